"""Pictures a client draws for itself: what is in them, and that they are drawn alike each time."""

import errno
import os

import pytest
import torch
from matplotlib.figure import Figure

from fedcli.runtime.pictures import draw
from fedmodels.numerics.prototypes import drift
from fedmodels.tensors.bundle import Prototypes
from fedmodels.training.pictures import Gallery, PrototypeMap
from fedtide.inprocess import run_in_process
from tests.conftest import tiny_experiment


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
        files = [tmp_path / "new" / f"{name}-{i}.png" for i in range(2)]
        for file in files:
            draw(picture, file)
        assert files[0].read_bytes() == files[1].read_bytes()
        assert files[0].read_bytes().startswith(b"\x89PNG")


def test_a_gallery_is_one_sheet_with_a_row_of_images_for_each_class(tmp_path, monkeypatch):
    gray, coloured = torch.full((3, 1, 20, 10), 0.25), torch.zeros(2, 3, 20, 10)
    coloured[1, 2] = 1.5  # the second one is blue, and brighter than a screen
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **how: drawn.append(figure))
    draw(Gallery({"cat": gray, "dog": coloured}), tmp_path / "sheet.png")
    (axes,) = drawn[0].axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cat", "dog"]
    assert axes.get_yticks().tolist() == [0.5, 1.5]
    (image,) = axes.images
    assert image.get_extent() == [0, 3, 2, 0]  # in images: three to the right, two down
    sheet = image.get_array()
    assert sheet.shape == (2 * 22, 3 * 11, 3)
    assert (sheet[:20, 22:32] == 0.25).all()
    assert (sheet[22:42, 11:21] == [0, 0, 1]).all()
    assert (sheet[22:42, 22:] == 1).all()  # the dogs are two
    assert (sheet[20:22] == 1).all()  # the gap


def test_a_picture_that_does_not_fit_leaves_the_earlier_one(tmp_path, monkeypatch):
    def full(figure, path, **how):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "map.png"
    path.write_text("an earlier one")
    monkeypatch.setattr(Figure, "savefig", full)
    with pytest.raises(OSError, match="No space left"):
        draw(Gallery({"0": torch.zeros(1, 1, 8, 8)}), path)
    assert path.read_text() == "an earlier one"
    assert os.listdir(tmp_path) == ["map.png"]


def test_a_picture_that_cannot_be_drawn_costs_nothing(digits, tmp_path, monkeypatch, caplog):
    experiment = tiny_experiment(method="fedproto", schedule={"rounds": 1})
    drawn = run_in_process(experiment, digits, tmp_path / "run")

    def refuse(picture, path):
        raise OSError("disk full")

    monkeypatch.setattr("fedcli.runtime.pictures.draw", refuse)
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
