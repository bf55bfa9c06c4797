"""Surface patterns of the sample shop."""

from collections import Counter

import numpy as np
import pytest

from training.data.sample_shop.patterns import MOTIFS, Pattern


@pytest.mark.parametrize("name", ["striped", "pinstriped", "dotted", "checked", "zigzag", "wavy", "diamond", "tartan"])
def test_regular_patterns_close_around_a_turned_body(name: str) -> None:
    u, v = np.random.default_rng(0).uniform(0, 1, (2, 500))
    pattern = Pattern(name, 1.1, 5)
    here, once_around = (pattern.colour_numbers(turn, v, (2.3, 1.0)) for turn in (u, u + 1))
    assert (here == once_around).mean() > 0.99  # all but those that rounding moves over an edge


@pytest.mark.parametrize("name", MOTIFS)
def test_every_pattern_paints_with_at_most_three_colours(name: str) -> None:
    u, v = np.random.default_rng(0).uniform(0, 1, (2, 5000))
    painted = Counter(Pattern(name, 1.0, 5).colour_numbers(u, v, (2.0, 1.0)).tolist())
    assert set(painted) <= {0, 1, 2}
    assert painted[0] >= 0.45 * 5000
    assert len(painted) > 1 or name == "plain"
