"""How help shows options: a flag takes no value, so that none is shown for it."""

from typing import Any

from typer.core import TyperCommand, TyperGroup, TyperOption


def _hide_flag_types(params: list[Any]) -> list[Any]:
    for param in params:
        if isinstance(param, TyperOption) and param.is_flag and param.metavar is None:
            param.metavar = ""
    return params


class Command(TyperCommand):
    """A command whose help shows flags without `<bool>`."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _hide_flag_types(super().get_params(ctx))


class Group(TyperGroup):
    """A group of commands whose help shows flags without `<bool>`."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _hide_flag_types(super().get_params(ctx))
