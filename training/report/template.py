"""The frame of every page that is written: one HTML file without scripts, with its style and content policy inside."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from importlib import resources

_CONTENT_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""Keeps the browser from requesting anything from anywhere."""


def html_page(
    title: str, sections: Mapping[str, tuple[str, str]], *, made_by: str, style: str = "", tail: str = ""
) -> str:
    """Returns a page of sections by name, each with its heading and its HTML; those without text are left out."""
    there = {name: (heading, text) for name, (heading, text) in sections.items() if text}
    links = "".join(f'<a href="#{name}">{heading}</a>' for name, (heading, _) in there.items())
    body = "".join(f'<section id="{name}">{text}</section>' for name, (_, text) in there.items())
    common = (resources.files("training.report") / "style.css").read_text(encoding="utf-8")
    made = datetime.now(UTC).strftime("%d %B %Y, %H:%M UTC")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_CONTENT_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{common}{style}</style>
</head>
<body>
<header class="bar">
<p class="brand"><svg viewBox="0 0 32 32" aria-hidden="true"><path class="one" d="M14.5 3v26a13 13 0 0 1 0-26z"/>
<path class="two" d="M17.5 3v26a13 13 0 0 0 0-26z"/></svg>Lookalike</p>
<nav aria-label="Parts of the page">{links}</nav>
</header>
<main>
{body}
</main>
<footer class="quiet">Made {made} by {made_by}.</footer>
{tail}
</body>
</html>
"""


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """Rows begin with their name."""
    titles = "".join(f'<th scope="col">{escape(title)}</th>' for title in head)
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for name, *cells in rows
    )
    return f'<table class="{kind}"><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>'
