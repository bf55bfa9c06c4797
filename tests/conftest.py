"""Fixtures of all packages' tests: the servers that run once per session."""

from collections.abc import Iterator

import pytest

from tests.support.postgres import PostgresServer, run_postgres


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server; tests take a schema each."""
    with run_postgres() as server:
        yield server
