"""The memory of a process: its division between the purposes, and the counting of each share."""

import threading

import pytest

from service.memory import Holding, MemoryPlan, Share
from service.settings import Settings

GIB = 2**30


def settings(**values: int) -> Settings:
    return Settings(gallery="none", **values)  # type: ignore[arg-type]


class Full(Exception):
    pass


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_shares_of_all_processes_leave_room_for_the_processes_themselves(workers: int) -> None:
    limit = workers * GIB
    plan = MemoryPlan.from_settings(settings(workers=workers), limit)
    assert workers * (sum(plan) + 250 * 2**20) + (100 * 2**20 if workers > 1 else 0) < limit
    assert sum(plan) > 0.6 * GIB


def test_the_largest_photos_fit_into_the_memory_of_the_compose_file() -> None:
    plan = MemoryPlan.from_settings(settings(), 2 * GIB)
    assert plan.decoding > 20 * 50_000_000, "an AVIF of 50 million pixels"
    assert sum(plan) < 1.6 * GIB


def test_settings_replace_the_shares_and_are_divided_by_the_processes() -> None:
    own = settings(workers=2, max_held_bytes=800_000_000, max_decode_bytes=500_000_000, max_unsent_bytes=200_000_000)
    assert MemoryPlan.from_settings(own, 4 * GIB) == (400_000_000, 250_000_000, 100_000_000)


def test_one_request_of_the_largest_size_always_fits() -> None:
    plan = MemoryPlan.from_settings(settings(max_held_bytes=1, max_unsent_bytes=1), 2 * GIB)
    body, answer = (Share(total, small=0, refuse=Full) for total in (plan.received, plan.answers))
    with body.hold() as held:
        held.add(6 * settings().max_body_bytes)
    with answer.hold() as held:
        held.add(2 * settings().max_answer_bytes)


def test_bytes_are_counted_over_all_requests_and_released() -> None:
    share = Share(1000, small=1000, refuse=Full)
    with share.hold() as first:
        first.add(300)
        first.add(300)
        with share.hold() as second:
            second.add(400)
            with pytest.raises(Full, match=r"Other requests hold 600 bytes already\."):
                second.add(1)
            assert (second.count, share.held) == (400, 1000)
        first.resize(1000)
        first.resize(10)
        assert share.held == 10
    assert share.held == 0


def test_large_requests_leave_a_fourth_for_small_ones() -> None:
    share = Share(1000, small=100, refuse=Full)
    with share.hold() as large, share.hold() as small:
        large.add(750)
        with pytest.raises(Full):
            large.add(1)
        small.add(100)
        with pytest.raises(Full):
            small.add(1)


def test_what_is_already_there_is_counted_even_beyond_the_share() -> None:
    share = Share(1000, small=100, refuse=Full)
    with share.hold() as held, share.hold() as other:
        held.resize(2000, forced=True)
        assert share.held == 2000
        with pytest.raises(Full):
            other.add(1)
        held.resize(500)
        other.add(1)


def test_threads_count_without_losing_a_byte() -> None:
    share = Share(10**9, small=0, refuse=Full)

    def count(held: Holding) -> None:
        for _ in range(5000):
            held.add(1)

    with share.hold() as first, share.hold() as second:
        threads = [threading.Thread(target=count, args=(held,)) for held in (first, second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert share.held == 10_000
