"""A proxy on loopback between a client and a server that delays what it passes on, or stops to."""

import socket
import threading
import time
from contextlib import suppress
from typing import Self

_CHUNK = 1 << 16


class TcpProxy:
    """Passes connections on to a port; `delay` and `hang` apply to open connections and to new ones."""

    def __init__(self, target: int) -> None:
        self._target = target
        self.delay = 0.0
        """Seconds by which each piece of data arrives later, in both directions."""
        self._flowing = threading.Event()
        self._flowing.set()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.close()
        self.resume()
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def hang(self) -> None:
        """Holds all data back, as a network that drops every packet: connections are accepted and never answered."""
        self._flowing.clear()

    def resume(self) -> None:
        self.delay = 0.0
        self._flowing.set()

    def _accept(self) -> None:
        with suppress(OSError):  # the listener is closed at the end
            while True:
                client = self._listener.accept()[0]
                self._sockets.append(client)
                threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        self._flowing.wait()
        try:
            server = socket.create_connection(("127.0.0.1", self._target))
        except OSError:
            client.close()
            return
        self._sockets.append(server)
        threading.Thread(target=self._pass_on, args=(client, server), daemon=True).start()
        self._pass_on(server, client)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(_CHUNK):
                if self.delay:
                    time.sleep(self.delay)
                self._flowing.wait()
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)
