"""Tasks and classes that come while a run goes on, at the client: noticed, announced, learned."""

from __future__ import annotations

import json
import logging
import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fedcli.cli import app
from fedcli.data import settled
from fedcli.data.store.growing import add_task
from fedcli.data.store.opened_data import open_data
from fedcli.data.store.own_files import CUT_FILE
from fedcli.gate.gate import Gate
from fedcli.gate.rules import Rules
from fedcli.parts.kept_models import described
from fedcli.parts.open_runs import OpenRuns, Spare
from fedcli.runtime.announcer import Announcer, Watched, how_cut
from fedcli.runtime.answers import RunOver, SessionGone, UploadRefused
from fedcli.runtime.enrolment import Enrolment
from fedcli.runtime.host import Host
from fedcli.runtime.link import Membership
from fedcli.runtime.worker import Result, Worker
from fedcli.runtime.workers import Workers
from fedmodels.config.data import Data
from fedmodels.errors import ConfigError, LinkError, PayloadError
from fedmodels.nets.trained import TrainedModel
from fedmodels.tensors.archive import load
from fedmodels.tensors.bundle import Bundle, ClientId
from fedpb.tables import table_of
from fedpb.v1 import coordinator_pb2 as rpc
from tests.conftest import tiny_experiment
from tests.fedcli.data.test_growing import images, shots
from tests.fedcli.data.test_own_data import own

NEW = ["cow", "fox"]
"""The server's order of new classes; client 0 knows of the second one alone."""
OPEN = {"open": True, "order": "tasks_outer"}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for client in range(2):
        own(tmp_path / "data", client, class_names=["a", "b"])
    return tmp_path / "data"


def workers_of(data: Path, states: Path, **tables: Any) -> Workers:
    made = Workers([0, 1], data, states, torch.device("cpu"))
    tables = {"method": "fedper", "net": {"name": "mlp", "hidden": [4]}, **tables, "schedule": OPEN}
    made.begin(tiny_experiment(**tables), ["a", "b"])
    return made


def order_of(kind: Any = rpc.ORDER_KIND_TRAIN, **facts: Any) -> rpc.Order:
    facts = {
        "client_id": "0",
        "interaction": 0,
        "base": -1,
        "committed": -1,
        "durable": -1,
        **facts,
    }
    return rpc.Order(kind=kind, **facts)


def executed(one: Worker, order: rpc.Order) -> Result:
    """Execute an order on the initial weights of its classes."""
    set_up = one.set_ups.of(order)
    sent, spec = set_up.run.initial_weights, set_up.payload_spec["common"]
    names = [key.removeprefix("weights/") for key in spec.required]
    found = one.execute(order, Bundle(weights={name: sent[name] for name in names}))
    assert found is not None
    assert found.failure == ""
    return found


def test_a_worker_goes_on_with_new_classes_and_back(data, tmp_path, synced):
    """Its head grows; what it stored with fewer classes is used again after a roll-back."""
    known = workers_of(data, tmp_path / "states")
    first = executed(known.of(0), order_of())
    assert "classes" not in load(known.of(0).states.path / "state-00000000.safetensors")[1]
    add_task(data, 0, images(tmp_path / "month", "fox", "b", count=3))
    one = known.of(0)
    assert one.data.num_tasks == 2
    later = order_of(
        interaction=1, base=0, committed=0, task=1, tasks_seen=2, new_classes=NEW,
        views=["after_local"],
    )  # fmt: skip
    done = executed(one, later)
    assert done.report.num_examples == 6
    supports = {c.test_set: list(c.support) for c in done.report.counts}
    assert supports == {"task/0": [4, 4, 0, 0], "task/1": [0, 3, 0, 3]}
    state, facts = load(one.states.path / "state-00000001.safetensors")
    assert facts["classes"] == "4"
    assert state.weights["head/weight"].shape == (4, 4)
    begun = one.private.at(order_of(base=0, new_classes=NEW)).learnt.weights["head/weight"]
    before = load(one.states.path / "state-00000000.safetensors")[0].weights["head/weight"]
    assert torch.equal(begun[:2], before)
    one.states.save_personal(*described(one, one.net, "after_downlink", 1))
    model = TrainedModel.load(one.states.path / "personal.safetensors")
    assert [*model.class_names] == ["a", "b", "cow", "fox"]
    again = executed(one, order_of(trip=1))  # the run went back, and has two classes
    for name, tensor in first.upload.weights.items():
        assert torch.equal(tensor, again.upload.weights[name])
    assert one.run.problem.num_classes == 2
    other = workers_of(data, tmp_path / "other").of(0)  # another process, which begins late
    executed(other, order_of())
    late = executed(other, later)
    for name, tensor in done.upload.weights.items():
        assert torch.equal(tensor, late.upload.weights[name])
    assert late.report.counts == done.report.counts


def test_a_state_of_more_classes_than_the_order_has_is_refused(data, tmp_path):
    one = workers_of(data, tmp_path / "states").of(0)
    executed(one, order_of(new_classes=NEW))
    found = one.execute(order_of(interaction=1, base=0, committed=0), Bundle())
    assert found is not None
    assert found.failure == "the order is of 2 classes, and the private state that it names of 4"


def test_payloads_are_held_against_the_classes_of_their_order(data, tmp_path):
    known = workers_of(data, tmp_path / "states", method="fedavg").set_ups
    rows = [
        known.of(order_of(new_classes=new))
        .payload_spec["common"]
        .required["weights/head/weight"]
        .shape[0]
        for new in ([], ["x"], NEW, [])
    ]
    assert rows == [2, 3, 4, 2]
    assert known.of(order_of(new_classes=NEW)) is known.of(order_of(new_classes=NEW))
    for wrong in (["a"], ["x", "x"]):
        with pytest.raises(PayloadError, match=r"names 2 classes and . new ones: one twice"):
            known.of(order_of(new_classes=wrong))


@pytest.mark.parametrize("name", ["", " x", "x\x1b[2J", "x\n", "x" * 101, "a"])
def test_a_server_gives_a_class_no_name_that_is_none(data, tmp_path, name):
    set_ups = workers_of(data, tmp_path / "states", method="fedavg").set_ups
    change = rpc.ClassChange(after=0, old="b", now="y")
    known = order_of(new_classes=["x"], class_changes=[change])
    assert set_ups.of(known).classes.names == ("a", "y", "x")
    change.now = name
    merges = name == "a"  # "b" may become part of another class
    for told in {"new_classes": [name]}, *([] if merges else [{"class_changes": [change]}]):
        with pytest.raises(PayloadError, match="or one cannot be a name"):
            set_ups.of(order_of(**told))


def test_classes_of_the_server_are_checked(data, tmp_path):
    for wrong in (["a", "a"], map(str, range(100_001))):
        made = Workers([0], data, tmp_path / "states", torch.device("cpu"))
        with pytest.raises(PayloadError, match="one twice, or too many"):
            made.begin(tiny_experiment(schedule=OPEN), [*wrong])


def test_classes_are_the_clients_own_until_the_server_names_them(data, tmp_path):
    """Data that come before the run has begun count, too, if the server forgot the client."""
    made = Workers([0], data, tmp_path / "states", torch.device("cpu"))
    made.begin(tiny_experiment(schedule=OPEN, net={"name": "mlp", "hidden": [4]}))
    one = made.of(0)
    made.name([])
    assert made.of(0) is one
    add_task(data, 0, images(tmp_path / "month", "fox"))
    for named in ([], ["a", "b", "fox"]):
        made.name(named)
        assert made.set_ups.classes == ("a", "b", "fox")
    made.name([])
    with pytest.raises(LinkError, match="other classes than at the start of the run"):
        made.name(["a", "b"])


def test_tests_of_the_last_tasks_alone(data, tmp_path):
    add_task(data, 0, images(tmp_path / "month", "b"))
    one = workers_of(data, tmp_path / "states", method="fedavg").of(0)
    order = order_of(
        rpc.ORDER_KIND_EVALUATE, first_task=1, tasks_seen=2, task=1, views=["after_downlink"]
    )
    executed(one, order_of(rpc.ORDER_KIND_EVALUATE, tasks_seen=2, views=["after_downlink"]))
    assert one.stream._test.keys() == {0, 1}
    assert {c.test_set for c in executed(one, order).report.counts} == {"task/1"}
    assert one.stream._test.keys() == {1}  # what is scored no more leaves the memory


def test_a_client_goes_on_without_the_training_data_of_earlier_tasks(data, tmp_path):
    add_task(data, 0, images(tmp_path / "month", "b"))
    for path in (data / "0" / "task-0").glob("train*"):
        path.unlink()
    one = workers_of(data, tmp_path / "states", method="fedavg").of(0)
    order = order_of(task=1, tasks_seen=2, views=["after_local"])
    assert {c.test_set for c in executed(one, order).report.counts} == {"task/0", "task/1"}


def test_a_description_is_read_again_before_the_next_order(data, tmp_path, caplog):
    known = workers_of(data, tmp_path / "states")
    one = known.of(0)
    held, stream = one.data, one.stream.data
    add_task(data, 0, images(tmp_path / "month", "b"))
    assert one.data.num_tasks == 1  # not in the middle of an order
    assert known.of(0) is one
    assert (held.num_tasks, stream.num_tasks, one.data.num_tasks) == (2, 2, 2)
    (data / "0" / "client.json").write_text("{")
    assert known.of(0).data.num_tasks == 2
    assert "client 0 continues with the data that it had: " in caplog.text


def test_a_line_says_when_old_data_are_spare(caplog):
    caplog.set_level(logging.INFO)
    spare = Spare()

    def told(**facts: Any) -> list[str]:
        caplog.clear()
        spare.tell(order_of(**facts))
        return [record.getMessage() for record in caplog.records]

    assert told(interaction=0, task=0, durable=-1) == []
    assert told(interaction=4, task=0, durable=3) == []
    assert told(interaction=5, task=1, durable=3) == []
    assert told(kind=rpc.ORDER_KIND_EVALUATE, interaction=5, task=1, durable=4) == [
        "client 0: the run has gone on to task 1: the training data of task 0 are not needed any "
        "more"
    ]
    assert told(interaction=6, task=1, durable=5) == []
    assert "tasks 0 to 2 are" in told(interaction=9, task=3, durable=8)[0]


# --- announcing


class FakeLink:
    """Notes what is announced; the next answers are given."""

    address, is_closed = "127.0.0.1:9", False

    def __init__(self) -> None:
        self.told: list[tuple[ClientId, int, list[str]]] = []
        self.answers: list[Exception] = []
        self.joined: list[int] = []
        self.data: dict[str, Any] | None = None
        self.gate = Gate()

    def announce(self, member: Membership, description: Any) -> list[rpc.TaskOf]:
        names = list(description.class_names)
        self.told.append((member.client, len(description.tasks), names))
        if self.answers:
            raise self.answers.pop(0)
        return []

    def join(self, request: Any) -> rpc.JoinResponse:
        self.joined += [len(one.tasks) for one in request.clients]
        return rpc.JoinResponse(run_id="run", beat_every_s=1.0)

    def prepare(self, client: ClientId) -> rpc.PrepareResponse:
        if self.data is None:
            raise ConfigError("the run's config has no [data]")
        return rpc.PrepareResponse(data=table_of(self.data), seed=3)


@pytest.fixture
def enrolment(data: Path, tmp_path: Path) -> Any:
    link: Any = FakeLink()
    made: Any = Enrolment(link, workers_of(data, tmp_path / "s"), tmp_path / "s", start_over=False)
    made.join()
    return made


def test_a_task_from_outside_is_announced_once(enrolment, data, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    news = Announcer(enrolment)
    news.look()
    add_task(data, 1, images(tmp_path / "month", "fox"))
    news.look()
    news.look()
    assert enrolment.link.told == [(1, 2, ["a", "b", "fox"])]
    assert "client 1: the server now knows its 2 tasks" in caplog.text
    enrolment.rejoin(dict(enrolment.members))
    assert enrolment.link.joined == [1, 1, 1, 2]


def test_a_session_that_the_server_forgot_is_renewed_with_the_longer_description(
    enrolment, data, tmp_path
):
    news, member = Announcer(enrolment), enrolment.members[0]
    add_task(data, 0, images(tmp_path / "month", "b"))
    enrolment.link.answers = [SessionGone()]
    news.look()
    assert enrolment.members[0] is not member
    assert enrolment.link.joined == [1, 1, 2]
    news.look()
    assert len(enrolment.link.told) == 1


def test_a_server_sets_only_new_tasks_of_an_open_run_aside(enrolment, data, tmp_path, monkeypatch):
    """It could mark any task of any site, in any run, so that it was never trained again."""

    def asides(client: int = 0) -> list[bool]:
        return [task.set_aside for task in open_data(data, client).tasks]

    add_task(data, 0, images(tmp_path / "month", "b"))
    monkeypatch.setattr(enrolment.link, "announce", lambda *_: refused)
    refused = [rpc.TaskOf(client_id="0", task=task, why="no") for task in (0, 1, 7)]
    closed = rpc.JoinResponse(run_id="run", beat_every_s=1.0, refused=refused)
    with monkeypatch.context() as patch:
        patch.setattr(enrolment.link, "join", lambda request: closed)
        enrolment.join()
    assert asides() == [False, False]
    add_task(data, 0, images(tmp_path / "next", "a"))
    refused += [rpc.TaskOf(client_id="0", task=2, why="no")]
    refused += [rpc.TaskOf(client_id="1", task=0, why="no")]
    Announcer(enrolment).look()
    assert (asides(), asides(1)) == ([False, False, True], [False])


@pytest.mark.parametrize(
    "answer", [UploadRefused("no new classes"), LinkError("no"), RunOver("ended")]
)
def test_a_refusal_is_a_line_and_no_end(
    answer, enrolment, data, tmp_path,
    caplog
):  # fmt: skip
    news = Announcer(enrolment)
    add_task(data, 0, images(tmp_path / "month", "b"))
    enrolment.link.answers = [answer]
    news.look()
    line = f"client 0: its new tasks are not announced: {answer}"
    assert (line in caplog.text) == (not isinstance(answer, RunOver))
    news.look()
    assert len(enrolment.link.told) == 1
    enrolment.rejoin(dict(enrolment.members))  # the server came again: it gets what it took
    assert enrolment.link.joined == [1, 1, 1 if isinstance(answer, UploadRefused) else 2, 1]
    add_task(data, 0, images(tmp_path / "next", "b"))
    news.look()
    assert [tasks for _, tasks, _ in enrolment.link.told] == [2, 3]


def test_what_the_server_took_is_told_without_later_classes(data, tmp_path):
    before = open_data(data, 0).announcement()
    add_task(data, 0, images(tmp_path / "month", "fox"))
    assert open_data(data, 0).announcement((1, 2)) == before


def test_a_damaged_description_is_a_line(enrolment, data, caplog):
    (data / "0" / "client.json").write_text("{")
    for _ in range(2):
        Announcer(enrolment).look()
    assert caplog.text.count("client 0: its new tasks are not announced: ") == 1


# --- a folder that is watched


@pytest.fixture
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take what two looks find unchanged for complete."""
    monkeypatch.setattr(settled, "SETTLE_S", 0.0)


def looked(news: Announcer) -> None:
    for _ in range(2):
        news.look()


def test_what_is_complete_in_a_folder_becomes_a_task(enrolment, data, tmp_path, caplog, no_rest):
    caplog.set_level(logging.INFO)
    incoming = tmp_path / "incoming"
    news = Announcer(enrolment, incoming)
    news.look()
    place = incoming / "1"
    images(place / "2026-02", "b")
    images(place / "2026-01", "fox")
    for name in (".hidden", "2026-03.part", "x.tmp", "Thumbs.db"):
        images(place / name, "a")
    (place / "notes.doc").write_text("no data")
    looked(news)
    assert open_data(data, 1).file.class_names == ("a", "b", "fox")
    assert open_data(data, 1).tasks[1].train == (0, 0, 2)
    assert sorted(path.name for path in (place / "taken").iterdir()) == ["2026-01", "2026-02"]
    assert "client 1: 2026-01 has come: it is task 1: 2 examples to train on" in caplog.text
    assert (place / "refused" / "notes.doc").exists()
    assert "is no directory" in (place / "refused" / "notes.doc.txt").read_text()
    assert "client 1: notes.doc is no task: " in caplog.text
    assert enrolment.link.told == [(1, 3, ["a", "b", "fox"])]
    assert sorted(p.name for p in place.iterdir() if not p.name.startswith(".")) == [
        "2026-03.part", "Thumbs.db", "refused", "taken", "x.tmp",
    ]  # fmt: skip
    images(tmp_path / "again", "a").rename(place / "2026-01")  # other content of the same name
    looked(news)
    assert (place / "taken" / "2026-01-2").exists()
    assert open_data(data, 1).num_tasks == 4


def test_what_became_a_task_before_a_crash_is_moved_away_alone(enrolment, data, tmp_path, no_rest):
    source = images(tmp_path / "incoming" / "0" / "month", "b")
    add_task(data, 0, source)
    looked(Announcer(enrolment, tmp_path / "incoming"))
    assert open_data(data, 0).num_tasks == 2
    assert (tmp_path / "incoming" / "0" / "taken" / "month").exists()


def test_a_full_disk_is_told_once_and_tried_again(
    enrolment, data, tmp_path, monkeypatch, caplog, no_rest
):  # fmt: skip
    news = Announcer(enrolment, tmp_path / "incoming")
    source = images(tmp_path / "incoming" / "0" / "month", "b")

    def full(*args: Any, **named: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("numpy.save", full)
        looked(news)
        looked(news)
    assert caplog.text.count("the task is not added: No space left on device; it is tried") == 1
    assert source.exists()
    news.look()
    assert open_data(data, 0).num_tasks == 2


def test_files_are_cut_as_before_or_as_the_server_says(tmp_path):
    link: Any = FakeLink()
    assert how_cut(tmp_path, 0, None) is None
    assert how_cut(tmp_path, 0, link) is None
    link.data = {"name": "digits"}
    assert how_cut(tmp_path, 0, link) == (Data(name="digits"), 3)
    link.data = {"name": "directory", "test_share": 0.5}
    asked = how_cut(tmp_path, 0, link)
    assert asked is not None
    assert (asked[0].test_share, asked[1]) == (0.5, 3)
    (tmp_path / CUT_FILE).write_text('[{"name": "directory", "test_share": 0.25}, 4]')
    known = how_cut(tmp_path, 0, link)
    assert known is not None
    assert (known[0].test_share, known[1]) == (0.25, 4)


def test_files_are_cut_by_no_other_table_than_that_of_the_run_that_was_joined(tmp_path):
    """A coordinator shows one to those who join, and would say another one later."""
    link: Any = FakeLink()
    for asked in ({"name": "digits"}, {"name": "directory", "test_share": 0.5}):
        run = tiny_experiment(data=asked, seed=3)
        link.data = {"name": "directory", "test_share": 0.25}
        with pytest.raises(LinkError, match=r"another \[data\] to cut files by"):
            how_cut(tmp_path, 0, link, run)
        link.data = run.data.model_dump(mode="json")
        assert how_cut(tmp_path, 0, link, run) == (run.data, 3)
        with pytest.raises(LinkError, match=r"another \[data\] to cut files by"):
            how_cut(tmp_path, 0, link, tiny_experiment(data=asked, seed=4))


def test_files_are_cut_by_no_column_that_the_site_does_not_allow(tmp_path):
    """A server that is asked by add-task names what to read of the files, as one that is joined."""
    link: Any = FakeLink()
    rules = Rules.of(allow_column=["age", "ill:label"])
    columns = {"features": ["age"], "label": "ill"}
    link.data = {"name": "table", "columns": columns}
    asked = how_cut(tmp_path, 0, link, rules=rules)
    assert asked is not None
    assert asked[0].columns is not None
    for more in ({"features": ["age", "name"]}, {"label": "name"}, {"split": "name"}):
        link.data = {"name": "table", "columns": columns | more}
        with pytest.raises(ConfigError, match=r"name.*--allow-column"):
            how_cut(tmp_path, 0, link, rules=rules)
    for unsaid in ({"name": "digits"}, {"name": "directory"}):
        link.data = unsaid
        with pytest.raises(ConfigError, match="does not name the columns that it reads"):
            how_cut(tmp_path, 0, link, rules=rules)
    (tmp_path / CUT_FILE).write_text(json.dumps([{"name": "table", "columns": columns}, 4]))
    assert how_cut(tmp_path, 0, link, rules=rules) is not None
    with pytest.raises(ConfigError, match=r"reads ill, .*--allow-column"):
        how_cut(tmp_path, 0, None, rules=Rules.of(allow_column=["age"]))


def test_add_task_takes_no_other_columns_from_a_server(data, tmp_path, monkeypatch):
    link: Any = FakeLink()
    link.close, link.data = lambda: None, {"name": "table", "columns": {"features": ["name"]}}
    monkeypatch.setattr("fedcli.runtime.link.Link", lambda *args: link)
    (tmp_path / "rules.toml").write_text('allow_column = ["age"]')
    (tmp_path / "new.csv").write_text("name,label\n1,a\n2,b\n")
    told = ["add-task", str(tmp_path / "new.csv"), "--client-id", "0", "--data", str(data)]
    for how in (["--rules", str(tmp_path / "rules.toml")], ["--allow-column", "age"]):
        done = CliRunner().invoke(app, [*told, "--server", "127.0.0.1:9", *how])
        assert isinstance(done.exception, ConfigError)
        assert "and this site allows age: --allow-column" in str(done.exception)
    assert open_data(data, 0).num_tasks == 1


def test_a_watched_folder_is_for_open_runs(data, tmp_path):
    link: Any = FakeLink()
    brought = {"watched": Watched(tmp_path / "in")}
    made: Any = Host([0], link, data, tmp_path / "s", torch.device("cpu"), brought=brought)
    for schedule in (OPEN, {}):
        tables = tiny_experiment(schedule=schedule).model_dump(mode="json", exclude_none=True)
        reply = rpc.JoinResponse(experiment=table_of(tables), class_names=["a", "b"])
        made.enrolment = SimpleNamespace(join=lambda reply=reply: reply, workers=made.workers)
        if schedule:
            made.join()
    assert made.workers.of(0).set_ups.classes == ("a", "b")
    with pytest.raises(ConfigError, match=r"--watch .*in is for a run that goes on with new tasks"):
        made.join()
    made.workers.brought["watched"] = Watched(tmp_path / "in", stays=True)
    made.join()  # a run without new tasks, beside others that take them


def test_the_thread_that_looks_for_tasks_outlives_what_goes_wrong(
    enrolment, data, tmp_path, monkeypatch
):
    link: Any = FakeLink()
    made: Any = Host([0], link, data, tmp_path / "s", torch.device("cpu"))
    made.enrolment, made.beat_every_s, looks = enrolment, 0.0, queue.SimpleQueue[int]()

    def look(self: Announcer) -> None:
        looks.put(looks.qsize())
        if looks.qsize() == 3:
            made._closed.set()
        raise RuntimeError("anything")

    monkeypatch.setattr(Announcer, "look", look)
    made._look_forever(OpenRuns.beside(enrolment))
    assert looks.qsize() == 3


# --- the command


def test_the_command_adds_a_task(data, tmp_path, capsys):
    from fedcli.cli import main

    def said(*arguments: str, ends: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["add-task", *arguments])
        assert ended.value.code == ends
        found = capsys.readouterr()
        return found.out + found.err

    source = str(images(tmp_path / "month", "b"))
    place = ["--client-id", "0", "--data", str(data)]
    line = f"client 0: {source} is taken: it is task 1: 2 examples to train on, 2 to test on"
    assert said(*place, source).strip().endswith(line)
    assert "is taken: it is task 1 already" in said(*place, source)
    assert "nowhere is not there" in said(*place, str(tmp_path / "nowhere"), ends=1)
    assert "has no data of client 0: pass the parent" in said(
        "--client-id", "0", "--state-dir", str(tmp_path / "none"), source, ends=2
    )
    shots(tmp_path / "more", "b")
    assert "is task 2: 4 examples" in said(*place, str(tmp_path / "more"))
