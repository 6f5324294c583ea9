"""A queue from another machine: its runs, and how one is added or ended."""

from __future__ import annotations

from typing import Any

from fedmodels.config.experiment import Experiment
from fedmodels.config.sent import without_places
from fedmodels.console.rows import QueuedLine
from fedmodels.errors import ConfigError, LinkError
from fedmodels.times import CONNECT_S, SUBMIT_S
from fedpb.tables import table_of
from fedpb.v1 import front_pb2 as pb
from fedsrv.commands.watching import queued_at
from fedsrv.identity.tls import ChannelCredentials
from fedsrv.progress.watching import ask_front


class QueueAt:
    """The front of a queue, at an address."""

    def __init__(self, address: str, credentials: ChannelCredentials | None = None) -> None:
        self.address, self._credentials = address, credentials

    def runs(self) -> list[QueuedLine]:
        """Return the runs of the queue; LinkError if it does not answer, or refuses."""
        runs: list[QueuedLine] = self._of_front(queued_at(self.address, self._credentials))
        return runs

    def submit(self, experiment: Experiment, name: str) -> str:
        """Put a run at the end of the queue; return what it is called there.

        Raises:
            ConfigError: the config names files, which the queue's machine does not have.
            LinkError: the front does not answer, or refuses.
        """
        values = experiment.to_dict()
        if without_places(values) != values:
            raise ConfigError(
                "the config names files of this machine: submit it on the machine of the queue"
            )
        request = pb.SubmitRunRequest(name=name, config=table_of(values))
        within_s = SUBMIT_S + CONNECT_S
        return str(self._call("SubmitRun", request, pb.SubmitRunResponse, within_s).name)

    def withdraw(self, name: str) -> None:
        """Take a run out of the queue; LinkError if the front does not answer, or refuses."""
        self._call("WithdrawRun", pb.WithdrawRunRequest(name=name), pb.WithdrawRunResponse)

    def _call(self, name: str, request: Any, reply: Any, within_s: float = CONNECT_S) -> Any:
        return self._of_front(
            ask_front(self.address, self._credentials, name, request, reply, within_s)
        )

    def _of_front(self, found: Any) -> Any:
        if found is None:
            raise LinkError(f"{self.address} serves one run, and is no front of a queue")
        return found
