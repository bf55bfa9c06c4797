"""The rasteriser of the sample shop."""

import numpy as np

from training.data.sample_shop.raster import rasterise


def test_the_nearest_face_wins_each_pixel() -> None:
    x = np.array([0.0, 10.0, 0.0, 0.0, 5.0, 0.0])
    y = np.array([0.0, 0.0, 10.0, 0.0, 0.0, 5.0])
    near = np.array([1.0, 1.0, 1.0, 2.0, 2.0, 2.0])
    owners, nearness = rasterise(x, y, near, np.array([[0, 1, 2], [3, 4, 5]]), 12)
    owners = owners.reshape(12, 12)
    assert owners[1, 1] == 1
    assert owners[1, 7] == 0
    assert owners[11, 11] == -1
    assert nearness.reshape(12, 12)[1, 1] == 2


def test_neighbouring_faces_leave_no_gap_and_share_no_pixel() -> None:
    rng = np.random.default_rng(0)
    corners = rng.uniform(2, 30, (6, 2))
    hub = corners.mean(axis=0)
    order = np.argsort(np.arctan2(*(corners - hub).T))
    x, y = np.concatenate([corners[order], [hub]]).T
    faces = np.array([[i, (i + 1) % 6, 6] for i in range(6)])
    counts = sum((rasterise(x, y, np.ones(7), faces[i : i + 1], 32)[0] >= 0).astype(int) for i in range(6))
    together = rasterise(x, y, np.ones(7), faces, 32)[0] >= 0
    assert np.asarray(counts).max() == 1
    np.testing.assert_array_equal(np.asarray(counts) > 0, together)
