"""What must hold when a run is over: on the service, on the store, and on the disk."""

import json
import re
import signal
import sqlite3
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from index.embedding.bundle import Bundle
from index.embedding.embedder import Embedder
from index.embedding.images import load_pixels
from tests.support.processes import lookalike

from .expectations import ItemState, Json, matches
from .readers import choose_filter
from .world import Client, World
from .writers import IMAGE, ITEM

QUERIES = 12
_SCORE_ERROR = 3e-6
_FILES = re.compile(
    r"catalogue\.sqlite(-wal|-shm)?|jobs\.sqlite(-wal|-shm)?|compaction\.lock|\.lockfile|jobs/.*"
    r"|generations/[^./][^/]*/(index\.faiss|records\.arrays|manifest\.json)|bundles/[0-9a-f]{16}/[^./][^/]*"
)
"""What docs/gallery.md names; the lock of a job exists only while it runs."""


async def check_service(world: World) -> None:
    """Compares what the service answers with the expectations and with a scan of the store's vectors."""
    client = Client(world, "final checks")
    for item_id, history in world.expectations.histories.items():
        started = time.monotonic()
        response = await client.send("read", f"GET {ITEM}", f"/v1/items/{item_id}")
        if response.status == 200:
            if problem := world.expectations.check_listed(response.json(), started, {}):
                world.violate("lost write", f"at the end: {problem}")
        elif response.status != 404 or None not in history.candidates(started):
            world.violate("lost write", f"at the end: {item_id}: {response.status}, expected {history.current}")
    for item_id, counter in world.expectations.counters.items():
        response = await client.send("read", f"GET {ITEM}", f"/v1/items/{item_id}")
        count = response.json()["attributes"]["count"] if response.status == 200 else 0
        if not counter.acknowledged <= count <= counter.acknowledged + counter.unknown:
            world.violate("lost write", f"at the end: {item_id} is {count}, but {counter}")
    await _compare_searches(world, client)
    await _send_photos_again(world, client)
    client.close()


async def _send_photos_again(world: World, client: Client) -> None:
    """Stores every photo again: those that were sent while another bundle was active get a vector of this one."""
    photos = {photo.digest: photo for photo in world.photos}
    for item_id in world.expectations.histories:
        path = f"/v1/items/{item_id}"
        if item_id.startswith("hostile"):
            await client.send("write", f"DELETE {ITEM}", path)
            continue
        item = (await client.send("read", f"GET {ITEM}", path)).json()
        for image in item.get("images", ()):
            headers, place = {"Content-Type": "image/jpeg"}, f"{path}/images/{image['id']}"
            response = await client.send("write", f"PUT {IMAGE}", place, photos[image["digest"]].data, headers)
            if response.status != 200 or response.json() != item:
                world.violate("lost write", f"{item} became {response.status} {response.body!r} by the same photo")


class _StoredVectors(NamedTuple):
    """The vectors of the active bundle as the store has them, with the item of each."""

    bundle: Bundle
    items: list[str]
    attributes: list[Json]
    vectors: NDArray[np.float32]


def _read_vectors(gallery: Path) -> _StoredVectors:
    with sqlite3.connect(gallery / "catalogue.sqlite") as db:
        key, name = db.execute("SELECT key, id FROM bundles WHERE key = (SELECT bundle FROM active)").fetchone()
        rows = db.execute(
            "SELECT items.id, attributes, vector FROM vectors JOIN images ON image = images.key "
            "JOIN items ON item = items.key WHERE bundle = ?",
            (key,),
        ).fetchall()
    db.close()
    vectors = np.array([np.frombuffer(vector, "<f2") for _, _, vector in rows]).astype(np.float32)
    return _StoredVectors(
        Bundle.load(gallery / "bundles" / name), [row[0] for row in rows], [json.loads(row[1]) for row in rows], vectors
    )


async def _compare_searches(world: World, client: Client) -> None:
    stored = _read_vectors(world.gallery)
    embedder = Embedder(stored.bundle, threads=1)
    for _ in range(QUERIES):
        photo, wanted = client.random.choice(world.photos), choose_filter(client.random)
        query = embedder.embed(load_pixels(photo.data, stored.bundle.preprocessing)[np.newaxis])[0]
        best: dict[str, float] = defaultdict(lambda: -2.0)
        for item_id, attributes, score in zip(stored.items, stored.attributes, stored.vectors @ query, strict=True):
            if matches(wanted, attributes):
                best[item_id] = max(
                    best[item_id], min(1.0, float(score))
                )  # rounded numbers may exceed a cosine's range
        document = {"image": photo.base64, "filter": wanted, "limit": 50}
        response = await client.send_json("search", "POST /v1/search", "/v1/search", document)
        if response.status != 200 or response.json()["bundle"] != stored.bundle.id:
            world.violate("brute force", f"{response.status} {response.body[:300]!r} with bundle {stored.bundle.id}")
            continue
        found = [(item["id"], item["score"]) for item in response.json()["items"]]
        expected = sorted(best.values(), reverse=True)[:50]
        same = len(found) == len(expected) and all(
            abs(score - wanted_score) < _SCORE_ERROR and abs(score - best[item_id]) < _SCORE_ERROR
            for (item_id, score), wanted_score in zip(found, expected, strict=True)
        )
        if not same:
            world.violate("brute force", f"{wanted}: found {found[:8]}, expected {expected[:8]} of {len(expected)}")


def check_stopped(world: World, exit_code: int) -> int:
    """Checks the exit of the service, its log, its temporary files and the gallery; returns the number of faults."""
    if exit_code not in (0, -signal.SIGTERM):
        world.violate("stop", f"the service ended with {exit_code} after SIGTERM")
    log = world.service.log.read_text(encoding="utf-8", errors="replace")
    for part in log.split("Traceback (most recent call last)")[1:4]:
        world.violate("traceback", f"in the log of the service: {part[:2500]}")
    # ONNX Runtime writes .ses, the id of its session, and never removes it.
    left = sorted(path.name for path in world.service.temporary_folder.iterdir() if path.name != ".ses")
    if left:
        world.violate("left-over files", f"the service left {left} in its temporary folder")
    # What killed compactions left is removed by the next one, and what killed jobs left by the next job.
    bundle = world.gallery / "bundles" / _read_vectors(world.gallery).bundle.id
    source = [str(world.table), "--bundle", str(bundle), "--rejects", str(world.folder / "rejects.csv")]
    for command in (["reindex", *source, "--gallery"], ["gallery", "compact"]):
        ended = lookalike(*command, str(world.gallery))
        if ended.returncode:
            world.violate("command", f"{' '.join(command)} ended with {ended.returncode}: {ended.stderr}")
    verified = lookalike("gallery", "verify", str(world.gallery))
    if verified.returncode:
        world.violate("verify", f"{verified.stdout} {verified.stderr}")
    _check_files(world)
    _check_store(world)
    counted = re.search(r"([\d,]+) faults? found", verified.stdout + verified.stderr)
    return int(counted[1].replace(",", "")) if counted else 0


def _check_files(world: World) -> None:
    names = [str(path.relative_to(world.gallery)) for path in world.gallery.rglob("*") if path.is_file()]
    folders = [str(path.relative_to(world.gallery)) for path in world.gallery.rglob(".*") if path.is_dir()]
    left = sorted(name for name in names if not _FILES.fullmatch(name)) + folders
    if left:
        world.violate("left-over files", f"in the gallery: {left}")


def _check_store(world: World) -> None:
    """Compares the rows of the store with the writes that are certain."""
    with sqlite3.connect(world.gallery / "catalogue.sqlite") as db:
        images = db.execute("SELECT items.id, images.id, digest FROM images JOIN items ON item = items.key").fetchall()
        embedded = db.execute(
            "SELECT items.id, images.id, digest, bundles.id FROM vectors JOIN images ON image = images.key "
            "JOIN items ON item = items.key JOIN bundles ON bundle = bundles.key"
        ).fetchall()
        orphans = db.execute(
            "SELECT count(*) FROM thumbnails WHERE digest NOT IN (SELECT digest FROM images) "
            "UNION ALL SELECT count(*) FROM images WHERE digest NOT IN (SELECT digest FROM thumbnails)"
        ).fetchall()
    db.close()
    by_item: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for item_id, image_id, digest in images:
        by_item[item_id].add((image_id, digest))
    for item_id, history in world.expectations.histories.items():
        state: ItemState | None = history.current
        if item_id.startswith("api-") and history.is_certain and by_item[item_id] != set(state.images if state else ()):
            world.violate("lost write", f"the store has {by_item[item_id]} of {item_id}, not {state}")
    present = set(embedded)
    active = _read_vectors(world.gallery).bundle.id
    if unfound := [image for image in images if (*image, active) not in present]:
        world.violate("lost write", f"{len(unfound)} images have no vector of the active bundle: {unfound[:3]}")
    for (item_id, image_id), (digest, bundle) in world.expectations.vectors.items():
        certain = world.expectations.histories[item_id].is_certain
        if certain and (item_id, image_id, digest, bundle) not in present:
            world.violate("lost write", f"the store has no vector of {item_id}/{image_id} of bundle {bundle}")
    if orphans != [(0,), (0,)]:
        world.violate("store", f"{orphans} thumbnails without image, or images without thumbnail")
