"""Which generation a compaction makes of the last one and of what is new."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from index.gallery import Gallery, open_gallery
from index.gallery.types import Item
from index.gallery.vectors.faiss.generation import Manifest, read_manifest
from index.gallery.vectors.faiss.index import GENERATIONS
from index.gallery.vectors.faiss.settings import FaissSettings
from tests.index.gallery.reference import BUNDLE, photo, unit


def fill(gallery: Gallery, names: range, vectors: NDArray[np.float64]) -> None:
    entries = zip(names, vectors, strict=True)
    gallery.upsert([(Item(id=f"{name:04d}"), [photo("front", unit(*vector))]) for name, vector in entries], BUNDLE)
    gallery.compact()


def newest(folder: Path) -> Manifest:
    [generation] = (folder / GENERATIONS).iterdir()
    return read_manifest(generation)


def test_new_pictures_that_no_walk_finds_do_not_make_all_searches_slow(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Random directions have no neighbourhoods to walk in; as few among many they are no reason to scan."""
    # A scan that costs nothing: no effort beyond the listed ones is tried.
    settings = FaissSettings(exact_up_to=100, scan_cost=0, graph_efforts=(16, 24, 32))
    random = np.random.default_rng(0)
    alike = random.standard_normal((60, 64))[random.integers(60, size=6000)] + 0.1 * random.standard_normal((6000, 64))
    with closing(open_gallery(tmp_path, create=True, faiss_settings=settings)) as gallery:
        fill(gallery, range(6000), alike)
        assert not newest(tmp_path).plan.scans
        fill(gallery, range(6000, 6130), random.standard_normal((130, 64)))
        assert "No effort reaches" in caplog.text, "for the new ones alone"
        found = newest(tmp_path)
        assert found.images == 6130 and not found.plan.scans and found.plan.recall >= found.plan.target
