"""Other vector search engines behind one interface; all but FAISS come with the extra `bench`."""

import tempfile
import time
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any, Protocol

import numpy as np
from _shop import BLOCK, TOP, Case, Choice, Rows, Shop, faiss, recall

EF_VALUES = (10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 256, 320, 384, 512, 768, 1024)
"""Values of ef that are tried for a peer until it reaches a recall."""
MAX_FETCHED = 1000
"""Maximum number of results that are fetched to be filtered afterwards."""


class Contender(Protocol):
    """An engine that is searched from several threads."""

    name: str

    def search(self, case: Case) -> Any:
        """Returns the result in the form of the engine: this is what is timed."""

    def rows(self, result: Any) -> Sequence[int]:
        """Returns the rows of a result."""


class Peer(Contender, Protocol):
    seconds: float
    """Duration of its build."""

    def tune(self, effort: int) -> None:
        """Sets the number of candidates that a search explores."""

    def close(self) -> None: ...


def measure_recall(contender: Contender, cases: Sequence[Case]) -> float:
    return recall([contender.rows(contender.search(case)) for case in cases], cases)


def tune_to_recall(peer: Peer, cases: Sequence[Case], target: float) -> str:
    """Sets the smallest ef that reaches a recall, or the largest, and returns its description."""
    for effort in EF_VALUES:
        peer.tune(effort)
        reached = measure_recall(peer, cases)
        if reached >= target:
            break
    return f"ef {effort}, recall {reached:.4f}"


class RawFaiss:
    """An HNSW index of FAISS, searched without a gallery."""

    def __init__(self, index: Any, name: str, seconds: float = 0.0, order: Rows | None = None) -> None:
        """Position p of the index holds row order[p] of the shop, or row p."""
        self.name, self.seconds, self.index = name, seconds, index
        self._order = np.arange(index.ntotal) if order is None else order
        self._parameters = cache(self._parameters_of)

    @classmethod
    def build(cls, shop: Shop, like: Any, threads: int) -> "RawFaiss":
        """Builds an index with the parameters of another one."""
        links = like.hnsw.nb_neighbors(1)
        index = faiss.IndexHNSWSQ(like.d, faiss.ScalarQuantizer.QT_fp16, links, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = like.hnsw.efConstruction
        vectors = shop.vectors.astype(np.float32)
        faiss.omp_set_num_threads(threads)
        begin = time.perf_counter()
        index.add(vectors)
        seconds = time.perf_counter() - begin
        return cls(index, f"raw FAISS HNSW{links},SQfp16", seconds)

    def tune(self, effort: int) -> None:
        self._effort = effort

    def _parameters_of(self, effort: int, choice: Choice | None) -> Any:
        if choice is None:
            return faiss.SearchParametersHNSW(efSearch=effort)
        selector = faiss.IDSelectorBitmap(np.packbits(choice.mask[self._order], bitorder="little"))
        return faiss.SearchParametersHNSW(efSearch=effort, sel=selector)

    def search(self, case: Case) -> Any:
        return self.index.search(case.query, TOP, params=self._parameters(self._effort, case.choice))

    def rows(self, result: Any) -> Sequence[int]:
        found = result[1][0]
        rows: list[int] = self._order[found[found >= 0]].tolist()
        return rows

    def close(self) -> None:
        del self.index


class Hnswlib:
    name = "hnswlib M 16, efC 200"

    def __init__(self, shop: Shop, threads: int) -> None:
        count, size = shop.vectors.shape
        self._index = import_module("hnswlib").Index(space="ip", dim=size)
        self._index.init_index(max_elements=count, M=16, ef_construction=200)
        vectors = shop.vectors.astype(np.float32)
        begin = time.perf_counter()
        self._index.add_items(vectors, num_threads=threads)
        self.seconds = time.perf_counter() - begin
        self._test = cache(lambda choice: choice.mask.tolist().__getitem__)

    def tune(self, effort: int) -> None:
        self._index.set_ef(effort)

    def search(self, case: Case) -> Any:
        test = None if case.choice is None else self._test(case.choice)
        try:
            return self._index.knn_query(case.query, k=TOP, num_threads=1, filter=test)
        except RuntimeError:  # it found fewer than requested, and then returns none of them
            return None

    def rows(self, result: Any) -> Sequence[int]:
        rows: list[int] = [] if result is None else result[0][0].tolist()
        return rows

    def close(self) -> None:
        del self._index


class Usearch:
    name = "usearch f16"

    def __init__(self, shop: Shop, threads: int) -> None:
        count, size = shop.vectors.shape
        self._index = import_module("usearch.index").Index(ndim=size, metric="ip", dtype="f16")
        begin = time.perf_counter()
        self._index.add(np.arange(count), shop.vectors, threads=threads)
        self.seconds = time.perf_counter() - begin
        self._fetched = cache(lambda choice: min(MAX_FETCHED, int(TOP / choice.mask.mean())))

    def tune(self, effort: int) -> None:
        self._index.expansion_search = effort

    def search(self, case: Case) -> Any:
        """Fetches more results and drops those that do not match: usearch has no filters."""
        if case.choice is None:
            return self._index.search(case.query[0], TOP, threads=1).keys
        keys = self._index.search(case.query[0], self._fetched(case.choice), threads=1).keys
        return keys[case.choice.mask[keys]][:TOP]

    def rows(self, result: Any) -> Sequence[int]:
        rows: list[int] = result.tolist()
        return rows

    def close(self) -> None:
        del self._index


class Milvus:
    """The standalone server of the package, in a process of its own, called over the loopback interface."""

    name = "Milvus 2.3 standalone, HNSW M 16, efC 200"

    def __init__(self, shop: Shop, threads: int) -> None:
        library = import_module("pymilvus")
        self._folder = tempfile.TemporaryDirectory(prefix="lookalike-milvus-")
        self._server = import_module("milvus").MilvusServer(data_dir=self._folder.name)
        try:
            self._server.start()
            self._client = library.MilvusClient(uri=f"http://127.0.0.1:{self._server.listen_port}")
            begin = time.perf_counter()
            self._load(shop, library.DataType)
            self.seconds = time.perf_counter() - begin
        except BaseException:
            self.close()
            raise

    def _load(self, shop: Shop, types: Any) -> None:
        client = self._client
        schema = client.create_schema(auto_id=False)
        schema.add_field("id", types.INT64, is_primary=True)
        schema.add_field("vector", types.FLOAT_VECTOR, dim=shop.vectors.shape[1])
        schema.add_field("bucket", types.INT64)
        schema.add_field("cluster", types.INT64)
        client.create_collection("shop", schema=schema, consistency_level="Eventually")
        for start in range(0, len(shop.vectors), BLOCK // 16):
            rows = range(start, min(start + BLOCK // 16, len(shop.vectors)))
            numbers = zip(rows, shop.buckets[rows].tolist(), shop.clusters[rows].tolist(), strict=True)
            client.insert("shop", [
                {"id": row, "vector": shop.vectors[row].astype(np.float32), "bucket": bucket, "cluster": cluster}
                for row, bucket, cluster in numbers
            ])  # fmt: skip
        client.flush("shop")
        parameters = client.prepare_index_params()
        graph = {"M": 16, "efConstruction": 200}
        parameters.add_index("vector", index_type="HNSW", metric_type="IP", params=graph)
        client.create_index("shop", parameters)
        while int(client.describe_index("shop", "vector")["pending_index_rows"]):
            time.sleep(0.5)
        client.load_collection("shop")

    def tune(self, effort: int) -> None:
        self._search = {"metric_type": "IP", "params": {"ef": effort}}

    def search(self, case: Case) -> Any:
        choice = case.choice
        condition = f"{choice.low} <= {choice.attribute} < {choice.high}" if choice else ""
        return self._client.search("shop", case.query, filter=condition, limit=TOP, search_params=self._search)

    def rows(self, result: Any) -> Sequence[int]:
        return [hit["id"] for hit in result[0]]

    def close(self) -> None:
        if process := self._server.server_proc:
            process.kill()  # a regular stop takes a minute, and its data is deleted anyway
        self._server.stop()
        self._folder.cleanup()
