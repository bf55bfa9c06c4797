"""`lookalike reindex`, `jobs` and `search` as typed on the command line."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lookalike import app
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import make_tiny_gallery, tiny_photo, write_tiny_source


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return make_tiny_bundle(tmp_path / "bundle")


def test_search_uses_the_active_bundle_by_default(tmp_path: Path, bundle: Path) -> None:
    gallery = make_tiny_gallery(tmp_path / "gallery", bundle)
    photo = tmp_path / "photo.jpg"
    photo.write_bytes(tiny_photo(2, 5))
    line = ["search", str(photo), "--gallery", str(gallery), "--top", "2"]
    default, named = (CliRunner().invoke(app, [*line, *more]) for more in ([], ["--bundle", str(bundle)]))
    assert default.exit_code == 0 and default.output == named.output
    assert default.output.splitlines()[0].split()[1] == "ball-blue"
    assert len(default.output.splitlines()) == 2


def test_options_come_from_a_file_and_the_command_line_overrides_them(tmp_path: Path, bundle: Path) -> None:
    source, gallery = write_tiny_source(tmp_path / "source"), tmp_path / "gallery"
    (source.parent / "red-0.jpg").write_bytes(b"not a photo")
    file = tmp_path / "options.json"
    stored = {"source": [str(source)], "bundle": str(bundle), "max_rejects": 0, "rejects": str(tmp_path / "bad.csv")}
    file.write_text(json.dumps(stored))
    line = ["reindex", "--options", str(file), "--gallery", str(gallery)]
    failed = CliRunner().invoke(app, line)
    assert failed.exception and "1 of 16 images were rejected, more than 0%" in str(failed.exception)
    done = CliRunner().invoke(app, [*line, "--max-rejects", "0.1"])
    assert done.exit_code == 3 and (tmp_path / "bad.csv").is_file()


@pytest.mark.parametrize(
    ("text", "message"),
    [('{"sauce": 1}', "sauce"), ("[]", "should be an object"), ("{", "JSON"), ('{"gallery": 5}', "gallery")],
)
def test_a_bad_file_of_options_is_wrong_usage(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "options.json").write_text(text)
    ended = CliRunner().invoke(app, ["reindex", "a.csv", "--options", str(tmp_path / "options.json")])
    assert ended.exit_code == 2 and message in ended.output


def test_a_mistake_in_an_option_is_reported_without_the_words_of_the_validator() -> None:
    ended = CliRunner().invoke(app, ["reindex", "a.csv", "--gallery", "g", "--bundle", "b", "--column", "sku"])
    assert ended.exit_code == 2
    assert "columns: 'sku' is not of the form NAME=COLUMN" in " ".join(ended.output.replace("│", " ").split())


def test_a_missing_option_is_wrong_usage() -> None:
    ended = CliRunner().invoke(app, ["reindex", "a.csv", "--gallery", "gallery"])
    assert ended.exit_code == 2 and "bundle: Field required" in ended.output


def test_jobs_lists_the_newest_first(tmp_path: Path, bundle: Path) -> None:
    gallery = make_tiny_gallery(tmp_path / "gallery", bundle)
    listed = CliRunner().invoke(app, ["jobs", "--gallery", str(gallery)])
    assert listed.exit_code == 0 and "16 of 16 images: 16 embedded" in listed.output
    (record,) = [
        json.loads(text)
        for text in CliRunner().invoke(app, ["jobs", "--gallery", str(gallery), "--json"]).output.splitlines()
    ]
    assert (record["id"], record["state"]) == (1, "done")
