"""Interactions of one of our methods by hand, on any net and any data; and plain tools."""

import copy

import torch
from torch import nn

from fedmodels.nets.split import SplitNet
from fedmodels.tensors.bundle import Bundle, Problem
from fedmodels.training.contexts import ClientContext, Position, ServerContext
from fedmodels.training.hooks import (
    as_uploads,
    broadcast,
    evaluation,
    init_client,
    init_server,
    reduce,
)
from fedmodels.training.loop import train_locally
from fedmodels.training.run import RunFacts
from fedpb.codec import merged
from tests.conftest import method_of, tiny_experiment

WHOLE = 10**6
"""A batch size that no training set reaches."""


class Facts(RunFacts):
    """The facts of a run on a net that is given."""

    def of(self, net):
        object.__setattr__(self, "given", net)
        return self

    def _built(self, purpose="init", role="server"):
        return copy.deepcopy(self.given)


class Stream:
    """One client's tasks: (x, y) of each."""

    def __init__(self, tasks):
        self.tasks = tasks

    def train(self, task):
        return self.tasks[task]

    def limits(self):
        return torch.tensor([-1.0]), torch.tensor([1.0])


class Rounds:
    """A run of our method: ``data[client][task]`` is (x, y)."""

    def __init__(self, method, net, data, classes, training, **switches):
        tables = {
            "training": {"batch_size": WHOLE, **training},
            "schedule": {"clients": len(data)},
        }
        experiment = tiny_experiment(method={"name": method, **switches}, **tables)
        self.method = method_of(experiment)
        self.run = Facts(experiment, Problem(tuple(data[0][0][0].shape[1:]), classes)).of(net)
        self.data, self.number = data, 0
        self.state = init_server(self.method, self.run)
        self.private = {i: init_client(self.method, self.run, i) for i in range(len(data))}
        self.uploads, self.metrics, self.series = {}, {}, {}

    def server(self, cohort, round, task):
        return ServerContext(self.run, Position(self.number, round, task), tuple(cohort))

    def client(self, client, round, task):
        at, stream = Position(self.number, round, task), Stream(self.data[client])
        return ClientContext(self.run, client, at, self.run.make_net(), stream, torch.device("cpu"))

    def payload(self, server, client, part=broadcast):
        common, own = part(self.method, server, self.state)
        return merged({"common": common, "personal": own.get(client, Bundle())})

    def interact(self, cohort, round, task):
        """Take the state through one interaction."""
        server, self.uploads, self.metrics = self.server(cohort, round, task), {}, {}
        for i in cohort:
            ctx = self.client(i, round, task)
            result = train_locally(self.method, ctx, self.payload(server, i), self.private[i])
            self.private[i], self.uploads[i] = result.state, result.upload
            self.metrics[i] = ctx.metrics
        uploads = as_uploads(self.method, self.uploads)
        self.state, _ = reduce(self.method, server, self.state, uploads)
        self.series, self.number = server.series, self.number + 1

    def scores(self, client, round, task, cohort, x):
        """Return what a client's model predicts for x after an interaction, by rule."""
        self.number -= 1
        ctx, server = self.client(client, round, task), self.server(cohort, round, task)
        payload = self.payload(server, client, evaluation)
        ctx.view = "after_downlink"
        self.method.load(ctx, payload, self.private[client])
        ctx.net.eval()
        with torch.no_grad():
            found = self.method.predict(ctx, payload, self.private[client], x)
        self.number += 1
        return {rule: scores.argmax(1) for rule, scores in found.items()}


def normalised_net(inputs=6, width=5, classes=4):
    """A net with batch normalisation: its statistics must travel, move and rest as they should."""
    torch.manual_seed(3)
    base = nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, width)
    )
    return SplitNet(base, nn.Linear(width, classes), width)


def blobs(classes_of, classes, shape, seed=1, per_class=6):
    """Return Gaussian data of the classes that each client has in each task."""
    draw = torch.Generator().manual_seed(seed)
    size = int(torch.tensor(shape).prod())
    centres = 2 * torch.randn(classes, size, generator=draw)
    data = []
    for tasks in classes_of:
        labels = [[k for k in held for _ in range(per_class + k % 3)] for held in tasks]
        drawn = [torch.randn(len(y), size, generator=draw) for y in labels]
        data.append(
            [
                ((centres[y] + noise).view(-1, *shape), torch.tensor(y))
                for y, noise in zip(labels, drawn, strict=True)
            ]
        )
    return data


class Descent:
    """Stochastic gradient descent with momentum; every parameter has its weight decay."""

    def __init__(self, groups, lr, momentum):
        self.groups, self.lr, self.momentum, self.velocity = groups, lr, momentum, {}

    @torch.no_grad()
    def step(self, loss):
        for parameters, _ in self.groups:
            for p in parameters:
                p.grad = None
        with torch.enable_grad():
            loss.backward()
        for parameters, decay in self.groups:
            for p in parameters:
                if p.grad is None:
                    continue
                slope = p.grad + decay * p
                before = self.velocity.get(p)
                now = slope.clone() if before is None else self.momentum * before + slope
                self.velocity[p] = now
                p -= self.lr * now


def mean_of(modules, weights=None):
    """Return the (weighted) mean of modules, statistics too, and the largest of integers."""
    tables = [m.state_dict() for m in modules]
    weights = [1 / len(tables)] * len(tables) if weights is None else weights
    mean = copy.deepcopy(modules[0])
    mean.load_state_dict(
        {
            name: sum(w * t[name] for w, t in zip(weights, tables, strict=True))
            if first.is_floating_point()
            else torch.stack([t[name] for t in tables]).amax(0)
            for name, first in tables[0].items()
        }
    )
    return mean


def same(theirs, module, prefix=""):
    """Check that weights by role are those of a module."""
    for name, tensor in module.state_dict().items():
        key = f"{prefix}{name}" if prefix else name.replace(".", "/", 1)
        torch.testing.assert_close(theirs[key], tensor, rtol=1e-8, atol=1e-10)


def same_rows(prototypes, rows):
    """Check that prototypes are ``{class: vector}``."""
    held = {}
    if prototypes is not None:
        held = dict(zip(prototypes.labels.tolist(), prototypes.vectors, strict=True))
    assert held.keys() == rows.keys()
    for k, vector in rows.items():
        torch.testing.assert_close(held[k], vector, rtol=1e-8, atol=1e-10)
