"""No upload ends a run while it is reduced, and no infinite state is committed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from fedmodels.errors import ConfigError, RunFailed
from fedmodels.methods.fedavg import FedAvg
from fedmodels.tensors.bundle import Bundle, Problem
from fedmodels.tensors.uploads import Reduction, Uploads
from fedmodels.training.contexts import START, Position, ServerContext, ServerState
from fedmodels.training.hooks import as_uploads
from fedmodels.training.run import RunFacts
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.reduction import reduced
from tests.conftest import records_of, tiny_experiment
from tests.liars import Stage, silent


@dataclass(frozen=True, kw_only=True)
class Fragile(FedAvg):
    """Raises, or answers with infinities, for weights that say so."""

    reduction: ClassVar[Reduction] = "each"

    def finish(self, ctx, state, uploads):
        values = [float(u.weights["w"][0]) for u in uploads.values()]
        if 99.0 in values:
            [0][99]
        if 77.0 in values:
            raise ConfigError("the config is wrong, whoever answers")
        if 55.0 in values:
            ctx.series["s"] = [[1.0, math.inf]]
        if 33.0 in values and 44.0 in values:
            raise ArithmeticError("not both\nof them")
        return state, {"sum": sum(values)}


def reduce(values, needed=1, folded=None):
    run = RunFacts(tiny_experiment(), Problem((1, 8, 8), 10))
    ctx = ServerContext(run, Position(4, 2, 0), tuple(range(len(values))))
    uploads = {
        c: Bundle({"w": torch.full((2,), value)}, scalars={"num_examples": count})
        for c, (value, count) in enumerate(values)
    }
    before = ServerState(Bundle({"w": torch.zeros(2)}))
    method = Fragile()
    return reduced(
        method, ctx, before, Uploads(uploads, method.count, method.reduction, folded), needed
    )


def mean_of(found):
    return found.state.common.weights["w"].tolist()


def test_nobody_is_left_out_where_all_is_well():
    found = reduce([(1.0, 1.0), (3.0, 1.0)])
    assert mean_of(found) == [2, 2]
    assert found.metrics == {"sum": 4.0}
    assert found.left_out == {}


@pytest.mark.parametrize(
    ("bad", "line"),
    [
        ((99.0, 1.0), "IndexError: list index out of range"),
        ((55.0, 1.0), "a series of the record would hold NaN or infinite values"),
        ((1e30, 1e300), "in the state that would follow, common: tensor 'weights/w' holds NaN"),
    ],
)
def test_who_spoils_it_is_left_out(bad, line):
    found = reduce([(1.0, 1.0), bad, (3.0, 1.0)], needed=2)
    assert mean_of(found) == [2, 2]
    assert found.metrics == {"sum": 4.0}
    assert found.series == {}
    assert found.left_out.keys() == {1}
    assert line in found.left_out[1]


def test_two_that_do_not_go_together_lose_the_first():
    found = reduce([(1.0, 1.0), (33.0, 1.0), (44.0, 1.0)])
    assert found.metrics == {"sum": 45.0}
    reason = "the uploads of all clients cannot be reduced together with this one"
    assert found.left_out == {1: reason}


def test_below_what_is_needed_the_run_fails_with_a_line():
    with pytest.raises(RunFailed) as caught:
        reduce([(99.0, 1.0), (99.0, 1.0), (1.0, 1.0)], needed=2)
    line = str(caught.value)
    assert line.startswith("client 0 failed in round 3 (reduction): method fedavg: finish failed (")
    assert "IndexError: list index out of range (1 more" in line
    with pytest.raises(RunFailed, match=r"list index out of range") as caught:
        reduce([(99.0, 1.0), (1.0, 1.0)], needed=2)
    assert "more failed" not in str(caught.value)


def test_what_no_single_client_is_behind():
    values = [(33.0, 1.0), (44.0, 1.0), (33.0, 1.0), (44.0, 1.0)]
    with pytest.raises(RunFailed, match=r"no single client's fault: .*ArithmeticError: not both"):
        reduce(values)
    with pytest.raises(RunFailed, match="interaction 5 cannot be aggregated"):
        reduce([(99.0, 1.0)], folded={"w": torch.zeros(2)})  # added up: nobody can be taken out


def test_what_fails_for_every_client_alike_is_the_methods_fault():
    line = r"no single client's fault: .*IndexError: list index out of range"
    with pytest.raises(RunFailed, match=line):
        reduce([(99.0, 1.0), (99.0, 1.0)])


def test_a_wrong_config_is_nobodys_fault():
    with pytest.raises(ConfigError):
        reduce([(77.0, 1.0), (1.0, 1.0)])


def test_the_run_goes_on_without_whom_no_check_caught(digits, tmp_path, monkeypatch):
    """The last line of defence: whatever a method's own check lets through."""
    experiment = tiny_experiment(server={"min_clients": 2}, schedule={"rounds": 1, "clients": 3})

    def lie(client, order, answer):
        if order.kind != rpc.ORDER_KIND_TRAIN:
            return silent(client, order, answer)
        weights = {k: torch.full_like(t, 1e30) for k, t in answer[0].weights.items()}
        upload = replace(answer[0], weights=weights, scalars={"num_examples": 1e300})
        return upload, rpc.Report(), ""

    quiet = Stage(experiment, digits, tmp_path / "quiet", silent).run()
    monkeypatch.setattr(FedAvg, "check_upload", lambda *_: None)
    monkeypatch.setattr("fedsrv.parts.odd_uploads.far_out", lambda *_: {})
    found = Stage(experiment, digits, tmp_path / "run", lie).run()
    assert found["state_sha256"] == quiet["state_sha256"]
    for record in records_of(tmp_path / "run"):
        assert record["cohort"] == [0, 1]
        assert record["failed"]["2"].startswith("in the state that would follow, common: tensor")


@dataclass(frozen=True, kw_only=True)
class Looking(FedAvg):
    """Reports what the first weight was before and is after the mean."""

    def finish(self, ctx, state, uploads):
        before, after = (s.common.weights["w"][0] for s in (ctx.before, state))
        return state, {"before": float(before), "after": float(after)}


def test_finish_sees_the_state_before():
    run = RunFacts(tiny_experiment(), Problem((1, 8, 8), 10))
    method, ctx = Looking(), ServerContext(run, START, (0, 1))
    sent = {c: Bundle({"w": torch.ones(1)}, scalars={"num_examples": 1.0}) for c in (0, 1)}
    before = ServerState(Bundle({"w": torch.zeros(1)}))
    found = reduced(method, ctx, before, as_uploads(method, sent), 2)
    assert found.metrics == {"before": 0.0, "after": 1.0}
