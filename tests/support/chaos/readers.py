"""Clients that read: searches, walks over all pages, lists, pictures, metrics and probes."""

import asyncio
import json
import time
from random import Random
from urllib.parse import urlencode

from .client import Connection, ConnectionBroken, Response, encode_request
from .expectations import COLOURS, Json
from .world import Client, Interrupted, World, problem_type

_HEALTHZ = encode_request("GET", "/healthz")
_RANKINGS: list[Json] = [
    {},
    {"diversity": 0.3, "window": 10},
    {"boosts": [{"filter": {"even": True}, "weight": 0.2}, {"attribute": "price", "from": 0, "to": 9, "weight": 0.1}]},
    {"sort_by": {"attribute": "stamp", "order": "descending"}, "window": 15},
]
"""Rules under which every item is on one page."""


def choose_filter(random: Random) -> Json:
    """Returns a filter on the attributes that clients write."""
    if random.random() < 0.15:
        return {"kind": "shop"}
    low = random.randrange(40)
    parts: list[Json] = [
        {"kind": random.choice(["api", "shop", "shared"])},
        {"stamp": {"gte": low, "lt": low + random.randrange(1, 40)}},
        {"even": random.random() < 0.5},
        {"colour": random.sample(COLOURS, 2)},
        {"price": {"lte": low / 4}},
        {"sale": {"exists": random.random() < 0.5}},
        {"not": [{"colour": random.choice(COLOURS)}, {"stamp": low}]},
    ]
    chosen: Json = {}
    for part in random.sample(parts, random.randint(0, 2)):
        chosen |= part
    return chosen


class Searcher:
    """Searches by photos, items and batches, with and without filters; checks every item of every answer."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._client = Client(world, name)
        self._random = self._client.random

    async def run(self) -> None:
        actions = [self._search, self._search, self._search, self._search_batch, self._look_around]
        while True:
            try:
                await self._random.choice(actions)()
            except Interrupted:
                continue
            await self._world.rest(self._random.uniform(0, 0.05))

    def _choose(self) -> Json:
        options: Json = {"limit": self._random.choice([1, 5, 12, 100]), "filter": choose_filter(self._random)}
        if self._random.random() < 0.3:
            return {**options, "item_id": self._random.choice(sorted(self._world.expectations.shop))}
        return {**options, "image": self._random.choice(self._world.photos).base64}

    async def _search(self) -> None:
        document = self._choose()
        started, newest = time.monotonic(), self._world.expectations.newest_version
        response = await self._client.send_json("search", "POST /v1/search", "/v1/search", document)
        if response.status == 200:
            self._check(response.json(), document, started, newest)
        else:
            self._check_refusal(response, document)

    async def _search_batch(self) -> None:
        documents = [self._choose() for _ in range(3)]
        started, newest = time.monotonic(), self._world.expectations.newest_version
        body = {"searches": documents}
        response = await self._client.send_json("batch", "POST /v1/search/batch", "/v1/search/batch", body)
        if response.status != 200:
            self._check_refusal(response, body)
            return
        for answer, document in zip(response.json()["answers"], documents, strict=True):
            self._check(answer, document, started, newest)

    def _check_refusal(self, response: Response, document: Json) -> None:
        """Without a kill, an honest search is refused only because too many others run."""
        if response.status != 503:
            self._world.violate("refused search", f"{str(document)[:200]}: {response.status} {response.body!r}")

    def _check(self, answer: Json, document: Json, started: float, newest: int) -> None:
        self._client.check_revision(answer, newest)
        items, wanted = answer["items"], document["filter"]
        for item in items:
            if problem := self._world.expectations.check_match(item, started, wanted):
                self._world.violate("search", problem)
        scores = [item["score"] for item in items]
        ids = {item["id"] for item in items}
        if scores != sorted(scores, reverse=True) or len(ids) < len(items) or document.get("item_id") in ids:
            self._world.violate("search", f"the list is not in order, or has an item twice: {str(items)[:500]}")
        if len(items) > document["limit"] or (len(items) < document["limit"] and answer["cursor"]):
            self._world.violate("search", f"{len(items)} items of {document['limit']}, cursor {answer['cursor']}")
        if wanted == {"kind": "shop"} and document["limit"] == 100:
            missing = self._world.expectations.shop.keys() - ids - {document.get("item_id")}
            if missing:
                self._world.violate("search", f"a search misses {sorted(missing)[:3]}")

    async def _look_around(self) -> None:
        """Reads everything else."""
        route = self._random.choice(["GET /v1/facets", "GET /v1/status", "GET /metrics", "GET /readyz", "GET /v1/jobs"])
        response = await self._client.send("read", route, route.partition(" ")[2])
        if response.status not in (200, 503, 507) or (response.status == 507 and not self._world.is_disk_full):
            self._world.violate("refused read", f"{route}: {response.status} {response.body!r}")


class Walker:
    """Walks over all pages of a search or a list: what is not changed meanwhile must come exactly once."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._client = Client(world, name)
        self._random = self._client.random

    async def run(self) -> None:
        while True:
            await self._random.choice([self._walk_search, self._walk_list])()
            await self._world.rest(self._random.uniform(0, 0.3))

    async def _walk_search(self) -> None:
        wanted: Json = self._random.choice([{"kind": "shop"}, {}])
        document: Json = {
            "image": self._random.choice(self._world.photos).base64,
            "filter": wanted,
            "ranking": self._random.choice(_RANKINGS),
        }
        found: list[str] = []
        bundles = set()
        while True:
            document["limit"] = self._random.randint(2, 9)
            started, newest = time.monotonic(), self._world.expectations.newest_version
            response = await self._retry("walk", "POST /v1/search", "/v1/search", document)
            if response.status == 422 and problem_type(response) == "search-invalid" and "cursor" in document:
                return  # another bundle is active now
            if response.status != 200:
                self._world.violate("refused search", f"a page: {response.status} {response.body!r}")
                return
            answer = response.json()
            bundles.add(answer["bundle"])
            self._client.check_revision(answer, newest)
            for item in answer["items"]:
                if problem := self._world.expectations.check_match(item, started, wanted):
                    self._world.violate("search", f"on a page: {problem}")
            found += [item["id"] for item in answer["items"]]
            if answer["cursor"] is None:
                break
            document["cursor"] = answer["cursor"]
        if len(bundles) > 1:
            self._world.violate("pages", f"one walk has pages of the bundles {bundles}")
        self._check_shop("a walk", found)

    async def _walk_list(self) -> None:
        wanted: Json = self._random.choice([{"kind": "shop"}, {"even": True}, {"stamp": {"gte": 3}}, {}])
        query: Json = {"filter": json.dumps(wanted), "limit": self._random.randint(2, 30)}
        found: list[str] = []
        while True:
            started = time.monotonic()
            response = await self._retry("list", "GET /v1/items", f"/v1/items?{urlencode(query)}")
            if response.status != 200:
                self._world.violate("refused read", f"a list: {response.status} {response.body!r}")
                return
            answer = response.json()
            for item in answer["items"]:
                if problem := self._world.expectations.check_listed(item, started, wanted):
                    self._world.violate("list", problem)
            found += [item["id"] for item in answer["items"]]
            if answer["cursor"] is None:
                break
            query["cursor"] = answer["cursor"]
        if found != sorted(set(found)):
            self._world.violate("list", f"the ids are not in order: {found}")
        if wanted in ({}, {"kind": "shop"}):
            self._check_shop("a list", found)

    def _check_shop(self, name: str, found: list[str]) -> None:
        rows = sorted(item_id for item_id in found if item_id in self._world.expectations.shop)
        if rows != sorted(self._world.expectations.shop):
            self._world.violate("pages", f"{name} returned {rows}, not each item of the catalogue once")

    async def _retry(self, kind: str, route: str, path: str, document: Json | None = None) -> Response:
        """Repeats a page until it is answered: a cursor also holds after the service was killed."""
        while True:
            try:
                if document is None:
                    response = await self._client.send(kind, route, path)
                else:
                    response = await self._client.send_json(kind, route, path, document)
            except Interrupted:
                continue
            if response.status != 503:
                return response
            await self._world.rest(self._random.uniform(0.1, 0.5))


async def probe_health(world: World) -> None:
    """Checks that /healthz answers in time whenever the service is up, on a new connection each time."""
    service, limit = world.service, world.options.health_seconds
    while True:
        await world.rest(0.25)
        if not service.up.is_set():
            continue
        kills, began, connection = service.kills, time.monotonic(), Connection(service.port)
        try:
            response = await connection.send(_HEALTHZ, timeout=limit)
        except ConnectionBroken as error:
            if service.kills == kills and service.up.is_set():
                world.violate("healthz", f"no answer after {time.monotonic() - began:.1f} s: {error}")
            continue
        finally:
            connection.close()
        world.stats.health.append(time.monotonic() - began)
        if response.status != 200:
            world.violate("healthz", f"{response.status} {response.body!r}")


async def watch_memory(world: World) -> None:
    """Records the memory of the service; its peak must stay below the limit."""
    exceeded = -1
    while True:
        now, peak = await asyncio.to_thread(world.service.memory)
        if now:
            world.stats.memory.append(now)
        world.peak_memory = max(world.peak_memory, peak)
        if peak > world.options.max_memory and exceeded != world.service.starts:
            exceeded = world.service.starts
            world.violate("memory", f"the service took {peak >> 20} MiB of {world.options.max_memory >> 20}")
        await world.rest(0.5)
