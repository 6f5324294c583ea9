"""What trainings have spent of privacy, by the content of examples: the ledger of a client or site.

Two trainings compose for every example that both were on, whichever tasks, files or runs it came
from. So epsilon is that of the example with the most costly history. The file is a database. It
keeps no example: it keeps a keyed hash of the content of each, and what each training released.

The same training again, as after a crash, has the same name and makes the same bytes, and is not
charged again. A training is on the disk before anything of it leaves. Several processes may share a
ledger. Rows of earlier versions count as they are; no training of now has the name of one.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from fedmodels.errors import ArchiveError, OrderDeclined
from fedmodels.numerics.secrecy import Secret
from fedmodels.privacy.accounting import GaussianReleases
from fedmodels.privacy.exposures import Exposures, History, Keys, epsilon_of_histories, joined
from fedmodels.privacy.ledger_file import LedgerFile

Level = Literal["example", "client"]
FORMAT = 1
_LAST = 2**63 - 1
"""The highest number that a database can give a row."""
_TABLES = {
    "facts": "name TEXT PRIMARY KEY, value TEXT NOT NULL",
    "examples": "digest BLOB PRIMARY KEY, cut TEXT NOT NULL, keys BLOB NOT NULL",
    "trainings": """number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, examples BLOB,
        releases TEXT NOT NULL, what TEXT NOT NULL, seconds INTEGER NOT NULL""",
}


@dataclass(frozen=True)
class Charge:
    """What one training releases, and of which examples."""

    name: str
    """The same for the same training alone."""
    releases: tuple[GaussianReleases, ...]
    contents: Keys | None = None
    """A hash of the content of each example (n,); None of a training that hides a whole client."""
    cut: str = ""
    """How examples were cut of files. Nobody can tell which examples of two cuts hold the same."""
    what: str = ""
    """Client, run and round, for people."""
    made: str = ""
    """A digest of what leaves; empty before it is there. The same training makes the same, but on
    another processor, or with an input that the name does not know."""

    @property
    def row(self) -> str:
        """The name in the file."""
        return f"{self.name}/{self.made}" if self.made else self.name

    def again(self) -> Charge:
        """Return what other bytes of a training cost that was charged before.

        Both took the same batches, so that the chance to be in none hides nothing the second time.
        """
        plain = (GaussianReleases(one.noise, one.times) for one in self.releases)
        return replace(self, releases=tuple(plain))


class PrivacyLedger(LedgerFile):
    """A ledger; used by one thread."""

    def __init__(self, path: Path, level: Level) -> None:
        """Open a ledger, or make it.

        Raises:
            ArchiveError: it is damaged, cannot be used, or counts what another level hides.
        """
        self._exposures: dict[str, Exposures] = {}
        """By cut."""
        self._seen, self._rows, self._names = 0, set[str](), set[str]()
        self._keys: tuple[Keys, Keys] | None = None
        super().__init__(path, _TABLES)
        with self._told():
            with self._writing():
                fresh = {"format": str(FORMAT), "level": level, "key": Secret.fresh().key.hex()}
                self._db.executemany("INSERT OR IGNORE INTO facts VALUES (?, ?)", fresh.items())
            facts = dict(self._db.execute("SELECT name, value FROM facts"))
            self._key = bytes.fromhex(facts["key"])
            if facts["format"] != str(FORMAT):
                raise ArchiveError(f"{path} was written by a later version of fedtide: update it")
            if facts["level"] != level:
                raise ArchiveError(
                    f"{path} counts what hides each {facts['level']}, and this is to hide each "
                    f"{level}: name another file"
                )
            self._refresh()

    # --- what was spent ---------------------------------------------------------------------------

    def has(self, charge: Charge) -> bool:
        """Tell whether a training was charged before."""
        with self._told():
            self._refresh()
        return charge.name in self._names

    def epsilon(self, delta: float, charge: Charge | None = None) -> float:
        """Return the epsilon of the most exposed example, as if a training were done once more.

        Raises:
            ArchiveError: the file is damaged.
        """
        with self._told():
            self._refresh()
        return self._epsilon(self._exposures, delta, charge)

    def epsilons_after(self, delta: float, charge: Charge) -> tuple[float, float]:
        """Return what was spent once a training was charged, and as if it were done once more.

        Trainings that were charged later do not count: a client may have trained on when an
        interaction is done again.

        Raises:
            ArchiveError: the file is damaged.
        """
        query = "SELECT number FROM trainings WHERE name = ?"
        with self._told():
            self._refresh()
            (number,) = self._db.execute(query, (charge.row,)).fetchone()
            exposures = self._exposures
            if number < self._seen:
                exposures = {}
                self._expose(exposures, self._trainings(0, number))
        return self._epsilon(exposures, delta), self._epsilon(exposures, delta, charge)

    def _epsilon(
        self, exposures: Mapping[str, Exposures], delta: float, charge: Charge | None = None
    ) -> float:
        parts: dict[str, list[History]] = {cut: of.histories() for cut, of in exposures.items()}
        if charge is not None:
            of = exposures.get(charge.cut, Exposures())
            parts[charge.cut] = of.histories(self._keys_of(charge), charge.releases)
        if len(parts) == 1:
            return epsilon_of_histories(next(iter(parts.values())), delta)
        return epsilon_of_histories(joined([*parts.values()]), delta)

    def check(self, charge: Charge, limit: float | None, delta: float) -> None:
        """Check that a training may be done.

        Raises:
            OrderDeclined: it would pass the limit.
        """
        if not self.has(charge):
            self._check(charge, limit, delta)

    def _check(self, charge: Charge, limit: float | None, delta: float) -> None:
        if limit is None:
            return
        epsilon = self._epsilon(self._exposures, delta, charge)
        if epsilon > limit * (1 + 1e-9):
            raise OrderDeclined(
                f"one more training would make epsilon {epsilon:.4g} at delta {delta:g}, beyond "
                f"{limit:g}"
            )

    def note(self, charge: Charge, limit: float | None, delta: float) -> None:
        """Charge a training, once; call it before anything of the training leaves.

        Raises:
            OrderDeclined: it would pass the limit.
            ArchiveError: the file cannot be written.
        """
        with self._told(), self._writing():
            self._refresh()  # another process may have spent meanwhile
            if charge.row in self._rows:
                return
            if charge.name in self._names:
                charge = charge.again()
            self._check(charge, limit, delta)
            self._insert(charge)
        with self._told():
            self._refresh()

    def _insert(self, charge: Charge) -> None:
        digest = None
        if charge.contents is not None:
            keys = self._keys_of(charge).tobytes()
            digest = hashlib.blake2b(charge.cut.encode() + b"\0" + keys, digest_size=16).digest()
            self._db.execute(
                "INSERT OR IGNORE INTO examples VALUES (?, ?, ?)", (digest, charge.cut, keys)
            )
        releases = json.dumps([[one.noise, one.times, one.rate] for one in charge.releases])
        row = charge.row, digest, releases, charge.what, int(time.time())
        columns = "name, examples, releases, what, seconds"
        self._db.execute(f"INSERT INTO trainings ({columns}) VALUES (?, ?, ?, ?, ?)", row)

    def _refresh(self) -> None:
        """Take in the trainings that were charged since the last look."""
        new = self._trainings(self._seen, _LAST)
        self._expose(self._exposures, new)
        if new:
            self._seen = new[-1][0]
            self._rows |= {row for _, row, _, _ in new}
            self._names |= {row.partition("/")[0] for _, row, _, _ in new}

    def _trainings(self, after: int, until: int) -> list[tuple[int, str, bytes | None, str]]:
        """Return number, name, examples and releases of trainings, as they were charged."""
        query = "SELECT number, name, examples, releases FROM trainings WHERE number > ? AND"
        return self._db.execute(f"{query} number <= ? ORDER BY number", (after, until)).fetchall()

    def _expose(
        self, exposures: dict[str, Exposures], new: Sequence[tuple[int, str, bytes | None, str]]
    ) -> None:
        """Add what trainings released of their examples."""
        by_set: dict[bytes | None, list[GaussianReleases]] = {}
        for _, _, digest, releases in new:
            found = [GaussianReleases(*one) for one in json.loads(releases)]
            by_set.setdefault(digest, []).extend(found)
        sets = {digest: self._set_of(digest) for digest in by_set}
        for cut in {cut for cut, _ in sets.values()}:
            of_cut = [keys for other, keys in sets.values() if other == cut]
            exposed = exposures.setdefault(cut, Exposures())
            exposed.learn(np.unique(np.concatenate(of_cut)))  # at once, as they may be many
        for digest, (cut, keys) in sets.items():
            exposures[cut].add(keys, by_set[digest])

    def _set_of(self, digest: bytes | None) -> tuple[str, Keys]:
        """Return how the examples of a training were cut, and their keys."""
        if digest is None:
            return "", np.zeros(1, dtype=np.uint64)
        wanted = "SELECT cut, keys FROM examples WHERE digest = ?"
        cut, held = self._db.execute(wanted, (digest,)).fetchone()
        return str(cut), np.frombuffer(held, dtype=np.uint64)

    def _keys_of(self, charge: Charge) -> Keys:
        """Return the keys of a training's examples, ascending, each once."""
        if charge.contents is None:
            return np.zeros(1, dtype=np.uint64)
        if self._keys is None or self._keys[0] is not charge.contents:
            held = np.unique(charge.contents).tobytes()
            hashes = b"".join(
                hashlib.blake2b(held[at : at + 8], digest_size=8, key=self._key).digest()
                for at in range(0, len(held), 8)
            )
            self._keys = charge.contents, np.unique(np.frombuffer(hashes, dtype=np.uint64))
        return self._keys[1]
