"""A page as a list of blocks, and the page as Markdown and as one HTML file. Pure functions.

Text is text: what Markdown or HTML would read as markup is escaped by whoever writes it.
"""

from __future__ import annotations

import base64
import html
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Link:
    """Text that leads to a heading of the page."""

    text: str
    target: str


@dataclass(frozen=True)
class Mark:
    """A verdict: a word in bold, with a colour of its own in HTML."""

    text: str
    kind: str


@dataclass(frozen=True)
class Code:
    """A command or a file's name."""

    text: str


Span = str | Link | Mark | Code
Inline = Span | tuple[Span, ...]


@dataclass(frozen=True)
class Heading:
    """A title, of level 1 to 3, that links lead to by its name."""

    level: int
    text: str
    name: str


@dataclass(frozen=True)
class Paragraph:
    """A paragraph."""

    text: Inline


@dataclass(frozen=True)
class Bullets:
    """A list."""

    items: Sequence[Inline]


@dataclass(frozen=True)
class Table:
    """A table; its first column is text, all cells may be."""

    header: Sequence[str]
    rows: Sequence[Sequence[Inline]]


@dataclass(frozen=True)
class Picture:
    """A PNG file, and what it shows."""

    path: Path
    text: str


Block = Heading | Paragraph | Bullets | Table | Picture

_SPECIAL = re.compile(r"([\\`*_\[\]<>|#])")
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1, h2, h3 { line-height: 1.25; }
h2 { margin-top: 3rem; border-top: 1px solid #8886; padding-top: 1rem; }
img { max-width: 100%; height: auto; background: white; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.875rem; }
th, td { text-align: left; vertical-align: top; padding: 0.25rem 0.5rem; }
th, td { border-bottom: 1px solid #8884; }
code { font-size: 0.875em; overflow-wrap: anywhere; }
.mark { font-weight: 600; padding: 0 0.4em; border-radius: 0.4em; white-space: nowrap; }
.supports { background: #009e7333; }
.contradicts { background: #d55e0044; }
.cannot-tell { background: #e69f0033; }
.not-run, .failed, .timed-out { background: #8883; }
"""


def markdown(blocks: Sequence[Block], folder: Path) -> str:
    """The page in Markdown, with pictures as links relative to the folder that it stands in."""
    return "\n\n".join(_markdown_block(block, folder) for block in blocks) + "\n"


def html_page(blocks: Sequence[Block]) -> str:
    """The page as one HTML file that needs no other, with its pictures inside."""
    title = next((b.text for b in blocks if isinstance(b, Heading)), "")
    body = "\n".join(_html_block(block) for block in blocks)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _spans(text: Inline) -> tuple[Span, ...]:
    return text if isinstance(text, tuple) else (text,)


def _markdown(text: Inline) -> str:
    return "".join(_markdown_span(span) for span in _spans(text))


def _markdown_span(span: Span) -> str:
    if isinstance(span, Link):
        return f"[{_escaped(span.text)}](#{span.target})"
    if isinstance(span, Mark):
        return f"**{_escaped(span.text)}**"
    if isinstance(span, Code):
        # A bar would end a table's cell, in code as well.
        return f"`{span.text.replace('`', '').replace('|', '/')}`"
    return _escaped(span)


def _escaped(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()) if "\n" in text else text)


def _markdown_block(block: Block, folder: Path) -> str:
    if isinstance(block, Heading):
        return f'<a id="{block.name}"></a>\n\n{"#" * block.level} {_escaped(block.text)}'
    if isinstance(block, Paragraph):
        return _markdown(block.text)
    if isinstance(block, Bullets):
        return "\n".join(f"- {_markdown(item)}" for item in block.items)
    if isinstance(block, Picture):
        return f"![{_escaped(block.text)}]({_relative(block.path, folder)})"
    rows = [[_markdown(cell) for cell in row] for row in block.rows]
    lines = [[_escaped(cell) for cell in block.header], ["---"] * len(block.header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _relative(path: Path, folder: Path) -> str:
    steps = os.path.relpath(path.resolve(), folder.resolve())
    return Path(steps).as_posix().replace(" ", "%20")


def _html(text: Inline) -> str:
    return "".join(_html_span(span) for span in _spans(text))


def _html_span(span: Span) -> str:
    if isinstance(span, Link):
        return f'<a href="#{html.escape(span.target)}">{html.escape(span.text)}</a>'
    if isinstance(span, Mark):
        kind = html.escape(span.kind.replace(" ", "-"))
        return f'<span class="mark {kind}">{html.escape(span.text)}</span>'
    if isinstance(span, Code):
        return f"<code>{html.escape(span.text)}</code>"
    return html.escape(span)


def _html_block(block: Block) -> str:
    if isinstance(block, Heading):
        name, text = html.escape(block.name), html.escape(block.text)
        return f'<h{block.level} id="{name}">{text}</h{block.level}>'
    if isinstance(block, Paragraph):
        return f"<p>{_html(block.text)}</p>"
    if isinstance(block, Bullets):
        items = "".join(f"<li>{_html(item)}</li>" for item in block.items)
        return f"<ul>{items}</ul>"
    if isinstance(block, Picture):
        inside = base64.b64encode(block.path.read_bytes()).decode("ascii")
        return f'<p><img alt="{html.escape(block.text)}" src="data:image/png;base64,{inside}"></p>'
    header = "".join(f"<th>{html.escape(cell)}</th>" for cell in block.header)
    rows = "".join(
        f"<tr>{''.join(f'<td>{_html(cell)}</td>' for cell in row)}</tr>\n" for row in block.rows
    )
    return (
        f'<div class="wide"><table>\n<thead><tr>{header}</tr></thead>\n'
        f"<tbody>\n{rows}</tbody>\n</table></div>"
    )
