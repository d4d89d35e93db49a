import ast
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("sam_rollout", "recipes", "scripts", "benchmarks", "tests")
BEGINNINGS = ("Those of", "As ", "Of ")
WORDS = ("whoever", "nobody", "so many ", "nor is")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def prose_of(path):
    nodes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, DOCUMENTED))
    yield from filter(None, map(ast.get_docstring, nodes))
    comments, last = [], -1
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                text = token.string.lstrip("#: ")
                if token.start[0] == last + 1 and comments:
                    comments[-1] += " " + text
                else:
                    comments.append(text)
                last = token.start[0]
    yield from comments


@pytest.mark.parametrize("folder", FOLDERS)
def test_prose_is_plain(folder):
    for path in sorted((ROOT / folder).rglob("*.py")):
        for text in prose_of(path):
            found = [word for word in WORDS if word in " ".join(text.lower().split()) + " "]
            assert not text.startswith(BEGINNINGS) and not found, f"{path}: {text[:80]}"
