"""Clients that attack: images made to break a decoder, and connections that are slow or end early."""

import asyncio
import base64
import json
from contextlib import suppress

from .client import ConnectionBroken, Streams, abandon, encode_request, read_response
from .expectations import ItemHistory, ItemState, content
from .photos import Photo
from .world import Client, Interrupted, World, check_contract
from .writers import IMAGE, ITEM, shared_write

ANSWERS = (200, 201, 413, 415, 422, 503, 507)
"""What a request with any image may be answered with."""


class HostileSender:
    """Searches with hostile images and stores them; the service answers each, and goes on."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._client = Client(world, name)
        self._random = self._client.random
        self._item = f"hostile-{name}"
        self._history = world.expectations.histories[self._item] = ItemHistory(ordered=False)

    async def run(self) -> None:
        actions = [self._search, self._search, self._search_json, self._store]
        while True:
            kind, data = self._world.hostile.choose(self._random)
            try:
                status = await self._random.choice(actions)(data)
            except Interrupted:
                continue
            if status not in ANSWERS:
                self._world.violate("hostile image", f"{kind}, {len(data):,} bytes: {status}")
            await self._world.rest(self._random.uniform(0.05, 0.4))

    async def _search(self, data: bytes) -> int:
        headers = {"Content-Type": self._random.choice(["image/jpeg", "image/png", "image/webp"])}
        return (await self._client.send("hostile", "POST /v1/search", "/v1/search?limit=3", data, headers)).status

    async def _search_json(self, data: bytes) -> int:
        document = {"image": base64.b64encode(data).decode(), "box": [0.1, 0.2, 0.9, 0.8]}
        return (await self._client.send_json("hostile", "POST /v1/search", "/v1/search", document)).status

    async def _store(self, data: bytes) -> int:
        title, attributes = content(self._item, 0)
        path, item = f"/v1/items/{self._item}", {"title": title, "attributes": attributes}
        # Recorded as possible with every image that is sent: some of the mutated ones are good photos.
        self._history.begin(ItemState(0, frozenset()))
        await self._client.send_json("hostile", f"PUT {ITEM}", path, item)
        self._history.begin(ItemState(0, frozenset({("photo", Photo.of(data).digest)})))
        headers = {"Content-Type": "image/jpeg"}
        response = await self._client.send("hostile", f"PUT {IMAGE}", f"{path}/images/photo", data, headers)
        return 200 if response.status == 404 else response.status


class SlowClient:
    """Sends or reads slowly, closes its half of the connection, or leaves in the middle."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._random = world.random(name)
        self._stamp = 1_000_000
        self._name = name

    async def run(self) -> None:
        actions = [self._send_slowly, self._stop_in_head, self._read_slowly, self._half_close, self._leave]
        while True:
            service = self._world.service
            if service.up.is_set():
                with suppress(OSError, EOFError, TimeoutError, ConnectionBroken):
                    streams = await asyncio.open_connection("127.0.0.1", service.port)
                    try:
                        async with asyncio.timeout(20):
                            await self._random.choice(actions)(streams)
                    finally:
                        await abandon(streams, reset=self._random.random() < 0.5)
            await self._world.rest(self._random.uniform(0, 0.3))

    def _search(self) -> bytes:
        photo = self._random.choice(self._world.photos)
        return encode_request("POST", "/v1/search?limit=5", photo.data, {"Content-Type": "image/jpeg"})

    async def _send_slowly(self, streams: Streams) -> None:
        """Sends a search in pieces with pauses, and may give up before the last."""
        reader, writer = streams
        request, kills = self._search(), self._world.service.kills
        piece = len(request) // self._random.randint(3, 12) + 1
        for start in range(0, len(request), piece):
            writer.write(request[start : start + piece])
            await self._pause(0.4)
            if self._random.random() < 0.03:
                return
        with suppress(EOFError, OSError):
            response = await read_response(reader)
            if self._world.service.kills == kills:
                check_contract(self._world, "POST /v1/search", response)

    async def _stop_in_head(self, streams: Streams) -> None:
        """Sends a part of a head; the service closes the connection after some seconds."""
        streams[1].write(self._search()[: self._random.randrange(1, 60)])
        try:
            async with asyncio.timeout(15):
                await streams[0].read()
        except TimeoutError:
            self._world.violate("slow client", "a connection with half a head is kept open")

    async def _read_slowly(self, streams: Streams) -> None:
        """Asks for a long answer several times and reads it in small pieces."""
        reader, writer = streams
        writer.write(encode_request("GET", "/v1/items?limit=1000") * 3)
        for _ in range(self._random.randint(1, 40)):
            if not await reader.read(512):
                return
            await self._pause(0.1)

    async def _half_close(self, streams: Streams) -> None:
        """Closes its half after the request; the service may answer or close the connection."""
        reader, writer = streams
        writer.write(self._search())
        writer.write_eof()
        await reader.read()

    async def _leave(self, streams: Streams) -> None:
        """Sends a write and leaves at once: it is made completely or not at all, now or a little later."""
        item_id, self._stamp = "shared-0", self._stamp + 1
        seed = self._random.randrange(1 << 30)
        document, state = shared_write(self._world, item_id, self._stamp + 1_000_000 * _number(self._name), seed)
        self._world.expectations.histories[item_id].begin(state).end("unknown")
        body, headers = json.dumps(document).encode(), {"Content-Type": "application/json"}
        request = encode_request("PUT", f"/v1/items/{item_id}", body, headers)
        streams[1].write(request[: self._random.choice([len(request), len(request), len(request) // 2])])
        await self._pause(0.05)

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(self._random.uniform(0, seconds))


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
