"""The commands `reindex`, `jobs` and `search`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError

from index.ingest.options import ReindexOptions

_STORED = TypeAdapter(dict[str, Any])
GalleryOption = Annotated[str, typer.Option(help=ReindexOptions.model_fields["gallery"].description)]


def _option(name: str, *declarations: str, metavar: str | None = None) -> Any:
    """Returns the command line option of a field of ReindexOptions, with its description, bounds and default."""
    field = ReindexOptions.model_fields[name]
    bounds = {
        attribute: getattr(rule, attribute)
        for rule in field.metadata
        for attribute in ("ge", "le")
        if hasattr(rule, attribute)
    }
    has_default = not field.is_required() and bool(field.default)
    return typer.Option(
        *declarations,
        help=field.description,
        metavar=metavar,
        min=bounds.get("ge"),
        max=bounds.get("le"),
        show_default=str(field.default) if has_default else False,
    )


def reindex(
    context: typer.Context,
    source: Annotated[
        list[str] | None, typer.Argument(help=ReindexOptions.model_fields["source"].description, show_default=False)
    ] = None,
    gallery: Annotated[str | None, _option("gallery")] = None,
    bundle: Annotated[str | None, _option("bundle")] = None,
    columns: Annotated[list[str] | None, _option("columns", "--column", metavar="NAME=COLUMN")] = None,
    attributes: Annotated[str | None, _option("attributes")] = None,
    images: Annotated[str | None, _option("images")] = None,
    rejects: Annotated[str | None, _option("rejects")] = None,
    max_rejects: Annotated[float | None, _option("max_rejects")] = None,
    delete_missing: Annotated[bool, _option("delete_missing", "--delete-missing")] = False,
    max_delete: Annotated[float | None, _option("max_delete")] = None,
    queries: Annotated[str | None, _option("queries")] = None,
    expect_recall: Annotated[float | None, _option("expect_recall")] = None,
    allow_slow_index: Annotated[bool, _option("allow_slow_index", "--allow-slow-index")] = False,
    ray: Annotated[str | None, _option("ray", metavar="ADDRESS")] = None,
    options_file: Annotated[
        Path | None,
        typer.Option("--options", metavar="FILE", help="JSON file with these options; the command line overrides it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print progress as JSON lines on standard output.")] = False,
    job: Annotated[int | None, typer.Option(help="Id of a job record that was created for this run.", hidden=True)] = (
        None
    ),
) -> None:
    """Index a catalogue's photos and make them searchable; unchanged photos are not embedded again.

    After a kill or Ctrl-C, the same command continues where it stopped. Vectors of another bundle are written
    alongside the active ones and tested before the bundle is activated.

    Example: lookalike reindex catalogue.csv --gallery gallery --bundle bundle --delete-missing

    Exit code 3: success, but some photos were rejected; 1: failed, no bundle was activated; 130: stopped.
    """
    from index.cli.progress import job_progress, stop_on_signal
    from index.ingest.pipeline import Cancelled, run_reindex

    options = _read_options(context.params, options_file)
    try:
        with job_progress(as_json=as_json) as on_progress, stop_on_signal() as on_start:
            record = run_reindex(options, job_id=job, on_start=on_start, on_progress=on_progress)
    except Cancelled as error:
        typer.echo(f"lookalike: {error}", err=True)
        raise typer.Exit(130) from None
    if not as_json:
        typer.echo(
            f"{record.embedded} photos embedded, {record.unchanged} unchanged, {record.rejected} rejected, "
            f"{record.deleted} deleted; the gallery is at revision {record.revision}"
        )
        if record.message:
            typer.echo(record.message)
    if record.rejected:
        typer.echo(f"The rejected photos and the reasons are in {options.rejects}.", err=True)
        raise typer.Exit(3)


def _read_options(given: dict[str, Any], file: Path | None) -> ReindexOptions:
    """Merges the options of a file with those given on the command line; all others have their defaults."""
    from index.errors import LookalikeError

    values = {name: given[name] for name in ReindexOptions.model_fields if _is_given(given[name])}
    try:
        stored = _STORED.validate_json(file.read_bytes()) if file else {}
        return ReindexOptions.model_validate({**stored, **values})
    except OSError as error:
        raise LookalikeError(f"Cannot read the options in {file}: {error.strerror}.", "Check the path.") from None
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}".lstrip(": ") for fault in error.errors()]
        raise typer.BadParameter("; ".join(problems).replace("Value error, ", "")) from None


def _is_given(value: Any) -> bool:
    return value is not None and value is not False and value not in ([], ())


def jobs(
    gallery: GalleryOption,
    cancel: Annotated[int | None, typer.Option(help="Stop the running job with this id.")] = None,
    count: Annotated[int, typer.Option(help="Number of jobs to list, newest first.", min=1)] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """List the re-indexing jobs of a gallery, or stop one.

    Example: lookalike jobs --gallery gallery
    """
    from index.cli.progress import format_job
    from index.gallery import open_gallery

    with open_gallery(gallery) as opened:
        if cancel is not None:
            opened.jobs.cancel(cancel)
            typer.echo(f"Job {cancel} stops after its current batch.")
            return
        for record in opened.jobs.newest(count):
            typer.echo(record.model_dump_json() if as_json else format_job(record))


def search(
    photo: Annotated[Path, typer.Argument(help="Photo to search with.")],
    gallery: GalleryOption,
    bundle: Annotated[
        Path | None, typer.Option(help="Folder of the exported model. Default: the gallery's active bundle.")
    ] = None,
    top: Annotated[int, typer.Option(help="Number of items to show.", min=1, max=1000)] = 5,
) -> None:
    """Find the products that look like a photo.

    Example: lookalike search photo.jpg --gallery gallery --top 3
    """
    from index.embedding.bundle import Bundle
    from index.embedding.embedder import Embedder
    from index.embedding.images import load_pixels, read_file
    from index.errors import LookalikeError
    from index.gallery import open_gallery

    if not photo.is_file():
        raise LookalikeError(f"No photo at {photo}.", "Check the path.")
    with open_gallery(gallery) as opened:
        active = opened.active_bundle()
        if active is None:
            raise LookalikeError(f"The gallery {gallery} is empty.", "Index a catalogue with `lookalike reindex`.")
        model = Bundle.load(bundle) if bundle else opened.load_bundle(active)
        pixels = load_pixels(read_file(photo), model.preprocessing)
        found = opened.search(Embedder(model).embed(pixels[None]), bundle_id=model.id, top=top)
        for hit in found.hits[0]:
            typer.echo(f"{hit.score:.3f}  {hit.item.id}  {hit.item.title}")
