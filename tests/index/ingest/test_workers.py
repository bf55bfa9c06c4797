"""Local workers: the outcomes of a chunk, in the order of its images."""

from pathlib import Path

import numpy as np

from index.embedding.bundle import Bundle
from index.embedding.embedder import Embedder
from index.embedding.images import digest, load_pixels
from index.gallery.types import NewImage
from index.ingest.embedding_plan import Reject, Unchanged
from index.ingest.sources import Source
from index.ingest.workers import LocalWorkers
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import write_tiny_source


def test_outcomes_are_in_the_order_of_the_chunk(tmp_path: Path) -> None:
    bundle = Bundle.load(make_tiny_bundle(tmp_path / "bundle"))
    chunk = list(Source([write_tiny_source(tmp_path / "source")]))[:4]
    Path(chunk[1].place).write_bytes(b"not a photo")
    data = [Path(image.place).read_bytes() for image in chunk]
    workers = LocalWorkers(bundle, cores=1)
    try:
        known = {(chunk[2].item.id, chunk[2].image_id): digest(data[2])}
        first, bad, unchanged, last = workers.submit(chunk, known).result(timeout=30)
    finally:
        workers.close()
    assert isinstance(bad, Reject) and (bad.item_id, bad.place) == (chunk[1].item.id, chunk[1].place)
    assert unchanged == Unchanged(chunk[2].image_id)
    embedder = Embedder(bundle, threads=1)
    for outcome, image, photo in ((first, chunk[0], data[0]), (last, chunk[3], data[3])):
        assert isinstance(outcome, NewImage) and (outcome.id, outcome.digest) == (image.image_id, digest(photo))
        expected = embedder.embed(load_pixels(photo, bundle.preprocessing)[None])[0]
        np.testing.assert_allclose(outcome.vector, expected, atol=1e-5)
