"""`lookalike reindex`, `jobs` and `search` as typed on the command line."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from index.embedding.bundle import Bundle
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
    line = ["search", str(photo), "--gallery", str(gallery), "--limit", "2"]
    default, named = (CliRunner().invoke(app, [*line, *more]) for more in ([], ["--bundle", str(bundle)]))
    assert default.exit_code == 0 and default.output == named.output
    assert default.output.splitlines()[0].split()[1] == "ball-blue"
    assert len(default.output.splitlines()) == 2


def test_a_search_takes_a_filter_a_part_of_the_photo_and_prints_json(tmp_path: Path, bundle: Path) -> None:
    gallery = make_tiny_gallery(tmp_path / "gallery", bundle)
    photo = tmp_path / "photo.jpg"
    photo.write_bytes(tiny_photo(2, 5))

    def search(*options: str) -> Result:
        return CliRunner().invoke(app, ["search", str(photo), str(gallery), *options])

    hits = [
        json.loads(line) for line in search("--filter", '{"colour": ["red", "blue"]}', "--json").output.splitlines()
    ]
    assert [hit["id"] for hit in hits] == ["ball-blue", "ball-red"]
    assert hits[0]["attributes"]["colour"] == "blue" and 0 < hits[0]["score"] <= 1
    assert hits[0]["url"] is None, "as in the API"
    misspelt = search("--filter", '{"color": "red"}')
    assert (misspelt.exit_code, misspelt.stdout) == (0, "")
    assert "No searchable item has the attribute 'color'" in misspelt.stderr
    assert search("--box", "0,0,0.1,0.1").output != search("--box", "0,0,1,1").output
    assert search("--box", "0,0,1,1").output.split()[1] == "ball-blue"
    for options in (("--box", "1,2"), ("--box", "0.5,0,0.5,1"), ("--filter", "{"), ("--gallery", "other")):
        assert search(*options).exit_code == 2
    assert CliRunner().invoke(app, ["search", str(photo)]).exit_code == 2


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


def test_images_that_a_new_bundle_loses_are_reported_by_the_exit_code(tmp_path: Path, bundle: Path) -> None:
    gallery = make_tiny_gallery(tmp_path / "gallery", bundle)
    source = tmp_path / "gallery-source" / "catalogue.csv"
    source.write_text("".join(line for line in source.read_text().splitlines(keepends=True) if "red" not in line))
    other = make_tiny_bundle(tmp_path / "other", grid=8)
    ended = CliRunner().invoke(
        app,
        ["reindex", str(source), "--gallery", str(gallery), "--bundle", str(other), "--rejects", str(tmp_path / "r")],
    )
    assert ended.exit_code == 3, ended.output
    assert (
        "2 images have no vector of bundle" in ended.stdout.splitlines()[-1] and "rejected photos" not in ended.output
    )
    listed = CliRunner().invoke(app, ["jobs", "--gallery", str(gallery)]).output.splitlines()[0]
    assert " partial " in listed and ", 0 deleted, 2 missing" in listed


@pytest.mark.parametrize(
    ("text", "message"),
    [('{"sauce": 1}', "sauce"), ("[]", "must be an object"), ("{", "JSON"), ('{"gallery": 5}', "gallery")],
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
    assert ended.exit_code == 2 and "bundle is missing" in ended.output


def test_jobs_lists_the_newest_first(tmp_path: Path, bundle: Path) -> None:
    gallery = make_tiny_gallery(tmp_path / "gallery", bundle)
    listed = CliRunner().invoke(app, ["jobs", "--gallery", str(gallery)])
    assert listed.exit_code == 0 and "16 of 16 images: 16 embedded" in listed.output
    assert f"with bundle {Bundle.load(bundle).id}: " in listed.output
    assert CliRunner().invoke(app, ["jobs", str(gallery)]).output == listed.output
    (record,) = [
        json.loads(text)
        for text in CliRunner().invoke(app, ["jobs", "--gallery", str(gallery), "--json"]).output.splitlines()
    ]
    assert (record["id"], record["state"]) == (1, "done")
