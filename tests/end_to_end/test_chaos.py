"""A service that is killed, attacked and run out of space while others write and search: nothing may be lost or wrong.

The seed is printed. `CHAOS_SEED=... CHAOS_SECONDS=...` makes other choices, or takes longer; the timing always differs.
"""

import os
from pathlib import Path

import pytest

from tests.support.chaos import ChaosOptions, run_chaos

SEED = int(os.environ.get("CHAOS_SEED") or 16)
SECONDS = float(os.environ.get("CHAOS_SECONDS") or 45)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "share"), [pytest.param(1, 1.0, id="one process"), pytest.param(2, 0.4, id="two processes")]
)
def test_a_killed_attacked_and_full_service_loses_nothing_and_answers_correctly(
    tmp_path: Path, workers: int, share: float
) -> None:
    print(f"CHAOS_SEED={SEED}")
    options = ChaosOptions(seed=SEED, seconds=share * SECONDS, workers=workers, max_memory=workers * (900 << 20))
    report = run_chaos(options, tmp_path)
    assert not report.violations, f"CHAOS_SEED={SEED}, files in {tmp_path}:\n" + "\n".join(report.violations)
    assert report.acknowledged > 100, "too few writes"
    assert report.totals.recoveries or any("killed" in name for name in report.totals.faults), "nothing was killed"
