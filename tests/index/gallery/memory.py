"""A store and a vector index in memory: the second implementation of the gallery's two seams.

All searches are exhaustive. Handles of one `MemoryData` behave like processes that share a gallery.
"""

import copy
import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from index.embedding.bundle import Bundle
from index.errors import LookalikeError
from index.gallery.errors import (
    IndexDamaged,
    JobMissing,
    JobRunning,
    StoreError,
    TooManyAttributes,
    TooManyImages,
    VersionConflict,
)
from index.gallery.expiry import expiry_of, is_expired
from index.gallery.filters import Filter
from index.gallery.jobs import Job
from index.gallery.store.base import BundleRow, Changes, FullImageRow, Head, ImageContent, ImageRecord, ImageRow
from index.gallery.types import (
    BuildReport,
    Facet,
    IndexStats,
    Item,
    NewImage,
    Progress,
    StoredImage,
    StoredItem,
    no_progress,
)
from index.gallery.vectors.base import LocalSegment, Positions, Queries, Results
from index.items import MAX_ATTRIBUTE_NAMES, MAX_IMAGES_PER_ITEM
from index.jobs import JobRecord
from index.rankings import Ranking, StoredRanking


@dataclass
class MemoryData:
    """The tables of a gallery; a transaction works on a copy."""

    revision: int = 0
    commits: int = 0
    next_key: int = 1
    items: dict[str, tuple[int, Item, int]] = field(default_factory=dict)
    """Item id to key, item and version."""
    images: dict[int, tuple[str, str, str]] = field(default_factory=dict)
    """Image key to item id, image id and digest."""
    vectors: dict[tuple[int, int], tuple[int, bytes]] = field(default_factory=dict)
    """Bundle and image key to revision and vector."""
    rankings: dict[tuple[str, int], StoredRanking] = field(default_factory=dict)
    removed: list[tuple[int, int]] = field(default_factory=list)
    """Revision and image key."""
    thumbnails: dict[str, bytes] = field(default_factory=dict)
    bundles: dict[int, BundleRow] = field(default_factory=dict)
    active: int | None = None
    previous: int | None = None
    copies: dict[str, Bundle] = field(default_factory=dict)
    built: dict[str, "MemoryBuiltIndex"] = field(default_factory=dict)
    jobs: list[JobRecord] = field(default_factory=list)
    cancelled: set[int] = field(default_factory=set)

    def new_key(self) -> int:
        self.next_key += 1
        return self.next_key - 1


class MemoryStore:
    """Implements `ItemStore` and, for its own reads, `StoreReader`."""

    def __init__(self, data: MemoryData) -> None:
        self.data = data
        self.jobs = MemoryJobs(data)

    @property
    def watch(self) -> "MemoryStore":
        return self

    @property
    def read(self) -> "MemoryStore":
        return self

    @contextmanager
    def open_reader(self) -> Iterator["MemoryStore"]:
        yield MemoryStore(copy.copy(self.data))

    @contextmanager
    def _transaction(self) -> Iterator[MemoryData]:
        """Yields a draft of all tables, and commits it unless the block raises."""
        fields: dict[str, Any] = {
            name: copy.copy(value) if isinstance(value, dict | list | set) else value
            for name, value in vars(self.data).items()
        }
        draft = MemoryData(**fields)
        yield draft
        draft.commits += 1
        vars(self.data).update(vars(draft))

    # Writes

    def upsert(
        self,
        entries: Iterable[tuple[Item, Sequence[NewImage]]],
        bundle_id: str,
        *,
        expected: Mapping[str, int | None] | None = None,
        without: Mapping[str, Iterable[str]] | None = None,
        activate_first: bool = True,
    ) -> int:
        with self._transaction() as draft:
            _check(draft, expected or {})
            before = _contents(draft)
            for item_id, image_ids in (without or {}).items():
                for image_id in image_ids:
                    _remove_image(draft, item_id, image_id)
            for item, images in entries:
                _store_item(draft, item)
                held = {name for owner, name, _ in draft.images.values() if owner == item.id}
                for image in images:
                    bundle = _store_image(draft, item.id, image, bundle_id)
                    draft.active = draft.active or (bundle if activate_first else None)
                _check_limits(draft, item, [image.id for image in images if image.id not in held], len(held))
            if _contents(draft) != before:
                draft.revision += 1
        return self.data.revision

    def delete(self, item_ids: Iterable[str], *, expected: Mapping[str, int | None] | None = None) -> int:
        with self._transaction() as draft:
            _check(draft, expected or {})
            before = len(draft.items)
            for item_id in item_ids:
                for image_id in [name for owner, name, _ in draft.images.values() if owner == item_id]:
                    _remove_image(draft, item_id, image_id)
                draft.items.pop(item_id, None)
            if len(draft.items) != before:
                draft.revision += 1
        return self.data.revision

    def delete_expired(self, instant: int, limit: int) -> int:
        expired = [name for name, (_, item, _) in self.data.items.items() if is_expired(item.attributes, instant)]
        self.delete(expired[:limit])
        return len(expired[:limit])

    def put_ranking(
        self,
        name: str,
        ranking: Ranking,
        *,
        expected: Mapping[str, int | None] | None = None,
        stored: float | None = None,
    ) -> StoredRanking:
        last = self.ranking(name)
        if name in (expected or {}) and (expected or {})[name] != (last.version if last else None):
            raise VersionConflict(name, "Ranking")
        if last and last.ranking.model_dump_json() == ranking.model_dump_json():
            return last
        with self._transaction() as draft:
            draft.revision += 1
            new = StoredRanking(name=name, version=draft.revision, stored=stored or time.time(), ranking=ranking)
            draft.rankings[name, draft.revision] = new
        return new

    def delete_ranking(self, name: str, *, expected: Mapping[str, int | None] | None = None) -> bool:
        last = self.ranking(name)
        if name in (expected or {}) and (expected or {})[name] != (last.version if last else None):
            raise VersionConflict(name, "Ranking")
        if last:
            with self._transaction() as draft:
                draft.revision += 1
                draft.rankings = {key: value for key, value in draft.rankings.items() if key[0] != name}
        return last is not None

    def set_index(self, bundle: int, name: str | None, revision: int) -> None:
        with self._transaction() as draft:
            draft.bundles[bundle] = draft.bundles[bundle]._replace(index_name=name, index_revision=revision)

    def set_active(self, bundle: BundleRow) -> None:
        with self._transaction() as draft:
            if bundle.key not in draft.bundles:
                raise LookalikeError(f"Bundle {bundle.id} was dropped meanwhile.", "Index with it again.")
            if draft.active != bundle.key:
                draft.active, draft.previous = bundle.key, draft.active

    def drop_bundle(self, bundle: BundleRow) -> None:
        with self._transaction() as draft:
            if draft.active == bundle.key:
                raise LookalikeError(
                    f"Bundle {bundle.id} is active.", "Activate another one first: lookalike gallery activate."
                )
            if draft.previous == bundle.key:
                draft.previous = None
            del draft.bundles[bundle.key]
            draft.copies.pop(bundle.id, None)
            draft.vectors = {key: value for key, value in draft.vectors.items() if key[0] != bundle.key}

    def keep_bundle(self, bundle: Bundle) -> None:
        self.data.copies[bundle.id] = bundle

    def has_bundle(self, bundle_id: str) -> bool:
        return bundle_id in self.data.copies

    def load_bundle(self, bundle_id: str) -> Bundle:
        return self.data.copies[bundle_id]

    @property
    def is_read_only(self) -> bool:
        return False

    @property
    def can_record_indexes(self) -> bool:
        return True

    def problems(self) -> list[str]:
        return []

    def lost_writes(self) -> list[str]:
        return []

    def check(self) -> None:
        pass

    def checkpoint(self, *, idle: bool) -> None:
        pass

    def files(self, folder: Path) -> dict[str, Path]:
        raise LookalikeError("A gallery in memory has no files.")

    def probe(self) -> None:
        pass

    def size(self) -> int:
        return 0

    def close(self) -> None:
        pass

    # Reads

    def news(self) -> int:
        return self.data.commits

    def revision(self) -> int:
        return self.data.revision

    def head(self) -> Head:
        bundles = self.data.bundles
        active = bundles[self.data.active] if self.data.active else None
        previous = bundles[self.data.previous] if self.data.previous else None
        return Head(self.data.revision, 0, active, previous)

    def counts(self) -> tuple[int, int]:
        return len(self.data.items), len(self.data.images)

    def bundle(self, bundle_id: str) -> BundleRow | None:
        return next((row for row in self.data.bundles.values() if row.id == bundle_id), None)

    def bundles(self) -> list[BundleRow]:
        return list(self.data.bundles.values())

    def changes(self, bundle: int, since: int, limit: int | None = None, *, whole_items: bool = False) -> Changes:
        changed = {key for key, _, version in self.data.items.values() if whole_items and version > since}
        new = {key for (owner, key), (revision, _) in self.data.vectors.items() if owner == bundle and revision > since}
        rows = [row for row in self._rows(bundle) if row.key in new or row.item in changed]
        owners = {row.item for row in rows}
        items = {key: item for key, item, version in self.data.items.values() if version > since or key in owners}
        removed = [key for revision, key in self.data.removed if revision > since]
        return Changes(self.data.revision, 0, removed, [ImageRow(*row[:5]) for row in rows], items)

    def get_item(self, item_id: str) -> StoredItem | None:
        if item_id not in self.data.items:
            return None
        _, item, version = self.data.items[item_id]
        images = [
            StoredImage(id=name, digest=digest) for owner, name, digest in self.data.images.values() if owner == item_id
        ]
        return StoredItem(item, images, version)

    def items_after(self, item_id: str, count: int) -> list[Item]:
        return [self.data.items[name][1] for name in sorted(self.data.items) if name > item_id][:count]

    def item_keys(self, item_ids: Sequence[str]) -> set[int]:
        return {self.data.items[item_id][0] for item_id in item_ids if item_id in self.data.items}

    def item_vectors(self, item_id: str, bundle: int) -> dict[str, NDArray[np.float32]]:
        rows = (row for row in self._rows(bundle) if row.item_id == item_id)
        return {row.id: np.frombuffer(row.vector, "<f2").astype(np.float32) for row in rows}

    def digests(self, item_ids: Iterable[str], bundle_id: str) -> dict[tuple[str, str], str]:
        bundle, wanted = self.bundle(bundle_id), set(item_ids)
        rows = self._rows(bundle.key) if bundle else []
        return {(row.item_id, row.id): row.digest for row in rows if row.item_id in wanted}

    def image_ids(self) -> Iterator[tuple[str, str]]:
        return iter(sorted((owner, name) for owner, name, _ in self.data.images.values()))

    def images_without(self, bundle_id: str, *, through: int | None = None) -> int:
        return sum(through is None or key <= through for key in self._without(bundle_id))

    def image_ids_without(self, bundle_id: str) -> Iterator[tuple[str, str]]:
        return (self.data.images[key][:2] for key in self._without(bundle_id))

    def _without(self, bundle_id: str) -> list[int]:
        bundle = self.bundle(bundle_id)
        return [key for key in sorted(self.data.images) if not bundle or (bundle.key, key) not in self.data.vectors]

    def newest_image(self) -> int:
        return max(self.data.images, default=0)

    def thumbnail(self, digest: str) -> bytes | None:
        is_used = any(digest == one for _, _, one in self.data.images.values())
        return self.data.thumbnails.get(digest) if is_used else None

    def image_contents(self, item_ids: Sequence[str], *, hashed: bool) -> dict[str, list[ImageContent]]:
        found: dict[str, list[ImageContent]] = {}
        wanted = set(item_ids)
        for key, (item_id, name, digest) in sorted(self.data.images.items()):
            if item_id in wanted:
                rows = {
                    row.id: self.data.vectors[row.key, key][1]
                    for row in self.bundles()
                    if (row.key, key) in self.data.vectors
                }
                vectors = {bundle: _sha256(vector) if hashed else vector for bundle, vector in rows.items()}
                thumbnail = self.data.thumbnails[digest]
                image = ImageContent(name, digest, vectors, _sha256(thumbnail) if hashed else thumbnail)
                found.setdefault(item_id, []).append(image)
        return found

    def ranking(self, name: str, version: int | None = None) -> StoredRanking | None:
        return next((one for one in self.ranking_versions(name) if version in (None, one.version)), None)

    def rankings(self) -> list[StoredRanking]:
        return [found for name in sorted({name for name, _ in self.data.rankings}) if (found := self.ranking(name))]

    def ranking_versions(self, name: str | None = None) -> list[StoredRanking]:
        found = [one for one in self.data.rankings.values() if name in (None, one.name)]
        return sorted(found, key=lambda one: (one.name, -one.version))

    def _rows(self, bundle: int) -> list[FullImageRow]:
        rows = []
        for (owner, key), (_, vector) in sorted(self.data.vectors.items()):
            if owner == bundle:
                item_id, name, digest = self.data.images[key]
                item_key, item, _ = self.data.items[item_id]
                content = item.model_dump_json(include={"attributes"})[len('{"attributes":') : -1]
                rows.append(FullImageRow(key, item_key, name, digest, vector, item_id, item.title, item.url, content))
        return rows

    def image_count(self, bundle: int) -> int:
        return len(self._rows(bundle))

    def image_keys(self, bundle: int) -> NDArray[np.int64]:
        return np.array([row.key for row in self._rows(bundle)], np.int64)

    def image_records(self, bundle: int) -> Iterator[ImageRecord]:
        return (ImageRecord(*row[:4], self.data.vectors[bundle, row.key][0]) for row in self._rows(bundle))

    def items(self, bundle: int) -> Iterator[tuple[int, Item]]:
        owners = {row.item for row in self._rows(bundle)}
        return ((key, item) for key, item, _ in sorted(self.data.items.values()) if key in owners)

    def vectors(self, bundle: int, since: int, out: NDArray[np.float16]) -> None:
        rows = [row for row in self._rows(bundle) if self.data.vectors[bundle, row.key][0] > since]
        for number, row in enumerate(rows):
            out[number] = np.frombuffer(row.vector, "<f2")

    def full_images(self, bundle: int) -> Iterator[list[FullImageRow]]:
        yield self._rows(bundle)


def _sha256(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _contents(data: MemoryData) -> object:
    return (dict(data.items), dict(data.images), dict(data.vectors), data.active)


def _check(data: MemoryData, expected: Mapping[str, int | None]) -> None:
    for item_id, version in expected.items():
        if (data.items[item_id][2] if item_id in data.items else None) != version:
            raise VersionConflict(item_id)


def _store_item(data: MemoryData, item: Item) -> None:
    key, stored, _ = data.items.get(item.id, (None, None, None))
    if stored is None or stored.model_dump_json() != item.model_dump_json():
        data.items[item.id] = (key or data.new_key(), item, data.revision + 1)


def _check_limits(data: MemoryData, item: Item, new: list[str], held: int) -> None:
    if (count := held + len(new)) > MAX_IMAGES_PER_ITEM and new:
        raise TooManyImages(item.id, count, new[MAX_IMAGES_PER_ITEM - count :])
    if len({name for _, one, _ in data.items.values() for name in one.attributes}) > MAX_ATTRIBUTE_NAMES:
        others = {name for _, one, _ in data.items.values() if one.id != item.id for name in one.attributes}
        raise TooManyAttributes(item.id, min(item.attributes.keys() - others))


def _touch(data: MemoryData, item_id: str) -> None:
    key, item, _ = data.items[item_id]
    data.items[item_id] = (key, item, data.revision + 1)


def _store_image(data: MemoryData, item_id: str, image: NewImage, bundle_id: str) -> int:
    """Returns the key of the bundle."""
    bundle = next((row for row in data.bundles.values() if row.id == bundle_id), None)
    shape = np.shape(image.vector)
    storable = (np.abs(image.vector) <= np.finfo(np.float16).max).all()
    if len(shape) != 1 or not shape[0] or (bundle and shape[0] != bundle.dimension) or not storable:
        raise StoreError(f"Image {image.id!r} has a vector of shape {shape}.")
    if len(image.digest) != 64:
        raise StoreError(f"Image {image.id!r} has the digest {image.digest!r}.")
    if bundle is None:
        bundle = BundleRow(data.new_key(), bundle_id, shape[0], None, 0)
        data.bundles[bundle.key] = bundle
    key = next((key for key, (owner, name, _) in data.images.items() if (owner, name) == (item_id, image.id)), None)
    if key is not None and data.images[key][2] != image.digest:
        _remove_image(data, item_id, image.id)
        key = None
    if key is None:
        key = data.new_key()
        data.images[key] = (item_id, image.id, image.digest)
        data.thumbnails.setdefault(image.digest, image.thumbnail)
        _touch(data, item_id)
    vector = np.asarray(image.vector, "<f2").tobytes()
    if (bundle.key, key) not in data.vectors or data.vectors[bundle.key, key][1] != vector:
        data.vectors[bundle.key, key] = (data.revision + 1, vector)
    return bundle.key


def _remove_image(data: MemoryData, item_id: str, image_id: str) -> None:
    for key in [key for key, (owner, name, _) in data.images.items() if (owner, name) == (item_id, image_id)]:
        del data.images[key]
        data.vectors = {pair: value for pair, value in data.vectors.items() if pair[1] != key}
        data.removed.append((data.revision + 1, key))
        _touch(data, item_id)


class MemoryJobs:
    """Implements `JobHistory` for jobs of one process."""

    folder = Path("/nowhere")

    def __init__(self, data: MemoryData) -> None:
        self._data = data

    def begin(self, source: str, bundle_id: str, *, exclusive: bool = False) -> Job:
        running = [record.id for record in self._data.jobs if record.state == "running"]
        if exclusive and running:
            raise JobRunning(running[-1])
        record = JobRecord(id=len(self._data.jobs) + 1, source=source, bundle_id=bundle_id, started=0, updated=0)
        self._data.jobs.append(record)
        return Job(self, record)

    def adopt(self, job_id: int) -> Job:
        return Job(self, self.get(job_id))

    def save(self, record: JobRecord) -> None:
        self._data.jobs[record.id - 1] = record

    def get(self, job_id: int) -> JobRecord:
        if not 1 <= job_id <= len(self._data.jobs):
            raise JobMissing(job_id)
        return self._data.jobs[job_id - 1]

    def newest(self, count: int = 20) -> list[JobRecord]:
        return self._data.jobs[::-1][:count]

    def cancel(self, job_id: int) -> JobRecord:
        record = self.get(job_id)
        if record.state != "running":
            raise LookalikeError(f"Job {job_id} is not running: it is {record.state}.")
        self._data.cancelled.add(job_id)
        return record

    def is_cancelled(self, job_id: int) -> bool:
        return job_id in self._data.cancelled

    def claim(self, job_id: int) -> "MemoryJobs":
        return self

    def release(self) -> None:
        pass

    def newest_revision(self) -> int:
        return max((record.revision or 0 for record in self._data.jobs), default=0)

    def problems(self) -> list[str]:
        return []

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class MemorySegment(LocalSegment):
    """Implements `Segment` over a list of rows."""

    rows: list[tuple[FullImageRow, Item]]

    @property
    def count(self) -> int:
        return len(self.rows)

    def search(self, queries: Queries, count: int, *, filtered: bool) -> Results:
        scores = queries @ self.vectors(self.positions()).astype(np.float32).T
        order = np.argsort(-scores, axis=1, kind="stable")[:, :count]
        return np.take_along_axis(scores, order, axis=1), order

    def keys(self, positions: Positions) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        rows = [self.rows[position][0] for position in positions.tolist()]
        return np.array([row.key for row in rows], np.int64), np.array([row.item for row in rows], np.int64)

    def item(self, position: int) -> Item:
        return self.rows[position][1]

    def image(self, position: int) -> StoredImage:
        row = self.rows[position][0]
        return StoredImage(id=row.id, digest=row.digest)

    def positions(self) -> Positions:
        return np.arange(len(self.rows))

    def vectors(self, positions: Positions) -> NDArray[np.float16]:
        return np.stack([np.frombuffer(self.rows[position][0].vector, "<f2") for position in positions.tolist()])


@dataclass(frozen=True)
class MemoryBuiltIndex:
    """Implements `BuiltIndex`: the rows of a bundle, without those that were removed since."""

    name: str | None
    revision: int
    rows: list[tuple[FullImageRow, Item]]
    masked: int = 0
    whole_items: bool = True

    @property
    def max_images_per_item(self) -> int:
        return len(self.rows)

    def after(self, removed: Sequence[int], items: Mapping[int, Item]) -> "MemoryBuiltIndex":
        removed_keys = set(removed)
        rows = [(row, item) for row, item in self.rows if row.key not in removed_keys]
        return replace(self, rows=rows, masked=self.masked + len(self.rows) - len(rows))

    def segment(self, filter: Filter | None) -> MemorySegment:
        return MemorySegment([pair for pair in self.rows if filter is None or filter.matches(pair[1].attributes)])

    def newest_expiry(self, instant: int) -> int | None:
        expiries = (expiry_of(item.attributes) for _, item in self.rows)
        return max((expiry for expiry in expiries if expiry is not None and expiry <= instant), default=None)

    def facets(
        self, count: int, names: Sequence[str] = (), *, filter: Filter | None = None, contains: str = ""
    ) -> Iterator[Facet]:
        return iter(())

    def is_due(self, pending: int) -> bool:
        return False

    def stats(self, pending: int) -> IndexStats:
        return IndexStats(engine="memory", name=self.name, revision=self.revision, pending=pending)


class MemoryIndex:
    """Implements `VectorIndex`."""

    engine = "memory"

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def open(self, bundle: BundleRow) -> MemoryBuiltIndex:
        if bundle.index_name not in self._store.data.built:
            raise IndexDamaged(f"There is no index {bundle.index_name}.")
        return self._store.data.built[bundle.index_name]

    def load(self, reader: object, bundle: BundleRow) -> MemoryBuiltIndex:
        assert isinstance(reader, MemoryStore)
        rows = [(row, reader.data.items[row.item_id][1]) for row in reader._rows(bundle.key)]
        return MemoryBuiltIndex(None, reader.revision(), rows)

    def build(
        self, bundle_id: str, *, rebuild: bool = False, wait: bool = True, on_progress: Progress = no_progress
    ) -> BuildReport | None:
        bundle = self._store.bundle(bundle_id)
        if bundle is None:
            return None
        built = self.load(self._store, bundle)
        name = f"{built.revision}-{bundle_id}" if built.rows else None
        if name:
            self._store.data.built[name] = replace(built, name=name)
        self._store.set_index(bundle.key, name, built.revision)
        on_progress(len(built.rows), len(built.rows))
        if name is None:
            return None
        return BuildReport(
            name=name, revision=built.revision, images=len(built.rows), is_new=True,
            kind="exact", recall=1.0, target=1.0, effort=0, scans=False,
        )  # fmt: skip

    def is_building(self) -> bool:
        return False

    def newest_revision(self) -> int:
        return max((built.revision for built in self._store.data.built.values()), default=0)

    def clean(self) -> None:
        named = {bundle.index_name for bundle in self._store.bundles()}
        for name in self._store.data.built.keys() - named:
            del self._store.data.built[name]

    def close(self) -> None:
        pass

    def files(self, bundle: BundleRow) -> dict[str, Path]:
        raise LookalikeError("An index in memory has no files.")
