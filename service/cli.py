"""The command `lookalike serve`."""

import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer


def serve(
    gallery: Annotated[str | None, typer.Option(help="Address of the gallery: a folder or postgresql://...")] = None,
    bundle: Annotated[Path | None, typer.Option(help="Folder of the bundle; default: the gallery's own copy.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; default: 127.0.0.1.")] = None,
    port: Annotated[
        int | None, typer.Option(help="Port to listen on; default: 8000; 0 takes a free one.", min=0, max=65535)
    ] = None,
    examples: Annotated[Path | None, typer.Option(help="Folder of sample photos for the web page.")] = None,
    keys: Annotated[Path | None, typer.Option(help="Key file; see `lookalike keys`.")] = None,
    workers: Annotated[int | None, typer.Option(help="Server processes; each loads the model.", min=1)] = None,
    create: Annotated[bool | None, typer.Option("--create", help="Create an empty gallery if none exists.")] = None,
    cache: Annotated[
        Path | None,
        typer.Option(help="Folder for the indexes of a gallery in PostgreSQL; default: ~/.cache/lookalike."),
    ] = None,
) -> None:
    """Serve the search API over HTTP, with a web page to search by photo.

    Every option can also be set by a LOOKALIKE_... variable, or in the file that LOOKALIKE_CONFIG names.

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
            cache=cache,
        )
    )


def _path_hint() -> str:
    """Returns how to call the other commands, if their environment is not on the PATH."""
    activate = Path(sys.prefix) / "bin" / "activate"
    if shutil.which("lookalike") or not activate.is_file():
        return ""
    return f"\nFor the other commands, put `lookalike` on the PATH:\n  source {shlex.quote(_relative(activate))}"


def _relative(path: Path) -> str:
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def serve_demo(directory: Path, *, host: str, port: int) -> None:
    """Serves the gallery of the demo, and prints a command to try."""
    from service.server.run import run
    from service.settings import load_settings

    examples = directory / "examples"
    photo = shlex.quote(str(min(examples.iterdir())))
    run(
        load_settings(gallery=directory / "gallery", host=host, port=port, examples=examples),
        announce=f"Open it in a browser, or try:\n  curl -F image=@{photo} '{{address}}/v1/search?limit=3'"
        + _path_hint(),
    )
