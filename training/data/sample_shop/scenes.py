"""Photo sessions: for each photo a pose, a light, a floor, a wall, something in the way, and a camera's faults."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageFilter

from training.data.sample_shop.camera import Camera, Light
from training.data.sample_shop.families import Family
from training.data.sample_shop.geometry import Array, rotation
from training.data.sample_shop.obstacles import obstacle
from training.data.sample_shop.products import Product
from training.data.sample_shop.render import Model, ShadowMap, contact_on_floor, draw, warp
from training.data.sample_shop.surfaces import FLOORS, REPEATS, TILE, UNITS, floor_light, texture, wall

SIZE = 256


def _film() -> Array:
    """Returns the table from linear light in steps of 1/2048 to bytes: linear up to 0.55, then compressed."""
    light = np.arange(4 * 2048) / 2048
    bent = np.where(light < 0.55, light, 0.55 + 0.45 * (1 - np.exp(-(light - 0.55) / 0.45)))
    curve = np.where(bent < 0.0031308, bent * 12.92, 1.055 * bent ** (1 / 2.4) - 0.055)
    return (curve * 255 + 0.5).astype(np.uint8)


_FILM = _film()


@dataclass(frozen=True)
class Session:
    """The choices behind one photo."""

    heading: float
    elevation: float
    roll: float
    distance: float
    fill: float
    centre: tuple[float, float]
    light: Light
    floor: str
    floor_colours: tuple[str, str]
    floor_turn: float
    wall_distance: float
    hidden: bool  # something stands in the way

    @classmethod
    def draw(cls, family: Family, rng: np.random.Generator, *, plain: bool) -> Session:
        """Draws a session; a `plain` one is the catalogue's own picture: nothing in the way, a quiet set."""
        crop = not plain and rng.random() < 0.14
        side, shift = rng.choice([-1, 1]), rng.uniform(0.0, 0.02 if plain else 0.07)
        offset = rng.uniform(0.2, 0.27) if crop else shift
        floor = "paper" if plain or rng.random() < 0.06 else list(FLOORS)[int(rng.integers(len(FLOORS)))]
        low, high = family.elevation
        behind = 180.0 if family.about_face and not plain and rng.random() < 0.5 else 0.0
        return cls(
            heading=behind + float(rng.uniform(*family.heading)) * (0.6 if plain else 1.0),
            elevation=float(rng.uniform(max(low, 10), min(high, 24)) if plain else rng.uniform(low, high)),
            roll=0.0 if plain else float(rng.normal(0, 2.5)),
            distance=float(rng.uniform(2.8, 5.5)),
            fill=float(rng.uniform(0.66, 0.74) if plain else rng.uniform(0.36, 0.8)),
            centre=(0.5 + float(side * offset), 0.53 + float(rng.uniform(-0.05, 0.05))),
            light=_light(rng),
            floor=floor,
            floor_colours=FLOORS[floor][int(rng.integers(len(FLOORS[floor])))],
            floor_turn=float(rng.uniform(-40, 40)),
            wall_distance=float(rng.uniform(1.0, 2.2)),
            hidden=not plain and not crop and rng.random() < 0.45,
        )


def _light(rng: np.random.Generator) -> Light:
    side, height = rng.uniform(-70, 70), rng.uniform(32, 68)
    direction = rotation("y", side) @ rotation("x", -height) @ np.array([0.0, 0.0, 1.0])
    warmth = np.clip(rng.normal(0, 0.12), -0.2, 0.2)
    tint = np.array([1 + warmth, 1.0, 1 - warmth])
    level = rng.uniform(0.74, 1.15)
    share = rng.uniform(0.3, 0.46)  # of the light that comes from everywhere
    return Light(
        direction,
        tint * level * 1.55,
        np.array([0.94, 1.0, 1.08]) * level * share,
        tint * level * share * 0.62,
        float(rng.uniform(0.02, 0.06)),
    )


def take_photo(product: Product, model: Model, photo_number: int) -> Image.Image:
    """Renders photo `photo_number` of a product with the surfaces `model`; the first is its catalogue picture."""
    rng = np.random.default_rng([*product.seeds, 2, photo_number])
    session = Session.draw(product.family, rng, plain=photo_number == 0)
    thing = model.rotate(rotation("y", session.heading))
    camera = Camera.framing(
        thing.points,
        elevation=session.elevation,
        roll=session.roll,
        distance=session.distance,
        fill=session.fill,
        centre=session.centre,
    )
    if session.hidden:
        thing = thing.join(obstacle(thing.points, rng))
    shadows = ShadowMap.of(thing, session.light)
    rays = camera.rays(SIZE)
    set_light = _backdrop(session, camera, rays, rng)
    dark = shadows.on_floor(camera, SIZE, session.light.softness)
    seam = contact_on_floor(thing, camera, SIZE)
    on_floor = rays[1] < 0
    shade = (1 - 0.62 * dark * on_floor) * (1 - 0.72 * seam * on_floor)
    picture, cover = draw(thing, camera, session.light, shadows, SIZE)
    return _develop(picture + set_light * shade[..., None] * (1 - cover), rng)


def _backdrop(session: Session, camera: Camera, rays: Array, rng: np.random.Generator) -> Array:
    """Renders floor and wall in linear light."""
    eye = camera.position
    down = np.minimum(rays[1], -1e-4)
    depth = eye[2] - rays[2] * (eye[1] / down)  # z where the ray meets the floor
    reach = np.where(rays[1] < 0, depth + session.wall_distance, -1.0)
    is_floor = np.clip(reach * 12, 0, 1).astype(np.float32)
    rows = np.flatnonzero(is_floor.mean(axis=1) > 0.5)
    horizon = int(rows[0]) if len(rows) else SIZE
    turn = np.radians(session.floor_turn)
    scale, middle = TILE / UNITS, TILE * REPEATS / 2
    to_sheet = np.array(
        [
            [np.cos(turn) * scale, -np.sin(turn) * scale, middle],
            [np.sin(turn) * scale, np.cos(turn) * scale, middle],
            [0, 0, 1],
        ]
    )
    tones = floor_light(session.floor_colours)
    floor = np.take(tones, warp(texture(session.floor), to_sheet @ camera.floor_map(SIZE), SIZE), axis=0)
    if session.floor == "paper":  # a sweep: the floor climbs into the wall without an edge
        behind = tones[230]
        is_floor = np.clip(reach * 1.2, 0, 1).astype(np.float32)
    else:
        behind = wall(rng, SIZE, horizon)
    light = behind + (floor - behind) * is_floor[..., None]
    sun = session.light
    pool = np.exp(-(((np.arange(SIZE) / SIZE - 0.5 - 0.25 * sun.direction[0]) / 1.2) ** 2))[None, :, None]
    up = max(float(sun.direction[1]), 0.3)
    level = (sun.key * up * 0.75 + sun.sky).astype(np.float32) * 0.74
    return np.asarray(light * level * pool.astype(np.float32) * 1.08, np.float32)


def _develop(light: Array, rng: np.random.Generator) -> Image.Image:
    """Applies the camera's faults: white balance, vignette, noise, the film's curve and a little blur."""
    balance = np.exp(rng.normal(0, 0.035, 3)).astype(np.float32)
    across = np.linspace(-1, 1, SIZE, dtype=np.float32) ** 2
    vignette = 1 - np.float32(rng.uniform(0, 0.12)) * (across[:, None] + across[None, :])[..., None]
    noise = 1 + rng.standard_normal((SIZE, SIZE, 1), np.float32) * np.float32(rng.uniform(0.005, 0.03))
    exposed = np.clip(light * balance * vignette * noise * np.float32(2048), 0, len(_FILM) - 1).astype(np.int32)
    image = Image.fromarray(np.take(_FILM, exposed))
    blur = rng.uniform(-0.6, 0.9)
    return image.filter(ImageFilter.GaussianBlur(blur)) if blur > 0.2 else image
