"""Progress without a terminal: a line from time to time."""

import pytest

from index.cli.progress import format_duration, progress_bar


def test_lines_name_the_work_its_rate_and_the_time_left(capfd: pytest.CaptureFixture[str]) -> None:
    with progress_bar("Embedding", interval=0) as update:
        update(100, 1000)
        update(400, 1000)
        update(1, 5, "Mapping the space")
    first, second, third = capfd.readouterr().err.splitlines()
    assert first == "Embedding: 100 of 1,000", "no rate yet: a resumed job starts in the middle"
    assert second.startswith("Embedding: 400 of 1,000 (40%), ") and "/s, about 0:00 left" in second
    assert third == "Mapping the space: 1 of 5"


def test_short_work_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with progress_bar("Embedding") as update:
        for done in range(100):
            update(done, 100)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (754, "12:34"), (3723, "1:02:03")])
def test_durations_are_read_at_a_glance(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
