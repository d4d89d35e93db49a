"""Published setups beside ours, value by value; writes docs/published_setups.md.

    python -m recipes.dapo_qwen3.published_setups [--check]

What was published lies in published_setups.yaml, ours is read from the composed experiments, so
that the page cannot say what no run does. ``--check`` exits with 1 if the page on disk is another.
"""

from __future__ import annotations

import argparse
import sys
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

Every value that was published for the runs that `experiment=article_...`, `customer_...` and
`reference_script_...` repeat, beside the value of ours. Written from the composed configuration by
`python -m recipes.dapo_qwen3.published_setups`; a test fails when a value or this page differs.

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


def _cells(setup: str, entry: Entry) -> tuple[str, str, str, str, str]:
    key = f"`{entry.key}`" if entry.key else "none"
    ours = _cell(our_value(setup, entry.key)) if entry.key else "-"
    return _cell(entry.published), entry.source, key, ours, entry.why or "same"


def _row(setup: str, entry: Entry) -> str:
    return "| " + " | ".join(_cells(setup, entry)) + " |"


def _section(setup: str) -> str:
    parent = catalogue()["setups"][setup].get("extends")
    lines = [f"## {setup}", ""]
    if parent:
        lines += [f"As [{parent}](#{parent}), except where this table says otherwise.", ""]
    lines += ["| published | source | our key | ours | difference, and why |", "| --- " * 5 + "|"]
    lines += [_row(setup, entry) for entry in entries(setup, inherited=False)]
    return "\n".join(lines)


def summary() -> str:
    """How many values each setup has, and every deliberate difference, as Markdown tables."""
    counts = ["| experiment | published values | ours the same | different |", "| --- " * 4 + "|"]
    differences = ["| experiment | published | our key | ours | why |", "| --- " * 5 + "|"]
    for setup in setups():
        named = entries(setup)
        other = [entry for entry in named if entry.why]
        counts.append(f"| `{setup}` | {len(named)} | {len(named) - len(other)} | {len(other)} |")
        for entry in entries(setup, inherited=False):
            if entry.why:
                published, _, key, ours, why = _cells(setup, entry)
                differences.append(f"| `{setup}` | {published} | {key} | {ours} | {why} |")
    return "\n".join(
        [*counts, "", "Every difference; a setup has those of the one it extends, too:"]
        + ["", *differences]
    )


def render() -> str:
    """The page."""
    sources = "\n".join(f"* `{name}`: {text}" for name, text in catalogue()["sources"].items())
    parts = [INTRODUCTION.rstrip(), "## Sources\n\n" + sources, *map(_section, setups())]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    if not parser.parse_args().check:
        PAGE.write_text(render(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != render():
        sys.exit(f"{PAGE} is out of date: run python -m recipes.dapo_qwen3.published_setups")


if __name__ == "__main__":
    main()
