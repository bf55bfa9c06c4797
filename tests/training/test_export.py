"""Export: bundles with PyTorch's vectors, each precision with its own figures."""

from pathlib import Path

import numpy as np
import pytest
import torch

import training.export
from index.embedding.bundle import Bundle
from index.embedding.embedder import Embedder
from index.embedding.images import decode
from tests.support.tiny_gallery import tiny_photo
from tests.support.training_runs import untrained_run
from training.checkpoints import RunFolder
from training.data import DataSet
from training.errors import TrainingError
from training.evaluation import load_model, measure
from training.export import export_reduced, export_run


def test_each_precision_has_its_own_bundle(bundles: list[Bundle]) -> None:
    assert [bundle.directory.name for bundle in bundles] == ["bundle", "bundle-fp16", "bundle-int8"]
    assert [bundle.card.precision for bundle in bundles] == ["fp32", "fp16", "int8"]
    assert len({bundle.id for bundle in bundles}) == 3
    assert len({bundle.preprocessing for bundle in bundles}) == 1
    sizes = [bundle.model_path.stat().st_size for bundle in bundles]
    assert sizes[1] < 0.8 * sizes[0] and sizes[2] < 0.8 * sizes[0]


def test_reduced_bundles_carry_their_own_figures_and_those_of_fp32(bundles: list[Bundle], data: DataSet) -> None:
    for bundle in bundles[1:]:
        assert bundle.card.metrics == pytest.approx(measure(data.test, *load_model(bundle.directory)))
        assert bundle.card.fp32_metrics == pytest.approx(measure(data.test, *load_model(bundles[0].directory)))
        assert bundle.card.untrained_metrics == {"recall@1": 0.5}
        readme = (bundle.directory / "README.md").read_text()
        assert bundle.id in readme and f"at {bundle.card.precision}" in readme and "at fp32" in readme


@pytest.mark.parametrize("moment", ["reduce_model", "write_card", "measure"])
def test_an_interrupted_export_leaves_the_old_bundle_unchanged(
    bundles: list[Bundle], data: DataSet, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    folder = bundles[0].directory.parent
    before = sorted(folder.iterdir())
    monkeypatch.setattr(training.export, moment, interrupt)
    with pytest.raises(KeyboardInterrupt):
        export_reduced(bundles[0], ["fp16"], data)
    assert sorted(folder.iterdir()) == before
    assert Bundle.load(folder / "bundle-fp16").id == bundles[1].id


def test_a_bundle_is_restored_when_the_new_one_cannot_replace_it(
    bundles: list[Bundle], data: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name.endswith(".lookalike-tmp"):
            raise OSError("no space left")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="no space left"):
        export_reduced(bundles[0], ["fp16"], data)
    assert Bundle.load(bundles[1].directory).id == bundles[1].id


def test_a_model_whose_values_overflow_is_not_written(data: DataSet, tmp_path: Path) -> None:
    bundle = export_run(
        untrained_run(tmp_path / "run", "test_efficientnet", data, gain=1e7), tmp_path / "bundle", data.test
    )
    with pytest.raises(TrainingError, match="overflows at fp16"):
        export_reduced(bundle, ["fp16"], data)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "run"]


@pytest.fixture(scope="module")
def bundle(run: RunFolder, data: DataSet, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return export_run(run, tmp_path_factory.mktemp("bundles") / "bundle", data.test)


@pytest.mark.slow
def test_the_bundle_embeds_as_the_run_does(run: RunFolder, bundle: Bundle) -> None:
    pixels = np.stack([bundle.preprocessing.apply(decode(tiny_photo(number, 9))) for number in range(5)])
    with torch.inference_mode():
        expected = run.model()(torch.from_numpy(pixels)).numpy()
    got = Embedder(bundle).embed(pixels)
    assert np.sum(expected * got, axis=1).min() > 0.99999
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1, atol=1e-5)


@pytest.mark.slow
def test_the_bundle_measures_as_the_run_does(run: RunFolder, bundle: Bundle, data: DataSet) -> None:
    figures = [measure(data.test, *load_model(path)) for path in (run.path, bundle.directory)]
    assert figures[0] == pytest.approx(figures[1], abs=1e-3)
    assert bundle.card.metrics == pytest.approx(figures[1], abs=1e-3)
    assert bundle.card.untrained_metrics.keys() == bundle.card.metrics.keys()
    assert bundle.card.loss == "proxy_isa" and bundle.card.versions["torch"]
    assert bundle.card.data == "folder photos"


@pytest.mark.slow
def test_a_model_that_differs_from_pytorch_is_not_exported(run: RunFolder, data: DataSet, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="differs from PyTorch"):
        export_run(run, tmp_path / "bundle", data.test, min_cosine=1.01)
    assert list(tmp_path.iterdir()) == [], "no partial bundle is left"


def test_export_does_not_replace_a_folder_that_is_not_a_bundle(run: RunFolder, data: DataSet, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(TrainingError, match="is not a bundle"):
        export_run(run, tmp_path, data.test)
