"""The embedding space: similarities, the map in the plane, and the sample."""

from itertools import combinations

import numpy as np
import pytest

from training.report.space import MAX_PHOTOS, class_similarity, map_to_plane, sample_photos


def test_class_similarity_is_the_mean_over_pairs_of_photos() -> None:
    vectors = np.random.default_rng(5).normal(size=(12, 3)).astype(np.float32)
    labels = [f"class {i % 4}" for i in range(12)]
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    similarity = class_similarity(vectors, labels)
    assert sorted(similarity.names) == ["class 0", "class 1", "class 2", "class 3"]
    for row, one in enumerate(similarity.names):
        for column, other in enumerate(similarity.names):
            cosines = [
                unit[i] @ unit[j]
                for i in range(12)
                for j in range(12)
                if (labels[i], labels[j]) == (one, other) and i != j
            ]
            assert similarity.matrix[row, column] == pytest.approx(np.mean(cosines), abs=1e-5)


def test_similar_classes_are_next_to_each_other() -> None:
    ways = np.eye(3, dtype=np.float32)[[0, 1, 2, 0, 1, 2]] + 0.01 * np.eye(6, 3, dtype=np.float32)
    names = class_similarity(np.repeat(ways, 2, axis=0), [f"class {i // 2}" for i in range(12)]).names
    places = {name: place for place, name in enumerate(names)}
    assert all(abs(places[f"class {i}"] - places[f"class {i + 3}"]) == 1 for i in range(3))


def test_a_map_keeps_groups_together_and_is_the_same_each_time() -> None:
    centres = np.repeat(np.eye(3, 8, dtype=np.float32), 20, axis=0)
    vectors = centres + 0.05 * np.random.default_rng(0).normal(size=centres.shape).astype(np.float32)
    plane = map_to_plane(vectors)
    assert plane is not None and plane.min() >= 0 and plane.max() <= 1
    groups = plane.reshape(3, 20, 2)
    spread = max(np.linalg.norm(group - group.mean(0), axis=1).max() for group in groups)
    assert all(np.linalg.norm(a.mean(0) - b.mean(0)) > spread for a, b in combinations(groups, 2))
    again = map_to_plane(vectors)
    assert again is not None and np.array_equal(plane, again)
    assert map_to_plane(vectors[:3]) is None


def test_a_large_set_is_sampled_evenly_over_its_classes() -> None:
    labels = [f"class {i % 50}" for i in range(10_000)]
    sample = sample_photos(labels)
    assert len(sample) == len(set(sample)) == MAX_PHOTOS
    assert {sum(labels[place] == f"class {i}" for place in sample) for i in range(50)} == {40}
    assert sample == sample_photos(labels)
