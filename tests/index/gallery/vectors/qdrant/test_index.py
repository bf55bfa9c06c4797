"""The index on a real cluster: facets, recall, switching, and collections that vanish."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from index.gallery import Gallery, open_gallery
from index.gallery.errors import IndexUnavailable, SearchError
from index.gallery.filters import Filter
from index.gallery.types import Item, NewImage
from index.gallery.vectors.qdrant.collection import Collection, Content, Neighbours
from tests.index.gallery.reference import (
    BUNDLE,
    OTHER_BUNDLE,
    ReferenceGallery,
    index_stats,
    make_entries,
    photo,
    unit,
    wait_until,
)
from tests.support.clustered_vectors import nearest_rows, queries_near, shop_vectors
from tests.support.qdrant import QUICK, Cluster, only_in_test_cluster, open_gallery_on

pytestmark = pytest.mark.slow


@pytest.fixture
def prefix(qdrant_cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"test-{abs(hash(request.node.nodeid)):x}"
    yield name
    qdrant_cluster.drop(name)


@pytest.fixture
def gallery(qdrant_cluster: Cluster, prefix: str, tmp_path: Path) -> Iterator[Gallery]:
    with open_gallery_on(qdrant_cluster.address(prefix), tmp_path / "gallery") as gallery:
        yield gallery


def test_facets_equal_those_of_the_embedded_engine(gallery: Gallery, tmp_path: Path) -> None:
    entries = make_entries(120)
    changed: list[tuple[Item, list[NewImage]]] = [
        (item.model_copy(update={"attributes": {"colour": "mauve", "new": 1}}), []) for item, _ in entries[:9]
    ]
    with open_gallery(tmp_path / "embedded", create=True) as embedded:
        for one in (gallery, embedded):
            one.upsert(entries, BUNDLE)
            one.activate(BUNDLE)
            one.upsert(changed, BUNDLE)
            # The first image of some items, which carried the mark of their facets.
            for item, images in entries[9:60]:
                one.delete_images(item.id, [images[0].id])
            one.delete([item.id for item, _ in entries[100:]])
            one.compact()
            while index_stats(one).pending:
                time.sleep(0.02)
        sale = Filter.parse({"sale": True, "price": {"lt": 30}})
        for options in ({}, {"names": ["price", "colour", "none"]}, {"filter": sale}, {"contains": "RE", "count": 2}):
            assert list(gallery.facets(**options)) == list(embedded.facets(**options)), options


@pytest.mark.parametrize("quantization", ["none", pytest.param("int8", marks=only_in_test_cluster)])
def test_filtered_searches_of_graphs_reach_their_recall(
    qdrant_cluster: Cluster, prefix: str, tmp_path: Path, quantization: str
) -> None:
    vectors, _ = shop_vectors()
    settings = QUICK.model_copy(update={"exact_up_to": 100, "indexing_threshold": 1, "quantization": quantization})
    share = np.random.default_rng(2).permutation(len(vectors)) / len(vectors)
    entries = [
        (Item(id=f"{row}", attributes={"share": float(share[row])}), [photo("one", vector.astype(np.float32))])
        for row, vector in enumerate(vectors)
    ]
    queries = queries_near(np.arange(0, len(vectors), 25))
    with open_gallery_on(qdrant_cluster.address(prefix), tmp_path / "gallery", settings=settings) as gallery:
        gallery.upsert(entries, BUNDLE)
        gallery.activate(BUNDLE)
        stats = index_stats(gallery)
        assert (stats.engine, stats.kind) == ("qdrant", "hnsw") and (stats.recall or 0) >= 0.98
        for part in (0.001, 0.01, 0.1, 0.5, 1.0):
            wanted = Filter.parse({"share": {"lt": part}})
            truth = nearest_rows(queries, vectors, 10, share < part)
            found = gallery.search(queries, bundle_id=BUNDLE, filter=wanted if part < 1 else None).hits
            hits = sum(len({int(hit.item.id) for hit in own} & want) for own, want in zip(found, truth, strict=True))
            assert hits / sum(map(len, truth)) >= (0.99 if part < 1 else 0.98), part


def test_searches_while_others_write_and_apply_are_of_one_revision(
    qdrant_cluster: Cluster, prefix: str, tmp_path: Path
) -> None:
    """Two items swap their vectors again and again: a mixed answer would have one of them twice, or not at all."""
    settings = QUICK.model_copy(update={"apply_delay": 1.5, "max_age": 0.0})
    address, folder = qdrant_cluster.address(prefix), tmp_path / "gallery"
    with (
        open_gallery_on(address, folder, settings=settings) as writer,
        open_gallery_on(address, folder, settings=settings) as reader,
    ):
        writer.upsert([(item, images) for item, images in make_entries(60)], BUNDLE)
        corner = unit(1, 0, 0, 0, 0, 0, 0, 0)
        other = unit(0.9, 0.1, 0, 0, 0, 0, 0, 0)
        pair = Item(id="one"), Item(id="two")
        states: dict[int, list[str]] = {}

        def write(turn: int) -> None:
            near, far = pair if turn % 2 else pair[::-1]
            revision = writer.upsert([(near, [photo("a", corner, turn)]), (far, [photo("a", other, turn)])], BUNDLE)
            states[revision] = [near.id, far.id]

        write(0)
        writer.activate(BUNDLE)
        ended = threading.Event()
        failures: list[BaseException] = []

        def apply() -> None:
            try:
                for number in range(3):
                    writer.compact(rebuild=number == 1)
            except BaseException as error:
                failures.append(error)
            finally:
                ended.set()

        thread = threading.Thread(target=apply)
        thread.start()
        turn = 1
        while not ended.is_set():
            write(turn)
            found = reader.search(corner[None], bundle_id=BUNDLE, top=2)
            assert [hit.item.id for hit in found.hits[0]] == states[found.revision]
            turn += 1
        thread.join()
        assert not failures and turn > 20
        writer.compact()
        assert [hit.item.id for hit in reader.search(corner[None], bundle_id=BUNDLE, top=2).hits[0]] == [
            it.id for it in (pair if turn % 2 == 0 else pair[::-1])
        ]


@only_in_test_cluster
def test_a_rebuild_removes_the_collection_that_it_replaces(
    qdrant_cluster: Cluster, gallery: Gallery, prefix: str
) -> None:
    gallery.upsert(make_entries(40), BUNDLE)
    gallery.activate(BUNDLE)
    first = qdrant_cluster.collections(prefix)
    gallery.compact(rebuild=True)
    second = qdrant_cluster.collections(prefix)
    assert len(first) == len(second) == 1 and first != second
    gallery.upsert([(item, images) for item, images in make_entries(40, seed=3)], OTHER_BUNDLE)
    gallery.activate(OTHER_BUNDLE)
    assert len(qdrant_cluster.collections(prefix)) == 2
    assert gallery.rollback() == BUNDLE
    gallery.drop_bundle(OTHER_BUNDLE)
    assert qdrant_cluster.collections(prefix) == second


def test_two_galleries_with_one_prefix_leave_each_other_alone(
    qdrant_cluster: Cluster, prefix: str, tmp_path: Path
) -> None:
    address = qdrant_cluster.address(prefix)
    with (
        open_gallery_on(address, tmp_path / "one", identity="one") as one,
        open_gallery_on(address, tmp_path / "two", identity="two") as two,
    ):
        for gallery in (one, two):
            gallery.upsert(make_entries(40), BUNDLE)
            gallery.activate(BUNDLE)
        one.compact(rebuild=True)
        for gallery in (one, two):
            assert gallery.verify() == []
        assert len(qdrant_cluster.collections(prefix)) == 2


def test_a_lost_collection_is_replaced_by_memory_and_then_rebuilt(
    qdrant_cluster: Cluster, gallery: Gallery, prefix: str
) -> None:
    entries = make_entries(60)
    reference, query = ReferenceGallery(entries), entries[3][1][0].vector[None]
    gallery.upsert(entries, BUNDLE)
    gallery.activate(BUNDLE)
    qdrant_cluster.drop(prefix)
    for _ in range(2):
        reference.check(gallery.search(query, bundle_id=BUNDLE).hits[0], query, top=10)
    assert index_stats(gallery).name is None
    assert "Rebuild it" in gallery.verify()[0].remedy
    gallery.compact()
    reference.check(gallery.search(query, bundle_id=BUNDLE).hits[0], query, top=10)
    assert gallery.verify() == []


@only_in_test_cluster
def test_a_lost_collection_that_does_not_fit_into_memory_is_refused_until_it_is_rebuilt(
    qdrant_cluster: Cluster, prefix: str, tmp_path: Path
) -> None:
    settings = QUICK.model_copy(update={"memory_up_to": 10})
    entries = make_entries(20)
    query = entries[3][1][0].vector[None]
    with open_gallery_on(qdrant_cluster.address(prefix), tmp_path / "gallery", settings=settings) as gallery:
        gallery.upsert(entries[:2], BUNDLE)
        gallery.upsert(entries, BUNDLE)
        gallery.activate(BUNDLE)
        qdrant_cluster.drop(prefix)
        with pytest.raises(IndexUnavailable, match="10 fit into memory"):
            gallery.search(query, bundle_id=BUNDLE)
        gallery.compact()
        assert gallery.search(query, bundle_id=BUNDLE).hits[0]


@only_in_test_cluster
def test_a_store_that_was_restored_does_not_use_a_collection_of_later_revisions(
    qdrant_cluster: Cluster, prefix: str, tmp_path: Path
) -> None:
    entries, address = make_entries(50), qdrant_cluster.address(prefix)
    query = entries[3][1][0].vector[None]
    with open_gallery_on(address, tmp_path / "gallery") as gallery:
        gallery.upsert(entries, BUNDLE)
        gallery.activate(BUNDLE)
        gallery._store.files(tmp_path)
        for item, _ in entries[:10]:
            gallery.delete([item.id])
        gallery.compact()
    copies = [path for path in tmp_path.iterdir() if path.is_file()]
    for copy in copies:
        copy.rename(tmp_path / "gallery" / copy.name)
    for log in (tmp_path / "gallery").glob("catalogue.sqlite-*"):
        log.unlink()
    with open_gallery_on(address, tmp_path / "gallery") as gallery:
        reference = ReferenceGallery(entries)
        reference.check(gallery.search(query, bundle_id=BUNDLE, top=60).hits[0], query, top=60)
        gallery.compact()
        reference.check(gallery.search(query, bundle_id=BUNDLE, top=60).hits[0], query, top=60)


def test_pages_beyond_the_bound_are_refused(qdrant_cluster: Cluster, prefix: str, tmp_path: Path) -> None:
    settings = QUICK.model_copy(update={"exhaustive_up_to": 1100})
    entries = [
        (Item(id=f"{number}", attributes={"half": number % 2}), [photo("a", unit(1, number, 3))])
        for number in range(1200)
    ]
    with open_gallery_on(qdrant_cluster.address(prefix), tmp_path / "gallery", settings=settings) as gallery:
        gallery.upsert(entries, BUNDLE)
        gallery.activate(BUNDLE)
        query = unit(1, 0, 0)[None]
        first = gallery.search(query, bundle_id=BUNDLE, top=1000)
        with pytest.raises(SearchError, match="more than 1,100 images to page through"):
            gallery.search(query, bundle_id=BUNDLE, top=1000, cursor=first.cursor)
        half = Filter.parse({"half": 1})
        seen: list[str] = []
        cursor: str | None = None
        while cursor or not seen:
            found = gallery.search(query, bundle_id=BUNDLE, top=450, filter=half, cursor=cursor)
            seen += [hit.item.id for hit in found.hits[0]]
            cursor = found.cursor
        assert len(seen) == len(set(seen)) == 600


def test_an_item_with_many_images_is_compared_without_reading_all_scores_of_each(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(7)
    entries = [(Item(id=f"{number}"), [photo("a", unit(*random.normal(size=8)))]) for number in range(1500)]
    entries.append((Item(id="many"), [photo(f"{view}", unit(*random.normal(size=8))) for view in range(200)]))
    gallery.upsert(entries, BUNDLE)
    gallery.activate(BUNDLE)
    read, search = [0], Collection.search

    def count_points(*args: Any, **options: Any) -> list[Neighbours]:
        answers = search(*args, **options)
        read[0] += sum(map(len, answers))
        return answers

    monkeypatch.setattr(Collection, "search", count_points)
    seen: list[str] = []
    cursor: str | None = None
    while cursor or not seen:
        read[0] = 0
        found = gallery.search_item("many", top=700, cursor=cursor)
        assert read[0] < 200 * 1700 / 4, "each of the 200 images would read most of the others"
        seen += [hit.item.id for hit in found.hits[0]]
        cursor = found.cursor
    reference = ReferenceGallery(entries)
    hits = gallery.search_item("many", top=1000).hits[0]
    reference.check(hits, reference.queries_of("many"), top=1000, exclude=["many"])
    assert len(seen) == len(set(seen)) == 1500


def test_a_filter_that_qdrant_cannot_compare_is_bounded(
    qdrant_cluster: Cluster, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = QUICK.model_copy(update={"exhaustive_up_to": 1500})
    entries = [
        (Item(id=f"{number}", attributes={"path": f"category/shoes/{number:05}"}), [photo("a", unit(1, number, 3))])
        for number in range(7000)
    ]
    largest, contents = [0], Collection.contents

    def measure(*args: Any, **options: Any) -> dict[int, Content]:
        found = contents(*args, **options)
        largest[0] = max(largest[0], len(found))
        return found

    monkeypatch.setattr(Collection, "contents", measure)
    query = unit(1, 0, 0)[None]
    with open_gallery_on(qdrant_cluster.address(prefix), tmp_path / "gallery", settings=settings) as gallery:
        gallery.upsert(entries, BUNDLE)
        gallery.activate(BUNDLE)
        few = Filter.parse({"path": {"lt": "category/shoes/06000", "gte": "category/shoes/05990"}})
        with pytest.raises(SearchError, match="compared with more than 1,500 images"):
            gallery.search(query, bundle_id=BUNDLE, top=5, filter=few)
        near = Filter.parse({"path": {"gte": "category/shoes/00500"}})
        hits = gallery.search(query, bundle_id=BUNDLE, top=5, filter=near).hits[0]
        assert [hit.item.id for hit in hits] == ["500", "501", "502", "503", "504"]
    assert 0 < largest[0] <= 1024


def test_a_closed_gallery_has_no_connections(qdrant_cluster: Cluster, prefix: str, tmp_path: Path) -> None:
    ports = {f"{node.grpc:04X}" for node in qdrant_cluster.nodes}

    def count_connections() -> int:
        """Returns how many established ones lead to the nodes' ports."""
        # gRPC connects to IPv4 addresses by sockets of IPv6.
        tables = [Path("/proc/net", name).read_text() for name in ("tcp", "tcp6")]
        lines = [line.split() for table in tables for line in table.splitlines()[1:]]
        return sum(fields[2].partition(":")[2] in ports and fields[3] == "01" for fields in lines)

    before = count_connections()
    gallery = open_gallery_on(qdrant_cluster.address(prefix), tmp_path / "gallery")
    gallery.upsert(make_entries(10), BUNDLE)
    gallery.activate(BUNDLE)
    assert count_connections() > before
    gallery.close()
    wait_until(lambda: count_connections() == before)
