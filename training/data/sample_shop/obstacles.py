"""Things in the way: leaves, boxes, balls, cups and ribbons that hide a part of a product."""

from __future__ import annotations

import numpy as np

from training.data.sample_shop.geometry import Array, Mesh, ball, filleted, grid, revolve, rounded_box, smooth
from training.data.sample_shop.looks import Material, Part, solid
from training.data.sample_shop.render import Model

TONES = ("#d8b98f", "#b8563f", "#e9e3d6", "#4d6b78", "#d9a441", "#7d8f69", "#8a6f9c", "#30343b", "#e3a6a0")


def obstacle(points: Array, rng: np.random.Generator) -> Model:
    """Something in front of the thing at (N, 3) points, low on its left or right."""
    low, high = points.min(axis=0), points.max(axis=0)
    side = float(rng.choice([-1, 1]))
    x = side * (high[0] - low[0]) * rng.uniform(0.33, 0.52)
    z = float(high[2]) + rng.uniform(0.1, 0.3)
    tone = TONES[int(rng.integers(len(TONES)))]
    kind = int(rng.integers(5))
    if kind == 0:
        return Model.of(_sprig(x, z, side, rng))
    if kind == 1:
        tall = rng.uniform(0.16, 0.36)
        box = rounded_box(rng.uniform(0.2, 0.4), tall, rng.uniform(0.2, 0.4), 0.015, 12.0)
        return Model.of([Part(box.turned("y", rng.uniform(-50, 50)).moved(x, 0, z), solid(tone, 0.1))])
    if kind == 2:
        r = rng.uniform(0.09, 0.17)
        return Model.of([Part(ball(r, 32).moved(x, r, z), solid(tone, 0.5))])
    if kind == 3:
        r, h = rng.uniform(0.09, 0.14), rng.uniform(0.2, 0.42)
        wall = filleted([(0, 0), (r * 0.8, 0), (r, h), (r - 0.02, h), (r * 0.7, h * 0.3), (0, h * 0.3)], 0.015)
        return Model.of([Part(revolve(wall, 40).moved(x, 0, z), solid(tone, 0.5))])
    return Model.of([Part(_ribbon(x, z, side, rng), solid(tone, 0.35))])


def _sprig(x: float, z: float, side: float, rng: np.random.Generator) -> list[Part]:
    greens: list[Material] = [solid(c, 0.25) for c in ("#3f6b3a", "#5d8a4a", "#7fa05b", "#2f5a44")]
    parts = []
    for _ in range(int(rng.integers(2, 5))):
        leaf = _leaf(rng.uniform(0.32, 0.6), rng.uniform(0.07, 0.12))
        leaf = leaf.turned("x", rng.uniform(-30, 25)).turned("z", side * rng.uniform(-5, 65)).turned("y", rng.uniform(-30, 30))
        parts.append(Part(leaf.moved(x + side * 0.12, 0.0, z), greens[int(rng.integers(4))]))
    return parts


def _leaf(length: float, half: float) -> Mesh:
    """A pointed leaf growing up from the origin, folded a little along its rib and drooping at the tip."""
    t = np.linspace(0, 1, 18)[:, None]
    across = np.linspace(-1, 1, 11)[None, :]
    reach = half * np.sin(np.pi * t**0.8) ** 0.8
    x = reach * across
    y = np.broadcast_to(length * (t - 0.12 * t**3), x.shape)
    z = 0.25 * np.abs(x) + 0.22 * length * t**2
    return grid(np.stack([x, y, z], -1), two_sided=True)


def _ribbon(x: float, z: float, side: float, rng: np.random.Generator) -> Mesh:
    """A band that curls over the floor and rises at the product's side."""
    reach = rng.uniform(0.25, 0.45)
    line = smooth([(x + side * 0.5, 0.02), (x + side * 0.2, 0.16), (x, 0.03), (x - side * reach * 0.5, 0.2), (x - side * reach, 0.04)], 48)
    wide = np.linspace(-1, 1, 7) * rng.uniform(0.04, 0.07)
    twist = np.sin(np.linspace(0, 5, 48))[:, None] * 0.5
    points = np.stack(
        np.broadcast_arrays(line[:, :1], line[:, 1:] + np.abs(wide) * 0 + wide * twist, z + wide * np.sqrt(1 - twist**2)), -1
    )
    return grid(np.ascontiguousarray(points[:, ::-1] if side > 0 else points), two_sided=True)
