"""The live model of a client: what goes live, what is refused and rolled back, and who answers."""

from __future__ import annotations

import asyncio
import csv
import hashlib
import http.client
import io
import json
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import fedtide
from benchmarks import serving
from fedcli.cli import main
from fedcli.data import settled
from fedcli.data.own.number_marks import is_number
from fedcli.gate.gate import held_back
from fedcli.gate.rules import Rules
from fedcli.parts import deployment
from fedcli.predicting.live_model import LiveModel, NoModelYet
from fedcli.predicting.watching import WatchedFolder
from fedcli.runtime import deployed as deployed_module
from fedcli.runtime.deployed import Deployed
from fedcli.runtime.sessions import Session, SessionFile
from fedmodels.errors import ArchiveError, ArchiveReplaced, DataError
from fedmodels.host import http_server
from fedmodels.nets.trained import ModelFacts, TrainedModel, header_of
from fedmodels.tensors import stored
from fedmodels.tensors.bundle import Bundle, state_digest
from fedplugins.serving import bodies, model_server
from fedplugins.serving.model_server import ModelServer
from fedsrv.progress.events import EventLog
from tests.conftest import records_of
from tests.fedmodels.tensors.test_stored import negate

TINY: dict[str, Any] = {
    "seed": 3,
    "data": {"name": "digits", "max_per_class": 40},
    "scenario": {"kind": "per_class_shards", "shards": 5, "tasks": 2},
    "net": {"name": "mlp", "hidden": [8]},
    "schedule": {"rounds": 2, "clients": 2, "order": "tasks_outer"},
    "training": {"batch_size": 16, "lr": 0.05},
    "evaluate": {"pictures": 0},
}  # fmt: skip


def facts(round: int = 0) -> ModelFacts:
    """Return what a linear model of two numbers and two classes is."""
    names = ("no", "yes")
    more = {"class_names": names, "method": "fedavg", "round": round}
    return ModelFacts("mlp", {"hidden": []}, (2,), 2, **more)  # type: ignore[arg-type]


def put_live(place: Deployed, round: int, sign: float = 1.0, of: ModelFacts | None = None) -> bool:
    """Put a model live that says "yes" to a positive first number, or to a negative one."""
    rows, bias = torch.tensor([[-sign, 0.0], [sign, 0.0]]), torch.full((2,), float(round))
    bundle = Bundle(weights={"head/weight": rows, "head/bias": bias})
    more = {"sha256": state_digest([("", bundle)]), "interaction": str(2 * round)}
    return place.go_live(
        bundle, header_of(of or facts(round)) | more, place.digest(), f"round {round}"
    )


@pytest.fixture
def place(tmp_path: Path) -> Deployed:
    """Return the folder of client 7, with no model yet."""
    (tmp_path / "states/7").mkdir(parents=True)
    return Deployed(tmp_path / "states/7")


def test_a_live_model_replaced_by_its_negative_is_refused(place: Deployed, tmp_path: Path) -> None:
    put_live(place, 1)
    put_live(place, 2)
    model = LiveModel.of(tmp_path / "states", 7)
    model.now()
    negate(place.current)
    with pytest.raises(ArchiveReplaced, match="is not what was stored there"):
        LiveModel.of(tmp_path / "states", 7).now()
    with pytest.raises(SystemExit) as ended:
        main(["predict", "--run", str(tmp_path / "states"), "--client", "7", "x.npy"])
    assert ended.value.code == 1
    assert model.now().model.facts.round == 2, "it goes on with what it read"
    assert "rolled back to the model of round 2" in place.roll_back()
    assert LiveModel.of(tmp_path / "states", 7).now().model.facts.round == 1


def test_no_roll_back_to_a_model_that_was_replaced(place: Deployed) -> None:
    put_live(place, 1)
    put_live(place, 2)
    negate(place.previous)
    with pytest.raises(ArchiveReplaced):
        place.roll_back()
    assert not place.status().held


def round_of(file: Path) -> int:
    return TrainedModel.load(file).facts.round


def typed(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([*map(str, words)])
    return int(ended.value.code or 0)


# --- the folder -----------------------------------------------------------------------------------


def test_the_live_model_and_the_one_before(place, capsys):
    assert put_live(place, 0)
    assert put_live(place, 1)
    assert put_live(place, 2)
    assert (round_of(place.previous), round_of(place.current)) == (1, 2)
    run = place.folder.parent.parent
    words = "rollback", "--run", run, "--client", 7
    assert typed(*words) == 0
    line = (
        "rolled back to the model of round 2 (interaction 3), from that of round 3 (interaction 5);"
    )
    assert line in capsys.readouterr().out
    assert round_of(place.current) == 1
    assert not put_live(place, 3), "a roll-back holds"
    assert typed(*words) == 1
    assert "no model from before the live one" in capsys.readouterr().err
    assert typed(*words, "--release") == 0
    assert put_live(place, 3)
    status = place.status()
    assert (status.went_live, status.rollbacks, status.held) == (4, 1, False)
    assert typed("rollback", "--run", run, "--client", 8) == 1


class Killed(BaseException):
    """Stands for ``kill -9``: no ``except Exception`` sees it."""


STEPS = ("save", "linked", "sync_path", "write_atomically", "replace")


@pytest.mark.parametrize("change", ["go live", "roll back"])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_a_kill_between_any_two_steps_leaves_a_good_model(place, step, after, change, monkeypatch):
    """And the change can be made again."""
    put_live(place, 0)
    put_live(place, 1)
    owner = {"replace": Path, "linked": stored}.get(step, deployed_module)
    original = getattr(owner, step)

    def dies(*args: Any, **more: Any) -> Any:
        if after:
            original(*args, **more)
        raise Killed

    def changed() -> None:
        put_live(place, 2) if change == "go live" else place.roll_back()

    with monkeypatch.context() as patched:
        patched.setattr(owner, step, dies)
        try:
            changed()
        except Killed:
            pass
        else:
            assert (step, change) in {("save", "roll back"), ("linked", "roll back")}
    assert round_of(place.current) in (0, 1, 2)
    place.clear_leftovers()
    assert {file.name for file in place.folder.glob("*")} >= {"current.safetensors"}
    assert not [*place.folder.glob(".*.tmp")]
    if place.status().held:
        place.release()
    put_live(place, 5)
    assert round_of(place.current) == 5
    assert place.roll_back().endswith("from that of round 6 (interaction 11)")


def test_a_change_waits_for_that_of_another_process(place, monkeypatch):
    monkeypatch.setattr(deployed_module, "LOCK_S", 0.0)
    with (
        place._locked(),
        pytest.raises(ArchiveError, match="another process changes"),
    ):
        Deployed(place.folder.parent).release()


# --- the guard ------------------------------------------------------------------------------------


def deployed_by(run: fedtide.Run, client: int = 0) -> Deployed:
    return Deployed(run.path / "clients" / str(client))


@pytest.mark.parametrize("method", ["fedavg", "fedrep"])
def test_what_goes_live_is_no_worse_on_the_clients_own_test_data(tmp_path, method, monkeypatch):
    """Each model is compared with the live one, on the tasks met by then."""
    judged: list[tuple[str, int | None]] = []
    sizes: list[int] = []
    original = deployment.rightly_named

    def seen(net: Any, sets: Any, merged: Any) -> int | None:
        found = original(net, sets, merged)
        judged.append((f"{len(sets)} tasks", found))
        sizes.append(sum(len(y) for _, y in sets))
        return found

    monkeypatch.setattr(deployment, "rightly_named", seen)
    tables = {**TINY, "method": {"name": method}, "deploy": {}}
    run = fedtide.run(tables, backend="inprocess", out=tmp_path / "run")
    assert {tasks for tasks, _ in judged} == {"1 tasks", "2 tasks"}
    for client in range(2):
        place, status = deployed_by(run, client), deployed_by(run, client).status()
        live = TrainedModel.load(place.current)
        assert live.facts.view == {"fedavg": "after_local", "fedrep": "after_downlink"}[method]
        assert status.went_live + status.refused >= 4
        assert "test examples are right" in status.last
        x, y = run.path / f"data/{client}/task-1/test_x.npy", f"data/{client}/task-1/test_y.npy"
        assert live.predict(np.load(x)).shape == np.load(run.path / y).shape
    judged.clear()
    sizes.clear()
    kept = {**tables, "data": {**TINY["data"], "validation_share": 0.25}}
    run_kept = fedtide.run(kept, backend="inprocess", out=tmp_path / "kept")
    trained = records_of(run_kept.path)[0]["clients"]["0"]["num_examples"]
    assert sizes[0] == pytest.approx(trained / 3, abs=5), "a quarter of the training examples"
    assert "validation examples are right" in deployed_by(run_kept).status().last
    judged.clear()
    outer = {**tables, "schedule": {**TINY["schedule"], "order": "rounds_outer"}}
    fedtide.run(outer, backend="inprocess", out=tmp_path / "outer")
    assert [tasks for tasks, _ in judged][-4:] == ["2 tasks"] * 4, "a second round has met all"
    without = fedtide.run({**tables, "deploy": None}, backend="inprocess", out=tmp_path / "plain")
    assert without.summary["state_sha256"] == run.summary["state_sha256"]
    assert not deployed_by(without).folder.exists()


@pytest.mark.parametrize(
    ("method", "guard", "rights", "live", "told"),
    [
        ("fedavg", {}, [5, 36, 72], 1, "names 10.0 % of the client's own"),  # 36 of 359, 72
        ("fedrep", {}, [5, 36, 72], 1, "examples rightly, the live one 20.1 %"),
        ("fedavg", {}, [5, 9, 9], 2, ""),
        ("fedavg", {}, [5, None], 1, "its outputs are not finite"),
        ("fedavg", {}, [5, 5, None], 2, ""),
        ("fedavg", {"tolerance": 1.0}, [5, 0, 9], 2, ""),
        ("fedavg", {"guard": "none"}, [], 2, ""),
    ],
)
def test_the_guard_refuses_worse_models(
    tmp_path, method, guard, rights, live, told, monkeypatch, caplog
):
    """The server is told of it, whichever order the model was offered in."""
    left, lines, tell = list(rights), list[str](), EventLog.tell
    monkeypatch.setattr(deployment, "rightly_named", lambda net, sets, merged: left.pop(0))
    monkeypatch.setattr(
        EventLog, "tell",
        lambda log, kind, *whom, **facts: (
            lines.extend([facts["line"]] if kind == "refused" else []),
            tell(log, kind, *whom, **facts),
        ),
    )  # fmt: skip
    caplog.set_level("INFO")
    more = {"schedule": {"clients": 1, "rounds": 2}, "scenario": {"kind": "iid"}}
    tables = {**TINY, "method": {"name": method}, **more, "deploy": guard}
    run = fedtide.run(tables, backend="inprocess", out=tmp_path / "run")
    status = deployed_by(run).status()
    assert (status.went_live, status.refused) == (live, 2 - live)
    assert len(lines) == 2 - live
    assert all(told in line and "client 0 does not serve its model of round 2" in line
               for line in lines)  # fmt: skip
    assert ("refuses the model of round 2" in caplog.text) == (live == 1)
    assert not left


def test_a_full_disk_costs_no_round(tmp_path, monkeypatch):
    def full(*args: Any, **more: Any) -> None:
        raise ArchiveError("No space left on device")

    monkeypatch.setattr(deployed_module, "save", full)
    tables = {**TINY, "method": {"name": "fedavg"}, "deploy": {}}
    run = fedtide.run(tables, backend="inprocess", out=tmp_path / "run")
    assert run.summary["metrics"]
    assert not deployed_by(run).current.exists()


# --- answers over HTTP ----------------------------------------------------------------------------

Ask = Callable[..., tuple[int, Any]]


@contextmanager
def asking(place: Deployed, **more: Any) -> Iterator[Ask]:
    """Return what asks a server of client 7's live model."""
    live = LiveModel.of(place.folder.parent.parent, 7)
    server = ModelServer("127.0.0.1", 0, {"7": live}, **more)
    end = server.begin("serve-model")

    def asked(
        path: str, body: bytes | None = None, kind: str = "application/json", **headers: str
    ) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        try:
            more = {"Content-Type": kind} if kind else {}
            connection.request("GET" if body is None else "POST", path, body, {**more, **headers})
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        if path == "/metrics" and answer.status == 200:
            return answer.status, text
        assert text.count("\n") == 1
        return answer.status, json.loads(text)

    asked.port = server.port  # type: ignore[attr-defined]
    yield asked
    end()


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    place = Deployed(tmp_path_factory.mktemp("served") / "7")
    put_live(place, 0)
    with asking(place) as asked:
        yield asked


def test_the_server_answers_with_the_model_that_is_live(place):
    pytest.importorskip("prometheus_client")
    with asking(place) as ask:
        check_answers(place, ask)


def test_what_asks_for_the_model_in_memory_does_not_wait_for_one_that_is_read(place, monkeypatch):
    """Such as the event loop, which names that model in the headers of an answer."""
    put_live(place, 0)
    live = LiveModel.of(place.folder.parent.parent, 7)
    before = live.now()
    put_live(place, 1)
    is_reading, may_end, load = threading.Event(), threading.Event(), TrainedModel.load

    def slowly(file: Path) -> TrainedModel:
        is_reading.set()
        assert may_end.wait(60)
        return load(file)

    monkeypatch.setattr(TrainedModel, "load", slowly)
    with ThreadPoolExecutor(2) as pool:
        now = pool.submit(live.now)
        try:
            assert is_reading.wait(60)
            asked = pool.submit(lambda: (live.loaded, live.round))
            assert asked.result(timeout=30) == (before, 1)
        finally:
            may_end.set()
        assert now.result().model.facts.round == 1
    assert live.round == 2


def check_answers(place: Deployed, ask: Ask) -> None:
    assert ask("/health") == (503, {"error": pytest.approx(ask("/health")[1]["error"])})
    assert ask("/predict", b"[1, 0]")[0] == 503
    put_live(place, 0)
    status, found = ask("/predict", b"[[1, 0], [-1, 0]]")
    assert status == 200
    assert [one["class"] for one in found["predictions"]] == ["yes", "no"]
    assert found["predictions"][0]["probabilities"][1] == pytest.approx(1 / (1 + np.exp(-2)))
    put_live(place, 1, sign=-1.0)
    _, found = ask("/predict", b'{"inputs": [1, 0]}')
    assert (found["model"]["round"], found["predictions"][0]["class"]) == (2, "no")
    place.current.write_bytes(b"half")  # no program of fedtide does that
    assert ask("/predict", b"[1, 0]")[1]["predictions"][0]["class"] == "no"
    place.roll_back()
    assert ask("/predict", b"[1, 0]")[1]["predictions"][0]["class"] == "yes"
    _, health = ask("/health")
    assert (health["model"]["round"], health["held"]) == (1, True)
    assert "rolled back to the model of round 1" in health["last"]
    _, page = ask("/metrics")
    for line in (
        'fedtide_live_model_round{model="7"} 1.0',
        'fedtide_live_model_events{event="rollbacks",model="7"} 1.0',
        'fedtide_predictions_total{class="yes",model="7"} 2.0',
        'fedtide_live_model_held{model="7"} 1.0',
        'fedtide_predict_requests_total{code="200",model="7"} 4.0',
        'fedtide_live_model_reads{model="7"} 3.0',
    ):  # fmt: skip
        assert line in page


def test_what_a_site_holds_back_is_not_told_to_callers_either(place):
    """How often each class is named, and how far inputs drift, tell of whom the site sees."""
    columns = {"kind": "table", "columns": {"features": ["age", "dose"]}}
    ranged = replace(facts(), transform=columns, ranges=((18.0, 90.0), (0.0, 1.0)))
    put_live(place, 0, of=ranged)
    held = held_back(Rules.of(require_privacy="level=client,epsilon=2,delta=1e-5"))
    with asking(place) as ask:
        assert "of the training data" in json.dumps(ask("/schema"))
    with asking(place, held_back=held) as ask:
        assert "of the training data" not in json.dumps(ask("/schema"))
        assert ask("/predict", b"[1, 0]")[1]["predictions"][0]["class"] == "yes"
        _, page = ask("/metrics")
    assert 'fedtide_predict_requests_total{code="200",model="7"} 1.0' in page
    assert "fedtide_predictions_total{" not in page
    told = held_back(
        Rules.of(require_privacy="level=client,epsilon=2,delta=1e-5", tell=["metrics"])
    )
    assert "metrics" in held
    assert "metrics" not in told


@pytest.mark.parametrize(
    ("path", "body", "kind", "headers", "status", "line"),
    [
        ("/predict", b"[1]", "application/json", {}, 400, "the input is [1]; the model takes [2]"),
        ("/predict", b"nonsense", "application/json", {}, 400, "no JSON array of numbers"),
        ("/predict", b"[" * 100_000, "application/json", {}, 400, "no JSON array of numbers"),
        (
            "/predict", b'["' + b"a" * 10**6 + b'"' + b",0" * 10**5 + b"]", "application/json", {},
            400, "no JSON array of numbers",
        ),
        ("/predict", b'{"inputs": {"a": 1}}', "application/json", {}, 400, "no JSON array"),
        ("/predict", b'["1", 0]', "application/json", {}, 400, "no JSON array of numbers"),
        ("/predict", b'["a", 0]', "application/json", {}, 400, "no JSON array of numbers"),
        ("/predict", b"[[1, 0], [1]]", "application/json", {}, 400, "no JSON array of numbers"),
        ("/predict", b"[NaN, 0]", "application/json", {}, 400, "not finite"),
        ("/predict", b"1", "application/json", {}, 400, "no JSON array of numbers"),
        ("/predict", b"", "application/json", {}, 400, "no JSON array of numbers"),
        ("/predict", b"a,b\n1,2\n", "text/csv", {}, 400, "is a table; the model takes arrays"),
        ("/predict", b"", "text/csv", {}, 400, "the input is a table; the model takes arrays [2]"),
        ("/predict", b"PNG", "image/png", {}, 400, "the input is no image, or damaged"),
        ("/predict", b"[1, 0]", "text/plain", {}, 415, "is none of text/csv"),
        ("/predict", b"[1, 0]", "", {}, 415, "is none of text/csv"),
        ("/predict", b"x" * ((16 << 20) + 1), "text/csv", {}, 413, "at most 16777216 are taken"),
        ("/predict", b"[1, 0]", "application/json", {"Host": "evil.example"}, 421, "asked for by"),
        ("/predict", None, "", {}, 405, "there are POST /predict, GET /health"),
        ("/other", b"[1, 0]", "application/json", {}, 404, "there are POST /predict"),
    ],
)  # fmt: skip
def test_what_is_refused_is_one_line(
    ask, path, body, kind, headers, status,
    line
):  # fmt: skip
    found, told = ask(path, body, kind, **headers)
    assert (found, [*told]) == (status, ["error"])
    assert line in told["error"]
    assert "/tmp" not in told["error"]


def test_a_fault_inside_is_one_line(ask, monkeypatch):
    monkeypatch.setattr(model_server, "predicted", lambda *args: 1 / 0)
    assert ask("/predict", b"[1, 0]") == (500, {"error": "the model cannot answer this"})


def test_what_would_grow_beyond_all_bounds_is_refused(tmp_path, monkeypatch):
    columns = {"features": ["a", "b"], "window": 64, "hop": 1, "time": "t", "rate": 10.0}
    transform = {"kind": "table", "columns": columns}
    of_windows = ModelFacts("mlp", {}, (2, 64), 2, transform=transform)
    body = b"t,a,b\n" + b"1,1,1\n" * 6000
    with pytest.raises(DataError, match="makes more than 16777216 numbers: send it in parts"):
        bodies.check_growth(tmp_path / "x.csv", "csv", body, of_windows)
    bodies.check_growth(tmp_path / "x.csv", "csv", body[:6000], of_windows)
    of_rows = ModelFacts("mlp", {}, (2,), 8, transform={"kind": "table", "columns": {
        "features": ["a", "b"],
    }})  # fmt: skip
    with pytest.raises(DataError, match="more than 1048576 cells: send it in parts"):
        bodies.check_growth(tmp_path / "x.csv", "csv", b"1,1\n" * 600_000, of_rows)
    with pytest.raises(DataError, match="holds more than 16384 inputs of the model: send it in"):
        bodies.check_growth(tmp_path / "x.csv", "csv", b"1,1\n" * 20_000, of_rows)
    with pytest.raises(DataError, match="more than 262144 numbers and arrays: send it in parts"):
        bodies.json_inputs(b"[" + b"0," * (1 << 20) + b"0]", of_rows)
    objects = json.dumps([{"a": 1}] * 20_000).encode()
    with pytest.raises(DataError, match="holds more than 16384 inputs of the model: send it in"):
        bodies.json_inputs(objects, of_rows)
    frames = [Image.new("L", (100, 100), shade) for shade in range(9)]
    frames[0].save(tmp_path / "x.gif", save_all=True, append_images=frames[1:])
    monkeypatch.setattr(bodies, "MAX_PIXELS", 80_000)
    with pytest.raises(DataError, match="send it in parts"):
        bodies.check_growth(tmp_path / "x.gif", "gif", b"", of_windows)


def test_the_schema_names_the_columns_that_rows_may_have():
    columns = {"features": ["age", "ward"], "categories": {"ward": ["north", "south"]}}
    how = {"kind": "table", "columns": columns}
    of_table = ModelFacts("mlp", {}, (4,), 2, transform=how, ranges=((18.0, 90.0),))
    rows, arrays = bodies.schema_of(of_table)["anyOf"]
    told = rows["items"]["properties"]
    assert told["age"]["description"] == "99 % of the training data: 36 to 72"
    assert told["ward"]["description"] == "one of north, south; others count as one more"
    rows, _ = bodies.schema_of(of_table, with_ranges=False)["anyOf"]
    assert "description" not in rows["items"]["properties"]["age"]
    taken = bodies.json_inputs(json.dumps([{"age": 40, "ward": "north"}]).encode(), of_table)
    assert taken.x.tolist() == [[40.0, 1.0, 0.0, 0.0]]
    assert arrays["description"] == "a raw input of shape [4], or several"
    assert "anyOf" not in bodies.schema_of(facts())


def test_a_long_number_costs_as_much_as_its_length():
    """A cell of 20,000 digits took eleven seconds, and one of 100,000 five minutes."""
    begun = time.process_time()
    for text in ("9" * 10**5 + "x", "9" * 10**5, " " * 10**5, "9" * 10**5 + "e"):
        for mark in (".", ","):
            is_number(text, mark)
    with pytest.raises(DataError, match="not finite in float32"):
        bodies.json_inputs(b"[" + b"9" * 10**5 + b"]", ModelFacts("mlp", {}, (1,), 2))
    assert time.process_time() - begun < 5


class Stuck:
    """Works on the first requests until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = threading.Semaphore(0), threading.Event()
        self.original = model_server.predicted
        monkeypatch.setattr(model_server, "predicted", self)

    def __call__(self, *given: Any) -> Any:
        self.begun.release()
        assert self.go_on.wait(60)
        return self.original(*given)


def test_whoever_finds_no_room_is_told_when_to_come_again(place, monkeypatch):
    """Callers beyond 32 had been cut off without an answer."""
    put_live(place, 0)
    stuck = Stuck(monkeypatch)
    monkeypatch.setattr(model_server, "cores", lambda: 1)
    monkeypatch.setattr(model_server, "MAX_WAITING", 0)
    with asking(place) as ask, ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, "/predict", b"[1, 0]")
        assert stuck.begun.acquire(timeout=30)
        status, told = ask("/predict", b"[1, 0]")
        assert (status, told["error"]) == (503, "1 requests are under way: come again later")
        assert ask("/health")[0] == 200, "it answers beside the work"
        stuck.go_on.set()
        assert first.result()[0] == 200
        assert ask("/predict", b"[1, 0]")[0] == 200


def status_of(call: http.client.HTTPConnection) -> int:
    """Return the status of the next answer of a connection, which stays."""
    call.request("POST", "/predict", b"[1, 0]", {"Content-Type": "application/json"})
    answer = call.getresponse()
    answer.read()
    return answer.status


def headers_of(server: ModelServer, body: bytes) -> tuple[int, dict[str, str], Any]:
    """Return status, headers and content of the answer to a request to predict."""
    call = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    call.request("POST", "/predict", body, {"Content-Type": "application/json"})
    answer = call.getresponse()
    found = answer.status, dict(answer.getheaders()), json.loads(answer.read())
    call.close()
    return found


def test_every_answer_names_the_run_and_the_model(place):
    SessionFile(place.folder.parent).write(Session("r" * 12, b"token"))
    server = ModelServer("127.0.0.1", 0, {"7": LiveModel.of(place.folder.parent.parent, 7)})
    end = server.begin("serving")
    try:
        assert not any(name.startswith("Fedtide-") for name in headers_of(server, b"[1, 0]")[1])
        for round in (0, 1):
            put_live(place, round)
            digest = hashlib.sha256(place.current.read_bytes()).hexdigest()
            status, headers, told = headers_of(server, b"[1, 0]")
            assert (told["model"]["sha256"], told["model"]["run"]) == (digest, "r" * 12)
            wanted = {"Run": "r" * 12, "Model-Sha256": digest, "Model-Round": str(round + 1)}
            assert {name: headers[f"fedtide-{name}".lower()] for name in wanted} == wanted
        status, headers, _ = headers_of(server, b"nonsense")
        assert (status, headers["fedtide-model-sha256"]) == (400, digest)
    finally:
        end()


def test_callers_that_stay_are_all_answered(place, monkeypatch):
    """Of 64 callers at a time, a tenth of the answers had been cut off."""
    put_live(place, 0)
    monkeypatch.setattr(serving, "INPUT", (2,))
    server = ModelServer("127.0.0.1", 0, {"7": LiveModel.of(place.folder.parent.parent, 7)})
    end = server.begin("serving")
    try:
        found = asyncio.run(serving.asked(server.port, 64, 0.1))
    finally:
        end()
    assert found.ends["200"] >= 64, "each got one at least"
    assert found.ends.keys() == {"200"}, "nobody was cut off, or told to come later"


def test_of_more_callers_than_may_wait_each_is_answered_or_told_to_come_later(place, monkeypatch):
    put_live(place, 0)
    monkeypatch.setattr(serving, "INPUT", (2,))
    monkeypatch.setattr(model_server, "cores", lambda: 1)
    monkeypatch.setattr(model_server, "MAX_WAITING", 1)
    server = ModelServer("127.0.0.1", 0, {"7": LiveModel.of(place.folder.parent.parent, 7)})
    end = server.begin("serving")
    try:
        found = asyncio.run(serving.asked(server.port, 32, 0.1))
    finally:
        end()
    assert found.ends["200"] > 0
    assert found.ends["503"] > 0
    assert not found.ends["cut"]


def test_callers_beyond_all_bounds_are_told_when_to_come_again(place, monkeypatch):
    """Of those that are connected, nobody is cut off; who came first is answered as before."""
    put_live(place, 0)
    monkeypatch.setattr(ModelServer, "most", 2)
    server = ModelServer("127.0.0.1", 0, {"7": LiveModel.of(place.folder.parent.parent, 7)})
    end, held = server.begin("serving"), server._server.server_state.connections
    try:
        first = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        with closing(first), ExitStack() as others:

            def connected(most: int) -> socket.socket:
                address = "127.0.0.1", server.port
                connection = others.enter_context(socket.create_connection(address, timeout=30))
                while len(held) < most:
                    time.sleep(0.001)
                return connection

            assert status_of(first) == 200
            for most in (2, 3):
                connected(most)
                assert status_of(first) == 200, "another one is too much"
            status, headers, told = headers_of(server, b"[1, 0]")
            assert (status, headers["retry-after"]) == (503, "1")
            assert (headers["connection"], len(told)) == ("close", 1)
            while len(held) > 3:
                time.sleep(0.001)
            connected(4)
            assert connected(4).recv(1) == b"", "files are left for the process itself"
            assert status_of(first) == 200
        while held:
            time.sleep(0.001)
        assert headers_of(server, b"[1, 0]")[0] == 200
    finally:
        end()


def test_a_request_has_limits_of_time(place, monkeypatch):
    put_live(place, 0)
    stuck = Stuck(monkeypatch)
    monkeypatch.setattr(model_server, "ANSWER_S", 0.1)
    monkeypatch.setattr(model_server, "BODY_S", 0.1)
    with asking(place) as ask:
        status, told = ask("/predict", b"[1, 0]")
        assert (status, told["error"][:22]) == (503, "there was no answer wi")
        stuck.go_on.set()
        assert ask("/predict", b"", **{"Content-Length": "5"})[0] == 408
        monkeypatch.setattr(http_server, "HEAD_S", 0.2)  # the heads above may come later
        with socket.create_connection(("127.0.0.1", ask.port), 30) as slow:  # type: ignore
            slow.sendall(b"GET /health HTTP/1.1\r\nHost: local")
            assert slow.recv(100) == b"", "a head that does not come ends its connection"


def test_a_request_at_work_has_a_limit_of_its_own_and_no_second_one():
    """A connection is looked at: once it waits too long, or one request is at work for too long."""
    looks, ended = list[Any](), list[bool]()

    def call_later(seconds: float, look: Any, cycle: Any) -> Any:
        looks.append((seconds, cycle))
        return SimpleNamespace(cancel=lambda: None)

    protocol: Any = http_server.BoundedProtocol.__new__(http_server.BoundedProtocol)
    protocol.loop = SimpleNamespace(call_later=call_later)
    protocol.transport = SimpleNamespace(abort=lambda: ended.append(True))
    first, second = (SimpleNamespace(response_complete=False) for _ in range(2))
    protocol.cycle = first
    protocol._look(None)
    protocol.cycle = second
    protocol._look(first)
    assert looks == [(http_server.SLOW_READER_S, first), (http_server.SLOW_READER_S, second)]
    assert not ended
    protocol._look(second)
    assert ended == [True]
    second.response_complete = True
    protocol._look(None)
    assert ended == [True, True], "it waits for a request that does not come"


@pytest.mark.parametrize(("parts", "read", "taken"), [(1, 1, True), (3, 3, False), (9, 5, False)])
def test_a_body_that_is_too_long_is_read_so_far_that_its_caller_hears_why(
    monkeypatch, parts, read, taken
):
    monkeypatch.setattr(model_server, "MAX_BODY", 10)
    monkeypatch.setattr(model_server, "MAX_DRAINED", 40)
    came = list[bytes]()

    async def stream() -> AsyncIterator[bytes]:
        for _ in range(parts):
            came.append(b"x" * 10)
            yield came[-1]

    request: Any = SimpleNamespace(stream=stream)
    found = asyncio.run(model_server._body_of(request))
    assert (len(came), found) == (read, b"x" * 10 if taken else None)


def test_a_damaged_first_model_is_named_each_time(place):
    place.folder.mkdir()
    place.current.write_bytes(b"half")
    live = LiveModel.of(place.folder.parent.parent, 7)
    for _ in range(2):
        with pytest.raises(ArchiveError):
            live.now()


def test_a_connection_takes_several_requests(place):
    put_live(place, 0)
    with asking(place) as ask:
        connection = http.client.HTTPConnection("127.0.0.1", ask.port, timeout=30)  # type: ignore
        for _ in range(3):
            connection.request("POST", "/predict", b"[1, 0]", {"Content-Type": "application/json"})
            assert connection.getresponse().read()
            held = connection.sock
            assert held is not None
        connection.close()


@pytest.mark.parametrize(
    ("header", "ok"),
    [
        ("127.0.0.1:8100", True), ("localhost", True), ("[::1]:8100", True), ("10.0.0.7", True),
        ("models.clinic.example:8100", True), ("MODELS.clinic.example", True),
        ("a.svc.cluster.local", True), ("svc.cluster.local", False), ("evil.example", False),
        ("models.clinic.example.evil.example", False), ("", False), ("a b", False),
    ],
)  # fmt: skip
def test_a_server_is_asked_by_the_names_that_it_is_given(header, ok):
    """The name of a service, or one that a proxy keeps, was refused whatever was said."""
    allowed = ("models.clinic.example", "*.svc.cluster.local")
    assert http_server.is_addressed(header, "0.0.0.0", allowed) == ok


def test_a_server_is_of_this_machine_unless_it_is_told_otherwise(place):
    words = "serve-model", "--run", place.folder.parent.parent, "--client", 7
    assert typed(*words, "--listen", "0.0.0.0:0") == 2
    assert typed("serve-model", "--listen", "0") == 2
    assert typed("serve-model", "--run", place.folder, "--client", 9) == 1


# --- a watched folder -----------------------------------------------------------------------------


def test_new_files_of_a_folder_are_answered_beside_them(place, tmp_path, monkeypatch):
    monkeypatch.setattr(settled, "SETTLE_S", 0.0)
    put_live(place, 0)
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    watched = WatchedFolder(inbox, LiveModel.of(place.folder.parent.parent, 7))
    assert [*watched.answers()] == []
    np.save(inbox / "one.npy", np.array([1.0, 0.0]))
    np.save(inbox / "bad.npy", np.array([1.0]))
    (inbox / ".half.npy").write_bytes(b"")
    (inbox / "notes.txt").write_text("no input")
    assert [*watched.answers()] == [], "it may still be written"
    said = [*watched.answers()]
    assert len(said) == 2
    assert said[0].startswith("not answered: ")
    assert "the model takes [2]" in (inbox / "bad.npy.error.txt").read_text()
    answer = inbox / "one.npy.predictions.csv"
    assert next(csv.DictReader(io.StringIO(answer.read_text())))["class"] == "yes"
    assert [*watched.answers()] == [*watched.answers()] == [], "each file once"
    again = WatchedFolder(inbox, watched.live)
    assert [*again.answers()] == [*again.answers()] == [], "also after a restart"

    put_live(place, 1, sign=-1.0)
    np.save(inbox / "bad.npy", np.array([1.0, 0.0]))
    os.utime(inbox / "bad.npy", (time.time() + 1e6, time.time() + 1e6))  # a clock that is ahead
    assert [*watched.answers()] == []
    (line,) = watched.answers()
    assert line.endswith("no 1, by the model of round 2")
    assert not (inbox / "bad.npy.error.txt").exists()
    assert [*watched.answers()] == [*watched.answers()] == []


def test_a_file_that_is_being_written_has_no_answer_yet(place, tmp_path, monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=0.0)
    monkeypatch.setattr(settled, "time", clock)
    put_live(place, 0)
    watched = WatchedFolder(tmp_path, LiveModel.of(place.folder.parent.parent, 7))
    for size in range(1, 4):
        np.save(tmp_path / "x.npy", np.zeros((size, 2)))
        for _ in range(3):
            assert [*watched.answers()] == []
            clock.now += settled.SETTLE_S / 3 - 0.01
    clock.now += 1
    assert len([*watched.answers()]) == 1


def test_a_folder_waits_for_the_first_model(place, tmp_path, monkeypatch):
    monkeypatch.setattr(settled, "SETTLE_S", 0.0)
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    np.save(inbox / "one.npy", np.array([1.0, 0.0]))
    watched = WatchedFolder(inbox, LiveModel.of(place.folder.parent.parent, 7))
    said = [line for _ in range(4) for line in watched.answers()]
    assert len(said) == 1
    assert "client 7 has no model yet" in said[0]
    with pytest.raises(NoModelYet):
        watched.live.now()
    put_live(place, 0)
    assert len([*watched.answers()]) == 1
    with pytest.raises(DataError, match="cannot be read"):
        [*WatchedFolder(tmp_path / "none", watched.live).answers()]


def test_what_is_to_be_watched_is_said_in_full():
    assert typed("predict", "--watch", "inbox") == 2
    assert typed("predict", "--run", "run", "--client", "0") == 2
    assert typed("predict", "x.npy", "--watch", "inbox", "--run", "run", "--client", 0) == 2
