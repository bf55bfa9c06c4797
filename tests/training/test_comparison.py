"""Comparison of models: seeds are averaged, differences are paired by query."""

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from index.embedding.images import Preprocessing
from tests.support.training_runs import SMALL_SETTINGS
from training.checkpoints import RunFolder
from training.comparison import compare_models, format_comparison, group_runs
from training.config import load_config
from training.data import Photo
from training.models import MeasuredModel
from training.seen_classes import SeenClasses

RULE = Preprocessing(resize=8, input_size=8)


def model_of(name: str, noise: float, run: RunFolder | None = None) -> MeasuredModel:
    """Returns a model that embeds a photo as its mean colour with some noise."""

    def embed(pixels: torch.Tensor) -> NDArray[np.float32]:
        colours = pixels.float().mean(dim=(1, 2)).numpy() - 128
        generator = np.random.default_rng(len(name))
        return (colours + noise * generator.standard_normal(colours.shape)).astype(np.float32)

    return MeasuredModel(name, RULE, embed, SeenClasses(), run=run)


@pytest.fixture
def photos(tmp_path: Path) -> list[Photo]:
    generator = np.random.default_rng(0)
    made = []
    for number, colour in enumerate(generator.integers(0, 256, (20, 3))):
        for view in range(3):
            file = tmp_path / f"{number}-{view}.png"
            shade = np.clip(colour + generator.integers(-20, 20, 3), 0, 255)
            Image.new("RGB", (8, 8), tuple(map(int, shade))).save(file)
            made.append(Photo(file, str(number)))
    return made


def make_run(folder: Path, *settings: str, data: str = "folder:photos") -> RunFolder:
    run = RunFolder(folder)
    run.start(load_config(None, [*SMALL_SETTINGS, *settings]), data, resume=False)
    return run


def test_runs_that_differ_in_the_seed_are_one_entry(tmp_path: Path) -> None:
    runs = {
        "a": make_run(tmp_path / "a", "seed=0"),
        "b": make_run(tmp_path / "b", "epochs=9"),
        "c": make_run(tmp_path / "c", "seed=1", "workers=3"),
        "d": make_run(tmp_path / "d", "seed=2", data="folder:others"),
    }
    models = [model_of(name, 0, run) for name, run in runs.items()]
    names = [[model.name for model in group] for group in group_runs([*models, model_of("bundle", 0)])]
    assert names == [["a", "c"], ["b"], ["d"], ["bundle"]]


def test_a_worse_model_differs_by_its_paired_mean(photos: list[Photo]) -> None:
    comparison = compare_models([model_of("good", 0), model_of("poor", 60)], photos, (1, 4), rounds=200)
    good, poor = comparison.models
    assert (comparison.queries, comparison.gallery, good.dimension) == (60, 60, 3)
    assert list(good.figures) == ["recall@1", "recall@4", "map@r"] and good.differences is None
    assert poor.differences
    difference = poor.differences["map@r"]
    expected = poor.figures["map@r"].spread.mean - good.figures["map@r"].spread.mean
    assert difference.spread.mean == pytest.approx(expected) and difference.spread.deviation is None
    assert difference.interval and difference.interval[0] < expected < difference.interval[1] < 0


def test_equal_models_differ_by_exactly_nothing(photos: list[Photo]) -> None:
    """Unpaired intervals would be as wide as those of the figures."""
    comparison = compare_models([model_of("one", 60), model_of("two", 60)], photos, (1,), rounds=50)
    differences = comparison.models[1].differences
    assert differences and differences["recall@1"].interval == (0, 0)


def test_seeds_have_a_mean_and_a_deviation(photos: list[Photo], tmp_path: Path) -> None:
    noisy, cleaner = (
        [
            model_of(
                f"{name}{'x' * seed}", noise, make_run(tmp_path / f"{name}{seed}", f"seed={seed}", f"epochs={noise}")
            )
            for seed in range(2)
        ]
        for name, noise in (("noisy", 60), ("clean", 20))
    )
    comparison = compare_models([*noisy, *cleaner], photos, (1,), rounds=50)
    first, second = comparison.models
    assert first.name == "noisy and 1 more" and first.runs == ("noisy", "noisyx")
    alone = [compare_models([model], photos, (1,), rounds=1).models[0].figures["map@r"].spread for model in noisy]
    assert first.figures["map@r"].spread.mean == pytest.approx(np.mean([spread.mean for spread in alone]))
    assert first.figures["map@r"].spread.deviation == pytest.approx(np.std([spread.mean for spread in alone], ddof=1))
    assert second.differences and second.differences["map@r"].spread.deviation is not None
    text = format_comparison(comparison)
    assert "mean ±deviation over runs" in text and "Points above noisy and 1 more, paired by query" in text
