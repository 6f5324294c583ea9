"""Open runs that learn numbers or several labels: weekly data, prequential scores, live models."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, mean_absolute_error, roc_auc_score

import fedtide
from fedcli.data.store.growing import add_task
from fedcli.data.store.opened_data import open_data
from fedcli.parts import deployment
from fedcli.predicting.live_model import LiveModel
from fedcli.predicting.predicted_targets import TargetPredictions
from fedcli.predicting.prediction import predictions
from fedmodels.errors import ConfigError, DataError, PayloadError
from fedmodels.facts.resolution import experiment_of
from fedmodels.facts.run_classes import ClassChange
from fedmodels.nets import make_net
from fedmodels.nets.trained import ModelFacts
from fedmodels.parts.prequential import Prequential
from fedmodels.problems.targets import targets_in
from fedmodels.tensors.archive import load_named
from fedmodels.tensors.bundle import Problem
from fedmodels.training.run import RunFacts
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.parts.open_admission import OpenAdmission
from fedsrv.parts.refused_models import line_of
from fedsrv.parts.stages import OpenRuns
from fedtide.inprocess import run_in_process
from tests.conftest import records_of
from tests.runs import dies, ends_as, killed

CLIENTS, ROUNDS, LR = 2, 2, 0.1
NUMBERS = {"target": "price", "target_mean": [100.0], "target_std": [10.0]}
LABELS = {"labels": ["hot", "wet"]}
HEADS = ("a", "b", "price", "hot", "wet", "site")


def table(path, week, sites=(0, 1), count=40, unit=1.0):
    rng = np.random.default_rng(10 * week + len(sites))
    with path.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(HEADS)
        for at in range(count * len(sites)):
            a, b = rng.normal(size=2) + week / 2
            price = (100 + 10 * a - 5 * b + rng.normal()) * unit
            lines.writerow([a, b, price, int(a > b), int(b > 0), sites[at % len(sites)]])
    return path


def tables_of(root, learned, **more):
    found = {
        "data": {
            "name": "table", "root": str(root),
            "columns": {"features": ["a", "b"], "client": "site", **learned},
        },
        "scenario": {"kind": "natural"},
        "net": {"name": "mlp", "hidden": []},
        "method": {"name": "fedavg"},
        "schedule": {
            "open": True, "order": "tasks_outer", "rounds": ROUNDS, "clients": CLIENTS,
        },
        "training": {"batch_size": 1000, "lr": LR, "local_epochs": 2},
        "evaluate": {"prequential": True},
        "deploy": {},
    }  # fmt: skip
    for name, keys in more.items():
        found[name] = {**found.get(name, {}), **keys}
    return found


def parts_of(run, client, task):
    """Return normalised inputs and targets as they are learned, for training and for testing."""
    held = open_data(run.data, client)
    targets = targets_in(held.file.transform, "data")
    read = [held.arrays(task, part) for part in ("train", "test")]
    return [(held.normaliser(x).astype(np.float64), targets.learned(y)) for x, y in read]


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


@pytest.mark.parametrize("learned", [NUMBERS, LABELS], ids=["numbers", "labels"])
def test_two_weeks_are_learned_scored_and_served_as_by_hand(tmp_path, learned):
    """A linear net of full batches; the week is scored first, by the model of the week before."""
    config = tables_of(table(tmp_path / "first.csv", 0), learned)
    run = fedtide.open_run(config, out=tmp_path / "run")
    run.learn()
    for client in range(CLIENTS):
        run.add_task(client, table(tmp_path / f"{client}.csv", 1 + client, [client]))
    run.learn()
    closed = run.close()
    names = learned.get("labels") or ["price"]
    outputs = len(names)
    first = RunFacts(experiment_of(config), Problem((2,), outputs)).initial_weights
    w, b = first["head/weight"].double().numpy(), first["head/bias"].double().numpy()
    expected = dict[str, float]()
    for task in range(2):
        parts = [parts_of(run, client, task) for client in range(CLIENTS)]
        for client in range(CLIENTS) if task else ():
            x, y = (np.concatenate(both) for both in zip(*parts[client], strict=True))
            z = x @ w.T + b
            expected[str(client)] = (
                10 * mean_absolute_error(y, z) if "target" in learned else roc_auc_score(y, z)
            )
        for _ in range(ROUNDS):
            sent = []
            for (x, y), _ in parts:
                v, c = w.copy(), b.copy()
                for _ in range(2):
                    z = x @ v.T + c
                    error = 2 * (z - y) if "target" in learned else sigmoid(z) - y
                    v -= LR * error.T @ x / error.size
                    c -= LR * error.mean(0) / (error.shape[1])
                sent.append((v, c, len(y)))
            n = [count for _, _, count in sent]
            w, b = (np.average([s[k] for s in sent], axis=0, weights=n) for k in (0, 1))
    name = "prequential_mae" if "target" in learned else "prequential_auroc"
    told = [{c: row[name] for c, row in r["clients"].items() if name in row}
            for r in records_of(tmp_path / "run")]  # fmt: skip
    assert told[:ROUNDS] == [{}] * ROUNDS
    assert told[ROUNDS] == {c: pytest.approx(v, rel=1e-3) for c, v in expected.items()}
    assert closed.summary["metrics"][name] == pytest.approx(np.mean([*expected.values()]), rel=1e-3)
    [*_, last] = sorted((tmp_path / "run/server").glob("state-*.safetensors"))
    found = load_named(last)[0]["common"].weights
    assert found["head/weight"].numpy() == pytest.approx(w, abs=1e-5)
    assert found["head/bias"].numpy() == pytest.approx(b, abs=1e-5)
    live = run.personal_model(0)
    raw, _ = open_data(run.data, 0).arrays(1, "test")
    assert live.predict(raw).shape == (len(raw), outputs)
    assert [*live.class_names] == names


def dealt_twice(tmp_path, learned, **more):
    """Return an experiment and data of two tasks, of which the second one was added."""
    config = tables_of(table(tmp_path / "first.csv", 0), learned, **more)
    run = fedtide.open_run(config, out=tmp_path / "dealt")
    data = run.data
    for client in range(CLIENTS):
        add_task(data, client, table(tmp_path / f"{client}.csv", 1 + client, [client]),
                 run.experiment.data)  # fmt: skip
    return run.experiment, data


@pytest.mark.parametrize("learned", [NUMBERS, LABELS], ids=["numbers", "labels"])
def test_a_run_that_dies_in_its_second_week_ends_with_the_same_bits(tmp_path, learned):
    more = {"trigger": {"close_after_s": 0}, "method": {"name": "fedper"},
            "net": {"hidden": [4]}}  # fmt: skip
    experiment, data = dealt_twice(tmp_path, learned, **more)
    whole = run_in_process(experiment, data, tmp_path / "whole")
    killed(experiment, data, tmp_path / "run", before=dies(interaction=ROUNDS + 1))
    ends_as(whole, experiment, data, tmp_path / "run")
    assert any(name.startswith("prequential_") for name in whole["metrics"])


# --- what goes live -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "tolerance", "live"),
    [
        ([0.5, 0.4, 0.5], 0.0, 2), ([0.5, 0.6, 0.5], 0.0, 1), ([0.5, 0.5, 0.5], 0.0, 2),
        ([0.5, 0.54, 0.5], 0.1, 2), ([0.5, 0.56, 0.5], 0.1, 1), ([0.5, float("nan"), 0.5], 0.9, 1),
        ([0.5, 0.5, float("nan")], 0.0, 2),
    ],
)  # fmt: skip
def test_a_model_with_a_larger_loss_does_not_go_live(
    tmp_path, monkeypatch, losses, tolerance, live
):
    left = list(losses)
    monkeypatch.setattr(deployment, "loss_of", lambda net, sets, targets: left.pop(0))
    config = tables_of(table(tmp_path / "first.csv", 0), NUMBERS, deploy={"tolerance": tolerance},
                       schedule={"clients": 1})  # fmt: skip
    table(tmp_path / "first.csv", 0, [0])
    run = fedtide.open_run(config, out=tmp_path / "run")
    run.learn()
    status = deployment.Deployed(tmp_path / "run/clients/0").status()
    assert (status.went_live, status.refused) == (live, 2 - live)
    assert not left


def test_the_loss_of_a_guard_is_that_of_scikit_learn(tmp_path):
    run = fedtide.open_run(tables_of(table(tmp_path / "a.csv", 0), LABELS), out=tmp_path / "run")
    targets = targets_in(open_data(run.data, 0).file.transform, "data")
    net = make_net("mlp", num_classes=2, input_shape=(2,), hidden=[])
    sets = [tuple(map(torch.from_numpy, (x.astype(np.float32), y)))
            for x, y in parts_of(run, 0, 0)]  # fmt: skip
    z = torch.cat([net(x) for x, _ in sets]).detach().double().numpy()
    y = torch.cat([y for _, y in sets]).numpy()
    by_hand = np.mean([log_loss(y[:, k], sigmoid(z[:, k])) for k in range(2)])
    assert deployment.loss_of(net, sets, targets) == pytest.approx(by_hand, rel=1e-6)


def test_a_live_model_of_another_unit_is_not_compared(tmp_path):
    config = tables_of(table(tmp_path / "first.csv", 0), NUMBERS)
    run = fedtide.open_run(config, out=tmp_path / "run")
    run.learn()
    model = run.personal_model(0)
    own = open_data(run.data, 0).file.transform
    assert model.targets == targets_in(own, "data")
    other = json.loads(json.dumps(own))
    other["columns"]["target_std"] = [1.0]
    assert model.targets != targets_in(other, "data")


def test_what_people_read_of_a_refused_model():
    assert "its loss on the client's own examples" in line_of(
        3, rpc.RefusedModel(round=1), of_targets=True
    )
    assert line_of(3, rpc.RefusedModel(round=1)).endswith("its outputs are not finite")


# --- who and what is refused ----------------------------------------------------------------------


def described(*names):
    about = {"format": 1, "input_shape": [2], "num_classes": len(names), "class_names": names}
    counts = {part: [2, *[0] * (len(names) - 1)] for part in ("train", "test")}
    return json.dumps({**about, "tasks": [counts]})


@pytest.mark.parametrize("others", [("price", "more"), ("cost",), ("hot",)])
def test_nobody_brings_an_output_to_a_run_of_numbers(tmp_path, others):
    """A client that announced one more grew everybody's net."""
    experiment = experiment_of(tables_of(table(tmp_path / "a.csv", 0), NUMBERS))
    found = OpenAdmission.of(experiment, {})
    found.check_fits(0, described("price"))
    with pytest.raises(PayloadError, match=r'client 1 learns .*, and the run \["price"\]'):
        found.check_fits(1, described(*others))


def test_outputs_are_no_classes_to_rename(tmp_path):
    run = fedtide.open_run(tables_of(table(tmp_path / "a.csv", 0), LABELS), out=tmp_path / "run")
    part = OpenRuns.__new__(OpenRuns)
    part.store = type("Held", (), {"experiment": run.experiment})()
    with pytest.raises(PayloadError, match="learns hot, wet, and has no classes to change"):
        part._ask_classes([ClassChange("hot", "wet")], merges=True)


@pytest.mark.parametrize(
    ("learned", "figures", "line"),
    [
        (NUMBERS, {"prequential_mae": -1.0}, "is -1, not from 0"),
        (NUMBERS, {"prequential_mae": float("inf")}, "is inf, not from 0"),
        (NUMBERS, {"prequential": 0.5}, "of a run that learns something else"),
        (LABELS, {"prequential_auroc": 1.5}, "is 1.5, not from 0 to 1"),
        (LABELS, {"prequential_mae": 0.5}, "of a run that learns something else"),
        ({"label": "hot"}, {"prequential_mae": 0.5}, "of a run that learns something else"),
    ],
)
def test_what_a_client_cannot_have_measured_is_refused(tmp_path, learned, figures, line):
    experiment = experiment_of(tables_of(table(tmp_path / "a.csv", 0), learned))
    part = Prequential.of(None, RunFacts(experiment, Problem((2,), 2)))
    with pytest.raises(PayloadError, match=line):
        part.check_told(figures, 3)


def test_score_drop_is_of_accuracies(tmp_path):
    with pytest.raises(ConfigError, match="score_drop compares accuracies"):
        experiment_of(tables_of(table(tmp_path / "a.csv", 0), LABELS, trigger={"score_drop": 0.1}))


# --- intervals ------------------------------------------------------------------------------------


def test_nine_of_ten_numbers_lie_within_their_interval(tmp_path):
    """By hand: the value at place ceil(0.9 (n + 1)) of the misses on the validation part."""
    config = tables_of(
        table(tmp_path / "first.csv", 0, count=250), NUMBERS, data={"validation_share": 0.4}
    )
    run = fedtide.open_run(config, out=tmp_path / "run")
    run.learn()
    model = run.personal_model(0)
    x, y = open_data(run.data, 0).arrays(0, "train")
    kept = round(0.4 * len(y))
    assert model.facts.calibrated_on == pytest.approx(kept, abs=1)
    n = model.facts.calibrated_on
    misses = np.sort(np.abs(model.predict(x[-n:]) - y[-n:])[:, 0])
    assert model.facts.widths == pytest.approx([misses[int(np.ceil(0.9 * (n + 1))) - 1]], rel=1e-4)
    new = table(tmp_path / "new.csv", 0, [0, 1], count=400)
    answers = fedtide.predict(new, run=tmp_path / "run", client=0)
    with new.open(encoding="utf-8") as file:
        prices = [float(row["price"]) for row in csv.DictReader(file)]
    ends = [one["intervals"]["price"] for one in answers]
    within = [low <= price <= high for price, (low, high) in zip(prices, ends, strict=True)]
    assert 0.8 <= np.mean(within) <= 0.97
    found = list(predictions(model, new, [new, Path(tmp_path / "none.csv")]))
    [*_, none] = [row for one in found for row in one.rows()]
    heads = TargetPredictions.heads(TargetPredictions.columns(model))
    assert heads[3:] == ["price", "price from", "price to", "note"]
    assert all(len(row) == len(heads) for one in found for row in one.rows())
    assert none[3:6] == ["", "", ""]
    said = found[0].shown()["predictions"][0]
    assert said["intervals"] == [pytest.approx(ends[0])]
    assert "±" in next(found[0].lines(1))


def test_several_labels_and_quantiles_have_no_interval(tmp_path):
    for number, learned in enumerate((LABELS, {**NUMBERS, "quantiles": [0.1, 0.5, 0.9]})):
        config = tables_of(
            table(tmp_path / "a.csv", 0, count=100), learned, data={"validation_share": 0.4}
        )
        run = fedtide.open_run(config, out=tmp_path / f"run{number}")
        run.learn()
        facts = run.personal_model(0).facts
        assert facts.calibrated_on >= 20
        assert facts.widths == ()
        assert (facts.temperature == 1.0) == (learned is not LABELS)


def test_probabilities_of_labels_are_as_sure_as_the_validation_examples_say(tmp_path):
    """Neither a surer nor a less sure answer has less loss there: each logit divided by one T."""
    config = tables_of(
        table(tmp_path / "a.csv", 0, count=200), LABELS, data={"validation_share": 0.4},
        training={"local_epochs": 6, "lr": 0.2},
    )  # fmt: skip
    run = fedtide.open_run(config, out=tmp_path / "run")
    run.learn()
    model = run.personal_model(0)
    x, y = (
        part[-model.facts.calibrated_on :] for part in open_data(run.data, 0).arrays(0, "train")
    )
    says = model.predict(x).astype(np.float64)
    logits = np.log(says / (1 - says))
    losses = [float(np.mean(np.logaddexp(0, f * logits) - y * f * logits)) for f in (0.9, 1, 1.1)]
    assert losses[1] == min(losses)
    np.testing.assert_array_equal(says, model.answers(x)[0])


# --- labels that come back ------------------------------------------------------------------------


@pytest.mark.needs("serving")
@pytest.mark.parametrize(
    ("learned", "labels", "numbers"),
    [
        (NUMBERS, [101.5, {"price": 99}, None], [[101.5], [99.0]]),
        (LABELS, [["wet"], {"hot": 1, "wet": False}, []], [[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]]),
    ],
    ids=["numbers", "labels"],
)
def test_targets_that_come_later_become_a_task(tmp_path, learned, labels, numbers):
    from fedplugins.serving.bodies import feedback_of
    from fedplugins.serving.site import Site

    run = fedtide.open_run(tables_of(table(tmp_path / "a.csv", 0), learned), out=tmp_path / "run")
    run.learn()
    live = LiveModel.of(tmp_path / "run/clients", 0)
    here = Site(run.data, 0, len(numbers))
    x = np.array([[0.125, 0.25], [0.5, 0.75], [1.5, 2.5]], np.float32)
    body = json.dumps({"id": "a" * 16, "inputs": x.tolist(), "labels": labels}).encode()
    found = feedback_of(body, live.now().model.facts)
    told = here.label("call", range(3), x, found.names, live.now())
    assert told["taken"] == len(numbers)
    here.end()
    data = open_data(run.data, 0)
    assert data.num_tasks == 2
    parts = [data.arrays(1, part) for part in ("train", "test")]
    rows = {tuple(map(float, one)): list(map(float, y)) for xs, ys in parts
            for one, y in zip(xs, ys, strict=True)}  # fmt: skip
    there = [row for row, label in zip(x.tolist(), labels, strict=True) if label is not None]
    assert rows == {tuple(row): y for row, y in zip(there, numbers, strict=True)}
    run.learn()
    run.close()


@pytest.mark.needs("serving")
def test_labels_for_a_model_of_other_targets_are_not_taken(tmp_path):
    from fedplugins.serving.site import Site

    first = table(tmp_path / "a.csv", 0)
    run = fedtide.open_run(tables_of(first, NUMBERS), out=tmp_path / "run")
    run.learn()
    now = LiveModel.of(tmp_path / "run/clients", 0).now()
    other = fedtide.open_run(tables_of(first, LABELS), out=tmp_path / "other")
    here = Site(other.data, 0, 5)
    with pytest.raises(DataError, match="the model learns something else than the client"):
        here.label("call", [0], np.zeros((1, 2), np.float32), ["[1.0, 0.0]"], now)
    here.end()


@pytest.mark.needs("serving")
@pytest.mark.parametrize(
    ("learned", "label"),
    [
        (NUMBERS, "dear"), (NUMBERS, {"cost": 3}), (NUMBERS, {"price": None}), (NUMBERS, True),
        (NUMBERS, {"price": float("nan")}), (NUMBERS, {"price": 1, "more": 2}), (NUMBERS, [3]),
        (LABELS, ["cold"]), (LABELS, 1), (LABELS, {"hot": 2, "wet": 0}), (LABELS, {"hot": 1}),
    ],
)  # fmt: skip
def test_what_is_no_target_is_refused_in_a_line(tmp_path, learned, label):
    from fedplugins.serving.bodies import feedback_of

    data = fedtide.open_run(
        tables_of(table(tmp_path / "a.csv", 0), learned), out=tmp_path / "r"
    ).data
    facts = ModelFacts("mlp", {}, (2,), 1, transform=open_data(data, 0).file.transform)
    body = json.dumps({"id": "a" * 16, "inputs": [[1, 2]], "labels": [label]}).encode()
    with pytest.raises(DataError, match="a label is an object of a number for each of"):
        feedback_of(body, facts)


# --- drift ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("learned", [NUMBERS, LABELS], ids=["numbers", "labels"])
def test_inputs_and_predictions_that_moved_are_told(tmp_path, learned):
    pytest.importorskip("fedplugins.drift.part", reason="needs the plugin of drift")
    config = tables_of(table(tmp_path / "a.csv", 0, count=200), learned, evaluate={"drift": True},
                       schedule={"rounds": 1})  # fmt: skip
    run = fedtide.open_run(config, out=tmp_path / "run")
    run.learn()
    for week in (1, 20):
        for client in range(CLIENTS):
            run.add_task(client, table(tmp_path / f"{week}{client}.csv", 0 if week == 1 else week,
                                       [client], count=200 + week))  # fmt: skip
        run.learn()
    rows = [r["clients"] for r in records_of(tmp_path / "run")]
    assert "input_drift" not in rows[0]["0"]
    assert rows[1]["0"]["input_drift_p"] > 1e-6
    for part in ("input", "prediction"):
        assert rows[2]["0"][f"{part}_drift_p"] < 1e-3
    alarms = [a for r in records_of(tmp_path / "run") for a in r.get("drift", ())]
    lines = [a["line"] for a in alarms if a["part"] == "prediction"]
    word = "the prediction of 'price'" if "target" in learned else "the probability of label"
    assert all(word in line for line in lines)
