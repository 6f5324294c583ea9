import re
import tomllib

import pytest
import tomli_w

from fedmodels.config.changes import difference
from fedmodels.config.presets import preset_file, preset_files
from fedmodels.errors import ConfigError
from fedmodels.facts.config_file import parse_experiment
from fedmodels.facts.resolution import experiment_of
from fedmodels.nets import make_net
from fedmodels.nets.alp import alp_layers

MIN_EXAMPLES = 60
"""Raise it with every example that is added: a search that finds nothing must not pass."""

TEXT = """
[data]
name = "digits"
[scenario]
kind = "per_class_shards"
shards = 4
[net]
name = "mlp"
hidden = [8]
[method]
name = "fedprox"
"""


def line_of(text=TEXT, overrides=()):
    with pytest.raises(ConfigError) as caught:
        parse_experiment(text, "run.toml", overrides)
    line = str(caught.value)
    assert "\n" not in line
    assert caught.value.exit_code == 2
    return line


# --- what is right --------------------------------------------------------------------------------


def test_another_scenario_or_net_drops_what_only_the_former_has(caplog):
    text = TEXT.replace("shards = 4", "shards = 4\ntasks = 2")
    asked = ["scenario.kind=dirichlet", "scenario.alpha=0.5", "net.name=digits-cnn"]
    found = parse_experiment(text, "run.toml", asked)
    assert (found.scenario.kind, found.scenario.tasks) == ("dirichlet", 2)
    assert found.net.options() == {}
    assert "scenario.kind is set to dirichlet: shards of per_class_shards in" in caplog.text
    assert "net.name is set to digits-cnn: hidden of mlp in the file is left out" in caplog.text
    caplog.clear()
    kept = parse_experiment(text, "run.toml", ["scenario.kind=label_shards", "net.weights=w"])
    assert kept.scenario.shards == 4
    assert kept.net.options() == {"hidden": [8]}
    assert not caplog.text


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("method.mu=0.5", "method.weighting=uniform"),
        ("scenario.tasks=[1, 2, 3]", "evaluate.views=['global']", "evaluate.reference=runs/x"),
        ("server.deadline_s=3", "server.min_clients=1", "schedule.per_round=2", "data.root=/data"),
    ],
)
def test_resolved_experiment_parses_to_itself(overrides):
    experiment = parse_experiment(TEXT, "run.toml", overrides)
    tables = experiment.to_dict()
    assert experiment_of(tables) == experiment
    assert parse_experiment(tomli_w.dumps(tables)) == experiment
    assert difference(experiment, experiment_of(tables)) == []


def test_resolved_experiment_holds_every_value():
    tables = parse_experiment(TEXT).to_dict()
    assert tables["method"] == {"name": "fedprox", "weighting": "examples", "mu": 0.01}
    assert tables["net"] == {"name": "mlp", "hidden": [8]}
    assert tables["training"]["batch_size"] == 32
    assert tables["scenario"]["tasks"] == 1


def test_difference_names_the_keys():
    one = parse_experiment(TEXT)
    other = parse_experiment(TEXT, overrides=("seed=1", "method.mu=0.5", "schedule.per_round=2"))
    assert difference(one, other) == ["method.mu", "schedule.per_round", "seed"]


def test_sizes_of_cohorts():
    experiment = parse_experiment(TEXT, overrides=("schedule.clients=5",))
    assert (experiment.cohort_size, experiment.min_clients) == (5, 5)
    sets = ("schedule.clients=5", "schedule.per_round=3", "server.min_clients=4")
    experiment = parse_experiment(TEXT, overrides=sets)
    assert (experiment.cohort_size, experiment.min_clients) == (3, 3)


def test_overrides_replace_and_add():
    sets = ("seed=7", "method.mu=1", "schedule.order=tasks_outer", "server.threads = 2")
    experiment = parse_experiment(TEXT, overrides=sets)
    assert experiment.seed == 7
    assert experiment.method.hyper_parameters()["mu"] == 1.0
    assert experiment.schedule.order == "tasks_outer"
    assert experiment.server.threads == 2
    assert parse_experiment(TEXT, overrides=("data.root=a=b",)).data.root == "a=b"


GLDP = TEXT.replace('name = "fedprox"', 'name = "gldp"').replace("mu = 0.01", "")


def test_a_reading_may_stand_beside_its_table():
    inside = parse_experiment(GLDP, "inside", ("method.reading.kl_space=head",))
    beside = parse_experiment(GLDP, "beside", ("method.kl_space=head", "method.heads=round"))
    assert beside.method.hyper_parameters()["reading"]["kl_space"] == "head"
    assert "kl_space" not in beside.method.hyper_parameters()
    assert difference(inside, beside) == ["method.reading.heads"]


def test_a_table_with_every_reading_beside_the_hyper_parameters_is_the_same_experiment():
    now = parse_experiment(GLDP, "now", ("method.reading.heads=round",))
    recorded = now.to_dict()
    recorded["method"] |= recorded["method"].pop("reading")
    assert "reading" not in recorded["method"]
    assert experiment_of(recorded) == now


EXAMPLE_FILES = [p for p in preset_files().values() if p.parent.name != "sweeps"]


@pytest.mark.parametrize("path", EXAMPLE_FILES, ids=lambda p: p.stem)
def test_examples_parse(path):
    experiment = parse_experiment(path.read_text(), path.name)
    assert experiment_of(experiment.to_dict()) == experiment


@pytest.mark.parametrize("name", ["fedali-hhar", "fedali-small"])
def test_overrides_that_a_comment_names_give_a_net(name):
    """The comment before the first table has the command for FedAvg on the plain net."""
    text = preset_file(name).read_text()
    comment = text.partition("[")[0].replace("\n#", "")
    overrides = re.findall(r"--set ([^\s`]+)", comment)
    experiment = parse_experiment(text, name, overrides)
    assert experiment.method.name == "fedavg"
    net = experiment.net
    made = make_net(net.name, num_classes=6, input_shape=(128, 6), **net.options())
    assert not alp_layers(made)


def test_there_are_examples():
    assert len(EXAMPLE_FILES) >= MIN_EXAMPLES


# --- what is wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["sed=1"], "unknown key 'sed' in the top level; known: "),
        (["sed=1"], " Did you mean 'seed'?"),
        (["method.mue=1"], "unknown key 'mue' in [method]; fedprox has: mu, weighting. Did you"),
        (["method.mue=1"], "Did you mean 'mu'?"),
        (["method.nme=1"], "Did you mean 'name'?"),
        (["net.nme=1"], "Did you mean 'name'?"),
        (["training.batchsize=1"], "unknown key 'batchsize' in [training]; known: augment, "),
        (["training.batchsize=1"], " Did you mean 'batch_size'?"),
        (["training.together=5"], "together was removed in 0.2: hosts by cores are as fast"),
        (["training.epochs=1"], " Did you mean 'local_epochs'?"),
        (["data.path=here"], " Did you mean 'root'?"),
        (["seed=" + "1" * 5000], f"(given: '{'1' * 98}…)"),
        (["scenario.shard=3"], "unknown key 'shard' in [scenario]; known: "),
        (["scenario.shard=3"], " Did you mean 'shards'?"),
        (["scenario.alpha=3"], "unknown key 'alpha' in [scenario]"),
        (["schedulle.rounds=3"], "unknown key 'schedulle' in the top level"),
        (["scenario.kind=shard"], "unknown kind 'shard' in [scenario]; known: iid, dirichlet, "),
        (["scenario.kind=per_class_shard"], " Did you mean 'per_class_shards'?"),
        (["method.name=fedpro"], "unknown method 'fedpro'; known: fedavg,"),
        (["method.name=fedpro"], " Did you mean 'fedprox'?"),
        (["net.name=mpl"], "unknown net 'mpl' in [net]; known: "),
        (["net.name=mpl"], " Did you mean 'mlp'?"),
        (["schedule.rounds=many"], "schedule.rounds: "),
        (["schedule.rounds=many"], "(given: 'many')"),
        (["schedule.rounds=0"], "schedule.rounds: Input should be greater than or equal to 1"),
        (["schedule.rounds=1000000000"], "should be less than or equal to 1000000"),
        (["schedule.clients=1000000000"], "should be less than or equal to 10000000"),
        (["scenario.tasks=1000000000"], "should be less than or equal to 10000"),
        (["training.lr=inf"], "training.lr: Input should be a finite number"),
        (["method.mu=nan"], "method.mu: Input should be a finite number (given: nan)"),
        ([f"seed={'9' * 5000}"], "seed: Input should be a valid integer"),
        ([f"seed={'[' * 5000}"], "seed: Input should be a valid integer"),
        (["schedule.per_round=4"], "schedule: per_round = 4 exceeds clients = 3"),
        (["server.min_clients=4"], "run.toml: [server] min_clients = 4 exceeds clients = 3"),
        (["method.mu=much"], "method.mu: "),
        (["method.mu=-1"], "method.mu: Input should be greater than or equal to 0 (given: -1)"),
        (["method.name=gldp", "method.tau=0"], "method.tau: Input should be greater than 0"),
        (["method.name=gldp", "method.lam=2"], "method.lam: Input should be less than or equal to"),
        (["method.name=gldp", "method.t=2.5"], "method.t: Input should be a valid integer"),
        (["method.name=pfedgrp", "method.w_batch=0"], "method.w_batch: Input should be"),
        (["method.weighting=equal"], "method.weighting: "),
        (["method.name=gldp", "method.reading.head=1"], "unknown key 'head' in [method.reading]; "),
        (["method.name=gldp", "method.reading.head=1"], " Did you mean 'heads'?"),
        (["method.name=gldp", "method.reading.inference=x"], "unknown key 'inference'"),
        (["method.name=gldp", "method.reading.heads=x"], "method.reading.heads: Input should be '"),
        (["method.name=gldp", "method.reading=3"], "method.reading must be a table (given: 3)"),
        (
            ["method.name=gldp", "method.reading.heads=round", "method.heads=round"],
            "method.heads and method.reading.heads are one switch: give one",
        ),
        (["evaluate.views=['local']"], "evaluate.views.0: "),
        (["schedule.wait=all"], "schedule: wait belongs to open = true"),
        (["schedule.max_classes=5"], "schedule: max_classes belongs to open = true"),
        (["deploy.guard=none", "deploy.tolerance=0.1"], "deploy: tolerance does nothing with"),
        (
            [f"server_optimizer.{it}" for it in ("name=fedavgm", "lr=1.0", "tau=0.1")],
            'server_optimizer: tau does nothing with name = "fedavgm"',
        ),
        (["scenario.test_long_tail=true"], "[scenario] test_long_tail cuts the tail of gamma"),
        (["evaluate.views=['global', 'global']"], "evaluate: views names 'global' twice"),
        (
            ["method.name=fedem", "evaluate.views=['global']"],
            "[evaluate] views = ['global']: fedem only has ['after_downlink']",
        ),
        (
            ["scenario.distinct_labels=true", "scenario.sharding=equal_size"],
            "distinct_labels needs shards of one class each",
        ),
        (["training.lr=0"], "training.lr: "),
        (["training.precision=half"], "training.precision: Input should be 'float32' or "),
        (["seed=-1"], "seed: "),
        (["method=3"], "method: "),
        (["scenario=3"], "scenario"),
        (["data=[1]"], "data: Input should be a table (given: [1])"),
        (["training=3"], "training: Input should be a table (given: 3)"),
        (
            ["compression.up=int4"],
            "compression.up: Input should be 'float32', 'float16', 'bfloat16' or 'int8' or 'top-k' "
            "(given: 'int4')",
        ),
        (["compression.up=int8", "compression.share=0.1"], "share does nothing with up = 'int8'"),
        (["compression.feedback=false"], "feedback does nothing with up = 'float32': leave it out"),
        (
            ["scenario.tasks=many"],
            "scenario.tasks: Input should be a valid integer or a list (given: 'many')",
        ),
        (["scenario.tasks=[1, 0]"], "scenario.tasks.1: Input should be greater than or equal to 1"),
        (["scenario.tasks=0"], "scenario.tasks: Input should be greater than or equal to 1 (given"),
        (["scenario=3"], "scenario: Input should be a table (given: 3)"),
        (["evaluate.views=global"], "evaluate.views: Input should be a list (given: 'global')"),
    ],
)  # fmt: skip
def test_error_lines(overrides, line):
    found = line_of(overrides=overrides)
    assert found.startswith("run.toml: ")
    assert line in found


@pytest.mark.parametrize(
    ("table", "line"),
    [
        ('[net]\nname = "mlp"\nhidden = [8]', "key 'net' is missing in the top level"),
        ('name = "digits"', "key 'name' is missing in [data]"),
        ("shards = 4", "key 'shards' is missing in [scenario]"),
        (
            'kind = "per_class_shards"',
            "key 'kind' is missing in [scenario]; known: iid, dirichlet, ",
        ),
        ('name = "fedprox"', "key 'name' is missing in [method]"),
    ],
)
def test_missing_keys(table, line):
    assert line in line_of(TEXT.replace(table, "", 1))


@pytest.mark.parametrize(
    "item", ["rounds='10'", "rounds=2.5", "rounds=true", "rounds='many'", "clients='3'"]
)
def test_values_are_not_converted(item):
    """A string is no number and a truth value no count."""
    assert f"schedule.{item.partition('=')[0]}: " in line_of(overrides=[f"schedule.{item}"])


@pytest.mark.parametrize("item", ["seed", "=3", " =3", ""])
def test_override_that_is_none(item):
    assert "is not key=value, such as --set method.lam=0.3" in line_of(overrides=[item])


def test_override_below_a_value():
    assert "'name' is a value, not a table" in line_of(overrides=["data.name.x=1"])


def test_invalid_toml():
    with pytest.raises(tomllib.TOMLDecodeError):
        tomllib.loads("seed = ")
    assert line_of("seed = ").startswith("run.toml is not valid TOML: ")


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 5000, "{a=" * 5000])
def test_toml_that_python_cannot_hold(value):
    """Integers of over 4,300 digits and deeply nested tables are errors of other kinds."""
    assert line_of(f"seed = {value}").startswith("run.toml is not valid TOML: ")


def test_numbers_of_toml_are_taken_as_they_are_meant():
    """``lr = 1`` is a learning rate of 1.0."""
    experiment = parse_experiment(
        TEXT, overrides=("training.lr=1", "server.min_clients=1", "server.deadline_s=5")
    )
    assert experiment.training.lr == 1.0
