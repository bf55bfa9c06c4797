"""How a re-indexing job looks from outside: a bar for people, JSON lines for machines, a line in the history."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from types import FrameType

from index.cli.progress import progress_bar
from index.gallery.jobs import Job, JobRecord


@contextmanager
def telling(*, as_json: bool) -> Iterator[Callable[[JobRecord], None]]:
    """Yields what shows a job's progress."""
    if as_json:
        yield lambda record: print(record.model_dump_json(), flush=True)
        return
    with progress_bar("Checking the source") as update:

        def show(record: JobRecord) -> None:
            bad = f", {record.rejected} rejected" if record.rejected else ""
            rate = f", {record.rate:.0f}/s" if record.done else ""
            update(record.done, record.total, f"{record.stage.capitalize()}{rate}{bad}")

        yield show


@contextmanager
def stoppable() -> Iterator[Callable[[Job], None]]:
    """Yields what hands a job to Ctrl-C and to a polite kill: it then ends after its batch, a second one at once."""
    job: Job | None = None
    wanted = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in wanted}

    def stop(number: int, frame: FrameType | None) -> None:
        if job is None or job.told_to_stop:
            raise KeyboardInterrupt
        print("\nFinishing the batch; once more stops at once.", file=sys.stderr)
        job.stop()

    def hand(started: Job) -> None:
        nonlocal job
        job = started

    for number in wanted:
        signal.signal(number, stop)
    try:
        yield hand
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def line_of(record: JobRecord) -> str:
    """A job in one line of the history."""
    begun = datetime.fromtimestamp(record.started).isoformat(" ", "seconds")
    counts = (
        f"{record.done} of {record.total} images: {record.embedded} embedded, {record.unchanged} unchanged, "
        f"{record.rejected} rejected, {record.deleted} deleted"
    )
    left = f", about {record.seconds_left:.0f} s left" if record.seconds_left is not None else ""
    return f"{record.id:>4}  {begun}  {record.state:<11} {record.source}: {counts}{left}  {record.message}".rstrip()
