"""A progress bar for long work, the same for every verb."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

console = Console(stderr=True)


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[..., None]]:
    """Yields a function of (done, total) and maybe a new title.

    The bar goes to standard error, so that output stays clean, and only if that is a terminal.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=None)

        def update(done: int, total: int, now: str = title) -> None:
            progress.update(task, completed=done, total=total, description=now)

        yield update
