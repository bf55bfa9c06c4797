"""The command line: help for every verb, one clear line for a mistake, a traceback only when asked."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from lookalike import main
from tests.support.processes import lookalike
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import make_tiny_gallery, tiny_photo, write_tiny_source

VERBS = ("demo", "train", "study", "evaluate", "export", "report", "reindex", "search", "serve")


class Told(NamedTuple):
    """How a verb ended and what it said."""

    code: object
    out: str
    error: str


@pytest.fixture
def tell(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Told]:
    """Runs a line as `lookalike` would, in this process: starting one for each would take minutes."""

    def run(*arguments: str | Path) -> Told:
        monkeypatch.setattr(sys, "argv", ["lookalike", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return Told(ended.value.code, *capfd.readouterr())

    return run


def test_help_names_every_verb() -> None:
    told = lookalike("--help")
    assert told.returncode == 0, told.stderr
    assert all(verb in told.stdout for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(tell: Callable[..., Told], verb: str) -> None:
    told = tell(verb, "--help")
    assert told.code == 0
    assert f"Example: lookalike {verb}" in told.out


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shop")
    bundle = make_tiny_bundle(directory / "bundle")
    make_tiny_gallery(directory / "gallery", bundle)
    make_tiny_bundle(directory / "other", grid=2)
    (directory / "photo.jpg").write_bytes(tiny_photo(2, 3))
    (directory / "text.jpg").write_text("not a photo")
    (directory / "bad.csv").write_text("sku,photo\n1,a.jpg\n")
    (directory / "begun").mkdir()
    (directory / "begun" / "config.yaml").write_text("data: sample\nconfig: {}\n")
    return directory


def test_search_prints_the_right_item_first(tell: Callable[..., Told], shop: Path) -> None:
    told = tell("search", shop / "photo.jpg", "--gallery", shop / "gallery", "--bundle", shop / "bundle")
    assert told.code == 0, told.error
    assert "ball-blue" in told.out.splitlines()[0]
    assert len(told.out.splitlines()) == 5


MISTAKES = [
    ("search nothing.jpg --gallery {shop}/gallery --bundle {shop}/bundle", "No photo at nothing.jpg"),
    ("search {shop}/text.jpg --gallery {shop}/gallery --bundle {shop}/bundle", "not an image of a known format"),
    ("search {shop}/photo.jpg --gallery {shop}/nothing --bundle {shop}/bundle", "lookalike reindex"),
    ("search {shop}/photo.jpg --gallery {shop}/gallery --bundle {shop}/other", "was indexed with bundle"),
    ("reindex {shop}/nothing.csv --gallery {shop}/new --bundle {shop}/bundle", "No source at"),
    ("reindex {shop}/bad.csv --gallery {shop}/new --bundle {shop}/bundle", "it has sku, photo"),
    ("reindex {shop}/gallery-source/catalogue.csv --gallery {shop}/new --bundle {shop}/nothing", "lookalike export"),
    ("reindex {shop}/gallery-source/catalogue.csv --gallery {shop}/bundle --bundle {shop}/bundle", "is not a gallery"),
    ("serve", "gallery: Field required"),
    ("serve --gallery {shop}/nothing --bundle {shop}/bundle", "No gallery at"),
    ("serve --gallery {shop}/gallery --bundle {shop}/other", "was indexed with bundle"),
    ("serve --gallery {shop}/gallery --host 192.0.2.1", "without API keys"),
    ("train --data nonsense --out {shop}/run", "Unknown data 'nonsense'"),
    ("train --data folder:{shop}/nothing --out {shop}/run", "No folder at"),
    ("train --data folder:{shop} --out {shop}/run --set epochs=many", "epochs='many'"),
    ("train --data folder:{shop} --out {shop}/run --set epochs", "--set key=value"),
    ("train --data folder:{shop} --out {shop}/run --config {shop}/nothing.yaml", "No configuration file"),
    ("evaluate --model {shop}/nothing --data sample", "No training run at"),
    ("evaluate --model {shop}/bundle --data sample --k zero", "Write it as 1,2,4,8"),
    ("export {shop}/nothing --out {shop}/new", "No training run at"),
    ("report {shop}/nothing", "No training run at"),
    ("report {shop}/begun", "has no checkpoint yet"),
    ("report {shop}/begun --out {shop}", "is a folder"),
]


@pytest.mark.parametrize(("line", "message"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_a_mistake_gets_one_clear_line(tell: Callable[..., Told], shop: Path, line: str, message: str) -> None:
    told = tell(*(part.format(shop=shop) for part in line.split()))
    assert told.code == 1, told.error
    assert message in told.error
    assert len(told.error.strip().splitlines()) == 1 and "Traceback" not in told.error


@pytest.mark.parametrize(
    "line", ["--debug search {0} --gallery g --bundle b", "search {0} --gallery g --bundle b --debug"]
)
def test_debug_shows_the_traceback(tell: Callable[..., Told], line: str) -> None:
    told = tell(*line.format("nothing.jpg").split())
    assert told.code == 1
    assert "Traceback" in told.error and "No photo at nothing.jpg" in told.error


def test_wrong_usage_exits_with_two(tell: Callable[..., Told]) -> None:
    assert tell("search", "photo.jpg", "--no-such-option").code == 2
    assert tell("no-such-verb").code == 2


def test_reindex_tells_rejected_photos_by_its_exit_code(tell: Callable[..., Told], shop: Path, tmp_path: Path) -> None:
    source = write_tiny_source(tmp_path / "source")
    (source.parent / "red-0.jpg").write_bytes(b"broken")
    rejects = tmp_path / "rejects.csv"
    told = tell("reindex", source, "--gallery", tmp_path / "g", "--bundle", shop / "bundle", "--rejects", rejects)
    assert told.code == 3, told.error
    assert "15 photos embedded, 0 unchanged, 1 rejected" in told.out
    assert "red-0.jpg" in rejects.read_text()
