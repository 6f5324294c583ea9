"""One client of three lies; the run ends as if that client had said nothing."""

from dataclasses import replace

import pytest
import torch

from fedmodels.errors import RunFailed
from fedmodels.tensors.bundle import Bundle
from fedpb.v1 import coordinator_pb2 as rpc
from tests.conftest import records_of, tiny_experiment
from tests.liars import Stage, silent

TOLERANT = {"min_clients": 2}
SHORT = {"rounds": 1, "clients": 3}


def experiment_of(method="fedavg"):
    return tiny_experiment(method=method, server=TOLERANT, schedule=SHORT)


@pytest.fixture(scope="module")
def without(digits, tmp_path_factory):
    """The summary of a run in which client 2 says nothing, by method, made once."""
    made = {}

    def summary(method):
        if method not in made:
            out = tmp_path_factory.mktemp("silent") / "run"
            made[method] = Stage(experiment_of(method), digits, out, silent).run()
        return made[method]

    return summary


def told(change):
    """Return a lie that changes the report of everything."""

    def lie(client, order, answer):
        upload, report, failure = answer
        report = rpc.Report.FromString(report.SerializeToString())
        change(report, order)
        return upload, report, failure

    return lie


def sent(change):
    """Return a lie that changes the upload, and says nothing else."""

    def lie(client, order, answer):
        if order.kind != rpc.ORDER_KIND_TRAIN:
            return silent(client, order, answer)
        return change(answer[0]), *answer[1:]

    return lie


def _counts(report, order, **facts):
    zeros = [0] * 10
    given = {"view": "global", "rule": "classifier", "test_set": "task/0"}
    report.counts.add(**{**given, "support": zeros, "predicted": zeros, "correct": zeros, **facts})


def _many_rules(report, order):
    for number in range(9000):
        _counts(report, order, rule=f"rule-{number}")


REPORTS = {
    "far-away": lambda r, o: _counts(r, o, test_set="task/30000000"),
    "rules": _many_rules,
    "views": lambda r, o: r.extra.update({"views": 1.0}),
}


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_that_lies_is_as_good_as_none(name, digits, tmp_path, without):
    stage = Stage(experiment_of(), digits, tmp_path / "run", told(REPORTS[name]))
    summary = stage.run()
    assert summary["state_sha256"] == without("fedavg")["state_sha256"]
    assert summary["metrics"] == without("fedavg")["metrics"]
    assert all(r.code.name == "INVALID_ARGUMENT" for r in stage.refused)
    assert all("\n" not in r.line and "\x1b" not in r.line for r in stage.refused)
    assert (tmp_path / "run" / "rounds.jsonl").stat().st_size < 20_000
    for record in records_of(tmp_path / "run"):
        assert record["cohort"] == [0, 1]
        assert record["failed"]["2"].startswith("its upload was refused: ")


def _weights(upload, value):
    return replace(
        upload, weights={k: torch.full_like(t, value) for k, t in upload.weights.items()}
    )


def _labelled(upload, value):
    rows = upload.prototypes["class"]
    wrong = replace(rows, labels=torch.full_like(rows.labels, value))
    return replace(upload, prototypes={"class": wrong})


UPLOADS = {
    ("fedavg", "infinity"): lambda u: replace(_weights(u, 1e30), scalars={"num_examples": 1e300}),
    ("fedproto", "label"): lambda u: _labelled(u, 99),
}


@pytest.mark.parametrize("case", UPLOADS, ids="-".join)
def test_an_upload_that_lies_is_refused(case, digits, tmp_path, without):
    method, _ = case
    stage = Stage(experiment_of(method), digits, tmp_path / "run", sent(UPLOADS[case]))
    summary = stage.run()
    assert summary["state_sha256"] == without(method)["state_sha256"]
    assert summary["metrics"] == without(method)["metrics"]
    assert {r.code.name for r in stage.refused} == {"INVALID_ARGUMENT"}
    for record in records_of(tmp_path / "run"):
        assert record["failed"]["2"].startswith("its upload was refused: ")


def test_below_min_clients_the_run_names_the_liar_and_can_go_on(digits, tmp_path):
    experiment = tiny_experiment(schedule=SHORT)
    lie = sent(UPLOADS["fedavg", "infinity"])
    with pytest.raises(RunFailed, match=r"client 2 failed in round 1 .*holds 1e\+30"):
        Stage(experiment, digits, tmp_path / "run", lie).run()
    resumed = Stage(experiment, digits, tmp_path / "run", lie, liars=()).run(resume=True)
    honest = Stage(experiment, digits, tmp_path / "honest", lie, liars=()).run()
    assert resumed["state_sha256"] == honest["state_sha256"]


def test_every_client_is_needed_for_scores_and_at_the_end_where_cohorts_are_smaller(
    digits, tmp_path
):
    """Unless ``min_clients`` says otherwise, as for an interaction."""
    schedule = {**SHORT, "per_round": 2}

    def fails_to_score(client, order, answer):
        if order.kind == rpc.ORDER_KIND_TRAIN:
            return answer
        return Bundle(), rpc.Report(), "no memory"

    strict = tiny_experiment(schedule=schedule)
    with pytest.raises(RunFailed, match=r"client 2 failed .*no memory"):
        Stage(strict, digits, tmp_path / "strict", fails_to_score).run()
    for rounds, missing in ((1, None), (3, ["2"])):  # in the first one it does not train
        longer = {**schedule, "rounds": rounds}
        tolerant = tiny_experiment(schedule=longer, server=TOLERANT)
        summary = Stage(tolerant, digits, tmp_path / f"{rounds} rounds", fails_to_score).run()
        assert summary.get("clients_missing") == missing


def test_what_a_client_says_of_its_failure_is_one_short_line(digits, tmp_path, without):
    def lie(client, order, answer):
        return Bundle(), rpc.Report(), "\x1b[2Jgone\nerror: all is lost" + "x" * 100_000

    summary = Stage(experiment_of(), digits, tmp_path / "run", lie).run()
    assert summary["state_sha256"] == without("fedavg")["state_sha256"]
    for record in records_of(tmp_path / "run"):
        assert record["failed"]["2"].startswith("\\x1b[2Jgone\\nerror: all is lost")
        assert len(record["failed"]["2"]) < 1100
