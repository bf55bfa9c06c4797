"""A run's parts: what learns when, which batches a loss gets, and the volume of Proxy-ISA."""

from pathlib import Path

import pytest
import torch

from tests.support.training_runs import RecordingCallback
from training.config import load_config
from training.data import DataSet
from training.data.samplers import BalancedBatches, RandomBatches
from training.distributed import ProcessGroup
from training.errors import TrainingError
from training.losses.sample_aware import SampleAwareProxyLoss
from training.setup import TrainingSetup, describe_volume, prepare_training

BASE = [
    "loss.name=proxy_isa",
    "preprocessing={resize: 36, input_size: 32}",
    "sampling.batch_size=8",
    "selection.validation_share=0",
    "workers=0",
]


def workshop(data: DataSet, out: Path, *overrides: str, callback: RecordingCallback | None = None) -> TrainingSetup:
    config = load_config(None, [*BASE, *overrides])
    return prepare_training(
        config, data, out, ProcessGroup(0, 1, torch.device("cpu")), callback or RecordingCallback(), pretrained=False
    )


def step_gradients(work: TrainingSetup, epoch: int) -> set[str]:
    """Returns the names of the model's parameters that have a gradient after a batch of an epoch."""
    work.begin_epoch(epoch, 0)
    inputs, labels = next(iter(work.loader))
    work.optimiser.zero_grad()
    work.criterion(work.network(inputs), labels).backward()
    return {name for name, parameter in work.model.named_parameters() if parameter.grad is not None}


def test_the_backbone_has_no_gradient_during_the_warm_up(data: DataSet, tmp_path: Path) -> None:
    work = workshop(data, tmp_path, "schedule.warm_up_epochs=1")
    assert step_gradients(work, 0) == {"head.weight", "head.bias"}
    assert step_gradients(work, 1) == {name for name, _ in work.model.named_parameters()}


def test_frozen_stages_and_frozen_batch_norm_do_not_learn(data: DataSet, tmp_path: Path) -> None:
    work = workshop(data, tmp_path, "backbone.frozen_stages=-1", "backbone.batch_norm=frozen")
    learning = step_gradients(work, 0)
    assert "head.weight" in learning and "backbone.conv_head.weight" in learning
    assert not any(name.startswith(("backbone.conv_stem", "backbone.blocks.0")) for name in learning)
    assert not any("bn" in name for name in learning)


def test_vectors_of_any_length_reach_the_loss(data: DataSet, tmp_path: Path) -> None:
    work = workshop(data, tmp_path)
    work.begin_epoch(0, 0)
    lengths = work.network(next(iter(work.loader))[0]).norm(dim=1)
    assert lengths.std() > 1e-3, "the loss N-pair would learn nothing from unit vectors"


def test_losses_on_pairs_get_balanced_batches_by_default(data: DataSet, tmp_path: Path) -> None:
    assert isinstance(workshop(data, tmp_path, "loss.name=triplet").batches, BalancedBatches)
    assert isinstance(workshop(data, tmp_path, "loss.name=proxy_anchor").batches, RandomBatches)
    with pytest.raises(TrainingError, match=r"sampling.batch_size=9 .* triplet"):
        workshop(data, tmp_path, "loss.name=triplet", "sampling.batch_size=9")


def test_few_pairs_in_random_batches_are_reported_for_losses_on_pairs(data: DataSet, tmp_path: Path) -> None:
    callback, quiet = RecordingCallback(), RecordingCallback()
    sparse = ["sampling={kind: random, batch_size: 2}"]
    workshop(data, tmp_path, "loss.name=triplet", *sparse, callback=callback)
    workshop(data, tmp_path, "loss.name=proxy_anchor", *sparse, callback=quiet)
    assert any("sampling.kind=balanced" in text for text in callback.messages)
    assert not any("sampling.kind=balanced" in text for text in quiet.messages)


def test_the_volume_follows_from_the_planned_samples_and_is_reported(data: DataSet, tmp_path: Path) -> None:
    work = workshop(data, tmp_path, "epochs=400")
    loss = work.loss
    assert isinstance(loss, SampleAwareProxyLoss)
    planned = 400 * len(data.train) / len({photo.label for photo in data.train})
    assert 0.07 <= loss.hardness.settings.half_decay_samples() / planned <= 0.10
    remark = describe_volume(work)
    assert remark and f"V = {loss.hardness.settings.volume:.4g} (chosen from the planned epochs): half-decay" in remark
    set_by_hand = workshop(data, tmp_path, "epochs=400", "loss.settings.volume=33").loss
    assert isinstance(set_by_hand, SampleAwareProxyLoss) and set_by_hand.hardness.settings.volume == 33


@pytest.mark.parametrize(
    ("overrides", "remark"),
    [
        (["epochs=20", "loss.settings.volume=100"], "are planned. Set loss.settings.volume=10, or leave it out."),
        (["epochs=3", "loss.settings.volume=5"], "never acts: positives are weighed from epoch 3 on"),
        (["epochs=20", "loss.settings.positive_penalty=none"], None),
        (["epochs=20", "loss.name=proxy_anchor"], None),
    ],
)
def test_a_volume_that_never_acts_is_reported(
    data: DataSet, tmp_path: Path, overrides: list[str], remark: str | None
) -> None:
    text = describe_volume(workshop(data, tmp_path, *overrides))
    assert text is None if remark is None else text is not None and remark in text


def test_equal_seeds_share_weights_and_batches_whatever_the_loss(data: DataSet, tmp_path: Path) -> None:
    runs = [
        workshop(data, tmp_path, *overrides).initial
        for overrides in (["loss.name=proxy_isa"], ["loss.name=proxy_anchor"], ["loss.name=proxy_isa", "seed=1"])
    ]
    assert runs[0] == runs[1]
    assert runs[0]["weights"] != runs[2]["weights"] and runs[0]["batches"] != runs[2]["batches"]
