"""What a run directory says of its run: read leniently, since a run may be in progress or killed.

The directory may be somebody else's. So texts of its records are escaped when they are read, and
those of its config where a line shows them.
"""

from __future__ import annotations

import base64
import itertools
import json
import sqlite3
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from fedmodels.console.printable import printable
from fedmodels.errors import ArchiveError
from fedmodels.host.files import read_regular
from fedmodels.own.code_names import short_name
from fedsrv.state.record import MeansOver, Record, means_of, named_aside, scored_in
from fedsrv.state.run_directory import reading

KINDS = {".png": ("png", b"\x89PNG\r\n\x1a\n"), ".svg": ("svg+xml", b"<svg ")}
"""Of pictures: the type, and how such a file begins."""
MAX = sys.float_info.max
"""Largest finite float; a file may hold larger integers."""
TARGETS = ("target", "labels", "label")
"""Keys of ``[data.columns]`` that name what is predicted."""
MAX_OF_A_RARE = 0.75
"""Of the examples of the most frequent class; a class with more is not rare."""


@dataclass(frozen=True, eq=False)
class RunRecord:
    """One run directory, as far as it is written."""

    path: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    rows: Sequence[Record]
    """The record of each interaction, in order; an older or damaged file may lack any field."""
    called: str = ""
    """What a sweep calls its row; by default a run goes by its method's name."""

    @property
    def is_finished(self) -> bool:
        """Whether the run ended and summed itself up."""
        return bool(self.summary)

    @property
    def method(self) -> str:
        """Return the method's name, or the directory's where the run does not say."""
        if self.called:
            return printable(self.called)
        name = self.summary.get("method") or self.setting("method.name")
        return printable(short_name(str(name))) if name else self.path.name

    @property
    def seed(self) -> object:
        """Return the run's seed, or ``None`` where the run does not say."""
        return self.summary.get("seed", self.config.get("seed"))

    @property
    def kind(self) -> str:
        """Return the kind of the scenario; empty where the run does not say."""
        kind = str(self.summary.get("scenario") or self.setting("scenario.kind") or "")
        return printable(short_name(kind))

    @property
    def rounds(self) -> int:
        """Return how many rounds are committed."""
        stated = number(self.summary.get("rounds"))
        return self.recorded if stated is None else int(stated)

    @property
    def recorded(self) -> int:
        """Return how many rounds there are up to the last one in ``rounds.jsonl``.

        A round in which nobody was there has no record.
        """
        return max(self.curve(lambda row: 0.0), default=0)

    @property
    def without(self) -> list[str]:
        """Return who the run is without, in words: forgotten, set aside, or never of a round.

        Of runs that draw cohorts, or grow, nobody is missed: who is there differs by itself.
        """
        stated = self.summary if self.is_finished else _aside_in(self.path)
        gone = {key: _names(stated.get(key)) for key in ("clients_forgotten", "clients_set_aside")}
        found = [f"client {client}, forgotten" for client in gone["clients_forgotten"]]
        found += [f"task {name}, forgotten" for name in _names(stated.get("tasks_forgotten"))]
        aside = [c for c in gone["clients_set_aside"] if c not in gone["clients_forgotten"]]
        found += [f"client {client}, set aside" for client in aside]
        schedule = table(self.config.get("schedule"))
        expected = int(number(schedule.get("clients"), 0))
        draws = any(schedule.get(key) for key in ("per_round", "open", "buffer", "availability"))
        draws = draws or schedule.get("sampling", "uniform") != "uniform"
        pools = self.setting("method.name") == "centralized"
        if draws or pools or not self.is_finished:
            return found
        cohorts = [row["cohort"] for row in self.rows if isinstance(row.get("cohort"), list)]
        counted = {str(client) for cohort in cohorts for client in cohort}
        absent = [c for c in map(str, range(expected)) if c not in counted]
        named = {*gone["clients_forgotten"], *gone["clients_set_aside"]}
        absent = [c for c in absent if c not in named] if len(cohorts) == len(self.rows) else []
        return found + [f"client {client}, never there" for client in absent]

    @property
    def in_means(self) -> tuple[int, list[str]]:
        """Return over how many clients the last scores are means, and who is missing in them."""
        row: Mapping[str, Any] = next((r for r in reversed(self.rows) if scored_in(r)), {})
        return len(scored_in(row)), _names(row.get("unscored"))

    @property
    def means(self) -> dict[str, int]:
        """Return over how many clients each accuracy of the last scored round is a mean."""
        return next((found for row in reversed(self.rows) if (found := means_of(row))), {})

    @cached_property
    def population(self) -> list[tuple[int, list[str], list[str]]]:
        """Return the rounds from which on means are over other clients: who left, and who came."""
        return MeansOver(self.rows).changes

    def roster(self) -> dict[str, dict[str, Any]]:
        """Return how each client stands that was ever there; nothing where that is not known."""
        try:
            with reading(self.path) as db:
                return {str(c): json.loads(said) for c, said in db.execute("SELECT * FROM roster")}
        except (sqlite3.Error, OSError, ValueError):
            return {}

    def setting(self, key: str) -> object:
        """Return the value of a dotted key of the config, or ``None``."""
        value: object = self.config
        for part in key.split("."):
            value = table(value).get(part)
        return value

    @property
    def selected(self) -> str:
        """Return how many clients a cohort's metric is a mean over, in words; empty if all."""
        some, everybody = self.setting("schedule.per_round"), self.setting("schedule.clients")
        if some in (None, everybody) or self.setting("evaluate.trained") == "all":
            return ""
        return printable(f"{some} of {everybody} clients")

    @property
    def extent(self) -> str:
        """Return how many rounds are committed, and whether the run is finished."""
        rounds = f"{self.rounds} round{'' if self.rounds == 1 else 's'}"
        return rounds if self.is_finished else f"{rounds}, not finished"

    def title(self) -> str:
        """Return one line that says what this run is: method, data, scenario, target, clients."""
        data = self.summary.get("data") or short_name(str(self.setting("data.name") or ""))
        parts = [f"{self.method} on {data}" if data else self.method, self.kind]
        if target := self.target:
            parts.append(f"predicting {target}")
        clients = number(self.setting("schedule.clients"))
        parts.append("" if clients is None else f"{clients:.0f} client{'s' * (clients != 1)}")
        return printable(", ".join(filter(None, parts)))

    @property
    def target(self) -> str:
        """Return the columns of a table that are predicted, as the config names them."""
        found = next(filter(None, (self.setting(f"data.columns.{key}") for key in TARGETS)), "")
        return ", ".join(map(str, found)) if isinstance(found, list) else str(found)

    @property
    def chooses_among(self) -> str:
        """Return among which classes the method's rule chooses; empty where no summary says so."""
        found = self.summary.get("chooses_among")
        return found if found in ("all classes", "classes met") else ""

    @property
    def tests(self) -> dict[int, list[float]]:
        """Return the test examples behind each client's scores, by class; empty if not known."""
        if not self.is_finished or self.setting("evaluate.last_tasks") is not None:
            return {}
        found = table(self._data.get("tests"))
        return {
            int(key): [number(count, 0.0) for count in counts]
            for key, counts in found.items()
            if str(key).isdecimal() and isinstance(counts, list)
        }

    def metrics(self) -> dict[str, float]:
        """Return the summary's metrics, or the last value of each while the run is going on."""
        if self.is_finished:
            return numbers(self.summary.get("metrics"))
        latest: dict[str, float] = {}
        for row in self.rows:
            latest.update(numbers(row.get("metrics")))
        return latest

    @cached_property
    def _data(self) -> Mapping[str, Any]:
        """What clients announced of their data, as far as the directory has it."""
        return table(_read_json(self.path / "data.json"))

    @property
    def class_names(self) -> dict[int, str]:
        """Return the names of classes, where they have some."""
        found = self._data.get("classes")
        return dict(enumerate(map(str, found))) if isinstance(found, list) else {}

    @property
    def client_names(self) -> dict[int, str]:
        """Return the names of clients, where they have some."""
        found = table(self._data.get("clients"))
        return {int(key): str(name) for key, name in found.items() if str(key).isdecimal()}

    @property
    def rare_classes(self) -> list[str] | None:
        """Return the names of the rare classes, none where no class is rare; None: not known.

        A rare class has at most three quarters of the examples that the most frequent one has.
        """
        rare, examples = self._data.get("rare"), self._data.get("examples")
        if not isinstance(rare, list) or not isinstance(examples, list):
            return None
        counts = [number(count, 0.0) for count in examples]
        most = MAX_OF_A_RARE * max(counts, default=0.0)
        few = [k for k in rare if isinstance(k, int) and 0 <= k < len(counts)]
        return [self.class_names.get(k, str(k)) for k in few if counts[k] <= most]

    @property
    def guesses(self) -> dict[str, float]:
        """Return the accuracy of answers without a model, by what is answered; empty: not known."""
        return numbers(self._data.get("guesses"))

    @property
    def again(self) -> int:
        """Return how many examples of new tasks earlier tasks of their clients have."""
        return int(sum(numbers(self._data.get("again")).values()))

    def environment(self) -> dict[str, str | int]:
        """Return the machine, the versions and the commit that the run said it had."""
        said = table(_read_json(self.path / "env.json")).items()
        return {str(key): value for key, value in said if isinstance(value, str | int)}

    def live_models(self) -> dict[int, str]:
        """Return what happened last to the live model of each client whose directory is here."""
        found = dict[int, str]()
        for path in self.path.glob("clients/*/model/status.json"):
            said = table(_read_json(path)).get("last")
            if isinstance(said, str) and path.parts[-3].isdecimal():
                found[int(path.parts[-3])] = said
        return found

    def pictures(self) -> list[tuple[str, int, str]]:
        """Return name, client and address of what clients drew, where their directories are here.

        What is no picture in the run's own directory is left out: a page is passed on to others.
        The address is for an ``img``, in which an SVG runs nothing and loads nothing.
        """
        drawn = []
        for path in self.path.glob("clients/*/pictures/*"):
            kind, begin = KINDS.get(path.suffix, ("", b""))
            client = path.parts[-3]
            with suppress(OSError, RuntimeError):  # the latter of links that go in a circle
                content = read_regular(path, self.path)
                if kind and client.isdigit() and content.startswith(begin):
                    data = base64.b64encode(content).decode()
                    drawn.append((path.stem, int(client), f"data:image/{kind};base64,{data}"))
        return sorted(drawn)

    def changes_of_definitions(self) -> list[tuple[int, int, int]]:
        """Return where metrics changed their meaning: definitions before and after, and the round.

        Definitions are 0 where an earlier version did not number them.
        """
        of = [(int(number(row.get("definitions"), 0)), row) for row in self.rows]
        return [
            (before, after, int(number(row.get("round"), 0)))
            for (before, _), (after, row) in itertools.pairwise(of)
            if before != after
        ]

    def totals(self, part: str) -> dict[str, float]:
        """Return what was spent over the whole run; ``part`` is ``bytes`` or ``seconds``."""
        stated = numbers(self.summary.get(part))
        if stated:
            return stated
        sums: Counter[str] = Counter()  # adds floats as well as it counts
        for row in self.rows:
            sums.update(numbers(row.get(part)))
        return {name: float(value) for name, value in sums.items()}

    def curve(self, value_of: Callable[[Mapping[str, Any]], float | None]) -> dict[int, float]:
        """Return ``{round: value}``, the last value of each round that has one.

        Rounds count from one, as in everything that a person looks at.
        """
        out: dict[int, float] = {}
        for index, row in enumerate(self.rows):
            if (value := value_of(row)) is not None:
                out[_round_of(row, index)] = value
        return out

    @property
    def open_round(self) -> int | None:
        """Return the last round, if it has fewer interactions so far than the one before."""
        counts = Counter(_round_of(row, index) for index, row in enumerate(self.rows))
        *_, before, last = (0, 0, *(counts[key] for key in sorted(counts)))
        return max(counts) if last < before and not self.is_finished else None


def _round_of(row: Mapping[str, Any], index: int) -> int:
    return int(number(row.get("round"), index)) + 1


def read_run(path: Path) -> RunRecord:
    """Read a run directory; ArchiveError if it is not one, or one of its files is damaged."""
    if path.exists() and not path.is_dir():
        raise ArchiveError(f"{path} is a file; name the run directory, which --out made")
    if not path.is_dir():
        raise ArchiveError(f"{path} is not a run directory: there is no such directory")
    names = ("config.toml", "summary.json", "rounds.jsonl")
    texts = {name: _text(path / name) for name in names}
    if all(text is None for text in texts.values()):
        raise ArchiveError(f"{path} is not a run directory: it has none of {', '.join(names)}")
    try:
        config = tomllib.loads(texts["config.toml"] or "")
    except (ValueError, RecursionError) as error:
        raise ArchiveError(f"{path / 'config.toml'} is damaged: {error}") from None
    summary = texts["summary.json"]
    return RunRecord(
        path,
        config,
        {} if summary is None else _object(summary, str(path / "summary.json")),
        list(_rows(texts["rounds.jsonl"] or "", path / "rounds.jsonl")),
    )


def _read_json(path: Path) -> object:
    """Return what a file says, fit to be shown; None where it is not there or damaged."""
    try:
        return _shown(json.loads(read_regular(path)))
    except (OSError, ValueError, RecursionError):
        return None


def _aside_in(run: Path) -> Mapping[str, Any]:
    """Return who a run that has not ended is without, as a summary would; nothing if unknown."""
    try:
        with reading(run) as db:
            facts = dict(db.execute("SELECT key, value FROM meta"))
        first = {int(client): int(at) for client, at in json.loads(facts.get("aside", "[]"))}
        tasks = [(int(c), int(t)) for c, t in json.loads(facts.get("forgotten", "[]"))]
    except (sqlite3.Error, OSError, ValueError, TypeError):
        return {}
    return named_aside(first, tasks)


def _names(value: object) -> list[str]:
    """Return the names of clients or tasks in a list of JSON."""
    return [printable(str(one)) for one in value] if isinstance(value, list) else []


def _text(path: Path) -> str | None:
    try:
        return read_regular(path).decode()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ArchiveError(f"{path} cannot be read: {reason}") from None


def _object(text: str, where: str) -> dict[str, Any]:
    is_plain = "\\" not in text and text.isprintable()  # as most lines of rounds.jsonl are
    try:
        value = json.loads(text) if is_plain else _shown(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise ArchiveError(f"{where} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise ArchiveError(f"{where} is damaged: it holds no object")
    return value


def _shown(value: object) -> object:
    """Return a value of JSON in which every text may be printed."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(key): _shown(item) for key, item in value.items()}
    return [_shown(item) for item in value] if isinstance(value, list) else value


def _rows(text: str, path: Path) -> Iterator[Record]:
    """Yield the records of a file of lines; a last line that is not ended was cut by a kill."""
    lines = text.split("\n")
    for index, line in enumerate(lines[:-1], start=1):
        if line.strip():
            try:
                yield cast(Record, _object(line, f"{path} line {index}"))
            except ArchiveError as error:
                raise ArchiveError(
                    f"{error}; fedsrv launch --resume of this run rewrites the file"
                ) from None


def table(value: object) -> Mapping[str, Any]:
    """Return a JSON object as it is, and anything else as an empty one."""
    return value if isinstance(value, Mapping) else {}


def number(value: object, default: Any = None) -> Any:
    """Return a finite number as a float, and anything else as ``default``."""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX:
        return float(value)
    return default


def numbers(value: object) -> dict[str, float]:
    """Return the finite numbers of a JSON object."""
    found = {str(key): number(item) for key, item in table(value).items()}
    return {key: item for key, item in found.items() if item is not None}


def present_task(
    record: Mapping[str, Any], client: int, row: Mapping[str, Any], views: Mapping[str, Any]
) -> int | None:
    """Return the present task of a client in a record.

    Args:
        record: of the interaction.
        client: which one.
        row: what the record has of it.
        views: those of the row that are asked where all others go on: its last task is the last one
            that a view scores.

    Returns:
        The task; None where the record does not say it.
    """
    if (own := number(row.get("task"))) is not None:
        return int(own)
    of_all, cohort = int(number(record.get("task"), 0)), record.get("cohort")
    if isinstance(cohort, list) and client in cohort:
        return of_all
    ends = [
        int(number(table(view).get("first_task"), 0)) + len(tasks)
        for view in views.values()
        if isinstance(tasks := table(view).get("tasks"), list)
    ]
    last = [end - 1 for end in ends if end]
    return min([of_all, *last]) if last else None


def leaves_of(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of a config by dotted key."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves_of(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def interaction_of(row: Mapping[str, Any], index: int) -> int:
    """Return which interaction a row is of, counted from one; its place where it says nothing."""
    return int(number(row.get("interaction"), index)) + 1
