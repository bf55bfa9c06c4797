"""Meshes of the sample shop."""

import numpy as np
import pytest

from training.data.sample_shop.geometry import Mesh, ball, revolve, rounded_box


@pytest.mark.parametrize("mesh", [ball(0.5), rounded_box(0.6, 0.4, 0.5, 0.05), revolve([(0.3, 0.0), (0.3, 1.0)])])
def test_normals_point_outward(mesh: Mesh) -> None:
    middle = mesh.points.mean(axis=0)
    assert (((mesh.points - middle) * mesh.normals).sum(-1) > 0).mean() > 0.95
    np.testing.assert_allclose(np.linalg.norm(mesh.normals, axis=1), 1, atol=1e-6)
