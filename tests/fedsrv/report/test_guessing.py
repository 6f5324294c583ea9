"""What stands beside an accuracy, and that nothing worse than a guess is praised."""

import json
from pathlib import Path

import pytest

from fedsrv.report.comparison import comparison
from fedsrv.report.frame import group_runs
from fedsrv.report.story import story
from fedsrv.state.run_record import read_run
from tests.fedsrv.report.test_report import write_run

GUESSES = {"chance": 0.1, "own": 0.5, "all": 0.12}


def runs(at: Path, better: float, guesses: dict[str, float] | None = GUESSES) -> list[Path]:
    """Write three seeds of two methods, of which ``gldp`` is the better one at each seed."""
    found = []
    for seed in range(3):
        for method, value in (("fedavg", better - 0.2 + 0.01 * seed), ("gldp", better)):
            metrics = {"a_loc": value, "a_glo": value, "bytes": 1.0}
            path = write_run(at / f"{method}-{seed}", method=method, seed=seed, metrics=metrics)
            if guesses is not None:
                (path / "data.json").write_text(json.dumps({"guesses": guesses}))
            found.append(path)
    return found


@pytest.mark.parametrize(("better", "praised"), [(0.5, False), (0.51, True)])
def test_the_better_of_two_below_a_guess_is_not_praised(tmp_path, better, praised):
    groups = group_runs([read_run(path) for path in runs(tmp_path, better)])
    said = story(groups)
    assert said[1] == "Without a model: chance 10.0 %, most frequent class 50.0 %."
    assert ("No model here is better than that." in said) is not praised
    assert ("gldp is better than every other in a paired test over seeds." in said) is praised
    table = comparison(groups)
    own, everyone = (
        [name.text.startswith(start) for name in table.rows].index(True)
        for start in ("clients' models", "global model")
    )
    assert {row for row, _ in table.bold} == {everyone, *([own] if praised else [])}
    assert table.rows[own].note == "chance 10.0 %, most frequent class 50.0 %"
    assert table.rows[everyone].note == "chance 10.0 %, most frequent class 12.0 %"


def test_unknown_guesses_are_not_made_up(tmp_path):
    groups = group_runs([read_run(path) for path in runs(tmp_path, 0.3, None)])
    assert not any("Without a model" in line for line in story(groups))
    assert {name.note for name in comparison(groups).rows} == {""}


def test_guesses_of_several_data_sets_are_a_range(tmp_path):
    for classes, name in ((2, "two"), (4, "four")):
        path = write_run(tmp_path / name, method=name, metrics={"a_loc": 0.9})
        guesses = {"chance": 1 / classes, "own": 0.5, "all": 0.5}
        (path / "data.json").write_text(json.dumps({"guesses": guesses}))
    groups = group_runs([read_run(tmp_path / name) for name in ("two", "four")])
    assert (
        story(groups)[1] == "Without a model: chance 25.0 % to 50.0 %, most frequent class 50.0 %."
    )
