"""The renderer: turns parts, a camera and a light into a picture of a thing and its shadow on the floor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image, ImageFilter

from training.data.sample_shop.camera import Camera, Light
from training.data.sample_shop.geometry import Array
from training.data.sample_shop.looks import Material, Part
from training.data.sample_shop.raster import rasterise, weights_at

OVERSAMPLING = 2  # fine pixels along a side of each pixel
SHADOW_SIZE = 168
SHADOW_MARGIN = 24  # map pixels around the thing, for its shadow to fade out in


@dataclass(frozen=True)
class Model:
    """Parts merged into flat arrays, ready to be posed and drawn many times."""

    points: Array  # (V, 3)
    normals: Array  # (V, 3)
    uv: Array  # (V, 2)
    faces: Array  # (F, 3)
    part_of_face: Array  # (F,)
    sizes: tuple[tuple[float, float], ...]
    materials: tuple[Material, ...]
    two_sided: Array  # (parts,)

    @classmethod
    def of(cls, parts: Sequence[Part]) -> Model:
        starts = np.cumsum([0] + [len(p.mesh.points) for p in parts[:-1]])
        return cls(
            np.concatenate([p.mesh.points for p in parts]).astype(np.float32),
            np.concatenate([p.mesh.normals for p in parts]).astype(np.float32),
            np.concatenate([p.mesh.uv for p in parts]).astype(np.float32),
            np.concatenate([p.mesh.faces + start for p, start in zip(parts, starts, strict=True)]),
            np.concatenate([np.full(len(p.mesh.faces), i) for i, p in enumerate(parts)]),
            tuple(p.mesh.size for p in parts),
            tuple(p.material for p in parts),
            np.array([p.mesh.two_sided for p in parts]),
        )

    def normalise(self) -> Model:
        """Returns the model standing on the floor around the origin, its longest side one unit long."""
        low, high = self.points.min(axis=0), self.points.max(axis=0)
        foot = np.array([(low[0] + high[0]) / 2, low[1], (low[2] + high[2]) / 2], np.float32)
        return replace(self, points=(self.points - foot) / (high - low).max())

    def rotate(self, turn: Array) -> Model:
        """Returns the model rotated about the origin by a (3, 3) matrix."""
        points, normals = (np.einsum("nj,kj->nk", a, turn.astype(np.float32)) for a in (self.points, self.normals))
        return replace(self, points=points, normals=normals)

    def join(self, other: Model) -> Model:
        return Model(
            np.concatenate([self.points, other.points]),
            np.concatenate([self.normals, other.normals]),
            np.concatenate([self.uv, other.uv]),
            np.concatenate([self.faces, other.faces + len(self.points)]),
            np.concatenate([self.part_of_face, other.part_of_face + len(self.sizes)]),
            self.sizes + other.sizes,
            self.materials + other.materials,
            np.concatenate([self.two_sided, other.two_sided]),
        )


@dataclass(frozen=True)
class ShadowMap:
    """What the light sees: nearness to it over a square window of its plane."""

    axes: Array
    low: Array  # (2,) corner of the window
    scale: float  # map pixels per unit
    nearness: Array  # (SHADOW_SIZE * SHADOW_SIZE), 0 where the light passes
    offset: float

    @classmethod
    def of(cls, model: Model, light: Light) -> ShadowMap:
        axes = light.axes().astype(np.float32)
        x, y, near = np.einsum("ij,nj->in", axes, model.points)
        low = np.array([x.min(), y.min()])
        scale = (SHADOW_SIZE - 2 * SHADOW_MARGIN) / max(float(np.ptp(x)), float(np.ptp(y)))
        low -= SHADOW_MARGIN / scale
        offset = 1.0 - float(near.min())
        _, nearness = rasterise((x - low[0]) * scale, (y - low[1]) * scale, near + offset, model.faces, SHADOW_SIZE)
        return cls(axes, low, scale, nearness, offset)

    def light_at(self, points: Array, normals: Array) -> Array:
        """Returns how much of the key light reaches (3, n) points: 1 in the open, 0 behind something."""
        lifted = points + normals * np.float32(0.012)
        x, y, near = np.einsum("ij,jn->in", self.axes, lifted)
        x, y = (x - self.low[0]) * self.scale, (y - self.low[1]) * self.scale
        near = near + np.float32(self.offset + 0.012)
        total = np.zeros(len(x), np.float32)
        for dx, dy in ((-0.9, -0.4), (0.4, -0.9), (0.9, 0.4), (-0.4, 0.9), (0.0, 0.0)):
            column = np.clip(x + dx, 0, SHADOW_SIZE - 1).astype(np.int32)
            line = np.clip(y + dy, 0, SHADOW_SIZE - 1).astype(np.int32)
            total += np.take(self.nearness, line * SHADOW_SIZE + column) <= near
        return total / 5

    def on_floor(self, camera: Camera, size: int, softness: float) -> Array:
        """Returns the darkness (0 to 1) that the thing casts on the floor, as a (size, size) picture."""
        covered = Image.fromarray((self.nearness.reshape(SHADOW_SIZE, SHADOW_SIZE) > 0).astype(np.uint8) * 255)
        radius = softness * self.scale
        wide = np.asarray(covered.filter(ImageFilter.GaussianBlur(radius * 2.2)), np.float32)
        close = np.asarray(covered.filter(ImageFilter.GaussianBlur(radius)), np.float32)
        soft = Image.fromarray((0.55 * close + 0.45 * wide).astype(np.uint8))
        to_map = np.array(
            [
                [self.axes[0, 0] * self.scale, self.axes[0, 2] * self.scale, -self.low[0] * self.scale],
                [self.axes[1, 0] * self.scale, self.axes[1, 2] * self.scale, -self.low[1] * self.scale],
                [0, 0, 1],
            ]
        )
        return warp(soft, to_map @ camera.floor_map(size), size) * np.float32(1 / 255)


def warp(image: Image.Image, homography: Array, size: int) -> Array:
    """Returns a (size, size) picture in bytes whose pixels look up the grey image at the mapped coordinates."""
    h = (homography / homography[2, 2]).ravel()
    out = image.transform((size, size), Image.Transform.PERSPECTIVE, tuple(h[:8]), Image.Resampling.BILINEAR)
    return np.asarray(out)


def contact_on_floor(model: Model, camera: Camera, size: int) -> Array:
    """Returns the dark seam where things meet the floor: their lowest parts seen from above, blurred."""
    x, y, z = model.points.T
    low = np.take(y, model.faces).max(axis=1) < 0.16
    if not low.any():
        return np.zeros((size, size), np.float32)
    side, reach = 96, 1.2 * float(np.abs(np.stack([x, z])).max())
    scale = side / (2 * reach)
    _, nearness = rasterise((x + reach) * scale, (z + reach) * scale, 2 - y, model.faces[low], side)
    dark = np.where(nearness > 0, np.clip(1 - (2 - nearness) / 0.16, 0, 1), 0)
    soft = Image.fromarray((dark.reshape(side, side) * 255).astype(np.uint8)).filter(
        ImageFilter.GaussianBlur(0.045 * scale)
    )
    to_map = np.array([[scale, 0, side / 2], [0, scale, side / 2], [0, 0, 1]])
    return warp(soft, to_map @ camera.floor_map(size), size) * np.float32(1 / 255)


def draw(model: Model, camera: Camera, light: Light, shadows: ShadowMap, size: int) -> tuple[Array, Array]:
    """Returns the model as linear (size, size, 3) light, dimmed by its (size, size, 1) coverage of each pixel."""
    fine = size * OVERSAMPLING
    x, y, near = camera.project(model.points.T)
    x, y = x * fine, y * fine
    fx, fy = np.take(x, model.faces.T), np.take(y, model.faces.T)
    area = (fx[1] - fx[0]) * (fy[2] - fy[0]) - (fx[2] - fx[0]) * (fy[1] - fy[0])
    facing = np.flatnonzero((area < 0) | np.take(model.two_sided, model.part_of_face))
    faces, part_of_face = np.take(model.faces, facing, axis=0), np.take(model.part_of_face, facing)
    lace = np.take(np.array([m.lace for m in model.materials]), part_of_face)
    owners, _ = rasterise(x, y, near, faces, fine, lace)
    pixels = np.flatnonzero(owners >= 0)
    face = np.take(owners, pixels)
    corners = np.take(faces, face, axis=0)
    surface = _blend(model, corners, weights_at(x, y, corners, pixels, fine))
    colour = _shade(model, np.take(part_of_face, face), surface, camera, light, shadows)
    pixel = pixels // (fine * OVERSAMPLING) * size + pixels % fine // OVERSAMPLING
    layers = [np.bincount(pixel, layer, size * size) for layer in (*colour, np.ones(len(pixel)))]
    picture = np.stack(layers, -1).reshape(size, size, 4).astype(np.float32) / OVERSAMPLING**2
    return picture[..., :3], picture[..., 3:]


def _blend(model: Model, corners: Array, weights: Array) -> Array:
    """Returns position, normal and texture coordinates, (8, n), of points within faces."""
    attributes = np.concatenate([model.points, model.normals, model.uv], 1)
    blended = np.take(attributes, corners[:, 0], axis=0) * weights[0][:, None]
    for i in (1, 2):
        blended += np.take(attributes, corners[:, i], axis=0) * weights[i][:, None]
    return np.ascontiguousarray(blended.T)


def _shade(model: Model, part: Array, surface: Array, camera: Camera, light: Light, shadows: ShadowMap) -> Array:
    """Returns the linear light (3, n) from points of the surface to the camera."""
    points, normals, (u, v) = surface[:3], _unit(surface[3:6]), surface[6:8]
    view = _unit(camera.position.astype(np.float32)[:, None] - points)
    facing = _dot(normals, view)
    normals = normals * np.where(facing < 0, np.float32(-1), np.float32(1))
    facing = np.abs(facing)

    albedo = _albedo(model, part, u, v)
    gloss, metal, glow = (
        np.take(np.array([getattr(m, name) for m in model.materials], np.float32), part)
        for name in ("gloss", "metal", "glow")
    )
    to_light = light.direction.astype(np.float32)
    slope = _dot(normals, to_light[:, None])
    lit = shadows.light_at(points, normals)
    diffuse = np.clip((slope + 0.12) / 1.12, 0, 1) * (0.12 + 0.88 * lit)
    open_sky = 0.5 + 0.5 * normals[1]
    nook = np.clip(0.5 + points[1] * 2.2, 0.5, 1)  # little of the sky reaches what is close to the floor
    key, sky, bounce = (c.astype(np.float32)[:, None] for c in (light.key, light.sky, light.bounce))
    fill = (sky * open_sky + bounce * (1 - open_sky)) * nook
    matte = albedo * (key * diffuse + fill) * (1 - 0.85 * metal)

    mirrored = 2 * facing * normals - view
    edge = (1 - facing) ** 2  # how much the surface turns away
    fresnel = 0.05 + 0.95 * edge**2
    softbox, room = _surroundings(mirrored, light)
    reflected = (
        key * (softbox * (0.25 + 0.75 * lit) * 2.2) + (sky * (0.5 + 0.6 * room) + bounce * 0.2 * (1 - room)) * 0.9
    )
    tint = metal * albedo + (1 - metal)
    strength = gloss * np.maximum(metal, 0.08 + fresnel * 0.55)
    glance = ((np.clip(_dot(mirrored, to_light[:, None]), 0, 1) ** 2) ** 2) ** 2
    sheen = glance * np.sqrt(glance) * 0.12 * (0.3 + gloss) * lit
    rim = edge * 0.14 * open_sky
    result: Array = matte + reflected * tint * strength + key * sheen + sky * rim * (0.3 + 0.7 * albedo) + albedo * glow
    return result


def _albedo(model: Model, part: Array, u: Array, v: Array) -> Array:
    colours = np.stack([m.colours for m in model.materials])
    number = np.zeros(len(part), np.int8)
    for i, material in enumerate(model.materials):
        if material.pattern.name != "plain":
            here = np.flatnonzero(part == i)
            number[here] = material.pattern.colour_numbers(u[here], v[here], model.sizes[i])
    return np.ascontiguousarray(np.take(colours.reshape(-1, 3), part * 3 + number, axis=0).T)


def _surroundings(direction: Array, light: Light) -> tuple[Array, Array]:
    """Returns what a polished surface mirrors: a softbox around the key light, and a room that is brighter above."""
    across, along, towards = np.einsum("ij,jn->in", light.axes().astype(np.float32), direction)
    depth = np.maximum(towards, 0.05)
    edge = np.minimum(0.55 - np.abs(across / depth), 0.75 - np.abs(along / depth))
    softbox = np.clip(edge * 6, 0, 1) * (towards > 0.05)
    return softbox, np.clip((direction[1] + 0.15) * 2.5, 0, 1)


def _dot(a: Array, b: Array) -> Array:
    result: Array = a[0] * b[0] + a[1] * b[1] + a[2] * b[2]
    return result


def _unit(vectors: Array) -> Array:
    return vectors / np.sqrt(np.maximum(_dot(vectors, vectors), 1e-12))
