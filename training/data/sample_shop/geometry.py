"""Parametric surfaces as triangle meshes: what every product, leaf and box in the sample shop is built from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Mesh:
    """Vertices with outward normals and texture coordinates; `size` is what one unit of (u, v) measures."""

    points: Array  # (V, 3): x to the right, y up, z towards the viewer
    normals: Array  # (V, 3)
    uv: Array  # (V, 2) in [0, 1]
    faces: Array  # (F, 3)
    size: tuple[float, float]
    two_sided: bool = False

    def translate(self, x: float = 0.0, y: float = 0.0, z: float = 0.0) -> Mesh:
        return replace(self, points=self.points + np.array([x, y, z]))

    def rotate(self, axis: str, degrees: float) -> Mesh:
        turn = rotation(axis, degrees).T
        return replace(
            self,
            points=np.einsum("nj,jk->nk", self.points, turn),
            normals=np.einsum("nj,jk->nk", self.normals, turn),
        )

    def scale(self, x: float, y: float, z: float) -> Mesh:
        factors = np.array([x, y, z])
        normals = self.normals / factors
        return replace(self, points=self.points * factors, normals=normals / _length(normals))

    def both_sides(self) -> Mesh:
        return replace(self, two_sided=True)

    def flat_uv(self, width: tuple[float, float], height: tuple[float, float]) -> Mesh:
        """Projects the texture from the front (x and y over the given ranges), like a printed sheet."""
        span = np.array([width[1] - width[0], height[1] - height[0]])
        uv = (self.points[:, :2] - np.array([width[0], height[0]])) / span
        return replace(self, uv=uv, size=(float(span[0]), float(span[1])))


def rotation(axis: str, degrees: float) -> Array:
    """Returns the matrix that turns a column vector about one axis, counter-clockwise seen from its tip."""
    angle = np.radians(degrees)
    cos, sin = np.cos(angle), np.sin(angle)
    if axis == "x":
        return np.array([[1, 0, 0], [0, cos, -sin], [0, sin, cos]])
    if axis == "y":
        return np.array([[cos, 0, sin], [0, 1, 0], [-sin, 0, cos]])
    return np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]])


def _length(vectors: Array) -> Array:
    result: Array = np.maximum(np.sqrt((vectors**2).sum(-1, keepdims=True)), 1e-12)
    return result


def grid(points: Array, *, two_sided: bool = False) -> Mesh:
    """Builds a mesh over a (rows, columns, 3) grid: u along the columns, v along the rows, u x v outward."""
    rows, columns = points.shape[:2]
    closed_u = np.allclose(points[:, 0], points[:, -1], atol=1e-6)
    closed_v = np.allclose(points[0], points[-1], atol=1e-6)
    cells = np.cross(points[:-1, 1:] - points[1:, :-1], points[1:, 1:] - points[:-1, :-1])
    padded = np.zeros((rows + 1, columns + 1, 3))
    padded[1:-1, 1:-1] = cells
    if closed_u:
        padded[:, 0], padded[:, -1] = padded[:, -2], padded[:, 1]
    if closed_v:
        padded[0], padded[-1] = padded[-2], padded[1]
    normals = padded[:-1, :-1] + padded[1:, :-1] + padded[:-1, 1:] + padded[1:, 1:]
    for row in (0, -1):  # a row that shrinks to a point has one normal, not one for each column
        if np.ptp(points[row], axis=0).max() < 1e-6:
            normals[row] = normals[row].mean(axis=0)
    index = np.arange(rows * columns).reshape(rows, columns)
    low, right, up, far = index[:-1, :-1], index[:-1, 1:], index[1:, :-1], index[1:, 1:]
    faces = np.concatenate([np.stack([low, right, far], -1), np.stack([low, far, up], -1)]).reshape(-1, 3)
    u, v = _arc_fractions(points, axis=1), _arc_fractions(points, axis=0)
    uv = np.stack(np.broadcast_arrays(u[None, :], v[:, None]), -1).reshape(-1, 2)
    size = (_mean_length(points, 1), _mean_length(points, 0))
    flat = points.reshape(-1, 3)
    return Mesh(flat, (normals / _length(normals)).reshape(-1, 3), uv, faces, size, two_sided)


def _steps(points: Array, axis: int) -> Array:
    result: Array = np.sqrt((np.diff(points, axis=axis) ** 2).sum(-1)).mean(axis=1 - axis)
    return result


def _arc_fractions(points: Array, axis: int) -> Array:
    travelled = np.concatenate([[0.0], np.cumsum(_steps(points, axis))])
    result: Array = travelled / max(travelled[-1], 1e-9)
    return result


def _mean_length(points: Array, axis: int) -> float:
    return float(_steps(points, axis).sum())


def smooth(knots: Sequence[Sequence[float]] | Array, count: int, *, closed: bool = False) -> Array:
    """Samples a Catmull-Rom curve through the knots at `count` parameters; a closed one returns to its start."""
    k = np.asarray(knots, float)
    k = np.concatenate([k[-1:], k, k[:2]]) if closed else np.concatenate([k[:1] * 2 - k[1:2], k, k[-1:] * 2 - k[-2:-1]])
    spans = len(k) - 3
    t = np.linspace(0, spans, count)
    i = np.minimum(t.astype(int), spans - 1)
    f = (t - i)[:, None]
    a, b, c, d = k[i], k[i + 1], k[i + 2], k[i + 3]
    result: Array = 0.5 * (2 * b + (c - a) * f + (2 * a - 5 * b + 4 * c - d) * f**2 + (3 * b - a - 3 * c + d) * f**3)
    return result


def fillet(corners: Sequence[Sequence[float]], radius: float, steps: int = 5) -> Array:
    """Rounds the inner corners of a polyline, so that edges catch the light as bevels do."""
    p = np.asarray(corners, float)
    out = [p[:1]]
    t = np.linspace(0, 1, steps)[:, None]
    for before, corner, after in zip(p[:-2], p[1:-1], p[2:], strict=True):
        r = min(radius, 0.49 * np.hypot(*(before - corner)), 0.49 * np.hypot(*(after - corner)))
        start = corner + (before - corner) / max(np.hypot(*(before - corner)), 1e-9) * r
        end = corner + (after - corner) / max(np.hypot(*(after - corner)), 1e-9) * r
        out.append((1 - t) ** 2 * start + 2 * t * (1 - t) * corner + t**2 * end)
    return np.concatenate([*out, p[-1:]])


def revolve(profile: Sequence[Sequence[float]] | Array, segments: int = 48) -> Mesh:
    """Turns a profile of (radius, height) about the y axis; a profile that climbs faces outward."""
    p = np.asarray(profile, float)
    angle = np.linspace(0, 2 * np.pi, segments + 1) + np.pi  # the seam is at the back
    r, y = p[:, :1], p[:, 1:]
    return grid(np.stack(np.broadcast_arrays(r * np.sin(angle), y, r * np.cos(angle)), -1))


def superellipse(width: float, depth: float, power: float = 2.0, count: int = 48) -> Array:
    """Builds a closed ring of (x, z) half-axes `width`, `depth`; power 2 is an ellipse, larger is boxier."""
    angle = np.linspace(0, 2 * np.pi, count + 1) + np.pi
    s, c = np.sin(angle), np.cos(angle)
    ring = np.stack([np.sign(s) * np.abs(s) ** (2 / power) * width, np.sign(c) * np.abs(c) ** (2 / power) * depth], -1)
    ring[-1] = ring[0]
    return ring


def loft(levels: Sequence[tuple[float, float, float]], *, power: float = 4.0, count: int = 56) -> Mesh:
    """Stacks superellipse rings of (height, half width, half depth) into a body; climbing levels face outward."""
    rings = []
    for y, width, depth in levels:
        ring = superellipse(width, depth, power, count)
        rings.append(np.stack([ring[:, 0], np.full(len(ring), y), ring[:, 1]], -1))
    return grid(np.array(rings))


def rounded_box(width: float, height: float, depth: float, radius: float, power: float = 6.0) -> Mesh:
    """Builds a box standing on y = 0 with rounded edges."""
    r = min(radius, width / 2, height / 2, depth / 2)
    levels: list[tuple[float, float, float]] = [(0.0, 0.0, 0.0)]
    for turn in np.linspace(0, np.pi / 2, 5):
        inset = r * (1 - np.sin(turn))
        levels.append((r * (1 - np.cos(turn)), width / 2 - inset, depth / 2 - inset))
    levels += [(height * f, width / 2, depth / 2) for f in (0.35, 0.65)]
    levels += [(height - y, w, d) for y, w, d in reversed(levels[:6])]
    return loft(levels, power=power)


def slab(outline: Array, thickness: float, bevel: float = 0.02, dome: float = 0.0) -> Mesh:
    """Builds a flat plate of a closed (x, y) outline, counter-clockwise, centred on z = 0; `dome` swells its front."""
    middle = outline[:-1].mean(axis=0)
    reach = float(np.abs(outline - middle).max())
    half, b = thickness / 2, min(bevel, thickness / 2)
    inner = 1 - b / reach
    rings = [(0.0, -half), (inner * 0.6, -half), (inner, -half), (1 - 0.3 * (1 - inner), -half + 0.3 * b)]
    rings += [(1.0, -half + b), (1.0, half - b), (1 - 0.3 * (1 - inner), half - 0.3 * b)]
    rings += [(inner * f, half + dome * (1 - f**2)) for f in (1.0, 0.9, 0.75, 0.55, 0.3, 0.0)]
    points = [np.column_stack([middle + (outline - middle) * s, np.full(len(outline), z)]) for s, z in rings]
    low, high = outline.min(axis=0), outline.max(axis=0)
    return grid(np.array(points)).flat_uv((low[0], high[0]), (low[1], high[1]))


def sweep(
    path: Array,
    radius: float | Array | Sequence[float],
    *,
    flatten: float = 1.0,
    segments: int = 14,
    up: tuple[float, float, float] = (0.0, 0.0, 1.0),
    power: float = 2.0,
    capped: bool = True,
) -> Mesh:
    """Builds a tube along a path; `up` orients the section, `flatten` is its extent along `up` over that across."""
    closed = np.allclose(path[0], path[-1])
    tangent = np.gradient(path, axis=0)
    if closed:
        tangent[0] = tangent[-1] = path[1] - path[-2]
    tangent /= _length(tangent)
    side = np.cross(np.asarray(up, float), tangent)
    side /= _length(side)
    lift = np.cross(tangent, side)
    r = np.broadcast_to(np.asarray(radius, float), (len(path),))
    if capped and not closed:
        path, r, side, lift = _with_round_ends(path, r, side, lift, tangent)
    angle = np.linspace(0, 2 * np.pi, segments + 1)
    cos, sin = (np.sign(f) * np.abs(f) ** (2 / power) for f in (np.cos(angle), np.sin(angle)))
    section = side[:, None] * cos[None, :, None] + lift[:, None] * (sin * flatten)[None, :, None]
    points = path[:, None] + section * r[:, None, None]
    points[:, -1] = points[:, 0]
    return grid(points)


def _with_round_ends(path: Array, r: Array, side: Array, lift: Array, tangent: Array) -> tuple[Array, ...]:
    turns = np.array([0.0, 0.45, 0.8, 0.97])
    bulge = np.sqrt(1 - turns**2) * 0.8
    start = path[:1] - tangent[:1] * (bulge * r[0])[:, None]
    end = path[-1:] + tangent[-1:] * (bulge * r[-1])[::-1][:, None]
    path = np.concatenate([start, path, end])
    r = np.concatenate([turns * r[0], r, turns[::-1] * r[-1]])
    repeated = (np.concatenate([np.repeat(f[:1], 4, 0), f, np.repeat(f[-1:], 4, 0)]) for f in (side, lift))
    return (path, r, *repeated)


def arch(half: float, foot: float, top: float, z: float = 0.0, power: float = 2.3) -> Array:
    """Builds a handle's line in the plane of `z`: up from (-half, foot), over `top`, down to (half, foot)."""
    turn = np.linspace(np.pi, 0, 41)
    c, s = np.cos(turn), np.sin(turn)
    x, y = np.sign(c) * np.abs(c) ** (2 / power) * half, foot + (top - foot) * np.abs(s) ** (2 / power)
    return np.column_stack([x, y, np.full(len(turn), z)])


def ball(radius: float, segments: int = 24) -> Mesh:
    turn = np.linspace(-np.pi / 2, np.pi / 2, segments // 2 + 1)
    return revolve(np.column_stack([np.cos(turn) * radius, np.sin(turn) * radius]).round(9), segments)


def tube_between(start: Sequence[float], end: Sequence[float], r0: float, r1: float, segments: int = 14) -> Mesh:
    """Builds a straight, tapering rod with round ends."""
    t = np.linspace(0, 1, 5)[:, None]
    path = np.asarray(start, float) * (1 - t) + np.asarray(end, float) * t
    along = np.abs(path[-1] - path[0])
    up = (0.0, 0.0, 1.0) if along[2] < 0.8 * along.max() else (0.0, 1.0, 0.0)
    return sweep(path, np.linspace(r0, r1, 5), up=up, segments=segments)
