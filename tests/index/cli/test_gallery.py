"""The commands of `lookalike gallery`: their output and their exit codes."""

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

COMMANDS = ("stats", "verify", "compact", "snapshot", "restore", "copy", "export")


@pytest.fixture
def gallery(tmp_path: Path) -> Path:
    return fill(tmp_path / "gallery", later=4)


Run = Callable[..., CompletedProcess[str]]
Output = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process: starting one for each would take a minute."""

    def end(*arguments: str | Path) -> CompletedProcess[str]:
        line = ["lookalike", "gallery", *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", line)
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return CompletedProcess(line, ended.value.code, *capfd.readouterr())

    return end


@pytest.fixture
def output(run: Run) -> Output:
    """Runs a command that must succeed, and returns what it prints."""

    def succeed(*arguments: str | Path) -> str:
        ended = run(*arguments)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    return succeed


def test_help_lists_every_command(output: Output) -> None:
    text = output("--help")
    assert all(command in text for command in COMMANDS)
    assert "Example: lookalike gallery snapshot" in output("snapshot", "--help")


def test_stats_show_what_searches_reflect(output: Output, gallery: Path) -> None:
    lines = dict(line.split(maxsplit=1) for line in output("stats", gallery).splitlines())
    assert (lines["items"], lines["images"]) == ("24", "47")
    assert lines["bundle"] == f"{BUNDLE}, 8 numbers per vector"
    assert lines["index"].endswith("of revision 1")
    pending = json.loads(output("stats", gallery, "--json"))["index"]["pending"]
    assert pending > 8 and lines["pending"].startswith(f"{pending} images or items")
    assert lines["quality"] == "exact, recall@10 1 (target 0.98)"


def test_stats_show_images_that_no_search_finds(output: Output, gallery: Path) -> None:
    with open_gallery(gallery) as opened:
        opened.upsert([entry(99)], "c" * 16)
    lines = dict(line.split(maxsplit=1) for line in output("stats", gallery).splitlines())
    assert lines["images"] == "49; 2 of them have no vector of the bundle and are not found"
    assert json.loads(output("stats", gallery, "--json"))["unsearchable"] == 2


def test_stats_list_every_bundle_and_a_kept_one_can_be_activated(output: Output, run: Run, gallery: Path) -> None:
    other = "c" * 16
    with open_gallery(gallery) as opened:
        opened.upsert([entry(99)], other)
    lines = dict(line.split(maxsplit=1) for line in output("stats", gallery).splitlines())
    assert (lines["active"], lines["unused"]) == (f"{BUNDLE}: 47 vectors", f"{other}: 2 vectors")
    refused = run("drop", gallery, BUNDLE)
    assert refused.returncode == 1 and "lookalike gallery activate" in refused.stderr
    ended = run("activate", gallery, other)
    assert (ended.returncode, ended.stdout) == (0, f"Bundle {other} is active.\n")
    assert "47 images have no vector of it" in ended.stderr
    lines = dict(line.split(maxsplit=1) for line in output("stats", gallery).splitlines())
    assert (lines["active"], lines["previous"]) == (f"{other}: 2 vectors", f"{BUNDLE}: 47 vectors")


def test_a_rollback_reports_the_images_that_it_loses(run: Run, gallery: Path) -> None:
    with open_gallery(gallery) as opened:
        opened.upsert([entry(99)], "c" * 16)
        opened.activate("c" * 16)
    ended = run("rollback", gallery)
    assert ended.returncode == 0 and f"Bundle {BUNDLE} is active again" in ended.stdout
    assert "2 images that were added since have no vector of it" in ended.stderr and "send them again" in ended.stderr


def test_stats_as_json_have_every_field(output: Output, gallery: Path) -> None:
    found = json.loads(output("stats", gallery, "--json"))
    with open_gallery(gallery) as opened:
        expected = opened.stats().model_dump()
    (generation,) = (gallery / "generations").iterdir()
    assert found.pop("store_bytes") >= (gallery / "catalogue.sqlite").stat().st_size
    del expected["store_bytes"]
    (bundle,) = found.pop("bundles")
    assert (bundle["id"], bundle["state"], bundle["vectors"]) == (BUNDLE, "active", 47)
    assert found == expected
    index = found["index"]
    assert index["bytes"] == sum(file.stat().st_size for file in generation.iterdir())
    assert (index["engine"], index["target"], index["effort"]) == ("faiss", 0.98, 0)


def test_compaction_prints_the_new_generation(output: Output, gallery: Path) -> None:
    before = json.loads(output("stats", gallery, "--json"))["index"]
    assert before["pending"] > 0
    printed = output("compact", gallery)
    after = json.loads(output("stats", gallery, "--json"))["index"]
    assert after["name"] != before["name"] and after["pending"] == 0
    assert printed == f"New generation {after['name']}: 47 images, exact, recall@10 1 (target 0.98)\n"
    assert output("compact", gallery).startswith(f"Nothing changed since generation {after['name']}")
    assert output("compact", gallery, "--rebuild").startswith(f"New generation {after['name']}.2")


def test_an_empty_gallery_is_reported(output: Output, tmp_path: Path) -> None:
    open_gallery(tmp_path / "gallery", create=True).close()
    assert "none active" in output("stats", tmp_path / "gallery")
    assert "nothing to compact" in output("compact", tmp_path / "gallery")


def test_verify_exits_with_one_when_it_finds_a_fault(output: Output, run: Run, gallery: Path) -> None:
    assert output("verify", gallery) == "No fault found.\n"
    (file,) = gallery.glob("generations/*/index.faiss")
    file.write_bytes(file.read_bytes()[:-1])
    ended = run("verify", gallery)
    assert ended.returncode == 1
    assert f"{file} differs from what was written. Rebuild it: lookalike gallery compact {gallery}." in ended.stderr
    assert "1 fault found." in ended.stderr


def test_a_script_sees_the_exit_code_of_the_process(gallery: Path, tmp_path: Path) -> None:
    assert lookalike("gallery", "snapshot", gallery, tmp_path / "backup.tar").returncode == 0
    shutil.rmtree(gallery / "generations")
    ended = lookalike("gallery", "verify", gallery)
    assert (ended.returncode, ended.stdout) == (1, "") and "cannot be read" in ended.stderr


def test_a_backup_drill(output: Output, gallery: Path, tmp_path: Path) -> None:
    file, restored = tmp_path / "backup.tar", tmp_path / "restored"
    assert f"{file}: 24 items, 47 images as of revision 4, index " in output("snapshot", gallery, file)
    assert f"{restored}: 24 items, 47 images as of revision 4, written " in output("restore", file, restored)
    assert output("verify", restored) == "No fault found.\n"
    before, after = (json.loads(output("stats", address, "--json")) for address in (gallery, restored))
    assert {**before, "store_bytes": 0} == {**after, "store_bytes": 0}


def test_restoring_without_an_index_prints_how_to_build_one(output: Output, tmp_path: Path) -> None:
    opened = open_gallery(tmp_path / "gallery", create=True)
    opened.upsert([entry(1)], BUNDLE)
    opened.close()
    assert "no index" in output("snapshot", tmp_path / "gallery", tmp_path / "backup.tar")
    printed = output("restore", tmp_path / "backup.tar", tmp_path / "restored")
    assert f"lookalike gallery compact {tmp_path / 'restored'}" in printed


def test_export_writes_a_table(output: Output, gallery: Path, tmp_path: Path) -> None:
    assert "47 images" in output("export", gallery, tmp_path / "vectors.parquet")
    assert pyarrow.parquet.read_table(tmp_path / "vectors.parquet").num_rows == 47


USER_ERRORS = [
    ("stats {0}/nothing", "No gallery at"),
    ("verify {0}/nothing", "No gallery at"),
    ("compact {0}/nothing", "No gallery at"),
    ("snapshot {0}/nothing {0}/new.tar", "No gallery at"),
    ("snapshot {0}/gallery {0}/there", "exists"),
    ("restore {0}/there {0}/new", "is not a complete snapshot"),
    ("restore {0}/there {0}/gallery", "is not empty"),
    ("export {0}/gallery {0}/new.parquet --bundle unknown", "no vectors of bundle unknown"),
]


@pytest.mark.parametrize(("line", "message"), USER_ERRORS, ids=[line for line, _ in USER_ERRORS])
def test_a_user_error_prints_one_clear_line(run: Run, gallery: Path, tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "there").write_text("precious")
    ended = run(*line.format(tmp_path).split())
    assert ended.returncode == 1 and message in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"gallery", "there"}


def test_copy_reports_both_sides_and_verify_only_finds_a_difference(
    gallery: Path, tmp_path: Path, run: Run, output: Output
) -> None:
    copied = output("copy", gallery, tmp_path / "copied")
    assert "24 items written, 0 deleted" in copied
    assert "Both are equal" in copied
    assert "Both are equal" in output("copy", gallery, tmp_path / "copied", "--verify-only")
    with open_gallery(gallery) as opened:
        opened.delete(["item-00001"])
    differing = run("copy", gallery, tmp_path / "copied", "--verify-only")
    assert differing.returncode == 1
    assert "The galleries differ." in differing.stderr
    assert "0 items written, 1 deleted" in output("copy", gallery, tmp_path / "copied")
    refused = run("copy", tmp_path / "nothing", tmp_path / "new")
    assert refused.returncode == 1
    assert not (tmp_path / "new").exists(), "nothing is created before the source is open"


def test_every_command_accepts_the_gallery_as_an_option(gallery: Path, tmp_path: Path, output: Output) -> None:
    option = ("--gallery", gallery)
    assert output("stats", *option) == output("stats", gallery) == output("stats", gallery, *option)
    assert "No fault found" in output("verify", *option)
    assert "generation" in output("compact", *option)
    assert "items" in output("snapshot", *option, tmp_path / "backup.tar")
    assert "items" in output("restore", tmp_path / "backup.tar", "--gallery", tmp_path / "restored")
    assert "images" in output("export", tmp_path / "vectors.parquet", *option)
    assert f"Bundle {BUNDLE} is active." in output("activate", BUNDLE, *option)
    assert (tmp_path / "backup.tar").is_file() and (tmp_path / "vectors.parquet").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("stats", "here", "--gallery", "there"), "Two galleries are given"),
        (("snapshot", "here", "file", "--gallery", "there"), "Two galleries are given"),
        (("stats", "--json"), "Name the gallery, as an argument or with --gallery."),
        (("snapshot", "here"), "Name the file to write."),
        (("drop", "--gallery", "here"), "Name the bundle."),
    ],
)
def test_gallery_is_given_once(arguments: tuple[str, ...], message: str, run: Run) -> None:
    ended = run(*arguments)
    assert ended.returncode == 2 and message in " ".join(ended.stderr.replace("│", " ").split())
