"""Named NumPy arrays in one memory-mapped file, and lists of texts packed into two arrays.

The file: a magic number, the length of a JSON header, the header (name, dtype, shape and offset of each array), then
the arrays, each aligned to 64 bytes. Opening reads only the header, and processes that open the same file share its
pages.
"""

import json
import mmap
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeInt, TypeAdapter, ValidationError

from index._util.files import atomic_write
from index._util.models import Frozen
from index.errors import LookalikeError

Arrays = Mapping[str, NDArray[Any]]

_MAGIC = b"LKARRAY1"
_PREFIX = struct.Struct("<8sQ")
_ALIGNMENT = 64
_DTYPES = ("|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8")


class ArraysError(LookalikeError):
    """A file of arrays is missing, damaged or of another format."""

    kind = "arrays"


class _Entry(Frozen):
    """The header's entry of one array; `offset` counts from the end of the header."""

    name: str
    dtype: str
    shape: tuple[NonNegativeInt, ...]
    offset: NonNegativeInt


_ENTRIES = TypeAdapter(list[_Entry])


def write_arrays(path: Path, arrays: Arrays) -> None:
    """Writes arrays to a file atomically; equal arrays give equal bytes."""
    entries, ordered, end = [], [], 0
    for name, source in sorted(arrays.items()):
        values = np.asarray(source, source.dtype.newbyteorder("<"), order="C")
        if values.dtype.str not in _DTYPES:
            raise TypeError(f"The array {name} is of type {values.dtype}; only numbers and booleans can be written.")
        offset = _align(end)
        end = offset + values.nbytes
        entries.append({"name": name, "dtype": values.dtype.str, "shape": values.shape, "offset": offset})
        ordered.append((offset, values))
    header = json.dumps(entries, separators=(",", ":")).encode()
    start = _align(_PREFIX.size + len(header))
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        file.write(_PREFIX.pack(_MAGIC, len(header)) + header)
        for offset, values in ordered:
            file.write(bytes(start + offset - file.tell()))
            file.write(values.data)


def open_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Returns the arrays of a file as read-only views of one memory map, which is closed with the last of them."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        magic, length = _PREFIX.unpack_from(mapped)
        if magic != _MAGIC:
            raise ValueError("its magic number is wrong")
        if length > len(mapped) - _PREFIX.size:
            raise ValueError("its header is truncated")
        entries = _ENTRIES.validate_json(mapped[_PREFIX.size : _PREFIX.size + length])
        start = _align(_PREFIX.size + length)
        return {entry.name: _view(mapped, entry, start) for entry in entries}
    except FileNotFoundError:
        raise ArraysError(f"{path} does not exist.", "Rebuild its generation.") from None
    except (ValidationError, ValueError, TypeError, OverflowError, struct.error) as error:
        reason = "its header is damaged" if isinstance(error, ValidationError) else error
        raise ArraysError(f"{path} is not a file of arrays: {reason}.", "Rebuild its generation.") from None


def _view(mapped: mmap.mmap, entry: _Entry, start: int) -> NDArray[Any]:
    if entry.dtype not in _DTYPES or entry.offset % _ALIGNMENT:
        raise ValueError(f"its array {entry.name} has type {entry.dtype} at offset {entry.offset}")
    # NumPy checks that the array lies within the map.
    return np.ndarray(entry.shape, entry.dtype, buffer=mapped, offset=start + entry.offset)


def _align(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT


class TextPacker:
    """Packs texts into offsets (one more than there are texts) and a blob of UTF-8; lone surrogates are kept."""

    def __init__(self) -> None:
        self._offsets, self._blob = array("q", [0]), bytearray()

    def append(self, text: str) -> None:
        self._blob += text.encode("utf-8", "surrogatepass")
        self._offsets.append(len(self._blob))

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """Returns the offsets and the blob; nothing may be appended after that."""
        return np.frombuffer(self._offsets, np.int64), np.frombuffer(self._blob, np.uint8)


def pack_texts(texts: Iterable[str]) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Returns the offsets and the blob of all texts."""
    packer = TextPacker()
    for text in texts:
        packer.append(text)
    return packer.arrays()


class Texts(Sequence[str]):
    """Packed texts, decoded one by one on access, so that `bisect` reads only the texts that it compares."""

    def __init__(self, offsets: NDArray[np.int64], blob: NDArray[np.uint8]) -> None:
        if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(blob):
            raise ArraysError("Packed texts do not fit their offsets.", "Rebuild their generation.")
        # Indexing a memory view returns plain ints, and is several times faster than indexing an array.
        self._offsets = offsets.data
        self._blob = blob.data
        self._length = len(offsets) - 1

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._length))]
        if index < 0:
            index += self._length
        if not 0 <= index < self._length:
            raise IndexError(f"Index {index} is out of range for {self._length} texts.")
        return str(self._blob[self._offsets[index] : self._offsets[index + 1]], "utf-8", "surrogatepass")
