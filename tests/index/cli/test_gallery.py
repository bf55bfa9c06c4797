"""`lookalike gallery`: what each verb prints, and the exit code that scripts go by."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pyarrow.parquet
import pytest

from index.gallery import open_gallery
from lookalike import main
from tests.support.filled_gallery import BUNDLE, entry, fill
from tests.support.processes import lookalike

VERBS = ("stats", "verify", "compact", "snapshot", "restore", "export")


@pytest.fixture
def gallery(tmp_path: Path) -> Path:
    return fill(tmp_path / "gallery", later=4)


Run = Callable[..., CompletedProcess[str]]
Told = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs a verb as `lookalike gallery` would, in this process: starting one for each would take a minute."""

    def end(*arguments: str | Path) -> CompletedProcess[str]:
        line = ["lookalike", "gallery", *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", line)
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return CompletedProcess(line, ended.value.code, *capfd.readouterr())

    return end


@pytest.fixture
def told(run: Run) -> Told:
    """What a verb prints when it succeeds."""

    def succeed(*arguments: str | Path) -> str:
        ended = run(*arguments)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    return succeed


def test_help_names_every_verb(told: Told) -> None:
    text = told("--help")
    assert all(verb in text for verb in VERBS)
    assert "Example: lookalike gallery snapshot" in told("snapshot", "--help")


def test_stats_tell_what_searches_reflect(told: Told, gallery: Path) -> None:
    lines = dict(line.split(maxsplit=1) for line in told("stats", gallery).splitlines())
    assert (lines["items"], lines["images"]) == ("24", "47")
    assert lines["bundle"] == f"{BUNDLE}, 8 numbers a vector"
    assert lines["generation"].endswith("of change 1")
    pending = json.loads(told("stats", gallery, "--json"))["pending"]
    assert pending > 8 and lines["pending"].startswith(f"{pending} images or items")
    assert lines["index"] == "exact, recall@10 1 (target 0.98)"


def test_stats_for_programs_have_every_field(told: Told, gallery: Path) -> None:
    found = json.loads(told("stats", gallery, "--json"))
    opened = open_gallery(gallery)
    expected = opened.stats().model_dump()
    opened.close()
    (generation,) = (gallery / "generations").iterdir()
    more = {name: value for name, value in found.items() if name not in expected}
    assert expected == {name: found[name] for name in expected}
    assert more.pop("catalogue_bytes") >= (gallery / "catalogue.sqlite").stat().st_size
    size = sum(file.stat().st_size for file in generation.iterdir())
    assert more == {"target": 0.98, "effort": 0, "generation_bytes": size}


def test_compaction_tells_the_new_generation(told: Told, gallery: Path) -> None:
    before = json.loads(told("stats", gallery, "--json"))
    assert before["pending"] > 0
    said = told("compact", gallery)
    after = json.loads(told("stats", gallery, "--json"))
    assert after["generation"] != before["generation"] and after["pending"] == 0
    assert said == f"New generation {after['generation']}: 47 images, exact, recall@10 1 (target 0.98)\n"
    assert told("compact", gallery).startswith(f"Nothing changed since generation {after['generation']}")
    assert told("compact", gallery, "--rebuild").startswith(f"New generation {after['generation']}.2")


def test_an_empty_gallery_is_told_as_such(told: Told, tmp_path: Path) -> None:
    open_gallery(tmp_path / "gallery", create=True).close()
    assert "none yet" in told("stats", tmp_path / "gallery")
    assert "nothing to compact" in told("compact", tmp_path / "gallery")


def test_verify_ends_with_one_when_it_finds_a_fault(told: Told, run: Run, gallery: Path) -> None:
    assert told("verify", gallery) == "No fault found.\n"
    (file,) = gallery.glob("generations/*/index.faiss")
    file.write_bytes(file.read_bytes()[:-1])
    ended = run("verify", gallery)
    assert ended.returncode == 1
    assert f"{file} is not as it was written. Make it again: lookalike gallery compact {gallery}." in ended.stderr
    assert "1 fault found." in ended.stderr


def test_a_script_sees_the_exit_code_of_the_process(gallery: Path, tmp_path: Path) -> None:
    assert lookalike("gallery", "snapshot", gallery, tmp_path / "backup.tar").returncode == 0
    shutil.rmtree(gallery / "generations")
    ended = lookalike("gallery", "verify", gallery)
    assert (ended.returncode, ended.stdout) == (1, "") and "cannot be read" in ended.stderr


def test_a_backup_drill(told: Told, gallery: Path, tmp_path: Path) -> None:
    file, restored = tmp_path / "backup.tar", tmp_path / "restored"
    assert f"{file}: 24 items, 47 images as of change 4, generation " in told("snapshot", gallery, file)
    assert f"{restored}: 24 items, 47 images as of change 4, written " in told("restore", file, restored)
    assert told("verify", restored) == "No fault found.\n"
    before, after = (json.loads(told("stats", place, "--json")) for place in (gallery, restored))
    assert {**before, "catalogue_bytes": 0} == {**after, "catalogue_bytes": 0}


def test_a_restored_gallery_without_an_index_tells_how_to_make_one(told: Told, tmp_path: Path) -> None:
    opened = open_gallery(tmp_path / "gallery", create=True)
    opened.upsert([entry(1)], BUNDLE)
    opened.close()
    assert "no generation" in told("snapshot", tmp_path / "gallery", tmp_path / "backup.tar")
    said = told("restore", tmp_path / "backup.tar", tmp_path / "restored")
    assert f"lookalike gallery compact {tmp_path / 'restored'}" in said


def test_export_writes_a_table(told: Told, gallery: Path, tmp_path: Path) -> None:
    assert "47 images" in told("export", gallery, tmp_path / "vectors.parquet")
    assert pyarrow.parquet.read_table(tmp_path / "vectors.parquet").num_rows == 47


MISTAKES = [
    ("stats {0}/nothing", "No gallery at"),
    ("verify {0}/nothing", "No gallery at"),
    ("compact {0}/nothing", "No gallery at"),
    ("snapshot {0}/nothing {0}/new.tar", "No gallery at"),
    ("snapshot {0}/gallery {0}/there", "is already there"),
    ("restore {0}/there {0}/new", "is not a whole snapshot"),
    ("restore {0}/there {0}/gallery", "is not empty"),
    ("export {0}/gallery {0}/new.parquet --bundle unknown", "no vectors of bundle unknown"),
]


@pytest.mark.parametrize(("line", "message"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_a_mistake_ends_with_one_clear_line(run: Run, gallery: Path, tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "there").write_text("precious")
    ended = run(*line.format(tmp_path).split())
    assert ended.returncode == 1 and message in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"gallery", "there"}
