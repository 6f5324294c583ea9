"""A watched folder: each new file gets the model's answer as a CSV beside it."""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fedcli.data.folders import TABLE_ENDS, is_foreign
from fedcli.data.image_files import ENDS
from fedcli.data.own.new_inputs import ARRAYS
from fedcli.data.settled import Settled
from fedcli.predicting.live_model import LiveModel, Loaded, NoModelYet
from fedcli.predicting.prediction import predictions, write_csv
from fedmodels.console.printable import printable
from fedmodels.errors import DataError, FedtideError, reason_of
from fedmodels.host.files import write_atomically
from fedmodels.host.machine import end_if_signalled
from fedmodels.times import FOLDER_LOOK_S

ANSWER, REFUSAL = ".predictions.csv", ".error.txt"
"""How the name of an answer goes on after that of its file."""
KINDS = (*ENDS, *TABLE_ENDS, ARRAYS, ".zip")
log = logging.getLogger(__name__)


@dataclass
class WatchedFolder:
    """The files of a folder that have no answer yet.

    A file is complete once it has come to rest (:mod:`fedcli.data.settled`). An answer has the time
    of its file, so a file that is replaced is answered again, also after a restart.
    """

    place: Path
    live: LiveModel
    _settled: Settled = field(default_factory=Settled, init=False)
    _waits: bool = field(default=False, init=False)

    def answers(self) -> Iterator[str]:
        """Yield a line for each file that is answered; DataError if the folder cannot be read."""
        times = self._open_files()
        complete = self._settled.among(times)
        if not complete:
            return
        try:
            now = self.live.now()
        except NoModelYet as error:
            if not self._waits:
                yield f"waiting: {error}"
            self._waits = True
            return
        self._waits = False
        for path in complete:
            yield self._answer(path, now, times[path])

    def watch(self) -> Iterator[str]:
        """Look again and again."""
        while True:
            end_if_signalled()
            yield from self.answers()
            time.sleep(FOLDER_LOOK_S)

    def _open_files(self) -> dict[Path, int]:
        """Return the files that have no answer, or that of another content, and their times."""
        found = dict[Path, int]()
        try:
            with os.scandir(self.place) as entries:
                all_of = {entry.name: facts for entry in entries if (facts := _facts(entry))}
        except OSError as error:
            raise DataError(f"{self.place} cannot be read: {reason_of(error)}") from None
        for name, facts in all_of.items():
            if is_foreign(name) or name.endswith((ANSWER, REFUSAL)):
                continue
            if not name.lower().endswith(KINDS):
                continue
            given = (all_of.get(name + end) for end in (ANSWER, REFUSAL))
            if not any(one and one.st_mtime_ns == facts.st_mtime_ns for one in given):
                found[self.place / name] = facts.st_mtime_ns
        return found

    def _answer(self, path: Path, now: Loaded, time_ns: int) -> str:
        """Write the answer to a file of a time, or why there is none; return a line about it."""
        answer, refusal = (path.with_name(path.name + end) for end in (ANSWER, REFUSAL))
        try:
            try:
                found = predictions(now.model, now.file, [path])
                told = [*write_csv(found, now.model, answer)]
                line, written, other = f"{told[0]}, by the model of {now.moment}", answer, refusal
            except FedtideError as error:
                line, written, other = f"not answered: {printable(str(error))}", refusal, answer
                write_atomically(refusal, f"{printable(str(error))}\n")
            other.unlink(missing_ok=True)
            os.utime(written, ns=(time_ns,) * 2)
        except OSError as error:
            raise DataError(f"no answer to {path} can be written: {reason_of(error)}") from None
        return line


def _facts(entry: os.DirEntry[str]) -> os.stat_result | None:
    """Return the facts of a regular file; a link that leads elsewhere is nobody's new file."""
    try:
        facts = entry.stat(follow_symlinks=False)
    except OSError:  # it went away meanwhile
        return None
    return facts if stat.S_ISREG(facts.st_mode) else None
