"""Sweeps: what a file says, the runs that come of it, and what tables say of them."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
import tomllib
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from typer.testing import CliRunner

import fedsrv.cli
from fedmodels.config.presets import preset_file
from fedmodels.errors import ConfigError, Interrupted, RunFailed
from fedmodels.facts.config_file import parse_experiment, read_experiment
from fedmodels.numerics.metric_tables import metric
from fedmodels.own.own_code import with_place
from fedplugins.studies import execution
from fedplugins.studies.columns import check_names, faults
from fedplugins.studies.outcome import Outcome, read_numbers
from fedplugins.studies.plan import Cell, Sweep, config_for, plan
from fedplugins.studies.sweeping import run_sweep
from fedsrv.report.frame import RunNumbers, difference, group_runs
from fedsrv.state.run_record import read_run
from tests.conftest import TABLES
from tests.growth.counting import MOST, exponent, operations

ROOT = Path(__file__).parents[3]
STUDIES = sorted((ROOT / "benchmarks" / "studies").glob("*.toml"))
FILE = {
    "preset": "preset.toml",
    "columns": {"A": "metrics.a_loc", "MB up": "bytes.up", "trained": "clients.trained"},
    "methods": {"FedAvg": "fedavg", "FedProx, 0.5": "fedprox mu=0.5", "Local": "local"},
    "seeds": [0, 1, 2],
}


@pytest.fixture
def sweep(tmp_path: Path) -> Any:
    """Return a maker of sweeps beside a preset."""
    (tmp_path / "preset.toml").write_text(tomli_w.dumps(TABLES))

    def make(**more: Any) -> Sweep:
        (tmp_path / "sweep.toml").write_text(tomli_w.dumps({**FILE, **more}))
        return Sweep.read(tmp_path / "sweep.toml")

    return make


class Launches:
    """Takes the place of processes: writes what a run would, or fails."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.dealt: list[str] = []
        self.broken: set[str] = set()

    def __call__(self, command: list[str], log: Path, *_: Any) -> int:
        if command[2:4] == ["fedcli", "partition"]:
            assert not self.commands, "data are dealt out before anything is run"
            self.dealt.append(" ".join(command[command.index("--set") + 1 : -2]))
            return 1 if "data" in self.broken else 0
        assert command[:4] == [sys.executable, "-m", "fedsrv", "launch"]
        self.commands.append(command)
        out = Path(command[command.index("--out") + 1])
        out.mkdir(exist_ok=True)
        (out / "logs").mkdir(exist_ok=True)
        if out.name in self.broken:
            log.write_text("error: its disk is full\n")
            return 1
        config = tomllib.loads(Path(command[4]).read_text())
        better = {"fedprox": 0.05, "local": -0.1}.get(config["method"]["name"], 0.0)
        seed = int(command[command.index("--set") + 1].removeprefix("seed="))
        finished_run(out, [0.5 + better + 0.01 * seed * (1 + better)], 3 + seed)
        return 0


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    found = Launches()
    monkeypatch.setattr(execution, "_run", found)
    monkeypatch.setattr(
        "fedplugins.studies.sweeping.write_html",
        lambda runs, path, further, private: path.write_text(""),
    )
    return found


def finished_run(run: Path, accuracies: list[float], trained: int) -> None:
    run.mkdir(exist_ok=True)
    summary = {"metrics": {"a_loc": accuracies[-1]}, "bytes": {"up": 2_500_000}, "state": "ab"}
    (run / "summary.json").write_text(json.dumps(summary))
    clients = {"0": {"trained": trained, "views": {}}, "1": {"trained": trained}, "evaluator": {}}
    lines = [json.dumps({"metrics": {"a_loc": a}, "clients": clients}) for a in accuracies]
    (run / "rounds.jsonl").write_text("\n".join(lines) + "\n")


# --- the plan -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_row_of_a_study_is_a_valid_experiment(path, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    study = Sweep.read(path)
    runs = plan(study, tmp_path, list(study.methods), [0])
    assert list(dict.fromkeys(run.cell.row for run in runs)) == list(study.methods)
    for run in runs:
        found = parse_experiment(run.config, run.cell.row)
        assert found.method.name == with_place(study.methods[run.cell.row].split()[0])


def test_there_are_studies():
    assert {"gldp", "fedmlp", "pfedgrp", "continual", "continual-circulating"} <= {
        path.stem for path in STUDIES
    }


def test_switches_go_to_the_table_they_name():
    preset = {"method": {"name": "gldp", "t": 3}, "net": {"name": "mlp"}, "seed": 0}
    own = tomllib.loads(config_for(preset, "gldp s=2 reading.bn=local", ["schedule.rounds=4"]))
    assert own["method"] == {"name": "gldp", "t": 3, "s": 2, "reading": {"bn": "local"}}
    assert own["schedule"] == {"rounds": 4}
    other = tomllib.loads(config_for(preset, 'fedprox mu=0.5 net.name="cnn5"', []))
    assert other["method"] == {"name": "fedprox", "mu": 0.5}
    assert other["net"] == {"name": "cnn5"}
    assert preset["net"] == {"name": "mlp"}


def test_every_method_runs_with_every_seed_in_every_setting(sweep, tmp_path):
    settings = {"few": ["schedule.rounds=1"], "many": ["schedule.rounds=9"]}
    found = plan(sweep(settings=settings), tmp_path, ["FedAvg", "FedProx, 0.5"], [0, 4])
    assert len(found) == 8
    assert found[0].cell == Cell("few", "FedAvg")
    assert [run.directory.name for run in found[2:5]] == [
        "few-fedavg-seed4", "few-fedprox-0-5-seed4", "many-fedavg-seed0"
    ]  # fmt: skip
    assert found[3].data == tmp_path / "few-data-seed4"
    assert tomllib.loads(found[-1].config)["schedule"]["rounds"] == 9
    plain = plan(sweep(reference=True), tmp_path, ["FedAvg", "Local"], [0])
    assert [run.directory.name for run in plain] == ["fedavg-seed0", "local-seed0"]
    assert plain[0].data == tmp_path / "data-seed0"
    referred = tomllib.loads(plain[1].config)["evaluate"]["reference"]
    assert referred == str(tmp_path / "fedavg-seed0")
    assert "reference" not in tomllib.loads(plain[0].config).get("evaluate", {})


def test_a_plan_costs_by_its_runs(sweep, tmp_path):
    found = sweep()

    def planned(seeds: int) -> int:
        return operations(lambda: plan(found, tmp_path, list(found.methods), range(seeds)))

    planned(1)  # what is imported then
    assert exponent({n: planned(n) for n in (2, 6, 18)}) < MOST


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (
            {"method": {}},
            r"unknown key 'method'; known: against, .* settings\. Did you mean 'methods'\?",
        ),
        ({"methods": {}}, "methods: "),
        ({"seeds": [-1]}, r"seeds\.0: "),
        ({"seeds": []}, "seeds: "),
        ({"seeds": 3}, "seeds: Input should be a list"),
        ({"methods": {"x": " "}}, "methods.x names no method; .* such as 'fedprox mu=0.1'"),
        ({"methods": {"x": "mu=0.1"}}, "methods.x names no method; .*'fedprox mu=0.1'"),
        ({"methods": {"x": "fedprox mu = 1"}}, "methods.x: 'mu' is no switch; .*'fedprox mu=0.1'"),
        ({"methods": {"x": 3}}, r"methods\.x: .*valid string; .*'fedprox mu=0.1'"),
        ({"methods": {"a|b": "fedavg"}}, r"\[methods\]: 'a\|b' is no name for a table: .*without"),
        ({"columns": {"a\nb": "metrics.a_loc"}}, r"\[columns\]: 'a\\nb' is no name for a table"),
        ({"settings": {"\x1b[2J": []}}, r"\[settings\]: '\\x1b\[2J' is no name for a table"),
        ({"methods": {" ": "fedavg"}}, r"\[methods\]: ' ' is no name for a table"),
        ({"against": "FedAvgg"}, "against = 'FedAvgg' is not one of its methods"),
        ({"preset": "no.toml"}, r"preset = 'no\.toml' is no file"),
        ({"preset": "studies/quickstart"}, r"preset = 'studies/quickstart' is no file, here or in"),
        ({"preset": "quickstrat"}, "Did you mean 'quickstart'"),
    ],
)
def test_mistakes_in_a_file(sweep, more, line):
    with pytest.raises(ConfigError, match=line):
        sweep(**more)


@pytest.mark.parametrize(("text", "key"), [("", "preset"), ('preset = "quickstart"', "methods")])
def test_what_a_sweep_needs(tmp_path, text, key):
    path = tmp_path / "sweep.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"key '{key}' is missing; a sweep needs preset, a con"):
        Sweep.read(path)


def test_a_run_and_a_sweep_that_are_mixed_up_are_told_apart(tmp_path):
    path = tmp_path / "one.toml"
    path.write_text(preset_file("quickstart").read_text())
    with pytest.raises(ConfigError, match=r"config of one run, not a sweep: use fedsrv launch$"):
        Sweep.read(path)
    path.write_text('preset = "quickstart"\n[methods]\nFedAvg = "fedavg"\n')
    with pytest.raises(
        ConfigError, match="is a sweep, not the config of one run: use fedsrv sweep"
    ):
        read_experiment(path)


def test_a_sweep_that_is_no_file_gets_the_line_of_other_commands(tmp_path):
    for path, why in ((tmp_path / "no.toml", "No such file or directory"), (tmp_path, "Is a dir")):
        with pytest.raises(ConfigError) as caught:
            Sweep.read(path)
        assert str(caught.value).startswith(f"cannot read the sweep {path}: {why}")


def test_mistakes_in_a_plan(sweep, tmp_path):
    with pytest.raises(ConfigError, match=r"no row of the sweep. Did you mean 'FedAvg'\?"):
        plan(sweep(), tmp_path, ["FedAv"], [0])
    with pytest.raises(ConfigError, match=r"no row of the sweep. Its rows are: FedAvg"):
        plan(sweep(), tmp_path, ["nope"], [0])
    with pytest.raises(ConfigError, match="unknown key 'mue'"):
        plan(sweep(methods={"x": "fedprox mue=1"}), tmp_path, ["x"], [0])
    with pytest.raises(ConfigError, match="would write data-seed0: name them apart"):
        plan(sweep(methods={"Data": "fedavg"}), tmp_path, ["Data"], [0])
    with pytest.raises(ConfigError, match="seed 4 is named 2 times"):
        plan(sweep(), tmp_path, ["FedAvg"], [4, 4])
    with pytest.raises(ConfigError, match="row 'FedAvg' is named 2 times"):
        plan(sweep(), tmp_path, ["FedAvg", "FedAvg"], [0])
    line = r"preset .*sweep\.toml is a sweep, not the config of one run"
    with pytest.raises(ConfigError, match=line):
        plan(sweep(preset="sweep.toml"), tmp_path, ["FedAvg"], [0])
    assert sweep(preset="quickstart").preset.name == "quickstart.toml"
    waits = ["schedule.open=true", "schedule.order=tasks_outer"]
    with pytest.raises(ConfigError, match=r"FedAvg: a run of a sweep has to end by itself, and"):
        plan(sweep(set=waits), tmp_path, ["FedAvg"], [0])
    assert plan(sweep(set=[*waits, "trigger.close_after_s=0"]), tmp_path, ["FedAvg"], [0])


# --- the runs -------------------------------------------------------------------------------------


def test_a_sweep_from_beginning_to_end(sweep, tmp_path, launches):
    out, said = tmp_path / "out", list[str]()
    launches.broken = {"local-seed1"}
    with pytest.raises(RunFailed, match="1 of 9 runs failed and are left out: local-seed1"):
        run_sweep(sweep(), out, jobs=2, say=said.append)
    assert any(s.startswith("local-seed1 failed: error: its disk is full (see ") for s in said)
    assert sum(" failed" in s for s in said) == 1
    names = [Path(command[4]).stem for command in launches.commands]
    assert len(names) == 9
    assert sorted(launches.dealt) == [f"seed={n}" for n in range(3)]
    for command in launches.commands:
        seed = command[command.index("--set") + 1].removeprefix("seed=")
        assert command[command.index("--data") + 1] == str(out / f"data-seed{seed}")
    assert sorted(p.name for p in out.glob("data-*") if p.is_dir()) == [
        f"data-seed{n}" for n in range(3)
    ]
    assert not list(out.glob(".data-*"))
    table = (out / "table.md").read_text().splitlines()
    assert table[:5] == [
        "| | A | MB up | trained |",
        "|---|---|---|---|",
        "| FedAvg | 51.00 ± 1.00 | 2.5 | 4.0 |",
        "| FedProx, 0.5 | **56.05 ± 1.05** | 2.5 | 4.0 |",
        "| Local (2 of 3 seeds) | 40.90 ± 1.27 | 2.5 | 4.0 |",
    ]
    # differences of 5, 5.05 and 5.1: s = 0.05, and t of two degrees of freedom is 4.303
    assert (
        "| FedProx, 0.5 | +5.05 [+4.93, +5.17] * | +0.0 [+0.0, +0.0] | +0.0 [+0.0, +0.0] |" in table
    )
    with (out / "runs.csv").open() as file:
        assert next(csv.DictReader(file)) == {
            "setting": "", "row": "FedAvg", "seed": "0", "column": "A",
            "path": "metrics.a_loc", "value": "50.0",
        }  # fmt: skip
    assert (out / "report.html").exists()
    launches.broken = set()
    launches.commands.clear()
    run_sweep(sweep(), out, say=said.append)
    (again,) = launches.commands
    assert "--resume" in again
    complete = (out / "table.md").read_text()
    assert "| Local | 40.90 ± 0.90 |" in complete
    assert "| FedProx, 0.5 | **56.05 ± 1.05** |" in complete
    assert len(launches.dealt) == 3, "data that are there are not dealt out again"


def test_a_finished_run_of_another_config_is_never_tabulated(sweep, tmp_path, launches):
    out = tmp_path / "out"
    run_sweep(sweep(), out, only=["FedAvg"], say=lambda line: None)
    launches.commands.clear()
    with pytest.raises(ConfigError, match=r"fedavg-seed0 was run with another config; .*rounds"):
        run_sweep(sweep(), out, sets=["schedule.rounds=7"])
    assert not launches.commands
    assert "| FedAvg | 51.00 ± 1.00 |" in (out / "table.md").read_text()


@pytest.mark.parametrize("columns", [{"A": "metrics.a_loc"}, {}])
@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("summary.json", '{"metrics": '),
        ("rounds.jsonl", "\udcff\n{"),
        ("summary.json", "[]"),
        ("../fedprox-0-5-seed0.toml", "seed = "),
        ("../fedprox-0-5-seed0.toml", "\udcff"),
    ],
)
def test_a_damaged_run_is_left_out_alone(sweep, tmp_path, launches, file, text, columns):
    out, said = tmp_path / "out", list[str]()
    run_sweep(sweep(columns=columns), out, seeds=[0], say=said.append)
    damaged = out / "fedprox-0-5-seed0" / file
    damaged.write_text(text, errors="surrogateescape")
    (out / "report.html").unlink()
    said.clear()
    with pytest.raises(RunFailed, match="1 of 3 runs failed and are left out: fedprox-0-5-seed0"):
        run_sweep(sweep(columns=columns), out, seeds=[0], say=said.append)
    assert said[0].startswith("fedprox-0-5-seed0 is left out: ")
    assert said[0].endswith("; remove its directory to run it again")
    assert (out / "report.html").exists()
    if columns:
        table = (out / "table.md").read_text()
        assert "| FedProx, 0.5 (0 of 1 seeds) | – |" in table
        assert "| Local | 40.00 |" in table


def test_a_run_that_cannot_be_started_is_left_out_alone(sweep, tmp_path, launches):
    out, said = tmp_path / "out", list[str]()
    (out / "local-seed0.toml").mkdir(parents=True)
    with pytest.raises(RunFailed, match="1 of 3 runs failed and are left out: local-seed0"):
        run_sweep(sweep(), out, seeds=[0], say=said.append)
    assert any(line.startswith("local-seed0 could not be started: ") for line in said)
    assert "| FedAvg | 50.00 |" in (out / "table.md").read_text()


@pytest.mark.parametrize("left", [(), ("logs/.lock", "logs/launch.toml")])
def test_a_run_that_was_killed_as_it_began_is_resumed(sweep, tmp_path, launches, left):
    """A launch makes its logs first, and refuses a directory with files unless it resumes."""
    out = tmp_path / "out"
    (out / "local-seed0" / "logs").mkdir(parents=True)
    for name in left:
        (out / "local-seed0" / name).touch()
    run_sweep(sweep(), out, only=["Local"], seeds=[0], say=print)
    assert all("--resume" in command for command in launches.commands)


def test_a_config_is_never_half_written(sweep, tmp_path, launches, monkeypatch):
    """Another sweep with the same --out writes it, too, while a run of this one reads it."""
    out, names = tmp_path / "out", ("data-seed0.toml", "local-seed0.toml")
    run_sweep(sweep(), out, only=["Local"], seeds=[0], say=print)
    whole = {name: (out / name).read_text() for name in names}
    for place in (out / "data-seed0", out / "local-seed0"):
        shutil.rmtree(place)
    launches.commands.clear()
    found = list[dict[str, str]]()

    def writes(path: Path, text: str, *_: object, **__: object) -> int:
        assert path.name not in names, "it is replaced"
        found.append({name: (out / name).read_text() for name in names})
        return path.write_bytes(text.encode())

    monkeypatch.setattr(Path, "write_text", writes)
    run_sweep(sweep(), out, only=["Local"], seeds=[0], say=print)
    assert found
    assert all(each == whole for each in found)


def test_a_partition_that_cannot_be_shared_stops_nothing(sweep, tmp_path, launches, monkeypatch):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(execution, "mkdtemp", full)
    out, said = tmp_path / "out", list[str]()
    run_sweep(sweep(), out, seeds=[0], say=said.append)
    (line,) = {line for line in said if "cannot be written" in line}
    assert line.startswith(f"{out / 'data-seed0'} cannot be written, so every run makes")
    assert "| Local | 40.00 |" in (out / "table.md").read_text()


def test_data_that_cannot_be_dealt_out_are_left_to_the_runs(sweep, tmp_path, launches):
    """Each of them says what is wrong, or is right all the same."""
    launches.broken = {"data"}
    out = tmp_path / "out"
    run_sweep(sweep(), out, seeds=[0], say=lambda line: None)
    assert launches.dealt == ["seed=0"]
    assert not any("--data" in command for command in launches.commands)
    assert not list(out.glob(".data*"))


def test_what_others_refer_to_is_run_before_them(sweep, tmp_path, launches):
    run_sweep(sweep(reference=True), tmp_path / "out", jobs=9, say=lambda line: None)
    names = [Path(command[4]).stem for command in launches.commands]
    assert sorted(names[:3]) == [f"fedavg-seed{n}" for n in range(3)]
    assert len(names) == 9


def test_data_that_are_given_are_not_dealt_out(sweep, tmp_path, launches):
    run_sweep(sweep(launch=["--data", "mine"]), tmp_path / "out", seeds=[0], say=print)
    assert not launches.dealt
    assert all(command.count("--data") == 1 for command in launches.commands)


def test_a_row_that_pools_the_data_has_its_own(sweep, tmp_path, launches):
    made = sweep(methods={"pooled": "centralized", "FedAvg": "fedavg"})
    run_sweep(made, tmp_path / "alone", only=["pooled"], seeds=[0], say=print)
    assert not launches.dealt
    launches.commands.clear()
    run_sweep(made, tmp_path / "out", seeds=[0, 1], say=print)
    given = {Path(command[4]).stem: "--data" in command for command in launches.commands}
    assert given == {
        "pooled-seed0": False, "pooled-seed1": False, "fedavg-seed0": True, "fedavg-seed1": True,
    }  # fmt: skip


def test_a_sweep_without_columns_has_tables_all_the_same(sweep, tmp_path, launches):
    """Where the most frequent class is 57 %, nobody is praised for 56.05."""
    out = tmp_path / "out"
    made = sweep(columns={}, methods={"FedAvg": "fedavg", "Half head": "fedprox mu=0.5"})
    run_sweep(made, out, say=lambda line: None)
    text = (out / "table.md").read_text()
    assert text.splitlines()[0].startswith(f"| | {metric('a_loc').label} |")
    assert "| FedAvg | 51.00 ± 1.00 |" in text
    assert "| Half head | **56.05 ± 1.05** |" in text
    assert "over 3 seeds (0, 1, 2), after 1 round. Bold" in text
    tex = (out / "table.tex").read_text()
    assert r"Half head & \textbf{56.05 $\pm$ 1.05}" in tex
    assert r"\caption{Mean $\pm$ sample standard deviation over 3 seeds (0, 1, 2)" in tex
    with (out / "table.csv").open() as file:
        found = next(csv.DictReader(file))
    assert (found["row"], found["seeds"], found["mean"]) == ("FedAvg", "3", "51.0")
    records = [replace(read_run(out / "half-head-seed0"), called="Half head")]
    assert [group.label for group in group_runs(records)] == ["Half head"]
    for run in out.glob("*-seed?/"):
        (run / "data.json").write_text('{"guesses": {"chance": 0.1, "own": 0.57, "all": 0.2}}')
    run_sweep(made, out, say=lambda line: None)
    assert "**" not in (out / "table.md").read_text()


@pytest.mark.parametrize("on", ["slurm", ""])
def test_only_a_cluster_gets_absolute_paths(sweep, tmp_path, launches, monkeypatch, on):
    """Its nodes run in directories of their own; on this machine paths stay as they were given."""
    monkeypatch.chdir(tmp_path)
    places: list[Path] = []

    def place_of(on: str, jobs: int, resources: Any, out: Path, say: Any) -> Any:
        places.append(out)
        return nullcontext(lambda call, runs: ((run, call(run, say)) for run in runs))

    monkeypatch.setattr("fedplugins.studies.sweeping.place_of", place_of)
    run_sweep(sweep(), Path("out"), seeds=[0], on=on, say=lambda line: None)
    outs = {Path(c[c.index("--out") + 1]).parent for c in launches.commands}
    assert outs == {*places} == {tmp_path / "out" if on else Path("out")}


@pytest.mark.parametrize("file", ["table.md", "picture.svg", "report.html"])
def test_a_disk_that_is_full_at_the_tables_costs_no_run(sweep, tmp_path, launches, file):
    out, said = tmp_path / "out", list[str]()
    out.mkdir()
    (out / file).mkdir()  # no file can take its place
    wanted = sweep(curves={"A": "a_loc"})
    with pytest.raises(RunFailed, match=r"the tables in .*out cannot be written: .*; the runs are"):
        run_sweep(wanted, out, seeds=[0], say=said.append)
    assert any("| FedAvg | 50.00 |" in line for line in said)  # told before it is written
    assert not list(out.glob(".*.tmp"))
    (out / file).rmdir()
    launched = len(launches.commands)
    run_sweep(wanted, out, seeds=[0], say=said.append)
    assert len(launches.commands) == launched
    assert (out / file).is_file()


def test_a_column_that_no_run_has_is_named(sweep, tmp_path, launches):
    def run(path: str) -> None:
        made = sweep(columns={"A": "metrics.a_loc", "B": path})
        run_sweep(made, tmp_path / "out", only=["Local"], seeds=[0], say=lambda line: None)

    run("metrics.a_glo")  # known; these runs have none
    wrong = ("metrics.a_lco", "metrics.a_loc"), ("byte.up", "bytes.up"), ("state.up", "bytes.up")
    for path, near in wrong:
        with pytest.raises(ConfigError, match=rf"column 'B', '{path}'. Did you mean '{near}'\?"):
            run(path)
        assert "| Local | 40.00 | – |" in (tmp_path / "out" / "table.md").read_text()


def test_a_curve_that_no_run_has_is_named(sweep, tmp_path, launches):
    def run(**tables: Any) -> None:
        made = sweep(**tables)
        run_sweep(made, tmp_path / "out", only=["Local"], seeds=[0], say=lambda line: None)

    run(curves={"acc": "a_glo"})  # known; these runs have none
    with pytest.raises(ConfigError, match=r"curve 'acc', 'a_lco'. Did you mean 'a_loc'\?"):
        run(curves={"acc": "a_lco"})
    with pytest.raises(ConfigError, match=r"curves are shown beside columns: give \[columns\]"):
        run(curves={"acc": "a_loc"}, columns={})


def test_what_one_run_has_is_not_missed(sweep, tmp_path):
    made = sweep(columns={"mine": "metrics.velocity"}, curves={"mine": "velocity"})
    runs = [
        RunNumbers(Cell("", "A"), 0, {"metrics.velocity": 1.0}, {"velocity": [1.0]}, {}),
        RunNumbers(Cell("", "B"), 0, {"metrics.velocity": None}, {"velocity": []}, {}),
    ]
    finished_run(tmp_path / "run", [0.5], 3)
    assert not list(faults(made, runs, tmp_path / "run"))
    assert [str(fault).split()[4] for fault in faults(made, runs[1:], tmp_path / "run")] == [
        "column",
        "curve",
    ]


def test_what_no_run_can_have_is_told_before_any_run(sweep, tmp_path, launches):
    for tables in (
        {"columns": {"A": "metrics.a_lco"}},
        {"columns": {"A": "a_loc"}},
        {"columns": {"A": "bytes.upp"}},
        {"columns": {"A": "metrics.a_loc"}, "curves": {"A": "metrics.a_loc"}},
    ):
        with pytest.raises(ConfigError, match=r"no run has the .* 'A', '.*'\. Did you mean '"):
            run_sweep(sweep(**tables), tmp_path / "out", say=lambda line: None)
    assert not launches.commands
    known = {"A": "metrics.a_loc_minority"}
    check_names(sweep(columns=known, curves={"A": "a_loc_received_balanced_minority"}))


def test_what_no_row_of_ones_own_has_is_told_when_each_has_ended_once(
    sweep, tmp_path, launches, monkeypatch
):
    monkeypatch.setattr("fedplugins.studies.columns._is_from_here", lambda row: False)
    said: list[str] = []
    in_turn = nullcontext(lambda call, runs: ((run, call(run, said.append)) for run in runs))
    monkeypatch.setattr("fedplugins.studies.sweeping.place_of", lambda *_: in_turn)
    columns = {"A": "metrics.a_loc", "mine": "metrics.veolcity", "c": "clients.traind"}
    made = sweep(columns=columns, curves={"mine": "veolcity"})
    with pytest.raises(ConfigError, match=r"column 'mine', 'metrics\.veolcity'"):
        run_sweep(made, tmp_path / "out", say=said.append)
    notes = [at for at, line in enumerate(said) if line.startswith("note: so far no run has the ")]
    before = [line for line in said[: notes[0]] if line.startswith("$ fedsrv launch")]
    assert len(notes) == 3
    assert len(before) == 3, "of nine"
    assert "'clients.traind'. Did you mean 'clients.trained'? Finished runs are" in said[notes[1]]


@pytest.mark.parametrize(
    "wrong",
    [
        {"set": ["seed=5"]},
        {"settings": {"a": ["seed=5"], "b": ["seed=6"]}},
        {"set": ["method.name=local"]},
        {"settings": {"a": ['method={name="local"}']}},
        {"launch": ["--hosts=1", "--set=seed=5"]},
        {"launch": ["--set", "training.lr=0.1"]},
        {"launch": ["--out", "elsewhere"]},
    ],
    ids=str,
)
def test_no_setting_makes_rows_or_seeds_alike(sweep, tmp_path, wrong):
    made = sweep(**wrong)
    with pytest.raises(ConfigError, match=r"its seeds, or|its rows, in methods|goes into set"):
        plan(made, tmp_path, list(made.methods), made.seeds)


def test_more_settings_keep_to_the_same(sweep, tmp_path):
    with pytest.raises(ConfigError, match="its seeds, or --seed"):
        plan(sweep(), tmp_path, ["Local"], [0], ["seed=3"])


def test_a_curve_goes_by_rounds(sweep, tmp_path):
    """Two interactions a round, of which the last one counts; the first round is not scored."""
    (run, *_) = plan(sweep(), tmp_path, ["Local"], [0])
    finished_run(run.directory, [0.5], 3)
    lines = [
        {"round": at // 2, "metrics": {"a_loc": value} if value else {}, "clients": {}}
        for at, value in enumerate([None, None, 0.1, 0.2, None, 0.4])
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run.directory / "rounds.jsonl").write_text(text)
    assert read_numbers(run, [], ["a_loc", "iaa"]).curves == {"a_loc": [None, 0.2, 0.4], "iaa": []}


def test_an_out_that_is_a_file_gets_one_line(sweep, tmp_path, launches):
    with pytest.raises(ConfigError, match=r"--out .*sweep\.toml cannot be used: File exists"):
        run_sweep(sweep(), tmp_path / "sweep.toml")


def test_what_failed_is_said_without_its_box(tmp_path):
    log = tmp_path / "log"
    log.write_text("╭─ Error ─╮\n│ No such option: --hots │\n╰─────────╯\n\n")
    assert execution._last_line(log) == "No such option: --hots"


def test_ctrl_c_ends_a_sweep_with_one_line(sweep, tmp_path, launches, monkeypatch):
    """The run under way ended with the status of Ctrl-C, which the sweep's process got too."""

    def interrupted(command: list[str], *_: Any) -> int:
        launches.commands.append(command)
        return 130

    def say(line: str) -> None:
        said.append(line)
        if line.endswith("was stopped"):
            raise KeyboardInterrupt

    said = list[str]()
    monkeypatch.setattr(execution, "_run", interrupted)
    monkeypatch.setattr(execution.signal, "signal", lambda *_: None)
    with pytest.raises(Interrupted, match="stopped; the same command continues the sweep"):
        run_sweep(sweep(reference=True), tmp_path / "out", seeds=[0], say=say)
    assert said[2:] == ["fedavg-seed0 was stopped"]
    assert len(launches.commands) == 2, "data dealt out, and one run"


def test_the_command(sweep, tmp_path, launches):
    sweep()
    words = ["sweep", str(tmp_path / "sweep.toml"), "--out", str(tmp_path / "out")]
    found = CliRunner().invoke(fedsrv.cli.app, [*words, "--seed", "7", "--only", "FedAvg"])
    assert found.exit_code == 0, found.output
    assert "| FedAvg | 57.00 | 2.5 | 10.0 |" in found.output
    assert len(launches.commands) == 1


def test_compare_of_the_makefile_is_a_sweep():
    told = subprocess.run(
        ["make", "-n", "--no-print-directory", "compare", "STUDY=gldp", "SEEDS=0 1", "JOBS=2"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    words = " ".join(told.stdout.replace("\\\n", " ").split())
    assert words.endswith(
        "fedsrv sweep benchmarks/studies/gldp.toml --out runs/gldp --jobs 2 --seed 0 --seed 1"
    )


# --- the tables -----------------------------------------------------------------------------------


def test_differences_are_of_the_same_seeds():
    found = difference({0: 3.0, 1: 5.0, 2: None, 3: 9.0}, {0: 1.0, 1: 1.0, 2: 1.0})
    assert found
    assert (found.mean, found.pairs) == (3.0, 2)
    # s = sqrt(2), and t of one degree of freedom is 12.706: half a width of 12.706
    assert found.low == pytest.approx(3 - 12.7062, abs=1e-4)
    assert not found.is_clear
    # the error is 1, so t = 3; of one degree of freedom p = 1 - 2 / pi * atan(3)
    assert found.p == pytest.approx(0.20483, abs=1e-5)
    assert difference({0: 1.0}, {1: 1.0}) is None


def test_tables_of_no_run_name_no_seeds(sweep, tmp_path, launches):
    """The caption had the mean over "0 seeds (), after  round"."""
    launches.broken |= {"fedavg-seed0", "local-seed0"}
    with pytest.raises(RunFailed, match="2 of 2 runs failed"):
        run_sweep(
            sweep(), tmp_path / "out", only=["FedAvg", "Local"], seeds=[0], say=lambda _: None
        )
    assert "0 seeds" not in (tmp_path / "out" / "table.md").read_text()


def test_curves_settings_and_latex(sweep, tmp_path, launches):
    out = tmp_path / "out"
    settings = {"a_b": [], "50 %": ["schedule.rounds=1"]}
    made = sweep(settings=settings, curves={"acc": "a_loc"}, against="Local")
    run_sweep(made, out, only=["FedAvg", "Local"], seeds=[0], say=lambda line: None)
    text = (out / "table.md").read_text()
    assert "| acc | 1 | mean |\n|---|---|---|\n| a_b: FedAvg | 50 | 50.0 |\n" in text
    assert "Differences to Local with the same seed; one seed has no interval." in text
    assert "±" not in text
    assert "interval by" not in text
    assert "| 50 %: FedAvg | +10.00 | +0.0 | +0.0 |" in text
    assert r"50 \%: FedAvg & \textbf{50.00} & 2.5 & 3.0 \\" in (out / "table.tex").read_text()
    empty = Outcome([], [Cell("", "x_1 ±")], {"n": "bytes.up"}, "", 0).table()
    assert empty.latex().splitlines()[3] == r"x\_1 $\pm$ & -- \\"


@pytest.mark.parametrize("broken", [False, True])
def test_a_sweep_as_objects_and_quietly(sweep, launches, tmp_path, broken):
    """A failure is told quietly, too; the tables are those of record.json."""
    sweep()
    launches.broken = {"local-seed0"} if broken else set()
    words = ["sweep", str(tmp_path / "sweep.toml"), "--seed", "0", "--out"]
    found = CliRunner().invoke(fedsrv.cli.app, [*words, str(tmp_path / "one"), "--json"])
    objects = [json.loads(line) for line in found.stdout.splitlines()]
    assert all({"kind", "detail", "unix_time"} <= one.keys() for one in objects)
    tables = [one["detail"] for one in objects if one["kind"] == "tables"]
    assert tables == [json.loads((tmp_path / "one" / "record.json").read_text())]
    lines = [one["detail"] for one in objects if one["kind"] == "sweep"]
    grave = [one["line"] for one in lines if one["level"] == "warning"]
    launches.commands.clear()
    quiet = CliRunner().invoke(fedsrv.cli.app, [*words, str(tmp_path / "two"), "--quiet"])
    assert bool(quiet.exit_code) == bool(found.exit_code) == broken
    assert (tmp_path / "two" / "record.json").exists()
    assert quiet.stdout.count("its disk is full") == sum("its disk is full" in o for o in grave)
    assert len(quiet.stdout.splitlines()) == len(grave) < len(lines)
    assert any("its disk is full" in line for line in grave) == broken
