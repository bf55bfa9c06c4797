"""The verbs of `lookalike gallery`: looking after a gallery that is already there."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from index.gallery import GalleryStats
    from index.gallery.vectors.faiss.generation import Manifest

app = typer.Typer(help="Look after a gallery: state, check, compaction, backup, export.", no_args_is_help=True)
GalleryArgument = Annotated[Path, typer.Argument(help="Folder of the gallery.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")]


@app.command(no_args_is_help=True)
def stats(
    gallery: GalleryArgument, as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False
) -> None:
    """Show what a gallery holds, what its searches reflect, and its size on disk.

    Example: lookalike gallery stats gallery --json
    """
    from index.gallery import open_gallery
    from index.gallery.vectors.faiss.compaction import CATALOGUE_FILE, GENERATIONS

    opened = open_gallery(gallery)
    try:
        found = opened.stats()
        manifest = _manifest(gallery, found.generation)
        catalogue = _bytes(gallery.glob(f"{CATALOGUE_FILE}*"))
        generation = _bytes((gallery / GENERATIONS / found.generation).glob("*")) if found.generation else 0
    finally:
        opened.close()
    if as_json:
        plan = {"target": manifest.plan.target, "effort": manifest.plan.effort} if manifest else {}
        sizes = {"catalogue_bytes": catalogue, "generation_bytes": generation}
        typer.echo(json.dumps({**found.model_dump(), "target": None, "effort": None, **plan, **sizes}, indent=2))
        return
    for name, text in _readable(found, manifest, catalogue, generation).items():
        typer.echo(f"{name:<12}{text}")


def _readable(found: "GalleryStats", manifest: "Manifest | None", catalogue: int, generation: int) -> dict[str, str]:
    lines = {"items": f"{found.items:,}", "images": f"{found.images:,}", "change": f"{found.change:,}"}
    lines["bundle"] = f"{found.bundle_id}, {found.dimension} numbers a vector" if found.bundle_id else "none yet"
    if found.previous_bundle_id:
        lines["previous"] = found.previous_bundle_id
    if found.generation:
        lines["generation"] = f"{found.generation}, of change {found.generation_change:,}"
        lines["pending"] = f"{found.pending:,} images or items came, went or changed since"
    else:
        lines["generation"] = "none: every search compares with all vectors"
    if manifest:
        lines["index"] = _quality(manifest)
    lines["on disk"] = f"catalogue {_size(catalogue)}, generation {_size(generation)}"
    return lines


@app.command(no_args_is_help=True)
def verify(gallery: GalleryArgument) -> None:
    """Check every byte of the index, the catalogue, and that both say the same of every image.

    Example: lookalike gallery verify gallery

    Exit code 1 means that faults were found; each is told with its remedy. The gallery may be in use.
    """
    from index.cli.progress import progress_bar
    from index.gallery.verify import verify as run

    with progress_bar("Verifying") as on_progress:
        faults = run(gallery, on_progress=on_progress)
    for fault in faults:
        typer.echo(f"{fault.problem} {fault.remedy}", err=True)
    if faults:
        typer.echo("1 fault found." if len(faults) == 1 else f"{len(faults)} faults found.", err=True)
        raise typer.Exit(1)
    typer.echo("No fault found.")


@app.command(no_args_is_help=True)
def compact(
    gallery: GalleryArgument,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Anew, instead of extending the last index.")] = False,
) -> None:
    """Move all changes into a new generation of the index, beside the searches.

    Example: lookalike gallery compact gallery
    """
    from index.cli.progress import progress_bar
    from index.gallery import open_gallery
    from index.gallery.vectors.faiss.compaction import GENERATIONS

    before = {path.name for path in (gallery / GENERATIONS).glob("*")}
    opened = open_gallery(gallery)
    try:
        with progress_bar("Compacting") as on_progress:
            name = opened.compact(rebuild=rebuild, on_progress=on_progress)
    finally:
        opened.close()
    if name is None:
        typer.echo("The gallery holds no images: there is nothing to compact.")
        return
    manifest = _manifest(gallery, name)
    told = f": {manifest.images:,} images, {_quality(manifest)}" if manifest else ""
    typer.echo(f"{'Nothing changed since' if name in before else 'New'} generation {name}{told}")


@app.command(no_args_is_help=True)
def snapshot(
    gallery: GalleryArgument,
    file: Annotated[Path, typer.Argument(help="Where to write the snapshot, a tar file.")],
    force: ForceOption = False,
) -> None:
    """Copy a gallery into one file, consistent while others read and write it.

    Example: lookalike gallery snapshot gallery backup.tar
    """
    from index.cli.progress import progress_bar
    from index.gallery.backup import snapshot as run

    with progress_bar("Copying"):
        card = run(gallery, file, force=force)
    index = f"generation {card.generation}" if card.generation else "no generation"
    typer.echo(
        f"{file}: {card.items:,} items, {card.images:,} images as of change {card.change:,}, {index}, "
        f"{_size(file.stat().st_size)}"
    )


@app.command(no_args_is_help=True)
def restore(
    file: Annotated[Path, typer.Argument(help="A snapshot.")],
    gallery: Annotated[Path, typer.Argument(help="A new or empty folder.")],
) -> None:
    """Make a gallery of a snapshot; every byte is checked before the gallery appears.

    Example: lookalike gallery restore backup.tar restored
    """
    from index.cli.progress import progress_bar
    from index.gallery.backup import restore as run

    with progress_bar("Restoring"):
        card = run(file, gallery)
    typer.echo(
        f"{gallery}: {card.items:,} items, {card.images:,} images as of change {card.change:,}, "
        f"written {card.created:%Y-%m-%d %H:%M} UTC"
    )
    if card.images and not card.generation:
        typer.echo(f"It came without its index and searches without one; make it: lookalike gallery compact {gallery}")


@app.command(no_args_is_help=True)
def export(
    gallery: GalleryArgument,
    file: Annotated[Path, typer.Argument(help="The Parquet file to write.")],
    bundle: Annotated[str | None, typer.Option(help="Id of the bundle whose vectors to write; else the live one.")] = (
        None
    ),
    force: ForceOption = False,
) -> None:
    """Write items, images and vectors as a Parquet table.

    Example: lookalike gallery export gallery vectors.parquet
    """
    from index.cli.progress import progress_bar
    from index.gallery.export import export_parquet

    with progress_bar("Exporting") as on_progress:
        count = export_parquet(gallery, file, bundle_id=bundle, force=force, on_progress=on_progress)
    typer.echo(f"{file}: {count:,} images, {_size(file.stat().st_size)}")


def _manifest(gallery: Path, generation: str | None) -> "Manifest | None":
    """What a generation says of itself; none if a compaction has replaced it just now."""
    from index.gallery.vectors.faiss.compaction import GENERATIONS
    from index.gallery.vectors.faiss.generation import read_manifest

    path = gallery / GENERATIONS / (generation or "")
    return read_manifest(path) if generation and path.is_dir() else None


def _quality(manifest: "Manifest") -> str:
    plan = manifest.plan
    if plan.kind == "exact":
        return f"exact, recall@10 1 (target {plan.target})"
    if plan.scans:
        return f"{plan.kind}, recall@10 1 (target {plan.target}): no effort was enough, every vector is compared"
    return f"{plan.kind}, recall@10 {plan.recall:.4f} (target {plan.target}) at effort {plan.effort}"


def _bytes(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def _size(size: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


@app.command(no_args_is_help=True)
def rollback(gallery: GalleryArgument) -> None:
    """Return to the bundle that was live before; running services follow by themselves.

    Example: lookalike gallery rollback gallery
    """
    from index.gallery import open_gallery

    opened = open_gallery(gallery)
    try:
        before = opened.live_bundle()
        bundle_id = opened.rollback()
        typer.echo(f"Bundle {bundle_id} is live again; {before} is kept and can be returned to.")
        missing = opened.images_without(bundle_id)
        if missing:
            typer.echo(f"{missing} images that came since have no vector of it and are not found.", err=True)
    finally:
        opened.close()


@app.command(no_args_is_help=True)
def drop(
    gallery: GalleryArgument, bundle: Annotated[str, typer.Argument(help="Id of a bundle that is not live.")]
) -> None:
    """Remove the vectors of a bundle that is no longer needed, its index and its model.

    Example: lookalike gallery drop gallery 1f0c2a4e9b7d4c1f
    """
    from index.gallery import open_gallery

    opened = open_gallery(gallery)
    try:
        opened.drop_bundle(bundle)
    finally:
        opened.close()
    typer.echo(f"Bundle {bundle} is gone.")
