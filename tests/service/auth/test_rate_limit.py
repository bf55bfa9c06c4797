"""The rate limit: bursts are allowed, more is not, keys do not feel each other. And whom a keyless service answers."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.auth.api_keys import KeyRing
from service.auth.rate_limit import RateLimit
from service.settings import Settings
from tests.service.conftest import problem, serving


def test_a_burst_is_allowed_and_the_next_request_gets_the_time_to_wait() -> None:
    limit = RateLimit(rate=2, burst=3)
    assert [limit.take("a", 100.0) for _ in range(3)] == [0, 0, 0]
    assert limit.take("a", 100.0) == 0.5
    assert limit.take("a", 100.25) == 0.25


def test_a_refused_request_does_not_push_the_next_one_back() -> None:
    limit = RateLimit(rate=2, burst=1)
    limit.take("a", 0.0)
    assert [limit.take("a", 0.25) for _ in range(50)] == [0.25] * 50
    assert limit.take("a", 0.5) == 0


def test_one_key_does_not_use_up_the_tokens_of_another() -> None:
    limit = RateLimit(rate=1, burst=1)
    assert limit.take("a", 0.0) == 0
    assert limit.take("a", 0.0) == 1
    assert limit.take("b", 0.0) == 0


def test_a_rest_earns_a_burst_and_no_more() -> None:
    limit = RateLimit(rate=10, burst=4)
    limit.take("a", 0.0)
    assert sum(limit.take("a", 1e6) == 0 for _ in range(10)) == 4


def test_the_number_of_buckets_is_bounded_and_the_busiest_stay() -> None:
    limit = RateLimit(rate=0.001, burst=1, max_keys=2)
    for now, other in enumerate("bcdefgh"):
        assert limit.take(other, float(now)) == 0
        assert (limit.take("a", float(now)) == 0) is (now == 0)
    assert len(limit._full_at) == 2


@pytest.mark.parametrize(("rate", "burst", "max_keys"), [(0, 1, 1), (-1.0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_a_limit_that_allows_nothing_is_a_mistake(rate: float, burst: int, max_keys: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        RateLimit(rate, burst, max_keys=max_keys)


@given(
    rate=st.floats(0.01, 1000),
    burst=st.integers(1, 50),
    schedule=st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 5)), max_size=200),
)
def test_over_any_schedule_no_more_than_burst_and_rate_are_allowed(
    rate: float, burst: int, schedule: list[tuple[str, float]]
) -> None:
    limit, now = RateLimit(rate, burst), 0.0
    allowed: dict[str, list[float]] = {"a": [], "b": [], "c": []}
    for key, pause in schedule:
        now += pause
        wait = limit.take(key, now)
        if wait == 0:
            allowed[key].append(now)
        else:
            # A client that waits as long as requested, and a thousandth for rounding, gets through.
            assert RateLimit.take(limit, key, now + wait + 0.001) == 0
            now += wait + 0.001
            allowed[key].append(now)
    for moments in allowed.values():
        for first, begin in enumerate(moments):
            for count, end in enumerate(moments[first:], start=1):
                assert count <= burst + rate * (end - begin) + 1e-6


def test_threads_share_one_bucket() -> None:
    limit = RateLimit(rate=0.001, burst=100)
    with ThreadPoolExecutor(8) as pool:
        waits = list(pool.map(lambda _: limit.take("a", 0.0), range(1000)))
    assert waits.count(0.0) == 100


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8000", "[::1]:8000", "localhost", "LocalHost:1"])
def test_without_keys_local_host_names_are_allowed(client: httpx.Client, host: str) -> None:
    assert client.get("/v1/status", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["shop.example.com:8000", "localhost.example.com", "127.0.0.1.example.com", "x", ""])
def test_without_keys_any_other_host_name_is_refused(client: httpx.Client, host: str) -> None:
    body = problem(client.delete("/v1/items/ball-blue", headers={"Host": host}), 421, "host-not-allowed")
    assert repr(host) in body["detail"] and "LOOKALIKE_OPEN=true" in body["remedy"]


def test_with_keys_or_when_open_any_host_name_is_allowed(settings: Settings, tmp_path: Path) -> None:
    key = KeyRing(tmp_path / "keys.json").create("shop", ["search"])
    for change in ({"keys": tmp_path / "keys.json"}, {"open": True}):
        with serving(settings.model_copy(update=change)) as client:
            headers = {"Host": "shop.example.com", "X-API-Key": key}
            assert client.get("/v1/status", headers=headers).status_code == 200
