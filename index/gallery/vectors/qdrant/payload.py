"""What a point of Qdrant holds of an image and its item, in fields that keep the types of attributes apart.

A point's id is the image's key in the store. Its payload has

- `i`, the key of the item, and `r`, a JSON list with the item, the image id and the digest: what a hit needs;
- `f`, whether it is the first image of its item: facets count items by these;
- `a`, the names of all attributes;
- `v.<name>`, each attribute's value as a text that begins with its type: `n5.5`, `tred`, `btrue`;
- `n.<name>`, a number, for ranges, and `t.<name>`, the beginning of a text as a number, which sorts as the text does.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from index.gallery.filters import ValueType, plain_number, value_type
from index.gallery.store.base import ImageRow
from index.gallery.types import Attribute, Item, StoredImage
from index.gallery.vectors.qdrant.nodes import messages

ITEM, RECORD, FIRST, NAMES = "i", "r", "f", "a"
_PLAIN = re.compile(r"[A-Za-z0-9_]+")
_PREFIX_BYTES = 6
"""The bytes of a text that `t.<name>` holds: together they are below 2^53, so a double holds them exactly."""
_KINDS: dict[str, ValueType] = {"n": "number", "t": "text", "b": "boolean"}


class Record(NamedTuple):
    """What a point holds: the item's key, and the JSON of the item and the image."""

    item: int
    text: str

    def parse(self) -> tuple[Item, StoredImage]:
        item_id, title, url, attributes, image_id, digest = json.loads(self.text)
        item = Item.model_construct(id=item_id, title=title, url=url, attributes=attributes)
        return item, StoredImage.model_construct(id=image_id, digest=digest)

    @property
    def attributes(self) -> dict[str, Attribute]:
        attributes: dict[str, Attribute] = json.loads(self.text)[3]
        return attributes


def read_record(payload: Any) -> Record:
    """Returns the record of a point that was read with the fields `i` and `r`."""
    return Record(payload[ITEM].integer_value, payload[RECORD].string_value)


def token(value: Attribute) -> str:
    """Returns a value as a text that begins with its type; equal values, such as 5 and 5.0, have the same."""
    if isinstance(value, bool):
        return "btrue" if value else "bfalse"
    return f"t{value}" if isinstance(value, str) else f"n{plain_number(value)!r}"


def parse_token(text: str) -> Attribute:
    """Returns the value of a token."""
    kind, content = _KINDS[text[0]], text[1:]
    if kind == "boolean":
        return content == "true"
    return content if kind == "text" else plain_number(float(content))


def text_order(text: str) -> int:
    """Returns a number that is smaller for a smaller text, and equal only for texts that begin alike.

    The order of UTF-8 bytes is that of code points.
    """
    start = text[:_PREFIX_BYTES].encode("utf-8", "surrogatepass")[:_PREFIX_BYTES]
    return int.from_bytes(start.ljust(_PREFIX_BYTES, b"\0"), "big")


def field(kind: str, name: str) -> str:
    """Returns the path of an attribute's field; a name with other characters than letters and digits is escaped."""
    return f"{kind}.{_key(name)}"


def _key(name: str) -> str:
    return name if _PLAIN.fullmatch(name) else f"x-{name.encode('utf-8', 'surrogatepass').hex()}"


def attribute_fields(attributes: Mapping[str, Attribute]) -> Iterator[tuple[str, str]]:
    """Yields kind and name of the fields that some attributes need, by which they are indexed."""
    for name, value in attributes.items():
        yield "v", name
        kind = value_type(value)
        if kind != "boolean":
            yield kind[0], name


def make_point(row: ImageRow, item: Item, vector: list[float], *, is_first: bool) -> Any:
    """Returns the point of an image."""
    q = messages()
    fields: dict[str, dict[str, Any]] = {"v": {}, "n": {}, "t": {}}
    for name, value in item.attributes.items():
        key = _key(name)
        fields["v"][key] = q.Value(string_value=token(value))
        if isinstance(value, str):
            fields["t"][key] = q.Value(integer_value=text_order(value))
        elif not isinstance(value, bool):
            fields["n"][key] = q.Value(double_value=value)
    record = json.dumps([item.id, item.title, item.url, item.attributes, row.id, row.digest])
    payload = {
        ITEM: q.Value(integer_value=row.item),
        RECORD: q.Value(string_value=record),
        FIRST: q.Value(bool_value=is_first),
        NAMES: q.Value(list_value=q.ListValue(values=[q.Value(string_value=name) for name in item.attributes])),
        **{kind: q.Value(struct_value=q.Struct(fields=values)) for kind, values in fields.items() if values},
    }
    return q.PointStruct(
        id=q.PointId(num=row.key),
        vectors=q.Vectors(vector=q.Vector(dense=q.DenseVector(data=vector))),
        payload=payload,
    )
