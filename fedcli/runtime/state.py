"""A client's state directory: its private state after each interaction.

A state is written before the upload it belongs to is sent (temporary file, rename), so a crash at
any moment leaves either the old or the new one. Nothing waits for the disk: a background thread
syncs new states, and the newest synced one is reported as durable.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fedcli.runtime.sessions import write_private
from fedmodels.errors import ArchiveError, ArchiveNotRead, ArchiveNotWritten, ArchiveReplaced
from fedmodels.host.files import locked, sync_path, used_without_lock
from fedmodels.host.guarded import Guarded
from fedmodels.tensors import stored
from fedmodels.tensors.archive import PERSONAL, load, save
from fedmodels.tensors.bundle import EVALUATOR, Bundle, ClientId

if TYPE_CHECKING:
    from fedmodels.numerics.secrecy import Secret

_NAME = "state-{:08d}.safetensors"
_SCORED = "scored-{:08d}.safetensors"
SECRET = "secret"
CLASSES = "classes"
log = logging.getLogger(__name__)


class _Syncer:
    """The thread of a process that makes states safe on the disk, one after the other."""

    _thread: Guarded[threading.Thread | None] = Guarded("_starting")

    def __init__(self) -> None:
        self._begin_anew()
        if hasattr(os, "register_at_fork"):  # a fork inherits no thread
            os.register_at_fork(after_in_child=self._begin_anew)

    def _begin_anew(self) -> None:
        self._wanted = queue.SimpleQueue[Callable[[], None]]()
        self._starting = threading.RLock()
        with self._starting:  # of a fork's parent it may have been one
            self._thread = None

    def want(self, sync: Callable[[], None]) -> None:
        """Call ``sync`` soon; start the thread when something is first wanted."""
        self._wanted.put(sync)
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="state-sync", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                self._wanted.get()()
            except Exception:  # the thread is never started again, and others wait for it
                log.exception("a state is not safe on the disk")


_SYNCER = _Syncer()


class StateDirectory:
    """The states of one client; used by the thread that trains."""

    _durable: Guarded[int] = Guarded("_syncing_one")
    _newest: Guarded[int] = Guarded("_syncing_one")
    _unsynced: Guarded[dict[int, object]] = Guarded("_syncing_one")

    def __init__(self, path: Path) -> None:
        """Open a state directory, or make one; raise ArchiveError if it cannot be used."""
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ArchiveError(f"state directory {path}: {error.strerror}") from None
        self._cached: tuple[int, Bundle] | None = None
        self.classes: int | None = None
        """How many classes there are, where they became more while the run went on."""
        self._classes: tuple[int, int | None] = (-1, None)
        """Interaction and number of classes of the state that was loaded or saved last."""
        self._secret: Secret | None = None
        self._syncing_one = threading.RLock()
        """Guards the three values that follow, between this thread and the one that syncs."""
        self._durable = -1
        self._newest = max(self.versions(), default=-1)
        """The last state that counts, or may; later ones are of commits that were rolled back."""
        self._unsynced = {}
        """What stands for each state since it was written last, until that is safe."""
        self._drop_unusable()
        for version in self.versions():  # an earlier process may have died before its sync
            self._sync_soon(version, self._written(version))

    def _drop_unusable(self) -> None:
        """Remove what a crash or a power loss left: cut writes and damaged states.

        Raises:
            ArchiveNotRead: a state cannot be read now.
            ArchiveReplaced: another state is in place of one that was stored.
        """
        for pattern in ("*.tmp", ".*.safetensors.*"):  # also hidden ones
            for leftover in self.path.glob(pattern):
                leftover.unlink()
        is_noted = stored.has_note(self.path)
        for version in self.versions():
            path = self.path / _NAME.format(version)
            try:
                load(path)
            except (ArchiveNotRead, ArchiveReplaced):  # it may be whole, and is whole
                raise
            except ArchiveError as error:
                log.warning("%s; it is dropped", error)
                path.unlink()
                continue
            if is_noted and not stored.noted(path):  # its line did not survive a power loss
                log.warning("%s was never noted as stored; it is dropped", path)
                path.unlink()

    # --- secret -----------------------------------------------------------------------------------

    def secret(self) -> Secret:
        """Return what only this client knows; draw it when it is first asked for.

        It is safe on the disk before it is used, so that a crash changes no noise.

        Raises:
            ArchiveError: it is damaged, or cannot be stored.
        """
        from fedmodels.numerics.secrecy import SECRET_BYTES, Secret  # private runs alone need it

        path = self.path / SECRET
        if self._secret is None:
            try:
                self._secret = Secret(path.read_bytes())
            except FileNotFoundError:
                fresh = Secret.fresh()
                write_private(path, fresh.key)
                self._secret = fresh
            except OSError as error:
                raise ArchiveError(f"cannot read {path}: {error.strerror}") from None
        if len(self._secret.key) != SECRET_BYTES:
            raise ArchiveError(f"{path} is damaged; delete it to draw another")
        return self._secret

    # --- private states ---------------------------------------------------------------------------

    def versions(self) -> list[int]:
        """Return the interactions after which a private state is held, ascending."""
        return sorted(self._numbered("state"))

    def _numbered(self, kind: str) -> dict[int, Path]:
        """Return the files of a kind by interaction; files of other names are somebody else's."""
        files = self.path.glob(f"{kind}-{'[0-9]' * 8}.safetensors")
        return {int(file.stem.partition("-")[2]): file for file in files}

    @property
    def durable(self) -> int:
        """Return the newest state that is safe on the disk; -1 for none."""
        with self._syncing_one:
            return self._durable

    def load(self, base: int, initial: Bundle) -> Bundle:
        """Return the state after ``base``, or ``initial`` for -1; ArchiveError if it is damaged."""
        with self._syncing_one:
            self._newest = base
            self._durable = min(self._durable, base)
        if base < 0:
            return initial
        if self._cached is None or self._cached[0] != base:
            state, facts = load(self.path / _NAME.format(base))
            self._cached = (base, state)
            self._classes = (base, int(facts[CLASSES]) if CLASSES in facts else None)
        return self._cached[1]

    def classes_of(self, base: int) -> int | None:
        """Return how many classes the state that was loaded or saved last was stored with.

        None where its file does not say it: there were those that the run began with.
        """
        known, classes = self._classes
        return classes if known == base else None

    def save(self, interaction: int, state: Bundle) -> None:
        """Write the private state after an interaction."""
        facts = {"interaction": str(interaction)}
        if self.classes is not None:
            facts[CLASSES] = str(self.classes)
        written = self._written(interaction)
        name = _NAME.format(interaction)
        save(self.path / name, state, facts, noted=name)
        self._cached, self._classes = (interaction, state), (interaction, self.classes)
        with self._syncing_one:
            self._newest = interaction
        self._sync_soon(interaction, written)

    def _written(self, version: int) -> object:
        """Return what stands for a state from now on: a sync that began before counts no more."""
        fresh = object()
        with self._syncing_one:
            self._unsynced[version] = fresh
        return fresh

    def _sync_soon(self, version: int, written: object) -> None:
        _SYNCER.want(partial(self._sync_state, version, written))

    def held_bytes(self) -> int:
        """Return the bytes of the state that is in memory."""
        return self._cached[1].num_bytes() if self._cached else 0

    def drop_cached(self) -> None:
        """Free the state that is in memory; the next order reads it from the disk."""
        self._cached = None

    def settle(self, base: int, committed: int) -> None:
        """Delete states after ``base``, the client's last one that counts, up to ``committed``.

        Those after the last commit stay: after a roll-back they may count again.
        """
        for version in self.versions():
            if base < version <= committed:
                (self.path / _NAME.format(version)).unlink(missing_ok=True)

    def prune(self, watermark: int) -> None:
        """Delete states that no roll-back to the watermark can ask for."""
        versions = self.versions()
        needed = max((v for v in versions if v <= watermark), default=-1)
        for version in versions:
            if version < needed:
                (self.path / _NAME.format(version)).unlink(missing_ok=True)

    # --- models -----------------------------------------------------------------------------------

    def keep_scored(
        self, interaction: int, base: int, weights: Bundle, description: Mapping[str, str]
    ) -> None:
        """Keep the model that was scored after an interaction, safely on the disk.

        What is older than ``base``, the last interaction of this client that counts, goes.
        """
        for number, path in self._numbered("scored").items():
            if number < base:
                path.unlink(missing_ok=True)
        name = _SCORED.format(interaction)
        save(self.path / name, weights, description, fsync=True, noted=name)

    def scored(self, interaction: int) -> tuple[Bundle, Mapping[str, str], Path] | None:
        """Return the model scored after an interaction, what it is, and its file, if there is one.

        Raises:
            ArchiveError: it is damaged.
        """
        place = self.path / _SCORED.format(interaction)
        return (*load(place), place) if interaction >= 0 and place.exists() else None

    def save_personal(
        self, weights: Bundle, description: Mapping[str, str], same_as: Path | None = None
    ) -> None:
        """Store the final personal model and what it is, safely on the disk.

        Nobody asks for it again once the run is over. A file that holds both already gets another
        name, and nothing is written.
        """
        place = self.path / PERSONAL
        if same_as is None:
            return save(place, weights, description, fsync=True, noted=PERSONAL)
        try:
            stored.give_name(same_as, place)
        except OSError as error:
            raise ArchiveNotWritten(f"cannot write {place}: {error.strerror}") from None

    def _sync_state(self, version: int, written: object) -> None:
        """Make a state safe; it counts unless the run went back, or it was written again since."""
        synced = self._sync(self.path / _NAME.format(version))
        with self._syncing_one:
            if self._unsynced.get(version) is not written:
                return
            del self._unsynced[version]
            if synced and version <= self._newest:
                self._durable = max(self._durable, version)

    def _sync(self, path: Path) -> bool:
        try:
            for place in (path.with_name(stored.NOTE), path, self.path):
                sync_path(place)
        except FileNotFoundError:
            return False
        except OSError as error:
            log.error("%s is not safe on the disk: %s", path, error.strerror)
            return False
        return True


# --- the lock -------------------------------------------------------------------------------------


LOCK = ".lock"
"""The file of a ``--state-dir`` in which the byte at a client's id is locked."""
EVALUATORS_BYTE = 1 << 30


def lock_states(states: Path, clients: Sequence[ClientId]) -> int | None:
    """Lock the states of clients until the returned file is closed, or the process ends.

    Two processes of one client would spoil its states.

    Returns:
        The open file. None if the file cannot be made: the first write of a state then fails
        with its own line. A file system without locks is no error, and gets a line.

    Raises:
        ArchiveError: another process has one of the clients.
    """
    try:
        states.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(states / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        return None
    for client in clients:
        place = EVALUATORS_BYTE if client == EVALUATOR else int(client)
        try:
            is_free = locked(handle, place)
        except OSError as error:
            used_without_lock(states, error)
            continue
        if not is_free:
            os.close(handle)
            raise ArchiveError(
                f"client {client} runs already, with its state in {states}; wait until that "
                "process has ended, or give another --state-dir"
            )
    return handle
