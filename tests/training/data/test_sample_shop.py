"""The sample shop's products and photos: what is drawn, and that the seed alone decides it."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image, ImageChops

from training.data.sample_shop import Product, design_products, render_photo
from training.data.sample_shop.families import FAMILIES
from training.data.sample_shop.geometry import Mesh, ball, revolve, rounded_box
from training.data.sample_shop.looks import PALETTES
from training.data.sample_shop.patterns import MOTIFS, Pattern
from training.data.sample_shop.raster import rasterise

PRODUCTS = design_products(7)


def of_family(category: str) -> list[Product]:
    return [product for product in PRODUCTS if product.category == category]


def difference(one: Image.Image, other: Image.Image) -> float:
    return float(np.asarray(ImageChops.difference(one, other), float).mean())


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
    """Dressed in pure red, green and blue, a product's catalogue picture tells how much of each colour shows."""
    dressed = replace(product, look=replace(product.look, main="#ff0000", accent="#00ff00", trim="#0000ff"))
    pixels = np.asarray(render_photo(dressed, 0), int)
    seen = [int((pixels[..., i] > 20 + 1.6 * np.delete(pixels, i, axis=-1).max(-1)).sum()) for i in range(3)]
    assert seen[0] > 0.4 * sum(seen)
    assert seen[0] > 0.9 * max(seen)


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


@pytest.mark.parametrize("category", FAMILIES)
def test_models_stand_on_the_floor_and_are_one_unit_long(category: str) -> None:
    points = of_family(category)[0].model().points
    assert np.isfinite(points).all()
    assert points[:, 1].min() == pytest.approx(0, abs=1e-6)
    assert np.ptp(points, axis=0).max() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("name", ["striped", "pinstriped", "dotted", "checked", "zigzag", "wavy", "diamond", "tartan"])
def test_regular_patterns_close_around_a_turned_body(name: str) -> None:
    u, v = np.random.default_rng(0).uniform(0, 1, (2, 500))
    pattern = Pattern(name, 1.1, 5)
    here, once_around = (pattern.colour_numbers(turn, v, (2.3, 1.0)) for turn in (u, u + 1))
    assert (here == once_around).mean() > 0.99  # all but those that rounding moves over an edge


@pytest.mark.parametrize("name", MOTIFS)
def test_every_pattern_paints_with_at_most_three_colours(name: str) -> None:
    u, v = np.random.default_rng(0).uniform(0, 1, (2, 5000))
    painted = Counter(Pattern(name, 1.0, 5).colour_numbers(u, v, (2.0, 1.0)).tolist())
    assert set(painted) <= {0, 1, 2}
    assert painted[0] >= 0.45 * 5000
    assert len(painted) > 1 or name == "plain"


@pytest.mark.parametrize("mesh", [ball(0.5), rounded_box(0.6, 0.4, 0.5, 0.05), revolve([(0.3, 0.0), (0.3, 1.0)])])
def test_normals_point_outward(mesh: Mesh) -> None:
    middle = mesh.points.mean(axis=0)
    assert (((mesh.points - middle) * mesh.normals).sum(-1) > 0).mean() > 0.95
    np.testing.assert_allclose(np.linalg.norm(mesh.normals, axis=1), 1, atol=1e-6)


def test_the_nearest_face_wins_each_pixel() -> None:
    x = np.array([0.0, 10.0, 0.0, 0.0, 5.0, 0.0])
    y = np.array([0.0, 0.0, 10.0, 0.0, 0.0, 5.0])
    near = np.array([1.0, 1.0, 1.0, 2.0, 2.0, 2.0])
    owners, nearness = rasterise(x, y, near, np.array([[0, 1, 2], [3, 4, 5]]), 12)
    owners = owners.reshape(12, 12)
    assert owners[1, 1] == 1
    assert owners[1, 7] == 0
    assert owners[11, 11] == -1
    assert nearness.reshape(12, 12)[1, 1] == 2


def test_neighbouring_faces_leave_no_gap_and_share_no_pixel() -> None:
    rng = np.random.default_rng(0)
    corners = rng.uniform(2, 30, (6, 2))
    hub = corners.mean(axis=0)
    order = np.argsort(np.arctan2(*(corners - hub).T))
    x, y = np.concatenate([corners[order], [hub]]).T
    faces = np.array([[i, (i + 1) % 6, 6] for i in range(6)])
    counts = sum((rasterise(x, y, np.ones(7), faces[i : i + 1], 32)[0] >= 0).astype(int) for i in range(6))
    together = rasterise(x, y, np.ones(7), faces, 32)[0] >= 0
    assert np.asarray(counts).max() == 1
    np.testing.assert_array_equal(np.asarray(counts) > 0, together)
