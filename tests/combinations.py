"""Tiny experiments that switch on parts of a config, and sets of parts that cover every pair."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedmodels.config.combinations import NEEDED, PARTS, refused_by

Tables = Mapping[str, Any]
REFUSED = refused_by(PARTS)
OF_PLUGINS = [part for part in PARTS.values() if part.sample]
"""Parts of plugins, each with its own small config."""
NOISE = {
    "level": "client", "noise_multiplier": 1.0, "delta": 1e-3, "clip": 0.5,
    "allow": ["announced", "examples", "loss", "scores"],
}  # fmt: skip
FIXED = {"mean": [0.3], "std": [0.3]}
NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes, input_shape):
        super().__init__()
        self.base = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 16))
        self.base[1].requires_grad_(False)
        self.head = nn.Linear(16, num_classes)

    def features(self, x):
        return self.base(x)
"""
SETTINGS: Mapping[str, Tables] = {
    "poisson sampling": {"schedule": {"sampling": "poisson", "per_round": 5}},
    "weighted sampling": {"schedule": {"sampling": "weighted", "per_round": 5}},
    "over-selection": {"schedule": {"per_round": 5, "over_select": 1}},
    "availability": {"schedule": {"availability": "there.csv", "per_round": 5}},
    "asynchronous rounds": {"schedule": {"order": "asynchronous", "buffer": 5}},
    "open runs": {"schedule": {"open": True}},
    "participants": {"schedule": {"participants": "new + 1"}},
    "triggers": {"trigger": {"new_data": 6}},
    "stopping": {"schedule": {"patience": 5}, "evaluate": {"select_by": "accuracy"}},
    "fewer clients": {"server": {"min_clients": 5}},
    "validation": {"data": {"validation_share": 0.2}},
    "repeats": {"data": {"repeats": "keep"}},
    "unusual tasks": {"data": {"unusual": "set-aside"}},
    "accumulated data": {"scenario": {"training_data": "accumulated"}},
    "reference run": {"evaluate": {"reference": "reference"}},
    "rate of all rounds": {"training": {"lr_schedule": {"kind": "cosine"}}},
    "trained by all": {"evaluate": {"trained": "all"}, "schedule": {"per_round": 5}},
    "prequential scores": {"evaluate": {"prequential": True}},
    "class masks": {"evaluate": {"class_masks": True}},
    "probabilities": {"evaluate": {"probabilities": True}},
    "deployment": {"deploy": {"guard": "held_out"}},
    "compressed uploads": {"compression": {"up": "int8"}},
    "compressed payloads": {"compression": {"down": "bfloat16"}},
    "zstd": {"compression": {"zstd": True}},
    "noise at the server": {"privacy": NOISE, "data": FIXED},
    "noise at clients": {"privacy": {**NOISE, "where": "clients", "colluders": 0}, "data": FIXED},
    "example privacy": {"privacy": {**NOISE, "level": "example"}, "data": FIXED},
    "hidden counts": {"privacy": {"announce": "rounded"}},
    "secure sums": {"privacy": {"secure_sum": {"trust": "coordinator"}}},
    "robust rules": {"server": {"reduce": "median"}},
    "exclusion by rule": {"server": {"exclude_after": 3}},
    "server optimiser": {"server_optimizer": {"name": "fedadam", "lr": 0.01}},
    "own loss": {"training": {"loss": "focal"}},
    "balanced weights": {"training": {"class_weights": "balanced"}},
    "clipped gradients": {"training": {"clip_norm": 1.0}},
    "rate of epochs": {"training": {"lr_schedule": {"kind": "cosine", "over": "epochs"}}},
    "bfloat16": {"training": {"precision": "bfloat16"}},
    "frozen parts": {"net": {"name": "net.py:Net"}},
    "own nets": {
        "net": {"by_client": [{"name": "mlp", "hidden": [8, 16]}]},
        "method": {"name": "lg-fedavg"},
    },
    **{part.name: part.sample for part in OF_PLUGINS if not part.is_beside},
}
"""What switches each part on; paths are files of a test's directory."""
TARGETS: Mapping[str, Tables] = {
    "numbers": {"target": "price"}, "several labels": {"labels": ["fever", "cough"]},
}  # fmt: skip
"""What is learned in place of classes: of a table, which no other set here has."""
WITHOUT_KEY: Mapping[str, Tables] = {
    "server data": {"method": {"name": "fedic"}},
    "beginning": {"net": {"name": "mlp", "hidden": [16], "begin_from": "run"}},
    "changes": {
        "scenario": {"tasks": 2, "concepts": {"show": ["plain", "swap 0 1"], "every": 1}},
    },
}
"""What asks for a part that is in no set here."""
APART = {
    "numbers": "of a table: tests/fedtide/test_targets.py has it with others",
    "several labels": "as numbers",
    "triggers": "does nothing but begin stages of an open run, which is on in every such set",
    **{part.name: "it reads what is in the records" for part in OF_PLUGINS if part.is_beside},
    "odd uploads": "always on",
    "relays": "no key; tests/integration has them over loopback",
    "forgetting": "no key; tests/fedsrv/engine/test_forgetting.py has it",
}
"""Parts without a setting here, or with one that another part needs, and why."""
ALONE = {"secure sums", "robust rules"}
"""A pair that needs three groups of three clients; tests/fedsrv has it."""


def one_key(one: str, other: str) -> bool:
    """Tell whether two parts are values of one key, of which a config has one."""
    first, second = (PARTS[name].keys.split(" = ")[0].split(" over")[0] for name in (one, other))
    return first == second


def is_refused(one: str, other: str, reads: str = "mean") -> bool:
    """Tell whether two parts are refused together, whatever else a config says."""
    pair = {one, other}
    return pair == ALONE or any(
        {*r.pair} == pair and r.only in ("", reads) and not r.where for r in REFUSED
    )


def needed_by(names: Sequence[str]) -> list[str]:
    """Return parts with those that they need."""
    wanted = [each.pair[1] for each in NEEDED if each.pair[0] in names]
    return [*dict.fromkeys([*names, *wanted])]


def fits(names: Sequence[str]) -> bool:
    """Tell whether parts, with those that they need, go together."""
    pairs = itertools.combinations(needed_by(names), 2)
    return not any(is_refused(*pair) or one_key(*pair) for pair in pairs)


def pairs() -> Iterator[tuple[str, str]]:
    """Yield every pair of parts that goes together."""
    yield from (pair for pair in itertools.combinations(SETTINGS, 2) if fits(pair))


def covering(most: int = 20) -> list[list[str]]:
    """Return sets of parts, each of which goes together, that have every pair in one of them."""
    known = {frozenset(pair) for pair in pairs()}
    left, sets = dict.fromkeys(map(frozenset, pairs())), list[list[str]]()
    while left:
        chosen = needed_by(sorted(next(iter(left))))
        while len(chosen) < most:
            wanted: dict[str, list[str]] = {
                name: [name, *(n for n in needed_by([name]) if n not in (name, *chosen))]
                for name in SETTINGS
                if name not in chosen
            }
            gains = {
                name: sum(frozenset((one, name)) in left for one in chosen)
                for name, more in wanted.items()
                if all(frozenset((one, new)) in known for one in chosen for new in more)
            }
            if not gains or not max(gains.values()):
                break
            chosen += wanted[max(gains, key=lambda name: gains[name])]
        for pair in itertools.combinations(chosen, 2):
            left.pop(frozenset(pair), None)
        sets.append(chosen)
    return sets


def tables_of(names: Sequence[str], place: Path) -> dict[str, Any]:
    """Return the tables that switch parts on, whose files are in a directory."""
    found: dict[str, Any] = {"schedule": {"rounds": 1, "clients": 6}}
    for name in names:
        for table, keys in SETTINGS[name].items():
            found[table] = {**found.get(table, {}), **keys}
    schedule, evaluate = found["schedule"], found.get("evaluate", {})
    if "open" in schedule:
        schedule.setdefault("order", "tasks_outer")
    if "availability" in schedule:
        schedule["availability"] = str(place / schedule["availability"])
    if "reference" in evaluate:
        kind = "-asynchronous" if schedule.get("order") == "asynchronous" else ""
        evaluate["reference"] = str(place / (evaluate["reference"] + kind))
    if "net" in found:
        file = found["net"].get("name")
        found["net"] = {
            "name": str(place / file) if file else "mlp", **({} if file else {"hidden": [16]}),
            **{key: value for key, value in found["net"].items() if key != "name"},
        }  # fmt: skip
    metrics = dict.fromkeys(("drift", "detectors", "prequential scores"), "metrics")
    told = {**metrics, "stopping": "stopping"}
    if "level" in found.get("privacy", {}):
        more = [word for name, word in told.items() if name in names]
        found["privacy"]["allow"] = [*found["privacy"]["allow"], *more]
    return found
