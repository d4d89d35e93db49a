import importlib.util

import pytest

from tests.pages import ROOT


@pytest.fixture(scope="module")
def script():
    path = ROOT / "scripts" / "reference.py"
    spec = importlib.util.spec_from_file_location("reference", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["configuration.md", "metrics.md"])
def test_the_tables_follow_from_the_declarations(script, page):
    assert page in script.PAGES
    committed = (ROOT / "docs" / page).read_text(encoding="utf-8")
    spoilt = committed.replace("| `sam.sources.own", "| `mine").replace("| `sam/", "| `mine/")
    assert spoilt != committed
    assert script.filled(page, spoilt) == committed, "run python scripts/reference.py"
    with pytest.raises(ValueError, match="<!-- end of"):
        script.filled(page, committed.replace("<!-- end of", "<!-- of"))
