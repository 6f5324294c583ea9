"""Going back to any model that was live: by round, by task, by time, within a bound of bytes."""

import os
import time
from calendar import timegm
from pathlib import Path

import pytest
import torch

from fedcli.cli import main
from fedcli.runtime.deployed import AFTER, DIGEST, STAGE, Deployed, digest_in, moment_of
from fedmodels.errors import ArchiveReplaced, DataError
from fedmodels.tensors.bundle import Bundle, state_digest
from fedplugins.serving.tests.test_serving import facts, header_of, negate


def dated(day: int, hour: int) -> float:
    return float(timegm(time.strptime(f"2026-11-{day:02d} {hour}:15", "%Y-%m-%d %H:%M")))


@pytest.fixture
def place(tmp_path: Path) -> Deployed:
    """Five models of three tasks went live, the last three on one day."""
    (tmp_path / "states/7").mkdir(parents=True)
    found = Deployed(tmp_path / "states/7")
    for round, (task, day) in enumerate([(1, 2), (1, 3), (2, 9), (2, 9), (3, 9)]):
        live(found, round, task, day, 10 + round)
    return found


def live(place: Deployed, round: int, task: int, day: int, hour: int, room: int = 1 << 30) -> None:
    weights = Bundle(weights={"head/weight": torch.full((2, 2), float(round))})
    digest = state_digest([("", weights)])
    header = {DIGEST: digest, AFTER: str(2 * round), STAGE: str(task)}
    assert place.go_live(weights, header_of(facts(round)) | header, place.digest(), "live", room)
    os.utime(place.current, (dated(day, hour),) * 2)


def test_earlier_models_are_kept_by_time_round_and_task(place):
    assert [path.stem for path in place.kept()] == [
        "20261102-101500-round-1-task-1", "20261103-111500-round-2-task-1",
        "20261109-121500-round-3-task-2", "20261109-131500-round-4-task-2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("to", "round"),
    [
        ("2", 2), ("task-1", 2), ("task-2", 4), ("2026-11-02", 1), ("2026-11-08", 2),
        ("2026-11-09T13:59", 4), ("2026-11-09T12:15", 3), ("2026-11-09T12:14", 2),
    ],
)  # fmt: skip
def test_a_roll_back_names_one_of_them(place, to, round):
    line = place.roll_back(to)
    assert line.startswith(f"rolled back to the model of round {round} ")
    assert moment_of(place.current).startswith(f"round {round} ")
    assert place.status().held
    assert any(f"-round-{round}-" in path.name for path in place.kept()), "it stays there"
    if round != 4:
        assert place.roll_back().startswith("rolled back to the model of round 4 ")


@pytest.mark.parametrize("to", ["9", "task-7", "2026-11-01"])
def test_what_is_not_kept_lists_what_is(place, to):
    with pytest.raises(DataError, match=r"there are: 20261102-101500-round-1-task-1, 2026"):
        place.roll_back(to)
    assert not place.status().held


def test_a_time_at_which_the_live_model_was_live_already_is_no_way_back(place):
    with pytest.raises(DataError, match="the live model is the last one up to 2026-11-09"):
        place.roll_back("2026-11-09")
    place.roll_back("1")
    assert place.roll_back("2026-11-09").startswith("rolled back to the model of round 4 ")


def test_words_that_name_no_model_are_refused(place, capsys):
    words = ["rollback", "--run", str(place.folder.parent.parent), "--client", "7"]
    for more, line in (
        (["--to", "yesterday"], "is no round (12), no task-3, and no date"),
        (["--to", "3", "--release"], "--release lets later models go live"),
    ):
        with pytest.raises(SystemExit) as ended:
            main([*words, *more])
        assert ended.value.code
        assert line in " ".join(capsys.readouterr().err.split())
    with pytest.raises(SystemExit) as ended:
        main([*words, "--to", "1"])
    assert ended.value.code == 0
    assert "rolled back to the model of round 1" in capsys.readouterr().out


def test_a_kept_model_that_was_replaced_is_refused(place):
    negate(place.kept()[0])
    with pytest.raises(ArchiveReplaced):
        place.roll_back("1")


@pytest.mark.parametrize(
    ("models", "rounds"), [(4, [1, 2, 3, 4]), (3, [2, 3, 4]), (2, [2, 4]), (0, [])]
)
def test_old_models_go_within_a_bound_and_the_last_of_each_task_stay_longest(
    tmp_path, models, rounds
):
    (tmp_path / "states/7").mkdir(parents=True)
    place = Deployed(tmp_path / "states/7")
    size = 0
    for round, task in enumerate((1, 1, 2, 2, 3)):
        live(place, round, task, 1 + round, 10, room=models * size + size // 2)
        size = place.current.stat().st_size
    assert [int(path.stem.split("-")[3]) for path in place.kept()] == rounds
    assert digest_in(place.previous)
