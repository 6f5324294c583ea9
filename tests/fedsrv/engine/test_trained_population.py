"""Whose models are scored right after local training: the cohort's, or those of all clients."""

from itertools import count

import pytest

from fedmodels.errors import ConfigError
from fedtide.inprocess import run_in_process
from tests.conftest import records_of, tiny_experiment
from tests.fedmodels.methods.test_conformance import experiment_for
from tests.runs import Killed, ends_as, killed

METHODS = ("fedavg", "gldp", "fedmlp", "fedproto", "ditto", "pfedgraph", "creff")


def run_of(method, data, out, trained, **schedule):
    experiment = experiment_for(
        (method, {}),
        schedule={"per_round": 1, **schedule},
        evaluate={"trained": trained, "generalization": True},
    )
    summary = run_in_process(experiment, data, out)
    return summary, records_of(out)


def views_of(record):
    return {int(c): row["views"] for c, row in record["clients"].items() if "views" in row}


@pytest.mark.parametrize("method", METHODS)
def test_all_train_for_the_score_and_nothing_else_changes(method, digits, tmp_path):
    """The cohort's own scores, the state and the other figures stay; the others join the column."""
    some, of_some = run_of(method, digits, tmp_path / "cohort", "cohort")
    everybody, of_all = run_of(method, digits, tmp_path / "all", "all")
    assert everybody["state_sha256"] == some["state_sha256"]
    for one, other in zip(of_some, of_all, strict=True):
        there, then = views_of(one), views_of(other)
        cohort = one["cohort"]
        assert sorted(c for c, views in there.items() if "after_local" in views) == cohort
        whole = [0, 1, 2] if one["task"] == 1 else cohort  # a round's last interaction
        assert sorted(c for c, views in then.items() if "after_local" in views) == whole
        assert {c: then[c]["after_local"] for c in cohort} == {
            c: there[c]["after_local"] for c in cohort
        }
    last = views_of(of_all[-1])
    mean = sum(views["after_local"]["accuracy"] for views in last.values()) / 3
    assert everybody["metrics"]["a_loc_trained"] == pytest.approx(mean)
    same = {k for k in some["metrics"] if k.startswith(("a_loc_received", "a_glo", "a_sel"))}
    assert same
    assert {k: everybody["metrics"][k] for k in same} == {k: some["metrics"][k] for k in same}


def test_who_trained_for_the_score_would_have_had_that_model_in_the_cohort(digits, tmp_path):
    """With everybody in the cohort of the first round, clients have the same scores."""
    _, tried = run_of("gldp", digits, tmp_path / "all", "all", rounds=1, order="tasks_outer")
    experiment = experiment_for(
        ("gldp", {}), schedule={"rounds": 1, "order": "tasks_outer"},
        evaluate={"generalization": True},
    )  # fmt: skip
    run_in_process(experiment, digits, tmp_path / "whole")
    whole = records_of(tmp_path / "whole")
    ours, theirs = views_of(tried[0]), views_of(whole[0])
    for client in range(3):
        assert ours[client]["after_local"] == theirs[client]["after_local"], client


def test_rounds_without_a_cohort_refuse_it():
    with pytest.raises(ConfigError, match=r'trained = "all" needs rounds with a cohort'):
        tiny_experiment(
            schedule={"order": "asynchronous", "buffer": 2}, evaluate={"trained": "all"}
        )


@pytest.mark.parametrize("at", [5, 6, 8, 11])
def test_a_run_that_was_killed_ends_with_the_same_records(at, digits, tmp_path, whole_run):
    """Killed at an order: to train for the score, to train, to score, and in the next round."""
    experiment = experiment_for(
        ("gldp", {}), schedule={"per_round": 1}, evaluate={"trained": "all"}
    )
    whole, orders = whole_run(experiment, digits), count()

    def kill(order):
        if next(orders) == at:
            raise Killed

    killed(experiment, digits, tmp_path / "run", before=kill)
    ends_as(whole.summary, experiment, digits, tmp_path / "run")
    views = [[views_of(r) for r in records_of(run)] for run in (tmp_path / "run", whole.out)]
    assert views[0] == views[1]
