"""The models that a client serves while it trains: the live one, and those before.

    STATES/<id>/model/current.safetensors    the live model; after the first one never missing
    STATES/<id>/model/previous.safetensors   the one that was live before
    STATES/<id>/model/kept/20261129-101500-round-12-task-3.safetensors
                                             one that was live before, by when it went live (UTC)
    STATES/<id>/model/status.json            counts, and what happened last

A file is written beside its place, synced and renamed. So a reader, and a crash between any two
steps, finds a whole live model.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedmodels.errors import ArchiveError, DataError, reason_of
from fedmodels.host.files import (
    LEFTOVER,
    locked,
    read_regular,
    sync_path,
    used_without_lock,
    write_atomically,
)
from fedmodels.nets.trained import KEY, ModelFacts
from fedmodels.tensors import stored
from fedmodels.tensors.archive import LIVE, load, save
from fedmodels.tensors.bundle import Bundle
from fedmodels.times import ASK_AGAIN_S, LOCK_S

CURRENT, PREVIOUS, KEPT = "current.safetensors", "previous.safetensors", "kept"
DIGEST, AFTER, STAGE = "sha256", "interaction", "task"
"""Keys of the header of a live model's file: the digest of the weights, the interaction after which
the model stood, and the task that its client was on, as people count."""
_NAME = re.compile(r"(\d{8}-\d{6})-round-(\d+)-task-(\d+)\.safetensors")
_DATE = re.compile(r"(\d{4})-(\d\d)-(\d\d)(?:T(\d\d):(\d\d)(?::(\d\d))?)?")
MAX_SHOWN = 20
Count = Annotated[int, Field(ge=0)]


class Status(BaseModel):
    """What happened to the live model so far."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    went_live: Count = 0
    """Models that went live."""
    refused: Count = 0
    """Models that the guard kept from going live."""
    rollbacks: Count = 0
    """How often the model before went live again, as a user asked."""
    held: bool = False
    """Whether the model stays until it is released, as after a roll-back."""
    last: str = ""
    """What happened last."""
    refused_sha256: str = ""
    """Weights of the model that was refused last: a client that trains again after a crash offers
    it again."""


class Deployed:
    """The folder of one client's live model; several processes may use it."""

    def __init__(self, states: Path) -> None:
        """Name the folder of a client's state directory; nothing is made yet."""
        self.folder = states / LIVE
        self.current, self.previous = self.folder / CURRENT, self.folder / PREVIOUS

    def status(self) -> Status:
        """Return what happened so far; nothing where the file is missing or damaged."""
        try:
            return Status.model_validate_json(read_regular(self.folder / "status.json"))
        except (OSError, ValidationError):
            return Status()

    def clear_leftovers(self) -> None:
        """Remove what a crash in the middle of a write left."""
        with self._locked():
            for leftover in self.folder.glob(LEFTOVER):
                leftover.unlink(missing_ok=True)

    def go_live(
        self,
        weights: Bundle,
        header: Mapping[str, Any],
        before: str,
        line: str,
        kept_bytes: int = 0,
    ) -> bool:
        """Put a model live unless another process has changed the live one; tell whether it did.

        ``before`` is the digest of the model that it was compared with, empty for none; the header
        has the keys of this module, and the status gets the line. ``kept_bytes`` bounds the models
        that are kept beside the two last ones.

        Raises:
            ArchiveError: the model cannot be written.
        """
        candidate = self.folder / ".candidate.tmp"
        with self._locked():
            was = self.status()
            if was.held or self.digest() != before:
                return False
            if before:
                stored.give_name(self.current, self.previous)
                self._keep(kept_bytes)
            save(candidate, weights, header, fsync=True, noted=CURRENT)
            candidate.replace(self.current)
            sync_path(self.folder)
            self._note(was, line, went_live=was.went_live + 1)
        return True

    def refuse(self, digest: str, line: str) -> bool:
        """Note that a model was refused; tell whether that is news."""
        with self._locked():
            was = self.status()
            if was.refused_sha256 == digest:
                return False
            self._note(was, line, refused=was.refused + 1, refused_sha256=digest)
        return True

    def digest(self) -> str:
        """Return the digest of the live model's weights; empty where there is no whole one."""
        return digest_in(self.current)

    def _keep(self, most: int) -> None:
        """Keep the live model for later roll-backs; the others go that find no room beside it.

        First go the oldest of tasks that have a newer one, so that each task keeps its last model
        for as long as there is room.
        """
        try:
            facts = load(self.current, verify=False)[1]
            round = ModelFacts.parse(facts[KEY], str(self.current)).round + 1
        except (ArchiveError, KeyError):
            return  # whoever reads it says so
        place = self.folder / KEPT
        place.mkdir(exist_ok=True)
        name = f"{_date_of(self.current)}-round-{round}-task-{facts.get(STAGE, 0)}"
        stored.give_name(self.current, place / f"{name}.safetensors")
        files = self.kept()
        sizes = {path: path.stat().st_size for path in files}
        while files and sum(sizes[path] for path in files) > most:
            tasks = [_task_of(path) for path in files]
            older = (path for n, path in enumerate(files) if tasks[n] in tasks[n + 1 :])
            files.remove(gone := next(older, files[0]))
            gone.unlink()

    def kept(self) -> list[Path]:
        """Return the models that were live before, the oldest first."""
        return sorted(p for p in (self.folder / KEPT).glob("*") if _NAME.fullmatch(p.name))

    def _chosen(self, to: str) -> Path:
        """Return the kept model of a round, or the last one of a task or up to a date."""
        files = self.kept()
        if (date := _DATE.fullmatch(to)) is not None:
            parts = [part or last for part, last in zip(date.groups(), _END, strict=True)]
            latest = f"{''.join(parts[:3])}-{''.join(parts[3:])}"
            fits = [path for path in files if path.name[: len(latest)] <= latest]
            live = _date_of(self.current)
            is_newest = not files or files[-1].name[: len(live)] < live
            if is_newest and live[: len(latest)] <= latest:
                raise DataError(f"the live model is the last one up to {to}: name an earlier time")
        elif (task := re.fullmatch(r"task-(\d+)", to)) is not None:
            fits = [path for path in files if _task_of(path) == task[1]]
        elif to.isdecimal():
            fits = [path for path in files if f"-round-{int(to)}-" in path.name]
        else:
            raise DataError(
                f"--to {to!r} is no round (12), no task-3, and no date (2026-11-29T10:15)"
            )
        if not fits:
            shown = ", ".join(path.stem for path in files[-MAX_SHOWN:]) or "none"
            raise DataError(f"{self.folder / KEPT} has no model of --to {to}; there are: {shown}")
        return fits[-1]

    def roll_back(self, to: str = "") -> str:
        """Put the model before live, and hold it; return a line that says which ones.

        Args:
            to: a kept one instead: a round, ``task-N``, or a date in UTC.

        Raises:
            DataError: there is none before, or none that is meant.
            ArchiveError: a file cannot be used.
        """
        with self._locked():
            if not self.current.is_file():
                raise DataError(f"{self.folder} holds no live model to roll back from")
            source = self._chosen(to) if to else self.previous
            if not source.is_file() or digest_in(source) == self.digest():
                raise DataError(f"{self.folder} holds no model from before the live one")
            load(source)
            back, was = moment_of(source), self.status()
            try:
                now = f"that of {moment_of(self.current)}"
            except ArchiveError:
                now = "a damaged one"
            line = f"rolled back to the model of {back}, from {now}"
            # Held first: a client that goes on must not replace what was rolled back to.
            self._note(was, line, held=True, rollbacks=was.rollbacks + 1)
            if to:
                stored.give_name(source, self.current)
            else:
                stored.note_as(self.current, source)
                source.replace(self.current)
            sync_path(self.folder)
        return line

    def release(self) -> bool:
        """Let later models go live again; tell whether they were held back."""
        with self._locked():
            was = self.status()
            if was.held:
                self._note(was, "released: later models go live again", held=False)
        return was.held

    def _note(self, was: Status, line: str, **changed: object) -> None:
        now = was.model_copy(update={**changed, "last": line})
        write_atomically(self.folder / "status.json", now.model_dump_json() + "\n", sync=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes from changing the folder; ArchiveError if that is not possible."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ArchiveError(f"{self.folder} cannot be used: {reason_of(error)}") from None
        try:
            last = time.monotonic() + LOCK_S
            while not self._is_free(handle):
                if time.monotonic() > last:
                    raise ArchiveError(f"another process changes {self.folder} all the time")
                time.sleep(ASK_AGAIN_S)
            yield
        except OSError as error:
            raise ArchiveError(f"{self.folder} cannot be changed: {reason_of(error)}") from None
        finally:
            os.close(handle)

    def _is_free(self, handle: int) -> bool:
        try:
            return locked(handle)
        except OSError as error:
            used_without_lock(self.folder, error)
            return True


_END = ("", "", "", "23", "59", "59")
"""What a date stands for that leaves out hours, minutes or seconds: their last moment."""


def _date_of(file: Path) -> str:
    """Return when a model went live, as names of kept ones begin."""
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime(file.stat().st_mtime))


def _task_of(path: Path) -> str:
    """Return of which task a kept model is."""
    found = _NAME.fullmatch(path.name)
    return found[3] if found else ""


def digest_in(file: Path) -> str:
    """Return the digest of the weights in a live model's file; empty where it is no whole one."""
    try:
        return str(load(file, verify=False)[1].get(DIGEST, ""))
    except ArchiveError:
        return ""


def moment_of(file: Path) -> str:
    """Return which of a client's models a file holds, as people count; ArchiveError if damaged."""
    try:
        header = load(file, verify=False)[1]
        round = ModelFacts.parse(header[KEY], str(file)).round
        return f"round {round + 1} (interaction {int(header[AFTER]) + 1})"
    except (KeyError, TypeError, ValueError):
        raise ArchiveError(f"{file} does not say of which round its model is") from None
