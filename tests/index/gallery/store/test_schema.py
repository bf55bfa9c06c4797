"""The tables of the SQLite store: created once, and refused in a file of another schema version."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from index.errors import LookalikeError
from index.gallery import open_gallery
from index.gallery.store.schema import SCHEMA_VERSION, prepare
from index.gallery.store.sqlite_connection import connect


def test_tables_are_created_once(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    with closing(connect(path)) as connection:
        prepare(connection)
        connection.execute("UPDATE counters SET value = 7 WHERE name = 'revision'")
        prepare(connection)
        assert connection.execute("SELECT value FROM counters WHERE name = 'revision'").fetchone() == (7,)
        assert connection.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_store_of_another_schema_version_is_refused_and_not_changed(tmp_path: Path) -> None:
    open_gallery(tmp_path, create=True).close()
    with closing(sqlite3.connect(tmp_path / "catalogue.sqlite")) as database:
        database.execute("PRAGMA user_version = 99")
    for _ in range(2):
        with pytest.raises(LookalikeError, match=r"schema version 99; this release reads .* Use the release that"):
            open_gallery(tmp_path)
