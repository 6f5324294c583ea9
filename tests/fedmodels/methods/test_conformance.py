"""What every registered method must do: the suite that ships as ``fedtide.testing``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch import Tensor

from fedmodels.config.experiment import Experiment
from fedmodels.methods import method_class, names
from fedmodels.methods.bases.accompanied import Accompanied
from fedmodels.methods.bases.collaborating import Collaborating
from fedmodels.methods.bases.private_parts import PrivatePrefixes
from fedmodels.methods.bases.released_prototypes import ReleasedPrototypes
from fedmodels.methods.bases.remembering import Remembering
from fedmodels.methods.bases.replay import GenerativeReplay
from fedmodels.methods.bases.round_heads import RoundHeads
from fedmodels.methods.bases.round_memory import RoundMemory
from fedmodels.methods.fedavg import FedAvg
from fedmodels.training.method import (
    Batch,
    ClientContext,
    LocalResult,
    Method,
    Output,
    RunFacts,
    ServerState,
)
from fedtide.testing import CHECKS, Case, check_method
from fedtide.trial import tiny_experiment

ALIGNED = {"name": "vit-tiny", "mlp_ratio": 1, "blocks": 2, "alp": True, "prototypes": [16, 8]}

NEEDS: dict[str, dict[str, object]] = {"fedali": {"net": ALIGNED}}
"""Tables a method cannot do without, by name: ``{"fedali": {"net": {"name": "hart", …}}}``."""

SMALL_GENERATORS = {"generator_width": 4, "generator_epochs": 5, "n_check": 16}
SMALL_MEMORY = {"latent": 16, "generator_width": 4}
SMALL: dict[str, dict[str, object]] = {
    "pfedgrp": {**SMALL_GENERATORS, "server_volume": 12, "w_epochs": 2},
    "fedavg-replay": SMALL_GENERATORS,
    "pfedgraph-replay": SMALL_GENERATORS,
    "creff": {"match_steps": 5, "crt_epochs": 2},
    "mfcl": {**SMALL_MEMORY, "generator_steps": 5, "generator_batch": 16, "synthetic_batch": 8},
    "target": {
        **SMALL_MEMORY,
        "batches": 2,
        "synthesis_batch": 16,
        "g_steps": 3,
        "kd_steps": 3,
        "num_images": 24,
        "kd": 1.0,
    },
    "fedic": {"fine_tuning_steps": 5, "calibration_steps": 5, "distillation_steps": 5},
    "af-fcl": {"flow_hidden": 8},
    "fedcil": {"iterations": 4, "md_iter": 3, "generator_width": 2, "replay_batch": 8},
}
"""Hyper-parameters that make a method fast enough for so many runs, by name."""

VARIANTS = [
    ("fedavg", {"weighting": "uniform"}),
    ("centralized", {"data": "own"}),
    ("fedmlp", {"share": "all", "proto_agg": "all_latest", "clustering": "finch"}),
    ("fedmlp", {"share": "shallow(1)", "eval_upload_head": True, "inference": "prototype"}),
    ("gldp", {"heads": "round", "own_moves": "epoch"}),
    ("fedmlp", {"heads": "round"}),
    ("pfedgrp", {"generator_decouple": False, "replay_labels": "soft"}),
    ("target", {"sends": "generator", "renew": "round"}),
    ("fedali", {"wire_prototypes": "both", "keep_personal_prototypes": True}),
]
"""Switches that change what travels or who trains."""

CASES = [*((name, {}) for name in names()), *VARIANTS]
EVERY_CASE = pytest.mark.parametrize(
    "case", CASES, ids=["-".join([name, *map(str, switches.values())]) for name, switches in CASES]
)
EVERY_NAME = pytest.mark.parametrize("name", names())


def experiment_for(case: tuple[str, dict[str, Any]], **overrides: Any) -> Experiment:
    """Return the tiny experiment of a case, with whole tables or keys of them replaced."""
    name, switches = case
    method = {"name": name, **SMALL.get(name, {}), **switches}
    return tiny_experiment(method=method, **{**NEEDS.get(name, {}), **overrides})


def trained(
    case: tuple[str, dict[str, Any]], root: Path, clients: tuple[int, ...] = (0, 1)
) -> tuple[Method, RunFacts, ServerState, Mapping[int, LocalResult]]:
    """Return method, run, server state, and each client's result of one interaction."""
    name, switches = case
    small = {**SMALL.get(name, {}), **switches}
    made = Case(name, small, NEEDS.get(name, {}), root, root).trained(clients)
    return made.method, made.run, made.state, made.results


@pytest.fixture(scope="module")
def cases(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """Every case; its whole run is made once."""
    return {
        repr(each): Case(
            each[0],
            {**SMALL.get(each[0], {}), **each[1]},
            NEEDS.get(each[0], {}),
            digits,
            tmp_path_factory.mktemp("case"),
        )
        for each in CASES
    }


@pytest.mark.parametrize("check", CHECKS)
@EVERY_CASE
def test_conformance(case: tuple[str, dict[str, Any]], check: str, cases: dict[str, Case]) -> None:
    CHECKS[check](cases[repr(case)])


@pytest.mark.parametrize("name", names())
def test_only_fedavg_and_bases_are_inherited(name: str) -> None:
    cls = method_class(name)
    alone = (FedAvg, Method, PrivatePrefixes, Collaborating, ReleasedPrototypes, Accompanied)
    both = (
        (Collaborating, GenerativeReplay),
        (RoundHeads, ReleasedPrototypes),
        (RoundMemory, ReleasedPrototypes),
        (PrivatePrefixes, RoundHeads),
    )
    assert cls.__bases__ in (*((base,) for base in (*alone, GenerativeReplay, Remembering)), *both)
    assert cls.name == name


def test_the_suite_has_not_shrunk() -> None:
    assert len(CHECKS) >= 18


# --- the suite sees what it is there to see -------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Broken(FedAvg):
    """A method whose loss changes its batch."""

    citation: ClassVar[str] = "nobody"

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: Any) -> Tensor:
        batch.x.add_(1.0)
        return super().loss(ctx, batch, out, refs)


def test_a_method_that_breaks_a_promise_is_named() -> None:
    with pytest.raises(AssertionError, match="broken fails 'loss_leaves_inputs_alone'"):
        check_method(Broken, checks=["its_views_are_known", "loss_leaves_inputs_alone"])


@pytest.mark.parametrize("name", ["fedavgm.py:FedAvgM", "median.py:Median", "anchored.py:Anchored"])
def test_the_examples_conform(name: str) -> None:
    check_method(str(Path(__file__).parents[3] / "examples" / "extend" / name))
