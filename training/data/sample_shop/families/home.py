"""Lamps and chairs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from training.data.sample_shop.geometry import ball, fillet, revolve, slab, smooth, superellipse, sweep, tube_between
from training.data.sample_shop.looks import GOLD, RUBBER, STEEL, WOODS, Look, Material, Part, solid


def lamp(look: Look, form: int, rng: np.random.Generator) -> list[Part]:
    """Builds a table lamp: a drum, cone, bell or dome shade on a vase, stacked balls, a column or three legs."""
    low, high = rng.uniform(0.46, 0.54), rng.uniform(0.92, 1.02)
    wide, narrow = rng.uniform(0.32, 0.4), rng.uniform(0.14, 0.2)
    t = np.linspace(0, 1, 16)
    kind = form % 4
    radius = [
        wide * 0.92 + 0 * t,
        wide + (narrow - wide) * t,
        narrow + (wide - narrow) * (1 - t) ** 2.2,
        wide * np.sqrt(np.clip(1 - (t * 0.96) ** 2, 0, 1)),
    ][kind]
    shade = revolve(np.column_stack([radius, low + (high - low) * t]), 56).both_sides()
    lit = replace(look.patterned(0.05), glow=rng.uniform(0.25, 0.45))
    edge = look.in_trim() if rng.random() < 0.5 else look.in_main()
    bottom = np.column_stack(
        [np.cos(a := np.linspace(0, 2 * np.pi, 49)) * radius[0], 0 * a + low, np.sin(a) * radius[0]]
    )
    parts = [Part(shade, lit), Part(sweep(bottom, 0.012, up=(0, 1, 0), segments=8), edge)]
    parts.append(Part(ball(0.07).translate(y=low + 0.12), solid("#fff1cf", 0.2, glow=2.0)))
    return parts + _lamp_base(look, form // 2 + int(rng.integers(4)), low, rng)


def _lamp_base(look: Look, kind: int, low: float, rng: np.random.Generator) -> list[Part]:
    metal = GOLD if rng.random() < 0.5 else STEEL
    stem = Part(revolve([(0.022, 0.05), (0.022, low + 0.12)], 16), metal)
    if kind % 4 == 0:
        knots = [(0.14, 0.0), (0.16, 0.03), (0.23, 0.2), (0.1, low * 0.8), (0.05, low * 0.9), (0.0, low * 0.9)]
        return [stem, Part(revolve(smooth(knots, 30)), look.in_main(0.8))]
    if kind % 4 == 1:
        sizes = (0.17, 0.13, 0.1)
        heights = np.cumsum([0.16, 0.24, 0.18])
        balls = [
            Part(ball(s).scale(1, 0.85, 1).translate(y=h * low / 0.62), look.in_trim(0.7))
            for s, h in zip(sizes, heights, strict=True)
        ]
        return [stem, *balls, Part(revolve(fillet([(0.19, 0), (0.19, 0.035), (0, 0.035)], 0.02)), metal)]
    if kind % 4 == 2:
        foot = fillet([(0.25, 0.0), (0.25, 0.04), (0.05, 0.06), (0.035, low * 0.95), (0.0, low * 0.95)], 0.03)
        return [stem, Part(revolve(foot), metal)]
    legs = []
    for turn in (90, 210, 330):
        x, z = 0.27 * np.cos(np.radians(turn)), 0.27 * np.sin(np.radians(turn))
        leg = tube_between((x, 0.02, z), (x * 0.1, low * 0.98, z * 0.1), 0.022, 0.03)
        legs.append(Part(leg, WOODS[int(rng.integers(3))]))
    return [stem, *legs]


def chair(look: Look, form: int, rng: np.random.Generator) -> list[Part]:
    """Builds a chair: four legs and a seat with a panel, a spindle, a ladder or a round back; some have arms."""
    half, seat_y, top = rng.uniform(0.23, 0.28), rng.uniform(0.4, 0.46), rng.uniform(0.92, 1.06)
    frame = [WOODS[0], WOODS[1], WOODS[2], RUBBER, STEEL, look.in_trim(0.4)][int(rng.integers(6))]
    seat = slab(superellipse(half, half * 0.96, 5.0 if form % 2 else 3.0)[::-1], 0.07, 0.03, dome=0.015)
    parts = [Part(seat.rotate("x", -90).translate(y=seat_y), look.patterned(0.12, density=1.2))]
    splay, slim = rng.uniform(0.02, 0.09), rng.uniform(0.02, 0.032)
    for x in (-1, 1):
        for z in (-1, 1):
            foot = (x * (half * 0.8 + splay), 0.01, z * (half * 0.8 + splay))
            leg = tube_between(foot, (x * half * 0.78, seat_y - 0.03, z * half * 0.78), slim * 0.75, slim)
            parts.append(Part(leg, frame))
    return parts + _chair_back(look, form % 4, half, seat_y, top, frame) + _chair_arms(look, rng, half, seat_y, frame)


def _chair_back(look: Look, kind: int, half: float, seat_y: float, top: float, frame: Material) -> list[Part]:
    lean = 0.1
    cloth = look.patterned(0.12, density=1.2)

    def at(x: float, y: float) -> tuple[float, float, float]:
        return (x, y, -half * 0.86 - lean * (y - seat_y) / (top - seat_y))

    ends = [(at(s * half * 0.86, seat_y - 0.02), at(s * half * 0.9, top - 0.03)) for s in (-1, 1)]
    posts = [Part(tube_between(foot, head, 0.026, 0.022), frame) for foot, head in ends]
    if kind == 0:
        panel = slab(superellipse(half * 0.98, (top - seat_y) * 0.36, 4.0)[::-1], 0.06, 0.03, dome=0.015)
        return [*posts, Part(panel.rotate("x", -11).translate(*at(0, seat_y + (top - seat_y) * 0.64)), cloth)]
    if kind == 1:
        bow = smooth(
            [
                at(-half * 0.9, seat_y),
                at(-half * 0.95, top - 0.16),
                at(0, top),
                at(half * 0.95, top - 0.16),
                at(half * 0.9, seat_y),
            ],
            36,
        )
        places = (-0.55, -0.2, 0.2, 0.55)
        ends = [(at(x * half, seat_y), at(x * half * 1.1, top - 0.05 - 0.12 * x * x)) for x in places]
        rods = [Part(tube_between(foot, head, 0.012, 0.012, 8), frame) for foot, head in ends]
        return [Part(sweep(bow, 0.026), look.in_main(0.3)), *rods]
    if kind == 2:
        bars = []
        for f in (0.35, 0.62, 0.9):
            bar = slab(superellipse(half * 0.95, 0.055, 6.0)[::-1], 0.035, 0.015)
            bars.append(Part(bar.rotate("x", -11).translate(*at(0, seat_y + (top - seat_y) * f)), cloth))
        return posts + bars
    disc = slab(superellipse(half * 0.92, half * 0.92, 2.0)[::-1], 0.06, 0.03, dome=0.015)
    ends = [(at(s * half * 0.4, seat_y), at(s * half * 0.45, top - half)) for s in (-1, 1)]
    stays = [Part(tube_between(foot, head, 0.02, 0.02), frame) for foot, head in ends]
    return [*stays, Part(disc.rotate("x", -11).translate(*at(0, top - half * 0.92)), cloth)]


def _chair_arms(look: Look, rng: np.random.Generator, half: float, seat_y: float, frame: Material) -> list[Part]:
    if rng.random() < 0.6:
        return []
    arms = []
    for s in (-1, 1):
        x = s * half * 1.02
        bends = ((0, half * 0.6), (0.2, half * 0.62), (0.22, 0), (0.21, -half))
        path = smooth([(x, seat_y + y, z) for y, z in bends], 24)
        arms.append(Part(sweep(path, 0.022, up=(1, 0, 0), flatten=1.4), frame))
    return arms
