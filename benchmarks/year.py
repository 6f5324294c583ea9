"""A year of an open run: twelve sites of three recordings, and what goes wrong in a year.

    python -m benchmarks.year [--form tiny|small|full] [--methods fedavg fedproto …] [--place DIR]
    python -m benchmarks.year --grpc [--form tiny|full] [--place DIR]    # by real processes

Four people of each of UCI HAR, MotionSense and WISDM are a site each, with activities of their own.
A month of a site is a task. Sites are silent for months, one has a hundred times the data, new
activities come at different times, three sites come late, one month of one site is a thousand times
too large, one site spells an activity otherwise and is refused until it writes it as before, two
sites retire, and one loses its disk: its private state, and the data that it had learned.

Each stretch between two months is a process. The whole is done twice, the second time with
processes that die by SIGKILL at seeded points; the two digests have to be equal, and each task has
to be trained by its owner as often as the schedule says. Beside it stand a closed run that has all
the data at once and trains as many rounds, and a plain loop of FedAvg over the same months. With
``--place`` a benchmark that was ended goes on with the methods that have no row yet.

With ``--grpc`` it is the year of :mod:`benchmarks.year_processes`.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from benchmarks.measure import parser_of, records_of, tell
from benchmarks.measured import given_as, keep
from benchmarks.streams import stretch
from fedcli.data.store.growing import add_task
from fedmodels.config.data import Repeats
from fedmodels.errors import DataError
from fedmodels.facts.resolution import experiment_of
from fedmodels.nets import make_net
from fedtide.inprocess import InProcessCohort, run_in_process

RECORDINGS = ("uci_har", "motionsense", "wisdm")
SHAPE = (1, 32, 24)
"""A window of 128 samples of six channels, laid out as an image: generators take no other kind."""
Part = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
"""Windows and the number of each one's class among those of a source."""


@dataclass(frozen=True)
class Form:
    """The size of a year."""

    months: int
    sites: int
    examples: int
    """Examples of a class and month to train on; half as many to test."""
    times: int
    """How much more the large site has."""
    rounds: int
    kills: int
    repeats: Repeats = "skip"
    """What becomes of windows that come again. Of an activity, a person has 19 to 107 to train on;
    a long year draws more."""


FORMS = {
    "tiny": Form(months=3, sites=6, examples=4, times=3, rounds=1, kills=3),
    "small": Form(months=6, sites=12, examples=4, times=100, rounds=2, kills=20),
    "full": Form(months=12, sites=12, examples=8, times=100, rounds=3, kills=100, repeats="keep"),
}
LARGE, BAD, SPELLS, LOSES, RETIRES, FORGOTTEN = 5, 3, 4, 2, 1, 0
"""Sites to which something happens."""
METHODS = ("fedavg", "fedrep", "fedproto", "gldp", "fedmlp", "pfedgrp", "fedali")
LR = 0.01
NET = {"name": "mlp", "hidden": [64]}
NETS = {"fedali": {"name": "vit-tiny", "alp": True, "prototypes": [8], "blocks": 1, "patch": 8}}
SETTINGS: dict[str, dict[str, Any]] = {
    "gldp": {"t": 1, "s": 1},
    "pfedgrp": {"generator_width": 8, "generator_epochs": 10, "server_volume": 16, "w_epochs": 1},
}


# --- what comes -----------------------------------------------------------------------------------


@dataclass
class Year:
    """What comes to the sites, the same for every run of a form and a seed."""

    form: Form
    place: Path
    windows: Mapping[str, Mapping[str, Any]]
    tasks: dict[int, int] = field(default_factory=dict)
    refused: int = 0
    """Spellings that were refused."""

    @property
    def data(self) -> Path:
        """The directories of the sites."""
        return self.place / "run" / "data"

    def begin(self) -> None:
        """Make the data with which the run begins."""
        (self.place / "run" / "clients").mkdir(parents=True)
        for site in range(self.form.sites - self.late):
            self.join(site)

    @property
    def late(self) -> int:
        """How many sites come later."""
        return max(1, self.form.sites // 4)

    def happen(self, month: int) -> None:
        """Let a month come to all sites that are not silent; what they learned is deleted."""
        there = [*self.tasks]
        if month <= self.late:
            self.join(self.form.sites - self.late + month - 1)
        for site in there:
            is_silent = (month + site) % 3 == 2 and (site, month) not in ((BAD, 1), (SPELLS, 1))
            if is_silent or site in self.retired(month):
                continue
            self.add(site, month)
            for file in self.data.glob(f"{site}/task-{self.tasks[site] - 1}/train_*"):
                file.unlink()
            self.tasks[site] += 1

    def retired(self, month: int) -> list[int]:
        """Return the sites that have retired by a month."""
        leaving = {self.form.months // 2: [RETIRES], self.form.months - 1: [RETIRES, FORGOTTEN]}
        return next((leaving[at] for at in sorted(leaving, reverse=True) if month >= at), [])

    def activities(self, site: int, month: int) -> list[str]:
        """Return what a site does in a month: three activities, and later a fourth."""
        names = [*self.windows[RECORDINGS[site % 3]]["names"]]
        own = [names[(site // 3 + k) % len(names)] for k in range(4)]
        return own if month >= 1 + site % 3 else own[:3]

    def join(self, site: int) -> None:
        """Make the directory of a site with its first task."""
        source, place = self.source(site, 0), self.data / str(site)
        names = json.loads((source / "dataset.json").read_text())["class_names"]
        shutil.copytree(source, place / "task-0", ignore=shutil.ignore_patterns("*.json"))
        about = {
            "format": 1, "input_shape": SHAPE, "num_classes": len(names), "class_names": names,
        }  # fmt: skip
        (place / "client.json").write_text(json.dumps(about))
        self.tasks[site] = 1

    def add(self, site: int, month: int) -> None:
        """Add a month to a site; an activity that is spelt otherwise is refused and corrected."""
        source = self.source(site, month)
        if (site, month) == (SPELLS, 1):
            other = source.with_name(f"{source.name}-spelt")
            shutil.copytree(source, other)
            names = self.activities(site, month)
            names[0] = f"{names[0].upper()} "
            (other / "dataset.json").write_text(json.dumps({"class_names": names}))
            try:
                add_task(self.data, site, other, repeats=self.form.repeats)
            except DataError:
                self.refused += 1
        add_task(self.data, site, source, repeats=self.form.repeats)

    def source(self, site: int, month: int) -> Path:
        """Write the windows of a site and a month; return the folder."""
        place = self.place / "in" / f"{site}-{month}"
        if place.exists():  # an ended benchmark goes on
            return place
        names, made = self.activities(site, month), place.with_name(f".{place.name}")
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        rng = np.random.default_rng([site, month])
        times = self.form.times if site == LARGE else 1
        factor = 1000.0 if (site, month) == (BAD, 1) else 1.0
        for part, count in (("train", self.form.examples), ("test", self.form.examples // 2)):
            drawn = [self.drawn(site, part, name, count * times, rng) for name in names]
            labels = np.repeat(np.arange(len(names)), [len(x) for x in drawn])
            np.save(made / f"{part}_x.npy", np.concatenate(drawn) * np.float32(factor))
            np.save(made / f"{part}_y.npy", labels)
        (made / "dataset.json").write_text(json.dumps({"class_names": names}))
        made.rename(place)
        return place

    def drawn(self, site: int, part: str, name: str, count: int, rng: Any) -> Any:
        """Draw windows of an activity: of the site's person, and of all for the large site.

        Every third window of a person is for tests.
        """
        found = self.windows[RECORDINGS[site % 3]]
        people = np.unique(found["subject"])
        mine = found["subject"] == people[site // 3]
        rows = np.flatnonzero((found["y"] == found["names"].index(name)) & (mine | (site == LARGE)))
        is_test = np.arange(len(rows)) % 3 == 2
        rows = rows[is_test if part == "test" else ~is_test]
        rows = rows if len(rows) else np.flatnonzero(found["y"] == found["names"].index(name))
        chosen = rng.choice(rows, count, replace=len(rows) < count)
        return found["x"][chosen].reshape(-1, *SHAPE).astype(np.float32)

    def seen(self, bad: bool = False) -> Iterator[tuple[int, int, dict[str, Part], list[str]]]:
        """Yield site, month, parts and class names of each task that came, month by month."""
        folders = [f for f in (self.place / "in").iterdir() if "spelt" not in f.name]
        for site, month in sorted((tuple(map(int, f.name.split("-"))) for f in folders), key=_late):
            if bad or (site, month) != (BAD, 1):
                place = self.place / "in" / f"{site}-{month}"
                parts = {
                    part: (np.load(place / f"{part}_x.npy"), np.load(place / f"{part}_y.npy"))
                    for part in ("train", "test")
                }
                yield site, month, parts, self.activities(site, month)


def _late(place: tuple[int, ...]) -> tuple[int, int]:
    return place[1], place[0]


def recordings(form: str) -> dict[str, dict[str, Any]]:
    """Return windows, labels, people and names of each recording; of the tiny form made-up ones."""
    found = {}
    for number, name in enumerate(RECORDINGS):
        if form == "tiny":
            rng = np.random.default_rng(number)
            y, names = np.tile(np.arange(6), 60), [f"{'abc'[number]}{k}" for k in range(6)]
            x = rng.normal(size=(360, 768)) + np.eye(768)[y] * 20
            found[name] = {"x": x, "y": y, "subject": np.arange(360) // 90, "names": names}
            continue
        with np.load(_data() / f"{name}.npz") as file:
            x = file["X"].astype(np.float32)  # the deviation is beyond float16, as which it is kept
            x = np.clip(x / x.reshape(-1, 6).std(0), -5, 5)
            names = [str(one) for one in file["label_names"]]
            found[name] = {"x": x, "y": file["y"], "subject": file["subject"], "names": names}
    return found


def _data() -> Path:
    import os

    return Path(os.environ.get("FEDTIDE_DATA", "data"))


# --- the run --------------------------------------------------------------------------------------


def experiment(method: str, form: Form, late: int, *, is_open: bool = True) -> Any:
    """Return the run of a method."""
    schedule: dict[str, Any] = {
        "order": "tasks_outer",
        "clients": form.sites,
        "rounds": form.rounds,
    }
    if is_open:
        schedule |= {"open": True, "begin_with": form.sites - late, "participants": "new + 3"}
        schedule |= {"per_round": max(3, form.sites // 2)}
    return experiment_of(
        {
            "net": NETS.get(method, NET),
            "method": {"name": method, **SETTINGS.get(method, {})},
            "schedule": schedule,
            "training": {"local_epochs": 2, "batch_size": 16, "lr": LR, "momentum": 0.9},
            "evaluate": {"last_tasks": 4, "pictures": 0} if is_open else {"pictures": 0},
        }
    )


def lived(method: str, year: Year, kills: int) -> int:
    """Let a run live through the year; return how many of its processes died."""
    form, killed = year.form, 0
    given, rng = experiment(method, form, year.late), random.Random(0)
    left = kills
    for month in range(form.months + 1):
        if month == 0:
            year.begin()
        elif month < form.months:
            year.happen(month)
        lost = month == form.months - 1
        if lost:
            shutil.rmtree(year.place / "run" / "clients" / str(LOSES), ignore_errors=True)
        steered = {"retired": year.retired(month), "forgets": month >= form.months - 1}
        at_rest = "close" if month == form.months else "pause"
        due = left // (form.months + 1 - month)
        for death in [*(rng.randrange(12) for _ in range(2 * due)), None]:
            used = stretch(
                given, year.place / "run", at_rest, death if left else None,
                _disk_lost if lost else _nothing, **steered,
            )  # fmt: skip
            if not used["killed"]:
                break
            killed, left = killed + 1, left - 1
    return killed


def _nothing() -> None:
    """All disks are whole."""


def _disk_lost() -> None:
    """Let a site start over that came back without its private state."""

    def starting_over(cohort: InProcessCohort) -> Sequence[int]:
        return () if cohort.workers.versions(LOSES) else (LOSES,)

    InProcessCohort.starting_over = starting_over  # type: ignore[method-assign]


def short_of(run: Path, rounds: int) -> tuple[list[tuple[int, int]], int]:
    """Return the tasks that their owners trained on too seldom, and how many were set aside."""
    records = records_of(run)
    task: dict[int, int] = {}
    trained: Counter[tuple[int, int]] = Counter()
    aside, gone, begun = set[tuple[int, int]](), set[int](), set[tuple[int, int]]()
    for record in records:
        for growth in record.get("growths", ()):
            task |= {client: number - 1 for client, number in growth["tasks"]}
            begun |= {(client, number - 1) for client, number in growth["tasks"]}
            aside |= {(one[0], one[1]) for one in growth.get("set_aside", ())}
            gone |= {*growth.get("retired", ())}
        trained.update((client, task[client]) for client in record["cohort"])
    out = aside | {(client, task[client]) for client in gone}
    return sorted(one for one in begun - out if trained[one] < rounds), len(aside)


# --- what stands beside it ------------------------------------------------------------------------


def closed(method: str, year: Year, rounds: int, place: Path) -> dict[str, float]:
    """Run a closed run that has all the data at once, for as many rounds; return its scores."""
    names = sorted({name for *_, own in year.seen() for name in own})
    for site in range(year.form.sites):
        for part in ("train", "test"):
            own = [(p[part], n) for s, _, p, n in year.seen() if s == site]
            (place / f"data/{site}/task-0").mkdir(parents=True, exist_ok=True)
            y = [np.array([names.index(n[k]) for k in labels]) for (_, labels), n in own]
            at = place / f"data/{site}/task-0"
            np.save(at / f"{part}_x.npy", np.concatenate([x for (x, _), _ in own]))
            np.save(at / f"{part}_y.npy", np.concatenate(y))
        about = {"input_shape": SHAPE, "num_classes": len(names), "class_names": names}
        (place / f"data/{site}/client.json").write_text(json.dumps({"format": 1, **about}))
    given = experiment(method, year.form, year.late, is_open=False)
    schedule = given.schedule.model_copy(update={"rounds": rounds})
    given = given.model_copy(update={"schedule": schedule})
    found: dict[str, float] = run_in_process(given, place / "data", place / "run")["metrics"]
    return found


def plain_loop(year: Year) -> dict[str, float]:
    """Train FedAvg in plain torch, month by month; return the accuracies of what it leaves.

    ``a_glo`` is that of the last mean, ``a_loc`` that of each site's model as it last trained it.
    Both are means over sites of what is right of all their tests. All classes are known beforehand.
    """
    names = sorted({name for *_, own in year.seen() for name in own})
    torch.manual_seed(0)
    net = make_net("mlp", num_classes=len(names), input_shape=SHAPE, hidden=[64])
    seen = [*year.seen()]
    trained: dict[int, torch.nn.Module] = {}

    def tensors(part: Part, own: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.tensor([names.index(own[k]) for k in part[1]])
        return torch.from_numpy(part[0]), labels

    for month in range(year.form.months):
        now = [(site, parts, own) for site, m, parts, own in seen if m == month]
        for _ in range(year.form.rounds if now else 0):
            states, sizes = [], []
            for site, parts, own in now:
                x, y = tensors(parts["train"], own)
                model = trained[site] = copy.deepcopy(net)
                optimizer = torch.optim.SGD(model.parameters(), LR, 0.9)
                for _ in range(2):
                    for rows in torch.randperm(len(y)).split(16):
                        optimizer.zero_grad()
                        cross_entropy(model(x[rows]), y[rows]).backward()
                        optimizer.step()
                states.append(model.state_dict())
                sizes.append(len(y) / 1.0)
            shares = [size / sum(sizes) for size in sizes]
            net.load_state_dict(
                {k: sum(w * s[k] for w, s in zip(shares, states, strict=True)) for k in states[0]}
            )

    def accuracy(net_of: Callable[[int], torch.nn.Module]) -> float:
        right: dict[int, list[float]] = {}
        with torch.no_grad():
            for site, _, parts, own in seen:
                x, y = tensors(parts["test"], own)
                right.setdefault(site, []).extend((net_of(site)(x).argmax(1) == y).float().tolist())
        return float(np.mean([np.mean(found) for found in right.values()]))

    return {"a_loc": accuracy(trained.__getitem__), "a_glo": accuracy(lambda _: net)}


def row_of(method: str, name: str, place: Path) -> dict[str, Any]:
    """Let a method live through the year twice; return what it came to.

    Raises:
        SystemExit: other bits with kills, or tasks that were trained on too seldom.
    """
    form, windows, began = FORMS[name], recordings(name), time.monotonic()
    years = {}
    killed = 0
    for which, kills in (("whole", 0), ("killed", form.kills)):
        shutil.rmtree(place / which, ignore_errors=True)
        years[which] = Year(form, place / which, windows)
        killed = lived(method, years[which], kills)
    summaries = [json.loads((place / w / "run/summary.json").read_text()) for w in years]
    digests = [summary["state_sha256"] for summary in summaries]
    if digests[0] != digests[1]:
        raise SystemExit(f"{method}: {killed} kills, and other bits: {digests}")
    run, year = place / "whole" / "run", years["whole"]
    short, aside = short_of(run, form.rounds)
    if short:
        raise SystemExit(f"{method}: these tasks were trained on too seldom: {short}")
    rounds, metrics = len(records_of(run)), summaries[0]["metrics"]
    shutil.rmtree(place / "closed", ignore_errors=True)
    beside = closed(method, year, rounds, place / "closed")
    scores = {k: metrics[k] for k in ("a_loc", "a_glo", "forgetting") if k in metrics}
    scores |= {f"closed_{k}": beside[k] for k in ("a_loc", "a_glo") if k in beside}
    scores |= {f"plain_{k}": value for k, value in plain_loop(year).items()}
    return {
        "method": method, "rounds": rounds, "tasks": sum(year.tasks.values()),
        **{k: round(v, 4) for k, v in scores.items()},
        "set_aside": aside, "refused": year.refused, "killed": killed,
        "digest": digests[0][:8], "seconds": round(time.monotonic() - began),
    }  # fmt: skip


def main() -> None:
    """Let each method live through the year."""
    parser = parser_of("year", __doc__, "year")
    parser.add_argument("--form", choices=[*FORMS], default="small")
    parser.add_argument("--methods", nargs="*", default=[*METHODS])
    parser.add_argument("--place", type=Path, help="where rows are kept; else nowhere")
    parser.add_argument("--grpc", action="store_true", help="by processes, over loopback")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.grpc:
        from benchmarks.year_processes import PLANS, rows_of

        if options.form not in PLANS:
            parser.error(f"--grpc has the forms {', '.join(PLANS)}")
        rows = rows_of(options.form, options.place)
        tell("year", rows)
        if options.keep:
            name = "year-grpc" if options.keep == "year" else options.keep
            keep(name, given_as("year"), {"A year by processes that die": rows})
        return
    with tempfile.TemporaryDirectory() as temporary:
        place = options.place or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        file = place / f"{options.form}.json"
        rows = json.loads(file.read_text()) if file.exists() else {}
        for method in options.methods:
            if method not in rows:
                rows[method] = row_of(method, options.form, place)
                file.write_text(json.dumps(rows, indent=1))
            tell("year", [rows[method]])
    if options.keep:
        title = f"A year of twelve sites, {options.form} form"
        keep(options.keep, given_as("year"), {title: [rows[m] for m in options.methods]})


if __name__ == "__main__":
    main()
