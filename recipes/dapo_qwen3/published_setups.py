"""Published setups beside ours; writes docs/published_setups.md.

    python -m recipes.dapo_qwen3.published_setups

What was published lies in published_setups.yaml, value by value with its source; ours is read from
the composed experiments. A test compares them. The page lists where they differ, and why.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from recipes.dapo_qwen3.main import REPOSITORY

VALUES = Path(__file__).with_name("published_setups.yaml")
PAGE = REPOSITORY / "docs" / "published_setups.md"
INTRODUCTION = """# Published setups

`experiment=article_...`, `customer_...` and `reference_script_...` repeat published runs. Every
value that was published for them stands with its source in
[published_setups.yaml](../recipes/dapo_qwen3/published_setups.yaml); a test holds the composed
experiments against it. This page is written by `python -m recipes.dapo_qwen3.published_setups`.

The article and the scripts published with it differ: the article gates at 8 requests, the scripts
at a quarter of `max_num_seqs`; the article ran eager, the scripts capture graphs; for Qwen3-32B the
article generates 96 prompts a round, the script 32. The presets keep them apart. Where the article
says nothing, its presets take the scripts' value. None of these setups has been run here: there was
no NPU at hand.
"""


@dataclass(frozen=True)
class Entry:
    """One published value; `why` is empty where ours is the same."""

    key: str | None
    published: Any
    source: str
    why: str = ""
    ours: Any = None


@cache
def catalogue() -> dict[str, Any]:
    """The file of published values."""
    return yaml.safe_load(VALUES.read_text(encoding="utf-8"))


def setups() -> list[str]:
    """Experiments that repeat a published setup."""
    return list(catalogue()["setups"])


def entries(setup: str, inherited: bool = True) -> list[Entry]:
    """What was published for a setup.

    Args:
        setup: Name of the experiment.
        inherited: With the values of the setups it extends.
    """
    described = catalogue()["setups"][setup]
    own = [
        Entry(key, value, source, ours=value)
        for source, values in described["values"].items()
        for key, value in values.items()
    ]
    own += [Entry(**entry) for entry in described.get("differences", ())]
    parent = described.get("extends")
    if not inherited or parent is None:
        return own
    named = {entry.key for entry in own if entry.key}
    return [*(entry for entry in entries(parent) if entry.key not in named), *own]


@cache
def composed(setup: str) -> Any:
    """The experiment as a run would have it."""
    with initialize_config_dir(str(REPOSITORY / "configs"), version_base="1.3"):
        return compose("dapo_qwen3", overrides=[f"experiment={setup}"])


def our_value(setup: str, key: str) -> Any:
    """A plain value of the composed experiment; None if there is no such key."""
    value = OmegaConf.select(composed(setup), key)
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def _cell(value: Any) -> str:
    if value is None:
        return "null"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text.replace(str(REPOSITORY), "<checkout>").replace("|", "\\|")


def _cells(setup: str, entry: Entry) -> tuple[str, ...]:
    key = f"`{entry.key}`" if entry.key else "none"
    ours = _cell(our_value(setup, entry.key)) if entry.key else "-"
    return f"`{setup}`", _cell(entry.published), entry.source, key, ours, entry.why


def render() -> str:
    """The page: sources, how many values each setup has, and every deliberate difference."""
    sources = [f"* `{name}`: {text}" for name, text in catalogue()["sources"].items()]
    counts = ["| experiment | extends | published values | ours the same | different |"]
    counts.append("| --- " * 5 + "|")
    differences = ["| experiment | published | source | our key | ours | why |", "| --- " * 6 + "|"]
    for setup in setups():
        parent = catalogue()["setups"][setup].get("extends")
        total = len(entries(setup))
        other = sum(bool(entry.why) for entry in entries(setup))
        figures = (f"`{setup}`", f"`{parent}`" if parent else "", total, total - other, other)
        counts.append("| " + " | ".join(map(str, figures)) + " |")
        for entry in entries(setup, inherited=False):
            if entry.why:
                differences.append("| " + " | ".join(_cells(setup, entry)) + " |")
    return "\n".join(
        [INTRODUCTION, "## Sources", "", *sources, "", "## Differences", "", *counts, "",
         "Every difference; a setup has those of the one it extends, too:", "", *differences, ""]
    )  # fmt: skip


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
