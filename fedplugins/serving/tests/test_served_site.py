"""What a server of models does beside answering: it watches what it is asked, and takes labels."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcli.data.own.new_inputs import NewInputs
from fedcli.data.store.growing import add_task
from fedcli.data.store.opened_data import open_data
from fedcli.predicting.live_model import LiveModel, Loaded
from fedcli.predicting.prediction import predicted
from fedcli.runtime.deployed import Deployed
from fedmodels.errors import ArchiveNotWritten, DataError
from fedmodels.numerics.data_drift import MAX_EXAMPLES
from fedplugins.serving import label_store, site
from fedplugins.serving.label_store import Asked, LabelStore
from fedplugins.serving.model_server import ModelServer
from fedplugins.serving.served_inputs import WINDOW
from fedplugins.serving.site import AT_ALARM, OWED, RATE, Site, TooFast, places_of
from fedplugins.serving.tests.test_open_inference import Served, tensor
from fedplugins.serving.tests.test_serving import Killed, facts, put_live, typed

NAMES = ["no", "yes"]


def points(count: int, seed: int = 0, shift: float = 0.0) -> tuple[Any, Any]:
    """Return inputs of two numbers, of which the first one's sign is the class."""
    rng = np.random.default_rng(seed)
    y = np.arange(count) % 2
    x = rng.normal(0, 0.5, (count, 2)) + np.stack([4.0 * y - 2, np.full(count, shift)], axis=1)
    return x.astype(np.float32), y.astype(np.int64)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return the directory above the data of client 7, which has one task."""
    task = tmp_path / "data/7/task-0"
    task.mkdir(parents=True)
    for part, seed in (("train", 1), ("test", 2)):
        x, y = points(120, seed)
        np.save(task / f"{part}_x.npy", x)
        np.save(task / f"{part}_y.npy", y)
    about = {"format": 1, "input_shape": [2], "num_classes": 2, "class_names": NAMES}
    (task.parent / "client.json").write_text(json.dumps(about))
    return tmp_path / "data"


@pytest.fixture
def live(tmp_path: Path) -> LiveModel:
    place = Deployed(tmp_path / "states/7")
    place.folder.parent.mkdir(parents=True)
    put_live(place, 0)
    return LiveModel.of(tmp_path / "states", 7)


def asked(of: Site, now: Loaded, x: Any) -> str:
    return of.answered(now, predicted(now.model, NewInputs(Path("x"), x)))


def label(of: Site, x: Any, names: list[str], now: Loaded, call: str = "") -> dict[str, Any]:
    """Send labels in a call of its own: by default another one for other rows."""
    return of.label(call or str(x.tolist()), range(len(x)), x, names, now)


def labelled(of: Site, x: Any, names: list[str], now: Loaded) -> None:
    label(of, x, names, now)
    of._make_tasks()


def tasks_of(root: Path) -> list[Any]:
    return [*open_data(root, 7).tasks]


def rows_in(root: Path) -> set[tuple[float, ...]]:
    """Return the inputs of all tasks but the first one; each is in one place."""
    data = open_data(root, 7)
    parts = [data.raw(t, part)[0] for t in range(1, len(data.tasks)) for part in ("train", "test")]
    rows = [tuple(map(float, row)) for x in parts for row in x]
    assert len({*rows}) == len(rows)
    return {*rows}


# --- over HTTP ------------------------------------------------------------------------------------


def test_labels_that_come_later_become_a_task(root, live):
    here = Site(root, 7, 10)
    server = ModelServer("127.0.0.1", 0, {"client-7": live}, sites={"client-7": here})
    end, ask = server.begin("serve-model"), Served(server.port)
    x, _ = points(6, 3)
    _, plain = ask("/predict", x[:3].tolist())
    _, v2 = ask("/v2/models/client-7/infer", {"inputs": [tensor(x[3:].tolist(), (3, 2))]})
    first, second = plain["request"], v2["parameters"]["request"]
    assert first != second
    taken = {"request": first, "labels": ["no", None, "no"]}
    status, told = ask("/feedback", taken)
    counts = "taken", "known", "corrected", "late", "waiting", "task_at"
    assert (status, [told[k] for k in counts]) == (200, [2, 0, 0, 0, 2, 10])
    again = {"request": first, "labels": ["yes", "no", "no"]}
    told = ask("/feedback", again)[1]
    assert [told[k] for k in counts] == [1, 1, 1, 0, 3, 10]
    told = ask("/models/client-7/feedback", {"request": second, "labels": ["no", "yes", "no"]})[1]
    assert [told[k] for k in counts] == [3, 0, 0, 0, 6, 10]
    more = points(4, 4)[0].tolist()
    call = {"id": "a" * 16, "inputs": more, "labels": NAMES * 2}
    told = ask("/feedback", call)[1]
    assert (told["taken"], told["waiting"]) == (4, 10)
    told = ask("/feedback", call)[1]
    assert (told["taken"], told["known"]) == (0, 4), "sent again, it adds nothing"
    for wrong, code, line in (
        ({"request": first, "labels": ["no"]}, 400, "1 labels come for 3 predictions"),
        ({"request": "x", "labels": ["no"]}, 404, "no request 'x' was answered here lately"),
        (
            {"id": "b" * 16, "inputs": [1, 0], "labels": ["Yes"]},
            400,
            "'Yes' is no class of the model: write 'yes'",
        ),
        (
            {"id": "b" * 16, "inputs": [1, 0], "labels": ["may be"]},
            400,
            "'may be' is no class of the model",
        ),
        (
            {"id": "b" * 16, "inputs": [1, 0], "labels": [[1]]},
            400,
            "a label is the name of a class, or null",
        ),
        ({"id": "b" * 16, "inputs": [1], "labels": ["no"]}, 400, "the model takes [2]"),
        ({"inputs": [1, 0], "request": first, "labels": ["no"]}, 400, "the id your own"),
        ({"inputs": [1, 0], "labels": ["no"]}, 400, "the id your own"),
        ({"id": "1", "inputs": [1, 0], "labels": ["no"]}, 400, "16 to 128 printable letters"),
        ({"request": 3, "labels": ["no"]}, 400, "named by the id"),
        ([1, 2], 400, "labels come as"),
    ):
        status, told = ask("/feedback", wrong)
        assert (status, [*told]) == (code, ["error"])
        assert line in told["error"]
    here.end()
    assert ask("/feedback", taken)[0] == 503, "nothing is taken that is not kept"
    end()
    assert [sum(task.train) + sum(task.test) for task in tasks_of(root)] == [240, 10]
    assert rows_in(root) == {tuple(map(float, row)) for row in [*x.tolist(), *more]}
    again_here = Site(root, 7, 10)
    told = again_here.label(f"request {first}", [0, 1], x[:2], ["no", "no"], live.now())
    assert (told["late"], told["known"], told["waiting"]) == (1, 1, 0)
    again_here.end()


def test_equal_rows_of_one_request_are_rows_of_their_own(root, live):
    """Of 100 equal predictions, labelled 70 times so and 30 times otherwise, one row was left."""
    here = Site(root, 7, 100)
    server = ModelServer("127.0.0.1", 0, {"client-7": live}, sites={"client-7": here})
    end, ask = server.begin("serve-model"), Served(server.port)
    told = ask("/predict", [[1.0, 0.0]] * 100)[1]
    names = ["no"] * 70 + ["yes"] * 30
    told = ask("/feedback", {"request": told["request"], "labels": names})[1]
    assert (told["taken"], told["waiting"]) == (100, 100)
    end()
    here.end()
    task = tasks_of(root)[1]
    assert [a + b for a, b in zip(task.train, task.test, strict=True)] == [70, 30]


def test_a_caller_neither_hears_of_rows_of_others_nor_changes_their_labels(root, live):
    """With the answers known, corrected and late one could ask whether a row was there."""
    here = Site(root, 7, 1000)
    tokens = "m" * 32, "n" * 32
    models = {"client-7": live}
    server = ModelServer("127.0.0.1", 0, models, sites={"client-7": here}, tokens=tokens)
    end, ask = server.begin("serve-model"), Served(server.port)
    mine, other = ({"Authorization": f"Bearer {token}"} for token in tokens)
    row = [[1.0, 0.0]]
    request = ask("/predict", row)[1]["request"]
    assert ask("/feedback", {"request": request, "labels": ["no"]}, **mine)[1]["taken"] == 1
    call = {"id": "0" * 16, "inputs": row, "labels": ["no"]}
    assert ask("/feedback", call, **mine)[1]["taken"] == 1
    heard = []
    for label in NAMES:
        for inputs in (row, [[9.0, 9.0]]):  # one that is there, and one that is not
            told = ask("/feedback", {**call, "inputs": inputs, "labels": [label]}, **other)[1]
            heard.append({k: told[k] for k in ("taken", "known", "corrected", "late")})
    assert heard[0] == heard[1]
    assert heard[2] == heard[3]
    end()
    assert here.store is not None
    here.store.gather([], {})
    (batch,) = here.store.batches(np.dtype(np.float32))
    assert [*batch.classes] == ["no", "no", "yes", "yes"], "two of mine, two of the other one"
    here.end()


def test_tasks_do_not_follow_each_other_faster_than_they_may(root, live, monkeypatch):
    """One caller had made 78 tasks in 25 seconds, and each was trained."""
    clock = [1e9]
    monkeypatch.setattr(site.time, "time", lambda: clock[0])
    here, now = Site(root, 7, 10, every_s=3600), live.now()
    rows = [points(10, seed) for seed in range(20, 30)]
    for x, y in rows[:8]:
        label(here, x, [NAMES[k] for k in y], now)
        here._pool.submit(int).result()
    assert len(tasks_of(root)) == 2
    assert here.store is not None
    here.store.keep({OWED: "it moved"})
    for step in (0.0, 3599.9):
        clock[0] += step
        x, y = rows[8]
        label(here, x + step, [NAMES[k] for k in y], now)
        here._pool.submit(int).result()
        assert len(tasks_of(root)) == 2, "nor with an alarm"
    here.end()
    again = Site(root, 7, 10, every_s=3600)
    again._pool.submit(int).result()
    assert len(tasks_of(root)) == 2, "nor after a restart"
    for later in (0.0, 1.0):  # a timer may go off a little before the other clock says so
        assert again._timer is not None
        assert 0 < again._timer.interval <= 0.2
        clock[0] += later
        again._timer.join()
        again._pool.submit(int).result()
    again.end()
    task = tasks_of(root)[2]
    assert sum(task.train) + sum(task.test) == 90, "what waited is one task, and nothing is lost"
    clock[0] -= 1e6
    third = Site(root, 7, 10, every_s=3600)
    label(third, rows[9][0], [NAMES[k] for k in rows[9][1]], now)
    third.end()
    assert len(tasks_of(root)) == 4, "a clock that was set back stops nothing"


def test_the_keys_of_old_rows_go(tmp_path, monkeypatch):
    """Of every row for ever there was a key, and after two million no label had room."""
    monkeypatch.setattr(label_store, "MAX_BYTES", 256 << 10)
    monkeypatch.setattr(label_store, "KEPT_ROWS", 200)
    store, x = LabelStore(tmp_path, [2]), np.zeros((100, 2), np.float32)
    for call in range(60):
        told = store.label(f"call {call}", range(100), x, ["no"] * 100)
        assert told == {"taken": 100}
        store.gather([], {})
        (batch,) = store.batches(np.dtype(np.float32))
        assert batch.number == call
        store.done(batch.number, {})
        assert store.label(f"call {call}", range(100), x, ["no"] * 100) == {"known": 100}
    store.close()


def test_without_the_option_no_label_is_taken_and_nothing_is_written(root, live, tmp_path, capsys):
    here = Site(root, 7, None)
    server = ModelServer("127.0.0.1", 0, {"client-7": live}, sites={"client-7": here})
    end, ask = server.begin("serve-model"), Served(server.port)
    assert "request" not in ask("/predict", [[1.0, 0.0]])[1]
    assert ask("/feedback", {"id": "a" * 16, "inputs": [1, 0], "labels": ["no"]})[0] == 404
    end()
    here.end()
    assert {path.name for path in (root / "7").iterdir()} == {"client.json", "task-0"}
    words = "serve-model", "--listen", 0, "--feedback", 10
    assert typed(*words, "--model", live.now().file)
    assert "are for a client's model" in capsys.readouterr().err
    assert typed(*words, "--run", tmp_path / "states", "--client", 7)
    assert "own-data has no data of client 7: pass the parent" in capsys.readouterr().err


# --- crashes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    "step", ["label", "gather", "save_arrays", "add_task", "done", "rmtree", "write_atomically"]
)
def test_a_kill_at_any_step_loses_no_row_and_adds_none_twice(
    root, live, step, after, monkeypatch
):  # fmt: skip
    owner: Any = LabelStore if step in ("label", "gather", "done") else site
    owner = site.shutil if step == "rmtree" else owner
    original: Callable[..., Any] = getattr(owner, step)

    def dies(*args: Any, **more: Any) -> Any:
        if after:
            original(*args, **more)
        raise Killed

    here, (x, y) = Site(root, 7, 10), points(12, 5)
    here._pool.shutdown()
    here._later = lambda *work: None  # type: ignore[method-assign]
    names = [NAMES[k] for k in y]
    with monkeypatch.context() as patched:
        patched.setattr(owner, step, dies)
        with pytest.raises(Killed):
            labelled(here, x, names, live.now())
    here.end()
    again = Site(root, 7, 10)  # takes up what was left
    label(again, x, names, live.now())  # a caller that heard nothing sends it again
    again.end()
    assert len(tasks_of(root)) == 2
    assert rows_in(root) == {tuple(map(float, row)) for row in x}
    assert not [*(root / "7").glob("feedback-*")]


def test_what_was_answered_is_on_the_disk(tmp_path):
    code = (
        "import os, signal, sys, numpy as np; from pathlib import Path\n"
        "from fedplugins.serving.label_store import LabelStore\n"
        "store = LabelStore(Path(sys.argv[1]), [2])\n"
        "store.label('call', [0], np.ones((1, 2), np.float32), ['no'])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=os.environ, check=False)
    assert ended.returncode == -signal.SIGKILL
    store = LabelStore(tmp_path, [2])
    assert store.waiting == 1
    store.close()


# --- bounds ---------------------------------------------------------------------------------------


def test_what_may_not_be_is_refused(root, live, monkeypatch, tmp_path):
    here = Site(root, 7, 10)
    now = live.now()
    with pytest.raises(DataError, match="send them in parts"):
        label(here, np.zeros((RATE + 1, 2)), ["no"] * (RATE + 1), now)
    here._left = 1.0
    with pytest.raises(TooFast, match="a minute"):
        label(here, np.zeros((1000, 2)), ["no"] * 1000, now)
    with pytest.raises(DataError, match="the client's inputs are float32"):
        label(here, np.array([[1e39, 0]]), ["no"], now)
    with pytest.raises(ArchiveNotWritten, match="another server has it"):
        LabelStore(root / "7", [2])
    here.end()
    monkeypatch.setattr(label_store, "MAX_BYTES", 256 << 10)
    small = LabelStore(tmp_path, [2])
    for name in range(100):
        small.ask(str(name), Asked(np.zeros((100, 2), np.float32), [*range(100)], 100))
    assert small.asked("0") is None, "the oldest go"
    found = small.asked("99")
    assert found is not None
    assert found.x.shape == (100, 2)
    with pytest.raises(ArchiveNotWritten, match="full"):
        small.label("call", range(10_000), np.zeros((10_000, 2)), ["no"] * 10_000)
    assert small.waiting == 0, "all of a request, or nothing"
    small.close()
    (tmp_path / label_store.FILE).write_bytes(b"damaged" * 1000)
    with pytest.raises(DataError, match="is damaged"):
        LabelStore(tmp_path, [2])


def test_whole_numbers_stay_whole(root, live):
    data = root / "7/task-0"
    for part in ("train", "test"):
        np.save(data / f"{part}_x.npy", np.zeros((120, 2), np.uint8))
    here = Site(root, 7, 10)
    with pytest.raises(DataError, match="the client's inputs are uint8"):
        label(here, np.array([[0.5, 1]]), ["no"], live.now())
    assert label(here, np.array([[3.0, 1]]), ["no"], live.now())["taken"] == 1
    here.end()


def test_a_row_without_an_answer_has_a_place_for_its_label():
    found = NewInputs(Path("x"), np.zeros((2, 2)), "row", [(1, 1), (3, 3)], left=[(2, "empty", ())])
    assert places_of(found) == ([0, 2], 3)


def test_labels_that_are_no_task_stay_beside_the_data(root, live, caplog, monkeypatch):
    def refused(*args: Any, **more: Any) -> Any:
        raise DataError("they are in earlier tasks already")

    here, (x, y) = Site(root, 7, 10), points(12, 6)
    with monkeypatch.context() as patched:
        patched.setattr(site, "add_task", refused)
        label(here, x, [NAMES[k] for k in y], live.now())
        here.end()
    assert "labels do not make a task: they are in earlier tasks already" in caplog.text
    assert np.load(root / "7/feedback-0/train_x.npy").shape == (12, 2)
    assert "earlier tasks" in (root / "7/feedback-0/why.txt").read_text()
    assert len(tasks_of(root)) == 1
    Site(root, 7, 10).end()
    assert len(tasks_of(root)) == 1, "they are not tried again"
    (root / "7" / label_store.FILE).unlink()
    third, (x, y) = Site(root, 7, 10), points(12, 7)
    label(third, x, [NAMES[k] for k in y], live.now())
    third.end()
    assert len(tasks_of(root)) == 2
    assert np.load(root / "7/feedback-0/train_x.npy").shape == (12, 2), "nor written over"


@pytest.mark.parametrize(("sizes", "tested"), [([4, 3, 1, 3], {3}), ([11], set())])
def test_windows_that_overlap_are_of_one_part(root, live, sizes, tested, monkeypatch):
    """Those of one call are of one recording: its windows are all for training, or for testing."""
    monkeypatch.setattr(Site, "_strange", lambda site, now: "")
    columns = {"label": "y", "features": ["a"], "window": 4, "hop": 2}
    for part in ("train", "test"):
        np.save(root / f"7/task-0/{part}_x.npy", np.zeros((120, 1, 4), np.float32))
    about = json.loads((root / "7/client.json").read_text())
    about |= {"input_shape": [1, 4], "transform": {"kind": "table", "columns": columns}}
    (root / "7/client.json").write_text(json.dumps(about))
    here = Site(root, 7, 11)
    for call, size in enumerate(sizes):
        x = np.random.default_rng(call).normal(call, 0.01, (size, 1, 4)).astype(np.float32)
        label(here, x, [NAMES[n % 2] for n in range(size)], live.now())
    here.end()
    data = open_data(root, 7)
    calls = [{*data.raw(1, p)[0].round().ravel().tolist()} for p in ("train", "test")]
    assert calls == [{*range(len(sizes))} - tested, tested]


def test_what_is_refused_leaves_an_alarm_for_the_next_task(root, live, monkeypatch):
    def refused(*args: Any, **more: Any) -> Any:
        raise DataError("no")

    x, y = points(2 * AT_ALARM, 9)
    names = [NAMES[k] for k in y]
    here = Site(root, 7, 1000)
    assert here.store is not None
    here.store.keep({OWED: "it moved"})
    with monkeypatch.context() as patched:
        patched.setattr(site, "add_task", refused)
        label(here, x[:AT_ALARM], names[:AT_ALARM], live.now())
        here._pool.submit(int).result()
    label(here, x[AT_ALARM:], names[AT_ALARM:], live.now())
    here.end()
    assert tasks_of(root)[1].drifted == "it moved"


def test_a_model_for_other_data_answers_and_nothing_of_it_is_kept(root, live, caplog):
    about = json.loads((root / "7/client.json").read_text())
    for part in ("train", "test"):
        np.save(root / f"7/task-0/{part}_x.npy", np.zeros((120, 3), np.float32))
    (root / "7/client.json").write_text(json.dumps({**about, "input_shape": [3]}))
    here = Site(root, 7, 10)
    assert not asked(here, live.now(), points(WINDOW)[0])
    with pytest.raises(DataError, match=r"takes \[2\], and the client's data have \[3\]"):
        label(here, points(1)[0], ["no"], live.now())
    here.end()
    assert "neither monitored nor kept: the model takes [2]" in caplog.text
    assert here.watch.windows == 0


def test_what_was_asked_goes_by_age_and_costs_no_more_with_more_of_it(tmp_path, monkeypatch):
    store, one = LabelStore(tmp_path, [2]), Asked(np.zeros((1, 2), np.float32), [0], 1)
    steps = list[int]()
    store._db.set_progress_handler(lambda: steps.append(1), 1)

    def cost_of(name: str) -> int:
        steps.clear()
        store.ask(name, one)
        return len(steps)

    first = [cost_of(str(name)) for name in range(3)][-1]
    assert [cost_of(str(name)) for name in range(3, 300)][-1] < 2 * first
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + label_store.FEEDBACK_KEPT_S + 9)
    store.ask("new", one)
    assert store.asked("0") is None
    assert store.asked("299") is None
    assert store.asked("new") is not None
    monkeypatch.setattr(label_store, "MAX_BYTES", 1 << 10)
    with pytest.raises(ArchiveNotWritten, match="keeps no request of"):
        store.ask("long", Asked(np.zeros((100, 2), np.float32), [*range(100)], 100))
    store.close()


# --- drift ----------------------------------------------------------------------------------------


def test_inputs_that_moved_are_told_and_labels_become_a_task_at_once(root, live, caplog):
    now = live.now()
    here = Site(root, 7, 1000)
    for seed in range(10, 13):
        asked(here, now, points(WINDOW, seed)[0])
        here._pool.submit(int).result()
    last = here.watch.last
    assert last is not None
    assert (here.watch.windows, last.alarm) == (3, False)
    for one in points(WINDOW, 20, shift=3.0)[0]:  # one by one
        asked(here, now, one[None])
    here.end()
    last = here.watch.last
    assert last is not None
    assert last.alarm
    assert "its model is asked moved from its data: the mean of number 1, by" in caplog.text
    again = Site(root, 7, 1000)
    x, y = points(AT_ALARM, 21, shift=3.0)
    label(again, x, [NAMES[k] for k in y], now)
    again.end()
    (first, task) = tasks_of(root)
    assert not first.drifted
    assert task.drifted.startswith("the mean of number 1, by")
    caplog.clear()
    third = Site(root, 7, 1000)
    assert third.store is not None
    assert third.store.kept(OWED, "none", str) == ""
    asked(third, now, points(WINDOW, 22, shift=3.0)[0])
    third.end()
    assert "moved from its data" not in caplog.text, "the alarm lasts, also over a restart"


def test_a_request_is_a_session_and_a_long_test_part_counts_from_end_to_end(
    root, live, monkeypatch
):
    """Rows of one recording resemble each other, and test parts lie in the order of time."""
    compared = list[Any]()
    monkeypatch.setattr(
        "fedplugins.serving.served_inputs.moved", lambda *given: compared.extend(given)
    )
    x, y = points(3000)
    x[:, 1] = np.linspace(0, 1, len(x))
    np.save(root / "7/task-0/test_x.npy", x)
    np.save(root / "7/task-0/test_y.npy", y)
    here, now = Site(root, 7, None), live.now()
    for size in (40, 60, 100):
        asked(here, now, points(size, size)[0])
    here.end()
    (reference,), none, served = compared
    assert none is None
    assert served.mix.sum(1).tolist() == [40, 60, 100]
    means = reference.cells[:, 1].sort().values
    assert reference.mix.sum() == MAX_EXAMPLES
    assert (means[0] < 0.2, means[-1] > 0.8) == (True, True)


def test_a_model_that_is_asked_nothing_new_and_a_client_without_test_data(root, live):
    now, here = live.now(), Site(root, 7, None)
    for part in ("test_x.npy", "test_y.npy"):
        (root / f"7/task-0/{part}").unlink()
    asked(here, now, points(WINDOW, 1)[0])
    here.end()
    assert (here.watch.windows, here.watch.last) == (1, None)
    assert facts().num_classes == 2


def test_a_task_may_say_that_inputs_moved(root, tmp_path):
    folder = tmp_path / "more"
    folder.mkdir()
    x, y = points(20, 8)
    np.save(folder / "train_x.npy", x)
    np.save(folder / "train_y.npy", y)
    add_task(root, 7, folder, drifted="b\nc" * 200)
    said = tasks_of(root)[1].drifted
    assert len(said) <= 300
    assert said.isprintable()
    told = open_data(root, 7).file.told("rounded").tasks[1].drifted
    assert told == "its own log says in what"
