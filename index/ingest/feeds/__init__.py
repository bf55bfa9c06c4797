"""Feeds of shops: reads the exports of shop systems as tables of items, recognised by their content."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from index.ingest.feeds import google_merchant, google_product_search, shopify, woocommerce
from index.ingest.feeds.cells import FIELDS
from index.ingest.feeds.delimited import read_header
from index.ingest.options import SourceFormat
from index.ingest.tables import Row, Table, open_table
from index.items import MAX_TEXT_LENGTH

_ALWAYS_TABLES = (".jsonl", ".ndjson", ".parquet", ".pq")
_READERS: dict[SourceFormat, Callable[[Path, str], Table]] = {
    "google-merchant": google_merchant.read_feed,
    "shopify": shopify.read_export,
    "woocommerce": woocommerce.read_export,
    "google-product-search": google_product_search.read_csv,
}


def open_catalogue(
    file: Path,
    name: str,
    title: str,
    kind: SourceFormat | None = None,
    *,
    columns: Sequence[Collection[str]] = (("item_id",), ("image",)),
) -> Table:
    """Opens a table or a feed; messages call it `title`.

    Without a `kind`, its first line decides. It is a table if it has one of each of these columns.
    """
    kind = kind or detect_format(file, name, columns)
    if kind == "table":
        return open_table(file, name, title)
    feed = _READERS[kind](file, title)
    return feed._replace(rows=map(_drop_long_texts, feed.rows))


def detect_format(file: Path, name: str, columns: Sequence[Collection[str]]) -> SourceFormat:
    """Returns the format of a file by its first line; the ending of `name` decides only for tables with types."""
    if Path(name.lower().removesuffix(".gz")).suffix in _ALWAYS_TABLES:
        return "table"
    header = read_header(file)
    if header.text.startswith("<"):
        return "google-merchant"
    if all(any(one in header.columns for one in alternatives) for alternatives in columns):
        return "table"
    if google_product_search.is_first_line(header.columns):
        return "google-product-search"
    if shopify.is_header(header.columns):
        return "shopify"
    if woocommerce.is_header(header.columns):
        return "woocommerce"
    return "google-merchant" if google_merchant.is_header(header.columns) else "table"


def _drop_long_texts(row: Row) -> Row:
    """Returns a row without texts that are too long for an attribute: nobody filters by them."""
    long = [name for name, text in row.values.items() if isinstance(text, str) and len(text) > MAX_TEXT_LENGTH]
    kept = {name: value for name, value in row.values.items() if name not in long or name in FIELDS}
    return row._replace(values=kept)
