"""The model that answers now: read again whenever its file is replaced."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedcli.data.own.new_inputs import read_by
from fedcli.predicting.prediction import places_of
from fedcli.runtime.deployed import Deployed, Status
from fedcli.runtime.sessions import SessionFile
from fedmodels.errors import ArchiveError, DataError, FedtideError, reason_of
from fedmodels.host.files import Stamp, stamp_of
from fedmodels.host.guarded import Guarded
from fedmodels.nets.trained import KEY, ModelFacts, TrainedModel
from fedmodels.tensors.archive import PERSONAL, header_in

log = logging.getLogger(__name__)


class NoModelYet(DataError):
    """A client has no model so far."""


@dataclass(frozen=True)
class Loaded:
    """A model in memory, and the file that it came from."""

    model: TrainedModel
    file: Path
    sha256: str
    """Digest of the file's bytes, as ``sha256sum`` gives it."""
    run: str = ""
    """Id of the run that made it, where the client's directory says so."""

    @property
    def moment(self) -> str:
        """Which of the client's models it is."""
        return f"round {self.model.facts.round + 1}"


class LiveModel:
    """The model in the first of some files that exists; safe between threads."""

    _loaded: Guarded[Loaded | None] = Guarded("_lock")
    _stamped: Guarded[tuple[Path, Stamp] | None] = Guarded("_lock")
    """The file that was read last, and its stamp then: another model has another one."""
    _looked: Guarded[tuple[tuple[Path, Stamp] | None, int]] = Guarded("_lock")
    """The file whose round was asked for last without reading it, and that round."""

    def __init__(
        self,
        files: Sequence[Path],
        whose: str,
        folders: Sequence[Deployed] = (),
        recipe: Path | None = None,
    ) -> None:
        """Read nothing yet; of the files, the first one that is there holds the model.

        An error names whose it is; the folders are where the client's live models may be. A
        ``recipe`` stands in place of the one that each model carries.
        """
        self._recipe = recipe
        self._files, self._whose, self._folders = files, whose, folders
        self._lock, self._reading = threading.RLock(), threading.Lock()
        self._loaded, self._stamped, self._looked = None, None, (None, 0)
        self.reads = 0
        """How many models were read."""

    @classmethod
    def of(cls, run: Path, client: int, recipe: Path | None = None) -> LiveModel:
        """Return the live model of a client; without one, what it stored at the end of its run.

        Raises:
            DataError: the client has no directory there.
        """
        places = [place for place in places_of(run, client) if place.is_dir()]
        if not places:
            raise DataError(
                f"{run} has no directory of client {client}: give RUN of fedsrv launch, or its own "
                "--state-dir, as --run"
            )
        folders = [Deployed(place) for place in places]
        files = [folder.current for folder in folders] + [place / PERSONAL for place in places]
        return cls(files, f"client {client}", folders, recipe)

    def status(self) -> Status:
        """Return what happened to the live model; nothing for a model that is a file alone."""
        return next((f.status() for f in self._folders if f.folder.is_dir()), Status())

    def now(self) -> Loaded:
        """Return the model that is live now.

        Raises:
            NoModelYet: there is none so far.
            FedtideError: it cannot be used, and none was read before.
        """
        with self._reading:
            while (first := self._first()) is not None and self._is_new(first):
                self._read(first[0])  # another look: it may have been replaced meanwhile
            if (found := self.loaded) is None:
                raise NoModelYet(
                    f"{self._whose} has no model yet: the first one is live after a round, where "
                    "it joined with --deploy or the run's config has [deploy]"
                )
            return found

    def _is_new(self, first: tuple[Path, Stamp]) -> bool:
        with self._lock:
            before, self._stamped = self._stamped, first
            return before != first

    @property
    def round(self) -> int:
        """The round of the live model, from 1, without reading its weights; 0: none yet."""
        first = self._first()
        with self._lock:
            stamped, looked, loaded = self._stamped, self._looked, self._loaded
        if first is not None and first not in (stamped, looked[0]):
            with suppress(ArchiveError, KeyError):  # a damaged one does not go live
                facts = ModelFacts.parse(header_in(first[0])[KEY], str(first[0]))
                with self._lock:
                    self._looked = looked = first, facts.round + 1
        if first is not None and first == looked[0] != stamped:
            return looked[1]
        return 0 if loaded is None else loaded.model.facts.round + 1

    @property
    def loaded(self) -> Loaded | None:
        """The model that was live when somebody asked last; waits for no model that is read."""
        with self._lock:
            return self._loaded

    def _first(self) -> tuple[Path, Stamp] | None:
        """Return the file that holds the model now, and its stamp."""
        there = ((file, stamp) for file in self._files if (stamp := stamp_of(file)))
        return next(there, None)

    def _read(self, file: Path) -> None:
        try:
            model = TrainedModel.load(file)
            if self._recipe is not None:
                model.facts = read_by(self._recipe, model.facts, file)
            found = Loaded(model, file, _digest_of(file), self._run())
        except FedtideError as error:
            with self._lock:
                if self._loaded is None:
                    self._stamped = None
                    raise
            log.warning("%s; the previous model continues to answer", error)
            return
        with self._lock:
            self._loaded = found
        self.reads += 1
        for caveat in found.model.caveats() if self.reads == 1 else ():
            log.warning("note: %s", caveat)

    def _run(self) -> str:
        """Return the id of the client's run; nothing where its directory does not say it."""
        states = [one.folder.parent for one in self._folders]
        for place in [place for own in states for place in (own, own.parent)]:
            with suppress(ArchiveError):
                if found := SessionFile(place).read().run_id:
                    return found
        return ""


def _digest_of(file: Path) -> str:
    """Return the sha256 of a file's bytes; of one that is gone meanwhile there is another one."""
    try:
        with file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise ArchiveError(f"{file} cannot be read: {reason_of(error)}") from None
