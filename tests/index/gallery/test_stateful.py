"""Random sequences of writes, searches and compactions: the gallery returns what the reference does."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from index.gallery import Gallery, open_gallery
from index.gallery.errors import ItemMissing
from index.gallery.filters import Filter
from index.gallery.settings import GallerySettings
from index.gallery.types import Attribute, Hit, Item, NewImage
from index.gallery.vectors.faiss.settings import FaissSettings
from tests.support.postgres import PostgresServer

from .memory import MemoryData, MemoryIndex, MemoryStore
from .reference import BUNDLE, ReferenceGallery, Vector, photo, unit

# Few distinct values, so that items are replaced, deleted and stored again, and scores tie.
ITEMS = [f"item-{number}" for number in range(12)]
IMAGES = ["front", "back", "side"]
VECTORS = [unit(*numbers) for numbers in np.random.default_rng(1).normal(size=(24, 5))]

vectors = st.sampled_from(VECTORS)
attributes: st.SearchStrategy[dict[str, Attribute]] = st.fixed_dictionaries(
    {},
    optional={
        "colour": st.sampled_from(["red", "green", "blue"]),
        "price": st.sampled_from([0, 1, 2.5, 10]),
        "sale": st.booleans(),
        "sizes": st.sampled_from(["S", ("S", "M"), ("M", "L", 38), (36, 38)]),
        "since": st.sampled_from(["2026-11-19", "2026-11-19T01:00+02:00", "soon", ("2026-01-01", "2027-01-01")]),
        "expires_at": st.sampled_from(["2020-01-01T00:00:00Z", "2020-06-01T00:00:00Z", "2100-01-01T00:00:00Z"]),
    },
)
items = st.builds(Item, id=st.sampled_from(ITEMS), title=st.sampled_from(["", "A title"]), attributes=attributes)
images = st.builds(
    photo,
    st.sampled_from(IMAGES),
    vectors,
    # A photo of its own for each vector, or the same photo with another vector.
    st.sampled_from([None, None, 7]),
)
entries = st.tuples(items, st.lists(images, max_size=3, unique_by=lambda image: image.id))
documents = st.sampled_from(
    [
        {"colour": "red"},
        {"colour": ["red", "blue"]},
        {"price": {"gte": 1, "lt": 10}},
        {"sale": {"exists": False}},
        {"not": {"colour": "green"}},
        {"sale": True, "not": {"price": 0}},
        {"sizes": ["M", 36]},
        {"sizes": {"all": ["M", 38]}},
        {"not": {"sizes": {"gt": 36}}},
        {"since": {"lt": "2026-11-19T00:00Z"}},
        {"any": [{"sizes": "S", "colour": "red"}, {"not": {"since": {"gte": "2026-01-02", "lt": "2026-12-31"}}}]},
    ]
)
filters = st.none() | documents.map(Filter.parse)
tops = st.sampled_from([1, 2, 5, 40])
min_scores = st.none() | st.sampled_from([-0.2, 0.0, 0.4, 1.0])


class History(RuleBasedStateMachine):
    """Writes use one handle; searches use it and another one that stays open."""

    settings = GallerySettings(listed_removals=4)
    faiss_settings = FaissSettings()

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.writer = self.open(create=True)
        self.reader = self.open()
        self.reference = ReferenceGallery()
        self.revision = 0

    def open(self, *, create: bool = False) -> Gallery:
        return open_gallery(
            Path(self.folder.name) / "gallery",
            create=create,
            settings=self.settings,
            faiss_settings=self.faiss_settings,
        )

    def teardown(self) -> None:
        self.writer.close()
        self.reader.close()
        self.folder.cleanup()

    def acknowledge(self, revision: int) -> None:
        assert revision >= self.revision
        self.revision = revision

    @initialize(first=st.lists(entries, max_size=12), compacted=st.booleans())
    def begin(self, first: list[tuple[Item, list[NewImage]]], compacted: bool) -> None:
        self.upsert(first)
        if compacted:
            self.compact(rebuild=False, other=False)

    @rule(batch=st.lists(entries, min_size=1, max_size=4))
    def upsert(self, batch: list[tuple[Item, list[NewImage]]]) -> None:
        self.acknowledge(self.writer.upsert(batch, BUNDLE))
        self.reference.upsert(batch)

    @precondition(lambda self: self.reference.items)
    @rule(data=st.data())
    def upsert_the_same_again(self, data: st.DataObject) -> None:
        item_id = data.draw(st.sampled_from(sorted(self.reference.items)))
        entry = self.reference.items[item_id], list(self.reference.images[item_id].values())
        assert self.reader.upsert([entry], BUNDLE) == self.revision

    @precondition(lambda self: self.reference.items)
    @rule(data=st.data(), changed=attributes)
    def change_attributes(self, data: st.DataObject, changed: dict[str, Attribute]) -> None:
        item_id = data.draw(st.sampled_from(sorted(self.reference.items)))
        item = self.reference.items[item_id].model_copy(update={"attributes": changed})
        self.upsert([(item, [])])

    @rule(item_ids=st.lists(st.sampled_from(ITEMS), max_size=3))
    def delete(self, item_ids: list[str]) -> None:
        self.acknowledge(self.writer.delete(item_ids))
        self.reference.delete(item_ids)

    @rule(item_id=st.sampled_from(ITEMS), image_ids=st.lists(st.sampled_from(IMAGES), min_size=1, max_size=3))
    def delete_images(self, item_id: str, image_ids: list[str]) -> None:
        self.acknowledge(self.writer.delete_images(item_id, image_ids))
        self.reference.delete_images(item_id, image_ids)

    @rule(rebuild=st.booleans(), other=st.booleans())
    def compact(self, rebuild: bool, other: bool) -> None:
        compacting = self.reader if other else self.writer
        report = compacting.compact(rebuild=rebuild)
        if self.reference.delete_expired():
            self.acknowledge(compacting.stats().revision)
        assert (report is None) == (not any(self.reference.images.values()))

    @rule()
    def reopen(self) -> None:
        self.writer.close()
        self.writer = self.open()

    @rule(catch_up=st.booleans())
    def swap_roles(self, catch_up: bool) -> None:
        """The writer becomes the reader, which may not have followed the store for long."""
        if catch_up:
            self.reader.stats()
        self.writer, self.reader = self.reader, self.writer

    @rule(data=st.data(), queries=st.lists(vectors, min_size=1, max_size=3), top=tops, wanted=filters)
    def search(self, data: st.DataObject, queries: list[Vector], top: int, wanted: Filter | None) -> None:
        min_score, exclude = self.bounds(data)
        vectors = np.stack(queries)
        for gallery in (self.writer, self.reader):
            found = gallery.search(
                vectors, bundle_id=BUNDLE, top=top, filter=wanted, min_score=min_score, exclude=exclude
            )
            assert found.revision == self.revision
            for query, hits in zip(queries, found.hits, strict=True):
                self.reference.check(hits, query[None], top=top, filter=wanted, min_score=min_score, exclude=exclude)

    @rule(data=st.data(), item_id=st.sampled_from(ITEMS), top=tops, wanted=filters)
    def search_item(self, data: st.DataObject, item_id: str, top: int, wanted: Filter | None) -> None:
        min_score, exclude = self.bounds(data)
        if not self.reference.images.get(item_id) or not self.reference.shown(item_id):
            with pytest.raises(ItemMissing):
                self.reader.search_item(item_id)
            return
        found = self.reader.search_item(item_id, top=top, filter=wanted, min_score=min_score, exclude=exclude)
        queries = self.reference.queries_of(item_id)
        self.reference.check(
            found.hits[0], queries, top=top, filter=wanted, min_score=min_score, exclude=[item_id, *exclude]
        )

    def bounds(self, data: st.DataObject) -> tuple[float | None, list[str]]:
        return data.draw(min_scores), data.draw(st.lists(st.sampled_from(ITEMS), max_size=2, unique=True))

    @rule(query=vectors, size=st.sampled_from([1, 2, 5]), wanted=filters, compact_between=st.booleans())
    def page(self, query: Vector, size: int, wanted: Filter | None, compact_between: bool) -> None:
        hits: list[Hit] = []
        cursor: str | None = None
        while True:
            found = self.reader.search(query[None], bundle_id=BUNDLE, top=size, filter=wanted, cursor=cursor)
            hits += found.hits[0]
            cursor = found.cursor
            if cursor is None:
                break
            assert len(found.hits[0]) == size
            if compact_between and len(hits) == size:
                self.compact(rebuild=False, other=False)
        self.reference.check(hits, query[None], top=1000, filter=wanted)

    @rule(wanted=filters, item_id=st.sampled_from(ITEMS))
    def read(self, wanted: Filter | None, item_id: str) -> None:
        for gallery in (self.writer, self.reader):
            stored = gallery.get_item(item_id)
            assert (stored.item if stored else None) == self.reference.shown(item_id)
            assert gallery.digests(item_id, BUNDLE) == {
                name: image.digest for name, image in self.reference.images.get(item_id, {}).items()
            }
            matching = [
                item
                for item in map(self.reference.shown, sorted(self.reference.items))
                if item and (not wanted or wanted.matches(item.attributes))
            ]
            assert gallery.scan(filter=wanted).items == matching
            stats = gallery.stats()
            assert (stats.items, stats.images) == (
                len(self.reference.items),
                sum(map(len, self.reference.images.values())),
            )
            assert stats.revision == self.revision


class FullHistory(History):
    """Starts with a generation that has every item."""

    @initialize()
    def fill(self) -> None:
        views = list(zip(ITEMS, VECTORS[:12], VECTORS[12:], strict=True))
        self.upsert([(Item(id=name), [photo("front", one), photo("back", two)]) for name, one, two in views])
        self.compact(rebuild=False, other=False)


def histories(examples: int, steps: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )


def test_a_gallery_on_sqlite_and_faiss_equals_the_reference() -> None:
    run_state_machine_as_test(History, settings=histories(40, 20))


class MemoryHistory(History):
    """Runs on the store and the index in memory."""

    def open(self, *, create: bool = False) -> Gallery:
        if create:
            self.data = MemoryData()
        store = MemoryStore(self.data)
        return Gallery(store, MemoryIndex(store), address="memory")


def test_a_gallery_in_memory_equals_the_reference() -> None:
    run_state_machine_as_test(MemoryHistory, settings=histories(20, 20))


class PostgresHistory(History):
    """Runs on PostgreSQL; each handle is a machine with a cache of its own."""

    server: ClassVar[PostgresServer]
    numbers: ClassVar[Iterator[int]] = count(1)

    def open(self, *, create: bool = False) -> Gallery:
        if create:
            self.schema = f"history_{next(self.numbers)}"
        return open_gallery(
            f"{self.server.url()}?schema={self.schema}",
            create=create,
            cache=Path(self.folder.name) / f"machine-{next(self.numbers) % 2}",
            settings=self.settings,
        )

    def teardown(self) -> None:
        super().teardown()
        self.server.execute(f"DROP SCHEMA {self.schema} CASCADE")


@pytest.mark.slow
def test_a_gallery_on_postgresql_equals_the_reference(postgres: PostgresServer) -> None:
    PostgresHistory.server = postgres
    run_state_machine_as_test(PostgresHistory, settings=histories(20, 20))


class ExtendedGraphs(FullHistory):
    """Graphs that are extended: dead positions stay, and the delta has many blocks."""

    settings = GallerySettings(delta_block=1, listed_removals=2)
    # Graph searches cost nothing, so that graphs are used; so small a graph is complete and returns exact results.
    # Allow lists are masks of the index rather than copies.
    faiss_settings = FaissSettings(exact_up_to=4, graph_step_cost=1e-9, copied_up_to=2, max_dead_share=0.9)


@pytest.mark.slow
def test_a_gallery_with_extended_graphs_equals_the_reference() -> None:
    run_state_machine_as_test(ExtendedGraphs, settings=histories(30, 20))
