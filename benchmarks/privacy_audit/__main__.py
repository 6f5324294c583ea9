"""Play the games of the audit; print a table, and keep it.

    python -m benchmarks.privacy_audit [--plays 600] [--canaries 60000] [--runs 4] [--only WORD]
                                       [--keep]

In each game somebody, the canary, is in the data of a run or not, and an attacker says which, from
what is released. How often it is right bounds epsilon from below, with 95 % confidence for each
bound (:mod:`.lower_bounds`). A bound above what the run charges shows a fault. Games are plays of
the engine's own parts with clients that do not train, single steps of which each example or client
is a canary (:mod:`.one_step`), or whole runs in one process.

    charged     the epsilon that the run says, at its delta
    any         a bound that holds for any mechanism
    Gaussian    a higher one, that counts on Gaussian releases; not with sampling
    one run     of whole runs: a bound from the first one alone

Then the faults (:mod:`.faults`) are planted, one by one: the bound has to pass what is charged.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.measure import parser_of
from benchmarks.measured import given_as, keep, markdown
from benchmarks.privacy_audit import faults
from benchmarks.privacy_audit.client_level import ClientGame
from benchmarks.privacy_audit.example_level import PrototypeGame
from benchmarks.privacy_audit.lower_bounds import any_bound, gaussian_bound
from benchmarks.privacy_audit.one_step import ClassSums, ClientStep, GradientStep, OneStep
from benchmarks.privacy_audit.whole_runs import WholeRun, one_run

CLIPS = {"prototype_clip": 1.0}
POISSON = {"clients": 4, "per_round": 2, "rounds": 4, "sampling": "poisson"}
RARE = {"clients": 8, "per_round": 1, "rounds": 6, "sampling": "poisson"}
SMALL = {"name": "digits", "max_per_class": 16, "max_test_per_class": 2}
CLIENTS = {"data": SMALL, "net": {"name": "mlp", "hidden": [8]},
           "schedule": {"clients": 40, "rounds": 2}}  # fmt: skip
EXAMPLES = {"data": {**SMALL, "max_per_class": 40}, "net": {"name": "mlp", "hidden": [64]},
            "schedule": {"clients": 1, "rounds": 2}}  # fmt: skip
HIDES_CLIENTS = {"level": "client", "noise_multiplier": 1.5, "clip": 0.5}
HIDES_EXAMPLES = {"level": "example", "noise_multiplier": 1.5, "clip": 0.5}
AT_CLIENTS = {"where": "clients"}
GROUPS = {"where": "clients", "secure_sum": {"groups": 2}}
EIGHT = {"clients": 8, "rounds": 1}
SHARED = {
    **EXAMPLES, "scenario": {"kind": "drawn", "tasks": 4, "examples": 400, "test_examples": 10},
    "training": {"lr": 1.0, "batch_size": 400}, "schedule": {"clients": 1, "rounds": 1},
}  # fmt: skip


Game = ClientGame | PrototypeGame
GAMES: tuple[Game, ...] = (
    ClientGame("client: weights, two rounds", {}, {"rounds": 2}),
    ClientGame("client: prototypes", CLIPS, method="fedproto"),
    ClientGame("client: weights and prototypes", CLIPS, method="gldp"),
    ClientGame("client: weights, adaptive bound", {"clip_quantile": 0.5}),
    ClientGame(
        "client: weights, cohorts of a fixed size", {}, {"clients": 4, "per_round": 2, "rounds": 4}
    ),
    ClientGame("client: weights, Poisson sampling", {}, POISSON),
    ClientGame("client: weights and prototypes, Poisson sampling", CLIPS, POISSON, "gldp"),
    ClientGame("client: adaptive bound, Poisson sampling", {"clip_quantile": 0.5}, POISSON),
    ClientGame("client: noise at clients", AT_CLIENTS),
    ClientGame("client: noise at clients, two parts", {**AT_CLIENTS, **CLIPS}, method="gldp"),
    ClientGame("client: noise at clients, each upload read", AT_CLIENTS, method="pfedgraph"),
    ClientGame("client: noise at clients, two groups of a secure sum", GROUPS, EIGHT),
    PrototypeGame("example: prototypes"),
)
STEPS = (
    GradientStep("example: one step"),
    ClassSums("example: class sums"),
    ClientStep("client: one release"),
)
RUNS = (
    WholeRun("client: weights", "CanaryClients", CLIENTS, privacy=HIDES_CLIENTS),
    WholeRun(
        "client: noise at clients", "CanaryClients", CLIENTS,
        privacy={**HIDES_CLIENTS, **AT_CLIENTS},
    ),
    WholeRun(
        "example: DP-SGD, all in each batch", "CanaryExamples",
        {**EXAMPLES, "training": {"lr": 1.0, "batch_size": 1000}}, privacy=HIDES_EXAMPLES,
    ),
    WholeRun(
        "example: DP-SGD, batches by Poisson sampling", "CanaryExamples",
        {**EXAMPLES, "training": {"lr": 1.0, "batch_size": 100}}, is_gaussian=False,
        privacy={**HIDES_EXAMPLES, "noise_multiplier": 1.0},
    ),
    WholeRun(
        "example: four tasks of the same examples", "CanaryExamples", SHARED,
        privacy={**HIDES_EXAMPLES, "noise_multiplier": 3.0},
    ),
)  # fmt: skip
Plant = Callable[[], AbstractContextManager[None]]
PLANTED: tuple[tuple[str, Game, Plant], ...] = (
    (
        "adaptive bound: a count in the clear halves its noise",
        ClientGame("", {"clip_quantile": 0.5, "noise_multiplier": 0.5}, step_of_fraction=1.0),
        faults.count_in_the_clear,
    ),
    (
        "groups of a secure sum: charged by the noise of all",
        ClientGame("", GROUPS, EIGHT), faults.whole_noise_for_groups,
    ),
    (
        "Poisson sampling: the first client where nobody is drawn",
        ClientGame("", {}, RARE, is_sure_alone=True),
        faults.first_client_for_nobody,
    ),
    (
        "two parts, each with the noise of one",
        ClientGame("", CLIPS, method="gldp"), faults.one_part_for_two,
    ),
    (
        "class sums of examples without the root of 2",
        PrototypeGame(""), faults.no_root_of_two,
    ),
)  # fmt: skip


PLANTED_RUNS: tuple[tuple[str, WholeRun, Plant], ...] = (
    (
        "four tasks of the same examples, charged as if they were others",
        RUNS[-1], faults.tasks_as_if_disjoint,
    ),
)  # fmt: skip


def audited(game: Game, plays: int, plant: Plant = nullcontext) -> dict[str, Any]:
    """Play a game so many times with the canary, and as often without; return a row."""
    with plant():
        ins, outs = ([game.play(there) for _ in range(plays)] for there in (True, False))
        return row_of(game, game.charged(), ins, outs)


def stepped(game: OneStep, canaries: int, plant: Plant = nullcontext) -> dict[str, Any]:
    """Play a game of one step with so many canaries; return a row."""
    with plant():
        return row_of(game, game.charged(), *game.plays(canaries))


def row_of(
    game: Game | WholeRun | OneStep, charged: float, ins: Sequence[float], outs: Sequence[float]
) -> dict[str, Any]:
    """Return what a game came to."""
    gaussian = gaussian_bound(ins, outs, game.delta) if game.is_gaussian else None
    return {
        "game": game.name,
        "plays": len(ins) + len(outs),
        "charged": charged,
        "any_bound": any_bound(ins, outs, game.delta),
        "gaussian_bound": gaussian,
    }


def ran(run: WholeRun, times: int, plant: Plant = nullcontext) -> dict[str, Any]:
    """Run a whole run so many times; return a row."""
    with plant():
        scores = [run.play() for _ in range(times)]
    ins, outs = ([s for one in scores for s in getattr(one, side)] for side in ("ins", "outs"))
    row = row_of(run, max(one.charged for one in scores), ins, outs)
    return {**row, "one_run_bound": one_run(scores[0], run.delta)}


def highest(row: Mapping[str, Any]) -> float:
    """Return the highest bound of a row."""
    return max(
        value for name, value in row.items() if name.endswith("_bound") and value is not None
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Audit; return 1 where a bound is above what is charged, or a fault stays hidden."""
    options = _parser().parse_args(arguments)

    def wanted(name: str) -> bool:
        return options.only in name

    tables = {
        "Plays of the engine's parts": [partial(audited, game, options.plays) for game in GAMES],
        "One step, each example or client a canary": [
            partial(stepped, game, options.canaries) for game in STEPS
        ],
        "Whole runs, a canary for each client or example": [
            partial(ran, run, options.runs) for run in RUNS
        ],
        "The same with a fault planted": [
            partial(audited, replace(game, name=name), options.plays, plant)
            for name, game, plant in PLANTED
        ]
        + [
            partial(
                stepped, replace(game, name=f"{game.name}, a tenth less noise"),
                options.canaries, faults.nine_tenths_of_the_noise,
            )
            for game in STEPS
        ]
        + [
            partial(ran, replace(run, name=name), options.runs, plant)
            for name, run, plant in PLANTED_RUNS
        ],
    }  # fmt: skip
    found: dict[str, list[dict[str, Any]]] = {}
    for title, works in tables.items():
        for work in works:
            if options.only in work.args[0].name:
                found.setdefault(title, []).append(work())
                print(found[title][-1], flush=True)
    for title, rows in found.items():
        print(f"\n{title}\n\n{markdown(rows)}")
    *fair, planted = (found.get(title, []) for title in tables)
    wrong = [row["game"] for rows in fair for row in rows if highest(row) > row["charged"]]
    hidden = [row["game"] for row in planted if highest(row) <= row["charged"]]
    for name in wrong:
        print(f"above what is charged: {name}")
    for name in hidden:
        print(f"the fault stays hidden: {name}")
    if options.keep:
        keep(options.keep, given_as("privacy_audit"), found)
    return 1 if wrong or hidden else 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("privacy_audit", __doc__, "privacy-audit")
    parser.add_argument("--plays", type=int, default=600, help="with the canary, and without")
    parser.add_argument("--canaries", type=int, default=60000, help="of each game of one step")
    parser.add_argument("--runs", type=int, default=4, help="of each whole run")
    parser.add_argument("--only", default="", help="the games whose names hold this")
    return parser


if __name__ == "__main__":
    sys.exit(main())
