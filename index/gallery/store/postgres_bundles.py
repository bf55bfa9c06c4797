"""Copies of bundles in PostgreSQL, and in the cache folder of each machine that uses them."""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from index._util.files import create_directory, temporary_directory
from index.embedding.bundle import CARD_FILE, MODEL_FILE, README_FILE, Bundle, BundleError
from index.gallery.store.postgres_connection import Connection, Connections, store_errors

_FILES = (MODEL_FILE, CARD_FILE, README_FILE)
_PART_BYTES = 1 << 20


class BundleCopies:
    """Files of bundles, stored in parts."""

    def __init__(self, connections: Connections, folder: Path) -> None:
        self._connections = connections
        self._folder = folder

    def keep(self, bundle: Bundle) -> None:
        """Stores a copy, unless an intact one exists."""
        if self._is_intact(bundle.id):
            return
        with self._connections.borrow(fresh=True) as connection, store_errors(), connection.transaction():
            connection.execute("DELETE FROM bundle_copies WHERE id = %s", (bundle.id,))
            connection.execute("INSERT INTO bundle_copies (id) VALUES (%s)", (bundle.id,))
            query = "INSERT INTO bundle_files VALUES (%s, %s, %s, %b, %b)"
            for name in _FILES:
                for number, data in enumerate(_parts(bundle.directory / name)):
                    digest = hashlib.sha256(data).digest()
                    connection.execute(query, (bundle.id, name, number, data, digest))

    def _is_intact(self, bundle_id: str) -> bool:
        query = "SELECT count(*) > 0 AND bool_and(sha256(data) = digest) FROM bundle_files WHERE bundle = %s "
        return bool(self._connections.run(lambda it: it.execute(query, (bundle_id,)).fetchall()[0][0]))

    def has(self, bundle_id: str) -> bool:
        query = "SELECT EXISTS (SELECT 1 FROM bundle_copies WHERE id = %s)"
        return bool(self._connections.run(lambda it: it.execute(query, (bundle_id,)).fetchall()[0][0]))

    def load(self, bundle_id: str) -> Bundle:
        """Returns this machine's copy after checking it; fetches it first if it is missing or damaged."""
        copy = self._folder / bundle_id
        with suppress(BundleError):
            return Bundle.load(copy)
        self._connections.run(lambda connection: self._fetch(connection, bundle_id, copy))
        return Bundle.load(copy)

    def _fetch(self, connection: Connection, bundle_id: str, copy: Path) -> None:
        query = "SELECT extract(epoch FROM added) FROM bundle_copies WHERE id = %s"
        found = connection.execute(query, (bundle_id,)).fetchone()
        if found is None:
            raise BundleError(
                f"The gallery has no copy of bundle {bundle_id}.", "Index with it again, or pass its folder."
            )
        create_directory(self._folder)
        with temporary_directory(copy) as temporary:
            for name in _FILES:
                _fetch_file(connection, bundle_id, temporary / name)
            os.utime(temporary / CARD_FILE, (float(found[0]),) * 2)  # when the gallery got it
            if copy.exists():
                shutil.rmtree(copy)
            try:
                temporary.rename(copy)
            except OSError:
                if not copy.is_dir():  # otherwise another process was faster
                    raise

    def remove(self, bundle_id: str) -> None:
        """Removes this machine's copy; the one in PostgreSQL goes with its bundle's rows."""
        shutil.rmtree(self._folder / bundle_id, ignore_errors=True)


def _parts(path: Path) -> Iterator[bytes]:
    if not path.is_file():
        return
    with path.open("rb") as file:
        while data := file.read(_PART_BYTES):
            yield data


def _fetch_file(connection: Connection, bundle_id: str, path: Path) -> None:
    query = "SELECT data FROM bundle_files WHERE bundle = %s AND name = %s AND part = %s"
    number = 0
    with path.open("wb") as file:
        while row := connection.execute(query, (bundle_id, path.name, number), binary=True).fetchone():
            file.write(row[0])
            number += 1
    if not number:
        path.unlink()
