"""Verification: whether a gallery is what it should be, from SQLite's pages to the vectors that a search compares.

The catalogue is the truth, so everything else is compared with it, all of one instant, while others read and write.
"""

import json
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from index.embedding.bundle import Bundle
from index.errors import LookalikeError
from index.gallery.backup import existing_catalogue
from index.gallery.gallery import BUNDLES
from index.gallery.store.sqlite import Catalogue, CatalogueError
from index.gallery.store.sqlite_reader import BundleRow, Reader, WholeImage
from index.gallery.types import Item
from index.gallery.vectors.faiss.compaction import GENERATIONS
from index.gallery.vectors.faiss.generation import Manifest, open_generation
from index.gallery.vectors.view import Segment, State

_EXAMPLES = 3
_UNFOUND = "{count} images of the catalogue are found by no search: {examples}"
_GONE = "{count} images are found by searches, but the catalogue does not have them: {examples}"
_RECORD = "{count} images are answered with another item, id or digest than the catalogue's: {examples}"
_VECTOR = "{count} images are searched by another vector than the catalogue's: {examples}"


class Fault(NamedTuple):
    """Something wrong with a gallery, and what to do about it."""

    problem: str
    remedy: str


def verify(directory: Path, *, on_progress: Callable[[int, int], None] = lambda done, total: None) -> list[Fault]:
    """Everything that is wrong with a gallery: every byte of its generations, and every image, is looked at."""
    restored = "Restore a snapshot: lookalike gallery restore. What came after it, `lookalike reindex` brings back."
    faults: list[Fault] = []
    try:
        with existing_catalogue(directory) as catalogue:
            fault = catalogue.read.fault()
            wrong = [f"SQLite finds the catalogue damaged: {fault}"] if fault else catalogue.read.malformed()
            faults += [Fault(f"{problem}.", restored) for problem in wrong]
            current = catalogue.read.current().bundle
            for bundle in catalogue.read.bundles():
                faults += _kept_faults(directory / BUNDLES / bundle.id, bundle.id)
                live = current is not None and bundle.id == current.id
                faults += _generation_faults(directory, catalogue, bundle.id, live, not wrong and live, on_progress)
    except CatalogueError as error:
        faults.append(Fault(error.problem, restored))
    except sqlite3.DatabaseError as error:
        faults.append(Fault(f"The catalogue cannot be read to its end: {error}.", restored))
    return faults


def _kept_faults(directory: Path, bundle_id: str) -> list[Fault]:
    """Those of the copy of a bundle, if the gallery keeps one."""
    remedy = f"Put the bundle {bundle_id} in its place."
    try:
        found = Bundle.load(directory).id if directory.exists() else bundle_id
    except LookalikeError as error:
        return [Fault(error.problem, remedy)]
    return [] if found == bundle_id else [Fault(f"{directory} holds the bundle {found}.", remedy)]


def _generation_faults(
    directory: Path,
    catalogue: Catalogue,
    bundle_id: str,
    live: bool,
    compare: bool,
    on_progress: Callable[[int, int], None],
) -> list[Fault]:
    again = f"Make it again: lookalike gallery compact {directory}" if live else "An activation of its bundle mends it"
    while True:
        with catalogue.reading() as reader:
            bundle = reader.bundle(bundle_id)
            if bundle is None or bundle.generation is None:
                return []
            try:
                generation, manifest = open_generation(directory / GENERATIONS / bundle.generation)
            except LookalikeError as error:
                now = catalogue.read.bundle(bundle_id)
                if now and now.generation == bundle.generation:
                    return [Fault(error.problem, f"{again}.")]
                continue  # a compaction replaced it while we looked
            problems = _manifest_problems(bundle, manifest)
            if compare and not problems:
                changes = reader.changes(bundle.key, generation.change)
                state = State.of(bundle, generation).following(changes)
                problems = _differences(reader, state, on_progress)
            rebuilt = f"The catalogue decides: lookalike gallery compact {directory} --rebuild" if live else again
            doubt = "; but if nobody changed it by hand, restore a snapshot." if compare else "."
            return [Fault(f"{problem}.", rebuilt + doubt) for problem in problems]


def _manifest_problems(bundle: BundleRow, manifest: Manifest) -> list[str]:
    """How a generation that is whole in itself is another one than the catalogue names."""
    said = (manifest.name, manifest.bundle_id, manifest.change, manifest.dimension)
    wanted = (bundle.generation, bundle.id, bundle.generation_change, bundle.dimension)
    fields = ("name", "bundle", "change", "dimension")
    return [
        f"The generation {bundle.generation} has {field} {one}, not {other}"
        for field, one, other in zip(fields, said, wanted, strict=True)
        if one != other
    ]


def _differences(reader: Reader, state: State, on_progress: Callable[[int, int], None]) -> list[str]:
    """Compares what searches can answer with the catalogue, image by image."""
    found: dict[str, list[str]] = defaultdict(list)
    living = _Living(state.segments(None))
    total, done = reader.image_count(state.bundle.key), 0
    for rows in reader.whole_images(state.bundle.key):
        places = living.places([row.key for row in rows])
        found[_UNFOUND] += [_shown(row) for row, place in zip(rows, places.tolist(), strict=True) if place < 0]
        for number, part in enumerate(living.parts):
            mine = np.flatnonzero((places >= 0) & (living.part_of[places] == number))
            if len(mine):
                _compare(part, living.positions[places[mine]], [rows[row] for row in mine.tolist()], found)
        done += len(rows)
        on_progress(done, total)
    found[_GONE] += [f"the image with key {key}" for key in living.keys[~living.seen].tolist()]
    return [_told(problem, examples) for problem, examples in found.items() if examples]


class _Living:
    """All images that a search can answer, by key, and where each of them lies."""

    def __init__(self, parts: list[Segment]) -> None:
        self.parts = parts
        positions = [_positions(part) for part in parts]
        keys = np.concatenate([part.keys(at)[0] for part, at in zip(parts, positions, strict=True)] or [_NONE])
        order = np.argsort(keys, kind="stable")
        self.keys = keys[order]
        self.positions = np.concatenate(positions or [_NONE])[order]
        counts = np.array([len(at) for at in positions], np.int64)
        self.part_of = np.repeat(np.arange(len(parts), dtype=np.int16), counts)[order]
        self.seen = np.zeros(len(keys), np.bool_)

    def places(self, keys: Iterable[int]) -> NDArray[np.int64]:
        """The place of each key in these arrays, or -1; and notes that it was asked for."""
        wanted = np.array(list(keys), np.int64)
        places = np.searchsorted(self.keys, wanted)
        known = places < len(self.keys)
        known[known] = self.keys[places[known]] == wanted[known]
        self.seen[places[known]] = True
        return np.where(known, places, -1)


_NONE = np.empty(0, np.int64)


def _positions(part: Segment) -> NDArray[np.int64]:
    return np.arange(part.searcher.count) if part.selection is None else np.flatnonzero(part.selection.mask)


def _compare(part: Segment, positions: NDArray[np.int64], rows: list[WholeImage], found: dict[str, list[str]]) -> None:
    """Compares images of one part with their rows; the bytes of vectors must be the same."""
    stored = part.searcher.storage.reconstruct_batch(positions).astype("<f2")
    truth = np.frombuffer(b"".join(row.vector for row in rows), "<f2").reshape(stored.shape)
    other = (stored.view(np.uint16) != truth.view(np.uint16)).any(axis=1) | ~np.isfinite(truth).all(axis=1)
    found[_VECTOR] += [_shown(rows[place]) for place in np.flatnonzero(other).tolist()]
    items = part.keys(positions)[1].tolist()
    last = -1
    for row, position, item in zip(rows, positions.tolist(), items, strict=True):
        image = part.image(position)
        same = (item, image.id, image.digest) == (row.item, row.id, row.digest)
        # The images of an item mostly follow each other: it is unpacked once.
        if same and item != last:
            same = _same_item(part.item(position), row)
            last = item if same else -1
        if not same:
            found[_RECORD].append(_shown(row))


def _same_item(item: Item, row: WholeImage) -> bool:
    # As text, since Python takes True, 1 and 1.0 for equal.
    attributes = (json.dumps(one, sort_keys=True) for one in (item.attributes, json.loads(row.attributes)))
    return (item.id, item.title, item.url) == (row.item_id, row.title, row.url) and len(set(attributes)) == 1


def _shown(row: WholeImage) -> str:
    return f"{row.item_id}/{row.id}"


def _told(problem: str, examples: list[str]) -> str:
    more = " and others" if len(examples) > _EXAMPLES else ""
    return problem.format(count=f"{len(examples):,}", examples=", ".join(examples[:_EXAMPLES]) + more)
