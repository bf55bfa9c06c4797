"""The page of real small runs: self-contained, with the run's figures, and a wrong label first."""

import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

from index.errors import LookalikeError
from tests.support.browsers import find_browser
from tests.support.tiny_gallery import COLOURS, write_tiny_folder
from tests.support.training_runs import RecordingCallback
from training.checkpoints import RunFolder
from training.cli import report
from training.data import load_data
from training.report import write_report


def page_of(run: RunFolder) -> str:
    return (run.path / "report.html").read_text(encoding="utf-8")


class Reader(HTMLParser):
    """The parts of a page that the tests check."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.rows: list[list[str]] = []
        self.text: list[str] = []
        self._cell = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.addresses += [found[name] or "" for name in ("src", "href", "srcset", "action") if name in found]
        self.ids += [found["id"] or ""] if "id" in found else []
        assert tag not in ("script", "iframe", "object", "embed"), tag
        assert tag != "img" or found["alt"]
        assert not (tag == "svg" and found.get("role") == "img") or found["aria-label"]
        if tag == "tr":
            self.rows.append([])
        self._cell = tag in ("td", "th")

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self._cell:
            self.rows[-1].append(data)
        self._cell = False


def test_the_page_requests_nothing(run: RunFolder) -> None:
    page, read = page_of(run), Reader(page_of(run))
    assert "http://" not in page and "https://" not in page and "@import" not in page
    addresses = [*read.addresses, *re.findall(r"url\(([^)]*)\)", page)]
    assert all(address.startswith(("#", "data:")) for address in addresses)
    assert {address[1:] for address in addresses if address.startswith("#")} <= set(read.ids)
    assert len(page) < 2_000_000
    assert len(read.ids) == len(set(read.ids)), "every picture is embedded once"


def test_the_page_shows_the_runs_figures(run: RunFolder) -> None:
    read, before, after = Reader(page_of(run)), run.history()[0], run.result()
    for name, title in (("recall@1", "Recall@1"), ("recall@8", "Recall@8"), ("map@r", "MAP@R")):
        row = [title, f"{100 * before[name]:.1f} %", f"{100 * after[name]:.1f} %"]
        assert row in read.rows
    text = " ".join(read.text)
    assert "efficientnet_lite0" in text and "volume 8" in text and "epoch 2, the newest" in text
    assert [row[0] for row in read.rows if len(row) > 8 and row[0].isdigit()] == ["0", "1", "2"]


def test_a_wrong_label_is_the_worst_query(run: RunFolder, photos: Path) -> None:
    (stray,) = photos.rglob("stray*")
    first = page_of(run).partition('<li class="row card">')[2].partition("</li>")[0]
    text = "".join(Reader(first).text)
    assert text.startswith(f"{stray.parent.name}/{stray.name} is labelled {stray.parent.name};")
    assert first.count('class="tile wrong"') >= 4, "the photos of what it really shows"
    assert first.count("<use ") == 8, "the query, six neighbours, the best right one"


def test_proxy_isa_shows_how_far_its_classes_are_learned(run: RunFolder) -> None:
    read = Reader(page_of(run))
    checkpoint = run.load_checkpoint()
    assert checkpoint
    state = checkpoint["work"]["loss"]
    seen, learned = state["hardness.seen"].double(), state["hardness.learned"].double()
    row = next(row for row in read.rows if row[0] == "n, clean samples")
    assert [float(cell) for cell in row[1:]] == [seen.min(), seen.quantile(0.5).round(), seen.max()]
    row = next(row for row in read.rows if row[0] == "S_learned")
    assert float(row[1]) == pytest.approx(learned.min().item(), abs=1e-4)
    for title in (
        "Decay functions",
        "Thresholds of the classes",
        "Shares of pairs in the loss",
        "Similarity of proxies",
    ):
        assert title in read.text
    assert "Training photos and proxies" in read.text


@pytest.mark.parametrize(("loss", "has_proxies"), [("proxy_anchor", True), ("triplet", False), ("soft_triple", True)])
def test_other_losses_leave_out_what_they_do_not_have(
    make_run: Callable[..., RunFolder], loss: str, has_proxies: bool
) -> None:
    sampling = "sampling={kind: balanced, batch_size: 8, photos_per_class: 2}"
    run = make_run(f"loss.name={loss}", sampling, "epochs=1")
    report(run.path)
    text = Reader(page_of(run)).text
    assert "Test photos" in text and "Similarity of test classes" in text
    assert ("Training photos and proxies" in text) == has_proxies == ("Similarity of proxies" in text)
    assert "Decay functions" not in text and "Shares of pairs in the loss" not in text


def test_an_unfinished_run_is_reported_with_its_newest_epoch(
    make_run: Callable[..., RunFolder], tmp_path: Path
) -> None:
    often = ("epochs=3", "selection={validation_share: 0.4}", "checkpoint_minutes=0.000001")
    run = make_run(*often, callback=RecordingCallback(stop_after_step=(1, 1)))
    assert not (run.path / "result.json").exists()
    report(run.path, out=tmp_path / "new" / "page.html")
    text = Reader((tmp_path / "new" / "page.html").read_text()).text
    assert "The run has not finished: it stands at epoch 1 of 3." in text
    assert "MAP@R, validation" in text
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["page.html"], "written atomically"


def test_missing_photos_are_reported_with_the_option_for_their_location(
    run: RunFolder, photos: Path, tmp_path: Path
) -> None:
    shutil.copytree(run.path, tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace(str(photos), str(tmp_path / "moved")))
    with pytest.raises(LookalikeError, match=r"No folder at .*moved.* --data"):
        report(tmp_path / "run")
    report(tmp_path / "run", data=f"folder:{photos}")
    assert (tmp_path / "run" / "report.html").is_file()


def test_photos_of_other_classes_are_shown_without_the_proxies(run: RunFolder, tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "photos", views=3)
    for colour in COLOURS[:2]:
        shutil.rmtree(folder / colour)
    data, out = load_data(f"folder:{folder}"), tmp_path / "page.html"
    write_report(run, data, out, spec="folder:elsewhere", on_progress=lambda *_: None)
    text = Reader(out.read_text()).text
    assert any("not those of this run" in part for part in text)
    assert "for this page" in text, "measured on other photos than the run was"
    assert "Similarity of proxies" in text and "Training photos and proxies" not in text


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_opens_in_a_browser_without_messages(run: RunFolder, scheme: str) -> None:
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium or Chrome on the PATH: install one, for example with `apt install chromium`")
    address = (run.path / "report.html").absolute().as_uri()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(color_scheme="dark" if scheme == "dark" else "light")
        messages: list[str] = []
        requests: list[str] = []
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(address)
        for width in (360, 1280):
            page.set_viewport_size({"width": width, "height": 800})
            overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert page.evaluate(overflow) == 0
        decode = "image => image.decode().then(() => image.naturalWidth)"
        addresses = "[...document.querySelectorAll('image')].map(image => image.href.baseVal)"
        pictures = f"{addresses}.map(address => Object.assign(new Image(), {{src: address}}))"
        assert min(page.evaluate(f"Promise.all({pictures}.map({decode}))")) > 1
        assert page.get_by_role("img", name="Query").first.is_visible()
        browser.close()
    assert messages == []
    assert [url for url in requests if url != address and not url.startswith("data:")] == []


def test_a_run_that_kept_the_untrained_backbone_states_it(make_run: Callable[..., RunFolder], photos: Path) -> None:
    run = make_run("selection.validation_share=0.4", "optimiser.learning_rate=0.1")
    remark = run.result()["remark"]
    assert run.result()["epoch"] == 0 and "Training did not help" in remark
    report(run.path)
    read = Reader(page_of(run))
    text = " ".join(read.text)
    assert remark in text and "the untrained backbone, the best MAP@R on the validation classes" in text
    assert "1,280 dimensions" in text


def test_photos_that_are_only_for_measuring_make_a_page(run: RunFolder, photos: Path, tmp_path: Path) -> None:
    labels = sorted({photo.label for photo in load_data(f"folder:{photos}").test})
    rows = [f"{label},{file},test" for label in labels for file in sorted((photos / label).glob("?.jpg"))]
    table = tmp_path / "measured.csv"
    table.write_text("\n".join(["label,path,split", *rows]))
    report(run.path, out=tmp_path / "page.html", data=f"table:{table}")
    assert "are not those of this run" in (tmp_path / "page.html").read_text()
