"""A run's parts: learning rates by group and over time, and the precision for a device."""

from pathlib import Path

import pytest
import torch

from tests.support.tiny_gallery import write_tiny_folder
from training.config import load_config
from training.data.photos import DataSet, load_data
from training.preparation import Workshop, _half, prepare
from training.recording import Watcher
from training.world import World

BASE = [
    "preprocessing={resize: 36, input_size: 32}",
    "sampling.batch_size=5",
    "selection.validation_share=0",
    "workers=0",
]


class Nobody:
    """A watcher that does not look."""

    def step(self, epoch: int, step: int, steps: int) -> None: ...
    def busy(self, what: str, done: int, total: int) -> None: ...
    def measured(self, record: dict[str, object]) -> None: ...
    def say(self, text: str) -> None: ...


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataSet:
    return load_data(f"folder:{write_tiny_folder(tmp_path_factory.mktemp('data') / 'photos')}")


def workshop(data: DataSet, out: Path, *overrides: str) -> Workshop:
    nobody: Watcher = Nobody()
    config = load_config(None, [*BASE, *overrides])
    return prepare(config, data, out, World(0, 1, torch.device("cpu")), nobody, pretrained=False)


def rates(work: Workshop, steps: int) -> dict[str, list[float]]:
    """The learning rate of every group, step by step."""
    seen: dict[str, list[float]] = {group["name"]: [] for group in work.optimiser.param_groups}
    for _ in range(steps):
        for group in work.optimiser.param_groups:
            seen[group["name"]].append(group["lr"])
        work.optimiser.step()
        work.schedule.step()
    return seen


def test_proxies_learn_a_hundred_times_faster_without_asking(data: DataSet, tmp_path: Path) -> None:
    seen = rates(workshop(data, tmp_path, "optimiser.learning_rate=0.001", "schedule.kind=constant"), 1)
    assert seen == {"backbone": [0.001], "head": [0.001], "proxies": [pytest.approx(0.1)]}


def test_every_parameter_is_in_one_group(data: DataSet, tmp_path: Path) -> None:
    work = workshop(data, tmp_path)
    grouped = [id(parameter) for group in work.optimiser.param_groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(p) for part in (work.model, work.loss) for p in part.parameters())


def test_steps_drop_the_rate_after_their_epochs(data: DataSet, tmp_path: Path) -> None:
    schedule = "schedule={kind: step, step_epochs: 2, step_factor: 0.5}"
    work = workshop(data, tmp_path, schedule, "optimiser.learning_rate=1", "epochs=6")
    assert len(work.batches) == 4
    assert rates(work, 24)["head"] == [1.0] * 8 + [0.5] * 8 + [0.25] * 8


def test_the_cosine_ends_at_nothing(data: DataSet, tmp_path: Path) -> None:
    seen = rates(workshop(data, tmp_path, "optimiser.learning_rate=1", "epochs=5"), 20)["head"]
    assert seen[0] == 1 and seen[10] == pytest.approx(0.5) and seen[-1] < 0.01
    assert seen == sorted(seen, reverse=True)


def test_the_backbone_rests_while_the_head_warms_up(data: DataSet, tmp_path: Path) -> None:
    seen = rates(
        workshop(data, tmp_path, "schedule={kind: constant, warm_up_epochs: 1}", "optimiser.learning_rate=1"), 6
    )
    assert seen["backbone"] == [0.0] * 4 + [1.0] * 2
    assert seen["head"] == [1.0] * 6


def test_mixed_precision_is_for_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(None, [])
    assert _half(config, torch.device("cpu")) is None
    for supported, expected in ((True, torch.bfloat16), (False, torch.float16)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda supported=supported: supported)
        assert _half(config, torch.device("cuda")) is expected
        assert _half(load_config(None, ["mixed_precision=false"]), torch.device("cuda")) is None
