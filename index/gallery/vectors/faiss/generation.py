"""Generations: one bundle's vectors and records as of one revision, in files that are fast to open and to search.

A generation is immutable and memory-mapped: a FAISS index over positions, and arrays with the image and item of each
position. It is written under a temporary name, fsynced and renamed before the store names it.
"""

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from index._util.files import atomic_write_text, chunked_digest, fsync_directory, temporary_directory
from index._util.models import Frozen
from index.gallery.errors import RESTORE, IndexDamaged, StoreError
from index.gallery.store.base import BundleRow, StoreReader
from index.gallery.types import Attribute, Item, StoredImage
from index.gallery.vectors.faiss.arrays import ArraysError, TextPacker, Texts, open_arrays, pack_texts, write_arrays
from index.gallery.vectors.faiss.columns import Columns, encode_columns
from index.gallery.vectors.faiss.searcher import (
    EXACT,
    IndexFileError,
    Plan,
    Searcher,
    exact_index,
    open_index,
    write_index,
)
from index.gallery.vectors.faiss.settings import FaissSettings
from index.items import EXPIRES_AT, parse_attributes

INDEX_FILE, RECORDS_FILE, MANIFEST_FILE = "index.faiss", "records.arrays", "manifest.json"
_REMEDY = "Rebuild it: lookalike gallery compact."
DEAD = -1
"""The key of a position whose image was removed or replaced since the index was built: it is never returned."""


class Manifest(Frozen):
    """`manifest.json`: what the other files of a generation hold."""

    schema_version: Literal[7] = 7
    name: str
    bundle_id: str
    revision: int = Field(description="the store's revision that it reflects")
    images: int
    items: int
    dead: int = Field(description="positions whose images were removed")
    dimension: int
    plan: Plan
    digests: dict[str, str] = Field(description="chunked digest of each file; of the manifest without this entry")


class Records(NamedTuple):
    """The images and items of one bundle as the store holds them, images by key."""

    revision: int
    keys: NDArray[np.int64]
    revisions: NDArray[np.int64]
    """The revision that stored each image's vector."""
    owners: NDArray[np.int32]
    """The row of each image's item in `item_keys`."""
    image_ids: list[str]
    digests: NDArray[np.uint8]
    item_keys: NDArray[np.int64]
    items: dict[str, NDArray[Any]]
    """The packed records and columns of the items."""


def read_records(reader: StoreReader, bundle: int) -> Records:
    """Reads everything but the vectors, row by row into arrays: Python objects take several times the memory."""
    item_keys, texts = array("q"), TextPacker()

    def read_attributes() -> Iterator[Mapping[str, Attribute]]:
        for key, item in reader.items(bundle):
            item_keys.append(key)
            texts.append(json.dumps([item.id, item.title, item.url, item.attributes], ensure_ascii=False))
            yield item.attributes

    columns = encode_columns(read_attributes())
    keys, revisions, items, digests = array("q"), array("q"), array("q"), bytearray()
    image_ids: list[str] = []
    for row in reader.image_records(bundle):
        keys.append(row.key)
        revisions.append(row.revision)
        items.append(row.item)
        image_ids.append(row.id)
        digests += _parse_digest(row.digest)
    offsets, blob = texts.arrays()
    item_rows = np.frombuffer(item_keys, np.int64)
    return Records(
        revision=reader.revision(),
        keys=np.frombuffer(keys, np.int64),
        revisions=np.frombuffer(revisions, np.int64),
        owners=np.searchsorted(item_rows, np.frombuffer(items, np.int64)).astype(np.int32),
        image_ids=image_ids,
        digests=np.frombuffer(digests, np.uint8).reshape(len(keys), 32),
        item_keys=item_rows,
        items={"items/offsets": offsets, "items/blob": blob, **columns},
    )


def _parse_digest(digest: str) -> bytes:
    try:
        parsed = bytes.fromhex(digest)
    except (ValueError, TypeError):
        parsed = b""
    if len(parsed) != 32:
        raise StoreError("The store is damaged: the digest of an image is invalid.", RESTORE)
    return parsed


def pack(records: Records, keys: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Returns the arrays of a generation whose position p holds the image keys[p], or none where that is DEAD."""
    # A dead position gets some valid row: it is masked, so nothing reads it.
    rows = np.minimum(np.searchsorted(records.keys, keys), len(records.keys) - 1)
    offsets, blob = pack_texts(records.image_ids[row] for row in rows.tolist())
    return {
        "keys": keys,
        "owners": records.owners[rows],
        "digests": records.digests[rows],
        "images/offsets": offsets,
        "images/blob": blob,
        "item_keys": records.item_keys,
        **records.items,
    }


class Generation:
    """A searcher over positions, and the image and item of each position."""

    def __init__(self, name: str | None, revision: int, searcher: Searcher, arrays: Mapping[str, NDArray[Any]]) -> None:
        """A generation without a name was never written: it stands in until there is one."""
        self.name = name
        self.revision = revision
        self.searcher = searcher
        self.keys: NDArray[np.int64] = arrays["keys"]
        self.owners: NDArray[np.int32] = arrays["owners"]
        self.item_keys: NDArray[np.int64] = arrays["item_keys"]
        self.columns = Columns(arrays)
        self._digests = arrays["digests"]
        self._image_ids = Texts(arrays["images/offsets"], arrays["images/blob"])
        self._items = Texts(arrays["items/offsets"], arrays["items/blob"])
        self.expiries: Sequence[int] = self.columns.instants(EXPIRES_AT)
        """The instants at which its items expire, sorted."""
        self.alive = self.keys != DEAD
        self.images = int(np.count_nonzero(self.alive))
        self.max_images_per_item = int(np.bincount(self.owners[self.alive]).max(initial=0)) if self.images else 0

    @classmethod
    def in_memory(cls, reader: StoreReader, bundle: BundleRow) -> "Generation":
        """Returns an exact generation of the store's vectors, while there is none on disk that can be opened."""
        records = read_records(reader, bundle.key)
        vectors = np.empty((len(records.keys), bundle.dimension), np.float16)
        reader.vectors(bundle.key, 0, vectors)
        searcher = Searcher(exact_index(vectors), EXACT)
        return cls(None, records.revision, searcher, pack(records, records.keys))

    def item(self, owner: int) -> Item:
        item_id, title, url, attributes = json.loads(self._items[owner])
        return Item.model_construct(id=item_id, title=title, url=url, attributes=parse_attributes(attributes))

    def image(self, position: int) -> StoredImage:
        digest = self._digests[position].tobytes().hex()
        return StoredImage.model_construct(id=self._image_ids[position], digest=digest)

    @cached_property
    def _by_key(self) -> NDArray[np.int64]:
        """Positions in the order of their keys; an extended generation has newer vectors of older images last."""
        return np.argsort(self.keys, kind="stable")

    def positions(self, keys: Sequence[int]) -> NDArray[np.int64]:
        """Returns the positions of those image keys that the generation holds."""
        wanted = np.unique(np.array(keys, np.int64))
        ranks = np.searchsorted(self.keys, wanted, sorter=self._by_key)
        positions = self._by_key[np.minimum(ranks, len(self.keys) - 1)] if len(self.keys) else ranks[:0]
        return positions[self.keys[positions] == wanted] if len(positions) else positions

    def item_rows(self, item_keys: Sequence[int]) -> dict[int, int]:
        """Returns item key to row, for those keys that the generation holds."""
        wanted = np.array(item_keys, np.int64)
        rows = np.searchsorted(self.item_keys, wanted)
        found = rows < len(self.item_keys)
        found[found] = self.item_keys[rows[found]] == wanted[found]
        return dict(zip(wanted[found].tolist(), rows[found].tolist(), strict=True))


def read_manifest(directory: Path) -> Manifest:
    """Reads the manifest of a generation and checks its digest."""
    try:
        manifest = Manifest.model_validate_json((directory / MANIFEST_FILE).read_bytes())
    except (OSError, ValidationError) as error:
        raise IndexDamaged(f"The generation {directory} cannot be read: {error}.", _REMEDY) from None
    if manifest.digests.get(MANIFEST_FILE) != _digest(manifest):
        raise IndexDamaged(f"{directory / MANIFEST_FILE} differs from what was written.", _REMEDY)
    return manifest


def _digest(manifest: Manifest) -> str:
    """Returns the digest of a manifest without the digest itself."""
    files = {name: digest for name, digest in manifest.digests.items() if name != MANIFEST_FILE}
    return sha256(manifest.model_copy(update={"digests": files}).model_dump_json().encode()).hexdigest()


def open_generation(directory: Path, settings: FaissSettings | None = None) -> tuple[Generation, Manifest]:
    """Opens a generation after checking every byte of it."""
    manifest = read_manifest(directory)
    try:
        for name in (INDEX_FILE, RECORDS_FILE):
            if chunked_digest(directory / name) != manifest.digests.get(name):
                raise IndexDamaged(f"{directory / name} differs from what was written.", _REMEDY)
        arrays = open_arrays(directory / RECORDS_FILE)
        searcher = Searcher(open_index(directory / INDEX_FILE), manifest.plan, settings)
    except (OSError, ArraysError, IndexFileError) as error:
        # A compaction may remove the files at any time.
        raise IndexDamaged(f"The generation {directory} cannot be read: {error}.", _REMEDY) from None
    return Generation(directory.name, manifest.revision, searcher, arrays), manifest


def write_generation(
    directory: Path,
    *,
    bundle_id: str,
    dimension: int,
    revision: int,
    index: Any,
    plan: Plan,
    arrays: dict[str, NDArray[Any]],
) -> None:
    """Writes a new generation atomically."""
    with temporary_directory(directory) as temporary:
        write_index(index, temporary / INDEX_FILE)
        write_arrays(temporary / RECORDS_FILE, arrays)
        dead = int(np.count_nonzero(arrays["keys"] == DEAD))
        manifest = Manifest(
            name=directory.name,
            bundle_id=bundle_id,
            revision=revision,
            images=len(arrays["keys"]) - dead,
            items=len(arrays["item_keys"]),
            dead=dead,
            dimension=dimension,
            plan=plan,
            digests={name: chunked_digest(temporary / name) for name in (INDEX_FILE, RECORDS_FILE)},
        )
        manifest = manifest.model_copy(update={"digests": {**manifest.digests, MANIFEST_FILE: _digest(manifest)}})
        atomic_write_text(temporary / MANIFEST_FILE, manifest.model_dump_json(indent=2) + "\n")
        temporary.rename(directory)
        fsync_directory(directory.parent)
