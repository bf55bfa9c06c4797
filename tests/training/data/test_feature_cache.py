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

from index.embedding.images import Preprocessing
from tests.support.small_backbones import untrained
from tests.support.tiny_gallery import write_tiny_folder
from training.config import AugmentationSettings
from training.data import Photo, load_data
from training.data.feature_cache import CachedFeatures, FeatureCache, FeatureStore, cache_bytes
from training.data.samplers import RandomBatches
from training.data.torch_datasets import MeasuredPhotos, SeedlessPhotos
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
        place: dict[str, Any] = {"directory": tmp_path / "cache", "embed": backbone, "key": "quarters"}
        place |= {name: changes.pop(name) for name in ("directory", "key", "min_free_bytes") if name in changes}
        settings: dict[str, Any] = {"views": VIEWS, "side": SIDE, "settings": AugmentationSettings()}
        return FeatureStore(**place).cache_views(changes.pop("photos", photos), **settings | changes)

    return cache


def files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache").iterdir())


def test_a_view_is_the_photo_of_that_epoch(photos: tuple[Photo, ...], cached: Callable[..., FeatureCache]) -> None:
    backbone = Backbone()
    features = CachedFeatures(cached(backbone))
    pixels = SeedlessPhotos(photos, SIDE, AugmentationSettings())
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
    pixels = SeedlessPhotos(photos, SIDE, AugmentationSettings())
    keys = [(1, index) for index in range(8)]
    rows = torch.stack([row for row, _ in cache.__getitems__(keys)])
    model.train()
    got = model.features_from(rows, -2)
    wanted = model.features(torch.stack([pixels[key][0] for key in keys]))
    torch.testing.assert_close(got, wanted, rtol=0.01, atol=0.01)
    torch.autograd.backward(got.sum())
    learned = {name for name, weight in model.backbone.named_parameters() if weight.grad is not None}
    assert {".".join(name.split(".")[:2]) for name in learned if "blocks" in name} == {"blocks.3", "blocks.4"}


def test_features_are_computed_once(cached: Callable[..., FeatureCache], tmp_path: Path) -> None:
    backbone, steps = Backbone(), list[tuple[int, int]]()
    first = cached(backbone, on_progress=lambda done, total: steps.append((done, total)))
    assert first.features.shape == (VIEWS, 40, 12) and first.features.dtype == np.float16
    assert steps[-1] == (200, 200) and backbone.sizes == [64, 64, 64, 8]
    second = cached(backbone)
    assert backbone.batches == 4 and second.path == first.path
    np.testing.assert_array_equal(first.features, second.features)
    assert len(files(tmp_path)) == 3, "values, keys and the shape of a row"


def test_runs_with_other_photos_or_more_views_compute_only_what_is_new(
    cached: Callable[..., FeatureCache], photos: tuple[Photo, ...]
) -> None:
    backbone = Backbone()
    complete = cached(backbone).features
    np.testing.assert_array_equal(cached(backbone, photos=photos[10:30]).features, complete[:, 10:30])
    np.testing.assert_array_equal(cached(backbone, photos=photos[::-1]).features, complete[:, ::-1])
    np.testing.assert_array_equal(cached(backbone, photos=(photos[3], photos[3])).features, complete[:, [3, 3]])
    assert sum(backbone.sizes) == 200
    more = cached(backbone, views=VIEWS + 1).features
    assert sum(backbone.sizes) == 240
    np.testing.assert_array_equal(more[:VIEWS], complete)


def test_photos_listed_twice_are_computed_once(
    cached: Callable[..., FeatureCache], photos: tuple[Photo, ...], tmp_path: Path
) -> None:
    backbone = Backbone()
    twice = cached(backbone, photos=(*photos[:5], *photos[:5]), views=1).features[0]
    assert sum(backbone.sizes) == 5
    np.testing.assert_array_equal(twice[:5], twice[5:])
    rest = cached(Backbone(), views=1).features
    np.testing.assert_array_equal(rest, cached(Backbone(), views=1, directory=tmp_path / "other").features)


def test_measured_photos_are_cached_in_full_precision(photos: tuple[Photo, ...], tmp_path: Path) -> None:
    backbone, rule = Backbone(), Preprocessing(resize=30, input_size=SIDE)
    store = FeatureStore(tmp_path / "cache", backbone, "quarters")
    cache = store.cache_measured(photos, rule)
    assert cache.features.dtype == np.float32
    pixels = MeasuredPhotos(photos, rule)
    np.testing.assert_array_equal(cache.features[0, 7], backbone(pixels[7][None])[0])
    computed = sum(backbone.sizes)
    store.cache_measured(photos[5:9], rule)
    assert sum(backbone.sizes) == computed
    assert store.size() >= cache.features.nbytes


@pytest.mark.parametrize("row_shape", [(12,), (3, 2, 2)])
@pytest.mark.parametrize("killed_after", [0, 1, 2, 3])
def test_a_killed_run_is_continued(
    cached: Callable[..., FeatureCache], tmp_path: Path, killed_after: int, row_shape: tuple[int, ...]
) -> None:
    complete = cached(Backbone(row_shape=row_shape), directory=tmp_path / "other").features
    with pytest.raises(KeyboardInterrupt):
        cached(Backbone(killed_after=killed_after, row_shape=row_shape))
    backbone = Backbone(row_shape=row_shape)
    np.testing.assert_array_equal(cached(backbone).features, complete)
    assert backbone.batches == 4 - killed_after


@pytest.mark.parametrize("suffix", ["rows", "keys", "json"])
@pytest.mark.parametrize("cut", [0, 5, 70, -7])
def test_a_torn_write_is_done_again(cached: Callable[..., FeatureCache], tmp_path: Path, suffix: str, cut: int) -> None:
    complete = cached(Backbone(), directory=tmp_path / "other").features
    with pytest.raises(KeyboardInterrupt):
        cached(Backbone(killed_after=3))
    (torn,) = (tmp_path / "cache").glob(f"*.{suffix}")
    size = torn.stat().st_size
    os.truncate(torn, min(size, cut) if cut >= 0 else max(0, size + cut))
    np.testing.assert_array_equal(cached(Backbone()).features, complete)


def test_of_two_runs_that_want_the_same_one_computes(cached: Callable[..., FeatureCache], tmp_path: Path) -> None:
    backbone = Backbone()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: cached(backbone), range(2))
    np.testing.assert_array_equal(first.features, second.features)
    assert backbone.batches == 4


def test_everything_that_the_numbers_depend_on_decides_what_is_found(
    cached: Callable[..., FeatureCache], photos: tuple[Photo, ...]
) -> None:
    names = {cached(Backbone()).path.name}
    for changes in ({"key": "other weights"}, {"side": 20}, {"settings": AugmentationSettings(flip=False)}):
        names.add(cached(lambda pixels: pixels.float().mean(dim=(1, 2)), **changes).path.name)
    assert len(names) == 4
    for changed in (photos[0]._replace(box=(0, 0, 50, 50)), photos[0]):
        backbone = Backbone()
        os.utime(photos[0].path, ns=(0, 0))
        cached(backbone, photos=(changed, *photos[1:]))
        assert sum(backbone.sizes) == VIEWS


def test_a_moved_folder_gives_the_same_views(
    cached: Callable[..., FeatureCache], photos: tuple[Photo, ...], tmp_path: Path
) -> None:
    first = cached(Backbone()).features
    (tmp_path / "photos").rename(tmp_path / "moved")
    moved = tuple(
        photo._replace(path=tmp_path / "moved" / photo.path.parent.name / photo.path.name) for photo in photos
    )
    np.testing.assert_array_equal(cached(Backbone(), photos=moved).features, first)


def test_values_beyond_sixteen_bits_are_refused(cached: Callable[..., FeatureCache], tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"reach .*e\+0[78]; 16 bits hold up to 65504\. .*cached_stage"):
        cached(lambda pixels: pixels.float().mean(dim=(1, 2)) * 1e6)
    assert not any(path.stat().st_size for path in (tmp_path / "cache").iterdir())


def test_a_cache_that_the_disk_cannot_hold_is_refused_before_it_is_written(
    cached: Callable[..., FeatureCache], tmp_path: Path
) -> None:
    with pytest.raises(TrainingError, match=r"200 views of 3x2x2 values .* GB free\. .*cached_views"):
        cached(Backbone(row_shape=(3, 2, 2)), min_free_bytes=2**60)
    assert not any(path.stat().st_size for path in (tmp_path / "cache").glob("*.rows"))
    assert cached(Backbone(row_shape=(3, 2, 2))).features.shape == (VIEWS, 40, 3, 2, 2)


def test_the_size_of_a_cache_is_known_before_it_is_made(cached: Callable[..., FeatureCache]) -> None:
    cache = cached(Backbone(row_shape=(3, 2, 2)))
    assert cache_bytes(40, VIEWS, (3, 2, 2)) == cache.path.stat().st_size == 40 * VIEWS * 12 * 2


def test_no_views_are_refused(cached: Callable[..., FeatureCache]) -> None:
    with pytest.raises(TrainingError, match="0 views"):
        cached(Backbone(), views=0)
