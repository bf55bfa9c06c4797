"""Files on this machine or at an address: listed, copied and read with limits, through `fsspec` where remote."""

import glob
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

from index._util.addresses import ForbiddenAddress
from index._util.imports import require
from index.embedding.images import DEFAULT_LIMITS, ImageError, ImageLimits
from index.errors import LookalikeError
from index.ingest.places import HTTP, OWN_FOLDER, AllowedPlaces, forbidden_place, local_path, url_scheme

_T = TypeVar("_T")
_MODULES = {"s3": ["fsspec", "s3fs"], "http": ["fsspec", "aiohttp"], "https": ["fsspec", "aiohttp"]}
_MAGIC = frozenset("*?[")
_BLOCK_BYTES = 1 << 20


class RetrySettings(NamedTuple):
    """Timeouts and retries over HTTP; the other filesystems of fsspec have their own."""

    timeout: float = 30.0
    """Seconds to wait for a connection and for each block; an image may take four times as long."""
    attempts: int = 3
    backoff: float = 0.3
    """Seconds before the second attempt; the wait grows by as much with each further one."""


DEFAULT_RETRIES = RetrySettings()


class FileReader:
    """Reads local and remote files: tables from anywhere, photos from allowed places. Threads may share one."""

    def __init__(self, allowed: AllowedPlaces = OWN_FOLDER, settings: RetrySettings = DEFAULT_RETRIES) -> None:
        self._allowed = allowed
        self._settings = settings
        self._filesystems: dict[tuple[str, bool], Any] = {}
        self._lock = threading.Lock()

    def matching(self, place: str) -> list[str]:
        """Returns the files that a path, an address or a pattern matches, sorted; HTTP has no patterns."""
        scheme = url_scheme(place)
        if scheme in HTTP or (scheme and not _MAGIC & set(place)):
            return [place]
        if scheme:
            try:
                files = self.filesystem(scheme)
                found = sorted(files.unstrip_protocol(name) for name in files.glob(place))
            except LookalikeError:
                raise
            except Exception as error:  # each kind of store raises its own types
                raise _table_error(place, error) from error
        else:
            path = local_path(place)
            found = [str(path)] if path.exists() else sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207
        if not found:
            problem = f"Nothing matches {place}." if _MAGIC & set(place) else f"No source at {place}."
            raise LookalikeError(problem, "Give a table, a pattern of tables, or a folder with one folder per item.")
        return found

    def copy(self, place: str, target: Path) -> None:
        """Copies a remote file of any size to this machine."""

        def attempt() -> None:
            with self._open(self.filesystem(url_scheme(place)), place) as file, target.open("wb") as out:
                shutil.copyfileobj(file, out, _BLOCK_BYTES)

        try:
            self._retry(place, attempt)
        except LookalikeError:
            raise
        except Exception as error:  # as in `matching`
            raise _table_error(place, error) from error

    def read(self, place: str, folder: str, limits: ImageLimits = DEFAULT_LIMITS) -> bytes:
        """Returns the bytes of an image that a row of `folder` names; raises ImageError whatever fails.

        It never holds more than the limit.
        """
        if not url_scheme(place):
            return self._allowed.read_file(place, folder, limits)
        if not self._allowed.permits(place, folder):
            raise forbidden_place(place, folder)
        try:
            data = self._retry(place, lambda: self._read(place, limits.max_bytes))
        except LookalikeError:
            raise
        except Exception as error:  # as in `matching`; a single image must never stop a job
            raise _image_error(place, error) from error
        if not data:
            raise ImageError("empty", f"{place} is empty (0 bytes).")
        return data

    def _read(self, place: str, limit: int) -> bytes:
        seconds = 4 * self._settings.timeout
        deadline = time.monotonic() + seconds
        data = bytearray()
        with self._open(self.filesystem(url_scheme(place), checked=True), place) as file:
            while block := file.read(_BLOCK_BYTES):
                data += block
                if len(data) > limit:
                    raise ImageError(
                        "too_large", f"{place} is larger than the limit of {limit:,} bytes.", "Provide a smaller file."
                    )
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not complete after {seconds:g} seconds")
        return bytes(data)

    @contextmanager
    def _open(self, files: Any, place: str) -> Iterator[IO[bytes]]:
        # One plain request over HTTP: with a given size and no blocks, fsspec does not request the size first.
        options = {"block_size": 0, "size": 1} if url_scheme(place) in HTTP else {}
        with files.open(place, "rb", **options) as file:
            yield file

    def filesystem(self, scheme: str, *, checked: bool = False) -> Any:
        """Returns the filesystem of a scheme; raises LookalikeError if its packages are missing.

        With `checked`, an HTTP filesystem connects to allowed addresses only.
        """
        with self._lock:
            key = (scheme, checked)
            if key not in self._filesystems:
                self._filesystems[key] = self._connect(scheme, checked)
            return self._filesystems[key]

    def _connect(self, scheme: str, checked: bool) -> Any:
        # A listing cached by an earlier job of this process would hide new tables.
        uncached = {"skip_instance_cache": True, "use_listings_cache": False}
        for module in _MODULES.get(scheme, ["fsspec"]):
            require(module, extra="remote")
        import fsspec

        if scheme in HTTP:
            import aiohttp

            from index.ingest.checked_http import CheckedHTTP

            seconds = self._settings.timeout
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=seconds, sock_read=seconds)
            client = {"get_client": CheckedHTTP(self._allowed.addresses).session} if checked else {}
            options = {"client_kwargs": {"timeout": timeout, "trust_env": True}, **client, **uncached}
            return fsspec.filesystem(scheme, **options)
        try:
            return fsspec.filesystem(scheme, **uncached)
        except (ImportError, ValueError) as error:
            raise LookalikeError(f"{scheme}:// is not supported: {error}.", "Use s3:// or https://") from None

    def _retry(self, place: str, attempt: Callable[[], _T]) -> _T:
        """Repeats an attempt over HTTP after transient errors, with back-off; other filesystems retry on their own."""
        for number in range(1, self._settings.attempts if url_scheme(place) in HTTP else 1):
            try:
                return attempt()
            except Exception as error:
                if not _is_transient(error):
                    raise
            time.sleep(number * self._settings.backoff)
        return attempt()


def _is_transient(error: Exception) -> bool:
    """Returns whether another attempt may succeed: the server is busy or the network failed, the address is right."""
    if isinstance(error, LookalikeError):
        return False
    status = getattr(error, "status", None)
    if isinstance(status, int) and status:
        return status >= 500 or status == 429
    if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError | ValueError) or _is_forbidden(error):
        return False
    # By name: botocore is installed only for S3.
    botocore_types = {base.__name__ for base in type(error).__mro__} & {"HTTPClientError", "ConnectionError"}
    return isinstance(error, OSError) or bool(botocore_types) or type(error).__module__.startswith("aiohttp.")


def _is_forbidden(error: Exception) -> bool:
    """Returns whether a connection was not allowed; aiohttp raises an error of its own from it."""
    return isinstance(error.__cause__, ForbiddenAddress)


def _table_error(place: str, error: Exception) -> LookalikeError:
    return LookalikeError(f"Cannot read {place}: {_describe(error)}.", "Check the address and the access rights.")


def _image_error(place: str, error: Exception) -> ImageError:
    if _is_forbidden(error):
        problem = f"{place} leads to an address that is not public."
        return ImageError("forbidden", problem, "Allow its host with --allow-address, or use another.")
    problem = f"Cannot read {place}: {_describe(error)}."
    if _is_transient(error):
        return ImageError("unreachable", problem, "Check the server, and run again.")
    return ImageError("unreadable", problem, "Check the address and the access rights.")


def _describe(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "it does not exist"
    if status := getattr(error, "status", None):
        return f"the server returned status {status}"
    return (str(error) or type(error).__name__).rstrip(".")
