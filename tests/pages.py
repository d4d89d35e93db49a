import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[1]
PAGES = [
    path
    for pattern in ("README*.md", "CONTRIBUTING.md", "docs/*.md", "benchmarks/results/*.md")
    for path in sorted(ROOT.glob(pattern))
]
PARSER = MarkdownIt("commonmark").enable("table")


@dataclass
class Section:
    tokens: list[Token]

    @property
    def title(self) -> str:
        if not self.tokens or self.tokens[0].type != "heading_open":
            return ""
        return "".join(child.content for child in self.tokens[1].children or [])

    @property
    def links(self) -> list[str]:
        inline = [child for token in self.tokens for child in token.children or []]
        targets = (child.attrs.get("href", child.attrs.get("src")) for child in inline)
        return [unquote(str(target)) for target in targets if target]


def sections(text: str) -> list[Section]:
    found = [Section([])]
    for token in PARSER.parse(text):
        if token.type == "heading_open":
            found.append(Section([]))
        found[-1].tokens.append(token)
    return found


@cache
def anchors(page: Path) -> list[str]:
    found: list[str] = []
    seen: Counter[str] = Counter()
    for section in sections(page.read_text(encoding="utf-8"))[1:]:
        slug = re.sub(r"[^\w\- ]", "", section.title.lower()).replace(" ", "-")
        found.append(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found
