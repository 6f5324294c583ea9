"""New photos and recordings, asked of a model that was trained on such files."""

from __future__ import annotations

import csv
import gzip
import json
import sys
import zipfile
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import pytest
import torch
from PIL import Image

import fedtide
from fedcli.cli import main
from fedcli.data.arrays import ranges_of
from fedcli.data.own.new_inputs import NewInputs
from fedcli.data.sets.registry import load
from fedcli.parts.kept_models import _ranges
from fedcli.predicting.live_model import LiveModel
from fedcli.predicting.prediction import predicted
from fedmodels.config.data import Data
from fedmodels.errors import ArchiveError, ConfigError, DataError
from fedmodels.nets import make_net
from fedmodels.nets.trained import ModelFacts, TrainedModel
from fedsrv.trained.export import export
from tests.fedcli.data.new_files import read_new

REST = {
    "net": {"name": "mlp", "hidden": [8]}, "method": {"name": "fedavg"},
    "schedule": {"clients": 2, "rounds": 6},
    "training": {"lr": 0.05, "local_epochs": 4}, "evaluate": {"pictures": 0},
}  # fmt: skip
COLUMNS = {
    "features": ["ax", "ay"], "time": "t", "window": 8, "rate": 10.0, "missing": "interpolate",
}  # fmt: skip


def recorded(path: Path, activities: str, label: bool = True) -> Path:
    """Write 40 rows of each activity, whose level tells it; 20 rows a second, one cell empty."""
    lines = ["t;ax;ay" + (";label" if label else "")]
    for number, name in enumerate(activities.split()):
        level = {"sit": -3.0, "run": 3.0}[name]
        for i in range(40):
            ax = "" if i == 7 else f"{level + (i % 5) / 10:.1f}".replace(".", ",")
            row = [f"{(40 * number + i) / 20:.2f}".replace(".", ","), ax, "1,5"]
            lines.append(";".join([*row, *([name] if label else [])]))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def of_recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run on windows of recordings."""
    pytest.importorskip("pandas")
    place = tmp_path_factory.mktemp("recordings")
    root = str(recorded(place / "r.csv", "sit run " * 4))
    data = {"name": "table", "root": root, "columns": COLUMNS}
    tables = {"data": data, "scenario": {"kind": "iid"}, **REST}
    return fedtide.run(tables, backend="inprocess", out=place / "run").path


@pytest.fixture(scope="module")
def of_photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run on photos of two sizes."""
    place = tmp_path_factory.mktemp("photos")
    for shade, name in ((30, "dark"), (220, "=light")):
        for number in range(12):
            path = place / "photos" / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (10 + number % 2, 12), (shade + number,) * 3).save(path)
    data = {"name": "directory", "root": str(place / "photos"), "resize": 8, "crop": 8}
    tables = {"data": data, "scenario": {"kind": "iid"}, **REST}
    return fedtide.run(tables, backend="inprocess", out=place / "run").path


def asked(run: Path, *words: object, status: int = 0, client: int = 1) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["predict", "--run", str(run), "--client", str(client), *map(str, words)])
    assert ended.value.code == status


def rows_in(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_new_recording_is_cut_as_those_of_training(of_recordings, tmp_path, monkeypatch, capsys):
    """The example of the page: no label, and files of both kinds of places."""
    monkeypatch.chdir(tmp_path)
    recorded(Path("new.csv"), "run sit", label=False)
    asked(of_recordings, "new.csv")
    said = capsys.readouterr().out.splitlines()
    assert said[0] in ("new.csv: run 3, sit 2", "new.csv: sit 3, run 2")
    assert said[1:] == ["written to predictions.csv"]
    rows = rows_in(Path("predictions.csv"))
    assert list(rows[0]) == ["input", "from", "to", "class", "probability", "run", "sit", "note"]
    # 80 rows in 4 s become 40 at 10 a second, and 5 windows of 8; the third has rows of both
    assert [row["class"] for row in rows[:2] + rows[3:]] == ["run", "run", "sit", "sit"]
    assert [(row["from"], row["to"]) for row in rows][:2] == [("2", "16"), ("18", "32")]
    for row in rows:
        assert float(row[row["class"]]) == float(row["probability"]) > 0.5
        assert float(row["run"]) + float(row["sit"]) == pytest.approx(1, abs=2e-6)


def test_windows_of_a_new_file_are_those_of_a_partition(of_recordings, tmp_path):
    model = TrainedModel.load(of_recordings / "clients/0/personal.safetensors")
    file = recorded(tmp_path / "one.csv", "sit")
    made = load(Data.model_validate({"name": "table", "root": str(file), "columns": COLUMNS}))
    (read,) = read_new([file], model.facts, "a model")
    expected = np.concatenate([made.train.x, made.test.x])
    assert read.x.tolist() == expected.tolist()
    assert len(read.x) == 2


def test_a_directory_and_a_file_may_be_asked_together(of_recordings, tmp_path, capsys, caplog):
    (tmp_path / "many").mkdir()
    recorded(tmp_path / "many" / "b.csv", "sit", label=False)
    recorded(tmp_path / "many" / "a.tsv", "run", label=False)
    text = (tmp_path / "many" / "a.tsv").read_text()
    (tmp_path / "many" / "a.tsv").write_text(text.replace(";", "\t"))
    (tmp_path / "many" / "._b.csv").write_bytes(b"\0")
    asked(of_recordings, tmp_path / "many", recorded(tmp_path / "c.csv", "run"),
          "--out", tmp_path / "p.csv")  # fmt: skip
    assert [row["class"] for row in rows_in(tmp_path / "p.csv")] == [
        "run", "run", "sit", "sit", "run", "run"
    ]  # fmt: skip
    assert "1 file is left out: ._b.csv" in caplog.text
    capsys.readouterr()
    asked(of_recordings, tmp_path / "c.csv", "--json")
    facts = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert facts[0]["input"] == f"{tmp_path / 'c.csv'}, line 2 to 16"
    assert list(facts[0]["classes"]) == ["run", "sit"]


def test_photos_of_a_directory_are_asked(of_photos, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("new/more").mkdir(parents=True)
    Image.new("L", (30, 50), 25).save("new/a.jpg")
    Image.new("RGBA", (64, 50)).save("new/more/b.png")  # transparent: on white
    Path("new/night").mkdir()
    for number in range(3):
        Image.new("L", (30, 50), 25).save(f"new/night/{number}.jpg")
    asked(of_photos, "new")
    said = capsys.readouterr().out
    assert "new/a.jpg: dark 1" in said
    assert "new/more/b.png: =light 1" in said
    assert "new/night: dark 3" in said
    rows = rows_in(Path("predictions.csv"))
    assert [row["class"] for row in rows] == ["dark", "'=light", *["dark"] * 3]  # no formula
    assert "'=light" in rows[0]
    asked(of_photos, "new/a.jpg")
    assert capsys.readouterr().out.startswith("new/a.jpg: dark ")


@pytest.mark.needs("serving")
@pytest.mark.parametrize("kind", ["text/csv", "image/png", "image/jpeg"])
def test_a_file_that_is_sent_is_answered_as_one_on_the_disk(
    kind, of_photos, tmp_path, request, capsys
):
    from fedplugins.serving.model_server import ModelServer

    run, file = of_photos, tmp_path / f"new.{kind[-3:]}"
    if kind == "text/csv":
        run = request.getfixturevalue("of_recordings")
        recorded(file, "run sit", label=False)
    else:
        Image.new("L", (30, 50), 25).save(file, kind.partition("/")[2])
    asked(run, file, "--out", tmp_path / "p.csv")
    rows, names = rows_in(tmp_path / "p.csv"), fedtide.open(run).personal_model(1).class_names
    server = ModelServer("127.0.0.1", 0, {"1": LiveModel.of(run, 1)})
    end = server.begin("serve-model")
    sent = Request(
        f"{server.url}predict", file.read_bytes(), {"Content-Type": f"{kind}; charset=utf-8"}
    )
    with urlopen(sent, timeout=60) as answer:
        told = json.loads(answer.read())
    end()
    assert told["classes"] == names
    assert [one["class"] for one in told["predictions"]] == [r["class"].strip("'") for r in rows]
    for one, row in zip(told["predictions"], rows, strict=True):
        assert one["probability"] == pytest.approx(float(row["probability"]), abs=1e-6)
        places = [str(one.get(end, "")) for end in ("from", "to")]
        assert places == [row["from"], row["to"]]


def test_an_exported_model_is_asked_as_the_run_s_own(of_photos, tmp_path, capsys):
    file = tmp_path / "m.safetensors"
    export(fedtide.open(of_photos).personal_model(1), "safetensors", file)
    photo = of_photos.parent / "photos" / "dark" / "3.png"
    said = []
    for whose in (["--run", of_photos, "--client", 1], ["--model", file]):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["predict", *map(str, whose), str(photo)])
        assert ended.value.code == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert "dark" in said[0]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["x.csv"], "choose a model: --run RUN --client ID, or --model FILE"),
        (["--run", "r", "x.csv"], "choose a model"),
        (["--model", "m", "--client", "0", "x.csv"], "--model FILE says which model: leave out"),
    ],
)
def test_whose_model_has_to_be_said(words, line, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["predict", *words])
    assert ended.value.code == 2
    assert line in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.csv", "ax;ay\n1;2\n", "a.csv has no column 't': the model was trained on 10 rows per"),
        ("a.csv", "t;ax\n1;2\n", "a.csv has no column 'ay'"),
        ("a.csv", "t;ax;ay\n0;1;2\n0,1;?;2\n", "column 'ax' holds '?' in line 3"),
        (
            "a.csv",
            "t;ax;ay\n0;1;2\n",
            "a.csv is too short: it has 1 row at 10 a second, and a window of the model has 8",
        ),
        ("a.csv", "t;ax;ay\n", "a.csv holds no row below the names of its columns"),
        ("a.png", "", "a.png is an image; the model takes arrays [8, 2], and tables"),
        ("d", None, "d holds no file *.csv, *.tsv, *.parquet, *.xlsx, *.h5 or *.sql"),
        ("none.csv", None, "none.csv"),
    ],
)
def test_what_does_not_fit_gets_one_line(of_recordings, tmp_path, capsys, name, content, line):
    if content is not None:
        (tmp_path / name).write_text(content)
    elif name == "d":
        (tmp_path / name).mkdir()
    out = tmp_path / "p.csv"
    asked(of_recordings, tmp_path / name, "--out", out, status=1)
    errors = capsys.readouterr().err.splitlines()
    assert line in errors[-1]
    assert not out.exists()


def test_a_transform_of_a_stranger_is_checked(of_photos, tmp_path):
    model = TrainedModel.load(of_photos / "clients/0/personal.safetensors")
    photo = of_photos.parent / "photos" / "dark" / "3.png"
    for transform, line in (
        ({"kind": "images", "resize": 10**9}, "m: transform.resize"),
        ({"kind": "video"}, "m: transform"),
        ({"kind": "table", "columns": {"gap": 1.0}}, "m: transform: .*gap needs time"),
        ({}, "m: transform"),
    ):
        facts = ModelFacts(**{**vars(model.facts), "transform": transform})
        with pytest.raises(DataError, match=line):
            list(read_new([photo], facts, "m"))
    text = json.dumps({**vars(model.facts), "transform": [1]})
    with pytest.raises(ArchiveError, match="m does not describe its model: transform"):
        ModelFacts.parse(text, "m")


# --- rows that have no answer, or a doubtful one --------------------------------------------------

FACTS = ModelFacts(
    "mlp", {"hidden": [2]}, (2,), 2, class_names=("rest", "alarm"),
    transform={"kind": "table", "columns": {"features": ["temp", "pulse"]}},
    ranges=[[34.0, 42.0], [40.0, 140.0]],
)  # fmt: skip


@pytest.fixture
def of_rows(tmp_path: Path) -> Path:
    """Return the file of a model of rows that answers alarm with 0.88 to whatever comes."""
    pytest.importorskip("pandas")
    net = make_net("mlp", num_classes=2, input_shape=(2,), hidden=[2])
    weights = {key: torch.zeros_like(tensor) for key, tensor in net.tensors().items()}
    bias = [key for key in weights if weights[key].shape == (2,)]
    weights[bias[-1]] = torch.tensor([0.0, 2.0])
    TrainedModel(FACTS, weights).save(tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_rows_without_an_answer_are_marked_and_the_others_answered(of_rows, tmp_path, capsys):
    """One empty cell left all rows without an answer, and 98.6 in degrees Celsius had 1.000000."""
    file = tmp_path / "new.csv"
    file.write_text("id,temp,pulse\na1,36.5,70\n-7,,70\n=a3,98.6,70\na4,lost,70\na5,37,300\n")
    found = fedtide.predict(file, model=of_rows, keep=["id"])
    assert [row["class"] for row in found] == ["alarm", None, "alarm", None, "alarm"]
    assert [row["from"] for row in found] == [2, 3, 4, 5, 6]
    assert [row["id"] for row in found] == ["a1", "-7", "=a3", "a4", "a5"]
    assert [row["note"] for row in found] == [
        "", "no answer: temp is empty", "temp 98.6 is far from 34 to 42",
        "no answer: temp holds 'lost'", "pulse 300 is far from 40 to 140",
    ]  # fmt: skip
    assert found[0]["probabilities"]["alarm"] == pytest.approx(1 / (1 + np.exp(-2)), abs=1e-6)
    far = fedtide.predict(file, model=of_rows, unknown=0.8)
    assert [row["class"] for row in far] == ["alarm", None, "unknown", None, "unknown"]
    assert {row["class"] for row in fedtide.predict([file], model=of_rows, unknown=0.9)} == {
        None, "unknown"
    }  # fmt: skip
    out = ["--out", str(tmp_path / "p.csv")]
    with pytest.raises(SystemExit) as ended:
        main(["predict", "--model", str(of_rows), str(file), "--keep", "id", *out])
    assert ended.value.code == 0
    rows = rows_in(tmp_path / "p.csv")
    assert [row["id"] for row in rows] == ["a1", "-7", "'=a3", "a4", "a5"]
    assert [row["class"] for row in rows] == ["alarm", "", "alarm", "", "alarm"]
    said = "alarm 3; 2 without an answer; 2 far from the training data"
    assert capsys.readouterr().out.startswith(f"{file}: {said}\n")
    file.write_text("temp,pulse\n,70\n")
    with pytest.raises(DataError, match="column 'temp' is empty in line 2"):
        fedtide.predict(file, model=of_rows)
    with pytest.raises(DataError, match="has no column 'who' to keep"):
        fedtide.predict(file, model=of_rows, keep=["who"])


def test_a_column_that_is_kept_is_what_stands_in_the_file(of_rows, tmp_path):
    """007 came back as 7, and a column called from ended a command with a traceback."""
    file = tmp_path / "new.csv"
    file.write_text("id,from,class,alarm,temp,pulse\n007,x,NA,1,36.5,70\n,y,b,2,,70\n")
    found = fedtide.predict(file, model=of_rows, keep="id")
    assert [row["id"] for row in found] == ["007", ""]
    assert fedtide.predict(file, model=of_rows, keep=["pulse"])[0]["pulse"] == "70"
    packed = tmp_path / "new.csv.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    assert [row["id"] for row in fedtide.predict(packed, model=of_rows, keep="id")] == ["007", ""]
    for keep in (["from"], ["class"], ["alarm"], ["id", "id"]):
        with pytest.raises(ConfigError, match="cannot be kept: answers have another column"):
            fedtide.predict(file, model=of_rows, keep=keep)
    for share in (3.0, -0.1, float("nan")):
        with pytest.raises(ConfigError, match="is no share from 0 to 1"):
            fedtide.predict(file, model=of_rows, unknown=share)


def test_a_number_that_passes_through_is_as_a_csv_has_it(of_rows, tmp_path):
    """Beside an empty cell, the id 7 of a parquet file came back as 7.0."""
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    columns = {"id": [7, None], "far": [2.5, 3], "temp": [36.5, 37], "pulse": [70, 71]}
    pandas.DataFrame(columns).to_parquet(tmp_path / "new.parquet")
    found = fedtide.predict(tmp_path / "new.parquet", model=of_rows, keep=["id", "far"])
    assert [(row["id"], row["far"]) for row in found] == [("7", "2.5"), ("", "3")]


@pytest.mark.needs("serving")
def test_a_number_by_name_is_the_level_that_it_is_in_a_file():
    """JSON's 2 counted as another level than the text 2, and 1,500 as 1500 beside 1,5."""
    from fedplugins.serving.bodies import json_inputs

    pytest.importorskip("pandas")
    columns = {"features": ["temp", "ward"], "categories": {"ward": ["1", "2", "true"]}}
    table = {"kind": "table", "columns": columns, "decimal": ","}
    facts = replace(FACTS, input_shape=(5,), transform=table, ranges=())
    rows = [{"temp": 1, "ward": 2}, {"temp": "1,500", "ward": True}, {"temp": 3, "ward": 1.5}]
    found = json_inputs(json.dumps(rows).encode(), facts)
    assert found.x.tolist() == [[1, 0, 1, 0, 0], [1.5, 0, 0, 1, 0], [3, 0, 0, 0, 1]]


@pytest.mark.needs("serving")
def test_what_a_workbook_or_a_scan_costs_is_known_before(tmp_path, monkeypatch):
    """Whatever the prefix and the place of its sheets; without pydicom, a line says what to do."""
    from fedplugins.serving import bodies

    for part, xml in (("xl/worksheets/sheet1.xml", "<c r='A1'/>"), ("s.bin", "<x:c r='A1'/>")):
        with zipfile.ZipFile(tmp_path / "w.xlsx", "w") as book:
            book.writestr(part, xml * 9)
        monkeypatch.setattr(bodies, "MAX_CELLS", 9)
        bodies.check_growth(tmp_path / "w.xlsx", "xlsx", b"", FACTS)
        monkeypatch.setattr(bodies, "MAX_CELLS", 8)
        with pytest.raises(DataError, match="more than 8 cells"):
            bodies.check_growth(tmp_path / "w.xlsx", "xlsx", b"", FACTS)
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(DataError, match=r"is a DICOM image, .*pip install .*pydicom"):
        bodies.check_growth(tmp_path / "a.dcm", "dcm", b"", FACTS)


@pytest.mark.needs("serving")
def test_an_answer_takes_one_pass_of_the_net(of_rows):
    """It took two: one for what the net says, and one for how far the input is."""
    from fedplugins.serving.bodies import json_inputs

    model, passes = TrainedModel.load(of_rows), list[int]()
    model.facts = replace(model.facts, reach=1.0)
    model.seen = torch.full((2, 2), 3.0)
    model.net.base.register_forward_hook(lambda *given: passes.append(1))
    found = predicted(model, json_inputs(b"[[36.5, 70], [40, 1e6]]", model.facts))
    assert len(passes) == 1
    assert all("far from the training data" in note for note in found.far)


@pytest.mark.needs("serving")
@pytest.mark.parametrize(
    "part", [("xl/sharedStrings.xml", "</sst>", "<si/>"), ("xl/styles.xml", "<font>", "<c/>")]
)
def test_a_workbook_that_takes_long_to_read_is_refused(tmp_path, monkeypatch, part):
    """A body of 162 kB kept a worker for 56 seconds: neither strings nor styles were counted."""
    from fedplugins.serving import bodies

    openpyxl = pytest.importorskip("openpyxl")
    place, mark, element = part
    book = openpyxl.Workbook()
    book.active.append(["a", 1])
    book.save(tmp_path / "w.xlsx")
    monkeypatch.setattr(bodies, "TRIED", 0)
    monkeypatch.setattr(bodies, "WORKBOOK_S", 600.0)
    bodies.check_growth(tmp_path / "w.xlsx", "xlsx", b"", FACTS)
    strings = '<sst xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"></sst>'
    kind = "application/vnd.openxmlformats-officedocument.spreadsheetml.sharedStrings+xml"
    named = f'<Override PartName="/xl/sharedStrings.xml" ContentType="{kind}"/></Types>'
    with (
        zipfile.ZipFile(tmp_path / "w.xlsx") as small,
        zipfile.ZipFile(tmp_path / "x.xlsx", "w", zipfile.ZIP_DEFLATED) as large,
    ):
        texts = {name: small.read(name).decode() for name in small.namelist()}
        texts.setdefault("xl/sharedStrings.xml", strings)
        types = texts["[Content_Types].xml"]
        if "sharedStrings" not in types:
            texts["[Content_Types].xml"] = types.replace("</Types>", named)
        assert mark in texts[place]
        for name, text in texts.items():
            many = element * 300_000 if name == place else ""
            large.writestr(name, text.replace(mark, many + mark, 1))
    assert (tmp_path / "x.xlsx").stat().st_size < 20_000
    monkeypatch.setattr(bodies, "WORKBOOK_CPU_S", 1)
    with pytest.raises(DataError, match="takes more than 1 seconds of the processor to read"):
        bodies.check_growth(tmp_path / "x.xlsx", "xlsx", b"", FACTS)


@pytest.mark.needs("serving")
def test_rows_by_names_are_answered_as_those_of_a_file(of_rows):
    from fedplugins.serving.bodies import json_inputs, schema_of

    def told(rows: object) -> NewInputs:
        return json_inputs(json.dumps(rows).encode(), FACTS)

    rows = [{"pulse": 70, "temp": 36.5, "more": 1}, {"temp": None, "pulse": 70}, {"temp": "37.5"}]
    found = told([*rows, {"temp": 40, "pulse": 80}])
    assert found.x.tolist() == [[36.5, 70.0], [40.0, 80.0]]
    assert [(row, why) for row, why, _ in found.left] == [
        (2, "temp is empty"),
        (3, "pulse is empty"),
    ]
    with pytest.raises(DataError, match="no column 'pulse'"):
        told([{"temp": 36.5}])
    with pytest.raises(DataError, match="a value that is no number and no text"):
        told([{"temp": [36.5], "pulse": 1}])
    columns = schema_of(FACTS)["anyOf"][0]["items"]["properties"]
    assert columns["temp"]["description"] == "99 % of the training data: 36 to 40"


def test_a_model_of_a_table_knows_the_range_of_each_column(of_recordings):
    """Half of the distance of the quantiles lies beyond each of them."""
    assert ranges_of(np.array([[0.0, 5.0], [10.0, 5.0]] * 500)) == [[-5.0, 15.0], [5.0, 5.0]]
    facts = TrainedModel.load(of_recordings / "clients/0/personal.safetensors").facts
    assert len(facts.ranges) == 2
    assert facts.beyond(np.full((1, 8, 2), 1.5)) == [""]
    (told,) = facts.beyond(np.full((1, 8, 2), 99.0))
    assert told.startswith("ax 99 is far from -6.")
    assert told.endswith("; ay 99 is far from 1.5 to 1.5")
    for ranges in ([[1.0]], None, 5, {}, [[0, 10**400]]):
        with pytest.raises(ArchiveError, match="ranges are no pairs"):
            ModelFacts.parse(json.dumps({**asdict(FACTS), "ranges": ranges}), "a file")


def test_a_rare_level_of_a_category_is_plausible_and_another_cell_is_not():
    columns = {"features": ["temp", "sex"], "categories": {"sex": ["f", "m"]}}
    file = SimpleNamespace(transform={"kind": "table", "columns": columns})
    ranges = [[34.0, 42.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
    data = SimpleNamespace(file=file, directory=Path("x"), ranges=lambda: ranges)
    client: Any = SimpleNamespace(data=data, experiment=SimpleNamespace(privacy=None))
    assert _ranges(client) == [[34.0, 42.0], [0.0, 1.0], [0.0, 1.0], [0.0, 0.0]]
    client.experiment.privacy = SimpleNamespace()
    assert _ranges(client) == ()


def test_a_validation_part_calibrates_a_model_and_marks_what_is_far(tmp_path, caplog):
    rng = np.random.default_rng(0)
    temps = rng.normal(37, 1, 400)
    labels = np.where(temps > 37 + rng.normal(size=400) / 2, "b", "a")
    rows = "".join(f"{v:.2f},{name}\n" for v, name in zip(temps, labels, strict=True))
    (tmp_path / "t.csv").write_text("temp,label\n" + rows)
    data = {"name": "table", "root": str(tmp_path / "t.csv"), "validation_share": 0.2,
            "columns": {"features": ["temp"]}}  # fmt: skip
    tables = {"data": data, "scenario": {"kind": "iid"}, **REST}
    run = fedtide.run(tables, backend="inprocess", out=tmp_path / "run")
    facts = run.personal_model(0).facts
    assert facts.calibrated_on == 32  # a fifth of 160 training examples
    assert facts.reach > 0
    assert facts.temperature != 1
    (tmp_path / "new.csv").write_text("temp\n36.8\n98.6\n")
    near, far = fedtide.predict(tmp_path / "new.csv", run=run.path, client=0, unknown=0.5)
    assert near["note"] == ""
    assert "far from the training data, " in far["note"]
    assert far["class"] == "unknown"


def test_a_file_without_an_answer_is_marked_and_the_others_are_answered(
    of_photos, tmp_path, capsys
):
    place = tmp_path / "new"
    place.mkdir()
    (place / "a.png").write_text("<html>")
    Image.new("RGB", (10, 10), (30,) * 3).save(place / "b.png")
    asked(of_photos, place, "--out", tmp_path / "p.csv", status=1)
    errors = capsys.readouterr().err
    assert f"1 file has no prediction, unlike the others: {place / 'a.png'}" in errors
    lost, found = rows_in(tmp_path / "p.csv")
    assert (lost["class"], found["class"]) == ("", "dark")
    assert lost["note"].startswith("no answer: ")
    asked(of_photos, place / "a.png", place / "b.png", "--json", status=1)
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert "cannot be read" in first["error"]
    assert "dark" in second["classes"]
    (place / "b.png").unlink()
    asked(of_photos, place, "--out", tmp_path / "none.csv", status=1)  # nothing is answered
    Image.new("RGB", (10, 10), (30,) * 3).save(place / "b.png")
    (tmp_path / "bad.zip").write_text("hello")
    (tmp_path / "empty").mkdir()
    asked(of_photos, tmp_path / "bad.zip", tmp_path / "empty", place / "b.png",
          "--out", tmp_path / "p.csv", status=1)  # fmt: skip
    notes = [row["note"] for row in rows_in(tmp_path / "p.csv")]
    assert notes[0].startswith(f"no answer: {tmp_path / 'bad.zip'} cannot be unpacked")
    assert notes[1].startswith(f"no answer: {tmp_path / 'empty'} holds no file")
    assert notes[2] == ""
    assert not (tmp_path / "none.csv").exists()


def test_serve_model_reads_by_another_recipe(of_recordings, tmp_path):
    (tmp_path / "site.toml").write_text('columns.ax = "X"')
    live = LiveModel.of(of_recordings, 1, tmp_path / "site.toml")
    assert live.now().model.facts.transform["recipe"] == {"columns": {"ax": {"from": "X"}}}
