"""Renders the templates of the pages: each page is one HTML file without scripts, with its style inside."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from index._util.files import atomic_write_text

Table = tuple[list[str], list[list[str]]]
"""The titles of the columns, and rows that begin with their name."""


def write_page(out: Path, template: str, *, title: str, command: str, **values: Any) -> None:
    """Writes a page atomically, in a folder that is made if need be."""
    environment = Environment(
        loader=PackageLoader("training.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made = datetime.now(UTC).strftime("%d %B %Y, %H:%M UTC")
    page = environment.get_template(template).render(title=title, command=command, made=made, **values)
    out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(out, page)
