"""The twelve product families: how each is built, seen, dressed, named and priced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from training.data.sample_shop.families.bags import backpack, handbag
from training.data.sample_shop.families.home import chair, lamp
from training.data.sample_shop.families.shirts import shirt
from training.data.sample_shop.families.shoes import shoe
from training.data.sample_shop.families.tableware import bottle, mug, teapot
from training.data.sample_shop.families.wearables import glasses, headphones, watch
from training.data.sample_shop.looks import Look, Part

Builder = Callable[[Look, int, np.random.Generator], list[Part]]

PRINTS = (
    "plain",
    "striped",
    "dotted",
    "checked",
    "zigzag",
    "wavy",
    "diamond",
    "tartan",
    "triangle",
    "colour-block",
    "speckled",
    "floral",
    "pinstriped",
)
THIN = ("plain", "striped", "checked", "colour-block", "tortoise", "speckled", "pinstriped")


@dataclass(frozen=True)
class Family:
    """A kind of product; poses are ranges in degrees, `heading` about the vertical, `elevation` of the camera.

    What looks as good from behind is shown `about_face` in half of its photos.
    """

    build: Builder
    heading: tuple[float, float]
    elevation: tuple[float, float]
    patterns: tuple[str, ...]
    price: tuple[float, float]
    brands: tuple[str, ...]
    about_face: bool = False


FAMILIES: dict[str, Family] = {
    "mug": Family(mug, (-60, 60), (8, 42), PRINTS, (9, 28), ("Fennick", "Oda Clay", "Brimwell"), about_face=True),
    "teapot": Family(
        teapot, (-55, 55), (6, 38), PRINTS, (24, 79), ("Oda Clay", "Tamsel", "Hearthling"), about_face=True
    ),
    "bottle": Family(bottle, (-90, 90), (4, 34), PRINTS, (12, 42), ("Rillo", "Norvane", "Brimwell"), about_face=True),
    "lamp": Family(lamp, (-90, 90), (-2, 24), PRINTS, (39, 149), ("Lumary", "Halvorsund", "Tamsel"), about_face=True),
    "chair": Family(chair, (-72, 72), (8, 34), PRINTS, (69, 289), ("Halvorsund", "Plankert", "Studio Moro")),
    "handbag": Family(handbag, (-60, 60), (6, 32), PRINTS, (45, 240), ("Vellaro", "Maison Pim", "Corriva")),
    "backpack": Family(backpack, (-70, 70), (4, 30), PRINTS, (39, 129), ("Trekkel", "Corriva", "Norvane")),
    "shoe": Family(
        shoe,
        (-68, 68),
        (8, 42),
        tuple(p for p in PRINTS if p != "colour-block"),
        (49, 159),
        ("Strydo", "Pacelle", "Trekkel"),
        about_face=True,
    ),
    "shirt": Family(shirt, (-55, 55), (-4, 22), PRINTS, (15, 69), ("Pacelle", "Linnet Row", "Maison Pim")),
    "glasses": Family(glasses, (-60, 60), (6, 42), THIN, (29, 189), ("Ocelle", "Brio Lens", "Linnet Row")),
    "watch": Family(watch, (-55, 55), (2, 36), PRINTS, (59, 349), ("Tiktara", "Ocelle", "Meridane")),
    "headphones": Family(
        headphones,
        (12, 72),
        (4, 34),
        PRINTS,
        (39, 299),
        ("Auralis Nine", "Humbolt", "Meridane"),
        about_face=True,
    ),
}
