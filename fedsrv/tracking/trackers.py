"""Metrics to experiment trackers as they come (``[tracking]``): TensorBoard, MLflow, W&B."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any, Protocol

from fedmodels.config.experiment import Experiment
from fedmodels.errors import ConfigError
from fedpb.zstd import check_installed
from fedsrv.events import Ending, EventLog

log = logging.getLogger(__name__)

PROJECT = "fedtide"
"""Name of the experiment or project under which a tracker lists runs."""
CLOSE_S = 60.0
"""Time for trackers to write what is left, at the end of a run."""
MOST_LETTERS = 300
"""Length of a tracker's error in our lines, at most."""


class Tracker(Protocol):
    """Takes the metrics of one run."""

    def log(self, interaction: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics after an interaction."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


class TensorBoard:
    """Writes event files to OUT/tensorboard."""

    def __init__(self, experiment: Experiment, out: Path) -> None:
        tensorboard = importlib.import_module("torch.utils.tensorboard")
        self._writer: Any = tensorboard.SummaryWriter(str(out / "tensorboard"))

    def log(self, interaction: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics after an interaction."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, interaction)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class MLflow:
    """Logs to the server that ``MLFLOW_TRACKING_URI`` names, or to OUT/mlflow.db."""

    def __init__(self, experiment: Experiment, out: Path) -> None:
        mlflow = importlib.import_module("mlflow")
        uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{(out / 'mlflow.db').resolve()}")
        self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
        known = self._client.get_experiment_by_name(PROJECT)
        within = known.experiment_id if known else self._client.create_experiment(PROJECT)
        self._run: str = self._client.create_run(within, run_name=out.name).info.run_id
        for name, value in settings_of(experiment).items():
            self._client.log_param(self._run, name, value)

    def log(self, interaction: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics after an interaction."""
        for name, value in metrics.items():
            self._client.log_metric(self._run, name, value, step=interaction)

    def close(self) -> None:
        """Say that the run has ended."""
        self._client.set_terminated(self._run)


class WandB:
    """Logs to Weights & Biases, as its own settings and environment say."""

    def __init__(self, experiment: Experiment, out: Path) -> None:
        wandb = importlib.import_module("wandb")
        config = settings_of(experiment)
        self._run: Any = wandb.init(project=PROJECT, name=out.name, dir=str(out), config=config)

    def log(self, interaction: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics after an interaction."""
        self._run.log(dict(metrics), step=interaction)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


TRACKERS: Mapping[str, Callable[[Experiment, Path], Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WandB,
}
"""By the key of ``[tracking]``, which is also the name of the module and of the extra."""


def settings_of(experiment: Experiment) -> dict[str, object]:
    """Return an experiment's settings by dotted key."""
    found: dict[str, object] = {}

    def visit(table: Mapping[str, Any], prefix: str) -> None:
        for key, value in table.items():
            if isinstance(value, Mapping):
                visit(value, f"{prefix}{key}.")
            else:
                found[prefix + key] = value

    visit(experiment.to_dict(), "")
    return found


def wanted(experiment: Experiment) -> list[str]:
    """Return the names of the trackers that a config asks for."""
    return [name for name in TRACKERS if getattr(experiment.tracking, name)]


def check_extras(experiment: Experiment) -> None:
    """Check that what the config asks for is installed.

    Raises:
        ConfigError: says how to install it.
    """
    if experiment.zstd:
        check_installed()
    for name in wanted(experiment):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(_missing(name))


def _missing(name: str) -> str:
    return f"[tracking] {name} = true needs a package more: pip install 'fedtide[{name}]'"


def track(events: EventLog, experiment: Experiment, out: Path) -> Ending:
    """Hand every score to the trackers of the config, each in a thread; return what ends that.

    A tracker that fails later is named in the log and told nothing more; the run goes on. So is one
    that does not close in time.

    Raises:
        ConfigError: one of them is not installed, or cannot begin.
    """
    trackers = {name: _begun(name, experiment, out) for name in wanted(experiment)}
    threads = {
        name: threading.Thread(target=_write, args=(events, name, tracker), name=name, daemon=True)
        for name, tracker in trackers.items()
    }
    for thread in threads.values():
        thread.start()

    def end() -> None:
        events.close()
        until = time.monotonic() + CLOSE_S
        for name, thread in threads.items():
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                log.warning(
                    "%s does not close within %g s; the run ends without it, and its last metrics "
                    "may be missing there",
                    name,
                    CLOSE_S,
                )

    return end


def _begun(name: str, experiment: Experiment, out: Path) -> Tracker:
    try:
        return TRACKERS[name](experiment, out)
    except ImportError:
        raise ConfigError(_missing(name)) from None
    except Exception as error:  # a package of somebody else raises errors of its own
        raise ConfigError(
            f"[tracking] {name} cannot begin: {_in_one_line(error)}; log in or set it up as its "
            f"documentation says, or leave it out: --set tracking.{name}=false"
        ) from None


def _write(events: EventLog, name: str, tracker: Tracker) -> None:
    """Tell one tracker everything, until the run ends or the tracker fails."""
    try:
        for event in events.listen(from_start=True):
            if event.kind == "scores":
                tracker.log(event.interaction, event.detail["metrics"])
        tracker.close()
    except Exception as error:  # a package of somebody else raises errors of its own
        reason = _in_one_line(error)
        log.warning("%s failed and gets no further metrics; the run goes on: %s", name, reason)


def _in_one_line(error: Exception) -> str:
    said = shorten(str(error).rstrip(". \n"), MOST_LETTERS, placeholder=" …")
    return said or type(error).__name__
