"""Metrics to experiment trackers as they come (``[tracking]``): TensorBoard, MLflow, W&B.

``tracked.json`` of the run holds which interaction each tracker has. A tracker that is slow, fails
or is killed is sent the rest from ``rounds.jsonl``, by a run that goes on or by ``fedsrv track``.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import re
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import shorten
from typing import Any, Protocol

from fedmodels.config.experiment import Experiment
from fedmodels.console.printable import without_passwords
from fedmodels.console.rows import Tracked
from fedmodels.errors import ArchiveError, ConfigError, pip_line
from fedmodels.host.files import read_regular, write_atomically
from fedmodels.times import CLOSE_S
from fedplugins.trackers.table import tracking_of
from fedsrv.progress.events import Ending, Event, EventLog
from fedsrv.report.tables import write_html
from fedsrv.state.run_record import leaves_of, numbers, read_run, table
from fedsrv.trained.trained_models import global_model

log = logging.getLogger(__name__)

PROJECT = "fedtide"
"""Name of the experiment or project under which a tracker lists runs."""
TAG = "fedtide_run"
"""What MLflow finds the run of a resumed run by: it holds the run's id."""
MAX_BATCH = 1000
"""Values that MLflow takes in one call."""
GLOBAL = "global.safetensors"
"""The server's model among the results of a run."""
TRACKED = "tracked.json"
"""The file of a run with the last interaction of each tracker."""
MAX_LETTERS = 300
"""Length of a tracker's error in our lines, at most."""
AGAIN_S = 5.0, 60.0
"""How long a tracker that cannot begin is left alone, first and at most; it doubles each time."""
MLFLOW_LETTERS, MLFLOW_PARAMS = 250, 100
"""Length of a name that MLflow takes, and parameters that it takes in one call."""


SECRETS = ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "WANDB_API_KEY")
"""Variables whose values stand in no line."""

Results = Callable[[], Sequence[Path]]


class Tracker(Protocol):
    """Takes the metrics of one run; a run that is resumed goes on where it was."""

    def log(self, interaction: int, metrics: Mapping[str, float], at: float) -> None:
        """Take the metrics after an interaction, known since a time in seconds of Unix."""
        ...

    def close(self, results: Results | None) -> None:
        """Write what is left; ``results`` makes the files of a run that has finished."""
        ...


class TensorBoard:
    """Writes event files to OUT/tensorboard."""

    def __init__(self, experiment: Experiment, out: Path, run_id: str) -> None:
        tensorboard = importlib.import_module("torch.utils.tensorboard")
        self._writer: Any = tensorboard.SummaryWriter(str(out / "tensorboard"))

    def log(self, interaction: int, metrics: Mapping[str, float], at: float) -> None:
        """Take the metrics after an interaction."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, interaction, at)

    def close(self, results: Results | None) -> None:
        """Write what is left."""
        self._writer.close()


class MLflow:
    """Logs to the server that ``MLFLOW_TRACKING_URI`` names, or to OUT/mlflow.db."""

    def __init__(self, experiment: Experiment, out: Path, run_id: str) -> None:
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        mlflow = importlib.import_module("mlflow")
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        place = None if uri else (out / "mlartifacts").resolve().as_uri()
        self._uri = uri = uri or f"sqlite:///{(out / 'mlflow.db').resolve()}"
        self._model = tracking_of(experiment).model
        self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
        known = self._client.get_experiment_by_name(PROJECT)
        within = known.experiment_id if known else self._client.create_experiment(PROJECT, place)
        settings = {name: str(value) for name, value in leaves_of(experiment.to_dict())}
        before = self._client.search_runs([within], f"tags.{TAG} = '{run_id}'", max_results=1)
        if before:
            self._run: str = before[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            told = before[0].data.params
            names = mlflow_names(settings)
            for name in [name for name in settings if told.get(names[name]) != settings[name]]:
                self._client.set_tag(self._run, names[name], settings[name])  # parameters stay
        else:
            made = self._client.create_run(
                within, tags={TAG: run_id}, run_name=tracking_of(experiment).name or out.name
            )
            self._run = made.info.run_id
            self._tell_settings(settings)

    def _tell_settings(self, settings: Mapping[str, str]) -> None:
        """Log parameters in few calls; a tag keeps the name of those that get another."""
        entities = importlib.import_module("mlflow.entities")
        names = mlflow_names(settings)
        params = [entities.Param(names[name], value) for name, value in settings.items()]
        other = {new: name for name, new in names.items() if new != name}
        tags = [entities.RunTag(f"{TAG}.{new}"[:MLFLOW_LETTERS], n) for new, n in other.items()]
        for first in range(0, max(len(params), len(tags)), MLFLOW_PARAMS):
            rows = slice(first, first + MLFLOW_PARAMS)
            self._client.log_batch(self._run, params=params[rows], tags=tags[rows])
        if other:
            shown = ", ".join(f"{name!r} as {new!r}" for new, name in [*other.items()][:3])
            more = f" and {len(other) - 3} more" if len(other) > 3 else ""
            log.info("mlflow takes no such names and gets %s%s", shown, more)

    def log(self, interaction: int, metrics: Mapping[str, float], at: float) -> None:
        """Take the metrics after an interaction; equal ones that it was sent before are one."""
        when, kind = int(at * 1000), importlib.import_module("mlflow.entities").Metric
        names = mlflow_names(metrics)
        values = [kind(names[name], value, when, interaction) for name, value in metrics.items()]
        for first in range(0, len(values), MAX_BATCH):  # one call each
            self._client.log_batch(self._run, metrics=values[first : first + MAX_BATCH])

    def close(self, results: Results | None) -> None:
        """Take the results, and say how the run has ended."""
        for file in results() if results else ():
            self._client.log_artifact(self._run, str(file))
            if file.name == GLOBAL:
                from fedplugins.trackers.mlflow_model import log_model

                log_model(self._client, self._uri, self._run, file, self._model)
        self._client.set_terminated(self._run, "KILLED" if results is None else "FINISHED")


def mlflow_names(names: Iterable[str]) -> dict[str, str]:
    """Return the name that MLflow takes for each of ours: most are their own.

    It takes letters, digits and ``_ - . : /`` and spaces, in a path without empty parts or ``..``.
    """
    found = dict[str, str]()
    for name in names:
        parts = re.sub(r"[^\w\-. :/]", "_", name).split("/")
        new = "/".join(part if part.strip(".") else f"_{part}" for part in parts)[:MLFLOW_LETTERS]
        number = 1
        while new in found.values():
            number += 1
            end = f"_{number}"
            new = new[: MLFLOW_LETTERS - len(end)] + end
        found[name] = new
    return found


class WandB:
    """Logs to Weights & Biases, as its own settings and environment say."""

    def __init__(self, experiment: Experiment, out: Path, run_id: str) -> None:
        self._wandb = importlib.import_module("wandb")
        self._run: Any = self._wandb.init(
            project=PROJECT,
            name=tracking_of(experiment).name or out.name,
            dir=str(out),
            id=run_id,
            resume="allow",
        )
        self._run.config.update(dict(leaves_of(experiment.to_dict())), allow_val_change=True)

    def log(self, interaction: int, metrics: Mapping[str, float], at: float) -> None:
        """Take the metrics after an interaction; W&B has times of its own."""
        self._run.log(dict(metrics), step=interaction)

    def close(self, results: Results | None) -> None:
        """Send what is left."""
        if results:
            artifact = self._wandb.Artifact(f"run-{self._run.id}", type="run")
            for file in results():
                artifact.add_file(str(file))
            self._run.log_artifact(artifact)
        self._run.finish(exit_code=int(results is None))


TRACKERS: Mapping[str, Callable[[Experiment, Path, str], Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WandB,
}
"""By the key of ``[tracking]``, which is also the name of the module and of the extra."""


OF_CLIENTS = ("tensorboard", "mlflow")
"""Trackers that take what came before; Weights & Biases takes no step behind its last one."""


def wanted(experiment: Experiment) -> list[str]:
    """Return the names of the trackers that a config asks for."""
    return [name for name in TRACKERS if getattr(tracking_of(experiment), name)]


def check_installed(experiment: Experiment) -> None:
    """Refuse a tracker that is not installed; raise ConfigError, which says how to install it."""
    for name in wanted(experiment):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(_missing(name))


def _missing(name: str) -> str:
    return f"[tracking] {name} = true needs a package more: {pip_line(name)}"


def track(events: EventLog, experiment: Experiment, out: Path, run_id: str) -> Ending:
    """Hand every score to the trackers of the config, each in a thread; return what ends that.

    A tracker that does not answer, cannot begin, fails or does not close in time is named in the
    log; the run goes on.
    """
    times, ended = dict[int, float](), threading.Event()
    sinks = [
        Sink(
            name,
            partial(_begun, name, experiment, out, run_id),
            out,
            times,
            tracking_of(experiment).clients,
        )
        for name in wanted(experiment)
    ]
    threads = [
        threading.Thread(target=sink.follow, args=(events, ended), name=sink.name, daemon=True)
        for sink in sinks
    ]

    def note(event: Event) -> None:
        """Remember when scores were known; a dict takes one item at a time from any thread."""
        if event.kind == "scores":
            times[event.interaction] = event.unix_time

    end_noting = events.follow(note, "times of scores")
    for thread in threads:
        thread.start()

    def end() -> None:
        ended.set()
        end_noting()
        until = time.monotonic() + CLOSE_S
        for sink, thread in zip(sinks, threads, strict=True):
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                log.warning(
                    "%s does not close within %g s; the run ends without it: it has metrics %s, %s",
                    sink.name,
                    CLOSE_S,
                    sink.until,
                    sink.later,
                )

    return end


def send(experiment: Experiment, out: Path, run_id: str, names: Sequence[str]) -> list[Tracked]:
    """Send trackers what they lack of a run that nobody computes; return how far each is.

    One that fails says so there; the others have what there is.

    Raises:
        ConfigError: a tracker is not installed, or cannot begin.
    """
    told = []
    for name in names:
        begin, clients = (
            partial(_begun, name, experiment, out, run_id),
            tracking_of(experiment).clients,
        )
        sink = Sink(name, begin, out, {}, clients)
        sink.begin()
        line = None
        try:
            sink.catch_up()
            sink.close(read_run(out).is_finished)
        except Exception as error:  # a package of somebody else raises errors of its own
            line = _in_one_line(error)
        told.append(Tracked(tracker=name, interactions=sink.interactions, error=line))
    return told


def until(interactions: int) -> str:
    """Say how far the metrics go of so many interactions."""
    return f"up to interaction {interactions}" if interactions else "of no interaction"


class Sink:
    """A tracker, and the place in the run up to which it has the metrics."""

    _tracker: Tracker

    def __init__(
        self,
        name: str,
        begin: Callable[[], Tracker],
        out: Path,
        times: Mapping[int, float],
        of_clients: bool = False,
    ) -> None:
        """Stand behind the last interaction that the tracker was sent and that the run still has.

        An exclusion takes interactions back.

        Args:
            name: the tracker's.
            begin: makes it; may take long, and fail.
            out: the run.
            times: when the scores of an interaction were known; others count as known now.
            of_clients: whether it is told of each client, too.
        """
        self.name, self._begin, self._out, self._times = name, begin, out, times
        self._of_clients = of_clients and name in OF_CLIENTS
        kept = [interaction for interaction, _ in _scored(out)]
        self._last = min(_tracked(out).get(name, -1), max(kept, default=-1))
        self.later = f"fedsrv track {shlex.quote(str(out))} sends it the rest"

    @property
    def interactions(self) -> int:
        """Of how many interactions the tracker has the metrics, from the first on."""
        return self._last + 1

    @property
    def until(self) -> str:
        """How far the metrics go that the tracker has."""
        return until(self.interactions)

    def begin(self) -> None:
        """Make the tracker."""
        self._tracker = self._begin()

    def _begins(self, ended: threading.Event) -> bool:
        """Begin, again and again if need be, until the run ends; tell whether that was possible."""
        wait, most = AGAIN_S
        while True:
            is_last = ended.is_set()
            try:
                self.begin()
                return True
            except ConfigError as error:
                if is_last:
                    log.warning("%s; the run ends without it: %s", error, self.later)
                    return False
                if wait == AGAIN_S[0]:
                    log.warning("%s; the run continues, and it is tried again", error)
            ended.wait(wait)
            wait = min(2 * wait, most)

    def follow(self, events: EventLog, ended: threading.Event) -> None:
        """Begin and tell the tracker everything, until the run ends or the tracker fails."""
        finished = False
        if not self._begins(ended):
            return
        try:
            self.catch_up()
            for event in events.listen(from_start=True):
                if event.kind == "scores":
                    self._take(event.interaction, event.detail["metrics"])
                elif event.kind == "missed":
                    self.catch_up()
                elif event.kind == "rollback":
                    self._last = min(self._last, event.interaction)
                finished = finished or event.kind == "finished"
            self.close(finished)
        except Exception as error:  # a package of somebody else raises errors of its own
            said, reason = (self.until, self.later), _in_one_line(error)
            line = "%s failed and has metrics %s, %s; the run continues: %s"
            log.warning(line, self.name, *said, reason)

    def catch_up(self) -> None:
        """Send what ``rounds.jsonl`` holds and the tracker has not."""
        for interaction, metrics in _scored(self._out):
            self._take(interaction, metrics)

    def close(self, finished: bool) -> None:
        """Close the tracker, with the results of a run that has finished."""
        if self._of_clients:
            self._tell_clients()
        with TemporaryDirectory(prefix="fedtide-results-") as place:
            self._tracker.close(partial(results_of, self._out, Path(place)) if finished else None)

    def _tell_clients(self) -> None:
        """Send what the run holds of each client and the tracker has not."""
        key = f"{self.name} clients"
        rows = [*_of_each_client(self._out)]
        last = min(_tracked(self._out).get(key, -1), max((at for at, _ in rows), default=-1))
        for interaction, found in rows:
            if interaction > last:
                self._tracker.log(interaction, found, self._time_of(interaction))
                last = interaction
        self._note(key, last)

    def _note(self, key: str, interaction: int) -> None:
        """Write down up to which interaction a tracker has what."""
        with _writing:
            now = {**_tracked(self._out), key: interaction}
            write_atomically(self._out / TRACKED, json.dumps(now), private=True)

    def _take(self, interaction: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics after an interaction, unless the tracker has them."""
        if interaction <= self._last:
            return
        self._tracker.log(interaction, metrics, self._time_of(interaction))
        self._last = interaction
        self._note(self.name, interaction)

    def _time_of(self, interaction: int) -> float:
        return self._times.get(interaction, time.time())


_writing = threading.Lock()


def _tracked(out: Path) -> dict[str, int]:
    """Return the last interaction that each tracker of a run has; a damaged file tells of none."""
    try:
        found = json.loads(read_regular(out / TRACKED))
    except (OSError, ValueError, RecursionError):
        return {}
    return {n: v for n, v in found.items() if type(v) is int} if isinstance(found, dict) else {}


def _scored(out: Path) -> Iterator[tuple[int, Mapping[str, float]]]:
    """Yield the interactions of a run that have scores, and their metrics."""
    if (out / "rounds.jsonl").exists():
        for row in read_run(out).rows:
            interaction, metrics = row.get("interaction"), numbers(row.get("metrics"))
            rows = table(row.get("clients")).values()
            if isinstance(interaction, int) and any("views" in table(one) for one in rows):
                yield interaction, metrics


def _of_each_client(out: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield the interactions of a run, and each client's loss and accuracies by name."""
    for row in read_run(out).rows if (out / "rounds.jsonl").exists() else ():
        found = dict[str, float]()
        for client, facts in table(row.get("clients")).items():
            views = table(table(facts).get("views"))
            told = {f"accuracy_{view}": table(one).get("accuracy") for view, one in views.items()}
            told["loss"] = table(facts).get("loss")
            found |= {f"client-{client}/{name}": v for name, v in numbers(told).items()}
        if isinstance(interaction := row.get("interaction"), int) and found:
            yield interaction, found


def _begun(name: str, experiment: Experiment, out: Path, run_id: str) -> Tracker:
    try:
        return TRACKERS[name](experiment, out, run_id)
    except ImportError:
        raise ConfigError(_missing(name)) from None
    except Exception as error:  # a package of somebody else raises errors of its own
        raise ConfigError(
            f"[tracking] {name} cannot begin: {_in_one_line(error)}; log in or set it up as its "
            f"documentation says, or leave it out: --set tracking.{name}=false"
        ) from None


def results_of(run: Path, place: Path) -> Sequence[Path]:
    """Write the files of a finished run to a directory, and return them.

    Clients' models stay with the clients.
    """
    page, model = place / "report.html", place / GLOBAL
    write_html([read_run(run)], page, private=True)
    try:
        global_model(run).save(model)
    except ArchiveError:  # the method has none
        return [page]
    return [page, model]


def _in_one_line(error: Exception) -> str:
    """Return what an error says, without what is secret."""
    said = str(error).rstrip(". \n")
    owner, at, _ = os.environ.get("MLFLOW_TRACKING_URI", "").rpartition("@")
    for secret in (owner.partition("://")[2] + at, *map(os.environ.get, SECRETS)):
        said = said.replace(secret, "***") if secret else said
    said = without_passwords(said)
    said = shorten(said, MAX_LETTERS, placeholder=" …")
    return said or type(error).__name__
