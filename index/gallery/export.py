"""Exports a gallery's items, images and vectors to a Parquet file, for analysis or another system."""

from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from index._util.files import atomic_write
from index.errors import LookalikeError
from index.gallery.backup import check_target
from index.gallery.store.base import BundleRow, FullImageRow, ItemStore, StoreReader
from index.gallery.types import Progress, no_progress


def write_parquet(
    store: ItemStore,
    file: Path,
    *,
    bundle_id: str | None = None,
    force: bool = False,
    group_rows: int = 8192,
    on_progress: Progress = no_progress,
) -> int:
    """Writes every image that has a vector of a bundle, by default the active one, all of one instant.

    Returns their number. The file's metadata names the bundle and the revision that it reflects. One row group of
    `group_rows` images is in memory at a time.
    """
    check_target(file, force=force)
    arrow, parquet = _pyarrow()
    try:
        with store.open_reader() as reader:
            bundle = _choose_bundle(reader, bundle_id)
            schema = _schema(arrow, bundle, reader.revision())
            total, done = reader.image_count(bundle.key), 0
            with (
                atomic_write(file) as temporary,
                parquet.ParquetWriter(temporary, schema, compression="zstd", write_statistics=False) as writer,
            ):
                for rows in _row_groups(reader, bundle, group_rows):
                    writer.write_table(_table(arrow, schema, rows), row_group_size=group_rows)
                    done += len(rows)
                    on_progress(done, total)
    except OSError as error:
        raise LookalikeError(
            f"{file} could not be written; nothing was left behind: {error}.", "Free space on its disk."
        ) from error
    return done


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise LookalikeError(
            "Writing Parquet needs pyarrow.", 'Install it with: pip install "lookalike[parquet]"'
        ) from None
    return pyarrow, pyarrow.parquet


def _choose_bundle(reader: StoreReader, bundle_id: str | None) -> BundleRow:
    bundle = reader.bundle(bundle_id) if bundle_id else reader.head().bundle
    if bundle is None:
        known = ", ".join(row.id for row in reader.bundles()) or "none"
        missing = f"of bundle {bundle_id}" if bundle_id else "yet"
        raise LookalikeError(f"The gallery has no vectors {missing}.", f"Bundles with vectors: {known}.")
    return bundle


def _schema(arrow: Any, bundle: BundleRow, revision: int) -> Any:
    texts = ("item_id", "title", "url", "attributes", "image_id", "digest")
    # Single precision: not every reader of Parquet supports half precision.
    vector = arrow.list_(arrow.float32(), bundle.dimension)
    return arrow.schema(
        [*((name, arrow.string()) for name in texts), ("vector", vector)],
        metadata={"lookalike.bundle_id": bundle.id, "lookalike.revision": str(revision)},
    )


def _row_groups(reader: StoreReader, bundle: BundleRow, size: int) -> Iterator[list[FullImageRow]]:
    rows = chain.from_iterable(reader.full_images(bundle.key))
    while group := list(islice(rows, size)):
        yield group


def _table(arrow: Any, schema: Any, rows: list[FullImageRow]) -> Any:
    vectors = np.frombuffer(b"".join(row.vector for row in rows), "<f2").astype(np.float32)
    texts = [(row.item_id, row.title, row.url, row.attributes, row.id, row.digest) for row in rows]
    columns = [arrow.array(column, arrow.string()) for column in zip(*texts, strict=True)]
    columns.append(arrow.FixedSizeListArray.from_arrays(arrow.array(vectors), type=schema.field("vector").type))
    return arrow.Table.from_arrays(columns, schema=schema)
