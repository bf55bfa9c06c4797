"""API keys: who may call the service, stored in one small file whose changes a running service applies.

A token is `lk_<id>_<secret>`: the prefix lets scanners recognise a leaked one, the id finds its entry, and the secret
has 256 random bits. The file holds only a SHA-256 of each token. Slow, salted hashes protect passwords, which can be
guessed; 256 random bits cannot, and one fast hash keeps every request cheap.
"""

import fcntl
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, get_args

from pydantic import AwareDatetime, Field, ValidationError

from index._util.files import atomic_write
from index._util.models import Frozen
from index.errors import LookalikeError

Scope = Literal["search", "write", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
"""In ascending order: each one includes those before it, so a key that may write may also search."""

_PREFIX = "lk_"
_ID_BYTES, _SECRET_BYTES = 4, 32
_MAX_NAME = 100
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class KeyFileError(LookalikeError):
    """The key file, or a requested change to it, is invalid."""

    kind = "keys"


class KeyFileUnreadable(KeyFileError):
    """The key file cannot be read, so nobody can be authorised."""

    kind = "keys-unreadable"


class KeyMissing(KeyFileError):
    """No key has this id."""

    kind = "key-missing"

    def __init__(self, key_id: str) -> None:
        super().__init__(f"There is no key {key_id!r}.", "List the keys for their ids.")


class Key(Frozen):
    """A key without its secret."""

    id: str
    name: str
    scopes: frozenset[Scope]
    created: AwareDatetime
    expires: AwareDatetime | None = None
    rotated: AwareDatetime | None = None

    @property
    def scope(self) -> Scope:
        """The scope that includes all others of the key."""
        return max(self.scopes, key=SCOPES.index)

    def allows(self, scope: Scope) -> bool:
        """Whether one of the key's scopes is or includes this one."""
        return any(SCOPES.index(own) >= SCOPES.index(scope) for own in self.scopes)

    def expired(self, now: datetime) -> bool:
        return self.expires is not None and now >= self.expires


class _Entry(Frozen):
    """A key as it is stored. After a rotation the former token stays valid for a grace period."""

    key: Key
    digest: _Digest
    former_digest: _Digest | None = None
    former_until: AwareDatetime | None = None

    def accepts(self, digest: str, now: datetime) -> bool:
        """Compares with both digests, each in constant time."""
        is_current = hmac.compare_digest(self.digest, digest)
        is_former = hmac.compare_digest(self.former_digest or self.digest, digest)
        return is_current or (is_former and self.former_until is not None and now < self.former_until)


class _File(Frozen):
    version: Literal[1] = 1
    keys: list[_Entry] = []


class _Loaded(NamedTuple):
    """The entries of the file as of this stamp."""

    stamp: tuple[int, int, int]
    entries: dict[str, _Entry]


def _digest(token: str) -> str:
    # A token that is not valid UTF-8 must be refused, not raise.
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()


def _utc_now() -> datetime:
    return datetime.now(UTC)


_EMPTY = _Loaded((0, 0, 0), {})
# Compared with when an id is unknown, so that the check takes as long.
_UNKNOWN_KEY = _Entry(
    key=Key(id="", name="", scopes=frozenset(), created=_utc_now()), digest=_digest(secrets.token_hex(_SECRET_BYTES))
)


class KeyRing:
    """The keys in a file. Every call sees what another process wrote before it.

    Without the file there are no keys. A file that cannot be read raises KeyFileUnreadable, also from `verify`: using
    what was read before would accept revoked keys. The folder must be writable, since the file is replaced.
    `on_change` is called once whenever the file cannot be read any more, or for another reason, and when it can again.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], datetime] = _utc_now,
        on_change: Callable[[KeyFileUnreadable | None], None] = lambda error: None,
    ) -> None:
        self._path = path
        self._clock = clock
        self._on_change = on_change
        self._loaded = _EMPTY
        self._reported = ""

    def create(self, name: str, scopes: Collection[Scope], expires_in: timedelta | None = None) -> str:
        """Adds a key and returns its token, which cannot be recovered later."""
        if not 0 < len(name) <= _MAX_NAME or not name.isprintable():
            raise KeyFileError(
                f"The name {name[:_MAX_NAME]!r} is not valid for a key.", "Use 1 to 100 printable characters."
            )
        if not scopes or not set(scopes) <= set(SCOPES):
            names = ", ".join(map(repr, scopes)) or "none"
            raise KeyFileError(f"Invalid scopes: {names}.", f"Choose from {', '.join(SCOPES)}.")
        if expires_in is not None and expires_in <= timedelta(0):
            raise KeyFileError(f"The key would expire after {expires_in}.", "Choose a time in the future.")
        with self._edit() as entries:
            now = self._clock()
            while (key_id := secrets.token_hex(_ID_BYTES)) in entries:
                pass
            token = _new_token(key_id)
            key = Key(
                id=key_id,
                name=name,
                scopes=frozenset(scopes),
                created=now,
                expires=None if expires_in is None else now + expires_in,
            )
            entries[key_id] = _Entry(key=key, digest=_digest(token))
        return token

    def list(self) -> list[Key]:
        """Returns all keys, the oldest first; expired ones stay until they are revoked."""
        return sorted((entry.key for entry in self._entries().values()), key=lambda key: (key.created, key.id))

    def revoke(self, key_id: str) -> None:
        """Removes a key; its token is refused from the next request on."""
        with self._edit() as entries:
            if entries.pop(key_id, None) is None:
                raise KeyMissing(key_id)

    def rotate(self, key_id: str, grace: timedelta = timedelta(0)) -> str:
        """Gives a key a new token. The former one stays valid for `grace`; any older one does not."""
        if grace < timedelta(0):
            raise KeyFileError(f"The grace period of {grace} is negative.", "Choose zero or more.")
        with self._edit() as entries:
            now = self._clock()
            entry = entries.get(key_id)
            if entry is None:
                raise KeyMissing(key_id)
            if entry.key.expired(now):
                raise KeyFileError(f"The key {key_id!r} has expired.", "Create another one.")
            token = _new_token(key_id)
            entries[key_id] = _Entry(
                key=entry.key.model_copy(update={"rotated": now}),
                digest=_digest(token),
                former_digest=entry.digest if grace else None,
                former_until=now + grace if grace else None,
            )
        return token

    def verify(self, token: str) -> Key | None:
        """Returns the key of a token that is valid now. Costs a stat of the file; thread-safe."""
        now = self._clock()
        key_id = token[len(_PREFIX) : len(_PREFIX) + 2 * _ID_BYTES]
        entry = self._entries().get(key_id, _UNKNOWN_KEY)
        return entry.key if entry.accepts(_digest(token), now) and not entry.key.expired(now) else None

    def check(self) -> None:
        """Raises KeyFileUnreadable if the file cannot be read."""
        self._entries()

    def _entries(self) -> dict[str, _Entry]:
        """Returns the keys of the file, which is read again when it was replaced."""
        try:
            entries = self._read()
        except KeyFileUnreadable as error:
            self._report(error)
            raise
        self._report(None)
        return entries

    def _report(self, error: KeyFileUnreadable | None) -> None:
        problem = error.problem if error else ""
        if problem != self._reported:
            self._reported = problem
            self._on_change(error)

    def _read(self) -> dict[str, _Entry]:
        try:
            if _stamp(self._path.stat()) != self._loaded.stamp:
                with self._path.open(encoding="utf-8") as file:
                    # Of the opened file, because the path may already name its successor.
                    stamp = _stamp(os.fstat(file.fileno()))
                    stored = _File.model_validate_json(file.read())
                self._loaded = _Loaded(stamp, {entry.key.id: entry for entry in stored.keys})
        except FileNotFoundError:
            self._loaded = _EMPTY
        except (ValidationError, UnicodeDecodeError):
            raise KeyFileUnreadable(f"The key file {self._path} is damaged.", "Restore it from a backup.") from None
        except OSError as error:
            raise KeyFileUnreadable(
                f"The key file {self._path} cannot be read: {error.strerror}.", "Check its permissions."
            ) from None
        return self._loaded.entries

    @contextmanager
    def _edit(self) -> Iterator[dict[str, _Entry]]:
        """Yields the entries to change and writes them on success; one edit at a time across all processes."""
        lock_file = self._path.with_name(f".{self._path.name}.lock")
        try:
            lock_file.touch(mode=0o600)
            with lock_file.open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                entries = dict(self._entries())
                yield entries
                self._write(entries)
        except OSError as error:
            raise KeyFileError(
                f"The key file {self._path} cannot be written: {error.strerror}.",
                "Choose a file in an existing, writable folder.",
            ) from None

    def _write(self, entries: dict[str, _Entry]) -> None:
        text = json.dumps(_File(keys=list(entries.values())).model_dump(mode="json"), indent=1)
        with atomic_write(self._path) as temporary:
            temporary.chmod(0o600)
            temporary.write_text(text + "\n", encoding="utf-8")
            # Clocks of file systems tick in milliseconds, and inode numbers are reused: without this, a reader that
            # compares stamps could miss the second of two quick edits.
            modified = max(temporary.stat().st_mtime_ns, self._loaded.stamp[0] + 1)
            os.utime(temporary, ns=(modified, modified))


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_mtime_ns, status.st_ino, status.st_size


def _new_token(key_id: str) -> str:
    return f"{_PREFIX}{key_id}_{secrets.token_hex(_SECRET_BYTES)}"
