"""An open run in this process: it learns when it is asked to, and grows in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedmodels.errors import ArchiveError, ConfigError, DataError
from fedtide.runs import Config, Run, experiment_and_place

if TYPE_CHECKING:
    import os

    import numpy as np

    from fedcli.data.store.growing import Added
    from fedtide.models import TrainedModel


def open_run(
    config: Config,
    overrides: Mapping[str, Any] | None = None,
    out: str | os.PathLike[str] | None = None,
    *,
    data: str | os.PathLike[str] | None = None,
    resume: bool = False,
) -> OpenRun:
    """Begin an open run in this process, or go on with one.

    >>> import fedtide
    >>> schedule = {"open": True, "order": "tasks_outer", "rounds": 1, "clients": 2}
    >>> tables = {"data": {"name": "digits"}, "scenario": {"kind": "iid", "tasks": 1}}
    >>> tables |= {"net": {"name": "mlp"}, "method": {"name": "fedavg"}, "schedule": schedule}
    >>> run = fedtide.open_run(tables)
    >>> run.learn()
    >>> run.close().summary["rounds"]
    1

    Args:
        config: as of :func:`fedtide.run`; it says ``[schedule] open = true``.
        overrides: as of :func:`fedtide.run`.
        out: the run directory.
        data: a folder with a directory for each client (docs/data.md), or with a partition, as
            ``fedsrv launch --data`` takes; also where the run is resumed. Tasks are added there.
            By default the data that ``[data]`` names are dealt out into the run directory.
        resume: go on with the run in ``out``.

    Raises:
        FedtideError: the config is wrong, or data are missing; one line says why.
    """
    from fedtide.inprocess import deal_out

    experiment, place = experiment_and_place(config, overrides, out)
    if not experiment.schedule.open:
        raise ConfigError("open_run needs [schedule] open = true; fedtide.run does other runs")
    root = None if data is None else Path(data)
    experiment = deal_out(experiment, place, resume=resume, data=root)
    return OpenRun(experiment, place, root or place / "data")


class OpenRun:
    """An open run, and what comes to it while it goes on."""

    def __init__(self, experiment: Any, path: Path, data: Path) -> None:
        """Go on with the run in ``path``, on the clients' data in ``data``."""
        self.experiment, self.path, self.data = experiment, path, data

    def add_task(self, client: int, source: str | os.PathLike[str]) -> Added:
        """Add a task to a client's data; the next :meth:`learn` trains on it.

        Args:
            client: whose task it is. The first task of a new client is its directory
                (docs/data.md).
            source: a folder with ``train/`` and ``test/``, arrays, or files that ``[data]`` cuts.

        Raises:
            DataError: the source cannot be used; nothing was changed.
        """
        from fedcli.data.store.growing import add_task

        how = self.experiment.data
        return add_task(self.data, client, Path(source), how, self.experiment.seed)

    def drop_task(self, client: int, task: int, why: str = "") -> bool:
        """Set a task of a client aside for good; the next :meth:`learn` goes on without it.

        Args:
            client: whose task it is.
            task: which, from 0.
            why: what the run's log says of it.

        Returns:
            Whether that is new.

        Raises:
            DataError: there is no such task; nothing was changed.
        """
        from fedcli.data.store.dropping import drop_task

        return drop_task(self.data, client, task, why)

    def retire(self, clients: Sequence[int], *, forget: bool = False) -> None:
        """Let clients leave for good, before the next round; that is on the disk at once.

        Args:
            clients: who.
            forget: drop what the server's state holds of these clients alone, too.

        Raises:
            ConfigError: a client has never joined the run, or is no number.
        """
        from fedsrv.state.decisions import RETIRE, decide

        rows: Sequence[Any] = ()
        with suppress(ArchiveError):  # nothing was learned yet
            rows = Run(self.path).record.rows
        growths = [growth for row in rows for growth in row.get("growths", ())]
        joined = {client for growth in growths for client, _ in growth["tasks"]}
        for client in clients:
            if type(client) is not int:
                raise ConfigError(f"retire takes the numbers of clients, and {client!r} is none")
            if client not in joined:
                raise ConfigError(f"client {client} has never joined this run: it cannot retire")
        if clients:
            decide(self.path, RETIRE, *({"client": c, "forgets": forget} for c in clients))

    def learn(self) -> None:
        """Train all rounds that are due.

        Raises:
            FedtideError: the run failed; one line says why.
        """
        from fedsrv.parts.stages import RunPaused

        with suppress(RunPaused):
            self._go_on("pause")

    def metrics(self) -> Any:
        """Return one row for each interaction so far, as :meth:`fedtide.Run.metrics`."""
        return Run(self.path).metrics()

    def personal_model(self, client: int) -> TrainedModel:
        """Return the deployed model of a client, which ``[deploy]`` keeps while the run goes on.

        Raises:
            DataError: the client has none; the line says what to do.
        """
        from fedcli.runtime.deployed import Deployed
        from fedtide.models import TrainedModel

        file = Deployed(self.path / "clients" / str(client)).current
        if file.exists():
            return TrainedModel.load(file)
        raise DataError(
            f"client {client} has no deployed model yet: learn() with a [deploy] table in the "
            "config makes one, and close() stores everybody's final models"
        )

    def predict(self, client: int, inputs: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the class (n,) that a client's deployed model gives each raw input.

        Inputs are ``(n, *input_shape)``.

        Raises:
            DataError: as :meth:`personal_model`.
        """
        return self.personal_model(client).predict(inputs)

    def close(self) -> Run:
        """Train all rounds that are due, and end the run: clients store their final models.

        Raises:
            FedtideError: the run failed; one line says why.
        """
        self._go_on("close")
        return Run(self.path)

    def _go_on(self, at_rest: Literal["pause", "close"]) -> None:
        """Train all rounds that are due."""
        from fedtide.inprocess import go_on

        go_on(self.experiment, self.path, at_rest, self.data)
