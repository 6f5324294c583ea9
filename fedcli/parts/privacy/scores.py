"""How many models a site lets be scored on its test examples: ``fedcli join --scores``.

No noise covers a score, and no epsilon tells of test examples. So a site allows a number of models
over all runs, and its own file counts them: the same model on the same examples, asked again, is
one. What a coordinator orders plays no part.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from fedcli.parts.privacy.ledger_marks import LedgerMark
from fedmodels.config.experiment import Experiment
from fedmodels.config.privacy import LEDGER
from fedmodels.privacy.ledger_file import LedgerFile
from fedmodels.tensors.bundle import ClientId

_TABLES = {"scores": "name TEXT PRIMARY KEY, what TEXT NOT NULL, seconds INTEGER NOT NULL"}
log = logging.getLogger(__name__)


class ScoreLedger:
    """The models that a site's clients scored; used by the thread that trains."""

    def __init__(self, most: int, path: Path) -> None:
        """Open nothing yet; ``most`` models are scored in all."""
        self.most, self.path = most, path
        self._file: LedgerFile | None = None
        self._is_said = False
        self._marks: dict[Path, LedgerMark] = {}

    def joined(self, experiment: Experiment, run_id: str, clients: Sequence[ClientId]) -> None:
        """Look at a run that the site's rules allow."""

    def takes(self, name: str, what: str, states: Path) -> bool:
        """Count a score before it is made, by its name; False where there were enough.

        ``states`` is the state directory of its client.

        Raises:
            ArchiveError: the file cannot be used, or was put back.
        """
        if self.most == 0:
            return self._refuses(what)
        if self._file is None:
            self._file = LedgerFile(self.path, _TABLES)
        mark = self._marks.setdefault(states, LedgerMark(states, "site, scores", "scores"))
        mark.check(self._file)
        if self._file.adds("scores", (name, what, int(time.time())), self.most):
            mark.set(self._file)
            return True
        return self._refuses(what)

    def _refuses(self, what: str) -> bool:
        if not self._is_said:
            self._is_said = True
            log.warning(
                "%s: not scored, and no later model is: this site allows %s (--scores)", what,
                f"{self.most} models over all runs" if self.most else "none",
            )  # fmt: skip
        return False


def score_ledger(most: int, ledger: Path | None, states: Path) -> ScoreLedger:
    """Return what counts scored models: in the site's ledger, beside its states by default."""
    return ScoreLedger(most, ledger or states.absolute().parent / LEDGER)
