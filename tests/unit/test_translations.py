"""Links of all pages lead somewhere, and Chinese pages (``*_zh.md``) keep up with their originals.

A translation is compared section by section: heading levels, order of blocks (paragraphs, list
items, table rows), code blocks, inline code, numbers and link targets. Comments in code blocks may
be translated and are left out of the comparison of code; their numbers still count. A link leads to
the translation of the original's target if there is one.
"""

import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("README*.md")), *sorted((ROOT / "docs").glob("*.md"))]
TRANSLATIONS = [page for page in PAGES if page.stem.endswith("_zh")]

PARSER = MarkdownIt("commonmark").enable("table")
COMMENTED = {"bash", "yaml"}  # languages of code blocks whose comments are recognised
COMMENT = re.compile(r"[ \t]*(?<!\S)#(?: .*)?$", re.MULTILINE)
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


@dataclass
class Section:
    """A heading, and what follows up to the next one."""

    tokens: list[Token]

    @property
    def title(self) -> str:
        if not self.tokens or self.tokens[0].type != "heading_open":
            return ""
        return "".join(child.content for child in self.tokens[1].children or [])

    @property
    def inline(self) -> list[Token]:
        return [child for token in self.tokens for child in token.children or []]

    @property
    def fences(self) -> list[Token]:
        return [token for token in self.tokens if token.type == "fence"]

    @property
    def shape(self) -> list[str]:
        """Block types in order; headings and table cells with their tag."""
        return [f"{token.type} {token.tag}" for token in self.tokens if token.nesting >= 0]

    @property
    def code(self) -> list[tuple[str, str]]:
        return [
            (
                token.info,
                COMMENT.sub("", token.content) if token.info in COMMENTED else token.content,
            )
            for token in self.fences
        ]

    @property
    def code_spans(self) -> set[str]:
        return {child.content for child in self.inline if child.type == "code_inline"}

    @property
    def numbers(self) -> Counter[str]:
        texts = [child.content for child in self.inline if child.type == "text"]
        comments = [
            comment
            for token in self.fences
            if token.info in COMMENTED
            for comment in COMMENT.findall(token.content)
        ]
        return Counter(NUMBER.findall("\n".join(texts + comments)))

    @property
    def links(self) -> list[str]:
        """Targets of links and pictures, as they are written."""
        targets = (child.attrs.get("href", child.attrs.get("src")) for child in self.inline)
        return [unquote(str(target)) for target in targets if target]


def sections(text: str) -> list[Section]:
    """The page cut at its headings; the first section is what stands before the first of them."""
    found = [Section([])]
    for token in PARSER.parse(text):
        if token.type == "heading_open":
            found.append(Section([]))
        found[-1].tokens.append(token)
    return found


def anchors(text: str) -> list[str]:
    """The anchors GitHub gives a page's headings, in order.

    Lower case; letters and digits of any script, "_" and "-" stay, spaces become "-", the rest
    goes; repeated ones are numbered.
    """
    found: list[str] = []
    seen: Counter[str] = Counter()
    for section in sections(text)[1:]:
        slug = re.sub(r"[^\w\- ]", "", section.title.lower()).replace(" ", "-")
        found.append(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


@cache
def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def original_of(page: Path) -> Path:
    return page.with_name(f"{page.stem.removesuffix('_zh')}.md")


def is_relative(link: str) -> bool:
    return re.match(r"[a-z][a-z0-9+.-]*:|//", link) is None


def target_of(page: Path, link: str) -> tuple[Path, str]:
    """File and anchor a relative link of a page leads to."""
    path, _, anchor = link.partition("#")
    return (page.parent / path).resolve() if path else page, anchor


def normalised(page: Path, link: str) -> tuple[str, int | None]:
    """A link's target; the same for a page and its translation, where anchors differ."""
    if not is_relative(link):
        return link, None
    target, anchor = target_of(page, link)
    place = anchors(read(target)).index(anchor) if anchor and target.suffix == ".md" else None
    return str(original_of(target) if target in TRANSLATIONS else target), place


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_there_are_translations():
    assert [name_of(page) for page in TRANSLATIONS] == ["README_zh.md", "docs/ascend_zh.md"]


@pytest.mark.parametrize("page", TRANSLATIONS, ids=name_of)
@pytest.mark.parametrize("aspect", ["shape", "code", "code_spans", "numbers"])
def test_translation_keeps_up(page, aspect):
    ours, theirs = (sections(read(path)) for path in (page, original_of(page)))
    assert len(ours) == len(theirs)
    for our, their in zip(ours, theirs, strict=True):
        assert getattr(our, aspect) == getattr(their, aspect), f"section {their.title!r}"


@pytest.mark.parametrize("page", TRANSLATIONS, ids=name_of)
def test_translation_links_where_its_original_does(page):
    ours, theirs = (
        [{normalised(path, link) for link in section.links} for section in sections(read(path))]
        for path in (page, original_of(page))
    )
    assert ours == theirs


@pytest.mark.parametrize("page", TRANSLATIONS, ids=name_of)
def test_languages_lead_to_each_other(page):
    """A translation leads to translations; only its own original is linked, to change language."""
    original = original_of(page)
    ours, theirs = (
        [target_of(path, link)[0] for part in sections(read(path)) for link in part.links]
        for path in (page, original)
    )
    assert page in theirs
    translated = {original_of(translation) for translation in TRANSLATIONS}
    assert [target for target in ours if target in translated] == [original]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    broken = []
    for link in (link for section in sections(read(page)) for link in section.links):
        if not is_relative(link):
            continue
        target, anchor = target_of(page, link)
        exists = target.is_relative_to(ROOT) and target.exists()
        if exists and anchor and target.suffix == ".md":
            exists = anchor in anchors(read(target))
        if not exists:
            broken.append(link)
    assert not broken


def test_anchors_follow_github():
    headings = ["What's *new*: `a_b`, x-y", "1. Eager 模式（单算子），第 2 节", "Ports", "Ports"]
    page = "\n\n".join(f"## {heading}" for heading in headings)
    assert anchors(page) == ["whats-new-a_b-x-y", "1-eager-模式单算子第-2-节", "ports", "ports-1"]


PAGE = """# Title

Takes 3 s, see `a` and [b](b.md).

| x | y |
| --- | --- |
| 1 | 2 |

```bash
run --now    # for 5 steps
```
"""


@pytest.mark.parametrize(
    ("aspect", "old", "new"),
    [
        ("shape", "| 1 | 2 |\n", "| 1 | 2 |\n| 1 | 2 |\n"),
        ("shape", "# Title", "## Title"),
        ("code", "--now", "--later"),
        ("code_spans", "`a`", "`c`"),
        ("numbers", "3 s", "4 s"),
        ("numbers", "5 steps", "6 steps"),
        ("links", "b.md", "c.md"),
    ],
)
def test_a_lagging_translation_is_seen(aspect, old, new):
    assert old in PAGE
    before, after = (sections(text) for text in (PAGE, PAGE.replace(old, new)))
    assert [getattr(s, aspect) for s in before] != [getattr(s, aspect) for s in after]


def test_comments_may_be_translated():
    translated = PAGE.replace("for 5 steps", "共 5 步")
    assert [s.code for s in sections(PAGE)] == [s.code for s in sections(translated)]
