"""An open run in this process: it learns when it is asked to, and grows in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmodels.errors import ConfigError
from fedtide.runs import Config, Run, experiment_and_place

if TYPE_CHECKING:
    import os

    from fedcli.data.store.growing import Added


def open_run(
    config: Config,
    overrides: Mapping[str, Any] | None = None,
    out: str | os.PathLike[str] | None = None,
    *,
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
        resume: go on with the run in ``out``.

    Raises:
        FedtideError: the config is wrong, or data are missing; one line says why.
    """
    from fedtide.inprocess import deal_out

    experiment, place = experiment_and_place(config, overrides, out)
    if not experiment.schedule.open:
        raise ConfigError("open_run needs [schedule] open = true; fedtide.run does other runs")
    return OpenRun(deal_out(experiment, place, resume=resume), place)


class OpenRun:
    """An open run, and what comes to it while it goes on."""

    def __init__(self, experiment: Any, path: Path) -> None:
        self.experiment, self.path = experiment, path
        self._steered: dict[str, Any] = {}

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

        data = self.experiment.data
        return add_task(self.path / "data", client, Path(source), data, self.experiment.seed)

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

        return drop_task(self.path / "data", client, task, why)

    def retire(self, clients: Sequence[int], *, forget: bool = False) -> None:
        """Let clients leave for good, before the next round.

        Args:
            clients: who.
            forget: drop what the server's state holds of these clients alone, too.
        """
        self._steered = {
            "retired": [*self._steered.get("retired", ()), *clients],
            "forgets": forget or self._steered.get("forgets", False),
        }

    def learn(self) -> None:
        """Train all rounds that are due.

        Raises:
            FedtideError: the run failed; one line says why.
        """
        from fedsrv.parts.stages import RunPaused
        from fedtide.inprocess import go_on

        try:
            go_on(self.experiment, self.path, "pause", **self._steered)
        except RunPaused:
            self._steered = {}

    def close(self) -> Run:
        """Train all rounds that are due, and end the run: clients store their final models.

        Raises:
            FedtideError: the run failed; one line says why.
        """
        from fedtide.inprocess import go_on

        go_on(self.experiment, self.path, "close", **self._steered)
        return Run(self.path)
