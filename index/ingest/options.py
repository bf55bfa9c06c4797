"""The options of a re-indexing job, defined once for the command line, the HTTP API and the job's own process.

Imports neither NumPy nor an engine, so that the HTTP client and `lookalike --help` can use it.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from typing_extensions import TypeAliasType

from index._util.addresses import AllowedAddresses
from index._util.models import Frozen

SourceFormat = Literal["table", "google-merchant", "shopify", "woocommerce", "google-product-search"]


def _parse_columns(value: Any) -> Any:
    return _parse_pairs(value, "NAME=COLUMN, such as item_id=sku")


def _parse_mirrors(value: Any) -> Any:
    return _parse_pairs(value, "PREFIX=FOLDER, such as https://cdn.shop.example/=/srv/photos")


def _parse_lists(value: Any) -> Any:
    return _parse_pairs(value, "NAME=SEPARATOR, such as 'sizes=|'")


def _parse_pairs(value: Any, form: str) -> Any:
    """Returns a list of NAME=VALUE, as the command line takes it, as a mapping."""
    if not isinstance(value, list):
        return value
    pairs = [str(text).partition("=") for text in value]
    for text, (name, equals, own) in zip(value, pairs, strict=True):
        if not (name and equals and own):
            raise ValueError(f"{text!r} is not of the form {form}")
    return {name: own for name, _, own in pairs}


def _split_names(value: Any) -> Any:
    """Returns a text of names separated by commas as a list."""
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


def _check_addresses(texts: list[str]) -> list[str]:
    AllowedAddresses.parse(texts)
    return texts


ListSeparators = TypeAliasType("ListSeparators", dict[str, Annotated[str, Field(min_length=1)]])
"""Attributes, and what separates the values of each."""
AddressList = Annotated[list[str], AfterValidator(_check_addresses)]
"""Host names, IP addresses and networks."""


class CommonOptions(Frozen):
    """The options that the command line and the HTTP API share: what a job may delete, and what it must reach."""

    delete_missing: bool = Field(
        default=False, description="Remove the items and images that are no longer in the source."
    )
    max_delete: float = Field(
        default=0.2,
        ge=0,
        le=1,
        description="Fail if more than this share of the gallery's images would be deleted, or lacks a vector of a new "
        "bundle.",
    )
    lists: Annotated[ListSeparators, BeforeValidator(_parse_lists)] = Field(
        default={}, description="Separator of an attribute's values, where a text lists several: sizes=|."
    )
    max_rejects: float = Field(
        default=1.0, ge=0, le=1, description="Fail if more than this share of the source's images and rows is rejected."
    )
    queries: str | None = Field(
        default=None, description="Source of labelled photos whose recall@1 is measured before the bundle is activated."
    )
    expect_recall: float | None = Field(
        default=None, ge=0, le=1, description="Fail if the recall@1 of the queries is lower."
    )
    allow_slow_index: bool = Field(
        default=False,
        description="Activate a bundle even if its index misses the recall target, so that every search compares all "
        "vectors.",
    )

    @model_validator(mode="after")
    def _check_queries(self) -> Self:
        if self.queries is None and self.expect_recall is not None:
            raise ValueError("expect_recall needs queries to measure: give both")
        return self


class ReindexOptions(CommonOptions):
    """A re-indexing job."""

    source: list[str] = Field(
        min_length=1,
        description="Tables (CSV, JSON lines, Parquet: item_id, image, ...), feeds of shops, or folders with one "
        "folder per item: paths, quoted patterns, s3:// and https:// addresses.",
    )
    format: SourceFormat | None = Field(
        default=None, description="Format of the tables. Default: recognised by their content."
    )
    gallery: str = Field(min_length=1, description="Address of the gallery: a folder or postgresql://...")
    bundle: Path = Field(description="Folder of the exported model.")
    columns: Annotated[dict[str, str], BeforeValidator(_parse_columns)] = Field(
        default={}, description="Column that holds a field, where its name differs: item_id=sku."
    )
    attributes: Annotated[list[str] | None, BeforeValidator(_split_names)] = Field(
        default=None, description="Columns to keep as attributes, separated by commas. Default: all."
    )
    images: str | None = Field(
        default=None, description="Folder that image paths are relative to. Default: the table's own."
    )
    mirror: Annotated[dict[str, str], BeforeValidator(_parse_mirrors)] = Field(
        default={},
        description="Folder with copies of the photos whose addresses begin with PREFIX, which are read instead.",
    )
    allow_folder: list[str] = Field(
        default=[],
        description="Folder or s3:// prefix whose files rows may name too. Default: only the folder of the table, or "
        "--images.",
    )
    allow_address: AddressList = Field(
        default=[],
        description="Host, IP address or network, such as 10.0.0.0/8, that rows may name too. Default: only public "
        "addresses.",
    )
    rejects: Path = Field(default=Path("rejects.csv"), description="File for the rejected photos and the reasons.")
    ray: str | None = Field(
        default=None,
        description="Embed on a Ray cluster: host:port, ray://host:port, auto, or local for one on this machine.",
    )
