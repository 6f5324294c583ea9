"""How a model is scored: in which batches, what is counted, and what is made once."""

import math
from dataclasses import replace

import pytest
import torch

from fedmodels.errors import ConfigError
from fedmodels.methods.fedavg import FedAvg
from fedmodels.tensors.bundle import Bundle, Problem
from fedmodels.training.scoring import FULL, INPUT_BYTES, batch_size, score
from tests.conftest import linear_context, tiny_experiment
from tests.fake_card import CARD, card


class Watched(FedAvg):
    """FedAvg that notes the batches it predicts."""

    def __init__(self):
        object.__setattr__(self, "sizes", [])

    def predict(self, ctx, payload, state, x):
        self.sizes.append(len(x))
        return super().predict(ctx, payload, state, x)


def context(size=None, **facts):
    """Return a context whose net scores inputs (a, b) as they are, as logits of two classes."""
    ctx = linear_context(
        tiny_experiment(evaluate={"batch_size": size} if size else {}), [[0.0, 0.0]], [0]
    )
    with torch.no_grad():
        ctx.net.head.weight.copy_(torch.eye(2))
    for name, value in facts.items():
        setattr(ctx.net, name, value)
    return ctx


def test_sets(*sizes):
    """Return test sets of these sizes: each example is of class 0, every third taken for 1."""
    rows = [torch.tensor([[1.0, 0.0], [0.0, 3.0], [2.0, 0.0]])[torch.arange(n) % 3] for n in sizes]
    return {f"task/{k}": (x, torch.zeros(len(x), dtype=torch.int64)) for k, x in enumerate(rows)}


test_sets.__test__ = False


def batches_of(ctx, sizes, **how):
    method = Watched()
    score(method, ctx, Bundle(), Bundle(), test_sets(*sizes), **how)
    return method.sizes


@pytest.mark.parametrize(
    ("sizes", "batches"),
    [
        ((12, 12, 12), [36]),
        ((12, 80, 12), [92, 12]),
        ((FULL, 1, 300, 5), [FULL, 1, 256, 44, 5]),
        ((0, 4, 0, 4), [4, 4]),
    ],
)
def test_neighbours_share_a_batch_as_long_as_that_pays(sizes, batches):
    assert batches_of(context(), sizes) == batches


def test_no_batch_is_larger_than_the_config_says():
    assert batches_of(context(size=20), (12, 12, 8, 50)) == [12, 20, 20, 20, 10]


def test_a_net_that_mixes_examples_scores_set_by_set():
    assert batches_of(context(mixes_examples=True), (12, 12)) == [12, 12]


def test_where_scores_are_read_they_are_those_of_a_set_alone():
    kept = {}
    assert batches_of(context(size=8), (12, 0, 3), kept=kept) == [8, 4, 0, 3]
    assert {name: [len(s) for s in kept[name]] for name in kept} == {
        "task/0": [8, 4], "task/1": [0], "task/2": [3],
    }  # fmt: skip


def test_counts_by_hand():
    """Of 4 examples one is taken for class 1; losses are ln(1 + e^(b - a)) of logits (a, b)."""
    found = score(FedAvg(), context(), Bundle(), Bundle(), test_sets(4, 0, 2), confusion=True)
    assert list(found) == [("classifier", f"task/{k}") for k in range(3)]
    losses = [math.log1p(math.exp(gap)) for gap in (-1, 3, -2)]
    for (_, name), support, correct, loss in zip(
        found, (4, 0, 2), (3, 0, 1), (sum(losses) + losses[0], 0, sum(losses[:2])), strict=True
    ):
        counts = found["classifier", name]
        assert counts.support.tolist() == [support, 0]
        assert counts.correct.tolist() == [correct, 0]
        assert counts.predicted.tolist() == [correct, support - correct]
        assert counts.confusion.tolist() == [[correct, support - correct], [0, 0]]
        assert counts.loss_sum == pytest.approx(loss, rel=1e-6)


def test_what_is_taken_for_a_class_that_is_part_of_another_counts_as_that_one():
    """Class 1 is part of class 0: all are right, whatever they are taken for, and lose nothing."""
    ctx = context()
    ctx.run = replace(ctx.run, merged=((1, 0),))
    (counts,) = score(FedAvg(), ctx, Bundle(), Bundle(), test_sets(6)).values()
    assert counts.correct.tolist() == counts.predicted.tolist() == [6, 0]
    assert counts.loss_sum == 0


def test_no_test_set_has_no_counts():
    assert score(FedAvg(), context(), Bundle(), Bundle(), {}) == {}


def test_rules_that_come_and_go_are_named():
    class Fickle(FedAvg):
        rules = ("classifier", "own")

        def predict(self, ctx, payload, state, x):
            scores = ctx.net(x)
            return {"classifier": scores} if len(x) > 100 else {"classifier": scores, "own": scores}

    line = "predict of Fickle returns the rules classifier, own, then classifier; return the same"
    with pytest.raises(ConfigError, match=line):
        score(Fickle(), context(), Bundle(), Bundle(), test_sets(12, 200))


def test_a_card_is_waited_for_once_and_joins_all_that_fits():
    """Of the processor 60 and 60 would be two batches; both devices count alike."""
    sets, here = test_sets(60, 60, 300), context()
    expected = score(FedAvg(), here, Bundle(), Bundle(), sets)
    method = Watched()
    with card() as found:
        there = context(size=256)
        there.net.to(CARD).pack()
        there.device = CARD
        moved = {name: (x.to(CARD), y.to(CARD)) for name, (x, y) in sets.items()}
        found.waits.clear()
        counts = score(method, there, Bundle(), Bundle(), moved, torch.tensor([True, False]))
    assert sum(found.waits.values()) == 1
    assert method.sizes == [120, 256, 44]
    for key, of_rule in expected.items():
        assert counts[key].correct.tolist() == of_rule.correct.tolist()
        assert counts[key].loss_sum == of_rule.loss_sum


def test_a_card_gets_more_of_small_examples():
    """Inputs here have two numbers; a net that mixes examples gives the same on both devices."""
    assert batch_size(context()) == 256
    for ctx, expected in (
        (context(), INPUT_BYTES // 8),
        (context(size=20), 20),
        (context(mixes_examples=True), 256),
    ):
        ctx.device = CARD
        assert batch_size(ctx) == expected
    large = context()
    large.device = CARD
    large.run = replace(large.run, problem=Problem((3, 224, 224), 2))
    assert batch_size(large) == 256


def test_what_a_payload_says_is_laid_out_once():
    """Per bundle and view, and not per batch."""
    ctx, made, one, other = context(), [], Bundle(), Bundle()

    def make(given, bundle):
        made.append(bundle)
        return len(made)

    assert [ctx.once(make, b) for b in (one, one, other, one)] == [1, 1, 2, 1]
    ctx.view = "global"
    assert ctx.once(make, one) == 3
