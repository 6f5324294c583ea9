"""``make soak``: hundreds of faults in runs of every method; prints what became of them.

KILLS=300 SEED=0 METHODS="fedavg fedper" make soak
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import median

from rich.console import Console

from fedcli.data.store.commands import run_partition
from fedmodels.methods import names
from tests.conftest import tiny_experiment, write_server_data
from tests.faults.ground import (
    Ground,
    Setting,
    may_be,
    may_be_asynchronous,
)
from tests.faults.playing import Played
from tests.faults.processes import Nursery
from tests.faults.verdict import outcome, troubles, troubles_of_the_living

LAUNCHED_EVERY = 4
"""Every so many passes over the methods are the launcher's; in the others all start by hand."""
ORDERS = ("synchronous", "strict", "open", "secure", "relayed", "asynchronous", "lenient")
"""Of rounds. All but asynchronous ones wait for everybody; in relayed ones all clients but the
evaluator join a relay. In lenient ones, asynchronous where a method's rounds may be, a client is
killed for good."""


@dataclass
class Tally:
    """What became of all runs so far."""

    runs: int = 0
    drawn: int = 0
    struck: int = 0
    killed: int = 0
    survived: int = 0
    mismatches: int = 0
    hangs: int = 0
    left_waiting: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    lost_s: list[float] = field(default_factory=list)

    def add(self, played: Played, undisturbed: Played, found: Sequence[str]) -> None:
        """Count one run."""
        self.runs += 1
        self.drawn += len(played.plan.faults)
        self.struck += len(played.struck)
        self.killed += played.killed
        self.survived += 0 if found else played.killed
        self.hangs += any(trouble.startswith("hang") for trouble in found)
        self.mismatches += bool(found)
        self.left_waiting += played.left_waiting
        self.lost_s.append(played.seconds - undisturbed.seconds)
        for fault in played.struck:
            victims = "nobody" if not fault.strikes else "one" if len(fault.strikes) == 1 else "all"
            self.kinds[fault.power or fault.then or victims] += 1
        self.kinds["naps"] += played.plan.naps
        self.kinds["slow disk"] += played.plan.slow_disk

    def lines(self) -> list[str]:
        """Return the figures."""
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(self.kinds.items()))
        never, lost = self.drawn - self.struck, self.lost_s or [0.0]
        return [
            f"runs {self.runs}, faults {self.struck}, never reached {never}; of each kind: {kinds}",
            f"kills {self.killed}, survived {self.survived}",
            f"mismatches {self.mismatches}, of them hangs {self.hangs}",
            f"time lost {sum(lost):.0f} s, {median(lost):.1f} s a run, {max(lost):.1f} s at most",
            f"clients left waiting after the end {self.left_waiting}",
        ]


def settings(
    methods: Sequence[str], orders: Sequence[str] = ORDERS, seed: int = 0
) -> Iterator[tuple[int, Setting]]:
    """Yield numbers and settings without end: the methods in turn, by hand and launched.

    Args:
        methods: their names.
        orders: of rounds; they take turns. A method that one is not for has synchronous ones.
        seed: the number to begin with.
    """
    if len(orders) == 1:
        methods = [name for name in methods if _is_for(name, orders[0])]
    for number in itertools.count(seed):
        turn, place = divmod(number, len(methods))
        name, order = methods[place], orders[turn % len(orders)]
        given = {} if order == "synchronous" else {order: True}
        if order == "lenient":  # asynchronous too, where a method's rounds may be
            given["asynchronous"] = _is_for(name, "asynchronous")
        elif not _is_for(name, order):
            given = {}
        by_turn = turn % LAUNCHED_EVERY == LAUNCHED_EVERY - 1
        launched = by_turn and order not in ("relayed", "lenient")
        yield number, Setting(name, launched, **given)


@cache
def _is_for(name: str, order: str) -> bool:
    """Tell whether an order is for a method."""
    if order == "asynchronous":
        return may_be_asynchronous(name)
    return order not in ("open", "secure") or may_be(Setting(name, **{order: True}))


def soak(
    ground: Ground,
    runs: Iterable[tuple[int, Setting]],
    kills: float,
    minutes: float,
    results: Path | None = None,
) -> Tally:
    """Play runs until there were so many kills, or until so many minutes have passed.

    Args:
        ground: plays them.
        runs: their numbers, which are seeds, and settings.
        kills: of processes.
        minutes: after which it ends.
        results: a file of a line for each run; those that it has are not played again.
    """
    tally, until = Tally(), time.monotonic() + 60 * minutes
    known = results.read_text().splitlines() if results and results.exists() else []
    played_before = {json.loads(line)["number"] for line in known}
    for number, setting in runs:
        if tally.killed >= kills or time.monotonic() >= until:
            break
        if number in played_before:
            continue
        undisturbed = ground.undisturbed(setting)
        if setting.lenient:
            played = ground.play(setting, ground.without(setting, number))
            found = troubles_of_the_living(played, len(outcome(undisturbed.site)["records"]))
        else:
            played = ground.play(setting, ground.drawn(setting, number))
            found = troubles(played, undisturbed)
        tally.add(played, undisturbed, found)
        told = [
            f"{len(played.struck)} faults, {played.killed} kills, {played.seconds:.1f} s",
            *found,
        ]
        say(f"{number} {setting}: {'; '.join(told)}")
        if results:
            line = {"number": number, "setting": str(setting), "killed": played.killed}
            line |= {"seconds": round(played.seconds, 1), "found": found}
            with results.open("a") as file:
                file.write(json.dumps(line) + "\n")
        if found:
            say(f"  {played.plan}")
            say(f"  kept in {played.site.out.parent}")
        else:
            shutil.rmtree(played.site.out.parent)
    return tally


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    """Run from the command line; 1 where a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=float, default=math.inf, help="after which it ends")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", nargs="*", default=[])
    parser.add_argument("--orders", nargs="*", choices=ORDERS, default=ORDERS, help="of rounds")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which it ends")
    parser.add_argument("--runs", type=int, help="after which it ends")
    parser.add_argument("--results", type=Path, help="file of a line for each run; goes on with it")
    parser.add_argument("--patience", type=float, default=240.0, help="seconds a run may take")
    given = parser.parse_args()
    root, begun = Path(tempfile.mkdtemp(prefix="fedtide-soak-")), time.monotonic()
    e = tiny_experiment()
    data = root / "data"
    run_partition(e.data, e.scenario, e.schedule.clients, e.seed, data, Console(quiet=True))
    write_server_data(data)
    nursery = Nursery(root / "nursery.log")
    try:
        ground = Ground(nursery, data, root / "runs", given.patience)
        runs = settings(given.methods or names(), given.orders, given.seed)
        runs = itertools.islice(runs, given.runs)
        tally = soak(ground, runs, given.kills, given.minutes, given.results)
    finally:
        nursery.close()
    for line in [*tally.lines(), f"seconds {time.monotonic() - begun:.0f}"]:
        say(line)
    if not tally.mismatches:
        shutil.rmtree(root)
    return 1 if tally.mismatches else 0


if __name__ == "__main__":
    sys.exit(main())
