"""Reads imports from syntax trees, and checks imports between folders of the library.
python tests/unit/test_architecture.py    prints the drawing for docs/architecture.md
"""

import ast
import functools
import graphlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "sam_rollout"

# The library's folders and modules ("rooms") stand on floors; the highest floor comes first. A file
# may import from its own room and from lower floors.
FLOORS = (
    ("commands",),
    ("doctor",),
    ("integrations", "bench"),
    ("session", "heads", "report"),
    ("gating", "drafting", "telemetry", "sizing"),
    ("config",),
    ("sources", "verification"),
    ("core", "automaton", "installer"),
)
MOST_ARGUMENTS = 8
UPSTREAM = {"vllm", "vllm_ascend", "verl"}
# Packages that are slow to import, and the rooms that may import them.
HEAVY = UPSTREAM | {"ray", "tensordict", "torch", "transfer_queue", "transformers"}
MAY_USE = {
    "verification": {"torch"},
    "bench": {"torch", "vllm", "vllm_ascend"},
    "doctor": {"ray"},
    "heads": {"torch", "transformers"},
}
NOT_AT_THE_TOP = {"bench": UPSTREAM, "doctor": {"ray"}}


def room_of(path: Path) -> str:
    name = path.relative_to(LIBRARY).parts[0].removesuffix(".py")
    return "commands" if name == "cli" else name


def floor_of(room: str) -> int:
    found = [number for number, rooms in enumerate(FLOORS) if room in rooms]
    assert found, f"{room} is a new room: put it on a floor in FLOORS"
    return found[0]


@functools.cache
def imports_of(path: Path, *, only_top: bool = False) -> frozenset[str]:
    """Return the full names of a file's imports, or only of the imports at its top level."""
    tree, found = ast.parse(path.read_text()), set()
    for node in tree.body if only_top else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(ROOT).with_suffix("").parts[: -node.level]
            base = ".".join([*(package if node.level else ()), *filter(None, [node.module])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return frozenset(found)


def packages_of(path: Path, *, only_top: bool = False) -> set[str]:
    return {name.partition(".")[0] for name in imports_of(path, only_top=only_top)}


@functools.cache
def file_of(name: str) -> Path | None:
    """Return the file that defines a name; None outside the library."""
    path = ROOT.joinpath(*name.split("."))
    places = [place for one in (path, path.parent) for place in (one, one / "__init__")]
    found = (place.with_suffix(".py") for place in places if place.is_relative_to(LIBRARY))
    return next((one for one in found if one.is_file()), None)


@functools.cache
def rooms_imported(path: Path) -> set[str]:
    names = [name.split(".") for name in imports_of(path)]
    parts = {LIBRARY / name[1] for name in names if name[0] == "sam_rollout" and len(name) > 1}
    found = {part for part in parts if part.is_dir() or part.with_suffix(".py").is_file()}
    return {room_of(part) for part in found} - {room_of(path)}


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


LIBRARY_FILES = [path for path in files(LIBRARY) if path != LIBRARY / "__init__.py"]


def test_files_import_their_own_room_and_lower_floors():
    upwards = [
        f"{name_of(path)} imports {room}"
        for path in LIBRARY_FILES
        for room in rooms_imported(path)
        if floor_of(room) <= floor_of(room_of(path))
    ]
    assert upwards == []


def test_no_files_import_each_other_in_a_circle():
    needed = {
        path: {file for name in imports_of(path) if (file := file_of(name))} - {path}
        for path in LIBRARY_FILES
    }
    try:
        graphlib.TopologicalSorter(needed).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" <- ".join(map(name_of, error.args[1])))


@pytest.mark.parametrize("room", sorted({*map(room_of, LIBRARY_FILES)} - {"integrations"}))
def test_the_library_needs_no_engine(room):
    for path in LIBRARY_FILES:
        if room_of(path) == room:
            assert packages_of(path) & HEAVY <= MAY_USE.get(room, set()), name_of(path)
            late = NOT_AT_THE_TOP.get(room, set())
            assert not packages_of(path, only_top=True) & late, name_of(path)


def test_no_script_of_ours_imports_an_engine():
    for path in files(ROOT / "scripts"):
        assert not packages_of(path) & UPSTREAM, name_of(path)


@pytest.mark.parametrize("upstream", ["vllm", "vllm_ascend", "verl"])
def test_each_upstream_is_named_in_its_folder(upstream):
    folders = {"vllm": {"vllm", "vllm_ascend", "verl"}, "vllm_ascend": {"vllm_ascend", "verl"}}
    allowed, ours = folders.get(upstream, {upstream}), f"sam_rollout.integrations.{upstream}"
    for path in files(LIBRARY / "integrations"):
        if path.relative_to(LIBRARY / "integrations").parts[0] in allowed:
            continue
        assert upstream not in packages_of(path), name_of(path)
        assert not any(f"{one}.".startswith(f"{ours}.") for one in imports_of(path)), name_of(path)


@pytest.mark.parametrize("folder", ["sam_rollout", "scripts"])
def test_nothing_imports_recipes(folder):
    for path in files(ROOT / folder):
        assert "recipes" not in packages_of(path), name_of(path)


def test_no_function_has_more_arguments_than_a_reader_holds():
    upstream = "second_runner/speculator.py: _verify"  # vLLM calls it
    for path in LIBRARY_FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                count = sum(one.arg not in ("self", "cls") for one in arguments)
                made_by = " ".join(map(ast.unparse, node.decorator_list))
                is_free = re.search(r"\b(njit|jit|kernel|command)\b|_inlined", made_by)
                name = f"{name_of(path)}: {node.name}"
                assert is_free or count <= MOST_ARGUMENTS or name.endswith(upstream), name


def drawing() -> str:
    names = [f'floor{number}["{" · ".join(rooms)}"]' for number, rooms in enumerate(FLOORS)]
    return "\n    --> ".join(["flowchart TB\n    " + names[0], *names[1:]])


def test_the_page_draws_and_names_every_room():
    page = (ROOT / "docs" / "architecture.md").read_text()
    drawn = re.findall(r"^```mermaid\n(.*?)\n```$", page, re.MULTILINE | re.DOTALL)
    assert drawing() in drawn, "print it anew: python tests/unit/test_architecture.py"
    rooms = set(map(room_of, LIBRARY_FILES))
    assert rooms == {room for floor in FLOORS for room in floor}, "a room of FLOORS is gone"
    for part in rooms - {"integrations"}:
        assert re.search(rf"^    {part}(/|\.py) ", page, re.MULTILINE), part


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_every_file_and_test_that_a_page_names_exists(page):
    named = re.findall(
        r"`((?:sam_rollout|recipes|configs|scripts|tests|docs)/[^`\s]+)`", (ROOT / page).read_text()
    )
    assert len(named) > 10
    for name in named:
        path, _, test = name.partition("::")
        assert "<" in path or (ROOT / path).exists(), name
        assert not test or f"def {test}(" in (ROOT / path).read_text(), name


if __name__ == "__main__":
    print(drawing())
