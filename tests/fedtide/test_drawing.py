"""A method that draws from torch's default generators comes to the same bits in every run."""

from __future__ import annotations

import pytest
import torch

import fedtide
from tests.fedtide.test_front_door import TINY

METHOD = """
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from fedtide import Bundle, BundleSpec, FedAvg, ServerState


def noisy(bundle):
    drawn = {k: v + 0.01 * torch.randn_like(v) for k, v in bundle.weights.items()}
    return replace(bundle, weights=drawn)


@dataclass(frozen=True, kw_only=True)
class Mine(FedAvg):
    citation: ClassVar[str] = "none"
    where: str = ""

    def init_server(self, run):
        state = super().init_server(run)
        return ServerState(noisy(state.common)) if self.where == "init_server" else state

    def broadcast(self, ctx, state):
        common, own = super().broadcast(ctx, state)
        return (noisy(common) if self.where == "broadcast" else common), own

    def aggregate(self, ctx, state, uploads):
        after = super().aggregate(ctx, state, uploads)
        return replace(after, common=noisy(after.common)) if self.where == "aggregate" else after

    def finish(self, ctx, state, uploads):
        common = noisy(state.common) if self.where == "finish" else state.common
        return replace(state, common=common), {}

    def after_local(self, ctx, state, refs):
        return state

    def init_client(self, run, client):
        own = {"own": float(torch.randn(()))} if self.where == "init_client" else {}
        return Bundle(scalars=own)

    def uplink(self, ctx, state, refs):
        sent = super().uplink(ctx, state, refs)
        if "own" in state.scalars:
            shift = torch.tensor(state.scalars["own"])
            moved = {k: v + shift.to(v.dtype) for k, v in sent.weights.items()}
            return replace(sent, weights=moved)
        return noisy(sent) if self.where == "uplink" else sent
"""
HOOKS = ("init_server", "broadcast", "aggregate", "finish", "init_client", "uplink")


@pytest.mark.parametrize("where", HOOKS)
def test_two_runs_of_one_seed_agree(where, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(METHOD)

    def digest(name: str, **more: object) -> str:
        torch.manual_seed(len(name))  # what came before in this process is no matter
        changes = {"method.name": f"{file}:Mine", "method.where": where, **more}
        run = fedtide.run(TINY, changes, backend="inprocess", out=tmp_path / name)
        return str(run.summary["state_sha256"])

    first = digest("first")
    assert digest("second") == first
    assert digest("third", **{"method.where": ""}) != first
