"""The shop's products: which shape, palette and pattern each has, what it is called and what it costs."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from training.data.sample_shop.families import FAMILIES, Family
from training.data.sample_shop.looks import PALETTES, Look
from training.data.sample_shop.patterns import Pattern
from training.data.sample_shop.render import Model

NAMES = (
    "Fjord", "Alba", "Juniper", "Marlow", "Sable", "Tilda", "Quill", "Onda", "Bramble", "Cinder", "Lark", "Pesto",
    "Nimbus", "Saffron", "Willa", "Zephyr", "Hazel", "Orla", "Kite", "Poppy", "Rune", "Sorrel", "Thistle", "Umber",
    "Vega", "Wren", "Yuki", "Aster", "Birch", "Clove", "Dune", "Ember", "Fable", "Grove", "Halo", "Indra",
)  # fmt: skip


@dataclass(frozen=True)
class Product:
    """A product: its attributes in the catalogue and what is needed to build it."""

    item_id: str
    title: str
    category: str
    colour: str
    pattern: str
    brand: str
    price: float
    split: str
    look: Look = field(repr=False)
    form: int = field(repr=False)
    seeds: tuple[int, int, int] = field(repr=False)  # of the shop, the family and the product within it

    @property
    def family(self) -> Family:
        return FAMILIES[self.category]

    def model(self) -> Model:
        """Returns its surfaces, standing on the floor around the origin, the longest side one unit long."""
        return Model.of(self.family.build(self.look, self.form, np.random.default_rng([*self.seeds, 1]))).normalise()


def design_products(seed: int, per_family: int = 12) -> list[Product]:
    """Returns all products of a shop. Within a family no two have both the same colour and the same pattern.

    Each third product is kept `unseen`, so that a search can be tried on articles training never met.
    """
    return [
        product
        for family_number, category in enumerate(FAMILIES)
        for product in _family_products(seed, family_number, category, per_family)
    ]


def _family_products(seed: int, family_number: int, category: str, count: int) -> list[Product]:
    family = FAMILIES[category]
    rng = np.random.default_rng([seed, family_number])
    looks = _distinct_looks(family, count, rng)
    forms = rng.permutation(count)
    names = rng.permutation(len(NAMES))
    companion = int(rng.integers(2))
    products = []
    for number, (colour, pattern) in enumerate(looks):
        main, companions = PALETTES[colour]
        accent, trim = companions[companion]
        motif = Pattern(pattern, float(rng.uniform(0.8, 1.3)), int(rng.integers(1000)))
        words = [colour, pattern, category] if pattern != "plain" else [colour, category]
        low, high = family.price
        products.append(
            Product(
                item_id=f"{category}-{number + 1:02d}",
                title=f"{' '.join(words).capitalize()} '{NAMES[names[number % len(NAMES)]]}'",
                category=category,
                colour=colour,
                pattern=pattern,
                brand=family.brands[int(rng.integers(len(family.brands)))],
                price=round(round(float(rng.uniform(low, high))) - 0.1, 2),
                split="unseen" if number % 3 == 2 else "train",
                look=Look(main, accent, trim, motif),
                form=int(forms[number]),
                seeds=(seed, family_number, number),
            )
        )
    return products


def _distinct_looks(family: Family, count: int, rng: np.random.Generator) -> list[tuple[str, str]]:
    """Returns pairs of colour and pattern, each used once; few of both, so that most products have near twins.

    Palettes are listed by hue: neighbours there are hard to distinguish in another light.
    """
    names = list(PALETTES)
    first, second, third = (int(i) for i in rng.permutation(len(names) // 2)[:3] * 2)
    colours = [names[i] for i in (first, first + 1, second, second + 1, third)]
    patterns = [family.patterns[i] for i in rng.permutation(len(family.patterns))[: max(3, -(-count // 5))]]
    pairs = [(colour, pattern) for colour in colours for pattern in patterns]
    return [pairs[i] for i in rng.permutation(len(pairs))[:count]]
