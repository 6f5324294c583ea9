"""Why a call is refused; the service ends it with the code of its kind."""


class AlreadyConnected(Exception):
    """The id is connected, and the caller's token is not its session's."""


class UnknownSession(Exception):
    """There is no session with this id and token."""


class RunOver(Exception):
    """The run has ended, and its end is committed."""


class RunHasFailed(Exception):
    """The run cannot go on; whoever takes part is told why, and leaves."""


class Superseded(Exception):
    """The order a result answers is no longer wanted."""


class NotReady(Exception):
    """The server cannot answer yet; the caller should try again in a moment."""

    is_fault = False
    """Whether that is worth a line in the log, and may take longer than a moment."""


class WrongRun(Exception):
    """The caller belongs to another run, or does not fit this run."""
