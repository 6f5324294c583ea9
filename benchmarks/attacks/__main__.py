"""Run a study of attacks in this process, and keep what its runs came to.

    python -m benchmarks.attacks benchmarks/studies/attacks.toml runs/attacks --minutes 40 --keep

Runs that are finished stay: the same command goes on. ``fedsrv sweep`` runs the same study, a
coordinator and a process of clients for each run, into the same directories; the bits are equal.
``--keep`` writes ``benchmarks/records/attacks/STUDY.json``; ``python -m benchmarks.records`` makes
the tables of docs/results/attacks.md from it.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.attacks.page import RECORDS
from benchmarks.attacks.study import cells, results, run_here, to_json
from benchmarks.measure import parser_of
from fedplugins.studies.plan import Sweep


def main() -> None:
    """Do what the command line asks for."""
    parser = parser_of("attacks", __doc__)
    parser.add_argument("study", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=0.0, help="after which no run begins")
    parser.add_argument("--seeds", type=int, nargs="*", help="by default the study's")
    parser.add_argument("--methods", nargs="*", help="to run now; by default all")
    parser.add_argument("--attackers", type=int, default=10, help="at most, of runs to run now")
    parser.add_argument("--keep", action="store_true", help="write the record")
    options = parser.parse_args()
    study = Sweep.read(options.study)
    found = cells(study, options.out, options.seeds or study.seeds)
    options.out.mkdir(parents=True, exist_ok=True)
    wanted = options.methods or {cell.method for cell in found.values()}
    now = [r for r, c in found.items() if c.method in wanted and c.attackers <= options.attackers]
    run_here(now, 60 * options.minutes)
    if options.keep:
        RECORDS.mkdir(exist_ok=True)
        file = RECORDS / f"{options.study.stem}.json"
        file.write_text(to_json(results(found)))
        print(f"kept {file}")


if __name__ == "__main__":
    main()
