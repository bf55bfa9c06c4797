"""The camera and the key light: where a point falls on the picture and on the light's shadow map."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from training.data.sample_shop.geometry import Array, rotation


@dataclass(frozen=True)
class Camera:
    """A pinhole looking at the origin's column from the front, framed so that a thing fills a part of the picture.

    Picture coordinates are fractions of its side: (0, 0) is the upper left corner.
    """

    turn: Array  # (3, 3) world to camera axes: right, up, towards the viewer
    position: Array  # (3,) world
    focal: float
    shift: tuple[float, float]

    @classmethod
    def framing(
        cls,
        points: Array,
        *,
        elevation: float,
        roll: float,
        distance: float,
        fill: float,
        centre: tuple[float, float],
    ) -> Camera:
        """Looks down by `elevation` degrees and zooms until the (N, 3) points fill `fill` around `centre`."""
        turn = rotation("z", roll) @ rotation("x", elevation)
        aim = np.array([0.0, float(points[:, 1].max()) / 2, 0.0])
        camera = cls(turn, aim + turn.T @ np.array([0.0, 0.0, distance]), 1.0, (0.0, 0.0))
        x, y, _ = camera.project(points.T)
        long, short = sorted((float(np.ptp(x)), float(np.ptp(y))), reverse=True)
        focal = min(fill / (long**0.7 * short**0.3), max(fill, 0.9) / long)  # slender things may grow longer
        middle = (float(x.min() + x.max()) / 2 * focal, float(y.min() + y.max()) / 2 * focal)
        return cls(turn, camera.position, focal, (centre[0] - middle[0], centre[1] - middle[1]))

    def project(self, points: Array) -> tuple[Array, Array, Array]:
        """Returns picture x, y and nearness (one over depth) of (3, N) world points."""
        offset = points - self.position[:, None].astype(points.dtype)
        right, up, back = np.einsum("ij,jn->in", self.turn.astype(points.dtype), offset)
        near = -1.0 / np.minimum(back, -1e-3)
        return self.shift[0] + self.focal * right * near, self.shift[1] - self.focal * up * near, near

    def rays(self, size: int) -> Array:
        """Returns world directions (3, size, size) through the pixel centres."""
        at = (np.arange(size) + 0.5) / size
        x, y = np.meshgrid((at - self.shift[0]) / self.focal, (self.shift[1] - at) / self.focal)
        result: Array = np.einsum("ji,jyx->iyx", self.turn, np.stack([x, y, -np.ones_like(x)])).astype(np.float32)
        return result

    def floor_map(self, size: int) -> Array:
        """Returns the homography from pixel coordinates to the floor's (x, z)."""
        to_ray = self.turn.T @ np.array(
            [
                [1 / (size * self.focal), 0, -self.shift[0] / self.focal],
                [0, -1 / (size * self.focal), self.shift[1] / self.focal],
                [0, 0, -1],
            ]
        )
        x, y, z = self.position
        result: Array = np.array([[-y, x, 0], [0, z, -y], [0, 1, 0]]) @ to_ray
        return result


@dataclass(frozen=True)
class Light:
    """A key light, the sky's fill and what the floor reflects, all as linear colours."""

    direction: Array  # (3,) unit, towards the light
    key: Array
    sky: Array
    bounce: Array
    softness: float  # blur of cast shadows, as a fraction of the thing's size

    def axes(self) -> Array:
        """Returns (3, 3) rows: across, along and towards the light."""
        across = np.cross([0.0, 1.0, 0.0], self.direction)
        across /= np.sqrt((across**2).sum())
        return np.stack([across, np.cross(self.direction, across), self.direction])
