"""The deadline that the waits of one request share."""

import threading
from contextvars import copy_context
from math import inf
from time import sleep

from index._util.deadline import deadline, seconds_left


def test_without_a_deadline_a_wait_has_its_own_limit() -> None:
    assert seconds_left() == inf
    assert seconds_left(30) == 30


def test_the_sooner_of_two_deadlines_applies_and_the_outer_one_returns() -> None:
    with deadline(100):
        with deadline(1000):
            assert 90 < seconds_left() <= 100
        with deadline(1):
            assert seconds_left(30) <= 1
        assert 90 < seconds_left() <= 100
        assert seconds_left(30) == 30
    assert seconds_left() == inf


def test_nothing_is_left_of_a_deadline_that_has_passed() -> None:
    with deadline(0.001):
        sleep(0.01)
        assert seconds_left(30) == 0


def test_a_thread_that_works_in_the_context_of_a_request_has_its_deadline() -> None:
    left: list[float] = []
    with deadline(1):
        thread = threading.Thread(target=copy_context().run, args=(lambda: left.append(seconds_left()),))
        thread.start()
        thread.join()
    assert left[0] <= 1
