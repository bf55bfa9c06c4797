"""Re-indexing: every usable photo is found, nothing is embedded twice, and no bad bundle is activated."""

import csv
import errno
import io
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from index.embedding.bundle import Bundle
from index.embedding.embedder import Embedder
from index.embedding.gpu_sessions import Pixels
from index.embedding.images import decode, load_pixels
from index.errors import LookalikeError
from index.gallery import Gallery, open_gallery
from index.gallery.errors import BundleMismatch, StorageFull
from index.gallery.store.sqlite_jobs import SQLiteJobs
from index.gallery.vectors.faiss import builder
from index.gallery.vectors.faiss.builder import BuildResult
from index.gallery.vectors.faiss.searcher import SCAN, Vectors
from index.ingest.options import ReindexOptions
from index.ingest.pipeline import Cancelled, PipelineSettings, ReindexError, run_reindex
from index.jobs import JobRecord
from tests.support.disk import files_up_to
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
    stored = gallery.get_item("ball-red")
    gallery.close()
    assert stored is not None
    assert stored.item.attributes == {"category": "ball", "colour": "red", "brand": "Huge", "price": 4.5}


def test_photos_of_expired_items_are_not_embedded_until_the_items_come_back(tmp_path: Path, bundle: Path) -> None:
    folder = write_tiny_folder(tmp_path / "photos", views=1)
    photos = sorted(folder.rglob("*.jpg"))
    address, table = tmp_path / "gallery", folder / "t.csv"

    def run(*expiries: str) -> tuple[JobRecord, list[str]]:
        lines = [f"{n},{photos[n].relative_to(folder)},{expiry}\n" for n, expiry in enumerate(expiries)]
        table.write_text("item_id,image,expires_at\n" + "".join(lines))
        record = index_source(table, gallery=address, bundle=bundle)
        with open_gallery(address) as gallery:
            return record, [item.id for item in gallery.scan().items]

    record, found = run("", "2020-01-01", "2100-01-01")
    assert (record.state, record.embedded, record.unchanged, found) == ("done", 2, 1, ["0", "2"])
    record, found = run("", "", "2020-01-01")
    assert (record.embedded, record.unchanged, found) == (1, 2, ["0", "1"])
    record, found = run("", "", "")
    assert (record.embedded, record.unchanged, found) == (0, 3, ["0", "1", "2"])


def test_the_first_row_of_an_item_describes_it_in_every_run(tmp_path: Path, bundle: Path) -> None:
    source, gallery = write_tiny_source(tmp_path / "source"), tmp_path / "gallery"
    header, *rows = source.read_text().splitlines()
    # The rows of an item differ, and lie in different transactions of the job.
    rows = [*rows[::2], *(f"filler-{n},red-0.jpg,,,,,{n}" for n in range(150)), *rows[1::2]]
    rows = [row.replace("Tiny", "Late") if "-1.jpg" in row else row for row in rows]
    source.write_text("\n".join([header, *rows]) + "\n")
    before = index_source(source, gallery=gallery, bundle=bundle)
    after = index_source(source, gallery=gallery, bundle=bundle)
    assert (after.embedded, after.unchanged, after.revision) == (0, 166, before.revision), "nothing was written"
    opened = open_gallery(gallery)
    stored = opened.get_item("ball-cyan")
    opened.close()
    assert stored and stored.item.attributes["brand"] == "Tiny"


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
    assert not (tmp_path / "rejects.csv").exists(), "the file holds the rejects of the last run only"


def test_a_photo_without_a_finite_vector_is_rejected(
    tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_tiny_source(tmp_path / "source")
    embed = Embedder.embed
    values = {"red-0.jpg": np.nan, "red-1.jpg": np.inf, "blue-0.jpg": 1e5}
    replaced = {
        load_pixels((source.parent / name).read_bytes(), Bundle.load(bundle).preprocessing).tobytes(): value
        for name, value in values.items()
    }

    def embed_with_overflow(self: Embedder, pixels: Pixels) -> NDArray[np.float32]:
        vectors = embed(self, pixels)
        for row, image in enumerate(pixels):
            vectors[row, 3] = replaced.get(image.tobytes(), vectors[row, 3])
        return vectors

    monkeypatch.setattr(Embedder, "embed", embed_with_overflow)
    summary = index_source(source, gallery=tmp_path / "gallery", bundle=bundle)
    assert (summary.state, summary.embedded, summary.rejected) == ("partial", 13, 3)
    with (tmp_path / "rejects.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["item_id"], row["image_id"], row["reason"]) for row in rows} == {
        (f"ball-{name[:-6]}", name, "unreadable") for name in values
    }
    assert all("no finite vector" in row["problem"] for row in rows)


def test_rejects_are_written_to_a_pipe_or_a_link_without_replacing_it(tmp_path: Path, bundle: Path) -> None:
    source = write_tiny_source(tmp_path / "source")
    (source.parent / "red-0.jpg").write_bytes(b"no photo")
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to("/dev/null")
    reading = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    for path in (pipe, link):
        run([source], tmp_path / "gallery", bundle, rejects=path)
    text = os.read(reading, 65536).decode()
    os.close(reading)
    assert [row["item_id"] for row in csv.DictReader(text.splitlines())] == ["ball-red"]
    assert pipe.is_fifo() and link.is_char_device()


def test_rows_that_name_forbidden_places_are_rejects(tmp_path: Path, bundle: Path) -> None:
    source = write_tiny_source(tmp_path / "source")
    (tmp_path / "secret.jpg").write_bytes(tiny_photo(0, 7))
    (source.parent / "link.jpg").symlink_to(tmp_path / "secret.jpg")
    places = ["../secret.jpg", f"file://{tmp_path}/secret.jpg", "link.jpg", "http://127.0.0.1:9/a.jpg", "htp://x/a.jpg"]
    with source.open("a") as file:
        file.writelines(f"bad,{place},,,,,\n" for place in places)
    summary = index_source(source, gallery=tmp_path / "gallery", bundle=bundle)
    assert (summary.state, summary.embedded, summary.rejected) == ("partial", 16, len(places))
    with (tmp_path / "rejects.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["item_id"], row["reason"]) for row in rows} == {("bad", "forbidden")}
    assert [row["image_id"] for row in rows] == places
    more = index_source(source, gallery=tmp_path / "gallery", bundle=bundle, allow_folder=[str(tmp_path)])
    assert (more.embedded, more.unchanged, more.rejected) == (3, 16, 2)


def test_links_out_of_a_folder_of_photos_are_rejects(tmp_path: Path, bundle: Path) -> None:
    folder, other = write_tiny_folder(tmp_path / "shop", views=1), write_tiny_folder(tmp_path / "other", views=2)
    (folder / "red" / "1.jpg").symlink_to(other / "red" / "1.jpg")
    (folder / "stolen").symlink_to(other / "blue")
    (folder / "again").symlink_to(folder / "blue")
    summary = index_source(folder, gallery=tmp_path / "gallery", bundle=bundle)
    assert (summary.embedded, summary.rejected) == (9, 2)
    with (tmp_path / "rejects.csv").open() as file:
        rows = [(row["item_id"], row["image_id"], row["reason"]) for row in csv.DictReader(file)]
    assert rows == [("red", "1.jpg", "forbidden"), ("stolen", "stolen", "forbidden")]
    more = index_source(folder, gallery=tmp_path / "gallery", bundle=bundle, allow_folder=[str(other)])
    assert (more.embedded, more.rejected) == (3, 0)


def test_photos_in_a_folder_that_are_not_read_are_rejects_and_other_files_are_left_out(
    tmp_path: Path, bundle: Path
) -> None:
    folder = write_tiny_folder(tmp_path / "shop", views=1)
    (folder / "red" / "new.JXL").write_bytes(b"\xff\x0a" + bytes(60))
    Image.new("RGB", (32, 32), "red").save(folder / "red" / "scan.TIFF")
    (folder / "red" / "notes.txt").write_text("no photo")
    summary = index_source(folder, gallery=tmp_path / "gallery", bundle=bundle)
    assert (summary.embedded, summary.rejected) == (9, 1)
    with (tmp_path / "rejects.csv").open() as file:
        (reject,) = csv.DictReader(file)
    assert (reject["item_id"], reject["image_id"], reject["reason"]) == ("red", "new.JXL", "unsupported")
    assert "JPEG XL" in reject["problem"]


def test_labelled_queries_follow_the_same_rules(tmp_path: Path, bundle: Path) -> None:
    source = write_tiny_source(tmp_path / "source")
    (tmp_path / "queries").mkdir()
    queries = tmp_path / "queries" / "queries.csv"
    queries.write_text("item_id,image\nball-red,../source/red-0.jpg\n")
    options: dict[str, Any] = {"queries": str(queries), "expect_recall": 0.5}
    with pytest.raises(ReindexError, match=r"labelled query .*/red-0\.jpg cannot be used: .* is outside "):
        run([source], tmp_path / "gallery", bundle, **options)
    assert run([source], tmp_path / "gallery", bundle, allow_folder=[str(source.parent)], **options).state == "done"


def test_a_source_without_a_usable_photo_fails(tmp_path: Path, bundle: Path) -> None:
    (tmp_path / "source.csv").write_text("item_id,image\n1,missing.jpg\n")
    with pytest.raises(LookalikeError, match="None of the 1 images"):
        index_source(tmp_path / "source.csv", gallery=tmp_path / "gallery", bundle=bundle)


def contents(gallery: Path) -> set[tuple[str, str]]:
    opened = open_gallery(gallery)
    found = set(opened.image_ids())
    opened.close()
    return found


def active_bundle(gallery: Path) -> str | None:
    opened = open_gallery(gallery)
    found = opened.active_bundle()
    opened.close()
    return found


def last_job(gallery: Path) -> JobRecord:
    with closing(SQLiteJobs(gallery)) as history:
        return history.newest(1)[0]


CALLBACKS = ("on_start", "on_progress", "settings")


def run(sources: list[Path], gallery: Path, bundle: Path, **values: Any) -> JobRecord:
    """Runs a job with options and callbacks."""
    callbacks = {name: values.pop(name) for name in CALLBACKS if name in values}
    values.setdefault("rejects", gallery.with_name("rejects.csv"))
    options = ReindexOptions(source=list(map(str, sources)), gallery=str(gallery), bundle=bundle, **values)
    return run_reindex(options, **callbacks)


def remove_rows(table: Path, *words: str) -> None:
    """Removes the rows that contain one of the words."""
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
        stored = opened.get_item(name)
        assert stored
        thumbnail = opened.thumbnail(stored.images[0].digest)
        assert thumbnail
        kept[name] = Image.open(io.BytesIO(thumbnail)).size
    opened.close()
    assert kept["small"] == (96, 64), "never enlarged"
    assert all(213 <= max(kept[name]) <= 480 for name in ("odd", "large", "sliver")), kept
    assert kept["large"][0] / kept["large"][1] == pytest.approx(1300 / 900, rel=0.02)


def test_two_photos_with_the_same_id_do_not_replace_each_other_in_every_run(tmp_path: Path, bundle: Path) -> None:
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


def test_a_repeated_row_counts_as_unchanged(tmp_path: Path, bundle: Path) -> None:
    source = write_tiny_source(tmp_path / "source")
    source.write_text(source.read_text() + source.read_text().splitlines()[-1] + "\n")
    summary = index_source(source, gallery=tmp_path / "gallery", bundle=bundle)
    assert (summary.embedded, summary.unchanged, summary.done, summary.total, summary.state) == (16, 1, 17, 17, "done")


def test_an_unchanged_source_loads_no_model_and_changes_nothing(
    tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_tiny_source(tmp_path / "source")
    before = index_source(source, gallery=tmp_path / "gallery", bundle=bundle)
    monkeypatch.delattr(Embedder, "__init__")
    after = index_source(source, gallery=tmp_path / "gallery", bundle=bundle)
    assert (after.embedded, after.unchanged, after.revision) == (0, 16, before.revision)


def test_a_source_of_several_chunks_is_indexed_completely(tmp_path: Path, bundle: Path) -> None:
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
        index_source(source, gallery=tmp_path / "gallery", bundle=bundle, max_rejects=0.1)
    assert last_job(tmp_path / "gallery").state == "failed"
    assert index_source(source, gallery=tmp_path / "gallery", bundle=bundle, max_rejects=0.2).state == "partial"


def test_a_full_disk_is_named_and_recorded(tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, gallery = write_tiny_source(tmp_path / "source"), tmp_path / "gallery"
    (source.parent / "red-0.jpg").write_bytes(b"no photo")
    with pytest.raises(LookalikeError, match=r"/dev/full: No space left on device\. Free space"):
        run([source], gallery, bundle, rejects=Path("/dev/full"))
    assert "No space left" in last_job(gallery).message

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("keep_bundle", "activate"):
        with monkeypatch.context() as patch, pytest.raises(StorageFull, match=r"No space .*\. Free space on its disk"):
            patch.setattr(Gallery, name, fail)
            run([source], gallery, bundle)
        assert (last_job(gallery).state, last_job(gallery).message[:17]) == ("failed", "No space to write")
    assert run([source], gallery, bundle).state == "partial"
    with files_up_to(300_000), pytest.raises(StorageFull, match=r"written to catalogue\.sqlite: .*\. Free space"):
        run([source], tmp_path / "new", bundle, settings=PipelineSettings(chunk_size=1))
    assert (last_job(tmp_path / "new").state, last_job(tmp_path / "new").message[:11]) == ("failed", "Nothing was")


def test_an_unwritable_rejects_file_fails_before_any_work(tmp_path: Path, bundle: Path) -> None:
    source = write_tiny_source(tmp_path / "source")
    with pytest.raises(LookalikeError, match=r"no/rejects.csv: No such file.*--rejects"):
        run([source], tmp_path / "gallery", bundle, rejects=tmp_path / "no" / "rejects.csv")
    assert contents(tmp_path / "gallery") == set()


def test_a_bad_table_of_queries_fails_before_any_work(tmp_path: Path, bundle: Path) -> None:
    source = write_tiny_source(tmp_path / "source")
    (tmp_path / "queries.csv").write_text("sku,image\n1,a.jpg\n")
    with pytest.raises(LookalikeError, match=r"queries.csv has no column 'item_id'; it has sku, image"):
        run([source], tmp_path / "gallery", bundle, queries=str(tmp_path / "queries.csv"), expect_recall=0.5)
    assert contents(tmp_path / "gallery") == set()


def test_a_cancelled_job_keeps_its_vectors_and_activates_nothing(tmp_path: Path, bundle: Path) -> None:
    source = write_tiny_source(tmp_path / "source")
    index_source(source, gallery=tmp_path / "gallery", bundle=bundle)
    other = make_tiny_bundle(tmp_path / "other", grid=8)

    def stop_while_building(record: JobRecord) -> None:
        if record.stage == "building" and record.state == "running":
            with closing(SQLiteJobs(tmp_path / "gallery")) as history:
                history.cancel(record.id)

    with pytest.raises(Cancelled, match="Run the same command again"):
        run([source], tmp_path / "gallery", other, on_progress=stop_while_building)
    assert last_job(tmp_path / "gallery").state == "cancelled"
    assert active_bundle(tmp_path / "gallery") == Bundle.load(bundle).id
    resumed = run([source], tmp_path / "gallery", other)
    assert (resumed.embedded, resumed.unchanged, resumed.state) == (0, 16, "done")
    assert active_bundle(tmp_path / "gallery") == Bundle.load(other).id


# Another bundle


def write_queries(path: Path, *, wrong: int = 0) -> str:
    """Writes a table of one new photo of each product, the first `wrong` with the label of another, and returns it."""
    path.mkdir()
    lines = ["item_id,image"]
    for number, colour in enumerate(COLOURS):
        (path / f"{colour}.jpg").write_bytes(tiny_photo(number, 3))
        lines.append(f"ball-{COLOURS[(number + (number < wrong)) % 8]},{colour}.jpg")
    (path / "queries.csv").write_text("\n".join(lines) + "\n")
    return str(path / "queries.csv")


def test_a_new_bundle_is_activated_and_can_be_rolled_back(tmp_path: Path, bundle: Path) -> None:
    source, gallery = write_tiny_source(tmp_path / "source"), tmp_path / "gallery"
    index_source(source, gallery=gallery, bundle=bundle)
    other = make_tiny_bundle(tmp_path / "other", grid=8)
    summary = run([source], gallery, other, queries=write_queries(tmp_path / "queries"), expect_recall=1.0)
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


def test_a_bundle_below_the_expected_recall_is_not_activated(tmp_path: Path, bundle: Path) -> None:
    source, gallery = write_tiny_source(tmp_path / "source"), tmp_path / "gallery"
    index_source(source, gallery=gallery, bundle=bundle)
    other = make_tiny_bundle(tmp_path / "other", grid=8)
    queries = write_queries(tmp_path / "queries", wrong=2)
    with pytest.raises(ReindexError, match=r"0\.7500, below 0\.9000; the bundle was not activated.*--expect-recall"):
        run([source], gallery, other, queries=queries, expect_recall=0.9)
    assert active_bundle(gallery) == Bundle.load(bundle).id and first(gallery, bundle, tiny_photo(2, 3)) == "ball-blue"
    assert run([source], gallery, other, queries=queries, expect_recall=0.75).embedded == 0
    assert active_bundle(gallery) == Bundle.load(other).id


def test_a_bad_query_photo_is_named(tmp_path: Path, bundle: Path) -> None:
    source = write_tiny_source(tmp_path / "source")
    queries = write_queries(tmp_path / "queries")
    (tmp_path / "queries" / "cyan.jpg").write_bytes(b"no photo")
    with pytest.raises(ReindexError, match=r"query .*/queries/cyan.jpg cannot be used"):
        run([source], tmp_path / "gallery", bundle, queries=queries, expect_recall=0.9)


def test_a_bundle_that_many_images_lack_is_not_activated(tmp_path: Path, bundle: Path) -> None:
    source, gallery = write_tiny_source(tmp_path / "source"), tmp_path / "gallery"
    index_source(source, gallery=gallery, bundle=bundle)
    other = make_tiny_bundle(tmp_path / "other", grid=8)
    complete = source.read_text()
    remove_rows(source, "red", "green")
    with pytest.raises(ReindexError, match=r"4 of the gallery's 16 images have no vector .* disappear.*--max-delete"):
        index_source(source, gallery=gallery, bundle=other)
    assert active_bundle(gallery) == Bundle.load(bundle).id
    source.write_text(complete)
    remove_rows(source, "red")
    summary = index_source(source, gallery=gallery, bundle=other)
    assert (summary.state, summary.missing) == ("partial", 2) and active_bundle(gallery) == Bundle.load(other).id
    assert summary.message == f"2 images have no vector of bundle {Bundle.load(other).id} and are no longer found."


def test_a_bundle_whose_index_misses_the_recall_target_is_not_activated_unless_allowed(
    tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, gallery = write_tiny_source(tmp_path / "source"), tmp_path / "gallery"
    index_source(source, gallery=gallery, bundle=bundle)
    other = make_tiny_bundle(tmp_path / "other", grid=8)
    build = builder.build

    def build_scanning(vectors: Vectors, **options: Any) -> BuildResult:
        graph = build(vectors, kind="hnsw", **options)
        return graph._replace(plan=graph.plan.model_copy(update={"effort": SCAN, "filtered_effort": SCAN}))

    monkeypatch.setattr(builder, "build", build_scanning)
    with pytest.raises(ReindexError, match=r"does not reach a recall@10 of 0\.9800.*--allow-slow-index"):
        index_source(source, gallery=gallery, bundle=other)
    assert active_bundle(gallery) == Bundle.load(bundle).id
    index_source(source, gallery=gallery, bundle=other, allow_slow_index=True)
    assert active_bundle(gallery) == Bundle.load(other).id
