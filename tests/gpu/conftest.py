"""Skips the tests of this folder where there is no GPU."""

import pytest

from index._util.cuda import find_gpus


@pytest.fixture(scope="session", autouse=True)
def needs_a_gpu() -> None:
    if problem := find_gpus().problem:
        pytest.skip(f"needs an NVIDIA GPU: {problem}")
