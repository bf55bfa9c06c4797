"""Things in the way: leaves, boxes, balls, cups and ribbons that hide a part of a product."""

from __future__ import annotations

import numpy as np

from training.data.sample_shop.geometry import Array, Mesh, ball, fillet, grid, revolve, rounded_box, smooth
from training.data.sample_shop.looks import Material, Part, solid
from training.data.sample_shop.render import Model

TONES = ("#d8b98f", "#b8563f", "#e9e3d6", "#4d6b78", "#d9a441", "#7d8f69", "#8a6f9c", "#30343b", "#e3a6a0")


def obstacle(points: Array, rng: np.random.Generator) -> Model:
    """Builds something in front of the thing at (N, 3) points, low on its left or right."""
    low, high = points.min(axis=0), points.max(axis=0)
    side = float(rng.choice([-1, 1]))
    x = side * (high[0] - low[0]) * rng.uniform(0.2, 0.42)
    z = float(high[2]) + rng.uniform(0.06, 0.2)
    size = 0.55 + 0.75 * float(high[1])
    tone = TONES[int(rng.integers(len(TONES)))]
    kind = int(rng.integers(5))
    if kind == 0:
        parts = _sprig(side, rng)
    elif kind == 1:
        parts = [Part(_box(rng), solid(tone, 0.1))]
    elif kind == 2:
        parts = [Part(_ball(rng), solid(tone, 0.5))]
    elif kind == 3:
        parts = [Part(_cup(rng), solid(tone, 0.5))]
    else:
        parts = [Part(_ribbon(side, rng), solid(tone, 0.35))]
    return Model.of([Part(p.mesh.scale(size, size, size).translate(x, 0, z), p.material) for p in parts])


def _box(rng: np.random.Generator) -> Mesh:
    box = rounded_box(rng.uniform(0.2, 0.36), rng.uniform(0.2, 0.42), rng.uniform(0.2, 0.36), 0.015, 12.0)
    return box.rotate("y", rng.uniform(-50, 50))


def _ball(rng: np.random.Generator) -> Mesh:
    radius = rng.uniform(0.11, 0.17)
    return ball(radius, 32).translate(y=radius)


def _cup(rng: np.random.Generator) -> Mesh:
    r, h = rng.uniform(0.09, 0.13), rng.uniform(0.24, 0.44)
    wall = fillet([(0, 0), (r * 0.8, 0), (r, h), (r - 0.02, h), (r * 0.7, h * 0.3), (0, h * 0.3)], 0.015)
    return revolve(wall, 40)


def _sprig(side: float, rng: np.random.Generator) -> list[Part]:
    greens: list[Material] = [solid(c, 0.25) for c in ("#3f6b3a", "#5d8a4a", "#7fa05b", "#2f5a44")]
    parts = []
    for _ in range(int(rng.integers(2, 5))):
        leaf = _leaf(rng.uniform(0.32, 0.6), rng.uniform(0.07, 0.12))
        leaf = (
            leaf.rotate("x", rng.uniform(-30, 25))
            .rotate("z", side * rng.uniform(-5, 65))
            .rotate("y", rng.uniform(-30, 30))
        )
        parts.append(Part(leaf.translate(x=side * 0.1), greens[int(rng.integers(4))]))
    return parts


def _leaf(length: float, half: float) -> Mesh:
    """Builds a pointed leaf growing up from the origin, folded a little along its rib and drooping at the tip."""
    t = np.linspace(0, 1, 18)[:, None]
    across = np.linspace(-1, 1, 11)[None, :]
    reach = half * np.sin(np.pi * t**0.8) ** 0.8
    x = reach * across
    y = np.broadcast_to(length * (t - 0.12 * t**3), x.shape)
    z = 0.25 * np.abs(x) + 0.22 * length * t**2
    return grid(np.stack([x, y, z], -1), two_sided=True)


def _ribbon(side: float, rng: np.random.Generator) -> Mesh:
    """Builds a band that curls over the floor and rises at the product's side."""
    reach, half = rng.uniform(0.3, 0.5), rng.uniform(0.05, 0.08)
    knots = [(0.5, 0.06), (0.22, 0.26), (0.0, 0.08), (-reach * 0.5, 0.34), (-reach, 0.06)]
    line = smooth(np.array(knots) * [side, 1], 48)
    across = np.linspace(-half, half, 7)
    tilt = 0.6 * np.sin(np.linspace(0, 5, 48))[:, None]
    y, z = line[:, 1:] + across * tilt, across * np.sqrt(1 - tilt**2)
    return grid(np.stack(np.broadcast_arrays(line[:, :1], y, z), -1), two_sided=True)
