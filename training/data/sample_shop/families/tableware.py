"""Mugs, teapots and bottles: turned bodies with handles, spouts and caps."""

from __future__ import annotations

import numpy as np

from training.data.sample_shop.geometry import Array, Mesh, arch, ball, fillet, revolve, smooth, sweep
from training.data.sample_shop.looks import STEEL, WOODS, Look, Part, solid


def mug(look: Look, form: int, rng: np.random.Generator) -> list[Part]:
    """Builds a straight, tapered, barrel or footed cup with a round, an ear-shaped or an angular handle."""
    height, radius = rng.uniform(0.78, 1.1), rng.uniform(0.36, 0.47)
    foot, belly, lip = [(1.0, 1.0, 1.0), (0.7, 0.9, 1.06), (0.78, 1.14, 0.88), (0.62, 1.1, 1.0)][form % 4]
    outside = smooth([(radius * foot, 0.05), (radius * belly, height * 0.45), (radius * lip, height)], 22)
    base = fillet([(0.0, 0.0), (radius * foot * 0.92, 0.0), (radius * foot, 0.05)], 0.03)
    rim = outside[-1] + np.array([[0.0, 0.0], [0.0, 0.01], [-0.012, 0.018], [-0.027, 0.012], [-0.035, -0.01]])
    inside = np.column_stack([outside[::-1, 0] - 0.035, outside[::-1, 1]])[1:-1]
    inside = np.concatenate([inside, [[radius * foot * 0.6, 0.07], [0.0, 0.07]]])
    lining = solid("#f5f1e8", 0.6) if rng.random() < 0.6 else look.in_main(0.6)
    handle = _side_handle(outside, height, int(rng.integers(3)), rng.uniform(0.24, 0.33), rng)
    return [
        Part(revolve(base), look.in_trim(0.5)),
        Part(revolve(outside, 64), look.patterned(0.8)),
        Part(revolve(np.concatenate([rim, inside]), 64), lining),
        Part(handle, look.in_main(0.8)),
    ]


def _side_handle(wall: Array, height: float, kind: int, out: float, rng: np.random.Generator) -> Mesh:
    """Builds a handle that leaves the `wall`, a profile of (radius, height), low and returns to it high."""
    low, high = height * rng.uniform(0.18, 0.28), height * rng.uniform(0.76, 0.86)
    a, b = (float(np.interp(y, wall[:, 1], wall[:, 0])) - 0.015 for y in (low, high))
    middle = (low + high) / 2
    knots = [
        [
            (a, low),
            (a + out * 0.8, low + 0.05),
            (max(a, b) + out, middle),
            (b + out * 0.8, high - 0.03),
            (b, high),
        ],
        [
            (a, low),
            (a + out * 0.6, low + 0.1),
            (b + out, high - 0.14),
            (b + out * 0.7, high + 0.02),
            (b, high - 0.03),
        ],
        [
            (a, low),
            (a + out * 0.6, low),
            (a + out, low + 0.1),
            (b + out, high - 0.1),
            (b + out * 0.6, high),
            (b, high),
        ],
    ][kind]
    path = smooth(knots, 30)
    path = np.column_stack([path, np.zeros(len(path))])
    return sweep(path, rng.uniform(0.036, 0.05), flatten=rng.uniform(1.1, 1.6), capped=False)


def teapot(look: Look, form: int, rng: np.random.Generator) -> list[Part]:
    """Builds a round, tall, squat or conical pot; the handle is at the side or arches over the lid."""
    knots = [
        [(0.26, 0.0), (0.36, 0.02), (0.47, 0.28), (0.36, 0.54), (0.2, 0.62)],
        [(0.24, 0.0), (0.33, 0.02), (0.4, 0.4), (0.36, 0.68), (0.2, 0.76)],
        [(0.3, 0.0), (0.44, 0.04), (0.54, 0.2), (0.42, 0.38), (0.24, 0.45)],
        [(0.36, 0.0), (0.45, 0.03), (0.4, 0.3), (0.29, 0.56), (0.2, 0.62)],
    ][form % 4]
    wall = smooth(np.array(knots) * [rng.uniform(0.92, 1.08), 1.0], 30)
    top = wall[-1]
    profile = [(top[0] + 0.015, 0), (top[0] * 0.75, 0.07), (0.05, 0.11), (0.0, 0.115)]
    lid = smooth([(radius, top[1] + y) for radius, y in profile], 12)
    parts = [
        Part(revolve([(0.0, 0.0), (wall[0, 0], 0.0)]), look.in_trim()),
        Part(revolve(wall, 64), look.patterned(0.8)),
        Part(revolve(lid, 48), look.in_accent(0.8) if rng.random() < 0.5 else look.in_main(0.8)),
    ]
    knob = ball(rng.uniform(0.05, 0.07)).translate(y=top[1] + 0.15)
    parts.append(Part(knob, WOODS[0] if rng.random() < 0.4 else look.in_trim(0.7)))
    at = float(np.interp(0.3 * top[1], wall[:, 1], wall[:, 0]))
    rise = top[1] * rng.uniform(0.95, 1.1)
    bends = [(at - 0.08, 0.3 * top[1]), (at + 0.14, 0.42 * top[1]), (at + 0.2, 0.75 * top[1]), (at + 0.33, rise)]
    spout = smooth([(x, y, 0) for x, y in bends], 24)
    parts.append(Part(sweep(spout, np.linspace(0.105, 0.045, 24), capped=False).both_sides(), look.in_main(0.8)))
    if form // 2 % 2:
        reach = float(wall[:, 0].max()) * 0.82
        bail = arch(reach, top[1] * 0.72, top[1] + rng.uniform(0.36, 0.5))
        parts.append(Part(sweep(bail, 0.03, flatten=1.3), WOODS[1]))
    else:
        handle = _side_handle(wall, top[1], form % 3, rng.uniform(0.24, 0.32), rng)
        parts.append(Part(handle.rotate("y", 180), look.in_main(0.8)))
    return parts


def bottle(look: Look, form: int, rng: np.random.Generator) -> list[Part]:
    """Builds a sports flask, a round-shouldered bottle, a slim carafe or a wide canteen with its closure."""
    r, height = rng.uniform(0.19, 0.24), rng.uniform(0.9, 1.08)
    neck, shoulder = [(0.62, 0.8), (0.42, 0.62), (0.5, 0.7), (0.55, 0.74)][form % 4]
    r *= [1.0, 1.08, 0.86, 1.35][form % 4]
    top, bend = height * 0.9, height * shoulder
    wall = fillet([(r, 0.045), (r, bend), (r * neck, top - 0.06), (r * neck, top)], 0.16, 9)
    wall = np.concatenate([smooth(wall[:1] + (wall[1:2] - wall[:1]) * np.linspace(0, 0.9, 4)[:, None], 8), wall[1:]])
    parts = [
        Part(revolve(fillet([(0, 0), (r * 0.95, 0), (r, 0.045)], 0.03)), look.in_trim(0.5)),
        Part(revolve(wall, 56), look.patterned(0.6, density=1.25)),
    ]
    n = r * neck
    if form % 4 == 0:
        cap = fillet([(n, top), (n + 0.02, top), (n + 0.02, top + 0.13), (0, top + 0.13)], 0.03)
        profile = [(-0.7, 0.12), (-0.6, 0.22), (0.6, 0.22), (0.7, 0.12)]
        loop = smooth([(n * x, top + y, 0) for x, y in profile], 24)
        parts += [
            Part(revolve(cap), look.in_accent(0.4)),
            Part(sweep(loop, 0.02, flatten=1.8), look.in_accent(0.4)),
        ]
    elif form % 4 == 1:
        cork = fillet([(n * 0.85, top), (n * 0.95, top + 0.12), (0, top + 0.12)], 0.02)
        ring = fillet([(n, top - 0.03), (n + 0.025, top - 0.02), (n + 0.025, top + 0.01), (n * 0.6, top + 0.015)], 0.01)
        parts += [Part(revolve(ring), look.in_main(0.6)), Part(revolve(cork), WOODS[2])]
    elif form % 4 == 2:
        parts += [Part(revolve([(n, top), (n + 0.012, top), (n + 0.012, top + 0.03), (0.0, top + 0.03)]), STEEL)]
        parts += [Part(ball(n * 0.95).scale(1, 0.8, 1).translate(y=top + 0.08), look.in_trim(0.7))]
    else:
        cup = fillet([(n + 0.01, top - 0.02), (n + 0.05, top - 0.02), (n + 0.035, top + 0.16), (0, top + 0.16)], 0.03)
        parts += [Part(revolve(cup), STEEL)]
        strap = smooth([(n * 0.9, top - 0.05, 0), (r * 1.25, bend, 0), (r * 1.12, height * 0.35, 0)], 24)
        parts += [Part(sweep(strap, 0.014, flatten=3.0), look.in_accent())]
    return parts
