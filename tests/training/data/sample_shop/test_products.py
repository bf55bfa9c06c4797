"""The sample shop's products: families, splits, names and colours."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from training.data.sample_shop import Product, design_products, render_photo
from training.data.sample_shop.families import FAMILIES
from training.data.sample_shop.looks import PALETTES

PRODUCTS = design_products(7)


def of_family(category: str) -> list[Product]:
    return [product for product in PRODUCTS if product.category == category]


def test_there_are_twelve_families_of_twelve_products() -> None:
    assert Counter(p.category for p in PRODUCTS) == dict.fromkeys(FAMILIES, 12)
    assert len(FAMILIES) == 12
    assert len({p.item_id for p in PRODUCTS}) == 144


def test_a_third_of_each_family_is_kept_unseen() -> None:
    for category in FAMILIES:
        assert Counter(p.split for p in of_family(category)) == {"train": 8, "unseen": 4}


@pytest.mark.parametrize("category", FAMILIES)
def test_no_two_products_of_a_family_share_shape_palette_and_pattern(category: str) -> None:
    products = of_family(category)
    assert len({(p.colour, p.pattern) for p in products}) == 12
    assert len({p.form for p in products}) == 12
    assert len({p.title for p in products}) == 12
    assert len({p.colour for p in products}) < 12, "some products have to share a colour, or search is too easy"


@pytest.mark.parametrize("product", PRODUCTS[::7], ids=lambda p: p.item_id)
def test_attributes_describe_the_product(product: Product) -> None:
    assert product.colour in PALETTES
    assert product.look.main == PALETTES[product.colour][0]
    assert product.pattern == product.look.pattern.name
    assert product.title.lower().startswith(product.colour)
    assert product.category in product.title
    assert (product.pattern in product.title) == (product.pattern != "plain")
    low, high = product.family.price
    assert low - 1 <= product.price <= high
    assert product.brand in product.family.brands


@pytest.mark.parametrize("product", PRODUCTS[::5], ids=lambda p: p.item_id)
def test_the_named_colour_is_the_one_most_seen(product: Product) -> None:
    """Dressed in pure red, green and blue, a product's catalogue picture shows how much of each colour is visible."""
    dressed = replace(product, look=replace(product.look, main="#ff0000", accent="#00ff00", trim="#0000ff"))
    pixels = np.asarray(render_photo(dressed, 0), int)
    seen = [int((pixels[..., i] > 20 + 1.6 * np.delete(pixels, i, axis=-1).max(-1)).sum()) for i in range(3)]
    assert seen[0] > 0.4 * sum(seen)
    assert seen[0] > 0.9 * max(seen)


@pytest.mark.parametrize("category", FAMILIES)
def test_models_stand_on_the_floor_and_are_one_unit_long(category: str) -> None:
    points = of_family(category)[0].model().points
    assert np.isfinite(points).all()
    assert points[:, 1].min() == pytest.approx(0, abs=1e-6)
    assert np.ptp(points, axis=0).max() == pytest.approx(1, abs=1e-5)
