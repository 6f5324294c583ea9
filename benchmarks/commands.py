"""CPU and wall time of commands that do little, and of a first round, beside importing torch.

    python -m benchmarks.commands [--repeats 5] [--code DIR …]

``--code`` names other checkouts; each takes its turn in every repetition.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.measure import parser_of, tell

HERE = Path(__file__).parent.parent
PROGRAM = "import sys; from {program}.cli import main; sys.argv = {words!r}; main()"
IMPORT = "import torch"
ROUND = """
import tempfile
from pathlib import Path
from fedtide.inprocess import run_in_process
from fedtide.testing.trial import digits_in, tiny_experiment

with tempfile.TemporaryDirectory() as place:
    run_in_process(tiny_experiment(), digits_in(Path(place) / "data"), Path(place) / "run")
"""
COMMANDS = {
    IMPORT: IMPORT,
    "a tiny run on digits, in one process": ROUND,
    **{
        " ".join(words): PROGRAM.format(program=words[0], words=words)
        for words in (
            ["fedsrv", "methods"],
            ["fedsrv", "metrics"],
            ["fedsrv", "status", "127.0.0.1:9", "--tls-ca", "missing.pem"],  # up to its first call
            ["fedcli", "data"],
        )
    },
}


def timed(program: str, code: Path) -> tuple[float, float]:
    """Run a program with the packages of a checkout; return its CPU and its wall seconds."""
    paths = os.pathsep.join(str(code / part) for part in ("", "models", "proto"))
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", program], cwd=code, env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    wall, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def main() -> None:
    """Print the medians, and CPU seconds beside those of importing torch."""
    parser = parser_of("commands", __doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--code", type=Path, nargs="*", default=[])
    given = parser.parse_args()
    places = [HERE, *given.code]
    found: dict[tuple[str, Path], list[tuple[float, float]]] = {}
    for _ in range(given.repeats):
        for name, program in COMMANDS.items():
            for code in places:
                found.setdefault((name, code), []).append(timed(program, code.resolve()))
    medians = {
        key: [statistics.median(column) for column in zip(*runs, strict=True)]
        for key, runs in found.items()
    }
    rows = [
        {
            "command": name, "code": str(code), "cpu_s": cpu, "wall_s": wall,
            "of_torch": cpu / medians[IMPORT, code][0],
        }
        for (name, code), (cpu, wall) in medians.items()
    ]  # fmt: skip
    tell("commands", rows)


if __name__ == "__main__":
    main()
