"""Runs whose uploads are reduced by another rule than the mean."""

import re
from dataclasses import dataclass, replace

import pytest
import torch

from fedmodels.config.reduction import Reduction
from fedmodels.errors import ConfigError, TooFewClients
from fedmodels.methods.fedavg import FedAvg
from fedmodels.reductions.rule import RobustRule
from fedmodels.tensors.bundle import Bundle, Problem
from fedmodels.tensors.uploads import Uploads
from fedmodels.training.contexts import ServerState
from fedmodels.training.run import RunFacts
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.reduction import reduced
from fedsrv.progress.events import EventLog
from fedtide.inprocess import InProcessCohort, run_in_process
from fedtide.testing.trial import registered, server_context, tiny_experiment
from tests.conftest import records_of
from tests.fedmodels.methods.test_conformance import experiment_for
from tests.liars import Stage

ROBUST = {"reduce": "trimmed_mean", "attackers": 1}


@pytest.mark.parametrize(
    ("method", "server"),
    [("gldp", ROBUST), ("fedproto", {"reduce": "norm_clipped"})],
)
def test_a_run_by_a_rule_differs_from_the_mean_and_repeats(method, server, digits, tmp_path):
    digests = [
        run_in_process(
            experiment_for((method, {}), schedule={"rounds": 1}, server=keys),
            digits,
            tmp_path / str(number),
        )["state_sha256"]
        for number, keys in enumerate((server, server, {}))
    ]
    assert digests[0] == digests[1] != digests[2]


@dataclass(frozen=True, kw_only=True)
class Hidden(FedAvg):
    """Averages by itself, and does not say so."""

    reduction = "each"

    def aggregate(self, ctx, state, uploads):
        trained = [u.weights for u in uploads.values()]
        mean = {k: torch.stack([w[k] for w in trained]).mean(0) for k in trained[0]}
        return replace(state, common=Bundle(mean))


def test_a_method_that_averages_by_itself_is_refused(digits, tmp_path):
    with registered(Hidden) as name:
        experiment = tiny_experiment(method=name, server={"reduce": "median"})
        with pytest.raises(ConfigError, match="hidden takes none, so no rule can take its place"):
            run_in_process(experiment, digits, tmp_path / "run")


@pytest.mark.parametrize(
    ("tables", "line"),
    [
        ({"method": "local"}, "local takes none, so no rule can take its place"),
        ({"method": "pfedgraph"}, "pfedgraph takes none, so no rule can take its place"),
        (
            {"server": {"reduce": "krum", "attackers": 1}},
            'reduce = "krum" with attackers = 1 needs 5 uploads in a round, and rounds have 3',
        ),
        (
            {"privacy": {"secure_sum": True}},
            "one by one, and [privacy] secure_sum shows the mean of a group",
        ),
        (
            {"server": {**ROBUST, "min_clients": 2}},
            'min_clients = 2 lets a round end with too few uploads: [server] reduce = "trimmed',
        ),
    ],
)
def test_what_a_rule_cannot_serve_is_refused_at_once(tables, line):
    with pytest.raises(ConfigError, match=re.escape(line)):
        tiny_experiment(**{"server": {"reduce": "median"}, **tables})


def test_a_round_with_too_few_uploads_fails_in_a_line():
    """A client without examples counts nothing, which no config tells."""
    sent = {c: Bundle({"w": torch.ones(1)}, scalars={"num_examples": float(c)}) for c in range(3)}
    uploads = Uploads(sent, FedAvg().count, "mean", rule=RobustRule(Reduction(**ROBUST)))
    ctx = server_context(RunFacts(tiny_experiment(), Problem((1, 8, 8), 10)), 0, (0, 1, 2))
    with pytest.raises(TooFewClients, match="needs 3 uploads that count, and interaction 1 has 2"):
        reduced(FedAvg(), ctx, ServerState(Bundle({"w": torch.zeros(1)})), uploads, 1)


def test_what_a_rule_does_not_reach_is_told(digits, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(EventLog, "tell", lambda log, kind, *_, **facts: told.append(facts))
    experiment = tiny_experiment(method="fedpac", schedule={"rounds": 1}, server=ROBUST)
    run_in_process(experiment, digits, tmp_path / "run")
    lines = [facts.get("line", "") for facts in told]
    assert any("does not reach all of fedpac: each client's head is mixed" in one for one in lines)


def test_rare_classes_are_in_the_record_and_told_once(digits, tmp_path, monkeypatch):
    """Of three clients, two holders or fewer of a class may all lie where one lies."""
    told = []
    monkeypatch.setattr(EventLog, "tell", lambda log, kind, *_, **facts: told.append(facts))
    server = {"reduce": "median", "attackers": 1, "rare_classes": "keep"}
    experiment = tiny_experiment(method="fedproto", schedule={"rounds": 2}, server=server)
    run_in_process(experiment, digits, tmp_path / "run")
    records = records_of(tmp_path / "run")
    assert all(record["rare_classes"]["class"] for record in records)
    lines = [facts.get("line", "") for facts in told]
    assert sum("2 clients or fewer have prototypes of classes" in line for line in lines) == 1


def test_uploads_in_the_spool_come_to_the_same_bits(digits, tmp_path):
    """Beyond ``upload_memory_mb`` a mean is taken as uploads come, and a rule waits for all."""
    rule = {"reduce": "geometric_median", "mix": "bucketing"}
    mapped = tiny_experiment(schedule={"rounds": 1}, server={**rule, "upload_memory_mb": 0})
    found = Stage(mapped, digits, tmp_path / "mapped", lambda *_: None, liars=()).run()
    plain = tiny_experiment(schedule={"rounds": 1}, server=rule)
    assert found["state_sha256"] == run_in_process(plain, digits, tmp_path / "run")["state_sha256"]


@pytest.mark.needs("relays")
@pytest.mark.parametrize("rule", [{}, ROBUST])
def test_no_relay_sums_what_a_rule_reads_one_by_one(rule, digits, tmp_path, monkeypatch):
    """A trip without a count has no groups: relays pass its uploads on whole."""
    from fedplugins.relays.grouped_intake import groups_of

    sums, send = [], InProcessCohort.send_and_receive

    def send_and_receive(cohort, trip):
        if trip.sample.kind == rpc.ORDER_KIND_TRAIN:
            sums.append(bool(groups_of(trip, dict.fromkeys(range(3), "relay"))))
        return send(cohort, trip)

    monkeypatch.setattr(InProcessCohort, "send_and_receive", send_and_receive)
    experiment = tiny_experiment(schedule={"rounds": 1}, server=rule)
    run_in_process(experiment, digits, tmp_path / "run")
    assert sums == [not rule] * 2
