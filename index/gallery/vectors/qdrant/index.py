"""The vector index of a gallery on a Qdrant cluster: a collection per build, to which changes are applied."""

import hashlib
import logging
import re
import secrets
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from index.gallery.errors import IndexDamaged, IndexUnavailable
from index.gallery.store.base import BundleRow, ItemStore, StoreReader
from index.gallery.types import BuildReport, Progress, no_progress
from index.gallery.vectors.base import BuiltIndex
from index.gallery.vectors.faiss.generation import Generation
from index.gallery.vectors.faiss.settings import FaissSettings
from index.gallery.vectors.qdrant.applier import apply_changes
from index.gallery.vectors.qdrant.built import ENGINE, LoadedVectors, QdrantBuiltIndex
from index.gallery.vectors.qdrant.collection import Collection, CollectionState
from index.gallery.vectors.qdrant.nodes import Nodes, messages
from index.gallery.vectors.qdrant.settings import QdrantAddress, QdrantSettings
from index.gallery.vectors.qdrant.upload import fill_collection
from index.items import EXPIRES_AT

_REMEDY = "Rebuild it: lookalike gallery compact."
_NAME = re.compile(r"(?P<collection>[^@]+)@(?P<revision>\d+)\.[0-9a-f]+")
BuildLock = Callable[..., AbstractContextManager[Callable[[], None] | None]]
"""`lock(wait=...)` holds the lock that one build of the gallery has, or yields None without waiting.

What it yields otherwise raises an error once the lock was lost.
"""
_SETTLE_SECONDS = 3.0
"""How long nodes may differ in what they know of a collection's metadata."""

log = logging.getLogger(__name__)


class QdrantIndex:
    """Collections of a gallery's bundles; any number of processes may share them.

    The store names an index as `collection@revision.step`. A step applies changes to the collection and then records a
    new name. Until a reader opens that name, it masks all that has changed since its own.
    """

    engine = ENGINE

    def __init__(
        self,
        address: str,
        store: ItemStore,
        lock: BuildLock,
        settings: QdrantSettings | None = None,
        *,
        identity: str = "",
    ) -> None:
        """`identity` distinguishes the gallery from others that were given the same prefix by mistake."""
        nodes, self._prefix, parsed = QdrantAddress.parse(address)
        self._settings = settings or parsed
        self._nodes = Nodes(nodes, self._settings)
        self._store = store
        self._lock = lock
        self._mark = hashlib.sha256(identity.encode()).hexdigest()[:8]

    def open(self, bundle: BundleRow, before_write: Callable[[], None] | None = None) -> QdrantBuiltIndex:
        """Opens an index; `before_write` is called before each write to its collection."""
        name = str(bundle.index_name)
        collection, revision = self._parse(name, before_write)
        state = self._settled_state(collection, bundle)
        if (state.bundle_id, state.dimension) != (bundle.id, bundle.dimension) or revision != bundle.index_revision:
            raise IndexDamaged(f"The collection {collection.name} is not that of bundle {bundle.id}.", _REMEDY)
        expiry = collection.first_expiry() if ("d", EXPIRES_AT) in state.fields else None
        return QdrantBuiltIndex(collection, name, revision, state, self._settings, first_expiry=expiry)

    def _parse(self, name: str, before_write: Callable[[], None] | None = None) -> tuple[Collection, int]:
        match = _NAME.fullmatch(name)
        if match is None:
            raise IndexDamaged(f"The index {name} is not in Qdrant.", _REMEDY)
        return Collection(self._nodes, match["collection"], self._settings, before_write), int(match["revision"])

    def _settled_state(self, collection: Collection, bundle: BundleRow) -> CollectionState:
        """Returns the state of a collection that was brought to an index, or is being brought to the next one.

        Otherwise the store was restored, and its changes are not those that the collection has. Nodes learn a new state
        one after the other.
        """
        deadline = time.monotonic() + _SETTLE_SECONDS
        while bundle.index_name not in ((state := collection.state()).last, state.next):
            current = self._store.read.bundle(bundle.id)
            if time.monotonic() > deadline or current is None or current.index_name != bundle.index_name:
                raise IndexDamaged(f"The index is at {state.next}, not at {bundle.index_name}.", _REMEDY)
            time.sleep(0.1)
        return state

    def load(self, reader: StoreReader, bundle: BundleRow) -> BuiltIndex:
        images, limit = reader.image_count(bundle.key), self._settings.memory_up_to
        if images > limit:
            raise IndexUnavailable(
                f"Bundle {bundle.id} has {images:,} images and no collection; {limit:,} fit into memory.",
                "Wait for its build, or start one: lookalike gallery compact.",
            )
        generation = Generation.in_memory(reader, bundle)
        return LoadedVectors(generation, FaissSettings(), 0, generation.alive)

    def build(
        self, bundle_id: str, *, rebuild: bool = False, wait: bool = True, on_progress: Progress = no_progress
    ) -> BuildReport | None:
        with self._lock(wait=wait) as check_lock:
            bundle = self._store.read.bundle(bundle_id)
            if not check_lock or bundle is None:
                return None
            before = bundle.index_name
            built = None if rebuild else self._open_last(bundle, check_lock)
            if built is None:
                self._remove_unused(grace=False)
                collection = Collection(self._nodes, self._new_name(bundle), self._settings, check_lock)
                fill_collection(self._store, bundle, collection, self._settings, on_progress)
            else:
                apply_changes(self._store, bundle, built, on_progress)
            current = self._store.read.bundle(bundle_id)
            if current is None or current.index_name is None:
                self._remove_unused(grace=False)
                return None
            if built is None:
                self._switch_alias(current)
                self._remove_unused(grace=before is not None)
            return _report(self.open(current), is_new=current.index_name != before)

    def _open_last(self, bundle: BundleRow, check_lock: Callable[[], None]) -> QdrantBuiltIndex | None:
        """Opens the index that the store names, if there is one to which changes can be applied."""
        if bundle.index_name is None:
            return None
        try:
            return self.open(bundle, check_lock)
        except IndexDamaged as error:
            log.warning("%s", error)
            return None

    def _new_name(self, bundle: BundleRow) -> str:
        revision = self._store.read.revision()
        return f"{self._prefix}.{bundle.id}.{revision:012d}.{self._mark}{secrets.token_hex(4)}"

    def is_building(self) -> bool:
        with self._lock(wait=False) as is_locked:
            return not is_locked

    def newest_revision(self) -> int:
        """Returns the highest revision at which a collection was built; 0 while no node answers."""
        try:
            return max((revision for _, revision in self._collections()), default=0)
        except IndexUnavailable as error:
            log.warning("%s", error)
            return 0

    def clean(self) -> None:
        with self._lock(wait=True):
            self._remove_unused(grace=False)

    def close(self) -> None:
        self._nodes.close()

    def files(self, bundle: BundleRow) -> dict[str, Path]:
        """Returns no files: whoever restores the store builds the index from it."""
        return {}

    def _collections(self) -> list[tuple[str, int]]:
        """Returns the collections of the gallery, with the revisions in their names."""
        pattern = re.compile(rf"{re.escape(self._prefix)}\.[^.]+\.(\d{{12}})\.{self._mark}[0-9a-f]{{8}}")
        listed = self._nodes.call("Collections", "List", messages().ListCollectionsRequest()).collections
        return [(one.name, int(match[1])) for one in listed if (match := pattern.fullmatch(one.name))]

    def _switch_alias(self, bundle: BundleRow) -> None:
        """Lets the alias `prefix.bundle` name the collection, for operators: searches go to what the store names."""
        q = messages()
        name = self._parse(str(bundle.index_name))[0].name
        alias = q.CreateAlias(collection_name=name, alias_name=f"{self._prefix}.{bundle.id}")
        request = q.ChangeAliases(actions=[q.AliasOperations(create_alias=alias)])
        self._nodes.call("Collections", "UpdateAliases", request, self._settings.write_timeout)

    def _remove_unused(self, *, grace: bool) -> None:
        """Removes collections that no bundle names. With `grace`, searches that began before get the time to end.

        One that is newer than the store is kept: it is the evidence that the store has lost writes.
        """
        named = {str(bundle.index_name).partition("@")[0] for bundle in self._store.read.bundles()}
        revision = self._store.read.revision()
        unused = [name for name, built in self._collections() if name not in named and built <= revision]
        if unused and grace:
            time.sleep(self._settings.apply_delay)
        for name in unused:
            Collection(self._nodes, name, self._settings).drop()


def _report(built: QdrantBuiltIndex, *, is_new: bool) -> BuildReport:
    state = built.state
    return BuildReport(
        name=built.name,
        revision=built.revision,
        images=state.images,
        is_new=is_new,
        kind=state.kind,
        recall=state.recall,
        target=state.target,
        effort=state.effort,
        scans=state.kind != "exact" and not state.effort,
    )
