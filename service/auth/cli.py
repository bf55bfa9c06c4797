"""The commands `lookalike keys create`, `list`, `revoke` and `rotate`."""

import re
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="API keys: create, list, revoke, rotate.", no_args_is_help=True)

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


class _Scope(StrEnum):
    """The scopes of service.auth.api_keys; typer accepts a list of an enumeration, but not of literals."""

    search = "search"
    write = "write"
    admin = "admin"


def _parse_duration(text: str) -> timedelta:
    match = re.fullmatch(r"(\d{1,6})([smhd])", text)
    if not match:
        raise typer.BadParameter(f"{text!r} is not a duration; write it as 30m, 12h or 90d.")
    return timedelta(**{_UNITS[match[2]]: int(match[1])})


KeysOption = Annotated[Path, typer.Option("--keys", envvar="LOOKALIKE_KEYS", help="Key file.", dir_okay=False)]
IdArgument = Annotated[str, typer.Argument(metavar="ID", help="Id of the key, as in its token after `lk_`.")]


@app.command(no_args_is_help=True)
def create(
    name: Annotated[str, typer.Argument(help="Who or what the key is for.")],
    keys: KeysOption,
    scope: Annotated[
        list[_Scope],
        typer.Option(help="What it may do; write includes search, and admin includes both."),
    ] = [_Scope.search],  # noqa: B006  # typer copies it
    expires_in: Annotated[
        timedelta | None,
        typer.Option(parser=_parse_duration, metavar="TIME", help="Such as 12h or 90d; default: never."),
    ] = None,
) -> None:
    """Create a key and print its token, which is not shown again.

    Example: lookalike keys create "Shop front" --scope search --expires-in 90d --keys keys.json
    """
    from service.auth.api_keys import KeyRing

    _print_token(KeyRing(keys).create(name, [it.value for it in scope], expires_in))


@app.command("list")
def list_keys(keys: KeysOption) -> None:
    """List the keys, without their tokens.

    Example: lookalike keys list --keys keys.json
    """
    from datetime import UTC, datetime

    from service.auth.api_keys import SCOPES, KeyRing

    now = datetime.now(UTC)
    entries = KeyRing(keys).list()
    if not entries:
        typer.echo(f"There are no keys in {keys}.", err=True)
    for key in entries:
        scopes = ",".join(it for it in SCOPES if it in key.scopes)
        details = [f"created {key.created:%Y-%m-%d}"]
        if key.rotated:
            details.append(f"rotated {key.rotated:%Y-%m-%d}")
        if key.expires:
            details.append(f"{'expired' if key.expired(now) else 'expires'} {key.expires:%Y-%m-%d %H:%M} UTC")
        typer.echo(f"{key.id}  {scopes:<20}  {key.name}  ({', '.join(details)})")


@app.command(no_args_is_help=True)
def revoke(key: IdArgument, keys: KeysOption) -> None:
    """Revoke a key: a running service refuses its next request.

    Example: lookalike keys revoke 1f9a03c4 --keys keys.json
    """
    from service.auth.api_keys import KeyRing

    KeyRing(keys).revoke(key)
    typer.echo(f"Revoked {key}.")


@app.command(no_args_is_help=True)
def rotate(
    key: IdArgument,
    keys: KeysOption,
    grace: Annotated[
        timedelta | None,
        typer.Option(
            parser=_parse_duration, metavar="TIME", help="How long the former token stays valid; default: not at all."
        ),
    ] = None,
) -> None:
    """Give a key a new token and print it; it is not shown again.

    Example: lookalike keys rotate 1f9a03c4 --grace 1h --keys keys.json
    """
    from service.auth.api_keys import KeyRing

    _print_token(KeyRing(keys).rotate(key, grace or timedelta(0)))


def _print_token(token: str) -> None:
    """Prints only the token on standard output, so that a script can read it."""
    typer.echo(token)
    typer.echo("Copy this token now: only its digest is stored, and it is not shown again.", err=True)
