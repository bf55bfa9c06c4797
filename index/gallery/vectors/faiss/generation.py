"""Generations: what the catalogue holds for one bundle, in a form that is searched fast and opened at once.

A generation is immutable and memory-mapped: a FAISS index over positions, and arrays that say which image and item
each position is. It is written under a temporary name, fsynced and renamed before the catalogue names it.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from index._util.files import atomic_write_text, chunked_digest, fsync_directory, temporary_sibling
from index._util.models import Frozen
from index.errors import LookalikeError
from index.gallery.store.sqlite_reader import Reader
from index.gallery.types import Item, StoredImage
from index.gallery.vectors.faiss.arrays import ArraysError, Texts, open_arrays, pack_texts, write_arrays
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

INDEX_FILE, RECORDS_FILE, MANIFEST_FILE = "index.faiss", "records.arrays", "manifest.json"
_REMEDY = "It can be made again: lookalike gallery compact."
DEAD = -1
"""The key at a position whose image has gone or was replaced since an index was begun: it is never answered."""


class GenerationError(LookalikeError):
    """A generation that is missing or damaged; it can always be made again from the catalogue."""

    kind = "generation"


class Manifest(Frozen):
    """What a generation holds, beside its files."""

    schema_version: Literal[3] = 3
    name: str
    bundle_id: str
    change: int = Field(description="the catalogue's change number that it reflects")
    images: int
    items: int
    dead: int = Field(description="positions whose images have gone")
    dimension: int
    plan: Plan
    digests: dict[str, str] = Field(description="of each file, over its pieces; of this one without its own")


class Records(NamedTuple):
    """The images and items of one bundle as the catalogue holds them, images by key."""

    change: int
    keys: NDArray[np.int64]
    changes: NDArray[np.int64]
    """Of each image the change that brought its vector."""
    owners: NDArray[np.int32]
    """Of each image the place of its item."""
    image_ids: list[str]
    digests: NDArray[np.uint8]
    item_keys: NDArray[np.int64]
    items: dict[str, NDArray[Any]]
    """The items' packed records and columns."""


def read_records(reader: Reader, bundle: int) -> Records:
    """Reads all but the vectors; within one instant of the reader."""
    item_keys: list[int] = []
    texts: list[str] = []
    attributes: list[Mapping[str, Any]] = []
    for key, item in reader.items(bundle):
        item_keys.append(key)
        texts.append(json.dumps([item.id, item.title, item.url, item.attributes], ensure_ascii=False))
        attributes.append(item.attributes)
    rows = list(reader.images(bundle))
    keys = np.array(item_keys, np.int64)
    offsets, blob = pack_texts(texts)
    return Records(
        change=reader.change(),
        keys=np.array([row[0] for row in rows], np.int64),
        changes=np.array([row[4] for row in rows], np.int64),
        owners=np.searchsorted(keys, np.array([row[1] for row in rows], np.int64)).astype(np.int32),
        image_ids=[row[2] for row in rows],
        digests=np.frombuffer(bytes.fromhex("".join(row[3] for row in rows)), np.uint8).reshape(-1, 32),
        item_keys=keys,
        items={"items/offsets": offsets, "items/blob": blob, **encode_columns(attributes)},
    )


def pack(records: Records, keys: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """The arrays of a generation whose position p holds the image keys[p], or nobody where that is DEAD."""
    # A dead position borrows the last row: it is masked, so nobody looks.
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
    """A searcher over positions, and what each position is."""

    def __init__(self, name: str | None, change: int, searcher: Searcher, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Without a name it was never written: it stands in until a generation is."""
        self.name = name
        self.change = change
        self.searcher = searcher
        self.keys: NDArray[np.int64] = arrays["keys"]
        self.owners: NDArray[np.int32] = arrays["owners"]
        self.item_keys: NDArray[np.int64] = arrays["item_keys"]
        self.columns = Columns(arrays)
        self._digests = arrays["digests"]
        self._image_ids = Texts(arrays["images/offsets"], arrays["images/blob"])
        self._items = Texts(arrays["items/offsets"], arrays["items/blob"])
        self.most_images = int(np.bincount(self.owners[self.keys != DEAD]).max(initial=0)) if len(self.keys) else 0
        self.alive = self.keys != DEAD

    @classmethod
    def in_memory(cls, reader: Reader, bundle: int, dimension: int) -> "Generation":
        """An exact one straight from the catalogue, for as long as there is none on disk that can be trusted."""
        records = read_records(reader, bundle)
        vectors = np.empty((len(records.keys), dimension), np.float16)
        reader.vectors(bundle, 0, vectors)
        searcher = Searcher(exact_index(vectors), EXACT)
        return cls(None, records.change, searcher, pack(records, records.keys))

    def item(self, owner: int) -> Item:
        item_id, title, url, attributes = json.loads(self._items[owner])
        return Item.model_construct(id=item_id, title=title, url=url, attributes=attributes)

    def image(self, position: int) -> StoredImage:
        digest = self._digests[position].tobytes().hex()
        return StoredImage.model_construct(id=self._image_ids[position], digest=digest)

    @cached_property
    def _by_key(self) -> NDArray[np.int64]:
        """Positions in the order of their keys; an extended generation has younger vectors of older images last."""
        return np.argsort(self.keys, kind="stable")

    def positions(self, keys: Sequence[int]) -> NDArray[np.int64]:
        """Where those of the image keys are that the generation holds."""
        wanted = np.unique(np.array(keys, np.int64))
        places = np.searchsorted(self.keys, wanted, sorter=self._by_key)
        positions = self._by_key[np.minimum(places, len(self.keys) - 1)] if len(self.keys) else places[:0]
        return positions[self.keys[positions] == wanted] if len(positions) else positions

    def owners_of(self, item_keys: Sequence[int]) -> dict[int, int]:
        """Place of an item to its key, for those of the keys that the generation holds."""
        wanted = np.array(item_keys, np.int64)
        places = np.searchsorted(self.item_keys, wanted)
        found = places < len(self.item_keys)
        found[found] = self.item_keys[places[found]] == wanted[found]
        return dict(zip(places[found].tolist(), wanted[found].tolist(), strict=True))


def read_manifest(directory: Path) -> Manifest:
    """What a generation says of itself."""
    try:
        manifest = Manifest.model_validate_json((directory / MANIFEST_FILE).read_bytes())
    except (OSError, ValidationError) as error:
        raise GenerationError(f"The generation {directory} cannot be read: {error}.", _REMEDY) from None
    if manifest.digests.get(MANIFEST_FILE) != _digest(manifest):
        raise GenerationError(f"{directory / MANIFEST_FILE} is not as it was written.", _REMEDY)
    return manifest


def _digest(manifest: Manifest) -> str:
    """Of all that a manifest says but this."""
    files = {name: digest for name, digest in manifest.digests.items() if name != MANIFEST_FILE}
    return sha256(manifest.model_copy(update={"digests": files}).model_dump_json().encode()).hexdigest()


def open_generation(directory: Path) -> tuple[Generation, Manifest]:
    """Opens a generation after checking every byte of it."""
    manifest = read_manifest(directory)
    try:
        for name in (INDEX_FILE, RECORDS_FILE):
            if chunked_digest(directory / name) != manifest.digests.get(name):
                raise GenerationError(f"{directory / name} is not as it was written.", _REMEDY)
        arrays = open_arrays(directory / RECORDS_FILE)
        searcher = Searcher(open_index(directory / INDEX_FILE), manifest.plan)
    except (OSError, ArraysError, IndexFileError) as error:
        # Whole a moment ago or not, a compaction may remove it at any time.
        raise GenerationError(f"The generation {directory} cannot be read: {error}.", _REMEDY) from None
    return Generation(directory.name, manifest.change, searcher, arrays), manifest


def write_generation(
    directory: Path,
    *,
    bundle_id: str,
    dimension: int,
    change: int,
    index: Any,
    plan: Plan,
    arrays: dict[str, NDArray[Any]],
) -> None:
    """Writes a new generation, whole or not at all."""
    temporary = temporary_sibling(directory)
    temporary.mkdir(parents=True)
    try:
        write_index(index, temporary / INDEX_FILE)
        write_arrays(temporary / RECORDS_FILE, arrays)
        dead = int(np.count_nonzero(arrays["keys"] == DEAD))
        manifest = Manifest(
            name=directory.name,
            bundle_id=bundle_id,
            change=change,
            images=len(arrays["keys"]) - dead,
            items=len(arrays["item_keys"]),
            dead=dead,
            dimension=dimension,
            plan=plan,
            digests={name: chunked_digest(temporary / name) for name in (INDEX_FILE, RECORDS_FILE)},
        )
        manifest.digests[MANIFEST_FILE] = _digest(manifest)
        atomic_write_text(temporary / MANIFEST_FILE, manifest.model_dump_json(indent=2) + "\n")
        temporary.rename(directory)
        fsync_directory(directory.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
