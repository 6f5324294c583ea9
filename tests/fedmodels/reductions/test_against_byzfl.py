"""Robust rules against those of byzfl (Allouah, Guerraoui, González et al.).

byzfl takes n - f - 1 neighbours for Krum, one more than the paper, which we follow: its scores with
f + 1 are ours with f. It rounds to float32 in between.
"""

import importlib

import numpy as np
import pytest
import torch

from fedmodels.config.reduction import Reduction
from fedmodels.reductions import coefficients
from fedmodels.reductions.rule import RobustRule
from fedmodels.tensors.aggregation_rule import Facts
from fedmodels.tensors.bundle import Bundle


@pytest.fixture(scope="module")
def aggregators():
    """It takes seconds to import, so only tests that need it do."""
    return importlib.import_module("byzfl.aggregators.aggregators")


@pytest.fixture(scope="module")
def preaggregators():
    return importlib.import_module("byzfl.aggregators.preaggregators")


@pytest.fixture(scope="module")
def vectors():
    draw = np.random.default_rng(5)
    found = draw.normal(size=(13, 400))
    found[[2, 9]] = draw.normal(3.0, 4.0, size=(2, 400))  # two that lie
    return found


def ours(vectors, given=0.0, **settings):
    sent = {c: {"w": torch.from_numpy(v)} for c, v in enumerate(vectors)}
    facts = Facts(given=Bundle({"w": torch.full((vectors.shape[1],), given, dtype=torch.float64)}))
    rule = RobustRule(Reduction(**settings))
    return rule.weights(sent, dict.fromkeys(sent, 1.0), facts)[0]["w"].numpy()


def test_rules_are_those_of_byzfl(vectors, aggregators):
    pairs = {
        "median": (ours(vectors, reduce="median"), aggregators.Median()),
        "trimmed_mean": (
            ours(vectors, reduce="trimmed_mean", attackers=2),
            aggregators.TrMean(f=2),
        ),
        "krum": (ours(vectors, reduce="krum", attackers=2), aggregators.Krum(f=3)),
        "geometric_median": (
            ours(vectors, reduce="geometric_median", iterations=7),
            aggregators.GeometricMedian(nu=1e-6, T=7),
        ),
        "centered_clipping": (
            ours(vectors, reduce="centered_clipping", clip_norm=15.0, iterations=4),
            aggregators.CenteredClipping(L=4, tau=15.0),
        ),
    }
    for name, (found, byzfl) in pairs.items():
        np.testing.assert_allclose(found, byzfl(vectors.copy()), rtol=1e-9, atol=1e-9, err_msg=name)


def test_multi_krum_takes_those_of_the_lowest_scores(vectors, aggregators):
    """Ours with f = 2 takes n - 2 by n - 4 neighbours; byzfl with f = 3 takes n - 3 by as many."""
    gram = vectors @ vectors.T
    chosen = coefficients.krum(coefficients.distances(gram), 2, len(vectors) - 3)
    expected = aggregators.MultiKrum(f=3)(vectors)
    np.testing.assert_allclose(vectors[chosen].mean(0), expected, rtol=1e-9, atol=1e-9)


def test_clipping_to_a_norm_is_that_of_byzfl(vectors, preaggregators):
    found = ours(vectors, reduce="norm_clipped", clip_norm=20.0)
    expected = preaggregators.Clipping(c=20.0)(vectors.copy()).mean(0)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("given", [0.0, 5.0])
def test_nearest_mixing_is_that_of_byzfl(vectors, given, aggregators, preaggregators):
    mixed = preaggregators.NNM(f=2)(vectors)
    for name, byzfl in (("median", aggregators.Median()), ("krum", aggregators.Krum(f=3))):
        found = ours(vectors, given, reduce=name, mix="nearest", attackers=2)
        np.testing.assert_allclose(found, byzfl(mixed), rtol=1e-9, atol=1e-9, err_msg=name)
