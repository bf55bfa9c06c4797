"""A gallery of a few coloured products, indexed by the real job."""

import csv
import io
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from index.ingest.options import ReindexOptions
from index.ingest.pipeline import run_reindex
from index.jobs import JobRecord

COLOURS = ("red", "green", "blue", "yellow", "magenta", "cyan", "orange", "purple")


def tiny_photo(item_number: int, view: int) -> bytes:
    """Returns a JPEG of product `item_number`: its colour on grey, at a position and size that depend on the view."""
    image = Image.new("RGB", (96, 96), (128, 128, 128))
    inset = 6 + 4 * (view % 4)
    shift = 2 * (view % 3) - 2
    draw = ImageDraw.Draw(image)
    draw.ellipse((inset + shift, inset, 96 - inset + shift, 96 - inset), fill=COLOURS[item_number])
    out = io.BytesIO()
    image.save(out, "JPEG", quality=92)
    return out.getvalue()


def write_tiny_source(directory: Path, *, views: int = 2) -> Path:
    """Writes photos and `catalogue.csv`; returns the path of the table."""
    directory.mkdir(parents=True, exist_ok=True)
    table = directory / "catalogue.csv"
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["item_id", "image", "title", "category", "colour", "brand", "price"])
        for number, colour in enumerate(COLOURS):
            for view in range(views):
                name = f"{colour}-{view}.jpg"
                (directory / name).write_bytes(tiny_photo(number, view))
                writer.writerow([f"ball-{colour}", name, f"A {colour} ball", "ball", colour, "Tiny", 4.5 + number])
    return table


def index_source(source: Path, *, gallery: Path, bundle: Path, **options: Any) -> JobRecord:
    """Runs the re-indexing job as the command line does."""
    rejects = gallery.with_name("rejects.csv")
    return run_reindex(
        ReindexOptions(source=[str(source)], gallery=str(gallery), bundle=bundle, rejects=rejects, **options)
    )


def make_tiny_gallery(directory: Path, bundle: Path) -> Path:
    """Creates a searchable gallery at `directory`, and its source next to it."""
    source = write_tiny_source(directory.with_name(directory.name + "-source"))
    index_source(source, gallery=directory, bundle=bundle)
    return directory


def write_tiny_folder(directory: Path, *, views: int = 4) -> Path:
    """Writes the same products as one folder per product."""
    for number, colour in enumerate(COLOURS):
        folder = directory / colour
        folder.mkdir(parents=True)
        for view in range(views):
            (folder / f"{view}.jpg").write_bytes(tiny_photo(number, view))
    return directory
