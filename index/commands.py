"""The verbs of index: `reindex` and `search`."""

from pathlib import Path
from typing import Annotated

import typer

GalleryOption = Annotated[Path, typer.Option(help="Folder of the gallery.")]
BundleOption = Annotated[Path, typer.Option(help="Folder of the exported model.")]


def reindex(
    source: Annotated[
        list[str],
        typer.Argument(
            help="Tables (CSV, JSON lines, Parquet: item_id, image, ...), or folders of one folder an item."
        ),
    ],
    gallery: GalleryOption,
    bundle: BundleOption,
    rejects: Annotated[Path, typer.Option(help="Where to write the photos that could not be used.")] = Path(
        "rejects.csv"
    ),
) -> None:
    """Index a catalogue's photos and make them searchable; unchanged photos are not embedded again.

    Example: lookalike reindex catalogue.csv --gallery gallery --bundle bundle

    Exit code 3 means done, but with photos that could not be used.
    """
    from index.bundle import Bundle
    from index.embedder import Embedder
    from index.gallery import open_gallery
    from index.progress import progress_bar
    from index.reindex import reindex as run
    from index.sources import Source

    checked = Source(source)
    checked.check()
    embedder = Embedder(Bundle.load(bundle))
    opened = open_gallery(gallery, create=True)
    try:
        with progress_bar("Indexing") as on_progress:
            summary = run(checked, gallery=opened, embedder=embedder, rejects_file=rejects, on_progress=on_progress)
    finally:
        opened.close()
    typer.echo(
        f"{summary.embedded} photos embedded, {summary.unchanged} unchanged, {summary.rejected} rejected; "
        f"live generation {summary.generation}"
    )
    if summary.rejected:
        typer.echo(f"The rejected photos and reasons are in {rejects}.", err=True)
        raise typer.Exit(3)


def search(
    photo: Annotated[Path, typer.Argument(help="The photo to search with.")],
    gallery: GalleryOption,
    bundle: BundleOption,
    top: Annotated[int, typer.Option(help="How many items to show.", min=1, max=1000)] = 5,
) -> None:
    """Find the products that look like a photo.

    Example: lookalike search photo.jpg --gallery gallery --bundle bundle --top 3
    """
    from index.bundle import Bundle
    from index.embedder import Embedder
    from index.errors import LookalikeError
    from index.gallery import open_gallery
    from index.images import load_pixels, read_file

    if not photo.is_file():
        raise LookalikeError(f"No photo at {photo}.", "Check the path.")
    model = Bundle.load(bundle)
    opened = open_gallery(gallery)
    try:
        pixels = load_pixels(read_file(photo), model.preprocessing)
        found = opened.search(Embedder(model).embed(pixels[None]), bundle_id=model.id, top=top)
        for hit in found.hits[0]:
            typer.echo(f"{hit.score:.3f}  {hit.item.id}  {hit.item.title}")
    finally:
        opened.close()
