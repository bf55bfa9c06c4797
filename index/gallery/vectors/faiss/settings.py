"""Tunable parameters of building and searching FAISS indexes."""

from typing import Literal

from pydantic import Field

from index._util.models import Frozen

IndexKind = Literal["exact", "hnsw", "ivf"]
"""A flat index, an HNSW graph, or an inverted file (IVF) with RaBitQ codes in the layout of fast scans."""


class FaissSettings(Frozen):
    """Parameters of a FAISS index. The defaults are measured; tests set others to reach every code path."""

    recall_target: float = Field(default=0.98, description="recall@10 that a build aims at")
    exact_up_to: int = Field(default=20_000, description="vectors up to which an exhaustive search is fast enough")
    hnsw_up_to: int = Field(
        default=1_000_000,
        description="vectors up to which a graph is built; beyond, inverted lists take a fraction of the time, and the"
        " vectors need not fit into memory meanwhile",
    )
    graph_links: int = Field(default=32, description="HNSW's M")
    construction_effort: int = Field(default=128, description="HNSW's efConstruction")
    graph_efforts: tuple[int, ...] = Field(
        default=(16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024),
        description="values of efSearch to measure, from fast to accurate",
    )
    list_efforts: tuple[int, ...] = Field(
        default=(8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024),
        description="values of nprobe to measure, from fast to accurate",
    )
    lists_per_root: float = Field(default=2.0, description="inverted lists per square root of the number of vectors")
    training_vectors: int = Field(default=40, description="vectors per inverted list that train their centres")
    training_rounds: int = Field(default=6, description="iterations of k-means that find the centres of the lists")
    quantizer_effort: float = Field(default=2.0, description="efSearch per list to read, of the graph that finds lists")
    max_list_growth: float = Field(
        default=4.0, description="times the vectors that inverted lists were trained for, beyond which they are rebuilt"
    )
    held_out: int = Field(default=256, description="vectors held out of a build as queries that measure its recall")
    filtered_target: float = Field(
        default=0.995,
        description="recall target of filtered searches: they search deeper, where a graph is less accurate, and start"
        " from this to end above 0.99",
    )
    depths: tuple[int, ...] = Field(
        default=(40, 160, 640),
        description="numbers of results by which a build measures how the effort grows: finding 10 among a tenth of"
        " all vectors is finding 100",
    )
    entry_candidates: int = Field(default=1024, description="evenly spaced vectors that a graph search may start from")
    entry_points: int = Field(
        default=4,
        description="nearest entry candidates that a graph search starts from. FAISS's own descent through the upper"
        " levels often ends in the wrong cluster: at equal effort ten times as many queries found no near vector",
    )
    reranked_per_list: int = Field(
        default=10,
        description="candidates per inverted list that are re-ranked with the full vector",
    )
    near_factor: int = Field(
        default=4,
        description="a restricted search first fetches this many times the requested number of neighbours, which is"
        " enough if the allowed positions lie around the query",
    )
    scattered_factor: int = Field(
        default=2, description="then this many times the number that suffices if they are spread evenly"
    )
    copied_up_to: int = Field(
        default=1024, description="allowed vectors up to which they are copied together once instead of masked"
    )
    copied_share: int = Field(
        default=64, description="an allow list that is used again is copied up to this fraction (1/n) of all vectors"
    )
    chunk_rows: int = Field(default=1 << 16, description="vectors added, or converted, at a time")
    min_pending: int = Field(default=2048, description="changes below which a compaction does not pay off")
    pending_share: int = Field(default=64, description="nor below this fraction (1/n) of all images")
    max_dead_share: float = Field(
        default=0.25, description="dead positions beyond which an index is rebuilt: they cost memory and search steps"
    )

    gpu_share: float = Field(
        default=0.25,
        ge=0,
        le=1,
        description="share of each GPU's memory that one index may take; two are there while a new one is opened",
    )
    gpu_checks: int = Field(default=4, description="vectors of an index that check its copy on a GPU as queries")

    # Costs of searches in random vector reads. Only ratios matter: they choose between approximate search and scan.
    graph_step_cost: float = Field(default=16.0, description="per unit of efSearch")
    list_step_cost: float = Field(default=64.0, description="per inverted list read")
    scan_cost: float = Field(default=0.3, description="per vector read in sequence")
    mask_cost: float = Field(default=0.01, description="per vector tested against a mask")

    def step_cost(self, kind: IndexKind) -> float:
        """Returns the cost of one unit of effort."""
        return self.graph_step_cost if kind == "hnsw" else self.list_step_cost

    def efforts(self, kind: IndexKind) -> tuple[int, ...]:
        """Returns the efforts that a build measures, from fast to accurate."""
        return {"exact": (0,), "hnsw": self.graph_efforts, "ivf": self.list_efforts}[kind]

    def choose_kind(self, count: int) -> IndexKind:
        """Returns the kind of index for a number of vectors."""
        return "exact" if count <= self.exact_up_to else "hnsw" if count <= self.hnsw_up_to else "ivf"

    def choose_lists(self, count: int) -> int:
        """Returns the number of inverted lists for a number of vectors."""
        return max(1, min(int(self.lists_per_root * count**0.5), count // self.training_vectors))

    def is_compaction_due(self, images: int, pending: int) -> bool:
        """Returns whether searches would gain from a compaction."""
        return pending > max(self.min_pending, images // self.pending_share)


DEFAULT = FaissSettings()
