"""Snapshots: a gallery in one file, written while it is in use, and restored elsewhere.

A snapshot is a tar file: `snapshot.json` with the digest of every other member, the store, and what saves work
after a restore: the index of the active bundle and the copies of bundles.
"""

import hashlib
import os
import re
import sqlite3
import tarfile
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from index._util.files import atomic_write, fsync_directory, temporary_directory
from index._util.models import Frozen
from index.gallery.addresses import parse_address, redact
from index.gallery.errors import IndexDamaged, SnapshotError, StoreError
from index.gallery.store.base import ItemStore
from index.gallery.store.sqlite import BUNDLE_FILES, BUNDLES, STORE_FILE
from index.gallery.store.sqlite_reader import SQLiteReader
from index.gallery.vectors.base import VectorIndex
from index.gallery.vectors.faiss.index import GENERATION_FILES, GENERATIONS

CARD = "snapshot.json"
_MAX_CARD_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 20
_NAME = r"[0-9A-Za-z][0-9A-Za-z._-]*"
_MEMBER = re.compile(
    rf"{re.escape(STORE_FILE)}|{GENERATIONS}/{_NAME}/({'|'.join(map(re.escape, GENERATION_FILES))})"
    rf"|{BUNDLES}/{_NAME}/({'|'.join(map(re.escape, BUNDLE_FILES))})"
)
"""The names that a snapshot may hold; no other is ever written to disk."""


class Snapshot(Frozen):
    """`snapshot.json`: what a snapshot holds."""

    format_version: Literal[2] = 2
    created: datetime
    revision: int
    items: int
    images: int
    bundle_ids: list[str] = Field(description="bundles whose vectors the store holds")
    index_name: str | None = Field(
        description="the active bundle's index; null if it was replaced while it was copied, or is damaged"
    )
    digests: dict[str, str] = Field(description="SHA-256 of each member")


def check_target(file: Path, *, force: bool) -> None:
    """Refuses a file that must not or cannot be written."""
    if file.is_dir():
        raise SnapshotError(f"{file} is a folder.", "Name a file.")
    if file.exists() and not force:
        raise SnapshotError(f"{file} exists.", "Name another file, or replace it with --force.")
    if not file.parent.is_dir():
        raise SnapshotError(f"The folder {file.parent} does not exist.", "Create it, or name another file.")


def write_snapshot(store: ItemStore, index: VectorIndex, file: Path, *, force: bool = False) -> Snapshot:
    """Writes a snapshot atomically, while others read and write."""
    check_target(file, force=force)
    try:
        with (
            temporary_directory(file) as folder,
            atomic_write(file) as temporary,
            ExitStack() as stack,
        ):
            members, card = _collect(store, index, folder, stack)
            _write(temporary, card, members)
    except (OSError, StoreError) as error:
        reason = error.problem if isinstance(error, StoreError) else f"{error}."
        raise SnapshotError(
            f"The snapshot {file} could not be written; nothing was left behind: {reason}",
            "It needs space for the store twice, the index and the bundles; if that is free, "
            "run `lookalike gallery verify`.",
        ) from error
    return card


def _collect(
    store: ItemStore, index: VectorIndex, folder: Path, stack: ExitStack
) -> tuple[dict[str, BufferedReader], Snapshot]:
    """Returns the members of a snapshot as open files: a compaction may remove their names at any time."""
    paths = store.files(folder)
    with closing(SQLiteReader(paths[STORE_FILE])) as reader:
        head, bundles, (items, images) = reader.head(), reader.bundles(), reader.counts()
    members: dict[str, BufferedReader] = {}
    try:
        indexed = index.files(head.bundle) if head.bundle else {}
        members = {name: stack.enter_context(path.open("rb")) for name, path in indexed.items()}
    except (IndexDamaged, FileNotFoundError):
        members = {}
    members |= {name: stack.enter_context(path.open("rb")) for name, path in paths.items()}
    card = Snapshot(
        created=datetime.now(UTC).replace(microsecond=0),
        revision=head.revision,
        items=items,
        images=images,
        bundle_ids=[bundle.id for bundle in bundles],
        index_name=head.bundle.index_name if head.bundle and len(members) > len(paths) else None,
        digests={name: hashlib.file_digest(file, "sha256").hexdigest() for name, file in members.items()},
    )
    return members, card


def _write(path: Path, card: Snapshot, members: dict[str, BufferedReader]) -> None:
    text = (card.model_dump_json(indent=2) + "\n").encode()
    with tarfile.open(path, "w") as archive:
        for name, file in {CARD: BytesIO(text), **members}.items():
            member = tarfile.TarInfo(name)
            member.size = file.seek(0, os.SEEK_END)
            member.mtime = int(card.created.timestamp())
            file.seek(0)
            archive.addfile(member, file)


def restore_gallery(file: Path, address: str | Path) -> Snapshot:
    """Restores a snapshot into a new or empty folder, atomically, after checking every byte."""
    if not parse_address(address).is_folder:
        raise SnapshotError(
            f"A snapshot is restored into a folder, not into {redact(address)}.",
            "Restore it into a new folder, and copy that: lookalike gallery copy.",
        )
    directory = Path(address).resolve()
    if not file.is_file():
        raise SnapshotError(f"No snapshot at {file}.", "Check the path.")
    if directory.is_mount():
        raise SnapshotError(f"{directory} is the root of a volume.", "Name a new folder inside it.")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise SnapshotError(f"{directory} is not empty.", "Name a new or an empty folder.")
    try:
        with temporary_directory(directory) as staged:
            card = _unpack(file, staged)
            _forget_missing_indexes(staged, card)
            for folder in (*staged.glob("*/*/"), *staged.glob("*/"), staged):
                fsync_directory(folder)
            staged.rename(directory)
            fsync_directory(directory.parent)
    except OSError as error:
        raise SnapshotError(
            f"{directory} could not be restored; nothing was left behind: {error}.",
            "Free space on its disk, or name another folder.",
        ) from error
    return card


def _forget_missing_indexes(directory: Path, card: Snapshot) -> None:
    """Removes the names of indexes that are not part of the snapshot: else they would be reported as damaged."""
    with closing(sqlite3.connect(directory / STORE_FILE)) as database, database:
        database.execute(
            "UPDATE bundles SET index_name = NULL, index_revision = 0 WHERE index_name IS NOT ?", (card.index_name,)
        )


def _unpack(file: Path, staged: Path) -> Snapshot:
    remedy = "Restore another snapshot."
    try:
        with tarfile.open(file, "r:") as archive:
            members = iter(archive)
            card = _read_card(archive, next(members, None))
            missing = dict(card.digests)
            for member in members:
                digest = missing.pop(member.name, None)
                if digest is None or member.type != tarfile.REGTYPE or member.issparse():
                    raise SnapshotError(f"{file} holds {member.name!r}, which is not part of a snapshot.", remedy)
                if _extract(archive, member, staged / member.name) != digest:
                    raise SnapshotError(f"{member.name} in {file} differs from what was written.", remedy)
    except (tarfile.TarError, ValidationError, ValueError) as error:
        reason = f"its {CARD} is invalid" if isinstance(error, ValidationError) else error
        raise SnapshotError(f"{file} is not a complete snapshot of a gallery: {reason}.", remedy) from None
    if missing:
        raise SnapshotError(f"{file} is truncated: it lacks {', '.join(missing)}.", remedy)
    return card


def _read_card(archive: tarfile.TarFile, member: tarfile.TarInfo | None) -> Snapshot:
    if member is None or member.name != CARD or member.size > _MAX_CARD_BYTES:
        raise ValueError(f"it does not begin with {CARD}")
    data = archive.extractfile(member)
    if data is None:
        raise ValueError(f"its {CARD} is not a file")
    card = Snapshot.model_validate_json(data.read())
    for name in card.digests:
        if not _MEMBER.fullmatch(name):
            raise ValueError(f"its {CARD} names {name!r}")
    if STORE_FILE not in card.digests:
        raise ValueError(f"it has no {STORE_FILE}")
    return card


def _extract(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> str:
    """Writes one member and returns the digest of what was written."""
    source, digest = archive.extractfile(member), hashlib.sha256()
    assert source is not None, "only regular files are extracted"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        while block := source.read(_CHUNK_BYTES):
            file.write(block)
            digest.update(block)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()
