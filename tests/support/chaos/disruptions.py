"""What happens to a service: kills, compactions and jobs that are killed, full disks, and other bundles."""

import asyncio
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

from index.embedding.bundle import Bundle

from .client import Response
from .disks import Disk
from .service import StartFailed
from .world import Client, Finished, Interrupted, World

JOB = "/v1/jobs/{job_id}"
_COMMAND_SECONDS = 120.0
_FOLLOW_SECONDS = 2.0
"""Time for every process of the service to load a newly activated bundle."""
_PAUSE_SECONDS = 1.5
_FULL_SECONDS = 15.0
_CLAIM_SECONDS = 0.1
"""Time for a job that holds its lock to keep the copy of its bundle that services embed with."""
_SPARE_SECONDS = 2.0
"""Time after which a disk that was freed must be usable."""


class Result(NamedTuple):
    """How a command ended."""

    code: int
    output: str
    was_disk_full: bool
    appeared: float | None
    """When the files appeared that show what it is doing."""


class Killer:
    """Kills the service and starts it again."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._random = world.random("killer")

    async def run(self) -> None:
        world = self._world
        while True:
            await world.rest(self._random.uniform(*world.options.kill_seconds))
            if world.options.workers > 1 and self._random.random() < 0.7:
                world.stats.faults["worker killed"] += 1
                world.service.kill_worker(self._random.randrange(100))
                continue
            world.stats.faults["service killed"] += 1
            began = time.monotonic()
            await world.service.kill()
            await self._start()
            world.stats.recoveries.append(time.monotonic() - began)

    async def _start(self) -> None:
        """Starts the service. On a full disk that may fail with a reason: SQLite needs a little space to open."""
        faults = self._world.stats.faults
        while True:
            was_full, fillings = self._world.is_disk_full, faults["disk filled"]
            try:
                await self._world.service.start()
                return
            except StartFailed as error:
                was_full = was_full or faults["disk filled"] > fillings  # it was filled during the start
                if not was_full or not re.search("disk|space", str(error)):
                    raise
                faults["start refused on a full disk"] += 1
                await asyncio.sleep(0.2)


class Operator:
    """Compacts, re-indexes, switches bundles and fills the disk; half of its commands are killed."""

    def __init__(self, world: World, disk: Disk | None, bundles: dict[str, Path]) -> None:
        self._world = world
        self._disk = disk
        self._bundles = bundles
        self._random = world.random("operator")
        self._client = Client(world, "operator")

    async def run(self) -> None:
        actions = [self._compact, self._compact, self._reindex, self._reindex, self._roll_back, self._run_api_job]
        needy = [None, self._compact, self._reindex, self._run_api_job]
        try:
            while True:
                await self._world.rest(self._random.uniform(0.2, 2.0))
                if self._disk and self._random.random() < 0.25:
                    await self._fill_disk(self._disk, self._random.choice(needy))
                else:
                    await self._random.choice(actions)()
        finally:
            if self._disk:
                self._disk.free()
            self._world.is_disk_full = False
            await self._wait_for_jobs()

    async def _compact(self) -> None:
        arguments = ["gallery", "compact", str(self._world.gallery)]
        if self._random.random() < 0.5:
            arguments.append("--rebuild")
        is_killed = self._random.random() < 0.6
        self._count("compaction", is_killed)
        await self._run_command(arguments, "generations/.*", 0.05 if is_killed else None)

    async def _reindex(self) -> None:
        """Indexes the catalogue with either bundle, which then becomes the active one."""
        name = self._random.choice(sorted(self._bundles))
        arguments = ["reindex", str(self._world.table), "--gallery", str(self._world.gallery)]
        arguments += ["--bundle", str(self._bundles[name]), "--max-delete", "1"]
        arguments += ["--rejects", str(self._world.folder / "rejects.csv")]
        is_killed = self._random.random() < 0.5
        self._count("re-index", is_killed)
        result = await self._switch(arguments, "job-*.lock", 1.0 if is_killed else None)
        if result.code in (0, 3) and not result.was_disk_full and result.appeared:
            self._check_stored_since(result.appeared + _CLAIM_SECONDS, Bundle.load(self._bundles[name]).id)

    def _check_stored_since(self, began: float, bundle_id: str) -> None:
        """Checks that photos which clients stored while the job ran have vectors of its bundle, which is now active."""
        query = (
            "SELECT items.id, images.id, digest FROM vectors JOIN images ON image = images.key "
            "JOIN items ON item = items.key WHERE bundle = (SELECT key FROM bundles WHERE id = ?)"
        )
        with closing(sqlite3.connect(self._world.gallery / "catalogue.sqlite")) as db:
            embedded = set(db.execute(query, (bundle_id,)))
        for (item_id, image_id), (digest, stored) in self._world.expectations.stored.items():
            if stored > began and (item_id, image_id, digest) not in embedded:
                text = f"{item_id}/{image_id} was stored during a re-index and has no vector of bundle {bundle_id}"
                self._world.violate("lost write", text)

    async def _roll_back(self) -> None:
        self._count("rollback", False)
        await self._switch(["gallery", "rollback", str(self._world.gallery)])

    async def _switch(self, arguments: list[str], sign: str = "", kill_after: float | None = None) -> Result:
        """Runs a command that may activate another bundle."""
        self._world.begin_switch()
        try:
            result = await self._run_command(arguments, sign, kill_after)
            await asyncio.sleep(_FOLLOW_SECONDS)
            return result
        finally:
            self._world.end_switch()

    def _count(self, name: str, is_killed: bool) -> None:
        self._world.stats.faults[f"{name} killed" if is_killed else name] += 1

    async def _run_command(self, arguments: list[str], sign: str, kill_after: float | None) -> Result:
        """Runs `lookalike`; kills it at most `kill_after` seconds after files appear whose names match `sign`."""
        was_full, appeared = self._world.is_disk_full, None
        before = set(self._world.gallery.glob(sign)) if sign else set()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "lookalike", *arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        assert process.stderr
        output = asyncio.create_task(process.stderr.read())
        try:
            async with asyncio.timeout(_COMMAND_SECONDS):
                while sign and process.returncode is None and not appeared:
                    await asyncio.sleep(0.002)
                    appeared = time.monotonic() if set(self._world.gallery.glob(sign)) - before else None
                if appeared and self._random.random() < 0.5:
                    await self._pause(process)
                if kill_after is not None:
                    await asyncio.sleep(self._random.uniform(0, kill_after))
                    if process.returncode is None:
                        os.kill(process.pid, signal.SIGKILL)
                code = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        was_full = was_full or self._world.is_disk_full
        result = Result(code, (await output).decode(errors="replace"), was_full, appeared)
        self._check_command(arguments, result, is_killed=kill_after is not None)
        return result

    async def _pause(self, process: asyncio.subprocess.Process) -> None:
        """Stops a process for a while, whatever locks it holds."""
        if process.returncode is None:
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(self._random.uniform(0, _PAUSE_SECONDS))
            process.send_signal(signal.SIGCONT)

    def _check_command(self, arguments: list[str], result: Result, *, is_killed: bool) -> None:
        # 3: the bundle is active, but images that the catalogue does not name have no vector of it.
        expected = {0, 3} if arguments[0] == "reindex" else {0}
        if is_killed:
            expected.add(-signal.SIGKILL)
        if result.was_disk_full:
            expected.add(1)
        if arguments[:2] == ["gallery", "rollback"] and "no previous bundle" in result.output:
            expected.add(1)
        if result.code not in expected or "Traceback" in result.output:
            command = " ".join(arguments)
            self._world.violate("command", f"{command} ended with {result.code}: {result.output[-1500:]}")

    async def _run_api_job(self) -> None:
        """Starts a job over the API, may cancel it, and waits until no job runs: it outlives a killed service."""
        self._count("API job", False)
        self._world.begin_switch()
        try:
            body = {"source": "shop", "bundle": self._random.choice(sorted(self._bundles)), "max_delete": 1}
            response = await self._client.send_json("job", "POST /v1/jobs", "/v1/jobs", body)
            if response.status == 202 and self._random.random() < 0.4:
                await asyncio.sleep(self._random.uniform(0, 2))
                await self._client.send("job", f"DELETE {JOB}", f"/v1/jobs/{response.json()['id']}")
            elif response.status not in (202, 409, 503, 507):
                self._world.violate("job", f"POST /v1/jobs: {response.status} {response.body!r}")
        except Interrupted:
            pass
        finally:
            try:
                await self._wait_for_jobs()
                await asyncio.sleep(_FOLLOW_SECONDS)
            finally:
                self._world.end_switch()

    async def _wait_for_jobs(self) -> None:
        """Waits until no job runs; not while the disk is full, when the history may not be readable."""
        end, states = time.monotonic() + _COMMAND_SECONDS, []
        while time.monotonic() < end:
            if self._world.is_disk_full or self._world.is_broken:
                return
            try:
                response: Response = await self._client.send("job", "GET /v1/jobs", "/v1/jobs?limit=5")
            except Interrupted:
                continue
            except Finished:  # only raised while the service starts
                await asyncio.sleep(0.1)
                continue
            states = [job["state"] for job in response.json()["jobs"]] if response.status == 200 else ["unknown"]
            if "running" not in states and "unknown" not in states:
                return
            await asyncio.sleep(0.2)
        self._world.violate("job", f"jobs do not end: {states}")

    async def _fill_disk(self, disk: Disk, meanwhile: Callable[[], Awaitable[None]] | None) -> None:
        """Leaves no space for some seconds, and may run a command that needs some."""
        world = self._world
        world.stats.faults["disk filled"] += 1
        world.begin_switch()
        world.is_disk_full = True
        try:
            await asyncio.to_thread(disk.fill)
            if meanwhile is not None:
                with suppress(TimeoutError):  # it may wait for a service that cannot start
                    async with asyncio.timeout(_FULL_SECONDS):
                        await meanwhile()
            await asyncio.sleep(self._random.uniform(0.5, 3))
        finally:
            disk.free()
        await asyncio.sleep(_SPARE_SECONDS)
        world.is_disk_full = False
        await self._wait_for_jobs()
        world.end_switch()
