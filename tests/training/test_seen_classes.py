"""Seen classes: their record in a bundle, and what a measurement does about them."""

import json
from pathlib import Path

import pytest

from index.embedding.bundle import Bundle
from tests.support.tiny_bundle import make_tiny_bundle
from training.data import DataSet, Photo
from training.errors import TrainingError
from training.seen_classes import SeenClasses, check_unseen


def photos_of(labels: str, **roles: bool) -> tuple[Photo, ...]:
    return tuple(Photo(Path(f"{label}{number}.jpg"), label, None, **roles) for label in labels for number in range(2))


DATA = DataSet("shop", (), photos_of("abcd"))


def with_record(bundle: Path, seen: str | None) -> Bundle:
    card = json.loads((bundle / "bundle.json").read_text())
    (bundle / "bundle.json").write_text(json.dumps(card | {"seen_classes": seen}))
    return Bundle.load(bundle)


def test_a_bundle_carries_the_classes_without_their_names(tmp_path: Path) -> None:
    labels = [f"product-{number}" for number in range(10_000)]
    text = SeenClasses.of(labels).encode()
    assert len(text) < 70_000
    bundle = with_record(make_tiny_bundle(tmp_path / "bundle"), text)
    seen = SeenClasses.of_bundle(bundle)
    assert seen == SeenClasses.of(reversed(labels)) and "product-7" in seen and "product-10000" not in seen


def test_a_bundle_without_a_record_differs_from_one_that_saw_nothing(tmp_path: Path) -> None:
    bundle = make_tiny_bundle(tmp_path / "bundle")
    assert SeenClasses.of_bundle(Bundle.load(bundle)) is None
    assert SeenClasses.of_bundle(with_record(bundle, "")) == SeenClasses()
    with pytest.raises(TrainingError, match="is not base64"):
        SeenClasses.of_bundle(with_record(bundle, "?"))


def test_classes_that_were_seen_are_refused_with_their_number() -> None:
    with pytest.raises(TrainingError, match="2 of the 4 classes to measure were used to train runs/b, such as a"):
        check_unseen(DATA, {"runs/a": SeenClasses.of("ax"), "runs/b": SeenClasses.of("ab")}, "refuse")


def test_excluded_classes_are_not_queried_but_stay_in_the_gallery() -> None:
    check = check_unseen(DATA, {"run": SeenClasses.of("ab")}, "exclude")
    assert {photo.label for photo in check.data.test if photo.is_query} == {"c", "d"}
    assert {photo.label for photo in check.data.test if photo.is_gallery} == set("abcd")
    assert check.record() == {"classes": 4, "seen": 2, "policy": "exclude"}
    assert (
        check.remarks
        == ("2 of the 4 classes to measure were used to train run; 2 classes are not queried: a, b.",)
        == check.data.remarks
    )
    queries = DataSet("shop", (), photos_of("abcd", is_gallery=False) + photos_of("abcd", is_query=False))
    kept = check_unseen(queries, {"run": SeenClasses.of("a")}, "exclude").data.test
    assert len(kept) == len(queries.test) - 2, "photos without a role are not embedded"
    with pytest.raises(TrainingError, match="4 of the 4 classes"):
        check_unseen(DATA, {"run": SeenClasses.of("abcd")}, "exclude")


def test_included_classes_are_measured_with_a_remark() -> None:
    check = check_unseen(DATA, {"run": SeenClasses.of("a")}, "include")
    assert check.data.test == DATA.test
    assert check.remarks == (
        "1 of the 4 classes to measure were used to train run: the figures are too high for new products.",
    )


def test_classes_of_the_gallery_alone_are_not_measured() -> None:
    data = DataSet("shop", (), photos_of("ab") + photos_of("c", is_query=False))
    assert check_unseen(data, {"run": SeenClasses.of("c")}, "refuse").seen == 0


def test_a_model_without_a_record_is_remarked() -> None:
    check = check_unseen(DATA, {"old": None}, "refuse")
    assert check.data.test == DATA.test and "old does not record the classes" in check.remarks[0]
