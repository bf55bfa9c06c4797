"""A shop to search in: vectors in clusters within clusters, items with attributes, filters, queries and the truth."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from index._util.imports import faiss as engine
from index.gallery.filters import Filter
from index.gallery.types import Attribute, Item, NewImage

faiss: Any = engine()
"""Untyped, as what it declares of itself is not what it has."""

TOP = 10
DEPARTMENTS, CLUSTERS, BUCKETS = 32, 1000, 1000
PHOTOS_PER_PRODUCT, VARIANTS = 8, 4
SHIFT = 0.5
"""How far a query lies from a stored vector, as a share of its length."""
FILTERS = 4
"""Different filters of each kind and share: one may be lucky."""
TAGGED_WIDTHS = (1, 10, 100)
"""Buckets of the items that have a tag in common; every item has a tag of each width."""
BLOCK = 1 << 16
THUMBNAIL = bytes(range(256)) * 8
COLOURS = ("black", "blue", "brown", "green", "grey", "orange", "red", "white")

Vectors = NDArray[np.float16]
Queries = NDArray[np.float32]
Rows = NDArray[np.int64]
Kind = Literal["random", "clustered, query inside", "clustered, query outside"]


@dataclass(frozen=True)
class Shop:
    """Normalised vectors, and for each the numbers that its item is filtered by."""

    vectors: Vectors
    clusters: Rows
    products: Rows
    """What grouped searches group by: VARIANTS neighbours on average, or a cluster of real embeddings."""
    buckets: Rows
    source: str

    @cached_property
    def bundle_id(self) -> str:
        """Named by content, so that a gallery built from other vectors is refused."""
        return blake2b(self.vectors[:: len(self.vectors) // 1000 + 1].tobytes(), digest_size=8).hexdigest()

    def entries(
        self, rows: Iterable[int], *, first: int = 0, tagged: bool = False
    ) -> Iterator[tuple[Item, list[NewImage]]]:
        """Items of one image each, numbered as their rows are, from `first` on; with a list of values if tagged."""
        for row in rows:
            number = first + row
            attributes: dict[str, Attribute] = {
                "bucket": int(self.buckets[row]),
                "cluster": int(self.clusters[row]),
                "product": int(self.products[row]),
                "colour": COLOURS[row % len(COLOURS)],
                "price": row % 9973 / 100,
                "in_stock": row % 7 > 0,
            }
            if tagged:
                attributes["tags"] = tuple(_tag(int(self.buckets[row]), width) for width in TAGGED_WIDTHS)
            item = Item(id=f"{number:08d}", title=f"Product {number}", attributes=attributes)
            yield item, [NewImage("1", f"{number:064x}", self.vectors[row].astype(np.float32), THUMBNAIL)]


@dataclass(frozen=True, eq=False)
class Choice:
    """A filter: a range of one attribute, or the tag of its items, and the rows that it selects."""

    attribute: str
    low: int
    high: int
    mask: NDArray[np.bool_]
    tag: str | None = None

    @cached_property
    def filter(self) -> Filter:
        if self.tag:
            return Filter.parse({"tags": self.tag})
        return Filter.parse({self.attribute: {"gte": self.low, "lt": self.high}})


class Case(NamedTuple):
    """A query as it is asked, and the true answer."""

    query: Queries
    choice: Choice | None
    truth: Rows


def synthetic_shop(count: int, size: int, file: Path | None = None) -> Shop:
    """Departments, clusters, products and their photos, each around the centre of the one before.

    Clusters and departments are of uneven size; later dimensions vary less, as those of trained embeddings do.
    With a file the vectors are a memory map of it, as they may exceed the memory.
    """
    rng = np.random.default_rng(0)
    spectrum = np.arange(1, size + 1, dtype=np.float32) ** -0.35
    spectrum /= np.linalg.norm(spectrum)

    def around(centres: Queries, owners: Rows, spread: float) -> Queries:
        points = np.empty((len(owners), size), np.float32)
        for start in range(0, len(owners), BLOCK):
            part = owners[start : start + BLOCK]
            noise = rng.standard_normal((len(part), size), np.float32)
            points[start : start + BLOCK] = centres[part] + spread * spectrum * noise
        return points

    departments = around(np.zeros((1, size), np.float32), np.zeros(DEPARTMENTS, np.int64), 1.0)
    centres = around(departments, np.arange(CLUSTERS) * DEPARTMENTS // CLUSTERS, 0.8)
    popularity = rng.lognormal(size=CLUSTERS)
    cluster_of = rng.choice(CLUSTERS, count // PHOTOS_PER_PRODUCT, p=popularity / popularity.sum())
    products = around(centres, cluster_of, 0.6)
    product_of = rng.integers(len(products), size=count)
    vectors = np.empty((count, size), np.float16) if file is None else create_matrix(file, count, size)
    for start in range(0, count, BLOCK):
        vectors[start : start + BLOCK] = _unit(around(products, product_of[start : start + BLOCK], 0.5))
    colourways = PHOTOS_PER_PRODUCT // VARIANTS
    groups = product_of * colourways + np.arange(count) % colourways
    return Shop(vectors, cluster_of[product_of], groups, rng.integers(BUCKETS, size=count), "synthetic")


def create_matrix(file: Path, count: int, size: int) -> Vectors:
    """Creates a .npy file of half-precision vectors and maps it for writing."""
    vectors: Vectors = np.lib.format.open_memmap(file, "w+", np.float16, (count, size))
    return vectors


def embedded_shop(file: Path, count: int) -> Shop:
    """Real embeddings; their clusters are found, and numbered so that neighbours have near numbers."""
    rng = np.random.default_rng(0)
    stored = np.load(file, mmap_mode="r")
    chosen = np.sort(rng.choice(len(stored), min(count, len(stored)), replace=False))
    rng.shuffle(chosen)  # folders are sorted by product, which no order of inserts should depend on
    vectors = np.concatenate(
        [
            _unit(stored[part].astype(np.float32)).astype(np.float16)
            for part in np.array_split(chosen, len(chosen) // BLOCK + 1)
        ]
    )
    means = faiss.Kmeans(vectors.shape[1], CLUSTERS, niter=8, spherical=True, max_points_per_centroid=64)
    means.train(vectors[: 64 * CLUSTERS].astype(np.float32))
    axis = np.linalg.svd(means.centroids - means.centroids.mean(axis=0), full_matrices=False)[2][0]
    number = np.argsort(np.argsort(means.centroids @ axis))
    clusters = [means.assign(part.astype(np.float32))[1] for part in np.array_split(vectors, len(vectors) // BLOCK + 1)]
    found = number[np.concatenate(clusters)]
    return Shop(vectors, found, found, rng.integers(BUCKETS, size=len(vectors)), file.stem)


def plain_cases(shop: Shop, count: int) -> list[Case]:
    queries = _shifted(shop, np.arange(len(shop.vectors)), count, np.random.default_rng(1))
    return _cases(shop, None, queries)


def filtered_cases(shop: Shop, kind: Kind, share: float, count: int) -> list[Case]:
    """Queries under some filters of a share of the rows."""
    rng = np.random.default_rng(2)
    found = []
    choices = _random_choices(shop, share) if kind == "random" else _clustered_choices(shop, share, rng)
    for choice in choices:
        near = np.ones_like(choice.mask) if kind == "random" else choice.mask ^ (kind == "clustered, query outside")
        found += _cases(shop, choice, _shifted(shop, np.flatnonzero(near), count // len(choices), rng))
    return found


def tagged_cases(shop: Shop, width: int, count: int) -> list[Case]:
    """Queries under filters by a tag, which items with buckets in a range have."""
    rng = np.random.default_rng(2)
    found = []
    for low in range(0, BUCKETS, BUCKETS // FILTERS // width * width or width):
        choice = replace(_choice("bucket", shop.buckets, low, low + width), tag=_tag(low, width))
        found += _cases(shop, choice, _shifted(shop, np.arange(len(shop.vectors)), count // FILTERS, rng))
    return found


def _tag(bucket: int, width: int) -> str:
    return f"{width}-{bucket // width}"


def recall(answers: Iterable[Iterable[int]], cases: Iterable[Case]) -> float:
    """The share of the true neighbours that was answered."""
    pairs = [(set(answer), case.truth.tolist()) for answer, case in zip(answers, cases, strict=True)]
    return sum(len(answer.intersection(truth)) for answer, truth in pairs) / sum(len(truth) for _, truth in pairs)


def _random_choices(shop: Shop, share: float) -> list[Choice]:
    width = round(share * BUCKETS)
    lows = np.unique(np.linspace(0, BUCKETS - width, FILTERS).astype(int)).tolist()
    return [_choice("bucket", shop.buckets, low, low + width) for low in lows]


def _clustered_choices(shop: Shop, share: float, rng: np.random.Generator) -> list[Choice]:
    """Ranges of clusters that hold about the share."""
    before = np.concatenate(([0], np.cumsum(np.bincount(shop.clusters, minlength=CLUSTERS))))
    wanted = max(share * len(shop.clusters), 2 * TOP)
    lows = rng.choice(np.flatnonzero(before[:-1] + wanted <= before[-1]), FILTERS, replace=False)
    highs = np.searchsorted(before, before[lows] + wanted)
    return [
        _choice("cluster", shop.clusters, low, high) for low, high in zip(lows.tolist(), highs.tolist(), strict=True)
    ]


def _choice(attribute: str, values: Rows, low: int, high: int) -> Choice:
    return Choice(attribute, low, high, (values >= low) & (values < high))


def _shifted(shop: Shop, near: Rows, count: int, rng: np.random.Generator) -> Queries:
    """Queries that are not stored, near rows that are: moved along the difference of two others."""
    rows = rng.choice(near, count)
    first, second = (shop.vectors[rng.integers(len(shop.vectors), size=count)].astype(np.float32) for _ in range(2))
    return _unit(shop.vectors[rows].astype(np.float32) + SHIFT * _unit(first - second + 1e-6))


def _cases(shop: Shop, choice: Choice | None, queries: Queries) -> list[Case]:
    """The queries with their true neighbours among the chosen rows."""
    rows = np.arange(len(shop.vectors)) if choice is None else np.flatnonzero(choice.mask)
    heap = faiss.ResultHeap(len(queries), min(TOP, len(rows)), keep_max=True)
    for start in range(0, len(rows), BLOCK):
        part = rows[start : start + BLOCK]
        block = shop.vectors[part].astype(np.float32)
        scores, places = faiss.knn(queries, block, min(heap.k, len(part)), metric=faiss.METRIC_INNER_PRODUCT)
        heap.add_result(scores, part[places])
    heap.finalize()
    return [Case(queries[row : row + 1], choice, heap.I[row]) for row in range(len(queries))]


def _unit(vectors: Queries) -> Queries:
    unit: Queries = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit
