"""The run directory: what is committed, and how a run is taken up again.

An interaction is committed by one rename (the new server state) and one SQLite record; the record
is the commit. Scores of the committed models are added to the record when they are known. A state
file without a record, or the other way round, is no commit and is computed again. What the server
keeps of single clients lies in files of its own (:mod:`fedsrv.parts`), written before the state
file that names them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sqlite3
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedmodels.archive import load_named, save_named
from fedmodels.config import Experiment, difference
from fedmodels.errors import ArchiveError, ConfigError, RunFailed
from fedmodels.method import ServerState
from fedmodels.types import Bundle
from fedsrv.parts import Manifest, Parts

FORMAT = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS clients (id INTEGER PRIMARY KEY, client_json TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS interactions (
    interaction INTEGER PRIMARY KEY, scored INTEGER NOT NULL, record TEXT NOT NULL,
    counts TEXT NOT NULL);
"""

Record = dict[str, Any]


class Store:
    """One run directory, locked while it is open; used by the engine's thread only."""

    def __init__(self, path: Path, experiment: Experiment, resume: bool) -> None:
        """Create the directory, or take up the run it holds.

        Raises:
            ConfigError: it exists and ``resume`` was not asked for, holds another experiment, or
                cannot be written.
            RunFailed: another process uses it.
        """
        self.path = path
        self.experiment = experiment
        self.strict = experiment.server.durability == "strict"
        if not resume:
            refuse_existing(path)
        elif path.is_dir() and any(path.iterdir()) and not _may_hold_a_run(path):
            raise ConfigError(
                f"{path} holds no run to resume; leave --resume out, or name its --out"
            )
        self.states = path / "server"
        try:
            self.states.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {path} cannot be used: {error.strerror}") from None
        self._lock_file = self._lock()
        self._db = sqlite3.connect(
            path / "run.db", isolation_level=None, check_same_thread=False
        )  # one thread at a time all the same
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute(f"PRAGMA synchronous={'FULL' if self.strict else 'NORMAL'}")
            self._db.executescript(_SCHEMA)
            self.run_id = self._identity()
            self._parts = Parts(self.states)
            self._manifests: dict[int, Manifest] = {}
            self._stored: set[int] = set()
            """Interactions after which the state is kept."""
            self._synced: set[str] = set()
            """Part files that are safe on the disk; written by the syncing thread alone."""
            self._drop_unusable()
            self.rewrite_lines()
        except BaseException:
            self.close()
            raise

    def _lock(self) -> int:
        handle = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise RunFailed(f"{self.path} is in use by another process") from None
        return handle

    def _identity(self) -> str:
        """Return the run's id; compare the stored experiment with this one."""
        from fedmodels.config import experiment_of

        text = json.dumps(self.experiment.to_dict(), sort_keys=True)
        stored = dict(self._db.execute("SELECT key, value FROM meta"))
        if "experiment" in stored:
            before = experiment_of(json.loads(stored["experiment"]), str(self.path / "run.db"))
            changed = [
                key
                for key in difference(before, self.experiment)
                if not self._may_grow(key, before)
            ]
            if changed:
                raise ConfigError(
                    f"{self.path} was begun with another config; it differs in "
                    f"{', '.join(changed)}. Resume with the config in {self.path / 'config.toml'}"
                )
        run_id = str(stored.get("run_id", uuid.uuid4().hex))
        values = {"experiment": text, "run_id": run_id}
        self._db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values.items())
        return run_id

    def _may_grow(self, key: str, before: Experiment) -> bool:
        """Only more rounds may be asked for, and only where they come after all others."""
        now, scenario = self.experiment.schedule, self.experiment.scenario
        one_task = scenario.tasks == 1 and not scenario.fixes_tasks
        return (
            key == "schedule.rounds"
            and now.rounds >= before.schedule.rounds
            and (now.order == "rounds_outer" or one_task)
        )

    # --- what is committed ------------------------------------------------------------------------

    @property
    def committed(self) -> int:
        """Return the last committed interaction; -1 before the first."""
        found = self._db.execute("SELECT MAX(interaction) FROM interactions").fetchone()[0]
        return -1 if found is None else int(found)

    def records(self) -> list[tuple[Record, bool]]:
        """Return every committed record and whether its scores are in."""
        rows = self._db.execute("SELECT record, scored FROM interactions ORDER BY interaction")
        return [(json.loads(record), bool(scored)) for record, scored in rows]

    def state(self, interaction: int) -> ServerState:
        """Return the committed state after an interaction.

        Raises:
            ArchiveError: a file of it is gone or damaged.
        """
        named, _ = load_named(self._file(interaction))
        clients = self._parts.load(self._manifest(interaction))
        return ServerState(named.get("common", Bundle()), named.get("own", Bundle()), clients)

    def has_state(self, interaction: int) -> bool:
        """Tell whether the state after an interaction can be taken up; -1 always can."""
        if interaction == -1 or not self._file(interaction).exists():
            return interaction == -1
        try:
            return self._parts.exist(self._manifest(interaction))
        except ArchiveError:
            return False

    def pending(self) -> tuple[Record, str] | None:
        """Return the record that waits for scores, and the counts its training trip brought."""
        rows = self._db.execute("SELECT record, counts FROM interactions WHERE scored = 0")
        found = rows.fetchone()
        return (json.loads(found[0]), found[1]) if found else None

    def commit(self, record: Record, state: ServerState, counts: str | None) -> None:
        """Make an interaction count; with ``counts``, its scores are still to come."""
        number = record["interaction"]
        header = {"run": self.run_id}
        parts = self._parts.save(number, state, header, fsync=self.strict)
        bundles = {"common": state.common, "own": state.own}
        save_named(self._file(number), bundles, {**header, "parts": parts}, fsync=self.strict)
        self._stored.add(number)
        self._manifests[number] = parts
        self._db.execute(
            "INSERT INTO interactions VALUES (?, ?, ?, ?)",
            (number, counts is None, json.dumps(record), counts or ""),
        )
        if counts is None:
            self._append(record)

    def add_scores(self, record: Record) -> None:
        """Complete a committed record with its scores."""
        self._db.execute(
            "UPDATE interactions SET scored = 1, counts = '', record = ? WHERE interaction = ?",
            (json.dumps(record), record["interaction"]),
        )
        self._append(record)

    def roll_back(self, interaction: int) -> None:
        """Forget every commit after an interaction."""
        self._db.execute("DELETE FROM interactions WHERE interaction > ?", (interaction,))
        self._stored = set()
        for file in self.states.glob("state-*.safetensors"):
            number = int(file.stem.partition("-")[2])
            if number > interaction:
                file.unlink()
            else:
                self._stored.add(number)
        self._parts.forget()
        self._synced = set()
        self._drop_parts()
        self.rewrite_lines()

    def prune(self, watermark: int) -> None:
        """Delete states that no power loss can roll back to any more."""
        keep = min(watermark, self.committed)
        old = [number for number in self._stored if number < keep]
        for number in old:
            self._file(number).unlink(missing_ok=True)
        self._stored.difference_update(old)
        gone = [self._manifests.pop(number, None) for number in old]
        if any(gone):
            self._drop_parts()

    def _drop_parts(self) -> None:
        """Delete the parts that no state file names any more."""
        manifests: dict[int, Manifest] = {}
        for interaction in sorted(self._stored):
            with contextlib.suppress(ArchiveError):
                manifests[interaction] = self._manifest(interaction)
        self._manifests = manifests
        self._parts.drop(manifests.values())

    def _manifest(self, interaction: int) -> Manifest:
        """Return the file of each part of the state after an interaction.

        Raises:
            ArchiveError: the state file is gone or damaged.
        """
        if interaction not in self._manifests:
            _, header = load_named(self._file(interaction), verify=False)
            self._manifests[interaction] = dict(header.get("parts", {}))
        return self._manifests[interaction]

    # --- the end ----------------------------------------------------------------------------------

    def end(self, summary: Record) -> None:
        """Commit the end of the run, safely on the disk: clients that are told of it leave."""
        end = {"rounds": self.experiment.schedule.rounds, "after": self.committed}
        value = json.dumps({**end, "summary": summary})
        self._db.execute("INSERT OR REPLACE INTO meta VALUES ('end', ?)", (value,))
        self.sync(self.committed)

    def ended(self) -> Record | None:
        """Return the summary, if the run came to its end and was not asked for more rounds."""
        found = self._db.execute("SELECT value FROM meta WHERE key = 'end'").fetchone()
        end = json.loads(found[0]) if found else {}
        same = (end.get("rounds"), end.get("after")) == (
            self.experiment.schedule.rounds,
            self.committed,
        )
        return dict(end["summary"]) if found and same else None

    # --- clients ----------------------------------------------------------------------------------

    def profiles(self) -> dict[int, str]:
        """Return the description every client gave when it first joined."""
        rows = self._db.execute("SELECT id, client_json FROM clients ORDER BY id")
        return {int(client): text for client, text in rows}

    def add_profile(self, client: int, client_json: str) -> None:
        """Remember a client's description."""
        self._db.execute("INSERT OR REPLACE INTO clients VALUES (?, ?)", (client, client_json))

    def fixed_tasks(self, tasks: Mapping[int, int]) -> dict[int, int]:
        """Return the numbers of tasks that the schedule was made from; these, the first time."""
        value = json.dumps(list(tasks.items()))
        self._db.execute("INSERT OR IGNORE INTO meta VALUES ('tasks', ?)", (value,))
        found = self._db.execute("SELECT value FROM meta WHERE key = 'tasks'").fetchone()
        return {int(client): int(number) for client, number in json.loads(found[0])}

    # --- files ------------------------------------------------------------------------------------

    def _file(self, interaction: int) -> Path:
        return self.states / f"state-{interaction:08d}.safetensors"

    def _drop_unusable(self) -> None:
        """After a crash: forget records whose state is damaged or gone, and states without one."""
        for leftover in self.states.glob(".*.safetensors.*"):  # a write that a crash cut short
            leftover.unlink()
        last = self.committed
        while last >= 0:
            try:
                self.state(last)
                break
            except ArchiveError:
                last -= 1
        self.roll_back(last)

    def rewrite_lines(self) -> None:
        """Write ``rounds.jsonl`` anew from what is committed."""
        lines = [json.dumps(record) + "\n" for record, scored in self.records() if scored]
        write_atomically(self.path / "rounds.jsonl", "".join(lines))

    def _append(self, record: Record) -> None:
        with (self.path / "rounds.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def sync(self, interaction: int) -> None:
        """Put the state after an interaction, and its record, safely on the disk."""
        files = self._manifests.get(interaction, {}).values()
        parts = [self.states / name for name in files if name not in self._synced]
        for path in (*parts, self._file(interaction), self.states, self.path / "run.db-wal"):
            if path.exists():
                sync_path(path)
        self._synced = set(files)

    def close(self) -> None:
        """Give the directory back."""
        self._db.close()
        os.close(self._lock_file)


class Syncer:
    """Syncs committed states in the background and knows the newest one that is safe."""

    def __init__(self, sync: Callable[[int], None]) -> None:
        self._sync = sync
        self._wanted = -1
        self.durable = -1
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="syncer", daemon=True)
        self._thread.start()

    def want(self, interaction: int) -> None:
        """Ask for everything up to an interaction to be made safe."""
        with self._changed:
            self._wanted = interaction
            self.durable = min(self.durable, interaction)
            self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._wanted > self.durable)
                if self._closed:
                    return
                target = self._wanted
            self._sync(target)
            with self._changed:
                self.durable = min(target, self._wanted)

    def close(self) -> None:
        """Stop after the sync under way."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()


def sync_path(path: Path) -> None:
    """Fsync a file or a directory; one that is gone meanwhile is no loss."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, text: str) -> None:
    """Write a small text file so that a reader sees the old or the new one, never half of one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def _may_hold_a_run(path: Path) -> bool:
    """Tell a run directory, or what the launcher lays out for one, from a stranger's directory."""
    return any((path / name).exists() for name in ("run.db", "logs", "clients"))


def refuse_existing(path: Path) -> None:
    """Refuse an output directory that holds something already.

    Raises:
        ConfigError: says how to go on.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        what = "already holds a run" if (path / "run.db").exists() else "exists and is not empty"
        raise ConfigError(f"{path} {what}; give --resume to go on with it, or another --out")
