"""Snapshots: a gallery in one file, made while it is used, and made a gallery again elsewhere.

A snapshot is a tar file: `snapshot.json` with the digest of every other member, the catalogue, and what saves work
after a restore: the live generation and the copies of bundles that the gallery keeps.
"""

import hashlib
import os
import re
import shutil
import sqlite3
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime
from io import BufferedReader, BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from pydantic import Field, ValidationError

from index._util.files import atomic_write, fsync_directory, temporary_sibling
from index._util.models import Frozen
from index.embedding.bundle import CARD_FILE, MODEL_FILE, README_FILE
from index.errors import LookalikeError
from index.gallery.gallery import BUNDLES
from index.gallery.store.sqlite import Catalogue
from index.gallery.store.sqlite_reader import BundleRow, Reader
from index.gallery.vectors.faiss.compaction import CATALOGUE_FILE, GENERATIONS
from index.gallery.vectors.faiss.generation import INDEX_FILE, MANIFEST_FILE, RECORDS_FILE, open_generation

CARD = "snapshot.json"
_MOST_CARD_BYTES = 1 << 20
_BLOCK = 1 << 20
_NAME = r"[0-9A-Za-z][0-9A-Za-z._-]*"
_GENERATION_FILES = (INDEX_FILE, RECORDS_FILE, MANIFEST_FILE)
_BUNDLE_FILES = (MODEL_FILE, CARD_FILE, README_FILE)
_MEMBER = re.compile(
    rf"{re.escape(CATALOGUE_FILE)}|{GENERATIONS}/{_NAME}/({'|'.join(map(re.escape, _GENERATION_FILES))})"
    rf"|{BUNDLES}/{_NAME}/({'|'.join(map(re.escape, _BUNDLE_FILES))})"
)
"""What a snapshot may hold: a name that is not of this form is never written to disk."""


class SnapshotError(LookalikeError):
    """A snapshot that cannot be written, or a file that is not a whole one."""

    kind = "snapshot"


class Snapshot(Frozen):
    """`snapshot.json`: what a snapshot holds."""

    format_version: Literal[1] = 1
    created: datetime
    change: int = Field(description="the newest write that it reflects")
    items: int
    images: int
    bundle_ids: list[str] = Field(description="bundles whose vectors the catalogue holds")
    generation: str | None = Field(description="the live generation; none if it was replaced while it was copied")
    digests: dict[str, str] = Field(description="SHA-256 of each member")


@contextmanager
def existing_catalogue(directory: Path) -> Iterator[Catalogue]:
    """The catalogue of a gallery that must be there."""
    if not (directory / CATALOGUE_FILE).is_file():
        raise LookalikeError(f"No gallery at {directory}.", "Check the path, or make one with `lookalike reindex`.")
    catalogue = Catalogue(directory / CATALOGUE_FILE)
    try:
        yield catalogue
    finally:
        catalogue.close()


def check_target(file: Path, *, force: bool) -> None:
    """Refuses a file that must not or cannot be written, before any work is done."""
    if file.is_dir():
        raise SnapshotError(f"{file} is a folder.", "Name a file.")
    if file.exists() and not force:
        raise SnapshotError(f"{file} is already there.", "Name another file, or replace it with --force.")
    if not file.parent.is_dir():
        raise SnapshotError(f"There is no folder {file.parent}.", "Make it, or name another file.")


def snapshot(directory: Path, file: Path, *, force: bool = False) -> Snapshot:
    """Writes all that a gallery holds at one instant into a file, whole or not at all, while others read and write."""
    check_target(file, force=force)
    try:
        with (
            existing_catalogue(directory) as catalogue,
            TemporaryDirectory(prefix=f".{file.name}.", dir=file.parent) as room,
            atomic_write(file) as temporary,
            ExitStack() as opened,
        ):
            copy = Path(room) / CATALOGUE_FILE
            catalogue.read.backup(copy)
            members, card = _gathered(directory, copy, opened)
            _write(temporary, card, members)
    except (OSError, sqlite3.DatabaseError) as error:
        raise SnapshotError(
            f"The snapshot {file} could not be written, and nothing of it was left: {error}.",
            "It takes room for the catalogue twice, the index and the bundles; if that is there, "
            f"run `lookalike gallery verify {directory}`.",
        ) from error
    return card


def _gathered(directory: Path, copy: Path, opened: ExitStack) -> tuple[dict[str, BufferedReader], Snapshot]:
    """The members of a snapshot, each an open file: a compaction may remove its name at any time."""
    with closing(Reader(copy)) as reader:
        current, bundles, (items, images) = reader.current(), reader.bundles(), reader.counts()
    members = _generation_files(directory, current.bundle, opened) if current.bundle else {}
    generation = current.bundle.generation if current.bundle and members else None
    with closing(sqlite3.connect(copy)) as database, database:
        # A catalogue must not name what does not come with it: such a gallery would be reported as damaged.
        database.execute(
            "UPDATE bundles SET generation = NULL, generation_change = 0 WHERE generation IS NOT ?", (generation,)
        )
    members[CATALOGUE_FILE] = opened.enter_context(copy.open("rb"))
    for bundle in bundles:
        for name in _BUNDLE_FILES:
            path = directory / BUNDLES / bundle.id / name
            if path.is_file():
                members[f"{BUNDLES}/{bundle.id}/{name}"] = opened.enter_context(path.open("rb"))
    card = Snapshot(
        created=datetime.now(UTC).replace(microsecond=0),
        change=current.change,
        items=items,
        images=images,
        bundle_ids=[bundle.id for bundle in bundles],
        generation=generation,
        digests={name: hashlib.file_digest(file, "sha256").hexdigest() for name, file in members.items()},
    )
    return members, card


def _generation_files(directory: Path, bundle: BundleRow, opened: ExitStack) -> dict[str, BufferedReader]:
    """The generation that the copied catalogue names; nothing if it is damaged or was replaced meanwhile."""
    if bundle.generation is None:
        return {}
    root = directory / GENERATIONS / bundle.generation
    try:
        open_generation(root)
        return {
            f"{GENERATIONS}/{bundle.generation}/{name}": opened.enter_context((root / name).open("rb"))
            for name in _GENERATION_FILES
        }
    except (LookalikeError, FileNotFoundError):
        return {}


def _write(path: Path, card: Snapshot, members: dict[str, BufferedReader]) -> None:
    text = (card.model_dump_json(indent=2) + "\n").encode()
    with tarfile.open(path, "w") as archive:
        for name, file in {CARD: BytesIO(text), **members}.items():
            member = tarfile.TarInfo(name)
            member.size = file.seek(0, os.SEEK_END)
            member.mtime = int(card.created.timestamp())
            file.seek(0)
            archive.addfile(member, file)


def restore(file: Path, directory: Path) -> Snapshot:
    """Makes a gallery of a snapshot in a new or empty folder; it appears whole and checked, or not at all."""
    directory = directory.resolve()
    if not file.is_file():
        raise SnapshotError(f"No snapshot at {file}.", "Check the path.")
    if directory.is_mount():
        raise SnapshotError(f"{directory} is the root of a volume.", "Name a new folder inside it.")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise SnapshotError(f"{directory} is not empty.", "A gallery is restored into a new or an empty folder.")
    staged = temporary_sibling(directory)
    try:
        staged.mkdir(parents=True)
        card = _unpack(file, staged)
        for folder in (*staged.glob("*/*/"), *staged.glob("*/"), staged):
            fsync_directory(folder)
        staged.rename(directory)
        fsync_directory(directory.parent)
    except OSError as error:
        raise SnapshotError(
            f"{directory} could not be restored, and nothing of it was left: {error}.",
            "Free space on its disk, or name another folder.",
        ) from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return card


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
                    raise SnapshotError(f"{file} holds {member.name!r}, which is no part of a snapshot.", remedy)
                if _extract(archive, member, staged / member.name) != digest:
                    raise SnapshotError(f"{member.name} in {file} is not as it was written.", remedy)
    except (tarfile.TarError, ValidationError, ValueError) as error:
        reason = f"its {CARD} says something else" if isinstance(error, ValidationError) else error
        raise SnapshotError(f"{file} is not a whole snapshot of a gallery: {reason}.", remedy) from None
    if missing:
        raise SnapshotError(f"{file} was cut short: it lacks {', '.join(missing)}.", remedy)
    return card


def _read_card(archive: tarfile.TarFile, member: tarfile.TarInfo | None) -> Snapshot:
    if member is None or member.name != CARD or member.size > _MOST_CARD_BYTES:
        raise ValueError(f"it does not begin with {CARD}")
    data = archive.extractfile(member)
    if data is None:
        raise ValueError(f"its {CARD} is no file")
    card = Snapshot.model_validate_json(data.read())
    for name in card.digests:
        if not _MEMBER.fullmatch(name):
            raise ValueError(f"its {CARD} names {name!r}")
    if CATALOGUE_FILE not in card.digests:
        raise ValueError("it has no catalogue")
    return card


def _extract(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> str:
    """Writes one member and answers the digest of what was written."""
    source, digest = archive.extractfile(member), hashlib.sha256()
    assert source is not None, "only regular files are extracted"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        while block := source.read(_BLOCK):
            file.write(block)
            digest.update(block)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()
