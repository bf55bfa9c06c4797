"""The specifications of data sets."""

import pytest

from training.data import load_data
from training.errors import TrainingError


@pytest.mark.parametrize("spec", ["nonsense", "folder", "folder:", "sampler", "cub", "table:"])
def test_an_unknown_specification_lists_the_known_ones(spec: str) -> None:
    with pytest.raises(TrainingError, match=r"folder:DIR.*table:FILE.*inshop:DIR"):
        load_data(spec)
