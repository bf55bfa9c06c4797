"""Handbags and backpacks: soft bodies with flaps, pockets, straps and metal fittings."""

from __future__ import annotations

import numpy as np

from training.data.sample_shop.geometry import (
    Mesh,
    arch,
    ball,
    grid,
    loft,
    rounded_box,
    slab,
    smooth,
    superellipse,
    sweep,
)
from training.data.sample_shop.looks import GOLD, STEEL, Look, Material, Part


def handbag(look: Look, form: int, rng: np.random.Generator) -> list[Part]:
    """Builds a tote, a satchel with a flap, a bucket or a round bag."""
    metal = GOLD if rng.random() < 0.6 else STEEL
    return (_tote, _satchel, _bucket, _round_bag)[form % 4](look, metal, rng)


def _handle(half: float, foot: float, top: float, z: float, radius: float, flatten: float = 1.6) -> Mesh:
    return sweep(arch(half, foot, top, z), radius, flatten=flatten)


def _tote(look: Look, metal: Material, rng: np.random.Generator) -> list[Part]:
    w, h, d = rng.uniform(0.36, 0.44), rng.uniform(0.56, 0.7), rng.uniform(0.13, 0.17)
    levels = [
        (0, 0, 0),
        (0, w * 0.8, d * 0.9),
        (0.015, w * 0.83, d * 0.98),
        (0.05, w * 0.85, d),
        (h * 0.5, w * 0.93, d * 0.9),
        (h, w, d * 0.7),
    ]
    inside = [(h, w, d * 0.7), (h - 0.01, w * 0.97, d * 0.64), (h * 0.4, w * 0.9, d * 0.6), (h * 0.4, 0, 0)]
    parts = [
        Part(loft(levels, power=4.5), look.patterned(0.2)),
        Part(loft(inside, power=4.5), look.in_trim(0.1)),
    ]
    band = [(h * 0.9, w * 0.992, d * 0.74), (h * 0.9, w * 1.0, d * 0.76), (h * 1.004, w * 1.012, d * 0.73)]
    parts.append(Part(loft(band, power=4.5), look.in_main(0.2)))
    reach, top = w * rng.uniform(0.45, 0.6), h + rng.uniform(0.24, 0.4)
    parts += [Part(_handle(reach, h * 0.82, top, z, 0.022), look.in_accent(0.2)) for z in (d * 0.74, -d * 0.74)]
    parts += [Part(ball(0.026, 12).translate(x, h * 0.84, d * 0.79), metal) for x in (-reach, reach)]
    return parts


def _satchel(look: Look, metal: Material, rng: np.random.Generator) -> list[Part]:
    w, h, d = rng.uniform(0.74, 0.92), rng.uniform(0.52, 0.62), rng.uniform(0.24, 0.3)
    parts = [Part(rounded_box(w, h, d, 0.06, 7.0), look.in_main(0.25))]
    drop = rng.uniform(0.52, 0.68)
    parts.append(Part(_flap(w * 0.5 + 0.012, h, d / 2, h * (1 - drop)), look.patterned(0.25)))
    clasp = slab(superellipse(0.06, 0.045, 5.0)[::-1], 0.03, 0.01).translate(0, h * (1 - drop) + 0.06, d / 2 + 0.045)
    parts.append(Part(clasp, metal))
    parts.append(Part(_handle(w * 0.24, h * 0.99, h + rng.uniform(0.2, 0.3), 0, 0.026), look.in_accent(0.3)))
    parts += [Part(ball(0.035, 12).translate(x, h + 0.01, 0), metal) for x in (-w * 0.24, w * 0.24)]
    return parts


def _flap(half: float, height: float, depth: float, bottom: float) -> Mesh:
    """Builds a sheet from the top's back edge over the front down to `bottom`, its lower corners rounded."""
    side = smooth(
        [
            (bottom, depth + 0.03),
            (height * 0.7, depth + 0.03),
            (height * 0.97, depth + 0.01),
            (height + 0.018, depth * 0.5),
            (height + 0.018, -depth * 0.5),
            (height * 0.97, -depth - 0.006),
        ],
        36,
    )
    lower = np.clip((side[:, 0] - bottom) / (height * 0.3), 0, 1)
    reach = half * (0.72 + 0.28 * np.sqrt(1 - (1 - lower) ** 2))
    reach[len(reach) // 2 :] = half * np.linspace(1.0, 0.94, len(reach) - len(reach) // 2)
    across = np.linspace(-1, 1, 25)
    y = side[:, :1] - 0.02 * (1 - lower[:, None]) * (1 - across**2)
    points = np.stack(np.broadcast_arrays(reach[:, None] * across, y, side[:, 1:]), -1)
    return grid(points, two_sided=True)


def _bucket(look: Look, metal: Material, rng: np.random.Generator) -> list[Part]:
    w, h, d = rng.uniform(0.29, 0.34), rng.uniform(0.6, 0.7), rng.uniform(0.22, 0.27)
    levels = [
        (0, 0, 0),
        (0, w * 0.93, d * 0.93),
        (0.02, w, d),
        (h * 0.45, w * 1.02, d * 1.02),
        (h * 0.8, w * 0.9, d * 0.85),
        (h * 0.88, w * 0.8, d * 0.72),
        (h, w * 0.92, d * 0.8),
    ]
    inside = [(h, w * 0.92, d * 0.8), (h - 0.02, w * 0.86, d * 0.74), (h * 0.6, w * 0.8, d * 0.7), (h * 0.6, 0, 0)]
    smooth_levels = [tuple(row) for row in np.concatenate([levels[:2], smooth(levels[2:], 24)])]
    parts = [
        Part(loft(smooth_levels, power=2.4), look.patterned(0.25)),
        Part(loft(inside, power=2.4), look.in_trim(0.1)),
    ]
    ring = superellipse(w * 0.8 + 0.012, d * 0.72 + 0.012, 2.4)
    cord = np.column_stack([ring[:, 0], np.full(len(ring), h * 0.875), ring[:, 1]])
    parts.append(Part(sweep(cord, 0.018, up=(0, 1, 0)), look.in_accent(0.2)))
    parts.append(Part(_handle(w * 0.86, h * 0.9, h + rng.uniform(0.32, 0.46), 0, 0.024, 1.8), look.in_main(0.2)))
    for x, drop in ((-0.03, 0.15), (0.035, 0.19)):
        knots = [(x * 0.4, h * 0.875, d * 0.74), (x, h * 0.8, d * 0.96), (x * 1.3, h * 0.875 - drop, d * 1.05)]
        tail = smooth(knots, 12)
        parts += [
            Part(sweep(tail, 0.011, up=(1, 0, 0), segments=8), look.in_accent(0.2)),
            Part(ball(0.024, 12).translate(*tail[-1]), metal),
        ]
    return parts


def _round_bag(look: Look, metal: Material, rng: np.random.Generator) -> list[Part]:
    r, d, lower = rng.uniform(0.32, 0.38), rng.uniform(0.2, 0.26), rng.uniform(0.86, 1.0)
    outline = superellipse(r, r * lower, 2.3)[::-1]
    edge = np.column_stack([outline * 1.005, np.zeros(len(outline))]) + np.array([0, r * lower, 0])
    parts = [Part(slab(outline, d, 0.05, dome=0.03).translate(y=r * lower), look.patterned(0.3))]
    parts += [Part(sweep(edge + np.array([0, 0, z]), 0.014), look.in_accent(0.3)) for z in (-d * 0.36, d * 0.36)]
    handle = _handle(r * 0.55, r * lower * 1.8, r * lower * 2 + rng.uniform(0.24, 0.42), 0, 0.024)
    parts.append(Part(handle, look.in_main(0.3)))
    parts += [Part(ball(0.034, 12).translate(x, r * lower * 1.84, 0), metal) for x in (-r * 0.55, r * 0.55)]
    pull = slab(superellipse(0.022, 0.05, 3.0)[::-1], 0.015, 0.006).translate(r * 0.1, r * lower * 1.9, d * 0.5)
    return [*parts, Part(pull, metal)]


def backpack(look: Look, form: int, rng: np.random.Generator) -> list[Part]:
    """Builds a school bag, a flap-top rucksack, a roll-top or a small round-topped day bag."""
    w, h, d = rng.uniform(0.3, 0.36), rng.uniform(0.88, 1.0), rng.uniform(0.17, 0.21)
    h *= (1.0, 0.92, 1.0, 0.84)[form % 4]
    rise = (0.3, 0.12, 0.04, 0.42)[form % 4]
    parts = [Part(_pouch(w, h, d, rise), look.patterned(0.12))]
    parts.append(Part(_strap_pair(-1, w, h, d), look.in_accent()))
    parts.append(Part(_strap_pair(1, w, h, d), look.in_accent()))
    parts.append(Part(_handle(0.075, h * 0.97, h + 0.09, -d * 0.4, 0.02, 1.8), look.in_trim()))
    pocket_h = h * rng.uniform(0.34, 0.42)
    pocket = _pouch(w * 0.78, pocket_h, d * 0.5, 0.14).translate(0, 0.06, d * 0.82)
    parts.append(Part(pocket, look.in_accent() if look.pattern.name == "plain" else look.in_main()))
    zip_y = 0.06 + pocket_h * 0.78
    parts.append(Part(_bar(w * 0.6, zip_y, d * 1.33), look.in_trim()))
    side_pocket = _pouch(d * 0.5, h * 0.3, 0.06, 0.05).rotate("y", 90)
    parts += [Part(side_pocket.translate(side * w * 0.98, 0.05, 0), look.in_main()) for side in (-1, 1)]
    return parts + _backpack_top(look, form % 4, w, h, d)


def _pouch(w: float, h: float, d: float, rise: float) -> Mesh:
    """Builds a soft box whose top rounds off over the last `rise` of its height."""
    levels = [(0.0, 0.0, 0.0)]
    levels += [
        (0.06 * (1 - np.cos(turn)), w * (0.86 + 0.14 * np.sin(turn)), d * (0.8 + 0.2 * np.sin(turn)))
        for turn in np.linspace(0.15, np.pi / 2, 5)
    ]
    start = h * (1 - rise)
    levels += [(float(y), w, d) for y in np.linspace(0.09, start, 7)]
    for turn in np.linspace(0.15, np.pi / 2, 9):
        shrink = np.cos(turn) ** 0.6 if rise > 0.2 else 0.55 + 0.45 * np.cos(turn)
        height = start + (h - start) * float(np.sin(turn))
        levels.append((height, w * float(shrink), d * float(0.25 + 0.75 * np.cos(turn))))
    return loft([*levels, (h, 0.0, 0.0)], power=3.2)


def _strap_pair(side: int, w: float, h: float, d: float) -> Mesh:
    x = side * w * 0.5
    path = smooth(
        [
            (x * 0.8, h * 0.95, -d * 0.7),
            (x * 1.1, h * 0.9, -d * 1.7),
            (x * 1.5, h * 0.55, -d * 2.1),
            (x * 1.6, h * 0.25, -d * 1.7),
            (x * 1.5, h * 0.06, -d * 0.9),
        ],
        30,
    )
    return sweep(path, 0.016, up=(1, 0, 0), flatten=3.4, power=3.0)


def _bar(half: float, y: float, z: float) -> Mesh:
    x = np.linspace(-half, half, 9)
    return sweep(np.column_stack([x, 0 * x + y, 0 * x + z - 0.03 * (x / half) ** 2]), 0.012, segments=8)


def _backpack_top(look: Look, kind: int, w: float, h: float, d: float) -> list[Part]:
    if kind in (0, 3):
        zipper = smooth(
            [
                (-w * 0.9, h * 0.55, d * 0.72),
                (-w * 0.72, h * 0.8, d * 0.84),
                (0, h * 0.93, d * 0.62),
                (w * 0.72, h * 0.8, d * 0.84),
                (w * 0.9, h * 0.55, d * 0.72),
            ],
            40,
        )
        return [Part(sweep(zipper, 0.013, segments=8), look.in_trim(0.3))]
    if kind == 1:
        parts = [Part(_flap(w * 1.02, h * 1.0, d * 1.02, h * 0.56), look.in_main())]
        for x in (-w * 0.5, w * 0.5):
            strip = smooth([(x, h * 0.85, d * 1.26), (x, h * 0.6, d * 1.3), (x, h * 0.46, d * 1.42)], 12)
            parts.append(Part(sweep(strip, 0.011, up=(1, 0, 0), flatten=2.4), look.in_trim()))
            buckle = slab(superellipse(0.036, 0.03, 5.0)[::-1], 0.02, 0.008).translate(x, h * 0.55, d * 1.34)
            parts.append(Part(buckle, GOLD))
        return parts
    across = np.linspace(-w * 0.92, w * 0.92, 13)
    roll = sweep(np.column_stack([across, 0 * across + h + 0.02, 0 * across]), 0.07, up=(0, 0, 1))
    buckle = slab(superellipse(0.05, 0.035, 5.0)[::-1], 0.02, 0.008).translate(0, h * 0.88, d * 1.02)
    strip = smooth([(0, h + 0.09, 0), (0, h + 0.03, d * 0.6), (0, h * 0.9, d * 1.0), (0, h * 0.72, d * 1.02)], 16)
    return [
        Part(roll, look.in_main()),
        Part(sweep(strip, 0.011, up=(1, 0, 0), flatten=2.6), look.in_trim()),
        Part(buckle, STEEL),
    ]
