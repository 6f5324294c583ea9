r"""Run one preset with several methods and seeds, and tabulate the runs side by side.

    python -m benchmarks.study benchmarks/studies/gldp.toml --out runs/gldp --jobs 2

A study is a TOML file: the preset, what is set in all its runs, the seeds, the columns of its
table, and the methods by the name of their row. Every method is run by ``fedsrv launch`` on the
preset with its ``[method]`` table replaced; the preset's own method keeps its hyper-parameters. A
switch without a dot belongs to the method, one with a dot to the table it names
(``net.alp=false``). A column is a path into ``summary.json``, or ``clients.`` and a field of the
last round, averaged over clients; a curve is a table of a metric after each round. Runs of a seed
share one partition, written by the first of them; only pooled data have their own. A run that is
finished is not run again, one that was interrupted is resumed, one that fails is left out of the
table. ``OUT/report.html`` and ``OUT/table.md`` are written in the end.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import tomli_w

from fedmodels.numerics.metric_names import find, metric
from fedmodels.resolution import parse_experiment

FEDSRV = str(Path(sys.executable).with_name("fedsrv"))
ROOT = Path(__file__).resolve().parents[1]
UNITS = {
    "bytes": (1e-6, "{:.1f}"),
    "compute": (1e-6, "{:.0f}"),
    "seconds": (1, "{:.0f}"),
    "metrics": (100, "{:.2f}"),
    "clients": (1, "{:.2f}"),
}
"""Factor and format of a column, by the table it is read from."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """What a study's file says."""

    preset: Path
    methods: Mapping[str, str]
    """Name of a row -> a method's name and its switches."""
    columns: Mapping[str, str]
    """Heading -> where in ``summary.json``, e.g. ``metrics.a_glo``; metrics are percentages."""
    curves: Mapping[str, str] = field(default_factory=dict)
    """Heading -> a metric of ``rounds.jsonl``, a percentage."""
    reference: bool = False
    """Whether the average forgetting of all runs is measured against the first row's."""
    set: Sequence[str] = ()
    seeds: Sequence[int] = (0, 1, 2)
    launch: Sequence[str] = ("--hosts=1",)

    @classmethod
    def read(cls, path: Path) -> Study:
        """Read a file; its preset is relative to the repository."""
        table = tomllib.loads(path.read_text())
        return cls(**table | {"preset": ROOT / table["preset"]})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.study", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("study", type=Path, help="a TOML file of benchmarks/studies")
    parser.add_argument("--out", type=Path, required=True, help="directory of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", help="in place of the study's")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--set", action="append", default=[], help="override a key of all runs")
    parser.add_argument("--only", nargs="+", help="rows to run, by name")
    options = parser.parse_args(arguments)
    study = Study.read(options.study)
    seeds = options.seeds or study.seeds
    rows = options.only or list(study.methods)
    if study.reference and (first := next(iter(study.methods))) not in rows:
        rows = [first, *rows]
    runs = run_all(study, options.out, rows, seeds, options.set, options.jobs)
    table = "\n".join([markdown(study.columns, runs), *curves(study.curves, runs)])
    (options.out / "table.md").write_text(table)
    print(table)
    page = ["--html", str(options.out / "report.html")]
    every = [str(run) for group in runs.values() for run in group]
    return subprocess.run([FEDSRV, "report", *every, *page], stdout=subprocess.DEVNULL).returncode


def run_all(
    study: Study, out: Path, rows: Sequence[str], seeds: Sequence[int], more: list[str], jobs: int
) -> dict[str, list[Path]]:
    """Run every row with every seed; return the run directories by row."""
    preset = tomllib.loads(study.preset.read_text())

    def directory_of(row: str, seed: int) -> Path:
        return out / f"{re.sub(r'[^a-z0-9]+', '-', row.lower()).strip('-')}-seed{seed}"

    def run(row: str, seed: int) -> Path:
        overrides = [*study.set, *more]
        if study.reference and row != rows[0]:
            overrides.append(f"evaluate.reference={directory_of(rows[0], seed).resolve()}")
        config = config_for(preset, study.methods[row], overrides)
        directory = directory_of(row, seed)
        launch(config, directory, seed, out / f"data-seed{seed}", study.launch)
        return directory

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda seed: run(rows[0], seed), seeds))  # these write the partitions
        pairs = [(row, seed) for seed in seeds for row in rows]
        found = list(pool.map(lambda pair: run(*pair), pairs))
    ended = [(row, d) for (row, _), d in zip(pairs, found, strict=True) if is_finished(d)]
    return {row: [d for r, d in ended if r == row] for row in rows}


def config_for(preset: Mapping[str, Any], method: str, overrides: Iterable[str]) -> str:
    """Return the TOML of the preset with another method and overrides."""
    name, *switches = method.split()
    table = dict(preset["method"]) if preset["method"]["name"] == name else {"name": name}
    tables = {**preset, "method": table}
    switches = [s if "." in s.partition("=")[0] else f"method.{s}" for s in switches]
    for line in (*overrides, *switches):
        path, _, value = line.partition("=")
        *parents, leaf = path.split(".")
        target = tables
        for parent in parents:
            target[parent] = dict(target.get(parent, {}))
            target = target[parent]
        try:
            target[leaf] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            target[leaf] = value
    return tomli_w.dumps(tables)


def launch(config: str, out: Path, seed: int, data: Path, further: Sequence[str]) -> None:
    """Run one experiment to its end."""
    if is_finished(out):
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    file = out.with_name(out.name + ".toml")
    file.write_text(config)
    command = [FEDSRV, "launch", str(file), "--out", str(out), "--set", f"seed={seed}", *further]
    command += ["--resume"] if (out / "config.toml").exists() else []
    pools = parse_experiment(config).method.pools_data
    command += ["--data", str(data)] if data.exists() and not pools else []
    print("$", *command, flush=True)
    log = out.with_name(out.name + ".log")
    with log.open("a") as file_of_log:
        done = subprocess.run(command, stdout=file_of_log, stderr=subprocess.STDOUT)
    if done.returncode:
        print(f"{out.name} failed, see {log}", flush=True)
    elif not data.exists():
        shutil.copytree(out / "data", data)


def is_finished(out: Path) -> bool:
    """Tell whether a run came to its end."""
    return (out / "summary.json").exists()


def markdown(columns: Mapping[str, str], runs: Mapping[str, Sequence[Path]]) -> str:
    """Return a table: a row of means ± population standard deviations over seeds per method."""
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    most = max(map(len, runs.values()))
    for row, directories in runs.items():
        summaries = [summary_of(d) for d in directories]
        cells = [cell(path, summaries) for path in columns.values()]
        note = "" if len(directories) == most else f" ({len(directories)} of {most} seeds)"
        lines.append(f"| {row}{note} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def curves(headings: Mapping[str, str], runs: Mapping[str, Sequence[Path]]) -> Iterator[str]:
    """Yield a table per metric: its means over seeds after each round, and over all rounds."""
    for heading, name in headings.items():
        series = {
            row: [[100 * v for r in rounds_of(d) if (v := find(r["metrics"], name)) is not None]
                  for d in directories]
            for row, directories in runs.items()
        }  # fmt: skip
        length = max((len(one) for found in series.values() for one in found), default=0)
        names = [heading, *map(str, range(1, length + 1)), "mean"]
        lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
        for row, found in series.items():
            if found and all(len(one) == length for one in found):
                means = [fmean(values) for values in zip(*found, strict=True)]
                cells = [*(f"{mean:.0f}" for mean in means), f"{fmean(means):.1f}"]
                lines.append(f"| {row} | " + " | ".join(cells) + " |")
        yield "\n".join(lines) + "\n"


def summary_of(run: Path) -> dict[str, Any]:
    """Return a run's summary, with what its clients told in the last round averaged."""
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    *_, last = rounds_of(run)
    told = [row for client, row in last["clients"].items() if client.isdigit()]
    numbers = {key for row in told for key, value in row.items() if isinstance(value, int | float)}
    summary["clients"] = {key: fmean(row[key] for row in told if key in row) for key in numbers}
    return summary


def rounds_of(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a run's rounds."""
    return map(json.loads, (run / "rounds.jsonl").read_text().splitlines())


def cell(path: str, summaries: Iterable[Mapping[str, Any]]) -> str:
    """Return one cell of the table, a dash where a run has no such figure."""
    table, _, name = path.partition(".")
    look_up = find if table == "metrics" else dict.get
    values = [look_up(summary[table], name) for summary in summaries]
    if not values or any(value is None for value in values):
        return "–"
    factor, form = UNITS[table]
    if table == "metrics" and not metric(name).unit:
        factor, form = 1, "{:.3f}"
    mean, spread = (form.format(factor * f(values)) for f in (fmean, pstdev))
    return mean if len(values) == 1 or table != "metrics" else f"{mean} ± {spread}"


if __name__ == "__main__":
    sys.exit(main())
