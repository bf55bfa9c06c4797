"""Glasses, watches and headphones."""

from __future__ import annotations

import numpy as np

from training.data.sample_shop.geometry import Mesh, ball, grid, slab, smooth, superellipse, sweep, tube_between
from training.data.sample_shop.looks import GOLD, RUBBER, STEEL, Look, Material, Part, linear, solid
from training.data.sample_shop.patterns import Pattern

LENSES = (
    ("#cfe0e6", "#f4fafc", 2),
    ("#20242b", "#4d5663", 0),
    ("#5b3a22", "#94683f", 1),
    ("#24506b", "#5c8fae", 1),
    ("#7a2f45", "#b5667c", 1),
    ("#1f3a34", "#4c776b", 0),
)
"""Lenses: their tint, its reflections and how see-through they are."""


def glasses(look: Look, form: int, rng: np.random.Generator) -> list[Part]:
    """Builds round, square, cat-eye or teardrop frames with clear, tinted or dark lenses."""
    w, h, thick = rng.uniform(0.22, 0.26), rng.uniform(0.16, 0.2), rng.uniform(0.024, 0.04)
    angle = np.linspace(0, 2 * np.pi, 65)
    c, s = np.cos(angle), np.sin(angle)
    kind = form % 4
    if kind == 0:
        outline = np.column_stack([c, s]) * (w * 0.86)
    elif kind == 1:
        outline = np.column_stack([np.sign(c) * np.abs(c) ** 0.5 * w, np.sign(s) * np.abs(s) ** 0.5 * h * 0.85])
    elif kind == 2:
        outline = np.column_stack([np.sign(c) * np.abs(c) ** 0.7 * w, np.sign(s) * np.abs(s) ** 0.75 * h * 0.85])
        outline += np.column_stack(
            [0.35 * s * w * (c > 0) * c**2 * 0.5, 0.12 * np.clip(c, 0, 1) ** 2 * np.clip(s + 0.4, 0, 1)]
        )
    else:
        outline = np.column_stack([c * w * (1 + 0.06 * s), s * h * 1.06]) + np.column_stack([0.05 * (1 - s) * w, 0 * s])
    outline[-1] = outline[0]
    frame = look.patterned(0.7, density=1.4)
    tint, shine, lace = LENSES[int(rng.integers(len(LENSES)))]
    lens = Material(np.stack([linear(tint), linear(shine), linear(shine)]), Pattern("glint"), 0.8, lace=lace)
    gap, base = w + rng.uniform(0.045, 0.07), float(-outline[:, 1].min()) + thick
    parts = []
    for side in (-1, 1):
        line = outline * [side, 1] if side == 1 else (outline * [-1, 1])[::-1]
        rim = np.column_stack([line[:, 0] + side * gap, line[:, 1] + base, -0.25 * (line[:, 0] + side * gap) ** 2])
        parts.append(Part(sweep(rim, thick, flatten=0.9, segments=12), frame))
        pane = slab(line * 0.99, 0.012, 0.004, dome=0.012).translate(side * gap, base, -0.25 * gap**2)
        parts.append(Part(pane, lens))
        parts.append(Part(_temple(side, gap + w, base + h * 0.35, thick, rng), look.in_main(0.6)))
    reach, low = gap - w * 0.84, base + h * 0.25
    bridge = smooth([(-reach, low, 0), (0, base + h * 0.5, 0.015), (reach, low, 0)], 14)
    parts.append(Part(sweep(bridge, thick * 0.9), look.in_main(0.6)))
    return parts


def _temple(side: int, x: float, y: float, thick: float, rng: np.random.Generator) -> Mesh:
    start = -0.25 * x**2
    knots = [
        (side * (x - 0.01), y, start + 0.01),
        (side * (x + 0.01), y, start - 0.35),
        (side * x, y - 0.005, start - 0.68),
        (side * (x - 0.03), y * 0.62, start - 0.86),
        (side * (x - 0.05), 0.03, start - 0.98),
    ]
    return sweep(smooth(knots, 36), np.linspace(thick * 0.8, thick * 0.95, 36), up=(0, 1, 0.2), flatten=1.3)


def watch(look: Look, form: int, rng: np.random.Generator) -> list[Part]:
    """Builds a round, square, cushion or diver's watch, its strap closed as on a stand."""
    kind = form % 4
    r = rng.uniform(0.25, 0.3)
    power = (2.0, 6.0, 3.4, 2.0)[kind]
    metal = (STEEL, GOLD, solid("#3a3b40", 0.6, metal=0.6), solid("#d99a7c", 0.7, metal=0.9))[int(rng.integers(4))]
    case = superellipse(r, r, power)[::-1]
    face = ("#f6f3ea", "#1f2229", look.main)[int(rng.integers(3))]
    ink = "#1c1d22" if linear(face).mean() > 0.25 else "#f4f1e8"
    colours = np.stack([linear(face), linear(ink), linear("#d8452f")])
    dial = Material(colours, Pattern("dial", 1.0, int(rng.integers(64))), 0.35)
    z = 0.06
    parts = [
        Part(_band(r, rng.uniform(0.6, 0.78), kind), look.patterned(0.15, density=1.6)),
        Part(slab(case, 0.13, 0.035).translate(z=z), metal),
        Part(slab(case * 0.86, 0.02, 0.005).translate(z=z + 0.062), dial),
        Part(tube_between((r * 0.98, 0, z), (r * 1.14, 0, z), 0.035, 0.035), metal),
    ]
    bezel = np.column_stack([case * 0.93, np.full(len(case), z + 0.066)])
    thick, finish = (0.03, look.in_trim(0.6)) if kind == 3 else (0.018, metal)
    parts.append(Part(sweep(bezel, thick, segments=10), finish))
    rotated = [Part(p.mesh.rotate("x", -24), p.material) for p in parts]
    low = min(float(p.mesh.points[:, 1].min()) for p in rotated)
    return [Part(p.mesh.translate(y=-low), p.material) for p in rotated]


def _band(r: float, share: float, kind: int) -> Mesh:
    """Builds the strap's loop behind the case; it is widest at the case."""
    angle = np.linspace(0, 2 * np.pi, 73)
    path = np.column_stack([0 * angle, 0.46 * np.sin(angle), -0.36 + 0.38 * np.cos(angle)])
    width = r * share * (0.86 + 0.14 * np.cos(angle))
    loop = sweep(path, 0.024, up=(1, 0, 0), segments=20, flatten=1.0, power=3.0)
    points = loop.points.reshape(73, 21, 3)
    points[:, :, 0] *= (width / 0.024)[:, None]
    return grid(points)


def headphones(look: Look, form: int, rng: np.random.Generator) -> list[Part]:
    """Builds headphones: round or oval cups on a padded, a thin or a double band; one form carries a microphone."""
    kind = form % 4
    r, tall = rng.uniform(0.2, 0.25), (1.0, 1.25, 1.0, 1.15)[kind]
    half, top = rng.uniform(0.36, 0.42), rng.uniform(0.92, 1.02)
    cup_y = r * tall + 0.01
    arch = smooth(
        [
            (-half, cup_y + 0.1, 0),
            (-half * 1.02, top * 0.66, 0),
            (-half * 0.72, top * 0.93, 0),
            (0, top, 0),
            (half * 0.72, top * 0.93, 0),
            (half * 1.02, top * 0.66, 0),
            (half, cup_y + 0.1, 0),
        ],
        48,
    )
    wide = (3.6, 2.4, 1.0, 4.2)[kind]
    parts = [Part(sweep(arch, 0.022, flatten=wide, power=2.6), look.in_main(0.3))]
    pad = arch[10:-10] - np.array([0, 0.028, 0])
    if kind == 2:
        parts = [Part(sweep(arch + np.array([0, 0, z]), 0.017), STEEL) for z in (-0.045, 0.045)]
        pad = pad + np.array([0, 0.02, 0])
    cover = look.in_main(0.1) if kind == 2 else look.in_accent(0.1)
    parts.append(Part(sweep(pad, 0.03, flatten=2.4, power=2.6), cover))
    outline = superellipse(r, r * tall, 2.2)[::-1]
    cushion = RUBBER if rng.random() < 0.6 else solid("#ddd6c8", 0.1)
    for side in (-1, 1):
        cup = [
            Part(slab(outline, 0.13, 0.04, dome=0.02), look.patterned(0.45, density=1.5)),
            Part(slab(outline * 0.98, 0.1, 0.045).translate(z=-0.1), cushion),
        ]
        rim = np.column_stack([outline * 0.99, np.full(len(outline), 0.03)])
        cup.append(Part(sweep(rim, 0.016, segments=10), STEEL if kind % 2 else look.in_accent(0.4)))
        for part in cup:
            mesh = part.mesh.rotate("y", side * 90).rotate("z", side * 4)
            parts.append(Part(mesh.translate(side * (half - 0.01), cup_y, 0), part.material))
        rod = tube_between((side * half, cup_y + r * tall * 0.55, 0), (side * half, top * 0.66, 0), 0.028, 0.024)
        parts.append(Part(rod, STEEL))
    if kind == 3:
        boom = smooth(
            [
                (-half - 0.05, cup_y, 0.05),
                (-half - 0.04, cup_y - 0.12, 0.25),
                (-half * 0.8, cup_y - 0.15, 0.42),
            ],
            20,
        )
        parts += [
            Part(sweep(boom, 0.013, up=(0, 1, 0)), RUBBER),
            Part(ball(0.035, 14).translate(*boom[-1]), RUBBER),
        ]
    return parts
