"""Helpers for tests of the service: blocking work, raw connections, and a slow gallery."""

import socket
import threading
from typing import Any

import httpx
import pytest

from index.gallery import open_gallery
from service.settings import Settings


class Blocker:
    """Work that occupies its thread until it is released."""

    def __init__(self) -> None:
        self.started = threading.Semaphore(0)
        self.released = threading.Event()

    def __call__(self) -> str:
        self.started.release()
        assert self.released.wait(60)
        return "done"


def block_gallery(settings: Settings, monkeypatch: pytest.MonkeyPatch, method: str) -> Blocker:
    """Makes a method of the gallery wait until the blocker is released."""
    gallery_class = class_of_gallery(settings)
    original, blocker = getattr(gallery_class, method), Blocker()

    def wait(self: object, *args: object, **kwargs: object) -> object:
        blocker()
        return original(self, *args, **kwargs)

    monkeypatch.setattr(gallery_class, method, wait)
    return blocker


def class_of_gallery(settings: Settings) -> Any:
    """Returns the class of the gallery that the service opens, to wrap its public methods."""
    gallery = open_gallery(settings.gallery)
    gallery.close()
    return type(gallery)


def connect(client: httpx.Client) -> socket.socket:
    """Opens a raw connection to the service of a client."""
    return socket.create_connection((client.base_url.host, client.base_url.port or 80), timeout=60)


def search_head(length: int) -> bytes:
    """Returns the head of a search whose body is a JPEG of this length."""
    lines = "POST /v1/search HTTP/1.1", "Host: localhost", "Content-Type: image/jpeg", f"Content-Length: {length}"
    return "\r\n".join((*lines, "\r\n")).encode()
