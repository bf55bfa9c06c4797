"""Translates filters to Qdrant's, never narrower than `Filter.matches`, which decides about what was found.

Qdrant compares neither texts by their order nor, at the last digit, numbers. So a bound has two translations: one that
holds for at least the values within it, and one for at most these; below an odd number of `not` the second is used.
"""

import math
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
    return q.Filter(
        must=[_nest(_condition(name, condition, wider=wider)) for name, condition in filter.conditions],
        must_not=[_nest(_filter(negated, wider=not wider)) for negated in filter.negated],
    )


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
        case Range(kind, bounds):
            # The type of the values is wanted even without a bound.
            typed = q.Condition(field=q.FieldCondition(key=field(kind[0], name), is_empty=False))
            return q.Filter(
                must=[typed, *(_nest(_bound(name, comparison, bound, wider=wider)) for comparison, bound in bounds)]
            )


def _is_any(name: str, values: list[Attribute]) -> Any:
    q = messages()
    match = q.Match(keywords=q.RepeatedStrings(strings=sorted({token(value) for value in values})))
    return q.Condition(field=q.FieldCondition(key=field("v", name), match=match))


def _bound(name: str, comparison: Comparison, bound: Attribute, *, wider: bool) -> Any:
    """Compares with a limit on the wider or the narrower side of the bound; the bound itself is compared exactly."""
    q = messages()
    is_lower = comparison in ("gte", "gt")
    # A wider range begins before its lower bound, and ends after its upper one.
    step = -1 if is_lower == wider else 1
    if isinstance(bound, str):
        kind, limit = "t", float(text_order(bound) + (0 if wider else step))
    else:
        # Qdrant parses numbers of 16 digits and more with an error of one unit in the last place.
        kind, limit = "n", math.nextafter(math.nextafter(bound, step * math.inf), step * math.inf)
    within = q.Condition(
        field=q.FieldCondition(key=field(kind, name), range=q.Range(**{"gte" if is_lower else "lte": limit}))
    )
    equal = _is_any(name, [bound])
    if comparison in ("gt", "lt"):
        return q.Filter(must=[within], must_not=[equal])
    return q.Filter(must=[within]) if wider else q.Filter(should=[within, equal])
