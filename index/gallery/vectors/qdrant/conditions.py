"""Translates filters to Qdrant's, never narrower than `Filter.matches`, which decides about what was found.

Qdrant compares neither texts by their order nor, at the last digit, numbers. So a bound has two translations: one that
holds for at least the values within it, and one for at most these; below an odd number of `not` the second is used.

Several values of an attribute are a list, of which one element must be within the bounds. What a condition excludes
besides, such as the bound itself, it excludes of items with one value only.
"""

import math
from collections.abc import Iterable
from typing import Any, Literal

from index.gallery.filters import AllOf, AnyOf, Condition, Exists, Filter, Range
from index.gallery.vectors.qdrant.nodes import messages
from index.gallery.vectors.qdrant.payload import FIRST, LISTS, NAMES, field, seconds, text_order, token
from index.items import Value

_Mode = Literal["wider", "narrower", "nearest"]
"""How the bounds of ranges are translated; `nearest` compares numbers as they are, which may be wrong for a value that
equals a bound in the first 15 digits."""
_OPPOSITE: dict[_Mode, _Mode] = {"wider": "narrower", "narrower": "wider", "nearest": "nearest"}


def translate(filter: Filter | None) -> Any | None:
    """Returns a filter of Qdrant that keeps at least what matches."""
    return _filter(filter, "wider") if filter else None


def translate_for_counting(filter: Filter | None) -> Any:
    """Returns a filter of Qdrant that keeps one image of each item that matches, where nothing checks each of them."""
    q = messages()
    translated = _filter(filter, "nearest") if filter else q.Filter()
    translated.must.append(q.Condition(field=q.FieldCondition(key=FIRST, match=q.Match(boolean=True))))
    return translated


def _filter(filter: Filter, mode: _Mode) -> Any:
    q = messages()
    must_not = [_nest(_filter(negated, _OPPOSITE[mode])) for negated in filter.negated]
    translated = q.Filter(must_not=must_not)
    for name, condition in filter.conditions:
        translated.MergeFrom(_condition(name, condition, mode))  # what it requires is required in addition
    if filter.alternatives:
        translated.must.append(_nest(q.Filter(should=[_nest(_filter(one, mode)) for one in filter.alternatives])))
    return translated


def _nest(filter: Any) -> Any:
    return messages().Condition(filter=filter)


def _condition(name: str, condition: Condition, mode: _Mode) -> Any:
    q = messages()
    match condition:
        case Exists(wanted):
            has = _has_keyword(NAMES, name)
            return q.Filter(must=[has]) if wanted else q.Filter(must_not=[has])
        case AnyOf(values):
            return q.Filter(must=[_is_any(name, [value for _, value in values])])
        case AllOf(values):
            return q.Filter(must=[_is_any(name, [value]) for _, value in values])
        case Range("boolean"):  # the parser accepts no bounds of this type
            return q.Filter(must=[_is_any(name, [True, False])])
        case Range(kind, ()):
            return q.Filter(must=[q.Condition(field=q.FieldCondition(key=field(kind[0], name), is_empty=False))])
        case Range():
            return _narrower_range(name, condition) if mode == "narrower" else _wider_range(name, condition, mode)


def _has_keyword(path: str, keyword: str) -> Any:
    q = messages()
    return q.Condition(field=q.FieldCondition(key=path, match=q.Match(keyword=keyword)))


def _is_any(name: str, values: Iterable[Value]) -> Any:
    q = messages()
    match = q.Match(keywords=q.RepeatedStrings(strings=sorted({token(value) for value in values})))
    return q.Condition(field=q.FieldCondition(key=field("v", name), match=match))


def _wider_range(name: str, condition: Range, mode: _Mode) -> Any:
    q = messages()
    if mode == "nearest" and condition.kind != "text":
        limits = {comparison: _number(condition, bound) for comparison, bound in condition.bounds}
        return q.Filter(must=[_within(name, condition, limits)])
    limits = {}
    for comparison, bound in condition.bounds:
        is_lower = comparison in ("gte", "gt")
        limits["gte" if is_lower else "lte"] = _limit(condition, bound, is_lower=is_lower, wider=True)
    excluded = [
        _nest(q.Filter(must=[_is_any(name, [bound])], must_not=[_has_keyword(LISTS, name)]))
        for comparison, bound in condition.bounds
        if comparison in ("gt", "lt") and condition.kind != "date"
    ]
    return q.Filter(must=[_within(name, condition, limits)], must_not=excluded)


def _narrower_range(name: str, condition: Range) -> Any:
    """Accepts values within limits on the inner side of the bounds, and bounds that are within the range themselves."""
    q = messages()
    limits = {}
    for comparison, bound in condition.bounds:
        is_lower = comparison in ("gte", "gt")
        limits["gte" if is_lower else "lte"] = _limit(condition, bound, is_lower=is_lower, wider=False)
    accepted = [_within(name, condition, limits)]
    included = [bound for _, bound in condition.bounds if condition.matches(bound)]
    if included:
        accepted.append(_is_any(name, included))
    return q.Filter(must=[_nest(q.Filter(should=accepted))])


def _within(name: str, condition: Range, limits: dict[Any, float]) -> Any:
    q = messages()
    # One condition, which takes Qdrant half the time of two, and which one element of a list must fulfil.
    return q.Condition(field=q.FieldCondition(key=field(condition.kind[0], name), range=q.Range(**limits)))


def _number(condition: Range, bound: Any) -> float:
    return seconds(bound) if condition.kind == "date" else float(bound)


def _limit(condition: Range, bound: Any, *, is_lower: bool, wider: bool) -> float:
    # A wider range begins before its lower bound, and ends after its upper one.
    step = -1 if is_lower == wider else 1
    if condition.kind == "text":
        return float(text_order(bound) + (0 if wider else step))
    # Qdrant parses numbers of 16 digits and more with an error of one unit in the last place.
    number = _number(condition, bound)
    return math.nextafter(math.nextafter(number, step * math.inf), step * math.inf)
