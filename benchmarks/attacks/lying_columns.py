"""What a coordinator that lies comes to know of columns that a site does not allow.

    python -m benchmarks.attacks.lying_columns

A site has a table and allows some of its columns, each for a role. The coordinator asks for another
column, or for one of these in another role, by every key of ``[data.columns]`` that takes a name:
in the config that it shows, in the table to cut by, and in the config that it says after the join.
Two sites differ in nothing but what they do not allow. Whatever is asked, both have to say the same
to the last bit.

The keys are those of the schema, so one that comes later is walked as well.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np

from benchmarks.attacks.lying_coordinator import Ask, Finding, Heard, Liar, leaks, told_to
from fedcli.gate.rules import Rules
from fedmodels.config.columns import Columns
from fedmodels.config.experiment import Experiment
from fedmodels.facts.resolution import experiment_of
from fedmodels.tensors.bundle import Problem
from fedpb.tables import table_of
from fedpb.v1 import coordinator_pb2 as rpc

SECRET = "hiv"
"""The column that the site does not allow."""
ALLOWED = ("age", "dose", "kind:label", "day")
HONEST: Mapping[str, Any] = {"label": "kind", "features": ["age", "dose"], "time": "day"}
TEXTS = {"delimiter", "decimal", "encoding", "missing", "time_unit", "sheet", "date_formats",
         "classes", "missing_values"}  # fmt: skip
"""Keys whose texts say how a table is written, and name no column."""
ROWS = 60
ROLES = ("age:label", "age:target", "dose:labels", "age:task", "age:client",
         "kind:features", "kind:task", "kind:client")  # fmt: skip
"""Allowed columns, and roles that they are not allowed for."""


def config(columns: Mapping[str, Any], **data: Any) -> Experiment:
    """Return a run whose table has these columns; ``data`` are further keys of ``[data]``.

    It lists no names of classes but those of the honest label: a site is to say them.
    """
    learned = {"target", "labels"} & columns.keys() or columns.get("label") != HONEST["label"]
    tables = {
        "data": {"name": "table", "mean": [0.5], "std": [2.0], "columns": dict(columns), **data}
        | ({} if learned else {"classes": ["a", "b"]}),
        "net": {"name": "mlp", "hidden": [4]},
        "method": {"name": "fedavg"},
        "schedule": {"rounds": 1, "clients": 2},
        "evaluate": {"views": []},
    }
    return experiment_of(tables)


def problem_of(experiment: Experiment) -> Problem:
    """Return what a net of a run sees and says."""
    assert experiment.data is not None
    assert experiment.data.columns is not None
    return Problem((len(experiment.data.columns.channels) or 1,), 2)


@dataclass(frozen=True)
class Wish:
    """What a coordinator wants to read."""

    what: str
    columns: Mapping[str, Any]


def named_by() -> Iterator[str]:
    """Yield the keys of ``[data.columns]`` that name columns, or files in their place."""
    for key, kind in get_type_hints(Columns).items():
        if key not in TEXTS and ("str" in str(kind) or _words(kind)):
            yield key


def _words(kind: Any) -> list[str]:
    """Return the literal words that a type allows."""
    inner = [word for each in get_args(kind) for word in _words(each)]
    return [*(each for each in get_args(kind) if isinstance(each, str)), *inner]


def wishes() -> list[Wish]:
    """Return what is asked for: the secret column by each key, and allowed ones in other roles."""
    kinds, found = get_type_hints(Columns), list[Wish]()
    for key in named_by():
        for value in _values(key, _words(kinds[key])):
            found.append(Wish(f"{key} = {value}", _with(key, value)))
    for text in ROLES:
        name, role = text.split(":")
        (value,) = _values(role, [], name)
        found.append(Wish(text, _with(role, value, name)))
    without = {k: v for k, v in HONEST.items() if k != "features"}
    return [*found, Wish("no features", without)]


def _values(key: str, words: Sequence[str], name: str = SECRET) -> list[Any]:
    if words:
        return [*words]
    lists: Mapping[str, Any] = {
        "features": sorted({"age", "dose", name}), "categories": {name: ["no", "yes"]},
        "target": [name], "labels": [name],
    }  # fmt: skip
    return [lists.get(key, name)]


def _with(key: str, value: Any, name: str = SECRET) -> dict[str, Any]:
    """Return the honest columns with another one, which has no other role there but the label."""
    found = {k: v for k, v in HONEST.items() if k == "label" or v != name}
    found["features"] = [one for one in HONEST["features"] if one != name]
    if key == "categories":
        found["features"].append(name)
    if key in ("target", "labels", "label_from"):
        found.pop("label", None)
    if key == "target":
        found |= {"target_mean": [50.0], "target_std": [20.0]}
    if key == "features" and name == HONEST["label"]:
        value, found = ["dose", name], found | {"label": "age", "categories": {name: ["a", "b"]}}
    return {**found, key: value}


def table(place: Path, secret: int) -> Path:
    """Write a site's table; only what it does not allow follows from the secret."""
    rng, own = np.random.default_rng(0), np.random.default_rng((1, secret))
    rows = [
        f"{rng.integers(2, 9)}0,{rng.integers(2)},{'ab'[row % 2]},{row},{own.choice(['no', 'yes'])}"
        for row in range(ROWS)
    ]
    folder = place / f"ward {secret}"
    folder.mkdir(parents=True)
    (folder / f"patient {secret}.csv").write_text("age,dose,kind,day,hiv\n" + "\n".join(rows))
    return place


def heard_of(liar: Any, rules: Rules, root: Path, name: str) -> dict[tuple[int, int], Heard]:
    """Let both sites meet the same coordinator; ``liar`` makes one."""
    found = {}
    for secret in range(2):
        states = root / name / str(secret)
        states.mkdir(parents=True)
        data = table(states / "data", secret)
        found[secret, 0] = told_to([liar()], rules, data, states)
    return found


def play(
    root: Path, allow: Sequence[str] = ALLOWED, asked: Sequence[Wish] = (), tell: Sequence[str] = ()
) -> list[Finding]:
    """Ask two sites for each wish in each place; return what is amiss.

    Args:
        root: a directory for tables and states.
        allow: the columns that the sites allow.
        asked: what is asked for; everything unless given.
        tell: what the sites tell of the columns that they allow.
    """
    rules, honest = Rules.of(allow_column=allow, tell=tell), config(HONEST)
    found = list[Finding]()
    asks = [Ask("train"), Ask("the end", {}, 0.0, rpc.ORDER_KIND_FINISH)]
    for number, wish in enumerate(asked or wishes()):
        try:
            lie = config(wish.columns)
        except ValueError as error:
            found.append(Finding(wish.what, f"no config says it, so nothing was tried: {error}"))
            continue
        assert lie.data is not None
        cut = table_of(lie.data.model_dump(mode="json", exclude_none=True))
        liars = {
            "shown": lambda lie=lie: Liar(lie, asks, problem_of(lie)),
            "cut": lambda cut=cut: Liar(honest, asks, problem_of(honest), prepared={"data": cut}),
        }
        for where, liar in liars.items():
            sites = heard_of(liar, rules, root, f"{number}-{where}")
            found += [Finding(f"{wish.what} ({where})", one.what) for one in leaks(sites, ())]
            calls = {call for one in sites.values() for call in one.calls}
            if calls != {"Prepare"}:
                found.append(Finding(f"{wish.what} ({where})", f"it told {sorted(calls)}"))
        facts = {"problem": problem_of(honest), "joined": lie}
        sites = heard_of(lambda f=facts: Liar(honest, asks, **f), rules, root, f"{number}-joined")
        found += [Finding(f"{wish.what} (joined)", one.what) for one in leaks(sites, ())]
    return found


def main() -> int:
    """Ask for everything that is not allowed; return 1 if something leaks."""
    with tempfile.TemporaryDirectory() as made:
        found = play(Path(made))
    for one in found:
        print(f"{one.lie}: {one.what}")
    print(json.dumps({"wishes": len(wishes()), "found": len(found)}))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
