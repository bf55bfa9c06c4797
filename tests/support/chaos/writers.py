"""Clients that write: each checks the answer to its write, and often that the next read shows it."""

import time
from collections.abc import Iterable
from typing import NamedTuple

from .client import Response
from .expectations import Attempt, Counter, ItemHistory, ItemState, Json, Outcome, content
from .photos import Photo
from .world import Client, Interrupted, World, problem_type

ITEM = "/v1/items/{item_id}"
IMAGE = "/v1/items/{item_id}/images/{image_id}"
_IMAGE_IDS = ("front", "back", "side")


class Write(NamedTuple):
    """A request to change an item, and the state that it leaves."""

    route: str
    path: str
    document: Json | None
    target: ItemState | None
    embedded: dict[str, str] = {}
    """Image id to digest of the photos that it sends."""


class ItemWriter:
    """The only writer of some items: after each acknowledged write it knows what every read must return."""

    def __init__(self, world: World, name: str, items: Iterable[str]) -> None:
        self._world = world
        self._client = Client(world, name)
        self._random = self._client.random
        self._versions: dict[str, int | None] = dict.fromkeys(items)
        self._stamps = dict.fromkeys(self._versions, 0)
        for item_id in self._versions:
            world.expectations.histories[item_id] = ItemHistory()

    async def run(self) -> None:
        """Writes until the run is over."""
        while True:
            item_id = self._random.choice(list(self._versions))
            history = self._world.expectations.histories[item_id]
            try:
                if not history.is_certain:
                    await self._settle(item_id, history)
                else:
                    await self._write(item_id, history)
            except Interrupted:
                continue
            await self._world.rest(self._random.uniform(0, 0.04))

    async def _write(self, item_id: str, history: ItemHistory) -> None:
        before = history.current
        write = self._choose(item_id, before)
        mark, bundle, began = self._world.switch_mark, None, time.monotonic()
        attempt = history.begin(write.target)
        self._forget_vectors(item_id, write)
        try:
            response = await self._send(item_id, before, write)
        except Interrupted:
            attempt.end("unknown")
            self._world.expectations.unknown += 1
            raise
        if response.status >= 400:
            self._refuse(item_id, write, attempt, response)
            await self._world.rest(self._random.uniform(0.05, 0.5))
            return
        self._acknowledge(item_id, before, write, attempt, response)
        for image_id, digest in write.embedded.items():
            self._world.expectations.stored[item_id, image_id] = digest, began
        if self._random.random() < 0.6:
            bundle = await self._find_written(item_id, write, mark)
        if bundle:
            for image_id, digest in write.embedded.items():
                self._world.expectations.vectors[item_id, image_id] = digest, bundle

    def _forget_vectors(self, item_id: str, write: Write) -> None:
        kept = {name for name, _ in write.target.images} - write.embedded.keys() if write.target else set()
        for image_id in set(_IMAGE_IDS) - kept:
            self._world.expectations.vectors.pop((item_id, image_id), None)
            self._world.expectations.stored.pop((item_id, image_id), None)

    def _choose(self, item_id: str, before: ItemState | None) -> Write:
        stamp = self._stamps[item_id] = self._stamps[item_id] + 1
        path = f"/v1/items/{item_id}"
        title, attributes = content(item_id, stamp)
        document: Json = {"title": title, "attributes": attributes}
        kind = self._random.choice(["put", "put", "fields", "patch", "add", "remove", "delete"])
        if kind == "put" or before is None:
            photos = self._pick_photos(self._random.randint(1, 2))
            document["images"] = [{"id": name, "image": photo.base64} for name, photo in photos.items()]
            digests = {name: photo.digest for name, photo in photos.items()}
            return Write(f"PUT {ITEM}", path, document, ItemState(stamp, frozenset(digests.items())), digests)
        if kind == "fields":
            return Write(f"PUT {ITEM}", path, document, before._replace(stamp=stamp))
        if kind == "patch":
            document["attributes"] = {"sale": None, **attributes}
            return Write(f"PATCH {ITEM}", path, document, before._replace(stamp=stamp))
        if kind == "add":
            ((name, photo),) = self._pick_photos(1).items()
            images = frozenset({**dict(before.images), name: photo.digest}.items())
            target, sent = before._replace(images=images), {name: photo.digest}
            return Write(f"PUT {IMAGE}", f"{path}/images/{name}", {"image": photo.base64}, target, sent)
        if kind == "remove":
            name = self._random.choice(_IMAGE_IDS)
            images = frozenset(image for image in before.images if image[0] != name)
            return Write(f"DELETE {IMAGE}", f"{path}/images/{name}", None, before._replace(images=images))
        return Write(f"DELETE {ITEM}", path, None, None)

    def _pick_photos(self, count: int) -> dict[str, Photo]:
        return {name: self._random.choice(self._world.photos) for name in self._random.sample(_IMAGE_IDS, count)}

    async def _send(self, item_id: str, before: ItemState | None, write: Write) -> Response:
        version = self._versions[item_id]
        headers = {}
        if self._random.random() < 0.5:
            if before is None:
                headers = {"If-None-Match": "*"}
            elif version:
                headers = {"If-Match": f'"{version}"'}
        if write.document is None:
            return await self._client.send("write", write.route, write.path, headers=headers)
        return await self._client.send_json("write", write.route, write.path, write.document, headers)

    def _refuse(self, item_id: str, write: Write, attempt: Attempt, response: Response) -> None:
        """A write that was refused changed nothing, except one that could not load a newly activated bundle."""
        kind = problem_type(response)
        reason = f"{write.route} got {response.status} {response.body.decode()}"
        attempt.end("unknown" if kind in ("not-ready", "internal") else "refused", reason)
        if kind not in ("not-ready", "internal", "overloaded", "storage-full"):
            self._world.violate("refused write", f"{write.route} of {item_id}: {response.status} {response.body!r}")
        if kind == "storage-full" and not self._world.is_disk_full:
            self._world.violate("refused write", f"{write.route} of {item_id}: the disk is not full: {response.body!r}")

    def _acknowledge(
        self, item_id: str, before: ItemState | None, write: Write, attempt: Attempt, response: Response
    ) -> None:
        expectations, version = self._world.expectations, self._versions[item_id]
        if write.document is None or write.target is None:
            expectations.acknowledge(attempt, 0)
            # A deletion does not return the version that it made.
            self._versions[item_id] = None if write.target is None or write.target != before else version
            return
        answer = response.json()
        if _state_of(answer) != write.target or content(item_id, write.target.stamp) != _content_of(answer):
            self._world.violate("answer of a write", f"{write.route} of {write.target} is answered with {answer}")
        if response.headers.get("etag") != f'"{answer["version"]}"' or answer["version"] < (version or 0):
            self._world.violate("version", f"{item_id}: {answer['version']} after {version}, {response.headers}")
        expectations.acknowledge(attempt, answer["version"])
        self._versions[item_id] = answer["version"]

    async def _find_written(self, item_id: str, write: Write, mark: int | None) -> str | None:
        """Reads what was just written; returns the bundle that it is found with, unless another may be active now."""
        await self._read(item_id)
        if write.target is None or not write.target.images:
            return None
        image_id, digest = self._random.choice(sorted(write.target.images))
        photo = next(photo for photo in self._world.photos if photo.digest == digest)
        wanted = {"seal": f"{item_id}:{write.target.stamp}"}
        started, newest = time.monotonic(), self._world.expectations.newest_version
        document = {"image": photo.base64, "filter": wanted, "limit": 3}
        response = await self._client.send_json("search", "POST /v1/search", "/v1/search", document)
        if response.status != 200:
            return None
        answer = response.json()
        self._client.check_revision(answer, newest)
        for match in answer["items"]:
            if problem := self._world.expectations.check_match(match, started, wanted):
                self._world.violate("search", f"after {write.route}: {problem}")
        if mark is None or mark != self._world.switch_mark or digest not in write.embedded.values():
            return None
        best = answer["items"][0] if answer["items"] else None
        if best is None or best["id"] != item_id or best["score"] < 0.999:
            text = f"{write.route} of {item_id}, image {image_id}, is not found by the next search: {response.body!r}"
            self._world.violate("lost write", text)
            return None
        return str(answer["bundle"])

    async def _read(self, item_id: str) -> ItemState | None:
        """Reads the item and checks it; returns its state."""
        started = time.monotonic()
        response = await self._client.send("read", f"GET {ITEM}", f"/v1/items/{item_id}")
        history = self._world.expectations.histories[item_id]
        if response.status == 200:
            item = response.json()
            if problem := self._world.expectations.check_listed(item, started, {}):
                self._world.violate("lost write", problem)
            self._versions[item_id] = item["version"]
            return _state_of(item)
        if response.status == 404 and None not in history.candidates(started):
            self._world.violate("lost write", f"{item_id} does not exist; possible are {history.current}")
        if response.status != 404:
            raise Interrupted
        return None

    async def _settle(self, item_id: str, history: ItemHistory) -> None:
        """Finds out what became of an interrupted write."""
        self._versions[item_id] = None
        history.settle(await self._read(item_id))


def _state_of(item: Json) -> ItemState:
    return ItemState(item["attributes"]["stamp"], frozenset((image["id"], image["digest"]) for image in item["images"]))


def _content_of(item: Json) -> tuple[str, Json]:
    return item["title"], item["attributes"]


class SharedItemWriter:
    """One of several writers of the same items: a read must return what one of them wrote, never a mixture."""

    def __init__(self, world: World, name: str, items: Iterable[str], first_stamp: int) -> None:
        self._world = world
        self._client = Client(world, name)
        self._items = list(items)
        self._stamp = first_stamp
        for item_id in self._items:
            world.expectations.histories.setdefault(item_id, ItemHistory(ordered=False))

    async def run(self) -> None:
        random, expectations = self._client.random, self._world.expectations
        while True:
            item_id = random.choice(self._items)
            history = expectations.histories[item_id]
            self._stamp += 1
            document, state = shared_write(self._world, item_id, self._stamp, random.randrange(1 << 30))
            attempt = history.begin(state)
            try:
                response = await self._client.send_json("write", f"PUT {ITEM}", f"/v1/items/{item_id}", document)
            except Interrupted:
                attempt.end("unknown")
                expectations.unknown += 1
                continue
            if response.status < 400:
                answer = response.json()
                if _state_of(answer) != state:
                    self._world.violate("answer of a write", f"PUT of {state} is answered with {answer}")
                expectations.acknowledge(attempt, answer["version"])
            else:
                outcome: Outcome = "unknown" if problem_type(response) == "not-ready" else "refused"
                attempt.end(outcome, f"{response.status} {response.body.decode()}")
            await self._world.rest(random.uniform(0.05, 0.4))


def shared_write(world: World, item_id: str, stamp: int, seed: int) -> tuple[Json, ItemState]:
    """Returns the body of a PUT that replaces an item with its images, and the state that it leaves."""
    title, attributes = content(item_id, stamp)
    photos = {"front": world.photos[seed % len(world.photos)], "back": world.photos[seed // 100 % len(world.photos)]}
    images = [{"id": name, "image": photo.base64} for name, photo in photos.items()]
    document = {"title": title, "attributes": attributes, "images": images}
    return document, ItemState(stamp, frozenset((name, photo.digest) for name, photo in photos.items()))


class CounterClient:
    """Increments shared counters by compare-and-set: reads the ETag, and writes with If-Match."""

    def __init__(self, world: World, name: str, items: Iterable[str]) -> None:
        self._world = world
        self._client = Client(world, name)
        self._items = list(items)
        self._number = 0
        for item_id in self._items:
            world.expectations.counters.setdefault(item_id, Counter())

    async def run(self) -> None:
        while True:
            item_id = self._client.random.choice(self._items)
            try:
                await self._increment(item_id, self._world.expectations.counters[item_id])
            except Interrupted:
                continue
            await self._world.rest(self._client.random.uniform(0, 0.1))

    async def _increment(self, item_id: str, counter: Counter) -> None:
        path, at_least = f"/v1/items/{item_id}", counter.acknowledged
        response = await self._client.send("read", f"GET {ITEM}", path)
        if response.status == 404:
            if at_least:
                self._world.violate("lost write", f"{item_id} does not exist after {at_least} increments")
            count, headers = 0, {"If-None-Match": "*"}
        elif response.status == 200:
            count, headers = response.json()["attributes"]["count"], {"If-Match": response.headers["etag"]}
            if not at_least <= count <= counter.acknowledged + counter.unknown:
                self._world.violate("lost write", f"{item_id} is {count} after {at_least} increments: {counter}")
        else:
            return
        self._number += 1
        mine = {"count": count + 1, "by": f"{self._client.name} {self._number}"}
        method = "PATCH" if count else "PUT"
        counter.unknown += 1
        try:
            document = {"attributes": mine}
            response = await self._client.send_json("count", f"{method} {ITEM}", path, document, headers)
        except Interrupted:
            self._world.expectations.unknown += 1
            raise
        counter.unknown -= 1
        if response.status < 300:
            counter.acknowledged += 1
            answer = response.json()
            if answer["attributes"] != mine:
                self._world.violate("answer of a write", f"an increment to {mine} is answered with {answer}")
            self._world.expectations.acknowledge(None, answer["version"])
