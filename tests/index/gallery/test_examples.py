"""Searches by several examples, on every engine."""

from collections.abc import Sequence

import numpy as np
import pytest

from index.errors import LookalikeError
from index.gallery.errors import ItemMissing
from index.gallery.examples import Example
from index.gallery.filters import Filter
from index.gallery.types import Hit, Item
from index.rankings import Combination, Ranking

from .conftest import OpenEngine
from .reference import BUNDLE, TRIO, Shop, make_entries, photo, unit


def search(shop: Shop, examples: Sequence[Example], combine: Combination = "mean", **bounds: object) -> list[Hit]:
    found = shop.gallery.search_examples(examples, bundle_id=BUNDLE, combine=combine, **bounds)  # type: ignore[arg-type]
    return found.hits[0]


def mean(shop: Shop, item_id: str) -> np.ndarray:
    return unit(*shop.reference.queries_of(item_id).sum(axis=0))


PHOTOS = [images[0].vector for _, images in make_entries(6, seed=5)]


def test_the_mean_is_the_direction_of_the_weighted_sum(shop: Shop) -> None:
    examples = [
        Example(PHOTOS[0]),
        Example(PHOTOS[1], weight=0.5),
        Example(item_id="item-00003", weight=0.7),
        Example(PHOTOS[2], weight=-0.4),
        Example(item_id="item-00011", weight=-0.1),
    ]
    total = PHOTOS[0] + 0.5 * PHOTOS[1] + 0.7 * mean(shop, "item-00003") - 0.4 * PHOTOS[2]
    query = unit(*(total - 0.1 * mean(shop, "item-00011")))
    hits = search(shop, examples, top=30, filter=Filter.parse({"stock": {"gt": 1}}))
    shop.reference.check(
        hits, query[None], top=30, filter=Filter.parse({"stock": {"gt": 1}}), exclude=["item-00003", "item-00011"]
    )


def test_only_the_ratio_of_weights_counts(shop: Shop) -> None:
    one, other, small = (
        [
            (hit.item.id, round(hit.score, 5))
            for hit in search(shop, [Example(PHOTOS[0], weight=a), Example(PHOTOS[1], weight=b)])
        ]
        for a, b in ((1.0, 0.5), (0.4, 0.2), (4e-5, 2e-5))
    )
    assert one == other == small


def test_the_smallest_weight_leaves_scores_finite(shop: Shop) -> None:
    examples = [Example(PHOTOS[0], weight=5e-324), Example(PHOTOS[1], weight=-1)]
    hits = search(shop, examples, "best", top=500, ranking=Ranking(window=500), explain=True)
    told = [hit.explanation for hit in hits if hit.explanation]
    penalties = [share.share for one in told for share in one.shares]
    assert len(penalties) == len(hits) == 160 and min(penalties) > -1.1e6
    assert [one.score for one in told] == sorted((one.score for one in told), reverse=True)
    for one in told:
        assert one.score == pytest.approx(one.similarity + one.shares[0].share, rel=1e-12)


def test_one_photo_is_searched_as_it_is(shop: Shop) -> None:
    for combine in ("mean", "best"):
        shop.reference.check(search(shop, [Example(PHOTOS[3])], combine, top=20), PHOTOS[3][None], top=20)


def test_the_best_counts_an_item_by_its_nearest_example(shop: Shop) -> None:
    examples = [
        Example(PHOTOS[0], weight=0.5),
        Example(PHOTOS[1], weight=0.4),
        Example(item_id="item-00003", weight=0.5),
    ]
    own = shop.reference.queries_of("item-00003")
    queries = np.concatenate([PHOTOS[0][None], 0.8 * PHOTOS[1][None], own])
    hits = search(shop, examples, "best", top=40)
    shop.reference.check(hits, queries.astype(np.float32), top=40, exclude=["item-00003"])


def test_negative_examples_of_the_best_lower_the_score_within_the_window(shop: Shop) -> None:
    examples = [Example(PHOTOS[0]), Example(PHOTOS[1], weight=0.5), Example(PHOTOS[2], weight=-0.6),
                Example(item_id="item-00003", weight=-0.2)]  # fmt: skip
    hits = search(shop, examples, "best", top=30, explain=True, ranking=Ranking(window=60))
    queries = np.stack([PHOTOS[0], 0.5 * PHOTOS[1]])
    similar = shop.reference.search(queries, exclude=["item-00003"])[:60]
    unwanted = np.concatenate([0.6 * PHOTOS[2][None], 0.2 * shop.reference.queries_of("item-00003")])

    def score(item_id: str, similarity: float) -> float:
        images, scores = shop.reference.images[item_id], shop.reference.scores(item_id, queries)
        vector = images[max(scores, key=scores.__getitem__)].vector.astype(np.float16)
        return similarity - max(0.0, float((unwanted @ vector).max()))

    expected = sorted(((score(*one), one.id) for one in similar), reverse=True)
    assert [hit.item.id for hit in hits] == [item_id for _, item_id in expected[:30]]
    for hit, (wanted, _) in zip(hits, expected, strict=False):
        assert hit.explanation and hit.explanation.score == pytest.approx(wanted, abs=5e-6)
        assert [share.rule for share in hit.explanation.shares] == ["negative examples"]


@pytest.mark.parametrize("combine", ["mean", "best"])
def test_the_pages_of_examples_return_every_item_once(shop: Shop, combine: Combination) -> None:
    examples = [Example(PHOTOS[0]), Example(item_id="item-00003"), Example(PHOTOS[2], weight=-0.6)]
    found: list[str] = []
    cursor: str | None = None
    while True:
        page = shop.gallery.search_examples(examples, bundle_id=BUNDLE, combine=combine, top=13, cursor=cursor)
        found += [hit.item.id for hit in page.hits[0]]
        cursor = page.cursor
        if cursor is None:
            break
    assert sorted(found) == sorted({*shop.reference.items} - {"item-00003"})


def test_a_cursor_is_bound_to_the_examples(shop: Shop) -> None:
    examples = [Example(PHOTOS[0]), Example(PHOTOS[2], weight=-0.6)]
    ways: tuple[tuple[Combination, Combination], ...] = (("mean", "best"), ("best", "mean"))
    for combine, other in ways:
        cursor = shop.gallery.search_examples(examples, bundle_id=BUNDLE, combine=combine).cursor
        for changed, how in (
            (examples, other),
            (examples[:1], combine),
            ([examples[0], Example(PHOTOS[2], weight=-0.5)], combine),
        ):
            with pytest.raises(LookalikeError, match="another search"):
                shop.gallery.search_examples(changed, bundle_id=BUNDLE, combine=how, cursor=cursor)


@pytest.mark.parametrize(
    ("examples", "problem"),
    [
        ([], "0 examples"),
        ([Example(PHOTOS[0])] * 17, "17 examples"),
        ([Example()], "not exactly one"),
        ([Example(PHOTOS[0], "item-00003")], "not exactly one"),
        ([Example(PHOTOS[0], weight=0)], "is 0"),
        ([Example(PHOTOS[0], weight=1.5)], "is 1.5"),
        ([Example(PHOTOS[0], weight=float("nan"))], "is nan"),
        ([Example(PHOTOS[0], weight=-1)], "negative"),
        ([Example(PHOTOS[0]), Example(PHOTOS[0], weight=-1)], "cancel"),
        ([Example(PHOTOS[0][:3])], "do not fit"),
        ([Example(PHOTOS[0] * np.float32("nan"))], "do not fit"),
    ],
)
def test_examples_that_make_no_query_are_refused(shop: Shop, examples: list[Example], problem: str) -> None:
    with pytest.raises(LookalikeError, match=problem):
        search(shop, examples)


def test_an_item_that_does_not_exist_is_refused(shop: Shop) -> None:
    with pytest.raises(ItemMissing, match="nobody"):
        search(shop, [Example(PHOTOS[0]), Example(item_id="nobody")])


def test_too_many_images_are_refused_unless_they_are_averaged(shop: Shop) -> None:
    crowd = [photo(str(number), unit(1, 0, 0, 0, 0, 0, 0, number / 1000)) for number in range(250)]
    shop.gallery.upsert([(Item(id=name), crowd) for name in ("one", "two")], BUNDLE)
    examples = [Example(item_id="one"), Example(item_id="two")]
    with pytest.raises(LookalikeError, match="500 images"):
        search(shop, examples, "best")
    assert len(search(shop, examples)) == 10


def test_examples_of_a_new_gallery(open_engine: OpenEngine) -> None:
    gallery = open_engine()
    assert gallery.search_examples([Example(unit(1, 0, 0))], bundle_id=BUNDLE).hits == [[]]
    with pytest.raises(ItemMissing):
        gallery.search_examples([Example(item_id="mug")])
    gallery.upsert(TRIO, BUNDLE)
    found = gallery.search_examples([Example(item_id="mug"), Example(item_id="bag", weight=-0.3)])
    assert [hit.item.id for hit in found.hits[0]] == ["shoe"]
