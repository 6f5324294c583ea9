"""A site's own files: cut as the run's [data] says, by names of classes, once, in its cache."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedcli.cli import main
from fedcli.data.store.client_data import ClientData
from fedcli.data.store.own_files import is_cut
from fedcli.data.store.site import cut
from fedmodels.errors import ConfigError, DataError, PayloadError
from fedmodels.facts.resolution import experiment_of
from fedsrv.engine.admission import Admission

TABLE = {
    "name": "table",
    "classes": ["sit", "walk", "run"],
    "columns": {"label": "activity", "features": ["ax"], "window": 4},
}
PHOTOS = {"name": "directory", "classes": ["cat", "dog", "fox"], "resize": 4, "crop": 4}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "states" / "own-data"


def recording(path: Path, activities: str) -> Path:
    rows = [f"{i},{name}\n" for name in activities.split() for i in range(20)]
    path.write_text("ax,activity\n" + "".join(rows))
    return path


def photos(root: Path, *classes: str) -> Path:
    for shade, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for number in range(5):
            Image.new("L", (5 + number, 6), 50 * shade).save(root / name / f"{number}.png")
    return root


def labels(root: Path, client: int, part: str = "train") -> list[int]:
    counts = getattr(ClientData(root / str(client)).tasks[0], part)
    return list(counts)


def test_classes_go_by_name(tmp_path, cache):
    """A site lacks one and has them in another order; labels are those of the run."""
    pytest.importorskip("pandas")
    found = [
        cut(recording(tmp_path / "a.csv", "walk sit"), TABLE, 0, 0, cache),
        cut(photos(tmp_path / "p", "fox", "cat"), PHOTOS, 0, 1, cache),
    ]
    assert labels(found[0], 0) == [4, 4, 0]
    assert labels(found[1], 1) == [4, 0, 4]
    client = ClientData(found[0] / "0")
    assert client.file.class_names == ("sit", "walk", "run")
    assert client.file.partition is None
    assert client.file.transform is not None
    client.check()
    x, y = client.arrays(0, "train")
    assert (x[:, 0, 0].tolist(), y.tolist()) == ([0, 4, 8, 12] * 2, [1] * 4 + [0] * 4)
    assert ClientData(found[1] / "1").file.input_shape == (1, 4, 4)


def test_files_are_cut_once(tmp_path, caplog, cache):
    pytest.importorskip("pandas")
    caplog.set_level("INFO")
    file = recording(tmp_path / "a.csv", "walk sit")
    first = cut(file, TABLE, 0, 2, cache)
    assert "client 2: " in caplog.text
    assert "a.csv is cut as the run wants it: 8 examples to train on, 2 to test on" in caplog.text
    assert cut(file, TABLE, 0, 2, cache) == first
    assert "a.csv was cut before" in caplog.text
    assert first.parent == cache
    assert cache.stat().st_mode & 0o777 == 0o700
    others = {
        cut(file, TABLE, 0, 3, cache), cut(file, TABLE | {"test_share": 0.4}, 0, 2, cache),
        cut(file, TABLE, 1, 2, cache), first,
    }  # fmt: skip
    os.utime(file, (1, 1))
    others.add(cut(file, TABLE, 0, 2, cache))
    assert len(others) == 5


def test_a_class_that_the_run_does_not_know_is_refused_by_its_name(tmp_path, cache):
    pytest.importorskip("pandas")
    root = cut(recording(tmp_path / "a.csv", "walk jump"), TABLE, 0, 2, cache)
    client = ClientData(root / "2")
    assert client.file.class_names == ("sit", "walk", "run", "jump")
    tables = {"data": TABLE, "net": {"name": "mlp"}, "method": {"name": "fedavg"}}
    admission = Admission.of(experiment_of(tables), {})
    line = "client 2 has the class 'jump', which the run does not know: it has .*walk.*; add it to"
    with pytest.raises(PayloadError, match=line):
        admission.check(2, client.announcement())
    good = cut(recording(tmp_path / "b.csv", "walk"), TABLE, 0, 1, cache)
    admission.check(1, ClientData(good / "1").announcement())


def test_without_a_list_a_site_that_lacks_a_class_is_told_what_helps(tmp_path, cache):
    pytest.importorskip("pandas")
    wanted = {key: value for key, value in TABLE.items() if key != "classes"}
    told = [
        ClientData(cut(recording(tmp_path / f"{i}.csv", names), wanted, 0, i, cache) / str(i))
        for i, names in enumerate(("sit walk", "sit walk", "sit"))
    ]
    admission = Admission({}, 3)
    for i in (0, 1):
        admission.admit(i, told[i].announcement())
    with pytest.raises(PayloadError, match=r"list every class in \[data\] classes of the coordina"):
        admission.check(2, told[2].announcement())


@pytest.mark.parametrize(
    ("tables", "line"),
    [
        ({"name": "digits"}, "the run's data are digits: bring a directory that fedcli partition"),
        ({"name": "my_data.py:load"}, "the run's data are my_data.py:load"),
        ({"name": "table", "window": 3}, "the server's .data.: "),
        ({"name": "directory", "resize": 10**6}, "the server's .data.: "),
    ],
)
def test_what_a_server_may_not_ask_for(tmp_path, tables, line, cache):
    with pytest.raises(ConfigError, match=line):
        cut(recording(tmp_path / "a.csv", "walk"), tables, 0, 0, cache)


def test_a_server_names_no_place_at_a_site(tmp_path, cache):
    """Neither a root nor a path within a name is followed."""
    secret = recording(tmp_path / "secret.csv", "sit")
    mine = recording(tmp_path / "a.csv", "walk")
    root = cut(mine, TABLE | {"root": str(secret)}, 0, 0, cache)
    assert labels(root, 0) == [0, 4, 0]
    (tmp_path / "evil.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ConfigError, match=r"the run's data are evil\.py:load: bring"):
        cut(mine, {"name": f"{tmp_path}/evil.py:load"}, 0, 0, cache)


def test_files_that_do_not_fit_get_one_line(tmp_path, cache):
    pytest.importorskip("pandas")
    file = tmp_path / "a.csv"
    file.write_text("ax,activity\n1,walk\n?,walk\n")
    with pytest.raises(DataError, match=r"column 'ax' holds '\?' in line 3"):
        cut(file, TABLE, 0, 0, cache)
    with pytest.raises(DataError, match=r"holds no file \*\.csv"):
        cut(photos(tmp_path / "p", "cat"), TABLE, 0, 0, cache)
    assert not list(cache.rglob("client.json"))


def test_which_paths_hold_clients_directories(tmp_path):
    assert is_cut(tmp_path / "none")  # whoever opens it says that it is not there
    (tmp_path / "empty").mkdir()
    assert is_cut(tmp_path / "empty")
    assert not is_cut(recording(tmp_path / "a.csv", "walk"))
    assert not is_cut(photos(tmp_path / "2", "0", "1"))
    for name in ("3/client.json", "store/x.npy", "partition.json", "client.json"):
        place = tmp_path / name.replace("/", "-") / name
        place.parent.mkdir(parents=True)
        place.write_text("{}")
        assert is_cut(tmp_path / name.replace("/", "-"))


def test_files_are_of_one_client(tmp_path, capsys):
    file = recording(tmp_path / "a.csv", "walk")
    words = ["--server", "127.0.0.1:1", "--data", str(file), "--state-dir", str(tmp_path / "s")]
    with pytest.raises(SystemExit) as ended:
        main(["join", "--client-id", "0-2", *words])
    assert ended.value.code == 2
    assert "a.csv holds files of one client: name it with --client-id" in capsys.readouterr().err


def test_classes_of_a_config_agree(tmp_path):
    def table(**keys: Any) -> Any:
        tables = {"net": {"name": "mlp"}, "method": {"name": "fedavg"}}
        return experiment_of({**tables, "data": {"name": "table", **keys}})

    assert table(classes=["a", "b"]).data.classes == ("a", "b")
    for keys, line in (
        ({"classes": ["a", "a"]}, "classes names a class twice"),
        ({"classes": ["a"], "columns": {"classes": ["b"]}}, "classes differ: give one"),
        ({"classes": ["a"], "num_classes": 2, "input_shape": [1]}, "classes names 1"),
    ):
        with pytest.raises(ConfigError, match=line):
            table(**keys)


def test_classes_of_the_data_are_those_of_every_reader(tmp_path):
    from fedcli.data.sets.registry import load
    from fedmodels.config.data import Data

    root = photos(tmp_path / "p", "fox", "cat")
    keys = {"name": "directory", "root": str(root), "resize": [4, 4]}
    found = load(Data.model_validate({**keys, "classes": ["cat", "dog", "fox"]}))
    assert found.class_names == ("cat", "dog", "fox")
    assert np.bincount(found.train.y).tolist() == [4, 0, 4]
    with pytest.raises(DataError, match="p/fox names no class; known are cat, dog"):
        load(Data.model_validate({**keys, "classes": ["cat", "dog"]}))
    assert "classes" not in json.dumps(Data(name="directory").identity()).replace("num_classes", "")


def test_mean_and_deviation_are_those_of_the_config_where_it_gives_them(tmp_path, cache):
    """Elsewhere they follow from the site's examples: one cell of the file is then read off."""
    pytest.importorskip("pandas")
    given = {**TABLE, "mean": [0.5], "std": [4]}
    file = recording(tmp_path / "a.csv", "walk sit")
    held = [ClientData(cut(file, how, 0, 0, cache) / "0").file for how in (given, TABLE)]
    assert (held[0].mean, held[0].std) == ((0.5,), (4.0,))
    assert held[1].mean[0] == pytest.approx(7.5), "windows of rows 0 to 15 of 20 train"
