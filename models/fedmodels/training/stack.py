"""Clients of one process trained together: one step of all of them through stacked parameters.

``torch.vmap`` maps the method's loss over the clients' parameters, buffers, batches and references,
stacked along a first axis. Nets that can be grouped (:mod:`fedmodels.nets.grouped`) give embeddings
and logits for all clients before that; others run within the mapped loss. Stacking pays for small
steps, whose calls cost more than their arithmetic: nets of the size of ``digits-cnn`` on a CPU, not
ResNets (docs/results/speed.md).

The weights equal those of training in turn up to rounding. One stack, in one order, has the same
bits on one machine. Rounding depends on how many clients a stack has: on some processors the
kernels of convolutions differ with the number of channels:
docs/decisions/068-clients-trained-together.md.

Shapes: C clients, B batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Self

import torch
from torch import Tensor

from fedmodels.devices import to_device
from fedmodels.errors import ConfigError
from fedmodels.nets.grouped import Grouped, can_be_grouped
from fedmodels.nets.split import SplitNet
from fedmodels.training.contexts import ClientContext
from fedmodels.training.loop import ClientHalf, EpochLoop
from fedmodels.training.returned import check_loss
from fedmodels.training.run import RunFacts
from fedmodels.training.stepped import Batch, Output, Phase, Stepped, in_steps
from fedmodels.training.steps import begin_phase
from fedmodels.training.trees import atoms, form, mapped


def fit_together(halves: Sequence[ClientHalf]) -> list[float]:
    """Run every phase of several clients; return each one's mean loss in its last epoch.

    Args:
        halves: begun halves of different clients, of one interaction and method; each has its own
            net, and all nets have one shape.

    Raises:
        ConfigError: phases or references of clients differ in more than the values of tensors, or
            the loss asks for what is one client's alone.
    """
    method = in_steps(halves[0].method)
    loops = [EpochLoop(method, half.ctx, half.x, half.y, half.refs) for half in halves]
    for phase in _common_phases(method, loops):
        stack = _ParameterStack(method, loops, phase)
        try:
            _run(stack, phase, loops)
        finally:
            stack.keep([])
    return [loop.close() for loop in loops]


def _run(stack: _ParameterStack, phase: Phase, loops: Sequence[EpochLoop]) -> None:
    """Step until no client has a batch left."""
    under_way = [(loop, loop.batches(phase)) for loop in loops]
    while True:
        due = [(c, *step) for c, steps in under_way if (step := next(steps, None)) is not None]
        if not due:
            return
        stack.keep([loop for loop, *_ in due])
        losses = stack.step(due)
        for loop, batch, _ in due:
            loop.end_step(batch, losses[loop])


def _common_phases(method: Stepped, loops: Sequence[EpochLoop]) -> Sequence[Phase]:
    """Return the phases of local training, which all clients have in common."""
    first, *others = (list(method.phases(loop.ctx)) for loop in loops)
    for loop, phases in zip(loops[1:], others, strict=True):
        if phases != first:
            raise _in_turn(loops[0], f"client {loop.ctx.client} has other phases")
    return first


def _in_turn(loop: EpochLoop, why: str) -> ConfigError:
    """Return the error of clients that cannot train together."""
    run, client = loop.ctx.run.experiment, loop.ctx.client
    return ConfigError(
        f"[training] together = {run.training.together}: method {run.method.name!r} cannot train "
        f"client {client} together with others, as {why}; leave together out"
    )


def nets_group(run: RunFacts) -> bool:
    """Tell whether several of a run's nets can run as one net of groups."""
    net = run.make_net()
    return not net.frozen and can_be_grouped(net.train(), run.problem.input_shape)


def check_stacks(run: RunFacts) -> None:
    """Check that the run's net can be stacked.

    Raises:
        ConfigError: the net cannot, for instance because it draws random numbers in training.
    """
    if run.once(nets_group):
        return
    net = run.make_net().train()
    rows = {key: torch.stack([tensor.detach()] * 2) for key, tensor in net.tensors().items()}
    x = torch.zeros(2, 2, *run.problem.input_shape)

    def logits(rows: dict[str, Tensor], x: Tensor) -> Tensor:
        with net.holding(rows):
            found: Tensor = net.head(net.embedded(x))
            return found

    try:
        torch.vmap(logits)(rows, x)
    except (RuntimeError, ValueError, TypeError) as error:
        raise ConfigError(
            f"[training] together = {run.experiment.training.together}: clients with net "
            f"{run.experiment.net.name!r} train in turn only; leave together out "
            f"({str(error).strip().splitlines()[0]})"
        ) from None


_Due = tuple[EpochLoop, Batch, Tensor | None]
"""A client's next step: its batch, and the embeddings if they are fixed."""


class _ParameterStack:
    """The nets of several clients in one phase, their parameters and buffers stacked.

    While it lasts, a row of the stack is what the net of its client holds.
    """

    def __init__(self, method: Stepped, loops: Sequence[EpochLoop], phase: Phase) -> None:
        first = loops[0].ctx
        self.method, self.net, self.ctx = method, first.net, _CommonContext.of(first)
        self._rows = list(loops)
        nets = [loop.ctx.net for loop in loops]
        for loop in loops:  # one loss and one optimiser are for all
            loop.ctx.asked = first.asked
        self._optimizer = begin_phase(nets, phase, first)
        self._nets = {loop: _OwnTensors(loop.ctx.net) for loop in loops}
        self._parameters = self._stacked(first.net.parameters_by_key())
        self._buffers = self._stacked(first.net.buffers_by_key())
        self._refs = {loop: tuple(_leaves(loop.refs)) for loop in loops}
        self._check_layouts()
        self._lie_in_rows()

    def _stacked(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        nets = [self._nets[loop].tensors for loop in self._rows]
        return {
            key: torch.stack([net[key].detach() for net in nets]).requires_grad_(t.requires_grad)
            for key, t in held.items()
        }

    def _check_layouts(self) -> None:
        """Check that references of clients differ in the values of tensors alone."""
        first, *others = self._rows
        layout = _layout(first.refs)
        for loop in others:
            if _layout(loop.refs) != layout:
                why = "its references differ in more than the values of tensors from those of"
                raise _in_turn(first, f"{why} client {loop.ctx.client}")

    def _lie_in_rows(self) -> None:
        """Let the nets' tensors be rows of the stack."""
        for key, rows in (self._parameters | self._buffers).items():
            for loop, row in zip(self._rows, rows.detach().unbind(), strict=True):
                self._nets[loop].tensors[key].data = row

    def keep(self, loops: Sequence[EpochLoop]) -> None:
        """Give the rows of all other clients back to their nets: they have no batch left."""
        if len(loops) == len(self._rows):
            return
        staying = set(loops)
        kept = self._index([n for n, loop in enumerate(self._rows) if loop in staying])
        for loop in self._rows:
            if loop not in staying:
                self._nets[loop].take_back()
        self._rows = list(loops)
        if loops:
            for tensors in (self._parameters, self._buffers):
                for key, rows in tensors.items():
                    tensors[key] = rows.detach()[kept].requires_grad_(rows.requires_grad)
            self._lie_in_rows()

    def _index(self, places: list[int]) -> Tensor:
        return to_device(torch.tensor(places, dtype=torch.int64), self.ctx.device)

    def step(self, due: Sequence[_Due]) -> dict[EpochLoop, Tensor]:
        """Step down the losses of the clients of all rows; return each one's loss."""
        losses: dict[EpochLoop, Tensor] = {}
        by_size: dict[int, list[_Due]] = {}
        for step in due:
            by_size.setdefault(len(step[1].y), []).append(step)
        for group in by_size.values():
            found = self._losses(group)
            found.sum().backward()  # type: ignore[no-untyped-call]
            losses |= zip((loop for loop, *_ in group), found.detach().unbind(), strict=True)
        self._deal_out_gradients()
        self._optimizer.step()
        return losses

    def _deal_out_gradients(self) -> None:
        """Give each net its rows of the gradients.

        A step over whole stacks would round differently: a vector unit takes the last few numbers
        of a tensor in another way than those before.
        """
        for key, rows in self._parameters.items():
            if rows.grad is not None:
                for loop, gradient in zip(self._rows, rows.grad.unbind(), strict=True):
                    self._nets[loop].tensors[key].grad = gradient
                rows.grad = None

    def _losses(self, group: Sequence[_Due]) -> Tensor:
        """Return the losses (C,) of batches of one size; statistics of the nets move."""
        loops = [loop for loop, *_ in group]
        places = [self._rows.index(loop) for loop in loops]
        rows = None if places == [*range(len(self._rows))] else self._index(places)
        parameters, buffers = _some(self._parameters, rows), _some(self._buffers, rows)
        batches, fixed = [batch for _, batch, _ in group], [f for *_, f in group if f is not None]
        given = [
            torch.stack(each)
            for each in zip(*((b.x, b.y, b.index, *b.taught) for b in batches), strict=True)
        ]
        features = torch.stack(fixed) if fixed else None
        refs = [torch.stack(each) for each in zip(*(self._refs[c] for c in loops), strict=True)]
        out = self._outputs(parameters, buffers, given[0], features)

        def loss_of(
            held: dict[str, Tensor], batch: tuple[Tensor, ...], out: Any, refs: list[Tensor]
        ) -> Tensor:
            again = _rebuild(loops[0].refs, iter(refs))
            with self.net.holding(held):
                if "logits" not in out:  # vmap sets the memory format
                    found = out["features"] if out else self.net.embedded(batch[0])
                    out = {"features": found, "logits": self.net.head(found)}
                x, y, index, *taught = batch
                some = Batch(x, y, index, taught=tuple(taught))
                return self.method.loss(self.ctx, some, Output(**out), again)

        losses: Tensor = torch.vmap(loss_of)(parameters | buffers, tuple(given), out, refs)
        check_loss(self.method, losses, (len(group),))
        if rows is not None:
            for key, rows_of_all in self._buffers.items():
                rows_of_all[rows] = buffers[key]
        return losses

    def _outputs(
        self,
        parameters: dict[str, Tensor],
        buffers: dict[str, Tensor],
        x: Tensor,
        features: Tensor | None,
    ) -> dict[str, Tensor]:
        """Return embeddings (C, B, d) and logits (C, B, K), as far as they come before the loss."""
        if not self.ctx.run.once(nets_group):
            return {} if features is None else {"features": features}
        nets = Grouped(len(x))
        with self.net.holding(parameters | buffers):
            inputs = nets.inputs(x)
            with nets:
                features = self.net.embedded(inputs) if features is None else features
                return {"features": features, "logits": self.net.head(features)}


class _OwnTensors:
    """Where the tensors of a net lie when they are no rows of a stack."""

    def __init__(self, net: SplitNet) -> None:
        self.tensors = net.tensors()
        self._own = {key: tensor.data for key, tensor in self.tensors.items()}

    def take_back(self) -> None:
        """Copy the rows to where the net's tensors lay before, and let them lie there again."""
        held = list(self.tensors.values())
        torch._foreach_copy_(list(self._own.values()), [tensor.data for tensor in held])
        for tensor, own in zip(held, self._own.values(), strict=True):
            tensor.data, tensor.grad = own, None


def _some(stacks: Mapping[str, Tensor], rows: Tensor | None) -> dict[str, Tensor]:
    return {key: each if rows is None else each[rows] for key, each in stacks.items()}


class _CommonContext(ClientContext):
    """The context of a mapped loss: one call serves all clients, so it hides what one has alone."""

    @classmethod
    def of(cls, ctx: ClientContext) -> Self:
        """Return a context like this one, which does not tell what is the client's own."""
        return cls(**{each.name: getattr(ctx, each.name) for each in fields(ctx)})

    def __getattribute__(self, name: str) -> Any:
        if name in _PERSONAL:
            raise ConfigError(
                f"[training] together: the loss asks for ctx.{name}, and is calculated for several "
                "clients at once; leave together out, or put tensors into what prepare returns"
            )
        return super().__getattribute__(name)


_PERSONAL = ("client", "metrics", "num_examples", "stream", "secret")
"""What a context holds of one client."""


def _layout(tree: Any) -> Any:
    """Return all of references but the values of their tensors."""
    return form(tree, lambda at: (at.shape, at.dtype) if isinstance(at, Tensor) else type(at))


def _leaves(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of references. Nets teach: what they say comes with batches.

    Raises:
        TypeError: they hold something else.
    """
    for atom in atoms(tree):
        if isinstance(atom, SplitNet):
            continue
        if not isinstance(atom, Tensor):
            name = type(atom).__name__
            raise TypeError(f"a loss that is mapped over clients cannot refer to {name}")
        yield atom


def _rebuild(tree: Any, leaves: Iterator[Tensor]) -> Any:
    """Return a copy of references with other tensors."""
    return mapped(tree, lambda at: _Teacher(at) if isinstance(at, SplitNet) else next(leaves))


class _Teacher:
    """What stands for a net: it is one client's, and the loss has what it says in its batch."""

    def __init__(self, net: SplitNet) -> None:
        self._what = type(net).__name__

    def __getattr__(self, name: str) -> Any:
        raise TypeError(f"a loss that is mapped over clients cannot refer to {self._what}")

    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x)  # type: ignore[no-any-return]
