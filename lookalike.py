"""The command line: one screen that composes each package's commands.

Every verb imports its engine only when it runs, so help is quick and serving never meets PyTorch.
"""

import sys
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

import index.cli.gallery
import index.cli.ingest
import service.auth.cli
import service.cli
import training.cli
import training.study.cli
from index.errors import LookalikeError

app = typer.Typer(
    help="Visual product search: train on your own catalogue, index it, serve it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
for verb in (
    training.cli.train,
    training.cli.evaluate,
    training.cli.export,
    training.cli.report,
    training.study.cli.study,
    index.cli.ingest.reindex,
    index.cli.ingest.jobs,
    index.cli.ingest.search,
):
    app.command(no_args_is_help=True)(verb)
app.command()(service.cli.serve)  # its settings may all come from variables
app.add_typer(index.cli.gallery.app, name="gallery")
app.add_typer(service.auth.cli.app, name="keys")


def _tell_version(asked: bool) -> None:
    if asked:
        print(f"lookalike {version('lookalike')}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    told: Annotated[
        bool, typer.Option("--version", help="Tell the version and end.", callback=_tell_version, is_eager=True)
    ] = False,
) -> None:
    """Read by `main`, which takes `--debug` at any place of the line; declared here for the help."""


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


def main() -> None:
    """Runs a verb. Exit codes: 0 done, 1 a mistake to mend, 2 wrong usage, 3 done in part, 70 a fault of ours."""
    debug = "--debug" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--debug"]
    try:
        app()
    except Exception as error:
        if debug:
            traceback.print_exc()
        elif isinstance(error, LookalikeError):
            print(f"lookalike: {error}", file=sys.stderr)
        else:
            hint = "This is a fault in Lookalike; --debug shows where."
            print(f"lookalike: {type(error).__name__}: {error}. {hint}", file=sys.stderr)
        sys.exit(1 if isinstance(error, LookalikeError) else 70)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
