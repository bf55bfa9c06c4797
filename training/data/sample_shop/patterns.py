"""Surface patterns: functions from texture coordinates to one of a look's three colours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from training.data.sample_shop.geometry import Array

Motif = Callable[[Array, Array, "Pattern"], Array]
"""Takes cell coordinates (integers at cell borders) and returns colour numbers 0 (main), 1 or 2."""


@dataclass(frozen=True)
class Pattern:
    """A motif, how many of its cells fit on one unit of length, and the seed of its irregularities."""

    name: str
    density: float = 1.0
    seed: int = 0

    def colour_numbers(self, u: Array, v: Array, size: tuple[float, float]) -> Array:
        """Returns the colour number at each (u, v); an even number of cells goes around, so that no seam shows."""
        motif, cells = MOTIFS[self.name]
        per_unit = cells * self.density
        around = max(2, 2 * round(size[0] * per_unit / 2))
        return motif(u * around, v * max(1.0, size[1] * per_unit), self)


def _plain(a: Array, b: Array, pattern: Pattern) -> Array:
    return np.zeros(a.shape, np.int8)


def _striped(a: Array, b: Array, pattern: Pattern) -> Array:
    return (b % 1 < 0.4).astype(np.int8)


def _pinstriped(a: Array, b: Array, pattern: Pattern) -> Array:
    return (a % 1 < 0.28).astype(np.int8)


def _dotted(a: Array, b: Array, pattern: Pattern) -> Array:
    x, y = (a + 0.5 * (np.floor(b) % 2)) % 1 - 0.5, b % 1 - 0.5
    return (x * x + y * y < 0.082).astype(np.int8)


def _checked(a: Array, b: Array, pattern: Pattern) -> Array:
    return ((np.floor(a) + np.floor(b)) % 2).astype(np.int8)


def _zigzag(a: Array, b: Array, pattern: Pattern) -> Array:
    return ((b + 1.1 * np.abs(a % 1 - 0.5)) % 1 < 0.38).astype(np.int8)


def _wavy(a: Array, b: Array, pattern: Pattern) -> Array:
    return ((b + 0.22 * np.sin(2 * np.pi * a)) % 1 < 0.34).astype(np.int8)


def _diamond(a: Array, b: Array, pattern: Pattern) -> Array:
    reach = np.abs(a % 1 - 0.5) + 0.75 * np.abs(b % 1 - 0.5)
    return np.where(reach < 0.1, 2, np.where(reach < 0.34, 1, 0)).astype(np.int8)


def _tartan(a: Array, b: Array, pattern: Pattern) -> Array:
    across, along = a % 1, b % 1
    bands = (across < 0.16).astype(np.int8) + (along < 0.16)
    threads = (np.abs(across - 0.58) < 0.03) | (np.abs(along - 0.58) < 0.03)
    return np.where(threads, 1, bands).astype(np.int8)


def _triangles(a: Array, b: Array, pattern: Pattern) -> Array:
    shifted = a + 0.5 * (np.floor(b) % 2)
    inside = 2 * np.abs(shifted % 1 - 0.5) < 0.85 - b % 1
    tint = 1 + (_hash(np.floor(shifted), np.floor(b), pattern.seed) < 0.3)
    return np.where(inside, tint, 0).astype(np.int8)


def _colour_block(a: Array, b: Array, pattern: Pattern) -> Array:
    """Bands across the whole surface: here one cell is as long as the surface."""
    cut = (0.28, 0.36)[pattern.seed % 2]
    return np.where(b < cut, 1, np.where(b < cut + 0.09, 2, 0)).astype(np.int8)


def _speckled(a: Array, b: Array, pattern: Pattern) -> Array:
    i, j = np.floor(a), np.floor(b)
    x = a - i - 0.3 - 0.4 * _hash(i, j, pattern.seed)
    y = b - j - 0.3 - 0.4 * _hash(i, j, pattern.seed + 1)
    radius = 0.1 + 0.2 * _hash(i, j, pattern.seed + 2)
    tint = 1 + (_hash(i, j, pattern.seed + 3) < 0.4)
    return np.where(x * x + y * y < radius * radius, tint, 0).astype(np.int8)


def _floral(a: Array, b: Array, pattern: Pattern) -> Array:
    shifted = a + 0.5 * (np.floor(b) % 2)
    i, j = np.floor(shifted), np.floor(b)
    x, y = shifted - i - 0.5, b - j - 0.5
    turn = np.arctan2(y, x) + 6.3 * _hash(i, j, pattern.seed)
    radius = np.sqrt(x * x + y * y)
    petals = radius < 0.29 + 0.13 * np.cos(5 * turn)
    return np.where(radius < 0.13, 2, np.where(petals, 1, 0)).astype(np.int8)


def _tortoise(a: Array, b: Array, pattern: Pattern) -> Array:
    p = pattern.seed
    cloud = np.sin(2 * np.pi * a + 2 * np.sin(b * 5 + p)) + np.sin(b * 7.1 + 2 * np.sin(4 * np.pi * a + p))
    return np.where(cloud > 0.75, 1, 0).astype(np.int8)


def _grain(a: Array, b: Array, pattern: Pattern) -> Array:
    return (np.sin(4 * np.pi * a + 1.3 * np.sin(b * 3.0) + np.sin(b * 0.9 + pattern.seed)) > 0.55).astype(np.int8)


def _glint(a: Array, b: Array, pattern: Pattern) -> Array:
    """Returns the slanting reflections of a pane."""
    slant = 0.5 * a + 0.7 * b
    return ((np.abs(slant - 0.62) < 0.1) | (np.abs(slant - 0.82) < 0.035)).astype(np.int8)


def _dial(a: Array, b: Array, pattern: Pattern) -> Array:
    """Returns a watch face at about ten past ten; the seed chooses the marks and moves the hands."""
    x, y = a / 2 - 0.5, b - 0.5
    radius = 2 * np.sqrt(x * x + y * y)
    turn = (np.arctan2(x, y) / (2 * np.pi)) % 1
    hours = (12, 4, 60, 12)[pattern.seed % 4]
    off_mark = np.abs((turn * hours + 0.5) % 1 - 0.5) / hours * radius * 6.3
    marks = (off_mark < (0.045 if hours <= 12 else 0.015)) & (np.abs(radius - 0.76) < (0.11 if hours <= 12 else 0.05))
    number: Array = marks.astype(np.int8)
    shift = (pattern.seed // 4) / 16 * 0.12
    for at, length, width, tint in (
        (0.84 + shift, 0.5, 0.05, 1),
        (0.16 + shift, 0.72, 0.04, 1),
        (0.52, 0.66, 0.018, 2),
    ):
        along = 2 * (x * np.sin(2 * np.pi * at) + y * np.cos(2 * np.pi * at))
        aside = 2 * np.abs(x * np.cos(2 * np.pi * at) - y * np.sin(2 * np.pi * at))
        number[(along > -0.1) & (along < length) & (aside < width)] = tint
    number[radius < 0.08] = 1
    return number


def _hash(i: Array, j: Array, seed: int) -> Array:
    """Returns a repeatable fraction in [0, 1) for each cell."""
    mixed = (i.astype(np.int64) * 73856093) ^ (j.astype(np.int64) * 19349663) ^ (seed * 83492791 + 12345)
    mixed = (mixed ^ (mixed >> 13)) * 1274126177
    return ((mixed >> 8) & 0xFFFF) / 65536.0


MOTIFS: dict[str, tuple[Motif, float]] = {
    "plain": (_plain, 1.0),
    "striped": (_striped, 6.0),
    "pinstriped": (_pinstriped, 9.0),
    "dotted": (_dotted, 6.0),
    "checked": (_checked, 7.0),
    "zigzag": (_zigzag, 5.0),
    "wavy": (_wavy, 5.0),
    "diamond": (_diamond, 5.0),
    "tartan": (_tartan, 4.5),
    "triangle": (_triangles, 5.0),
    "colour-block": (_colour_block, 1e-3),
    "speckled": (_speckled, 10.0),
    "floral": (_floral, 4.2),
    "tortoise": (_tortoise, 3.0),
    "grain": (_grain, 4.0),
    "dial": (_dial, 1e-3),
    "glint": (_glint, 1e-3),
}
"""Each motif by name, with how many of its cells fit on one unit of length at density 1."""
