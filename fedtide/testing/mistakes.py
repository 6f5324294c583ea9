"""The checks of mistakes that no error shows: in random numbers, references and rules."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from fedmodels.training.loop import train_locally
from fedtide.testing.case import Case, Finished
from fedtide.testing.trial import context_of, method_of, payload_of

RANDOM = (
    "two equal runs differ: draw by ctx.generator() or by torch, not by numpy or random, and keep "
    "nothing outside of the states"
)
ARRIVAL = "the order in which uploads come changes a run: keep nothing of check_upload's calls"


def arrival_does_not_matter(case: Case) -> None:
    """Two runs of one seed agree to the bit, whatever the order in which uploads come."""
    first = _end(case.finished)
    if _end(case.again(arrival=random.Random(3))) == first:
        return
    raise AssertionError(ARRIVAL if _end(case.again()) == first else RANDOM)


def _end(run: Finished) -> tuple[str, dict[str, float]]:
    """Return what two runs that are the same have in common."""
    return run.summary["state_sha256"], run.summary["metrics"]


def references_stay_while_the_net_trains(case: Case) -> None:
    """No tensor that ``prepare`` returns is a parameter of the net that trains.

    A distance from the net to itself is zero at every step, and nothing else shows it.
    """
    experiment = case.experiment()
    method, ctx = method_of(experiment), context_of(experiment, case.data)
    payload, state = payload_of(experiment, ctx)
    method.load(ctx, payload, state)
    held = {t.data_ptr() for t in _tensors(method.prepare(ctx, payload, state)) if t.numel()}
    for key, parameter in ctx.net.parameters_by_key().items():
        assert parameter.data_ptr() not in held, (
            f"what prepare returns holds {key!r} of ctx.net itself, which moves while it trains: "
            "return a copy, such as tensor.detach().clone()"
        )


def _tensors(value: object) -> Iterator[Tensor]:
    """Yield the tensors of nested references; what holds none has none."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(map(_tensors, value.values()))
    elif isinstance(value, list | tuple):
        yield from chain.from_iterable(map(_tensors, value))
    elif dataclasses.is_dataclass(value):
        fields = (getattr(value, field.name) for field in dataclasses.fields(value))
        yield from chain.from_iterable(map(_tensors, fields))


def the_classifier_is_the_net(case: Case) -> None:
    """A rule called ``classifier`` is the stored net's own output, as ``predict`` promises."""
    experiment = case.experiment()
    method, ctx = method_of(experiment), context_of(experiment, case.data)
    payload, state = payload_of(experiment, ctx)
    result = train_locally(method, ctx, payload, state)
    x = ctx.stream.test(0)[0]  # type: ignore[attr-defined]
    ctx.net.eval()
    with torch.no_grad():
        found = method.predict(ctx, payload, result.state, x).get("classifier")
        if found is not None:
            same = torch.allclose(found, ctx.net(x), rtol=1e-3, atol=1e-4)
            assert same, (
                "its rule 'classifier' is not ctx.net(x): give it another name, in rules too"
            )
