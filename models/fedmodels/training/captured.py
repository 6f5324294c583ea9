"""Steps of the stock loop as CUDA graphs: recorded once, repeated with one launch.

A step of a small net costs a GPU less than its launches cost the processor. A graph repeats all
launches of a step at once, on the same memory. So what a step reads and writes stays in its place:
the packed net, the optimiser's state, copies of the batch and of what the loss refers to. The first
steps of each kind are taken operator by operator, and audited (``step_audit.py``): a step that a
graph could not repeat goes on so. Both ways have the same bits.

What makes a kind: the method, the net, the phase, the form of the references, and the shape of the
batch. The last batch of an epoch, which is smaller, is a kind of its own. Kinds serve all clients
of a process: docs/decisions/115-captured-steps.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedmodels.training.contexts import ClientContext
from fedmodels.training.criterion import Noted
from fedmodels.training.kept_references import Copies, facts, follow, switches
from fedmodels.training.optimizer import is_ready, optimizer_of, restart, set_rates
from fedmodels.training.step_audit import StepAudit, places
from fedmodels.training.step_graphs import Recorder, graphs_on
from fedmodels.training.stepped import Batch, Phase
from fedmodels.training.steps import Step, Steps, groups_of
from fedmodels.training.trees import atoms, form, tensors_in

AUDITS = 4
"""Steps of a kind that are audited at most: the last two have to be alike."""
COMMON = ("run", "net", "device", "criterion", "asked", "view")
"""What a context holds that is the same for all steps of a kind."""
CHANGES = 3
"""Steps of a phase that may change what Python holds, before no further one is looked at."""


class CapturedSteps(Steps):
    """The steps of one phase of a client's training, as graphs where they can be."""

    def _begun(self, phase: Phase) -> torch.optim.Optimizer:
        """Return the optimiser that this phase of this net had before, as if it were fresh."""
        ctx, net = self.ctx, self.ctx.net
        groups, decays = groups_of([net], phase, ctx), tuple(phase.weight_decay.items())
        self._graphs = graphs_on(ctx.device)
        self._place = tuple(t.data_ptr() for t in net.everything().values())
        self._phase = (id(net), id(ctx.run), phase.trains, decays, phase.lr, phase.bn_of_frozen)
        make = partial(optimizer_of, groups, ctx, phase.lr)
        optimizer = self._graphs.optimizer((*self._phase, self._place), (net, ctx.run), make)
        restart(optimizer, ctx)
        self._slot: Slot | None = None
        self._held: Slot | None = None
        self._changes = 0
        return optimizer

    def take(self, batch: Batch, fixed: Tensor | None) -> Tensor:
        """Take a step; return the loss of its batch. See :class:`Step`."""
        slot = self._slot = self._slot or self._look()
        if slot.why:
            self._give_back()
            return self._plain(slot, batch, fixed)
        kind = slot.kind(batch, fixed)
        if kind.is_known and kind.replay is None:
            kind.put(batch, fixed)
            slot.record(kind, self.ctx, self._tree())
            self._tell(slot)
        if kind.replay is not None:
            if self._held is not slot:
                self._held = slot.hold(self._tree(), self.ctx)
            return kind.run(batch, fixed)
        self._give_back()
        take = self._plain if slot.why else self._tried
        return take(slot, batch, fixed)

    def settle(self) -> None:
        """Give references what steps changed in them; the next step looks at them anew."""
        self._give_back()
        self._slot = None

    def _give_back(self) -> None:
        if self._held is not None:
            self._held.copies.give(self._tree())
        self._held = None

    def _tree(self) -> Any:
        return self.refs, _criterion(self.ctx)

    def _look(self) -> Slot:
        """Return the slot of the references as they are now."""
        step, ctx = self.step, self.ctx
        set_rates(step.optimizer)
        follow(atoms(self._tree()), ctx)
        net = {*places(ctx.net.everything().values())}
        loss = None if _criterion(ctx) else ctx.criterion
        key = (
            id(step.method), id(step.optimizer), self._phase, self._place, step.repeats, loss,
            switches(ctx.net), form(self._tree(), partial(facts, ctx.device, net)),
        )  # fmt: skip
        slot: Slot = self._graphs.slot(key, lambda: Slot(step, ctx, self._graphs.recorder))
        if not slot.moves:
            self._tell(slot)
        return slot

    def _tried(self, slot: Slot, batch: Batch, fixed: Tensor | None) -> Tensor:
        """Take a step operator by operator, and find out whether a graph could repeat it."""
        tree = self._tree()
        held = tree, self.step.method
        before, _atoms = form(held, id), [*atoms(held)]  # held, so that no id is used again
        loss = slot.audited(self.ctx, tree, batch, fixed)
        if form(held, id) != before:
            slot.why, slot.moves = "it changes what Python holds", True
            self._moved(slot)
        else:
            self._tell(slot)
        return loss

    def _plain(self, slot: Slot, batch: Batch, fixed: Tensor | None) -> Tensor:
        """Take a step that no graph can repeat."""
        loss = super().take(batch, fixed)
        if slot.moves:
            self._moved(slot)
        return loss

    def _moved(self, slot: Slot) -> None:
        """Look at the references anew, as the next step may be of another kind; but not always."""
        self._changes += 1
        if self._changes < CHANGES:
            self._slot = None
        else:
            self._tell(slot)

    def _tell(self, slot: Slot) -> None:
        if slot.why:
            self._graphs.tell(self.step.method.name, slot.why)


class Slot:
    """The steps of one method, net, phase and form of references: their memory and their graphs.

    Attributes:
        copies: what graphs read of references.
        why: why these steps are taken operator by operator; empty if they are not.
        moves: whether a step changes what Python holds: the next one may be of another slot.
        asked: what the steps took from the run, as in a context.
    """

    def __init__(self, step: Step, ctx: ClientContext, recorder: Recorder) -> None:
        """Begin without a graph."""
        self.copies, self.why, self.moves, self.asked = Copies(ctx.device), "", False, {"optimizer"}
        self._step, self._run, self._recorder = step, ctx.run, recorder
        self._kinds: dict[Any, Kind] = {}
        if not is_ready(step.optimizer):
            self.why = f"{type(step.optimizer).__name__} begins with a state of its own"

    def kind(self, batch: Batch, fixed: Tensor | None) -> Kind:
        """Return the kind of a batch."""
        given = _inputs(batch, fixed)
        key = len(batch.taught), *((t.shape, t.stride(), t.dtype) for t in given)
        if key not in self._kinds:
            self._kinds[key] = Kind(given, len(batch.taught))
        return self._kinds[key]

    def audited(self, ctx: ClientContext, tree: Any, batch: Batch, fixed: Tensor | None) -> Tensor:
        """Take a step operator by operator, and find out whether a graph could repeat it."""
        kind = self.kind(batch, fixed)
        audit, seen, done = StepAudit(ctx.device), set[str](), list[Tensor]()
        watched, asked = _Watched(ctx, seen), {*ctx.asked}

        def step() -> None:
            with audit:
                done.append(self._step.take(watched, batch, fixed, tree[0]))

        ctx.asked.clear()
        try:
            self._recorder.aside(step)
        finally:
            self.asked |= ctx.asked
            ctx.asked |= asked
        given = [tensor for atom in atoms(tree) for tensor in tensors_in(atom)]
        known = places([*_inputs(batch, fixed), *self._own(), *given])
        if seen:
            self.why = f"it asks for ctx.{min(seen)}"
        elif audit.why:
            self.why = audit.why
        elif not audit.read <= {*known}:
            self.why = "it reads a tensor that neither net nor batch nor references hold"
        else:
            self.why = kind.learn(audit, tree)
        if kind.audits >= AUDITS and not kind.is_known:
            self.why = "its steps differ from one to the next"
        return done[0]

    def record(self, kind: Kind, ctx: ClientContext, tree: Any) -> None:
        """Record the step of a kind."""
        self.copies.make(tree, {*places(self._own())}, kind.touched, kind.written)
        refs, loss = self.copies.tree(tree)
        self.copies.follow(ctx)
        seen, batch, fixed = set[str](), kind.batch, kind.fixed
        watched = _Watched(ctx, seen, criterion=loss or ctx.criterion)
        try:
            kind.replay = self._recorder.recorded(
                lambda: kind.loss.copy_(self._step.take(watched, batch, fixed, refs))
            )
        except Exception as error:  # whatever a library does not let a graph do
            kind.replay, self.why = None, str(error).strip().splitlines()[0] or repr(error)
        finally:
            self._step.optimizer.zero_grad(set_to_none=True)

    def hold(self, tree: Any, ctx: ClientContext) -> Slot:
        """Take over what references hold; return this slot."""
        self.copies.take(tree)
        ctx.asked |= self.asked
        return self

    def _own(self) -> list[Tensor]:
        """Return the tensors that stay where they are: the net's and the optimiser's."""
        net, optimizer = self._step.net, self._step.optimizer
        states = [v for state in optimizer.state.values() for v in state.values()]
        rates = [group["lr"] for group in optimizer.param_groups]
        attributes = [v for part in net.parts for v in vars(part).values()]
        given = [*net.parameters(), *net.buffers(), *states, *rates, *attributes]
        return [value for value in given if isinstance(value, Tensor)]


class Kind:
    """The steps of a slot on one shape of batch.

    Attributes:
        batch, fixed, loss: what its graph reads and writes.
        replay: takes a step on them; None before the step is recorded.
        touched, written: the numbers of the references' atoms that a step reads or writes, and of
            those it writes, in the last step that was audited.
        audits: how many were.
        is_known: whether the last two were alike.
    """

    def __init__(self, given: list[Tensor], taught: int) -> None:
        """Make room for inputs like these, of which teachers say so many tensors."""
        self._inputs = [torch.empty_like(tensor) for tensor in given]
        x, y, index, *rest = self._inputs
        self.batch = Batch(x, y, index, taught=tuple(rest[:taught]))
        self.fixed = rest[taught] if len(rest) > taught else None
        self.loss = torch.zeros((), device=x.device)
        self.replay: Callable[[], None] | None = None
        self.touched, self.written = set[int](), set[int]()
        self.audits, self.is_known = 0, False
        self._calls: list[Any] = []

    def learn(self, audit: StepAudit, tree: Any) -> str:
        """Take in what an audit found; return what stands against a graph, if anything does."""
        self.audits, self.is_known = self.audits + 1, audit.calls == self._calls
        self._calls = [] if self.is_known else audit.calls
        held = [{*places(tensors_in(atom))} for atom in atoms(tree)]
        self.touched = {n for n, at in enumerate(held) if at & (audit.read | audit.written)}
        self.written = {n for n, at in enumerate(held) if at & audit.written}
        if any(held[n] & at for n in self.written for m, at in enumerate(held) if m != n):
            return "it writes memory that its references hold twice"
        return ""

    def put(self, batch: Batch, fixed: Tensor | None) -> None:
        """Copy the inputs of a step to where its graph reads them."""
        torch._foreach_copy_(self._inputs, _inputs(batch, fixed))

    def run(self, batch: Batch, fixed: Tensor | None) -> Tensor:
        """Take a step by the graph; return its loss."""
        assert self.replay is not None, "not recorded yet"
        self.put(batch, fixed)
        self.replay()
        return self.loss.clone()  # the next step writes there


def _inputs(batch: Batch, fixed: Tensor | None) -> list[Tensor]:
    given = [batch.x, batch.y, batch.index, *batch.taught]
    return given if fixed is None else [*given, fixed]


def _criterion(ctx: ClientContext) -> Any:
    """Return the run's loss of labels if it may hold tensors, else None."""
    loss = ctx.criterion.loss if isinstance(ctx.criterion, Noted) else ctx.criterion
    return loss if is_dataclass(loss) else None


class _Watched(ClientContext):
    """A client's context that notes who asks for what is not the same for all steps of a kind."""

    def __init__(self, ctx: ClientContext, seen: set[str], **instead: Any) -> None:
        object.__setattr__(self, "_behind", (ctx, seen, instead))

    def __getattribute__(self, name: str) -> Any:
        ctx, seen, instead = object.__getattribute__(self, "_behind")
        if name not in COMMON and not name.startswith("__"):
            seen.add(name)
        return instead[name] if name in instead else getattr(ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        ctx, seen, _ = object.__getattribute__(self, "_behind")
        seen.add(name)
        setattr(ctx, name, value)
