"""The run directory: commits, and the way to take a run up again.

An interaction is committed by one rename (the new server state) and one record in the database
(:mod:`fedsrv.state.ledger`); the record is the commit. Scores of the committed models are added to
the record later. A state file without a record is no commit, and neither is a record without its
state file: the interaction is computed again. The server's state of single clients lies in separate
files (:mod:`fedsrv.state.state_files`), written before the state file that names them.

A roll-back deletes nothing. Undone commits stay until the replay has passed them, and count again
if everybody still has the states.

One thread owns all of it, that of the database: methods that write, or read files, run there, one
after the other, whoever calls them. What the engine asks for all the time is in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import sqlite3
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmodels.config.bounds import canonical
from fedmodels.config.combinations import halves_of
from fedmodels.config.experiment import Experiment
from fedmodels.errors import ArchiveError, ArchiveNotRead, RunFailed
from fedmodels.facts.position import NONE_YET, Interaction
from fedmodels.facts.usual import defaults_of
from fedmodels.host.files import LEFTOVER, sync_path, write_atomically
from fedmodels.host.line_file import append_lines
from fedmodels.tensors.bundle import state_digest
from fedmodels.training.contexts import ServerState
from fedsrv.state.audit import Evidence
from fedsrv.state.chain import LINES, Head
from fedsrv.state.decisions import of_the_version_before
from fedsrv.state.history import History
from fedsrv.state.ledger import Ledger
from fedsrv.state.owner import Owned, owned
from fedsrv.state.record import Record, trained_in
from fedsrv.state.run_directory import (
    holds_commits,
    lock,
    refuse_existing,
    refuse_other_files,
    require_place,
    using,
    writing,
)
from fedsrv.state.state_files import StateFiles, Unsynced

if TYPE_CHECKING:
    from fedmodels.numerics.secrecy import Secret
    from fedsrv.state.stated_lines import StatedLines

log = logging.getLogger(__name__)


class Store:
    """One run directory, locked while it is open; safe between threads.

    The engine's thread alone sets ``experiment``, ``secret`` and ``keeps_since``.
    """

    _highest = Owned[Interaction]()
    """The newest interaction that was committed before the last roll-back."""
    _grown = Owned[Interaction]()
    """First interaction of the last stage of an open run; -1 in others."""
    _written = Owned[ServerState | None]()
    """The state that the last commit wrote, while it is in memory."""
    _unkept = Owned[Mapping[int, Mapping[str, Any]]]()
    """The standings of clients that are not stored yet."""

    def __init__(self, path: Path, experiment: Experiment, resume: bool) -> None:
        """Create the directory, or take up the run it holds.

        Raises:
            ConfigError: the directory exists and ``resume`` is false, or it holds another
                experiment, or it cannot be written.
            ArchiveError: the database is damaged; nothing was changed.
            RunFailed: another process uses the directory, or too many states are damaged.
        """
        self.path = path
        self.experiment = self.wished = self.began = experiment
        """What holds now; what the run is started with; and, where that was changed since, what it
        began with."""
        self.secret: Secret | None = None
        """What the run draws from where nobody may be able to draw it again; a part sets it."""
        self.grows: dict[str, StatedLines] = {}
        """Files of parts that only grow, by name: each commit states how far they had come."""
        self.keeps_since = 0
        """The first interaction after which clients have to hold their states."""
        self.strict = experiment.server.durability == "strict"
        if not resume:
            refuse_existing(path)
        else:
            refuse_other_files(path)
        self.states = path / "server"
        with using(path):
            path.mkdir(parents=True, exist_ok=True)
            self._lock_file = lock(path)  # the first file: a start killed after it can be resumed
        try:
            with writing(path):
                self.states.mkdir(mode=0o700, exist_ok=True)
            self.ledger = Ledger(path / "run.db", strict=self.strict, new=not holds_commits(path))
            self.evidence = Evidence(path, self.ledger, _wrong_in(path) if resume else None)
        except BaseException:
            os.close(self._lock_file)
            raise
        self.owner, self.run_id = self.ledger.owner, self.ledger.run_id
        try:
            self._take_up()
        except BaseException:
            self._release()
            raise

    @owned
    def _take_up(self) -> None:
        """Read what the directory holds, and put it in order."""
        self._files = StateFiles(
            self.states, self.run_id, self.owner, self.ledger.stated_state, strict=self.strict
        )
        self._written, self._unkept = None, {}
        self._compare_experiment()
        stages = (Interaction(growth["interaction"]) for growth in self.ledger.growths())
        self._grown = max(stages, default=NONE_YET)
        for file, what, facts in of_the_version_before(self.path):
            self.decide(what, *facts)
            file.unlink()
        self._sync_log()  # before any client stores the run's id
        with writing(self.path):
            self._reconcile_files()
            self.rewrite_lines()

    def _compare_experiment(self) -> None:
        """Compare the stored experiment with the present one, and store the present one."""
        highest, watermark = (self.ledger.fact(name, int) for name in ("highest", "watermark"))
        self._highest = NONE_YET if highest is None else Interaction(highest)
        self.watermark = NONE_YET if watermark is None else Interaction(watermark)
        """The newest interaction that is known to be safe on every disk; its owner sets it.

        The next commit stores it. Until then a restart knows of an earlier one, which is as safe.
        """
        stored, before = self.ledger.fact("experiment", dict), self.experiment
        if stored is not None:
            from fedmodels.config.changes import another_config, forbidden_changes
            from fedmodels.facts.resolution import experiment_of

            before = experiment_of(stored, str(self.path / "run.db"))
            if changed := forbidden_changes(before, self.experiment):
                raise another_config(self.path, changed, self.experiment)
        defaults = defaults_of(self.experiment, self.ledger.fact("defaults", dict))
        facts = {
            "experiment": canonical(self.experiment.to_dict()),
            "defaults": canonical(defaults),
        }
        with writing(self.path):
            for part in halves_of(self.experiment, "server"):
                facts |= part.takes_up(self, before)
            self.ledger.set_facts(**facts)

    # --- what is committed ------------------------------------------------------------------------

    @property
    def committed(self) -> Interaction:
        """Return the last committed interaction; -1 before the first."""
        return self.ledger.committed

    @property
    def newest(self) -> Interaction:
        """Return the last interaction with a record, committed or undone."""
        return max((self.committed, *self.ledger.undone()))

    @owned
    def state(self, interaction: Interaction) -> ServerState:
        """Return the committed state after an interaction.

        Raises:
            ArchiveError: a file of it is gone, damaged or of another run.
        """
        return self._files.read(interaction)

    @owned
    def mapped(self, state: ServerState) -> ServerState:
        """Return the last committed state, or the initial one, on the pages of its file.

        Another state stays as it is: one that has grown since, or that was read from its file.
        """
        if self.committed >= 0 and state is not self._written:
            return state
        self._written = None
        try:
            return self._files.mapped(self.committed, state)
        except ArchiveError as error:  # the next commit says what is wrong with the disk
            log.debug("the state stays in memory: %s", error)
            return state

    @owned
    def has_state(self, interaction: Interaction) -> bool:
        """Tell whether the state after an interaction can be taken up; -1 always can."""
        return all(self._files.exists(n) for n in self._needed(interaction) if n >= 0)

    @owned
    def oldest_begun(self, interaction: Interaction) -> Interaction:
        """Return the earliest interaction whose states a commit needs, client states included."""
        return self._needed(interaction)[0]

    def _needed(self, interaction: Interaction) -> list[Interaction]:
        """Return a commit's interaction, and those whose states its orders under way began from."""
        record = self.ledger.record(interaction)
        orders = record.get("under_way", ()) if record else ()
        return sorted({interaction, *(Interaction(begun - 1) for _, begun in orders)})

    @owned
    def commit(self, record: Record, state: ServerState, counts: str | None) -> None:
        """Commit an interaction; with ``counts``, its scores are still to come.

        Raises:
            ArchiveError, RunFailed: a file cannot be written, or the directory is gone.
        """
        with writing(self.path):
            require_place(self.path, self._lock_file)
            self._compare_replay(record, state)
            named: dict[str, Any] = {"state": self._files.write(record["interaction"], state)}
            self._written = state
            named |= self.evidence.committing(record)
            if self.grows:
                named[LINES] = {name: file.now() for name, file in self.grows.items()}
            self.ledger.append(record, counts, named, self._new_watermark())
            if counts is None:
                self._append(record)

    @owned
    def add_scores(self, record: Record) -> None:
        """Complete the last committed record with its scores; RunFailed if it cannot be written."""
        with writing(self.path):
            require_place(self.path, self._lock_file)
            has_line = self.ledger.pending() is None
            self.ledger.complete(record)
            if has_line:  # a run that ends early scores what it had passed over
                self.rewrite_lines()
            else:
                self._append(record)

    def states_lines(self, name: str) -> None:
        """State the lines of a file of the directory that only grows, from the next commit on.

        Raises:
            ArchiveError: it lacks lines that were stated before.
        """
        from fedsrv.state.stated_lines import StatedLines, other_lines  # few runs have such files

        if wrong := next(other_lines(self.path, self.ledger.said_of(LINES)), ""):
            raise ArchiveError(f"{self.path}: {wrong}")
        self.grows[name] = StatedLines(self.path / name)

    def _new_watermark(self) -> dict[str, str]:
        """Return the fact that says the watermark, where it is not stored yet."""
        known = self.ledger.facts().get("watermark", str(NONE_YET))
        return {} if known == str(self.watermark) else {"watermark": str(self.watermark)}

    # --- roll-back --------------------------------------------------------------------------------

    @owned
    def history(self) -> History:
        """Return who trained when, and how far the run may go back."""
        committed = {r["interaction"]: trained_in(r) for r, _ in self.ledger.records()}
        undone = {n: trained_in(record) for n, record in self.ledger.undone().items()}
        all_of_them = undone | committed
        return History(
            trained={n: who for n, who in all_of_them.items() if n >= self.keeps_since},
            started_over=self.ledger.started_over(),
            highest=max(self._highest, self.committed),
            floor=self.floor,
            max_rollback=self.experiment.server.max_rollback,
        )

    @property
    @owned
    def floor(self) -> Interaction:
        """Return the earliest interaction the run may be rolled back to."""
        behind = max(self._highest, self.committed) - self.experiment.server.max_rollback
        # earlier tasks' data may be gone since the run last grew
        return Interaction(max(-1, min(self.watermark, max(behind, self._grown - 1))))

    @owned
    def go_to(self, interaction: Interaction) -> None:
        """Make an interaction the last committed one: roll back, or redo undone commits."""
        if interaction < self.committed:
            self.roll_back(interaction)
        elif interaction > self.committed:
            log.warning("interactions up to %d are all there again", interaction)
            with writing(self.path):
                self.ledger.redo(interaction)
                self._files.forget()
                self.rewrite_lines()

    @owned
    def roll_back(self, interaction: Interaction) -> None:
        """Undo every commit after an interaction; states stay until the replay passes them."""
        log.warning("interactions after %d are computed again", interaction)
        self._highest = max(self._highest, self.committed)
        self.watermark = min(self.watermark, interaction)  # later states will be new files
        facts = {"highest": str(self._highest), "watermark": str(self.watermark)}
        with writing(self.path):
            self.ledger.undo(interaction, **facts)
            self._files.forget()
            self.rewrite_lines()
        self.tell("rolled back", after=interaction)

    def _compare_replay(self, record: Record, state: ServerState) -> None:
        """Forget undone commits from the first one on that the replay computes differently."""
        number = record["interaction"]
        undone = self.ledger.undone()
        if number not in undone:
            return
        try:
            before = state_digest(self._files.read(number, aside=True).named())
        except ArchiveNotRead:  # it may be whole
            raise
        except ArchiveError:
            before = ""
        if before == state_digest(state.named()) and undone[number]["cohort"] == record["cohort"]:
            return
        log.warning("the replay differs from what was undone from interaction %d on", number + 1)
        self.ledger.forget_undone(number)
        self._files.drop(n for n in undone if n >= number)

    @owned
    def take_back(self, interaction: Interaction) -> None:
        """Undo every commit after an interaction for good: a replay is not compared with them.

        Files go first: states alone, with no record of any, look like a damaged database.
        """
        self.roll_back(interaction)
        with writing(self.path):
            self._files.drop([n for n in self._files.kept if n > interaction])
            sync_path(self.states)
            self.ledger.forget_undone(Interaction(interaction + 1))

    def aside(self) -> dict[int, Interaction]:
        """Return the first interaction without each client that was set aside."""
        found = self._numbers("aside", self.ledger.fact("aside", list) or [])
        return {client: Interaction(first) for client, first in found.items()}

    @owned
    def set_aside(self, why: Mapping[int, str], first: Interaction | None = None) -> None:
        """Let clients take no part from the next interaction on, or from an earlier one.

        ``first`` names another interaction than the next one.

        Each client is told the reason that is given for it, also after a restart.
        """
        found, following = self.aside(), first
        if following is None:
            following = Interaction(self.committed + 1)
        found |= {c: min(following, found.get(c, following)) for c in why}
        reasons = {**(self.ledger.fact("aside_why", dict) or {}), **{str(c): why[c] for c in why}}
        with writing(self.path):
            self.ledger.set_facts(
                aside=json.dumps(sorted(found.items())),
                aside_why=json.dumps(reasons, sort_keys=True),
            )
        for client, reason in why.items():
            self.tell("set aside", client=client, interaction=following, reason=reason)

    def forgotten(self, *, done: bool = False) -> set[tuple[int, int]]:
        """Return the clients and tasks that are forgotten, or those that were computed without."""
        found = self.ledger.fact("forgotten_done" if done else "forgotten", list) or []
        return {(int(client), int(task)) for client, task in found}

    @owned
    def forget_tasks(
        self, tasks: Collection[tuple[int, int]], why: str, *, done: bool = False
    ) -> None:
        """Let clients have no part in tasks; ``done`` once nothing is left that had them."""
        found = self.forgotten() | {*tasks}
        if tasks or found != self.forgotten(done=True):
            with writing(self.path):
                said = json.dumps(sorted(found))
                self.ledger.set_facts(**{"forgotten_done" if done else "forgotten": said})
        for client, task in sorted(tasks):
            self.tell("forgotten", client=client, task=task, reason=why)

    def gone(self, interaction: Interaction) -> dict[int, str]:
        """Return why clients take no part in an interaction and in none after it, by client."""
        reasons = self.ledger.fact("aside_why", dict) or {}
        first = {
            c: (n, str(reasons.get(str(c), "it was set aside"))) for c, n in self.aside().items()
        }
        for growth in self.ledger.growths():
            retired = (growth["interaction"], "an operator retired it")
            first |= {int(c): retired for c in growth.get("retired", ()) if int(c) not in first}
        return {client: why for client, (n, why) in sorted(first.items()) if n <= interaction}

    @owned
    def decide(self, what: str, *facts: Mapping[str, Any]) -> None:
        """Store decisions of a kind; they are safe on the disk when this returns."""
        with writing(self.path):
            new = self.ledger.decide(what, *facts)
            self._sync_log()
        for one in new:
            self.tell("decided", decision=what, facts=one)

    def decided(self, what: str) -> list[dict[str, Any]]:
        """Return the facts of each decision of a kind, in order."""
        return self.ledger.decided(what)

    def tell(self, what: str, **facts: Any) -> None:
        """Put down in the run's log that something happened."""
        self.evidence.tell(what, **facts)

    @owned
    def start_over(self, client: int) -> None:
        """Remember that a client goes on from its initial private state."""
        with writing(self.path):
            self.ledger.start_over(client)
        self.tell("started over", client=client, after=self.committed)

    @owned
    def advance(self, watermark: Interaction) -> Interaction:
        """Raise the watermark; return the interaction below which states are not needed."""
        self.watermark = max(self.watermark, watermark)
        floor = self.floor
        self.prune(floor)
        return floor

    @owned
    def prune(self, watermark: Interaction) -> None:
        """Delete states that nothing can roll back to any more."""
        keep = min(watermark, self.committed)
        needed = self._needed(keep)
        self._files.drop(n for n in self._files.kept if n < keep and n not in needed)

    # --- the end ----------------------------------------------------------------------------------

    @owned
    def end(self, summary: Mapping[str, Any]) -> None:
        """Commit the end of the run, and sync it: clients leave when they hear of it."""
        end = {"rounds": self.wished.schedule.rounds, "after": self.committed}
        value = json.dumps({**end, "summary": summary})
        with writing(self.path):
            self.ledger.set_facts(end=value, **self._new_watermark())
            self.evidence.name_last_line()
            self._sync_rest()
            self.sync(self.committed)

    @owned
    def expect(self, name: str, text: str) -> None:
        """State the sha256 of a file of the run that is about to be written, for people to read.

        The statement is safe on the disk before the file changes. So a file that no statement
        knows was not written by the run.
        """
        digest = hashlib.sha256(text.encode()).hexdigest()
        if self.ledger.file(name) != digest:
            with writing(self.path):
                self.ledger.say(writes=name, sha256=digest)
                self._sync_log()

    @owned
    def publish(self, name: str, text: str) -> None:
        """Write a file of the run whose sha256 the history states."""
        self.expect(name, text)
        with writing(self.path):
            write_atomically(self.path / name, text, sync=True, private=True)

    def ended(self) -> dict[str, Any] | None:
        """Return the summary of an ended run; None if the run may go on."""
        end = self.ledger.fact("end", dict) or {}
        wanted = self.wished.schedule.rounds, self.committed
        same = (end.get("rounds"), end.get("after")) == wanted
        return dict(end["summary"]) if end and same else None

    # --- open runs --------------------------------------------------------------------------------

    @owned
    def grow(self, growth: Mapping[str, Any]) -> None:
        """Store a growth before it takes effect; the run goes back behind it no more."""
        with writing(self.path):
            self.ledger.grow(growth)
        self._grown = max(self._grown, Interaction(growth["interaction"]))

    # --- clients ----------------------------------------------------------------------------------

    def keep_standings(self, standings: Mapping[int, Mapping[str, Any]]) -> None:
        """Store standings without waiting; what the disk refuses is stored with the next change."""
        self.owner.queue(self._keep_standings, standings)

    @owned
    def _keep_standings(self, standings: Mapping[int, Mapping[str, Any]]) -> None:
        self._unkept = {**self._unkept, **standings}
        try:
            with writing(self.path):
                self.ledger.keep_standings(self._unkept)
        except RunFailed as error:  # the next commit ends the run, if the disk still fails
            log.error("the list of present and missing clients is not stored: %s", error)
            return
        self._unkept = {}

    def add_profiles(self, described: Mapping[int, str]) -> None:
        """Remember what clients describe."""
        with writing(self.path):
            self.ledger.add_profiles(described)

    @owned
    def describe(self, facts: Mapping[str, Any]) -> None:
        """Write what clients announced of their data in common, for reports to read."""
        self.publish("data.json", json.dumps(facts) + "\n")

    @owned
    def fixed(self, name: str, numbers: Mapping[int, int]) -> dict[int, int]:
        """Return the stored numbers of the clients, such as their tasks; the first call stores.

        Raises:
            ArchiveError: what is stored cannot be read as numbers of clients.
        """
        found = self.ledger.fact(name, list)
        if found is None:
            found = list(numbers.items())
            with writing(self.path):
                self.ledger.set_facts(**{name: json.dumps(found)})
        return self._numbers(name, found)

    def _numbers(self, name: str, found: list[Any]) -> dict[int, int]:
        """Read the numbers of clients that a fact holds."""
        try:
            return {int(client): int(number) for client, number in found}
        except (TypeError, ValueError):
            raise self.ledger.damaged(f"its {name!r} cannot be read") from None

    def revocations(self) -> dict[str, Any]:
        """Return how new the lists of revoked certificates were that the run saw last."""
        return self.ledger.fact("revocations", dict) or {}

    def keep_revocations(self, marks: Mapping[str, tuple[int, float]]) -> None:
        """Remember how new the lists of revoked certificates are."""
        with writing(self.path):
            self.ledger.set_facts(revocations=json.dumps(marks, sort_keys=True))

    # --- files ------------------------------------------------------------------------------------

    def _reconcile_files(self) -> None:
        """Go back to the newest whole state after a crash; drop states without a record.

        All checks come before the first deletion: all records are there, and the run may go back
        far enough.
        """
        files = self._files
        oldest = min(files.kept, default=0)
        if oldest > max(0, self.newest):  # older ones were pruned: later records were safe by then
            raise self.ledger.damaged(
                f"it ends with interaction {self.newest + 1}, but the states start with "
                f"{oldest + 1}"
            )
        last, unusable = self._last_usable()
        cut_short = (*self.path.glob(LEFTOVER), *self.states.glob(".*.safetensors.*"))
        for leftover in cut_short:  # by a crash
            leftover.unlink()
        undone = self.ledger.undone().keys()
        unusable |= {number for number in undone if files.why_unusable(number)}
        known = {*range(last + 1), *undone, *unusable}
        if last < self.committed:
            self.roll_back(last)
        for number in sorted(files.kept - known):
            log.warning("the state after interaction %d has no record; dropped", number + 1)
        files.drop((files.kept - known) | unusable)
        files.drop_parts()

    def _last_usable(self) -> tuple[Interaction, set[int]]:
        """Return the last committed interaction with a whole state, and those with damaged ones.

        Raises:
            RunFailed: the run may not go back so far.
        """
        last, reasons = self.committed, dict[int, str]()
        while last >= 0 and (reason := self._why_unusable(last)):
            reasons[last] = reason
            last = Interaction(last - 1)
        if reasons and last < self.floor:
            raise RunFailed(
                f"no state after interaction {self.floor + 1} or later can be read "
                f"({next(iter(reasons.values()))}); put a copy back, or have everything after "
                f"interaction {last + 1} computed again: --resume --set server.max_rollback="
                f"{max(self._highest, self.committed) - last}"
            )
        for reason in reasons.values():
            log.warning("%s; it is computed again", reason)
        return last, set(reasons)

    def _why_unusable(self, interaction: Interaction) -> str:
        """Return why the run cannot go on from a commit; an empty text if it can."""
        needed = (n for n in self._needed(interaction)[::-1] if n >= 0)
        return next(filter(None, map(self._files.why_unusable, needed)), "")

    @owned
    def rewrite_lines(self) -> None:
        """Write ``rounds.jsonl`` anew from the committed records."""
        lines = [json.dumps(record) + "\n" for record, scored in self.ledger.records() if scored]
        write_atomically(self.path / "rounds.jsonl", "".join(lines), private=True)

    def _append(self, record: Record) -> None:
        append_lines(self.path / "rounds.jsonl", (json.dumps(record) + "\n").encode())

    def sync(self, interaction: Interaction) -> None:
        """Sync a commit and the states it needs; from then on callers are told of this head.

        The disk is waited for on the calling thread; the run goes on meanwhile.
        """
        head, files = self._unsynced(interaction)
        self.evidence.audit.sync()
        for path in files.paths:
            with contextlib.suppress(FileNotFoundError):  # it is dropped meanwhile
                sync_path(path)
        self._sync_log()
        self.owner.run(self._files.synced, files)
        self.evidence.chain.is_safe(head)

    @owned
    def _sync_rest(self) -> None:
        """Sync lines and earlier states: a run that has ended is not resumed to write them anew."""
        sync_path(self.path / "rounds.jsonl")
        for path in self._files.unsynced(self._files.kept - {self.committed}).paths:
            with contextlib.suppress(FileNotFoundError):  # of a run whose states were lost
                sync_path(path)

    @owned
    def _unsynced(self, interaction: Interaction) -> tuple[Head, Unsynced]:
        """Return the newest head, and what is to be synced for an interaction."""
        needed = (n for n in self._needed(interaction) if n >= 0)
        return self.evidence.chain.head, self._files.unsynced(needed)

    def _sync_log(self) -> None:
        """Sync the database's log and its name in the directory; SQLite does not sync the name."""
        for path in (self.path / "run.db-wal", self.path):
            with contextlib.suppress(FileNotFoundError):  # the log is written back meanwhile
                sync_path(path)

    def close(self) -> None:
        """Close the database and unlock the directory."""
        self._name_the_end()
        self._release()

    @owned
    def _name_the_end(self) -> None:
        with contextlib.suppress(OSError, sqlite3.Error):  # of a run that failed for that reason
            self.ledger.set_facts(**self._new_watermark())
            self.evidence.name_last_line()

    def _release(self) -> None:
        self.evidence.close()
        self.ledger.close()
        os.close(self._lock_file)


def _wrong_in(run: Path) -> list[str]:
    """Return what does not fit in the records of a run that goes on, a line each."""
    from fedsrv.state.verification import differences

    return differences(run)
