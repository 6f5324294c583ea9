"""Asynchronous rounds in one process: who trains when, what counts, and how bits come back."""

import json
import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from fedcli.data.store.commands import run_partition
from fedmodels.errors import ConfigError
from fedmodels.tensors.archive import load_named
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.commits import Syncer
from fedsrv.state.store import Store
from fedtide.inprocess import InProcessCohort, launch_in_process, run_in_process
from tests.conftest import arrivals_of, records_of, tiny_experiment
from tests.runs import Killed, dies, ends_as, killed


def asynchronous(method="fedavg", rounds=3, buffer=1, tables=None, **schedule):
    """Three clients, two tasks: six interactions."""
    schedule = {"order": "asynchronous", "rounds": rounds, "buffer": buffer, **schedule}
    return tiny_experiment(method=method, schedule=schedule, **(tables or {}))


def dies_at(interaction, client):
    return dies(kind=rpc.ORDER_KIND_TRAIN, interaction=interaction, client_id=str(client))


# --- who trains when ------------------------------------------------------------------------------


def test_clients_begin_when_a_round_ends(digits, tmp_path):
    """All three begin in round 0; in every later round the one that was counted begins again."""
    run_in_process(asynchronous(), digits, tmp_path / "run")
    records = records_of(tmp_path / "run")
    assert [r["arrivals"] for r in records] == [
        [[0, 0]], [[1, 0]], [[2, 0]], [[0, 1]], [[1, 2]], [[2, 3]]
    ]  # fmt: skip
    assert [r["under_way"] for r in records[:3]] == [
        [[1, 0], [2, 0]], [[2, 0], [0, 1]], [[0, 1], [1, 2]]
    ]  # fmt: skip
    assert [r["metrics"]["staleness"] for r in records] == [0, 1, 2, 2, 2, 2]
    assert [r["task"] for r in records] == [0, 0, 0, 1, 1, 1]
    assert [r["round"] for r in records] == [*range(6)]


def test_no_more_train_at_once_than_may(digits, tmp_path):
    run_in_process(asynchronous(per_round=2), digits, tmp_path / "run")
    records = records_of(tmp_path / "run")
    assert {len(r["arrivals"]) + len(r["under_way"]) for r in records} == {2}
    assert {client for r in records for client in r["cohort"]} == {0, 1, 2}


@pytest.mark.parametrize("size", [2, 3])
def test_a_buffer_of_all_that_train_is_the_synchronous_run(size, digits, tmp_path):
    """Nothing is stale then: the same cohorts, the same bits."""
    plain = tiny_experiment(schedule={"order": "tasks_outer", "rounds": 3, "per_round": size})
    expected = run_in_process(plain, digits, tmp_path / "plain")
    found = run_in_process(asynchronous(buffer=size, per_round=size), digits, tmp_path / "run")
    assert found["state_sha256"] == expected["state_sha256"]
    assert records_of(tmp_path / "run")[-1]["metrics"]["staleness"] == 0


def test_a_server_half_may_go_on_from_the_mean(digits, tmp_path):
    """Server momentum: with nothing stale, the synchronous run's bits."""
    momentum = str(Path(__file__).parents[3] / "examples" / "extend" / "fedavgm.py:FedAvgM")
    plain = tiny_experiment(method=momentum, schedule={"order": "tasks_outer", "rounds": 2})
    expected = run_in_process(plain, digits, tmp_path / "plain")
    found = run_in_process(asynchronous(momentum, rounds=2, buffer=3), digits, tmp_path / "run")
    assert found["state_sha256"] == expected["state_sha256"]
    run_in_process(asynchronous(momentum, rounds=2, buffer=1), digits, tmp_path / "stale")


def test_pooled_training_comes_to_the_same_in_both_orders(tmp_path):
    """Client 0 trains alone, so a round ends with its upload, whatever the buffer.

    A sweep over asynchronous methods may have Centralized as a row.
    """
    plain = tiny_experiment(method="centralized", schedule={"order": "tasks_outer", "rounds": 2})
    launch_in_process(plain, tmp_path / "plain")
    launch_in_process(asynchronous("centralized", rounds=2, buffer=3), tmp_path / "run")
    assert arrivals_of(tmp_path / "run") == [[[0, 0]], [[0, 1]], [[0, 2]], [[0, 3]]]
    expected, found = (
        json.loads((tmp_path / name / "summary.json").read_text()) for name in ("plain", "run")
    )
    assert found["state_sha256"] == expected["state_sha256"]


def test_the_first_stale_upload_by_hand(digits, tmp_path):
    """w_2 = w_1 + (u_1 - w_0) / sqrt(2): client 1's upload of round 0 is counted in round 1.

    With a = 0 it counts as a whole. So the moves of the two runs differ by that factor.
    """
    moved = []
    for exponent in (0.5, 0.0):
        out = tmp_path / f"run{exponent}"
        tables = {"server": {"max_rollback": 9}}
        run = asynchronous(staleness_exponent=exponent, tables=tables)
        run_in_process(run, digits, out)
        first, second = (
            load_named(out / "server" / f"state-{n:08d}.safetensors")[0]["common"].weights
            for n in (0, 1)
        )
        moved.append({key: second[key].double() - first[key].double() for key in second})
    shrunk, whole = moved
    assert any(tensor.abs().max() > 1e-3 for tensor in whole.values())
    for key, tensor in shrunk.items():
        torch.testing.assert_close(tensor, whole[key] * 0.5**0.5, atol=1e-6, rtol=1e-4)


def test_idle_clients_alone_score_before_the_end(digits, tmp_path):
    run_in_process(asynchronous(rounds=2), digits, tmp_path / "run")
    scored = [
        [int(c) for c, row in r["clients"].items() if "global" in row.get("views", {})]
        for r in records_of(tmp_path / "run")
    ]
    assert scored == [[0], [1], [2], [0, 1, 2]]


# --- the way back to the bits ---------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedntd", "fedrep", "ditto", "moon"])
def test_a_run_that_follows_recorded_arrivals_comes_to_the_same_bits(method, digits, tmp_path):
    first = tmp_path / "first"
    shuffled = {"arrival": random.Random(1)}
    expected = run_in_process(asynchronous(method), digits, first, **shuffled)
    other = run_in_process(
        asynchronous(method), digits, tmp_path / "other", arrival=random.Random(5)
    )
    assert arrivals_of(tmp_path / "other") != arrivals_of(first)
    assert other["state_sha256"] != expected["state_sha256"]
    follows = asynchronous(method, arrivals=str(first))
    again = run_in_process(follows, digits, tmp_path / "again", arrival=random.Random(5))
    assert again["state_sha256"] == expected["state_sha256"]
    assert arrivals_of(tmp_path / "again") == arrivals_of(first)
    scores = [[r["metrics"] for r in records_of(tmp_path / name)] for name in ("first", "again")]
    assert scores[0] == scores[1]


@pytest.mark.parametrize("method", ["fedavg", "apfl"])
@pytest.mark.parametrize("at", [(1, 0), (2, 1), (3, 2)])
def test_a_killed_run_goes_on_with_the_orders_that_were_under_way(
    method, at, digits, tmp_path, whole_run
):
    """Each of these orders is counted two interactions after it was given."""
    run, out, orders = asynchronous(method), tmp_path / "run", []
    whole = whole_run(run, digits)
    killed(run, digits, out, before=dies_at(*at))
    ends_as(whole.summary, run, digits, out, before=orders.append)
    assert arrivals_of(out) == arrivals_of(whole.out)
    trained = [(o.interaction, int(o.client_id)) for o in orders if o.kind == 1]
    assert trained[0] == at
    assert all(o.committed < o.interaction for o in orders if o.kind == 1)


def test_what_was_undone_is_replayed_as_it_was_recorded(digits, tmp_path, monkeypatch):
    """The first time the newest order is answered first, the second time the oldest one."""
    out, take = tmp_path / "run", InProcessCohort.take

    def newest_first(cohort, flush):
        client, trip = [*cohort._lasting.items()][-1]
        return take(cohort, replace(flush, wanted={client: trip.sample.interaction}))

    with monkeypatch.context() as patch:
        patch.setattr(InProcessCohort, "take", newest_first)
        expected = run_in_process(asynchronous(), digits, out)
    before = arrivals_of(out)
    assert before[4:] == [[[2, 4]], [[2, 5]]]
    for number in (4, 5):
        (out / "server" / f"state-{number:08d}.safetensors").write_bytes(b"damaged")
    ends_as(expected, asynchronous(), digits, out)
    assert arrivals_of(out) == before


def test_a_compact_upload_is_added_to_the_model_it_began_with(digits, tmp_path, whole_run):
    """The server adds it to the weights that its client got; what it left out is private state."""
    tables = {"compression": {"up": "int8"}}
    run, out = asynchronous(tables=tables), tmp_path / "run"
    expected = run_in_process(run, digits, tmp_path / "whole")
    exact = whole_run(asynchronous(), digits).summary
    assert expected["metrics"]["loss"] == pytest.approx(exact["metrics"]["loss"], abs=0.05)
    killed(run, digits, out, before=dies_at(3, 2))
    ends_as(expected, run, digits, out)


def record_arrivals(run, order):
    """Change which orders the records of a run say were counted, one in each interaction."""
    under_way, lines = {0: 0, 1: 0, 2: 0}, []
    for record, (client, begun) in zip(records_of(run), order, strict=True):
        assert under_way.pop(client) == begun
        lines.append(record | {"arrivals": [(client, begun)], "under_way": [*under_way.items()]})
        under_way[client] = record["interaction"] + 1
    (run / "rounds.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))


LATE = [(0, 0), (1, 0), (0, 1), (0, 3), (0, 4), (0, 5), (0, 6), (1, 2), (1, 8), (0, 7)]
"""Client 1's order of interaction 2 is counted in 7, client 2's of 0 never; client 0 is quick."""


@pytest.fixture
def late(digits, tmp_path):
    """Return a maker of runs with these arrivals that go back by one interaction at most."""
    run_in_process(asynchronous(rounds=5), digits, tmp_path / "first")
    record_arrivals(tmp_path / "first", LATE)
    follows = {"rounds": 5, "arrivals": str(tmp_path / "first")}
    return lambda method: asynchronous(method, **follows, tables={"server": {"max_rollback": 1}})


def sync_at_once(syncer, interaction):
    """Sync a commit before the run goes on; the thread that does it lags behind on a slow disk."""
    if interaction >= 0:
        syncer._sync(interaction)
    syncer._durable = interaction


def test_a_state_stays_as_long_as_an_order_of_it_is_under_way(late, digits, tmp_path, monkeypatch):
    """Client 1's order of interaction 2 began with the state after 1, which others have left."""
    monkeypatch.setattr(Syncer, "want", sync_at_once)
    expected, out = run_in_process(late("fedavg"), digits, tmp_path / "whole"), tmp_path / "run"
    killed(late("fedavg"), digits, out, before=dies_at(2, 1))
    kept = {int(f.stem[-8:]) for f in (out / "server").glob("state-*")}
    assert kept == {1, 5, 6}
    ends_as(expected, late("fedavg"), digits, out)


def test_clients_keep_what_a_roll_back_may_ask_for(late, digits, tmp_path, monkeypatch):
    """At commit 6 client 1's last state is that of order 0; that of order 2 is counted in 7."""
    expected, out = run_in_process(late("fedper"), digits, tmp_path / "whole"), tmp_path / "run"
    commit = Store.commit

    def dying(store, record, *rest):
        if record["interaction"] == 8:  # client 1 has had order 8, and forgot what it may
            raise Killed
        commit(store, record, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "commit", dying)
        killed(late("fedper"), digits, out)
    (out / "server" / "state-00000007.safetensors").write_bytes(b"damaged")
    with closing(Store(out, late("fedper"), resume=True)) as store:
        assert store.committed == 6
        assert store.history().last_trained(6) == {0: 6, 1: 0}
    ends_as(expected, late("fedper"), digits, out)


def test_a_commit_counts_as_lost_without_the_state_of_an_order_under_way(digits, tmp_path):
    out, tables = tmp_path / "run", {"server": {"max_rollback": 9}}
    expected = run_in_process(asynchronous(tables=tables), digits, out)
    (out / "server" / "state-00000003.safetensors").unlink()  # orders of interaction 4 begin there
    with closing(Store(out, asynchronous(tables=tables), resume=True)) as store:
        assert store.committed == 2
        assert not store.has_state(5)
    ends_as(expected, asynchronous(tables=tables), digits, out)


def test_an_asynchronous_run_may_grow(digits, tmp_path):
    one_task = {"scenario": {"kind": "iid", "tasks": 1}}
    made, longer = asynchronous(tables=one_task), asynchronous(rounds=5, tables=one_task)
    run_partition(made.data, made.scenario, 3, made.seed, tmp_path / "data", Console(quiet=True))
    expected = run_in_process(longer, tmp_path / "data", tmp_path / "whole")
    run_in_process(made, tmp_path / "data", tmp_path / "run")
    again = run_in_process(longer, tmp_path / "data", tmp_path / "run", resume=True)
    assert again["state_sha256"] == expected["state_sha256"]


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("fedmlp", "its server half reads single uploads"),
        ("fedproto", "other tensors than weights of the net are shared"),
        ("fedem", "other tensors than weights of the net are shared"),
        ("local", "clients do not send all the weights that they receive"),
        ("mfcl", "its server sends parts to single clients"),
    ],
)
def test_methods_that_do_more_than_average_are_refused(method, why, digits, tmp_path):
    with pytest.raises(ConfigError, match=why) as caught:
        run_in_process(asynchronous(method), digits, tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert method in str(caught.value)


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ({"order": "asynchronous"}, "needs buffer"),
        ({"order": "asynchronous", "buffer": 4}, "buffer = 4 exceeds the 3 that train at once"),
        ({"order": "asynchronous", "buffer": 3, "per_round": 2}, "exceeds the 2"),
        ({"buffer": 2}, 'buffer belongs to order = "asynchronous"'),
        ({"staleness_exponent": 1.0}, 'staleness_exponent belongs to order = "asynchronous"'),
        ({"arrivals": "run"}, 'arrivals belongs to order = "asynchronous"'),
        ({"order": "asynchronous", "buffer": 1, "staleness_exponent": -1.0}, "greater than"),
    ],
)
def test_configs_that_make_no_sense_are_refused(schedule, said):
    with pytest.raises(ConfigError, match=said):
        tiny_experiment(schedule=schedule)
