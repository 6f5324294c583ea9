"""What the studies of benchmarks/ have to compare; ``fedsrv sweep`` itself has tests of its own."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from benchmarks.records import RECORDS
from fedmodels.config.experiment import Experiment
from fedmodels.errors import ConfigError
from fedmodels.facts.config_file import parse_experiment
from fedplugins.studies.fairness import fairness
from fedplugins.studies.outcome import read_record
from fedplugins.studies.plan import Sweep, plan

ROOT = Path(__file__).parents[2]
STUDIES = sorted((ROOT / "benchmarks" / "studies").glob("*.toml"))


@pytest.fixture
def rows_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Return a function from a study to the experiments of its rows."""
    monkeypatch.chdir(ROOT)

    def experiments(study: str) -> dict[str, Experiment]:
        found = Sweep.read(ROOT / "benchmarks" / "studies" / f"{study}.toml")
        runs = plan(found, tmp_path, list(found.methods), [0])
        return {run.cell.row: parse_experiment(run.config, run.cell.row) for run in runs}

    return experiments


def test_fedali_is_compared_on_nets_that_pool_by_the_mean(rows_of):
    """The class token sees an image through attention alone, which tokens of norm 1 weaken."""
    rows = rows_of("fedali-cifar")
    assert [row for row, found in rows.items() if found.net.options()["pool"] == "cls"] == [
        "the head reads the class token: FedAli",
        "the head reads the class token: FedAvg",
    ]


def test_fedali_is_compared_on_clients_as_the_paper_defines_them(rows_of):
    assert {found.schedule.clients for found in rows_of("fedali-wisdm").values()} == {58}


def test_gldp_is_compared_among_the_same_classes(rows_of):
    assert all(found.evaluate.class_masks for found in rows_of("gldp").values())


@pytest.mark.parametrize("study", ["change-pictures", "change-recordings", "change-concepts"])
def test_methods_are_compared_under_change_on_one_net(rows_of, study):
    """FedAli alone has an alignment layer, and pFedGRP no row where inputs are no images."""
    rows = rows_of(study)
    aligned = {row for row, found in rows.items() if found.net.options().get("alp")}
    assert aligned == {"FedAli"}
    nets = {(found.net.name, found.net.options()["pieces"]) for found in rows.values()}
    assert len(nets) == 1
    assert ("pFedGRP" in rows) == (study != "change-recordings")
    rules: dict[str, set[str]] = {}
    for found in rows.values():  # a phase of the head, one of the rest
        if found.method.name == "gldp":
            assert found.method.t + found.method.s == found.training.local_epochs
        if hasattr(found.method, "inference"):
            rules.setdefault(found.method.name, set()).add(found.method.inference)
    assert rules == {
        "fedproto": {"nearest", "classifier"},
        "gldp": {"gldp_gp", "classifier"},
        "fedmlp": {"classifier", "prototype"},
    }


OF_CLIENTS = re.compile(
    r"metrics\.(?:best_|chosen_)?"
    r"(?:a_loc|a_sel|iaa|aa|present|prequential|personalization|generalization)(?:_|$)"
)
OF_ATTACKERS = "settings are switches of attackers, and a client that sends nothing is none"
WITHOUT_LOCAL = {
    "attacks": OF_ATTACKERS,
    "attacks-defences": OF_ATTACKERS,
    "attacks-fashion": OF_ATTACKERS,
    "attacks-optimised": OF_ATTACKERS,
    "pfedgrp-judge": "settings are switches of pFedGRP",
}
"""Studies of clients' models without a row that shares nothing, and why."""


@pytest.mark.parametrize("place", STUDIES, ids=[place.stem for place in STUDIES])
def test_models_of_clients_are_compared_with_those_of_clients_on_their_own(place, monkeypatch):
    """A lead over FedAvg alone does not show that sharing helps."""
    monkeypatch.chdir(ROOT)
    study = Sweep.read(place)
    scores_clients = any(map(OF_CLIENTS.match, study.columns.values()))
    has_local = any(method.split()[0] == "local" for method in study.methods.values())
    assert has_local == (scores_clients and place.stem not in WITHOUT_LOCAL)


@pytest.mark.parametrize("place", STUDIES, ids=[place.stem for place in STUDIES])
def test_reasons_state_no_epochs(place):
    """The line says by itself who trains what for how long; a typed number was once wrong."""
    reasons = tomllib.loads(place.read_text())["differs"].values()
    typed = re.compile(
        r"\b(?:\d+|one|two|three|four|five|six|ten) (?:\w+ )?epochs?\b", re.IGNORECASE
    )
    assert not [reason for reason in reasons if typed.search(reason)]


@pytest.mark.parametrize("place", STUDIES, ids=[place.stem for place in STUDIES])
def test_a_study_says_in_what_its_rows_differ(place, monkeypatch):
    """A study without the table, or with a reason too few, is none that compares like with like.

    A reason too many says that rows differ where they do not.
    """
    monkeypatch.chdir(ROOT)
    study = Sweep.read(place)
    assert study.differs is not None
    first = dict(list(study.settings.items())[:1])
    study = study.model_copy(update={"settings": first, "lengths": ()})
    runs = plan(study, ROOT / "runs", list(study.methods), [0])
    said = fairness(study, runs)
    assert all(f"Rows differ in {key}: " in said for key in study.differs)
    record = RECORDS / f"{place.stem}.json"
    if record.exists():
        outcome = read_record(record)
        recorded = {cell.row for cell in outcome.cells}
        runs = [run for run in runs if run.cell.row in recorded]
        assert outcome.fairness == fairness(study, runs)


def test_a_reason_too_few_refuses_a_study(monkeypatch):
    """One row of the neighbours weighs by examples; without the reason the study is refused."""
    monkeypatch.chdir(ROOT)
    study = Sweep.read(ROOT / "benchmarks" / "studies" / "neighbours.toml")
    runs = plan(study, ROOT / "runs", list(study.methods), [0])
    said = fairness(study, runs)
    assert "weighting: examples with FedAvg, by examples; uniform with the others" in said
    assert "steps: 2 a batch of 32 with Ditto; 5 a batch of 32 with pFedMe" in said
    assert "epochs: 6 × 2 (and 5 before a score) with FedBABU; 6 × 2 with the others" in said
    assert said.endswith("Equal: nothing.")
    assert study.differs
    for key in ("weighting", "steps", "epochs", "tuning"):
        less = {other: why for other, why in study.differs.items() if other != key}
        with pytest.raises(ConfigError, match=f"rows differ in {key}"):
            fairness(study.model_copy(update={"differs": less}), runs)
    assert fairness(study.model_copy(update={"differs": None}), runs) == ""


def test_rows_of_other_lengths_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = (ROOT / "benchmarks" / "studies" / "neighbours.toml").read_text("utf-8")
    place = tmp_path / "long.toml"
    place.write_text(text.replace('"scaffold"', '"scaffold schedule.rounds=7"'), "utf-8")
    study = Sweep.read(place)
    assert study.differs
    less = {key: why for key, why in study.differs.items() if key != "epochs"}
    study = study.model_copy(update={"differs": less})
    runs = plan(study, tmp_path, list(study.methods), [0])
    with pytest.raises(
        ConfigError, match=r"rows differ in epochs: 7 × 2 with SCAFFOLD; .*; 6 × 2 with the others"
    ):
        fairness(study, runs)


def test_epochs_are_those_of_each_phase(monkeypatch):
    """GLDP's two phases have six epochs, FedAvg five: without the reason that is refused."""
    monkeypatch.chdir(ROOT)
    study = Sweep.read(ROOT / "benchmarks" / "studies" / "privacy.toml")
    runs = plan(study, ROOT / "runs", list(study.methods), [0])
    assert (
        "in epochs: 6 × (3 of base, 3 of head) with GLDP; 6 × 5 with the others (GLDP has"
        in fairness(study, runs)
    )
    assert study.differs
    less = {key: why for key, why in study.differs.items() if key != "epochs"}
    with pytest.raises(
        ConfigError, match=r"rows differ in epochs: 6 × \(3 of base, 3 of head\) with GLDP"
    ):
        fairness(study.model_copy(update={"differs": less}), runs)


def test_phases_that_need_a_client_have_the_epochs_of_the_config(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from fedtide import FedAvg\n\n\nclass Mine(FedAvg):\n"
        "    def phases(self, ctx):\n        return super().phases(ctx) * ctx.stream.tasks\n"
    )
    text = (ROOT / "benchmarks" / "studies" / "neighbours.toml").read_text("utf-8")
    place = tmp_path / "mine.toml"
    place.write_text(text.replace('"scaffold"', f'"{mine}:Mine"'), "utf-8")
    study = Sweep.read(place)
    runs = plan(study, tmp_path, list(study.methods), [0])
    said = fairness(study, runs)
    assert "epochs: 6 × 2 (and 5 before a score) with FedBABU; 6 × 2 with the others" in said
