"""Measures, for each sampler, how often a token changes if logits are rounded differently.

    python -m benchmarks.exactness [--model FOLDER]... [--output benchmarks/results/exactness.json]
    python -m benchmarks.exactness --check

The program draws tokens from original and disturbed logits with the same random bits. Some logits
are made up: Zipf-like distributions over 151,936 tokens, in random order. Other logits come from
models that read their own samples twice, the second time with a disturbance.

The program measures the share of changed tokens, and also computes it from a closed form. For
Gumbel noise this share is at most twice the total variation distance (TV). The program also reports
the mean number of tokens before the first change. ``--check`` measures two rows of the table again,
and fails if they contradict docs/verification.md.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measuring import MODEL, load_prompts, parser, write_record
from sam_rollout.bench.machine_record import machine
from sam_rollout.verification import draw_gumbel, draw_tokens, keyed_bits

VOCABULARY = 151_936  # size of Qwen3's vocabulary
BATCH = 32
POSITIONS, DRAWS = 384, 16  # made-up distributions per table row, draws from each distribution
RESPONSE = 10_000
# Quantiles of a reasoning model's entropies in nats: half of the tokens have an entropy below 0.01,
# and a fifth has more than 0.672 (Wang et al., arXiv 2506.01939, Qwen3-8B). The smallest and the
# largest entropy are assumptions.
REASONING = ((0.0, 0.5, 0.8, 1.0), (1e-4, 0.01, 0.672, 4.0))
BANDS = ((0.5, 1.5), (3.0, 5.0))  # ranges of entropy, nats
PROMPTS, SIBLINGS, TOKENS = 8, 2, 160

Draw = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Pairs = Iterator[tuple[torch.Tensor, torch.Tensor]]  # logits, disturbed logits: [rows, vocabulary]


def inversion_changes(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return the chance that inversion draws another token from q than from p.

    The result is double [rows].
    """
    (p_end, q_end) = (p.cumsum(-1), q.cumsum(-1))
    both = torch.minimum(p_end, q_end) - torch.maximum(p_end - p, q_end - q)
    return 1 - both.clamp_(min=0).sum(-1)


def gumbel_changes(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return the chance that Gumbel noise draws another token from q than from p.

    The result is double [rows].

    Token i is drawn from both p and q with probability 1 / sum_j max(p_j / p_i, q_j / q_i). If
    tokens are sorted by q / p, the maximum is p_j / p_i for tokens j up to i, and q_j / q_i for
    later tokens.
    """
    order = (q / p.clamp(min=1e-300)).argsort(dim=-1)
    p, q = p.gather(-1, order), q.gather(-1, order)
    p_to, q_behind = p.cumsum(-1), q.flip(-1).cumsum(-1).flip(-1) - q
    both = p * q / (p_to * q + q_behind * p).clamp(min=1e-300)
    return 1 - both.sum(-1)


# Sampler -> function that draws tokens, function that computes the share of changed tokens.
SAMPLERS: dict[str, tuple[Draw, Draw]] = {
    "inversion": (lambda logits, bits: draw_tokens(logits.softmax(-1), bits), inversion_changes),
    "gumbel": (draw_gumbel, gumbel_changes),
}


def tokens_before_a_change(share: float) -> float:
    """Return the mean number of tokens before a change; `share` is a token's chance to change."""
    if share < 1e-12:
        return float(RESPONSE)
    return -math.expm1(RESPONSE * math.log1p(-share)) * (1 - share) / share


@torch.no_grad()
def measure(pairs: Pairs, draws: int) -> dict[str, Any]:
    sums = dict.fromkeys(("entropy", "tv", *SAMPLERS), 0.0)
    changed = dict.fromkeys(SAMPLERS, 0)
    positions = 0
    for logits, disturbed in pairs:
        p, q = (both.double().softmax(-1) for both in (logits, disturbed))
        sums["entropy"] += float(torch.special.entr(p).sum())
        sums["tv"] += float((p - q).abs().sum()) / 2
        places = torch.arange(positions, positions + len(p))
        for name, (draw, changes) in SAMPLERS.items():
            sums[name] += float(changes(p, q).clamp(min=0).sum())
            for key in range(draws):
                bits = keyed_bits(torch.full_like(places, key), places)
                changed[name] += int((draw(logits, bits) != draw(disturbed, bits)).sum())
        positions += len(p)
    if not positions:
        return {}
    mean = {name: total / positions for name, total in sums.items()}
    return {
        "positions": positions, "draws": draws, "entropy": mean["entropy"], "tv": mean["tv"],
        "samplers": {
            name: {
                "changed": changed[name] / positions / draws,
                "expected": mean[name],
                "tokens_before_a_change": tokens_before_a_change(mean[name]),
            }
            for name in SAMPLERS
        },
    }  # fmt: skip


def made_up(entropies: np.ndarray, disturb: Callable[..., torch.Tensor], seed: int = 0) -> Pairs:
    """Yield pairs: Zipf-like logits with these entropies, and disturbed copies of the logits."""
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.arange(1, VOCABULARY + 1).log()
    for some in torch.tensor(entropies).split(BATCH):
        low, high = torch.zeros(len(some)), torch.full((len(some),), 30.0)
        for _ in range(30):  # bisection finds the exponent for this entropy
            middle = (low + high) / 2
            flat = torch.special.entr((-middle[:, None] * ranks).softmax(-1)).sum(-1) > some
            low, high = torch.where(flat, middle, low), torch.where(flat, high, middle)
        orders = [torch.randperm(VOCABULARY, generator=generator) for _ in some]
        logits = -middle[:, None] * ranks[torch.stack(orders)]
        yield logits, disturb(logits, generator)


def add_noise(logits: torch.Tensor, generator: torch.Generator, size: float) -> torch.Tensor:
    return logits + size * torch.randn(logits.shape, generator=generator)


def to_bfloat16(values: torch.Tensor, _generator: Any = None) -> torch.Tensor:
    """Round to the 8 significant bits of bfloat16."""
    return values.bfloat16().float()


def to_tf32(values: torch.Tensor) -> torch.Tensor:
    """Round to the 11 significant bits of TF32, as tensor cores round their inputs."""
    bits = values.float().view(torch.int32)
    return ((bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF).view(torch.float32)


def made_up_rows() -> dict[str, Pairs]:
    shapes = {f"{nats:g} nats": np.full(POSITIONS, float(nats)) for nats in (1, 4, 7)}
    shapes["reasoning"] = np.interp((np.arange(POSITIONS) + 0.5) / POSITIONS, *REASONING)
    noises = {f"noise {size:g}": partial(add_noise, size=size) for size in (0.01, 0.001, 0.0001)}
    return {
        f"{shape}, {name}": made_up(entropies, disturb)
        for shape, entropies in shapes.items()
        for name, disturb in (noises | {"bfloat16 logits": to_bfloat16}).items()
    }


class Reader:
    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        load = partial(AutoModelForCausalLM.from_pretrained, folder)
        self._model = load(dtype=torch.float32, attn_implementation="eager")
        self._half = load(dtype=torch.bfloat16, attn_implementation="eager")
        torch.manual_seed(0)
        self._texts = []
        for prompt in load_prompts(PROMPTS, model=folder):
            texts = self._model.generate(
                torch.tensor([prompt]), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                max_new_tokens=TOKENS, num_return_sequences=SIBLINGS,
            )  # fmt: skip
            self._texts += [(len(prompt), text[None, :-1]) for text in texts]

    def rows(self) -> dict[str, Pairs]:
        weight = self._model.get_output_embeddings().weight
        parts = [slice(start, None, 4) for start in range(4)]
        heads: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "output layer in another order": lambda hidden: torch.stack(
                [hidden[:, part] @ weight[:, part].T for part in parts]
            ).sum(0),
            "TF32 output layer": lambda hidden: to_tf32(hidden) @ to_tf32(weight).T,
            "bfloat16 hidden states": lambda hidden: to_bfloat16(hidden) @ weight.T,
            "bfloat16 logits": lambda hidden: to_bfloat16(hidden @ weight.T),
        }
        return {
            "attention in another order": self._read_twice(self._model),
            **{name: self._with_head(head) for name, head in heads.items()},
            "bfloat16, attention in another order": self._read_twice(self._half),
            **{f"noise 0.01, {low:g} to {high:g} nats": self._noisy(low, high)
               for low, high in BANDS},
        }  # fmt: skip

    def _read_twice(self, model: Any) -> Pairs:
        for start, text in self._texts:
            pair = []
            for attention in ("eager", "sdpa"):
                model.set_attn_implementation(attention)
                pair.append(model(text).logits[0, start - 1 :].float())
            yield pair[0], pair[1]

    def _with_head(self, head: Callable[[torch.Tensor], torch.Tensor]) -> Pairs:
        self._model.set_attn_implementation("eager")
        weight = self._model.get_output_embeddings().weight
        for start, text in self._texts:
            hidden = self._model.model(text).last_hidden_state[0, start - 1 :]
            yield hidden @ weight.T, head(hidden)

    def _noisy(self, low: float, high: float) -> Pairs:
        """Yield pairs, logits and noisy logits, for positions whose entropy is in this range."""
        generator = torch.Generator().manual_seed(0)
        for logits, _ in self._with_head(lambda hidden: hidden):
            entropy = torch.special.entr(logits.softmax(-1)).sum(-1)
            some = logits[(entropy >= low) & (entropy < high)]
            if len(some):
                yield some, add_noise(some, generator, 0.01)


def show(name: str, row: dict[str, Any]) -> None:
    shares = ", ".join(
        f"{sampler} {one['changed']:.3%} (expected {one['expected']:.3%}, "
        f"{one['tokens_before_a_change']:,.0f} tokens before a change)"
        for sampler, one in row["samplers"].items()
    )
    print(f"{name}: {row['entropy']:.2f} nats, TV {row['tv']:.2e}: {shares}", flush=True)


def check() -> None:
    for nats, positions, draws, fewer in ((1.0, POSITIONS, DRAWS, 5), (4.0, BATCH, 1, 30)):
        name = f"{nats:g} nats, noise 0.01"
        row = measure(made_up(np.full(positions, nats), partial(add_noise, size=0.01)), draws)
        show(name, row)
        inversion, gumbel = (row["samplers"][sampler]["expected"] for sampler in SAMPLERS)
        if gumbel > 2 * row["tv"]:
            raise SystemExit(f"{name}: {gumbel} is more than 2 TV = {2 * row['tv']}")
        if inversion < fewer * gumbel:
            raise SystemExit(f"{name}: {inversion / gumbel:.1f} times fewer changes, not {fewer}")
        count = positions * draws
        for sampler, one in row["samplers"].items():
            off = abs(one["changed"] - one["expected"]) * count
            if off > 5 * math.sqrt(one["expected"] * count) + 1:
                raise SystemExit(f"{name}: {sampler} changes {one['changed']}, not as expected")
    print("holds")


def main() -> None:
    options = parser(__doc__, "exactness")
    options.add_argument("--model", type=Path, action="append", default=[], help="a folder")
    options.add_argument("--check", action="store_true", help="repeat two rows, write nothing")
    arguments = options.parse_args()
    if arguments.check:
        return check()
    sources = {"made-up": made_up_rows}
    for folder in (MODEL, *arguments.model):
        sources[folder.name] = lambda folder=folder: Reader(folder).rows()
    rows: dict[str, dict[str, Any]] = {source: {} for source in sources}
    for source, rows_of in sources.items():
        for name, pairs in rows_of().items():
            if row := measure(pairs, DRAWS):
                rows[source][name] = row
                show(f"{source}, {name}", row)
    setting = {"vocabulary": VOCABULARY, "draws": DRAWS, "response": RESPONSE}
    setting |= {"texts": PROMPTS * SIBLINGS, "tokens": TOKENS}
    record = {"machine": machine("torch", "transformers"), "setting": setting, "rows": rows}
    write_record(record, arguments.output)


if __name__ == "__main__":
    main()
