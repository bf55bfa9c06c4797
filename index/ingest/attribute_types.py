"""Finds attributes whose values have different types: a filter on numbers skips the texts among them."""

from collections.abc import Mapping
from typing import Any

_MAX_WARNINGS = 5
"""Attributes that the warnings name."""
_MAX_EXAMPLE = 40


class AttributeTypes:
    """Counts the types of each attribute's values, with an example of each."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, int]] = {}
        self._examples: dict[tuple[str, str], str] = {}

    def add(self, attributes: Mapping[str, Any]) -> None:
        """Counts the attributes of one row."""
        for name, values in attributes.items():
            counts = self._counts.setdefault(name, {})
            for value in values if isinstance(values, list | tuple) else [values]:
                kind = _kind(value)
                if kind not in counts:
                    self._examples[name, kind] = repr(value)[:_MAX_EXAMPLE]
                counts[kind] = counts.get(kind, 0) + 1

    def warnings(self) -> tuple[str, ...]:
        """Returns a sentence for each attribute of more than one type, with the counts and the rarest example."""
        mixed = [(name, counts) for name, counts in sorted(self._counts.items()) if len(counts) > 1]
        sentences = [self._describe(name, counts) for name, counts in mixed[:_MAX_WARNINGS]]
        if len(mixed) > _MAX_WARNINGS:
            sentences.append(f"{len(mixed) - _MAX_WARNINGS:,} more attributes have mixed types.")
        return tuple(sentences)

    def _describe(self, name: str, counts: Mapping[str, int]) -> str:
        ordered = sorted(counts, key=lambda kind: -counts[kind])
        listed = " and ".join(f"{counts[kind]:,} {kind}{'s' if counts[kind] > 1 else ''}" for kind in ordered)
        example = self._examples[name, ordered[-1]]
        return f"Attribute {name!r} has {listed}, such as {example}: a filter compares values of one type only."


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    return "text" if isinstance(value, str) else "number"
