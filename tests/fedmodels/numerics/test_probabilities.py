"""Ranking and calibration of scores, by hand and against scikit-learn and torchmetrics."""

import importlib

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from fedcli.parts.probabilities import Probabilities


def drawn(n=200, classes=4, seed=0):
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=draw)
    return torch.randn(n, classes, generator=draw) + torch.nn.functional.one_hot(y, classes), y


def test_by_hand():
    """Two examples of class 0 with p = .9 and .6, one of class 1 with p(0) = .8.

    Of the two pairs of a 0 and a 1 one is in order: AUROC is 1/2 for both classes. The bins of .6,
    .8 and .9 hold one example each: ECE = (.4 + .8 + .1) / 3.
    """
    p = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.8, 0.2]])
    found = Probabilities.of(p.log(), torch.tensor([0, 0, 1]))
    assert found.auroc == pytest.approx(0.5)
    assert found.ece == pytest.approx(1.3 / 3)


def test_examples_of_a_bin_make_up_for_each_other():
    p = torch.tensor([[0.75, 0.25]] * 4)
    assert Probabilities.of(p.log(), torch.tensor([0, 0, 0, 1])).ece == pytest.approx(0, abs=1e-6)


def test_all_classes_as_scikit_learn():
    scores, y = drawn()
    wanted = roc_auc_score(y, scores.double().softmax(1), multi_class="ovr")
    assert Probabilities.of(scores, y).auroc == pytest.approx(wanted)


def test_as_torchmetrics():
    functional = importlib.import_module("torchmetrics.functional.classification")
    scores, y = drawn()
    found, p = Probabilities.of(scores, y), scores.softmax(1)
    ece = functional.multiclass_calibration_error(p, y, num_classes=4, n_bins=15)
    assert found.ece == pytest.approx(float(ece), abs=1e-6)
    assert found.auroc == pytest.approx(float(functional.multiclass_auroc(p, y, 4)), abs=1e-6)


def test_a_class_that_is_not_there_or_alone_counts_nothing():
    scores, y = drawn()
    some = y < 2
    wanted = np.mean([roc_auc_score(y[some] == k, scores[some].softmax(1)[:, k]) for k in range(2)])
    assert Probabilities.of(scores[some], y[some]).auroc == pytest.approx(wanted)
    assert Probabilities.of(scores[y == 3], y[y == 3]).auroc is None


def test_scores_that_exclude_classes_have_numbers_all_the_same():
    scores = torch.tensor([[0.0, -torch.inf], [-torch.inf, -torch.inf]])
    found = Probabilities.of(scores, torch.tensor([0, 1]))
    assert (found.auroc, found.ece) == (1.0, pytest.approx(0.25))
