"""Weights come from a package, the hub or a file; errors name the fix."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import timm
import torch
from safetensors.torch import save_file

from training.backbones import EmbeddingModel
from training.config import BackboneSettings
from training.errors import TrainingError


def load(weights: str | Path, name: str = "test_resnet") -> dict[str, torch.Tensor]:
    """Returns the tensors of a small backbone after loading."""
    model = EmbeddingModel(BackboneSettings(name=name, weights=str(weights)), input_size=32)
    return dict(model.backbone.state_dict())


@pytest.fixture(scope="module")
def source() -> dict[str, torch.Tensor]:
    """A state dict with a classifier, as weights are published."""
    torch.manual_seed(3)
    return dict(timm.create_model("test_resnet", num_classes=10).state_dict())


def same(got: dict[str, torch.Tensor], source: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, source[name]) for name, value in got.items())


@pytest.mark.parametrize("wrapping", [None, "state_dict", "model"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_file_gives_its_weights_and_keeps_its_classifier(
    wrapping: str | None, prefix: str, source: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    state: dict[str, Any] = {prefix + name: value for name, value in source.items()}
    torch.save({wrapping: state, "epoch": 3} if wrapping else state, tmp_path / "weights.pth")
    assert same(load(tmp_path / "weights.pth"), source)


def test_a_safetensors_file_gives_its_weights(source: dict[str, torch.Tensor], tmp_path: Path) -> None:
    save_file(source, tmp_path / "weights.safetensors")
    assert same(load(tmp_path / "weights.safetensors"), source)


def test_a_transformers_file_fits_at_another_input_size(tmp_path: Path) -> None:
    published = timm.create_model("test_vit", num_classes=10).state_dict()
    torch.save(published, tmp_path / "vit.pth")
    got = load(tmp_path / "vit.pth", "test_vit")
    assert got.pop("pos_embed").shape == (1, 1 + 2 * 2, 64)
    assert same(got, published)


def test_a_misfit_names_the_first_missing_and_unexpected_tensor_and_shape(
    source: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    state = {name: value for name, value in source.items() if name != "layer1.0.conv1.weight"}
    state |= {"layer9.weight": torch.zeros(1), "bn1.bias": torch.zeros(65)}
    torch.save(state, tmp_path / "weights.pth")
    with pytest.raises(TrainingError) as refused:
        load(tmp_path / "weights.pth")
    for part in (
        "weights.pth do not fit test_resnet",
        "1 missing, first layer1.0.conv1.weight",
        "1 unexpected, first layer9.weight",
        "1 of another shape, first bn1.bias (65,) for (32,)",
    ):
        assert part in str(refused.value)


def test_a_missing_file_or_one_without_a_state_dict_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"No weights file at packge\. .* auto, package, hub, none"):
        load("packge")
    (tmp_path / "notes.pth").write_text("mine")
    with pytest.raises(TrainingError, match="cannot be read as weights"):
        load(tmp_path / "notes.pth")
    (tmp_path / "notes.safetensors").write_text("mine")
    with pytest.raises(TrainingError, match="cannot be read as weights"):
        load(tmp_path / "notes.safetensors")
    torch.save([torch.zeros(2)], tmp_path / "list.pth")
    with pytest.raises(TrainingError, match="is not a state dict"):
        load(tmp_path / "list.pth")


def test_a_file_that_would_run_code_is_refused(source: dict[str, torch.Tensor], tmp_path: Path) -> None:
    torch.save({"state_dict": source, "hook": print}, tmp_path / "weights.pth")
    with pytest.raises(TrainingError, match="cannot be read as weights"):
        load(tmp_path / "weights.pth")


def test_without_weights_every_model_starts_at_random() -> None:
    torch.manual_seed(0)
    assert not torch.equal(load("none")["conv1.0.weight"], load("none")["conv1.0.weight"])


def test_lite0_finds_its_package_automatically() -> None:
    assert same(load("auto", "efficientnet_lite0"), load("package", "tf_efficientnet_lite0"))


def test_a_model_without_a_package_is_refused() -> None:
    with pytest.raises(TrainingError, match=r"No package holds weights of test_resnet\. Use backbone\.weights=hub"):
        load("package")


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub's client, and a hub at a port where nobody listens."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    template = "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    return tmp_path


@pytest.mark.parametrize("weights", ["auto", "hub"])
def test_without_a_network_the_hub_is_given_up_and_a_file_proposed(weights: str, hub_cache: Path) -> None:
    with pytest.raises(TrainingError, match=r"r160_in1k \(.*refused\)\. .* use backbone\.weights=FILE"):
        load(weights)


def test_cached_weights_of_the_hub_need_no_network(source: dict[str, torch.Tensor], hub_cache: Path) -> None:
    folder, revision = hub_cache / "models--timm--test_resnet.r160_in1k", "0" * 40
    for part in ("refs", f"snapshots/{revision}"):
        (folder / part).mkdir(parents=True)
    (folder / "refs" / "main").write_text(revision)
    save_file(source, folder / "snapshots" / revision / "model.safetensors")
    assert same(load("hub", "test_resnet.r160_in1k"), source)
