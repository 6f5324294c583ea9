"""What the server's state holds for each client, in files that are written when it changes.

This may be much, and most of it unchanged, as with every client's generators. A *part* is a
client's bundle without its generators, or one generator. The state file of an interaction names the
file of each part, and a file is kept as long as a state file names it::

    part-clients-3-00000007.safetensors      the bundle clients/3 without its generators
    part-clients-3-4-00000002.safetensors    its generator "4", unchanged since interaction 2
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from fedmodels.errors import ArchiveError
from fedmodels.printable import printable
from fedmodels.tensors.archive import load, save
from fedmodels.tensors.bundle import Bundle, GeneratorState
from fedmodels.training.contexts import ServerState

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

    def save(
        self, number: int, state: ServerState, header: Mapping[str, str], *, fsync: bool
    ) -> Manifest:
        """Write the parts that have changed since the last commit; return the files of all parts.

        What changes becomes a new object, so a part that is the same object is unchanged.
        """
        held: dict[str, tuple[Content, str]] = {}
        for part, content in _parts(state).items():
            before = self._held.get(part)
            if before is not None and before[0] is content:
                held[part] = before
                continue
            file = f"part-{part.replace('/', '-')}-{number:08d}.safetensors"
            if isinstance(content, GeneratorState):
                bundle = Bundle(generators={part.split("/", 2)[2]: content})
            else:
                bundle = replace(content, generators={})
            save(self.directory / file, bundle, header, fsync=fsync)
            held[part] = content, file
        self._held = held
        return {part: file for part, (_, file) in held.items()}

    def load(self, manifest: Manifest) -> dict[int, Bundle]:
        """Return each client's bundle; its tensors are mapped from the files.

        Raises:
            ArchiveError: a file is gone or damaged, or the manifest is malformed.
        """
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
