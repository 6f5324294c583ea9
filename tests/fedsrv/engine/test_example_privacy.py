"""Runs whose clients hide examples: what meets in several tasks, who declines, and how runs end."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedcli.data.store.growing import add_task
from fedmodels.errors import ClientFailed, ConfigError, OrderDeclined, TooFewClients
from fedmodels.privacy.accounting import GaussianReleases, epsilon_of
from fedmodels.tensors.bundle import Bundle
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.parts.example_privacy import ExamplePrivacy, why_declined
from fedsrv.parts.stages import RunPaused
from fedsrv.progress.events import EventLog
from fedtide.inprocess import run_in_process
from tests.conftest import records_of, tiny_experiment
from tests.fedsrv.engine.test_private_rounds import BESIDE
from tests.fuzz.poisons import poisoned, scaled
from tests.liars import Stage
from tests.runs import Killed, dies, killed

pytest.importorskip("dp_accounting", reason="needs the extra privacy")
DELTA, ALL = 1e-3, 16
HIDING = {"level": "example", "noise_multiplier": 4.0, "delta": DELTA, "allow": BESIDE}
CLASSES = 3


def grown(place: Path, rows: list[int]) -> Path:
    """Write a file whose rows are given by number: one number is one content, wherever it is."""
    place.mkdir(parents=True)
    for part, numbers in (("train", rows), ("test", [1000, 1001, 1002])):
        images = [np.random.default_rng(n).integers(0, 256, (1, 8, 8)) for n in numbers]
        np.save(place / f"{part}_x.npy", np.array(images, dtype=np.uint8))
        np.save(place / f"{part}_y.npy", np.array([n % CLASSES for n in numbers], dtype=np.int64))
    return place


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Two clients of their own data: the rows 0 to 15 of one, and 100 to 115 of the other."""
    for client in range(2):
        place = tmp_path / "data" / str(client)
        grown(place / "task-0", [*range(100 * client, 100 * client + ALL)])
        facts = {"input_shape": [1, 8, 8], "num_classes": CLASSES}
        (place / "client.json").write_text(json.dumps(facts))
    return tmp_path / "data"


def hiding(**privacy: Any) -> Any:
    made = tiny_experiment(
        schedule={"open": True, "order": "tasks_outer", "rounds": 2, "clients": 2},
        server={"min_clients": privacy.pop("min_clients", None)},
        privacy={**HIDING, **privacy},
        training={"batch_size": 4},
    )
    return made.model_copy(update={"scenario": None, "data": None})


def stage(experiment: Any, data: Path, out: Path, at_rest: str = "pause", **more: Any) -> Any:
    try:
        return run_in_process(experiment, data, out, resume=True, at_rest=at_rest, **more)
    except RunPaused:
        return None


def cost(*steps_and_rates: tuple[int, float]) -> float:
    return epsilon_of(
        tuple(
            sorted((GaussianReleases(4.0, n, q) for n, q in steps_and_rates), key=lambda r: r.rate)
        ),
        DELTA,
    )


def told(out: Path, client: int, key: str = "epsilon") -> list[float]:
    return [record["clients"][str(client)][key] for record in records_of(out)]


def test_what_a_grown_file_holds_again_composes_and_so_does_a_task_that_is_trained_anew(
    own, tmp_path
):
    """Client 0 trains twice on rows 0 to 15, then twice on these and 16 more, under another name.

    Client 1 has nothing new, and trains on its old task for as long. A batch is 4 examples, so an
    epoch is 4 steps with a rate of 1/4, then 8 steps of 1/8.
    """
    out, experiment = tmp_path / "run", hiding()
    stage(experiment, own, out)
    add_task(own, 0, grown(tmp_path / "other name", [*range(2 * ALL)]), repeats="keep")
    summary = stage(experiment, own, out, "close")
    wanted = [
        cost((4, 1 / 4)), cost((8, 1 / 4)),
        cost((8, 1 / 4), (8, 1 / 8)), cost((8, 1 / 4), (16, 1 / 8)),
    ]  # fmt: skip
    assert told(out, 0) == wanted
    assert told(out, 1) == [cost((4 * n, 1 / 4)) for n in (1, 2, 3, 4)]
    assert told(out, 1, "epsilon_next")[0] == cost((8, 1 / 4))
    assert summary["privacy"]["epsilon"] == max(wanted[-1], cost((16, 1 / 4)))


def test_other_rows_cost_nothing_more(own, tmp_path):
    out, experiment = tmp_path / "run", hiding()
    stage(experiment, own, out)
    add_task(own, 0, grown(tmp_path / "new", [*range(ALL, 2 * ALL)]), repeats="keep")
    stage(experiment, own, out, "close")
    assert told(out, 0)[-1] == cost((8, 1 / 4))


@pytest.fixture
def unlike(own: Path, tmp_path: Path) -> Path:
    """The same clients, of which the second has four times the rows: it spends less."""
    shutil.rmtree(own / "1/task-0")
    grown(own / "1/task-0", [*range(100, 100 + 4 * ALL)])
    return own


def test_a_run_ends_in_order_where_a_client_declines_what_nobody_else_could_know(
    unlike, tmp_path, caplog
):
    """The coordinator cannot know that the new task holds old rows: client 0 declines it."""
    out = tmp_path / "run"
    experiment = hiding(epsilon=1.001 * cost((8, 1 / 4)), min_clients=2)
    stage(experiment, unlike, out)
    add_task(unlike, 0, grown(tmp_path / "new", [*range(ALL), 500]), repeats="keep")
    summary = stage(experiment, unlike, out, "close")
    assert len(records_of(out)) == 2
    assert summary["metrics"]["a_glo"] >= 0, "the last state has its scores"
    assert "client 0 trains no more: one more training would make epsilon" in caplog.text
    again = stage(experiment, unlike, out, "close")
    assert again["state_sha256"] == summary["state_sha256"]


def test_a_run_of_fewer_clients_goes_on_without_who_declines(unlike, tmp_path):
    out = tmp_path / "run"
    experiment = hiding(epsilon=1.001 * cost((8, 1 / 4)), min_clients=1)
    stage(experiment, unlike, out)
    add_task(unlike, 0, grown(tmp_path / "new", [*range(ALL)]), repeats="keep")
    stage(experiment, unlike, out, "close")
    records = records_of(out)
    assert [record["cohort"] for record in records] == [[0, 1], [0, 1], [1]]
    assert records[2]["failed"]["0"].startswith(OrderDeclined.SAID)


def test_a_training_that_is_done_again_after_a_crash_is_charged_once(own, tmp_path):
    out, experiment = tmp_path / "run", hiding()
    killed(
        experiment, own, out, before=dies(interaction=1, client_id="1"), resume=True,
        at_rest="pause",
    )  # fmt: skip
    stage(experiment, own, out, "close")
    with closing(sqlite3.connect(out / "clients/0/privacy.db")) as db:
        assert db.execute("SELECT count(*) FROM trainings").fetchone() == (2,)
    assert told(out, 0) == told(out, 1)


def test_a_client_whose_ledger_is_gone_trains_no_more(own, tmp_path):
    out, experiment = tmp_path / "run", hiding(min_clients=2)
    stage(experiment, own, out)
    (out / "clients/0/privacy.db").unlink()
    add_task(own, 0, grown(tmp_path / "new", [*range(ALL)]), repeats="keep")
    with pytest.raises(ClientFailed, match=r"privacy.db is gone: .* put a copy of it back"):
        stage(experiment, own, out, "close")


def test_a_run_fails_as_ever_where_not_all_declined():
    said = f"{OrderDeclined.SAID}it is spent"
    assert why_declined(ClientFailed(3, 1, "order", said)) == "client 3 trains no more: it is spent"
    both = TooFewClients("", {3: said, 5: said})
    assert why_declined(both).endswith("it is spent; 1 more declined")
    assert why_declined(TooFewClients("", {3: said, 5: "its disk is full"})) == ""
    assert why_declined(TooFewClients("it is the state")) == ""


def spending(limit: float, **schedule: Any) -> tuple[Any, Any]:
    """Return the part of a run of three clients, and a plan of two rounds of the first two."""
    tables: dict[str, Any] = {"schedule": {"clients": 3, "order": "tasks_outer", **schedule}}
    server = {"min_clients": 2} if schedule else {}
    made = tiny_experiment(**tables, server=server, privacy={**HIDING, "epsilon": limit})
    records = list[tuple[Any, bool]]()
    ledger = SimpleNamespace(records=lambda: records)
    store: Any = SimpleNamespace(experiment=made, ledger=ledger, aside=lambda: {})
    step = SimpleNamespace(cohort=(0, 1), task_of=lambda client: 0)
    steps = [SimpleNamespace(interaction=n, round=n, **vars(step)) for n in range(3)]
    plan: Any = SimpleNamespace(
        needed=len, steps=steps, records=records, spares_clients=bool(schedule)
    )
    return ExamplePrivacy(store, EventLog()), plan


def said(part: Any, plan: Any, number: int, **clients: tuple[float, float]) -> Any:
    """Return a record in which clients tell what they have spent, and would have after one more."""
    rows = {c[1:]: {"epsilon": now, "epsilon_next": then} for c, (now, then) in clients.items()}
    record: Any = {"interaction": number, "cohort": [], "clients": {**rows, "2": {}}, "metrics": {}}
    part._see(record, plan)
    plan.records.append((record, True))
    return record


def test_a_run_says_the_most_that_a_client_spent_and_ends_by_what_they_would_spend_next():
    """Client 1 is at 2 and would be at 2.5; later client 0 is at 1.2, and would be at 1.6."""
    part, plan = spending(2.5)
    first = said(part, plan, 0, c0=(1.0, 1.5), c1=(2.0, 2.5))
    second = said(part, plan, 1, c0=(1.2, 1.6))
    assert [one["metrics"]["epsilon"] for one in (first, second)] == [2.0, 2.0]
    assert second["privacy"] == {"epsilon": 2.0, "delta": DELTA}
    step = plan.steps[2]
    assert part.may_go_on(step, plan, None) == ""
    part.limit = 2.4
    assert "the privacy of client 1 is spent: one more" in part.may_go_on(step, plan, None)
    assert "would make epsilon 2.5 at delta 0.001" in part.may_go_on(step, plan, None)
    plan.needed = lambda _: 1
    assert part.may_go_on(step, plan, None) == ""


def test_a_run_that_went_back_does_not_know_what_was_spent_later():
    part, plan = spending(2.0)
    said(part, plan, 0, c0=(1.0, 1.5), c1=(1.0, 1.5))
    said(part, plan, 1, c0=(1.5, 2.1), c1=(1.5, 2.1))
    assert part.may_go_on(plan.steps[2], plan, None)
    plan.records.pop()
    assert part.may_go_on(plan.steps[1], plan, None) == ""
    assert part.most == 1.0


def test_an_open_run_goes_on_without_who_may_train_no_more():
    part, plan = spending(2.0, open=True)
    said(part, plan, 0, c0=(1.0, 1.5), c1=(1.9, 2.1))
    assert part.may_go_on(plan.steps[1], plan, None) == ""
    assert {*part.abstains(plan.steps[1], plan, None)} == {1}
    came: Any = SimpleNamespace(step=plan.steps[1], results=SimpleNamespace(failed={}))
    part.came(came, None)
    assert came.results.failed == {
        1: "declined: one more training would make epsilon 2.1 at delta 0.001, beyond [privacy] "
        "epsilon = 2"
    }
    record: Any = {**said(part, plan, 1, c0=(1.5, 1.7)), "failed": {"1": came.results.failed[1]}}
    part._see(record, plan)
    came.results.failed.clear()
    part.abstains(plan.steps[2], plan, None)
    part.came(came, None)
    assert came.results.failed == {}, "it is said once"


def test_what_is_spent_is_of_the_task_that_an_order_was_of():
    """Asynchronous rounds count an upload of task 0 after its client has gone on to task 1."""
    part, plan = spending(2.0, open=True)
    plan.steps[1].task_of = lambda client: 1
    record: Any = {"interaction": 1, "cohort": [1], "metrics": {}, "arrivals": [[1, 0]]}
    record["clients"] = {"1": {"epsilon": 1.9, "epsilon_next": 2.1}}
    part._see(record, plan)
    plan.steps[2].task_of = lambda client: 1
    assert part.abstains(plan.steps[2], plan, None) == {}
    plan.steps[2].task_of = lambda client: 0
    assert {*part.abstains(plan.steps[2], plan, None)} == {1}


def test_new_data_are_learned_though_silent_sites_have_spent_all(own, tmp_path):
    """Three sites may train twice on each example; the first one alone brings another task."""
    grown(own / "2" / "task-0", [*range(200, 200 + ALL)])
    shutil.copy(own / "0/client.json", own / "2/client.json")
    made = hiding(epsilon=1.001 * cost((8, 1 / 4)), min_clients=2)
    made = made.model_copy(update={"schedule": made.schedule.model_copy(update={"clients": 3})})
    out = tmp_path / "run"
    stage(made, own, out)
    add_task(own, 0, grown(tmp_path / "new", [*range(500, 500 + ALL)]))
    killed(made, own, out, before=dies(interaction=3), resume=True, at_rest="close")
    summary = stage(made, own, out, "close")
    records = records_of(out)
    assert [record["cohort"] for record in records] == [[0, 1, 2]] * 2 + [[0]] * 2
    assert [[*record.get("failed", {})] for record in records] == [[], [], ["1", "2"], []]
    assert told(out, 0)[-1] == summary["privacy"]["epsilon"] == cost((8, 1 / 4))


def by_accountant(steps: int) -> float:
    """Return epsilon of steps with a rate of 1/4 by dp-accounting alone."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant(value_discretization_interval=1e-3)
    step = PoissonSampledDpEvent(0.25, GaussianDpEvent(HIDING["noise_multiplier"]))
    return float(accountant.compose(SelfComposedDpEvent(step, steps)).get_epsilon(DELTA))


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """Three clients, of which the last has a quarter of the rows of each other, and spends most."""
    for client, count in enumerate((4 * ALL, 4 * ALL, ALL)):
        place = tmp_path / "data" / str(client)
        grown(place / "task-0", [*range(1000 * (client + 5), 1000 * (client + 5) + count)])
        facts = {"input_shape": [1, 8, 8], "num_classes": CLASSES}
        (place / "client.json").write_text(json.dumps(facts))
    return tmp_path / "data"


def of_three(**schedule: Any) -> Any:
    made = tiny_experiment(
        schedule={"rounds": 2, "clients": 3, **schedule}, server={"min_clients": 2},
        privacy=HIDING, training={"batch_size": 4},
    )  # fmt: skip
    return made.model_copy(update={"scenario": None, "data": None})


LIES = {
    "its upload is left out": poisoned(scaled(1e6)),
    "its upload is refused": poisoned(lambda upload: Bundle()),
    "it fails after its training": lambda client, order, answer: (Bundle(), answer[1], "no room"),
}


@pytest.mark.parametrize("how", LIES)
def test_a_training_whose_upload_does_not_count_was_spent_all_the_same(three, tmp_path, how):
    """Client 2 trains twice, 4 steps each time at a rate of 1/4, and nothing later says so."""

    def lie(client: int, order: Any, answer: Any) -> Any:
        trains = order.kind == rpc.ORDER_KIND_TRAIN and order.round == 1
        return LIES[how](client, order, answer) if trains else answer

    out = tmp_path / "run"
    summary = Stage(of_three(), three, out, lie).run()
    records = records_of(out)
    assert [record["cohort"] for record in records] == [[0, 1, 2], [0, 1]]
    spent = [record["metrics"]["epsilon"] for record in records]
    assert spent == pytest.approx([by_accountant(4), by_accountant(8)], rel=0.02)
    assert summary["privacy"]["epsilon"] == spent[-1]


def test_a_client_that_is_set_aside_after_it_trained_ahead_counts_with_that(three, tmp_path):
    """It had its second order before the run died, and is not there any more when that goes on."""

    def dies_after(result: Any) -> None:
        if (result.order.client_id, result.order.interaction) == ("2", 1):
            raise Killed

    out = tmp_path / "run"
    killed(of_three(), three, out, after=dies_after)
    with closing(sqlite3.connect(out / "clients/2/privacy.db")) as db:
        assert db.execute("SELECT count(*) FROM trainings").fetchone() == (2,)
    summary = run_in_process(of_three(), three, out, resume=True, without=[2])
    assert summary["privacy"]["epsilon"] == pytest.approx(by_accountant(8), rel=0.02)


def test_orders_under_way_at_the_end_count_as_trained(three, tmp_path):
    """Of asynchronous rounds some are not answered when the last one ends."""
    out = tmp_path / "run"
    made = of_three(order="asynchronous", rounds=3, buffer=2)
    summary = run_in_process(made, three, out)
    left = dict(records_of(out)[-1]["under_way"])
    told = {c: [r["clients"][str(c)]["epsilon_next"] for r in records_of(out)
                if "epsilon_next" in r["clients"].get(str(c), {})] for c in left}  # fmt: skip
    assert left
    least = max((each[-1] for each in told.values() if each), default=0.0)
    assert summary["privacy"]["epsilon"] >= least > 0


def test_a_run_whose_clients_trained_ahead_does_not_end_before_that(own, tmp_path):
    """Its epsilon would leave out what they had charged. With all rounds it is that of all steps,
    three times 4 at a rate of 1/4, which dp-accounting composes here by itself."""

    def rounds(number: int) -> Any:
        made = tiny_experiment(
            schedule={"rounds": number, "clients": 2}, training={"batch_size": 4}, privacy=HIDING
        )
        return made.model_copy(update={"scenario": None, "data": None})

    out = tmp_path / "run"
    killed(rounds(3), own, out, before=dies(interaction=2, client_id="1"))
    with closing(sqlite3.connect(out / "clients/0/privacy.db")) as db:
        assert db.execute("SELECT count(*) FROM trainings").fetchone() == (3,)
    assert len(records_of(out)) == 2
    for fewer in (2, 1):
        with pytest.raises(ConfigError, match=r"schedule\.rounds.* never taken away"):
            run_in_process(rounds(fewer), own, out, resume=True)
    summary = run_in_process(rounds(3), own, out, resume=True)
    assert summary["privacy"]["epsilon"] == pytest.approx(by_accountant(12), rel=0.02)
