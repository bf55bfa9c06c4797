"""Shirts: a torso of soft rings with sleeves, filled as if worn."""

from __future__ import annotations

import numpy as np

from training.data.sample_shop.geometry import Array, Mesh, ball, grid, slab, smooth, superellipse, sweep
from training.data.sample_shop.looks import Look, Material, Part

ROWS = 44


def shirt(look: Look, form: int, rng: np.random.Generator) -> list[Part]:
    """Builds a T-shirt, a long-sleeved shirt, a polo or a hooded jumper."""
    kind = form % 4
    wide, tall = rng.uniform(0.33, 0.39), rng.uniform(0.94, 1.08)
    torso = _torso(wide, tall, rng.uniform(0.94, 1.12), rng.uniform(0, 6))
    cloth = look.patterned(0.05, density=1.25)
    body = grid(torso, two_sided=True).flat_uv((-0.5, 0.5), (0.0, tall))
    length = {1: 1.0, 3: 0.98}.get(kind, float(rng.uniform(0.4, 0.52)))
    parts = [
        Part(body, cloth),
        Part(_rolled_edge(torso[-1], 0.024), look.in_accent(0.05)),
        Part(_rolled_edge(torso[0], 0.012), look.in_main(0.05)),
        *_sleeves(look, cloth, wide, tall, length),
    ]
    neck = torso[-1]
    if kind == 2:
        parts += _polo_collar(look, neck)
    elif kind == 3:
        parts += _hood_and_pouch(look, neck, wide, tall)
    elif rng.random() < 0.6:
        pocket = slab(superellipse(0.075, 0.085, 8.0)[::-1], 0.014, 0.004)
        parts.append(Part(pocket.translate(wide * 0.42, tall * 0.66, 0.183), look.in_accent(0.05)))
    return [Part(p.mesh.translate(y=0.1), p.material) for p in parts]


def _torso(wide: float, tall: float, flare: float, sway: float) -> Array:
    """Builds the torso: rings from the hem to a neckline that dips at the front; folds deepen towards the hem."""
    levels = [
        (0, flare, 0.19),
        (0.3, 0.98, 0.18),
        (0.58, 1.0, 0.185),
        (0.74, 1.06, 0.18),
        (0.83, 1.06, 0.155),
        (0.89, 0.9, 0.13),
        (0.94, 0.66, 0.115),
        (0.985, 0.44, 0.105),
    ]
    rings = []
    for y, width, depth in smooth(levels, ROWS):
        ring = superellipse(width * wide, depth, 2.5, 72)
        turn = np.arctan2(ring[:, 0], ring[:, 1])
        fold = 1 + 0.06 * np.sin(7 * turn + sway) * np.clip(1 - y / 0.7, 0, 1)
        dip = 0.55 * np.clip((y - 0.86) / 0.12, 0, 1) * (ring[:, 1] + 0.03)
        rings.append(np.column_stack([ring[:, 0], y * tall - dip, ring[:, 1] * fold]))
    points = np.array(rings)
    points[:, -1] = points[:, 0]
    return points


def _rolled_edge(ring: Array, radius: float) -> Mesh:
    return sweep(ring, radius, up=(0, 1, 0), segments=10)


def _sleeves(look: Look, cloth: Material, wide: float, tall: float, length: float) -> list[Part]:
    parts = []
    for side in (-1, 1):
        knots = [
            (0.6, 0.765, 0.0),
            (1.02, 0.72, 0.0),
            (1.36, 0.56, 0.01),
            (1.52, 0.36, 0.03),
            (1.58, 0.14, 0.06),
        ]
        line = np.array(knots) * [side * wide, tall, 1]
        path = smooth(line, 60)[: int(60 * length)]
        radius = np.linspace(0.145, 0.145 - 0.07 * length, len(path))
        parts.append(Part(sweep(path, radius, flatten=0.9, capped=False, segments=28).both_sides(), cloth))
        end = path[-4:] + (path[-1] - path[-4]) * 0.25
        cuff = sweep(end, radius[-1] + 0.007, flatten=0.9, capped=False, segments=28)
        parts.append(Part(cuff.both_sides(), look.in_accent(0.05)))
    return parts


def _polo_collar(look: Look, neck: Array) -> list[Part]:
    """Builds a turned-down collar around the neckline, a buttoned strip below it."""
    middle = neck[:-1].mean(axis=0)
    rows = [
        middle + (neck - middle) * [s, 1, s] + [0, y, 0]
        for s, y in ((1.5, -0.05), (1.42, -0.03), (1.12, 0.045), (1.0, 0.05), (0.95, 0.02))
    ]
    front = neck[np.argmax(neck[:, 2])]
    strip = slab(superellipse(0.032, 0.13, 8.0)[::-1], 0.016, 0.004).rotate("x", -17)
    parts = [
        Part(grid(np.array(rows), two_sided=True), look.in_accent(0.05)),
        Part(strip.translate(0, front[1] - 0.13, front[2] + 0.05), look.in_accent(0.05)),
    ]
    for drop in (0.1, 0.16, 0.22):
        button = ball(0.014, 10).translate(0, front[1] - drop, front[2] + 0.052 + (drop - 0.13) * 0.3)
        parts.append(Part(button, look.in_trim(0.5)))
    return parts


def _hood_and_pouch(look: Look, neck: Array, wide: float, tall: float) -> list[Part]:
    """Builds a hood that has fallen back, its two cords, and a pouch on the belly."""
    middle, front = neck[:-1].mean(axis=0), neck[np.argmax(neck[:, 2])]
    hood = ball(1.0, 32).scale(wide * 0.62, 0.13, 0.13).rotate("x", -12).translate(0, middle[1] + 0.05, middle[2] - 0.1)
    rim = sweep(middle + (neck - middle) * [1.15, 1.3, 1.15], 0.045, up=(0, 1, 0), segments=12)
    outline = np.array(
        [(-0.2, -0.1), (0.2, -0.1), (0.2, -0.02), (0.13, 0.1), (-0.13, 0.1), (-0.2, -0.02), (-0.2, -0.1)]
    )
    dense = np.column_stack([np.interp(np.linspace(0, 6, 61), np.arange(7), outline[:, i]) for i in (0, 1)])
    pouch = slab(dense * [wide / 0.36, 1], 0.03, 0.01).translate(0, tall * 0.24, 0.178)
    parts = [Part(hood, look.in_main(0.05)), Part(rim, look.in_main(0.05)), Part(pouch, look.in_accent(0.05))]
    for side in (-1, 1):
        cord = smooth(
            [
                (side * 0.05, front[1] - 0.01, front[2] + 0.03),
                (side * 0.06, front[1] - 0.1, front[2] + 0.075),
                (side * 0.062, front[1] - 0.22, front[2] + 0.085),
            ],
            12,
        )
        parts.append(Part(sweep(cord, 0.01, up=(1, 0, 0), segments=8), look.in_trim()))
    return parts
