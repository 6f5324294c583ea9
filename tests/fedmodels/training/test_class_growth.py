"""Classes that come while a run goes on: what every method's states become."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedmodels.config.experiment import Experiment
from fedmodels.tensors.bundle import Bundle, ClientId, Problem
from fedmodels.training.class_growth import grow_client, grow_server
from fedmodels.training.contexts import ClientContext, ServerState
from fedmodels.training.hooks import as_uploads, broadcast, init_client, init_server, reduce
from fedmodels.training.loop import train_locally
from fedmodels.training.method import Method
from fedmodels.training.position import Position
from fedmodels.training.returned import check_upload
from fedmodels.training.run import RunFacts
from fedpb.codec import merged
from fedtide.testing.case import bytes_of, states_of
from fedtide.testing.trial import method_of, server_context
from tests.fedmodels.methods.test_conformance import EVERY_CASE, experiment_for

SHAPE = (1, 8, 8)
EARLIER, LATER = 3, 5
"""Classes before and after."""
CLIENTS = (0, 1)
BY_LABEL = ("prototypes/", "generators/", "weights/levels/cluster")
"""What begins empty, and comes to have parts by class."""


@dataclass
class Made:
    """Made-up data of one client, eight examples of some classes."""

    seed: int
    classes: int

    def train(self, task: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(self.seed)
        y = torch.arange(8) % self.classes
        return torch.randn(8, *SHAPE, generator=draw) + y.view(-1, 1, 1, 1), y

    def train_up_to(self, task: int) -> tuple[Tensor, Tensor]:
        return self.train(task)

    def limits(self) -> tuple[Tensor, Tensor]:
        return torch.full((1,), -3.0), torch.full((1,), 8.0)


@dataclass
class World:
    """A run of two clients without processes."""

    method: Method
    run: RunFacts
    server: ServerState
    clients: dict[int, Bundle]
    interaction: int = 0

    @classmethod
    def begun(cls, experiment: Experiment, classes: int = EARLIER) -> World:
        method, run = method_of(experiment), RunFacts(experiment, Problem(SHAPE, classes))
        states = {c: init_client(method, run, c) for c in CLIENTS}
        return cls(method, run, init_server(method, run), states)

    def context(self, client: ClientId, view: str = "") -> ClientContext:
        data = Made(1 if client == 1 else 0, self.run.problem.num_classes)
        at = Position(self.interaction, self.interaction, self.interaction)
        net = self.run.make_net()
        return ClientContext(self.run, client, at, net, data, torch.device("cpu"), view=view)

    def payloads(self, *, scores: bool = False) -> dict[int, Bundle]:
        ctx = replace(server_context(self.run, self.interaction, CLIENTS), scores=scores)
        common, own = broadcast(self.method, ctx, self.server)
        return {c: merged({"common": common, "personal": own.get(c, Bundle())}) for c in CLIENTS}

    def interact(self) -> None:
        sent = {}
        for client, payload in self.payloads().items():
            done = train_locally(self.method, self.context(client), payload, self.clients[client])
            check_upload(self.method, self.run, done.upload)
            sent[client] = done.upload
            if self.method.keeps_state(self.run):
                self.clients[client] = done.state
        ctx = server_context(self.run, self.interaction, CLIENTS)
        at = Position(self.interaction, self.interaction, self.interaction)
        uploads = as_uploads(self.method, sent)
        self.server, _ = reduce(self.method, replace(ctx, at=at), self.server, uploads)
        self.interaction += 1

    def scores(self) -> dict[str, Tensor]:
        """Return the scores of client 0's model by rule."""
        ctx, state = self.context(0, "after_downlink"), self.clients[0]
        payload = self.payloads(scores=True)[0]
        self.method.load(ctx, payload, state)
        ctx.net.eval()
        with torch.no_grad():
            x, _ = Made(5, EARLIER).train(0)
            return {**self.method.predict(ctx, payload, state, x), "net": ctx.net(x)}

    def grown(self, *steps: int) -> World:
        """Return a world with more classes, which come in steps."""
        run, server, clients = self.run, self.server, self.clients
        for classes in steps:
            now = run.for_classes(classes)
            server = grow_server(self.method, run, now, server)
            clients = {c: grow_client(self.method, run, now, c, s) for c, s in clients.items()}
            run = now
        return World(self.method, run, server, clients, self.interaction)

    def bundles(self) -> dict[str, Bundle]:
        return {**dict(self.server.named()), **{f"client {c}": s for c, s in self.clients.items()}}


def assert_begins_with(found: Bundle, kept: Bundle, where: str) -> None:
    """Every tensor begins with what it was."""
    tensors = found.by_key()
    assert tensors.keys() == kept.by_key().keys(), where
    for key, tensor in kept.by_key().items():
        part = tensors[key][tuple(slice(n) for n in tensor.shape)]
        assert torch.equal(part, tensor), (where, key)


@EVERY_CASE
def test_the_states_of_every_method_grow(case: tuple[str, dict[str, Any]]) -> None:
    world = World.begun(experiment_for(case))
    world.interact()
    world.interact()
    before, after, fresh = (
        world.scores(),
        world.grown(LATER),
        World.begun(world.run.experiment, LATER),
    )
    small = World.begun(world.run.experiment).bundles()
    for where, kept in world.bundles().items():
        found = after.bundles()[where]
        if case[0] != "fedcil":  # its generators see a label where they saw noise
            assert_begins_with(found, kept, where)
        wanted = fresh.bundles().get(where, Bundle()).by_key()
        for key, form in small.get(where, Bundle()).by_key().items():
            if not key.startswith(BY_LABEL):
                assert found.by_key()[key].shape == wanted[key].shape, (where, key)
                assert kept.by_key()[key].shape == form.shape, (where, key)

    in_steps = world.grown(EARLIER + 1, LATER)
    assert states_of(in_steps.server) == states_of(after.server)
    assert bytes_of(*in_steps.clients.values()) == bytes_of(*after.clients.values())

    for rule, scores in after.scores().items():
        assert scores.shape[1] == LATER
        if rule != "mixture":  # a mean of probabilities, which sum to 1 over all classes
            # the same weights, but a library adds products of five columns in another order
            torch.testing.assert_close(scores[:, :EARLIER], before[rule], rtol=1e-5, atol=1e-6)
    after.interact()
    assert after.scores()["net"].shape[1] == LATER
