import re
from pathlib import Path

import pytest

from tests.pages import PAGES, ROOT, anchors, sections


def original_of(page: Path) -> Path:
    return page.with_name(f"{page.stem.removesuffix('_zh')}.md")


TRANSLATIONS = [page for page in PAGES if page.stem.endswith("_zh") and original_of(page).exists()]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", TRANSLATIONS, ids=name_of)
def test_a_translation_has_the_blocks_of_its_original(page):
    shapes = [
        [
            [f"{token.type} {token.tag}" for token in section.tokens if token.nesting >= 0]
            for section in sections(path.read_text(encoding="utf-8"))
        ]
        for path in (page, original_of(page))
    ]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    broken = []
    for link in (one for part in sections(page.read_text(encoding="utf-8")) for one in part.links):
        if re.match(r"[a-z][a-z0-9+.-]*:|//", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        exists = target.is_relative_to(ROOT) and target.exists()
        if exists and anchor and target.suffix == ".md":
            exists = anchor in anchors(target)
        if not exists:
            broken.append(link)
    assert not broken
