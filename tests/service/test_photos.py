"""The photos of one request: a few at a time, and none after one has failed."""

import asyncio

import pytest

from service.photos import run_together

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_a_few_run_at_the_same_time_and_results_keep_their_order() -> None:
    running = most = 0

    async def work(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001 * (16 - number))
        running -= 1
        return number

    assert await run_together([work(number) for number in range(16)]) == list(range(16))
    assert most == 4
    assert await run_together([work(7)]) == [7]
    assert await run_together([]) == []


async def test_an_error_cancels_the_others_and_is_raised_itself() -> None:
    events: list[str] = []

    async def work(number: int) -> None:
        if number == 2:
            raise ValueError("not a photo")
        try:
            events.append(f"{number} begun")
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            events.append(f"{number} cancelled")
            raise

    with pytest.raises(ValueError, match="not a photo"):
        await run_together([work(number) for number in range(9)])
    begun = {event.split()[0] for event in events if event.endswith("begun")}
    assert begun and {f"{number} cancelled" for number in begun} <= {*events}
    assert len(begun) <= 4, "those that had to wait never begin"


async def test_cancelling_the_request_cancels_its_photos() -> None:
    cancelled: list[int] = []

    async def work(number: int) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(number)
            raise

    task = asyncio.create_task(run_together([work(number) for number in range(6)]))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled == [0, 1, 2, 3]
