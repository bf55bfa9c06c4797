"""The commands of `lookalike gallery`: statistics, verification, compaction, backup, copy, export, bundles."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from index.cli import rankings
from index.cli.arguments import GalleryArgument, GalleryOption, gallery_and, one_gallery
from index.cli.help import Group

if TYPE_CHECKING:
    from index.gallery import BuildReport, GalleryStats, IndexStats
    from index.gallery.bundle_stats import BundleStats
    from index.gallery.contents import Contents

app = typer.Typer(
    help="Maintain a gallery: statistics, verification, compaction, backup, copy, export, rankings.",
    no_args_is_help=True,
)
app.add_typer(rankings.app, name="rankings", cls=Group)
ForceOption = Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")]


@app.command(no_args_is_help=True)
def stats(
    gallery: GalleryArgument = None,
    gallery_option: GalleryOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a gallery holds, what its searches reflect, and its size on disk.

    Example: lookalike gallery stats gallery --json
    """
    from index.gallery import open_gallery

    with open_gallery(one_gallery(gallery, gallery_option)) as opened:
        found, bundles = opened.stats(), opened.bundles()
    if as_json:
        listed = [bundle.model_dump(mode="json") for bundle in bundles]
        typer.echo(json.dumps({**found.model_dump(mode="json"), "bundles": listed}, indent=2))
        return
    for name, text in _describe(found).items():
        typer.echo(f"{name:<12}{text}")
    for bundle in bundles:
        typer.echo(f"{bundle.state:<12}{_describe_bundle(bundle)}")


def _describe(found: "GalleryStats") -> dict[str, str]:
    index = found.index
    lines = {"items": f"{found.items:,}", "images": f"{found.images:,}", "revision": f"{found.revision:,}"}
    if found.unsearchable:
        lines["images"] += f"; {found.unsearchable:,} of them have no vector of the bundle and are not found"
    lines["bundle"] = f"{found.bundle_id}, {found.dimension} numbers per vector" if found.bundle_id else "none active"
    if index.name:
        lines["index"] = f"{index.name}, of revision {index.revision:,}"
        lines["pending"] = f"{index.pending:,} images or items were added, changed or removed since"
        lines["quality"] = _quality(index)
    elif found.bundle_id:
        lines["index"] = "none: every search compares with all vectors"
    lines["on disk"] = f"store {_size(found.store_bytes)}, index {_size(index.bytes)}"
    return lines


def _describe_bundle(bundle: "BundleStats") -> str:
    origin = ", ".join(filter(None, (bundle.backbone, bundle.loss or (bundle.backbone and "pretrained"), bundle.data)))
    added = f", added {bundle.added:%Y-%m-%d %H:%M} UTC" if bundle.added else ""
    return f"{bundle.id}: {bundle.vectors:,} vectors{added}{f' ({origin})' if origin else ''}"


@app.command(no_args_is_help=True)
def verify(gallery: GalleryArgument = None, gallery_option: GalleryOption = None) -> None:
    """Check every byte of the store and the index, and compare every image in both.

    Example: lookalike gallery verify gallery

    Exit code 1 means that faults were found; each is printed with its remedy. The gallery may be in use.
    """
    from index.cli.progress import progress_bar
    from index.gallery import verify_gallery

    address = one_gallery(gallery, gallery_option)
    with progress_bar("Verifying") as on_progress:
        faults = verify_gallery(address, on_progress=on_progress)
    for fault in faults:
        typer.echo(f"{fault.problem} {fault.remedy}", err=True)
    if faults:
        typer.echo("1 fault found." if len(faults) == 1 else f"{len(faults)} faults found.", err=True)
        raise typer.Exit(1)
    typer.echo("No fault found.")


@app.command(no_args_is_help=True)
def compact(
    gallery: GalleryArgument = None,
    gallery_option: GalleryOption = None,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Build from scratch instead of extending the last index.")
    ] = False,
) -> None:
    """Build the next generation of the index from all changes, while searches continue.

    Example: lookalike gallery compact gallery
    """
    from index.cli.progress import progress_bar
    from index.gallery import open_gallery

    address = one_gallery(gallery, gallery_option)
    with open_gallery(address) as opened, progress_bar("Compacting") as on_progress:
        report = opened.compact(rebuild=rebuild, on_progress=on_progress)
    if report is None:
        typer.echo("The gallery has no active bundle: there is nothing to compact.")
        return
    state = "New" if report.is_new else "Nothing changed since"
    typer.echo(f"{state} generation {report.name}: {report.images:,} images, {_quality(report)}")


@app.command(no_args_is_help=True)
def snapshot(
    gallery: GalleryArgument = None,
    file: Annotated[str | None, typer.Argument(help="The tar file to write.", show_default=False)] = None,
    gallery_option: GalleryOption = None,
    force: ForceOption = False,
) -> None:
    """Copy a gallery into one file, consistent while others read and write it.

    Example: lookalike gallery snapshot gallery backup.tar
    """
    from index.cli.progress import progress_bar
    from index.gallery import open_gallery

    address, name = gallery_and(gallery, file, gallery_option, "file to write")
    path = Path(name)
    with open_gallery(address) as opened, progress_bar("Copying"):
        card = opened.snapshot(path, force=force)
    index = f"index {card.index_name}" if card.index_name else "no index"
    typer.echo(
        f"{path}: {card.items:,} items, {card.images:,} images as of revision {card.revision:,}, {index}, "
        f"{_size(path.stat().st_size)}"
    )


@app.command(no_args_is_help=True)
def restore(
    file: Annotated[Path, typer.Argument(help="The snapshot to restore.")],
    gallery: Annotated[str | None, typer.Argument(help="A new or empty folder.", show_default=False)] = None,
    gallery_option: GalleryOption = None,
) -> None:
    """Restore a gallery from a snapshot; every byte is checked before the gallery appears.

    Example: lookalike gallery restore backup.tar restored
    """
    from index.cli.progress import progress_bar
    from index.gallery import restore_gallery

    folder = one_gallery(gallery, gallery_option)
    with progress_bar("Restoring"):
        card = restore_gallery(file, folder)
    typer.echo(
        f"{folder}: {card.items:,} items, {card.images:,} images as of revision {card.revision:,}, "
        f"written {card.created:%Y-%m-%d %H:%M} UTC"
    )
    if card.images and not card.index_name:
        typer.echo(f"The snapshot has no index, so searches scan all vectors; run: lookalike gallery compact {folder}")


@app.command(no_args_is_help=True)
def export(
    gallery: GalleryArgument = None,
    file: Annotated[str | None, typer.Argument(help="The Parquet file to write.", show_default=False)] = None,
    gallery_option: GalleryOption = None,
    bundle: Annotated[str | None, typer.Option(help="Id of the bundle to export. Default: the active one.")] = None,
    force: ForceOption = False,
) -> None:
    """Write items, images and vectors to a Parquet file.

    Example: lookalike gallery export gallery vectors.parquet
    """
    from index.cli.progress import progress_bar
    from index.gallery import open_gallery

    address, name = gallery_and(gallery, file, gallery_option, "file to write")
    path = Path(name)
    with open_gallery(address) as opened, progress_bar("Exporting") as on_progress:
        count = opened.export(path, bundle_id=bundle, force=force, on_progress=on_progress)
    typer.echo(f"{path}: {count:,} images, {_size(path.stat().st_size)}")


@app.command(no_args_is_help=True)
def copy(
    source: Annotated[str, typer.Argument(help="Address of the gallery to copy; it may be in use.")],
    target: Annotated[str, typer.Argument(help="Address of a new gallery, or of a copy to continue or update.")],
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Make TARGET equal whatever it holds: deletes what SOURCE does not have."),
    ] = False,
    verify_only: Annotated[
        bool, typer.Option("--verify-only", help="Compare both galleries, and write nothing.")
    ] = False,
) -> None:
    """Copy a gallery to another one, of the same or another engine, while the source is in use.

    Example: lookalike gallery copy gallery gallery-copy

    Repeat the command to continue a copy that was stopped, and to update one. At the end both galleries are compared;
    exit code 1 means that they differ.
    """
    from index.cli.progress import progress_bar, stop_on_signal
    from index.gallery import open_gallery
    from index.gallery.copy import check_addresses

    check_addresses(source, target)
    with (
        open_gallery(source) as opened,
        open_gallery(target, create=not verify_only) as copied,
        stop_on_signal() as register,
        progress_bar("Comparing" if verify_only else "Copying") as on_progress,
    ):
        if verify_only:
            found = opened.compare(copied, on_progress=on_progress)
        else:
            report = opened.copy_to(copied, replace=replace, on_start=register, on_progress=on_progress)
            found = report.source, report.target
        newest = opened.stats().revision
    for name, contents in zip(("source", "target"), found, strict=True):
        typer.echo(f"{name:<8}{_describe_contents(contents)}")
    if not verify_only:
        typer.echo(f"{report.written:,} items written, {report.deleted:,} deleted, passes: {report.passes}")
    if not found[0].is_equal_to(found[1]):
        hint = "" if verify_only else " Repeat the copy; if they still differ, copy to a new gallery."
        active = f"Active is {found[0].active} in the source, {found[1].active} in the target."
        typer.echo(f"The galleries differ. {active}{hint}", err=True)
        raise typer.Exit(1)
    typer.echo(f"Both are equal: the target reflects revision {found[0].revision:,} of the source.")
    if newest > found[0].revision:
        typer.echo(f"The source is at revision {newest:,} by now; repeat the copy to follow it.")


def _describe_contents(contents: "Contents") -> str:
    vectors = f"{sum(contents.vectors.values()):,} vectors of {len(contents.vectors)} bundles"
    counts = f"{contents.items:,} items, {contents.images:,} images, {vectors}"
    if contents.rankings:
        counts += f", {contents.rankings:,} versions of rankings"
    return f"revision {contents.revision:,}: {counts}, SHA-256 {contents.digest[:16]}"


@app.command(no_args_is_help=True)
def rollback(gallery: GalleryArgument = None, gallery_option: GalleryOption = None) -> None:
    """Activate the bundle that was active before; running services follow automatically.

    Example: lookalike gallery rollback gallery
    """
    from index.gallery import open_gallery

    with open_gallery(one_gallery(gallery, gallery_option)) as opened:
        before = opened.active_bundle()
        bundle_id = opened.rollback()
        typer.echo(f"Bundle {bundle_id} is active again; {before} is kept for another rollback.")
        missing = opened.images_without(bundle_id)
    if missing:
        typer.echo(
            f"{missing} images that were added since have no vector of it and are not found. "
            "Re-index their source with this bundle, or send them again.",
            err=True,
        )


@app.command(no_args_is_help=True)
def activate(
    gallery: GalleryArgument = None,
    bundle: Annotated[
        str | None, typer.Argument(help="Id of a bundle with vectors, see stats.", show_default=False)
    ] = None,
    gallery_option: GalleryOption = None,
) -> None:
    """Activate a bundle without the checks of `lookalike reindex`; running services follow automatically.

    Example: lookalike gallery activate gallery 1f0c2a4e9b7d4c1f
    """
    from index.cli.progress import progress_bar
    from index.gallery import open_gallery

    address, bundle_id = gallery_and(gallery, bundle, gallery_option, "bundle")
    with open_gallery(address) as opened:
        with progress_bar("Building") as on_progress:
            opened.activate(bundle_id, on_progress=on_progress)
        missing = opened.images_without(bundle_id)
    typer.echo(f"Bundle {bundle_id} is active.")
    if missing:
        typer.echo(f"{missing} images have no vector of it and are not found. Re-index their source with it.", err=True)


@app.command(no_args_is_help=True)
def drop(
    gallery: GalleryArgument = None,
    bundle: Annotated[str | None, typer.Argument(help="Id of a bundle that is not active.", show_default=False)] = None,
    gallery_option: GalleryOption = None,
) -> None:
    """Remove the vectors of a bundle that is no longer needed, its index and its model.

    Example: lookalike gallery drop gallery 1f0c2a4e9b7d4c1f
    """
    from index.gallery import open_gallery

    address, bundle_id = gallery_and(gallery, bundle, gallery_option, "bundle")
    with open_gallery(address) as opened:
        opened.drop_bundle(bundle_id)
    typer.echo(f"Bundle {bundle_id} was removed.")


def _quality(index: "IndexStats | BuildReport") -> str:
    if index.kind == "exact":
        return f"exact, recall@10 1 (target {index.target})"
    if index.effort == 0:
        return f"{index.kind}, recall@10 1 (target {index.target}): no effort sufficed, every vector is compared"
    return f"{index.kind}, recall@10 {index.recall:.4f} (target {index.target}) at effort {index.effort}"


def _size(size: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
