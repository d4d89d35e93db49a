"""Compares the settings, versions and machines of two runs, as their run folders describe them."""

from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from sam_rollout.core.json_values import encode
from sam_rollout.telemetry.records import ASKED, RunInfo, flat

ABSENT = "absent"
PLACES = {
    "experiment_name", "project_name", "run_dir", "default_local_dir", "logger",
    "TENSORBOARD_DIR", "WANDB_DIR", "VERL_FILE_LOGGER_PATH",
}  # fmt: skip
REPEATS_PARTS = {"sam_rollout", "compare", "max_logprobs"}
SAM_PARTS = REPEATS_PARTS | {"sam", "draft_model_path"}
SPECULATION = "speculative_config"  # if `sam.enabled`, the group `sam` decides this value
_ASKED = f"{ASKED}."
_COMMIT_DIGITS = 12
SEEDS = ("actor_rollout_ref.rollout.seed", "data.seed")  # not compared by `run_differences`

# For each kind of difference that does not change a rollout, how the names of its settings end.
# Settings with other names are of the kind "config".
_MILD = {
    "validation": ("trainer.test_freq", "trainer.val_before_train", "data.val_batch_size"),
    "saving": (
        "trainer.save_freq", "rollout_telemetry.record_traces", "rollout_telemetry.curve_every",
        "rollout_telemetry.progress", "proof.every", "proof.responses",
    ),
    "steps": ("trainer.total_training_steps", "trainer.total_epochs"),
}  # fmt: skip
_INPUT_FILES = ("model.path", "_files")  # Paths of the model and of the data.


class Difference(NamedTuple):
    """One difference between two runs, and whether it makes a comparison unfair."""

    kind: str
    name: str
    left: Any
    right: Any
    unfair: bool


def run_differences(one: RunInfo, other: RunInfo, repeats: bool = False) -> Iterator[Difference]:
    """Yield all differences between the descriptions of two starts.

    With `repeats`, both starts belong to one side, so their settings `sam.*` are compared, too.
    """
    settings = (comparable(start.config, repeats) for start in (one, other))
    for name, *values in differences(*settings):
        if name not in SEEDS:
            yield _setting(name, *values)
    for kind in ("versions", "host"):
        for name, left, right in differences(flat(getattr(one, kind)), flat(getattr(other, kind))):
            yield Difference(kind, f"{kind} {name}", left, right, True)
    commits = _commit(one), _commit(other)
    if all(commits) and commits[0] != commits[1]:
        yield Difference("versions", "versions commit", *commits, False)


def _setting(name: str, left: Any, right: Any) -> Difference:
    """Judge a setting that differs; two paths with the same end may name the same files."""
    if alike := _common_end(left, right):
        unfair = name.endswith(_INPUT_FILES) and alike < 2
        return Difference("paths", name, left, right, unfair)
    kind = next((kind for kind, ends in _MILD.items() if name.endswith(ends)), "config")
    return Difference(kind, name, left, right, kind == "config")


def _common_end(left: Any, right: Any) -> int:
    if not (isinstance(left, str) and isinstance(right, str) and "/" in left and "/" in right):
        return 0
    ends = zip(*(reversed(PurePosixPath(path).parts) for path in (left, right)), strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], ends)))


def _commit(start: RunInfo) -> str:
    commit = (start.git.get("commit") or "")[:_COMMIT_DIGITS]
    return f"{commit} with changes" if commit and start.git.get("dirty") else commit


def comparable(config: Mapping[str, Any], repeats: bool = False) -> dict[str, Any]:
    """Return, by dotted name, the settings that should be equal in a fair comparison.

    Settings that the launcher changed because of drafts get the values that the user typed. If
    `repeats` is true, the result also contains the settings `sam.*`.
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
    """Yield the name and the two values of each setting that differs."""
    for name in sorted(base.keys() | sam.keys()):
        left, right = (side.get(name, ABSENT) for side in (base, sam))
        if left != right:
            yield name, left, right
