"""Every error a user can cause, as one tree.

FedtideError                     one clear line for the user; ``exit_code`` says how a command ends
├── ConfigError                  a config, an option or a hyper-parameter is wrong        (exit 2)
│   └── RecipeError              a site's recipe cannot be read, or is malformed
├── DataError                    a data set or a client's directory is missing or wrong   (exit 1)
├── ArchiveError                 a file of a run cannot be used                           (exit 1)
│   ├── ArchiveNotWritten        the disk is full, or fails
│   └── ArchiveNotRead           it may be whole, but cannot be read now
├── PayloadError                 a message does not hold what it must
│   └── PayloadTooLarge          it claims or carries more bytes than it may
├── ClientFailed                 one client failed; names it, the round and the work
├── OrderDeclined                a client does not train: it would spend too much of privacy
├── TrainingFailed               a client's training diverged
├── RunFailed                    the run cannot go on                                     (exit 1)
│   └── TooFewClients            too many clients failed in an interaction
├── RunStopped                   the run was asked to stop, and can be resumed            (exit 143)
│   └── Interrupted              by Ctrl-C                                                (exit 130)
└── LinkError                    the server refused, or cannot be reached any more        (exit 1)
    └── SetOut                   the run goes on without this client, for good            (exit 3)
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from importlib.metadata import requires
from typing import Any

MAX_LETTERS = 200
"""Of a word that may be meant for a known one."""
SAME = {
    **dict.fromkeys(("dir", "directory", "file", "folder", "path"), "root"),
    **dict.fromkeys(("epochs", "num_epochs"), "local_epochs"),
    **dict.fromkeys(("learning_rate", "eta"), "lr"),
    **dict.fromkeys(("num_clients", "n_clients"), "clients"),
    **dict.fromkeys(("num_rounds", "n_rounds"), "rounds"),
}
"""What others call a key, and its name here: no letters lead from one to the other."""


class FedtideError(Exception):
    """One clear line for the user: what is wrong, where, and what to do."""

    exit_code = 1

    @property
    def lines(self) -> list[str]:
        """Lines that stand below: what may be pasted to mend it."""
        return [line for note in getattr(self, "__notes__", ()) for line in note.split("\n")]


class ConfigError(FedtideError):
    """A config, an option or a hyper-parameter is wrong."""

    exit_code = 2

    @classmethod
    def like(cls, error: FedtideError) -> ConfigError:
        """Return another error as one that the same command again does not mend."""
        made = cls(str(error))
        for note in getattr(error, "__notes__", ()):
            made.add_note(note)
        return made


class RecipeError(ConfigError):
    """The recipe of a site cannot be read, or says what it must not."""


class DataError(FedtideError):
    """A data set, or the directory of a client, is missing or does not hold what it must."""


class ArchiveError(FedtideError):
    """A file of a run is missing, damaged or belongs to another run."""


class ArchiveNotWritten(ArchiveError):
    """A file of a run cannot be written: the disk is full, or fails."""


class ArchiveNotRead(ArchiveError):
    """A file of a run cannot be read now, and may be whole: rights or memory are missing, say."""


class ArchiveReplaced(ArchiveError):
    """A file is whole, and is not the one that was stored under its name."""


class PayloadError(FedtideError):
    """A message does not hold what the method, the net and the problem say it must."""


class PayloadTooLarge(PayloadError):
    """A message claims or carries more bytes than its receiver allows."""


class ClientFailed(FedtideError):
    """One client failed in one interaction."""

    def __init__(self, client: object, round: int, work: str, reason: str) -> None:
        super().__init__(f"client {client} failed in round {round + 1} ({work}): {reason}")
        self.client, self.round, self.work, self.reason = client, round, work, reason


class OrderDeclined(FedtideError):
    """A client does not do what an order says: a limit of privacy, of its own or the run's."""

    SAID = "declined: "
    """How the reason begins in records; what a client says of its kind decides it."""


class TrainingFailed(FedtideError):
    """A client's training diverged: its loss is not finite."""


class RunFailed(FedtideError):
    """The run cannot go on."""


class TooFewClients(RunFailed):
    """Too many clients failed in an interaction for the run to go on."""

    def __init__(
        self, line: str, reasons: Mapping[Any, str] | None = None, advice: str = ""
    ) -> None:
        super().__init__(f"{line}{advice}")
        self.line = line
        """What happened, without what to do."""
        self.reasons = dict(reasons or {})
        """Why each client failed, where it is the clients."""


class RunStopped(FedtideError):
    """The run was asked to stop (SIGTERM), and stopped where it can be resumed."""

    exit_code = 143


class Interrupted(RunStopped):
    """Ctrl-C stopped the run, which can be resumed."""

    exit_code = 130


class LinkError(FedtideError):
    """The server refused this client, or cannot be reached any more."""


class SetOut(LinkError):
    """The run goes on without a client of this process for good: the same command is in vain."""

    exit_code = 3

    def __init__(self, line: str, client: int) -> None:
        super().__init__(line)
        self.client = client


def reason_of(error: Exception) -> str:
    """Return why a file that a line names is of no use: the system's words, without a number."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the known word nearest to ``word``, or nothing."""
    if len(word) > MAX_LETTERS:
        return ""  # to compare it would take minutes
    known = [*known]
    if (meant := SAME.get(word)) in known:
        return f" Did you mean {meant!r}?"
    near = difflib.get_close_matches(word, known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def pip_line(extra: str) -> str:
    """Return the command that installs the packages of an extra.

    It names the packages themselves, so it works wherever fedtide came from: a wheel, a clone or a
    package index.

    Raises:
        ConfigError: fedtide has no such extra.
    """
    lines = [line.partition(";") for line in requires("fedtide") or ()]
    needed = [
        f"'{package.strip()}'" for package, _, marker in lines
        if marker.replace('"', "'").replace(" ", "") == f"extra=='{extra}'"
    ]  # fmt: skip
    if not needed:
        raise ConfigError(f"fedtide has no extra {extra!r}")
    return f"pip install {' '.join(needed)}"
