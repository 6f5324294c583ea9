"""One's own images and arrays: scaled as one expects, named alike everywhere, inspected first."""

from __future__ import annotations

import io
import json
import os
import shutil
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from fedcli.cli import main
from fedcli.data.image_files import ENDS, OF_DICOM
from fedcli.data.own.examples import coded
from fedcli.data.sets.registry import load
from fedcli.data.store.client_data import ClientData, GlobalTest
from fedcli.data.store.findings import inspect
from fedmodels.config.columns import Columns
from fedmodels.config.data import Data
from fedmodels.errors import ClientFailed, ConfigError, DataError, PayloadError, RunFailed
from fedmodels.facts.resolution import experiment_of
from fedsrv.engine.admission import Admission
from fedtide.inprocess import run_in_process


def own(root: Path, client: int, dtype: Any = np.uint8, factor: float = 1, **about: Any) -> Path:
    """Write one client's arrays: 24 training and 8 test images of two classes."""
    place, rng = root / str(client), np.random.default_rng(client)
    (place / "task-0").mkdir(parents=True)
    for part, n in (("train", 24), ("test", 8)):
        x = (rng.integers(0, 256, (n, 1, 4, 4)) * factor).astype(dtype)
        np.save(place / f"task-0/{part}_x.npy", x)
        np.save(place / f"task-0/{part}_y.npy", np.arange(n) % 2)
    facts = {"input_shape": [1, 4, 4], "num_classes": 2, **about}
    (place / "client.json").write_text(json.dumps(facts))
    return place


def names_of(root: Path, client: int, **about: Any) -> str:
    return ClientData(own(root, client, **about)).announcement()


# --- scale


def test_bytes_are_scaled_unless_told_otherwise(tmp_path):
    found = [
        ClientData(own(tmp_path, 0)),
        ClientData(own(tmp_path, 1, scale=1)),
        ClientData(own(tmp_path, 2, np.float32)),
    ]
    highest = [float(one.normaliser(one.arrays(0, "train")[0]).max()) for one in found]
    assert 0.9 < highest[0] <= 1
    assert min(highest[1:]) > 200
    assert json.loads(found[0].announcement())["scale"] == 255
    with pytest.raises(DataError, match=r'client\.json: mean is of x / scale.*"scale": 1'):
        ClientData(own(tmp_path, 3, mean=[33.3], std=[78.6]))


def test_images_in_folders_are_scaled_too(tmp_path):
    _image(tmp_path / "0/task-0/train/0/a.png")
    (tmp_path / "0/task-0/test").mkdir()
    (tmp_path / "0/client.json").write_text('{"input_shape": [1, 4, 4], "num_classes": 1}')
    assert ClientData(tmp_path / "0").file.scale == 255
    own(tmp_path, 1)
    place = tmp_path / "global-test"
    place.mkdir()
    for name in "xy":
        source = tmp_path / "1" / "task-0" / f"test_{name}.npy"
        (place / f"{name}.npy").write_bytes(source.read_bytes())
    (place / "problem.json").write_text('{"input_shape": [1, 4, 4], "num_classes": 2}')
    found = GlobalTest.find(tmp_path)
    assert found is not None
    assert found.problem.scale == 255


def _image(path: Path, mode: str = "L") -> None:
    path.parent.mkdir(parents=True)
    Image.new(mode, (4, 4), color=200 if mode == "L" else (200, 100, 0)).save(path)


# --- names of classes


@pytest.mark.parametrize(
    ("names", "line"),
    [
        ([], r'cat names no class; known are numbers: .*client\.json.*"class_names": \["cat", "d'),
        (
            ["cat", "cow"],
            r'dog names no class; known are cat, cow: .*: 3, .*: \["cat", "cow", "dog"\]',
        ),
        (
            ["cat", "dogs"],
            r"known are cat, dogs\. Did you mean 'dogs'\? Rename the directory, or me",
        ),
    ],
)
def test_folders_without_a_name_get_an_example(names, line, tmp_path):
    for name in ("cat", "dog"):
        _image(tmp_path / "0/task-0/train" / name / "a.png")
    facts = {"input_shape": [1, 4, 4], "num_classes": 2, "class_names": names}
    (tmp_path / "0/client.json").write_text(json.dumps(facts))
    with pytest.raises(DataError, match=line):
        ClientData(tmp_path / "0")


def test_accents_in_a_name_may_be_written_in_two_ways(tmp_path):
    """A Mac writes them apart from their letters, and editors do not: both look the same."""
    for name in ("cat", normalize("NFD", "kätzchen")):
        for part in ("train", "test"):
            _image(tmp_path / "0/task-0" / part / name / "a.png")
    facts = {"input_shape": [1, 4, 4], "num_classes": 2, "class_names": ["kätzchen", "cat"]}
    (tmp_path / "0/client.json").write_bytes(BOM_UTF8 + json.dumps(facts).encode())
    client = ClientData(tmp_path / "0")
    assert client.arrays(0, "train")[1].tolist() == [1, 0]
    assert client.file.class_names == ("kätzchen", "cat")


def test_clients_whose_accents_are_written_in_two_ways_agree(tmp_path):
    told = [
        names_of(tmp_path, client, class_names=["cat", normalize(form, "kätzchen")])
        for client, form in enumerate(("NFC", "NFD"))
    ]
    admission = Admission({}, 2)
    for client, said in enumerate(told):
        admission.check(client, said)
        assert admission.admit(client, said) == []
    assert admission.settle() == []
    for form in ("NFC", "NFD"):  # as an older client announces it
        said = json.loads(told[0]) | {"class_names": ["cat", normalize(form, "kätzchen")]}
        Admission({0: told[0]}, 2).check(1, json.dumps(said))


def test_classes_in_folders_are_in_one_order_however_accents_are_written(tmp_path):
    """Written apart, u and an accent would come before z."""
    roots = [tmp_path / form for form in ("NFC", "NFD")]
    for root in roots:
        for name in ("zebra", normalize(root.name, "ürs")):
            for part in ("train", "test"):
                _image(root / part / name / "a.png")
    found = [load(Data(name="directory", root=str(root))) for root in roots]
    assert [one.class_names for one in found] == [("zebra", "ürs")] * 2


def test_labels_of_a_table_whose_accents_are_written_in_two_ways_are_one_class():
    texts = np.array([normalize("NFC", "kür"), "walk", normalize("NFD", "kür")])
    for names in (None, ["kür", "walk"], [normalize("NFD", "kür"), "walk"]):
        y, classes = coded(texts, names, "a table")
        assert (y.tolist(), classes) == ([0, 1, 0], ["kür", "walk"])


def test_a_missing_part_of_images_is_named_as_a_folder(tmp_path):
    _image(tmp_path / "0/task-0/train/0/a.png")
    facts = {"input_shape": [1, 4, 4], "num_classes": 2}
    (tmp_path / "0/client.json").write_text(json.dumps(facts))
    with pytest.raises(DataError, match=r"task-0/test is missing: train beside it has a folder"):
        ClientData(tmp_path / "0")


def test_classes_in_another_order_are_refused(tmp_path):
    """Label 0 would be a cat at one client and a dog at another."""
    told = [names_of(tmp_path, c, class_names=["cat", "dog"]) for c in (0, 1)]
    told += [names_of(tmp_path, 2, class_names=["dog", "cat"]), names_of(tmp_path, 3)]
    admission = Admission({}, 4)
    admission.check(0, told[2])
    for client, text in ((0, told[2]), (1, told[0]), (2, told[1])):
        assert admission.admit(client, text) == []
    assert admission.admit(3, told[3]) == []  # says none
    assert admission.settle() == [0]
    line = r'client 0 calls its classes \["dog", "cat"\].*"class_names": \["cat", "dog"\]'
    with pytest.raises(PayloadError, match=line):
        admission.check(0, told[2])
    with pytest.raises(PayloadError, match=line):
        Admission({1: told[0]}, 4).check(0, told[2])
    half = Admission({}, 2)
    half.admit(0, told[0])
    half.admit(1, told[2])
    with pytest.raises(RunFailed, match=r"name the classes alike.*client 1"):
        half.settle()


# --- a loss that is not finite


def test_a_loss_that_is_not_finite_says_whose_and_what_helps(tmp_path):
    for client in range(2):
        own(tmp_path, client, np.float32, factor=1e6)
    tables = {
        "net": {"name": "mlp", "hidden": [8]},
        "method": {"name": "fedavg"},
        "schedule": {"clients": 2, "rounds": 2},
        "training": {"lr": 1e30, "local_epochs": 3, "batch_size": 4},
    }
    with pytest.raises(ClientFailed, match=r"client 0 .* its loss is (nan|inf)") as ended:
        run_in_process(experiment_of(tables), tmp_path, tmp_path / "run")
    assert "inputs go from 0 to 2.55e+08" in str(ended.value)
    assert "[training] lr is 1e+30" in str(ended.value)
    assert "\n" not in str(ended.value)


# --- fedcli check


def check(root: Path) -> tuple[bool, str]:
    text = io.StringIO()
    return inspect(root, Console(file=text, width=200)), text.getvalue()


def test_check_is_content_with_good_data(tmp_path, digits):
    own(tmp_path, 0)
    own(tmp_path, 1)
    well, text = check(tmp_path)
    assert well, text
    assert "nothing wrong with 2 client directories" in text
    assert "2 of 2" in text
    well, text = check(digits)
    assert well, text
    assert check(tmp_path / "0")[0]
    with pytest.raises(DataError, match=r"holds no client directory such as .*in docs/data\.md$"):
        check(tmp_path / "0" / "task-0")


def rewrite(place: Path, name: str, change: Any) -> None:
    path = place / "task-0" / name
    np.save(path, change(np.load(path)))


def test_check_says_which_clients_have_no_directory(tmp_path):
    """Some clients of a run on one machine are well; launch needs all."""
    for client in (0, 2):
        own(tmp_path, client)
    well, text = check(tmp_path)
    assert well, text
    assert "note: no directory of client 1; that is well where other machines" in text
    (tmp_path / "1").write_text("")
    well, text = check(tmp_path)
    assert not well
    assert f"wrong: {tmp_path / '1'} is a file; client 1 needs a directory" in text
    (tmp_path / "1").unlink()
    own(tmp_path, 1)
    assert "note:" not in check(tmp_path)[1]


def test_check_says_what_is_wrong(tmp_path, capsys):
    for client in range(8):
        own(tmp_path, client)
    train = np.load(tmp_path / "0/task-0/train_x.npy")
    rewrite(tmp_path / "0", "test_x.npy", lambda x: train[:8])
    rewrite(tmp_path / "1", "train_x.npy", lambda x: train)
    rewrite(tmp_path / "2", "train_x.npy", lambda x: x * 0)
    rewrite(tmp_path / "2", "test_x.npy", lambda x: x * 0)
    rewrite(tmp_path / "3", "train_x.npy", lambda x: x.astype(np.float32) * 1e4)
    rewrite(tmp_path / "4", "train_x.npy", lambda x: np.full(x.shape, np.nan, np.float32))
    rewrite(tmp_path / "5", "train_y.npy", lambda y: y + 7)
    rewrite(tmp_path / "6", "train_y.npy", lambda y: y * 0)
    facts = {"input_shape": [1, 4, 4], "num_classes": 2, "class_names": ["a", "b"]}
    (tmp_path / "7/client.json").write_text(json.dumps(facts))
    with pytest.raises(SystemExit) as ended:
        main(["check", str(tmp_path)])
    assert ended.value.code == 1
    said = capsys.readouterr().out
    for line in (
        "wrong: client 0: 8 test examples are among its training examples",
        "wrong: client 1: 24 of its training examples are also at client 0",
        "wrong: client 2: all inputs are the same",
        "wrong: client 3: inputs go from 0",
        "wrong: client 4: inputs hold NaN or infinity",
        "train_y.npy: labels go from 7 to 8; expected 0 to 1",
        "note: client 6: class 1 has test examples and none to train on",
        "wrong: client 7: class_names is ('a', 'b'), and () at client 0",
    ):
        assert line in said, said
    assert "Traceback" not in said


def test_a_class_whose_name_is_no_text_gets_one_line(tmp_path):
    """It ended with a traceback, where the first client.json was written."""
    for part in ("train", "test"):
        place = os.fsencode(tmp_path / part) + b"/\xff"
        os.makedirs(place)
        Image.new("L", (4, 4)).save(Path(os.fsdecode(place)) / "0.png")
    line = r"train has a directory '\\udcff', which is no name in UTF-8: rename it"
    with pytest.raises(DataError, match=line):
        load(Data(name="directory", root=str(tmp_path)))


def test_a_task_that_is_missing_is_named(tmp_path):
    place = own(tmp_path, 0)
    shutil.copytree(place / "task-0", place / "task-2")
    with pytest.raises(DataError, match="holds no task-1, but task-2"):
        ClientData(place)
    (place / "task-2").rename(place / "task-1")
    assert ClientData(place).num_tasks == 2


def test_a_task_that_is_being_written_is_none_yet(tmp_path):
    """A site's labels become a task while its server reads: that was told as a missing task."""
    place = own(tmp_path, 0)
    shutil.copytree(place / "task-0", place / "task-1.part")
    assert ClientData(place).num_tasks == 1


def test_inputs_of_another_type_are_named_by_their_file(tmp_path):
    place = own(tmp_path, 0, np.int32)
    with pytest.raises(DataError, match=r"train_x\.npy: inputs are int32; expected uint8, uint16"):
        ClientData(place)


def test_class_folders_hold_images_alone(tmp_path):
    for part in ("train", "test"):
        for name in ("cat", "dog"):
            _image(tmp_path / part / name / "a.tif")
        (tmp_path / part / ".cache").mkdir()
        (tmp_path / part / "cat" / ".DS_Store").write_bytes(b"")
    found = load(Data(name="directory", root=str(tmp_path)))
    assert found.class_names == ("cat", "dog")
    assert len(found.train.y) == 2
    (tmp_path / "train" / "dog" / "a.tif").rename(tmp_path / "train" / "dog" / "a.raw")
    with pytest.raises(
        DataError, match=r"a\.raw is no image that is read, and .*dog has none: \*\.png"
    ):
        load(Data(name="directory", root=str(tmp_path)))
    _image(tmp_path / "train" / "dog" / "more" / "a.png")
    with pytest.raises(DataError, match=r"dog/more is a directory; images .* lie in .*dog itself"):
        load(Data(name="directory", root=str(tmp_path)))


@pytest.mark.parametrize("page", ["data.md", "tutorial-images.md"])
def test_pages_name_every_kind_of_image(page, tmp_path):
    text = (Path(__file__).parents[3] / "docs" / page).read_text()
    assert [end for end in ENDS if f"*{end}`" not in text] == []
    photos = [end for end in ENDS if end not in OF_DICOM]  # test_real_exports reads those
    for part in ("train", "test"):
        for end in photos:
            if end in (".heic", ".heif"):
                pytest.importorskip("pillow_heif").register_heif_opener()
            _image(tmp_path / part / end[1:] / f"a{end.upper()}", "RGB")
    assert len(load(Data(name="directory", root=str(tmp_path))).class_names) == len(photos)


def test_a_directory_that_holds_no_data_says_what_it_may_hold(tmp_path):
    _image(tmp_path / "photos" / "test" / "cat" / "a.png")
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    own(tmp_path, 0)
    (tmp_path / "0/task-0/train_x.npy").unlink()
    for name, line in (
        ("photo", r"photo is not there: \[data\] root must name the directory of the data"),
        ("file", r"file is no directory: \[data\] root"),
        ("empty", r"empty holds no data: put images into .*empty/CLASS/\*\.png, or into .*/train/"),
        ("empty", r"empty holds no data: .*, or arrays into train_x\.npy, train_y\.npy"),
        ("photos", r"photos/train is missing: .*photos/test beside it is for testing"),
        ("0/task-0", r"train_x\.npy is missing"),
    ):
        with pytest.raises(DataError, match=line):
            load(Data(name="directory", root=str(tmp_path / name)))


def test_other_arrays_are_another_partition(tmp_path):
    place = own(tmp_path, 0) / "task-0"
    variant = load(Data(name="directory", root=str(place))).identity
    assert load(Data(name="directory", root=str(place))).identity == variant
    np.save(place / "test_y.npy", 1 - np.load(place / "test_y.npy"))
    assert load(Data(name="directory", root=str(place))).identity != variant


def test_classes_have_names_of_their_own(tmp_path):
    with pytest.raises(DataError, match="class_names must differ"):
        ClientData(own(tmp_path, 0, num_classes=3, class_names=["a", "a", "c"]))
    place = own(tmp_path, 1) / "task-0"
    (place / "dataset.json").write_text(json.dumps({"class_names": ["a", "a"]}))
    with pytest.raises(DataError, match="two classes have the name 'a'"):
        load(Data(name="directory", root=str(place)))
    with pytest.raises(ConfigError, match="classes names a class twice"):
        Columns(classes=("lo", "lo"))


def test_check_names_parts_without_examples(tmp_path, capsys):
    for client, empty in enumerate((["train"], ["test"], ["train", "test"])):
        place = own(tmp_path, client)
        for name in (f"{part}_{array}.npy" for part in empty for array in "xy"):
            rewrite(place, name, lambda held: held[:0])
    with pytest.raises(SystemExit):
        main(["check", str(tmp_path)])
    said = capsys.readouterr().out
    assert "wrong: client 0: there is no example to train on" in said
    assert "note: client 1: there is no test example" in said
    assert "wrong: client 2: there is no example: fill task-0" in said
    assert "inf" not in said, "the range of no inputs"
