"""The verb of the service: `serve`."""

import shlex
from pathlib import Path
from typing import Annotated

import typer


def serve(
    gallery: Annotated[Path | None, typer.Option(help="Folder of the gallery.")] = None,
    bundle: Annotated[
        Path | None, typer.Option(help="Folder of the exported model; the gallery's own unless told.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; 127.0.0.1 unless told.")] = None,
    port: Annotated[
        int | None, typer.Option(help="Port to listen on; 8000 unless told, 0 takes a free one.", min=0, max=65535)
    ] = None,
    examples: Annotated[Path | None, typer.Option(help="Folder of photos that the page offers to try.")] = None,
    keys: Annotated[Path | None, typer.Option(help="File of API keys; see `lookalike keys`.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that answer; each loads the model.", min=1)] = None,
    create: Annotated[bool | None, typer.Option("--create", help="Make an empty gallery where there is none.")] = None,
) -> None:
    """Serve similar products over HTTP, with a page to search by photo.

    Everything can also be set by LOOKALIKE_... variables, or in the file that LOOKALIKE_CONFIG names.

    Example: lookalike serve --gallery gallery --port 8000
    """
    from service.server.run import run
    from service.settings import load_settings

    run(
        load_settings(
            gallery=gallery,
            bundle=bundle,
            host=host,
            port=port,
            examples=examples,
            keys=keys,
            workers=workers,
            create=create,
        )
    )


def serve_demo(directory: Path, *, host: str, port: int) -> None:
    """Serves what the demo prepared, and says what to try."""
    from service.server.run import run
    from service.settings import load_settings

    examples = directory / "examples"
    photo = shlex.quote(str(min(examples.iterdir())))
    run(
        load_settings(gallery=directory / "gallery", host=host, port=port, examples=examples),
        announce=f"Open it in a browser, or try:\n  curl -F image=@{photo} '{{address}}/v1/search?top=3'",
    )
