"""Every pair of parts of a config: it runs, is killed and goes on to the same bits, or is refused.

One run has many parts. Where it fails, ``FEDTIDE_PARTS="drift, zstd"`` runs a set of one's own.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from rich.console import Console

from fedcli.data.store.commands import run_partition
from fedmodels.config.combinations import NEEDED, PARTS, RESTS, refusals, refused_by
from fedmodels.errors import ConfigError
from fedtide.inprocess import run_in_process
from tests import combinations
from tests.combinations import (
    APART,
    NET,
    SETTINGS,
    TARGETS,
    covering,
    fits,
    is_refused,
    one_key,
    tables_of,
)
from tests.conftest import tiny_experiment
from tests.runs import Killed, dies, ends_as, let_secrets_be_known

ASKED = os.environ.get("FEDTIDE_PARTS")
SETS = [[name.strip() for name in ASKED.split(",")]] if ASKED else covering()
REFUSED = refused_by(PARTS)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with six clients' data, and the files that parts name."""
    root = tmp_path_factory.mktemp("combinations")
    (root / "net.py").write_text(NET)
    rows = "".join(f"{client},0,10\n" for client in range(6))
    (root / "there.csv").write_text(f"client,from,until\n{rows}")
    plain = tiny_experiment(**tables_of((), root))
    assert plain.data is not None
    assert plain.scenario is not None
    run_partition(plain.data, plain.scenario, 6, 0, root / "data", Console(quiet=True))
    run_in_process(plain, root / "data", root / "reference", facts=True)
    buffered = tiny_experiment(**tables_of(["asynchronous rounds"], root))  # scored after others
    run_in_process(buffered, root / "data", root / "reference-asynchronous", facts=True)
    return root


@pytest.fixture(autouse=True)
def _known_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two runs have the same noise."""
    let_secrets_be_known(monkeypatch)


@pytest.mark.parametrize(
    "names", SETS, ids=lambda names: f"{names[0]}, {names[1]}".replace(" ", "-")
)
def test_parts_go_together_and_survive_a_kill(names, place, tmp_path):
    experiment = tiny_experiment(**tables_of(names, place))
    assert {*names} <= {n for n, part in PARTS.items() if part.is_on(experiment)} | {"frozen parts"}
    whole = run_in_process(experiment, place / "data", tmp_path / "whole")
    with pytest.raises(Killed):
        run_in_process(experiment, place / "data", tmp_path / "killed", before=dies(interaction=1))
    ends_as(whole, experiment, place / "data", tmp_path / "killed")


def test_the_sets_have_every_pair_that_goes_together():
    every = itertools.combinations(SETTINGS, 2)
    one_of_two = {pair for pair in every if not is_refused(*pair) and not one_key(*pair)}
    needs = {pair for pair in one_of_two if not fits(pair)}  # what one needs is in the other's way
    had = {pair for names in covering() for pair in itertools.permutations(names, 2)}
    assert one_of_two - needs <= had
    assert len(had) > 1000


def test_a_pair_that_fits_by_none_of_its_needs_is_refused(place):
    for pair in itertools.combinations(SETTINGS, 2):
        if not is_refused(*pair) and not one_key(*pair) and not fits(pair):
            with pytest.raises(ConfigError):
                tiny_experiment(**tables_of(combinations.needed_by(pair), place))


@pytest.mark.parametrize("refusal", REFUSED, ids=lambda each: "--".join(each.pair))
def test_a_refused_pair_has_its_line(refusal, place):
    if "forgetting" in refusal.pair:
        (other,) = {*refusal.pair} - {"forgetting"}
        tables = tables_of(combinations.needed_by([other]), place)
        if refusal.where == "fixed = false":
            tables["privacy"]["secure_sum"] = {**tables["privacy"]["secure_sum"], "fixed": False}
        asked = tiny_experiment(**tables)
        assert refusal.why in refusals(asked, also="forgetting")
        return
    needed = [name for name in combinations.needed_by(refusal.pair) if name not in TARGETS]
    tables = tables_of(needed, place)
    for columns in (TARGETS[name] for name in refusal.pair if name in TARGETS):
        tables["data"] = {"name": "table", "root": "table.csv", "columns": columns}
    if "asynchronous rounds" in needed:
        tables["schedule"]["order"] = "asynchronous"
    if refusal.where == 'announce = "none"':
        tables["privacy"]["announce"] = "none"
    if refusal.where == "fixed = true":
        tables["privacy"]["secure_sum"] = {**tables["privacy"]["secure_sum"], "fixed": True}
    if refusal.where.startswith("epsilon"):
        del tables["privacy"]["noise_multiplier"]
        tables["privacy"]["epsilon"] = 8.0
    if refusal.where == "guard":
        tables["deploy"] = {"guard": "held_out"}
    if refusal.where.startswith("[evaluate]"):
        tables["evaluate"]["select_by"] = "f1"
    if refusal.where.startswith("[training.lr_schedule]"):
        tables.setdefault("training", {})["lr_schedule"] = {"kind": "exponential", "gamma": 0.5}
    told = refusal.why.split("{")[0][:40]
    with pytest.raises(ConfigError) as error:
        tiny_experiment(**tables)
    is_alone = combinations.needed_by(refusal.pair) == [*refusal.pair]
    assert told.strip() in str(error.value) or not is_alone, str(error.value)


@pytest.mark.parametrize("need", NEEDED, ids=lambda each: each.pair[0])
def test_a_part_without_the_one_it_needs_is_refused(need, place):
    with pytest.raises(ConfigError, match=r"looks at a validation part|belongs to \[schedule\]"):
        tiny_experiment(**tables_of(need.pair[:1], place))


def test_every_part_has_a_setting_or_a_reason():
    assert {*PARTS} | {"odd uploads"} == {*SETTINGS} | {*APART}
    assert {name for pair in RESTS for name in pair} <= {*PARTS} | {"odd uploads"}
    assert all({*each.pair} <= {*PARTS} for each in (*REFUSED, *NEEDED))
