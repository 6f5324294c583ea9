from pathlib import Path

import pytest
from rich.console import Console

from fedmodels.errors import ConfigError
from fedmodels.methods import make, method_class, names, settings_of
from fedmodels.numerics.metric_names import METRICS
from fedsrv.catalogue import method_table, methods_table, metrics_markdown, metrics_table


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


def test_what_is_shown():
    shown = text_of(method_table("fedprox"))
    assert "Weight of the proximal term; 0 is FedAvg." in shown
    assert "Aggregation weights over the clients" in shown
    assert "Li et al., MLSys 2020" in shown


def test_an_unknown_method():
    with pytest.raises(ConfigError, match=r"unknown method 'fedprx'; .* Did you mean 'fedprox'\?"):
        method_table("fedprx")


def test_the_page_of_metrics_is_the_table():
    """After a change: ``fedsrv metrics --markdown``."""
    page = Path(__file__).parents[3] / "docs" / "metrics.md"
    assert page.read_text().endswith("\n\n" + metrics_markdown())


def test_metrics_in_the_terminal():
    assert list(metrics_table(()).columns[0].cells) == list(METRICS)
    text = text_of(metrics_table(["a_loc_minority", "afm"]))
    assert "a_loc_minority" in text
    assert "rare classes" in text
    assert "pFedGRP, Eq. 11" in text


def test_an_unknown_metric():
    with pytest.raises(ConfigError, match=r"'forgeting' is no metric .* mean 'forgetting'\?"):
        metrics_table(["a_loc", "forgeting"])
