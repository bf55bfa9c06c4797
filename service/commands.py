"""The verb of the service: `serve`."""

import shlex
from pathlib import Path
from typing import Annotated

import typer


def serve(
    gallery: Annotated[Path, typer.Option(help="Folder of the gallery.")],
    bundle: Annotated[Path, typer.Option(help="Folder of the exported model.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8000,
    examples: Annotated[Path | None, typer.Option(help="Folder of photos that the page offers to try.")] = None,
) -> None:
    """Serve similar products over HTTP, with a page to search by photo.

    Example: lookalike serve --gallery gallery --bundle bundle --port 8000
    """
    from service.server import run
    from service.settings import Settings

    run(Settings(gallery=gallery, bundle=bundle, host=host, port=port, examples=examples))


def serve_demo(directory: Path, *, host: str, port: int) -> None:
    """Serves what the demo prepared, and says what to try."""
    from service.server import run
    from service.settings import Settings

    examples = directory / "examples"
    photo = shlex.quote(str(min(examples.iterdir())))
    run(
        Settings(gallery=directory / "gallery", bundle=directory / "bundle", host=host, port=port, examples=examples),
        announce=f"Open it in a browser, or try:\n  curl -F image=@{photo} '{{address}}/v1/search?top=3'",
    )
