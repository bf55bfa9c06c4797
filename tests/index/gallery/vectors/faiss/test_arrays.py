"""Files of arrays: opened as views of the file, and refused when damaged."""

from bisect import bisect_left
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from index.gallery.vectors.faiss.arrays import ArraysError, Texts, open_arrays, pack_texts, write_arrays

ARRAYS: dict[str, NDArray[Any]] = {
    "vectors": np.arange(12, dtype=np.float32).reshape(3, 4),
    "keys": np.array([-1, 2**62]),
    "flags": np.array([True, False, True]),
    "none": np.empty((0, 4), np.float16),
    "one": np.array(7, np.int8),
    "ünï/codes": np.array([1, 2, 3], np.uint16),
    "transposed": np.arange(6, dtype=np.float64).reshape(2, 3).T,
    "big-endian": np.array([1, 2], ">i4"),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_arrays(tmp_path / "arrays", ARRAYS)
    return tmp_path / "arrays"


def test_opened_arrays_equal_the_written_ones(path: Path) -> None:
    opened = open_arrays(path)
    assert set(opened) == set(ARRAYS)
    for name, values in ARRAYS.items():
        assert opened[name].dtype == values.dtype.newbyteorder("<") and opened[name].shape == values.shape
        np.testing.assert_array_equal(opened[name], values)


def test_opened_arrays_are_aligned_read_only_views(path: Path) -> None:
    for values in open_arrays(path).values():
        assert values.ctypes.data % 64 == 0 and not values.flags.owndata
        with pytest.raises(ValueError, match="read-only"):
            values[...] = 0


def test_opened_arrays_stay_valid_when_the_file_is_deleted(path: Path) -> None:
    vectors = open_arrays(path)["vectors"]
    path.unlink()
    assert vectors.sum() == 66


def test_equal_arrays_give_equal_bytes(path: Path, tmp_path: Path) -> None:
    write_arrays(tmp_path / "again", dict(reversed(ARRAYS.items())))
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


def test_a_file_may_have_no_arrays(tmp_path: Path) -> None:
    write_arrays(tmp_path / "none", {})
    assert open_arrays(tmp_path / "none") == {}


def test_an_array_of_objects_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="The array names is of type object"):
        write_arrays(tmp_path / "arrays", {"names": np.array(["a", None])})
    assert not list(tmp_path.iterdir())


def test_a_file_truncated_anywhere_is_refused(path: Path) -> None:
    intact = path.read_bytes()
    for length in range(len(intact)):
        path.write_bytes(intact[:length])
        with pytest.raises(ArraysError, match="not a file of arrays"):
            open_arrays(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"LKARRAY1", b"\x89PNG\r\n\x1a\n"),
        (b'"shape":[3,4]', b'"shape":[9,9]'),
        (b'"shape":[3,4]', b'"shape":[-1] '),
        (b'"dtype":"<f4"', b'"dtype":"|O4"'),
        (b'"dtype":"<f4"', b'"dtipe":"<f4"'),
        (b"[{", b"[["),
        (b'"shape":[3,4],"offset":', b'"shape":[3,4],"offset":9'),
    ],
)
def test_a_foreign_or_damaged_header_is_refused(path: Path, old: bytes, new: bytes) -> None:
    intact = path.read_bytes()
    damaged = intact.replace(old, new)[: len(intact)]
    assert damaged != intact
    path.write_bytes(damaged)
    with pytest.raises(ArraysError, match="Rebuild its generation"):
        open_arrays(path)


def test_a_header_longer_than_the_file_is_refused(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:8] + b"\xff" * 8 + path.read_bytes()[16:])
    with pytest.raises(ArraysError, match="header is truncated"):
        open_arrays(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArraysError, match="does not exist"):
        open_arrays(tmp_path / "arrays")


@settings(deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=()))))
def test_packed_texts_equal_the_originals_including_lone_surrogates(texts: list[str]) -> None:
    packed = Texts(*pack_texts(texts))
    assert list(packed) == texts and len(packed) == len(texts)
    assert [packed[i - len(texts)] for i in range(len(texts))] == texts
    assert packed[1:-1] == texts[1:-1] and packed[::-2] == texts[::-2]


@settings(deadline=None)
@given(st.lists(st.text(), unique=True), st.text())
def test_bisect_on_packed_texts_equals_bisect_on_a_list(texts: list[str], wanted: str) -> None:
    texts.sort()
    assert bisect_left(Texts(*pack_texts(texts)), wanted) == bisect_left(texts, wanted)


def test_an_index_beyond_the_last_text_is_refused(tmp_path: Path) -> None:
    offsets, blob = pack_texts(["a", "é"])
    write_arrays(tmp_path / "texts", {"offsets": offsets, "blob": blob})
    opened = open_arrays(tmp_path / "texts")
    texts = Texts(opened["offsets"], opened["blob"])
    assert texts[1] == texts[-1] == "é"
    for index in (2, -3):
        with pytest.raises(IndexError):
            texts[index]


def test_offsets_that_do_not_fit_the_blob_are_refused() -> None:
    offsets, _ = pack_texts(["a", "bc"])
    _, blob = pack_texts(["a"])
    for invalid in (offsets, offsets[1:], offsets[:0]):
        with pytest.raises(ArraysError, match="do not fit"):
            Texts(invalid, blob)
