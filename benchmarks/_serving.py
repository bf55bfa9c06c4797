"""Measures requests per second of the service, a bare loop over the same engines, and a tutorial handler.

All run on the same cores and take turns; photos are JPEGs of about 100 KB with grain, from the sample shop. The load
comes from another process on the same cores.
"""

import argparse
import io
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch
from _load import Load, closed_load, form_request, open_load
from _table import Row, make_row, print_table, write_json
from embed import untrained_run
from PIL import Image

from index._util.imports import faiss
from index.embedding.bundle import Bundle
from index.embedding.embedder import Embedder
from index.embedding.images import decode, load_pixels
from index.ingest.options import ReindexOptions
from index.ingest.pipeline import run_reindex
from training.backbones import EmbeddingModel
from training.config import TrainingConfig
from training.data import shop_data
from training.data.sample_shop import write_shop
from training.export import export_run

CLIENTS = (1, 8, 32)
HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer requests; memory is not measured")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lookalike-bench-") as folder:
        rows = compare(Path(folder), quick=arguments.quick)
    print_table(rows)
    if arguments.json:
        write_json(rows, arguments.json)


def compare(folder: Path, *, quick: bool) -> list[Row]:
    bundle, gallery, photos = prepare(folder)
    embedder = Embedder(bundle)
    vectors = embedder.embed(np.stack([load_pixels(photo, bundle.preprocessing) for photo in photos]))
    np.save(folder / "vectors.npy", vectors)
    rounds, count = (1, 96) if quick else (5, 320)
    with ExitStack() as running:
        ours = running.enter_context(our_service(gallery))
        plain = running.enter_context(plain_service(folder / "vectors.npy"))
        rows = rate_rows(embedder, vectors, photos, ours.port, plain, rounds, count)
        print_table(rows)  # what follows takes minutes
        rows.append(latency_row(ours.port, photos, rounds, count))
        if not quick:
            rows.append(memory_row(ours, photos))
    return rows


def prepare(folder: Path) -> tuple[Bundle, Path, list[bytes]]:
    """Makes a pretrained bundle, a gallery of the sample shop, and photos as a phone would send them."""
    shop = write_shop(folder / "shop", products_per_family=3, photos_per_product=4)
    config = TrainingConfig()
    torch.manual_seed(0)
    model = EmbeddingModel(config.backbone, input_size=config.preprocessing.input_size).eval()
    data = shop_data(shop)
    bundle = export_run(untrained_run(folder / "run", config, model), folder / "bundle", data.test[:8])
    run_reindex(
        ReindexOptions(
            source=[str(shop / "catalogue.csv")],
            gallery=str(folder / "gallery"),
            bundle=bundle.directory,
            rejects=folder / "rejects.csv",
        )
    )
    files = [photo.path for photo in (*data.train, *data.test)][:32]
    return bundle, folder / "gallery", [enlarged(file, number) for number, file in enumerate(files)]


def enlarged(file: Path, seed: int) -> bytes:
    """Returns the photo at 640 pixels with camera noise: about 100 KB."""
    photo = decode(file.read_bytes()).resize((640, 640), Image.Resampling.BICUBIC)
    grain = np.random.default_rng(seed).normal(0, 6, (640, 640, 1)).astype(np.float32)
    out = io.BytesIO()
    Image.fromarray(np.clip(np.asarray(photo) + grain, 0, 255).astype(np.uint8)).save(out, "JPEG", quality=85)
    return out.getvalue()


class OurService:
    """A running `lookalike serve`."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self.port = port

    def memory(self) -> float:
        """Returns its private memory in MiB."""
        text = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text(encoding="ascii")
        return sum(int(kb) for kb in re.findall(r"^Private_\w+:\s+(\d+) kB", text, re.MULTILINE)) / 1024


@contextmanager
def our_service(gallery: Path) -> Iterator[OurService]:
    command = [sys.executable, "-m", "lookalike", "serve", "--gallery", str(gallery), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout
    try:
        while not (found := re.search(r"serves on http://\S+:(\d+)", process.stdout.readline())):
            assert process.poll() is None, "the service did not start"
        yield OurService(process, int(found[1]))
    finally:
        process.terminate()
        process.wait()


@contextmanager
def plain_service(vectors: Path) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(HERE / "_plain_service.py"), str(vectors), str(port)])
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                assert process.poll() is None, "the plain service did not start"
                time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait()


def rate_rows(
    embedder: Embedder,
    vectors: np.ndarray[tuple[int, ...], np.dtype[np.float32]],
    photos: Sequence[bytes],
    ours: int,
    plain: int,
    rounds: int,
    count: int,
) -> list[Row]:
    index = faiss().IndexFlatIP(vectors.shape[1])
    index.add(vectors)

    def bare_loop() -> float:
        started = time.perf_counter()
        for number in range(count // 2):
            pixels = load_pixels(photos[number % len(photos)], embedder.bundle.preprocessing)
            index.search(embedder.embed(pixels[np.newaxis]), 12)
        return count // 2 / (time.perf_counter() - started)

    def load(port: int, path: str, clients: int) -> float:
        requests = [form_request(photo, "image", path) for photo in photos]
        found = closed_load(port, requests, clients=clients, count=count)
        assert set(found.statuses) == {200}, found.statuses
        return found.rate

    bare_loop(), load(ours, "/v1/search", 8), load(plain, "/search", 8)
    loops: list[float] = []
    rates: dict[tuple[str, int], list[float]] = {}
    for _ in range(rounds):
        loops.append(bare_loop())
        for clients in CLIENTS:
            rates.setdefault(("ours", clients), []).append(load(ours, "/v1/search", clients))
            rates.setdefault(("plain", clients), []).append(load(plain, "/search", clients))
    middle = {name: statistics.median(values) for name, values in rates.items()}
    loop = statistics.median(loops)
    rows = []
    for clients in CLIENTS:
        name, rate = f"our service, {clients} clients", middle["ours", clients]
        reach = {"at_least": 0.85} if clients == CLIENTS[-1] else {}
        rows.append(make_row(name, rate, "bare loop of decode, session and FAISS", loop, "requests/s", **reach))
        reach = {"at_least": 3} if clients == CLIENTS[-1] else {}
        peer = f"plain FastAPI and PyTorch, {clients} clients"
        rows.append(make_row(name, rate, peer, middle["plain", clients], "requests/s", **reach))
    return rows


def latency_row(port: int, photos: Sequence[bytes], rounds: int, count: int) -> Row:
    """The load is set again before each round: what a shared machine can do changes from minute to minute."""
    requests = [form_request(photo, "image", "/v1/search") for photo in photos]
    p99s, p50s, refused = [], [], 0
    for _ in range(rounds):
        max_rate = closed_load(port, requests, clients=CLIENTS[-1], count=count).rate
        found: Load = open_load(port, requests, rate=0.8 * max_rate, count=2 * count)
        assert set(found.statuses) <= {200, 503}, found.statuses
        refused += found.statuses.get(503, 0)
        p99s.append(1000 * found.percentile(99))
        p50s.append(1000 * found.percentile(50))
    name = f"p99 at 80 % load, {refused} of {2 * count * rounds:,} refused"
    return make_row(name, statistics.median(p99s), "p50 at 80 % load", statistics.median(p50s), "ms", at_most=4)


def memory_row(service: OurService, photos: Sequence[bytes]) -> Row:
    requests = [form_request(photo, "image", "/v1/search") for photo in photos]
    closed_load(service.port, requests, clients=16, count=2000)
    before = service.memory()
    closed_load(service.port, requests, clients=16, count=18_000)
    return make_row("memory after 20,000 requests", service.memory(), "after 2,000", before, "MiB", at_most=1.05)


if __name__ == "__main__":
    main()
