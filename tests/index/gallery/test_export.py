"""Exporting: the Parquet file holds what the catalogue does, image by image."""

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest

from index.errors import LookalikeError
from index.gallery import export, open_gallery
from tests.support.filled_gallery import BUNDLE, DIMENSION, entry, fill


def write_parquet(directory: Path, file: Path, *, bundle_id: str | None = None, force: bool = False) -> int:
    with open_gallery(directory) as gallery:
        return gallery.export(file, bundle_id=bundle_id, force=force)


def test_the_table_reads_back_as_the_gallery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "_GROUP_ROWS", 16)
    gallery = fill(tmp_path / "gallery")
    assert write_parquet(gallery, tmp_path / "vectors.parquet") == 40
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
        named = {"item_id": item.id, "title": item.title, "url": item.url}
        assert row == named | {"image_id": image.id, "digest": image.digest}


def test_the_vectors_of_another_bundle_can_be_chosen(tmp_path: Path) -> None:
    gallery = fill(tmp_path / "gallery")
    opened = open_gallery(gallery)
    opened.upsert([entry(number) for number in range(3)], "c" * 16)
    opened.close()
    assert write_parquet(gallery, tmp_path / "live.parquet") == 40
    assert write_parquet(gallery, tmp_path / "other.parquet", bundle_id="c" * 16) == 6
    with pytest.raises(LookalikeError, match=r"no vectors of bundle unknown.*b{16}, c{16}"):
        write_parquet(gallery, tmp_path / "none.parquet", bundle_id="unknown")
    assert not (tmp_path / "none.parquet").exists()


def test_an_empty_gallery_has_nothing_to_export(tmp_path: Path) -> None:
    open_gallery(tmp_path / "gallery", create=True).close()
    with pytest.raises(LookalikeError, match="no vectors yet"):
        write_parquet(tmp_path / "gallery", tmp_path / "vectors.parquet")


def test_a_file_is_replaced_only_when_asked(tmp_path: Path) -> None:
    gallery = fill(tmp_path / "gallery")
    (tmp_path / "vectors.parquet").write_text("precious")
    with pytest.raises(LookalikeError, match="exists"):
        write_parquet(gallery, tmp_path / "vectors.parquet")
    assert write_parquet(gallery, tmp_path / "vectors.parquet", force=True) == 40


def test_without_pyarrow_the_remedy_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gallery = fill(tmp_path / "gallery")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(LookalikeError, match=r'pip install "lookalike\[parquet\]"'):
        write_parquet(gallery, tmp_path / "vectors.parquet")
