r"""Keep what studies came to, and render the tables of ``docs/results/`` from it.

    python -m benchmarks.records                                        # every page anew
    python -m benchmarks.records benchmarks/studies/gldp.toml runs/gldp # keep a study's runs first
    python -m benchmarks.records --add benchmarks/studies/gldp.toml runs/gldp

A study's long rows may run on several machines. With ``--add`` its record keeps the runs that the
directory does not have.

A record is ``benchmarks/records/STUDY.json`` (:mod:`fedplugins.studies.outcome`): numbers by row,
seed and length, and the versions and commit of each run. A page holds tables between two marks,

    <!-- record: STUDY -->
    <!-- end of record -->

and what lies between them is never typed: a test renders it again and compares. ``choices``, in
place of ``record``, is what a reader's choices move (:mod:`benchmarks.papers.views`), ``attacks``
are the tables of a study of attacks (:mod:`benchmarks.attacks.page`), ``pfllib`` is the table of
PFLlib's code beside ours (:mod:`benchmarks.pfllib.page`), and ``deciding`` says what
would decide the open intervals of all studies (:mod:`benchmarks.deciding`). A study with
curves or lengths has a picture, ``docs/results/STUDY.svg``, and one of change a plane
(:mod:`benchmarks.plane`). What benchmarks measured has records of
its own (benchmarks/measured.py), and the same marks. How long our runs are beside the papers' is
computed in the tables of verdicts, too (:mod:`benchmarks.papers.lengths`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import deciding, plane
from benchmarks.attacks.page import page as attacks_page
from benchmarks.measure import parser_of
from benchmarks.measured import page as measured_page
from benchmarks.papers import lengths
from benchmarks.papers.views import page as choices_page
from benchmarks.pfllib.page import page as pfllib_page
from fedmodels.errors import FedtideError
from fedplugins.studies.fairness import fairness
from fedplugins.studies.outcome import Outcome, outcome_of, read_record, to_json
from fedplugins.studies.plan import Sweep, plan
from fedplugins.studies.tables import draw, page
from fedsrv.report.frame import RunNumbers

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "records"
STUDIES = ROOT / "benchmarks" / "studies"
PAGES = ROOT / "docs" / "results"
END = "<!-- end of record -->"
MARKED = re.compile(
    rf"(<!-- (?:record|choices|attacks|deciding|pfllib): ([\w-]+) -->\n).*?({re.escape(END)}\n)",
    flags=re.DOTALL,
)
"""The tables of a record, what the choices of its study's readers move, those of attacks, or what
would decide the open ones."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line asks for; return the exit status."""
    parser = parser_of("records", __doc__)
    parser.add_argument("study", type=Path, nargs="?", help="a TOML file of benchmarks/studies")
    parser.add_argument("runs", type=Path, nargs="?", help="the directory of its runs")
    parser.add_argument("--add", action="store_true", help="beside the runs in the record")
    options = parser.parse_args(arguments)
    if options.study and not options.runs:
        parser.error("a study needs the directory of its runs")
    try:
        if options.study:
            print(f"kept {keep(options.study, options.runs, add=options.add)}")
        for path in sorted(PAGES.glob("*.md")):
            path.write_text(rendered(path.read_text()))
        for record in sorted(RECORDS.glob("*.json")):
            outcome, file = read_record(record), PAGES / f"{record.stem}.svg"
            draw(outcome, file)
            if plane.is_plane(outcome):
                file.write_text(plane.picture(outcome))
    except FedtideError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def keep(study: Path, runs: Path, *, add: bool = False) -> Path:
    """Write the record of a study's finished runs; return its file.

    Rows without a finished run are left out.

    Args:
        study: its TOML file.
        runs: the directory of its runs.
        add: keep the recorded runs that the directory does not have, too.

    Raises:
        ConfigError: the study, or the record to add to, cannot be read.
    """
    sweep = Sweep.read(study)
    planned = plan(sweep, runs, list(sweep.methods), sweep.seeds)
    outcome = outcome_of(sweep, planned, len(sweep.seeds))
    file = RECORDS / f"{study.stem}.json"
    if add:
        outcome = replace(outcome, runs=_with_recorded(outcome, read_record(file)))
    found = {run.row for run in outcome.runs}
    cells = [cell for cell in outcome.cells if cell in found]
    file.parent.mkdir(exist_ok=True)
    said = fairness(sweep, [run for run in planned if run.cell in found])
    file.write_text(to_json(replace(outcome, cells=cells, fairness=said)))
    return file


def _with_recorded(outcome: Outcome, recorded: Outcome) -> list[RunNumbers]:
    """Return the runs of both in the order of the study's cells; of equal ones ``outcome``'s."""
    runs = {(run.row, run.seed): run for run in [*recorded.runs, *outcome.runs]}
    places = {cell: place for place, cell in enumerate(outcome.cells)}
    kept = [run for run in runs.values() if run.row in places]
    return sorted(kept, key=lambda run: (places[run.row], run.seed))


def rendered(text: str) -> str:
    """Return a page with everything between its marks made anew, and the lengths of its studies.

    Raises:
        ConfigError: a mark names a study without a record.
    """

    def tables(mark: re.Match[str]) -> str:
        if mark[1].startswith("<!-- choices"):
            return "\n".join([mark[1], choices_page(mark[2]), mark[3]])
        if mark[1].startswith("<!-- attacks"):
            return "\n".join([mark[1], attacks_page(mark[2]), mark[3]])
        if mark[1].startswith("<!-- deciding"):
            return "\n".join([mark[1], deciding.page(mark[2]), mark[3]])
        if mark[1].startswith("<!-- pfllib"):
            return "\n".join([mark[1], pfllib_page(mark[2]), mark[3]])
        measured = measured_page(mark[2])
        if measured is not None:
            return "\n".join([mark[1], measured, mark[3]])
        outcome = read_record(RECORDS / f"{mark[2]}.json")
        parts = [
            mark[1],
            made_with(outcome) + "\n",
            page(outcome, pictured=True),
            *_not_run(outcome, mark[2]),
            *_picture(outcome, mark[2]),
        ]
        return "\n".join([*parts, mark[3]])

    return lengths.rendered(MARKED.sub(tables, text))


def made_with(outcome: Outcome) -> str:
    """Return a sentence on the seeds, versions and commits behind a record."""
    seeds = ", ".join(map(str, sorted({run.seed for run in outcome.runs})))
    facts = [
        f"{name} {', '.join(found)}"
        for key, name in (("fedtide", "fedtide"), ("torch", "torch"), ("git_commit", "commit"))
        if (found := sorted(set(_known(outcome, key))))
    ]
    many = "seeds" if "," in seeds else "seed"
    return "; ".join([f"Of {len(outcome.runs)} runs with {many} {seeds}", *facts]) + "."


def _known(outcome: Outcome, key: str) -> Iterator[str]:
    for run in outcome.runs:
        if key in run.environment:
            yield str(run.environment[key])[:12]


def _not_run(outcome: Outcome, study: str) -> Iterator[str]:
    """Yield a line that names the study's rows without a run, and the command that runs them."""
    rows = Sweep.read(STUDIES / f"{study}.toml").methods.keys()
    if missing := [row for row in rows if row not in {cell.row for cell in outcome.cells}]:
        only = " ".join(f'--only "{row}"' for row in missing)
        file = f"benchmarks/studies/{study}.toml"
        yield f"Not run: {'; '.join(missing)}.\n"
        yield f"```\nfedsrv sweep {file} --out runs/{study} {only}\n```\n"


def _picture(outcome: Outcome, study: str) -> Iterator[str]:
    if plane.is_plane(outcome):
        yield f"![{study}: present task against next task]({study}.svg)\n"
    if outcome.curves or len(set(outcome.lengths.values())) > 1:
        yield f"![{study}: scores by length and round]({study}.svg)\n"


if __name__ == "__main__":
    sys.exit(main())
