"""What would decide the comparisons that are open: how many seeds, and how long those train.

    python -m benchmarks.deciding [--studies gldp fedmlp] [--keep]

It times one optimiser step of each study's first row, in seconds of one core, and counts the steps
of a run. Windows of sensors are counted where the data are (FEDTIDE_DATA). The page is made of that
and of the studies' records: at the mean and the deviation of today's paired differences, how many
seeds an interval needs until it leaves out zero.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import torch

from benchmarks.measure import parser_of, tell
from benchmarks.measured import RECORDS, given_as, keep
from benchmarks.papers.lengths import papers_cells
from benchmarks.papers.page import experiments_of, record_of
from benchmarks.papers.size import SHAPES, problem_of, size_of
from benchmarks.training import one_step
from fedcli.data.cuts.partition import partition
from fedcli.data.sets.registry import load
from fedmodels.config.experiment import Experiment
from fedmodels.config.scenario import Natural
from fedmodels.host.machine import keep_large_blocks
from fedmodels.nets import make_net
from fedsrv.report.frame import CONFIDENCE, Difference

RECORD = "steps"
SEEDS = (5, 10, 20)
"""Numbers of seeds that the page asks about."""
CAPTURED_MS = {"digits-cnn": 0.242, "cnn5": 0.530, "vit-tiny": 2.96, "hart": 3.08}
"""A step of FedAvg as a CUDA graph on an NVIDIA H100, of docs/results/speed.md, by net."""


def main() -> None:
    """Time the steps that the command line asks for."""
    parser = parser_of("deciding", __doc__, RECORD)
    parser.add_argument("--studies", nargs="+", default=list(studies()), choices=list(studies()))
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_large_blocks()  # as the commands do
    rows = [row_of(study) for study in options.studies]
    tell("steps", rows)
    if options.keep:
        keep(options.keep, given_as("deciding"), {"Steps of a run, and a step": rows})


def studies() -> Iterator[str]:
    """Give the studies beside a paper's table whose record has intervals."""
    for study in papers_cells():
        if (record := record_of(study)) and record.compared:
            yield study


def row_of(study: str) -> dict[str, Any]:
    """Return how many steps all clients of a run take, on average over settings, and one's time."""
    settings: dict[str, Experiment] = {}
    for cell, experiment in experiments_of(study).items():
        if not experiment.method.pools_data:
            settings.setdefault(cell.setting, experiment)
    steps = [_steps(one) for one in settings.values()]
    timed = next(iter(settings.values()))
    assert timed.data is not None
    problem = problem_of(timed.data)
    facts: dict[str, Any] = {
        "num_classes": problem.num_classes,
        "input_shape": problem.input_shape,
    }
    net = make_net(timed.net.name, **facts, **timed.net.options())
    net.mixed_precision = timed.training.precision == "bfloat16"
    x = torch.randn(timed.training.batch_size, *problem.input_shape)
    step = one_step(net, x, torch.randint(problem.num_classes, (len(x),)), fused=True)
    took = min(_core_seconds(step) for _ in range(15))
    name = timed.net.name.rpartition(":")[2]
    return {"study": study, "net": name, "steps": round(np.mean(steps)), "step_ms": 1e3 * took}


def _core_seconds(step: Callable[[], object]) -> float:
    begun = time.process_time()
    step()
    return time.process_time() - begun


def _steps(experiment: Experiment) -> float:
    if not isinstance(experiment.scenario, Natural):
        return (size_of(experiment).steps or 0) * experiment.schedule.clients
    assert experiment.data is not None
    found = load(experiment.data)
    dealt = partition(
        experiment.scenario, found.train.y, found.test.y, len(SHAPES[experiment.data.name].train),
        experiment.schedule.clients, 0, found.groups, overlapping=False,
    )  # fmt: skip
    batches = (
        math.ceil(len(task.train) / experiment.training.batch_size)
        for tasks in dealt.clients
        for task in tasks
    )
    return size_of(experiment).passes * sum(batches)


# --- the page -------------------------------------------------------------------------------------


def seeds_needed(found: Difference, most: int = 10_000) -> int | None:
    """Return how many seeds make an interval leave out zero, at today's mean and deviation.

    Two at least; None where ``most`` do not.
    """
    if not found.mean:
        return None
    deviation = (found.high - found.mean) / _quantile(found.pairs) * math.sqrt(found.pairs)
    low, high = 1, most
    if not _decides(found.mean, deviation, most):
        return None
    while high - low > 1:  # more seeds never make an interval wider
        middle = (low + high) // 2
        low, high = (low, middle) if _decides(found.mean, deviation, middle) else (middle, high)
    return high


def _decides(mean: float, deviation: float, seeds: int) -> bool:
    return abs(mean) > _quantile(seeds) * deviation / math.sqrt(seeds)


@cache
def _quantile(seeds: int) -> float:
    from scipy.special import stdtrit  # slow to import

    return float(stdtrit(seeds - 1, (1 + CONFIDENCE) / 2))


def page(record: str) -> str:
    """Return the table of studies as Markdown, from the record of steps and those of studies."""
    facts = json.loads((RECORDS / f"{record}.json").read_text())
    (table,) = facts["tables"].values()
    heads = ["study", "intervals", "open", *(f"decided by {n} seeds" for n in SEEDS), "by more",
             "runs up to five seeds", "their training on two cores", "on one H100"]  # fmt: skip
    lines = [heads, ["---"] * len(heads), *map(_cells, table["rows"])]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return f"Steps timed by `{facts['command']}` with {versions}.\n\n{text}\n"


def _cells(row: dict[str, Any]) -> list[str]:
    study = row["study"]
    record = record_of(study)
    assert record is not None
    still = [one for one in record.compared if not one.is_clear]
    needed = [seeds_needed(one) or math.inf for one in still]
    counts = [sum(n <= most for n in needed) for most in SEEDS]
    missing = sum(
        max(0, SEEDS[0] - sum(run.row == cell for run in record.runs)) for cell in record.cells
    )
    steps = missing * row["steps"]
    graph = CAPTURED_MS.get(row["net"])
    hours = _hours(steps * row["step_ms"] / 2)
    return [
        f"`{study}`", str(len(record.compared)), str(len(still)), *map(str, counts),
        str(len(still) - counts[-1]), str(missing), hours, _hours(steps * graph) if graph else "–",
    ]  # fmt: skip


def _hours(milliseconds: float) -> str:
    minutes = milliseconds / 60_000
    return f"{minutes / 60:.1f} h" if minutes >= 90 else f"{minutes:.0f} min"


if __name__ == "__main__":
    main()
