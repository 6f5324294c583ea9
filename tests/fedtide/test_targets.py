"""Runs that learn numbers or several labels, from a table to predictions."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from sklearn.datasets import load_diabetes
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error
from sklearn.neural_network import MLPRegressor

import fedtide
from fedcli.data.own.new_inputs import NewInputs
from fedcli.data.store.commands import run_partition
from fedcli.data.store.opened_data import open_data
from fedcli.data.store.site import cut
from fedcli.predicting.predicted_targets import TargetPredictions
from fedmodels.errors import ArchiveError, ConfigError
from fedmodels.facts.resolution import experiment_of
from fedmodels.tensors.archive import load_named
from fedmodels.tensors.bundle import Problem
from fedmodels.training.run import RunFacts
from fedsrv.trained.trained_models import global_model
from fedtide.inprocess import run_in_process
from tests.runs import dies, ends_as, killed

CLIENTS, ROUNDS, DECAY = 3, 4, 1.0


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Write scikit-learn's diabetes as three sites have it, with labels beside the target."""
    data = load_diabetes(scaled=False)
    sites = np.random.default_rng(0).integers(0, CLIENTS, len(data.target))
    path = tmp_path_factory.mktemp("diabetes") / "diabetes.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file)
        lines.writerow([*data.feature_names, "progress", "fast", "heavy", "site"])
        for x, y, site in zip(data.data.tolist(), data.target.tolist(), sites, strict=True):
            lines.writerow([*x, y, int(y > 140), int(x[2] > 26), site])
    return path


def config(table, target=True, **more):
    features = ("age", "sex", "bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6")
    columns = {"features": features, "client": "site"}
    learned = {"target": "progress"} if target else {"labels": ["fast", "heavy"]}
    found = {
        "data": {"name": "table", "root": str(table), "columns": {**columns, **learned}},
        "scenario": {"kind": "natural"},
        "net": {"name": "mlp", "hidden": []},
        "method": {"name": "fedavg"},
        "schedule": {"clients": CLIENTS, "rounds": ROUNDS},
        "training": {"batch_size": 1000, "lr": 0.1, "local_epochs": 2},
        "evaluate": {"pictures": 0},
    }
    for name, keys in more.items():
        found[name] = {**found.get(name, {}), **keys}
    return experiment_of(found)


def dealt(experiment, place):
    run_partition(
        experiment.data, experiment.scenario, CLIENTS, 0, place, Console(quiet=True),
        gather=experiment.method.pools_data,
    )  # fmt: skip
    return place


@pytest.fixture(scope="module")
def data(table, tmp_path_factory):
    return dealt(config(table), tmp_path_factory.mktemp("dealt") / "data")


def learned(data, client, part):
    """Return normalised inputs and targets of a client, and mean and deviation of the target."""
    held = open_data(data, client)
    x, y = held.arrays(0, part)
    columns = held.file.transform["columns"]
    mean, std = np.array(columns["target_mean"]), np.array(columns["target_std"])
    return held.normaliser(x), y, mean, std


def test_everybodys_model_needs_the_unit_of_its_answers(table, tmp_path):
    """Clients know the unit; a coordinator knows what its config says."""
    tables = config(table, schedule={"rounds": 1}).model_dump(
        mode="json", exclude_defaults=True, exclude_none=True
    )
    out = tmp_path / "run"
    fedtide.run(tables, backend="inprocess", out=out)
    with pytest.raises(ArchiveError, match="in what unit progress was learned"):
        global_model(out)


def test_fedavg_is_a_plain_federated_loop(table, data, tmp_path):
    """Full batches of a linear net, by hand: w -= lr grad of the mean square, means by n_k."""
    run = run_in_process(config(table), data, tmp_path / "run")
    weight, bias = None, None
    parts = [learned(data, client, "train") for client in range(CLIENTS)]
    mean, std = parts[0][2:]
    n = np.array([len(y) for _, y, _, _ in parts])
    pooled = np.concatenate([y for _, y, _, _ in parts])
    assert (mean, std) == (pytest.approx(pooled.mean(0)), pytest.approx(pooled.std(0)))
    first = RunFacts(config(table), Problem((10,), 1)).initial_weights
    weight, bias = first["head/weight"].double().numpy(), first["head/bias"].double().numpy()
    for _ in range(ROUNDS):
        sent = []
        for x, y, _, _ in parts:
            w, b = weight.copy(), bias.copy()
            for _ in range(2):
                error = x @ w.T + b - (y - mean) / std
                w -= 0.1 * 2 * error.T @ x / len(y)
                b -= 0.1 * 2 * error.mean(0)
            sent.append((w, b))
        weight, bias = (np.average([s[k] for s in sent], axis=0, weights=n) for k in (0, 1))
    [*_, last] = sorted((tmp_path / "run/server").glob("state-*.safetensors"))
    found = load_named(last)[0]["common"].weights
    assert found["head/weight"].numpy() == pytest.approx(weight, abs=1e-6)
    assert found["head/bias"].numpy() == pytest.approx(bias, abs=1e-6)
    errors = []
    for client in range(CLIENTS):
        x, y, _, _ = learned(data, client, "test")
        errors.append(mean_absolute_error(y, (x @ weight.T + bias) * std + mean))
    assert run["metrics"]["mae_glo"] == pytest.approx(np.mean(errors), rel=1e-6)
    assert "a_loc" not in run["metrics"]


@pytest.mark.parametrize("method", ["local", "centralized"])
def test_one_site_and_all_together_come_to_what_ridge_regression_does(
    table, data, method, tmp_path
):
    """SGD with decay comes to Ridge with alpha = n decay / 2, of the columns and one of ones."""
    more = {"local_epochs": 80, "weight_decay": DECAY, "lr": 0.2}
    experiment = config(table, method={"name": method}, schedule={"rounds": 1}, training=more)
    if method == "centralized":
        data = dealt(experiment, tmp_path / "data")
    run_in_process(experiment, data, tmp_path / "run")
    x, y, mean, std = learned(data, 0, "train")
    ridge = Ridge(alpha=len(y) * DECAY / 2, fit_intercept=False)
    ridge.fit(np.c_[x, np.ones(len(x))], (y - mean) / std)
    told = scores(tmp_path / "run", "after_local" if method == "local" else "global")
    x, y, _, _ = learned(data, 0, "test")
    said = ridge.predict(np.c_[x, np.ones(len(x))]).reshape(-1, 1) * std + mean
    assert told["mae"] == pytest.approx(mean_absolute_error(y, said), rel=1e-5)
    assert told["rmse"] == pytest.approx(root_mean_squared_error(y, said), rel=1e-5)
    assert told["r2"] == pytest.approx(r2_score(y, said), rel=1e-5)


def scores(place, view):
    """Return the figures of client 0's model at the end of a run."""
    [*_, last] = (place / "rounds.jsonl").read_text("utf-8").splitlines()
    return json.loads(last)["clients"]["0"]["views"][view]


def test_all_together_come_to_what_linear_regression_does(table, tmp_path):
    """Of columns that are not nearly dependent, descent ends where least squares does."""
    columns = {"features": ["bmi", "bp", "s5"], "target": "progress", "client": "site"}
    more = {"local_epochs": 80, "lr": 0.2, "batch_size": 1000}
    experiment = config(
        table, method={"name": "centralized"}, schedule={"rounds": 1}, training=more,
        data={"columns": columns},
    )  # fmt: skip
    data = dealt(experiment, tmp_path / "data")
    run_in_process(experiment, data, tmp_path / "run")
    x, y, _, _ = learned(data, 0, "train")
    model = LinearRegression().fit(x, y)
    x, y, _, _ = learned(data, 0, "test")
    told = scores(tmp_path / "run", "global")
    assert told["mae"] == pytest.approx(mean_absolute_error(y, model.predict(x)), rel=1e-5)
    assert told["r2"] == pytest.approx(r2_score(y, model.predict(x)), rel=1e-5)


def test_one_site_alone_learns_as_a_net_of_scikit_learn(table, data, tmp_path):
    """Both begin with the same weights. Its loss is half the mean square: twice the rate."""
    experiment = config(
        table, method={"name": "local"}, net={"name": "mlp", "hidden": [6]},
        schedule={"rounds": 1}, training={"local_epochs": 30, "lr": 0.1},
    )  # fmt: skip
    run_in_process(experiment, data, tmp_path / "run")
    first = RunFacts(experiment, Problem((10,), 1)).initial_weights
    x, y, mean, std = learned(data, 0, "train")
    model = MLPRegressor(
        hidden_layer_sizes=(6,), solver="sgd", alpha=0, momentum=0, batch_size=len(x), max_iter=1,
        warm_start=True, shuffle=False, n_iter_no_change=1000,
    )  # fmt: skip
    with pytest.warns(ConvergenceWarning):
        model.fit(x, (y - mean).ravel() / std)
    weights = [first[name].double().numpy().T for name in sorted(first) if "weight" in name]
    biases = [first[name].double().numpy() for name in sorted(first) if "bias" in name]
    model.coefs_, model.intercepts_ = weights, biases
    model.set_params(learning_rate_init=0.2, max_iter=30)
    with pytest.warns(ConvergenceWarning):
        model.fit(x, (y - mean).ravel() / std)
    x, y, _, _ = learned(data, 0, "test")
    said = model.predict(x)[:, None] * std + mean
    told = scores(tmp_path / "run", "after_local")
    assert told["mae"] == pytest.approx(mean_absolute_error(y, said), rel=1e-5)
    assert told["r2"] == pytest.approx(r2_score(y, said), rel=1e-5)


def test_fedbabu_learns_numbers_under_the_head_that_it_began_with(table, data, tmp_path):
    experiment = config(
        table, method={"name": "fedbabu"}, net={"name": "mlp", "hidden": [6]},
        schedule={"rounds": 2},
    )  # fmt: skip
    run = run_in_process(experiment, data, tmp_path / "run")
    first = RunFacts(experiment, Problem((10,), 1)).initial_weights
    [*_, last] = sorted((tmp_path / "run/server").glob("state-*.safetensors"))
    found = load_named(last)[0]["common"].weights
    for name, began in first.items():
        assert name.startswith("head/") == bool(np.array_equal(found[name], began))
    assert run["metrics"]["mae_loc"] < run["metrics"]["mae_of_mean_loc"]


@pytest.mark.parametrize("target", [True, False])
def test_a_run_that_dies_ends_with_the_same_bits(table, data, target, tmp_path):
    experiment = config(
        table, target, method={"name": "ditto"}, data={"validation_share": 0.2},
        compression={"up": "int8"}, server={"reduce": "median"},
    )  # fmt: skip
    if not target:
        data = dealt(experiment, tmp_path / "data")
    whole = run_in_process(experiment, data, tmp_path / "whole", evaluator=True)
    killed(experiment, data, tmp_path / "run", evaluator=True, before=dies(interaction=2))
    ends_as(whole, experiment, data, tmp_path / "run", evaluator=True)
    chosen = "validation_r2" if target else "validation_auroc"
    assert chosen in whole["metrics"]
    assert "chosen_round" in whole["metrics"]


def test_predictions_are_in_the_unit_of_the_column(table, data, tmp_path):
    run_in_process(config(table), data, tmp_path / "run")
    answers = fedtide.predict(table, run=tmp_path / "run", client=0, keep="site")
    assert len(answers) == 442
    assert 80 < answers[0]["values"]["progress"] < 300
    model = fedtide.TrainedModel.load(tmp_path / "run/clients/0/personal.safetensors")
    x, _, mean, std = learned(data, 0, "test")
    raw, _ = open_data(data, 0).arrays(0, "test")
    linear = model.net.head
    by_hand = x @ linear.weight.detach().numpy().T + linear.bias.detach().numpy()
    assert model.predict(raw) == pytest.approx(by_hand * std + mean, rel=1e-5)
    with pytest.raises(ConfigError, match="call predict"):
        model.probabilities(raw)


def test_quantiles_are_in_their_order_in_a_csv(table, tmp_path):
    columns = {**config(table).data.columns.model_dump(exclude_none=True, exclude_defaults=True),
               "target": ["progress"], "quantiles": [0.1, 0.5, 0.9]}  # fmt: skip
    experiment = config(table, data={"columns": columns}, training={"local_epochs": 40})
    run = run_in_process(experiment, dealt(experiment, tmp_path / "data"), tmp_path / "run")
    assert run["metrics"]["pinball_loc"] < run["metrics"]["mae_loc"]
    [one, *_] = fedtide.predict(table, run=tmp_path / "run", client=1)
    low, middle, high = one["values"].values()
    assert low < middle < high
    assert [*one["values"]] == [f"progress q{q}" for q in (0.1, 0.5, 0.9)]


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"method": {"name": "gldp"}}, "'gldp' needs classes"),
        ({"scenario": {"kind": "dirichlet", "alpha": 1.0}}, "partitions by class"),
        ({"training": {"loss": "focal"}}, "no loss of numbers"),
        ({"training": {"loss": "cross-entropy"}}, "no loss of numbers"),
        ({"training": {"class_weights": "balanced"}}, "class_weights belongs to loss"),
        ({"evaluate": {"select_by": "accuracy"}}, "select_by is of classes"),
        ({"schedule": {"open": True, "order": "tasks_outer"}, "trigger": {"score_drop": 0.1}},
         "score_drop compares accuracies"),
        ({"data": {"max_per_class": 3}}, "max_per_class is of classes"),
    ],
)  # fmt: skip
def test_what_needs_classes_is_refused_in_a_line(table, more, line):
    with pytest.raises(ConfigError, match=line):
        config(table, **more)


def test_who_takes_targets_is_listed_with_the_methods_of_plugins(table):
    pytest.importorskip("fedplugins.methods.ditto", reason="needs the plugin methods")
    with pytest.raises(ConfigError, match=r"take fedavg, .*, ditto, ") as refused:
        config(table, method={"name": "gldp"})
    assert "fedtgp" not in str(refused.value)


def test_losses_of_targets_are_refused_for_classes():
    with pytest.raises(ConfigError, match="'squared' is no loss of classes"):
        experiment_of(
            {"net": {"name": "mlp"}, "method": {"name": "fedavg"}, "training": {"loss": "squared"}}
        )


def test_labels_that_no_test_example_lacks_have_no_figures_and_no_accuracy(table, tmp_path):
    """All have both labels: there is no area under a curve, and no class that could be right."""
    rows = table.read_text("utf-8").splitlines()
    cells = [line.split(",") for line in rows[1:]]
    lines = [",".join([*row[:-3], "1", "1", row[-1]]) for row in cells]
    own = tmp_path / "all.csv"
    own.write_text("\n".join([rows[0], *lines]), "utf-8")
    experiment = config(own, target=False, schedule={"rounds": 1})
    run = run_in_process(experiment, dealt(experiment, tmp_path / "data"), tmp_path / "run")
    assert not [name for name in run["metrics"] if name.startswith("a_")]
    [row] = (tmp_path / "run/rounds.jsonl").read_text("utf-8").splitlines()
    assert [*json.loads(row)["clients"]["0"]["views"]["global"]] == ["loss"]


def test_noise_covers_the_unit_of_a_target(table):
    """Mean and deviation of the training rows would be told without noise: inputs' are refused."""
    privacy = {"level": "example", "noise_multiplier": 1.0, "delta": 1e-3, "clip": 1.0,
               "allow": ["announced", "examples", "loss", "scores"]}  # fmt: skip
    data = {"mean": [0.0] * 10, "std": [1.0] * 10}
    with pytest.raises(ConfigError, match="target_mean and target_std"):
        config(table, data=data, privacy=privacy)
    columns = config(table).data.columns.model_dump(exclude_defaults=True)
    unit = {"target_mean": [150.0], "target_std": [80.0]}
    config(table, data={**data, "columns": {**columns, **unit}}, privacy=privacy)
    config(table, target=False, data=data, privacy=privacy)


@pytest.mark.parametrize("more", [{"missing": "interpolate"}, {"rate": 1.0, "time": "age"}])
def test_a_forecast_sees_no_row_after_its_window(table, more):
    columns = {"target": "progress", "window": 4, "horizon": 2, **more}
    with pytest.raises(ConfigError, match="adds later measurements"):
        config(table, data={"columns": {"features": ["bmi"], **columns}})


def test_a_site_proposes_a_unit_by_its_digits_however_small_it_is(tmp_path):
    rows = "".join(f"{i},{i % 2 * 2e-9 + 1.23456789e-9}\n" for i in range(10))
    (tmp_path / "a.csv").write_text("a,farad\n" + rows, "utf-8")
    tables = {"name": "table", "columns": {"features": ["a"], "target": "farad"}}
    with pytest.raises(
        ConfigError, match=r"have target_mean = \[2.*e-09\] and target_std = \[1e-09\]"
    ):
        cut(tmp_path / "a.csv", tables, 0, 0, tmp_path / "own")


def test_small_numbers_stand_in_a_csv_as_they_are():
    inputs, values = NewInputs(Path("new.csv"), np.zeros((1, 1))), [[1.23456789e-9, 150.25]]
    [row] = TargetPredictions(inputs, ["farad", "volt"], np.array(values)).rows()
    assert row[3:-1] == ["1.23456789e-09", "150.25"]


@pytest.mark.parametrize("role", ["client", "time", "group"])
def test_what_is_predicted_has_no_other_part(table, role):
    columns = {"features": ["bmi"], "target": "progress", "client": "site", role: "progress"}
    with pytest.raises(ConfigError, match=f"target names 'progress', which is the {role}"):
        config(table, data={"columns": columns})
