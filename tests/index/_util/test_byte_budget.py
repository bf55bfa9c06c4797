"""Tests of the memory budget: never exceeded, in the order of arrival, released whatever happens."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from index._util import byte_budget
from index._util.byte_budget import ByteBudget, QueueFull


def start(budget: ByteBudget, count: int, entered: list[int], leave: threading.Event) -> threading.Thread:
    """Starts a thread that holds bytes until `leave` is set, and waits until it has them or is waiting for them."""

    def work() -> None:
        with budget.hold(count):
            entered.append(count)
            assert leave.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.05)
    return thread


def test_small_ones_are_admitted_together_and_a_huge_one_alone() -> None:
    budget, entered, leave, leave_huge = ByteBudget(10), list[int](), threading.Event(), threading.Event()
    threads = [start(budget, 3, entered, leave) for _ in range(3)]
    assert entered == [3, 3, 3]
    threads.append(start(budget, 10, entered, leave_huge))
    threads.append(start(budget, 1, entered, leave_huge))
    assert entered == [3, 3, 3], "the small one must not overtake the huge one, though it would fit"
    leave.set()
    time.sleep(0.05)
    assert entered == [3, 3, 3, 10]
    leave_huge.set()
    for thread in threads:
        thread.join(10)
    assert entered == [3, 3, 3, 10, 1]


def test_budget_is_never_exceeded_and_nobody_is_left_waiting() -> None:
    budget, rng, lock = ByteBudget(100), random.Random(0), threading.Lock()
    held = peak = 0

    def work(count: int) -> int:
        nonlocal held, peak
        with budget.hold(count):
            with lock:
                held += count
                peak = max(peak, held)
            time.sleep(0.0005)
            with lock:
                held -= count
        return count

    counts = [rng.choice((1, 5, 30, 60, 100)) for _ in range(400)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, counts)) == counts
    assert 60 < peak <= 100 and held == 0


def test_bytes_are_released_after_an_error() -> None:
    budget = ByteBudget(10)
    with pytest.raises(RuntimeError), budget.hold(10):
        raise RuntimeError
    with budget.hold(10):
        pass


def test_more_than_the_whole_budget_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="11 bytes are more than the whole budget of 10"), ByteBudget(10).hold(11):
        pytest.fail("nobody may hold more than there is")


def test_long_queue_refuses_what_is_large_and_admits_what_is_small() -> None:
    budget, entered, leave = ByteBudget(10, max_waiting=10), list[int](), threading.Event()
    threads = [start(budget, count, entered, leave) for count in (10, 8)]
    with pytest.raises(QueueFull, match="8 bytes are being waited for already"), budget.hold(3):
        pytest.fail("the queue is full")
    threads.append(start(budget, 2, entered, leave))
    leave.set()
    for thread in threads:
        thread.join(10)
    assert entered == [10, 8, 2]
    with budget.hold(10):
        pass


def test_number_of_holders_is_limited_whatever_they_need() -> None:
    budget, entered, leave = ByteBudget(10, max_holders=2), list[int](), threading.Event()
    threads = [start(budget, 1, entered, leave) for _ in range(4)]
    assert len(entered) == 2
    leave.set()
    for thread in threads:
        thread.join(10)
    assert len(entered) == 4


def test_small_ones_do_not_wait_for_large_ones() -> None:
    budget, entered = ByteBudget(100, max_holders=2, small=5), list[int]()
    leave_large, leave_small = threading.Event(), threading.Event()
    threads = [start(budget, 60, entered, leave_large) for _ in range(3)]
    assert entered == [60], "a second large one would take the last place"
    threads.append(start(budget, 5, entered, leave_small))
    assert entered == [60, 5]
    threads += [start(budget, count, entered, leave_small) for count in (4, 3)]
    assert entered == [60, 5, 4], "both places of small ones are taken"
    leave_small.set()
    time.sleep(0.05)
    assert entered == [60, 5, 4, 3]
    leave_large.set()
    for thread in threads:
        thread.join(10)
    assert entered == [60, 5, 4, 3, 60, 60]


def test_small_ones_do_not_wait_for_slow_ones() -> None:
    budget, order, leave = ByteBudget(100, max_holders=2, small=5), list[str](), threading.Event()

    def work(name: str, slow: bool) -> None:
        with budget.hold(3, slow=slow):
            order.append(name)
            leave.wait(10)

    threads = [threading.Thread(target=work, args=(name, name != "small")) for name in ("slow", "second slow", "small")]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    assert order == ["slow", "small"], "a second slow one would take the last place"
    leave.set()
    for thread in threads:
        thread.join(10)
    assert order == ["slow", "small", "second slow"]


def test_a_large_one_that_fits_next_to_small_ones_never_stops_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_budget, "_OVERTAKE_SECONDS", 0.0)
    budget, entered, leave = ByteBudget(100, max_holders=2, small=5), list[int](), threading.Event()
    threads = [start(budget, count, entered, leave) for count in (90, 90, 5)]
    assert entered == [90, 5], "although the second large one has waited for long"
    leave.set()
    for thread in threads:
        thread.join(10)


def test_small_ones_do_not_wait_while_one_large_one_waits_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_budget, "_OVERTAKE_SECONDS", 0.0)
    budget, entered = ByteBudget(100, max_holders=2, small=5), list[int]()
    leave_first, leave = threading.Event(), threading.Event()
    threads = [start(budget, 92, entered, leave_first), start(budget, 91, entered, leave)]
    threads.append(start(budget, 5, entered, leave_first))
    assert entered == [92, 5], "the second large one has no room next to the first, with or without the small one"
    leave_first.set()
    time.sleep(0.05)
    assert entered == [92, 5, 91]
    leave.set()
    for thread in threads:
        thread.join(10)


def test_a_large_one_is_not_overtaken_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_budget, "_OVERTAKE_SECONDS", 0.2)
    budget, entered = ByteBudget(100, max_holders=4, small=30), list[int]()
    leaving = [threading.Event() for _ in range(4)]
    threads = [start(budget, 30, entered, leaving[0]), start(budget, 90, entered, leaving[1])]
    threads.append(start(budget, 29, entered, leaving[2]))
    assert entered == [30, 29], "the large one has not waited long"
    time.sleep(0.3)
    threads.append(start(budget, 28, entered, leaving[3]))
    leaving[0].set()
    leaving[2].set()
    time.sleep(0.05)
    assert entered == [30, 29, 90], "now it is its turn"
    leaving[1].set()
    leaving[3].set()
    for thread in threads:
        thread.join(10)
    assert entered == [30, 29, 90, 28]
