"""Pictures a client draws for itself: what is in them, and that they are drawn alike each time."""

import base64
import errno
import io
import os
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from PIL import Image

from fedcli.parts.drawing import draw
from fedmodels.numerics.prototypes import drift
from fedmodels.tensors.bundle import Prototypes
from fedmodels.training.pictures import Gallery, PrototypeMap
from fedtide.inprocess import run_in_process
from tests.conftest import tiny_experiment

SVG = "{http://www.w3.org/2000/svg}"


def prototypes(rows):
    return Prototypes.of({k: (torch.tensor(v), 3) for k, v in rows.items()}, 2)


def test_the_map_keeps_the_two_largest_directions():
    # Spread 8 along the third coordinate, 4 along the first, none along the second.
    features = torch.tensor([[2.0, 5, 4], [-2, 5, 4], [2, 5, -4], [-2, 5, -4]])
    known = {"own class": Prototypes.of({7: (torch.tensor([1.0, 9, 2]), 1)}, 3)}
    found = PrototypeMap.of(features, torch.tensor([0, 1, 0, 1]), known)
    expected = torch.tensor([[4.0, 2], [4, -2], [-4, 2], [-4, -2]])
    torch.testing.assert_close(found.points, expected)
    at, classes = found.prototypes["own class"]
    torch.testing.assert_close(at, torch.tensor([[2.0, 1.0]]))  # moved with the data's mean
    assert classes.tolist() == [7]


def test_rows_known_by_position_belong_to_no_class():
    cloud = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    known = {"everyone's semantic": Prototypes.by_position(cloud[:2])}
    found = PrototypeMap.of(cloud, torch.zeros(5, dtype=torch.int64), known)
    assert found.prototypes["everyone's semantic"][1].tolist() == [-1, -1]


def test_equal_pictures_are_equal_files(tmp_path):
    rng = torch.Generator().manual_seed(0)
    cloud, labels = torch.randn(20, 4, generator=rng), torch.arange(20) % 15
    known = {
        "own class": Prototypes.of({1: (cloud[1], 1), 14: (cloud[2], 1)}, 4),
        "everyone's semantic": Prototypes.by_position(cloud[:2]),
    }
    gallery = Gallery({"0": torch.rand(3, 1, 8, 8, generator=rng), "1": torch.rand(2, 3, 8, 8)})
    for name, picture in {
        "map": PrototypeMap.of(cloud, labels, known),
        "bare": PrototypeMap.of(cloud, labels % 3, {}),
        "gallery": gallery,
    }.items():
        files = [tmp_path / "new" / f"{name}-{i}.svg" for i in range(2)]
        for file in files:
            draw(picture, file)
        assert files[0].read_bytes() == files[1].read_bytes()
        ElementTree.parse(files[0])


def test_a_map_has_a_dot_for_each_example_and_a_mark_for_each_prototype(tmp_path):
    points = torch.tensor([[0.0, 0.0], [2.0, 1.0], [1.0, 0.5]])
    known = {"own <class>": (torch.tensor([[4.0, 2.0]]), torch.tensor([1]))}
    drawn = PrototypeMap(points, torch.tensor([0, 1, 1]), known)
    draw(drawn, tmp_path / "map.svg", ["cat", "dog"])
    root = ElementTree.parse(tmp_path / "map.svg").getroot()
    dots = [(dot.attrib["cx"], dot.attrib["cy"]) for dot in root.iter(f"{SVG}circle")]
    assert dots[:3] == [("10.0", "310.0"), ("160.0", "160.0"), ("85.0", "235.0")]
    marks = [m.attrib["transform"] for m in root.iter(f"{SVG}path") if "transform" in m.attrib]
    assert marks[0] == "translate(310.0 10.0)"
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts == ["own <class>", "two principal directions", "cat", "dog"]


def test_a_gallery_has_a_row_of_images_for_each_class(tmp_path):
    gray, coloured = torch.full((3, 1, 20, 10), 0.25), torch.zeros(2, 3, 20, 10)
    coloured[1, 2] = 1.5  # the second one is blue, and brighter than a screen
    draw(Gallery({"0": gray, "any": coloured}), tmp_path / "sheet.svg", ["cat", "dog"])
    root = ElementTree.parse(tmp_path / "sheet.svg").getroot()
    assert [text.text for text in root.iter(f"{SVG}text")] == ["cat", "any"]
    images = [image.attrib for image in root.iter(f"{SVG}image")]
    rows = [image["y"] for image in images]
    assert [rows.count(row) for row in dict.fromkeys(rows)] == [3, 2]
    shown = []
    for image in images:
        data = base64.b64decode(image["href"].removeprefix("data:image/png;base64,"))
        with Image.open(io.BytesIO(data)) as opened:
            shown.append((opened.size, opened.getpixel((3, 3))))
    assert shown[0] == ((10, 20), (64, 64, 64))
    assert shown[4] == ((10, 20), (0, 0, 255))


def test_a_picture_that_does_not_fit_leaves_the_earlier_one(tmp_path, monkeypatch):
    def full(path, text, *_, **__):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "map.svg"
    path.write_text("an earlier one")
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        draw(Gallery({"0": torch.zeros(1, 1, 8, 8)}), path)
    assert path.read_text() == "an earlier one"
    assert os.listdir(tmp_path) == ["map.svg"]


def test_a_picture_that_cannot_be_drawn_costs_nothing(digits, tmp_path, monkeypatch, caplog):
    experiment = tiny_experiment(method="fedproto", schedule={"rounds": 1})
    drawn = run_in_process(experiment, digits, tmp_path / "run")

    def refuse(picture, path, class_names):
        raise OSError("disk full")

    monkeypatch.setattr("fedcli.parts.drawing.draw", refuse)
    without = run_in_process(experiment, digits, tmp_path / "again")
    assert without["state_sha256"] == drawn["state_sha256"]
    assert "client 1 drew no picture: disk full" in caplog.text
    assert "client 2" not in caplog.text  # evaluate.pictures = 2


def test_drift_is_relative_and_of_classes_known_before():
    before = prototypes({0: [3.0, 4.0], 1: [0.0, 2.0], 2: [9.0, 9.0]})
    after = prototypes({0: [3.0, 3.0], 1: [1.0, 2.0], 5: [1.0, 1.0]})
    assert drift(before, after) == torch.tensor([1 / 5, 1 / 2]).mean()
    assert drift(before, before) == 0
    assert drift(None, after) is None
    assert drift(prototypes({0: [1.0, 1.0]}), prototypes({1: [1.0, 1.0]})) is None
    zero = prototypes({0: [0.0, 0.0], 1: [0.0, 2.0]})
    assert drift(zero, after) == 0.5
    assert drift(prototypes({0: [0.0, 0.0]}), after) is None
