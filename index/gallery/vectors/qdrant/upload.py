"""Fills a new collection from the store, and measures how deep its searches must look."""

import secrets
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from index.gallery.errors import IndexBuildError
from index.gallery.store.base import BundleRow, FullImageRow, ImageRow, ItemStore
from index.gallery.store.rows import parse_item
from index.gallery.types import Item, Progress
from index.gallery.vectors.qdrant.collection import Collection, CollectionState
from index.gallery.vectors.qdrant.nodes import messages
from index.gallery.vectors.qdrant.payload import attribute_fields, make_point
from index.gallery.vectors.qdrant.settings import QdrantSettings
from index.items import EXPIRES_AT

_RECALL_AT = 10
_ROUNDING = 1e-5
"""Largest difference between two ways to sum one score."""


def step_name(collection: str, revision: int) -> str:
    """Returns a new name for a collection with the changes up to a revision."""
    return f"{collection}@{revision}.{secrets.token_hex(4)}"


def fill_collection(
    store: ItemStore, bundle: BundleRow, collection: Collection, settings: QdrantSettings, on_progress: Progress
) -> None:
    """Creates a collection with a bundle's images as of one instant, and records it in the store.

    Nobody reads the collection until then. What is left of an interrupted build is removed by the next one.
    """
    names: Counter[tuple[str, str]] = Counter()
    per_item: Counter[int] = Counter()
    newest = 0
    with store.open_reader() as reader:
        bundle, revision = reader.bundle(bundle.id) or bundle, reader.revision()
        total = reader.image_count(bundle.key)
        if not total:
            store.set_index(bundle.key, None, revision)
            return
        name = step_name(collection.name, revision)
        state = CollectionState(bundle_id=bundle.id, dimension=bundle.dimension, last=name, next=name)
        collection.create(bundle.dimension, state)
        with _Uploader(collection, settings) as uploader:
            for rows in reader.full_images(bundle.key):
                points = []
                for row in rows:
                    item = _item(row)
                    per_item[row.item] += 1
                    is_first = per_item[row.item] == 1
                    names.update(attribute_fields(item.attributes) if is_first else ())
                    image = ImageRow(row.key, row.item, row.id, row.digest, row.vector)
                    points.append(make_point(image, item, to_list(row.vector), is_first=is_first))
                    newest = row.key
                uploader.add(points)
                on_progress(per_item.total(), total)
    fields = choose_fields(names, settings.indexed_attributes)
    collection.index_attributes(fields)
    state = state.model_copy(
        update={
            "images": total,
            "newest_key": newest,
            "max_images_per_item": max(per_item.values()),
            "fields": fields,
        }
    )
    collection.start_indexing()
    collection.record(measure(collection, state, settings))
    store.set_index(bundle.key, name, revision)


def to_list(vector: bytes) -> list[float]:
    values: list[float] = np.frombuffer(vector, "<f2").tolist()
    return values


def _item(row: FullImageRow) -> Item:
    return parse_item(row.item_id, row.title, row.url, row.attributes)


class _Uploader:
    """Sends points in several requests at a time; waits for all of them when it is closed."""

    def __init__(self, collection: Collection, settings: QdrantSettings) -> None:
        self._collection = collection
        self._size = settings.upload_batch
        self._threads = settings.upload_threads
        self._pool = ThreadPoolExecutor(settings.upload_threads, "upload")
        self._pending: deque[Future[None]] = deque()

    def __enter__(self) -> "_Uploader":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._pool.shutdown(cancel_futures=kind is not None)
        if kind is None:
            self._finish(0)

    def add(self, points: list[object]) -> None:
        for start in range(0, len(points), self._size):
            self._pending.append(self._pool.submit(self._collection.upsert, points[start : start + self._size]))
            self._finish(2 * self._threads)

    def _finish(self, left: int) -> None:
        while len(self._pending) > left:
            self._pending.popleft().result()


def upload(collection: Collection, points: list[object], settings: QdrantSettings) -> None:
    """Sends points, and returns when all are applied."""
    with _Uploader(collection, settings) as uploader:
        uploader.add(points)


def choose_fields(
    names: Counter[tuple[str, str]], limit: int, chosen: Iterable[tuple[str, str]] = ()
) -> tuple[tuple[str, str], ...]:
    """Returns the fields to index: those chosen before, and those of the attributes that most items have."""
    fields = list(chosen)
    # The expiry in any case: the first one is found by its index.
    attributes = {name for _, name in fields}.union(name for _, name in names if name == EXPIRES_AT)
    for (_, name), _ in names.most_common():
        if name not in attributes and len(attributes) < limit:
            attributes.add(name)
    return (*fields, *sorted(field for field in names if field[1] in attributes and field not in fields))


def measure(collection: Collection, state: CollectionState, settings: QdrantSettings) -> CollectionState:
    """Returns the state with the lowest effort that reaches the target recall, on a sample of the stored vectors."""
    if state.images <= settings.exact_up_to:
        exact = {"kind": "exact", "effort": 0, "recall": 1.0, "target": 1.0, "measured": state.images}
        return state.model_copy(update=exact)
    _wait_until_indexed(collection, settings)
    queries = collection.sample(settings.sample, state.dimension)
    truth = [scores[-1] for scores in _scores(collection, queries, 0, settings)]
    effort, recall = 0, 1.0
    for candidate in settings.efforts:
        found = _scores(collection, queries, candidate, settings)
        hits = sum(int((scores >= worst - _ROUNDING).sum()) for scores, worst in zip(found, truth, strict=True))
        recall = min(1.0, hits / (_RECALL_AT * len(truth)))
        if recall >= settings.recall_target:
            effort = candidate
            break
    return state.model_copy(
        update={
            "kind": "hnsw",
            "effort": effort,
            "recall": recall if effort else 1.0,
            "target": settings.recall_target,
            "measured": state.images,
        }
    )


def _scores(collection: Collection, queries: np.ndarray, effort: int, settings: QdrantSettings) -> Iterator[np.ndarray]:
    """Yields the scores of the nearest points of each query."""
    for start in range(0, len(queries), 16):
        answers = collection.search(
            queries[start : start + 16], _RECALL_AT, effort=effort, timeout=settings.write_timeout
        )
        yield from (np.array([score for _, score, _ in points], np.float32) for points in answers)


def _wait_until_indexed(collection: Collection, settings: QdrantSettings) -> None:
    """Waits until the cluster has built its graphs. A pause between two steps may look like the end."""
    deadline, quiet = time.monotonic() + settings.index_timeout, 0
    while quiet < 3:
        if time.monotonic() > deadline:
            raise IndexBuildError(
                f"Qdrant has not indexed {collection.name} within {settings.index_timeout:,.0f} s.",
                "See its log; searches continue with the last index.",
            )
        time.sleep(0.3)
        quiet = quiet + 1 if collection.info().status == messages().CollectionStatus.Green else 0
