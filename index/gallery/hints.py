"""Explains why a filter matches nothing: a misspelt attribute, or a text where the items have numbers."""

from itertools import chain

from index.gallery.filters import AllOf, AnyOf, Condition, Exists, Filter, Range, RangeKind
from index.gallery.vectors.view import View

_PLURALS: dict[RangeKind, str] = {"number": "numbers", "text": "texts", "boolean": "true or false"}


def find_mismatches(filter: Filter, view: View) -> list[str]:
    """Returns a sentence for each condition on an attribute, or with a type of value, that no searchable item has.

    Each condition is checked with a few filters of its own, which are as quick as that of a search.
    """
    found = [hint for name, condition in filter.conditions if (hint := _explain(name, condition, view))]
    alternatives = [find_mismatches(one, view) for one in filter.alternatives]
    if all(alternatives):  # one without a mismatch may match
        found += chain.from_iterable(alternatives)
    return list(dict.fromkeys(found))


def _explain(name: str, condition: Condition, view: View) -> str | None:
    wanted = _types(condition)
    if not wanted or any(_has_values(view, name, kind) for kind in wanted):
        return None
    found = [plural for kind, plural in _PLURALS.items() if _has_values(view, name, kind)]
    if not found:
        return f"No searchable item has the attribute {name!r}; the facets list those that exist."
    asked = " or ".join(_PLURALS.get(kind, "dates") for kind in sorted(wanted))
    return f"The filter compares {name!r} with {asked}, but its values are {' and '.join(found)}."


def _types(condition: Condition) -> set[RangeKind]:
    """Returns the types of the values that match a condition."""
    match condition:
        case AnyOf(values) | AllOf(values):
            return {kind for kind, _ in values}
        case Range(kind):
            return {kind}
        case Exists(wanted):
            return set(_PLURALS) if wanted else set()


def _has_values(view: View, name: str, kind: RangeKind) -> bool:
    # A range without bounds matches every value of its type.
    return not all(segment.is_empty() for segment in view.segments(Filter(((name, Range(kind, ())),))))
