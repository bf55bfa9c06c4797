"""The rule that decides which images are embedded."""

from collections.abc import Iterator, Mapping

import pytest

from index.ingest.embedding_plan import EmbeddingPlan, Reject, Unchanged, is_unchanged
from index.ingest.sources import SourceImage
from index.items import MAX_IMAGES_PER_ITEM, Item

STORED = {("mug", "front"): "digest of front", ("mug", "old"): "digest of old"}


def image(item_id: str, image_id: str, place: str = "a.jpg", title: str = "") -> SourceImage:
    return SourceImage(Item(id=item_id, title=title), image_id, place, "")


def read_digests(item_id: str) -> Mapping[str, str]:
    return {pair[1]: digest for pair, digest in STORED.items() if pair[0] == item_id}


@pytest.fixture
def plan() -> Iterator[EmbeddingPlan]:
    with EmbeddingPlan(read_digests) as plan:
        yield plan


def test_a_chunk_is_planned_with_the_digests_of_its_own_images(plan: EmbeddingPlan) -> None:
    images = [image("mug", "front"), image("mug", "back"), image("lamp", "front")]
    chunk = plan.add(images)
    assert chunk.images == images and chunk.settled == []
    assert chunk.known == {("mug", "front"): "digest of front"}


def test_the_same_bytes_are_unchanged_and_other_bytes_are_not() -> None:
    assert is_unchanged(image("mug", "front"), "digest of front", STORED)
    assert not is_unchanged(image("mug", "front"), "digest of another photo", STORED)
    assert not is_unchanged(image("mug", "back"), "digest of front", STORED), "the image id counts too"


def test_a_repeated_image_is_unchanged_from_the_same_place_and_rejected_from_another(plan: EmbeddingPlan) -> None:
    plan.add([image("mug", "front", "a.jpg")])
    chunk = plan.add([image("mug", "front", "a.jpg"), image("mug", "front", "b.jpg")])
    assert chunk.images == [] and chunk.known == {}
    same, other = (settled.outcome for settled in chunk.settled)
    assert same == Unchanged("front")
    assert isinstance(other, Reject) and (other.place, other.reason) == ("b.jpg", "duplicate")
    assert "first at a.jpg" in other.problem


def test_images_beyond_the_limit_of_an_item_are_rejected_unread(plan: EmbeddingPlan) -> None:
    for start in range(0, MAX_IMAGES_PER_ITEM, 64):
        assert len(plan.add([image("mug", f"{number}") for number in range(start, start + 64)]).images) == 64
    chunk = plan.add([image("mug", "one more"), image("lamp", "front"), image("mug", "0")])
    assert [one.item.id for one in chunk.images] == ["lamp"]
    surplus, same = (settled.outcome for settled in chunk.settled)
    assert isinstance(surplus, Reject) and (surplus.image_id, surplus.reason) == ("one more", "limit")
    assert same == Unchanged("0")


def test_the_first_description_of_an_item_is_kept(plan: EmbeddingPlan) -> None:
    first, second = plan.add([image("mug", "front", title="Mug"), image("mug", "back", title="Another mug")]).images
    assert first.item == second.item == Item(id="mug", title="Mug")


def test_the_plan_knows_what_the_source_named(plan: EmbeddingPlan) -> None:
    plan.add([image("mug", "front")])
    assert plan.has_item("mug") and not plan.has_item("lamp")
    assert plan.has_image("mug", "front") and not plan.has_image("mug", "back")
