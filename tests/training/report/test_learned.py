"""The state of the loss in a checkpoint: proxies and decay functions."""

import numpy as np
import pytest
import torch

from training.config import load_config
from training.losses.class_state import HardnessSettings
from training.losses.registry import make_loss
from training.report.learned import learned_classes, read_proxies


def test_decay_curves_follow_the_papers_equations() -> None:
    config = load_config(None, ["loss={name: proxy_isa, settings: {volume: 20, tau: 2, positive_penalty: nu}}"])
    state = {"hardness.seen": torch.tensor([3, 90]), "hardness.learned": torch.tensor([0.1, 0.2])}
    classes = learned_classes(config, state)
    assert classes is not None and classes.settings.positive_penalty == "nu"
    volume, tau = 20.0, 2.0
    n = np.array(classes.decay.samples)
    assert n[0] == 0 and n[-1] >= 90
    effective = (1 - (1 - 1 / volume) ** n) * volume
    nu = 1 / (1 + np.log(1 + effective))
    np.testing.assert_allclose(classes.decay.nu, nu, rtol=1e-5)
    sigma = 1 + (1 + np.exp(-tau)) * (nu - 1) / (1 + np.exp(volume - effective - tau))
    np.testing.assert_allclose(classes.decay.sigma, sigma, rtol=1e-5)
    np.testing.assert_allclose(classes.decay.inverse[1:], 1 / effective[1:], rtol=1e-5)
    s = HardnessSettings(queue_start=0, filter_start=0)
    hardness = 1 + s.hardness_sensitivity * (1 - 0.2)
    own_nu = 1 / (1 + np.log(1 + classes.effective[1]))
    assert classes.outlier[1] == pytest.approx(0.2 - hardness * own_nu - s.search_margin, rel=1e-5)


@pytest.mark.parametrize(("loss", "each"), [("proxy_gml", 12), ("arcface", 1), ("soft_triple", 10), ("proxy_nca", 1)])
def test_proxies_are_found_where_each_loss_keeps_them(loss: str, each: int) -> None:
    proxies = read_proxies(make_loss(loss, 30, 16, {}).state_dict())
    assert proxies is not None and proxies.shape == (30 * each, 16)
    np.testing.assert_allclose(np.linalg.norm(proxies, axis=1), 1, rtol=1e-5)
