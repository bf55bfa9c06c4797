"""Dates as instants."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from index.dates import format_instant, parse_instant, parse_zoned

NOON = 1_795_089_600_000_000


@pytest.mark.parametrize(
    ("text", "instant"),
    [
        ("2026-11-19T12:00:00Z", NOON),
        ("2026-11-19T12:00", NOON),
        ("2026-11-19 12:00:00", NOON),
        ("2026-11-19T14:00:00+02:00", NOON),
        ("2026-11-19T08:30-0330", NOON),
        ("2026-11-19T13:00+01", NOON),
        ("2026-11-19T12:00:00.000001Z", NOON + 1),
        ("2026-11-19T12:00:00.5Z", NOON + 500_000),
        ("2026-11-19T12:00:00.123456789Z", NOON + 123_456),
        ("2026-11-19", NOON - 12 * 3_600_000_000),
        ("1969-12-31T23:59:59Z", -1_000_000),
    ],
)
def test_dates_are_instants(text: str, instant: int) -> None:
    assert parse_instant(text) == instant


@pytest.mark.parametrize(
    "text",
    [
        "", "soon", "2026", "2026-11", "20261119", "19.11.2026", "2026-02-30", "2026-13-01", "0000-01-01",
        "2026-11-19T24:00", "2026-11-19T12:60", "2026-11-19T12:00:60Z", "2026-11-19T12:00+25:00", "2026-11-19Z",
        "2026-W47-4", "2026-11-19T12", " 2026-11-19", "2026-11-19\n", "२०२६-११-१९", "2026-11-19T12:00:00,5Z",
        "0001-01-01T00:00+01:00", "9999-12-31T23:59-01:00",
    ],
)  # fmt: skip
def test_other_texts_are_no_dates(text: str) -> None:
    assert parse_instant(text) is None


def test_the_text_of_an_instant_is_in_utc() -> None:
    assert format_instant(NOON) == "2026-11-19T12:00:00Z"
    assert format_instant(NOON + 1) == "2026-11-19T12:00:00.000001Z"
    assert format_instant(NOON - 12 * 3_600_000_000) == "2026-11-19T00:00:00Z"


@pytest.mark.parametrize("text", ["2026-11-19T12:00:00Z", "2026-11-19T13:00+01:00", "2026-11-19T12:00:00+00"])
def test_a_time_with_an_offset_is_an_instant_everywhere(text: str) -> None:
    assert parse_zoned(text) == NOON
    assert parse_zoned("2026-11-19") == NOON - 12 * 3_600_000_000
    assert parse_zoned("2026-11-19T12:00:00") is None and parse_zoned("soon") is None


zones = st.integers(-23 * 60, 23 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))


@given(st.datetimes(datetime(1, 1, 3), datetime(9999, 12, 29)), zones)
def test_an_instant_is_read_back_in_any_zone(naive: datetime, zone: timezone) -> None:
    aware = naive.replace(tzinfo=zone)
    instant = parse_instant(aware.isoformat())
    assert instant is not None and parse_instant(format_instant(instant)) == instant
    assert instant == (aware - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
