"""The templates: text is escaped, a missing value is an error, and the page replaces the old one atomically."""

from pathlib import Path

import jinja2
import pytest

from training.report.rendering import write_page

STUDY = {"name": "<b>&", "runs": {"one": {}}, "seeds": (0,), "baseline_run": "one"}
VALUES = {
    "study": STUDY,
    "remarks": ["a < b"],
    "figure_table": (["run"], [["<i>one</i>"]]),
    "best_remark": "",
    "difference_title": "",
    "differences": ([], []),
    "curves": [],
    "states": [],
    "settings": ([], []),
    "runs": ([], []),
}


def test_text_is_escaped_and_empty_sections_are_left_out(tmp_path: Path) -> None:
    write_page(tmp_path / "new" / "page.html", "study.html", title="<x>", command="lookalike study", **VALUES)
    page = (tmp_path / "new" / "page.html").read_text()
    assert "<title>&lt;x&gt;</title>" in page and "<h1>&lt;b&gt;&amp;</h1>" in page
    assert "<li>a &lt; b</li>" in page and '<th scope="row">&lt;i&gt;one&lt;/i&gt;</th>' in page
    assert 'id="curves"' not in page and 'href="#curves"' not in page
    assert ":root {" in page, "the style is part of the page"


def test_a_missing_value_leaves_the_old_page(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("old")
    with pytest.raises(jinja2.UndefinedError, match="is undefined"):
        write_page(tmp_path / "page.html", "study.html", title="", command="", study=STUDY)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("page.html", "old")]
