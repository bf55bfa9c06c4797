"""Translates filters to Qdrant's, never narrower than `Filter.matches`, which decides about what was found.

Qdrant compares neither texts by their order nor, at the last digit, numbers. So a bound has two translations: one that
holds for at least the values within it, and one for at most these; below an odd number of `not` the second is used.
"""

import math
from collections.abc import Sequence
from typing import Any

from index.gallery.filters import AnyOf, Comparison, Condition, Exists, Filter, Range
from index.gallery.types import Attribute
from index.gallery.vectors.qdrant.nodes import messages
from index.gallery.vectors.qdrant.payload import FIRST, NAMES, field, text_order, token


def translate(filter: Filter | None, *, first: bool = False) -> Any | None:
    """Returns a filter of Qdrant that keeps at least what matches; with `first` only one image of each item."""
    translated = _filter(filter, wider=True) if filter else messages().Filter()
    if first:
        q = messages()
        translated.must.append(q.Condition(field=q.FieldCondition(key=FIRST, match=q.Match(boolean=True))))
    return translated if filter or first else None


def _filter(filter: Filter, *, wider: bool) -> Any:
    q = messages()
    must_not = [_nest(_filter(negated, wider=not wider)) for negated in filter.negated]
    translated = q.Filter(must_not=must_not)
    for name, condition in filter.conditions:
        translated.MergeFrom(_condition(name, condition, wider=wider))  # what it requires is required in addition
    return translated


def _nest(filter: Any) -> Any:
    return messages().Condition(filter=filter)


def _condition(name: str, condition: Condition, *, wider: bool) -> Any:
    q = messages()
    match condition:
        case Exists(wanted):
            has = q.Condition(field=q.FieldCondition(key=NAMES, match=q.Match(keyword=name)))
            return q.Filter(must=[has]) if wanted else q.Filter(must_not=[has])
        case AnyOf(values):
            return q.Filter(must=[_is_any(name, [value for _, value in values])])
        case Range("boolean"):  # the parser accepts no bounds of this type
            return q.Filter(must=[_is_any(name, [True, False])])
        case Range(kind, ()):
            return q.Filter(must=[q.Condition(field=q.FieldCondition(key=field(kind[0], name), is_empty=False))])
        case Range(kind, bounds):
            return _range(field(kind[0], name), name, bounds, wider=wider)


def _is_any(name: str, values: list[Attribute]) -> Any:
    q = messages()
    match = q.Match(keywords=q.RepeatedStrings(strings=sorted({token(value) for value in values})))
    return q.Condition(field=q.FieldCondition(key=field("v", name), match=match))


def _range(path: str, name: str, bounds: Sequence[tuple[Comparison, Attribute]], *, wider: bool) -> Any:
    """Compares with limits on the wider or the narrower side of bounds; the bounds themselves are compared exactly."""
    q = messages()
    translated, limits = q.Filter(), dict[str, float]()
    for comparison, bound in bounds:
        is_lower, equal = comparison in ("gte", "gt"), _is_any(name, [bound])
        limit = _limit(bound, is_lower=is_lower, wider=wider)
        if comparison in ("gte", "lte") and not wider:
            beyond = q.Range(**{comparison: limit})
            within = q.Condition(field=q.FieldCondition(key=path, range=beyond))
            translated.must.append(_nest(q.Filter(should=[within, equal])))
            continue
        if comparison in ("gt", "lt"):
            translated.must_not.append(equal)
        if is_lower:
            limits["gte"] = max(limit, limits.get("gte", limit))
        else:
            limits["lte"] = min(limit, limits.get("lte", limit))
    if limits:  # one condition, which takes Qdrant half the time of two
        translated.must.append(q.Condition(field=q.FieldCondition(key=path, range=q.Range(**limits))))
    return translated


def _limit(bound: Attribute, *, is_lower: bool, wider: bool) -> float:
    # A wider range begins before its lower bound, and ends after its upper one.
    step = -1 if is_lower == wider else 1
    if isinstance(bound, str):
        return float(text_order(bound) + (0 if wider else step))
    # Qdrant parses numbers of 16 digits and more with an error of one unit in the last place.
    return math.nextafter(math.nextafter(bound, step * math.inf), step * math.inf)
