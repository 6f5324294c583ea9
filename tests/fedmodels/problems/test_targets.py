"""Losses and figures of targets, by hand and against scikit-learn."""

import numpy as np
import pytest
import torch
from sklearn import metrics

from fedmodels.config.columns import Columns
from fedmodels.config.training import Training
from fedmodels.problems.targets import made


def numbers(loss="squared", **columns):
    columns = {"target": ("price",), **columns}
    training = Training(loss=loss, **({"huber_delta": 0.5} if loss == "huber" else {}))
    return made(Columns(**columns), training)


def test_losses_by_hand():
    """Errors 1 and -2: squares 1 and 4; Huber with delta 0.5: 0.5 (1 - 0.25) and 0.5 (2 - 0.25)."""
    outputs, y = torch.tensor([[2.0], [1.0]]), torch.tensor([[1.0], [3.0]])
    assert numbers().losses(outputs, y).tolist() == [1.0, 4.0]
    assert numbers()(outputs, y) == 2.5
    assert numbers("huber").losses(outputs, y).tolist() == [0.375, 0.875]


def test_a_loss_of_several_targets_is_the_mean_over_them():
    outputs, y = torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0, 3.0]])
    assert numbers(target=("price", "size")).losses(outputs, y).tolist() == [5.0]


def test_pinball_by_hand():
    """With q = 0.1 and 0.9: an error of 1 costs 0.1 and 0.9, one of -2 costs 1.8 and 0.2."""
    kind = numbers("quantile", quantiles=(0.1, 0.9))
    outputs = torch.tensor([[0.0, 0.0], [3.0, 3.0]])
    found = kind.losses(outputs, torch.tensor([[1.0], [1.0]]))
    assert found.tolist() == pytest.approx([0.5, 1.0])
    assert kind.outputs == ("price q0.1", "price q0.9")


def test_figures_are_those_of_scikit_learn_in_the_unit_of_the_target():
    rng = np.random.default_rng(0)
    true, said = rng.normal(150, 40, (50, 2)), rng.normal(150, 40, (50, 2))
    kind = numbers(target=("a", "b"), target_mean=(140.0, 150.0), target_std=(30.0, 50.0))
    learned, outputs = (torch.from_numpy((x - kind.mean) / kind.std) for x in (true, said))
    assert kind.answers(outputs).numpy() == pytest.approx(said)
    found = kind.score(outputs, learned)
    assert found["mae"] == pytest.approx(metrics.mean_absolute_error(true, said))
    assert found["rmse"] == pytest.approx(metrics.root_mean_squared_error(true, said))
    assert found["r2"] == pytest.approx(metrics.r2_score(true, said))
    always = np.tile(kind.mean, (50, 1))
    assert found["mae_of_mean"] == pytest.approx(metrics.mean_absolute_error(true, always))


def test_quantiles_are_scored_by_the_one_nearest_to_the_median():
    rng = np.random.default_rng(1)
    true, said = rng.normal(0, 1, 30), rng.normal(0, 1, (30, 3))
    kind = numbers("quantile", quantiles=(0.1, 0.5, 0.9), target_mean=(0.0,), target_std=(2.0,))
    found = kind.score(torch.from_numpy(said), torch.from_numpy(true[:, None]))
    assert found["mae"] == pytest.approx(2 * metrics.mean_absolute_error(true, said[:, 1]))
    each = [metrics.mean_pinball_loss(true, said[:, k], alpha=q) for k, q in
            enumerate((0.1, 0.5, 0.9))]  # fmt: skip
    assert found["pinball"] == pytest.approx(2 * np.mean(each))


def test_equal_numbers_have_no_r2():
    assert "r2" not in numbers().score(torch.zeros(3, 1), torch.ones(3, 1))


def test_several_labels_are_scored_as_by_scikit_learn():
    rng = np.random.default_rng(2)
    true, scores = rng.integers(0, 2, (40, 3)).astype(np.float32), rng.normal(0, 2, (40, 3))
    kind = made(Columns(labels=("fever", "cough", "rash")), Training(loss="sigmoid"))
    found = kind.score(torch.from_numpy(scores), torch.from_numpy(true))
    for name, of in (("auroc", metrics.roc_auc_score),
                     ("average_precision", metrics.average_precision_score)):  # fmt: skip
        assert found[name] == pytest.approx(of(true, scores, average="macro"))
        assert found[f"{name}_micro"] == pytest.approx(of(true, scores, average="micro"))
    assert found["base_rate"] == pytest.approx(true.mean())
    share = 1 / (1 + np.exp(-scores))
    assert kind.answers(torch.from_numpy(scores)).numpy() == pytest.approx(share)
    log_loss = metrics.log_loss(true.ravel(), share.ravel())
    assert float(kind(torch.from_numpy(scores), torch.from_numpy(true).double())) == (
        pytest.approx(log_loss)
    )


def test_a_label_that_all_have_counts_in_no_mean():
    kind = made(Columns(labels=("fever", "cough")), Training(loss="sigmoid"))
    true, scores = torch.tensor([[1.0, 1.0], [0.0, 1.0]]), torch.tensor([[2.0, 0.0], [1.0, 0.0]])
    assert kind.score(scores, true)["auroc"] == 1.0
    assert kind.score(scores, torch.ones(2, 2)) == {}


def test_an_infinite_logit_is_the_largest():
    kind = made(Columns(labels=("fever",)), Training(loss="sigmoid"))
    true, scores = (
        torch.tensor([[1.0], [0.0], [0.0]]),
        torch.tensor([[torch.inf], [3.0], [-torch.inf]]),
    )
    assert kind.score(scores, true)["auroc"] == 1.0
