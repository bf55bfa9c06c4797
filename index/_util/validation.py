"""Formats pydantic's errors for users: what is wrong with which entry, and a similar known name."""

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel

_SHOWN_LENGTH = 80
"""Characters of a value or a name that a message shows."""
_PHRASES = {
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "multiple_of": "must be a multiple of {multiple_of}",
    "finite_number": "must be a finite number",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must have at least {min_length} character(s)",
    "string_pattern_mismatch": "must match the pattern {pattern}",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
    "json_invalid": "is not JSON: {error}",
    "too_short": "must have at least {min_length} entries",
    "attribute_type": "must be a text, a number, true, false or a list of them",
    "value_type": "must be a text, a number, true or false",
    "union_tag_invalid": "must be one of {expected_tags}",
}
"""By the type of an error; the braces are filled with its context."""
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "decimal": "a number",
    "bool": "true or false",
    "string": "a text",
    "bytes": "bytes",
    "list": "a list",
    "tuple": "a list",
    "set": "a list",
    "frozen_set": "a list",
    "dict": "an object",
    "model": "an object",
    "dataclass": "an object",
    "date": "a date",
    "datetime": "a date and time",
    "path": "a path",
}
"""What an error of the type `<key>_type`, `<key>_parsing` and the like asked for."""


def explain_errors(
    errors: Sequence[Mapping[str, Any]], known: type[BaseModel] | Collection[str] = (), *, prefix: str = ""
) -> list[str]:
    """Returns a clause for each of pydantic's `errors()`, such as `epochs must be at least 1 (got 0)`.

    Unknown names are compared with those that are known, or with the fields of the model that was validated.
    """
    return [_explain(error, known, prefix) for error in errors]


def suggest(name: str, known: Collection[str]) -> str:
    """Returns ` (did you mean ...?)` when a known name is close, else an empty string."""
    close = difflib.get_close_matches(name[:_SHOWN_LENGTH], list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def format_value(value: object) -> str:
    """Returns a value as a message shows it; a large one only by its kind."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, str | bytes) and len(value) > _SHOWN_LENGTH:
        return f"{value[:_SHOWN_LENGTH]!r}..."
    text = repr(value)
    return text if len(text) <= 2 * _SHOWN_LENGTH else f"{text[:_SHOWN_LENGTH]}..."


def _explain(error: Mapping[str, Any], known: type[BaseModel] | Collection[str], prefix: str) -> str:
    location, kind = error["loc"], error["type"]
    place = prefix + _format_place(location)
    if kind == "extra_forbidden":
        names = _field_names(known, location[:-1]) if isinstance(known, type) else known
        return f"{place} is unknown{suggest(str(location[-1]), names)}"
    if kind == "missing":
        return f"{place} is missing"
    phrase = _phrase(kind, error.get("ctx", {}))
    if phrase is None:  # a message of our own, or one that pydantic adds later
        message = error["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        return f"{place}: {message}{_got(error)}" if place else message
    return f"{place or 'The document'} {phrase}{'' if kind == 'json_invalid' else _got(error)}"


def _phrase(kind: str, context: Mapping[str, Any]) -> str | None:
    if kind == "too_long":
        return f"must have at most {context['max_length']:,} entries"
    if kind in _PHRASES:
        return _PHRASES[kind].format(**{name: _format_bound(value) for name, value in context.items()})
    if kind == "int_from_float":
        return "must be a whole number"
    # Such as `int_parsing`, `bool_type` and `model_attributes_type`.
    subject = next((name for name in sorted(_KINDS, key=len, reverse=True) if kind.startswith(f"{name}_")), None)
    return f"must be {_KINDS[subject]}" if subject else None


def _format_bound(value: object) -> object:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return f"{value:,}" if isinstance(value, int) else value


def _got(error: Mapping[str, Any]) -> str:
    if "input" not in error:
        return ""
    value = error["input"]
    return f" (got {f'{len(value):,}' if error['type'].endswith('too_long') else format_value(value)})"


def _format_place(location: Sequence[int | str]) -> str:
    """Formats the place of an entry, such as `searches[1].limit`."""
    if "attributes" in location:
        end = location.index("attributes") + 2  # what follows names the types that were validated
        location = (*location[:end], *(part for part in location[end:] if isinstance(part, int)))
    parts = (f"[{part}]" if isinstance(part, int) else f".{part[:_SHOWN_LENGTH]}" for part in location)
    return "".join(parts).removeprefix(".")


def _field_names(model: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """Returns the names of the fields at a place within a model."""
    for part in location:
        if isinstance(part, int):
            continue
        found = model.model_fields.get(part)
        inner = next(_models(found.annotation), None) if found else None
        if inner is None:
            return []
        model = inner
    return list(model.model_fields)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)
