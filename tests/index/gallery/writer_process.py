"""A process that writes to a gallery until it is killed; tests start and kill it many times per second.

`python -m tests.index.gallery.writer_process GALLERY` imports everything once and then forks a child for each command
that it reads, before FAISS has started any thread: a fork takes milliseconds, an import seconds.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np

from index._util.imports import faiss
from index.gallery import Gallery, open_gallery
from index.gallery.types import Item
from index.gallery.vectors.faiss.settings import FaissSettings

from .reference import BUNDLE, ReferenceGallery, photo, unit

DIMENSION = 6
WRITERS, ITEMS_PER_WRITER = 6, 4


def write(target: Gallery | ReferenceGallery, number: int) -> None:
    """Makes the write with a number, always the same one: of few items, so that most writes change existing ones."""
    random = Random(number)
    names = [f"item-{random.randrange(30):02d}" for _ in range(random.randint(1, 4))]
    kind = random.choice(["upsert", "upsert", "upsert", "delete", "delete images"])
    if kind == "delete":
        target.delete(names[:2])
    elif kind == "delete images":
        target.delete_images(names[0], random.sample(["front", "back", "side"], 2))
    else:
        draw = np.random.default_rng(number)
        entries = [
            (
                Item(id=name, title=f"As of {number}", attributes={"number": number, "even": number % 2 == 0}),
                [photo(view, unit(*draw.normal(size=DIMENSION))) for view in random.sample(["front", "back"], 1)],
            )
            for name in names
        ]
        if isinstance(target, ReferenceGallery):
            target.upsert(entries)
        else:
            target.upsert(entries, BUNDLE)


class Commands:
    """The commands of a child; each takes a number."""

    def __init__(self, address: str) -> None:
        self._address = address

    def write(self, number: int) -> None:
        """Writes from a number on until it is killed, reports each acknowledged write, and compacts often."""
        gallery = open_gallery(self._address)
        while True:
            write(gallery, number)
            _report("wrote", str(number))
            number += 1
            if number % 9 == 0:
                gallery.compact(rebuild=number % 2 == 0)

    def compact(self, exact_up_to: int) -> None:
        """Builds generations until it is killed."""
        gallery = open_gallery(self._address, faiss_settings=FaissSettings(exact_up_to=exact_up_to))
        while True:
            gallery.compact(rebuild=True)
            _report("compacted", "1")

    def serve(self, count: int) -> None:
        """Serves so many requests from its input: to make the write with a number, or to report a search's hits."""
        gallery = open_gallery(self._address)
        _report("ready")
        for _ in range(count):
            word, number = sys.stdin.readline().split()
            if word == "write":
                write(gallery, int(number))
                _report("wrote", number)
            else:
                _report("found", ",".join(sorted(describe_hits(gallery))))

    def race(self, attempt: int) -> None:
        """Creates a gallery in several processes concurrently, each of which stores some items."""
        read_end, write_end = os.pipe()
        children = []
        for writer in range(WRITERS):
            children.append(os.fork())
            if children[-1] == 0:
                os.close(write_end)
                os.read(read_end, 1)  # returns in all children when the parent closes the other end
                gallery = open_gallery(f"{self._address}-{attempt}", create=True)
                for number in range(ITEMS_PER_WRITER):
                    image = photo(f"of {writer}", unit(writer + 1, number + 1))
                    gallery.upsert([(Item(id=f"{writer}-{number}"), [image]), (Item(id="shared"), [image])], BUNDLE)
                os._exit(0)
        os.close(write_end)
        statuses = [os.waitpid(child, 0)[1] for child in children]
        _report("raced", " ".join(map(str, statuses)))


def describe_hits(gallery: Gallery) -> set[str]:
    """Returns everything that a search finds: per item its id, its title, which names its last write, and a digest."""
    hits = gallery.search(unit(*range(1, DIMENSION + 1))[None], bundle_id=BUNDLE, top=1000).hits[0]
    return {f"{hit.item.id} {hit.item.title} {hit.image.digest}" for hit in hits}


def _report(word: str, value: str = "") -> None:
    # One write, not buffered by Python: nothing is lost or cut off when the process is killed.
    os.write(1, f"{word} {value}\n".encode())


def main(address: str) -> None:
    faiss()
    for line in sys.stdin:
        command, number = line.split()
        child = os.fork()
        if child == 0:
            _report("pid", str(os.getpid()))  # by the child, so that it precedes the child's other reports
            getattr(Commands(address), command)(int(number))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        _report("ended", str(status))


class Report(NamedTuple):
    """One line from the process."""

    word: str
    value: str


class WriterProcess:
    """The process that forks children, as seen by a test."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin and process.stdout
        self._input, self._output = process.stdin, process.stdout

    def start(self, command: str, number: int) -> int:
        """Starts a child and returns its process id."""
        self.send(command, number)
        word, pid = self.receive()
        assert word == "pid"
        return int(pid)

    def send(self, word: str, number: int = 0) -> None:
        self._input.write(f"{word} {number}\n")
        self._input.flush()

    def receive(self) -> Report:
        line = self._output.readline()
        assert line.endswith("\n"), "the process that forks children has ended"
        word, value = line.rstrip("\n").split(" ", 1)
        return Report(word, value)

    def kill(self, pid: int) -> list[int]:
        """Kills a child; returns the numbers that it had reported and that were not yet received."""
        os.kill(pid, signal.SIGKILL)
        numbers: list[int] = []
        while True:
            word, value = self.receive()
            if word == "ended":
                return numbers
            numbers.append(int(value))


@contextmanager
def run_writer_process(gallery: Path) -> Iterator[WriterProcess]:
    """Runs the process that forks children for one gallery."""
    command = [sys.executable, "-m", "tests.index.gallery.writer_process", str(gallery)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield WriterProcess(process)
        finally:
            process.kill()


if __name__ == "__main__":
    main(sys.argv[1])
