"""Places: files on this machine or at an address, found, copied and read with limits, through `fsspec` where remote."""

import glob
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import unquote, urlsplit

from index.embedding.images import DEFAULT_LIMITS, ImageError, ImageLimits, read_file
from index.errors import LookalikeError

_T = TypeVar("_T")
_HTTP = ("http", "https")
_LOCAL = ("file", "local")
_IMAGE_SCHEMES = (*_HTTP, "s3")
_MAGIC = frozenset("*?[")
_ATTEMPTS = 3
_PIECE = 1 << 20
_WAIT_SECONDS = 0.3
"""Before the second attempt; the third waits twice as long."""


def scheme_of(place: str) -> str:
    """`s3` of `s3://bucket/key`; empty for a path of this machine, also one given as `file://`."""
    scheme, separator, _ = place.partition("://")
    return scheme.lower() if separator and scheme.lower() not in _LOCAL else ""


def local_path(place: str) -> Path:
    """The path that a place of this machine names."""
    scheme, separator, _ = place.partition("://")
    return Path(unquote(urlsplit(place).path)) if separator and scheme.lower() in _LOCAL else Path(place)


def name_of(place: str) -> str:
    """The file's name, without the query of a signed address."""
    path = urlsplit(place).path if scheme_of(place) in _HTTP else place
    return path.rpartition("/")[2]


def folder_of(place: str) -> str:
    """The folder or remote prefix that a file lies in."""
    if not scheme_of(place):
        return str(local_path(place).parent)
    whole = place.partition("?")[0].partition("#")[0] if scheme_of(place) in _HTTP else place
    return whole.rpartition("/")[0]


def joined(folder: str, value: str) -> str:
    """The place that `value` names, seen from a folder; ValueError for one that a table must not name."""
    remote = scheme_of(folder)
    if "://" in value:
        named = scheme_of(value)
        if remote and not named:
            raise ValueError(f"{value!r} is a file of this machine, named by a table from elsewhere")
        if "::" in value or (named and named not in (*_IMAGE_SCHEMES, remote)):
            raise ValueError(f"{value!r} is no address that is known; use a path or {', '.join(_IMAGE_SCHEMES)}")
        return value if named else str(local_path(value))
    if not remote:
        return str(local_path(folder) / value)
    if value.startswith("//"):
        return f"{remote}:{value}"
    root = f"{remote}://{urlsplit(folder).netloc}" if value.startswith("/") else folder.rstrip("/")
    return f"{root}/{value.lstrip('/')}"


class Places:
    """Reads files wherever they lie. Threads may share one."""

    def __init__(self, *, timeout: float = 30) -> None:
        self.timeout = timeout
        """Seconds to wait for a connection and for each piece; a whole image may take four times as long."""
        self._filesystems: dict[str, Any] = {}
        self._lock = threading.Lock()

    def matching(self, place: str) -> list[str]:
        """The files that a path, an address or a pattern names, in order; HTTP knows no patterns."""
        scheme = scheme_of(place)
        if scheme in _HTTP or (scheme and not _MAGIC & set(place)):
            return [place]
        if scheme:
            try:
                files = self.filesystem(scheme)
                found = sorted(files.unstrip_protocol(name) for name in files.glob(place))
            except LookalikeError:
                raise
            except Exception as error:  # each kind of store raises its own types
                raise _unlisted(place, error) from error
        else:
            path = local_path(place)
            found = [str(path)] if path.exists() else sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207
        if not found:
            problem = f"Nothing matches {place}." if _MAGIC & set(place) else f"No source at {place}."
            raise LookalikeError(problem, "Name a table, a pattern of tables, or a folder with one folder an item.")
        return found

    def copy(self, place: str, target: Path) -> None:
        """Brings a remote file here, of any size."""

        def attempt() -> None:
            with self._opened(place) as file, target.open("wb") as out:
                shutil.copyfileobj(file, out, _PIECE)

        try:
            _persistently(place, attempt)
        except LookalikeError:
            raise
        except Exception as error:  # as in `matching`
            raise _unlisted(place, error) from error

    def read(self, place: str, limits: ImageLimits = DEFAULT_LIMITS) -> bytes:
        """An image's bytes, or an ImageError whatever fails; no more than the limit is ever held."""
        if not scheme_of(place):
            return read_file(local_path(place), limits)
        try:
            data = _persistently(place, lambda: self._read(place, limits.max_bytes))
        except LookalikeError:
            raise
        except Exception as error:  # as in `matching`; one image must never stop a job
            raise _unread(place, error) from error
        if not data:
            raise ImageError("empty", f"{place} is empty (0 bytes).")
        return data

    def _read(self, place: str, limit: int) -> bytes:
        deadline = time.monotonic() + 4 * self.timeout
        data = bytearray()
        with self._opened(place) as file:
            while piece := file.read(_PIECE):
                data += piece
                if len(data) > limit:
                    raise ImageError(
                        "too_large", f"{place} has more than {limit:,} bytes, the limit.", "Offer a smaller file."
                    )
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not whole after {4 * self.timeout:g} seconds")
        return bytes(data)

    @contextmanager
    def _opened(self, place: str) -> Iterator[IO[bytes]]:
        scheme = scheme_of(place)
        # One plain request for HTTP: a known size and no blocks keep fsspec from asking for the size first.
        options = {"block_size": 0, "size": 1} if scheme in _HTTP else {}
        with self.filesystem(scheme).open(place, "rb", **options) as file:
            yield file

    def filesystem(self, scheme: str) -> Any:
        """What reads addresses of a scheme; a LookalikeError where its packages are missing."""
        with self._lock:
            if scheme not in self._filesystems:
                self._filesystems[scheme] = self._connected(scheme)
            return self._filesystems[scheme]

    def _connected(self, scheme: str) -> Any:
        # A listing remembered by an earlier job of this process would hide tonight's tables.
        fresh = {"skip_instance_cache": True, "use_listings_cache": False}
        try:
            import fsspec

            if scheme not in _HTTP:
                return fsspec.filesystem(scheme, **fresh)
            import aiohttp
        except ImportError as error:
            raise LookalikeError(
                f"Addresses of {scheme}:// need more packages ({error}).", 'Run: pip install "lookalike[remote]"'
            ) from None
        except ValueError as error:
            raise LookalikeError(
                f"{scheme}:// is no address that is known: {error}.", "Use s3:// or https://"
            ) from None
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.timeout, sock_read=self.timeout)
        return fsspec.filesystem(scheme, client_kwargs={"timeout": timeout, "trust_env": True}, **fresh)


def _persistently(place: str, attempt: Callable[[], _T]) -> _T:
    """Several attempts over HTTP; the other filesystems make their own."""
    for number in range(1, _ATTEMPTS if scheme_of(place) in _HTTP else 1):
        try:
            return attempt()
        except Exception as error:
            if isinstance(error, LookalikeError) or not _may_pass(error):
                raise
        time.sleep(number * _WAIT_SECONDS)
    return attempt()


def _may_pass(error: Exception) -> bool:
    """Whether another attempt may succeed: the server is busy or the network failed, not the address."""
    status = getattr(error, "status", None)
    if isinstance(status, int) and status:
        return status >= 500 or status == 429
    if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError | ValueError):
        return False
    # By name, since only those who read from S3 have botocore.
    of_botocore = {base.__name__ for base in type(error).__mro__} & {"HTTPClientError", "ConnectionError"}
    return isinstance(error, OSError) or bool(of_botocore) or type(error).__module__.startswith("aiohttp.")


def _unlisted(place: str, error: Exception) -> LookalikeError:
    return LookalikeError(f"{place} cannot be read: {_told(error)}.", "Check the address and the access to it.")


def _unread(place: str, error: Exception) -> ImageError:
    problem = f"{place} cannot be read: {_told(error)}."
    if _may_pass(error):
        return ImageError("unreachable", problem, "Check the server, and run again.")
    return ImageError("unreadable", problem, "Check the address and the access to it.")


def _told(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "it does not exist"
    if status := getattr(error, "status", None):
        return f"the server answered {status}"
    return (str(error) or type(error).__name__).rstrip(".")
