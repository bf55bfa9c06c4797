"""Networks between a replica and its engines that delay every packet, or drop all of them and close nothing."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import NamedTuple

import pytest

from service.client import Client, ServiceError
from tests.support.postgres import run_postgres
from tests.support.processes import lookalike
from tests.support.qdrant import only_in_test_cluster, run_cluster
from tests.support.replicas import Replica, run_replicas
from tests.support.shoppers import photo_of
from tests.support.tcp_proxy import TcpProxy
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import tiny_photo, write_tiny_source

MAX_STALE_SECONDS = 8
CLIENTS = 12
"""More than the threads that search, on a machine with few cores."""


class Shop(NamedTuple):
    replica: Replica
    postgres: TcpProxy
    nodes: list[TcpProxy]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """A replica that reaches PostgreSQL, and three nodes of Qdrant, through proxies."""
    tmp_path = tmp_path_factory.mktemp("shop")
    with ExitStack() as stack:
        cluster = stack.enter_context(run_cluster(tmp_path / "qdrant"))
        server = stack.enter_context(run_postgres())
        nodes = [stack.enter_context(TcpProxy(node.grpc)) for node in cluster.nodes]
        proxy = stack.enter_context(TcpProxy(server.port))
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in nodes)
        gallery = f"{server.url()} qdrant://{hosts}/shop?shards=3&replicas=2&timeout=2"
        arguments = ("--gallery", gallery, "--bundle", make_tiny_bundle(tmp_path / "bundle"))
        done = lookalike("reindex", write_tiny_source(tmp_path / "source"), *arguments)
        assert done.returncode == 0, done.stderr
        address = gallery.replace(f":{server.port}/", f":{proxy.port}/")
        replicas = run_replicas(address, tmp_path / "replicas", 1, max_stale_seconds=MAX_STALE_SECONDS)
        yield Shop(stack.enter_context(replicas)[0], proxy, nodes)


@pytest.fixture
def shop(running: Shop) -> Iterator[Shop]:
    yield running
    for proxy in (running.postgres, *running.nodes):
        proxy.resume()
    eventually(lambda: is_ready(running.replica), "it recovers")
    with Client(running.replica.address, timeout=60) as client:
        client.delete_item("late")


def search(replica: Replica) -> tuple[str, float]:
    """Returns the best item, or the problem, and how old the answer is."""
    with Client(replica.address, retries=0, timeout=60) as client:
        try:
            found = client.search(tiny_photo(0, 0), limit=1)
        except ServiceError as error:
            return error.type, 0.0
    return found.items[0].id, found.stale_seconds


def search_at_once(replica: Replica) -> list[tuple[str, float]]:
    with ThreadPoolExecutor(CLIENTS) as threads:
        return list(threads.map(search, [replica] * CLIENTS))


def eventually(check: Callable[[], bool], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def is_ready(replica: Replica) -> bool:
    return replica.probe("/readyz")[0] == 200


def is_alive(replica: Replica) -> bool:
    return replica.probe("/healthz", timeout=2)[0] == 200


@pytest.mark.slow
def test_a_postgres_that_stops_to_respond_makes_searches_stale_and_then_refused(shop: Shop) -> None:
    assert search(shop.replica) == ("ball-red", 0)
    shop.postgres.hang()
    answers = search_at_once(shop.replica)
    assert {name for name, _ in answers} == {"ball-red"}, "all are answered"
    assert any(age for _, age in answers)
    assert is_alive(shop.replica)
    eventually(lambda: search(shop.replica)[0] == "store-unavailable", "searches are refused after a time")
    eventually(lambda: not is_ready(shop.replica), "/readyz reports it")
    assert {name for name, _ in search_at_once(shop.replica)} == {"store-unavailable"}
    assert is_alive(shop.replica)
    shop.postgres.resume()
    eventually(lambda: is_ready(shop.replica), "it recovers")
    eventually(lambda: search(shop.replica) == ("ball-red", 0), "searches are answered, and are not stale")
    assert set(search_at_once(shop.replica)) == {("ball-red", 0)}
    with Client(shop.replica.address, timeout=60) as client:
        client.put_item("late", images={"front": photo_of(1)})
        assert client.search(photo_of(1), limit=1).items[0].id == "late"


@pytest.mark.slow
@only_in_test_cluster
def test_a_qdrant_that_stops_to_respond_is_reported_and_recovers(shop: Shop) -> None:
    shop.nodes[1].hang()
    assert set(search_at_once(shop.replica)) == {("ball-red", 0)}, "other nodes answer"
    for node in shop.nodes:
        node.hang()
    assert {name for name, _ in search_at_once(shop.replica)} == {"index-unavailable"}
    assert is_alive(shop.replica)
    eventually(lambda: not is_ready(shop.replica), "/readyz reports it")
    with Client(shop.replica.address, retries=0, timeout=60) as client:
        client.put_item("late", images={"front": photo_of(1)})
    for node in shop.nodes:
        node.resume()
    eventually(lambda: is_ready(shop.replica), "it recovers")
    assert set(search_at_once(shop.replica)) == {("ball-red", 0)}
    with Client(shop.replica.address, timeout=60) as client:
        assert client.search(photo_of(1), limit=1).items[0].id == "late"


@pytest.mark.slow
@only_in_test_cluster
def test_delays_make_searches_slower_and_nothing_else(shop: Shop) -> None:
    for proxy in (shop.postgres, *shop.nodes):
        proxy.delay = 0.05
    assert set(search_at_once(shop.replica)) == {("ball-red", 0)}
    with Client(shop.replica.address, timeout=60) as client:
        client.put_item("late", images={"front": photo_of(1)})
        assert client.search(photo_of(1), limit=1).items[0].id == "late"
        client.delete_item("late")
        assert client.search(photo_of(1), limit=1).items[0].id != "late"
    assert is_ready(shop.replica) and is_alive(shop.replica)
