"""Dates in ISO 8601 as instants: whole microseconds since 1970, in UTC."""

import re
from datetime import UTC, datetime, timedelta
from functools import lru_cache

_INSTANT = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
    r"(?:[T ](?:[01][0-9]|2[0-3]):[0-9]{2}(?::[0-9]{2}(?:\.[0-9]{1,9})?)?(?P<zone>Z|[+-][0-9]{2}(?::?[0-9]{2})?)?)?"
)
_DATE_LENGTH = len("2026-11-19")
_MAX_LENGTH = len("2026-11-19T10:00:00.123456789+01:00")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_FIRST, _LAST = ((limit.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND for limit in (datetime.min, datetime.max))


def parse_instant(text: str) -> int | None:
    """Returns the instant of a date or a date-time; None for any other text.

    A date is its start in UTC, and a time without an offset is in UTC.
    """
    return _parse(text) if _DATE_LENGTH <= len(text) <= _MAX_LENGTH else None


@lru_cache(1 << 13)  # rules and the delta compare the same dates again and again
def _parse(text: str) -> int | None:
    if not _INSTANT.fullmatch(text):
        return None
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError:  # such as the 30th of February
        return None
    instant = ((parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)) - _EPOCH) // _MICROSECOND
    return instant if _FIRST <= instant <= _LAST else None  # an offset may lead out of the calendar


def format_instant(instant: int) -> str:
    """Returns the date and time of an instant in UTC, the same text for the same instant."""
    return f"{(_EPOCH + instant * _MICROSECOND).replace(tzinfo=None).isoformat()}Z"


def parse_zoned(text: str) -> int | None:
    """Returns the instant of a date, or of a date-time with an offset; None for any other text."""
    match = _INSTANT.fullmatch(text)
    return parse_instant(text) if match and (match["zone"] or len(text) == _DATE_LENGTH) else None
