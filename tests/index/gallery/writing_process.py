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

from index._util.imports import faiss
from index.gallery import Gallery, open_gallery
from index.gallery.types import Item
from index.gallery.vectors.faiss.settings import FaissSettings

from .reference import BUNDLE, PlainGallery, photo, unit

DIMENSION = 6
WRITERS, WRITTEN = 6, 4


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
    """What a child can be told to do."""

    def __init__(self, address: str) -> None:
        self._address = address

    def write(self, number: int) -> None:
        """Until it is killed: writes from a number on, tells each when it was acknowledged, and often compacts."""
        gallery = open_gallery(self._address)
        while True:
            write(gallery, number)
            _tell("wrote", str(number))
            number += 1
            if number % 9 == 0:
                gallery.compact(rebuild=number % 2 == 0)

    def compact(self, graphs_from: int) -> None:
        """Until it is killed: builds generations, of graphs when there are more images than given."""
        gallery = open_gallery(self._address, faiss_settings=FaissSettings(exact_up_to=graphs_from))
        while True:
            gallery.compact(rebuild=True)
            _tell("compacted", "1")

    def obey(self, count: int) -> None:
        """Does what it reads so many times: makes the write of a number, or tells what a search finds."""
        gallery = open_gallery(self._address)
        _tell("ready")
        for _ in range(count):
            word, number = sys.stdin.readline().split()
            if word == "write":
                write(gallery, int(number))
                _tell("wrote", number)
            else:
                _tell("found", ",".join(sorted(found(gallery))))

    def race(self, attempt: int) -> None:
        """Makes a new gallery in several processes at the same time, each of which stores some items."""
        start, go = os.pipe()
        children = []
        for writer in range(WRITERS):
            children.append(os.fork())
            if children[-1] == 0:
                os.close(go)
                os.read(start, 1)  # until the parent closes its end, which all notice at once
                gallery = open_gallery(f"{self._address}-{attempt}", create=True)
                for number in range(WRITTEN):
                    picture = photo(f"of {writer}", unit(writer + 1, number + 1))
                    gallery.upsert([(Item(id=f"{writer}-{number}"), [picture]), (Item(id="all"), [picture])], BUNDLE)
                os._exit(0)
        os.close(go)
        statuses = [os.waitpid(child, 0)[1] for child in children]
        _tell("raced", " ".join(map(str, statuses)))


def found(gallery: Gallery) -> set[str]:
    """All that a search finds, each item with the number of the write that it is as of."""
    hits = gallery.search(unit(*range(1, DIMENSION + 1))[None], bundle_id=BUNDLE, top=1000).hits[0]
    return {f"{hit.item.id} {hit.item.title} {hit.image.digest}" for hit in hits}


def _tell(word: str, said: str = "") -> None:
    # In one piece, and past Python's buffer: nothing of it is lost when the process is killed.
    os.write(1, f"{word} {said}\n".encode())


def main(address: str) -> None:
    faiss()
    for line in sys.stdin:
        order, number = line.split()
        child = os.fork()
        if child == 0:
            getattr(Orders(address), order)(int(number))
            os._exit(0)
        _tell("pid", str(child))
        _, status = os.waitpid(child, 0)
        _tell("ended", str(status))


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
        self.order(order, number)
        word, pid = self.told()
        assert word == "pid"
        return int(pid)

    def order(self, word: str, number: int = 0) -> None:
        self._input.write(f"{word} {number}\n")
        self._input.flush()

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
