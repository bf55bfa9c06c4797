"""The gallery of a command, which is given as an argument or as an option."""

from typing import Annotated

import typer

from index.ingest.options import ReindexOptions

GalleryArgument = Annotated[
    str | None, typer.Argument(help=ReindexOptions.model_fields["gallery"].description, show_default=False)
]
GalleryOption = Annotated[str | None, typer.Option("--gallery", help="The same, as an option.")]


def one_gallery(argument: str | None, option: str | None) -> str:
    """Returns the gallery, which is given as an argument or as an option."""
    if argument and option and argument != option:
        raise typer.BadParameter("Two galleries are given, as an argument and with --gallery.")
    if not (argument or option):
        raise typer.BadParameter("Name the gallery, as an argument or with --gallery.")
    return argument or option or ""


def gallery_and(first: str | None, second: str | None, option: str | None, name: str) -> tuple[str, str]:
    """Returns the gallery and the argument after it, which is the first one if the gallery is given as an option."""
    if option and second is None:
        first, second = None, first
    gallery = one_gallery(first, option)
    if second is None:
        raise typer.BadParameter(f"Name the {name}.")
    return gallery, second
