"""One site.toml serves several runs, every door reads the site's names, and bad is the site's."""

import json

import pytest

from fedcli.data.own.new_inputs import _read_tables, given_rows, read_by
from fedcli.data.sets import registry
from fedcli.data.sets.registry import load
from fedcli.data.store.site import cut
from fedmodels.config.data import Data
from fedmodels.config.recipe import recipe_of
from fedmodels.config.transforms import TableTransform
from fedmodels.errors import ConfigError, DataError
from fedmodels.nets.trained import ModelFacts

RECIPE = """
columns.temp = {from = "Temp", factor = 0.5, offset = -16.0, missing = [-9]}
columns.temperature.from = "Temp"
columns.pulse.from = "Herz"
classes.gelb = "yellow"
"""


@pytest.fixture
def site(tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "site.toml").write_text(RECIPE)
    lines = [f"{96 + at % 9},{70 + at},{('gelb', 'green')[at % 2]}" for at in range(40)]
    (tmp_path / "site" / "a.csv").write_text("Temp,Herz,y\n" + "\n".join(lines) + "\n")
    registry._tell.cache_clear()
    return tmp_path / "site"


def data_of(site, *features, **more):
    return Data(
        name="table", root=str(site), columns={"label": "y", "features": [*features]}, **more
    )


def test_what_a_run_does_not_ask_for_is_said_once(site, tmp_path, caplog):
    for names in (["temp"], ["temperature", "pulse"]):
        caplog.clear()
        tables = data_of(site, *names).model_dump(
            mode="json", exclude_defaults=True, exclude={"root"}
        )
        root = cut(site, tables, 0, 0, tmp_path / "-".join(names) / "own-data")
        kept = json.loads((root / "0" / "client.json").read_text())["transform"]["recipe"]
        assert {*kept["columns"]} == {*names}
        assert caplog.text.count("asks for no column") == 1
        load(data_of(site, *names))
        assert caplog.text.count("asks for no column") == 1
    assert "'temp', which the recipe has" in caplog.text


def test_two_columns_of_one_run_may_not_be_one_of_the_site(site):
    with pytest.raises(ConfigError, match=r"columns\.temp and columns\.temperature are one column"):
        load(data_of(site, "temp", "temperature"))


def test_a_slip_in_a_name_is_suggested(site, caplog):
    (site / "site.toml").write_text('columns.tempp.from = "Temp"\n')
    with pytest.raises(DataError, match="no column 'temp'"):
        load(data_of(site, "temp"))
    assert "no column 'tempp', which the recipe has. Did you mean 'temp'?" in caplog.text


@pytest.mark.parametrize(("run", "own"), [(None, "skip"), ("refuse", "skip"), ("skip", "refuse")])
def test_a_site_says_what_becomes_of_its_bad_rows(site, run, own):
    (site / "site.toml").write_text(f'bad = "{own}"\ncolumns.temp = "Temp"\n')
    path = site / "a.csv"
    path.write_text(path.read_text().replace("\n97,", "\nx,", 1))
    if own == "skip":
        found = load(data_of(site, "temp", bad=run))
        assert len(found.train.y) + len(found.test.y) == 39
    else:
        with pytest.raises(DataError, match="'temp' holds 'x' in line 3"):
            load(data_of(site, "temp", bad=run, bad_share=0.1))


def test_lines_to_paste_are_there_where_files_are_set_aside(site):
    (site / "site.toml").unlink()
    with pytest.raises(DataError, match="1 of 1 files are bad") as error:
        load(data_of(site, "temp", bad="skip"))
    assert 'columns.temp.from = "Temp"' in error.value.lines


def how_of(*features):
    how = TableTransform.model_validate({"columns": {"label": "y", "features": [*features]}})
    recipe, _ = recipe_of(
        {"columns": {"temp": {"from": "Temp", "factor": 0.5, "offset": -16.0, "missing": [-9]}}},
        "site.toml",
    ).for_run(how.columns)
    return how.model_copy(update={"recipe": recipe})


def test_json_is_read_by_the_names_of_the_site_or_of_the_run(tmp_path):
    """By the site's names numbers are in the site's unit, by the run's in the run's."""
    how = how_of("temp", "pulse")
    facts = ModelFacts("mlp", {}, (2,), 2, transform=how.facts())
    own = given_rows([{"Temp": 100, "pulse": 70}, {"Temp": -9, "pulse": 1}], tmp_path, facts, how)
    assert own.x.tolist() == [[34.0, 70.0]]
    assert [why for _, why, _ in own.left] == ["temp is empty"]
    of_run = given_rows([{"temp": 34, "pulse": 70}], tmp_path, facts, how)
    assert of_run.x.tolist() == own.x.tolist()
    with pytest.raises(DataError, match=r"no column 'temp'.* It has: \w+, \w+"):
        given_rows([{"T": 34, "pulse": 70}], tmp_path, facts, how)


def test_columns_are_kept_by_the_names_of_the_file(tmp_path):
    (tmp_path / "new.csv").write_text('Temp,pulse,id\n100,70,007\n"102",71,8\n')
    for name in ("Temp", "temp"):
        (found,) = _read_tables(tmp_path / "new.csv", how_of("temp", "pulse"), (name, "id"))
        assert found.x.tolist() == [[34.0, 70.0], [35.0, 71.0]]
        assert found.kept == [["100", "007"], ["102", "8"]]


def test_another_recipe_for_predict_may_have_columns_of_other_runs(tmp_path, site, caplog):
    facts = ModelFacts("mlp", {}, (1,), 2, transform=how_of("temp").facts())
    read = read_by(site / "site.toml", facts, "model")
    assert {*read.transform["recipe"]["columns"]} == {"temp"}
    assert "asks for no column 'temperature', 'pulse'" in caplog.text
