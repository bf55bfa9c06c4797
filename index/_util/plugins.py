"""Plug-ins: classes and functions from outside, named by `module:name` or by an entry point of an installed package."""

from importlib import import_module
from importlib.metadata import entry_points
from operator import attrgetter
from typing import Any, Literal

from index.errors import LookalikeError

Group = Literal["lookalike.losses", "lookalike.backbones", "lookalike.sources"]
"""The groups of entry points that are looked up."""


class PluginError(LookalikeError):
    """A plug-in cannot be loaded, or does not have the form that its use needs."""

    kind = "plugin"


def plugin_names(group: Group) -> list[str]:
    """Returns the names that installed packages declare as entry points of a group."""
    return sorted(entry_points(group=group).names)


def load_plugin(group: Group, name: str) -> Any | None:
    """Returns the class or function that a name refers to; None if it is neither `module:name` nor an entry point."""
    module, colon, attribute = name.partition(":")
    try:
        if colon:
            return attrgetter(attribute)(import_module(module))
        for entry in entry_points(group=group, name=name):
            return entry.load()
    except Exception as error:  # whatever the imported module raises
        raise PluginError(
            f"The plug-in {name!r} cannot be loaded ({type(error).__name__}: {error}).",
            "Install its package, or set PYTHONPATH to the folder of its module.",
        ) from error
    return None
