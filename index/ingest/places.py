"""Places: the paths and addresses of files, and which of them the rows of a source may name.

Whoever writes a catalogue is not the operator who runs the job. A row must not publish other files of the machine, nor
objects that only the operator's credentials can read.
"""

import os
import stat
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Self
from urllib.parse import unquote, urlsplit

from index._util.addresses import AllowedAddresses
from index.embedding.image_headers import DEFAULT_LIMITS, ImageError, ImageLimits, check_bytes

HTTP = ("http", "https")
_LOCAL = ("file", "local")
# O_PATH, where it exists: a folder need not be readable to open a file in it.
_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | getattr(os, "O_PATH", os.O_RDONLY)
# O_NONBLOCK: opening a pipe would wait for its writer.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK


def url_scheme(place: str) -> str:
    """Returns `s3` for `s3://bucket/key`; empty for a path on this machine, also one given as `file://`."""
    scheme, separator, _ = place.partition("://")
    return scheme.lower() if separator and scheme.lower() not in _LOCAL else ""


def local_path(place: str) -> Path:
    """Returns the path of a place on this machine."""
    scheme, separator, _ = place.partition("://")
    return Path(unquote(urlsplit(place).path)) if separator and scheme.lower() in _LOCAL else Path(place)


def file_name(place: str) -> str:
    """Returns the file's name, without the query of a signed URL."""
    path = urlsplit(place).path if url_scheme(place) in HTTP else place
    return path.rpartition("/")[2]


def parent_folder(place: str) -> str:
    """Returns the folder or remote prefix of a file."""
    if not url_scheme(place):
        return str(local_path(place).parent)
    path = place.partition("?")[0].partition("#")[0] if url_scheme(place) in HTTP else place
    return path.rpartition("/")[0]


def resolve_place(folder: str, value: str) -> str:
    """Returns the place of `value` relative to a folder."""
    if "://" in value:
        return value if url_scheme(value) else str(local_path(value))
    remote = url_scheme(folder)
    if not remote:
        return str(local_path(folder) / value)
    if value.startswith("//"):
        return f"{remote}:{value}"
    root = f"{remote}://{urlsplit(folder).netloc}" if value.startswith("/") else folder.rstrip("/")
    return f"{root}/{value.lstrip('/')}"


class AllowedPlaces(NamedTuple):
    """A row may name what is below its own folder or one of `folders`, and http(s) URLs that lead to `addresses`.

    Its own folder is that of its table, or the one that its images are relative to. Links are resolved first.
    """

    folders: tuple[str, ...] = ()
    """Absolute paths, and remote prefixes such as s3://bucket/photos."""
    addresses: AllowedAddresses = AllowedAddresses()

    @classmethod
    def of(cls, folders: Sequence[str], addresses: Sequence[str]) -> Self:
        """Returns the rule for the options of a job."""
        return cls(tuple(map(absolute_place, folders)), AllowedAddresses.parse(addresses))

    def permits(self, place: str, folder: str) -> bool:
        """Whether a row of `folder` may name a place; the address of a URL is checked when it is connected to."""
        scheme = url_scheme(place)
        if not scheme:
            return self._root(_resolve(local_path(place)), folder) is not None
        prefixes = [prefix.rstrip("/") for prefix in (folder, *self.folders) if url_scheme(prefix) == scheme]
        is_below = any(place.startswith(f"{prefix}/") for prefix in prefixes)
        # Stores differ in whether they resolve `..`.
        return scheme in HTTP or (is_below and ".." not in unquote(place).split("/"))

    def read_file(self, place: str, folder: str, limits: ImageLimits = DEFAULT_LIMITS) -> bytes:
        """Returns the bytes of a photo on this machine; raises ImageError. A file over the limit is not read."""
        path = local_path(place)
        try:
            target = _resolve(path)
            root = self._root(target, folder)
            if root is None:
                raise forbidden_place(place, folder)
            descriptor = _open_below(root, target)
            try:
                return _read_regular(descriptor, limits)
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
            cause = getattr(error, "strerror", None) or error
            raise ImageError("unreadable", f"{path} cannot be read: {cause}.", "Check the path.") from error

    def _root(self, target: str, folder: str) -> str | None:
        """Returns the allowed folder that a path is below, both without links and with a slash at the folder's end."""
        roots = (_resolve_folder(root) for root in (folder, *self.folders) if not url_scheme(root))
        return next((root for root in roots if target.startswith(root)), None)


OWN_FOLDER = AllowedPlaces()
"""Only the row's own folder and public addresses."""


def absolute_place(place: str) -> str:
    """Returns a place that does not depend on the working directory."""
    return place if url_scheme(place) else str(local_path(place).absolute())


def forbidden_place(place: str, folder: str) -> ImageError:
    """Returns the error of a place that a row must not name."""
    allow = "allow its prefix with --allow-folder, or read a copy with --mirror"
    return ImageError(
        "forbidden",
        f"{place} is outside {absolute_place(folder)}.",
        f"Move it there, {allow if url_scheme(place) else 'or allow its folder with --allow-folder'}.",
    )


def _resolve(path: Path) -> str:
    """Returns a path without links and `..`; a part that does not exist is kept."""
    return os.path.realpath(path)


def _resolve_folder(folder: str) -> str:
    # A relative folder is not cached: the working directory may change.
    return _resolve_absolute(folder) if folder.startswith("/") else _resolve_absolute(absolute_place(folder))


@lru_cache(64)
def _resolve_absolute(folder: str) -> str:
    return f"{_resolve(Path(folder)).rstrip('/')}/"


def _open_below(root: str, target: str) -> int:
    """Opens a file without following a link that replaced a part of its path after it was resolved."""
    *parts, name = target[len(root) :].split("/")
    folder = os.open(root, _FOLDER)
    try:
        for part in parts:
            inner = os.open(part, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = inner
        return os.open(name, _FILE, dir_fd=folder)
    finally:
        os.close(folder)


def _read_regular(descriptor: int, limits: ImageLimits) -> bytes:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(0, "Not a regular file")
    check_bytes(status.st_size, limits)
    with os.fdopen(descriptor, "rb", closefd=False) as file:
        return file.read(status.st_size)
