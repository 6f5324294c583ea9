"""Uploads far out of their cohort: bounds by hand, and runs of which one client scales or flips."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cosine_similarity

import fedtide
from fedcli.runtime.worker import Worker
from fedmodels.errors import ClientFailed, TooFewClients
from fedmodels.facts.config_file import read_experiment
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.differences import SKETCH, Measured, against
from fedpb.failures import failed_by
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine import comparison
from fedsrv.engine.cohort import Answers, too_few
from fedsrv.engine.comparison import agreed_on, far_out, oddities, standing_out
from fedsrv.parts.odd_uploads import OddUploads, first_odd
from fedsrv.progress.events import EventLog
from fedsrv.state.store import Store
from fedtide.inprocess import launch_in_process, run_in_process
from tests.conftest import records_of, tiny_experiment
from tests.fedmodels.methods.test_conformance import experiment_for
from tests.fuzz.poisons import (
    huge_generators,
    huge_prototypes,
    poisoned,
    scaled,
    wild_statistics,
)
from tests.liars import Stage
from tests.runs import dies, ends_as, killed
from tests.sizes import ROOT

# --- the bounds, by hand --------------------------------------------------------------------------


def weights(*norms, given=1.0):
    return {c: Measured({"weights": n}, {"weights": given}) for c, n in enumerate(norms)}


@pytest.mark.parametrize(
    ("norms", "odd"),
    [
        ((1.0, 1.0, 11.0), [2]),
        ((1.0, 1.0, 10.0), []),  # ten times the median: no more
        ((0.1, 0.1, 4.9), []),  # 49 times as far, and less than five times what was given
        ((0.1, 0.1, 5.1), [2]),
        ((1.0, 20.0), []),  # of two nobody knows which one is odd
        ((1.0, 20.0, 20.0, 1.0), [1, 2]),
        ((20.0, 20.0, 1.0), []),
        ((0.0, 0.0, 20.0), []),  # two that trained nothing are no cohort
        ((0.0, 1.0, 1.0, 20.0), [3]),
    ],
)
def test_weights_far_out_of_their_cohort(norms, odd):
    assert [*far_out(weights(*norms))] == odd


def test_what_has_no_measure_but_its_size_may_be_a_hundred_times_as_large():
    def prototypes(*sizes):
        return {c: Measured({"prototypes/class": size}) for c, size in enumerate(sizes)}

    assert far_out(prototypes(1.0, 2.0, 200.0)) == {}
    (line,) = far_out(prototypes(1.0, 2.0, 201.0)).values()
    assert line == (
        "its upload is far out of its cohort: its prototypes are 100 times as large as the median "
        "of 3 uploads"
    )


def test_the_part_that_lies_farthest_out_is_named():
    cohort = {c: Measured({"weights": 1.0, "statistics": 1.0}) for c in range(2)}
    cohort[2] = Measured({"weights": 20.0, "statistics": 1e6})
    assert "its statistics moved 1e+06 times as far" in far_out(cohort)[2]


@pytest.mark.parametrize(("all_but", "ratio"), [(0, None), (1, 11.0), (2, 16.5), (3, 33.0)])
def test_an_upload_is_compared_with_the_largest_but_those_that_may_lie(all_but, ratio):
    """Of 1, 2, 3 and 33 the largest is 33; without one, two and three of them it is 3, 2 and 1."""
    found = oddities(weights(1.0, 2.0, 3.0, 33.0), 0.0, all_but=all_but)
    assert {c: odd.ratio for c, odd in found.items()} == ({} if ratio is None else {3: ratio})


@pytest.mark.parametrize(("one", "out"), [(-0.45, []), (-0.55, [0])])
def test_a_direction_stands_out_by_two_deviations_of_its_cohort(monkeypatch, one, out):
    """Of -0.3 with 0.1 more and less, the median deviation is 0.05: two of 1.48 times that are
    0.148 below the median of -0.35, so the bound is -0.498."""
    cosines = [one, -0.4, -0.35, -0.35, -0.3]
    voices = {client: (4, cosine) for client, cosine in enumerate(cosines)}
    monkeypatch.setattr(comparison, "against", lambda *_: voices)
    assert [*standing_out(weights(*[1.0] * 5))] == out


def drawn(*rows, norms=()):
    """Return uploads with these projections, of which the first numbers are given."""
    found = {}
    for client, row in enumerate(rows):
        sketch = torch.zeros(SKETCH)
        sketch[: len(row)] = torch.tensor(row)
        norm = norms[client] if norms else 1.0
        found[client] = Measured({"weights": norm}, {"weights": 1.0}, norm, sketch)
    return found


def test_an_upload_against_the_others_stands_out_whatever_its_size():
    """Of five, three are a majority: client 4 has a cosine of -0.71 with each of four others."""
    rows = [(1.0, 0.0), (3.0, 0.0), (0.0, 1.0), (0.0, 0.2), (-9.0, -9.0)]
    voices = against({c: m.sketch for c, m in drawn(*rows).items()}, -0.2, 2)
    assert voices[4] == (4, pytest.approx(-(0.5**0.5)))
    assert voices[0] == (1, pytest.approx(0.0))
    assert standing_out(drawn(*rows)) == {4: "it points against 4 of 4 others"}
    assert standing_out(drawn(*rows[1:])) == {}, "of four nobody knows"


@pytest.mark.parametrize("liars", [2, 3, 4])
def test_fewer_than_half_cannot_aim_a_warning_at_one_whom_the_honest_agree_with(liars):
    """All liars of ten turn against client 0 with all they have; the honest ones agree with it."""
    honest = [(1.0, 0.1 * c) for c in range(10 - liars)]
    rows = [*honest, *[(-5.0, 0.0)] * liars]
    assert all(client >= 10 - liars for client in standing_out(drawn(*rows)))
    small = drawn(*honest, *[(1.0, 0.0)] * liars, norms=[*[1.0] * (10 - liars), *[1e-6] * liars])
    assert standing_out(small) == {}, "nor by uploads so small that the others look large"


def test_an_exclusion_takes_the_voices_of_all_but_those_that_may_lie():
    """Client 9 points against seven of nine others: all but three of ten, and not all but two."""
    rows = [*[(1.0, 0.01 * c) for c in range(7)], (0.0, 1.0), (0.0, 1.0), (-1.0, 0.0)]
    cohort = drawn(*rows)
    assert standing_out(cohort) == {9: "it points against 7 of 9 others"}
    assert agreed_on(cohort, None) == agreed_on(cohort, 3) == [9]
    assert agreed_on(cohort, 2) == [], "eight voices are needed then"
    assert agreed_on(cohort, 4) == [], "four of ten could aim it at an honest client"


def test_uploads_that_differ_as_much_from_one_another_do_not_stand_out():
    """Six at right angles: each cosine is 0. With pairs that are opposed: all are below -0.2."""
    each = [tuple(float(i == j) for j in range(6)) for i in range(6)]
    opposed = [(1.0, 0.0), (-1.0, 0.0), (0.0, 1.0), (0.0, -1.0), (1.0, 1.0), (-1.0, -1.0)]
    assert standing_out(drawn(*each)) == standing_out(drawn(*opposed)) == {}


@pytest.mark.parametrize(("norm", "out"), [(5.0, []), (5.1, [4])])
def test_an_upload_of_more_than_half_the_bound_stands_out(norm, out):
    cohort = drawn(*[(1.0, 0.0)] * 5, norms=[1.0] * 4 + [norm])
    assert [*standing_out(cohort)] == out


def test_a_client_that_flips_its_sign_is_told(tmp_path, monkeypatch):
    """Among ten clients of unlike data; of honest ones at most one upload stands out."""
    told = []
    monkeypatch.setattr(EventLog, "tell", lambda log, kind, *_, **facts: told.append(facts))
    attackers = ROOT / "benchmarks" / "attacks"
    flips = [f"method.name={attackers}/attackers.py:AttackedFedAvg", "method.attack=sign_flip"]
    more = ["method.attackers=1", "schedule.rounds=3"]
    launch_in_process(read_experiment(attackers / "digits.toml", flips + more), tmp_path / "run")
    records = records_of(tmp_path / "run")
    warned = [client for record in records for client in record.get("warned", {})]
    assert warned.count("9") == 3
    assert len(warned) <= 4
    lines = [facts.get("line", "") for facts in told]
    for place in (
        "interaction 1 stands out and counts:",
        "interaction 2 stands out and counts (as",
    ):
        assert any(f"the upload of client 9 in {place}" in line for line in lines)
    for record in records:
        shares = [record["clients"][str(c)]["aggregation_weight"] for c in record["cohort"]]
        assert sum(shares) == pytest.approx(1.0)


def test_earlier_uploads_are_company():
    """An asynchronous round may take one upload at a time."""
    alone = {4: weights(20.0)[0]}
    assert far_out(alone) == {}
    assert [*far_out(alone, [{"weights": 1.0}, {"weights": 1.5}])] == [4]


def record(interaction, **norms):
    rows = {c: {"difference_norm": n, "given_norm": 1.0} for c, n in norms.items()}
    cohort = [*map(int, norms)]
    return {"interaction": interaction, "cohort": cohort, "clients": rows}


def of(interaction, *norms):
    return record(interaction, **{str(c): n for c, n in enumerate(norms)})


def test_whose_upload_was_odd_is_in_the_records():
    """Two uploads suffice there, as clients failed after them."""
    calm, odd = of(3, 1.0, 1.0), of(4, 1.0, 20.0)
    assert first_odd([]) is None
    assert first_odd([calm, odd]) is None, "the latest commit was not odd"
    assert first_odd([odd, calm])[:2] == (4, 1)
    assert first_odd([of(5, 1.0, 30.0), odd, calm])[:2] == (4, 1), "the same client twice"
    assert first_odd([of(5, 30.0, 1.0), odd])[:2] == (5, 0)
    assert str(first_odd([odd])[2]) == (
        "its weights moved 20 times as far as the median of 2 uploads"
    )
    assert first_odd([of(4, 0.01, 0.9)]) is None, "90 times as far, and less than what was given"


# --- runs with one liar -------------------------------------------------------------------------


def fails(client, order, answer):
    """Say of each order to train that it cannot be done."""
    if order.kind == rpc.ORDER_KIND_TRAIN:
        return Bundle(), rpc.Report(), "no"
    return answer


NORMED = {"net": {"name": "resnet20"}}
FOLDED = {"server": {"upload_memory_mb": 0}}
CASES = {
    "weights-x-1e6": ("fedavg", scaled(1e6), {}, "weights moved"),
    "weights-x-10": ("fedavg", scaled(10.0), {}, "weights moved"),
    "weights-x-minus-10": ("fedavg", scaled(-10.0), {}, "weights moved"),
    "folded": ("fedper", scaled(10.0), FOLDED, "weights moved"),
    "read-one-by-one": ("pfedgraph", scaled(10.0), {}, "weights moved"),
    "statistics": ("fedavg", wild_statistics, NORMED, "statistics moved"),
    "prototypes": ("fedproto", huge_prototypes, {}, "prototypes are"),
    "prototypes-beside-weights": ("gldp", huge_prototypes, {}, "prototypes are"),
    "generators": ("pfedgrp", huge_generators, {}, "generators are"),
}


@pytest.mark.parametrize("case", CASES)
def test_an_upload_far_out_is_left_out_and_named(case, digits, tmp_path):
    """The run has the bits of one in which that client cannot train."""
    method, change, tables, what = CASES[case]
    tables = {"schedule": {"rounds": 1}, **tables}
    experiment = experiment_for((method, {}), **tables)
    summary = Stage(experiment, digits, tmp_path / "run", poisoned(change)).run()
    tables["server"] = {**tables.get("server", {}), "min_clients": 2}
    tolerant = experiment_for((method, {}), **tables)
    without = Stage(tolerant, digits, tmp_path / "without", fails).run()
    assert summary["state_sha256"] == without["state_sha256"]
    assert summary["metrics"] == without["metrics"]
    for record in records_of(tmp_path / "run"):
        assert record["cohort"] == [0, 1]
        assert record["failed"].keys() == {"2"}
        assert record["failed"]["2"].startswith("its upload is far out of its cohort: its ")
        assert what in record["failed"]["2"]
        row = record["clients"]["2"]
        assert row["difference_norm"] > 0
        assert -1 <= row["difference_cosine"] <= 1
        assert "loss" not in row


def test_what_an_upload_is_like_is_in_records_and_frames(digits, tmp_path):
    """Client 2 turns its difference around: nobody is left out, and the cosines tell."""
    moves, counts = {}, {}

    def turned(client, order, answer):
        upload, *rest = answer
        if order.kind != rpc.ORDER_KIND_TRAIN or order.interaction:
            return upload, *rest
        given = stage.cohort._trips.current.trip.common.weights
        if client == 2:
            turned = {k: 2 * given[k] - t for k, t in upload.weights.items()}
            upload = replace(upload, weights=turned)
        moves[client] = torch.cat([(upload.weights[k] - given[k]).flatten() for k in given])
        counts[client] = upload.scalars["num_examples"]
        return upload, *rest

    experiment = tiny_experiment(schedule={"rounds": 1})
    stage = Stage(experiment, digits, tmp_path / "run", turned, liars=range(3))
    stage.run()
    first = records_of(tmp_path / "run")[0]
    assert first["cohort"] == [0, 1, 2]
    mean = sum(counts[c] * moves[c] for c in moves)
    for client, move in moves.items():
        row, cosine = first["clients"][str(client)], cosine_similarity(move, mean, dim=0)
        assert row["difference_norm"] == pytest.approx(float(move.norm()), rel=1e-5)
        assert row["difference_cosine"] == pytest.approx(float(cosine), abs=0.05)
    frame = fedtide.open(tmp_path / "run").clients()
    assert {"difference_norm", "difference_cosine"} <= {*frame}


def test_an_honest_run_tells_the_same_in_every_layout(digits, tmp_path):
    """Norms and cosines are of the same bits whole, added up as they come, and in one process."""

    def told(out):
        return [
            {c: {k: v for k, v in row.items() if k.startswith("difference")}
             for c, row in record["clients"].items()}
            for record in records_of(out)
        ]  # fmt: skip

    experiment = tiny_experiment(schedule={"rounds": 1})
    folded = tiny_experiment(schedule={"rounds": 1}, **FOLDED)
    run_in_process(experiment, digits, tmp_path / "alone")
    Stage(experiment, digits, tmp_path / "whole", fails, liars=()).run()
    Stage(folded, digits, tmp_path / "folded", fails, liars=()).run()
    expected = told(tmp_path / "alone")
    assert all(len(row) == 2 for record in expected for row in record.values())
    assert told(tmp_path / "whole") == told(tmp_path / "folded") == expected


def test_below_min_clients_the_run_names_the_odd_one_and_how_to_go_on(digits, tmp_path):
    strict = tiny_experiment(schedule={"rounds": 1}, server={"min_clients": 3})
    stage = Stage(strict, digits, tmp_path / "run", poisoned(scaled(1e6)))
    with pytest.raises(TooFewClients, match=r"client 2 failed in round 1 .*--without 2 continues"):
        stage.run()


@pytest.mark.parametrize(
    ("reason", "is_blamed"),
    [(rpc.FAILURE_REASON_DECLINED, False), (rpc.FAILURE_REASON_TRAINING, True)],
)
def test_no_upload_is_blamed_for_a_budget_that_is_spent(reason, is_blamed, tmp_path, monkeypatch):
    """Their kind of failure decides; the words are the same."""
    store = Store(tmp_path, tiny_experiment(), resume=False)
    odd = (4, 1, oddities(weights(1.0, 2.0, 33.0), 0.0)[2])
    monkeypatch.setattr("fedsrv.parts.odd_uploads.odd_commit", lambda _: odd)
    monkeypatch.setattr(Store, "take_back", lambda *_: None)
    part, why = OddUploads(store, EventLog()), failed_by(reason, "declined: epsilon is spent")
    results = Answers({}, dict.fromkeys(range(3), why))
    at = SimpleNamespace(results=results, step=SimpleNamespace(round=2))
    told = []
    try:
        part.came(at, lambda: told.append("settled"))
    except TooFewClients as failed:
        told.append(failed)
    told.append(part.explains(too_few(results.failed, 2, "order", 2)))
    told.append(part.explains(ClientFailed(1, 2, "order", why)))
    store.close()
    if is_blamed:
        assert told[0] == "settled"
        assert all(isinstance(one, TooFewClients) for one in told[1:])
        assert "client 1's upload" in str(told[-1])
    else:
        assert told == [None, None]


# --- asynchronous rounds --------------------------------------------------------------------------


def asynchronous(buffer, **more):
    schedule = {"order": "asynchronous", "rounds": 3, "buffer": buffer, **more}
    return tiny_experiment(schedule=schedule)


@pytest.fixture
def late_liar(monkeypatch):
    """Client 2 lies as soon as two uploads have been counted."""
    honest = Worker.execute

    def lies(worker, order, payload):
        done = honest(worker, order, payload)
        if (worker.client, order.kind) == (2, rpc.ORDER_KIND_TRAIN) and order.interaction > 1:
            return replace(done, upload=scaled(1e6)(done.upload))
        return done

    monkeypatch.setattr(Worker, "execute", lies)


@pytest.mark.parametrize("buffer", [1, 2, 3])
def test_an_asynchronous_round_compares_with_the_uploads_before_it(
    buffer, digits, tmp_path, late_liar
):
    summary = run_in_process(asynchronous(buffer), digits, tmp_path / "run")
    records = records_of(tmp_path / "run")
    assert len(records) == 6
    odd = [r for r in records if "2" in r.get("failed", {})]
    assert odd
    assert all("far out of its cohort" in r["failed"]["2"] for r in odd)
    assert all(2 not in r["cohort"] for r in odd)
    assert summary["metrics"]["loss"] < 10
    assert all(dict(r["arrivals"])[2] < 2 for r in records if 2 in r["cohort"])


def test_a_killed_asynchronous_run_leaves_out_the_same_uploads(digits, tmp_path, late_liar):
    """What earlier uploads were like is read from the records."""

    def told(out):
        return [[r["cohort"], r.get("failed"), r["arrivals"]] for r in records_of(out)]

    experiment, out = asynchronous(2), tmp_path / "run"
    whole = run_in_process(experiment, digits, tmp_path / "whole")
    assert any(failed for _, failed, _ in told(tmp_path / "whole")[3:])
    killed(experiment, digits, out, before=dies(kind=rpc.ORDER_KIND_TRAIN, interaction=3))
    ends_as(whole, experiment, digits, out)
    assert told(out) == told(tmp_path / "whole")
