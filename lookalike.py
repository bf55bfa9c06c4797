"""The command line, and the public Python names.

    from lookalike import Client, Gallery, open_gallery

Importing this module loads none of the packages: each name is imported when it is first used, each command imports its
engine when it runs. So the client needs no engine, help is quick, and serving never loads PyTorch.
"""

import sys
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    import typer

    from index.embedding.bundle import Bundle
    from index.embedding.embedder import Embedder
    from index.errors import LookalikeError
    from index.gallery import Gallery, open_gallery
    from index.gallery.examples import Example
    from index.gallery.filters import Filter
    from index.items import Item
    from index.rankings import Ranking
    from service.client import AsyncClient, Client
    from training.losses.proxy_isa import ProxyISALoss

    app: typer.Typer

__all__ = [
    "AsyncClient",
    "Bundle",
    "Client",
    "Embedder",
    "Example",
    "Filter",
    "Gallery",
    "Item",
    "LookalikeError",
    "ProxyISALoss",
    "Ranking",
    "open_gallery",
]

_MODULES = {
    "AsyncClient": "service.client",
    "Bundle": "index.embedding.bundle",
    "Client": "service.client",
    "Embedder": "index.embedding.embedder",
    "Example": "index.gallery.examples",
    "Filter": "index.gallery.filters",
    "Gallery": "index.gallery",
    "Item": "index.items",
    "LookalikeError": "index.errors",
    "ProxyISALoss": "training.losses.proxy_isa",
    "Ranking": "index.rankings",
    "open_gallery": "index.gallery",
}


if not TYPE_CHECKING:  # type checkers would take every name for an attribute

    def __getattr__(name: str) -> object:
        """Imports a public name when it is first used."""
        if name == "app":
            return _build_app()
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_MODULES[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


@cache
def _build_app() -> "typer.Typer":
    """Composes the commands of the packages into one command line."""
    from importlib.metadata import version
    from pathlib import Path

    import typer

    import index.cli.gallery
    import index.cli.info
    import index.cli.ingest
    import index.cli.rankings
    import service.auth.cli
    import service.cli
    import training.cli
    import training.evaluation_cli
    import training.study.cli
    from index.cli.help import Command, Group

    app = typer.Typer(
        help="Visual product search: train on your own catalogue, index it, serve it.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
        cls=Group,
    )
    for command in (
        training.cli.train,
        training.evaluation_cli.evaluate,
        training.evaluation_cli.compare,
        training.cli.export,
        training.cli.report,
        training.study.cli.study,
        index.cli.ingest.reindex,
        index.cli.ingest.jobs,
        index.cli.ingest.search,
    ):
        app.command(no_args_is_help=True)(command)
    app.command()(service.cli.serve)  # without arguments: its settings may all come from environment variables
    app.command()(index.cli.info.info)
    app.add_typer(index.cli.gallery.app, name="gallery", cls=Group)
    app.add_typer(service.auth.cli.app, name="keys", cls=Group)

    def print_version(requested: bool) -> None:
        if requested:
            print(f"lookalike {version('lookalike')}")
            raise typer.Exit

    @app.callback()
    def options(
        debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
        version: Annotated[
            bool, typer.Option("--version", help="Print the version and exit.", callback=print_version, is_eager=True)
        ] = False,
    ) -> None:
        """Declares the options for the help; `main` reads --debug, which may be anywhere on the command line."""

    @app.command()
    def demo(
        directory: Annotated[Path, typer.Option("--dir", help="Where the demo keeps its files.")] = Path("demo"),
        quick: Annotated[bool, typer.Option("--quick", help="A smaller shop, a minute instead of three.")] = False,
        serve: Annotated[bool, typer.Option(help="Serve the shop when it is ready.")] = True,
        host: Annotated[str, typer.Option(help="Address to serve on.")] = "127.0.0.1",
        port: Annotated[int, typer.Option(help="Port to serve on; 0 takes a free one.", min=0, max=65535)] = 8000,
    ) -> None:
        """Train on the built-in sample shop, index it and serve it.

        Example: lookalike demo --no-serve --dir /tmp/shop
        """
        training.cli.prepare_demo(directory, quick=quick)
        if serve:
            service.cli.serve_demo(directory, host=host, port=port)

    for group in (app, index.cli.gallery.app, index.cli.rankings.app, service.auth.cli.app):
        for registered in group.registered_commands:
            registered.cls = Command
    return app


def main() -> None:
    """Runs a command. Exit codes: 0 success, 1 user error, 2 wrong usage, 3 partial success, 70 internal error."""
    from index.errors import LookalikeError

    debug = "--debug" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--debug"]
    try:
        _build_app()()
    except Exception as error:
        if debug:
            import traceback

            traceback.print_exc()
        elif isinstance(error, LookalikeError):
            print(f"lookalike: {error}", file=sys.stderr)
        else:
            hint = "This is a bug in Lookalike; --debug shows the traceback."
            print(f"lookalike: {type(error).__name__}: {error}. {hint}", file=sys.stderr)
        sys.exit(1 if isinstance(error, LookalikeError) else 70)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
