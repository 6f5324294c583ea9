"""The committed states of a run as files: one per interaction, and the parts they name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from fedmodels.errors import ArchiveError, ArchiveNotRead
from fedmodels.files import sync_path
from fedmodels.tensors.archive import load_named, save_named
from fedmodels.tensors.bundle import Bundle
from fedmodels.training.contexts import ServerState
from fedsrv.state.client_parts import ClientParts, Manifest
from fedsrv.state.run_directory import state_numbers


class StateFiles:
    """The states of one run."""

    def __init__(self, directory: Path, run_id: str, *, strict: bool) -> None:
        """List the states in a directory.

        Args:
            directory: the directory of the states.
            run_id: the run's id; a state of another run counts as damaged.
            strict: sync each state when it is written.
        """
        self.directory, self.run_id, self.strict = directory, run_id, strict
        self.kept = state_numbers(directory)
        """Interactions after which the state is kept."""
        self._parts = ClientParts(directory)
        self._manifests: dict[int, Manifest] = {}
        self._synced: set[str] = set()
        """Part files that are safe on the disk; written by the syncing thread alone."""

    def path(self, interaction: int) -> Path:
        """Return the file of the state after an interaction."""
        return self.directory / f"state-{interaction:08d}.safetensors"

    def read(self, interaction: int, *, aside: bool = False) -> ServerState:
        """Return the state after an interaction.

        Args:
            interaction: which.
            aside: read the state alone; the next commit does not build on it.

        Raises:
            ArchiveError: a file of it is gone, damaged or of another run.
        """
        named, header = load_named(self.path(interaction))
        if header.get("run") != self.run_id:
            raise ArchiveError(f"{self.path(interaction)} belongs to another run")
        parts = ClientParts(self.directory) if aside else self._parts
        clients = parts.load(self._manifest(interaction))
        common, own, moments = (named.get(k, Bundle()) for k in ("common", "own", "optimizer"))
        return ServerState(common, own, clients, moments)

    def why_unusable(self, interaction: int) -> str:
        """Return why a state is of no use; an empty text if it can be read.

        Raises:
            ArchiveNotRead: it may be whole, but cannot be read now.
        """
        try:
            self.read(interaction, aside=True)
        except ArchiveNotRead:
            raise
        except ArchiveError as error:
            return str(error)
        return ""

    def exists(self, interaction: int) -> bool:
        """Tell whether all files of a state are there.

        Raises:
            ArchiveNotRead: its file cannot be read now.
        """
        if not self.path(interaction).exists():
            return False
        try:
            return self._parts.exist(self._manifest(interaction))
        except ArchiveNotRead:
            raise
        except ArchiveError:
            return False

    def write(self, interaction: int, state: ServerState) -> None:
        """Write a state, and the parts that changed since the last one.

        Raises:
            ArchiveError: a file cannot be written.
        """
        header = {"run": self.run_id}
        parts = self._parts.save(interaction, state, header, fsync=self.strict)
        facts = {**header, "parts": parts}
        bundles = {name: bundle for name, bundle in state.named() if "/" not in name}
        save_named(self.path(interaction), bundles, facts, fsync=self.strict)
        self.kept.add(interaction)
        self._manifests[interaction] = parts

    def forget(self) -> None:
        """Forget written parts after a roll-back: the next commit writes and syncs all."""
        self._parts.forget()
        self._synced = set()

    def drop(self, interactions: Iterable[int]) -> None:
        """Delete states, and the parts that no remaining state names."""
        gone = set(interactions)
        for number in gone:
            self.path(number).unlink(missing_ok=True)
        self.kept -= gone
        manifests = [self._manifests.pop(number, None) for number in gone]
        if any(manifests):
            self.drop_parts()

    def drop_parts(self) -> None:
        """Delete the parts that no state file names any more.

        Raises:
            ArchiveNotRead: a state cannot be read now, so nobody knows what it names.
        """
        manifests: dict[int, Manifest] = {}
        for interaction in sorted(self.kept):
            try:
                manifests[interaction] = self._manifest(interaction)
            except ArchiveNotRead:
                raise
            except ArchiveError:
                continue
        self._manifests = manifests
        self._parts.drop(manifests.values())

    def _manifest(self, interaction: int) -> Manifest:
        """Return the file of each part of the state after an interaction.

        Raises:
            ArchiveError: the state file is gone or damaged.
        """
        if interaction not in self._manifests:
            _, header = load_named(self.path(interaction), verify=False)
            self._manifests[interaction] = dict(header.get("parts", {}))
        return self._manifests[interaction]

    def sync(self, interaction: int) -> None:
        """Sync a state and its parts."""
        files = self._manifests.get(interaction, {}).values()
        parts = [self.directory / name for name in files if name not in self._synced]
        for path in (*parts, self.path(interaction), self.directory):
            with contextlib.suppress(FileNotFoundError):  # it is dropped meanwhile
                sync_path(path)
        self._synced = set(files)
