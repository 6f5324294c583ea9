"""Trackers get every score; Prometheus gets where a run stands; what is missing gets one line."""

import contextlib
import json
import math
import posixpath
import re
import sys
import threading
import types
import urllib.request
from importlib.metadata import version
from unittest.mock import ANY
from urllib.parse import urlsplit

import numpy as np
import pytest
import tomli_w

import fedtide
from fedmodels.errors import ConfigError
from fedmodels.nets.trained import TrainedModel
from fedplugins.trackers import trackers
from fedplugins.trackers.prometheus import SHOWN_S, Exporter, QueuedRuns, Scrapes, export
from fedplugins.trackers.trackers import TRACKERS, results_of, track
from fedsrv import cli
from fedsrv.coordinator import Listen, serve
from fedsrv.progress.events import HAS_FAILED, Event, EventLog, EventQueue
from fedsrv.state.ledger import Ledger
from fedsrv.state.run_record import leaves_of
from fedsrv.state.store import Store
from fedsrv.trained.trained_models import global_model
from fedtide.inprocess import run_in_process
from tests.conftest import tiny_experiment
from tests.fedmodels.test_http_server import got


class Recorder:
    """Stands for any object of a tracker's package: remembers calls, and answers with itself."""

    def __init__(self, told, **answers):
        self.__dict__.update(answers, told=told)

    def __getattr__(self, name):
        def call(*args, **more):
            self.told.append((name, *args, *more.items()))
            return self

        return call


def pair(*two):
    return two


def run_id_of(out):
    with contextlib.closing(Ledger(out / "run.db", strict=False, new=False)) as ledger:
        return ledger.run_id


def follow(name, out, step=3, finishes=False):
    events = EventLog()
    end = track(events, tiny_experiment(tracking={name: True}), out, "the-run")
    events.tell("commit", interaction=0)
    events.tell("scores", interaction=step, metrics={"a_glo": 0.5, "loss": 1.0})
    if finishes:
        events.tell("finished", metrics={}, state_sha256="")
    end()


@pytest.fixture(autouse=True)
def results(monkeypatch, tmp_path):
    """Have trackers take a page that nobody draws."""
    page = tmp_path / "page.html"
    page.write_text("page")
    monkeypatch.setattr(trackers, "results_of", lambda run, place: [page])
    return page


def test_tensorboard_is_written(monkeypatch, tmp_path):
    told = []
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", Recorder(told))
    follow("tensorboard", tmp_path)
    assert told == [
        ("SummaryWriter", str(tmp_path / "tensorboard")),
        ("add_scalar", "a_glo", 0.5, 3, ANY),
        ("add_scalar", "loss", 1.0, 3, ANY),
        ("close",),
    ]


@pytest.mark.parametrize("before", [False, True], ids=["new", "resumed"])
def test_mlflow_is_told(monkeypatch, tmp_path, before, results):
    told, data = [], types.SimpleNamespace(params={"seed": "0", "schedule.clients": "9"})
    run = Recorder(told, info=types.SimpleNamespace(run_id="r7"), data=data)
    client = Recorder(told)
    client.__dict__["get_experiment_by_name"] = lambda name: None
    client.__dict__["search_runs"] = lambda within, tags, max_results: [run] if before else []
    client.__dict__["create_run"] = lambda within, tags, run_name: told.append(tags) or run
    fake = types.SimpleNamespace(
        MlflowClient=lambda tracking_uri: told.append(("at", tracking_uri)) or client
    )
    entities = types.SimpleNamespace(
        Metric=lambda name, value, at, step: (name, value, step), Param=pair, RunTag=pair
    )
    monkeypatch.setattr(trackers, "MAX_BATCH", 1)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    follow("mlflow", tmp_path, finishes=True)
    assert told[:2] == [
        ("at", f"sqlite:///{tmp_path}/mlflow.db"),
        ("create_experiment", "fedtide", (tmp_path / "mlartifacts").as_uri()),
    ]
    logged = [
        row for call in told if "log_batch" in call for row in dict(call[2:]).get("params", ())
    ]
    assert (("method.name", "fedavg") in logged) is not before
    assert ({"fedtide_run": "the-run"} in told) is not before
    assert (("update_run", "r7", ("status", "RUNNING")) in told) is before
    assert (("set_tag", "r7", "schedule.clients", "3") in told) is before
    assert ("set_tag", "r7", "seed", "0") not in told
    assert told[-4:] == [
        ("log_batch", "r7", ("metrics", [("a_glo", 0.5, 3)])),
        ("log_batch", "r7", ("metrics", [("loss", 1.0, 3)])),
        ("log_artifact", "r7", str(results)),
        ("set_terminated", "r7", "FINISHED"),
    ]


def test_wandb_is_told(monkeypatch, tmp_path, results):
    told = []
    fake = Recorder(told, id="the-run", config=Recorder(told))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    (tmp_path / "my-run").mkdir()
    follow("wandb", tmp_path / "my-run", finishes=True)
    init = dict(told[0][1:])
    assert (init["project"], init["name"]) == ("fedtide", "my-run")
    assert (init["id"], init["resume"]) == ("the-run", "allow")
    assert told[1][1]["method.name"] == "fedavg"
    assert told[2:5] == [
        ("log", {"a_glo": 0.5, "loss": 1.0}, ("step", 3)),
        ("Artifact", "run-the-run", ("type", "run")),
        ("add_file", str(results)),
    ]
    assert told[-1] == ("finish", ("exit_code", 0))
    follow("wandb", tmp_path / "my-run")
    assert told[-1] == ("finish", ("exit_code", 1)), "a run that was stopped"


@pytest.mark.filterwarnings("ignore")  # of the package's own
def test_a_resumed_run_is_one_run_of_mlflow(tmp_path, results, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    follow("mlflow", tmp_path, step=0)
    follow("mlflow", tmp_path, step=1, finishes=True)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (within,) = [e for e in client.search_experiments() if e.name == trackers.PROJECT]
    (run,) = client.search_runs([within.experiment_id])
    assert run.info.status == "FINISHED"
    assert [m.step for m in client.get_metric_history(run.info.run_id, "a_glo")] == [0, 1]
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == [results.name]


@pytest.mark.filterwarnings("ignore")  # of the package's own
def test_mlflow_has_the_name_the_clients_and_a_registered_model(tmp_path, monkeypatch):
    """The model that MLflow loads answers as that of the run, and is registered once."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(trackers, "results_of", results_of)
    told = {"mlflow": True, "name": "Wards, second try", "clients": True, "model": "wards"}
    out = tmp_path / "run"
    tables = {
        "data": {"name": "digits", "max_per_class": 40}, "scenario": {"kind": "iid", "tasks": 1},
        "net": {"name": "mlp", "hidden": [8]}, "schedule": {"rounds": 2, "clients": 3},
        "method": {"name": "fedavg"}, "tracking": told,
    }  # fmt: skip
    run = fedtide.run(tables, backend="inprocess", out=out)
    trackers.send(run.experiment, out, run_id_of(out), ["mlflow"])
    client = mlflow.MlflowClient(uri := f"sqlite:///{out / 'mlflow.db'}")
    (within,) = [e for e in client.search_experiments() if e.name == trackers.PROJECT]
    (run,) = client.search_runs([within.experiment_id])
    assert (run.info.run_name, run.info.status) == ("Wards, second try", "FINISHED")
    rows = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    kept = client.get_metric_history(run.info.run_id, "client-0/loss")
    assert [m.value for m in kept] == [r["clients"]["0"]["loss"] for r in rows]
    assert client.get_metric_history(run.info.run_id, "client-2/accuracy_global")
    (version,) = client.search_model_versions("name = 'wards'")
    mlflow.set_tracking_uri(uri)
    model = mlflow.pyfunc.load_model(f"models:/wards/{version.version}")
    (taken,) = model.metadata.get_input_schema().inputs
    assert (taken.type, taken.shape) == (np.dtype(np.float32), (-1, 1, 8, 8))
    x = np.random.default_rng(0).integers(0, 17, (5, 1, 8, 8)).astype(np.float32)
    assert (model.predict(x) == global_model(out).probabilities(x)).all()


@pytest.mark.parametrize(
    ("table", "line"),
    [
        ({"name": "x"}, "name is for mlflow = true or wandb = true"),
        ({"wandb": True, "clients": True}, "clients is for mlflow = true or tensorboard = true"),
        ({"wandb": True, "model": "wards"}, "model is for mlflow = true"),
        ({"mlflow": True, "model": "a/b"}, "model: String should match pattern"),
    ],
)
def test_a_key_that_no_tracker_reads_is_refused(table, line):
    with pytest.raises(ConfigError, match=line):
        tiny_experiment(tracking=table)


def test_clients_of_a_run_are_told_once(digits, tmp_path, monkeypatch):
    """Also where the run stops and goes on: what came before is not sent again."""
    told, out = [], tmp_path / "run"
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", Recorder(told))
    run_in_process(tiny_experiment(), digits, out)
    of = tiny_experiment(tracking={"tensorboard": True, "clients": True})
    for _ in range(2):
        trackers.send(of, out, "the-run", ["tensorboard"])
    calls = [call[1:4] for call in told if call[0] == "add_scalar" and call[1] == "client-1/loss"]
    rows = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert [(v, at) for _, v, at in calls] == [
        (row["clients"]["1"]["loss"], row["interaction"]) for row in rows
    ]


@pytest.mark.filterwarnings("ignore")  # of the package's own
def test_a_resumed_run_is_one_run_of_wandb(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    follow("wandb", tmp_path, step=0)
    follow("wandb", tmp_path, step=1, finishes=True)
    parts = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert {part.name.rpartition("-")[2] for part in parts} <= {"run", "the-run"}
    assert parts


def test_what_a_finished_run_gives(digits, tmp_path, monkeypatch):
    def files(method):
        experiment, out = tiny_experiment(method=method), tmp_path / method
        summary = run_in_process(experiment, digits, out)
        (out / "summary.json").write_text(json.dumps(summary))
        (out / "config.toml").write_text(tomli_w.dumps(experiment.to_dict()))
        return results_of(out, tmp_path)

    page, model = files("fedavg")
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert TrainedModel.load(model).facts.view == "global"
    monkeypatch.setattr(trackers, "write_html", lambda runs, path, private: None)
    assert [file.name for file in files("local")] == ["report.html"], "every model is private"


def test_a_run_in_one_process_has_its_trackers(monkeypatch, tmp_path, digits):
    written = []
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", Recorder(written))
    experiment = tiny_experiment(tracking={"tensorboard": True})
    run_in_process(experiment, digits, tmp_path / "run", facts=True)
    calls = [call[0] for call in written]
    assert calls[0] == "SummaryWriter"
    assert calls[-1] == "close"
    assert "add_scalar" in calls


@pytest.mark.parametrize("name", TRACKERS)
def test_without_its_package_there_is_a_line(monkeypatch, tmp_path, name, caplog):
    module = "torch.utils.tensorboard" if name == "tensorboard" else name
    monkeypatch.setitem(sys.modules, module, None)
    follow(name, tmp_path)
    assert f"pip install '{name}>=" in caplog.messages[-1]


def test_a_tracker_that_fails_ends_neither_the_run_nor_the_others(monkeypatch, tmp_path, caplog):
    def full(*_, **__):
        raise OSError("quota exceeded\ndetails")

    written, online = [], []
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", Recorder(written))
    run = Recorder(online, log=full, config=Recorder([]))
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **_: run))
    events = EventLog()
    switches = {"tensorboard": True, "wandb": True}
    end = track(events, tiny_experiment(tracking=switches), tmp_path, "")
    for step in (1, 2):
        events.tell("scores", interaction=step, metrics={"a_glo": 0.5})
    end()
    assert [call[0] for call in written] == ["SummaryWriter", "add_scalar", "add_scalar", "close"]
    assert online == []
    (line,) = caplog.messages
    assert (
        line == f"wandb failed and has metrics of no interaction, fedsrv track {tmp_path} sends it "
        "the rest; the run continues: quota exceeded details"
    )


def test_a_tracker_that_hangs_holds_up_neither_the_end_nor_the_others(
    monkeypatch, tmp_path, caplog
):
    told, forever = [], threading.Event()
    config = Recorder([])
    run = types.SimpleNamespace(
        log=lambda *_, **__: None, finish=lambda **_: forever.wait(), config=config
    )
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **_: run))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", Recorder(told))
    monkeypatch.setattr(trackers, "CLOSE_S", 0.2)
    events = EventLog()
    end = track(
        events, tiny_experiment(tracking={"wandb": True, "tensorboard": True}), tmp_path, ""
    )
    events.tell("scores", interaction=3, metrics={"a_glo": 0.5})
    end()
    forever.set()
    assert told[-1] == ("close",)
    (line,) = caplog.messages
    assert line == (
        "wandb does not close within 0.2 s; the run ends without it: it has metrics up to "
        f"interaction 4, fedsrv track {tmp_path} sends it the rest"
    )


def row(interaction, loss):
    """Return a line of ``rounds.jsonl`` of an interaction that was scored."""
    scored = {"0": {"views": {}}}
    return {"interaction": interaction, "metrics": {"loss": loss}, "clients": scored}


def write_rows(out, *losses):
    lines = [json.dumps(row(n, loss)) + "\n" for n, loss in enumerate(losses)]
    (out / "rounds.jsonl").write_text("".join(lines))


@pytest.fixture
def board(monkeypatch):
    """Return the values that TensorBoard was told, by name, value and step; it may be made fail."""
    told = []
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", Recorder(told))
    return lambda: [call[1:4] for call in told if call[0] == "add_scalar"]


def test_a_run_that_goes_on_sends_what_a_tracker_lacks(board, tmp_path):
    follow("tensorboard", tmp_path, step=0)
    write_rows(tmp_path, 1.0, 0.9, 0.8)
    follow("tensorboard", tmp_path, step=3)
    assert board() == [
        ("a_glo", 0.5, 0),
        ("loss", 1.0, 0),
        ("loss", 0.9, 1),
        ("loss", 0.8, 2),
        ("a_glo", 0.5, 3),
        ("loss", 1.0, 3),
    ]


def test_what_a_run_took_back_is_sent_again(board, tmp_path):
    write_rows(tmp_path, 1.0, 0.9, 0.8)
    (tmp_path / "tracked.json").write_text('{"tensorboard": 7}')
    events = EventLog()
    end = track(events, tiny_experiment(tracking={"tensorboard": True}), tmp_path, "the-run")
    for step in (2, 3):
        events.tell("scores", interaction=step, metrics={"a_glo": 0.5})
    events.tell("rollback", interaction=2, reason="")
    events.tell("scores", interaction=3, metrics={"a_glo": 0.6})
    end()
    assert board() == [("a_glo", 0.5, 3), ("a_glo", 0.6, 3)]


def test_a_tracker_that_is_slow_gets_what_it_missed(monkeypatch, tmp_path):
    """Its queue holds three events, and ten come while it takes the first one.

    Each carries the time when it was known, and not that of sending.
    """
    told, is_at_work, goes_on = [], threading.Event(), threading.Event()

    def slow(name, value, step, at):
        is_at_work.set()
        goes_on.wait(30)
        told.append((value, step, at))

    writer = types.SimpleNamespace(add_scalar=slow, close=lambda: None)
    board = types.SimpleNamespace(SummaryWriter=lambda place: writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setattr(EventQueue, "MAX", 3)
    noted, real = threading.Semaphore(0), EventLog.follow

    def follow_in_step(events, take, name):
        return real(events, lambda event: (take(event), noted.release()), name)

    monkeypatch.setattr(EventLog, "follow", follow_in_step)
    events = EventLog()
    end = track(events, tiny_experiment(tracking={"tensorboard": True}), tmp_path, "the-run")
    for step in range(10):
        monkeypatch.setattr("fedsrv.progress.events.time.time", lambda step=step: 1000.0 + step)
        events.tell("scores", interaction=step, metrics={"loss": step / 2})
        assert is_at_work.wait(30)
        assert noted.acquire(timeout=30)
    write_rows(tmp_path, *(step / 2 for step in range(10)))
    goes_on.set()
    end()
    assert told == [(step / 2, step, 1000.0 + step) for step in range(10)]


def test_rows_that_tell_of_no_scores_are_passed_over(board, tmp_path):
    odd = [{}, {"interaction": "1", "clients": {"0": {"views": 1}}}, {"clients": [1]}, row(1, 0.9)]
    odd[3]["metrics"]["a_glo"] = None
    (tmp_path / "rounds.jsonl").write_text("".join(json.dumps(one) + "\n" for one in odd))
    follow("tensorboard", tmp_path, step=2)
    assert board() == [("loss", 0.9, 1), ("a_glo", 0.5, 2), ("loss", 1.0, 2)]


def test_a_run_can_be_sent_later(board, tmp_path, digits, capsys, monkeypatch):
    out, experiment = tmp_path / "run", tiny_experiment(schedule={"rounds": 2})
    run_in_process(experiment, digits, out, facts=True)
    (out / "config.toml").write_text(tomli_w.dumps(experiment.to_dict()))
    for _ in range(2):
        with pytest.raises(SystemExit, match="0"):
            cli.main(["track", str(out), "--to", "tensorboard"])
    rows = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert board() == [
        (name, value, row["interaction"]) for row in rows for name, value in row["metrics"].items()
    ]
    said = f"tensorboard has metrics up to interaction {len(rows)}\n"
    assert capsys.readouterr().out == 2 * said
    with pytest.raises(SystemExit, match="0"):
        cli.main(["track", str(out), "--to", "tensorboard", "--json"])
    (told,) = json.loads(capsys.readouterr().out)
    assert told == {"tracker": "tensorboard", "interactions": len(rows), "error": None}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["nowhere"], "nowhere is not a run directory: pass the directory given to --out"),
        (["run"], "run has no tracker: choose one of tensorboard, mlflow, wandb with --to"),
        (["run", "--to", "mlfow"], "--to mlfow is no tracker. Did you mean 'mlflow'?"),
    ],
)
def test_what_cannot_be_sent_gets_one_line(words, line, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Store(tmp_path / "run", tiny_experiment(), resume=False).close()
    (tmp_path / "run" / "config.toml").write_text(tomli_w.dumps(tiny_experiment().to_dict()))
    with pytest.raises(SystemExit) as ended:
        cli.main(["track", *words])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {line}\n"


class Up:
    """A tracker's server: it may refuse, and it may accept and not answer."""

    def __init__(self):
        self.tried, self.is_up, self.told = threading.Event(), threading.Event(), []

    def init(self, **_):
        self.tried.set()
        if not self.is_up.is_set():
            raise RuntimeError("no API key configured\nuse wandb login")
        return Recorder(self.told, config=Recorder([]))

    def hang(self, **_):
        self.tried.set()
        self.is_up.wait()
        raise RuntimeError("the connection was reset")


@pytest.fixture
def up(monkeypatch):
    server = Up()
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=server.init))
    yield server
    server.is_up.set()


CANNOT_BEGIN = (
    "[tracking] wandb cannot begin: no API key configured use wandb login; log in or set it up as "
    "its documentation says, or leave it out: --set tracking.wandb=false"
)


def test_a_tracker_that_cannot_begin_gets_two_lines_and_the_run_goes_on(up, tmp_path, caplog):
    follow("wandb", tmp_path)
    assert caplog.messages[-1] == (
        f"{CANNOT_BEGIN}; the run ends without it: fedsrv track {tmp_path} sends it the rest"
    )
    assert caplog.messages[:-1] in (
        [],
        [f"{CANNOT_BEGIN}; the run continues, and it is tried again"],
    )


def test_a_tracker_that_comes_up_later_gets_all(up, tmp_path, monkeypatch):
    """Compose starts both at once."""
    monkeypatch.setattr(trackers, "AGAIN_S", (0.01, 0.01))
    events = EventLog()
    end = track(events, tiny_experiment(tracking={"wandb": True}), tmp_path, "the-run")
    assert up.tried.wait(30)
    events.tell("scores", interaction=3, metrics={"a_glo": 0.5})
    up.is_up.set()
    end()
    assert up.told[0] == ("log", {"a_glo": 0.5}, ("step", 3))


def test_a_tracker_that_accepts_and_does_not_answer_holds_up_nothing(
    up, tmp_path, monkeypatch, caplog
):
    """A launch stood silent for 14 minutes."""
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=up.hang))
    monkeypatch.setattr(trackers, "CLOSE_S", 0.1)
    follow("wandb", tmp_path)
    assert up.tried.is_set()
    assert not up.is_up.is_set()
    assert caplog.messages == [
        "wandb does not close within 0.1 s; the run ends without it: it has metrics of no "
        f"interaction, fedsrv track {tmp_path} sends it the rest"
    ]


def test_names_that_mlflow_refuses_get_others():
    """Its rule is that of ``mlflow.utils.validation``, of releases 2 and 3."""
    names = ["seed", "a (m/w)", "a [m/w]", "x//y", "../z", "größe", "b" * 300, "b" * 299]
    found = trackers.mlflow_names(names)
    assert found["seed"] == "seed"
    assert found["größe"] == "größe"
    assert (found["a (m/w)"], found["a [m/w]"]) == ("a _m/w_", "a _m/w__2")
    assert len({*found.values()}) == len(names)
    for name in found.values():
        assert re.fullmatch(r"[/\w.\- :]{1,250}", name)
        assert posixpath.normpath(name) == name
        assert not name.startswith(("..", "/"))


@pytest.mark.parametrize(
    "uri", ["https://ann:s3cr/et@flow.example/x", "mysql+pymysql://ann:s3cr/et@db.example:3306/y"]
)
def test_a_password_stands_in_no_line(monkeypatch, tmp_path, uri, caplog):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("WANDB_API_KEY", "k3y")

    class Refuses:
        def __init__(self, *_):
            raise OSError(f"cannot reach {uri} again or {uri}?api_token=k3y as k3y")

    monkeypatch.setitem(TRACKERS, "mlflow", Refuses)
    follow("mlflow", tmp_path)
    said = " ".join(caplog.messages)
    assert "cannot reach" in said
    assert not {word for word in ("s3cr", "ann:", "k3y") if word in said}


def test_settings_are_flat():
    found = dict(leaves_of(tiny_experiment(seed=4).to_dict()))
    assert (found["seed"], found["method.name"]) == (4, "fedavg")


HAPPENED = [
    Event("joined", "0"),
    Event("joined", "1"),
    Event("left", "1"),
    Event("failed", "1", detail={"reason": "its disk is full"}),
    Event("waiting", detail={"seconds": 70}),
]
SIZES = {"down": 300, "up": 100}


def test_prometheus_scrapes_where_a_run_stands(tmp_path):
    pytest.importorskip("prometheus_client")
    events = EventLog()
    end = export(events, tmp_path, "127.0.0.1", 0)
    for event in HAPPENED:
        events.tell(event.kind, event.client, **event.detail)
    for step in (0, 1):
        place = {"interaction": step, "round": step, "task": 0}
        events.tell("commit", **place, of=9, loss=1.0, bytes=SIZES, seconds=2.0)
    events.tell("scores", interaction=1, round=1, metrics={"a_loc": 0.75})
    (url,) = [e.detail["url"] for e in listened(events) if e.kind == "metrics"]
    text = scraped_until(url, 'fedtide_metric{name="a_loc"} 0.75')
    for line in (
        "fedtide_interactions_committed 2.0",
        "fedtide_interactions_planned 9.0",
        "fedtide_clients_joined 2.0",
        "fedtide_clients_present 1.0",
        'fedtide_client_failures_total{client="1"} 1.0',
        'fedtide_payload_bytes_total{direction="down"} 600.0',
        "fedtide_interaction_seconds_count 2.0",
        "fedtide_waiting_seconds 0.0",
        "fedtide_finished 0.0",
    ):
        assert line in text
    end()


@pytest.mark.parametrize(
    ("kind", "facts", "shown"),
    [
        ("finished", {"metrics": {}, "state_sha256": ""}, "finished"),
        ("ended", {"reason": f"{HAS_FAILED}its disk is full"}, "failed"),
        ("ended", {"reason": "stopped by Ctrl-C"}, "stopped"),
    ],
)
def test_the_scrape_after_the_end_says_how_a_run_has_ended(tmp_path, kind, facts, shown):
    """The page disappeared in the instant in which it said so; a crash says nothing."""
    pytest.importorskip("prometheus_client")
    (tmp_path / "config.toml").write_text('[method]\nname = "fedavg"\n')
    events = EventLog()
    end = export(events, tmp_path, "127.0.0.1", 0)
    events.tell("listening", address="", clients=1, needed=1)
    events.tell("joined", 0)
    (url,) = [e.detail["url"] for e in listened(events) if e.kind == "metrics"]
    text = scraped_until(url, 'fedtide_client_failures_total{client="0"} 0.0')
    text = scraped_until(url, "process_cpu_seconds_total")
    info = f'fedtide_info{{method="fedavg",run="{tmp_path.name}",version="{version("fedtide")}"}}'
    assert f"{info} 1.0" in text
    events.tell(kind, **facts)
    ended = threading.Thread(target=end)
    ended.start()
    text = scraped_until(url, f"fedtide_{shown} 1.0")
    ended.join(30)
    assert not ended.is_alive()
    for other in {"finished", "failed", "stopped"} - {shown}:
        assert f"fedtide_{other} 0.0" in text


def test_the_end_waits_for_no_scrape_of_a_page_that_nobody_reads(monkeypatch):
    scrapes = Scrapes()
    monkeypatch.setattr(scrapes._changed, "wait", None)
    scrapes.wait_for_next()
    scrapes.note()
    scrapes.wait_for_next()


def test_prometheus_knows_a_rest_and_a_resumed_run():
    """At rest a run had 4.26 s left for ever; taken up there, it stood in round 0."""
    prometheus = pytest.importorskip("prometheus_client")
    exporter = Exporter(prometheus)

    def value(figure, **labels):
        return exporter.registry.get_sample_value(f"fedtide_{figure}", labels)

    assert math.isnan(value("seconds_left"))
    facts = {"task": 2, "loss": 0.5, "metrics": {"a_loc": 0.75}}
    exporter.take(Event("resumed", "", 8, 8, facts))
    assert (value("interactions_committed"), value("round"), value("task")) == (9, 8, 2)
    assert value("metric", name="a_loc") == 0.75
    for client in ("0", "1", "evaluator"):
        exporter.take(Event("joined", client))
    exporter.take(
        Event("waiting", detail={"line": "for client 1", "clients": ["1"], "seconds": 40})
    )
    assert value("waiting_seconds") == 40
    exporter.take(Event("resting", detail={"line": "it waits for new data", "clients": []}))
    assert (value("seconds_left"), value("resting"), value("interactions_planned")) == (0, 1, 9)
    exporter.take(Event("gone", detail={"line": "", "clients": ["1"]}))
    assert (value("clients_joined"), value("clients_present")) == (2, 1), "it is no client"
    assert value("waiting_seconds") == 0, "a rest is no wait"
    for client in "110":
        exporter.take(Event("refused", client, detail={"line": "it does not serve its model"}))
    assert value("models_refused_total", client="1") == 2
    exporter.take(Event("growth", detail={"line": ""}))
    assert math.isnan(value("seconds_left"))
    for at, seconds in ((9, 0.0), (10, 4.0)):
        facts = {"task": 3, "of": 12, "seconds": 4.0, "bytes": {}}
        exporter.take(Event("commit", "", at, at, facts, seconds))
    assert (value("seconds_left"), value("resting")) == (4, 0)


def test_prometheus_counts_a_site_that_was_away_when_the_coordinator_began_again():
    """Joined 1 and present 1 said that nothing was missing, and a mean of one site rose."""
    prometheus = pytest.importorskip("prometheus_client")
    exporter = Exporter(prometheus)
    away = {"state": "away", "since": 5.0, "why": "stopped"}
    out = {"state": "out", "since": 5.0, "why": "an operator retired it"}
    exporter.take(Event("present", detail={"clients": [], "roster": {"1": away, "2": out}}))
    exporter.take(Event("joined", "0"))
    facts = {"metrics": {"a_loc": 0.992}, "scored": 1, "unscored": ["1"]}
    exporter.take(Event("scores", "", 8, 8, facts))
    figures = ("clients_joined", "clients_present", "clients_scored")
    found = [exporter.registry.get_sample_value(f"fedtide_{one}") for one in figures]
    assert found == [2, 1, 1]


def listened(events):
    """Return what a log holds so far."""
    return list(events._kept)


def scraped_until(url, line):
    """Scrape until a line is there: a thread of its own takes the events in."""
    for _ in range(1000):
        with urllib.request.urlopen(url, timeout=5) as answer:
            text = answer.read().decode()
        if line in text:
            return text
    raise AssertionError(text)


def test_without_prometheus_there_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match="pip install 'prometheus-client>="):
        export(EventLog(), tmp_path, "127.0.0.1", 0)


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_a_missing_extra_is_said_first(tmp_path, monkeypatch, name):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    experiment = tiny_experiment(tracking={name: True})
    with pytest.raises(ConfigError, match=f"pip install '{name}>="):
        serve(experiment, tmp_path / "run", Listen("127.0.0.1:0"))
    assert not (tmp_path / "run").exists()


def test_the_page_of_prometheus_has_the_same_checks(tmp_path):
    pytest.importorskip("prometheus_client")
    events = EventLog()
    end = export(events, tmp_path, "127.0.0.1", 0, ("*.svc.example",))
    url = urlsplit(events._kept[0].detail["url"])
    assert url.hostname is not None
    assert url.port is not None
    place = (url.hostname, url.port)
    assert got(place, url.path) == 200
    assert got(place, url.path, Host="evil.example") == 421
    assert got(place, url.path, Host="run.svc.example") == 200
    assert got(place, url.path, "POST") == 405
    assert got(place, "/config.toml") == 404
    with pytest.raises(ConfigError, match=r"no page at 127\.0\.0\.1:\d+: .*give another port"):
        export(EventLog(), tmp_path, *place)
    end()


def test_the_page_of_a_queue_says_of_each_run_how_it_has_ended_and_stays():
    """The front goes on: neither end looks like a crash, and a scrape later sees both."""
    from pathlib import Path

    prometheus, now = pytest.importorskip("prometheus_client"), [0.0]
    runs = QueuedRuns(prometheus, lambda: now[0])
    registry = prometheus.CollectorRegistry()
    registry.register(runs)

    def value(name: str, **labels: str) -> float | None:
        found: float | None = registry.get_sample_value(f"fedtide_{name}", labels)
        return found

    one, two = (runs.follow(name, Path(name)) for name in ("0001-a", "0002-b"))
    for take in (one, two):
        take(Event("joined", client="3"))
    one(Event("finished", detail={"metrics": {}, "state_sha256": ""}))
    runs.follow("0001-a", None)
    two(Event("failed", client="3", detail={"reason": "x"}))
    two(Event("ended", detail={"reason": f"{HAS_FAILED}no disk"}))
    assert value("queue_runs_served") == 1
    runs.follow("0002-b", None)
    assert value("queue_runs_served") == 0
    assert [value("finished", run=run) for run in ("0001-a", "0002-b")] == [1, 0]
    assert [value("failed", run=run) for run in ("0001-a", "0002-b")] == [0, 1]
    assert value("client_failures_total", run="0002-b", client="3") == 1
    assert b"# TYPE fedtide_finished gauge" in prometheus.generate_latest(registry)
    now[0] = SHOWN_S + 1
    assert value("finished", run="0001-a") is None
    runs.follow("0002-b", Path("again"))
    assert value("failed", run="0002-b") == 0
