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

LISTS = FaissSettings(exact_up_to=100, hnsw_up_to=100, max_dead_share=0.5)
"""Inverted lists for small galleries."""


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


def clustered_vectors(count: int) -> NDArray[np.float64]:
    random = np.random.default_rng(0)
    return random.standard_normal((20, 64))[random.integers(20, size=count)] + 0.5 * random.standard_normal((count, 64))


def test_inverted_lists_are_extended_and_keep_removed_positions_masked(tmp_path: Path) -> None:
    vectors = clustered_vectors(1500)
    with closing(open_gallery(tmp_path, create=True, faiss_settings=LISTS)) as gallery:
        add_vectors(gallery, range(1000), vectors[:1000])
        gallery.delete([f"{name:04d}" for name in range(100)])
        add_vectors(gallery, range(1000, 1500), vectors[1000:])
        found = read_newest(tmp_path)
        assert (found.plan.kind, found.images, found.dead) == ("ivf", 1400, 100), "extended, not built again"
        hits = gallery.search(np.stack([unit(*row) for row in vectors]), bundle_id=BUNDLE, top=1).hits
        names = [row[0].item.id for row in hits]
        assert names[100:] == [f"{name:04d}" for name in range(100, 1500)]
        assert not {f"{name:04d}" for name in range(100)} & set(names)


def test_inverted_lists_that_became_too_long_are_built_again(tmp_path: Path) -> None:
    vectors = clustered_vectors(1500)
    settings = LISTS.model_copy(update={"max_list_growth": 2.0, "lists_per_root": 0.5})
    with closing(open_gallery(tmp_path, create=True, faiss_settings=settings)) as gallery:
        add_vectors(gallery, range(500), vectors[:500])
        gallery.delete(["0000"])
        add_vectors(gallery, range(500, 900), vectors[500:900])
        assert read_newest(tmp_path).dead == 1
        add_vectors(gallery, range(900, 1500), vectors[900:])
        assert read_newest(tmp_path).dead == 0
