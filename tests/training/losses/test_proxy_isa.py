"""Proxy-ISA against the paper in plain loops, against Proxy-Anchor, and at the edges of its numbers."""

import io
import math
from typing import Any

import pytest
import torch
from pytorch_metric_learning.losses import ProxyAnchorLoss
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from tests.training.losses.reference import SlowProxyISA, SlowProxyISAGradient
from training.losses.class_state import REBUILD_EVERY
from training.losses.proxy_isa import ProxyISAGradientLoss, ProxyISALoss, ProxyISASettings
from training.losses.proxy_nca_isa import ProxyNCAISALoss
from training.losses.sample_aware import SampleAwareProxyLoss

CLASSES, SIZE, BATCH = 6, 5, 10
STATES = ("outlier", "informative", "easy", "damped_negatives")


def settings(**changes: Any) -> ProxyISASettings:
    """Returns a schedule and a volume small enough that every rule acts within a few dozen steps."""
    return ProxyISASettings(**{"queue_start": 3, "filter_start": 6, "queue_size": 37, "volume": 12.0, **changes})


def batches(steps: int, seed: int = 0, batch: int = BATCH) -> list[tuple[Tensor, Tensor]]:
    """Noisy clusters, so that all of outliers, informative and easy positives turn up."""
    random = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, SIZE, generator=random, dtype=torch.double)
    made = []
    for _ in range(steps):
        labels = torch.randint(0, CLASSES, (batch,), generator=random)
        noise = torch.randn(batch, SIZE, generator=random, dtype=torch.double)
        made.append((centres[labels] + 1.2 * noise, labels))
    return made


def queue_in_order(loss: ProxyISALoss) -> list[tuple[int, list[float]]]:
    """Returns the queue's entries from the oldest to the newest."""
    state, capacity = loss.hardness, loss.hardness.settings.queue_capacity
    order = (torch.arange(capacity) + state.pointer) % capacity
    entries = [(int(state.queue_labels[slot]), state.queue[slot].tolist()) for slot in order]
    return [entry for entry in entries if entry[0] < CLASSES]


@pytest.mark.parametrize(
    ("kind", "reference"), [(ProxyISALoss, SlowProxyISA), (ProxyISAGradientLoss, SlowProxyISAGradient)]
)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"initial_similarity": 1.0},
        {"positive_penalty": "none", "negative_penalty": "inverse"},
        {"positive_penalty": "inverse"},
        {"positive_penalty": "nu"},
        {"positive_penalty": "none", "negative_penalty": "none"},
        {"hardness_sensitivity": 0.1, "search_margin": 0.0, "hardness_scale": 0.9, "tau": 4.0},
        {"queue_size": 4},
        {"queue_start": 0, "filter_start": 0},
    ],
    ids=str,
)
def test_every_step_equals_the_definition_in_plain_loops(
    kind: type[ProxyISALoss], reference: type[SlowProxyISA], changes: dict[str, Any]
) -> None:
    torch.manual_seed(1)
    loss = kind(CLASSES, SIZE, settings(**changes)).double()
    slow = reference(loss.proxies, settings(**changes))
    seen_states = torch.zeros(len(STATES), dtype=torch.double)
    for embeddings, labels in batches(40):
        fast_input, slow_input = embeddings.clone().requires_grad_(), embeddings.clone().requires_grad_()
        fast, expected = loss(fast_input, labels), slow.loss(slow_input, labels.tolist())
        assert fast.item() == pytest.approx(expected.item(), rel=1e-12)
        gradients = torch.autograd.grad(fast, [fast_input, loss.proxies])
        for got, wanted in zip(gradients, torch.autograd.grad(expected, [slow_input, slow.proxies]), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)
        state = loss.hardness
        assert state.seen.tolist() == slow.n
        torch.testing.assert_close(state.learned, torch.tensor(slow.learned, dtype=torch.double))
        outliers = torch.tensor([slow.outlier(c) for c in range(CLASSES)], dtype=torch.double)
        torch.testing.assert_close(state.thresholds().outlier, outliers)
        got_queue = queue_in_order(loss)
        assert [label for label, _ in got_queue] == [label for label, _ in slow.queue]
        for (_, vector), (_, wanted) in zip(got_queue, slow.queue, strict=True):
            assert vector == pytest.approx(wanted.tolist(), abs=1e-15)
        figures = loss.diagnostics()
        seen_states += torch.stack([figures[name] for name in STATES])
        with torch.no_grad():
            for proxies in (loss.proxies, slow.proxies):
                proxies.sub_(gradients[1], alpha=0.05)
    assert (seen_states > 0).all(), "the data must bring about every state of a pair"


def test_the_gradient_is_right_by_finite_differences() -> None:
    loss = ProxyISALoss(CLASSES, SIZE, settings()).double()
    for embeddings, labels in batches(12):
        loss(embeddings, labels)
    loss.eval()
    embeddings, labels = batches(1, seed=5)[0]
    assert torch.autograd.gradcheck(
        lambda x, _: 3 * loss(x, labels), (embeddings.requires_grad_(), loss.proxies), atol=1e-7
    )


@pytest.mark.parametrize("kind", [ProxyISALoss, ProxyISAGradientLoss])
@pytest.mark.parametrize("only_class", [None, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_with_every_weight_one_it_is_proxy_anchor(
    kind: type[ProxyISALoss], dtype: torch.dtype, only_class: int | None
) -> None:
    torch.manual_seed(0)
    loss = kind(CLASSES, SIZE, settings(positive_penalty="none", negative_penalty="none")).to(dtype)
    anchor = ProxyAnchorLoss(CLASSES, SIZE, margin=0.1, alpha=32).to(dtype)
    anchor.proxies.data.copy_(loss.proxies.data)
    for embeddings, drawn in batches(10):
        labels = drawn if only_class is None else torch.full_like(drawn, only_class)
        ours, theirs = (embeddings.to(dtype).clone().requires_grad_() for _ in range(2))
        value, expected = loss(ours, labels), anchor(theirs, labels)
        torch.testing.assert_close(value, expected)
        value.backward()
        expected.backward()
        rtol, atol = (1e-4, 1e-5) if dtype == torch.float32 else (1e-9, 1e-12)
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=rtol, atol=atol)
        torch.testing.assert_close(loss.proxies.grad, anchor.proxies.grad, rtol=rtol, atol=atol)
        loss.zero_grad()
        anchor.zero_grad()


def test_gradient_weights_that_agree_within_each_class_are_the_derivative_of_the_value() -> None:
    loss = ProxyISAGradientLoss(CLASSES, SIZE, settings(filter_start=3, negative_penalty="none")).double()
    for embeddings, labels in batches(12):
        loss(embeddings, labels)
    loss.eval()
    loss.hardness.learned.fill_(-1)  # Every positive is easy: its weight is the sigma of its class.
    embeddings, labels = batches(1, seed=5)[0]
    at = loss.hardness.thresholds()
    weights = loss.hardness.positive_weights(torch.ones(CLASSES).double(), torch.arange(CLASSES), at)
    assert len(set(weights.tolist())) > 1 and (weights < 1).all()
    assert torch.autograd.gradcheck(
        lambda x, _: 3 * loss(x, labels), (embeddings.requires_grad_(), loss.proxies), atol=1e-7
    )


def test_one_class_alone_has_only_an_attraction() -> None:
    loss = ProxyISALoss(1, SIZE, settings()).double()
    embeddings = batches(1)[0][0].requires_grad_()
    value = loss(embeddings, torch.zeros(BATCH, dtype=torch.long))
    cosine = torch.nn.functional.cosine_similarity(embeddings, loss.proxies)
    assert value.item() == pytest.approx(torch.log(1 + torch.exp(32 * (0.1 - cosine)).sum()).item())
    value.backward()
    assert embeddings.grad is not None and embeddings.grad.isfinite().all()


def test_a_class_absent_from_the_queue_keeps_its_last_similarity() -> None:
    loss = ProxyISALoss(CLASSES, SIZE, settings(queue_start=0, filter_start=0, queue_size=BATCH)).double()
    embeddings, _ = batches(1)[0]
    loss(embeddings, torch.full((BATCH,), 3))
    learned = loss.hardness.learned.clone()
    loss(loss.proxies.detach()[0].expand(BATCH, -1), torch.zeros(BATCH, dtype=torch.long))
    assert loss.hardness.class_counts[3] == 0
    assert loss.hardness.learned[3] == learned[3] != 0
    assert loss.hardness.learned[0] == pytest.approx(0.15)


def test_a_batch_of_outliers_leaves_queue_and_counters_untouched() -> None:
    loss = ProxyISALoss(CLASSES, SIZE, settings(queue_start=0, filter_start=0)).double()
    loss.hardness.learned.fill_(0.9)
    loss.hardness.seen.fill_(10_000)
    value = loss(-loss.proxies.detach(), torch.arange(CLASSES))
    assert value.isfinite()
    assert loss.diagnostics()["outlier"] == 1
    assert (loss.hardness.seen == 10_000).all()
    assert queue_in_order(loss) == []
    assert loss.hardness.learned.tolist() == [0.9] * CLASSES


@pytest.mark.parametrize("filter_start", [0, 1000])
def test_a_nan_embedding_affects_its_step_but_not_the_state(filter_start: int) -> None:
    loss = ProxyISALoss(CLASSES, SIZE, settings(queue_start=0, filter_start=filter_start, queue_size=500)).double()
    data = batches(3)
    loss(*data[0])
    broken = data[1][0].clone()
    broken[2, 1] = torch.nan
    assert loss(broken, data[1][1]).isnan()
    state = loss.hardness
    assert state.class_counts[:CLASSES].sum() == state.seen.sum() == len(queue_in_order(loss))
    assert state.seen.sum() < 2 * BATCH
    assert state.learned.isfinite().all()
    assert loss(*data[2]).isfinite()


def test_under_autocast_it_computes_in_float32_and_returns_gradients_in_half() -> None:
    loss = ProxyISALoss(CLASSES, SIZE, settings())
    embeddings, labels = batches(1)[0]
    half = embeddings.bfloat16().requires_grad_()
    full = half.detach().float().requires_grad_()
    loss.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = loss(half, labels)
    expected = loss(full, labels)
    assert value.dtype == torch.float32
    assert torch.equal(value, expected)
    value.backward()
    expected.backward()
    assert half.grad is not None and half.grad.dtype == torch.bfloat16
    torch.testing.assert_close(half.grad, full.grad.bfloat16())  # type: ignore[union-attr]
    assert loss.proxies.dtype == loss.hardness.queue.dtype == torch.float32


def test_logits_in_the_thousands_stay_finite() -> None:
    loss = ProxyISALoss(CLASSES, SIZE, settings(alpha=5000.0, filter_start=3))
    for embeddings, labels in batches(8):
        x = (embeddings.float() * 1e-3).requires_grad_()
        value = loss(x, labels)
        value.backward()
        assert value.isfinite() and value > 100
        assert x.grad is not None and x.grad.isfinite().all()
        assert loss.proxies.grad is not None and loss.proxies.grad.isfinite().all()


def test_sigma_stays_finite_in_float32_where_its_exponential_would_overflow() -> None:
    loss = ProxyISALoss(3, SIZE, settings(volume=1000.0, queue_start=0, filter_start=0))
    loss.hardness.seen.copy_(torch.tensor([0, 3_000, 10**9]))
    at = loss.hardness.thresholds()
    easy = loss.hardness.positive_weights(torch.ones(3), torch.arange(3), at)
    assert easy[0] == 1
    assert easy[2].item() == pytest.approx(1 / (1 + math.log(1001)), rel=1e-5)
    assert at.effective.tolist() == pytest.approx([0, 950.3, 1000], rel=1e-3)


def test_running_sums_follow_the_queue_over_many_turns() -> None:
    loss = ProxyISALoss(CLASSES, SIZE, settings(queue_start=0, filter_start=5, queue_size=23))
    for embeddings, labels in batches(300):
        loss(embeddings.float(), labels)
    state = loss.hardness
    for c in range(CLASSES):
        members = state.queue[state.queue_labels == c]
        assert state.class_counts[c] == len(members)
        torch.testing.assert_close(state.class_sums[c], members.sum(0), atol=1e-5, rtol=0)
    state.class_sums.add_(1)
    state.steps = REBUILD_EVERY - 1
    loss(*[t.float() if t.is_floating_point() else t for t in batches(1)[0]])
    for c in range(CLASSES):
        members = state.queue[state.queue_labels == c]
        torch.testing.assert_close(state.class_sums[c], members.sum(0), atol=1e-6, rtol=0)


@pytest.mark.parametrize("stop", [2, 5, 20])
def test_a_saved_and_resumed_run_continues_bit_for_bit(stop: int) -> None:
    def run(loss: ProxyISALoss, data: list[tuple[Tensor, Tensor]]) -> list[float]:
        optimiser = torch.optim.SGD(loss.parameters(), lr=0.1)
        values = []
        for embeddings, labels in data:
            optimiser.zero_grad()
            value = loss(embeddings.float(), labels)
            value.backward()
            optimiser.step()
            values.append(value.item())
        return values

    torch.manual_seed(3)
    undisturbed = ProxyISALoss(CLASSES, SIZE, settings())
    resumed = ProxyISALoss(CLASSES, SIZE, settings())
    resumed.load_state_dict(undisturbed.state_dict())
    data = batches(30)
    values = run(undisturbed, data)
    first = run(resumed, data[:stop])
    file = io.BytesIO()
    torch.save(resumed.state_dict(), file)
    file.seek(0)
    fresh = ProxyISALoss(CLASSES, SIZE, settings())
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert first + run(fresh, data[stop:]) == values
    for name, wanted in undisturbed.state_dict().items():
        got = fresh.state_dict()[name]
        assert torch.equal(got, wanted) if isinstance(wanted, Tensor) else got == wanted, name


def test_evaluation_mode_does_not_change_the_state() -> None:
    loss = ProxyISALoss(CLASSES, SIZE, settings(queue_start=0, filter_start=0)).double()
    data = batches(3)
    loss(*data[0])
    before = {name: value.clone() for name, value in loss.hardness.named_buffers()}
    loss.eval()
    assert loss(*data[1]).item() == loss(*data[1]).item()
    assert all(torch.equal(before[name], value) for name, value in loss.hardness.named_buffers())
    assert loss.hardness.steps == 1


def test_proxies_start_kaiming_normal_by_fan_out() -> None:
    torch.manual_seed(0)
    loss = ProxyISALoss(400, 64, settings())
    assert loss.proxies.std().item() == pytest.approx(math.sqrt(2 / 400), rel=0.02)
    assert [name for name, _ in loss.named_parameters()] == ["proxies"]


@pytest.mark.parametrize("kind", [ProxyISALoss, ProxyISAGradientLoss, ProxyNCAISALoss])
def test_no_step_and_no_diagnosis_waits_for_the_gpu(kind: type[SampleAwareProxyLoss]) -> None:
    """Fake CUDA tensors have shapes but no values: whatever reads one raises."""
    with FakeTensorMode(), torch.device("cuda"):
        loss = kind(CLASSES, SIZE, queue_start=0, filter_start=0, queue_size=37)
        for _ in range(2):
            value = loss(torch.randn(BATCH, SIZE), torch.zeros(BATCH, dtype=torch.long))
        assert value.device.type == "cuda" and loss.hardness.steps == 2
        assert all(figure.device.type == "cuda" for figure in loss.diagnostics().values())
        with pytest.raises(DataDependentOutputException):
            value.item()
