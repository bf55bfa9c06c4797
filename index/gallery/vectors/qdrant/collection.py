"""One collection of Qdrant, and what is recorded about it in its metadata."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from index._util.models import Frozen
from index.gallery.errors import IndexDamaged, IndexUnavailable
from index.gallery.types import Facet
from index.gallery.vectors.qdrant.nodes import Nodes, messages
from index.gallery.vectors.qdrant.payload import (
    FIRST,
    ITEM,
    LISTS,
    NAMES,
    RECORD,
    Record,
    field,
    parse_seconds,
    parse_token,
    read_record,
)
from index.gallery.vectors.qdrant.settings import QdrantSettings
from index.items import EXPIRES_AT, MAX_ATTRIBUTE_NAMES, MAX_FACETS

_METADATA = "lookalike"
_SCROLL = 10_000
"""Points that are listed at a time; with their vectors a sixteenth as many."""
Neighbours = list[tuple[int, float, int]]
"""Points with Qdrant's score and the key of the item, best first."""
Content = tuple[Record, bytes]
"""The record of a point, and its vector as numbers of four bytes."""
SCORE_ERROR = 6e-4
"""By how much Qdrant's scores of half-precision vectors may be wrong: it rounds the query to half precision too."""


class CollectionState(Frozen):
    """What the metadata of a collection record about it."""

    schema_version: Literal[2] = 2
    bundle_id: str
    dimension: int
    last: str = Field(description="the index's name before the step that wrote this")
    next: str = Field(description="its name after that step")
    images: int = 0
    newest_key: int = Field(default=0, description="the highest key of its images")
    max_images_per_item: int = 0
    fields: tuple[tuple[str, str], ...] = Field(default=(), description="kind and name of the indexed fields")
    kind: Literal["exact", "hnsw"] = "exact"
    effort: int = Field(default=0, description="hnsw_ef that reaches the target; 0: all vectors are compared")
    recall: float = 1.0
    target: float = 1.0
    measured: int = Field(default=0, description="the images with which the recall was measured")


class Collection:
    """Reads and writes of one collection."""

    def __init__(
        self, nodes: Nodes, name: str, settings: QdrantSettings, before_write: Callable[[], None] | None = None
    ) -> None:
        """`before_write` may raise an error, by which a writer that has lost its lock stops."""
        self.name = name
        self._nodes = nodes
        self._settings = settings
        self._before_write = before_write or (lambda: None)
        self._relaxing = threading.Lock()

    # The collection itself

    def create(self, dimension: int, state: CollectionState) -> None:
        """Creates the collection without graphs, for a fast upload."""
        q, settings = messages(), self._settings
        several = len(self._nodes) > 1
        quantization = {
            "none": None,
            "int8": q.QuantizationConfig(scalar=q.ScalarQuantization(type=q.QuantizationType.Int8, always_ram=True)),
            "binary": q.QuantizationConfig(binary=q.BinaryQuantization(always_ram=True)),
        }[settings.quantization]
        request = q.CreateCollection(
            collection_name=self.name,
            vectors_config=q.VectorsConfig(
                params=q.VectorParams(
                    size=dimension, distance=q.Distance.Dot, datatype=q.Datatype.Float16, on_disk=settings.on_disk
                )
            ),
            hnsw_config=q.HnswConfigDiff(m=settings.graph_links, ef_construct=settings.construction_effort),
            optimizers_config=q.OptimizersConfigDiff(indexing_threshold=0),
            quantization_config=quantization,
            shard_number=settings.shards or (12 if several else 1),
            replication_factor=settings.copies(len(self._nodes)),
            write_consistency_factor=settings.write_copies(len(self._nodes)),
            on_disk_payload=True,
            metadata={_METADATA: q.Value(string_value=state.model_dump_json())},
        )
        self._admin("Create", request)
        types = q.FieldType
        keywords = dict.fromkeys((NAMES, LISTS), types.FieldTypeKeyword)
        self._index({ITEM: types.FieldTypeInteger, FIRST: types.FieldTypeBool, **keywords})

    def drop(self) -> None:
        self._admin("Delete", messages().DeleteCollection(collection_name=self.name))

    def start_indexing(self) -> None:
        """Lets the cluster build graphs."""
        q = messages()
        optimizers = q.OptimizersConfigDiff(indexing_threshold=self._settings.indexing_threshold)
        self._admin("Update", q.UpdateCollection(collection_name=self.name, optimizers_config=optimizers))

    def info(self) -> Any:
        request = messages().GetCollectionInfoRequest(collection_name=self.name)
        return self._nodes.call("Collections", "Get", request).result

    def state(self) -> CollectionState:
        """Returns the recorded state; raises IndexDamaged if the collection is missing or not ours."""
        value = self.info().config.metadata
        text = value[_METADATA].string_value if _METADATA in value else ""
        try:
            return CollectionState.model_validate_json(text)
        except ValidationError:
            raise IndexDamaged(
                f"The collection {self.name} has no valid record of its content.",
                "Rebuild it: lookalike gallery compact.",
            ) from None

    def record(self, state: CollectionState) -> None:
        q = messages()
        metadata = {_METADATA: q.Value(string_value=state.model_dump_json())}
        self._admin("Update", q.UpdateCollection(collection_name=self.name, metadata=metadata))

    def _admin(self, method: str, request: Any) -> None:
        self._before_write()
        self._nodes.call("Collections", method, request, self._settings.write_timeout)

    def index_attributes(self, fields: Iterable[tuple[str, str]]) -> None:
        """Creates payload indexes of some fields of attributes."""
        types = messages().FieldType
        of_kind = {"v": types.FieldTypeKeyword, **dict.fromkeys("ntd", types.FieldTypeFloat)}
        self._index({field(kind, name): of_kind[kind] for kind, name in fields})

    def _index(self, fields: Mapping[str, Any]) -> None:
        """Creates payload indexes, several at a time: each waits for all nodes."""
        requests = [
            messages().CreateFieldIndexCollection(
                collection_name=self.name, wait=True, field_name=path, field_type=type
            )
            for path, type in fields.items()
        ]
        with ThreadPoolExecutor(self._settings.upload_threads, "index") as pool:
            for done in [pool.submit(self._write, "CreateFieldIndex", request) for request in requests]:
                done.result()

    # Writes, which return after they were applied

    def upsert(self, points: Sequence[Any]) -> None:
        q = messages()
        ordering = q.WriteOrdering(type=q.WriteOrderingType.Weak)
        request = q.UpsertPoints(collection_name=self.name, wait=True, points=points, ordering=ordering)
        self._write("Upsert", request)

    def delete(self, keys: Sequence[int]) -> None:
        request = messages().DeletePoints(collection_name=self.name, wait=True, points=_selector(keys))
        self._write("Delete", request)

    def _write(self, method: str, request: Any) -> None:
        """Sends a write that all copies confirm: else a search could read one that lacks it.

        Where a node has just failed, one confirmation is enough once. Qdrant then leaves the copies out that did not
        confirm, until they are complete again.
        """
        seconds = self._settings.write_timeout
        self._before_write()
        try:
            self._nodes.call("Points", method, request, seconds)
        except IndexUnavailable:
            with self._relaxing:
                self._confirm_by(1)
                try:
                    self._nodes.call("Points", method, request, seconds)
                finally:
                    self._confirm_by(self._settings.write_copies(len(self._nodes)))

    def restore_confirmations(self) -> None:
        """Lets all copies confirm writes again, if a writer was killed while one was enough."""
        copies = self._settings.write_copies(len(self._nodes))
        if self.info().config.params.write_consistency_factor != copies:
            self._confirm_by(copies)

    def _confirm_by(self, copies: int) -> None:
        q = messages()
        params = q.CollectionParamsDiff(write_consistency_factor=copies)
        self._admin("Update", q.UpdateCollection(collection_name=self.name, params=params))

    def set_first(self, keys: Sequence[int], value: bool) -> None:
        """Records of some images whether each is the first of its item."""
        q = messages()
        request = q.SetPayloadPoints(
            collection_name=self.name,
            wait=True,
            payload={FIRST: q.Value(bool_value=value)},
            points_selector=_selector(keys),
        )
        self._write("SetPayload", request)

    # Reads

    def search(
        self,
        queries: NDArray[np.float32],
        limit: int,
        *,
        filter: Any | None = None,
        effort: int = 0,
        owners: bool = False,
        contents: dict[int, Content] | None = None,
        timeout: float | None = None,
    ) -> list[Neighbours]:
        """Returns the nearest points of each query; compares all vectors if the effort is 0.

        The item's key is 0 unless `owners` are asked for. Adds what the points hold to `contents`, if it is passed.
        """
        q, settings = messages(), self._settings
        quantization = None
        if settings.quantization != "none":
            quantization = q.QuantizationSearchParams(
                ignore=not effort, rescore=True, oversampling=settings.oversampling
            )
        params = q.SearchParams(hnsw_ef=effort or None, exact=not effort, quantization=quantization)
        selector = _fields(ITEM) if owners else None
        vectors = None
        if contents is not None:
            selector, vectors = _fields(ITEM, RECORD), q.WithVectorsSelector(enable=True)
        requests = [
            q.QueryPoints(
                collection_name=self.name,
                query=q.Query(nearest=q.VectorInput(dense=q.DenseVector(data=query))),
                limit=limit,
                filter=filter,
                params=params,
                with_payload=selector,
                with_vectors=vectors,
            )
            for query in queries.tolist()  # lists are copied into messages much faster than arrays
        ]
        if len(requests) == 1:
            results = [self._nodes.call("Points", "Query", requests[0], timeout)]
        else:
            batch = q.QueryBatchPoints(collection_name=self.name, query_points=requests)
            results = self._nodes.call("Points", "QueryBatch", batch, timeout).result
        if contents is not None:
            contents.update((point.id.num, _content(point)) for one in results for point in one.result)
        return [
            [(point.id.num, point.score, point.payload[ITEM].integer_value if owners else 0) for point in one.result]
            for one in results
        ]

    def sample(self, count: int, dimension: int) -> NDArray[np.float32]:
        """Returns the vectors of random points."""
        q = messages()
        request = q.QueryPoints(
            collection_name=self.name,
            query=q.Query(sample=q.Sample.Random),
            limit=count,
            with_vectors=q.WithVectorsSelector(enable=True),
        )
        points = self._nodes.call("Points", "Query", request, self._settings.write_timeout).result
        return np.frombuffer(b"".join(map(_vector, points)), "<f4").reshape(len(points), dimension)

    def count(self, filter: Any | None = None) -> int:
        request = messages().CountPoints(collection_name=self.name, filter=filter, exact=True)
        count: int = self._nodes.call("Points", "Count", request).result.count
        return count

    def items(self, filter: Any | None = None, *, limit: int | None = None) -> Iterator[tuple[int, int]]:
        """Yields the keys of all points and of their items, by key."""
        for point in self._scroll(filter, _fields(ITEM), limit):
            yield point.id.num, point.payload[ITEM].integer_value

    def firsts(self, item_keys: Sequence[int]) -> Iterator[tuple[int, int, bool]]:
        """Yields key, item and mark of all points of some items."""
        q = messages()
        match = q.Match(integers=q.RepeatedIntegers(integers=item_keys))
        filter = q.Filter(must=[q.Condition(field=q.FieldCondition(key=ITEM, match=match))])
        for point in self._scroll(filter, _fields(ITEM, FIRST), None):
            yield point.id.num, point.payload[ITEM].integer_value, point.payload[FIRST].bool_value

    def first_expiry(self) -> int | None:
        """Returns an instant before which no item expires, close to the first; None if none does.

        The attribute must be indexed.
        """
        q = messages()
        path = field("d", EXPIRES_AT)
        request = q.ScrollPoints(
            collection_name=self.name, limit=1, order_by=q.OrderBy(key=path), with_payload=_fields(path)
        )
        found = self._nodes.call("Points", "Scroll", request, self._settings.write_timeout).result
        return min((parse_seconds(point.payload, EXPIRES_AT) for point in found), default=None)

    def _scroll(self, filter: Any | None, fields: Any, limit: int | None) -> Iterator[Any]:
        q = messages()
        offset, left = None, limit
        while left is None or left > 0:
            request = q.ScrollPoints(
                collection_name=self.name,
                filter=filter,
                offset=offset,
                limit=_SCROLL if left is None else min(_SCROLL, left),
                with_payload=fields,
            )
            response = self._nodes.call("Points", "Scroll", request, self._settings.write_timeout)
            yield from response.result
            left = None if left is None else left - len(response.result)
            if not response.HasField("next_page_offset"):
                return
            offset = response.next_page_offset

    def owners(self, keys: Sequence[int]) -> dict[int, int]:
        """Returns the keys of the items of those points that exist."""
        points = self._get(keys, _fields(ITEM), with_vectors=False)
        return {point.id.num: point.payload[ITEM].integer_value for point in points}

    def records(self, keys: Sequence[int]) -> dict[int, Record]:
        """Returns the records of those points that exist."""
        points = self._get(keys, _fields(ITEM, RECORD), with_vectors=False)
        return {point.id.num: read_record(point.payload) for point in points}

    def contents(self, keys: Sequence[int], timeout: float | None = None) -> dict[int, Content]:
        """Returns the records and vectors of those points that exist."""
        points = self._get(keys, _fields(ITEM, RECORD), with_vectors=True, timeout=timeout)
        return {point.id.num: _content(point) for point in points}

    def _get(
        self, keys: Sequence[int], fields: Any, *, with_vectors: bool, timeout: float | None = None
    ) -> Iterator[Any]:
        q, size = messages(), _SCROLL // 16 if with_vectors else _SCROLL
        for start in range(0, len(keys), size):
            request = q.GetPoints(
                collection_name=self.name,
                ids=[q.PointId(num=key) for key in keys[start : start + size]],
                with_payload=fields,
                with_vectors=q.WithVectorsSelector(enable=with_vectors),
            )
            yield from self._nodes.call("Points", "Get", request, timeout or self._settings.write_timeout).result

    # Facets

    def names(self, filter: Any, fields: Iterable[tuple[str, str]]) -> list[str]:
        """Returns the indexed attributes that most items have, at most MAX_FACETS, by descending frequency."""
        indexed = {name for kind, name in fields if kind == "v"}
        counts = self._facet(NAMES, filter, MAX_ATTRIBUTE_NAMES)
        ranked = sorted((-count, name) for name, count in counts.items() if name in indexed)
        return [name for _, name in ranked[:MAX_FACETS]]

    def facet(self, name: str, count: int, filter: Any, contains: str) -> Facet:
        """Returns an attribute's values with the number of items that have them."""
        tokens = self._facet(field("v", name), filter, self._settings.facet_values)
        found = [(parse_token(text), number) for text, number in tokens.items()]
        if contains:
            found = [(value, number) for value, number in found if contains.casefold() in str(value).casefold()]
        # As the values sort: numbers, then texts, then false and true.
        found.sort(key=lambda pair: (-pair[1], isinstance(pair[0], bool), isinstance(pair[0], str), pair[0]))
        numbers = [value for value, _ in found if isinstance(value, int | float) and not isinstance(value, bool)]
        return Facet(
            name=name,
            values=found[:count],
            minimum=min(numbers, default=None),
            maximum=max(numbers, default=None),
            distinct=len(found),
        )

    def _facet(self, path: str, filter: Any, limit: int) -> Mapping[str, int]:
        q = messages()
        request = q.FacetCounts(collection_name=self.name, key=path, filter=filter, limit=limit, exact=True)
        hits = self._nodes.call("Points", "Facet", request, self._settings.write_timeout).hits
        return {hit.value.string_value: hit.count for hit in hits}


def _fields(*names: str) -> Any:
    q = messages()
    return q.WithPayloadSelector(include=q.PayloadIncludeSelector(fields=names))


def _selector(keys: Sequence[int]) -> Any:
    q = messages()
    return q.PointsSelector(points=q.PointsIdsList(ids=[q.PointId(num=key) for key in keys]))


def _content(point: Any) -> Content:
    return read_record(point.payload), _vector(point)


def _vector(point: Any) -> bytes:
    """Returns a point's vector as the bytes of the message, which end with it: faster than number by number."""
    vector = point.vectors.vector
    data = vector.dense if vector.HasField("dense") else messages().DenseVector(data=vector.data)
    encoded: bytes = data.SerializeToString()
    return encoded[-4 * len(data.data) :]
