"""A process that writes to a gallery until it is killed, and how tests start and kill one many times a second.

`python -m tests.index.gallery.writing_process GALLERY` imports everything once and then forks a child for each order
that it reads, before FAISS has started any thread: a fork costs milliseconds, an import seconds.
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

from index import ann
from index.engines import faiss
from index.gallery import Gallery, open_gallery
from index.items import Item

from .plain import BUNDLE, PlainGallery, photo, unit

DIMENSION = 6


def write(target: Gallery | PlainGallery, number: int) -> None:
    """The write of a number, always the same one: on few items, so that most change what is there."""
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
        if isinstance(target, PlainGallery):
            target.upsert(entries)
        else:
            target.upsert(entries, BUNDLE)


class Orders:
    """What a child can be told to do; it goes on until it is killed."""

    def __init__(self, address: str) -> None:
        self._address = address

    def write(self, number: int) -> None:
        """Writes from a number on, telling each number after it was acknowledged, and compacts now and then."""
        gallery = open_gallery(self._address)
        while True:
            write(gallery, number)
            _tell(f"wrote {number}")
            number += 1
            if number % 9 == 0:
                gallery.compact(rebuild=number % 2 == 0)

    def compact(self, graphs_from: int) -> None:
        """Builds generations, of graphs when there are at least so many images, one after the other."""
        ann.EXACT_UP_TO = graphs_from
        gallery = open_gallery(self._address)
        while True:
            gallery.compact(rebuild=True)
            _tell("compacted 1")

    def search(self, count: int) -> None:
        """Answers with the titles of all items that a search finds, as often as it is asked."""
        gallery = open_gallery(self._address)
        _tell("ready 1")
        query = unit(*range(1, DIMENSION + 1))[None]
        for _ in range(count):
            sys.stdin.readline()
            hits = gallery.search(query, bundle_id=BUNDLE, top=1000).hits[0]
            _tell("found " + ",".join(hit.item.title for hit in hits))


def _tell(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def main(address: str) -> None:
    faiss()
    for line in sys.stdin:
        order, number = line.split()
        child = os.fork()
        if child == 0:
            getattr(Orders(address), order)(int(number))
            os._exit(0)
        _tell(f"pid {child}")
        _, status = os.waitpid(child, 0)
        _tell(f"ended {status}")


class Killed(NamedTuple):
    """What a child told before its end."""

    numbers: list[int]
    status: int


class Forge:
    """The process that forks children, from the side of a test."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin and process.stdout
        self._input, self._output = process.stdin, process.stdout

    def start(self, order: str, number: int) -> int:
        """Starts a child and answers its process id."""
        self._input.write(f"{order} {number}\n")
        self._input.flush()
        word, pid = self.told()
        assert word == "pid"
        return int(pid)

    def told(self) -> tuple[str, str]:
        line = self._output.readline()
        assert line.endswith("\n"), "the process that forks children has ended"
        word, said = line.rstrip("\n").split(" ", 1)
        return word, said

    def kill(self, pid: int) -> Killed:
        """Kills a child, and answers what it had told."""
        os.kill(pid, signal.SIGKILL)
        numbers: list[int] = []
        while True:
            word, number = self.told()
            if word == "ended":
                return Killed(numbers, int(number))
            numbers.append(int(number))


@contextmanager
def forging(gallery: Path) -> Iterator[Forge]:
    """Runs the process that forks children for one gallery."""
    command = [sys.executable, "-m", "tests.index.gallery.writing_process", str(gallery)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Forge(process)
        finally:
            process.kill()


if __name__ == "__main__":
    main(sys.argv[1])
