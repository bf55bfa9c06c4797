"""The wire types of the service's state."""

from typing import Literal

from pydantic import BaseModel, Field
from typing_extensions import TypeAliasType

Metrics = TypeAliasType("Metrics", dict[str, float])
Scope = TypeAliasType("Scope", Literal["search", "write", "admin"])


class IndexStatus(BaseModel):
    """The vector index that searches use."""

    engine: str = Field(description="the implementation, such as faiss")
    name: str | None = Field(description="the generation; null before the first compaction")
    revision: int | None = Field(description="the revision that the generation reflects")
    pending: int = Field(description="images changed since the generation was built; searches include them")
    kind: str | None = Field(description="exact, hnsw or ivf")
    recall: float | None = Field(description="recall@10 against exact search, measured when it was built")
    device: str | None = Field(description="what compares the vectors: cpu or the names of GPUs; null: servers do")


class GalleryStatus(BaseModel):
    """What the gallery holds."""

    items: int
    images: int
    unsearchable: int = Field(description="images without a vector of the active bundle, which no search finds")
    revision: int = Field(description="the number of the last committed write")
    index: IndexStatus


class BundleStatus(BaseModel):
    """The model that embeds queries, and its metrics on products that training never saw."""

    id: str
    backbone: str
    loss: str | None = Field(description="null if the backbone is used as it was pretrained")
    dimension: int
    data: str | None = Field(description="what it was trained on, such as `table catalogue.csv`")
    metrics: Metrics = Field(description="such as recall@1, as a fraction of 1")
    untrained_metrics: Metrics = Field(description="the same metrics before training")


class Limits(BaseModel):
    """The limits of a request."""

    max_body_bytes: int
    max_pixels: int
    max_batch: int
    max_examples: int = Field(description="photos and items that one search combines")


class Status(BaseModel):
    """The state of the service."""

    gallery: GalleryStatus
    bundle: BundleStatus | None = Field(description="null in an empty gallery without a configured bundle")
    provider: str | None = Field(description="the ONNX Runtime execution provider")
    keys: bool = Field(description="whether requests need an API key")
    scope: Scope | None = Field(description="the widest scope of the request's key; null without keys")
    urls: bool = Field(description="whether `image_url` is enabled")
    limits: Limits


class Health(BaseModel):
    """The answer to a probe."""

    status: str = "ok"
