"""Shoes: one foot-shaped surface that caps, stripes, laces and the sole all follow."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from training.data.sample_shop.geometry import Array, Mesh, grid, smooth, sweep
from training.data.sample_shop.looks import Look, Material, Part, solid

LOW, HIGH, SLIP_ON, BOOT = range(4)


@dataclass(frozen=True)
class Last:
    """The upper's surface: rings that rise from the sole (t = 0) to the collar (t = 1), toe towards +x.

    Around a ring, `turn` is 0 at the toe, half a circle at the heel, and positive on the side facing +z.
    """

    front: Array  # (k, 2) toe line: (x, y) from the sole over the toe box up the instep
    back: Array  # (k, 2) heel line
    width: Array  # (k,) half width
    sag: float  # how far the collar dips at the ankle

    def at(self, t: Array, turn: Array, out: float = 0.0) -> Array:
        k = np.linspace(0, 1, len(self.width))
        fx, fy = (np.interp(t, k, self.front[:, i]) for i in (0, 1))
        bx, by = (np.interp(t, k, self.back[:, i]) for i in (0, 1))
        half = np.interp(t, k, self.width)
        c, s = np.cos(turn), np.sin(turn)
        along = np.sign(c) * np.abs(c) ** 0.86
        waist = 1 - 0.13 * np.exp(-(((along + 0.15) / 0.35) ** 2)) * (1 - t)  # the arch of the foot
        lean = 0.5 + 0.5 * along
        x = bx + (fx - bx) * lean + out * c
        y = by + (fy - by) * lean**1.5 + out * 0.5 * t - self.sag * s**2 * t**3
        z = (
            half * waist * (1 + 0.1 * along * (1 - t)) * np.sign(s) * np.abs(s) ** 0.9
            + out * np.sign(s) * np.abs(s) ** 0.5
        )
        return np.stack(np.broadcast_arrays(x, y, z), -1)

    def patch(
        self, t: tuple[float, float], turn: tuple[float, float], out: float, rows: int = 10, columns: int = 20
    ) -> Mesh:
        """Builds a piece of the surface lifted off it by `out`; turns run from the right of the toe to its left."""
        tt, aa = np.meshgrid(np.linspace(*t, rows), np.linspace(turn[1], turn[0], columns), indexing="ij")
        return grid(self.at(tt, aa, out), two_sided=True)

    def bar(self, start: float, width: float) -> Mesh:
        """Builds a slanting stripe on the side that begins at the turn `start`."""
        t, across = np.meshgrid(np.linspace(0.02, 0.7, 14), np.linspace(0, width, 4), indexing="ij")
        return grid(self.at(t, start + across + np.sign(start) * 0.45 * t, 0.006), two_sided=True)


def shoe(look: Look, form: int, rng: np.random.Generator) -> list[Part]:
    """Builds a low or high trainer, a slip-on or an ankle boot."""
    kind = form % 4
    collar = (0.4, 0.58, 0.36, 0.74)[kind] * rng.uniform(0.94, 1.06)
    sole = (0.12, 0.1, 0.075, 0.1)[kind] * rng.uniform(0.85, 1.35)
    last = _last(collar, sole, kind, rng)
    ring = np.linspace(2 * np.pi, 0, 65)[None, :] + np.pi
    rows = np.linspace(0, 1, 34)[:, None]
    upper = grid(last.at(rows, ring))
    inside = last.at(np.linspace(1, 0.4, 9)[:, None], ring, out=-0.022)
    parts = [
        Part(upper, look.patterned(0.2, density=1.15)),
        Part(grid(inside, two_sided=True), look.in_trim(0.05)),
        Part(_collar(last), look.in_accent(0.15)),
    ]
    rubber = solid("#f4f1ea", 0.2) if kind in (LOW, HIGH) and rng.random() < 0.7 else solid("#cf9f68", 0.2)
    parts += _sole(last, sole, rubber if kind != BOOT else solid("#3a2a20", 0.3), look)
    if kind != SLIP_ON:
        parts += _laces(last, look, kind, rng)
    cap = look.in_accent(0.3) if look.pattern.name == "plain" else look.in_main(0.3)
    if kind in (LOW, HIGH) or rng.random() < 0.5:
        parts.append(Part(last.patch((0.0, 0.3), (-0.95, 0.95), 0.006), cap))
    parts.append(Part(last.patch((0.0, 0.62), (np.pi - 0.75, np.pi + 0.75), 0.006), look.in_accent(0.25)))
    if kind in (LOW, HIGH) and look.pattern.name in ("plain", "speckled"):
        parts += [
            Part(last.bar(side * start, side * 0.14), look.in_trim(0.3))
            for side in (1, -1)
            for start in (1.1, 1.36, 1.62)
        ]
    if kind == SLIP_ON:
        for side in (1, -1):
            parts.append(Part(last.patch((0.55, 0.98), (side * 1.35, side * 1.85), 0.004), look.in_trim()))
    return parts


def _last(collar: float, sole: float, kind: int, rng: np.random.Generator) -> Last:
    toe = rng.uniform(0.53, 0.6)
    lift = sole - 0.02
    box = (0.17, 0.17, 0.12, 0.19)[kind]
    tongue = collar * (1.08 if kind != SLIP_ON else 0.78)
    instep = -0.04 if kind != SLIP_ON else 0.06
    front = smooth(
        [
            (toe, lift + 0.02),
            (toe + 0.012, lift + box * 0.4),
            (toe - 0.05, lift + box),
            (0.36, lift + box * 1.35),
            (0.18, lift + 0.26 if kind != SLIP_ON else lift + 0.2),
            (instep + 0.05, min(tongue * 0.85, lift + 0.42)),
            (instep, lift + tongue),
        ],
        30,
    )
    heel = -0.46
    knots = [(heel, lift), (heel - 0.02, lift + 0.12), (heel - 0.005, lift + 0.25), (heel + 0.02, lift + collar)]
    back = smooth(knots, 30)
    widths = smooth([(0.175,), (0.185,), (0.18,), (0.16,), (0.13,), (0.115,), (0.112 if kind < 2 else 0.12,)], 30)[:, 0]
    return Last(front, back, widths * rng.uniform(0.95, 1.05), (0.1, 0.06, 0.05, 0.02)[kind])


def _collar(last: Last) -> Mesh:
    ring = np.linspace(2 * np.pi, 0, 49) + np.pi
    path = last.at(np.ones(49), ring)
    path[-1] = path[0]
    return sweep(path, 0.02, up=(0, 1, 0), segments=10)


def _sole(last: Last, height: float, rubber: Material, look: Look) -> list[Part]:
    ring = np.linspace(2 * np.pi, 0, 65) + np.pi
    edge = last.at(np.zeros(65), ring, out=0.016)
    edge[:, 1] = 0.0
    lift = 0.05 * np.clip((edge[:, 0] - 0.25) / 0.35, 0, 1) ** 2  # the toe's spring
    middle = edge[:-1].mean(axis=0)

    def level(y: float, scale: float, up: float) -> Array:
        out: Array = middle + (edge - middle) * scale
        out[:, 1] = y + up * lift
        return out

    under = [level(0.0, 0.0, 0.6), level(0.0, 0.9, 1.0), level(0.0, 0.97, 1.0), level(0.02, 1.0, 1.0)]
    wall = [level(height * f, 1.0, 1 - 0.5 * f) for f in (0.3, 0.7)]
    top = [level(height - 0.012, 1.0, 0.5), level(height, 0.985, 0.5), level(height, 0.9, 0.5)]
    body = grid(np.array(under + wall + top))
    stripe = grid(np.array([level(height * f, 1.006, 1 - 0.5 * f) for f in (0.42, 0.62)]))
    return [Part(body, rubber), Part(stripe, look.in_main(0.2))]


def _laces(last: Last, look: Look, kind: int, rng: np.random.Generator) -> list[Part]:
    parts = [Part(last.patch((0.5, 1.03), (-0.42, 0.42), 0.006), look.in_accent(0.1))]
    parts += [
        Part(last.patch((0.46, 0.96), (side * 0.42, side * 0.8), 0.012, 12, 5), look.in_main(0.2)) for side in (-1, 1)
    ]
    colour = solid("#f7f4ee", 0.05) if rng.random() < 0.6 else look.in_trim(0.05)
    count = 4 if kind == LOW else 6
    for t in np.linspace(0.53, 0.92, count):
        turn = np.linspace(-0.62, 0.62, 13)
        path = last.at(np.full(13, t), turn, out=0.022)
        parts.append(Part(sweep(path, 0.013, up=(0, 1, 0), segments=8), colour))
    return parts
