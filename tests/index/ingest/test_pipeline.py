"""Re-indexing: everything usable is found afterwards, nothing is embedded twice, and no bad result goes live."""

import csv
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from index.embedding.bundle import Bundle
from index.embedding.embedder import Embedder, Pixels
from index.embedding.images import decode, load_pixels
from index.errors import LookalikeError
from index.gallery import BundleMismatch, open_gallery
from index.gallery.jobs import JobRecord, opened_jobs
from index.gallery.vectors.faiss import builder
from index.gallery.vectors.faiss.builder import BuildResult
from index.gallery.vectors.faiss.searcher import SCAN, Vectors
from index.ingest.pipeline import Cancelled, ReindexError, Rules, run_reindex
from index.ingest.sources import Source
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import COLOURS, index_source, tiny_photo, write_tiny_folder, write_tiny_source


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return make_tiny_bundle(tmp_path / "bundle")


def first(gallery: Path, bundle: Path, photo: bytes) -> str:
    embedder = Embedder(Bundle.load(bundle), threads=1)
    opened = open_gallery(gallery)
    pixels = embedder.bundle.preprocessing.apply(decode(photo))
    found = opened.search(embedder.embed(pixels[None]), bundle_id=embedder.bundle.id, top=1)
    opened.close()
    return found.hits[0][0].item.id


def test_a_new_photo_of_every_product_finds_it(tmp_path: Path, bundle: Path) -> None:
    source = write_tiny_source(tmp_path / "source")
    summary = index_source(source, gallery=tmp_path / "gallery", bundle=bundle)
    assert (summary.embedded, summary.unchanged, summary.rejected) == (16, 0, 0)
    for number, colour in enumerate(COLOURS):
        assert first(tmp_path / "gallery", bundle, tiny_photo(number, 3)) == f"ball-{colour}"


def test_a_second_run_embeds_only_what_changed(tmp_path: Path, bundle: Path) -> None:
    source = write_tiny_source(tmp_path / "source")
    index_source(source, gallery=tmp_path / "gallery", bundle=bundle)
    (source.parent / "red-1.jpg").write_bytes(tiny_photo(0, 5))
    summary = index_source(source, gallery=tmp_path / "gallery", bundle=bundle)
    assert (summary.embedded, summary.unchanged) == (1, 15)


def test_changed_attributes_are_stored_without_embedding(tmp_path: Path, bundle: Path) -> None:
    source = write_tiny_source(tmp_path / "source")
    index_source(source, gallery=tmp_path / "gallery", bundle=bundle)
    source.write_text(source.read_text().replace("Tiny", "Huge"))
    assert index_source(source, gallery=tmp_path / "gallery", bundle=bundle).embedded == 0
    gallery = open_gallery(tmp_path / "gallery")
    item = gallery.get("ball-red")
    gallery.close()
    assert item is not None
    assert item.attributes == {"category": "ball", "colour": "red", "brand": "Huge", "price": 4.5}


def test_the_first_row_of_an_item_describes_it_in_every_run(tmp_path: Path, bundle: Path) -> None:
    source, gallery = write_tiny_source(tmp_path / "source"), tmp_path / "gallery"
    header, *rows = source.read_text().splitlines()
    # The rows of an item differ, and lie in different transactions of the job.
    rows = [*rows[::2], *(f"filler-{n},red-0.jpg,,,,,{n}" for n in range(150)), *rows[1::2]]
    rows = [row.replace("Tiny", "Late") if "-1.jpg" in row else row for row in rows]
    source.write_text("\n".join([header, *rows]) + "\n")
    before = index_source(source, gallery=gallery, bundle=bundle)
    after = index_source(source, gallery=gallery, bundle=bundle)
    assert (after.embedded, after.unchanged, after.generation) == (0, 166, before.generation), "nothing was written"
    opened = open_gallery(gallery)
    item = opened.get("ball-cyan")
    opened.close()
    assert item and item.attributes["brand"] == "Tiny"


def test_bad_photos_are_listed_and_do_not_stop_the_job(tmp_path: Path, bundle: Path) -> None:
    source = write_tiny_source(tmp_path / "source")
    (source.parent / "red-0.jpg").write_bytes(b"no photo")
    (source.parent / "blue-1.jpg").unlink()
    summary = index_source(source, gallery=tmp_path / "gallery", bundle=bundle)
    assert (summary.embedded, summary.rejected) == (14, 2)
    with (tmp_path / "rejects.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["item_id"]: "No such file" in row["problem"] for row in rows} == {"ball-red": False, "ball-blue": True}
    write_tiny_source(tmp_path / "source")
    index_source(source, gallery=tmp_path / "gallery", bundle=bundle)
    assert not (tmp_path / "rejects.csv").exists(), "the file tells of the last run only"


def test_a_photo_without_a_finite_vector_is_a_reject(
    tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_tiny_source(tmp_path / "source")
    embed = Embedder.embed
    values = {"red-0.jpg": np.nan, "red-1.jpg": np.inf, "blue-0.jpg": 1e5}
    looks = {
        load_pixels((source.parent / name).read_bytes(), Bundle.load(bundle).preprocessing).tobytes(): value
        for name, value in values.items()
    }

    def overflowing(self: Embedder, pixels: Pixels) -> NDArray[np.float32]:
        vectors = embed(self, pixels)
        for row, one in enumerate(pixels):
            vectors[row, 3] = looks.get(one.tobytes(), vectors[row, 3])
        return vectors

    monkeypatch.setattr(Embedder, "embed", overflowing)
    summary = index_source(source, gallery=tmp_path / "gallery", bundle=bundle)
    assert (summary.state, summary.embedded, summary.rejected) == ("partial", 13, 3)
    with (tmp_path / "rejects.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["item_id"], row["image_id"], row["reason"]) for row in rows} == {
        (f"ball-{name[:-6]}", name, "unreadable") for name in values
    }
    assert all("no finite vector" in row["problem"] for row in rows)


def test_rejects_go_to_a_pipe_or_a_link_that_stays(tmp_path: Path, bundle: Path) -> None:
    source = write_tiny_source(tmp_path / "source")
    (source.parent / "red-0.jpg").write_bytes(b"no photo")
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to("/dev/null")
    reading = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    for path in (pipe, link):
        run_reindex(Source([source]), gallery=tmp_path / "gallery", bundle=Bundle.load(bundle), rejects_file=path)
    told = os.read(reading, 65536).decode()
    os.close(reading)
    assert [row["item_id"] for row in csv.DictReader(told.splitlines())] == ["ball-red"]
    assert pipe.is_fifo() and link.is_char_device()


def test_a_source_without_a_usable_photo_fails(tmp_path: Path, bundle: Path) -> None:
    (tmp_path / "source.csv").write_text("item_id,image\n1,missing.jpg\n")
    with pytest.raises(LookalikeError, match="None of the 1 images"):
        index_source(tmp_path / "source.csv", gallery=tmp_path / "gallery", bundle=bundle)


def test_a_folder_of_folders_is_a_source(tmp_path: Path, bundle: Path) -> None:
    images = list(Source([write_tiny_folder(tmp_path / "photos", views=2)]))
    assert len(images) == 16 and images[0].item.id == "blue" and images[0].image_id == "0.jpg"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sku,photo\n1,a.jpg\n", "no column 'item_id' and no 'image'; it has sku, photo"),
        ("item_id,image\n", "names no images"),
        ("item_id,image\n1,\n", "line 2"),
        ("item_id,image\n1,a.jpg,surplus\n", "line 2"),
    ],
)
def test_a_wrong_table_is_refused_before_any_work(tmp_path: Path, text: str, message: str) -> None:
    table = tmp_path / "table.csv"
    table.write_text(text)
    with pytest.raises(LookalikeError, match=message):
        Source([table]).check()


def contents(gallery: Path) -> set[tuple[str, str]]:
    opened = open_gallery(gallery)
    found = set(opened.image_ids())
    opened.close()
    return found


def live(gallery: Path) -> str | None:
    opened = open_gallery(gallery)
    found = opened.live_bundle()
    opened.close()
    return found


def last_job(gallery: Path) -> JobRecord:
    with opened_jobs(gallery) as log:
        return log.newest(1)[0]


def run(sources: list[Path], gallery: Path, bundle: Path, **options: Any) -> JobRecord:
    rejects = gallery.with_name("rejects.csv")
    return run_reindex(Source(sources), gallery=gallery, bundle=Bundle.load(bundle), rejects_file=rejects, **options)


def without(table: Path, *words: str) -> None:
    """Takes the rows with a word out of a table."""
    lines = table.read_text().splitlines(keepends=True)
    table.write_text("".join(line for line in lines if not any(word in line for word in words)))


# Photos


def test_a_thumbnail_of_about_320_pixels_is_kept(tmp_path: Path, bundle: Path) -> None:
    table = tmp_path / "table.csv"
    sizes = {"small": (96, 64), "odd": (470, 330), "large": (1300, 900), "sliver": (1, 4000)}
    rows = [["item_id", "image"]]
    for name, size in sizes.items():
        Image.new("RGB", size, "red").save(tmp_path / f"{name}.png")
        rows.append([name, f"{name}.png"])
    with table.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    summary = index_source(table, gallery=tmp_path / "gallery", bundle=bundle)
    assert summary.embedded == 4
    opened = open_gallery(tmp_path / "gallery")
    kept = {}
    for name in sizes:
        stored = opened.stored(name)
        assert stored
        thumbnail = opened.thumbnail(stored.images[0].digest)
        assert thumbnail
        kept[name] = Image.open(io.BytesIO(thumbnail)).size
    opened.close()
    assert kept["small"] == (96, 64), "never enlarged"
    assert all(213 <= max(kept[name]) <= 480 for name in ("odd", "large", "sliver")), kept
    assert kept["large"][0] / kept["large"][1] == pytest.approx(1300 / 900, rel=0.02)


def test_two_photos_of_one_name_do_not_replace_each_other_in_every_run(tmp_path: Path, bundle: Path) -> None:
    folders = [write_tiny_folder(tmp_path / name, views=1) for name in ("old", "new")]
    (tmp_path / "new" / "red" / "0.jpg").write_bytes(tiny_photo(0, 3))
    first_run = run(folders, tmp_path / "gallery", bundle)
    assert (first_run.embedded, first_run.rejected, first_run.done) == (8, 8, 16)
    with (tmp_path / "rejects.csv").open() as file:
        row = next(row for row in csv.DictReader(file) if row["item_id"] == "red")
    assert (row["reason"], row["place"]) == ("duplicate", str(tmp_path / "new" / "red" / "0.jpg"))
    assert str(tmp_path / "old" / "red" / "0.jpg") in row["problem"]
    second_run = run(folders, tmp_path / "gallery", bundle)
    assert (second_run.embedded, second_run.unchanged) == (0, 8)


def test_a_row_that_is_there_twice_does_no_harm(tmp_path: Path, bundle: Path) -> None:
    source = write_tiny_source(tmp_path / "source")
    source.write_text(source.read_text() + source.read_text().splitlines()[-1] + "\n")
    summary = index_source(source, gallery=tmp_path / "gallery", bundle=bundle)
    assert (summary.embedded, summary.unchanged, summary.done, summary.total, summary.state) == (16, 1, 17, 17, "done")


def test_an_unchanged_source_loads_no_model_and_changes_nothing(tmp_path: Path, bundle: Path) -> None:
    source = write_tiny_source(tmp_path / "source")
    before = index_source(source, gallery=tmp_path / "gallery", bundle=bundle)
    loaded = Bundle.load(bundle)
    loaded.model_path.unlink()
    after = run_reindex(
        Source([source]), gallery=tmp_path / "gallery", bundle=loaded, rejects_file=tmp_path / "rejects.csv"
    )
    assert (after.embedded, after.unchanged, after.generation) == (0, 16, before.generation)


def test_a_source_larger_than_a_few_chunks_is_indexed_whole(tmp_path: Path, bundle: Path) -> None:
    write_tiny_source(tmp_path)
    with (tmp_path / "many.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["item_id", "image", "image_id"])
        writer.writerows([f"item-{n // 3}", f"{COLOURS[n % 8]}-{n % 2}.jpg", n] for n in range(1000))
    summary = index_source(tmp_path / "many.csv", gallery=tmp_path / "gallery", bundle=bundle)
    assert (summary.embedded, summary.done, summary.total, summary.state) == (1000, 1000, 1000, "done")
    assert contents(tmp_path / "gallery") == {(f"item-{n // 3}", str(n)) for n in range(1000)}


# Failing


def test_too_many_rejects_fail_the_job(tmp_path: Path, bundle: Path) -> None:
    source = write_tiny_source(tmp_path / "source")
    for name in ("red-0.jpg", "blue-0.jpg"):
        (source.parent / name).write_bytes(b"")
    with pytest.raises(ReindexError, match=r"2 of 16 images were rejected, more than 10%.*--max-rejects"):
        index_source(source, gallery=tmp_path / "gallery", bundle=bundle, rules=Rules(most_rejected=0.1))
    assert last_job(tmp_path / "gallery").state == "failed"
    rules = Rules(most_rejected=0.2)
    assert index_source(source, gallery=tmp_path / "gallery", bundle=bundle, rules=rules).state == "partial"


def test_a_place_for_rejects_that_cannot_be_written_is_told_before_any_work(tmp_path: Path, bundle: Path) -> None:
    source = Source([write_tiny_source(tmp_path / "source")])
    nowhere = tmp_path / "no" / "rejects.csv"
    with pytest.raises(ReindexError, match=r"no/rejects.csv: No such file.*--rejects"):
        run_reindex(source, gallery=tmp_path / "gallery", bundle=Bundle.load(bundle), rejects_file=nowhere)
    assert contents(tmp_path / "gallery") == set()


def test_a_wrong_table_of_queries_is_told_before_any_work(tmp_path: Path, bundle: Path) -> None:
    source = write_tiny_source(tmp_path / "source")
    (tmp_path / "queries.csv").write_text("sku,image\n1,a.jpg\n")
    rules = Rules(queries=Source([tmp_path / "queries.csv"]), expected_recall=0.5)
    with pytest.raises(LookalikeError, match=r"queries.csv has no column 'item_id'; it has sku, image"):
        index_source(source, gallery=tmp_path / "gallery", bundle=bundle, rules=rules)
    assert contents(tmp_path / "gallery") == set()


def test_a_job_that_is_stopped_keeps_what_it_embedded_and_does_not_go_live(tmp_path: Path, bundle: Path) -> None:
    source = write_tiny_source(tmp_path / "source")
    index_source(source, gallery=tmp_path / "gallery", bundle=bundle)
    other = make_tiny_bundle(tmp_path / "other", grid=8)

    def stop_while_building(record: JobRecord) -> None:
        if record.stage == "building" and record.state == "running":
            with opened_jobs(tmp_path / "gallery") as log:
                log.cancel(record.id)

    with pytest.raises(Cancelled, match="Run the same command again"):
        run([source], tmp_path / "gallery", other, on_progress=stop_while_building)
    assert last_job(tmp_path / "gallery").state == "cancelled"
    assert live(tmp_path / "gallery") == Bundle.load(bundle).id
    resumed = run([source], tmp_path / "gallery", other)
    assert (resumed.embedded, resumed.unchanged, resumed.state) == (0, 16, "done")
    assert live(tmp_path / "gallery") == Bundle.load(other).id


# Another bundle


def queries_of(path: Path, *, wrong: int = 0) -> Source:
    """A new photo of each product, the first ones with the label of another."""
    path.mkdir()
    lines = ["item_id,image"]
    for number, colour in enumerate(COLOURS):
        (path / f"{colour}.jpg").write_bytes(tiny_photo(number, 3))
        lines.append(f"ball-{COLOURS[(number + (number < wrong)) % 8]},{colour}.jpg")
    (path / "queries.csv").write_text("\n".join(lines) + "\n")
    return Source([path / "queries.csv"])


def test_a_new_bundle_goes_live_whole_and_the_old_one_can_be_returned_to(tmp_path: Path, bundle: Path) -> None:
    source, gallery = write_tiny_source(tmp_path / "source"), tmp_path / "gallery"
    index_source(source, gallery=gallery, bundle=bundle)
    other = make_tiny_bundle(tmp_path / "other", grid=8)
    rules = Rules(queries=queries_of(tmp_path / "queries"), expected_recall=1.0)
    summary = index_source(source, gallery=gallery, bundle=other, rules=rules)
    assert (summary.embedded, summary.message) == (16, "Recall@1 of the labelled queries is 1.0000.")
    assert first(gallery, other, tiny_photo(2, 3)) == "ball-blue"
    with pytest.raises(BundleMismatch):
        first(gallery, bundle, tiny_photo(2, 3))
    opened = open_gallery(gallery)
    assert opened.rollback() == Bundle.load(bundle).id
    opened.close()
    assert first(gallery, bundle, tiny_photo(2, 3)) == "ball-blue"
    opened = open_gallery(gallery)
    opened.drop_bundle(Bundle.load(other).id)
    opened.close()
    assert index_source(source, gallery=gallery, bundle=bundle).unchanged == 16


def test_a_bundle_that_finds_too_little_does_not_go_live(tmp_path: Path, bundle: Path) -> None:
    source, gallery = write_tiny_source(tmp_path / "source"), tmp_path / "gallery"
    index_source(source, gallery=gallery, bundle=bundle)
    other = make_tiny_bundle(tmp_path / "other", grid=8)
    rules = Rules(queries=queries_of(tmp_path / "queries", wrong=2), expected_recall=0.9)
    with pytest.raises(ReindexError, match=r"0\.7500, below 0\.9000; the bundle did not go live"):
        index_source(source, gallery=gallery, bundle=other, rules=rules)
    assert live(gallery) == Bundle.load(bundle).id and first(gallery, bundle, tiny_photo(2, 3)) == "ball-blue"
    assert index_source(source, gallery=gallery, bundle=other, rules=rules._replace(expected_recall=0.75)).embedded == 0
    assert live(gallery) == Bundle.load(other).id


def test_a_bad_query_photo_is_named(tmp_path: Path, bundle: Path) -> None:
    source = write_tiny_source(tmp_path / "source")
    rules = Rules(queries=queries_of(tmp_path / "queries"), expected_recall=0.9)
    (tmp_path / "queries" / "cyan.jpg").write_bytes(b"no photo")
    with pytest.raises(ReindexError, match=r"query .*/queries/cyan.jpg cannot be used"):
        index_source(source, gallery=tmp_path / "gallery", bundle=bundle, rules=rules)


def test_a_bundle_that_most_images_lack_does_not_go_live(tmp_path: Path, bundle: Path) -> None:
    source, gallery = write_tiny_source(tmp_path / "source"), tmp_path / "gallery"
    index_source(source, gallery=gallery, bundle=bundle)
    other = make_tiny_bundle(tmp_path / "other", grid=8)
    whole = source.read_text()
    without(source, "red", "green")
    with pytest.raises(ReindexError, match=r"4 of the gallery's 16 images have no vector .* vanish"):
        index_source(source, gallery=gallery, bundle=other)
    assert live(gallery) == Bundle.load(bundle).id
    source.write_text(whole)
    without(source, "red")
    summary = index_source(source, gallery=gallery, bundle=other)
    assert "2 of the gallery's 16 images have no vector" in summary.message and live(gallery) == Bundle.load(other).id


def test_a_generation_whose_index_is_of_no_use_does_not_go_live_unless_forced(
    tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, gallery = write_tiny_source(tmp_path / "source"), tmp_path / "gallery"
    index_source(source, gallery=gallery, bundle=bundle)
    other = make_tiny_bundle(tmp_path / "other", grid=8)
    built = builder.build

    def in_vain(vectors: Vectors, *, target: float, on_progress: builder.Progress) -> BuildResult:
        graph = built(vectors, target=target, kind="hnsw", on_progress=on_progress)
        return graph._replace(plan=graph.plan.model_copy(update={"effort": SCAN, "filtered_effort": SCAN}))

    monkeypatch.setattr(builder, "build", in_vain)
    with pytest.raises(ReindexError, match=r"No effort .* recall@10 of 0\.9800"):
        index_source(source, gallery=gallery, bundle=other)
    assert live(gallery) == Bundle.load(bundle).id
    index_source(source, gallery=gallery, bundle=other, rules=Rules(force=True))
    assert live(gallery) == Bundle.load(other).id
