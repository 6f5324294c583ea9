"""No cost of a run grows faster than what it is a cost of.

Operations, bytes and calls are counted, never seconds: the numbers are equal on every machine.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, pairwise
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from rich.console import Console

from benchmarks.secure_sum import World
from fedcli.data.sets.registry import load
from fedcli.data.store.commands import run_partition
from fedmodels.config.columns import Columns
from fedmodels.config.data import Data
from fedmodels.facts.position import Stage, Task
from fedmodels.methods import make
from fedmodels.secure_sum import keys
from fedmodels.tensors.bundle import Problem
from fedmodels.training.run import RunFacts
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.client_profile import Profile
from fedsrv.engine.report_validator import ReportValidator
from fedsrv.engine.schedule import Step, scorers, steps
from fedsrv.engine.scores import Scores, client_rows
from fedsrv.engine.summary import forgetting_of_streams
from fedsrv.parts.open_plan import Growth, OpenPlan
from fedsrv.parts.secure_group import SecureGroup
from fedsrv.report.frame import group_runs
from fedsrv.report.page import page
from fedsrv.state.run_record import read_run
from fedtide.inprocess import run_in_process
from tests.conftest import tiny_experiment
from tests.growth.counting import MOST, exponent, operations

KEPT = 5
"""Objects of Python that may stay alive for each interaction of a closed run."""
WINDOW = 2
"""Tasks that are scored, of all that a client has had."""


def test_exponents_by_hand():
    """Fixed parts do not count: 7 + n^2 at 2, 4, 8 grows by 12 over 2 more, and by 60 over 6."""
    assert exponent({n: 1000 + 3 * n for n in (4, 16, 64)}) == pytest.approx(1)
    assert exponent({n: 7 + n**2 for n in (2, 4, 8)}) == pytest.approx(np.log(5) / np.log(3))
    assert exponent({4: 9, 8: 9, 16: 9}) == 0
    squares = operations(lambda: [a * b for a in range(40) for b in range(40)])
    assert 1600 < squares < 2 * 1600, "each pass of a comprehension counts"


# --- clients of a secure sum ----------------------------------------------------------------------


def secure_sum(place: Path, clients: int) -> dict[str, float]:
    """Return what each phase of a secure sum costs, of all clients together."""
    place.mkdir()
    world, everybody = World(place, clients, 4, signs=False), [*range(clients)]
    costs: dict[str, float] = {"sharing": operations(world.share)}
    costs["masking"] = operations(lambda: world.train(everybody))
    costs["opening"] = operations(lambda: world.unmask(everybody))
    costs["bytes"] = world.messages
    costs["bytes at rest"] = sum(f.stat().st_size for f in place.glob("*/secure-sum/*"))
    return costs


def test_a_secure_sum_costs_as_much_as_it_has_pairs_of_clients(tmp_path):
    """Shares that are put together once a client cost N^3: 1.5 of the number of pairs."""
    sizes = (6, 12, 24)
    found = {n * n: secure_sum(tmp_path / str(n), n) for n in sizes}
    for phase in found[36]:
        assert exponent({pairs: each[phase] for pairs, each in found.items()}) < MOST, phase


def test_a_client_agrees_with_each_other_once_for_shares_and_once_an_attempt_for_masks(
    tmp_path, monkeypatch
):
    agreed = list[int | None]()
    real = keys._agreed
    monkeypatch.setattr(
        keys, "_agreed", lambda key, public, whose=None: agreed.append(whose) or real(key, public)
    )
    world = World(tmp_path, 6, 4, signs=False)
    for made in (2 * 6 * 6 - 6, 6 * 5):
        agreed.clear()
        world.share()
        world.train([*range(6)])
        world.unmask([*range(6)])
        assert len([one for one in agreed if one is not None]) == made
        old = world.group
        facts = old.threshold, old.keys, old.numbers, old.payload
        world.group = SecureGroup.begun(rpc.Order(), b"", *facts)


def test_what_a_client_forgets_does_not_grow_with_what_it_has_forgotten(tmp_path):
    client = World(tmp_path, 3, 4, signs=False).clients[0]
    costs, total = dict[int, float](), 0
    for n in range(1, 33):
        order = rpc.Order(interaction=n, committed=n - 1)
        client._begin(order, {"pair": ""})
        total += operations(partial(client._forget, n - 1))
        costs[n] = total
    assert exponent({n: costs[n] for n in (2, 8, 32)}) < MOST


# --- rounds, cohorts and populations --------------------------------------------------------------


def validator(clients: int, cohort: int, rounds: int, tasks: int = 1) -> ReportValidator:
    """Return the rules of a run whose cohorts are drawn evenly."""
    rows = [{"train": [5, 3], "test": [2, 1]}] * tasks
    text = json.dumps({"format": 1, "input_shape": [4], "num_classes": 2, "tasks": rows})
    rng = np.random.default_rng(0)
    visits = [
        Step(n, n, Stage(n * tasks // rounds), drawn, True, n + 1 == rounds)
        for n in range(rounds)
        for drawn in [tuple(sorted(rng.choice(clients, cohort, replace=False).tolist()))]
    ]
    profiles = dict.fromkeys(range(clients), Profile.parse(0, text))
    run = RunFacts(tiny_experiment(), Problem((4,), 2))
    return ReportValidator(make("fedavg"), run, profiles, visits)


def all_announced(clients: int, cohort: int, rounds: int) -> int:
    """Return what it costs to look up what is announced behind each upload of a run, twice."""
    terms = validator(clients, cohort, rounds)
    return operations(
        lambda: [terms.announced(c, s) for s in terms.steps for c in s.cohort for _ in range(2)]
    )


def test_what_uploads_may_count_costs_the_same_in_each_round():
    """Each upload walked over all steps that were before, once it came from over 1,000 clients."""
    assert exponent({n: all_announced(1500, 4, n) for n in (8, 32, 128)}) < MOST
    assert exponent({n: all_announced(4, 4, n) for n in (8, 32, 128)}) < MOST


def test_what_uploads_may_count_costs_by_the_cohort_and_not_by_the_population():
    assert exponent({n: all_announced(200, n, 20) for n in (4, 16, 64)}) < MOST
    costs = {n: all_announced(n, 4, 20) for n in (80, 800)}
    assert costs[800] < 1.1 * costs[80]


def costs_of_rounds(
    data: Path, out: Path, *, looks_at: Collection[int] = (), **tables: Any
) -> dict[str, list[int]]:
    """Return what each interaction of a run in this process costs.

    ``calls``, ``bytes`` of its record, and, of interactions that are looked at, ``objects`` of
    Python that are alive as it begins.
    """
    calls, begun, alive = 0, dict[int, int](), list[int]()

    def called(frame: FrameType, event: str, value: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    def before(order: rpc.Order) -> None:
        if order.interaction not in begun and order.interaction in looks_at:
            sys.setprofile(None)
            gc.collect()
            alive.append(len(gc.get_objects()))
            sys.setprofile(called)
        begun.setdefault(order.interaction, calls)

    sys.setprofile(called)
    try:
        run_in_process(tiny_experiment(**tables), data, out, before=before)
    finally:
        sys.setprofile(None)
    lines = (out / "rounds.jsonl").read_text().splitlines()
    return {
        "calls": [after - first for first, after in pairwise(begun.values())],
        "bytes": [*map(len, lines)],
        "objects": alive,
    }


def test_a_later_round_costs_as_much_as_an_earlier_one(digits, tmp_path):
    """Whatever looks once at each interaction that was before makes a run a square of them."""
    schedule = {"rounds": 12}
    found = costs_of_rounds(digits, tmp_path / "run", looks_at=(4, 22), schedule=schedule)
    early, late = (sum(found["calls"][part]) for part in (slice(2, 6), slice(18, 22)))
    assert late < 1.005 * early, found["calls"]
    early, late = (sum(found["bytes"][part]) for part in (slice(2, 6), slice(18, 22)))
    assert late < MOST * early, found["bytes"]
    early, late = found["objects"]
    assert late - early < 18 * KEPT, found["objects"]


@pytest.fixture(scope="module")
def nine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a partition of the digits for nine clients."""
    root, made = tmp_path_factory.mktemp("nine"), tiny_experiment()
    assert made.data is not None
    assert made.scenario is not None
    run_partition(made.data, made.scenario, 9, 0, root, Console(quiet=True))
    return root


def test_groups_of_a_secure_sum_cost_by_their_number(nine, tmp_path):
    """Three groups of three cost thrice what one does: no client is held against other groups."""
    calls = dict[int, int]()
    for groups in (1, 2, 3):
        tables = {
            "privacy": {"secure_sum": {"trust": "coordinator", "groups": groups}},
            "schedule": {"clients": 3 * groups, "rounds": 1},
            "evaluate": {"every": 9},
        }
        calls[groups] = costs_of_rounds(nine, tmp_path / str(groups), **tables)["calls"][0]
    assert exponent(calls) < MOST, calls


@pytest.mark.parametrize("sampling", ["uniform", "poisson"])
def test_steps_cost_by_population_and_by_cohort_and_not_by_their_product(sampling):
    """Whoever looks at the population once for each of a cohort has a product of the two."""

    def planned(clients: int, cohort: int) -> int:
        schedule = {"clients": clients, "per_round": cohort, "rounds": 4, "sampling": sampling}
        experiment, tasks = tiny_experiment(schedule=schedule), dict.fromkeys(range(clients), 1)
        plan = partial(steps, experiment, range(clients), tasks)
        return operations(lambda: [scorers(experiment, tasks, s.cohort) for s in plan()])

    assert exponent({n: planned(n, 4) for n in (40, 160, 640)}) < MOST
    assert exponent({n: planned(640, n) for n in (4, 16, 64)}) < MOST
    grown = planned(640, 4) + planned(40, 32) - planned(40, 4)
    assert planned(640, 32) < MOST * grown


# --- tasks of an open run -------------------------------------------------------------------------


def scores_after(tasks: int) -> Scores:
    """Return the scores of four clients on their last tasks."""
    counts = [rpc.Counts(
        view="global", rule="classifier", test_set=f"task/{task}", support=[2, 1], predicted=[2, 1],
        correct=[1, 1], loss_sum=1.5,
    ) for task in range(max(0, tasks - WINDOW), tasks)]  # fmt: skip
    found, report = Scores(), rpc.Report(counts=counts)
    found.add({client: cast(Any, SimpleNamespace(report=report)) for client in range(4)})
    return found


def test_a_record_of_an_open_run_is_as_large_after_any_number_of_tasks():
    """A row had an entry for each task, null but for those of the window."""
    rows = {n: client_rows(scores_after(n), n) for n in (4, 64, 512)}
    sizes = {n: len(json.dumps(found)) for n, found in rows.items()}
    assert sizes[512] < 1.1 * sizes[4]
    work = {n: operations(lambda n=n: client_rows(scores_after(n), n)) for n in rows}
    assert work[512] == work[64]


def test_what_an_open_run_forgot_is_told_from_what_was_scored():
    """A list for each record with an entry for each task is a square of the tasks."""

    def told(tasks: int) -> int:
        records = [
            {"clients": {c: {**row, "task": n - 1} for c, row in rows.items()}}
            for n in range(1, tasks + 1)
            for rows in [client_rows(scores_after(n), n)]
        ]
        return operations(lambda: forgetting_of_streams(cast(Any, records), "global"))

    told(1)  # what is imported then
    assert exponent({n: told(n) for n in (8, 32, 128)}) < MOST


def test_steps_of_an_open_run_know_their_tasks_without_a_look_at_all_growths():
    def begun(tasks: int) -> int:
        growths = [Growth(n, {0: n + 1}) for n in range(tasks)]
        plan = OpenPlan(
            make("fedavg"), RunFacts(tiny_experiment(), Problem((4,), 2)), {}, {}, (), {},
            cast(Any, None), growths, {0: tuple(range(tasks))},
        )  # fmt: skip
        step = Step(tasks - 1, tasks - 1, Stage(tasks - 1), (0,), True, False, True, {0: Task(0)})
        assert plan.task_began(0, step) == tasks - 1
        return operations(lambda: plan.task_began(0, step))

    assert begun(512) == begun(8)


def test_a_growth_describes_anew_those_alone_that_go_on(monkeypatch):
    """Where clients go on one by one, all of them anew at each growth are a square of them."""
    plan, calls = validator(40, 4, 1, tasks=3), list[int]()
    known = {c: Profile.parse(c, _described(3)) for c in range(40)}
    opened = OpenPlan(plan.method, plan.run, {}, {}, (), {}, plan)
    real = Profile.within

    def within(self: Profile, *of: Any) -> Profile:
        calls.append(next(c for c, profile in known.items() if profile is self))
        return real(self, *of)

    monkeypatch.setattr(Profile, "within", within)
    first = opened.grown(Growth(0, dict.fromkeys(known, 1), ("0", "1")), known)
    assert calls == [*range(40)]
    known[5] = Profile.parse(5, _described(4))  # it has told of another task
    second = first.grown(Growth(1, {7: 2}), known)
    assert calls[40:] == [5, 7]
    third = second.grown(Growth(2, {8: 2}, ("2",)), known)
    assert calls[42:] == [*range(40)], "all have a column for the new class"
    assert [len(third.profiles[c].train) for c in (6, 7, 8)] == [1, 2, 2]
    assert third.profiles[9].train.tolist() == [[5, 3, 0]]


def _described(tasks: int) -> str:
    rows = [{"train": [5, 3], "test": [2, 1]}] * tasks
    return json.dumps({"format": 1, "input_shape": [4], "num_classes": 2, "tasks": rows})


def test_orders_of_an_open_run_are_counted_once():
    def counted(tasks: int) -> int:
        terms, total = validator(2, 2, tasks, tasks), 0
        for end in range(1, tasks + 1):
            terms = terms.grown(terms.run, terms.profiles, _going_on(terms.steps, end))
            total += operations(lambda t=terms, n=end: t.announced(0, t.steps[n - 1]))
        return total

    assert exponent({n: counted(n) for n in (8, 32, 128)}) < MOST


def _going_on(known: Sequence[Step], end: int) -> list[Step]:
    """Return steps of a growth: those before are the same, and all later ones are other ones."""
    return [*known[:end], *(Step(**vars(step)) for step in known[end:])]


# --- rows of a report and columns of a table ------------------------------------------------------


def test_a_report_costs_by_its_rows(whole_run, digits):
    run = read_run(whole_run(tiny_experiment(), digits).out)

    def written(rows: int) -> int:
        many = [{**row, "interaction": n, "round": n}
                for n, row in zip(range(rows), cycle(run.rows), strict=False)]  # fmt: skip
        groups = group_runs([replace(run, rows=many)])
        return operations(lambda: page(groups))

    written(4)  # what is imported then
    assert exponent({n: written(n) for n in (4, 12, 36)}) < MOST


def test_a_table_costs_by_its_columns(tmp_path):
    pytest.importorskip("pandas")

    def read(columns: int) -> int:
        place = tmp_path / str(columns)
        place.mkdir()
        lines = [",".join([*(f"c{n}" for n in range(columns)), "label"])]
        lines += [",".join([*(f"{n}.{row}" for n in range(columns)), "ab"[row % 2]])
                  for row in range(16)]  # fmt: skip
        (place / "one.csv").write_text("\n".join(lines) + "\n")
        data = Data(name="table", root=str(place), columns=Columns(label="label"))
        return operations(lambda: load(data))

    read(4)  # what is imported then
    assert exponent({n: read(n) for n in (8, 24, 72)}) < MOST
