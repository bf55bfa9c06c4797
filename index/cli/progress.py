"""How commands show long work: a progress bar, JSON lines, and a clean stop on Ctrl-C."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from types import FrameType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from index.gallery.jobs import Job
    from index.jobs import JobRecord

console = Console(stderr=True)
LINE_SECONDS = 30.0
"""Time between two lines of progress without a terminal."""


@contextmanager
def progress_bar(title: str, interval: float = LINE_SECONDS) -> Iterator[Callable[..., None]]:
    """Yields a function that updates a progress bar: (done, total), and optionally a new title.

    The bar is drawn on standard error if that is a terminal. Otherwise, as in a log file or a container, a line is
    printed there every `interval` seconds.
    """
    if not console.is_terminal:
        yield _ProgressLines(title, interval)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=None)

        def update(done: int, total: int, current: str = title) -> None:
            progress.update(task, completed=done, total=total, description=current)

        yield update


class _ProgressLines:
    """Prints a line of progress on standard error from time to time."""

    def __init__(self, title: str, interval: float) -> None:
        self._title, self._interval = title, interval
        self._total: int | None = None
        self._printed = time.monotonic()
        self._start(0)

    def _start(self, done: int) -> None:
        self._first, self._done, self._started = done, done, time.monotonic()

    def __call__(self, done: int, total: int, current: str | None = None) -> None:
        if total != self._total or done < self._done:  # other work begins
            self._total = total
            self._start(done)
        self._done, now = done, time.monotonic()
        if now - self._printed < self._interval:
            return
        self._printed = now
        line = f"{current or self._title}: {done:,} of {total:,}"
        if done > self._first and now > self._started:
            rate = (done - self._first) / (now - self._started)
            line += f" ({done / total:.0%}), {rate:.3g}/s, about {format_duration((total - done) / rate)} left"
        print(line, file=sys.stderr, flush=True)


def format_duration(seconds: float) -> str:
    """Formats seconds as hours, minutes and seconds: 1:02:03, or 2:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


@contextmanager
def job_progress(*, as_json: bool) -> Iterator[Callable[["JobRecord"], None]]:
    """Yields a progress callback for a job: it prints JSON lines on standard output, or updates a progress bar."""
    if as_json:
        yield lambda record: print(record.model_dump_json(), flush=True)
        return
    with progress_bar("Checking the source") as update:

        def show(record: "JobRecord") -> None:
            rejected = f", {record.rejected} rejected" if record.rejected else ""
            rate = f", {record.rate:.0f}/s" if record.done else ""
            update(record.done, record.total, f"{record.stage.capitalize()}{rate}{rejected}")

        yield show


@contextmanager
def stop_on_signal() -> Iterator[Callable[["Job"], None]]:
    """Yields a function that registers a job to be stopped by SIGINT and SIGTERM.

    The first signal ends the job after its batch, a second one immediately.
    """
    job: Job | None = None
    signals = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.getsignal(number) for number in signals}

    def stop(number: int, frame: FrameType | None) -> None:
        if job is None or job.was_stopped:
            raise KeyboardInterrupt
        print("\nFinishing the current batch; interrupt again to stop immediately.", file=sys.stderr)
        job.stop()

    def register(started: "Job") -> None:
        nonlocal job
        job = started

    for number in signals:
        signal.signal(number, stop)
    try:
        yield register
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def format_job(record: "JobRecord") -> str:
    """Returns a job as one line of the history."""
    started = datetime.fromtimestamp(record.started).isoformat(" ", "seconds")
    counts = (
        f"{record.done} of {record.total} images: {record.embedded} embedded, {record.unchanged} unchanged, "
        f"{record.rejected} rejected, {record.deleted} deleted"
    )
    counts += f", {record.missing} missing" if record.missing else ""
    left = f", about {record.seconds_left:.0f} s left" if record.seconds_left is not None else ""
    what = f"{record.source} with bundle {record.bundle_id}"
    return f"{record.id:>4}  {started}  {record.state:<11} {what}: {counts}{left}  {record.message}".rstrip()
