"""The registry of losses by name, and losses of others by `module:Class` or entry point."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, create_model
from torch import nn

from index._util.models import Frozen
from index._util.plugins import Group, load_plugin, plugin_names
from index._util.validation import suggest
from training.errors import TrainingError
from training.losses.baselines import ON_PAIRS, PEERS, Builder
from training.losses.proxy_anchor import ProxyAnchorLoss, ProxyAnchorSettings
from training.losses.proxy_gml import ProxyGMLLoss, ProxyGMLSettings
from training.losses.proxy_isa import ProxyISAGradientLoss, ProxyISALoss, ProxyISASettings
from training.losses.proxy_nca_isa import ProxyNCAISALoss, ProxyNCAISASettings
from training.losses.validation import parse_settings

_LOSSES: dict[str, tuple[type[BaseModel], Builder]] = {
    "proxy_isa": (ProxyISASettings, ProxyISALoss),
    "proxy_isa_gradient": (ProxyISASettings, ProxyISAGradientLoss),
    "proxy_anchor": (ProxyAnchorSettings, ProxyAnchorLoss),
    "proxy_nca_isa": (ProxyNCAISASettings, ProxyNCAISALoss),
    "proxy_gml": (ProxyGMLSettings, ProxyGMLLoss),
    **PEERS,
}
_GROUP: Group = "lookalike.losses"
_SIZES = ("num_classes", "embedding_size")


def loss_names() -> list[str]:
    """Returns the names of our own losses."""
    return list(_LOSSES)


def learns_from_pairs(name: str) -> bool:
    """Returns whether loss `name` compares the embeddings of a batch with each other and so needs several per class."""
    _entry(name)
    return name in ON_PAIRS or bool(getattr(load_plugin(_GROUP, name), "learns_from_pairs", False))


def setting_names(name: str) -> list[str]:
    """Returns every setting of loss `name`."""
    return list(_entry(name)[0].model_fields)


def default_settings(name: str) -> dict[str, Any]:
    """Returns every setting of loss `name` with its default."""
    return {setting: field.default for setting, field in _entry(name)[0].model_fields.items()}


def parse_loss_settings(name: str, settings: Mapping[str, Any]) -> BaseModel:
    """Validates the settings of loss `name`."""
    return parse_settings(_entry(name)[0], name, None, settings)


def make_loss(name: str, num_classes: int, embedding_size: int, settings: Mapping[str, Any]) -> nn.Module:
    """Makes the loss `name`, called as `loss(embeddings, labels)`; its learnable parts are its `parameters()`."""
    model, build = _entry(name)
    return build(num_classes, embedding_size, parse_settings(model, name, None, settings))


def _entry(name: str) -> tuple[type[BaseModel], Builder]:
    if name in _LOSSES:
        return _LOSSES[name]
    plugin = load_plugin(_GROUP, name)
    if plugin is None:
        known = [*_LOSSES, *plugin_names(_GROUP)]
        raise TrainingError(f"No loss is called {name!r}{suggest(name, known)}.", f"Known losses: {', '.join(known)}.")
    return _plugin_entry(name, plugin)


def _plugin_entry(name: str, plugin: Callable[..., nn.Module]) -> tuple[type[BaseModel], Builder]:
    """Derives the settings of a plug-in from its parameters other than the sizes."""
    try:
        parameters = dict(inspect.signature(plugin, eval_str=True).parameters)
        for size in _SIZES:
            del parameters[size]
    except (KeyError, TypeError, ValueError, NameError) as error:
        raise TrainingError(
            f"The loss {name} cannot be called with num_classes and embedding_size ({error}).",
            "Give its constructor these two parameters; all others are settings.",
        ) from error
    fields: dict[str, Any] = {
        parameter.name: (_or(parameter.annotation, Any), _or(parameter.default, ...))
        for parameter in parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    settings = create_model("PluginSettings", __base__=_PluginSettings, **fields)

    def build(num_classes: int, embedding_size: int, parsed: BaseModel) -> nn.Module:
        return plugin(num_classes=num_classes, embedding_size=embedding_size, **dict(parsed))

    return settings, build


class _PluginSettings(Frozen):
    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())


def _or(value: Any, default: Any) -> Any:
    return default if value is inspect.Parameter.empty else value
