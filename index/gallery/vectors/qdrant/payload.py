"""What a point of Qdrant holds of an image and its item, in fields that keep the types of attributes apart.

A point's id is the image's key in the store. Its payload has

- `i`, the key of the item, and `r`, a JSON list with the item, the image id and the digest: what a hit needs;
- `f`, whether it is the first image of its item: facets count items by these;
- `a`, the names of all attributes;
- `l`, the names of those that have several values: their fields below are lists, of which one element must match;
- `v.<name>`, each attribute's value as a text that begins with its type: `n5.5`, `tred`, `btrue`;
- `n.<name>`, a number, for ranges, `t.<name>`, the beginning of a text as a number, which sorts as the text does, and
  `d.<name>`, the seconds since 1970 of a text that is a date.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from index.dates import parse_instant
from index.gallery.filters import ValueType, plain_number
from index.gallery.store.base import ImageRow
from index.gallery.types import Attribute, Item, StoredImage
from index.gallery.vectors.qdrant.nodes import messages
from index.items import Value, parse_attributes, values_of

ITEM, RECORD, FIRST, NAMES, LISTS = "i", "r", "f", "a", "l"
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
        item = Item.model_construct(id=item_id, title=title, url=url, attributes=parse_attributes(attributes))
        return item, StoredImage.model_construct(id=image_id, digest=digest)

    @property
    def attributes(self) -> dict[str, Attribute]:
        return parse_attributes(json.loads(self.text)[3])


def read_record(payload: Any) -> Record:
    """Returns the record of a point that was read with the fields `i` and `r`."""
    return Record(payload[ITEM].integer_value, payload[RECORD].string_value)


def token(value: Value) -> str:
    """Returns a value as a text that begins with its type; equal values, such as 5 and 5.0, have the same."""
    if isinstance(value, bool):
        return "btrue" if value else "bfalse"
    return f"t{value}" if isinstance(value, str) else f"n{plain_number(value)!r}"


def parse_token(text: str) -> Value:
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


def seconds(instant: int) -> float:
    """Returns an instant as stored: whole seconds have few digits, which Qdrant keeps."""
    return instant / 1_000_000


def parse_seconds(payload: Any, name: str) -> int:
    """Returns the instant of a date that a point was read with, rounded down."""
    number: float = payload["d"].struct_value.fields[_key(name)].double_value
    return math.floor(number * 1_000_000) - 1


def field(kind: str, name: str) -> str:
    """Returns the path of an attribute's field; a name with other characters than letters and digits is escaped."""
    return f"{kind}.{_key(name)}"


def _key(name: str) -> str:
    return name if _PLAIN.fullmatch(name) else f"x-{name.encode('utf-8', 'surrogatepass').hex()}"


def attribute_fields(attributes: Mapping[str, Attribute]) -> Iterator[tuple[str, str]]:
    """Yields kind and name of the fields that some attributes need, by which they are indexed."""
    for name, attribute in attributes.items():
        yield from ((kind, name) for kind in {kind for kind, _ in _contents(attribute)})


def _contents(attribute: Attribute) -> Iterator[tuple[str, str | int | float]]:
    """Yields what each value adds to the fields of an attribute, with their kind."""
    for value in values_of(attribute):
        yield "v", token(value)
        if isinstance(value, str):
            yield "t", text_order(value)
            instant = parse_instant(value)
            if instant is not None:
                yield "d", seconds(instant)
        elif not isinstance(value, bool):
            yield "n", float(value)


def make_point(row: ImageRow, item: Item, vector: list[float], *, is_first: bool) -> Any:
    """Returns the point of an image."""
    q = messages()
    fields: dict[str, dict[str, Any]] = {}
    for name, attribute in item.attributes.items():
        contents: dict[str, list[Any]] = {}
        for kind, content in _contents(attribute):
            contents.setdefault(kind, []).append(_value(content))
        for kind, own in contents.items():
            fields.setdefault(kind, {})[_key(name)] = own[0] if len(own) == 1 else _list(own)
    record = json.dumps([item.id, item.title, item.url, item.attributes, row.id, row.digest])
    payload = {
        ITEM: q.Value(integer_value=row.item),
        RECORD: q.Value(string_value=record),
        FIRST: q.Value(bool_value=is_first),
        NAMES: _list(map(_value, item.attributes)),
        **{kind: q.Value(struct_value=q.Struct(fields=values)) for kind, values in fields.items()},
    }
    if lists := [name for name, attribute in item.attributes.items() if len(values_of(attribute)) > 1]:
        payload[LISTS] = _list(map(_value, lists))
    return q.PointStruct(
        id=q.PointId(num=row.key),
        vectors=q.Vectors(vector=q.Vector(dense=q.DenseVector(data=vector))),
        payload=payload,
    )


def _value(content: str | int | float) -> Any:
    q = messages()
    if isinstance(content, str):
        return q.Value(string_value=content)
    return q.Value(integer_value=content) if isinstance(content, int) else q.Value(double_value=content)


def _list(values: Iterable[Any]) -> Any:
    q = messages()
    return q.Value(list_value=q.ListValue(values=values))
