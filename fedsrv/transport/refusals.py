"""Why a call is refused; the service ends it with the code of its kind."""

from __future__ import annotations

from typing import Self

from fedmodels.tensors.bundle import ClientId


class AlreadyConnected(Exception):
    """The id is connected, and the caller's token is not its session's."""


class UnknownSession(Exception):
    """There is no session with this id and token."""


class Unfinished(Exception):
    """An upload in parts is not whole yet."""

    def __init__(self, received: int) -> None:
        """Say how many bytes of it are there."""
        super().__init__(received)
        self.received = received


class RunOver(Exception):
    """The run has ended, and its end is committed."""


class RunHasFailed(Exception):
    """The run cannot go on; whoever takes part is told why, and leaves."""


class SetOut(Exception):
    """A client takes no part in the run any more, and never will; says why."""

    def __init__(self, client: ClientId, line: str) -> None:
        super().__init__(line)
        self.client = client

    @classmethod
    def of(cls, client: int, why: str) -> Self:
        """Return the error that tells a client why it is out, and what that means for it."""
        return cls(
            client,
            f"client {client} takes no part in this run any more: {why}. What it learned stays in "
            "its --state-dir, and only another run takes it: ask whoever runs the coordinator",
        )


class Superseded(Exception):
    """The order a result answers is no longer wanted."""


class NotReady(Exception):
    """The server cannot answer yet; the caller should try again in a moment."""

    is_fault = False
    """Whether that is worth a line in the log, and may take longer than a moment."""


class SecondRelay(NotReady):
    """Somebody of this name is connected, and the caller is another one."""


class WrongRun(Exception):
    """The caller belongs to another run, or does not fit this run."""
