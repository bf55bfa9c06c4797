"""Runs a mix of clients and disruptions against a real service, and returns what was measured and what was wrong."""

import asyncio
import csv
import json
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from index.ingest.options import ReindexOptions
from index.ingest.pipeline import run_reindex
from tests.support.tiny_bundle import make_tiny_bundle

from .attackers import HostileSender, SlowClient
from .client import Connection, encode_request
from .disks import LimitedFiles, small_file_system
from .disruptions import Killer, Operator
from .expectations import Json
from .final_checks import check_service, check_stopped
from .load import measure_capacity, send_load
from .photos import MAX_PIXELS, make_photo
from .readers import Searcher, Walker, probe_health, watch_memory
from .records import make_end_record, make_record, make_start_record
from .service import ServiceProcess, StartFailed
from .world import ChaosOptions, Finished, Stats, World
from .writers import CounterClient, ItemWriter, SharedItemWriter

ROWS = 24
Record = Callable[[Json], None]


@dataclass(frozen=True)
class Report:
    """The result of a run."""

    violations: list[str]
    """What was wrong, with up to five examples of a kind."""
    totals: Stats
    acknowledged: int
    unknown: int
    peak_memory: int


def run_chaos(options: ChaosOptions, folder: Path, on_record: Record = lambda record: None) -> Report:
    """Runs the mix in a folder, which must be empty; `on_record` receives what was measured, as it comes."""
    bundles = {"first": make_tiny_bundle(folder / "first"), "second": make_tiny_bundle(folder / "second", grid=8)}
    table = _write_catalogue(folder / "catalogue" / "catalogue.csv")
    with small_file_system(folder / "disk") as disk:
        gallery = folder / "disk" / "gallery"
        run_reindex(
            ReindexOptions(
                source=[str(table)], gallery=str(gallery), bundle=bundles["first"], rejects=folder / "rejects.csv"
            )
        )
        settings = _settings(options, bundles, table)
        service = ServiceProcess(gallery, folder, workers=options.workers, settings=settings)
        world = World(options, folder, gallery=gallery, service=service)
        world.expectations.shop = _read_catalogue(table)
        operator = Operator(world, disk or LimitedFiles(gallery, service.processes), bundles)
        try:
            asyncio.run(_run(world, operator, on_record))
        finally:
            service.abort()
    expectations = world.expectations
    return Report(world.examples, world.totals, expectations.acknowledged, expectations.unknown, world.peak_memory)


def _settings(options: ChaosOptions, bundles: dict[str, Path], table: Path) -> dict[str, str]:
    """Returns settings with short timeouts, so that slow clients meet them."""
    return {
        "LOG_LEVEL": "warning",
        "MAX_PIXELS": str(MAX_PIXELS),
        "MAX_DECODE_BYTES": str(options.max_memory // 3),
        "HEAD_SECONDS": "3",
        "CHUNK_SECONDS": "2",
        "BODY_SECONDS": "6",
        "WRITE_SECONDS": "3",
        "BUNDLE_POLL_SECONDS": "0.5",
        "BUNDLE_RETRY_SECONDS": "0.5",
        "SOURCES": json.dumps({"shop": str(table)}),
        "BUNDLES": json.dumps({name: str(path) for name, path in bundles.items()}),
    }


def _write_catalogue(table: Path) -> Path:
    """Writes the items that only jobs write, each with two photos."""
    table.parent.mkdir()
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["item_id", "image", "title", "kind", "colour", "stamp"])
        for number in range(ROWS):
            for view in range(2):
                name = f"{number}-{view}.jpg"
                (table.parent / name).write_bytes(make_photo(1000 + 2 * number + view).data)
                writer.writerow([f"shop-{number:02}", name, f"Product {number}", "shop", "red", number])
    return table


def _read_catalogue(table: Path) -> dict[str, tuple[str, Json]]:
    with table.open(newline="", encoding="utf-8") as file:
        return {
            row["item_id"]: (row["title"], {"kind": "shop", "colour": row["colour"], "stamp": int(row["stamp"])})
            for row in csv.DictReader(file)
        }


async def _run(world: World, operator: Operator, on_record: Record) -> None:
    service, options = world.service, world.options
    await service.start()
    world.documented = await _read_documented(service.port)
    capacity = await measure_capacity(service.port, seconds=min(10.0, options.seconds / 4)) if options.load else 0.0
    rate = options.load * capacity
    on_record(make_start_record(world, capacity, rate))
    began = time.monotonic()
    tasks = [asyncio.create_task(_run_client(world, client)) for client in _clients(world, operator, rate)]
    while (left := began + options.seconds - time.monotonic()) > 0 and not world.is_over:
        await asyncio.sleep(min(left, options.record_seconds))
        on_record(make_record(world, time.monotonic() - began))
    world.is_over = True
    await asyncio.gather(*tasks)
    world.is_over = False
    memory, files, faults = service.memory()[0], service.open_files(), 0
    if not world.is_broken:
        await check_service(world)
        faults = check_stopped(world, await service.stop())
    world.take_stats()
    on_record(make_end_record(world, memory=memory, open_files=files, faults=faults))


def _clients(world: World, operator: Operator, rate: float) -> Iterator[Coroutine[Any, Any, None]]:
    """Yields the mix."""
    yield probe_health(world)
    yield watch_memory(world)
    yield Killer(world).run()
    yield operator.run()
    for number in range(4):
        yield ItemWriter(world, f"writer-{number}", [f"api-{number}-{item}" for item in range(5)]).run()
    shared, counters = [f"shared-{item}" for item in range(3)], [f"counter-{item}" for item in range(2)]
    for number in range(2):
        yield SharedItemWriter(world, f"shared-{number}", shared, 1_000_000_000 * (number + 1)).run()
        yield HostileSender(world, f"sender-{number}").run()
        yield Walker(world, f"walker-{number}").run()
    for number in range(3):
        yield CounterClient(world, f"counter-{number}", counters).run()
        yield Searcher(world, f"searcher-{number}").run()
        yield SlowClient(world, f"slow-{number}").run()
    if rate:
        yield send_load(world, rate)


async def _run_client(world: World, client: Coroutine[Any, Any, None]) -> None:
    """Runs a client to the end of the run; its own failure is reported like a broken invariant."""
    name = getattr(client, "__qualname__", "client")
    try:
        await client
    except Finished:
        pass
    except Exception as error:
        world.violate("client failed", f"{name}: {error!r}: {traceback.format_exc()[-1500:]}")
        if isinstance(error, StartFailed):
            world.is_over = world.is_broken = True


async def _read_documented(port: int) -> dict[str, set[int]]:
    """Returns the statuses that the OpenAPI document lists for each route."""
    connection = Connection(port)
    document = (await connection.send(encode_request("GET", "/openapi.json"))).json()
    connection.close()
    return {
        f"{method.upper()} {path}": {int(status) for status in operation["responses"]}
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    }
