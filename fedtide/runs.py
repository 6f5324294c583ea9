"""Run an experiment, open a run directory, and use what was learnt."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedmodels.config.presets import config_file, presets
from fedmodels.errors import ConfigError, FedtideError, RunFailed
from fedmodels.host.files import require_utf8
from fedmodels.numerics.metric_tables import FIGURES

if TYPE_CHECKING:
    import numpy as np

    from fedmodels.config.experiment import Experiment
    from fedsrv.launch.progress import PlainLines
    from fedsrv.progress.events import Hear
    from fedsrv.state.run_record import RunRecord
    from fedtide.models import TrainedModel

Backend = Literal["processes", "inprocess"]
Config = str | os.PathLike[str] | Mapping[str, Any]
Directory = str | os.PathLike[str]


def run(
    config: Config,
    overrides: Mapping[str, Any] | None = None,
    backend: Backend = "processes",
    out: Directory | None = None,
    progress: Callable[[str], None] | None = None,
    data: Directory | None = None,
) -> Run:
    """Run an experiment to its end.

    A run does not outlive whoever called this. Ctrl-C stops it, and so does the end of this
    process; ``fedtide.open(out).resume()`` goes on with it.

    Args:
        config: a TOML file, its content as a mapping, or the name of a preset.
        overrides: values by dotted key, such as ``{"seed": 1, "method.lam": 0.3}``. A table
            as a value takes the place of the config's whole table. Another ``method.name`` leaves
            out the former method's keys, as ``--set`` does.
        backend: ``processes`` starts a coordinator and processes for the clients, as ``fedsrv
            launch`` does; ``inprocess`` trains one client after the other here, without a network.
            Both end in the same bits.
        out: the run directory, which must be new or empty; by default a temporary one.
        progress: called with each line that says how the run goes. Without it, a terminal and a
            notebook show a bar, and nothing is shown elsewhere.
        data: a folder with a directory for each client (docs/data.md), or with a partition, as
            ``fedsrv launch --data`` takes. By default the data that ``[data]`` names are dealt out
            into the run directory.

    Raises:
        FedtideError: the config is wrong, data are missing, or the run failed; one line says why.
    """
    experiment, place = experiment_and_place(config, overrides, out)
    return _run(experiment, place, backend, progress, resume=False, data=data)


def experiment_and_place(
    config: Config, overrides: Mapping[str, Any] | None, out: Directory | None
) -> tuple[Experiment, Path]:
    """Return the experiment of a config, and the run directory; by default a temporary one.

    Raises:
        ConfigError: the config is wrong.
    """
    experiment = experiment_from(config, overrides)
    place = Path(out or tempfile.mkdtemp(prefix="fedtide-"))
    require_utf8(place)
    return experiment, place


def experiment_from(config: Config, overrides: Mapping[str, Any] | None = None) -> Experiment:
    """Return the experiment of a config; ConfigError if it is wrong."""
    from fedmodels.facts.resolution import experiment_of

    name = "config" if isinstance(config, Mapping) else str(config)
    return experiment_of(_tables(config, overrides or {}), name)


def open(path: Directory) -> Run:
    """Open the directory of a run that has ended, or that can be resumed.

    Raises:
        ArchiveError: it holds no run.
    """
    found = Run(Path(path))
    _ = found.record
    return found


@dataclass(frozen=True)
class Run:
    """One run directory."""

    path: Path

    @property
    def record(self) -> RunRecord:
        """Return what the directory says at this moment."""
        from fedsrv.state.run_record import read_run

        return read_run(self.path)

    @property
    def summary(self) -> dict[str, Any]:
        """Return the content of ``summary.json``; empty while the run has not ended."""
        return dict(self.record.summary)

    @property
    def experiment(self) -> Experiment:
        """Return the resolved experiment."""
        from fedmodels.facts.resolution import experiment_of

        return experiment_of(self.record.config, str(self.path / "config.toml"))

    def _repr_html_(self) -> str:
        """Return the run as a notebook shows it: a table of its numbers, and charts."""
        from fedsrv.report.page import cell

        return cell(self.record)

    def metrics(self) -> Any:
        """Return one row for each interaction: its number, round, task and metrics.

        A pandas frame where pandas is installed, else a dict of columns.
        """
        return _frame(
            [
                {key: row[key] for key in ("interaction", "round", "task")} | row["metrics"]
                for row in self.record.rows
            ]
        )

    def clients(self) -> Any:
        """Return one row for each interaction and client: loss, seconds, examples, bytes, scores.

        The accuracy on the client's own test data stands in a column for each view, such as
        ``accuracy_after_local``, where the interaction scored it; of targets their figures.

        A pandas frame where pandas is installed, else a dict of columns.
        """
        return _frame(
            [
                {"interaction": row["interaction"], "round": row["round"], "client": int(client)}
                | {key: value for key, value in facts.items() if isinstance(value, int | float)}
                | {
                    f"{name}_{view}": value
                    for view, one in facts.get("views", {}).items()
                    for name, value in one.items()
                    if name == "accuracy" or name in FIGURES
                }
                | row["bytes"]["per_client"].get(client, {})
                for row in self.record.rows
                for client, facts in row["clients"].items()
                if client.isdigit()
            ]
        )

    def personal_model(self, client: int) -> TrainedModel:
        """Return the model that a client holds at the end, with its normalisation and classes.

        Raises:
            DataError: the run has not ended, or the client's directory is elsewhere.
        """
        from fedsrv.trained.trained_models import personal_model

        return personal_model(self.path, client)

    def global_model(self) -> TrainedModel:
        """Return everybody's model after the last round; inputs as client 0 normalises them.

        Raises:
            ArchiveError: the method keeps a part of its net private, or no state is there.
        """
        from fedsrv.trained.trained_models import global_model

        return global_model(self.path)

    def predict(self, client: int, inputs: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the class (n,) that a client's model gives each raw input (n, *input_shape)."""
        return self.personal_model(client).predict(inputs)

    def example(self, client: int) -> Any:
        """Return the first raw test input of a client's first task, as a batch of one.

        Raises:
            DataError: the client's data are not in this directory.
        """
        import torch

        from fedcli.data.store.opened_data import open_data

        x, _ = open_data(self.path / "data", client).arrays(0, "test")
        return torch.from_numpy(x[:1].copy())

    def resume(
        self,
        backend: Backend = "processes",
        without: Sequence[int] = (),
        data: Directory | None = None,
    ) -> Run:
        """Go on with a run that was stopped; return it when it has ended.

        Args:
            backend: as of :func:`run`.
            without: clients that take no part from now on.
            data: as of :func:`run`, for a run that was given data.

        Raises:
            FedtideError: the run cannot go on; one line says why.
        """
        run, path = self.experiment, self.path
        return _run(run, path, backend, None, resume=True, without=without, data=data)

    def extend(
        self, rounds: int, backend: Backend = "processes", data: Directory | None = None
    ) -> Run:
        """Add rounds to a run that has ended; return it when they are done.

        Args:
            rounds: how many.
            backend: as of :func:`run`.
            data: as of :func:`run`, for a run that was given data.

        Raises:
            FedtideError: the run cannot be extended; one line says why.
        """
        if not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 1:
            raise ConfigError(f"rounds is {rounds!r}; give a whole number of rounds to add")
        before = self.experiment
        schedule = before.schedule.model_copy(update={"rounds": before.schedule.rounds + rounds})
        longer = before.model_copy(update={"schedule": schedule})
        return _run(longer, self.path, backend, None, resume=True, data=data)


def _run(
    experiment: Experiment,
    out: Path,
    backend: Backend,
    progress: Callable[[str], None] | None,
    *,
    resume: bool,
    without: Sequence[int] = (),
    data: Directory | None = None,
) -> Run:
    from fedsrv.launch.given_data import check_given_data
    from fedsrv.state.run_directory import holds_commits

    if backend not in ("inprocess", "processes"):
        raise ConfigError(f"backend {backend!r} is neither 'processes' nor 'inprocess'")
    if not resume and (out / "run.db").exists():
        if (out / "config.toml").exists() or holds_commits(out):
            raise ConfigError(
                f"{out} already holds a run: fedtide.open({str(out)!r}).resume() continues it; "
                "or choose another out"
            )
        resume = True  # a start was killed before it wrote its config
    if not isinstance(data, str | os.PathLike | None):
        raise ConfigError(f"data is a {type(data).__name__}; give the path of a directory")
    root = None if data is None else Path(data)
    check_given_data(experiment, root, "data")
    try:
        with ExitStack() as stack:
            display = _display_of(experiment, progress, root)
            if display is not None:
                stack.enter_context(display)
            hear = None if display is None else display.take
            if backend == "inprocess":
                from fedtide.inprocess import launch_in_process

                how: dict[str, Any] = {"resume": resume, "without": without, "data": root}
                launch_in_process(experiment, out, **how, hear=hear)
            else:
                _launch(experiment, out, hear, resume=resume, without=without, data=root)
    except KeyboardInterrupt as stopped:
        if (out / "run.db").exists():
            given = "" if root is None else f"data={str(root)!r}"
            stopped.add_note(f"fedtide.open({str(out)!r}).resume({given}) continues the run")
        raise
    return Run(out)


def _display_of(
    experiment: Experiment, progress: Callable[[str], None] | None, data: Path | None
) -> PlainLines | None:
    """Return what shows a run: lines for ``progress``, else a bar where somebody sees it."""
    from fedsrv.launch.given_data import name_of
    from fedsrv.launch.progress import GivenLines, live_display

    if progress is not None:
        return GivenLines(progress)
    return live_display(f"{experiment.method.name} on {name_of(experiment, data)}")


def _launch(
    experiment: Experiment,
    out: Path,
    hear: Hear | None,
    *,
    resume: bool,
    without: Sequence[int] = (),
    data: Path | None = None,
) -> None:
    """Run ``fedsrv launch`` in a process of its own: safe in notebooks and in plain scripts."""
    import tomli_w

    from fedmodels.host.machine import require_linux
    from fedsrv.progress.events import Event

    require_linux()
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as config:
        config.write(tomli_w.dumps(experiment.to_dict()))
        config.flush()
        command = [sys.executable, "-c", _LAUNCH, str(os.getpid())]
        command += ["launch", config.name, "--out", str(out), "--json"]
        command += ["--resume"] if resume else []
        command += [] if data is None else ["--data", str(data)]
        command += [word for client in without for word in ("--without", str(client))]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process:
            assert process.stdout is not None
            last = ""
            try:
                for line in process.stdout:
                    if not line.startswith("{"):  # why it ends
                        last = line.rstrip() or last
                    elif hear is not None:
                        hear(Event.from_json(line))
            except BaseException:  # Ctrl-C, or what ``hear`` raised: nobody follows it any more
                process.terminate()
                try:
                    process.communicate()  # it drains, and says so
                finally:
                    process.kill()  # after another Ctrl-C; one that has ended is left alone
                raise
    if process.returncode:
        kind: type[FedtideError] = ConfigError if process.returncode == 2 else RunFailed
        raise kind(last.removeprefix("error: ") or f"fedsrv launch ended with {process.returncode}")


_LAUNCH = """
import signal, sys
from fedmodels.host.processes import end_with_parent
end_with_parent(signal.SIGTERM, int(sys.argv.pop(1)))
from fedsrv.cli import main
main(sys.argv[1:])
"""
"""A program: ``fedsrv``, which gets SIGTERM when the process that began it ends in any way."""


def _tables(config: Config, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain tables of a config with the overrides in them."""
    from fedmodels.facts.config_file import drop_former_keys, put

    if isinstance(config, Mapping):
        tables: dict[str, Any] = _plain(config, "the config")
    else:
        path = _file_of(config)
        try:
            tables = tomllib.loads(path.read_text("utf-8-sig"))
        except OSError as error:
            raise ConfigError(f"cannot read the config {path}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from None
    if not isinstance(overrides, Mapping):
        raise ConfigError(f"overrides is a {type(overrides).__name__}; give values by dotted key")
    texts = {key: value for key, value in overrides.items() if isinstance(value, str)}
    drop_former_keys(tables, [f"{key}={json.dumps(text)}" for key, text in texts.items()])
    for key, value in overrides.items():
        if not isinstance(key, str):
            raise ConfigError(
                f"overrides names {key!r}; give a dotted key, such as 'schedule.rounds'"
            )
        put(tables, key, _plain(value, key))
    return tables


def _plain(value: Any, what: str) -> Any:
    """Return a value as a TOML file would give it; a path is its text, numpy's number a number."""
    try:
        return json.loads(json.dumps(value, default=_plain_one))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{what} holds what no TOML file can: {error}") from None


def _plain_one(value: Any) -> int | float | str | bytes:
    """Return what ``json`` itself has no form of: numpy's numbers and paths."""
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else os.fspath(value)


def _file_of(config: str | os.PathLike[str]) -> Path:
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(
            f"the config is a {type(config).__name__}; "
            "give a TOML file, a mapping or a preset's name"
        )
    path = config_file(Path(config))
    if not path.suffix and (path.is_dir() or not path.exists()):
        from fedmodels.errors import suggestion

        raise ConfigError(
            f"{config} is neither a file nor a preset.{suggestion(str(config), presets())}"
        )
    return path


def _frame(rows: list[dict[str, Any]]) -> Any:
    """Return rows as a pandas frame, or as a dict of columns where pandas is not installed."""
    columns = {key: [row.get(key) for row in rows] for row in rows for key in row}
    try:
        import pandas
    except ModuleNotFoundError:
        return columns
    return pandas.DataFrame(columns)
