"""Compaction: when the last generation is extended, and when it is rebuilt."""

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


def add_vectors(gallery: Gallery, names: range, vectors: NDArray[np.float64]) -> None:
    entries = zip(names, vectors, strict=True)
    gallery.upsert([(Item(id=f"{name:04d}"), [photo("front", unit(*vector))]) for name, vector in entries], BUNDLE)
    gallery.compact()


def read_newest(folder: Path) -> Manifest:
    [generation] = (folder / GENERATIONS).iterdir()
    return read_manifest(generation)


@pytest.mark.slow
def test_a_few_unusual_new_vectors_do_not_make_every_search_scan(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A graph search does not find random vectors; a few among many must not turn every search into a scan."""
    # A scan costs nothing, so no effort beyond the listed ones is tried.
    settings = FaissSettings(exact_up_to=100, scan_cost=0, graph_efforts=(16, 24, 32))
    random = np.random.default_rng(0)
    clustered = random.standard_normal((60, 64))[random.integers(60, size=6000)] + 0.1 * random.standard_normal(
        (6000, 64)
    )
    with closing(open_gallery(tmp_path, create=True, faiss_settings=settings)) as gallery:
        add_vectors(gallery, range(6000), clustered)
        assert not read_newest(tmp_path).plan.scans
        add_vectors(gallery, range(6000, 6130), random.standard_normal((130, 64)))
        assert "No effort reaches" in caplog.text, "for the new vectors alone"
        found = read_newest(tmp_path)
        assert found.images == 6130 and not found.plan.scans and found.plan.recall >= found.plan.target
