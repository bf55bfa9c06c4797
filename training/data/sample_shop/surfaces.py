"""Floors and walls: the textures that products are photographed on and in front of."""

from __future__ import annotations

from functools import cache

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from training.data.sample_shop.geometry import Array
from training.data.sample_shop.looks import from_bytes
from training.data.sample_shop.patterns import Pattern

TILE = 512
REPEATS = 4
UNITS = 2.6  # what one tile measures on the floor

FLOORS: dict[str, tuple[tuple[str, str], ...]] = {
    "wood": (("#7a4d2b", "#d9ad78"), ("#4a2f20", "#9c6b45"), ("#a8957c", "#e6d8c1"), ("#8c5a34", "#e2b67f")),
    "tiles": (("#b9bfc2", "#f3f4f2"), ("#8fa7a8", "#dfeae6"), ("#c98f73", "#e9c4aa"), ("#54606b", "#9aa7b0")),
    "marble": (("#8f8f94", "#f6f4f1"), ("#26282c", "#6d6f75"), ("#b7a48c", "#f5ecdf")),
    "concrete": (("#7d7d7c", "#c9c8c4"), ("#b5aa9b", "#e5ddd0"), ("#55585c", "#8d9195")),
    "linen": (("#b9a88c", "#efe5d2"), ("#6f86a0", "#c3d2df"), ("#8f9b7d", "#d9dfc9"), ("#a65f5a", "#e0aba2")),
    "terrazzo": (("#8b6f5c", "#f0ebe2"), ("#5f7a78", "#e8ece6"), ("#b8745c", "#f3e9df")),
    "gingham": (
        ("#b8483f", "#fbf4ec"),
        ("#4a6fa5", "#f6f7f9"),
        ("#6f8f5f", "#f7f6ec"),
        ("#c9973f", "#fdf6e3"),
    ),
    "paper": (
        ("#d8d4cc", "#f4f1ea"),
        ("#c3cfd8", "#e9eff3"),
        ("#e0c7b5", "#f7e8dc"),
        ("#b9c7b4", "#e2eadc"),
        ("#d9b3b0", "#f5dedb"),
    ),
}
"""Each floor's texture with the (dark, light) colours it comes in."""


@cache
def texture(kind: str) -> Image.Image:
    """Returns a seamless grey texture, repeated to cover the floor; the same in every shop."""
    rng = np.random.default_rng(list(FLOORS).index(kind))
    tone = np.clip(_TONES[kind](rng), 0, 1)
    return Image.fromarray((np.tile(tone, (REPEATS, REPEATS)) * 255).astype(np.uint8))


@cache
def floor_light(colours: tuple[str, str]) -> Array:
    """Returns the linear light of each of a texture's 256 tones, from dark to light."""
    dark, light = (np.array([int(c[i : i + 2], 16) for i in (1, 3, 5)]) for c in colours)
    return from_bytes((dark + (light - dark) * np.linspace(0, 1, 256)[:, None]).astype(np.uint8))


def _noise(rng: np.random.Generator, across: float, along: float) -> Array:
    """Returns seamless noise of unit variance with about that many waves over the tile in x and y."""
    frequency = np.fft.fftfreq(TILE, 1 / TILE)
    shape = np.exp(-((frequency[None, :] / across) ** 2) - (frequency[:, None] / along) ** 2)
    field = np.fft.ifft2(np.fft.fft2(rng.standard_normal((TILE, TILE))) * shape).real
    tone: Array = field / field.std()
    return tone


def _wood(rng: np.random.Generator) -> Array:
    grain = 0.5 + 0.11 * _noise(rng, 3, 30) + 0.06 * _noise(rng, 7, 120)
    plank = TILE // 5
    for i in range(5):
        board = slice(i * plank, (i + 1) * plank if i < 4 else TILE)
        grain[board] = np.roll(grain[board], int(rng.integers(TILE)), axis=1) + rng.uniform(-0.14, 0.14)
        grain[board.start : board.start + 3] *= 0.5
    return grain


def _tiles(rng: np.random.Generator) -> Array:
    count = 6
    place = np.arange(TILE) * count / TILE
    edge = np.minimum(place % 1, 1 - place % 1)
    joint = np.minimum(edge[:, None], edge[None, :]) < 0.022
    tones = rng.uniform(0.72, 0.95, (count, count))
    cell = place.astype(int)
    return np.where(joint, 0.25, tones[cell[:, None], cell[None, :]] + 0.03 * _noise(rng, 12, 12))


def _marble(rng: np.random.Generator) -> Array:
    vein = np.abs(_noise(rng, 4, 4) + 0.35 * _noise(rng, 14, 14))
    faint = np.abs(_noise(rng, 8, 8) + 0.3 * _noise(rng, 30, 30))
    tone: Array = 0.92 - 0.55 * np.exp(-vein * 9) - 0.22 * np.exp(-faint * 10) + 0.03 * _noise(rng, 3, 3)
    return tone


def _concrete(rng: np.random.Generator) -> Array:
    return 0.6 + 0.13 * _noise(rng, 4, 4) + 0.07 * _noise(rng, 20, 20) + 0.05 * _noise(rng, 110, 110)


def _linen(rng: np.random.Generator) -> Array:
    wave = np.sin(np.arange(TILE) * 2 * np.pi * 64 / TILE)
    weave = 0.1 * wave[:, None] * wave[None, :]
    return 0.62 + weave + 0.09 * _noise(rng, 3, 60) + 0.07 * _noise(rng, 60, 3) + 0.1 * _noise(rng, 2, 3)


def _terrazzo(rng: np.random.Generator) -> Array:
    u, v = np.meshgrid(np.arange(TILE) / TILE, np.arange(TILE) / TILE)
    chips = sum(Pattern("speckled", d, s).colour_numbers(u, v, (2.0, 2.0)) for d, s in ((1.2, 3), (0.8, 8)))
    tone: Array = 0.93 - 0.3 * np.minimum(np.asarray(chips), 2) + 0.02 * _noise(rng, 40, 40)
    return tone


def _gingham(rng: np.random.Generator) -> Array:
    band = (np.arange(TILE) * 8 / TILE % 1 < 0.5).astype(float)
    tone: Array = 1 - 0.4 * (band[:, None] + band[None, :]) + 0.03 * _noise(rng, 90, 90)
    return tone


def _paper(rng: np.random.Generator) -> Array:
    return 0.8 + 0.05 * _noise(rng, 2, 2) + 0.02 * _noise(rng, 70, 70)


_TONES = {
    "wood": _wood,
    "tiles": _tiles,
    "marble": _marble,
    "concrete": _concrete,
    "linen": _linen,
    "terrazzo": _terrazzo,
    "gingham": _gingham,
    "paper": _paper,
}

WALLS = (
    "#e9e4da",
    "#dfe5e8",
    "#cfd8d3",
    "#e7d3c4",
    "#c7b8a6",
    "#9fb1bd",
    "#8c9a86",
    "#b98d7b",
    "#5f6b75",
    "#3f4650",
    "#d9c6d0",
    "#f3efe6",
    "#e8cf9f",
    "#a9bccf",
)


def wall(rng: np.random.Generator, size: int, horizon: int) -> Array:
    """Returns a plain, a panelled or a cluttered wall, out of focus, as the linear light of a picture."""
    base = WALLS[int(rng.integers(len(WALLS)))]
    small = Image.new("RGB", (size // 2, size // 2), base)
    kind = rng.random()
    if kind < 0.3:
        _panel(ImageDraw.Draw(small), rng, size // 2)
    elif kind < 0.75:
        _clutter(ImageDraw.Draw(small), rng, size // 2, horizon // 2)
    blurred = small.filter(ImageFilter.GaussianBlur(float(rng.uniform(1.5, 5.0) if kind < 0.75 else 1)))
    return from_bytes(np.asarray(blurred.resize((size, size), Image.Resampling.BILINEAR)))


def _panel(draw: ImageDraw.ImageDraw, rng: np.random.Generator, size: int) -> None:
    gap = int(rng.integers(10, 26))
    for x in range(int(rng.integers(gap)), size, gap):
        draw.rectangle((x, 0, x + 1, size), fill="#7d7468")


def _clutter(draw: ImageDraw.ImageDraw, rng: np.random.Generator, size: int, horizon: int) -> None:
    """Draws things on a shelf far behind: boxes, bottles and lights, to be blurred beyond recognition."""
    tones = [*WALLS, "#c2412f", "#2f6f62", "#dfae3f", "#31507a", "#7a4d2b", "#efe7da"]
    for _ in range(int(rng.integers(6, 15))):
        x, width, tall = rng.uniform(-5, size), rng.uniform(5, 22), rng.uniform(8, 50)
        fill = tones[int(rng.integers(len(tones)))]
        if rng.random() < 0.6:
            draw.rectangle((x, horizon - tall, x + width, horizon + 2), fill=fill)
        else:
            y = rng.uniform(0, max(horizon, 12))
            draw.ellipse((x, y - width / 2, x + width, y + width / 2), fill=fill)
