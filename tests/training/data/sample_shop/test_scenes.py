"""Photos of the sample shop: the seed alone decides them."""

import numpy as np
import pytest
from PIL import Image, ImageChops

from training.data.sample_shop import Product, design_products, render_photo
from training.data.sample_shop.families import FAMILIES

PRODUCTS = design_products(7)


def of_family(category: str) -> list[Product]:
    return [product for product in PRODUCTS if product.category == category]


def difference(one: Image.Image, other: Image.Image) -> float:
    return float(np.asarray(ImageChops.difference(one, other), float).mean())


def test_the_same_seed_gives_the_same_photo_and_another_seed_another() -> None:
    again = design_products(7)[30]
    assert render_photo(PRODUCTS[30], 4).tobytes() == render_photo(again, 4).tobytes()
    assert design_products(8)[30] != PRODUCTS[30]


@pytest.mark.parametrize("category", FAMILIES)
def test_photos_of_a_product_differ_while_its_surfaces_stay(category: str) -> None:
    product = of_family(category)[5]
    first, second, third = (render_photo(product, number) for number in (0, 1, 2))
    assert first.size == (256, 256)
    assert min(difference(first, second), difference(first, third), difference(second, third)) > 5
    np.testing.assert_array_equal(product.model().points, product.model().points)
