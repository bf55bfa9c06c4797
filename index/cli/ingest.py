"""The verbs of index: `reindex`, `jobs` and `search`."""

from pathlib import Path
from typing import Annotated

import typer

GalleryOption = Annotated[Path, typer.Option(help="Folder of the gallery.")]
BundleOption = Annotated[Path, typer.Option(help="Folder of the exported model.")]


def reindex(
    source: Annotated[
        list[str],
        typer.Argument(
            help="Tables (CSV, JSON lines, Parquet: item_id, image, ...), or folders of one folder an item; paths, "
            "quoted patterns, s3:// and https:// addresses."
        ),
    ],
    gallery: GalleryOption,
    bundle: BundleOption,
    column: Annotated[
        list[str] | None, typer.Option(metavar="NAME=COLUMN", help="A column of another name: item_id=sku.")
    ] = None,
    attributes: Annotated[
        str | None, typer.Option(help="Columns to keep as attributes, with commas; else all.")
    ] = None,
    images: Annotated[
        str | None, typer.Option(help="Where image paths begin; the table's own folder unless told.")
    ] = None,
    rejects: Annotated[Path, typer.Option(help="Where to write the photos that could not be used.")] = Path(
        "rejects.csv"
    ),
    max_rejects: Annotated[
        float, typer.Option(help="Share of rejected photos beyond which it fails.", min=0, max=1)
    ] = 1.0,
    delete_missing: Annotated[
        bool, typer.Option("--delete-missing", help="Remove the items and images that left the source.")
    ] = False,
    max_delete: Annotated[
        float, typer.Option(help="Share of the images beyond which nothing is deleted.", min=0, max=1)
    ] = 0.2,
    expect_recall: Annotated[
        float | None, typer.Option(help="Recall@1 of --queries below which it does not go live.", min=0, max=1)
    ] = None,
    queries: Annotated[
        str | None, typer.Option(help="Labelled photos (a source of its own) to test the result with.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Delete, and go live, beyond the shares and below the recall.")
    ] = False,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Embed on a Ray cluster: host:port, ray://host:port, auto, or local for one on this machine.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Progress as JSON lines on standard output.")] = False,
    job: Annotated[int | None, typer.Option(help="A job that was begun for this run.", hidden=True)] = None,
) -> None:
    """Index a catalogue's photos and make them searchable; unchanged photos are not embedded again.

    Killed or stopped with Ctrl-C, the same command goes on where it was. With another bundle the new vectors are
    written beside the live ones, tested, and only then go live.

    Example: lookalike reindex catalogue.csv --gallery gallery --bundle bundle --delete-missing

    Exit code 3 means done, but with photos that could not be used; 1 that nothing went live; 130 stopped.
    """
    from index.cli.job_progress import stoppable, telling
    from index.embedding.bundle import Bundle
    from index.errors import LookalikeError
    from index.ingest.pipeline import Cancelled, Rules, run_reindex
    from index.ingest.ray_workers import RayWorkers
    from index.ingest.sources import Source
    from index.ingest.workers import LocalWorkers

    if (expect_recall is None) != (queries is None):
        raise LookalikeError("--expect-recall and --queries belong together.", "Give both or neither.")
    wanted = Source(
        source,
        columns=_mapping(column or []),
        attributes=attributes.split(",") if attributes else None,
        images=images,
    )
    rules = Rules(
        delete_missing=delete_missing,
        most_deleted=max_delete,
        force=force,
        most_rejected=max_rejects,
        queries=Source([queries]) if queries else None,
        expected_recall=expect_recall or 0.0,
    )
    try:
        with telling(as_json=as_json) as on_progress, stoppable() as on_start:
            record = run_reindex(
                wanted,
                gallery=gallery,
                bundle=Bundle.load(bundle),
                rejects_file=rejects,
                rules=rules,
                hire=LocalWorkers if ray is None else lambda source, bundle: RayWorkers(ray, bundle),
                job_id=job,
                on_start=on_start,
                on_progress=on_progress,
            )
    except Cancelled as end:
        typer.echo(f"lookalike: {end}", err=True)
        raise typer.Exit(130) from None
    if not as_json:
        typer.echo(
            f"{record.embedded} photos embedded, {record.unchanged} unchanged, {record.rejected} rejected, "
            f"{record.deleted} deleted; live generation {record.generation}"
        )
        if record.message:
            typer.echo(record.message)
    if record.rejected:
        typer.echo(f"The rejected photos and reasons are in {rejects}.", err=True)
        raise typer.Exit(3)


def _mapping(columns: list[str]) -> dict[str, str]:
    from index.errors import LookalikeError

    pairs = [column.partition("=") for column in columns]
    for given, (name, equals, column) in zip(columns, pairs, strict=True):
        if not (name and equals and column):
            raise LookalikeError(f"--column {given} names no column.", "Write it as NAME=COLUMN, such as item_id=sku.")
    return {name: column for name, _, column in pairs}


def jobs(
    gallery: GalleryOption,
    cancel: Annotated[int | None, typer.Option(help="Stop the running job of this number.")] = None,
    count: Annotated[int, typer.Option(help="How many to list, the newest first.", min=1)] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="For programs, one a line.")] = False,
) -> None:
    """List the re-indexing jobs of a gallery, or stop one.

    Example: lookalike jobs --gallery gallery
    """
    from index.cli.job_progress import line_of
    from index.gallery import check_gallery
    from index.gallery.jobs import opened_jobs

    check_gallery(gallery)
    with opened_jobs(gallery) as log:
        if cancel is not None:
            log.cancel(cancel)
            typer.echo(f"Job {cancel} ends after the batch that it is at.")
            return
        for record in log.newest(count):
            typer.echo(record.model_dump_json() if as_json else line_of(record))


def search(
    photo: Annotated[Path, typer.Argument(help="The photo to search with.")],
    gallery: GalleryOption,
    bundle: BundleOption,
    top: Annotated[int, typer.Option(help="How many items to show.", min=1, max=1000)] = 5,
) -> None:
    """Find the products that look like a photo.

    Example: lookalike search photo.jpg --gallery gallery --bundle bundle --top 3
    """
    from index.embedding.bundle import Bundle
    from index.embedding.embedder import Embedder
    from index.embedding.images import load_pixels, read_file
    from index.errors import LookalikeError
    from index.gallery import open_gallery

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
