"""Settings: defaults, preset, file and overrides, in that order; mistakes are named."""

from pathlib import Path

import pytest

from training.config import load_config, parse_config
from training.errors import TrainingError


def test_overrides_win_over_the_file_and_the_file_over_the_preset(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("epochs: 9\nsampling: {batch_size: 7}\nloss: {settings: {tau: 2}}\n")
    config = load_config(file, ["epochs=3", "backbone.embedding_size=64"], presets=["sample"])
    assert (config.epochs, config.sampling.batch_size, config.backbone.embedding_size) == (3, 7, 64)
    assert config.preprocessing.input_size == 128, "from the preset"
    assert config.loss.settings == {"tau": 2}
    merged = load_config(file, [], presets=["cub"]).loss.settings
    assert merged["tau"] == 2 and "hardness_sensitivity" in merged, "nested settings are merged"


def test_another_loss_does_not_inherit_the_presets_settings() -> None:
    config = load_config(None, ["loss.settings.alpha=16", "loss.name=proxy_anchor"], presets=["cub"])
    assert config.loss.model_dump() == {"name": "proxy_anchor", "settings": {"alpha": 16}}
    same = load_config(None, ["loss.name=proxy_isa"], presets=["cub"])
    assert same.loss == load_config(None, [], presets=["cub"]).loss and same.loss.settings


def test_every_mistake_is_reported_with_its_value(tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as caught:
        load_config(None, ["epochs=-1", "optimiser.learning_rate=fast", "nonsense=1"])
    for part in (
        "epochs must be at least 0 (got -1)",
        "optimiser.learning_rate must be a number (got 'fast')",
        "nonsense is unknown",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "override", ["sampling={kind: balanced, batch_size: 10}", "selection={fold: 4, folds: 4}", "cached_stage=-1"]
)
def test_settings_that_contradict_each_other_are_refused(override: str) -> None:
    with pytest.raises(TrainingError, match="Bad training settings"):
        load_config(None, [override])


@pytest.mark.parametrize(("text", "message"), [("a: [", "not YAML"), ("just words", "has no settings")])
def test_a_file_without_settings_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(TrainingError, match=message):
        load_config(file, [])


def test_crop_and_resize_follow_from_each_other() -> None:
    assert load_config(None, ["preprocessing.input_size=128"]).preprocessing.resize == 146
    assert load_config(None, ["preprocessing.resize=256"]).preprocessing.input_size == 224
    assert load_config(None, ["preprocessing={resize: 100, input_size: 96}"]).preprocessing.resize == 100


@pytest.mark.parametrize("override", ["optimiser.weight_decay=.inf", "seed=99999999999999999999", "epoch=3"])
def test_numbers_out_of_range_and_misspelt_settings_are_refused(override: str) -> None:
    with pytest.raises(TrainingError, match=override.partition("=")[0]):
        load_config(None, [override])


@pytest.mark.parametrize(
    ("overrides", "rate"),
    [
        ([], 1e-4),
        (["cached_views=4"], 1e-3),
        (["cached_views=4", "cached_stage=-2"], 3e-4),
        (["cached_views=4", "optimiser.learning_rate=2e-4"], 2e-4),
        (["cached_views=4", "optimiser.weight_decay=0"], 1e-3),
    ],
)
def test_the_default_learning_rate_depends_on_what_learns(overrides: list[str], rate: float) -> None:
    config = load_config(None, overrides)
    assert config.optimiser.learning_rate == rate
    assert parse_config(config.model_dump(mode="json")) == config, "a recorded run keeps its rate"


def test_the_batch_size_is_automatic_or_a_number() -> None:
    assert load_config(None, []).sampling.batch_size == "auto"
    assert load_config(None, ["sampling.batch_size=auto"]).sampling.batch_size == "auto"
    for wrong in ("1", "many", "true", "12.5"):
        with pytest.raises(
            TrainingError, match=r"sampling\.batch_size: give a whole number from 2 on, or auto \(got .*\)"
        ):
            load_config(None, [f"sampling.batch_size={wrong}"])
