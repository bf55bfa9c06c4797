"""Every preset loads and trains an epoch on a small tree of its data set's layout."""

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.support.published_trees import TREES
from tests.support.training_runs import RecordingCallback
from training.checkpoints import RunFolder
from training.config import TrainingConfig, flatten_settings, load_config, preset_names
from training.data import DataSet, load_data, shop_data
from training.data.sample_shop import write_shop
from training.loop import train

LAYERS = {"extra": ("paper-cub", "extra"), "mlrc": ("cub", "mlrc")}
"""Presets that are used on top of another one."""
PAIR = ("default", "paper")
"""Presets that docs/results.md compares."""
SIDES = {"vit": 112, "dino": 112}
"""Transformers take multiples of their patches of 14 or 16 pixels; Inception-BN needs 64 or another multiple of 32."""

DataOf = Callable[[str], tuple[str, DataSet]]


@pytest.fixture(scope="module")
def data_of(tmp_path_factory: pytest.TempPathFactory) -> DataOf:
    """The specification and the photos of a data set, written once."""
    written: dict[str, tuple[str, DataSet]] = {}

    def make(kind: str) -> tuple[str, DataSet]:
        if kind not in written:
            directory = tmp_path_factory.mktemp(kind) / "photos"
            spec = f"{kind}:{directory}"
            if kind == "sample":
                shop = write_shop(directory, products_per_family=3, photos_per_product=3, workers=1)
                written[kind] = spec, shop_data(shop)
            else:
                TREES[kind](directory)
                written[kind] = spec, load_data(spec)
        return written[kind]

    return make


def cheap(side: int) -> list[str]:
    """Overrides that only shrink the cost."""
    return [
        "epochs=1",
        f"preprocessing={{resize: {side + side // 8}, input_size: {side}}}",
        "backbone={weights: none, embedding_size: 16}",
        "sampling.batch_size=8",
        "workers=0",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("preset", preset_names())
def test_a_preset_trains_an_epoch_on_its_data_set(preset: str, data_of: DataOf, tmp_path: Path) -> None:
    layers = LAYERS.get(preset, (preset,))
    kind = layers[0].removeprefix("paper-")
    spec, data = data_of(kind if kind in (*TREES, "sample") else "cub")
    fold = ["selection.fold=0", "sampling.steps_per_epoch=2"] if preset == "mlrc" else []
    config = load_config(None, [*cheap(SIDES.get(preset, 64)), *fold], presets=layers)
    result = train(config, data, tmp_path / "run", spec, RecordingCallback())
    run = RunFolder(tmp_path / "run")
    assert run.history()[-1]["epoch"] == 1 and result["epoch"] in (0, 1), "the untrained backbone competes"
    assert 0 <= result["recall@1"] <= 1
    assert math.isfinite(run.history()[-1]["loss"])
    assert run.config == config and run.is_finished


@pytest.mark.parametrize("name", list(TREES))
def test_the_authors_release_differs_from_our_preset_where_documented(name: str) -> None:
    ours, release = (load_config(None, [], presets=[preset]) for preset in (name, f"paper-{name}"))
    assert (ours.loss.settings["initial_similarity"], release.loss.settings["initial_similarity"]) == (0, 1)
    assert "volume" not in ours.loss.settings and release.loss.settings["volume"] == 100
    assert release.backbone.name == "bn_inception" and release.backbone.batch_norm == ours.backbone.batch_norm
    assert (ours.epochs, ours.optimiser, ours.schedule) == (release.epochs, release.optimiser, release.schedule)
    assert release.loss.settings["hardness_sensitivity"] == ours.loss.settings["hardness_sensitivity"]


def test_the_papers_preset_is_its_release_for_cub_on_our_backbone() -> None:
    release = load_config(None, [], presets=["paper-cub"])
    ours = load_config(None, ["backbone.name=bn_inception", "backbone.pooling=avg"], presets=["paper"])
    assert ours == release


def test_the_default_preset_is_what_training_does_without_one() -> None:
    assert load_config(None, [], presets=["default"]) == TrainingConfig()


def test_the_page_of_the_results_shows_what_both_presets_hold() -> None:
    page = (Path(__file__).parents[2] / "docs" / "results.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z_.]+)` \| (.+?) \| (.+?) \|$", page.partition("\n## Presets")[2], re.MULTILINE)
    shown = [{key: yaml.safe_load(values[column]) for key, *values in rows} for column in (0, 1)]
    held = [flatten_settings(load_config(None, [], presets=[name]).model_dump(mode="json")) for name in PAIR]
    names = {name for name in {**held[0], **held[1]} if held[0].get(name) != held[1].get(name)}
    assert {key for key, *_ in rows} == names, "every setting in which they differ"
    assert shown == [{name: values.get(name) for name in names} for values in held]


def test_the_extra_settings_override_any_other_preset() -> None:
    plain, extra = (load_config(None, [], presets=layers) for layers in (["paper-cars"], ["paper-cars", "extra"]))
    assert (extra.optimiser.name, extra.schedule.warm_up_epochs, extra.backbone.pooling) == ("adamw", 1, "avg+max")
    assert extra.loss == plain.loss and extra.schedule.step_epochs == plain.schedule.step_epochs == 20
