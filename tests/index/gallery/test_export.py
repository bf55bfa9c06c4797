"""Exports to Parquet: the file holds what the store holds, image by image."""

import json
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest

from index.errors import LookalikeError
from index.gallery import export, open_gallery
from index.gallery.store.sqlite import SQLiteStore
from tests.support.filled_gallery import BUNDLE, DIMENSION, entry, fill


def export_gallery(directory: Path, file: Path, *, bundle_id: str | None = None, force: bool = False) -> int:
    with open_gallery(directory) as gallery:
        return gallery.export(file, bundle_id=bundle_id, force=force)


def test_the_table_has_every_image_with_its_item_and_vector(tmp_path: Path) -> None:
    with closing(SQLiteStore(fill(tmp_path / "gallery"))) as store:
        assert export.write_parquet(store, tmp_path / "vectors.parquet", group_rows=16) == 40
    assert pyarrow.parquet.ParquetFile(tmp_path / "vectors.parquet").num_row_groups == 3
    table = pyarrow.parquet.read_table(tmp_path / "vectors.parquet")
    assert table.schema.metadata[b"lookalike.bundle_id"].decode() == BUNDLE
    assert table.schema.metadata[b"lookalike.revision"] == b"1"
    assert table.schema.field("vector").type == pyarrow.list_(pyarrow.float32(), DIMENSION)
    rows = table.to_pylist()
    expected = [(item, image) for item, images in map(entry, range(20)) for image in images]
    for row, (item, image) in zip(rows, expected, strict=True):
        vector = row.pop("vector")
        assert vector == image.vector.astype(np.float16).tolist()
        assert json.loads(row.pop("attributes")) == item.attributes
        expected_row = {"item_id": item.id, "title": item.title, "url": item.url}
        assert row == expected_row | {"image_id": image.id, "digest": image.digest}


def test_the_vectors_of_an_inactive_bundle_can_be_exported(tmp_path: Path) -> None:
    gallery = fill(tmp_path / "gallery")
    with open_gallery(gallery) as opened:
        opened.upsert([entry(number) for number in range(3)], "c" * 16)
    assert export_gallery(gallery, tmp_path / "active.parquet") == 40
    assert export_gallery(gallery, tmp_path / "other.parquet", bundle_id="c" * 16) == 6
    with pytest.raises(LookalikeError, match=r"no vectors of bundle unknown.*b{16}, c{16}"):
        export_gallery(gallery, tmp_path / "none.parquet", bundle_id="unknown")
    assert not (tmp_path / "none.parquet").exists()


def test_an_empty_gallery_cannot_be_exported(tmp_path: Path) -> None:
    open_gallery(tmp_path / "gallery", create=True).close()
    with pytest.raises(LookalikeError, match="no vectors yet"):
        export_gallery(tmp_path / "gallery", tmp_path / "vectors.parquet")


def test_an_existing_file_is_replaced_only_with_force(tmp_path: Path) -> None:
    gallery = fill(tmp_path / "gallery")
    (tmp_path / "vectors.parquet").write_text("precious")
    with pytest.raises(LookalikeError, match="exists"):
        export_gallery(gallery, tmp_path / "vectors.parquet")
    assert export_gallery(gallery, tmp_path / "vectors.parquet", force=True) == 40


def test_the_error_without_pyarrow_names_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gallery = fill(tmp_path / "gallery")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(LookalikeError, match=r'pip install "lookalike\[parquet\]"'):
        export_gallery(gallery, tmp_path / "vectors.parquet")
