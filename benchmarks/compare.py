r"""Run one experiment with several methods and seeds, and tabulate the runs side by side.

    python -m benchmarks.compare examples/gldp-small.toml --out runs/gldp-small \
        --method gldp --method "gldp use_lp=false lam=0" --method "fedprox mu=0.1" --seeds 0 1 2

Every method is run by ``fedsrv launch`` on the preset with its ``[method]`` table replaced; the
preset's own method keeps its hyper-parameters. All runs of a seed share one partition. A run that
is finished is not run again, one that was interrupted is resumed.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w

FEDSRV = str(Path(sys.executable).with_name("fedsrv"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return the exit status."""
    options = parse(arguments)
    preset = tomllib.loads(options.preset.read_text())
    runs = []
    for method in options.method or [preset["method"]["name"]]:
        config = config_for(preset, method, options.set)
        for seed in options.seeds:
            out = options.out / f"{label_of(method)}-seed{seed}"
            launch(config, out, seed, options.out / f"data-seed{seed}", options.launch)
            runs.append(str(out))
    page = options.out / "report.html"
    return subprocess.run([FEDSRV, "report", *runs, "--html", str(page)]).returncode


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("preset", type=Path, help="a TOML experiment")
    parser.add_argument("--out", type=Path, required=True, help="directory of the runs")
    parser.add_argument(
        "--method", action="append", help='a name and overrides: "fedprox mu=0.1"; repeatable'
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--set", action="append", default=[], help="override a key of all runs")
    parser.add_argument(
        "--launch", nargs="*", default=[], help="further arguments of fedsrv launch"
    )
    return parser.parse_args(arguments)


def config_for(preset: dict[str, Any], method: str, overrides: Sequence[str]) -> str:
    """Return the TOML of the preset with another method and overrides."""
    name, *switches = method.split()
    table = dict(preset["method"]) if preset["method"]["name"] == name else {"name": name}
    tables = {**preset, "method": table}
    lines = [*overrides, *(f"method.{switch}" for switch in switches)]
    for line in lines:
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


def label_of(method: str) -> str:
    """Return a directory name for a method and its overrides."""
    return re.sub(r"[^\w.=-]+", "-", method).replace("=", "").strip("-")


def launch(config: str, out: Path, seed: int, data: Path, further: Sequence[str]) -> None:
    """Run one experiment to its end."""
    if (out / "summary.json").exists():
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    file = out.with_name(out.name + ".toml")
    file.write_text(config)
    command = [FEDSRV, "launch", str(file), "--out", str(out), "--set", f"seed={seed}", *further]
    command += ["--resume"] if (out / "config.toml").exists() else []
    command += ["--data", str(data)] if data.exists() else []
    print("$", *command, flush=True)
    subprocess.run(command, check=True)
    if not data.exists():
        shutil.copytree(out / "data", data)


if __name__ == "__main__":
    sys.exit(main())
