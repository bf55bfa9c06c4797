"""Filters: conditions on the attributes of items, written as JSON and validated before a search.

    {"category": "mug", "colour": ["red", "blue"], "price": {"gte": 5, "lt": 20}, "not": {"brand": "Acme"}}

All conditions must hold. A list asks for one of its values, and `{"all": [...]}` for every one. An attribute with
several values fulfils a condition if one value alone does, also a range. `any` takes a list of filters, of which one
must match. `not` takes a filter, or a list of filters, of which none may match: a plain complement, so an item without
the attribute passes.

Equality is typed: 1 equals 1.0, but not true or "1". A range whose bounds are dates compares instants; any other range
of texts compares code points.
"""

import json
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

from index.dates import format_instant, parse_instant
from index.errors import LookalikeError
from index.items import MAX_INTEGER, MAX_NAME_LENGTH, MAX_TEXT_LENGTH, Attribute, Value, values_of

MAX_DEPTH = 8
MAX_CONDITIONS = 64
MAX_VALUES = 1_000

ValueType = Literal["number", "text", "boolean"]
RangeKind = Literal["number", "text", "boolean", "date"]
Comparison = Literal["gte", "gt", "lte", "lt"]
_COMPARE: dict[Comparison, Callable[[Any, Any], bool]] = {
    "gte": operator.ge,
    "gt": operator.gt,
    "lte": operator.le,
    "lt": operator.lt,
}
_OPERATORS = (*_COMPARE, "exists", "all")
_RESERVED = ("any", "not")
"""Keys that are not names of attributes."""
_BOUND_PAIRS: tuple[tuple[Comparison, Comparison], ...] = (("gte", "gt"), ("lte", "lt"))
_ALONE = {
    "all": "Use it alone, and other conditions in a filter of `any` or `not`.",
    "exists": "Use it alone: a range implies it.",
}
_TWO_DATES = "Use two dates, such as 2026-11-19 or 2026-11-19T10:00:00Z, or two other texts."


class FilterError(LookalikeError):
    """An invalid filter: the place within it, the value there, and what to write instead."""

    kind = "filter"


TypedValue = tuple[ValueType, Value]
"""A value with its type, because True == 1 in Python."""


def value_type(value: Value) -> ValueType:
    """Returns the type of a value; only values of one type are compared."""
    if isinstance(value, bool):
        return "boolean"
    return "text" if isinstance(value, str) else "number"


def plain_number(number: float) -> int | float:
    """Returns the canonical form of a number: 5 for 5.0, and 0 for -0.0."""
    return int(number) if abs(number) <= MAX_INTEGER and number == int(number) else number


def _list_values(values: frozenset[TypedValue]) -> list[Value]:
    """Returns values in their canonical order."""
    return [value for _, value in sorted(values, key=operator.itemgetter(0, 1))]


def _total_length(values: frozenset[TypedValue]) -> int:
    return sum(len(str(value)) for _, value in values)


@dataclass(frozen=True)
class AnyOf:
    """The attribute is, or has among its values, one of these."""

    values: frozenset[TypedValue]

    def matches(self, attribute: Attribute | None) -> bool:
        if isinstance(attribute, tuple):
            return any((value_type(value), value) in self.values for value in attribute)
        return attribute is not None and (value_type(attribute), attribute) in self.values

    @property
    def length(self) -> int:
        return _total_length(self.values)

    @property
    def document(self) -> object:
        values = _list_values(self.values)
        return values[0] if len(values) == 1 else values


@dataclass(frozen=True)
class AllOf:
    """The attribute has every one of these values: there are at least two, so it is a list."""

    values: frozenset[TypedValue]

    def matches(self, attribute: Attribute | None) -> bool:
        return self.values.issubset((value_type(value), value) for value in values_of(attribute))

    @property
    def length(self) -> int:
        return _total_length(self.values)

    @property
    def document(self) -> object:
        return {"all": _list_values(self.values)}


@dataclass(frozen=True)
class Range:
    """A value has the type of the bounds and is within them all.

    Strings are compared by code point. The bounds of dates are instants, and the values are texts that are dates.
    """

    kind: RangeKind
    bounds: tuple[tuple[Comparison, Value], ...]

    def matches(self, attribute: Attribute | None) -> bool:
        if isinstance(attribute, tuple):
            return any(map(self._includes, attribute))
        return attribute is not None and self._includes(attribute)

    def _includes(self, value: Value) -> bool:
        compared: Value | None = value
        if self.kind == "date":
            compared = parse_instant(value) if isinstance(value, str) else None
        elif value_type(value) != self.kind:
            compared = None
        return compared is not None and all(_COMPARE[comparison](compared, bound) for comparison, bound in self.bounds)

    @property
    def length(self) -> int:
        return sum(len(str(bound)) for _, bound in self.bounds)

    @property
    def document(self) -> object:
        if self.kind == "date":
            return {comparison: format_instant(cast(int, bound)) for comparison, bound in self.bounds}
        return dict(self.bounds)


@dataclass(frozen=True)
class Exists:
    """The item has the attribute or, if `wanted` is false, does not have it."""

    wanted: bool
    length: ClassVar[int] = 0

    def matches(self, attribute: Attribute | None) -> bool:
        return (attribute is not None) == self.wanted

    @property
    def document(self) -> object:
        return {"exists": self.wanted}


Condition = AnyOf | AllOf | Range | Exists


@dataclass(frozen=True)
class Filter:
    """Conditions that must all hold, filters that must not match, and alternatives, of which one must match.

    Filters that mean the same are equal.
    """

    conditions: tuple[tuple[str, Condition], ...] = ()
    negated: tuple["Filter", ...] = ()
    alternatives: tuple["Filter", ...] = ()

    @classmethod
    def parse(cls, document: object) -> "Filter":
        """Parses decoded JSON; `{}` matches everything. Raises FilterError."""
        return FilterParser().parse(document)

    def matches(self, attributes: Mapping[str, Attribute]) -> bool:
        """Returns whether an item with these attributes passes: the reference that every engine must agree with."""
        if not all(condition.matches(attributes.get(name)) for name, condition in self.conditions):
            return False
        if any(negated.matches(attributes) for negated in self.negated):
            return False
        return not self.alternatives or any(one.matches(attributes) for one in self.alternatives)

    @property
    def length(self) -> int:
        """The number of characters of all texts."""
        own = sum(len(name) + condition.length for name, condition in self.conditions)
        return own + sum(inner.length for inner in (*self.negated, *self.alternatives))

    @property
    def document(self) -> dict[str, object]:
        """The canonical JSON of the filter, which parses to an equal filter."""
        document: dict[str, object] = {name: condition.document for name, condition in self.conditions}
        if self.negated:
            negated = [negated.document for negated in self.negated]
            document["not"] = negated[0] if len(negated) == 1 else negated
        if self.alternatives:
            document["any"] = [one.document for one in self.alternatives]
        return document


class FilterParser:
    """Parses filters; counts conditions and values, because the limits apply to all of them together."""

    def __init__(self) -> None:
        self._conditions = 0
        self._values = 0

    def parse(self, document: object) -> Filter:
        """Parses decoded JSON. Raises FilterError."""
        return self._filter(document, "filter", depth=0)

    def _filter(self, document: object, path: str, depth: int) -> Filter:
        if depth > MAX_DEPTH:
            raise FilterError(
                f"{path} is nested deeper than {MAX_DEPTH} times.", "Use fewer `not` and `any` inside each other."
            )
        if not isinstance(document, dict):
            raise FilterError(
                f"{path} is {_format(document)}, not an object.",
                'Map attributes to values, such as {"colour": "red"}.',
            )
        conditions = sorted(self._parse_conditions(document, path), key=operator.itemgetter(0))
        return Filter(
            tuple(conditions),
            self._negated(document["not"], f"{path}.not", depth) if "not" in document else (),
            self._alternatives(document["any"], f"{path}.any", depth) if "any" in document else (),
        )

    def _negated(self, document: object, path: str, depth: int) -> tuple[Filter, ...]:
        if document == []:
            raise FilterError(
                f"{path} is an empty list, which excludes nothing.", "Leave it out, or add what to exclude."
            )
        if not isinstance(document, list):
            return self._filters({path: document}, depth, "which excludes every item", "what to exclude")
        return self._filters(_elements(document, path), depth, "which excludes every item", "what to exclude")

    def _alternatives(self, document: object, path: str, depth: int) -> tuple[Filter, ...]:
        if not isinstance(document, list):
            raise FilterError(
                f"{path} is {_format(document)}, not a list of filters.",
                'List filters of which one must match, such as [{"colour": "red"}, {"price": {"lt": 20}}].',
            )
        if not document:
            raise FilterError(f"{path} is an empty list, which no item matches.", "Add filters, or leave it out.")
        return self._filters(_elements(document, path), depth, "which matches every item", "a condition")

    def _filters(self, documents: Mapping[str, object], depth: int, effect: str, missing: str) -> tuple[Filter, ...]:
        """Parses filters by their paths; refuses an empty one. Returns each once, in the canonical order."""
        found = {self._filter(document, path, depth + 1): path for path, document in documents.items()}
        if Filter() in found:
            raise FilterError(f"{found[Filter()]} is {{}}, {effect}.", f"Leave it out, or add {missing}.")
        return tuple(sorted(found, key=lambda one: json.dumps(one.document, sort_keys=True)))

    def _parse_conditions(self, document: Mapping[object, object], path: str) -> Iterator[tuple[str, Condition]]:
        for name, expected in document.items():
            if name in _RESERVED:
                continue
            if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_LENGTH:
                raise FilterError(
                    f"{path} has the attribute name {_format(name)}.",
                    f"Use a string of 1 to {MAX_NAME_LENGTH} characters.",
                )
            self._conditions += 1
            if self._conditions > MAX_CONDITIONS:
                raise FilterError(
                    f"{path}.{name} exceeds the limit of {MAX_CONDITIONS} conditions.",
                    "Use fewer, or a list of values for one attribute.",
                )
            yield name, self._condition(expected, f"{path}.{name}")

    def _condition(self, expected: object, path: str) -> Condition:
        if isinstance(expected, dict):
            return self._operators(expected, path)
        if not isinstance(expected, list):
            return AnyOf(frozenset([self._value(expected, path)]))
        if not expected:
            raise FilterError(
                f"{path} is an empty list, which no item matches.", "Add a value, or leave the attribute out."
            )
        return AnyOf(self._values_in(expected, path))

    def _values_in(self, values: list[object], path: str) -> frozenset[TypedValue]:
        return frozenset(self._value(value, f"{path}[{i}]") for i, value in enumerate(values))

    def _operators(self, expected: Mapping[object, object], path: str) -> Condition:
        if not expected:
            raise FilterError(f"{path} is an empty object.", f"Use one of {', '.join(_OPERATORS)}.")
        for key in expected:
            if key not in _OPERATORS:
                raise FilterError(
                    f"{path} has the unknown operator {_format(key)}.",
                    f"Use one of {', '.join(_OPERATORS)}; attributes are not nested.",
                )
        for key in ("all", "exists"):
            if key in expected and len(expected) > 1:
                raise FilterError(f"{path} combines `{key}` with other operators.", _ALONE[key])
        if "all" in expected:
            return self._all(expected["all"], f"{path}.all")
        if "exists" not in expected:
            return self._range(cast(Mapping[Comparison, object], expected), path)
        if not isinstance(expected["exists"], bool):
            raise FilterError(f"{path}.exists is {_format(expected['exists'])}.", "Use true or false.")
        return Exists(expected["exists"])

    def _all(self, expected: object, path: str) -> AllOf | AnyOf:
        if not isinstance(expected, list):
            raise FilterError(
                f"{path} is {_format(expected)}, not a list.", 'List the values, such as {"all": ["S", "M"]}.'
            )
        if not expected:
            raise FilterError(f"{path} is an empty list, which every item matches.", "Add a value, or leave it out.")
        values = self._values_in(expected, path)
        return AllOf(values) if len(values) > 1 else AnyOf(values)

    def _range(self, expected: Mapping[Comparison, object], path: str) -> Range:
        for pair in _BOUND_PAIRS:
            if all(comparison in expected for comparison in pair):
                raise FilterError(f"{path} has both `{pair[0]}` and `{pair[1]}`.", "Keep one of them.")
        bounds = {name: self._value(expected[name], f"{path}.{name}") for name in sorted(expected)}
        for comparison, (kind, bound) in bounds.items():
            if kind == "boolean":
                raise FilterError(
                    f"{path}.{comparison} is {_format(bound)}, which has no order.",
                    "Use a number or a string.",
                )
        kinds = {kind for kind, _ in bounds.values()}
        if len(kinds) > 1:
            mixed = " and ".join(f"{comparison} {_format(bound)}" for comparison, (_, bound) in bounds.items())
            raise FilterError(f"{path} mixes a number and a string: {mixed}.", "Use two numbers or two strings.")
        instants = {name: parse_instant(bound) for name, (_, bound) in bounds.items() if isinstance(bound, str)}
        found = {name: instant for name, instant in instants.items() if instant is not None}
        if found and len(found) < len(instants):
            mixed = " and ".join(f"{comparison} {_format(bound)}" for comparison, (_, bound) in bounds.items())
            raise FilterError(f"{path} mixes a date and another text: {mixed}.", _TWO_DATES)
        if found:
            return Range("date", tuple(found.items()))
        return Range(kinds.pop(), tuple((comparison, bound) for comparison, (_, bound) in bounds.items()))

    def _value(self, value: object, path: str) -> TypedValue:
        self._values += 1
        if self._values > MAX_VALUES:
            raise FilterError(f"{path} exceeds the limit of {MAX_VALUES:,} values.", "Use fewer, or a range.")
        if value is None:
            raise FilterError(f"{path} is null.", 'To find items without the attribute use {"exists": false}.')
        if not isinstance(value, str | int | float):
            raise FilterError(f"{path} is {_format(value)}.", "Use a string, a number, true or false.")
        if isinstance(value, str):
            if len(value) > MAX_TEXT_LENGTH:
                raise FilterError(
                    f"{path} is a string of {len(value):,} characters: {_format(value)}.",
                    f"Use at most {MAX_TEXT_LENGTH:,}.",
                )
        elif isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise FilterError(
                f"{path} is {_format(value)}, too large to compare exactly.",
                f"Use at most {MAX_INTEGER}, or store such numbers as strings.",
            )
        elif not math.isfinite(value):
            raise FilterError(f"{path} is {_format(value)}.", "Use a finite number.")
        kind = value_type(value)
        return kind, plain_number(cast(float, value)) if kind == "number" else value


def _elements(document: list[object], path: str) -> dict[str, object]:
    """Returns the filters of a list by their paths."""
    if len(document) > MAX_CONDITIONS:
        raise FilterError(
            f"{path} has {len(document):,} filters; the limit is {MAX_CONDITIONS} conditions.",
            "Use fewer, or a list of values for one attribute.",
        )
    return {f"{path}[{i}]": element for i, element in enumerate(document)}


def _format(value: object) -> str:
    """Returns a value as its JSON, shortened for a message."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value, ensure_ascii=False, default=repr).encode(errors="backslashreplace").decode()
    return text if len(text) <= 60 else f"{text[:57]}..."
