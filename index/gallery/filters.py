"""Filters: conditions on the attributes of items, written as JSON and validated before a search.

    {"category": "mug", "colour": ["red", "blue"], "price": {"gte": 5, "lt": 20}, "not": {"brand": "Acme"}}

All conditions must hold; a list holds if one of its values does. `not` takes a filter, or a list of filters, of which
none may match: a plain complement, so an item without the attribute passes. Equality is typed: 1 equals 1.0, but not
true or "1".
"""

import json
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

from index.errors import LookalikeError
from index.items import MAX_INTEGER, MAX_NAME_LENGTH, MAX_TEXT_LENGTH, Attribute

MAX_DEPTH = 8
MAX_CONDITIONS = 64
MAX_VALUES = 1_000

ValueType = Literal["number", "text", "boolean"]
Comparison = Literal["gte", "gt", "lte", "lt"]
_COMPARE: dict[Comparison, Callable[[Any, Any], bool]] = {
    "gte": operator.ge,
    "gt": operator.gt,
    "lte": operator.le,
    "lt": operator.lt,
}
_OPERATORS = (*_COMPARE, "exists")
_BOUND_PAIRS: tuple[tuple[Comparison, Comparison], ...] = (("gte", "gt"), ("lte", "lt"))


class FilterError(LookalikeError):
    """An invalid filter: the place within it, the value there, and what to write instead."""

    kind = "filter"


def value_type(value: Attribute) -> ValueType:
    """Returns the type of a value; only values of one type are compared."""
    if isinstance(value, bool):
        return "boolean"
    return "text" if isinstance(value, str) else "number"


def plain_number(number: float) -> int | float:
    """Returns the canonical form of a number: 5 for 5.0, and 0 for -0.0."""
    return int(number) if abs(number) <= MAX_INTEGER and number == int(number) else number


@dataclass(frozen=True)
class AnyOf:
    """The attribute is one of these values; each is stored with its type, because True == 1 in Python."""

    values: frozenset[tuple[ValueType, Attribute]]

    def matches(self, value: Attribute | None) -> bool:
        return value is not None and (value_type(value), value) in self.values

    @property
    def length(self) -> int:
        return sum(len(str(value)) for _, value in self.values)

    @property
    def document(self) -> object:
        values = [value for _, value in sorted(self.values, key=operator.itemgetter(0, 1))]
        return values[0] if len(values) == 1 else values


@dataclass(frozen=True)
class Range:
    """The attribute has the type of the bounds and is within them; strings are compared by code point."""

    kind: ValueType
    bounds: tuple[tuple[Comparison, Attribute], ...]

    def matches(self, value: Attribute | None) -> bool:
        if value is None or value_type(value) != self.kind:
            return False
        return all(_COMPARE[comparison](value, bound) for comparison, bound in self.bounds)

    @property
    def length(self) -> int:
        return sum(len(str(bound)) for _, bound in self.bounds)

    @property
    def document(self) -> object:
        return dict(self.bounds)


@dataclass(frozen=True)
class Exists:
    """The item has the attribute or, if `wanted` is false, does not have it."""

    wanted: bool
    length: ClassVar[int] = 0

    def matches(self, value: Attribute | None) -> bool:
        return (value is not None) == self.wanted

    @property
    def document(self) -> object:
        return {"exists": self.wanted}


Condition = AnyOf | Range | Exists


@dataclass(frozen=True)
class Filter:
    """Conditions that must all hold, and filters that must not match; filters that mean the same are equal."""

    conditions: tuple[tuple[str, Condition], ...] = ()
    negated: tuple["Filter", ...] = ()

    @classmethod
    def parse(cls, document: object) -> "Filter":
        """Parses decoded JSON; `{}` matches everything. Raises FilterError."""
        return _Parser().filter(document, "filter", depth=0)

    def matches(self, attributes: Mapping[str, Attribute]) -> bool:
        """Returns whether an item with these attributes passes: the reference that every engine must agree with."""
        if not all(condition.matches(attributes.get(name)) for name, condition in self.conditions):
            return False
        return not any(negated.matches(attributes) for negated in self.negated)

    @property
    def length(self) -> int:
        """The number of characters of all texts."""
        own = sum(len(name) + condition.length for name, condition in self.conditions)
        return own + sum(negated.length for negated in self.negated)

    @property
    def document(self) -> dict[str, object]:
        """The canonical JSON of the filter, which parses to an equal filter."""
        document: dict[str, object] = {name: condition.document for name, condition in self.conditions}
        if self.negated:
            negated = [negated.document for negated in self.negated]
            document["not"] = negated[0] if len(negated) == 1 else negated
        return document


class _Parser:
    """Parses one filter; counts conditions and values, because the limits apply to the filter as a whole."""

    def __init__(self) -> None:
        self._conditions = 0
        self._values = 0

    def filter(self, document: object, path: str, depth: int) -> Filter:
        if depth > MAX_DEPTH:
            raise FilterError(f"{path} is nested deeper than {MAX_DEPTH} times.", "Use fewer `not` inside `not`.")
        if not isinstance(document, dict):
            raise FilterError(
                f"{path} is {_format(document)}, not an object.",
                'Map attributes to values, such as {"colour": "red"}.',
            )
        conditions = sorted(self._parse_conditions(document, path), key=operator.itemgetter(0))
        return Filter(
            tuple(conditions), self._negated(document["not"], f"{path}.not", depth) if "not" in document else ()
        )

    def _negated(self, document: object, path: str, depth: int) -> tuple[Filter, ...]:
        if document == []:
            raise FilterError(
                f"{path} is an empty list, which excludes nothing.", "Leave it out, or add what to exclude."
            )
        if isinstance(document, list) and len(document) > MAX_CONDITIONS:
            raise FilterError(
                f"{path} has {len(document):,} filters; the limit is {MAX_CONDITIONS} conditions.",
                "Use fewer, or a list of values for one attribute.",
            )
        documents = (
            {f"{path}[{i}]": element for i, element in enumerate(document)}
            if isinstance(document, list)
            else {path: document}
        )
        negated = {self.filter(inner, inner_path, depth + 1): inner_path for inner_path, inner in documents.items()}
        if Filter() in negated:
            raise FilterError(
                f"{negated[Filter()]} is {{}}, which excludes every item.", "Leave it out, or add what to exclude."
            )
        return tuple(sorted(negated, key=lambda inner: json.dumps(inner.document, sort_keys=True)))

    def _parse_conditions(self, document: Mapping[object, object], path: str) -> Iterator[tuple[str, Condition]]:
        for name, expected in document.items():
            if name == "not":
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
        return AnyOf(frozenset(self._value(value, f"{path}[{i}]") for i, value in enumerate(expected)))

    def _operators(self, expected: Mapping[object, object], path: str) -> Condition:
        if not expected:
            raise FilterError(f"{path} is an empty object.", f"Use one of {', '.join(_OPERATORS)}.")
        for key in expected:
            if key not in _OPERATORS:
                raise FilterError(
                    f"{path} has the unknown operator {_format(key)}.",
                    f"Use one of {', '.join(_OPERATORS)}; attributes are not nested.",
                )
        if "exists" not in expected:
            return self._range(cast(Mapping[Comparison, object], expected), path)
        if len(expected) > 1:
            raise FilterError(
                f"{path} combines `exists` with other operators.",
                "Use it alone: a range implies it.",
            )
        if not isinstance(expected["exists"], bool):
            raise FilterError(f"{path}.exists is {_format(expected['exists'])}.", "Use true or false.")
        return Exists(expected["exists"])

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
        return Range(kinds.pop(), tuple((comparison, bound) for comparison, (_, bound) in bounds.items()))

    def _value(self, value: object, path: str) -> tuple[ValueType, Attribute]:
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


def _format(value: object) -> str:
    """Returns a value as its JSON, shortened for a message."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value, ensure_ascii=False, default=repr).encode(errors="backslashreplace").decode()
    return text if len(text) <= 60 else f"{text[:57]}..."
