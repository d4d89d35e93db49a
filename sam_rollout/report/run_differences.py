"""What two runs say of themselves, side by side: settings, versions, machine.

Some settings may differ between two fair runs: the sam group, wherever it travels, where results
go, and what a run is shown beside.
"""

from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from sam_rollout.core.json_values import encode
from sam_rollout.report.runs import flat
from sam_rollout.telemetry.records import ASKED, BEFORE, RunInfo

ABSENT = "absent"
PLACES = {
    "experiment_name", "project_name", "run_dir", "default_local_dir", "logger",
    "TENSORBOARD_DIR", "WANDB_DIR", "VERL_FILE_LOGGER_PATH",
}  # fmt: skip
REPEATS_PARTS = {"sam_rollout", "compare", "max_logprobs"}
SAM_PARTS = REPEATS_PARTS | {"sam", "draft_model_path"}
SPECULATION = "speculative_config"  # the sam group's doing only where that is enabled
_ASKED = f"{ASKED}."
_COMMIT_DIGITS = 12
_TOLD_SEEDS = {"actor_rollout_ref.rollout.seed", "data.seed"}  # told by the seeds of a start

# Kind of a difference -> what a setting of that kind ends in. The rest is "config".
KINDS = {
    "validation": ("trainer.test_freq", "trainer.val_before_train", "data.val_batch_size"),
    "saving": (
        "trainer.save_freq", "rollout_telemetry.record_traces", "rollout_telemetry.curve_every",
        "rollout_telemetry.progress", "proof.every", "proof.responses",
    ),
    "steps": ("trainer.total_training_steps", "trainer.total_epochs"),
    "batch_size": ("_batch_size", "dynamic_sampling.max_rounds", "ppo_mini_batch_size"),
    "responses_per_prompt": ("rollout.n",),
    "lengths": ("_length", "max_model_len", "prompt_length", "response_length"),
    "sampler": ("temperature", "top_p", "top_k", "rollout_sampler.kind", "coupling", "do_sample",
                "batch_invariant"),
    "seeds": (".seed", "_seed"),
    "tail": ("rollout_telemetry.tail_threshold",),
}  # fmt: skip
_WHAT_IS_READ = ("model.path", "_files")  # other files there are another model, other data
_MILD = {"validation", "saving", "steps"}  # they touch the whole step or its number, no rollout


class Difference(NamedTuple):
    """One entry that two runs do not share, and whether that makes a comparison unfair."""

    kind: str
    name: str
    left: Any
    right: Any
    unfair: bool


def run_differences(one: RunInfo, other: RunInfo, repeats: bool = False) -> Iterator[Difference]:
    """Every difference of what two starts record of themselves; repeats draft alike, too."""
    settings = comparable(one.config, repeats), comparable(other.config, repeats)
    for name, *values in differences(*settings):
        if name not in _TOLD_SEEDS:
            yield _setting(name, *values)
    for kind in ("versions", "host"):
        for name, left, right in differences(flat(getattr(one, kind)), flat(getattr(other, kind))):
            yield Difference(kind, f"{kind} {name}", left, right, True)
    commits = _commit(one), _commit(other)
    if all(commits) and commits[0] != commits[1]:
        yield Difference("versions", "versions commit", *commits, False)


def _setting(name: str, left: Any, right: Any) -> Difference:
    """A setting that differs; two paths that end alike may be two checkouts of the same files."""
    if alike := _common_end(left, right):
        unfair = name.endswith(_WHAT_IS_READ) and alike < 2
        return Difference("paths", name, left, right, unfair)
    found = (kind for kind, ends in KINDS.items() if name.endswith(ends))
    kind = next(found, "config")
    return Difference(kind, name, left, right, kind not in _MILD)


def _common_end(left: Any, right: Any) -> int:
    """How many last components two paths have in common; 0 if one is no path."""
    if not (isinstance(left, str) and isinstance(right, str) and "/" in left and "/" in right):
        return 0
    ends = zip(*(reversed(PurePosixPath(path).parts) for path in (left, right)), strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], ends)))


def _commit(start: RunInfo) -> str:
    """The commit in words; empty where none is known."""
    commit = (start.git.get("commit") or "")[:_COMMIT_DIGITS]
    return f"{commit} with changes" if commit and start.git.get("dirty") else commit


def comparable(config: Mapping[str, Any], repeats: bool = False) -> dict[str, Any]:
    """A configuration with dotted names, without what two fair runs may differ in.

    <run_dir> stands for the run's own folder. Repeats of one side may not differ in the sam group
    either. What the launcher changed for the drafts' sake, such as sizes of graphs, is compared as
    it was asked for.
    """
    named = flat(encode(config))
    run_dir = str(named.get("run_dir") or "<run_dir>")
    for name in [name for name in named if name.startswith(_ASKED)]:
        named[name.removeprefix(_ASKED)] = named.pop(name)
    hidden = (REPEATS_PARTS if repeats else SAM_PARTS) | (
        {SPECULATION} if named.get("sam.enabled") else set()
    )
    return {
        name: value.replace(run_dir, "<run_dir>") if isinstance(value, str) else value
        for name, value in named.items()
        if not hidden & set(name.split(".")) and name.split(".")[-1] not in PLACES
    }


def differences(base: dict[str, Any], sam: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Name and both values of whatever differs."""
    for name in sorted(base.keys() | sam.keys()):
        left, right = (side.get(name, BEFORE.get(name, ABSENT)) for side in (base, sam))
        if left != right:
            yield name, left, right
