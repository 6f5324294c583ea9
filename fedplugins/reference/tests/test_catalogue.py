import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from rich.console import Console

from fedmodels.config.presets import preset_files
from fedmodels.errors import ConfigError
from fedmodels.methods import file_of, make, method_class, names, settings_of
from fedmodels.nets import net_names
from fedmodels.numerics.metric_tables import METRICS
from fedplugins.reference import catalogue, net_catalogue
from fedplugins.reference.catalogue import (
    method_table,
    methods_table,
    metrics_markdown,
    metrics_table,
)
from fedplugins.reference.config_schema import config_schema
from tests.conftest import script_of


def text_of(table):
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_every_method_has_its_line():
    table = methods_table()
    assert list(table.columns[0].cells) == names()
    for column in table.columns[1:]:
        assert all(column.cells)


@pytest.mark.parametrize("name", names())
def test_every_setting_has_default_and_meaning(name):
    table, made = method_table(name), settings_of(make(name))
    keys, defaults, meanings = (list(column.cells) for column in table.columns)
    readings = {f"reading.{key}": value for key, value in made.pop("reading", {}).items()}
    expected = {**made, **readings}
    assert set(keys) == expected.keys()
    assert keys[len(keys) - len(readings) :] == list(readings)  # below the hyper-parameters
    for key, default, meaning in zip(keys, defaults, meanings, strict=True):
        assert default == repr(expected[key])
        assert meaning, f"{name}.{key} is not explained"
        assert meaning.endswith("."), f"{name}.{key} is explained by {meaning!r}"
    assert method_class(name).citation in str(table.title)


@pytest.mark.needs
def test_stored_tables_are_those_of_the_classes():
    """After a change: ``python docs/site/catalogue.py > fedplugins/reference/catalogue.json``."""
    kept = json.loads(catalogue.STORED.read_text("utf-8"))
    assert kept == script_of("catalogue").content()


@pytest.mark.parametrize("text", [None, "", '{"methods"', "{}"])
def test_without_stored_tables_the_classes_are_asked(text, tmp_path, monkeypatch):
    shown = text_of(method_table("fedprox"))
    monkeypatch.setattr(catalogue, "STORED", tmp_path / "catalogue.json")
    if text is not None:
        catalogue.STORED.write_text(text)
    assert text_of(method_table("fedprox")) == shown
    assert text_of(net_catalogue.net_table("mlp"))


def test_tables_of_methods_and_nets_are_shown_without_torch():
    """To import torch takes seconds."""
    asked = [["methods", "gldp"], ["nets"], ["nets", "mlp"]]
    script = f"""
import sys
from fedsrv.cli import app
for words in {asked}:
    app(words, standalone_mode=False)
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_is_shown():
    shown = text_of(method_table("fedprox"))
    assert "Weight of the proximal term; 0 is FedAvg." in shown
    assert "Aggregation weights over the clients" in shown
    assert "Li et al., MLSys 2020" in shown


def test_an_unknown_method():
    with pytest.raises(ConfigError, match=r"unknown method 'fedprx'; .* Did you mean 'fedprox'\?"):
        method_table("fedprx")


@pytest.mark.needs
def test_the_page_of_metrics_is_the_table():
    """After a change: ``fedsrv metrics --markdown``."""
    page = Path(__file__).parents[3] / "docs" / "metrics.md"
    assert page.read_text().endswith("\n\n" + metrics_markdown())


def test_the_page_of_nets_is_the_table():
    """After a change: ``fedsrv nets --markdown``."""
    assert net_catalogue.USUAL.keys() == set(net_names())
    page = Path(__file__).parents[3] / "docs" / "nets.md"
    assert page.read_text().endswith("\n\n" + net_catalogue.nets_markdown())
    for name in net_catalogue.USUAL:
        assert all(text for _, text in net_catalogue.options_of(name).values()), name


def test_nets_in_the_terminal():
    assert "1,445,918 (128×6, 6 classes)" in text_of(net_catalogue.nets_table())
    assert "widths of the hidden layers" in text_of(net_catalogue.net_table("mlp"))
    with pytest.raises(ConfigError, match=r"'mpl' is no net\. Did you mean 'mlp'\?"):
        net_catalogue.net_table("mpl")


@pytest.mark.needs
def test_the_schema_knows_every_key_of_the_configs_that_come_along():
    schema = json.loads(json.dumps(config_schema()))
    tables = schema["$defs"]

    def named(table, name):
        forms = [form["properties"] for form in tables[table]["anyOf"]]
        return next(keys for keys in forms if keys["name"].get("const") == name)

    for file, path in preset_files().items():
        if path.parent.name == "sweeps":
            continue
        text = path.read_text()
        assert text.startswith("#:schema ../fedtide.schema.json\n"), file
        config = tomllib.loads(text)
        assert config.keys() <= schema["properties"].keys()
        for table, key in (("MethodTable", "method"), ("NetTable", "net")):
            assert config[key].keys() <= named(table, config[key]["name"]).keys(), file
    mu = named("MethodTable", "fedprox")["mu"]
    assert (mu["type"], mu["minimum"], mu["description"][:6]) == ("number", 0, "Weight")
    assert tables["Schedule"]["properties"]["clients"]["description"] == "Clients of the run."


def test_the_schema_takes_what_a_config_may_give_in_short():
    """``target = "y"`` of a preset was none of its forms, nor was ``secure_sum = true``."""
    for key, kind in (("target", "string"), ("secure_sum", "boolean")):
        keys = [table.get("properties", {}) for table in config_schema()["$defs"].values()]
        forms = [form for each in keys for form in each.get(key, {}).get("anyOf", ())]
        assert kind in {form.get("type") for form in forms}, key


def test_metrics_in_the_terminal():
    assert list(metrics_table(()).columns[0].cells) == list(METRICS)
    text = text_of(metrics_table(["a_loc_minority", "afm"]))
    assert "a_loc_minority" in text
    assert "rare classes" in text
    assert "pFedGRP, Eq. 11" in text


def test_an_unknown_metric():
    with pytest.raises(ConfigError, match=r"'forgeting' is no metric .* mean 'forgetting'\?"):
        metrics_table(["a_loc", "forgeting"])


@pytest.mark.parametrize("name", [name for name in names() if file_of(name)])
def test_a_method_is_read_as_it_is_imported(name):
    """The listing reads the files of methods, since importing them takes seconds."""
    cls = method_class(name)
    assert catalogue._about(name) == (catalogue._first_line(cls), cls.citation)
