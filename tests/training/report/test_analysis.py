"""The analysis of a run: its figures, proxies and embedding space."""

import numpy as np
import pytest

from training.checkpoints import RunFolder
from training.data import load_data
from training.report.analysis import analyse_run


def test_an_analysis_measures_the_kept_model_on_the_test_photos(run: RunFolder) -> None:
    data = load_data(run.data)
    titles: list[str] = []
    analysis = analyse_run(run, data, lambda done, total, title: titles.append(title))
    result = run.result()
    assert {name: analysis.measured[name] for name in ("recall@1", "map@r")} == pytest.approx(
        {name: result[name] for name in ("recall@1", "map@r")}, abs=1e-6
    )
    assert 1 - analysis.results.wrong.mean() == pytest.approx(result["recall@1"])
    assert analysis.chosen["epoch"] == analysis.newest == 2 and not analysis.validated
    assert dict.fromkeys(titles).keys() == {
        "Embedding the test photos",
        "Embedding training photos",
        "Mapping photos and proxies",
        "Mapping the space",
    }
    assert analysis.space and len(analysis.space.photos) == len(data.test)
    classes = sorted({photo.label for photo in data.train})
    assert analysis.proxies and analysis.proxies.classes == classes
    np.testing.assert_allclose(analysis.proxies.similarity.matrix.diagonal(), 1, rtol=1e-5)
    assert analysis.classes and len(analysis.classes.seen) == len(classes)
