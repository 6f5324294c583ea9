"""The committed states of a run as files: one for each interaction, and the parts that it names.

What the server's state holds for each client may be much, and most of it unchanged, as with every
client's generators. So it lies in files that are written when it changes. A *part* is a client's
bundle without its generators, or one generator. The state file of an interaction names the file of
each part, and a file is kept as long as a state file names it::

    part-clients-3-00000007.safetensors      the bundle clients/3 without its generators
    part-clients-3-4-00000002.safetensors    its generator "4", unchanged since interaction 2

It also has the sha256 of each of these files. So the sha256 of a state file, which the run's
history states, covers all that belongs to the state.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fedmodels.console.printable import printable
from fedmodels.errors import ArchiveError, ArchiveNotRead, reason_of
from fedmodels.host.files import sha256_of
from fedmodels.tensors.archive import header_in, load, load_named, save, save_named
from fedmodels.tensors.bundle import Bundle, GeneratorState
from fedmodels.training.contexts import ServerState
from fedsrv.state.owner import Owned, Owner
from fedsrv.state.run_directory import state_numbers

_PART = re.compile(r"clients/([0-9]{1,9})(?:/(?P<key>.+))?")
_FILE = re.compile(r"part-[^/]+\.safetensors")
Content = Bundle | GeneratorState
Manifest = dict[str, str]
"""The file of each part: ``clients/3`` is a bundle without generators, ``clients/3/4`` generator 4.
"""


class ClientParts:
    """The files of the parts in a directory of states."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._held: dict[str, tuple[Content, str]] = {}
        """By part: the object that was written to a file or read from it, and that file."""
        self.digests: dict[str, str] = {}
        """The sha256 of each of these files."""

    def save(
        self, number: int, state: ServerState, header: Mapping[str, str], *, fsync: bool
    ) -> Manifest:
        """Write the parts that have changed since the last commit; return the files of all parts.

        What changes becomes a new object, so a part that is the same object is unchanged.
        """
        held, digests = dict[str, tuple[Content, str]](), dict[str, str]()
        for part, content in _parts(state).items():
            before = self._held.get(part)
            if before is not None and before[0] is content:
                held[part] = before
                digests[before[1]] = self.digests[before[1]]
                continue
            file = f"part-{part.replace('/', '-')}-{number:08d}.safetensors"
            if isinstance(content, GeneratorState):
                bundle = Bundle(generators={part.split("/", 2)[2]: content})
            else:
                bundle = replace(content, generators={})
            save(self.directory / file, bundle, header, fsync=fsync)
            held[part] = content, file
            digests[file] = digest_of_file(self.directory / file)
        self._held, self.digests = held, digests
        return {part: file for part, (_, file) in held.items()}

    def load(self, manifest: Manifest) -> dict[int, Bundle]:
        """Return each client's bundle, mapped from the files; ArchiveError if one is damaged."""
        _check(manifest)
        found = {part: load(self.directory / file)[0] for part, file in manifest.items()}
        clients: dict[int, Bundle] = {}
        for part in sorted(found):  # a client's own part comes before its generators'
            _, client, *key = part.split("/", 2)
            if not key:
                clients[int(client)] = found[part]
            elif key[0] in found[part].generators:
                clients[int(client)].generators[key[0]] = found[part].generators[key[0]]
            else:
                raise ArchiveError(f"{self.directory / manifest[part]} holds no generator {key[0]}")
        contents = _parts(ServerState(Bundle(), Bundle(), clients))
        self._held = {part: (contents[part], file) for part, file in manifest.items()}
        self.digests = {f: digest_of_file(self.directory / f) for f in manifest.values()}
        return clients

    def forget(self) -> None:
        """Write every part anew at the next commit."""
        self._held = {}

    def exist(self, manifest: Manifest) -> bool:
        """Tell whether every file is there."""
        return all((self.directory / file).exists() for file in manifest.values())

    def drop(self, manifests: Iterable[Manifest]) -> None:
        """Delete every file that no given manifest names."""
        named = {file for manifest in manifests for file in manifest.values()}
        for path in self.directory.glob("part-*.safetensors"):
            if path.name not in named:
                path.unlink(missing_ok=True)


def _check(manifest: Manifest) -> None:
    """Check that a manifest names files of this directory, and clients before their generators.

    Raises:
        ArchiveError: it was not written by :meth:`ClientParts.save`.
    """
    for part, file in manifest.items():
        match = _PART.fullmatch(part)
        owned = match is not None and (match["key"] is None or f"clients/{match[1]}" in manifest)
        if not owned or not isinstance(file, str) or not _FILE.fullmatch(file):
            raise ArchiveError(f"the manifest of parts is damaged at {printable(part, 60)!r}")


def _parts(state: ServerState) -> dict[str, Content]:
    """Return the bundles and the generators of all clients, by part."""
    parts: dict[str, Content] = {}
    for client, bundle in sorted(state.clients.items()):
        parts[f"clients/{client}"] = bundle
        for key, generator in sorted(bundle.generators.items()):
            parts[f"clients/{client}/{key}"] = generator
    return parts


def _of_all(state: ServerState) -> dict[str, Bundle]:
    """Return what a state holds that is not of single clients."""
    return {name: bundle for name, bundle in state.named() if "/" not in name}


def state_path(directory: Path, interaction: int) -> Path:
    """Return the file of the state after an interaction."""
    return directory / f"state-{interaction:08d}.safetensors"


def digest_of_file(path: Path) -> str:
    """Return the sha256 of a file of states in hexadecimal digits.

    Raises:
        ArchiveError: it is gone.
        ArchiveNotRead: it cannot be read now.
    """
    try:
        return sha256_of(path)
    except FileNotFoundError:
        raise ArchiveError(f"{path} is missing") from None
    except OSError as error:
        raise ArchiveNotRead(f"{path} cannot be read: {reason_of(error)}") from None


def check_stated(path: Path, stated: str) -> None:
    """Compare a state file, and the files of its parts, with the sha256 that the history states.

    Raises:
        ArchiveError: one of them is gone, or is not the one that the run wrote.
        ArchiveNotRead: one cannot be read now.
    """
    if digest_of_file(path) != stated:
        raise ArchiveError(f"{path} is not the state that the run wrote (sha256 {stated[:12]}…)")
    for file, digest in header_in(path).get("sha256", {}).items():
        if digest_of_file(path.parent / file) != digest:
            raise ArchiveError(f"{path.parent / file} is not what the run wrote")


@dataclass(frozen=True)
class Unsynced:
    """The files of states that are not safe on the disk yet."""

    generation: int
    files: frozenset[str]
    """All files of the states."""
    paths: tuple[Path, ...]
    """What is to be synced, in this order."""


class StateFiles:
    """The states of one run; one thread owns them."""

    kept = Owned[set[int]]()
    """Interactions after which the state is kept."""
    _manifests = Owned[dict[int, Manifest]]()
    _safe = Owned[frozenset[str]]()
    """Files that are safe on the disk."""
    _generation = Owned[int]()
    """How often the run went back: files of an earlier generation are written anew."""

    def __init__(
        self,
        directory: Path,
        run_id: str,
        owner: Owner,
        stated: Callable[[int], str],
        *,
        strict: bool,
    ) -> None:
        """List the states in a directory.

        Args:
            directory: the directory of the states.
            run_id: the run's id; a state of another run counts as damaged.
            owner: the thread of these files, which is this one.
            stated: returns the sha256 of the state's file after an interaction, as the history
                states it; another file counts as damaged. Empty where none is stated.
            strict: sync each state when it is written.
        """
        self.directory, self.run_id, self.owner, self.strict = directory, run_id, owner, strict
        self._stated = stated
        self.kept, self._manifests = state_numbers(directory), {}
        self._safe, self._generation = frozenset(), 0
        self._parts = ClientParts(directory)

    def path(self, interaction: int) -> Path:
        """Return the file of the state after an interaction."""
        return state_path(self.directory, interaction)

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
        if stated := self._stated(interaction):
            check_stated(self.path(interaction), stated)
        parts = ClientParts(self.directory) if aside else self._parts
        clients = parts.load(self._manifest(interaction))
        common, own, moments = (named.get(k, Bundle()) for k in ("common", "own", "optimizer"))
        return ServerState(common, own, clients, moments)

    def mapped(self, interaction: int, state: ServerState) -> ServerState:
        """Return a state with what is not of single clients on the pages of its file.

        Args:
            interaction: the committed one that the state follows; -1 for the initial state, which
                has a file without a name.
            state: that state.

        Raises:
            ArchiveError: the file is gone or damaged, or cannot be written.
        """
        path = self.path(interaction)
        if interaction < 0:
            path = self.directory / ".initial.safetensors.tmp"
            save_named(path, _of_all(state), {})
        try:
            named, _ = load_named(path, verify=False)
        finally:
            if interaction < 0:
                path.unlink(missing_ok=True)
        common, own, moments = (named.get(k, Bundle()) for k in ("common", "own", "optimizer"))
        return replace(state, common=common, own=own, optimizer=moments)

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

    def write(self, interaction: int, state: ServerState) -> str:
        """Write a state, and the parts that changed since the last one; return its sha256.

        Raises:
            ArchiveError: a file cannot be written.
        """
        header = {"run": self.run_id}
        parts = self._parts.save(interaction, state, header, fsync=self.strict)
        facts = {**header, "parts": parts, "sha256": self._parts.digests}
        save_named(self.path(interaction), _of_all(state), facts, fsync=self.strict)
        self.kept.add(interaction)
        self._manifests[interaction] = parts
        return digest_of_file(self.path(interaction))

    def forget(self) -> None:
        """Forget written parts after a roll-back: the next commit writes and syncs all."""
        self._parts.forget()
        self._safe = frozenset()
        self._generation += 1

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
        """Return the file of each part of a state; ArchiveError if that file is gone or damaged."""
        if interaction not in self._manifests:
            _, header = load_named(self.path(interaction), verify=False)
            self._manifests[interaction] = dict(header.get("parts", {}))
        return self._manifests[interaction]

    def unsynced(self, interactions: Iterable[int]) -> Unsynced:
        """Return what is to be synced for states to be safe; another thread may sync it."""
        files = frozenset[str]()
        for number in interactions:
            files |= {self.path(number).name, *self._manifests.get(number, {}).values()}
        new = sorted(files - self._safe)  # parts come before the states that name them
        paths = (*(self.directory / name for name in new), self.directory)
        return Unsynced(self._generation, files, paths)

    def synced(self, done: Unsynced) -> None:
        """Take in that files are safe, unless they have been written anew meanwhile."""
        if done.generation == self._generation:
            self._safe = done.files
