"""Export: bundles that say what PyTorch said, at every precision with figures of their own."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto

import training.export
from index.embedding.bundle import Bundle
from index.embedding.embedder import Embedder
from index.embedding.images import load_pixels
from tests.support.tiny_gallery import tiny_photo, write_tiny_folder
from training import cli
from training.backbones import EmbeddingModel
from training.checkpoints import RunFolder
from training.config import load_config
from training.data import DataSet, load_data
from training.errors import TrainingError
from training.evaluation import load_model, measure
from training.export import export_reduced, export_run

BACKBONES = ["test_efficientnet", "test_vit"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataSet:
    return load_data(f"folder:{write_tiny_folder(tmp_path_factory.mktemp('data') / 'photos')}")


def make_run(folder: Path, backbone: str, data: DataSet, *, gain: float = 1) -> RunFolder:
    """Returns a run as training leaves it, of a small network with random weights."""
    settings = [f"backbone={{name: {backbone}, weights: none, embedding_size: 32}}"]
    config = load_config(None, [*settings, "preprocessing={resize: 176, input_size: 160}"])
    run = RunFolder(folder)
    with run.begin(config, f"folder:{data.train[0].path.parents[1]}", resume=False):
        torch.manual_seed(1)
        model = EmbeddingModel(config.backbone, input_size=160, pretrained=False)
    with torch.no_grad():
        next(iter(model.backbone.parameters())).mul_(gain)
    run.save_best(model.state_dict())
    run.write_result({"epoch": 1, "recall@1": 0.9, "map@r": 0.8, "untrained": {"recall@1": 0.5}})
    return run


@pytest.fixture(scope="module", params=BACKBONES)
def bundles(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, data: DataSet) -> list[Bundle]:
    """The bundles at fp32, fp16 and int8."""
    folder = tmp_path_factory.mktemp("export")
    bundle = export_run(make_run(folder / "run", request.param, data), folder / "bundle", data.test)
    return [bundle, *export_reduced(bundle, ["fp16", "int8"], data)]


def test_each_precision_is_a_bundle_of_its_own(bundles: list[Bundle]) -> None:
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


def test_every_precision_takes_bytes_and_answers_floats(bundles: list[Bundle]) -> None:
    for bundle in bundles:
        graph = onnx.load(bundle.model_path).graph
        assert [value.type.tensor_type.elem_type for value in graph.input] == [TensorProto.UINT8]
        assert [value.type.tensor_type.elem_type for value in graph.output] == [TensorProto.FLOAT]


def test_reduced_vectors_stay_close_and_of_length_one(bundles: list[Bundle]) -> None:
    pixels = np.stack([load_pixels(tiny_photo(n % 8, n), bundles[0].preprocessing) for n in range(11)])
    exact, half, int8 = (Embedder(bundle, threads=1).embed(pixels) for bundle in bundles)
    for vectors, lowest in ((half, 0.9999), (int8, 0.9)):
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
        assert np.sum(exact * vectors, axis=1).min() > lowest


def test_most_weights_are_really_reduced(bundles: list[Bundle]) -> None:
    for bundle, kind in zip(bundles[1:], (TensorProto.FLOAT16, TensorProto.INT8), strict=True):
        weights = [np.prod(one.dims) for one in onnx.load(bundle.model_path).graph.initializer if one.data_type == kind]
        everything = [np.prod(one.dims) for one in onnx.load(bundle.model_path).graph.initializer]
        assert sum(weights) > 0.5 * sum(everything)


@pytest.mark.parametrize("moment", ["reduce_model", "write_card", "measure"])
def test_an_interrupted_export_leaves_the_old_bundle_whole(
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


def test_a_bundle_is_put_back_when_its_successor_cannot_take_its_place(
    bundles: list[Bundle], data: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name.endswith(".tmp"):
            raise OSError("no space left")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="no space left"):
        export_reduced(bundles[0], ["fp16"], data)
    assert Bundle.load(bundles[1].directory).id == bundles[1].id


def test_a_model_whose_values_overflow_is_not_written(data: DataSet, tmp_path: Path) -> None:
    bundle = export_run(make_run(tmp_path / "run", "test_efficientnet", data, gain=1e7), tmp_path / "bundle", data.test)
    with pytest.raises(TrainingError, match="overflows at fp16"):
        export_reduced(bundle, ["fp16"], data)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "run"]


def test_the_command_writes_what_is_asked_for_and_tells_a_loss(
    data: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", "test_efficientnet", data)
    monkeypatch.setattr(training.export, "MAX_RECALL_LOSS", -1.0)
    cli.export(run.path, tmp_path / "bundle", precision="fp32,fp16")
    told = capsys.readouterr().out
    assert Bundle.load(tmp_path / "bundle-fp16").id in told
    assert "fp16 loses" in told and "points of Recall@1" in told


def test_an_unknown_precision_is_named_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="'fp8' is unknown"):
        cli.export(tmp_path / "no-run", tmp_path / "bundle", precision="fp32,fp8")
