"""Cached features and activations: computed once, found again, continued after a kill, never mixed up."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.small_backbones import untrained
from tests.support.tiny_gallery import write_tiny_folder
from training.config import AugmentationSettings
from training.data import Photo, load_data
from training.data.feature_cache import CachedFeatures, FeatureCache, cache_bytes, cache_features
from training.data.samplers import RandomBatches
from training.data.torch_datasets import TrainingPhotos
from training.errors import TrainingError

VIEWS, SIDE = 5, 24


@dataclass
class Backbone:
    """Colours of the four quarters of a photo, in rows of a shape, and how often it was called."""

    batches: int = 0
    killed_after: int | None = None
    row_shape: tuple[int, ...] = (12,)
    sizes: list[int] = field(default_factory=list)

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        if self.batches == self.killed_after:
            raise KeyboardInterrupt
        self.batches += 1
        self.sizes.append(len(pixels))
        quarters = pixels.float().reshape(len(pixels), 2, SIDE // 2, 2, SIDE // 2, 3)
        return quarters.mean(dim=(2, 4)).reshape(len(pixels), *self.row_shape)


@pytest.fixture
def photos(tmp_path: Path) -> tuple[Photo, ...]:
    return load_data(f"folder:{write_tiny_folder(tmp_path / 'photos', views=8)}").train


@pytest.fixture
def cached(photos: tuple[Photo, ...], tmp_path: Path) -> Callable[..., FeatureCache]:
    def cache(backbone: Callable[[torch.Tensor], torch.Tensor], **changes: Any) -> FeatureCache:
        settings: dict[str, Any] = {
            "views": VIEWS,
            "side": SIDE,
            "settings": AugmentationSettings(),
            "seed": 3,
            "directory": tmp_path / "cache",
            "key": "quarters",
        }
        return cache_features(changes.pop("photos", photos), backbone, **settings | changes)

    return cache


def files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache").iterdir())


def test_a_view_is_the_photo_of_that_epoch(photos: tuple[Photo, ...], cached: Callable[..., FeatureCache]) -> None:
    backbone = Backbone()
    features = CachedFeatures(cached(backbone))
    pixels = TrainingPhotos(photos, SIDE, AugmentationSettings(), seed=3)
    assert len(features) == len(pixels) and features.classes == pixels.classes
    for key in [(0, 0), (2, 17), (VIEWS - 1, len(photos) - 1)]:
        got, number = features[key]
        wanted, wanted_number = pixels[key]
        assert got.dtype == torch.float16 and number == wanted_number
        torch.testing.assert_close(got.float(), backbone(wanted[None])[0], rtol=1e-3, atol=0)
    assert torch.equal(features[VIEWS + 1, 4][0], features[1, 4][0]), "views come again after the last"
    assert not torch.equal(features[0, 4][0], features[1, 4][0])


@pytest.mark.parametrize("row_shape", [(12,), (3, 2, 2), (4, 3)], ids=["features", "map", "tokens"])
def test_it_stands_in_the_place_of_photos_in_a_loader(
    cached: Callable[..., FeatureCache], row_shape: tuple[int, ...]
) -> None:
    features = CachedFeatures(cached(Backbone(row_shape=row_shape)))
    batches = RandomBatches(len(features), 10, seed=0)
    batches.epoch = VIEWS + 2
    seen = list(DataLoader(features, batch_sampler=batches))
    assert [rows.shape for rows, _ in seen] == [(10, *row_shape)] * 4
    for keys, (rows, labels) in zip(batches, seen, strict=True):
        singles = [features[key] for key in keys]
        assert torch.equal(rows, torch.stack([row for row, _ in singles]))
        assert labels.tolist() == [label for _, label in singles]


def test_a_channels_last_map_is_stored_in_the_order_of_its_shape(
    cached: Callable[..., FeatureCache],
) -> None:
    plain = cached(Backbone(row_shape=(3, 2, 2)))
    backbone = Backbone(row_shape=(3, 2, 2))
    turned = cached(lambda pixels: backbone(pixels).contiguous(memory_format=torch.channels_last), key="other")
    np.testing.assert_array_equal(plain.features, turned.features)


def test_training_on_a_cached_stage_is_training_from_the_pixels(
    photos: tuple[Photo, ...], cached: Callable[..., FeatureCache]
) -> None:
    model = untrained("test_efficientnet", input_size=SIDE)
    model.freeze_stages(-2)
    cache = CachedFeatures(cached(lambda pixels: model.eval().activations(pixels, -2)))
    pixels = TrainingPhotos(photos, SIDE, AugmentationSettings(), seed=3)
    keys = [(1, index) for index in range(8)]
    rows = torch.stack([row for row, _ in cache.__getitems__(keys)])
    model.train()
    got = model.features_from(rows, -2)
    wanted = model.features(torch.stack([pixels[key][0] for key in keys]))
    torch.testing.assert_close(got, wanted, rtol=0.01, atol=0.01)
    torch.autograd.backward(got.sum())
    learned = {name for name, weight in model.backbone.named_parameters() if weight.grad is not None}
    assert {".".join(name.split(".")[:2]) for name in learned if "blocks" in name} == {"blocks.3", "blocks.4"}


def test_features_are_computed_once_and_only_one_file_is_left(
    cached: Callable[..., FeatureCache], tmp_path: Path
) -> None:
    backbone, steps = Backbone(), list[tuple[int, int]]()
    first = cached(backbone, on_progress=lambda done, total: steps.append((done, total)))
    assert first.features.shape == (VIEWS, 40, 12) and first.features.dtype == np.float16
    assert steps[-1] == (200, 200) and backbone.sizes == [64, 64, 64, 8]
    second = cached(backbone)
    assert backbone.batches == 4 and second.path == first.path
    np.testing.assert_array_equal(first.features, second.features)
    assert files(tmp_path) == [first.path.name]


@pytest.mark.parametrize("row_shape", [(12,), (3, 2, 2)])
@pytest.mark.parametrize("killed_after", [0, 1, 2, 3])
def test_a_killed_run_is_continued(
    cached: Callable[..., FeatureCache], tmp_path: Path, killed_after: int, row_shape: tuple[int, ...]
) -> None:
    complete = cached(Backbone(row_shape=row_shape), directory=tmp_path / "other").features
    with pytest.raises(KeyboardInterrupt):
        cached(Backbone(killed_after=killed_after, row_shape=row_shape))
    assert not [name for name in files(tmp_path) if not name.startswith(".")], "half a file has no name to be found by"
    backbone = Backbone(row_shape=row_shape)
    np.testing.assert_array_equal(cached(backbone).features, complete)
    assert backbone.batches == 4 - max(0, killed_after - 1), "the last batch before the kill is done again"
    assert len(files(tmp_path)) == 1


def test_a_torn_write_is_done_again(cached: Callable[..., FeatureCache], tmp_path: Path) -> None:
    complete = cached(Backbone(), directory=tmp_path / "other").features
    for cut in (0, 5, 70, -7):
        with pytest.raises(KeyboardInterrupt):
            cached(Backbone(killed_after=3))
        (partial,) = (tmp_path / "cache").glob(".*.partial")
        os.truncate(partial, cut if cut >= 0 else partial.stat().st_size + cut)
        cache = cached(Backbone())
        np.testing.assert_array_equal(cache.features, complete)
        cache.path.unlink()


def test_of_two_runs_that_want_the_same_one_computes(cached: Callable[..., FeatureCache], tmp_path: Path) -> None:
    backbone = Backbone()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: cached(backbone), range(2))
    np.testing.assert_array_equal(first.features, second.features)
    assert backbone.batches == 4 and files(tmp_path) == [first.path.name]


def test_a_finished_file_that_was_cut_short_is_made_again(cached: Callable[..., FeatureCache]) -> None:
    first = cached(Backbone())
    complete = np.array(first.features)
    os.truncate(first.path, 1000)
    np.testing.assert_array_equal(cached(Backbone()).features, complete)


def test_everything_that_the_numbers_depend_on_names_the_file(
    cached: Callable[..., FeatureCache], photos: tuple[Photo, ...]
) -> None:
    names = {cached(Backbone()).path.name}
    for changes in (
        {"key": "other weights"},
        {"views": 2},
        {"side": 20},
        {"seed": 4},
        {"settings": AugmentationSettings(flip=False)},
        {"photos": photos[1:]},
        {"photos": photos[::-1]},
        {"photos": (photos[0]._replace(box=(0, 0, 50, 50)), *photos[1:])},
    ):
        names.add(cached(lambda pixels: pixels.float().mean(dim=(1, 2)), **changes).path.name)
    os.utime(photos[0].path, ns=(0, 0))
    names.add(cached(Backbone()).path.name)
    assert len(names) == 10


def test_values_beyond_sixteen_bits_are_refused(cached: Callable[..., FeatureCache], tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"reach .*e\+0[78]; 16 bits hold up to 65504\. .*cached_stage"):
        cached(lambda pixels: pixels.float().mean(dim=(1, 2)) * 1e6)
    assert not list((tmp_path / "cache").glob("*.npy"))


def test_a_cache_that_the_disk_cannot_hold_is_refused_before_it_is_written(
    cached: Callable[..., FeatureCache], tmp_path: Path
) -> None:
    with pytest.raises(TrainingError, match=r"40 photos in 5 views of 3x2x2 values .* GB free\. .*cached_views"):
        cached(Backbone(row_shape=(3, 2, 2)), min_free_bytes=2**60)
    assert not any((tmp_path / "cache" / name).stat().st_size for name in files(tmp_path))
    assert cached(Backbone(row_shape=(3, 2, 2))).features.shape == (VIEWS, 40, 3, 2, 2)


def test_the_size_of_a_cache_is_known_before_it_is_made(cached: Callable[..., FeatureCache]) -> None:
    cache = cached(Backbone(row_shape=(3, 2, 2)))
    assert cache_bytes(40, VIEWS, (3, 2, 2)) == cache.features.nbytes == 40 * VIEWS * 12 * 2
    assert 0 < cache.path.stat().st_size - cache.features.nbytes < 256, "the header"


def test_no_views_are_refused(cached: Callable[..., FeatureCache]) -> None:
    with pytest.raises(TrainingError, match="0 views"):
        cached(Backbone(), views=0)
