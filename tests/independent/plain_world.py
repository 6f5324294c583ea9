"""Three clients and three rounds: what a method makes of them, and what plain loops need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedmodels.nets.split import SplitNet, load_weights
from fedmodels.tensors.bundle import Bundle
from fedmodels.training.contexts import Position, ServerContext
from fedmodels.training.hooks import as_uploads, init_server, reduce
from fedmodels.training.loop import train_locally
from fedpb.codec import merged
from tests.conftest import context_of, method_of, tiny_experiment

CLIENTS, ROUNDS, EPOCHS = (0, 1, 2), (0, 1, 2), 2
BATCH, LR, DECAY = 8, 0.05, 1e-3
TRAINING = {
    "batch_size": BATCH, "lr": LR, "momentum": 0.9, "weight_decay": DECAY, "local_epochs": EPOCHS,
}  # fmt: skip
Weights = Mapping[str, Tensor]


@dataclass
class World:
    """The data, the first weights and the batches of all clients."""

    root: Path
    switches: Mapping[str, Any]
    epochs: int = EPOCHS
    data: dict[int, tuple[Tensor, Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        self.training = {**TRAINING, "local_epochs": self.epochs}
        self.experiment = tiny_experiment(method=dict(self.switches), training=self.training)
        contexts = {c: context_of(self.experiment, self.root, c) for c in CLIENTS}
        self.run = contexts[0].run
        self.data = {c: ctx.stream.train(0) for c, ctx in contexts.items()}
        self.sizes = [len(y) for _, y in self.data.values()]
        self.first = dict(self.run.initial_weights)

    def net(self, weights: Weights) -> SplitNet:
        net = self.run.make_net()
        load_weights(net, weights)
        return net.train()

    def order(self, client: int, number: int) -> torch.Generator:
        return context_of(self.experiment, self.root, client, 0, number).generator("order")

    def drawn(self, client: int | str, number: int) -> torch.Generator:
        if client == "server":
            return ServerContext(self.run, Position(number, number, 0), CLIENTS).generator()
        return context_of(self.experiment, self.root, client, 0, number).generator()

    def batches(self, client: int, number: int, epochs: int = EPOCHS) -> Iterator[Tensor]:
        order = self.order(client, number)
        for _ in range(epochs):
            yield from torch.split(
                torch.randperm(len(self.data[client][1]), generator=order), BATCH
            )

    def trained(
        self, weights: Weights, client: int, number: int, loss: Callable[[SplitNet, Tensor], Tensor]
    ) -> SplitNet:
        """Return a net after plain SGD from these weights; ``loss`` is of the rows of a batch."""
        net = self.net(weights)
        optimizer = sgd(net.parameters())
        for rows in self.batches(client, number):
            descend(optimizer, loss(net, rows))
        return net

    def found(self) -> dict[str, Weights]:
        """Return what the method itself comes to."""
        method = method_of(self.experiment)
        server = init_server(method, self.run)
        states = {c: method.init_client(self.run, c) for c in CLIENTS}
        for number in ROUNDS:
            at = ServerContext(self.run, Position(number, number, 0), CLIENTS)
            common, personal = method.broadcast(at, server)
            sent = {}
            for c in CLIENTS:
                ctx = context_of(self.experiment, self.root, c, 0, number)
                payload = merged({"common": common, "personal": personal.get(c, Bundle())})
                result = train_locally(method, ctx, payload, states[c])
                states[c], sent[c] = result.state, result.upload
            server, _ = reduce(method, at, server, as_uploads(method, sent))
        held = {f"server/{c}": bundle.weights for c, bundle in server.clients.items()}
        own = {f"state/{c}": with_scalars(state) for c, state in states.items()}
        kept = {"common": with_prototypes(server.common), "server": server.own.weights}
        return {**kept, **held, **own}


def with_scalars(bundle: Bundle) -> Weights:
    return {**bundle.weights, **{k: torch.tensor(v) for k, v in bundle.scalars.items()}}


def with_prototypes(bundle: Bundle) -> Weights:
    found = bundle.prototypes.get("class")
    rows = {} if found is None else dict(zip(found.labels.tolist(), found.vectors, strict=True))
    return {**bundle.weights, **{f"class/{k}": row for k, row in rows.items()}}


def sgd(parameters: Any, lr: float = LR, decay: float = DECAY) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters), lr=lr, momentum=0.9, weight_decay=decay)


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def copied(net: SplitNet) -> Weights:
    return {key: tensor.detach().clone() for key, tensor in net.tensors().items()}


def mean(weights: list[Weights], counts: list[float]) -> dict[str, Tensor]:
    shares = [count / sum(counts) for count in counts]
    return {k: sum(p * w[k] for p, w in zip(shares, weights, strict=True)) for k in weights[0]}
