"""The demo: from photos to a searchable gallery, on the sample shop; finished steps are reused."""

import csv
import shutil
from dataclasses import dataclass
from pathlib import Path

from index._util.files import atomic_write
from index.embedding.bundle import Bundle
from index.ingest.options import ReindexOptions
from index.ingest.pipeline import run_reindex
from index.jobs import JobRecord
from training.callbacks import Callback, Progress
from training.checkpoints import RunFolder
from training.config import TrainingConfig, load_config
from training.data import DataSet, shop_data
from training.data.sample_shop import ShopPhoto, read_shop, write_shop
from training.export import export_run
from training.loop import train

_COLUMNS = ("item_id", "image", "title", "category", "colour", "pattern", "brand", "price")


@dataclass(frozen=True)
class Demo:
    """The folders of the demo; each step is skipped when its result exists."""

    directory: Path
    quick: bool = False
    """A smaller shop: the same steps in a minute, with lower figures."""

    @property
    def shop(self) -> Path:
        return self.directory / "shop"

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.directory / "run")

    @property
    def bundle(self) -> Path:
        return self.directory / "bundle"

    @property
    def gallery(self) -> Path:
        return self.directory / "gallery"

    @property
    def examples(self) -> Path:
        """New photos of products in the gallery, for people to try."""
        return self.directory / "examples"

    def data(self, on_progress: Progress) -> DataSet:
        """Returns the sample shop, which is rendered if necessary."""
        size = {"products_per_family": 3, "photos_per_product": 5} if self.quick else {}
        write_shop(self.shop, on_progress=on_progress, **size)
        data = shop_data(self.shop)
        self._write_examples(read_shop(self.shop))
        return data

    @property
    def config(self) -> TrainingConfig:
        """The preset of the sample shop: Proxy-ISA on Lite0, small enough for two CPU cores."""
        return load_config(None, [], presets=["sample"])

    def train(self, data: DataSet, callback: Callback) -> None:
        """Trains the embedder, or continues an interrupted run."""
        train(self.config, data, self.run.path, "sample", callback, resume=True)

    def export(self, data: DataSet) -> Bundle:
        """Exports the trained model, or loads the bundle of an earlier export."""
        checkpoint, card = self.run.path / "checkpoint.pt", self.bundle / "bundle.json"
        if card.is_file() and card.stat().st_mtime >= checkpoint.stat().st_mtime:
            return Bundle.load(self.bundle)
        return export_run(self.run, self.bundle, data.test[:64])

    def index(self, bundle: Bundle, on_progress: Progress) -> JobRecord:
        """Builds the gallery from all photos that are not reserved as queries."""
        table = self.shop / "gallery.csv"
        with atomic_write(table) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, _COLUMNS, extrasaction="ignore")
            writer.writeheader()
            photos = [photo for photo in read_shop(self.shop) if photo.role == "gallery"]
            writer.writerows(photo._asdict() for photo in photos)
        options = ReindexOptions(
            source=[str(table)],
            gallery=str(self.gallery),
            bundle=bundle.directory,
            rejects=self.directory / "rejects.csv",
        )
        return run_reindex(options, on_progress=lambda record: on_progress(record.done, record.total))

    def _write_examples(self, photos: list[ShopPhoto]) -> None:
        """Copies one query photo of an unseen product of each family."""
        self.examples.mkdir(exist_ok=True)
        seen: set[str] = set()
        for photo in photos:
            if photo.role == "query" and photo.split == "unseen" and photo.category not in seen:
                seen.add(photo.category)
                target = self.examples / f"{photo.item_id}.jpg"
                if not target.exists():
                    with atomic_write(target) as temporary:
                        shutil.copyfile(self.shop / photo.image, temporary)
