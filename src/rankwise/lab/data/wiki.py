"""The corpus "enwik8-words": the words of enwik8 without its markup. It is neither text8 nor WikiText.

The rules, in this order:

1. Only what stands in a `<text>` element counts; redirects do not. Entities are resolved (twice: XML, then HTML).
2. Comments, `<ref>`, `<math>` and the like go with their contents, other tags without.
3. Templates (two levels deep) and tables go; so do images, categories and links to other languages.
4. A link leaves the text it shows; addresses go.
5. A word is a run of letters or digits, in lower case. All else separates words.
6. A line of text is a line of words; lines without words go.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path

from rankwise.lab.data.text import Text, read_blocks

RULES = "enwik8-words 1"
MIN_COUNT = 5

_TEXT = re.compile(rb"<text[^>]*>(.*?)</text>", re.DOTALL)
_END = b"</text>"
_TEMPLATE = (re.compile(r"\{\{[^{}]*\}\}"), " ")
_MARKUP = (
    (re.compile(r"<!--.*?-->", re.DOTALL), " "),
    (re.compile(r"<(ref|math|nowiki|pre|code|gallery|timeline)\b[^>]*(?<!/)>.*?</\1>", re.DOTALL | re.IGNORECASE), " "),
    (re.compile(r"<[^<>]*>"), " "),
    _TEMPLATE,
    _TEMPLATE,
    (re.compile(r"\{\|.*?\|\}", re.DOTALL), " "),
    (re.compile(r"\[\[(?:[Ii]mage|[Ff]ile|[Cc]ategory|[a-z-]{2,12}):[^][]*(?:\[\[[^][]*\]\][^][]*)*\]\]"), " "),
    (re.compile(r"\[\[(?:[^][|]*\|)?([^][|]*)\]\]"), r"\1"),
    (re.compile(r"\[\w+://\S+([^]]*)\]"), r"\1"),
    (re.compile(r"\w+://\S+"), " "),
)
_WORD = re.compile(r"[^\W_]+")


def words_of(path: Path, digest: str | None = None) -> Text:
    """The words of a Wikipedia dump, a line of text to a line."""
    return Text(
        label=f"the words of {path}",
        blocks=lambda: _articles(read_blocks(path)),
        path=path,
        digest=digest,
    )


def stripped(article: str) -> str:
    """The words of an article: rules 1 (entities) to 6."""
    if article[:9].lower() == "#redirect":
        return ""
    article = html.unescape(html.unescape(article))
    for pattern, left in _MARKUP:
        article = pattern.sub(left, article)
    lines = (" ".join(_WORD.findall(line)) for line in article.lower().split("\n"))
    return "".join(line + "\n" for line in lines if line)


def _articles(blocks: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for block in blocks:
        rest += block
        cut = rest.rfind(_END) + len(_END)
        if cut >= len(_END):
            whole, rest = rest[:cut], rest[cut:]
            articles = (match[1].decode("utf-8", "replace") for match in _TEXT.finditer(whole))
            yield "".join(map(stripped, articles)).encode()
