"""Too many connections: those that send nothing make room for those that do."""

import socket
import threading
import time
from contextlib import ExitStack, suppress
from typing import Any

import httpx
import pytest

from service.server.connections import ConnectionLimits, ConnectionTable, max_connections
from service.settings import Settings
from tests.service.conftest import serving
from tests.service.support import connect
from tests.support.tiny_gallery import tiny_photo

HEAD = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


class FakeConnection:
    """Records that it was closed."""

    def __init__(self) -> None:
        self.is_open = True

    def abort(self) -> None:
        self.is_open = False


def table_of(total: int, per_client: int) -> tuple[ConnectionTable, Any]:
    table = ConnectionTable(ConnectionLimits(total, per_client, head_seconds=15))

    def open_connection(client: str) -> FakeConnection:
        connection = FakeConnection()
        table.add(connection, client)
        return connection

    return table, open_connection


def states(*connections: FakeConnection) -> list[bool]:
    return [connection.is_open for connection in connections]


def test_the_oldest_connection_without_a_head_makes_room() -> None:
    table, open_connection = table_of(3, 3)
    used, first, second = (open_connection(name) for name in "abc")
    table.mark_working(used)
    third = open_connection("d")
    assert states(used, first, second, third) == [True, False, True, True]
    fourth = open_connection("d")
    assert states(used, second, third, fourth) == [True, False, True, True]


def test_a_connection_between_two_requests_makes_room_only_when_no_other_can() -> None:
    table, open_connection = table_of(2, 2)
    kept, silent = open_connection("a"), open_connection("b")
    table.mark_working(kept)
    table.mark_waiting(kept)
    assert states(kept, silent, open_connection("c")) == [True, False, True]
    table, open_connection = table_of(2, 2)
    kept, used = open_connection("a"), open_connection("b")
    for connection in (kept, used):
        table.mark_working(connection)
    table.mark_waiting(kept)
    assert states(kept, used, open_connection("c")) == [False, True, True]


def test_a_connection_is_refused_while_all_others_are_in_use() -> None:
    table, open_connection = table_of(2, 2)
    used = [open_connection(name) for name in "ab"]
    for connection in used:
        table.mark_working(connection)
    assert states(*used, open_connection("c")) == [True, True, False]
    table.remove(used[0])
    assert states(open_connection("c")) == [True]


def test_an_address_has_its_own_limit_and_makes_room_for_itself_only() -> None:
    table, open_connection = table_of(10, 2)
    other = open_connection("other")
    first, second, third = (open_connection("one") for _ in range(3))
    assert states(other, first, second, third) == [True, False, True, True]
    for connection in (second, third):
        table.mark_working(connection)
    assert states(open_connection("one"), second, third, other) == [False, True, True, True]


@pytest.mark.parametrize(("files", "limit"), [(1024, 896), (100, 16)])
def test_open_files_are_reserved_for_the_gallery(monkeypatch: pytest.MonkeyPatch, files: int, limit: int) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda kind: (files, files))
    assert max_connections() == limit


def test_one_address_gets_half_of_the_connections_unless_configured(settings: Settings) -> None:
    def limits(**values: int) -> ConnectionLimits:
        return ConnectionLimits.from_settings(settings.model_copy(update={"max_connections": 100, **values}))

    assert limits().max_per_client == 50
    assert limits(max_client_connections=80).max_per_client == 80
    assert limits(max_connections=1).max_per_client == 1


def test_requests_are_answered_while_others_connect_and_send_one_byte(settings: Settings) -> None:
    """More than ten times the limit of connections are opened in the meantime."""
    is_ended, opened = threading.Event(), 0

    def flood(client: httpx.Client) -> None:
        nonlocal opened
        with ExitStack() as connections:
            while not is_ended.is_set():
                connection = connections.enter_context(connect(client))
                opened += 1
                with suppress(ConnectionError):  # closed for others
                    connection.sendall(b"G")
                time.sleep(0.005)

    few = {"max_connections": 20, "max_client_connections": 20}
    with serving(settings.model_copy(update=few)) as client:
        attacker = threading.Thread(target=flood, args=(client,))
        attacker.start()
        try:
            address, photo = client.base_url, {"image": tiny_photo(2, 5)}
            while opened < 220:
                answer = httpx.post(f"{address}/v1/search?limit=1", files=photo)  # each on a connection of its own
                assert answer.json()["items"][0]["id"] == "ball-blue"
        finally:
            is_ended.set()
            attacker.join()


def test_a_request_that_is_being_sent_is_not_cut_off_by_new_connections(settings: Settings) -> None:
    few = {"max_connections": 4, "max_client_connections": 3}
    with serving(settings.model_copy(update=few)) as client, ExitStack() as opened, connect(client) as slow:
        photo = tiny_photo(2, 5)
        head = b"POST /v1/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/jpeg\r\n"
        slow.sendall(head + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(photo))
        assert slow.recv(100).startswith(b"HTTP/1.1 100")
        silent: list[socket.socket] = [opened.enter_context(connect(client)) for _ in range(8)]
        assert silent[0].recv(1) == b"", "the oldest of them was closed"
        slow.sendall(photo)
        assert slow.recv(100_000).startswith(b"HTTP/1.1 200")
