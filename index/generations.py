"""Generations: immutable FAISS files derived from the catalogue, and the pointer to the live one.

A generation is written under a temporary name, fsynced and renamed before `CURRENT` names it, so a reader
sees a whole one or the one before.
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from index.engines import faiss
from index.errors import LookalikeError
from index.files import file_digest, fsync_directory, write_text
from index.items import Frozen

CURRENT = "CURRENT"
_INDEX = "index.faiss"
_MANIFEST = "manifest.json"


class GenerationError(LookalikeError):
    """A generation that is missing or damaged; it can always be made again from the catalogue."""

    kind = "generation"


class Manifest(Frozen):
    """What a generation holds, beside its index file."""

    schema_version: int = 1
    bundle_id: str
    change: int = Field(description="the catalogue's change number that it reflects")
    count: int
    dimension: int
    digest: str = Field(description="SHA-256 of the index file")


class Generation:
    """A loaded generation: an exact inner-product index in half precision over image keys."""

    def __init__(self, name: str, manifest: Manifest, index: object) -> None:
        self.name = name
        self.manifest = manifest
        self._index = index

    @classmethod
    def load(cls, directory: Path) -> "Generation":
        remedy = "Run `lookalike reindex` again: unchanged images are not embedded a second time."
        try:
            manifest = Manifest.model_validate_json((directory / _MANIFEST).read_text(encoding="utf-8"))
        except (OSError, ValidationError) as error:
            raise GenerationError(f"The generation {directory} has no readable manifest: {error}.", remedy) from None
        path = directory / _INDEX
        if not path.is_file() or file_digest(path) != manifest.digest:
            raise GenerationError(f"The generation {directory} is damaged or incomplete.", remedy)
        return cls(directory.name, manifest, faiss().read_index(str(path)))

    def search(self, vectors: NDArray[np.float32], count: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Scores and image keys of shape (queries, count); -1 fills up where there are fewer images."""
        scores, keys = self._index.search(np.ascontiguousarray(vectors), count)  # type: ignore[attr-defined]
        return scores, keys


def write_generation(
    root: Path, *, bundle_id: str, change: int, keys: NDArray[np.int64], vectors: NDArray[np.float32]
) -> str:
    """Builds a generation under `root` and answers its name."""
    library = faiss()
    dimension = vectors.shape[1]
    index = library.IndexIDMap2(
        library.IndexScalarQuantizer(dimension, library.ScalarQuantizer.QT_fp16, library.METRIC_INNER_PRODUCT)
    )
    index.add_with_ids(vectors, keys)
    root.mkdir(parents=True, exist_ok=True)
    name = f"{change:012d}-{bundle_id}"
    temporary = root / f".{name}.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    library.write_index(index, str(temporary / _INDEX))
    with (temporary / _INDEX).open("rb+") as file:
        os.fsync(file.fileno())
    manifest = Manifest(
        bundle_id=bundle_id,
        change=change,
        count=len(keys),
        dimension=dimension,
        digest=file_digest(temporary / _INDEX),
    )
    write_text(temporary / _MANIFEST, manifest.model_dump_json(indent=2) + "\n")
    if (root / name).exists():  # the same change number built again, because the first was damaged
        shutil.rmtree(root / name)
    temporary.rename(root / name)
    fsync_directory(root)
    return name


def switch(root: Path, name: str) -> None:
    """Makes a generation the live one, for every process at its next search."""
    write_text(root / CURRENT, json.dumps({"generation": name}) + "\n")


def current(root: Path) -> str | None:
    """The name of the live generation; none before the first activation."""
    try:
        text = (root / CURRENT).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    name: str = json.loads(text)["generation"]
    return name
