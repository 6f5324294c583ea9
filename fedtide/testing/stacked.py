"""The check of methods that say that their clients may train together."""

from __future__ import annotations

import torch

from fedmodels.errors import ConfigError
from fedmodels.training.loop import ClientHalf, train_locally
from fedmodels.training.method import LocalResult
from fedmodels.training.stack import begin_apart, check_stacks, end_apart, fit_together
from fedtide.testing.case import Case
from fedtide.testing.trial import context_of, method_of, payload_of

CLIENTS = (0, 1)


def training_together_comes_to_the_same(case: Case) -> None:
    """With ``trains_together``, a stacked step of two clients is their steps in turn, rounded."""
    if not method_of(case.experiment()).may_train_together():
        return
    halves = _halves(case)
    try:
        check_stacks(halves[0].ctx.run)
    except ConfigError:  # the net cannot be stacked, and the method is not to blame
        return
    in_turn = [train_locally(h.method, h.ctx, h.payload, h.state) for h in halves]
    for client, one, other in zip(CLIENTS, in_turn, _together(_halves(case)), strict=True):
        _agree(client, one, other)


def _halves(case: Case) -> list[ClientHalf]:
    experiment = case.experiment(training={"together": len(CLIENTS)})
    contexts = [context_of(experiment, case.data, client) for client in CLIENTS]
    return [ClientHalf(method_of(experiment), c, *payload_of(experiment, c)) for c in contexts]


def _together(halves: list[ClientHalf]) -> list[LocalResult]:
    for half in halves:
        begin_apart(half)
    try:
        losses = fit_together(halves)
    except (ConfigError, RuntimeError, TypeError, ValueError) as error:
        raise AssertionError(f"it says trains_together, but {error}") from error
    return [end_apart(half, loss) for half, loss in zip(halves, losses, strict=True)]


def _agree(client: int, one: LocalResult, other: LocalResult) -> None:
    for what in ("upload", "state"):
        a, b = (dict(getattr(result, what).by_key()) for result in (one, other))
        assert a.keys() == b.keys(), what
        for key in a:
            close = torch.allclose(a[key].float(), b[key].float(), rtol=1e-3, atol=1e-4)
            assert close, f"{key} in the {what} of client {client} differs from training in turn"
