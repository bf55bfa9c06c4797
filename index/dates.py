"""Dates in ISO 8601 as instants: whole microseconds since 1970, in UTC."""

import re
from datetime import UTC, datetime, timedelta

_DATE = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
    r"(?:[T ](?:[01][0-9]|2[0-3]):[0-9]{2}(?::[0-9]{2}(?:\.[0-9]{1,9})?)?(?:Z|[+-][0-9]{2}(?::?[0-9]{2})?)?)?"
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_FIRST, _LAST = ((limit.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND for limit in (datetime.min, datetime.max))


def parse_instant(text: str) -> int | None:
    """Returns the instant of a date or a date-time; None for any other text.

    A date is its start in UTC, and a time without an offset is in UTC.
    """
    if not _DATE.fullmatch(text):
        return None
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError:  # such as the 30th of February
        return None
    instant = ((parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)) - _EPOCH) // _MICROSECOND
    return instant if _FIRST <= instant <= _LAST else None  # an offset may lead out of the calendar


def format_instant(instant: int) -> str:
    """Returns the text of an instant in UTC, the same for the same instant: only a date if that is its start."""
    parsed = _EPOCH + instant * _MICROSECOND
    text = parsed.replace(tzinfo=None).isoformat()
    return text.removesuffix("T00:00:00") if text.endswith("T00:00:00") else f"{text}Z"
