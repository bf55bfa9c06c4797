"""Tunable parameters of a Qdrant index, and its address."""

import re
from typing import Literal, NamedTuple, Self
from urllib.parse import parse_qs, urlsplit

from pydantic import Field, ValidationError

from index._util.models import Frozen
from index._util.validation import explain_errors
from index.errors import LookalikeError
from index.gallery.addresses import redact

_EXAMPLE = "Write qdrant://host1:6334,host2:6334/gallery; options follow as ?name=value&name=value."
_PREFIX = re.compile(r"[A-Za-z0-9_-]{1,64}")
_REST_PORT, _GRPC_PORT = 6333, 6334
Quantization = Literal["none", "int8", "binary"]


class QdrantSettings(Frozen):
    """Parameters of a Qdrant index. Each may be an option of the address."""

    tls: bool = Field(default=False, description="whether to connect with TLS; qdrants:// always does")
    shards: int = Field(
        default=0,
        ge=0,
        description="shards of a collection, fixed when it is built; 0: 12 on several nodes, else 1",
    )
    replicas: int = Field(default=0, ge=0, description="copies of each shard; 0: 2 on several nodes, else 1")
    write_consistency: int = Field(
        default=0,
        ge=0,
        description="copies that confirm a write, of those that are up; 0: all, else a search may read an older copy",
    )
    quantization: Quantization = Field(
        default="none", description="codes of the vectors that a search compares first; the nearest are rescored"
    )
    oversampling: float = Field(
        default=0.0, ge=0, description="candidates per result that quantized vectors select; 0: 2, or 8 if binary"
    )
    on_disk: bool = Field(default=False, description="whether vectors are read from disk instead of memory")
    graph_links: int = Field(default=16, ge=4, description="HNSW's m")
    construction_effort: int = Field(default=100, ge=4, description="HNSW's ef_construct")
    indexing_threshold: int = Field(
        default=10_000, ge=1, description="kilobytes of vectors from which a segment gets a graph"
    )
    recall_target: float = Field(default=0.98, gt=0, le=1, description="recall@10 that a build aims at")
    exact_up_to: int = Field(default=20_000, ge=0, description="images up to which all vectors are compared")
    efforts: tuple[int, ...] = Field(
        default=(32, 48, 64, 96, 128, 192, 256, 512), description="values of hnsw_ef to measure, from fast to accurate"
    )
    filtered_factor: int = Field(default=12, ge=1, description="by which a filter raises hnsw_ef")
    sample: int = Field(default=200, ge=1, description="stored vectors that measure the recall")
    indexed_attributes: int = Field(
        default=100,
        ge=0,
        description="attributes with a payload index; others have no facets, and filters on them are slow",
    )
    facet_values: int = Field(default=10_000, ge=1, description="distinct values of an attribute that facets count")
    exhaustive_up_to: int = Field(
        default=100_000,
        ge=1,
        description="matching images up to which pages go to the end; beyond, deep pages are refused",
    )
    memory_up_to: int = Field(
        default=100_000, ge=0, description="images that searches scan in memory while there is no collection"
    )
    timeout: float = Field(default=3.0, gt=0, description="seconds that one node may take to answer a search")
    write_timeout: float = Field(default=60.0, gt=0, description="seconds that one node may take to confirm a write")
    index_timeout: float = Field(default=86_400.0, gt=0, description="seconds that a cluster may take to build graphs")
    apply_delay: float = Field(
        default=8.0,
        ge=0,
        description="age in seconds of changes that are applied to a collection in use; longer than any search takes",
    )
    min_pending: int = Field(default=1000, ge=0, description="changes above which they are applied at once")
    max_age: float = Field(default=60.0, ge=0, description="seconds after which fewer changes are applied too")
    apply_batch: int = Field(
        default=20_000, ge=1, description="changes that are applied at a time, to bound the memory"
    )
    upload_batch: int = Field(default=256, ge=1, description="images per request of an upload")
    upload_threads: int = Field(default=4, ge=1, description="requests of an upload in flight")

    @property
    def candidates_per_result(self) -> float:
        """How many candidates per result quantized vectors select: enough for filters to keep their recall."""
        return self.oversampling or (8.0 if self.quantization == "binary" else 2.0)

    def copies(self, nodes: int) -> int:
        """Returns the copies of each shard on so many nodes."""
        return self.replicas or (2 if nodes > 1 else 1)

    def write_copies(self, nodes: int) -> int:
        """Returns how many of them confirm a write."""
        return self.write_consistency or self.copies(nodes)


class QdrantAddress(NamedTuple):
    """The nodes of a cluster, the prefix of a gallery's collections there, and the settings."""

    nodes: tuple[tuple[str, int], ...]
    prefix: str
    settings: QdrantSettings

    @classmethod
    def parse(cls, address: str) -> Self:
        """Parses `qdrant://host:port,host:port/prefix?option=value`; `qdrants://` connects with TLS.

        Ports are those of gRPC. 6333, the usual port of the REST interface, stands for 6334, that of gRPC next to it.
        """
        parts = urlsplit(address)
        prefix = parts.path.strip("/")
        try:
            nodes = tuple(map(_parse_node, parts.netloc.split(",")))
        except ValueError:
            raise LookalikeError(f"The address {redact(address)} names no node of Qdrant.", _EXAMPLE) from None
        if parts.scheme not in ("qdrant", "qdrants") or not _PREFIX.fullmatch(prefix):
            raise LookalikeError(f"The address {redact(address)} has no valid prefix of collections.", _EXAMPLE)
        options = {name: values[-1] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        if parts.scheme == "qdrants":
            options["tls"] = "true"
        try:
            settings = QdrantSettings.model_validate_strings(options)
        except ValidationError as error:
            reasons = "; ".join(explain_errors(error.errors(), QdrantSettings))
            raise LookalikeError(f"The address {redact(address)} has an invalid option: {reasons}.", _EXAMPLE) from None
        return cls(nodes, prefix, settings)


def _parse_node(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname or parts.username is not None:
        raise ValueError(text)
    port = parts.port or _GRPC_PORT
    return parts.hostname, _GRPC_PORT if port == _REST_PORT else port
