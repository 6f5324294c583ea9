"""Clients of an open run that have classes of their own: the run has all of them, by name."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Sequence
from typing import Any

import pytest

from fedcli.data.store.growing import add_task
from fedmodels.errors import DataError, PayloadError, RunFailed
from fedmodels.facts.class_names import MAX_LETTERS, alike, named, near
from fedsrv.engine.admission import Admission
from fedsrv.parts.open_admission import OpenAdmission, first_classes, spelt
from fedsrv.parts.stages import RunPaused
from fedtide.inprocess import run_in_process
from tests.conftest import records_of, tiny_experiment
from tests.fedcli.data.test_growing import images
from tests.fedcli.data.test_own_data import own
from tests.fedsrv.engine.test_open_run import Dies
from tests.links.test_restarts_of_grown_runs import Processes, processes
from tests.runs import Killed

__all__ = ["processes"]
OPEN = {"order": "tasks_outer", "open": True, "rounds": 1, "clients": 3}
SITES = (["a", "b"], ["c", "b"], ["d", "a"])
"""The classes of three sites; the run has all four."""


def open_run(**tables: Any) -> Any:
    net = {"name": "mlp", "hidden": [4]}
    found = tiny_experiment(**{"method": "fedper", "net": net, "schedule": OPEN, **tables})
    return found.model_copy(update={"scenario": None, "data": tables.get("data") and found.data})


def described(*names: str, shape: Sequence[int] = (1,)) -> str:
    about = {"format": 1, "input_shape": shape, "num_classes": len(names), "class_names": names}
    return json.dumps({**about, "tasks": [{"train": [2] * len(names), "test": [1] * len(names)}]})


def numbered(count: int) -> str:
    facts = json.loads(described(*map(str, range(count))))
    return json.dumps({**facts, "class_names": []})


def admitted(*texts: str, **tables: Any) -> OpenAdmission:
    found = OpenAdmission.of(open_run(**tables), {})
    for client, text in enumerate(texts):
        found.check(client, text)
        assert found.admit(client, text) == []
    return found


# --- which classes a run has ----------------------------------------------------------------------


def test_the_run_has_all_classes_in_the_order_of_its_clients():
    announced = {2: ("d", "a"), 0: ("a", "b"), 1: ("c", "b")}
    assert first_classes(open_run(), announced) == ("a", "b", "c", "d")
    data = {"name": "table", "classes": ["b", "x"], "columns": {"label": "a", "window": 4}}
    assert first_classes(open_run(data=data), announced) == ("b", "x", "a", "c", "d")


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_clients_with_other_classes_join_in_any_order(order):
    found = OpenAdmission.of(open_run(), {})
    for client in order:
        text = described(*SITES[client])
        found.check(client, text)
        assert found.admit(client, text) == []
    assert found.settle() == []


def test_clients_of_a_run_that_is_not_open_vote_on_names_still():
    closed = Admission({}, 3)
    for client, names in enumerate(SITES):
        closed.admit(client, described(*names))
    with pytest.raises(RunFailed, match="no more than half of the clients name the classes alike"):
        closed.settle()


def test_inputs_alone_are_voted_on():
    found = admitted(described("a"), described("b", "c"))
    with pytest.raises(PayloadError, match="the run has inputs"):
        found.check(2, described("d", shape=[2]))
    found = admitted(described("a", shape=[2]), described("b"))
    assert found.admit(2, described("c", "d")) == [0]
    with pytest.raises(PayloadError, match=r"client 0 has inputs \[2\]; the run has inputs \[1\]"):
        found.check(0, described("a", shape=[2]))
    divided = admitted(described("a"), described("b", "c", shape=[2]))
    with pytest.raises(RunFailed, match=r"client 0 has inputs \[1\]; client 1 has inputs"):
        divided.settle()


def test_classes_are_bounded_from_the_first_join_on():
    found = admitted(described("a", "b"), schedule={**OPEN, "max_classes": 3})
    with pytest.raises(PayloadError, match=r"brings 2 new classes to 2, and .* max_classes = 3"):
        found.check(1, described("c", "d"))
    found.check(1, described("c"))
    again = described("a")
    found.admit(0, again)  # it has fewer classes by now, and the run has not begun
    found.check(1, described("c", "d"))


@pytest.mark.parametrize("kills", [(), (0, 2)])
def test_sites_with_classes_of_their_own_learn_together(kills, tmp_path):
    """Their heads have a row for every class, and what comes later is a row behind them."""
    data, run = tmp_path / "data", tmp_path / "run"
    for client, names in enumerate(SITES):
        own(data, client, class_names=names, num_classes=len(names))
    for number in kills:
        with pytest.raises(Killed):
            run_in_process(open_run(), data, run, resume=True, before=Dies(number))
    with pytest.raises(RunPaused):
        run_in_process(open_run(), data, run, resume=True, at_rest="pause")
    add_task(data, 2, images(tmp_path / "in", "a", "e"))
    run_in_process(open_run(), data, run, resume=True)
    growths = [g for record in records_of(run) for g in record.get("growths", ())]
    assert [g["classes"] for g in growths] == [["a", "b", "c", "d"], ["e"]]
    known = json.loads((run / "data.json").read_text())
    assert known["classes"] == ["a", "b", "c", "d", "e"]
    assert all(known["examples"]), "no count is lost"


def test_sites_with_classes_of_their_own_join_a_run(processes, tmp_path):
    """As ``fedcli join`` does, with a restart of all processes before and after a new class."""
    run: Processes = processes(2)
    run.schedule["max_classes"] = 5
    shutil.rmtree(tmp_path / "data")
    for client, names in enumerate(SITES):
        own(tmp_path / "data", client, class_names=names, num_classes=len(names))
    run.serve()
    run.join(1)
    run.join(0)
    run.wait_rest()
    run.kill()
    run.start([1, "server", 0])
    run.join(2)
    run.wait_rest()
    run.kill()
    run.start(["server", 0, 1, 2])
    run.learn(1, "fox")
    grown = [g for record in records_of(tmp_path / "run") for g in record.get("growths", ())]
    assert [name for g in grown for name in g["classes"]] == ["a", "b", "c", "d", "fox"]
    assert run.problems == []


# --- how they are spelt ---------------------------------------------------------------------------


def test_names_are_short_printable_and_without_spaces_at_their_ends():
    assert named("  gr\u0075\u0308n ") == "gr\u00fcn"
    assert named("x" * MAX_LETTERS) == "x" * MAX_LETTERS
    for wrong, line in (
        ("", "must not be empty"), ("  ", "must not be empty"), ("a\0", "must not hold '.x00'"),
        ("\x1b[2J", "must not hold '.x1b'"), ("a\u2028b", "must not hold '.u2028'"),
        ("x" * (MAX_LETTERS + 1), f"has {MAX_LETTERS} letters at most"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=line):
            named(wrong)
        with pytest.raises(
            PayloadError, match=f"client.json is malformed: class_names.0: .*{line}"
        ):
            admitted(described(wrong))


def test_names_that_differ_in_case_or_spaces_alone_are_asked_for():
    assert alike(" Green  tea ") == alike("green tea")
    assert near("Green", ["red", "green"]) == "green"
    assert near("green", ["red", "green"]) is None
    found = admitted(described("green", "red"))
    with pytest.raises(PayloadError, match="has the class 'Green', and the run has 'green': write"):
        found.check(1, described("Green"))
    found.check(1, described(" green ", "blue"))
    found.check(1, described("green", "Green"))  # who has both means both


def test_a_number_and_a_name_may_be_one_class():
    """Client 0 has three classes without names, and client 1 brings one with a name."""
    for first, second, line in (
        (numbered(3), described("0", "1", "fox"), "has the class 'fox', a name, and .* has '2'"),
        (described("0", "1", "fox"), numbered(3), "has the class '2', a number without a name"),
        (described("sit", "run"), numbered(2), "has the class '0', a number without a name"),
        (numbered(2), described("sit", "run"), "has the class 'sit', a name, and the run has '0'"),
    ):
        with pytest.raises(PayloadError, match=line):
            admitted(first).check(1, second)
    for first, second in (
        (numbered(2), described("0", "1", "fox")),
        (described("0", "1", "fox"), numbered(2)),
        (numbered(2), numbered(5)),
    ):
        admitted(first).check(1, second)
    assert spelt(["elk"], ["fox"], ["elk"]) == ""


def test_a_task_with_a_class_in_another_spelling_is_refused_where_it_is_added(tmp_path):
    own(tmp_path / "data", 0, class_names=["green", "red"])
    with pytest.raises(DataError, match="the class 'Green' differs from 'green', which the client"):
        add_task(tmp_path / "data", 0, images(tmp_path / "in", "Green"))
    with pytest.raises(DataError, match="letters at most"):
        add_task(tmp_path / "data", 0, images(tmp_path / "long", "x" * 150))
    added = add_task(tmp_path / "data", 0, images(tmp_path / "ok", "red", "blue"))
    assert added.new_classes == ("blue",)
