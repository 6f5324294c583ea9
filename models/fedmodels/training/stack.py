"""Clients of one process trained together: one step of all of them through stacked parameters.

``torch.vmap`` maps the method's loss over the clients' parameters, buffers, batches and references,
stacked along a first axis. Stacking pays for small steps, whose calls cost more than their
arithmetic: nets of the size of ``digits-cnn`` on a CPU, not ResNets (docs/results/speed.md).

The weights equal those of training in turn up to rounding. Rounding must not depend on which
clients are stacked together, so a batch without another of its size is stacked with itself. This
was seen to suffice for the nets here; it is no promise for others (docs/decisions.md).

Shapes: C clients, B batch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedmodels.errors import ConfigError
from fedmodels.numerics.randomness import seeded
from fedmodels.training.loop import ClientHalf, Course, begin_phase
from fedmodels.training.method import (
    Batch,
    ClientContext,
    LocalResult,
    Method,
    Output,
    Phase,
    RunFacts,
)


def begin_apart(half: ClientHalf) -> None:
    """Begin a client's half with random numbers of the client's own seed."""
    with seeded(half.ctx.seed("dropout")):
        half.begin()
        half.drawn = torch.get_rng_state()


def end_apart(half: ClientHalf, loss: float) -> LocalResult:
    """End a client's half with the random numbers that follow those of its beginning."""
    with seeded(half.ctx.seed("dropout")):
        torch.set_rng_state(half.drawn)
        return half.end(loss)


def fit_together(halves: Sequence[ClientHalf]) -> list[float]:
    """Run every phase of several clients; return each one's mean loss of its last epoch.

    Args:
        halves: begun halves of different clients, of one interaction and method; each has its own
            net, and all nets have one shape.

    Raises:
        ConfigError: phases or references of clients differ in more than the values of tensors, or
            the loss asks for what is one client's alone.
    """
    method = halves[0].method
    courses = [Course(method, half.ctx, half.x, half.y, half.refs) for half in halves]
    stack = _Stack(method, courses)
    for phase in _common_phases(method, courses):
        training = courses[0].ctx.run.experiment.training
        optimizer = begin_phase([c.ctx.net for c in courses], phase, training)
        under_way = [(course, course.batches(phase)) for course in courses]
        while True:
            due = [(c, *step) for c, steps in under_way if (step := next(steps, None)) is not None]
            if not due:
                break
            optimizer.zero_grad(set_to_none=True)
            losses = stack.backward(due)
            optimizer.step()
            for course, batch, _ in due:
                course.end_step(batch, losses[course])
    return [course.left() for course in courses]


def _common_phases(method: Method, courses: Sequence[Course]) -> Sequence[Phase]:
    """Return the phases of local training, which all clients have in common."""
    first, *others = (list(method.phases(course.ctx)) for course in courses)
    for course, phases in zip(courses[1:], others, strict=True):
        if phases != first:
            raise _in_turn(courses[0], f"client {course.ctx.client} has other phases")
    return first


def _in_turn(course: Course, why: str) -> ConfigError:
    """Return the error of clients that cannot train together."""
    run, client = course.ctx.run.experiment, course.ctx.client
    return ConfigError(
        f"[training] together = {run.training.together}: method {run.method.name!r} cannot train "
        f"client {client} together with others, as {why}; leave together out"
    )


def check_stacks(run: RunFacts) -> None:
    """Check that the run's net can be stacked.

    Raises:
        ConfigError: the net cannot, for instance because it draws random numbers in training.
    """
    net = run.make_net().train()
    plain = nn.Sequential(OrderedDict(base=net.base, head=net.head))
    weights = _stacked([plain.state_dict()] * 2)
    x = torch.zeros(2, 2, *run.problem.input_shape)
    try:
        torch.vmap(lambda w, x: torch.func.functional_call(plain, w, (x,)))(weights, x)
    except (RuntimeError, ValueError, TypeError) as error:
        raise ConfigError(
            f"[training] together = {run.experiment.training.together}: clients with net "
            f"{run.experiment.net.name!r} train in turn only; leave together out "
            f"({str(error).strip().splitlines()[0]})"
        ) from None


_Due = tuple[Course, Batch, Tensor | None]
"""A client's next step: its batch, and the embeddings if they are fixed."""


class _Stack:
    """The loss of several clients at once."""

    def __init__(self, method: Method, courses: Sequence[Course]) -> None:
        self.loss = _Loss(method, courses[0].ctx)
        nets = {course: course.ctx.net for course in courses}
        self.parameters = {c: dict(net.named_parameters("net")) for c, net in nets.items()}
        self.buffers = {c: dict(net.named_buffers("net")) for c, net in nets.items()}

    def backward(self, due: Sequence[_Due]) -> dict[Course, Tensor]:
        """Compute gradients in the nets of all clients with a batch; return each client's loss."""
        losses: dict[Course, Tensor] = {}
        by_size: dict[int, list[_Due]] = {}
        for step in due:
            by_size.setdefault(len(step[1].y), []).append(step)
        for group in by_size.values():
            found = self._losses(group if len(group) > 1 else group * 2)[: len(group)]
            found.sum().backward()  # type: ignore[no-untyped-call]
            losses |= zip((course for course, *_ in group), found.detach().unbind(), strict=True)
        return losses

    def _losses(self, group: Sequence[_Due]) -> Tensor:
        """Return the losses (C,) of batches of one size; statistics of the nets move."""
        courses = [course for course, *_ in group]
        parameters = _stacked([self.parameters[c] for c in courses])
        buffers = _stacked([self.buffers[c] for c in courses])
        inputs = [(b.x, b.y, b.index, f, c.refs) for c, b, f in group]
        leaves = [list(_leaves(each)) for each in inputs]
        layouts = [_layout(each) for each in inputs]
        for course, layout in zip(courses, layouts, strict=True):
            if layout != layouts[0]:
                why = "its references differ in more than the values of tensors from those of"
                raise _in_turn(courses[0], f"{why} client {course.ctx.client}")

        def loss_of(p: Any, b: Any, *tensors: Tensor) -> Tensor:
            again = _rebuilt(inputs[0], iter(tensors))
            loss: Tensor = torch.func.functional_call(self.loss, (p, b), again)
            return loss

        columns = [torch.stack(column) for column in zip(*leaves, strict=True)]
        losses: Tensor = torch.vmap(loss_of)(parameters, buffers, *columns)
        for name, rows in buffers.items():
            for course, row in zip(courses, rows.unbind(), strict=True):
                self.buffers[course][name].copy_(row)
        return losses


class _CommonContext(ClientContext):
    """Where a mapped loss is: one call is for all clients, so it knows none of them."""

    def __getattribute__(self, name: str) -> Any:
        if name in _PERSONAL:
            raise ConfigError(
                f"[training] together: the loss asks for ctx.{name}, and is calculated for several "
                "clients at once; leave together out, or put tensors into what prepare returns"
            )
        return super().__getattribute__(name)


_PERSONAL = ("client", "metrics", "stream", "secret")
"""What a context holds of one client."""


class _Loss(nn.Module):
    """A method's loss of one batch, as a module whose parameters can be replaced by others."""

    def __init__(self, method: Method, ctx: ClientContext) -> None:
        super().__init__()
        self.method, self.net = method, ctx.net
        self.ctx = _CommonContext(**{each.name: getattr(ctx, each.name) for each in fields(ctx)})

    def forward(
        self, x: Tensor, y: Tensor, index: Tensor, fixed: Tensor | None, refs: Any
    ) -> Tensor:
        features = self.net.embedded(x) if fixed is None else fixed  # vmap sets the memory format
        out = Output(features, self.net.head(features))
        return self.method.loss(self.ctx, Batch(x, y, index), out, refs)


def _stacked(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _leaves(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of a loss's arguments, in the order of :func:`_rebuilt`."""
    if isinstance(tree, Tensor):
        yield tree
    else:
        for branch in _branches(tree):
            yield from _leaves(branch)


def _layout(tree: Any) -> Any:
    """Return what is not a tensor's values: its shape, and types, names and numbers of the rest."""
    if isinstance(tree, Tensor):
        return tree.shape
    branches = _branches(tree)
    names = tuple(tree) if isinstance(tree, Mapping) else ()
    value = tree if isinstance(tree, bool | int | float | str) else None
    return type(tree), names, value, tuple(map(_layout, branches))


def _rebuilt(tree: Any, leaves: Iterator[Tensor]) -> Any:
    """Return a copy of a tree with other tensors."""
    if isinstance(tree, Tensor):
        return next(leaves)
    branches = [_rebuilt(branch, leaves) for branch in _branches(tree)]
    if isinstance(tree, Mapping):
        return dict(zip(tree, branches, strict=True))
    if is_dataclass(tree) and not isinstance(tree, type):
        names = (each.name for each in fields(tree))
        return replace(tree, **dict(zip(names, branches, strict=True)))
    return type(tree)(branches) if branches else tree


def _branches(tree: Any) -> list[Any]:
    if isinstance(tree, Mapping):
        return list(tree.values())
    if is_dataclass(tree):
        return [getattr(tree, each.name) for each in fields(tree)]
    if isinstance(tree, tuple | list):
        return list(tree)
    if tree is None or isinstance(tree, bool | int | float | str):
        return []
    raise TypeError(f"a loss that is mapped over clients cannot refer to {type(tree).__name__}")
