"""A triangle rasteriser in numpy: which face shows at each pixel, and where on that face the pixel lies."""

from __future__ import annotations

import numpy as np

from training.data.sample_shop.geometry import Array


def rasterise(
    x: Array, y: Array, near: Array, faces: Array, size: int, lace: Array | None = None
) -> tuple[Array, Array]:
    """Draws faces whose vertices lie at pixel coordinates (x, y), keeping what is nearest (largest `near` > 0).

    Answers, for each of size * size pixels, the face that shows (-1 for none) and its nearness (0 for none).
    `lace` thins see-through faces: a face with 1 keeps every other pixel, one with 2 a quarter of them; the
    supersampled picture's reduction turns that into an even transparency.
    """
    fx, fy, fz = (np.take(v, faces) for v in (x, y, near))
    face, row, first, count = _spans(fx, fy, size)
    span = np.repeat(np.arange(len(face)), count)
    step = np.arange(len(span)) - np.repeat(np.cumsum(count) - count, count)
    pixel = np.take(row * size + first, span) + step

    dz_dx, dz_dy = _slopes(fx, fy, fz)
    at_first = fz[face, 0] + dz_dx[face] * (first + 0.5 - fx[face, 0]) + dz_dy[face] * (row + 0.5 - fy[face, 0])
    nearness = (np.take(at_first, span) + np.take(dz_dx[face], span) * step).astype(np.float32)
    owner = np.take(face, span)
    if lace is not None and lace.any():
        px, py = pixel % size, pixel // size
        thin = np.take(lace, owner)
        keep = (thin == 0) | ((thin == 1) & ((px + py) % 2 == 0)) | ((thin == 2) & (px % 2 == 0) & (py % 2 == 0))
        pixel, nearness, owner = pixel[keep], nearness[keep], owner[keep]

    buffer = np.zeros(size * size, np.float32)
    np.maximum.at(buffer, pixel, nearness)
    shown = nearness == np.take(buffer, pixel)
    owners = np.full(size * size, -1, np.int32)
    owners[pixel[shown]] = owner[shown]
    return owners, buffer


def _spans(fx: Array, fy: Array, size: int) -> tuple[Array, Array, Array, Array]:
    """Cuts each face into horizontal runs of pixel centres: (face, row, first column, count) of each run."""
    order = np.argsort(fy, axis=1)
    x0, x1, x2 = np.take_along_axis(fx, order, 1).T
    y0, y1, y2 = np.take_along_axis(fy, order, 1).T
    top = np.clip(np.ceil(y0 - 0.5), 0, size).astype(np.int64)
    rows = np.clip(np.ceil(y2 - 0.5), 0, size).astype(np.int64) - top
    face = np.repeat(np.arange(len(rows)), rows)
    row = np.arange(len(face)) - np.repeat(np.cumsum(rows) - rows - top, rows)
    centre = row + 0.5
    with np.errstate(divide="ignore", invalid="ignore"):  # a level edge has no slope and crosses no row
        long, upper, lower = (x2 - x0) / (y2 - y0), (x1 - x0) / (y1 - y0), (x2 - x1) / (y2 - y1)
        from_top = centre - y0[face]
        one = x0[face] + long[face] * from_top
        above = x0[face] + upper[face] * from_top
        below = x1[face] + lower[face] * (centre - y1[face])
    other = np.where(centre < y1[face], above, below)
    first = np.clip(np.ceil(np.minimum(one, other) - 0.5), 0, size).astype(np.int64)
    count = np.clip(np.ceil(np.maximum(one, other) - 0.5), 0, size).astype(np.int64) - first
    some = count > 0
    return face[some], row[some], first[some], count[some]


def _slopes(fx: Array, fy: Array, fz: Array) -> tuple[Array, Array]:
    ax, ay, az = fx[:, 1] - fx[:, 0], fy[:, 1] - fy[:, 0], fz[:, 1] - fz[:, 0]
    bx, by, bz = fx[:, 2] - fx[:, 0], fy[:, 2] - fy[:, 0], fz[:, 2] - fz[:, 0]
    area = ax * by - bx * ay
    area = np.where(np.abs(area) < 1e-9, 1e-9, area)
    return (az * by - bz * ay) / area, (ax * bz - bx * az) / area


def weights_at(x: Array, y: Array, corners: Array, pixels: Array, size: int) -> Array:
    """Returns how much each of a face's three `corners`, (n, 3) vertex numbers, counts at the centres of n pixels."""
    x0, x1, x2 = np.take(x, corners.T)
    y0, y1, y2 = np.take(y, corners.T)
    px, py = pixels % size + np.float32(0.5), pixels // size + np.float32(0.5)
    area = (x1 - x0) * (y2 - y0) - (x2 - x0) * (y1 - y0)
    area = np.where(np.abs(area) < 1e-9, 1e-9, area)
    second = ((px - x0) * (y2 - y0) - (x2 - x0) * (py - y0)) / area
    third = ((x1 - x0) * (py - y0) - (px - x0) * (y1 - y0)) / area
    result: Array = np.clip(np.stack([1 - second - third, second, third]), 0, 1).astype(np.float32)
    return result
