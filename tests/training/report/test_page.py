"""The report of real small runs: self-contained, true, and quick to show a wrong label."""

import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from playwright.sync_api import sync_playwright

from index.errors import LookalikeError
from index.evaluation.metrics import retrieval_metrics
from tests.support.tiny_gallery import COLOURS, tiny_photo, write_tiny_folder
from tests.support.training_runs import SMALL_SETTINGS, RecordingCallback
from training.checkpoints import RunFolder
from training.cli import report
from training.config import load_config
from training.data import Photo, load_data
from training.loop import train
from training.losses.class_state import HardnessSettings
from training.losses.registry import make_loss
from training.report import write_report
from training.report.learned import learned_classes, read_proxies
from training.report.neighbors import SearchResults
from training.report.space import MAX_PHOTOS, class_similarity, map_to_plane, sample_photos

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Products in folders; in one that is measured lies a photo of another, under a name that needs escaping."""
    folder = write_tiny_folder(tmp_path_factory.mktemp("data") / "photos")
    one, other = sorted({photo.label for photo in load_data(f"folder:{folder}").test})[:2]
    (folder / one / "stray & <lost>.jpg").write_bytes(tiny_photo(COLOURS.index(other), 5))
    return folder


@pytest.fixture(scope="module")
def make_run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RunFolder]:
    def make(*changes: str, callback: RecordingCallback | None = None) -> RunFolder:
        out, spec = tmp_path_factory.mktemp("runs") / "run", f"folder:{photos}"
        config = load_config(None, [*SMALL_SETTINGS, *changes])
        try:
            train(config, load_data(spec), out, spec, callback or RecordingCallback())
        except KeyboardInterrupt:
            assert callback
        return RunFolder(out)

    return make


@pytest.fixture(scope="module")
def run(make_run: Callable[..., RunFolder]) -> RunFolder:
    """Proxy-ISA, whose queue and filter are on at once."""
    folder = make_run("loss.settings={queue_start: 0, filter_start: 0, volume: 8}")
    report(folder.path)
    return folder


def page_of(run: RunFolder) -> str:
    return (run.path / "report.html").read_text(encoding="utf-8")


class Reader(HTMLParser):
    """The parts of a page that tests ask for."""

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


def test_the_page_asks_nobody_for_anything(run: RunFolder) -> None:
    page, read = page_of(run), Reader(page_of(run))
    assert "http://" not in page and "https://" not in page and "@import" not in page
    addresses = [*read.addresses, *re.findall(r"url\(([^)]*)\)", page)]
    assert all(address.startswith(("#", "data:")) for address in addresses)
    assert {address[1:] for address in addresses if address.startswith("#")} <= set(read.ids)
    assert len(page) < 2_000_000
    assert len(read.ids) == len(set(read.ids)), "every picture is kept once"


def test_the_page_tells_the_runs_figures(run: RunFolder) -> None:
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


def test_a_run_that_goes_on_is_reported_as_it_stands(make_run: Callable[..., RunFolder], tmp_path: Path) -> None:
    often = ("epochs=3", "selection={validation_share: 0.4}", "checkpoint_minutes=0.000001")
    run = make_run(*often, callback=RecordingCallback(stop_after_step=(1, 1)))
    assert not (run.path / "result.json").exists()
    report(run.path, out=tmp_path / "new" / "page.html")
    text = Reader((tmp_path / "new" / "page.html").read_text()).text
    assert "The run has not finished: it stands at epoch 1 of 3." in text
    assert "MAP@R, validation" in text
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["page.html"], "written whole"


def test_photos_that_are_gone_are_asked_for(run: RunFolder, photos: Path, tmp_path: Path) -> None:
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


def test_answers_agree_with_a_search_in_plain_loops() -> None:
    draw = np.random.default_rng(3)
    vectors = draw.normal(size=(60, 4)).astype(np.float32)
    photos = [
        Photo(Path(f"{i}.jpg"), f"class {i % 7}", None, is_query=i % 3 != 0, is_gallery=i % 3 != 1) for i in range(60)
    ]
    answers = SearchResults(vectors, photos)
    figures = retrieval_metrics(
        vectors,
        [photo.label for photo in photos],
        is_query=[photo.is_query for photo in photos],
        is_gallery=[photo.is_gallery for photo in photos],
    )
    assert 1 - answers.wrong.mean() == pytest.approx(figures["recall@1"])

    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    margins = {}
    for query in range(60):
        if photos[query].is_query:
            scores = {i: unit[query] @ unit[i] for i in range(60) if photos[i].is_gallery and i != query}
            own = {i for i in scores if photos[i].label == photos[query].label}
            margins[query] = max(scores[i] for i in scores if i not in own) - max(scores[i] for i in own)
    expected = sorted((query for query in margins if margins[query] > 0), key=lambda query: -margins[query])
    worst = answers.worst(5, neighbours=6)
    assert [answer.query for answer in worst] == expected[:5]
    for answer in worst:
        assert answer.margin == pytest.approx(margins[answer.query], abs=1e-5)
        ranked = sorted(
            (i for i in range(60) if photos[i].is_gallery and i != answer.query),
            key=lambda i: -float(unit[answer.query] @ unit[i]),
        )
        assert [found.photo for found in answer.neighbours] == ranked[:6]
        assert ranked[answer.rank - 1] == answer.right.photo
    assert sum(pair.mistakes for pair in answers.confusions(100)) == answers.wrong.sum() == len(expected)


def test_a_photo_in_two_folders_is_shown_with_the_one_it_finds_first() -> None:
    vectors = np.random.default_rng(1).normal(size=(300, 64)).astype(np.float32)
    vectors[100] = vectors[200] = vectors[299]
    photos = [Photo(Path(f"{i}.jpg"), "lamp" if i in (200, 299) else f"class {i % 20}") for i in range(300)]
    twin = next(answer for answer in SearchResults(vectors, photos).worst(300, neighbours=2) if answer.query == 299)
    assert [found.photo for found in twin.neighbours] == [100, 200]
    assert twin.margin == 0 and twin.rank == 2


def test_class_similarity_is_the_mean_over_pairs_of_photos() -> None:
    vectors = np.random.default_rng(5).normal(size=(12, 3)).astype(np.float32)
    labels = [f"class {i % 4}" for i in range(12)]
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    similarity = class_similarity(vectors, labels)
    assert sorted(similarity.names) == ["class 0", "class 1", "class 2", "class 3"]
    for row, one in enumerate(similarity.names):
        for column, other in enumerate(similarity.names):
            cosines = [
                unit[i] @ unit[j]
                for i in range(12)
                for j in range(12)
                if (labels[i], labels[j]) == (one, other) and i != j
            ]
            assert similarity.matrix[row, column] == pytest.approx(np.mean(cosines), abs=1e-5)


def test_similar_classes_lie_side_by_side() -> None:
    ways = np.eye(3, dtype=np.float32)[[0, 1, 2, 0, 1, 2]] + 0.01 * np.eye(6, 3, dtype=np.float32)
    names = class_similarity(np.repeat(ways, 2, axis=0), [f"class {i // 2}" for i in range(12)]).names
    places = {name: place for place, name in enumerate(names)}
    assert all(abs(places[f"class {i}"] - places[f"class {i + 3}"]) == 1 for i in range(3))


def test_a_map_keeps_groups_together_and_is_the_same_each_time() -> None:
    centres = np.repeat(np.eye(3, 8, dtype=np.float32), 20, axis=0)
    vectors = centres + 0.05 * np.random.default_rng(0).normal(size=centres.shape).astype(np.float32)
    plane = map_to_plane(vectors)
    assert plane is not None and plane.min() >= 0 and plane.max() <= 1
    groups = plane.reshape(3, 20, 2)
    spread = max(np.linalg.norm(group - group.mean(0), axis=1).max() for group in groups)
    assert all(np.linalg.norm(a.mean(0) - b.mean(0)) > spread for a, b in combinations(groups, 2))
    again = map_to_plane(vectors)
    assert again is not None and np.array_equal(plane, again)
    assert map_to_plane(vectors[:3]) is None


def test_a_large_set_is_sampled_evenly_over_its_classes() -> None:
    labels = [f"class {i % 50}" for i in range(10_000)]
    sample = sample_photos(labels)
    assert len(sample) == len(set(sample)) == MAX_PHOTOS
    assert {sum(labels[place] == f"class {i}" for place in sample) for i in range(50)} == {40}
    assert sample == sample_photos(labels)


def test_decay_curves_follow_the_papers_equations() -> None:
    config = load_config(None, ["loss.settings={volume: 20, tau: 2, positive_penalty: nu}"])
    state = {"hardness.seen": torch.tensor([3, 90]), "hardness.learned": torch.tensor([0.1, 0.2])}
    classes = learned_classes(config, state)
    assert classes is not None and classes.settings.positive_penalty == "nu"
    volume, tau = 20.0, 2.0
    n = np.array(classes.decay.samples)
    assert n[0] == 0 and n[-1] >= 90
    effective = (1 - (1 - 1 / volume) ** n) * volume
    nu = 1 / (1 + np.log(1 + effective))
    np.testing.assert_allclose(classes.decay.nu, nu, rtol=1e-5)
    sigma = 1 + (1 + np.exp(-tau)) * (nu - 1) / (1 + np.exp(volume - effective - tau))
    np.testing.assert_allclose(classes.decay.sigma, sigma, rtol=1e-5)
    np.testing.assert_allclose(classes.decay.inverse[1:], 1 / effective[1:], rtol=1e-5)
    s = HardnessSettings(queue_start=0, filter_start=0)
    hardness = 1 + s.hardness_sensitivity * (1 - 0.2)
    own_nu = 1 / (1 + np.log(1 + classes.effective[1]))
    assert classes.outlier[1] == pytest.approx(0.2 - hardness * own_nu - s.search_margin, rel=1e-5)


@pytest.mark.parametrize(("loss", "each"), [("proxy_gml", 12), ("arcface", 1), ("soft_triple", 10), ("proxy_nca", 1)])
def test_proxies_are_found_where_each_loss_keeps_them(loss: str, each: int) -> None:
    proxies = read_proxies(make_loss(loss, 30, 16, {}).state_dict())
    assert proxies is not None and proxies.shape == (30 * each, 16)
    np.testing.assert_allclose(np.linalg.norm(proxies, axis=1), 1, rtol=1e-5)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_opens_in_a_browser_without_a_complaint(run: RunFolder, scheme: str) -> None:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("no Chromium or Chrome on the PATH: install one, for example with `apt install chromium`")
    address = (run.path / "report.html").absolute().as_uri()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(color_scheme="dark" if scheme == "dark" else "light")
        said: list[str] = []
        asked: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
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
    assert said == []
    assert [url for url in asked if url != address and not url.startswith("data:")] == []
