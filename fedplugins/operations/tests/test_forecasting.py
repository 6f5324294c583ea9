"""What a run will take: bytes by counts, and time by how a trial's work grows."""

from __future__ import annotations

import itertools
import json
import runpy
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fedcli.cli import app
from fedmodels.errors import DataError, FedtideError
from fedmodels.methods import make
from fedmodels.training.contexts import START, ServerContext
from fedplugins.operations import forecasting
from fedplugins.operations.forecasting import Forecast, Work, forecast
from fedsrv.progress.events import Event
from fedtide.inprocess import run_in_process
from tests.conftest import tiny_experiment

CPU = torch.device("cpu")
LESS = {"method": {"name": "pfedgrp", "generator_epochs": 90}, "training": {"local_epochs": 3}}


@pytest.mark.parametrize(("method", "is_exact"), [("fedavg", True), ("fedproto", False)])
def test_what_clients_move_is_foretold_to_the_byte(digits, tmp_path, method, is_exact):
    """Prototypes of round 1 are few, and later ones not more than the specification holds."""
    events = list[Event]()
    experiment = tiny_experiment(method={"name": method}, schedule={"rounds": 2})
    run_in_process(experiment, digits, tmp_path / "run", hear=events.append)
    (said,) = [event.detail for event in events if event.kind == "forecast"]
    rows = [*map(json.loads, (tmp_path / "run" / "rounds.jsonl").read_text().splitlines())]
    moved = sum(row["bytes"]["down"] + row["bytes"]["up"] for row in rows)
    least, most = said["all"]
    assert (least == moved == most) if is_exact else (least < moved <= most)
    assert said["interactions"] == len(rows)
    stored = sum(file.stat().st_size for file in (tmp_path / "run" / "server").iterdir())
    assert stored <= said["server_disk"][1]
    if is_exact:  # a run that goes on is not foretold again
        longer = tiny_experiment(method={"name": method}, schedule={"rounds": 3})
        run_in_process(longer, digits, tmp_path / "run", resume=True, hear=events.append)
        assert [event.kind for event in events].count("forecast") == 1
        assert [event.kind for event in events].count("finished") == 2


def test_disks_of_clients_are_those_of_their_nets(digits, tmp_path):
    """By hand: a state of each net, and three models; by two states with one roll-back."""
    events = list[Event]()
    net = {"name": "mlp", "hidden": [16], "by_client": [{"name": "mlp", "hidden": [8, 16]}]}
    experiment = tiny_experiment(
        method="local", net=net, server={"max_rollback": 1}, schedule={"rounds": 1}
    )
    run_in_process(experiment, digits, tmp_path / "run", hear=events.append)
    (said,) = [event.detail for event in events if event.kind == "forecast"]
    one = 64 * 16 + 16 + 16 * 10 + 10
    two = 64 * 8 + 8 + 8 * 16 + 16 + 16 * 10 + 10
    assert said["client_disk"] == [5 * 4 * min(one, two), 5 * 4 * max(one, two)]


def test_a_trial_changes_neither_the_data_nor_what_is_drawn(digits, tmp_path, whole_run):
    experiment, data = tiny_experiment(), {f: f.stat().st_mtime_ns for f in digits.rglob("*")}
    torch.manual_seed(7)
    before = torch.get_rng_state()
    found = forecast(experiment, digits, CPU)
    assert torch.equal(torch.get_rng_state(), before)
    assert {f: f.stat().st_mtime_ns for f in digits.rglob("*")} == data
    assert found.interactions == 2 * experiment.schedule.rounds
    assert found.interaction > found.client > 0
    again = run_in_process(experiment, digits, tmp_path / "run")
    assert again["state_sha256"] == whole_run(experiment, digits).summary["state_sha256"]


def test_code_that_cannot_tell_what_clients_hold_ends_no_run(digits, tmp_path, monkeypatch):
    """A class of one's own may read in ``init_client`` what only a site has."""

    def nowhere(*_):
        raise FileNotFoundError("/site/only")

    monkeypatch.setattr("fedsrv.engine.forecast.init_client", nowhere)
    events = list[Event]()
    held = tiny_experiment(method={"name": "fedrep"}, schedule={"rounds": 1})
    run_in_process(held, digits, tmp_path / "run", hear=events.append)
    (said,) = [event.detail for event in events if event.kind == "forecast"]
    assert said["client_disk"] == []
    assert said["line"].endswith(" at the coordinator")
    assert "finished" in [event.kind for event in events]


def test_an_end_that_a_finalizer_swallows_comes_again(monkeypatch):
    monkeypatch.setattr(forecasting, "AGAIN", 0.02)
    swallowed = list[int]()

    def works():
        while True:
            try:
                while True:
                    pass
            except forecasting._TooLong:
                if len(swallowed) == 2:
                    raise
                swallowed.append(1)

    with pytest.raises(forecasting._TooLong), forecasting._within(0.02):
        works()


def test_a_trial_that_waits_for_ever_ends(digits, monkeypatch):
    monkeypatch.setattr(forecasting, "CLOCK", 0.05)
    monkeypatch.setattr(forecasting._Trial, "_tried", lambda *_: threading.Event().wait())
    with pytest.raises(FedtideError, match=r"^a trial takes longer than "):
        forecast(tiny_experiment(), digits, CPU)


def test_a_trial_has_the_threads_of_a_client(digits, monkeypatch):
    """With more of them than the run has, they waited for one another, and a busy machine made a
    forecast many times too long."""
    seen, before = list[int](), torch.get_num_threads()
    monkeypatch.setattr(
        forecasting._Trial, "forecast", lambda *_: seen.append(torch.get_num_threads())
    )
    for threads in (1, 3):
        forecast(tiny_experiment(training={"threads": threads}), digits, CPU)
    assert seen == [1, 3]
    assert torch.get_num_threads() == before


def test_clients_without_tasks_are_not_tried(digits, tmp_path):
    """As in an open run, whose clients may begin with nothing."""
    data = tmp_path / "data"
    shutil.copytree(digits, data)
    files = [data / str(client) / "client.json" for client in range(3)]
    open_run = tiny_experiment(schedule={"order": "tasks_outer", "open": True})
    for file in files[:2]:
        file.write_text(json.dumps({**json.loads(file.read_text()), "tasks": []}))
    assert forecast(open_run, data, CPU).client > 0
    files[2].write_text(json.dumps({**json.loads(files[2].read_text()), "tasks": []}))
    with pytest.raises(DataError, match="holds no client's data"):
        forecast(open_run, data, CPU)


def test_what_is_too_long_follows_from_how_it_grows(digits, tmp_path, monkeypatch):
    """A training of 1 s, 0.5 s for each further epoch and 0.2 s for each of a generator.

    Whole it takes 1 + 2 * 0.5 + 89 * 0.2 = 19.8 s, of which generators are 0.9.
    """
    tried = list[dict[tuple[str, str], int]]()

    def work(trial, lengths, within_s=0.0):
        if not lengths:
            raise forecasting._TooLong
        tried.append(dict(lengths))
        epochs, generators = (
            lengths["training", "local_epochs"],
            lengths["method", "generator_epochs"],
        )
        trial.moved = 0
        return Work(1 + 0.5 * (epochs - 1) + 0.2 * (generators - 1), 0.25)

    monkeypatch.setattr(forecasting._Trial, "_tried", work)
    monkeypatch.setattr(forecasting._Trial, "_scores", lambda trial: 0.0)
    found = forecast(tiny_experiment(**LESS), digits, CPU, at_once=1)
    trial = forecasting._Trial(tiny_experiment(**LESS), digits, CPU, tmp_path, 1)
    scale = trial.mean / trial.examples[trial.client][0]
    assert found.client == pytest.approx(19.8 * scale)
    assert next(iter(found.shares)) == "[method] generator_epochs = 90"
    assert found.shares["[method] generator_epochs = 90"] == pytest.approx(17.8 / 20.05)
    costly = ("training", "local_epochs"), ("method", "generator_epochs")
    assert max(lengths[key] for lengths in tried for key in costly) == 4


def test_where_lengths_add_little_the_whole_is_tried(digits, monkeypatch):
    """1 s with all lengths at 1, 1.5 s as it is."""

    def work(trial, lengths, within_s=0.0):
        trial.moved = 0
        if not lengths and within_s < 1.5:
            raise forecasting._TooLong
        return Work(1.0 if lengths else 1.5, 0.0)

    monkeypatch.setattr(forecasting._Trial, "_tried", work)
    monkeypatch.setattr(forecasting._Trial, "_scores", lambda trial: 0.0)
    found = forecast(tiny_experiment(**LESS), digits, CPU, at_once=1)
    assert found.client == pytest.approx(1.5, rel=0.2), "clients differ in their examples"
    assert found.shares == {}


def test_a_long_run_is_told_what_makes_it_shorter():
    short = Forecast(2.0, 0.5, 30, 10**8)
    assert [*short.lines()] == [
        "an interaction takes about 2 s on this machine, of which a client trains 0.5 s; all 30 "
        "take about 1 min 0 s; a client takes 100 MB of memory"
    ]
    shares = {"[method] generator_epochs = 6000": 0.97}
    long = Forecast(1200.0, 550.0, 100, 10**8, shares=shares, without=("[privacy]",))
    first, second = long.lines()
    assert "all 100 take about 33 h 20 min, without [privacy];" in first
    assert second.endswith(": [method] generator_epochs = 6000 (97%), [schedule] rounds")
    open_run = Forecast(1200.0, 550.0, 0, 10**8, least=True)
    assert "takes more than 20 min 0 s" in next(open_run.lines())
    assert "all " not in next(open_run.lines())


@pytest.mark.parametrize("trust", ["certificates", "coordinator"])
def test_masks_of_a_secure_sum_are_foretold_without_peers_and_certificates(
    digits, tmp_path, caplog, trust
):
    """Each look at the clock is a second later: 1 s a mask, 1 s a key. By hand, for a group of 3:
    3 masks and 2 keys with each of 2 peers at a client, and 3 masks at the coordinator."""
    privacy = {"announce": "rounded", "secure_sum": {"trust": trust}}
    masked = tiny_experiment(privacy=privacy, schedule={"clients": 3})
    assert forecast(masked, digits, CPU).without == ()
    assert not caplog.records, "that nobody else is here is no error"
    trial = forecasting._Trial(masked, digits, CPU, tmp_path, 1)
    assert trial.experiment.privacy.announce == "rounded"
    trial._tried({})
    trial.clock = itertools.count().__next__
    assert trial._masks() == Work(3 + 2 * 2, 3)
    assert trial._more_trips == (3 if trust == "certificates" else 2)


def test_masks_of_several_groups_are_foretold_by_the_largest(digits, tmp_path):
    """Seven clients in two groups, of 4 and 3: by hand, 4 masks and 2 keys with each of 3 peers at
    a client, and the own masks of all seven at the coordinator."""
    rules = {"trust": "coordinator", "groups": 2}
    masked = tiny_experiment(privacy={"secure_sum": rules}, schedule={"clients": 7})
    trial = forecasting._Trial(masked, digits, CPU, tmp_path, 1)
    trial._tried({})
    trial.clock = itertools.count().__next__
    assert trial._masks() == Work(4 + 2 * 3, 7)
    assert forecast(masked, digits, CPU).without == ()


def test_noise_that_needs_a_secure_sum_is_left_out_and_named(digits):
    noise = {"level": "client", "where": "clients", "noise_multiplier": 1.0, "delta": 1e-5}
    noisy = tiny_experiment(
        privacy={**noise, "secure_sum": {"trust": "coordinator"}}, schedule={"clients": 3}
    )
    assert set(forecast(noisy, digits, CPU).without) <= {"[privacy]"}


HISTORIES = {
    "feddrift": {"method": {"name": "feddrift"}},
    "accumulated": {"method": "fedavg", "scenario": {"training_data": "accumulated"}},
    "fedavg": {"method": "fedavg"},
}


@pytest.mark.parametrize("name", HISTORIES)
def test_the_rows_of_a_forecast_are_those_that_a_run_trains_on(digits, tmp_path, name):
    """In each task, and not in the first one alone: the records say what the uploads count."""
    experiment = tiny_experiment(**HISTORIES[name], schedule={"rounds": 1})
    trial = forecasting._Trial(experiment, digits, CPU, tmp_path / "trial", 1)
    run_in_process(experiment, digits, tmp_path / "run")
    rows = map(json.loads, (tmp_path / "run" / "rounds.jsonl").read_text().splitlines())
    trained = {int(c): [] for c in range(experiment.schedule.clients)}
    for row in rows:
        for client, facts in row["clients"].items():
            trained[int(client)].append(sum(n for _, n in facts["trained"]) if "trained" in facts
                                        else facts["num_examples"])  # fmt: skip
    assert trial.examples == trained


def test_a_memory_of_fewer_examples_than_came_before_is_what_a_training_takes(digits, tmp_path):
    """GLFC reads its history, and trains on the open task and on no more exemplars than that."""
    whole, few = (
        forecasting._Trial(
            tiny_experiment(method={"name": "glfc", "memory": n}), digits, CPU, tmp_path / str(n), 1
        )
        for n in (2000, 10)
    )
    now = {c: [first, both - first] for c, (first, both) in whole.examples.items()}
    assert few.examples == {c: [first, 10 + second] for c, (first, second) in now.items()}


def test_the_command_deals_data_out_or_says_what_lacks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "config.toml"
    import tomli_w

    config.write_text(tomli_w.dumps(tiny_experiment().to_dict()))
    done = CliRunner().invoke(app, ["forecast", str(config), "--json", "--device", "cpu"])
    assert json.loads(done.stdout)["lines"][0].startswith("an interaction takes about ")
    assert [file.name for file in Path().iterdir()] == ["config.toml"]
    told = tmp_path / "told" / "told.json"
    told.parent.mkdir()
    ask = ["forecast", str(config), "--device", "cpu", "--told", "told/told.json"]
    done = CliRunner().invoke(app, ask)
    assert done.stdout.splitlines() == json.loads(told.read_text())["lines"]
    assert [*told.parent.iterdir()] == [told]
    lost = CliRunner().invoke(app, [*ask[:-1], "gone/told.json"])
    assert str(lost.exception).startswith("no directory for a trial can be made: ")
    nothing = CliRunner().invoke(app, ["forecast", str(config), "--data", str(tmp_path)])
    assert isinstance(nothing.exception, DataError)
    assert str(nothing.exception) == f"{tmp_path} holds no client's data"


HOOKS = ("init_server", "init_client", "broadcast", "load", "prepare", "training_data", "fit",
         "after_local", "uplink", "aggregate", "finish", "predict")  # fmt: skip


@pytest.mark.parametrize("name", ["fedavg", "fedproto"])
def test_the_trial_calls_what_a_run_calls(digits, tmp_path, monkeypatch, name):
    called = set[str]()
    kind = type(make(name))

    def spied(hook):
        real = getattr(kind, hook)
        return lambda *args, **more: (called.add(hook), real(*args, **more))[1]

    for hook in HOOKS:
        monkeypatch.setattr(kind, hook, spied(hook))
    experiment = tiny_experiment(method={"name": name}, schedule={"rounds": 1})
    forecast(experiment, digits, CPU)
    tried = called.copy()
    called.clear()
    run_in_process(experiment, digits, tmp_path / "run")
    assert called <= tried


def test_what_the_coordinator_learns_at_the_end_of_a_task_counts(digits, tmp_path):
    tasks = {"rounds": 4, "order": "tasks_outer"}
    for name, found in (("mfcl", {False: 0.75, True: 0.25}), ("fedavg", {False: 1.0})):
        experiment = tiny_experiment(method={"name": name}, schedule=tasks)
        trial = forecasting._Trial(experiment, digits, CPU, tmp_path / name, 1)
        trial.ctx = ServerContext(None, START, ())
        moments = trial._moments(make(name))
        assert {ctx.ends_task: share for ctx, share in moments} == found


def test_what_is_tried_no_more_is_named(digits, monkeypatch):
    """Without it the line told the shortest training for the whole one."""

    def work(trial, lengths, within_s=0.0):
        trial.began_at -= forecasting.ALL / 3  # the trials themselves take long
        if not lengths:
            raise forecasting._TooLong
        return Work(1.0, 0.0)

    monkeypatch.setattr(forecasting._Trial, "_tried", work)
    monkeypatch.setattr(forecasting._Trial, "_scores", lambda trial: 0.0)
    found = forecast(tiny_experiment(**LESS), digits, CPU, at_once=1)
    assert found.least
    assert "[training] local_epochs = 3" in found.without
    assert "takes more than" in next(found.lines())


def test_where_the_shortest_training_takes_too_long_a_line_says_so(digits, monkeypatch):
    def work(*_):
        raise forecasting._TooLong

    monkeypatch.setattr(forecasting._Trial, "_tried", work)
    assert "takes more than" in next(forecast(tiny_experiment(**LESS), digits, CPU).lines())


def test_scores_are_those_of_the_run(digits, monkeypatch):
    """Only what the config scores, on its sets; never after training where no view asks for it."""
    orders = list[Any]()
    execute = forecasting.Workers.of

    def of(workers, client):
        worker = execute(workers, client)
        real = type(worker).execute
        worker.execute = lambda order, sent: (orders.append(order), real(worker, order, sent))[1]
        return worker

    monkeypatch.setattr(forecasting.Workers, "of", of)
    evaluate = {"every": 0, "views": ["global"]}
    forecast(tiny_experiment(evaluate=evaluate), digits, CPU)
    assert {view for order in orders for view in order.views} == {"global"}
    assert not any(order.global_test for order in orders)
    monkeypatch.setattr(forecasting._Trial, "_tried", _tried_for_a_second)
    monkeypatch.setattr(forecasting._Trial, "_scores", lambda trial: 0.0)
    population = {"clients": 5, "per_round": 1}
    one = forecast(tiny_experiment(schedule=population), digits, CPU, at_once=1)
    everybody = {"trained": "all"}
    all_train = tiny_experiment(schedule=population, evaluate=everybody)
    assert forecast(all_train, digits, CPU, at_once=1).interaction > 2 * one.interaction


def _tried_for_a_second(*_):
    return Work(1.0, 0.0)


def test_without_the_timers_of_posix_a_trial_has_no_limit(monkeypatch):
    """On Windows the module could not be imported."""
    for name in ("SIGPROF", "SIGALRM", "ITIMER_PROF", "ITIMER_REAL", "setitimer"):
        monkeypatch.delattr(signal, name)
    within = runpy.run_path(forecasting.__file__)["_within"]
    with within(0.0), within(0.0, "SIGALRM", "ITIMER_REAL"):
        pass
