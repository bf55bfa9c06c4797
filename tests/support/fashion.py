"""A small fashion catalogue, drawn like the sample shop: sizes as lists, and colours as variants of a parent."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from training.data.sample_shop.looks import PALETTES
from training.data.sample_shop.patterns import Pattern
from training.data.sample_shop.products import Product, design_products
from training.data.sample_shop.shop import render_photo

PARENTS = ("shirt-01", "shirt-02", "shirt-03", "shoe-01", "shoe-02")
COLOURS = ("red", "blue", "olive")
SIZES = {"shirt": ("S", "M", "L"), "shoe": ("39", "41", "43")}
EXPIRED = "shirt-03-olive"


class Variant(NamedTuple):
    """A colour of a parent, and its line of the catalogue."""

    product: Product
    line: dict[str, Any]


def design_variants() -> Iterator[Variant]:
    """Returns the variants: the first colour of a parent has all sizes, each further one lacks the largest."""
    products = {product.item_id: product for product in design_products(7, 4)}
    for number, parent in enumerate(PARENTS):
        product = products[parent]
        for place, colour in enumerate(COLOURS):
            main, ((accent, trim), _) = PALETTES[colour]
            pattern = "plain" if product.category == "shoe" else product.pattern
            look = replace(product.look, main=main, accent=accent, trim=trim, pattern=Pattern(pattern, 1.0, 3))
            item_id = f"{parent}-{colour}"
            line: dict[str, Any] = {
                "item_id": item_id,
                "image": f"{item_id}.jpg",
                "title": f"{colour.capitalize()} {product.category} '{product.title.split(chr(39))[1]}'",
                "category": product.category,
                "colour": colour,
                "sizes": list(SIZES[product.category][: 3 - place]),
                "in_stock": colour != "red",
                "margin": round(0.1 + 0.1 * place, 1),
                "added": f"2026-0{1 + number}-15",
                "price": product.price,
                "item_group_id": parent,
            }
            if item_id == EXPIRED:
                line["expires_at"] = "2026-01-01T00:00:00Z"
            yield Variant(replace(product, colour=colour, look=look), line)


def write_fashion(directory: Path) -> Path:
    """Draws the photos, and new ones of two items to search with in `examples/`; returns the path of the catalogue."""
    examples = directory / "examples"
    examples.mkdir(parents=True)
    lines = []
    for product, line in design_variants():
        render_photo(product, 0).save(directory / line["image"], quality=88)
        if line["item_id"] in ("shirt-01-red", "shoe-01-blue"):
            render_photo(product, 2).save(examples / line["image"], quality=88)
        lines.append(json.dumps(line))
    catalogue = directory / "catalogue.jsonl"
    catalogue.write_text("\n".join(lines) + "\n")
    return catalogue
