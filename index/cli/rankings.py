"""The commands of `lookalike gallery rankings`: the rules for the order of search results, stored under names."""

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from index.cli.arguments import GalleryArgument, GalleryOption, gallery_and, one_gallery

if TYPE_CHECKING:
    from index.rankings import StoredRanking

app = typer.Typer(help="Show and change the rankings that a gallery holds.", no_args_is_help=True)
NameArgument = Annotated[str | None, typer.Argument(help="Name of the ranking.", show_default=False)]
VersionOption = Annotated[int | None, typer.Option(help="The version. Default: the newest one.")]


@app.command("list", no_args_is_help=True)
def list_rankings(gallery: GalleryArgument = None, gallery_option: GalleryOption = None) -> None:
    """List the rankings of a gallery.

    Example: lookalike gallery rankings list gallery
    """
    from index.gallery import open_gallery

    with open_gallery(one_gallery(gallery, gallery_option)) as opened:
        for stored in opened.rankings():
            typer.echo(_describe(stored))


@app.command(no_args_is_help=True)
def show(
    gallery: GalleryArgument = None,
    name: NameArgument = None,
    gallery_option: GalleryOption = None,
    version: VersionOption = None,
    versions: Annotated[bool, typer.Option("--versions", help="List the versions instead.")] = False,
) -> None:
    """Print the rules of a ranking as JSON.

    Example: lookalike gallery rankings show gallery home
    """
    from index.gallery import open_gallery
    from index.gallery.errors import RankingMissing

    address, name = gallery_and(gallery, name, gallery_option, "ranking")
    with open_gallery(address) as opened:
        found = opened.ranking_versions(name)
    chosen = [stored for stored in found if version in (None, stored.version)]
    if not chosen:
        raise RankingMissing(name, version)
    if versions:
        for stored in chosen:
            typer.echo(_describe(stored))
    else:
        typer.echo(chosen[0].ranking.model_dump_json(exclude_defaults=True, indent=2))


@app.command("set", no_args_is_help=True)
def set_ranking(
    gallery: GalleryArgument = None,
    name: NameArgument = None,
    file: Annotated[
        Path | None, typer.Argument(help="A file with the rules as JSON; - for standard input.", show_default=False)
    ] = None,
    gallery_option: GalleryOption = None,
) -> None:
    """Store a ranking, or a new version of it; running services use it from their next search on.

    Example: lookalike gallery rankings set gallery home rules.json
    """
    from pydantic import ValidationError

    from index._util.validation import explain_errors
    from index.errors import LookalikeError
    from index.gallery import open_gallery
    from index.rankings import Ranking

    if gallery_option and file is None:
        gallery, name, file = None, gallery, Path(name) if name else None
    address = one_gallery(gallery, gallery_option)
    if name is None or file is None:
        raise typer.BadParameter("Name the ranking and the file with its rules.")
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
        ranking = Ranking.model_validate_json(text)
    except OSError as error:
        raise LookalikeError(f"{file} cannot be read: {error.strerror}.", "Name a file with the rules.") from None
    except ValidationError as error:
        problems = "; ".join(explain_errors(error.errors(), Ranking))
        raise LookalikeError(f"{file}: {problems}.", "Correct the rules and repeat the command.") from None
    with open_gallery(address) as opened:
        typer.echo(_describe(opened.put_ranking(name, ranking)))


@app.command(no_args_is_help=True)
def delete(gallery: GalleryArgument = None, name: NameArgument = None, gallery_option: GalleryOption = None) -> None:
    """Delete a ranking with all its versions.

    Example: lookalike gallery rankings delete gallery home
    """
    from index.gallery import open_gallery
    from index.gallery.errors import RankingMissing

    address, name = gallery_and(gallery, name, gallery_option, "ranking")
    with open_gallery(address) as opened:
        if not opened.delete_ranking(name):
            raise RankingMissing(name)
    typer.echo(f"Ranking {name} was deleted.")


def _describe(stored: "StoredRanking") -> str:
    rules = ", ".join(stored.ranking.model_dump(exclude_defaults=True)) or "no rules"
    moment = datetime.fromtimestamp(stored.stored, UTC)
    return f"{stored.name}  version {stored.version}, {moment:%Y-%m-%d %H:%M} UTC: {rules}"
