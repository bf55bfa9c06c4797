"""Colours and materials: the named palettes of the shop and how each kind of surface reflects light."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from training.data.sample_shop.geometry import Array, Mesh
from training.data.sample_shop.patterns import Pattern

PLAIN = Pattern("plain")

PALETTES: dict[str, tuple[str, tuple[tuple[str, str], tuple[str, str]]]] = {
    "red": ("#c22f2a", (("#f4e7d3", "#2b2a33"), ("#6d1718", "#f0b64a"))),
    "orange": ("#e2762f", (("#fff1dc", "#5b2c17"), ("#f7d9a8", "#2d5d6b"))),
    "yellow": ("#e9b93a", (("#fbf3de", "#4a4a52"), ("#fdf0c8", "#3f6a73"))),
    "olive": ("#7b7f3f", (("#efe6c8", "#3d3f22"), ("#f3ead0", "#d98f3d"))),
    "green": ("#2e7d55", (("#eef2e0", "#173f2e"), ("#123d2b", "#e9c15a"))),
    "mint": ("#93cfb3", (("#ffffff", "#2f6b5a"), ("#fdf6ea", "#e98a7d"))),
    "teal": ("#1b7f88", (("#f3ead8", "#0f4048"), ("#0f4048", "#f19a6b"))),
    "light blue": ("#86b9de", (("#ffffff", "#2e5484"), ("#3d6c99", "#f2d16b"))),
    "blue": ("#2a5fb6", (("#f2f4f8", "#142f5f"), ("#a9c2ea", "#f2b84b"))),
    "navy": ("#22325e", (("#f1e9da", "#b8402f"), ("#8fa3cf", "#d9a441"))),
    "purple": ("#68469b", (("#f1e8f7", "#2f1d4f"), ("#c6aee6", "#e8b64f"))),
    "lilac": ("#b69fdb", (("#ffffff", "#5d4391"), ("#6d55a0", "#f7e08a"))),
    "pink": ("#e88fab", (("#fff4f2", "#9c2f58"), ("#a63a5b", "#fde5e4"))),
    "brown": ("#77482c", (("#ecd9bd", "#3a2114"), ("#c9a27c", "#f3e7d3"))),
    "beige": ("#d8c09a", (("#fbf4e6", "#8a5a38"), ("#8c7355", "#45606e"))),
    "white": ("#f3f0e9", (("#9db6d3", "#c4453a"), ("#45454b", "#c9a25a"))),
    "grey": ("#8b9097", (("#f2f3f4", "#3b3f45"), ("#3a3e44", "#e6b840"))),
    "black": ("#2a2a2f", (("#ece7dd", "#b53a34"), ("#77777f", "#c99a45"))),
}
"""A plain colour name, its main colour, and two ways (accent, trim) to accompany it."""


def linear(colour: str) -> Array:
    """Returns a web colour as linear light."""
    return from_bytes(np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]))


_BYTES = np.arange(256) / 255
_LINEAR = np.where(_BYTES < 0.04045, _BYTES / 12.92, ((_BYTES + 0.055) / 1.055) ** 2.4).astype(np.float32)


def from_bytes(values: Array) -> Array:
    """Returns the linear light of sRGB bytes."""
    return np.take(_LINEAR, values)


@dataclass(frozen=True)
class Material:
    """Three colours laid out by a pattern, and the surface's gloss, metalness, own glow and transparency."""

    colours: Array  # (3, 3) linear
    pattern: Pattern = PLAIN
    gloss: float = 0.15
    metal: float = 0.0
    glow: float = 0.0
    lace: int = 0  # 0 opaque, 1 half, 2 three quarters transparent


@dataclass(frozen=True)
class Part:
    """One surface of a thing and what it is made of."""

    mesh: Mesh
    material: Material


@dataclass(frozen=True)
class Look:
    """A palette (main, accent, trim) and a pattern: what two products of one shape may differ in."""

    main: str
    accent: str
    trim: str
    pattern: Pattern

    def patterned(self, gloss: float = 0.15, density: float = 1.0) -> Material:
        pattern = replace(self.pattern, density=self.pattern.density * density)
        return Material(np.stack([linear(c) for c in (self.main, self.accent, self.trim)]), pattern, gloss)

    def in_main(self, gloss: float = 0.15) -> Material:
        return solid(self.main, gloss)

    def in_accent(self, gloss: float = 0.15) -> Material:
        return solid(self.accent, gloss)

    def in_trim(self, gloss: float = 0.15) -> Material:
        return solid(self.trim, gloss)


def solid(colour: str, gloss: float = 0.15, metal: float = 0.0, glow: float = 0.0, lace: int = 0) -> Material:
    """Returns a material of one colour."""
    return Material(np.stack([linear(colour)] * 3), PLAIN, gloss, metal, glow, lace)


def wood(tone: str, dark: str, seed: int = 0) -> Material:
    """Returns planed wood with a visible grain."""
    return Material(np.stack([linear(tone), linear(dark), linear(dark)]), Pattern("grain", 1.0, seed), 0.2)


STEEL = solid("#c9cdd2", 0.7, metal=0.9)
GOLD = solid("#e0b766", 0.7, metal=0.9)
RUBBER = solid("#26262a", 0.1)
WOODS = (wood("#c99562", "#b27e4d"), wood("#8a5a38", "#75492b"), wood("#dcb98a", "#cba674"))
