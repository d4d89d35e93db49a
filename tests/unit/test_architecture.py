"""Who may import whom, read from the syntax trees: nothing is imported here.

python tests/unit/test_architecture.py    prints the drawing for docs/architecture.md
"""

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "sam_rollout"

# Part of sam_rollout -> the other parts it may import. A new part has to be entered here.
MAY_IMPORT = {
    "settings": set(),
    "composition": {"settings"},
    "metric": set(),
    "json_values": set(),
    "verified": set(),
    "hardware": set(),
    "identity": set(),
    "statistics": set(),
    "automaton": set(),
    "verification": set(),
    "sources": {"automaton", "identity", "metric", "settings"},
    "config": {"settings", "sources"},
    "gating": {"config", "verified"},
    "drafting": {"automaton", "config", "identity", "sources", "verified"},
    "telemetry": {"config", "json_values", "metric", "settings", "sources", "statistics"},
    "session": {
        "automaton", "config", "drafting", "gating", "identity", "sources", "telemetry", "verified",
    },
    "report": {"config", "json_values", "sources", "statistics", "telemetry"},
    "sizing": {"config", "sources"},
    "doctor": {"composition", "config", "integrations", "sizing"},
    "bench": {
        "automaton", "config", "drafting", "gating", "hardware", "identity", "session", "sources",
        "verification",
    },
    "heads": {"bench", "json_values", "settings", "sources"},
    "simulation": {
        "bench", "config", "gating", "identity", "json_values", "session", "sources", "telemetry",
    },
    "integrations": {
        "config", "gating", "hardware", "heads", "identity", "json_values", "session", "settings",
        "sizing", "sources", "telemetry", "verification",
    },
    "cli": {
        "automaton", "bench", "doctor", "heads", "integrations", "json_values",
        "report", "settings", "simulation", "sources", "telemetry",
    },
}  # fmt: skip
# How the drawing of docs/architecture.md groups them.
GROUPS = {
    "commands": ("cli",),
    "runs": ("integrations",),
    "measures and plans": ("bench", "simulation", "heads", "doctor", "sizing"),
    "records and their readers": ("report", "telemetry"),
    "drafts and verifies": (
        "session", "gating", "drafting", "sources", "verification", "automaton",
    ),
    "shared": (
        "config", "settings", "composition", "metric", "verified", "identity", "statistics",
        "hardware", "json_values",
    ),
}  # fmt: skip
UPSTREAM = {"vllm", "vllm_ascend", "verl"}
# What makes a package heavy to import. The verification of drafts is torch code by nature, and its
# measurement compares with the engines' samplers where these are installed.
HEAVY = UPSTREAM | {"ray", "tensordict", "torch", "transfer_queue", "transformers"}
MAY_USE = {
    "verification": {"torch"},
    "bench": {"torch", "vllm", "vllm_ascend"},
    "doctor": {"ray"},
    "heads": {"torch", "transformers"},
}


def part_of(path: Path) -> str:
    """The part of the library that a file belongs to: a folder or a module below sam_rollout."""
    return path.relative_to(LIBRARY).parts[0].removesuffix(".py")


def modules_imported(path: Path) -> set[str]:
    """Full names of all modules a file imports, at its top or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = base_of(node, path)
            # `from sam_rollout import gating` imports a module, too.
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return found


def base_of(node: ast.ImportFrom, path: Path) -> str:
    """Full name of what a `from` statement of a file imports from."""
    package = path.relative_to(ROOT).with_suffix("").parts[: -node.level] if node.level else ()
    return ".".join([*package, *filter(None, [node.module])])


def library_files() -> list[Path]:
    return [path for path in sorted(LIBRARY.rglob("*.py")) if path != LIBRARY / "__init__.py"]


def parts_imported(path: Path) -> set[str]:
    """Other parts of the library that a file imports."""
    names = [name.split(".") for name in modules_imported(path)]
    parts = {name[1] for name in names if name[0] == "sam_rollout" and len(name) > 1}
    return {part for part in parts if exists(part)} - {part_of(path)}


def exists(part: str) -> bool:
    return (LIBRARY / part).is_dir() or (LIBRARY / f"{part}.py").is_file()


def packages_imported(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in modules_imported(path)}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", library_files(), ids=name_of)
def test_arrows_point_one_way(path):
    assert part_of(path) in MAY_IMPORT, "a new part: decide in MAY_IMPORT what it may import"
    assert parts_imported(path) <= MAY_IMPORT[part_of(path)]


@pytest.mark.parametrize(
    "path", [path for path in library_files() if part_of(path) != "integrations"], ids=name_of
)
def test_the_library_needs_no_engine(path):
    assert packages_imported(path) & HEAVY <= MAY_USE.get(part_of(path), set())


def test_measuring_does_not_need_what_it_compares_with():
    """The engines are imported inside functions, never with the module."""
    for path in sorted((LIBRARY / "bench").rglob("*.py")):
        top = ast.Module([n for n in ast.parse(path.read_text()).body if _is_import(n)], [])
        assert not re.search(r"\b(vllm|vllm_ascend|verl)\b", ast.unparse(top)), name_of(path)


def test_the_doctor_answers_without_ray():
    for path in sorted((LIBRARY / "doctor").rglob("*.py")):
        for node in filter(_is_import, ast.parse(path.read_text()).body):
            assert not re.search(r"\bray\b", ast.unparse(node)), name_of(path)


def _is_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def test_no_script_of_ours_imports_an_engine():
    for path in sorted((ROOT / "scripts").rglob("*.py")):
        assert not packages_imported(path) & UPSTREAM, name_of(path)


@pytest.mark.parametrize("upstream", ["vllm", "vllm_ascend", "verl"])
def test_each_upstream_is_named_in_its_folder(upstream):
    """verl's integration builds on vLLM's and vllm-ascend's, vllm-ascend's on vLLM's."""
    folders = {"vllm": {"vllm", "vllm_ascend", "verl"}, "vllm_ascend": {"vllm_ascend", "verl"}}
    allowed = folders.get(upstream, {upstream})
    for path in sorted((LIBRARY / "integrations").rglob("*.py")):
        folder = path.relative_to(LIBRARY / "integrations").parts[0]
        if folder in allowed:
            continue
        assert upstream not in packages_imported(path), name_of(path)
        ours = f"sam_rollout.integrations.{upstream}"
        assert not any(m == ours or m.startswith(f"{ours}.") for m in modules_imported(path)), (
            name_of(path)
        )


# Programs at the top, benchmarks and tests among them, may use a recipe's data.
@pytest.mark.parametrize("folder", ["sam_rollout", "scripts"])
def test_nothing_imports_recipes(folder):
    for path in sorted((ROOT / folder).rglob("*.py")):
        assert "recipes" not in packages_imported(path), name_of(path)


def drawing() -> str:
    """The parts and every arrow of `MAY_IMPORT`, as a Mermaid flowchart."""
    lines = ["flowchart TB"]
    for group, parts in GROUPS.items():
        lines += [f'    subgraph {group.replace(" ", "_")}["{group}"]']
        lines += [f"        {part}" for part in parts] + ["    end"]
    lines += [
        f"    {part} --> {' & '.join(sorted(others))}"
        for part, others in MAY_IMPORT.items()
        if others
    ]
    return "\n".join(lines)


def test_the_page_draws_the_arrows_that_are_allowed():
    assert sorted(MAY_IMPORT) == sorted(part for group in GROUPS.values() for part in group)
    page = (ROOT / "docs" / "architecture.md").read_text()
    drawn = re.findall(r"^```mermaid\n(.*?)\n```$", page, re.MULTILINE | re.DOTALL)
    assert drawn == [drawing()], "print it anew: python tests/unit/test_architecture.py"


def modules_needed(path: Path) -> set[Path]:
    """Files of the library that a file imports while it is imported itself.

    A submodule that is imported from its package counts, the package's __init__.py does not.
    """
    found = set()
    for node in executed(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {file_of(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = base_of(node, path)
            found |= {file_of(f"{base}.{alias.name}") or file_of(base) for alias in node.names}
    return found - {None, path}


def executed(tree: ast.AST) -> Iterator[ast.AST]:
    """What runs when a module is imported: no function's body, and nothing for types alone."""
    for node in ast.iter_child_nodes(tree):
        for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not for_types and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            yield from executed(node)


def file_of(module: str) -> Path | None:
    """Source of a module of the library; None for all others."""
    stem = ROOT.joinpath(*module.split("."))
    files = (stem.with_suffix(".py"), stem / "__init__.py")
    return next((f for f in files if f.is_relative_to(LIBRARY) and f.is_file()), None)


def test_no_modules_import_each_other_in_a_circle():
    needed = {path: modules_needed(path) for path in LIBRARY.rglob("*.py")}
    try:
        graphlib.TopologicalSorter(needed).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" <- ".join(map(name_of, error.args[1])))


def test_every_file_and_test_that_the_page_names_exists():
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`((?:sam_rollout|recipes|configs|scripts|tests|docs)/[^`\s]+)`", page)
    assert len(named) > 20
    for name in named:
        path, _, test = name.partition("::")
        assert (ROOT / path).exists(), name
        assert not test or f"def {test}(" in (ROOT / path).read_text(), name


def test_the_page_shows_every_part_of_the_library():
    page = (ROOT / "docs" / "architecture.md").read_text()
    for part in {part_of(path) for path in library_files()} - {"integrations"}:
        assert re.search(rf"^    {part}(/|\.py) ", page, re.MULTILINE), part


def test_the_rules_see_every_kind_of_import(tmp_path, monkeypatch):
    """A rule that overlooks an import would never fail."""
    folder = tmp_path / "sam_rollout" / "gating"
    folder.mkdir(parents=True)
    source = folder / "gate.py"
    source.write_text(
        "import vllm.platforms\n"
        "def late():\n"
        "    from sam_rollout import report\n"
        "    from ..telemetry import schema\n"
        "    from . import other\n"
    )
    monkeypatch.setitem(modules_imported.__globals__, "ROOT", tmp_path)
    assert modules_imported(source) >= {
        "vllm.platforms",
        "sam_rollout.report",
        "sam_rollout.telemetry.schema",
        "sam_rollout.gating.other",
    }


if __name__ == "__main__":
    print(drawing())
