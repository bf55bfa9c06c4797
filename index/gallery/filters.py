"""Filters on the attributes of items: what a search may answer, as JSON, checked before anything is searched.

    {"category": "mug", "colour": ["red", "blue"], "price": {"gte": 5, "lt": 20}, "not": {"brand": "Acme"}}

All keys must hold; one value of a list suffices; `not` holds a filter, or a list of them, none of which may match: a
plain complement, so an item that lacks the attribute passes. Equality is typed: 1 equals 1.0, but neither true nor "1".
"""

import json
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from index.errors import LookalikeError
from index.gallery.types import MAX_INTEGER, MAX_NAME_LENGTH, MAX_TEXT_LENGTH, Attribute

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
    """A filter that says nothing sensible: where in it, the value there, and what to write instead."""

    kind = "filter"


def value_type(value: Attribute) -> ValueType:
    """What a value can be compared with."""
    if isinstance(value, bool):
        return "boolean"
    return "text" if isinstance(value, str) else "number"


def plain_number(number: float) -> int | float:
    """The one spelling of a number: 5 for 5.0, and 0 for -0.0."""
    return int(number) if abs(number) <= MAX_INTEGER and number == int(number) else number


@dataclass(frozen=True)
class AnyOf:
    """The attribute is one of these values; each carries its kind, since Python takes True for 1."""

    values: frozenset[tuple[ValueType, Attribute]]

    def matches(self, value: Attribute | None) -> bool:
        return value is not None and (value_type(value), value) in self.values

    @property
    def document(self) -> object:
        values = [value for _, value in sorted(self.values, key=operator.itemgetter(0, 1))]
        return values[0] if len(values) == 1 else values


@dataclass(frozen=True)
class Range:
    """The attribute is of the bounds' kind and within them; texts are compared by code point."""

    kind: ValueType
    bounds: tuple[tuple[Comparison, Attribute], ...]

    def matches(self, value: Attribute | None) -> bool:
        if value is None or value_type(value) != self.kind:
            return False
        return all(_COMPARE[comparison](value, bound) for comparison, bound in self.bounds)

    @property
    def document(self) -> object:
        return dict(self.bounds)


@dataclass(frozen=True)
class Exists:
    """The item has the attribute, or lacks it."""

    wanted: bool

    def matches(self, value: Attribute | None) -> bool:
        return (value is not None) == self.wanted

    @property
    def document(self) -> object:
        return {"exists": self.wanted}


Condition = AnyOf | Range | Exists


@dataclass(frozen=True)
class Filter:
    """Conditions that all hold, and filters that must not. Equal filters are equal keys of a cache."""

    conditions: tuple[tuple[str, Condition], ...] = ()
    negated: tuple["Filter", ...] = ()

    @classmethod
    def parse(cls, document: object) -> "Filter":
        """A filter from decoded JSON; `{}` matches everything. Raises FilterError."""
        return _Parser().filter(document, "filter", depth=0)

    def matches(self, attributes: Mapping[str, Attribute]) -> bool:
        """Whether an item with these attributes passes: the definition that every engine must agree with."""
        if not all(condition.matches(attributes.get(name)) for name, condition in self.conditions):
            return False
        return not any(negated.matches(attributes) for negated in self.negated)

    @property
    def document(self) -> dict[str, object]:
        """The canonical JSON of the filter, which parses to an equal one."""
        document: dict[str, object] = {name: condition.document for name, condition in self.conditions}
        if self.negated:
            negated = [negated.document for negated in self.negated]
            document["not"] = negated[0] if len(negated) == 1 else negated
        return document


class _Parser:
    """Reads one filter; counts what it has read, so that the limits hold for the whole of it."""

    def __init__(self) -> None:
        self._conditions = 0
        self._values = 0

    def filter(self, document: object, path: str, depth: int) -> Filter:
        if depth > MAX_DEPTH:
            raise FilterError(f"{path} is nested deeper than {MAX_DEPTH} times.", "Use fewer `not` inside `not`.")
        if not isinstance(document, dict):
            raise FilterError(
                f"{path} is {_shown(document)}, not an object.",
                'Write attributes and what they must be, such as {"colour": "red"}.',
            )
        conditions = sorted(self._all_conditions(document, path), key=operator.itemgetter(0))
        return Filter(
            tuple(conditions), self._negated(document["not"], f"{path}.not", depth) if "not" in document else ()
        )

    def _negated(self, document: object, path: str, depth: int) -> tuple[Filter, ...]:
        if document == []:
            raise FilterError(
                f"{path} is an empty list, which excludes nothing.", "Leave it out, or say what to exclude."
            )
        if isinstance(document, list) and len(document) > MAX_CONDITIONS:
            raise FilterError(
                f"{path} has {len(document):,} filters, and a filter may have {MAX_CONDITIONS} conditions.",
                "Use fewer, or a list of values for one attribute.",
            )
        paths = (
            {f"{path}[{i}]": one for i, one in enumerate(document)} if isinstance(document, list) else {path: document}
        )
        negated = {self.filter(one, place, depth + 1): place for place, one in paths.items()}
        if Filter() in negated:
            raise FilterError(
                f"{negated[Filter()]} is {{}}, which excludes every item.", "Leave it out, or say what to exclude."
            )
        return tuple(sorted(negated, key=lambda one: json.dumps(one.document, sort_keys=True)))

    def _all_conditions(self, document: Mapping[object, object], path: str) -> Iterator[tuple[str, Condition]]:
        for name, wanted in document.items():
            if name == "not":
                continue
            if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_LENGTH:
                raise FilterError(
                    f"{path} has the attribute name {_shown(name)}.",
                    f"A name is a text of 1 to {MAX_NAME_LENGTH} characters.",
                )
            self._conditions += 1
            if self._conditions > MAX_CONDITIONS:
                raise FilterError(
                    f"{path}.{name} is one more than the {MAX_CONDITIONS} conditions that a filter may have.",
                    "Use fewer, or a list of values for one attribute.",
                )
            yield name, self._condition(wanted, f"{path}.{name}")

    def _condition(self, wanted: object, path: str) -> Condition:
        if isinstance(wanted, dict):
            return self._operators(wanted, path)
        if not isinstance(wanted, list):
            return AnyOf(frozenset([self._value(wanted, path)]))
        if not wanted:
            raise FilterError(
                f"{path} is an empty list, which no item matches.", "Name a value, or leave the attribute out."
            )
        return AnyOf(frozenset(self._value(value, f"{path}[{i}]") for i, value in enumerate(wanted)))

    def _operators(self, wanted: Mapping[object, object], path: str) -> Condition:
        if not wanted:
            raise FilterError(f"{path} is an empty object.", f"Use one of {', '.join(_OPERATORS)}.")
        for key in wanted:
            if key not in _OPERATORS:
                raise FilterError(
                    f"{path} has the unknown operator {_shown(key)}.",
                    f"Known are {', '.join(_OPERATORS)}; attributes are not nested.",
                )
        if "exists" not in wanted:
            return self._range(cast(Mapping[Comparison, object], wanted), path)
        if len(wanted) > 1:
            raise FilterError(
                f"{path} has `exists` beside other operators.", "Use it alone: a range asks for the attribute anyway."
            )
        if not isinstance(wanted["exists"], bool):
            raise FilterError(f"{path}.exists is {_shown(wanted['exists'])}.", "Use true or false.")
        return Exists(wanted["exists"])

    def _range(self, wanted: Mapping[Comparison, object], path: str) -> Range:
        for pair in _BOUND_PAIRS:
            if all(comparison in wanted for comparison in pair):
                raise FilterError(f"{path} has both `{pair[0]}` and `{pair[1]}`.", "Keep one of them.")
        found = {comparison: self._value(wanted[comparison], f"{path}.{comparison}") for comparison in sorted(wanted)}
        for comparison, (kind, bound) in found.items():
            if kind == "boolean":
                raise FilterError(
                    f"{path}.{comparison} is {_shown(bound)}, which has no order.", "Use a number or a text as a bound."
                )
        kinds = {kind for kind, _ in found.values()}
        if len(kinds) > 1:
            said = " and ".join(f"{comparison} {_shown(bound)}" for comparison, (_, bound) in found.items())
            raise FilterError(f"{path} mixes a number and a text: {said}.", "Use two numbers or two texts.")
        return Range(kinds.pop(), tuple((comparison, bound) for comparison, (_, bound) in found.items()))

    def _value(self, value: object, path: str) -> tuple[ValueType, Attribute]:
        self._values += 1
        if self._values > MAX_VALUES:
            raise FilterError(
                f"{path} is one more than the {MAX_VALUES:,} values that a filter may name.", "Use fewer, or a range."
            )
        if value is None:
            raise FilterError(f"{path} is null.", 'To find items without the attribute use {"exists": false}.')
        if not isinstance(value, str | int | float):
            raise FilterError(f"{path} is {_shown(value)}.", "Use a text, a number, true or false.")
        if isinstance(value, str):
            if len(value) > MAX_TEXT_LENGTH:
                raise FilterError(
                    f"{path} is a text of {len(value):,} characters: {_shown(value)}.",
                    f"Attributes have at most {MAX_TEXT_LENGTH:,}.",
                )
        elif isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise FilterError(
                f"{path} is {_shown(value)}, beyond the integers that are told apart.",
                f"Use at most {MAX_INTEGER}, or keep such numbers as texts.",
            )
        elif not math.isfinite(value):
            raise FilterError(f"{path} is {_shown(value)}.", "Use a finite number.")
        kind = value_type(value)
        return kind, plain_number(cast(float, value)) if kind == "number" else value


def _shown(value: object) -> str:
    """A value as the sender wrote it, short enough for a message."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value, ensure_ascii=False, default=repr).encode(errors="backslashreplace").decode()
    return text if len(text) <= 60 else f"{text[:57]}..."
