"""Exporting: a gallery's items, images and vectors as a Parquet file, for analysis or another system."""

from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from index._util.files import atomic_write
from index.errors import LookalikeError
from index.gallery.backup import check_target, existing_catalogue
from index.gallery.store.sqlite_reader import BundleRow, Reader, WholeImage

_GROUP = 8192
"""Images of a row group, which is what is in memory at a time."""


def export_parquet(
    directory: Path,
    file: Path,
    *,
    bundle_id: str | None = None,
    force: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Writes every image that has a vector of a bundle, by default the live one, all of one instant.

    Answers how many. The file's metadata names the bundle and the change that it reflects.
    """
    check_target(file, force=force)
    arrow, parquet = _pyarrow()
    try:
        with existing_catalogue(directory) as catalogue, catalogue.reading() as reader:
            bundle = _chosen(reader, bundle_id)
            schema = _schema(arrow, bundle, reader.change())
            total, done = reader.image_count(bundle.key), 0
            with (
                atomic_write(file) as temporary,
                parquet.ParquetWriter(temporary, schema, compression="zstd", write_statistics=False) as writer,
            ):
                for rows in _groups(reader, bundle):
                    writer.write_table(_table(arrow, schema, rows), row_group_size=_GROUP)
                    done += len(rows)
                    on_progress(done, total)
    except OSError as error:
        raise LookalikeError(
            f"{file} could not be written, and nothing of it was left: {error}.", "Free space on its disk."
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


def _chosen(reader: Reader, bundle_id: str | None) -> BundleRow:
    bundle = reader.bundle(bundle_id) if bundle_id else reader.current().bundle
    if bundle is None:
        known = ", ".join(row.id for row in reader.bundles()) or "none"
        wanted = f"of bundle {bundle_id}" if bundle_id else "yet"
        raise LookalikeError(f"The gallery has no vectors {wanted}.", f"It has those of: {known}.")
    return bundle


def _schema(arrow: Any, bundle: BundleRow, change: int) -> Any:
    texts = ("item_id", "title", "url", "attributes", "image_id", "digest")
    # Full precision, though half would hold the same: not every reader of Parquet knows half-precision numbers.
    vector = arrow.list_(arrow.float32(), bundle.dimension)
    return arrow.schema(
        [*((name, arrow.string()) for name in texts), ("vector", vector)],
        metadata={"lookalike.bundle_id": bundle.id, "lookalike.change": str(change)},
    )


def _groups(reader: Reader, bundle: BundleRow) -> Iterator[list[WholeImage]]:
    rows = chain.from_iterable(reader.whole_images(bundle.key))
    while group := list(islice(rows, _GROUP)):
        yield group


def _table(arrow: Any, schema: Any, rows: list[WholeImage]) -> Any:
    vectors = np.frombuffer(b"".join(row.vector for row in rows), "<f2").astype(np.float32)
    texts = [(row.item_id, row.title, row.url, row.attributes, row.id, row.digest) for row in rows]
    columns = [arrow.array(column, arrow.string()) for column in zip(*texts, strict=True)]
    columns.append(arrow.FixedSizeListArray.from_arrays(arrow.array(vectors), type=schema.field("vector").type))
    return arrow.Table.from_arrays(columns, schema=schema)
