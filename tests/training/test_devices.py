"""The device and its precision, as far as a machine without a GPU can show it."""

import pytest
import torch

from training.devices import check_vectors, choose_device, half_precision, set_precision
from training.errors import TrainingError


def test_the_device_is_chosen_or_refused() -> None:
    assert choose_device("auto").type in ("cuda", "mps", "cpu")
    assert choose_device("cpu").type == "cpu"
    if not torch.cuda.is_available():
        with pytest.raises(TrainingError, match="cuda is not available"):
            choose_device("cuda")


def test_bfloat16_is_taken_only_where_the_gpu_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A T4 emulates bfloat16, which PyTorch counts as supported by default."""
    assert half_precision(torch.device("cpu")) is None
    for native, expected in ((True, torch.bfloat16), (False, torch.float16)):
        monkeypatch.setattr(
            torch.cuda,
            "is_bf16_supported",
            lambda including_emulation=True, native=native: including_emulation or native,
        )
        assert half_precision(torch.device("cuda")) is expected


def test_precision_settings_reach_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    before = (torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
    try:
        set_precision(torch.device("cpu"), cudnn_benchmark=True, tf32=True)
        assert (torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()) == before[:2], "a CPU has none"
        set_precision(torch.device("cuda"), cudnn_benchmark=True, tf32=True)
        assert torch.backends.cudnn.benchmark and torch.get_float32_matmul_precision() == "high"
        set_precision(torch.device("cuda"), cudnn_benchmark=False, tf32=False)
        assert not torch.backends.cudnn.benchmark and torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.backends.cudnn.benchmark = before[0]
        torch.set_float32_matmul_precision(before[1])
        torch.backends.cudnn.allow_tf32 = before[2]


def test_a_device_that_computes_other_vectors_is_refused() -> None:
    torch.manual_seed(0)
    expected = torch.randn(4, 64)
    check_vectors(expected.bfloat16().float(), expected, torch.device("cuda"))
    for wrong in (expected.roll(1, 0), expected * torch.nan):
        with pytest.raises(TrainingError, match="computes different vectors than the CPU"):
            check_vectors(wrong, expected, torch.device("cuda"))
