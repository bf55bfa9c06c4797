"""Writes TIFF files tag by tag, also those that no program writes."""

import struct
from collections.abc import Mapping, Sequence

Tags = dict[int, Sequence[int]]
_SHORT, _LONG, _LONG8 = 3, 4, 16


def write_tiff(
    tags: Mapping[int, Sequence[int]], pixels: bytes | Sequence[bytes], *, order: str = "<", big: bool = False
) -> bytes:
    """Returns a TIFF of one page; the strips of `pixels` are entered where the tags do not name any.

    Every strip starts after the header of 8 or 16 bytes, one after the other.
    """
    strips = [pixels] if isinstance(pixels, bytes) else list(pixels)
    start = 16 if big else 8
    offsets = [start + sum(len(strip) for strip in strips[:index]) for index in range(len(strips))]
    offsets_tag, counts_tag = (324, 325) if 322 in tags else (273, 279)
    filled = {offsets_tag: offsets, counts_tag: [len(strip) for strip in strips], **tags}
    body = b"".join(strips)
    directory_at = start + len(body)
    kind, code = (_LONG8, "Q") if big else (_LONG, "I")
    entry_bytes, inline = (20, 8) if big else (12, 4)
    place = directory_at + (8 if big else 2) + entry_bytes * len(filled) + inline
    entries, values = b"", b""
    for tag, numbers in sorted(filled.items()):
        packed = struct.pack(f"{order}{len(numbers)}{code}", *numbers)
        entries += struct.pack(f"{order}HH{code}", tag, kind, len(numbers))
        if len(packed) <= inline:
            entries += packed.ljust(inline, b"\0")
        else:
            entries += struct.pack(order + code, place + len(values))
            values += packed
    magic = b"II" if order == "<" else b"MM"
    head = struct.pack(order + "HHHQ", 43, 8, 0, directory_at) if big else struct.pack(order + "HI", 42, directory_at)
    count = struct.pack(order + ("Q" if big else "H"), len(filled))
    return magic + head + body + count + entries + bytes(inline) + values


def grey_tags(width: int, height: int, **changed: Sequence[int]) -> Tags:
    """Returns the tags of an uncompressed image of one strip with 8 bits per pixel; `t259=[5]` sets tag 259."""
    tags: Tags = {256: [width], 257: [height], 258: [8], 259: [1], 262: [1], 277: [1], 278: [height]}
    return {**tags, **{int(name[1:]): numbers for name, numbers in changed.items()}}


def rgb_tags(width: int, height: int, **changed: Sequence[int]) -> Tags:
    """Returns the tags of the same in colour."""
    return grey_tags(width, height, **{"t258": [8, 8, 8], "t262": [2], "t277": [3], **changed})
