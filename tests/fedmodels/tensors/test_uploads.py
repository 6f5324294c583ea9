"""What the server half of a method reads of the uploads, in memory or added up as they came."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from fedmodels.config.reduction import Reduction as Rule
from fedmodels.errors import ConfigError
from fedmodels.methods.fedavg import FedAvg
from fedmodels.reductions.rule import RobustRule
from fedmodels.tensors.aggregation_rule import MEAN, AggregationRule
from fedmodels.tensors.bundle import Bundle, Problem, Prototypes
from fedmodels.tensors.uploads import Reduction, Uploads
from fedmodels.training.contexts import START, ServerContext, ServerState
from fedmodels.training.hooks import as_uploads
from fedmodels.training.run import RunFacts
from fedsrv.engine.reduction import reduced
from tests.conftest import tiny_experiment


@dataclass(frozen=True, kw_only=True)
class Largest(FedAvg):
    """Takes the largest weights that came, and does not say that it reads them one by one."""

    def aggregate(self, ctx, state, uploads):
        values = torch.stack([u.weights["w"] for u in uploads.values()])
        return ServerState(Bundle({"w": values.max(0).values}))


@dataclass(frozen=True, kw_only=True)
class Declared(Largest):
    reduction: ClassVar[Reduction] = "each"


def sent(*values: tuple[float, float]) -> dict[int, Bundle]:
    """Uploads of one weight each, and what they count."""
    return {
        client: Bundle({"w": torch.tensor([value])}, scalars={"num_examples": count})
        for client, (value, count) in enumerate(values)
    }


def count(upload: Bundle) -> float:
    return upload.scalars["num_examples"]


def reduce(method, uploads):
    ctx = ServerContext(RunFacts(tiny_experiment(), Problem((1, 8, 8), 10)), START, (0, 1))
    before = ServerState(Bundle({"w": torch.zeros(1)}))
    return reduced(method, ctx, before, uploads, 1).state.common.weights["w"].tolist()


def test_the_mean_weighs_by_count():
    """(1 * 1 + 5 * 3) / 4 = 4."""
    assert Uploads(sent((1.0, 1.0), (5.0, 3.0)), count).mean()["w"].tolist() == [4.0]


def test_there_is_no_mean_of_what_counts_nothing():
    assert Uploads({}, count).mean() is None
    assert Uploads(sent((1.0, 0.0)), count).mean() is None


@pytest.mark.parametrize("rule", [MEAN, RobustRule(Rule(reduce="median"))])
def test_there_is_no_mean_of_weights_where_prototypes_travel_alone(rule):
    """What clients counted for is told of what came."""
    uploads = {
        c: replace(one, weights={}, prototypes={"class": Prototypes.of({0: (torch.ones(2), c)}, 2)})
        for c, one in sent((1.0, 1.0), (5.0, 3.0)).items()
    }
    found = Uploads(uploads, count, rule=rule)
    assert found.mean() is None
    found.mean_prototypes("class", 1, 2, uniform=False)
    assert found.share_of_each() == found.shares["class"]
    folded = Uploads(uploads, count, "mean", {})
    assert folded.mean() is None
    assert not folded.shares


@pytest.mark.parametrize("is_folded", [False, True])
def test_a_mean_hides_single_weights_in_memory_or_not(is_folded):
    """A method that runs below the limit on memory runs above the limit too."""
    whole = sent((1.0, 1.0), (5.0, 3.0))
    rests = {c: replace(u, weights={}) for c, u in whole.items()}
    mean = {"w": torch.tensor([4.0])}
    uploads = as_uploads(FedAvg(), whole)
    if is_folded:
        uploads = Uploads(rests, FedAvg().count, "mean", mean)
    assert reduce(FedAvg(), uploads) == [4.0]
    assert uploads[1].scalars == {"num_examples": 3.0}
    for read in (len, list, lambda weights: weights["w"]):
        with pytest.raises(ConfigError, match="declare reduction = 'each'"):
            read(uploads[0].weights)


def test_a_method_that_forgot_to_declare_is_told_at_once():
    """No client is blamed for a fault of the method."""
    values = (1.0, 1.0), (5.0, 3.0)
    with pytest.raises(ConfigError, match="reads the weights of single uploads"):
        reduce(Largest(), as_uploads(Largest(), sent(*values)))
    assert reduce(Declared(), as_uploads(Declared(), sent(*values))) == [5.0]


def test_some_of_them_have_a_mean_of_their_own():
    some = Uploads(sent((1.0, 1.0), (5.0, 3.0), (9.0, 3.0)), count, "mean").of({1, 2})
    assert list(some) == [1, 2]
    assert some.mean()["w"].tolist() == [7.0]


class Second(AggregationRule):
    """Takes what the second client sent."""

    reads_each = True

    def weights(self, sent, counts, facts):
        return dict([*sent.values()][1]), {client: float(client == 1) for client in sent}

    sets = weights

    def rows(self, sent, counts, uniform, centre, facts):
        return [*sent.values()][-1], {client: float(client == max(sent)) for client in sent}


def test_every_kind_of_mean_is_taken_by_the_rule_of_the_run():
    rows = [Prototypes.of({0: (torch.tensor([n, n]), 2)}, 2) for n in (1.0, 3.0)]
    uploads = {
        c: replace(one, prototypes={"class": p, "alp": Prototypes.by_position(p.vectors)})
        for (c, one), p in zip(sent((1.0, 1.0), (5.0, 3.0)).items(), rows, strict=True)
    }
    plain, ruled = Uploads(uploads, count), Uploads(uploads, count, rule=Second()).of({0, 1})
    for found, w, p, a in ((plain, 4.0, 2.0, 2.5), (ruled, 5.0, 3.0, 3.0)):
        assert found.mean()["w"].tolist() == [w]
        prototypes = found.mean_prototypes("class", 1, 2, uniform=True)
        assert (prototypes.vectors.tolist(), prototypes.counts.tolist()) == ([[p, p]], [4])
        assert found.mean_sets(["alp"])["alp"].vectors.tolist() == [[a, a]]
    assert plain.shares["weights"] == plain.shares["alp"] == {0: 0.25, 1: 0.75}
    assert plain.shares["class"] == {0: 0.5, 1: 0.5}
    assert ruled.shares == {key: {0: 0.0, 1: 1.0} for key in ("weights", "class", "alp")}
