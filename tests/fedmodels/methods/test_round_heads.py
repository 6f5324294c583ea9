"""``heads = "round"``: a head that everybody begins a round with, private only within it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedmodels.errors import ConfigError
from fedmodels.methods import make
from fedmodels.nets.split import weights_of
from fedmodels.tensors.bundle import Bundle
from fedmodels.training.contexts import ClientContext
from fedtide.inprocess import run_in_process
from fedtide.testing.trial import context_of, method_of, payload_of, tiny_experiment

METHODS = ["fedrep", "gldp", "fedmlp"]


def ready(name: str, digits: Path) -> tuple[Any, ClientContext, Bundle, Bundle]:
    """Return a method, a client that has just trained in round 0, its payload and its state."""
    experiment = tiny_experiment(method={"name": name, "reading": {"heads": "round"}})
    ctx = context_of(experiment, digits)
    method, (payload, state) = method_of(experiment), payload_of(experiment, ctx)
    method.load(ctx, payload, state)
    refs = method.prepare(ctx, payload, state)
    with torch.no_grad():
        for parameter in ctx.net.head.parameters():
            parameter.add_(1.0)
    return method, ctx, payload, method.after_local(ctx, state, refs)


@pytest.mark.parametrize("name", METHODS)
def test_a_head_is_its_clients_own_within_its_round_alone(name, digits):
    method, ctx, payload, state = ready(name, digits)
    received = payload.weights["head/weight"]
    for round_number, view, own in ((0, "", 1.0), (0, "after_downlink", 0.0), (1, "", 0.0)):
        ctx.at, ctx.view = replace(ctx.at, round=round_number), view
        method.load(ctx, payload, state)
        torch.testing.assert_close(weights_of(ctx.net)["head/weight"], received + own)


@pytest.mark.parametrize("name", METHODS)
def test_heads_travel_and_make_everyones_model(name, digits, tmp_path):
    """What clients hold after a round is everyone's model: A_loc as received is A_glo."""
    tables: dict[str, Any] = {"schedule": {"order": "rounds_outer", "rounds": 1}}
    one = tiny_experiment(method={"name": name, "reading": {"heads": "round"}}, **tables)
    other = tiny_experiment(method={"name": name}, **tables)
    found = run_in_process(one, digits, tmp_path / "round")
    private = run_in_process(other, digits, tmp_path / "private")
    assert found["metrics"]["a_loc_received"] == found["metrics"]["a_glo"]
    assert found["bytes"]["up"] > private["bytes"]["up"]
    assert found["state_sha256"] != private["state_sha256"]


def test_private_layers_stay_while_the_head_travels(digits):
    """With a private first layer the head travels, whatever that layer does."""
    method = {"name": "fedrep", "private": ["base/1", "head/"], "reading": {"heads": "round"}}
    experiment = tiny_experiment(method=method, net={"name": "mlp", "hidden": [8, 8]})
    ctx = context_of(experiment, digits)
    made, (payload, state) = method_of(experiment), payload_of(experiment, ctx)
    assert {k[:6] for k in state.weights} == {"base/1"}
    assert "head/weight" in payload.weights
    own = {k: w + 1.0 for k, w in state.weights.items()}
    for view in ("", "after_downlink"):
        ctx.view = view
        made.load(ctx, payload, Bundle(own, state.prototypes))
        loaded = weights_of(ctx.net)
        for name, tensor in own.items():
            torch.testing.assert_close(loaded[name], tensor)


def test_shared_heads_have_no_round_of_their_own():
    with pytest.raises(ConfigError, match="fedmlp: share and heads exclude each other: give one"):
        make("fedmlp", share="all", heads="round")
