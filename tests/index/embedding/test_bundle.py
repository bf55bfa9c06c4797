"""Tests of the bundle: it matches its card, or it is refused."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from index.embedding.bundle import Bundle, BundleError
from tests.support.tiny_bundle import SIDE, make_tiny_bundle


def change_card(bundle: Path, **fields: object) -> None:
    card = json.loads((bundle / "bundle.json").read_text())
    (bundle / "bundle.json").write_text(json.dumps(card | fields))


def test_bundle_has_its_preprocessing_and_metrics(tmp_path: Path) -> None:
    bundle = Bundle.load(make_tiny_bundle(tmp_path))
    assert bundle.dimension == 48 and bundle.preprocessing.input_size == SIDE
    assert bundle.card.metrics == {"recall@1": 0.9}


def test_id_depends_on_the_model_and_its_preprocessing(tmp_path: Path) -> None:
    same = [Bundle.load(make_tiny_bundle(tmp_path / name)).id for name in ("a", "b")]
    other_rule = Bundle.load(make_tiny_bundle(tmp_path / "c", resize=40)).id
    other_model = Bundle.load(make_tiny_bundle(tmp_path / "d", grid=2)).id
    assert same[0] == same[1]
    assert len({same[0], other_rule, other_model}) == 3


def test_a_bundle_that_cannot_be_read_is_not_reported_as_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_bundle(tmp_path)

    def refuse(path: Path) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("index.embedding.bundle.file_digest", refuse)
    with pytest.raises(BundleError, match=r"cannot be read: Too many open files\. Check .*ulimit"):
        Bundle.load(tmp_path)


def test_model_with_a_changed_byte_is_refused(tmp_path: Path) -> None:
    path = make_tiny_bundle(tmp_path) / "model.onnx"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(BundleError, match="damaged"):
        Bundle.load(tmp_path)


def test_changed_preprocessing_is_refused(tmp_path: Path) -> None:
    bundle = make_tiny_bundle(tmp_path)
    change_card(bundle, preprocessing={"resize": 99, "input_size": SIDE})
    with pytest.raises(BundleError, match="damaged"):
        Bundle.load(bundle)


def test_unknown_schema_version_is_refused(tmp_path: Path) -> None:
    bundle = make_tiny_bundle(tmp_path)
    change_card(bundle, schema_version=2)
    with pytest.raises(BundleError, match="schema version 2"):
        Bundle.load(bundle)


def test_error_names_the_invalid_field(tmp_path: Path) -> None:
    bundle = make_tiny_bundle(tmp_path)
    change_card(bundle, dimension=-1)
    with pytest.raises(BundleError, match="dimension"):
        Bundle.load(bundle)


def test_error_of_a_missing_bundle_names_the_export_command(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="lookalike export"):
        Bundle.load(tmp_path / "nothing")


def test_card_of_an_older_release_loads(tmp_path: Path) -> None:
    bundle = make_tiny_bundle(tmp_path)
    card = json.loads((bundle / "bundle.json").read_text())
    (bundle / "bundle.json").write_text(
        json.dumps({name: value for name, value in card.items() if name not in ("precision", "fp32_metrics")})
    )
    (bundle / "README.md").unlink()
    assert Bundle.load(bundle).card.precision == "fp32"


def test_readme_describes_the_bundle(tmp_path: Path) -> None:
    bundle = Bundle.load(make_tiny_bundle(tmp_path))
    text = (tmp_path / "README.md").read_text()
    assert bundle.id in text and "colour_grid" in text
    assert "| recall@1 | 50.0 % | 90.0 % |" in text


def test_concurrent_copies_from_two_containers_do_not_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process id of each container's first process is 1, and their host names may be equal."""
    bundle = Bundle.load(make_tiny_bundle(tmp_path / "bundle"))
    copyfile = shutil.copyfile
    monkeypatch.setattr(os, "getpid", lambda: 1)

    def copy_after_another_process(source: Path, copy: Path) -> None:
        monkeypatch.setattr(shutil, "copyfile", copyfile)
        bundle.copy_to(tmp_path / "copy")
        copyfile(source, copy)

    monkeypatch.setattr(shutil, "copyfile", copy_after_another_process)
    bundle.copy_to(tmp_path / "copy")
    assert Bundle.load(tmp_path / "copy").id == bundle.id
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "copy"]


def test_damaged_copy_is_replaced_and_a_valid_one_is_kept(tmp_path: Path) -> None:
    bundle, copy = Bundle.load(make_tiny_bundle(tmp_path / "bundle")), tmp_path / "copy" / "model.onnx"
    bundle.copy_to(copy.parent)
    first = copy.stat()
    bundle.copy_to(copy.parent)
    assert copy.stat() == first
    copy.unlink()
    bundle.copy_to(copy.parent)
    assert Bundle.load(copy.parent).id == bundle.id
