"""The commands `reindex`, `jobs` and `search`."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError

from index._util.validation import explain_errors
from index.cli.arguments import GalleryArgument, GalleryOption, one_gallery
from index.ingest.options import ReindexOptions, SourceFormat

if TYPE_CHECKING:
    from index.embedding.images import Box
    from index.gallery.filters import Filter

_STORED = TypeAdapter(dict[str, Any])


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
    format: Annotated[SourceFormat | None, _option("format")] = None,
    attributes: Annotated[str | None, _option("attributes")] = None,
    lists: Annotated[list[str] | None, _option("lists", "--list", metavar="NAME=SEPARATOR")] = None,
    images: Annotated[str | None, _option("images")] = None,
    mirror: Annotated[list[str] | None, _option("mirror", metavar="PREFIX=FOLDER")] = None,
    allow_folder: Annotated[list[str] | None, _option("allow_folder", metavar="FOLDER")] = None,
    allow_address: Annotated[list[str] | None, _option("allow_address", metavar="HOST")] = None,
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
        typer.Option(
            "--options",
            metavar="FILE",
            help="JSON file with these options, - for standard input; the command line overrides it.",
        ),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait while another job of the gallery runs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print progress as JSON lines on standard output.")] = False,
    job: Annotated[int | None, typer.Option(help="Id of a job record that was created for this run.", hidden=True)] = (
        None
    ),
) -> None:
    """Index a catalogue's photos and make them searchable; unchanged photos are not embedded again.

    After a kill or Ctrl-C, the same command continues where it stopped. Vectors of another bundle are written
    alongside the active ones and tested before the bundle is activated.

    Example: lookalike reindex catalogue.csv --gallery gallery --bundle bundle --delete-missing

    Exit code 3: success, but photos or rows were rejected, or photos are no longer found; 1: failed, no bundle was
    activated; 130: stopped.
    """
    from index.cli.progress import job_progress, stop_on_signal
    from index.ingest.pipeline import Cancelled, run_reindex

    options = _read_options(context.params, options_file)
    try:
        with job_progress(as_json=as_json) as on_progress, stop_on_signal() as on_start:
            record = run_reindex(options, job_id=job, on_start=on_start, on_progress=on_progress, wait=wait)
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
        typer.echo(f"The rejected photos and rows, with the reasons, are in {options.rejects}.", err=True)
    if record.state == "partial":
        raise typer.Exit(3)


def _read_options(given: dict[str, Any], file: Path | None) -> ReindexOptions:
    """Merges the options of a file with those given on the command line; all others have their defaults."""
    from index.errors import LookalikeError

    values = {name: given[name] for name in ReindexOptions.model_fields if _is_given(given[name])}
    try:
        stored = _STORED.validate_json(_read_file(file)) if file else {}
        return ReindexOptions.model_validate({**stored, **values})
    except OSError as error:
        raise LookalikeError(f"Cannot read the options in {file}: {error.strerror}.", "Check the path.") from None
    except ValidationError as error:
        raise typer.BadParameter("; ".join(explain_errors(error.errors(), ReindexOptions))) from None


def _read_file(file: Path) -> bytes:
    return sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()


def _is_given(value: Any) -> bool:
    return value is not None and value is not False and value not in ([], ())


def jobs(
    gallery: GalleryArgument = None,
    gallery_option: GalleryOption = None,
    cancel: Annotated[int | None, typer.Option(help="Stop the running job with this id.")] = None,
    limit: Annotated[int, typer.Option(help="Number of jobs to list, newest first.", min=1)] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """List the re-indexing jobs of a gallery, or stop one.

    Example: lookalike jobs gallery
    """
    from index.cli.progress import format_job
    from index.gallery import open_gallery

    with open_gallery(one_gallery(gallery, gallery_option)) as opened:
        if cancel is not None:
            opened.jobs.cancel(cancel)
            typer.echo(f"Job {cancel} stops after its current batch.")
            return
        for record in opened.jobs.newest(limit):
            typer.echo(record.model_dump_json() if as_json else format_job(record))


def search(
    photo: Annotated[Path, typer.Argument(help="Photo to search with.")],
    gallery: GalleryArgument = None,
    gallery_option: GalleryOption = None,
    bundle: Annotated[
        Path | None, typer.Option(help="Folder of the exported model. Default: the gallery's active bundle.")
    ] = None,
    limit: Annotated[int, typer.Option(help="Number of items to show.", min=1, max=1000)] = 5,
    filter: Annotated[str | None, typer.Option(help='Only items that match, as JSON: {"colour": "red"}.')] = None,
    box: Annotated[str | None, typer.Option(help="Part of the photo: left,top,right,bottom, each from 0 to 1.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """Find the products that look like a photo.

    Example: lookalike search photo.jpg gallery --limit 3
    """
    from index.embedding.bundle import Bundle
    from index.embedding.embedder import Embedder
    from index.embedding.images import load_part, load_pixels, read_file
    from index.errors import LookalikeError
    from index.gallery import open_gallery, redact

    if not photo.is_file():
        raise LookalikeError(f"No photo at {photo}.", "Check the path.")
    part, wanted, address = _parse_box(box), _parse_filter(filter), one_gallery(gallery, gallery_option)
    with open_gallery(address) as opened:
        active = opened.active_bundle()
        if active is None:
            raise LookalikeError(
                f"The gallery {redact(address)} has no active bundle.", "Index a catalogue with `lookalike reindex`."
            )
        model = Bundle.load(bundle) if bundle else opened.load_bundle(active)
        data = read_file(photo)
        pixels = load_part(data, model.preprocessing, part) if part else load_pixels(data, model.preprocessing)
        found = opened.search(Embedder(model).embed(pixels[None]), bundle_id=model.id, top=limit, filter=wanted)
        for hit in found.hits[0]:
            if as_json:
                # As in the API: null where the item has no title or page.
                item = {**hit.item.model_dump(), "title": hit.item.title or None, "url": hit.item.url or None}
                typer.echo(json.dumps({"score": round(hit.score, 6), "image_id": hit.image.id, **item}))
            else:
                typer.echo(f"{hit.score:.3f}  {hit.item.id}  {hit.item.title}")
        for hint in opened.filter_hints(wanted) if wanted and not found.hits[0] else ():
            typer.echo(hint, err=True)


def _parse_box(text: str | None) -> "Box | None":
    if text is None:
        return None
    try:
        left, top, right, bottom = (float(share) for share in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"--box {text!r} is not four numbers, such as 0.1,0.1,0.9,0.9.") from None
    if not (0 <= left < right <= 1 and 0 <= top < bottom <= 1):
        raise typer.BadParameter(f"--box {text!r} must have 0 <= left < right <= 1 and 0 <= top < bottom <= 1.")
    return left, top, right, bottom


def _parse_filter(text: str | None) -> "Filter | None":
    from index.gallery.filters import Filter

    if text is None:
        return None
    try:
        return Filter.parse(json.loads(text))
    except ValueError:
        raise typer.BadParameter(f'--filter {text[:80]!r} is not JSON, such as {{"colour": "red"}}.') from None
