"""A year of an open run over gRPC, by processes that die alone and together.

    python -m benchmarks.year --grpc [--form tiny|full] [--place DIR] [--keep]

A coordinator, a relay and sites are processes, and each week some sites have another task: added
beside their process, or put into a folder that is watched, also by a site that stays. What happens
is in :data:`PLANS`: a month that is a thousand times too large, a misspelt activity, newcomers, a
site that loses its disk and comes back from a backup, upgrades, and what an operator wishes in the
middle of rounds: to set aside, to retire, to forget, to exclude and to close. Meanwhile the
coordinator, the relay, sites, or all together die by SIGKILL at seeded points, and some stay away
longer than their lease.

With ``wait = "all"`` the run has to end with the bits, metrics and cohorts of one that nothing
happened to: it is done in one process without a network, and decides what the operator wished
before the interactions in which the first one heard of it. By default, waiting decides who takes
part: there, each task has to be trained by its owner as often as the schedule says, and the row has
both runs' figures. An ended benchmark goes on with ``--place`` at the week that it was in.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tomli_w
import torch

from benchmarks import year
from benchmarks.measure import records_of
from fedcli.data.store.dropping import drop_task
from fedcli.data.store.opened_data import open_data
from fedcli.data.store.recovering import LOST
from fedmodels.facts.resolution import experiment_of
from fedsrv.parts.stages import BY_HAND, RunPaused
from fedsrv.state.decisions import EXCLUDE, RETIRE, SET_ASIDE
from fedsrv.state.ledger import Ledger
from fedsrv.state.verification import verified
from fedtide.inprocess import InProcessCohort, go_on
from tests.integration.harness import (
    Client,
    Coordinator,
    ForkServer,
    Relay,
    join_arguments,
    until,
)
from tests.runs import Killed, deciding

RELAYED = range(5)
"""The sites behind the relay; the others join the coordinator."""
STAYS = year.LARGE
"""The site that stays at the coordinator's address, and has an ordinary process for the run."""
WATCHES = year.SPELLS
"""The site of which a folder is watched."""
EXCLUDED, SETS_ASIDE = year.BAD, year.LARGE
"""The site that an operator excludes, and the one of which a task is set aside."""
LEASE_S = 4.0
"""After which the coordinator takes a silent client for gone."""
STEPS = 8
"""Events of a run between two strikes, at most."""
SET_OUT = 3
"""Exit status of a client that retired or was excluded."""


@dataclass(frozen=True)
class Plan:
    """How large a year is, and what happens in its weeks."""

    weeks: int
    sites: int
    news: int
    """Sites with another task in a week."""
    rounds: int
    strikes: int
    away: int
    """Strikes after which a client stays away longer than its lease; of ``strikes``."""
    joins: Mapping[int, int]
    """The week in which a site joins; the others are there at the start."""
    wishes: Mapping[int, Sequence[str]]
    """What an operator wishes in a week."""
    backup: int
    """At the end of this week, a site's data are copied; and it loses all in week ``lost``."""
    lost: int
    upgrades: Collection[int] = ()


PLANS = {
    "tiny": Plan(
        weeks=6, sites=7, news=3, rounds=2, strikes=12, away=1, joins={3: 6},
        wishes={2: ["set-aside"], 3: ["retire"], 4: ["exclude"], 5: ["forget", "close"]},
        backup=1, lost=4, upgrades=(3,),
    ),
    "full": Plan(
        weeks=26, sites=10, news=4, rounds=3, strikes=104, away=8, joins={4: 8, 7: 9},
        wishes={
            3: ["set-aside"], 8: ["retire"], 13: ["exclude"], 18: ["set-aside"], 22: ["forget"],
            25: ["close"],
        },
        backup=6, lost=11, upgrades=(6, 16),
    ),
}  # fmt: skip


class Sites(year.Year):
    """What comes to the sites, week by week: windows that never come again."""

    def __init__(self, plan: Plan, place: Path) -> None:
        """Begin with nothing."""
        self.plan = plan
        form = year.Form(
            months=plan.weeks, sites=plan.sites, examples=4, times=4, rounds=plan.rounds, kills=0
        )
        super().__init__(form, place, year.recordings("tiny"))

    def drawn(self, site: int, part: str, name: str, count: int, rng: Any) -> Any:
        """Draw windows with noise of their own, as no window comes twice."""
        x = super().drawn(site, part, name, count, rng)
        return x + rng.normal(scale=0.01, size=x.shape).astype(np.float32)

    def news(self, week: int) -> list[int]:
        """Return the sites with another task in a week: those to which something happens, first."""
        plan, wishes = self.plan, self.plan.wishes.get(week, ())
        gone = {"retire": year.RETIRES, "forget": year.FORGOTTEN, "exclude": EXCLUDED}
        left = {gone[w] for at, some in plan.wishes.items() if at < week for w in some if w in gone}
        there = [s for s in range(plan.sites) if s not in left and self._since(s) < week]
        first = [s for at, s in plan.joins.items() if at == week]
        first += [year.BAD, year.SPELLS] if week == 1 else []
        first += [SETS_ASIDE] if "set-aside" in wishes else []
        first += [year.LOSES] if week in (plan.backup + 1, plan.lost) else []
        others = [s for s in there if s not in first]
        random.Random(week).shuffle(others)
        return sorted([*first, *others][: plan.news])

    def _since(self, site: int) -> int:
        return next((week for week, one in self.plan.joins.items() if one == site), 0)

    def given(self, waits: bool) -> Any:
        """Return the run."""
        return experiment_of(
            {
                "net": {"name": "mlp", "hidden": [8]},
                "method": {"name": "fedrep"},
                "schedule": {
                    "open": True, "order": "tasks_outer", "clients": self.plan.sites,
                    "begin_with": self.plan.sites - len(self.plan.joins),
                    "participants": "new + 2", "rounds": self.plan.rounds,
                    **({"wait": "all"} if waits else {}),
                },
                "trigger": {"new_data": self.plan.news},
                "training": {"local_epochs": 1, "batch_size": 16, "lr": 0.01, "momentum": 0.9},
                "evaluate": {"last_tasks": 4, "pictures": 0},
            }
        )  # fmt: skip


# --- the run that things happen to ----------------------------------------------------------------


@dataclass
class Living:
    """A year of processes; what was done of it lies in a file, with which it goes on."""

    sites: Sites
    forks: ForkServer
    waits: bool
    killed: int = 0
    """Processes."""
    struck: int = 0
    week: int = 0
    done: list[str] = field(default_factory=list)
    """What was wished already, and what was lost."""
    gone: list[int] = field(default_factory=list)
    """Sites that retired or were excluded."""

    def __post_init__(self) -> None:
        self.place, self.rng = self.sites.place, random.Random(self.waits)
        self.out, self.logs = self.place / "run" / "served", self.place / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.note = self.place / "done.json"
        if self.note.exists():
            for name, value in json.loads(self.note.read_text()).items():
                setattr(self, name, value)
        self.config = self.place / "config.toml"
        self.config.write_text(tomli_w.dumps(self.sites.given(self.waits).to_dict()))
        self.port = self.relay_port = 0
        self.running: dict[int, Client] = {}
        self.rests = self.ended = False

    def keep(self) -> None:
        """Write down what was done."""
        names = ("killed", "struck", "week", "done", "gone")
        told = {name: getattr(self, name) for name in names}
        self.note.with_suffix(".new").write_text(json.dumps(told))
        self.note.with_suffix(".new").rename(self.note)

    # --- processes --------------------------------------------------------------------------------

    def serve(self) -> None:
        """Start the coordinator, again at its port."""
        more = ["--resume"] if (self.out / "run.db").exists() else []
        self.rests = False
        self.coordinator = Coordinator(
            self.config, self.out, *more, port=self.port, forks=self.forks, lease_s=LEASE_S
        ).listening()
        self.port = self.coordinator.port

    def relay(self) -> None:
        """Start the relay, again at its port."""
        up, clients = f"127.0.0.1:{self.port}", f"{RELAYED[0]}-{RELAYED[-1]}"
        self.relays = Relay(self.forks, self.logs / "relay.log", up, clients, port=self.relay_port)
        self.relay_port = self.relays.port

    def states(self, site: int) -> Path:
        """Return the directory of a site's states."""
        return self.place / "run" / "states" / str(site)

    def join(self, site: int, *more: str) -> Client:
        """Start the process of a site."""
        port = self.relay_port if site in RELAYED else self.port
        more += ("--watch", str(self.inbox(site))) if site in (WATCHES, STAYS) else ()
        words = join_arguments(
            str(site), f"127.0.0.1:{port}", self.sites.data, self.states(site), *more
        )
        log = self.logs / f"site-{site}.log"
        if site == STAYS:
            words = ["fedcli", *words, "--stay"]
            found = self.forks.called("fedcli.cli:main", words, self.place, log)
        else:
            found = self.forks.start(words, log)
        self.running[site] = found
        return found

    def inbox(self, site: int) -> Path:
        """Return the folder that a site watches."""
        return self.place / "inbox" / str(site)

    def start(self) -> None:
        """Start all processes of the week."""
        self.serve()
        self.relay()
        for site in sorted(self.sites.tasks.keys() - {*self.gone}):
            self.join(site)

    def stop(self) -> None:
        """Stop all processes in order, as for an upgrade."""
        for site, process in self.running.items():
            with suppress(ProcessLookupError):
                psutil.Process(process.pid).terminate()
            status = process.wait()
            assert status in (0, 143, SET_OUT), f"site {site}: {status}: {process.output()[-500:]}"
        self.running.clear()
        for process in (self.relays.process, self.coordinator.process):
            process.send_signal(signal.SIGTERM)
            process.wait()
        self.relays.kill()
        self.coordinator.close()

    def end(self) -> None:
        """Leave no process behind."""
        for process in self.running.values():
            _kill(process.pid)
        for name in ("relays", "coordinator"):
            if (one := getattr(self, name, None)) is not None:
                one.kill()

    # --- what happens -----------------------------------------------------------------------------

    def live(self) -> None:
        """Live through the weeks that are left."""
        self.sites.begin() if not self.sites.data.exists() else self._known()
        self.start()
        plan, strikes = self.sites.plan, 0
        while self.week < plan.weeks:
            strikes = plan.strikes * (self.week + 1) // plan.weeks - self.struck
            if self.week in plan.upgrades and not self._is_done("upgrade"):
                self.stop()
                self.start()
            if self.week:
                self._arrive()
            self._happen(strikes)
            self._look()
            if self.week == plan.backup:
                copy = self.place / "backup"
                shutil.rmtree(copy, ignore_errors=True)
                shutil.copytree(self.sites.data / str(year.LOSES), copy)
            self.week += 1
            self.keep()

    def _known(self) -> None:
        """Take up the tasks that sites have."""
        folders = (path for path in self.sites.data.iterdir() if path.name.isdecimal())
        self.sites.tasks = {int(p.name): 0 for p in folders}
        for site in self.sites.tasks:
            self.sites.tasks[site] = open_data(self.sites.data, site).num_tasks

    def _is_done(self, what: str) -> bool:
        """Tell whether something of this week was done before; from now on it is."""
        key = f"{self.week}: {what}"
        found = key in self.done
        self.done += [] if found else [key]
        return found

    def _arrive(self) -> None:
        """Let the week's tasks come; a site may lose its disk before."""
        for site in self.sites.news(self.week):
            if site not in self.sites.tasks:
                self.sites.join(site)
                self.join(site)
            elif site == year.LOSES and self.week == self.sites.plan.lost:
                self._lose()
            elif site in (WATCHES, STAYS):
                self._drop(site)
            else:
                self.sites.add(site, self.week)
        self._known()

    def _drop(self, site: int) -> None:
        """Put a task into the folder that a site watches; a misspelt one is refused there."""
        source, box = self.sites.source(site, self.week), self.inbox(site)
        if (site, self.week) == (year.SPELLS, 1):
            names = self.sites.activities(site, 1)
            _put(source, box / "spelt", [f"{names[0].upper()} ", *names[1:]])
        _put(source, box / f"week-{self.week:02}")

    def _lose(self) -> None:
        """Lose a site's disk; it comes back with its data of long ago, and has to be recovered."""
        site = year.LOSES
        if self._is_done("lost"):
            return
        self._strike_at([site])
        self._until_gone(site)  # until then, its session is another process's
        for place in (self.sites.data / str(site), self.states(site)):
            shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(self.place / "backup", self.sites.data / str(site))
        self.sites.add(site, self.week)
        refused = self.join(site)
        assert refused.wait() not in (0, SET_OUT), "the run takes a site with other data"
        assert "fedcli recover --client-id" in refused.output(), refused.output()[-500:]
        self._type("fedcli", "recover", "--client-id", site, "--data", self.sites.data,
                   "--server", f"127.0.0.1:{self.relay_port}")  # fmt: skip
        self.join(site, "--start-over")

    def _type(self, program: str, *words: object) -> None:
        status, said = self.forks.typed(self.place, program, *words)
        assert status == 0, said

    def _happen(self, strikes: int) -> None:
        """Let processes die and an operator wish while the run learns, and wait for its rest."""
        plan, address = self.sites.plan, f"127.0.0.1:{self.port}"
        wishes = [w for w in plan.wishes.get(self.week, ()) if w != "close"]
        acts: list[Callable[[], object]] = [self._strike] * strikes
        acts += [partial(self._wish, w, address) for w in wishes if not self._is_done(w)]
        self.rng.shuffle(acts)
        if self.rng.random() < 0.3 and self._strike in acts:  # before anybody has told of news
            acts.remove(self._strike)
            self._strike()
        self._until(lambda event: event["kind"] == "order")
        for act in acts:
            left = iter(range(self.rng.randrange(STEPS)))
            self._until(lambda event, left=left: self.rests or next(left, None) is None)
            act()
        if "close" in plan.wishes.get(self.week, ()):
            self._until(lambda event: self.rests or event["kind"] == "commit")
            self._type("fedsrv", "close", address)
            self._end()
            return
        self._until(lambda event: self.rests and not self._owed())

    def _owed(self) -> bool:
        """Tell whether a site that is there has a task that the run has not begun."""
        begun: dict[int, int] = {}
        for growth in growths_of(self.out):
            begun |= dict(growth["tasks"])
        self._known()
        away = {*self.gone}
        return any(
            begun.get(site, 0) < tasks for site, tasks in self.sites.tasks.items()
            if site not in away
        )  # fmt: skip

    def _until(self, wanted: Callable[[dict[str, Any]], object]) -> None:
        """Wait for an event; none has to come where what is wanted is so already."""

        def heard(event: dict[str, Any]) -> bool:
            if event.get("kind") == "resting":
                self.rests = True
            elif event.get("kind") in ("order", "growth"):
                self.rests = False
            return bool(wanted({"kind": "", **event}))

        if not wanted({"kind": ""}):
            self.coordinator.wait_for(heard)

    def _wish(self, what: str, address: str) -> None:
        """Type what an operator wishes."""
        if what == "set-aside":
            task = self._begun(SETS_ASIDE) - 1
            self._type("fedsrv", "set-aside", address, "--client", SETS_ASIDE, "--task", task)
            return
        site = {"retire": year.RETIRES, "forget": year.FORGOTTEN, "exclude": EXCLUDED}[what]
        command = "retire" if what == "forget" else what
        more = ["--forget"] if what == "forget" else []
        self._type("fedsrv", command, address, site, *more)
        self.gone.append(site)

    def _begun(self, site: int) -> int:
        """Return how many tasks of a site the run has begun."""
        found = [dict(growth["tasks"]) for growth in growths_of(self.out)]
        return max(tasks.get(site, 0) for tasks in found)

    def _strike(self) -> None:
        """Kill processes, and start them again; a client may stay away longer than its lease."""
        plan, self.struck = self.sites.plan, self.struck + 1
        is_away = self.struck % (plan.strikes // plan.away) == 0
        there = sorted(self.running.keys() - {*self.gone})
        site = self.rng.choice(
            [s for s in there if s not in (*RELAYED, STAYS)] if is_away else there
        )
        if is_away:
            self._strike_at([site])
            self._until_gone(site)
            self.join(site)
            return
        victims = self.rng.choice(["coordinator", "relay", "site", "site", "all"])
        if victims in ("coordinator", "all"):
            self.coordinator.kill()
            self.killed += 1
        if victims in ("relay", "all"):
            self.relays.kill()
            self.killed += 1
        some = there if victims == "all" else [site] if victims == "site" else []
        self._strike_at(some)
        if victims in ("coordinator", "all"):
            self.serve()
        if victims in ("relay", "all"):
            self.relay()
        for one in some:
            self.join(one)

    def _until_gone(self, site: int) -> None:
        """Wait until the coordinator takes a site for gone, or waits for it to join."""
        kinds = ("gone", "waiting")
        self._until(lambda e: e["kind"] in kinds and str(site) in e["detail"]["clients"])

    def _strike_at(self, sites: Sequence[int]) -> None:
        for site in sites:
            process = self.running.pop(site)
            self.killed += _kill(process.pid)
            process.wait()

    def _look(self) -> None:
        """Look whether all processes live that should, and those have ended that retired."""
        for site in [*self.running]:
            process = self.running[site]
            if site in self.gone:  # one that was excluded at rest hears of it before the next round
                if process.has_ended():
                    assert process.wait() == SET_OUT, f"site {site}: {process.output()[-500:]}"
                    del self.running[site]
            elif not self.ended:
                assert not process.has_ended(), f"site {site} ended: {process.output()[-800:]}"

    def _end(self) -> None:
        """Wait for the end of all processes."""
        assert self.coordinator.wait() == 0, self.coordinator.log.read_text()[-800:]
        self.ended = True
        for site, process in self.running.items():
            if site == STAYS:
                until(partial(_hears_the_end, process), "the end at a site that stays")
                _kill(process.pid)
                continue
            allowed = (0, SET_OUT) if site in self.gone else (0,)
            assert process.wait() in allowed, f"site {site}: {process.output()[-500:]}"
        assert self.relays.wait() == 0, self.relays.output()[-500:]


def _hears_the_end(stays: Client) -> bool:
    return "is over" in stays.output()


def _put(source: Path, target: Path, names: Sequence[str] = ()) -> None:
    """Put a folder where it is watched, unless it is there or was taken."""
    if target.exists() or (target.parent / "taken" / target.name).exists():
        return
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(source, part)
    if names:
        (part / "dataset.json").write_text(json.dumps({"class_names": names}))
    part.rename(target)


def _kill(pid: int) -> int:
    """Kill a process and what it has started; return how many there were."""
    try:
        process = psutil.Process(pid)
        victims = [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return 0
    for victim in victims:
        with suppress(psutil.NoSuchProcess):
            victim.kill()
    psutil.wait_procs(victims[:-1], timeout=20)
    return len(victims)


def growths_of(run: Path) -> list[dict[str, Any]]:
    """Return how a run grew, also while it is served."""
    import sqlite3
    from contextlib import closing

    with closing(sqlite3.connect(f"file:{run / 'run.db'}?mode=ro", uri=True)) as db:
        rows = db.execute("SELECT * FROM growths ORDER BY 1").fetchall()
    return [json.loads(row[-1]) for row in rows]


# --- the run that nothing happens to --------------------------------------------------------------


@dataclass(frozen=True)
class Decision:
    """What an operator wished, and when it took effect."""

    interaction: int
    """The first one that it holds for."""
    what: str
    facts: Mapping[str, Any]
    after_growth: bool = False
    """Whether that one had begun: its coordinator was killed, and it began again."""


def wished(run: Path) -> list[Decision]:
    """Return what was decided of a run."""
    found, grown = list[Decision](), set[int]()
    for growth in growths_of(run):
        at, forgets = growth["interaction"], growth.get("forgets", ())
        told = [(RETIRE, {"client": c, "forgets": c in forgets}) for c in growth.get("retired", ())]
        told += [
            (SET_ASIDE, {"client": client, "task": task})
            for client, task, why in growth.get("set_aside", ()) if why == BY_HAND
        ]  # fmt: skip
        found += [Decision(at, what, facts, at in grown) for what, facts in told]
        grown |= {at} if growth["tasks"] else set()
    ledger = Ledger(run / "run.db", strict=False, new=False)
    try:
        excluded = ledger.fact("aside", list) or []
        wished_out = {one["client"] for one in ledger.decided(EXCLUDE)}
    finally:
        ledger.close()
    return found + [Decision(at, EXCLUDE, {"client": c}) for c, at in excluded if c in wished_out]


def alone(sites: Sites, served: Path, waits: bool) -> None:
    """Do the run again in one process, with the decisions of the one that was served."""
    plan, run, decisions = sites.plan, sites.place / "run", wished(served)
    kept = InProcessCohort.starting_over
    sites.begin()
    for week in range(plan.weeks):
        if week:
            for site in sites.news(week):
                if site not in sites.tasks:
                    sites.join(site)
                    continue
                if site == year.LOSES and week == plan.lost:
                    for task in range(lost_from(sites), sites.tasks[site]):
                        drop_task(sites.data, site, task, LOST)
                    shutil.rmtree(run / "clients" / str(site))
                    year._disk_lost()
                sites.add(site, week)
                sites.tasks[site] += 1
        try:
            at_rest = "close" if week == plan.weeks - 1 else "pause"
            while _dies(sites.given(waits), run, at_rest, decisions):
                pass
        finally:
            InProcessCohort.starting_over = kept  # type: ignore[method-assign]
    assert not decisions, f"these came to nothing: {decisions}"


def _dies(given: Any, run: Path, at_rest: Any, left: list[Decision]) -> bool:
    """Go on with a run, and decide what is left of decisions; tell whether it died of one."""

    def before(order: Any) -> None:
        for one in [d for d in left if d.interaction - (not d.after_growth) == order.interaction]:
            left.remove(one)
            decide(one.what, one.facts)
            if one.after_growth:
                raise Killed

    with deciding() as decide, suppress(RunPaused):
        try:
            go_on(given, run, at_rest, before=before)
        except Killed:
            return True
    return False


def lost_from(sites: Sites) -> int:
    """Return the first task of the site that loses its disk which its backup does not have."""
    weeks = range(1, sites.plan.backup + 1)
    return 1 + sum(year.LOSES in sites.news(week) for week in weeks)


def came_to(run: Path) -> dict[str, Any]:
    """Return what two runs have in common that are the same.

    The number of a stage is not: what is wished while the run rests begins one more.
    """
    summary, records = json.loads((run / "summary.json").read_text()), records_of(run)
    return {
        "state_sha256": summary["state_sha256"],
        "metrics": summary["metrics"],
        "records": [
            {key: record.get(key) for key in ("interaction", "round", "cohort", "metrics")}
            for record in records
        ],
    }


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Yield the places at which two outcomes differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {**one, **other}:
            yield from differences(one.get(key), other.get(key), f"{where}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, (each, another) in enumerate(zip(one, other, strict=True)):
            yield from differences(each, another, f"{where}[{number}]")
    elif one != other:
        yield f"{where}: {str(one)[:80]}, and {str(other)[:80]}"


# --- both -----------------------------------------------------------------------------------------


def row_of(name: str, place: Path, *, waits: bool = True) -> dict[str, Any]:
    """Live through a year as processes, and again as nothing happens; return what it came to.

    Raises:
        SystemExit: a promise was broken.
    """
    plan = PLANS[name]
    torch.set_num_threads(1)
    forks = ForkServer(_made(place) / "forks.log")
    living = Living(Sites(plan, _made(place / "served")), forks, waits)
    try:
        if living.week < plan.weeks:
            living.live()
    finally:
        living.end()
        forks.close()
    served = living.out
    wrong = verified(served).wrong
    logs = [*living.logs.glob("*.log"), served.parent / f"{served.name}-server.log"]
    wrong += [f"a traceback in {log}" for log in logs if "Traceback" in log.read_text()]
    short, aside = year.short_of(served, plan.rounds)
    short = [one for one in short if one[0] != EXCLUDED]  # in the middle of a task
    wrong += [f"trained on too seldom: {short}"] if short else []
    shutil.rmtree(place / "alone", ignore_errors=True)
    undisturbed = Sites(plan, _made(place / "alone"))
    alone(undisturbed, served, waits)
    one, other = came_to(served), came_to(undisturbed.place / "run")
    different = [*differences(one, other)]
    if waits:
        wrong += different
    if wrong:
        raise SystemExit("\n".join(wrong[:20]))
    return {
        "wait": "all" if waits else "by default",
        "weeks": plan.weeks, "sites": plan.sites, "rounds": len(one["records"]),
        "rounds_alone": len(other["records"]),
        "tasks": sum(undisturbed.tasks.values()), "set_aside": aside,
        "strikes": living.struck, "killed": living.killed,
        "a_loc": round(one["metrics"]["a_loc"], 4),
        "alone_a_loc": round(other["metrics"]["a_loc"], 4),
        "digest": one["state_sha256"][:8], "alone_digest": other["state_sha256"][:8],
    }  # fmt: skip


def _made(place: Path) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    return place


def rows_of(name: str, place: Path | None) -> list[dict[str, Any]]:
    """Return the rows of both ways of waiting, of the default one the tiny form.

    With a place those that are there are kept.
    """
    with tempfile.TemporaryDirectory() as temporary:
        root = (place or Path(temporary)).absolute()
        file = _made(root) / f"grpc-{name}.json"
        rows = json.loads(file.read_text()) if file.exists() else {}
        for key, form in (("all", name), ("default", "tiny")):
            if key not in rows:
                rows[key] = row_of(form, root / f"grpc-{form}-{key}", waits=key == "all")
                file.write_text(json.dumps(rows, indent=1))
        return [*rows.values()]
