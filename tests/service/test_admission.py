"""The admission controller: each kind of work has its own limit, and what exceeds it is refused at once."""

import asyncio
import sqlite3
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import get_args

import pytest

from index._util.deadline import seconds_left
from service.admission import Admission, Lane, Overloaded, Pool, Refusal
from service.memory import MemoryPlan
from service.settings import Settings
from tests.service.conftest import problem, serving
from tests.service.support import Blocker, block_gallery
from tests.support.tiny_gallery import tiny_photo

PHOTO = {"image": tiny_photo(2, 5)}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Counts:
    """Records what the controller reports."""

    def __init__(self) -> None:
        self.refusals: Counter[Refusal] = Counter()
        self.running = 0

    def refused(self, reason: Refusal) -> None:
        self.refusals[reason] += 1

    def working(self, change: int) -> None:
        self.running += change


def limits(**values: float) -> Settings:
    return Settings(gallery="none", **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(("lane", "setting"), [("search", "max_requests"), ("write", "max_writes")])
def test_a_full_lane_refuses_and_leaves_the_other_alone(lane: Lane, setting: str) -> None:
    counts = Counts()
    admission = Admission(limits(**{setting: 2}), counts)
    (other,) = set(get_args(Lane)) - {lane}
    with ExitStack() as places:
        for _ in range(2):
            places.enter_context(admission.place(lane))
        with pytest.raises(Overloaded, match=r"2 .* are running already"):
            admission.check(lane)
        with pytest.raises(Overloaded), admission.place(lane):
            pytest.fail("a full lane has no place")
        admission.check(other)
        assert (admission.working, counts.running) == (2, 2)
    admission.check(lane)
    assert (admission.working, counts.running, counts.refusals) == (0, 0, {lane: 2})


@pytest.mark.anyio
@pytest.mark.parametrize("pool", get_args(Pool))
async def test_a_pool_that_is_stuck_refuses_and_stops_no_other_pool(pool: Pool) -> None:
    counts, blocker = Counts(), Blocker()
    admission = Admission(limits(max_waiting=3, max_reads=3, max_writes=3), counts)
    tasks = [asyncio.create_task(admission.run(pool, blocker)) for _ in range(100)]
    try:
        while not all(task.done() for task in tasks[-50:]):
            await asyncio.sleep(0)
        accepted = [task for task in tasks if not task.done()]
        refused = [task for task in tasks if task.done()]
        assert {type(task.exception()) for task in refused} == {Overloaded}
        assert counts.refusals == {pool: len(refused)}
        for other in set(get_args(Pool)) - {pool}:
            assert await asyncio.wait_for(admission.run(other, lambda: "at once"), 10) == "at once"
    finally:
        blocker.released.set()
    assert await asyncio.gather(*accepted) == ["done"] * len(accepted)
    assert await admission.run(pool, lambda: "free again") == "free again"


@pytest.mark.anyio
async def test_work_gets_its_arguments_and_its_error_reaches_the_caller() -> None:
    admission = Admission(limits(), Counts())
    assert await admission.run("read", sorted, [1, 3, 2], reverse=True) == [3, 2, 1]
    with pytest.raises(ZeroDivisionError):
        await admission.run("read", divmod, 1, 0)


@pytest.mark.anyio
async def test_a_write_that_gets_no_thread_in_time_is_refused_and_one_that_has_begun_is_awaited() -> None:
    counts, blocker, begun = Counts(), Blocker(), asyncio.Event()
    admission, loop, ran = Admission(limits(wait_seconds=0.2), counts), asyncio.get_running_loop(), list[str]()

    def begin() -> str:
        loop.call_soon_threadsafe(begun.set)
        return blocker()

    running = [asyncio.create_task(admission.run("write", begin)) for _ in range(2)]
    await asyncio.wait_for(begun.wait(), 10)
    with pytest.raises(Overloaded, match=r"Other writes have not ended for 0\.2 s"):
        await admission.run("write", ran.append, "waited")
    assert not any(task.done() for task in running)
    blocker.released.set()
    assert await asyncio.gather(*running) == ["done"] * 2
    assert await admission.run("write", lambda: "free again") == "free again"
    assert (ran, counts.refusals) == ([], {"write": 1})


@pytest.mark.anyio
async def test_the_time_that_a_write_waited_for_a_thread_is_not_given_to_its_locks() -> None:
    admission = Admission(limits(wait_seconds=5), Counts())
    blocker, left = Blocker(), list[float]()
    running = [asyncio.create_task(admission.run("write", blocker)) for _ in range(2)]
    waiting = asyncio.create_task(admission.run("write", lambda: left.append(seconds_left())))
    await asyncio.sleep(0.5)
    blocker.released.set()
    await asyncio.gather(*running, waiting)
    assert left[0] < 4.9


def test_writes_of_many_clients_are_refused_by_one_deadline_while_another_process_holds_the_lock(
    settings: Settings,
) -> None:
    database = Path(settings.gallery) / "catalogue.sqlite"
    with serving(settings.model_copy(update={"wait_seconds": 0.5})) as client, ThreadPoolExecutor(8) as threads:
        with closing(sqlite3.connect(database, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            writes = [threads.submit(client.patch, "/v1/items/ball-red", json={"title": "new"}) for _ in range(8)]
            answers = [write.result() for write in writes]
            other.execute("ROLLBACK")
        for answer in answers:
            assert problem(answer, 503, "overloaded") and int(answer.headers["retry-after"]) >= 1
        assert client.patch("/v1/items/ball-red", json={}).status_code == 200


def test_received_bytes_and_answers_are_counted_apart() -> None:
    counts = Counts()
    admission = Admission(
        limits(max_held_bytes=40_000, max_unsent_bytes=30_000, max_body_bytes=1, max_answer_bytes=1), counts
    )
    with admission.received.hold() as body, admission.answers.hold() as answer:
        body.add(40_000)
        answer.add(30_000)
        with pytest.raises(Overloaded) as refused:
            body.add(1)
        assert refused.value.close, "the rest of the body is not read"
        with pytest.raises(Overloaded) as refused:
            answer.add(1)
        assert not refused.value.close
    assert counts.refusals == {"bytes": 1, "answers": 1}


def test_jobs_are_watched_by_a_bounded_number_of_clients() -> None:
    counts = Counts()
    admission = Admission(limits(max_waiting=2), counts)
    with ExitStack() as places:
        for _ in range(2):
            places.enter_context(admission.watch_place())
        with pytest.raises(Overloaded, match="2 watchers of jobs already"):
            places.enter_context(admission.watch_place())
    with admission.watch_place():
        assert counts.refusals == {"watch": 1}


@pytest.mark.anyio
async def test_photos_are_fetched_by_a_few_at_once() -> None:
    counts, released = Counts(), asyncio.Event()
    admission = Admission(limits(max_fetches=2, max_waiting=1), counts)
    running = 0

    async def fetch() -> None:
        nonlocal running
        async with admission.fetch_place():
            running += 1
            await released.wait()

    tasks = [asyncio.create_task(fetch()) for _ in range(5)]
    for _ in range(20):
        await asyncio.sleep(0)
    assert (running, counts.refusals) == (2, {"fetch": 2})
    released.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [type(None)] * 3 + [Overloaded] * 2


def test_a_long_queue_of_photos_is_refused_with_the_time_that_it_takes() -> None:
    counts = Counts()
    admission = Admission(limits(max_waiting=10), counts)
    admission.check_queue(9, 0.5)
    with pytest.raises(Overloaded, match="10 photos to embed are waiting") as refused:
        admission.check_queue(10, 0.5)
    assert refused.value.retry_after == 5
    with pytest.raises(Overloaded) as refused:
        admission.check_queue(10, 0.001)
    assert (refused.value.retry_after, counts.refusals) == (1, {"embed": 2})


def test_listings_wait_for_each_other_and_searches_do_not_wait_for_them(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(settings.model_copy(update={"max_waiting": 2})) as client, ThreadPoolExecutor(8) as threads:
        blocker = block_gallery(settings, monkeypatch, "iter_items")
        try:
            lists = [threads.submit(client.get, "/v1/items") for _ in range(8)]
            assert blocker.started.acquire(timeout=60)
            assert client.post("/v1/search", files=PHOTO).status_code == 200
            refused = 0
            while refused < 5:  # one runs and two wait
                refused = sum(one.done() and one.result().status_code == 503 for one in lists)
        finally:
            blocker.released.set()
        answers = [one.result() for one in lists]
    assert sorted(answer.status_code for answer in answers) == [200] * 3 + [503] * 5
    problem(next(answer for answer in answers if answer.status_code == 503), 503, "overloaded")


def test_writes_that_wait_for_the_store_stop_neither_searches_nor_reads(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(settings.model_copy(update={"max_writes": 6})) as client, ThreadPoolExecutor(12) as threads:
        blocker = block_gallery(settings, monkeypatch, "upsert")
        try:
            writes = [threads.submit(client.patch, "/v1/items/ball-red", json={}) for _ in range(12)]
            refused = 0
            while refused < 6:
                refused = sum(one.done() and one.result().status_code == 503 for one in writes)
            for _ in range(10):
                assert client.post("/v1/search", files=PHOTO).status_code == 200
                assert client.post("/v1/search", json={"item_id": "ball-red"}).status_code == 200
                assert client.get("/v1/items/ball-red").status_code == 200
            assert client.get("/v1/jobs").status_code == client.get("/readyz").status_code == 200
            assert 'lookalike_refused_total{reason="write"} 6.0' in client.get("/metrics").text
        finally:
            blocker.released.set()
        assert sorted(one.result().status_code for one in writes) == [200] * 6 + [503] * 6


def test_memory_for_decoding_is_shared_by_the_processes() -> None:
    assert Admission(limits(max_decode_bytes=1000, workers=4), Counts()).decode_budget.total == 250
    assert Admission(limits(), Counts()).decode_budget.total == MemoryPlan.from_settings(limits()).decoding


@pytest.mark.anyio
async def test_photos_that_would_wait_too_long_for_memory_are_refused() -> None:
    counts, released = Counts(), threading.Event()
    admission = Admission(limits(max_decode_bytes=100), counts)

    def decode(cost: int) -> int:
        with admission.decode_budget.hold(cost):
            assert released.wait(10)
        return cost

    tasks = [asyncio.create_task(admission.run("decode", decode, 100)) for _ in range(12)]
    try:
        while sum(task.done() for task in tasks) < 7:
            await asyncio.sleep(0.01)
        assert {type(task.exception()) for task in tasks if task.done()} == {Overloaded}
        assert counts.refusals == {"decode": 7}
    finally:
        released.set()
    assert await asyncio.gather(*(task for task in tasks if not task.done())) == [100] * 5
