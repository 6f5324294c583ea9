"""What ``fedcli forecast`` says of a run, beside what the run takes.

    python -m benchmarks.forecast fedavg fedmlp [--set schedule.rounds=4]

The config is the quickstart's, whose clients train one after another in one process here. Seconds
are the processor's, of an interaction: as foretold, of the first one with what comes before it, and
of all later ones. ``ratio`` is these over what was foretold.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.measure import parser_of, tell
from fedcli.data.store.commands import run_partition
from fedmodels.config.experiment import Experiment
from fedmodels.config.origin import data_and_scenario
from fedmodels.facts.config_file import read_experiment
from fedplugins.operations.forecasting import forecast
from fedsrv.progress.events import Event
from fedtide.inprocess import run_in_process

CONFIG = Path(__file__).parent.parent / "examples" / "start" / "three-tasks.toml"


def main() -> None:
    """Try and run each method, and print both."""
    parser = parser_of("forecast", __doc__)
    parser.add_argument("methods", nargs="+")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    options = parser.parse_args()
    named = [[f"method.name={name}", *options.sets] for name in options.methods]
    tell("forecast", [_compared(read_experiment(CONFIG, sets)) for sets in named])


def _compared(experiment: Experiment) -> dict[str, Any]:
    ends = list[float]()

    def hear(event: Event) -> None:
        if event.kind in ("commit", "finished"):
            ends.append(time.process_time())

    with tempfile.TemporaryDirectory() as place:
        data, clients = Path(place) / "data", experiment.schedule.clients
        dealt = data_and_scenario(experiment)
        run_partition(*dealt, clients, experiment.seed, data, Console(quiet=True))
        begun = time.process_time()
        foretold = forecast(experiment, data, torch.device("cpu"), at_once=1).interaction
        ended = time.process_time()
        run_in_process(experiment, data, Path(place) / "run", hear=hear)
    first, *_, last = ends
    later = (last - first) / (len(ends) - 2)
    return {
        "method": experiment.method.name, "trial_s": ended - begun, "foretold_s": foretold,
        "first_s": first - ended, "later_s": later, "ratio": later / foretold,
    }  # fmt: skip


if __name__ == "__main__":
    main()
