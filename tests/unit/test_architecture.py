"""Who may import whom, read from the syntax trees: nothing is imported here."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "sam_rollout"

# Part of sam_rollout -> the other parts it may import. A new part has to be entered here.
MAY_IMPORT = {
    "config": set(),
    "hardware": set(),
    "identity": set(),
    "routing": set(),
    "statistics": set(),
    "automaton": set(),
    "drafting": {"automaton", "config", "identity"},
    "gating": {"config"},
    "verification": set(),
    "telemetry": {"statistics"},
    "report": {"sources", "statistics", "telemetry"},
    "dashboard": {"telemetry"},
    "simulation": {"bench", "config", "gating", "routing", "statistics", "telemetry"},
    "bench": {"automaton", "config", "drafting", "hardware", "identity", "verification"},
    "sizing": {"config"},
    "doctor": {"config", "sizing"},
    "cli": {
        "automaton", "bench", "dashboard", "doctor", "drafting", "report", "telemetry",
        "simulation", "integrations",
    },
    "integrations": {
        "automaton", "config", "drafting", "gating", "hardware", "identity", "routing", "sizing",
        "telemetry", "verification",
    },
}  # fmt: skip
UPSTREAM = {"vllm", "vllm_ascend", "verl"}
# What makes a package heavy to import. The verification of drafts is torch code by nature, and its
# measurement compares with the engines' samplers where these are installed.
HEAVY = UPSTREAM | {"ray", "tensordict", "torch", "transfer_queue", "transformers"}
MAY_USE = {
    "verification": {"torch"},
    "bench": {"torch", "vllm", "vllm_ascend"},
    "doctor": {"ray"},
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
            base = node.module or ""
            if node.level:
                package = path.relative_to(ROOT).with_suffix("").parts[: -node.level]
                base = ".".join([*package, *filter(None, [base])])
            # `from sam_rollout import gating` imports a module, too.
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return found


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
