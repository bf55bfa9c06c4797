"""Search results of test photos against plain loops."""

from pathlib import Path

import numpy as np
import pytest

from index.evaluation.metrics import retrieval_metrics
from training.data import Photo
from training.report.neighbors import SearchResults


def test_results_agree_with_a_search_in_plain_loops() -> None:
    draw = np.random.default_rng(3)
    vectors = draw.normal(size=(60, 4)).astype(np.float32)
    photos = [
        Photo(Path(f"{i}.jpg"), f"class {i % 7}", None, is_query=i % 3 != 0, is_gallery=i % 3 != 1) for i in range(60)
    ]
    results = SearchResults(vectors, photos)
    figures = retrieval_metrics(
        vectors,
        [photo.label for photo in photos],
        is_query=[photo.is_query for photo in photos],
        is_gallery=[photo.is_gallery for photo in photos],
    )
    assert 1 - results.wrong.mean() == pytest.approx(figures["recall@1"])

    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    margins = {}
    for query in range(60):
        if photos[query].is_query:
            scores = {i: unit[query] @ unit[i] for i in range(60) if photos[i].is_gallery and i != query}
            own = {i for i in scores if photos[i].label == photos[query].label}
            margins[query] = max(scores[i] for i in scores if i not in own) - max(scores[i] for i in own)
    expected = sorted((query for query in margins if margins[query] > 0), key=lambda query: -margins[query])
    worst = results.worst(5, neighbours=6)
    assert [result.query for result in worst] == expected[:5]
    for result in worst:
        assert result.margin == pytest.approx(margins[result.query], abs=1e-5)
        ranked = sorted(
            (i for i in range(60) if photos[i].is_gallery and i != result.query),
            key=lambda i: -float(unit[result.query] @ unit[i]),
        )
        assert [found.photo for found in result.neighbours] == ranked[:6]
        assert ranked[result.rank - 1] == result.right.photo
    assert sum(pair.mistakes for pair in results.confusions(100)) == results.wrong.sum() == len(expected)


def test_a_photo_in_two_folders_is_shown_with_the_one_it_finds_first() -> None:
    vectors = np.random.default_rng(1).normal(size=(300, 64)).astype(np.float32)
    vectors[100] = vectors[200] = vectors[299]
    photos = [Photo(Path(f"{i}.jpg"), "lamp" if i in (200, 299) else f"class {i % 20}") for i in range(300)]
    twin = next(result for result in SearchResults(vectors, photos).worst(300, neighbours=2) if result.query == 299)
    assert [found.photo for found in twin.neighbours] == [100, 200]
    assert twin.margin == 0 and twin.rank == 2
