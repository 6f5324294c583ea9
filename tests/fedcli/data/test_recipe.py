"""The recipe of a site, and columns of categories: from a real export to what a net sees."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedcli.cli import main
from fedcli.data import settled
from fedcli.data.own.new_inputs import _read_tables, read_by
from fedcli.data.sets.registry import load
from fedcli.data.store.client_data import ClientData
from fedcli.data.store.findings import tell_own
from fedcli.data.store.growing import Added, Incoming, add_task
from fedcli.data.store.site import cut
from fedmodels.config.columns import Columns
from fedmodels.config.data import Data
from fedmodels.config.recipe import Recipe, SiteColumn, recipe_in, recipe_of
from fedmodels.config.transforms import TableTransform, parse_transform
from fedmodels.errors import ConfigError, DataError, PayloadError
from fedmodels.nets.trained import ModelFacts
from fedsrv.engine.client_profile import Profile
from tests.fedcli.data.new_files import read_new

pytest.importorskip("pandas")
FEATURES = ["spo2", "temp", "crp", "sex"]
DATA: dict[str, Any] = {
    "name": "table",
    "classes": ["green", "yellow", "red"],
    "test_share": 0.5,
    "columns": {
        "label": "triage", "features": FEATURES, "categories": {"sex": ["f", "m"]},
        "missing": "mean",
    },
}  # fmt: skip
RECIPE = """
columns.triage = "Ampel"
columns.spo2.from = "SpO2 (%)"
columns.spo2.unit = "%"
columns.temp = {from = "Temp", unit = "°F", factor = 0.5, offset = -10}
columns.crp = {from = "CRP", below = "half", above = 99, missing = ["n.b."]}
columns.sex = {from = "Geschlecht", values = {"männlich" = "m", "weiblich" = "f"}}
classes.Gelb = "yellow"
classes."1" = "yellow"
"""
HEAD = "Ampel;Temp;SpO2 (%);Geschlecht;CRP;Kommentar\n"
ROWS = """Gelb ;98,5 °F;97 %;männlich;<0,5;a
gelb;90;96%;Weiblich;>90,0;b
1;100 °F;95 %;x;7,25;c
GELB;98 °F;94 %;;n.b.;d
"""
SEEN = [  # in the order of the config: % as it is, (°F / 2 - 10), limits, and f, m, other
    [97, 39.25, 0.25, 0, 1, 0],
    [96, 35.0, 99, 1, 0, 0],
    [95, 40.0, 7.25, 0, 0, 1],
    [94, 39.0, np.nan, 0, 0, 1],
]
EXTRA = "red;104 °F;88 %;weiblich;50,0;e\nred;104,5 °F;87 %;weiblich;51,0;f\n"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    place = tmp_path / "site"
    place.mkdir()
    (place / "a.csv").write_text(HEAD + ROWS + EXTRA, "utf-8")
    (place / "site.toml").write_text(RECIPE, "utf-8")
    return place


def client_of(site: Path, *given: Path) -> ClientData:
    return ClientData(cut(site, DATA, 0, 0, site.parent / "states" / "own-data", *given) / "0")


def test_files_of_a_site_become_what_the_run_asks_for(site, caplog):
    """Names, order, units, limits, missing cells, levels and spellings, by hand."""
    caplog.set_level(logging.INFO)
    client = client_of(site)
    (x, y), (z, w) = (client.arrays(0, part) for part in ("train", "test"))
    assert [*y, *w] == [1, 1, 2, 1, 1, 2]
    seen = np.concatenate([x[:2], z[:2]])
    fill = (0.25 + 99 + 50) / 3  # of the training rows
    assert seen == pytest.approx(np.where(np.isnan(SEEN), fill, SEEN), rel=1e-6)
    assert client.file.mean[3:] == (0, 0, 0)
    assert client.file.std[3:] == (1, 1, 1)
    assert "temp (here 'Temp'), crp (here 'CRP')" in caplog.text
    assert "left out: Kommentar" in caplog.text
    assert "none of the levels f, m, and count as another one: empty (1), 'x' (1)" in caplog.text


def test_what_is_announced_is_the_digest_alone(site):
    client = client_of(site)
    told = client.announcement()
    assert recipe_in(site / "site.toml").digest in told
    assert "SpO2" not in told
    Profile.parse(0, told)
    with pytest.raises(PayloadError, match="recipe: String should match"):
        Profile.parse(0, told.replace(recipe_in(site / "site.toml").digest, "../../x"))


def test_new_files_are_read_by_the_recipe_that_the_model_carries(site, tmp_path):
    how = parse_transform(client_of(site).file.transform, "the model")
    assert isinstance(how, TableTransform)
    rows = HEAD.replace("Ampel;", "") + "98,5 °F;97 %;x;<0,5;a\n98 °F;?;männlich;2,0;b\n"
    (tmp_path / "new.csv").write_text(rows)
    columns = how.columns.model_copy(update={"missing": None})
    (found,) = _read_tables(
        tmp_path / "new.csv", how.model_copy(update={"columns": columns, "fill": None}), ()
    )
    assert found.x.tolist() == [[97, 39.25, 0.25, 0, 0, 1]]
    assert [(line, why) for line, why, _ in found.left] == [(3, "spo2 holds '?'")]
    assert how.fill is not None  # a mean is for an empty cell, and makes no number of a text
    (tmp_path / "new.csv").write_text(rows.replace("2,0", "").replace("98 °F", "") + "90;1 %;m;;c")
    (found,) = _read_tables(tmp_path / "new.csv", how, ())
    fill = how.fill[2]
    assert found.x.tolist() == [[97, 39.25, 0.25, 0, 0, 1], [1, 35, fill, 0, 1, 0]]
    assert [(line, why) for line, why, _ in found.left] == [(3, "spo2 holds '?'")]


def test_what_stands_for_an_empty_cell_is_looked_for_once(tmp_path):
    """Beside a row without an answer, 32 °F became 0 °C, and then an empty cell."""
    columns = {"features": ["temp"], "missing_values": [0]}
    how = TableTransform.model_validate({"columns": columns}).model_copy(
        update={"recipe": Recipe(columns={"temp": SiteColumn(factor=0.5, offset=-16.0)})}
    )
    (tmp_path / "new.csv").write_text("temp\n32\nx\n0\n34\n")
    (found,) = _read_tables(tmp_path / "new.csv", how)
    assert found.x.tolist() == [[0.0], [1.0]]
    assert [(line, why) for line, why, _ in found.left] == [
        (3, "temp holds 'x'"), (4, "temp is empty")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "line", "lines"),
    [
        (
            "",
            "has no column 'triage'",
            ['columns.spo2.from = "SpO2 (%)"', 'columns.temp.from = "Temp"',
             '# columns.sex.from = one of "Ampel", "Geschlecht", "Kommentar"'],
        ),
        (
            RECIPE.replace('columns.spo2.unit = "%"', "").replace('below = "half", ', "")
            .replace('unit = "°F", ', ""),
            "column 'spo2' holds '97 %' in line 2 and in 5 more, which is no finite number",
            ['columns.spo2.unit = "%"', 'columns.temp.unit = "°F"',
             'columns.crp.below = "limit"  # or "half", or a number',
],
        ),
        (
            RECIPE.replace('"Temp"', '"Tmp"'),
            "has no column 'Tmp', which is 'temp' by the recipe. Did you mean 'Temp'?",
            ['columns.temp.from = "Temp"'],
        ),
    ],
)  # fmt: skip
def test_what_a_site_lacks_is_a_line_and_lines_to_paste(site, recipe, line, lines):
    (site / "site.toml").write_text(recipe, "utf-8")
    with pytest.raises(DataError) as caught:
        client_of(site)
    assert line in str(caught.value)
    assert caught.value.lines[0] == "to paste into site.toml:"
    assert {*lines} <= {*caught.value.lines}


def test_classes_that_the_run_does_not_list_are_told_with_lines(site, caplog):
    (site / "site.toml").write_text(RECIPE.replace("classes.Gelb", "#"), "utf-8")
    (site / "a.csv").write_text((HEAD + ROWS + EXTRA).replace("gelb", "Yellow "), "utf-8")
    client_of(site)
    assert "the run lists no class 'GELB', 'Gelb', 'Yellow'" in caplog.text
    assert 'classes.Yellow = "yellow"' in caplog.text
    assert '# classes.Gelb = one of "green", "yellow", "red"' in caplog.text


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('column.a = "x"', "site.toml: column: Extra inputs are not permitted. Did you mean"),
        ('columns.spo2.form = "x"', "columns.spo2.form: Extra inputs are not permitted. Did you"),
        ("columns.spo2.factor = 0", "factor = 0 makes all numbers alike"),
        ('columns.temp = "a"\ncolumns.spo2 = "a"', "columns.temp and columns.spo2 are one column"),
        ('classes.a = "x"\nclasses."A " = "y"', "'A ' is 'y', and another spelling of it"),
        ('columns.triage.unit = "%"', "column 'triage', which is the label: these are for columns"),
        ("columns.sex.factor = 2", "column 'sex', which is one of categories: these are for"),
        ('columns.triage.missing = ["?"]', "missing for column 'triage', which is the label"),
        ('classes.grün = "green"', "a name with spaces or letters beyond A to Z is in quotes"),
        ('columns.triage.values.a = "x"', "values for column 'triage': classes says how labels"),
        ('columns.temp.values.a = "x"', "values for column 'temp': values are for columns of text"),
        ("columns.spo2 = ", "is not valid TOML"),
    ],
)
def test_a_recipe_that_is_no_good_is_a_line(site, text, line):
    (site / "site.toml").write_text(text, "utf-8")
    with pytest.raises(ConfigError) as caught:
        client_of(site)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_change_takes_effect_from_the_next_arrival(site, tmp_path, caplog):
    """In week 18 the export has another name for a column, and °C."""
    client, root = client_of(site), site.parent / "states" / "own-data"
    root = client.directory.parent
    first = client.announcement()
    new = tmp_path / "week-18.csv"
    new.write_text(HEAD.replace("Temp", "T") + ROWS.replace("°F", "°C").replace("97 %", "50 %"))
    with pytest.raises(DataError, match="has no column 'Temp', which is 'temp' by the recipe"):
        add_task(root, 0, new, *how())
    changed = RECIPE.replace('"Temp", unit = "°F", factor = 0.5, offset = -10', '"T", unit = "°C"')
    (site / "site.toml").write_text(changed, "utf-8")
    added = add_task(root, 0, new, *how())
    assert "it was read with another site mapping" in added.notes[0]
    grown = ClientData(client.directory)
    assert grown.arrays(1, "train")[0][0, :2].tolist() == [50, 98.5]
    assert grown.arrays(0, "train")[0].tolist() == client.arrays(0, "train")[0].tolist()
    assert recipe_in(site / "site.toml").digest in grown.announcement()
    assert recipe_in(site / "site.toml").digest not in first
    (site / "site.toml").unlink()  # the last one is known all the same
    new.write_text(new.read_text().replace("50 %", "51 %"))
    assert not any("recipe" in note for note in add_task(root, 0, new, *how()).notes)
    given = tmp_path / "other.toml"
    given.write_text(changed.replace("half", "limit"), "utf-8")
    new.write_text(new.read_text().replace("51 %", "52 %"))
    assert "another site mapping" in add_task(root, 0, new, *how(), given=given).notes[0]
    assert ClientData(client.directory).arrays(3, "train")[0][0, 2] == 0.5


def how() -> tuple[Any, int]:
    from fedmodels.config.data import Data

    return Data.model_validate(DATA), 0


def taken(folder: Incoming) -> list[Added]:
    """Return what two looks add: the first one sees what has come."""
    return [added for _ in range(2) for added in folder.take()]


def test_what_comes_waits_while_somebody_writes_the_recipe(site, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(settled, "SETTLE_S", 0.0)
    client, incoming = client_of(site), tmp_path / "incoming"
    folder = Incoming(incoming, client.directory.parent, 0, how)
    folder.take()
    (incoming / "b.csv").write_text(HEAD + ROWS.replace("97 %", "50 %"), "utf-8")
    (incoming / "site.toml").write_text("columns.spo2 = ", "utf-8")
    assert taken(folder) == []
    assert "is not valid TOML" in caplog.text
    assert (incoming / "b.csv").exists()
    (incoming / "site.toml").write_text(RECIPE, "utf-8")
    (added,) = taken(folder)
    assert added.task == 1
    assert (incoming / "site.toml").exists()


def test_a_folder_that_comes_is_read_by_the_recipe_in_the_watched_folder(
    site, tmp_path, monkeypatch
):  # fmt: skip
    monkeypatch.setattr(settled, "SETTLE_S", 0.0)
    client, incoming = client_of(site), tmp_path / "incoming"
    (incoming / "week-18").mkdir(parents=True)
    rows = (ROWS + EXTRA).replace(" %", "1 %")  # other numbers than those of the first files
    (incoming / "week-18" / "b.csv").write_text(HEAD.replace("Temp", "T") + rows, "utf-8")
    (incoming / "site.toml").write_text(RECIPE.replace('"Temp"', '"T"'), "utf-8")
    (added,) = taken(Incoming(incoming, client.directory.parent, 0, how))
    assert added.task == 1


def test_a_recipe_that_says_nothing_stands_in_place_of_another(site, tmp_path):
    """A file that is written as the run has it comes to a client with a recipe."""
    root = client_of(site).directory.parent
    (tmp_path / "plain.toml").write_text("# as the run has it\n", "utf-8")
    new = tmp_path / "new.csv"
    rows = "".join(f"red,{80 + n},37.{n},5,f\n" for n in range(6))
    new.write_text("triage,spo2,temp,crp,sex\n" + rows, "utf-8")
    with pytest.raises(DataError, match="has no column 'Ampel', which is 'triage' by the recipe"):
        add_task(root, 0, new, *how())
    assert add_task(root, 0, new, *how(), given=tmp_path / "plain.toml").task == 1
    assert ClientData(root / "0").arrays(1, "train")[0][0].tolist() == [80, 37, 5, 1, 0, 0]


def test_what_an_earlier_recipe_said_of_the_writing_goes_with_it(site, tmp_path):
    """A decimal comma of the first recipe is none of the next one, nor of a model's new files."""
    (site / "site.toml").write_text('decimal = ","\nmissing_values = ["-"]\n' + RECIPE, "utf-8")
    client = client_of(site)
    how = parse_transform(client.file.transform, "the model")
    assert isinstance(how, TableTransform)
    assert (how.columns.decimal, how.of_site.decimal) == (None, ",")
    (site / "site.toml").write_text(RECIPE, "utf-8")
    new = tmp_path / "new.csv"
    new.write_text((HEAD + ROWS + EXTRA).replace(",", ".").replace("98.5", "97.1"), "utf-8")
    assert add_task(client.directory.parent, 0, new).task == 1
    assert ClientData(client.directory).arrays(1, "train")[0][0, 1] == pytest.approx(38.55)
    facts = ModelFacts("mlp", {}, (6,), 3, transform=how.facts())
    (found,) = read_new([new], read_by(site / "site.toml", facts, "the model"), "the model")
    assert found.x[0, 1] == pytest.approx(38.55)


def test_a_run_keeps_what_it_began_with(site, caplog):
    client = client_of(site)
    state = site.parent / "states" / "0"
    state.mkdir()
    (state / "session.json").write_text("{}")
    (site / "site.toml").write_text(RECIPE.replace("half", "limit"), "utf-8")
    assert client_of(site).directory == client.directory
    assert "it applies to new data only" in caplog.text
    (state / "session.json").unlink()  # it never joined
    assert client_of(site).directory != client.directory


def test_a_recipe_that_goes_back_to_an_earlier_one_changes_no_data_of_a_run(site, caplog):
    """Two cuts were made before the client joined; a later recipe is that of the other one."""
    first, other = client_of(site), RECIPE.replace("half", "limit")
    (site / "site.toml").write_text(other, "utf-8")
    second = client_of(site)
    assert second.directory != first.directory
    state = site.parent / "states" / "0"
    state.mkdir()
    (state / "session.json").write_text("{}")  # it joined with the second one
    (site / "site.toml").write_text(RECIPE, "utf-8")
    assert client_of(site).directory == second.directory
    assert "it applies to new data only" in caplog.text
    (state / "session.json").unlink()
    assert client_of(site).directory == first.directory
    (state / "session.json").write_text("{}")  # and now with the first one
    (site / "site.toml").write_text(other, "utf-8")
    assert client_of(site).directory == first.directory


def test_folders_of_images_have_classes_by_the_recipe(tmp_path):
    place = tmp_path / "photos"
    for name in ("Gelb", "gelb ", "red"):
        (place / name).mkdir(parents=True)
        for number in range(4):
            Image.new("L", (4, 4), 9 * number).save(place / name / f"{name.strip()}{number}.png")
    (place / "site.toml").write_text('classes.gelb = "yellow"\n', "utf-8")
    data = {"name": "directory", "classes": ["yellow", "red"]}
    client = ClientData(cut(place, data, 0, 1, tmp_path / "states" / "own-data") / "1")
    assert sum(client.tasks[0].train) + sum(client.tasks[0].test) == 12
    assert client.tasks[0].train[0] == 6
    assert recipe_in(place / "site.toml").digest in client.announcement()
    (place / "site.toml").write_text('decimal = ","\n', "utf-8")
    with pytest.raises(ConfigError, match="the recipe has decimal, which is for tables"):
        cut(place, data, 0, 1, tmp_path / "states" / "own-data")


def test_check_says_what_would_be_learned_and_keeps_nothing(site, tmp_path, capsys):
    config = tmp_path / "run.toml"
    config.write_text(
        'seed = 1\n[method]\nname = "fedavg"\n[net]\nname = "mlp"\n[schedule]\nclients = 1\n'
        'rounds = 1\n[data]\nname = "table"\n[data.columns]\nlabel = "triage"\n'
        'features = ["spo2", "temp", "crp", "sex"]\ncategories = {sex = ["f", "m"]}\n'
        'missing = "mean"\n'
    )
    with pytest.raises(SystemExit) as ended:
        main(["check", str(site), "--config", str(config)])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "column crp: from CRP, below half, above 99.0, missing ('n.b.',)" in out
    assert "class 'Gelb' is yellow" in out
    assert "nothing wrong with 1 client directories" in out
    (site / "site.toml").unlink()
    with pytest.raises(SystemExit) as ended:
        main(["check", str(site), "--config", str(config)])
    assert ended.value.code == 1
    assert 'columns.spo2.from = "SpO2 (%)"' in capsys.readouterr().err.splitlines()
    assert {path.name for path in tmp_path.iterdir()} == {"site", "run.toml"}


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        ({"categories": {"sex": ["f", "F "]}}, "two levels that differ in case or spaces alone"),
        ({"categories": {"label": ["a"]}}, "categories has 'label', which is the label"),
        ({"categories": {"sex": ["f"]}, "features": ["x"]}, "which features lacks"),
    ],
)
def test_categories_that_make_no_sense_are_refused(columns, line):
    from fedmodels.config.columns import Columns

    with pytest.raises(ConfigError, match=line):
        Columns.model_validate(columns)


def test_columns_that_may_not_be_meant_are_told(tmp_path, caplog):
    """A running number, one that tells the class, and 368 °C once; the others are well."""
    drawn = np.random.default_rng(0)
    rows = [
        f"{n + 1},{36 + drawn.random():.2f},{n % 3},{drawn.integers(9)},{'abc'[n % 3]}"
        for n in range(90)
    ]
    rows[40] = f"41,368,{40 % 3},4,{'abc'[40 % 3]}"
    (tmp_path / "a.csv").write_text("case_id,temp,ward,pulse,label\n" + "\n".join(rows) + "\n")
    data = {"name": "table", "columns": {"label": "label"}}
    root = cut(tmp_path / "a.csv", data, 0, 0, tmp_path / "own-data")
    with pytest.raises(DataError, match="--strict: client 0: column case_id counts up, from 1 to"):
        tell_own(root, [0], strict=True)
    assert "other sites need the same columns in the same order" in caplog.messages[0]
    told = [line for line in caplog.messages if line.startswith(("note: client 0", "note: column"))]
    assert len(told) == 3
    assert "column ward tells the class of every example by itself, with 3 values" in told[1]
    assert "column temp holds 368, far from all other values (36 to 37)" in told[2]


def test_equal_recipes_have_one_digest():
    one = recipe_of({"columns": {"a": "b"}, "classes": {}}, "x")
    assert one.digest == recipe_of({"columns": {"a": {"from": "b", "factor": 1}}}, "x").digest
    assert recipe_of({}, "x").digest == ""


def test_a_title_above_a_table_does_not_hide_its_names(tmp_path):
    """The lines to paste had the title's cells in place of the names."""
    rows = "".join(f"{i},5;{'uv'[i % 2]};\n" for i in range(9))
    (tmp_path / "a.csv").write_text("Export of May;;\n;;\nTemp;Ampel;Note\n" + rows)
    data = Data(name="table", root=str(tmp_path), columns=Columns(features=("temp",)))
    with pytest.raises(DataError, match="It has: Temp, Ampel, Note") as caught:
        load(data)
    assert 'columns.temp.from = "Temp"' in caught.value.lines
