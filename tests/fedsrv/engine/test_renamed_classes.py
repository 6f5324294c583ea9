"""Classes of an open run that get other names, or become one: the same, also where the run dies."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedcli.data.store.client_data import ClientData
from fedcli.data.store.dropping import drop_task
from fedcli.data.store.growing import add_task
from fedcli.data.store.stream import TaskStream
from fedcli.data.store.validation import Validation
from fedmodels.errors import PayloadError, RunFailed
from fedmodels.facts.run_classes import ClassChange, RunClasses
from fedmodels.nets.trained import TrainedModel
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.coordinator import write_facts
from fedsrv.engine.client_profile import Profile
from fedsrv.parts import stages
from fedsrv.parts.open_admission import OpenAdmission
from fedsrv.parts.open_buffer import kept_orders
from fedsrv.parts.open_plan import Growth, OpenPlan, classes_of
from fedsrv.parts.open_wishes import checked, told_of
from fedsrv.parts.stages import OpenRuns, RunPaused, Stages, names_after
from fedsrv.parts.stages import closing as closed
from fedsrv.progress.events import EventLog
from fedsrv.state.decisions import CLASSES, CLOSE, EXCLUDE, decide
from fedsrv.state.store import Store
from fedsrv.trained.trained_models import global_model
from fedtide.inprocess import run_in_process
from tests.conftest import records_of
from tests.fedcli.data.test_growing import images
from tests.fedcli.data.test_own_data import own
from tests.fedsrv.engine.test_open_run import Dies
from tests.fedsrv.engine.test_own_classes import OPEN, SITES, described, open_run
from tests.fedsrv.engine.test_private_rounds import NOISE, fixed_secrets
from tests.runs import Killed, deciding

__all__ = ["fixed_secrets"]

RUN = RunClasses(("a", "b"), ("c",))
"""Two classes, and one that came."""


def renamed(*changes: tuple[str, str], run: RunClasses = RUN) -> RunClasses:
    for old, now in changes:
        run = run.grown((), [checked(run, ClassChange(old, now))])
    return run


# --- names ----------------------------------------------------------------------------------------


def test_a_class_keeps_its_label_and_all_names_that_it_had_stand_for_it():
    found = renamed(("a", "x"), ("c", "z"), ("x", "y")).grown(("d",))
    assert found.names == ("y", "b", "z", "d")
    assert found.labels == {"y": 0, "b": 1, "z": 2, "d": 3, "a": 0, "x": 0, "c": 2}
    assert found.called(["a", "c", "new"]) == ("y", "z", "new")
    back = renamed(("a", "x"), ("x", "a"))
    assert (back.names, back.earlier) == (RUN.names, ["x"])


@pytest.mark.parametrize(
    ("old", "now", "line"),
    [
        ("q", "x", "the run has no class 'q': it has a, b, c"),
        ("a", "b", "the run has a class 'b' already"),
        ("a", "a", "the class 'a' is called so already"),
        ("a", "B ", "'B' differs only in case or spaces from 'b', another class of the run"),
        ("a", "", "the name of a class must not be empty"),
        ("a", "7", "7 is a number, which sites may have for another class"),
        ("gelb", "x", "the class 'gelb' is called 'd' by now"),
        ("a", "gelb", "sites that say 'gelb' mean the class 'd', which was called so before"),
    ],
)
def test_a_name_that_cannot_be_is_refused_in_a_line(old, now, line):
    run = renamed(("gelb", "d"), run=RUN.grown(("gelb",)))
    with pytest.raises(PayloadError) as error:
        checked(run, ClassChange(old, now))
    assert line in str(error.value)
    assert checked(run, ClassChange("a", "A")) == ("a", "A")


def merged(*changes: tuple[str, str], run: RunClasses = RUN) -> RunClasses:
    for old, now in changes:
        run = run.grown((), [checked(run, ClassChange(old, now), merges=True)])
    return run


def test_a_class_that_is_part_of_another_keeps_its_label_and_all_its_names_stand_for_that_one():
    found = merged(("x", "c"), ("c", "b"), run=renamed(("a", "x"))).grown(("d",))
    assert found.names == ("x", "b", "c", "d")
    assert found.merged == {0: 1, 2: 1}
    assert found.labels == {"a": 1, "x": 1, "b": 1, "c": 1, "d": 3}
    assert found.rows == {"a": 0, "x": 0, "b": 1, "c": 2, "d": 3}
    assert (found.called("axbcd"), found.earlier) == (tuple("bbbbd"), ["a", "c", "x"])
    first, second, third = (one for _, one in found.changes)
    assert [found.merges(one) for one in (first, second, third)] == [False, True, True]
    assert renamed(("b", "y"), run=found).labels["a"] == 1


@pytest.mark.parametrize(
    ("old", "now", "merges", "line"),
    [
        ("b", " b", True, "the class 'b' cannot become part of itself"),
        ("b", "q", True, "the run has no class 'q': it has a, b, c"),
        ("a", "b", True, "the class 'a' is part of 'b' by now"),
        ("c", "a", True, "the class 'a' is part of 'b' by now"),
        ("b", "e", False, "a client brings a class 'e' that the run has not begun: where both are"),
        ("e", "b", True, "the run has not begun the class 'e'"),
        ("b", "E", False, "'E' differs only in case or spaces from 'e', another class of the run"),
        ("b", "c", False, "the run has a class 'c' already: where both are to be one class, use"),
        ("b", "a", False, "sites that say 'a' mean the class 'b', which was called so before"),
    ],
)
def test_a_merge_that_cannot_be_is_refused_in_a_line(old, now, merges, line):
    run = merged(("a", "b"))
    with pytest.raises(PayloadError) as error:
        checked(run, ClassChange(old, now), merges=merges, coming=["e"])
    assert line in str(error.value)
    assert checked(run, ClassChange("b", "e"), merges=True, coming=["e"]) == ("b", "e")


@pytest.mark.parametrize("later", [("c", "a"), ("a", "c"), ("b", "b"), ("b", "a")])
def test_a_class_that_is_part_of_another_takes_part_in_no_change(later):
    with pytest.raises(ValueError, match="part of another one"):
        _ = merged(("a", "b")).grown((), [ClassChange(*later)]).names


def test_an_operator_is_told_what_a_class_is_part_of():
    profile = Profile.parse(0, described("a", "b"))
    told = told_of(merged(("a", "b")), [profile])
    assert [(one.name, one.part_of, one.examples) for one in told] == [
        ("a", "b", 0), ("b", "", 4), ("c", "", 0)
    ]  # fmt: skip
    assert told[1].earlier == ["a"]


def test_orders_under_way_end_with_a_class_that_becomes_part_of_another_and_with_no_new_name():
    steps = [SimpleNamespace(task_of=lambda client: 0)] * 4
    for change, left in ((("a", "x"), {1: 1}), (("a", "b"), {})):
        later = Growth(2, class_changes=(ClassChange(*change),))
        plan: Any = SimpleNamespace(
            growths=[Growth(0, classes=("a", "b")), later], steps=steps, aside={}, set_aside={},
            classes=classes_of([Growth(0, classes=("a", "b")), later]),
        )  # fmt: skip
        assert kept_orders(plan, 3, {1: 1}) == left


def test_wishes_outlast_a_crash_and_are_done_once(tmp_path):
    """Also those of the version before, which lay in files of their own."""
    run = tmp_path / "run"
    with closing(Store(run, open_run(), False)) as store:
        store.decide(CLASSES, *facts_of(("a", "x"), ("x", "y")))
    (run / "classes.json").write_text('[[0, "a", "x"], [2, "b", "z"]]')
    (run / "excluded.json").write_text("[3]")
    for _ in range(2):
        with closing(Store(run, open_run(), True)) as store:
            assert names_after(store, 1) == [ClassChange("x", "y"), ClassChange("b", "z")]
            assert names_after(store, 3) == []
            assert store.decided(EXCLUDE) == [{"client": 3}]
    assert not (run / "classes.json").exists()
    (run / "classes.json").write_text("[1]")
    with pytest.raises(RunFailed, match=r"classes\.json holds what was decided of the run, and"):
        Store(run, open_run(), True)


def test_a_site_may_say_the_name_of_earlier_or_the_new_one_and_no_other_spelling_of_them():
    experiment = open_run(schedule={**OPEN, "clients": 4, "max_classes": 3})
    found = OpenAdmission.of(experiment, {0: described("a", "b", "c")}, classes=RUN)
    for client, names in enumerate((["c", "a"], ["z", "b"]), 1):
        if client == 2:
            found.follow(renamed(("c", "z")))
        found.check(client, described(*names))
        found.admit(client, described(*names))
    found.check(3, described("c", "z"))
    with pytest.raises(PayloadError, match="has the class 'C', and the run has 'c'"):
        found.check(3, described("C"))
    with pytest.raises(PayloadError, match="brings 1 new classes to 3"):
        found.check(3, described("d"))


def test_a_class_that_is_part_of_another_counts_towards_the_most_as_it_keeps_its_row():
    run = merged(("c", "b"))
    experiment = open_run(schedule={**OPEN, "clients": 4, "max_classes": 3})
    found = OpenAdmission.of(experiment, {0: described("a", "b", "c")}, classes=run)
    found.check(1, described("c", "a"))
    with pytest.raises(PayloadError, match=r"brings 1 new classes to 3, and .* max_classes = 3"):
        found.check(1, described("c", "d"))


# --- runs -----------------------------------------------------------------------------------------


def prepared(place: Path) -> Path:
    """Make the data of three sites with four classes together, and what comes to two of them."""
    for client, names in enumerate(SITES):
        own(place / "data", client, class_names=names, num_classes=len(names))
    images(place / "2", "a", "e")
    images(place / "0", "a", "b")
    return place


def facts_of(*changes: Sequence[str], first: int = 0) -> list[dict[str, Any]]:
    """Return the facts of decisions that change classes."""
    found = enumerate(changes, first)
    return [{"number": number, "old": old, "now": now} for number, (old, now) in found]


def learned(
    place: Path,
    changes: Sequence[tuple[str, str]] = (),
    kills: Sequence[int] = (),
    **tables: Any,
) -> Any:
    """Learn, change names at rest and in the middle of a stage, and die before some orders."""
    data, run = place / "data", place / "run"
    experiment = open_run(schedule={**OPEN, "rounds": 2}, **tables)

    def goes_on(at_rest: Any, **facts: Any) -> Any:
        return run_in_process(experiment, data, run, resume=True, at_rest=at_rest, **facts)

    def wished(order: Any) -> None:
        if order.interaction == 3 and not asked:
            asked.extend(changes[1:])
            store(CLASSES, *facts_of(*changes[1:], first=1))
            raise Killed

    asked = list[Any]()
    with pytest.raises(RunPaused):
        goes_on("pause")
    decide(run, CLASSES, *facts_of(*changes[:1]))
    for client in (2, 0):
        add_task(data, client, place / str(client))
    early, late = kills[:1], kills[1:]
    for before in (*map(Dies, early), *([wished] if changes else ()), *map(Dies, late)):
        with deciding() as store, pytest.raises(Killed):
            goes_on("close", before=before)
    return goes_on("close")


def test_a_run_with_other_names_ends_in_the_same_bits_wherever_it_dies(tmp_path):
    """Class a is called alpha at rest; d is called delta while a stage goes on."""
    plain = prepared(tmp_path / "plain")
    shutil.copytree(plain, tmp_path / "killed")
    for part in ("train", "test"):  # site 2 says the new name in what comes
        (tmp_path / "killed" / "2" / part / "a").rename(tmp_path / "killed" / "2" / part / "alpha")
    run, changes = tmp_path / "killed" / "run", (("a", "alpha"), ("d", "delta"))
    found = learned(tmp_path / "killed", changes, kills=[4])
    assert found["state_sha256"] == learned(plain)["state_sha256"]
    growths = [g for r in records_of(run) for g in r.get("growths", ())]
    told = [(g["interaction"], g["class_changes"]) for g in growths if "class_changes" in g]
    assert told == [(2, [["a", "alpha"]]), (3, [["d", "delta"]])]
    about = json.loads((run / "data.json").read_text())
    assert about["classes"] == ["alpha", "b", "c", "delta", "e"]
    lines = map(json.loads, (run / "audit.jsonl").read_text().splitlines())
    assert [line["now"] for line in lines if line["what"] == "renamed"] == ["alpha", "delta"]


def test_two_classes_become_one_wherever_the_run_dies(tmp_path):
    """Class c becomes part of b at rest, and d part of a while a stage goes on."""
    plain, changes = prepared(tmp_path / "plain"), (("c", "b"), ("d", "a"))
    shutil.copytree(plain, tmp_path / "killed")
    whole = learned(plain, changes, deploy={"guard": "none"})
    again = learned(tmp_path / "killed", changes, kills=[4, 3, 2])
    assert whole["state_sha256"] == again["state_sha256"]
    assert whole["metrics"] == again["metrics"]
    told = [r.get("growths", [{}])[0].get("class_changes") for r in records_of(plain / "run")]
    assert told == [None, None, [["c", "b"]], [["d", "a"]], *[None] * (len(told) - 4)]
    last = records_of(plain / "run")[-1]["clients"]["1"]["views"]["after_downlink"]["classes"]
    assert [share is None for share in last] == [True, False, True, True, True]
    model = TrainedModel.load(plain / "run/clients/1/personal.safetensors")
    assert model.class_names == ["a", "b", "e"]
    live = TrainedModel.load(plain / "run/clients/1/model/current.safetensors")
    assert live.class_names == ["a", "b", "e"], "as callers of serve-model are told"
    x = np.zeros((3, 1, 4, 4), np.uint8)
    assert model.probabilities(x).shape == (3, 3)
    assert np.allclose(model.probabilities(x).sum(1), 1)
    lines = map(json.loads, (plain / "run/audit.jsonl").read_text().splitlines())
    assert [line["now"] for line in lines if line["what"] == "merged"] == ["b", "a"]


@pytest.mark.parametrize("where", ["clients", "server"])
def test_two_classes_become_one_also_under_noise(where, tmp_path, fixed_secrets):
    pytest.importorskip("dp_accounting", reason="needs the extra privacy")
    noise = {**NOISE, "where": where}
    plain, changes = prepared(tmp_path / "plain"), (("c", "b"), ("d", "a"))
    shutil.copytree(plain, tmp_path / "killed")
    whole = learned(plain, changes, privacy=noise)
    again = learned(tmp_path / "killed", changes, kills=[4, 2], privacy=noise)
    assert whole["state_sha256"] == again["state_sha256"]
    assert whole["privacy"]["releases"] == again["privacy"]["releases"] == 4


def test_a_run_that_waits_for_its_clients_to_join_again_tells_of_its_classes(tmp_path):
    """It said that it had not begun; what is asked for now is done like any other wish."""
    data, run = prepared(tmp_path) / "data", tmp_path / "run"
    with closing(Store(tmp_path / "new", open_run(), resume=False)) as store:
        part = OpenRuns(store, EventLog())
        part.admission({})
        with pytest.raises(PayloadError, match="the run has not begun: it has no classes and no"):
            part._ask_classes(())
    with pytest.raises(RunPaused):
        run_in_process(open_run(), data, run, at_rest="pause")
    with closing(Store(run, open_run(), resume=True)) as store:
        part = OpenRuns(store, EventLog())
        part.admission(store.ledger.profiles())
        told = part._ask_classes([ClassChange("c", "b")], merges=True)
        part._ask([(1, 0)])
    assert [(one.name, one.part_of) for one in told] == [
        ("a", ""), ("b", ""), ("c", "b"), ("d", ""),
    ]  # fmt: skip
    found = run_in_process(open_run(), data, run, resume=True, at_rest="close")
    (growth,) = found["growths"]
    assert growth["class_changes"] == (("c", "b"),)
    assert growth["set_aside"] == [(1, 0, "an operator set it aside")]


def test_what_is_kept_for_validation_stays_so_when_two_classes_become_one(tmp_path):
    place = own(tmp_path, 0, class_names=["a", "b"])
    np.save(place / "task-0/train_y.npy", np.repeat([0, 1], 12))
    data = ClientData(place)
    stream = TaskStream(data, validation=Validation(0.25, False))

    def kept() -> Any:
        stream.close()
        stream.open(0)
        return stream.validation(0)

    before = kept()
    data.order_by(RunClasses(("a", "b")).grown((), [ClassChange("a", "b")]))
    after = kept()
    assert before[1].unique().tolist() == [0, 1]
    assert after[1].unique().tolist() == [1]
    assert torch.equal(before[0], after[0])
    assert data.counts(0, "train") == [0, 24]


def test_everybodys_model_has_the_classes_of_the_run(tmp_path):
    """It had those that client 0 has, as that one calls them."""
    data, run = prepared(tmp_path) / "data", tmp_path / "run"
    experiment = open_run(method={"name": "fedavg"})
    with pytest.raises(RunPaused):
        run_in_process(experiment, data, run, at_rest="pause")
    write_facts(run, experiment)
    (newer := run / "server/state-00000001.safetensors").write_text("is written before its record")
    assert global_model(run).class_names == ["a", "b", "c", "d"]
    newer.unlink()
    decide(run, CLASSES, *facts_of(("c", "b")))
    add_task(data, 2, tmp_path / "2")
    with pytest.raises(RunPaused):
        run_in_process(experiment, data, run, resume=True, at_rest="pause")
    decide(run, CLASSES, *facts_of(("a", "alpha"), first=1))
    summary = run_in_process(experiment, data, run, resume=True, at_rest="close")
    (run / "summary.json").write_text(json.dumps(summary))
    found = global_model(run)
    stored = TrainedModel.load(run / "clients/1/personal.safetensors")
    assert found.class_names == stored.class_names == ["alpha", "b", "d", "e"]
    assert found.facts.merged == ((2, 1),)


@pytest.mark.parametrize("now", [False, True])
def test_what_is_decided_after_the_last_round_stands_in_the_summary(now, tmp_path, monkeypatch):
    """It stood in no record; and clients ended with the names of earlier.

    With ``now`` as after ``fedsrv close --now``, a task that came is trained no more.
    """
    data, run, last = prepared(tmp_path) / "data", tmp_path / "run", {}
    with pytest.raises(RunPaused):
        run_in_process(open_run(), data, run, at_rest="pause")
    decide(run, CLASSES, *facts_of(("a", "alpha")))
    drop_task(data, 1, 0, "a loose sensor")
    if now:
        add_task(data, 2, tmp_path / "2")
        decide(run, CLOSE, {"now": True})
    finishes = {"before": lambda order: last.update({order.kind: [*order.class_changes]})}
    found = run_in_process(open_run(), data, run, resume=True, at_rest="close", **finishes)
    (growth,) = found["growths"]
    assert growth["interaction"] == 1
    assert growth["set_aside"] == [(1, 0, "a loose sensor")]
    assert growth["class_changes"] == (("a", "alpha"),)
    assert (found["rounds"], growth["tasks"], growth["classes"]) == (1, [], ())
    assert last == {rpc.ORDER_KIND_FINISH: [rpc.ClassChange(old="a", now="alpha")]}


@pytest.mark.parametrize("method", ["fedper", "fedavg"])
def test_the_last_models_say_the_names_of_by_now(method, tmp_path):
    """One that was kept when it was scored said the earlier name."""
    data, run = prepared(tmp_path) / "data", tmp_path / "run"
    for at_rest in ("pause", "close"):
        with nullcontext() if at_rest == "close" else pytest.raises(RunPaused):
            run_in_process(open_run(method=method), data, run, resume=True, at_rest=at_rest)
        decide(run, CLASSES, *facts_of(("a", "alpha")))
    for place in run.glob("clients/*/personal.safetensors"):
        assert [*TrainedModel.load(place).class_names] == ["alpha", "b", "c", "d"], place


def test_clients_that_retire_after_the_last_round_are_not_asked_to_finish(tmp_path, monkeypatch):
    """They were asked, over the network in vain; and what --forget should drop stayed."""
    data, run, asked, dropped = prepared(tmp_path) / "data", tmp_path / "run", set(), []
    with pytest.raises(RunPaused):
        run_in_process(open_run(), data, run, at_rest="pause")
    note = {"before": lambda order: asked.add((order.kind, order.client_id))}
    monkeypatch.setattr(
        stages, "forgotten", lambda method, state, clients: dropped.extend(clients) or state
    )
    facts = {"retired": [1], "forgets": True, "at_rest": "close", **note}
    found = run_in_process(open_run(), data, run, resume=True, **facts)
    assert asked == {(rpc.ORDER_KIND_FINISH, "0"), (rpc.ORDER_KIND_FINISH, "2")}
    assert (found["clients_set_aside"], dropped) == ([1], [1])


def test_a_run_ends_by_the_classes_that_it_has_learned():
    """A class came with a task whose client left before it trained, and got another name."""
    said: Any = [None, None, {}, {}, (), {}, None]
    plan = OpenPlan(*said, growths=[Growth(0, classes=("a", "b"))])
    came = Growth(1, {2: 2}, ("c",), away=(2,))
    names = Growth(1, class_changes=(ClassChange("c", "z"), ClassChange("a", "alpha")))
    assert closed(plan, [came]) is plan
    assert closed(plan, [came, names]).classes.names == ("alpha", "b")


def test_a_name_that_is_asked_for_while_a_growth_is_made_belongs_to_it(tmp_path, monkeypatch):
    """Class e came with the growth, so that two classes had one name, and no start went on."""
    grown, late = Stages._growth_of, [ClassChange("a", "e")]

    def made(self: Any, *facts: Any) -> Any:
        found = grown(self, *facts)
        if found and "e" in found.classes and late:
            self.store.decide(CLASSES, *facts_of(late.pop()))
        return found

    place = prepared(tmp_path)
    monkeypatch.setattr(Stages, "_growth_of", made)
    assert learned(place)["rounds"] == 4
    assert not late
    assert json.loads((place / "run" / "data.json").read_text())["classes"] == ["e", "b", "c", "d"]
