"""Whole runs of methods, against plain loops that were written from the papers alone.

A loop shares the batches' order and the net's form with the method, and nothing else: no hook, no
bundle, no helper of the project. Three clients train in three rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from fedmodels.nets.split import SplitNet
from fedmodels.training.hooks import init_server
from tests.conftest import method_of
from tests.independent.plain_world import (
    BATCH,
    CLIENTS,
    DECAY,
    EPOCHS,
    LR,
    ROUNDS,
    Weights,
    World,
    copied,
    descend,
    mean,
    sgd,
)

Expected = Mapping[str, Weights]
"""Weights by place: ``common``, ``server``, ``server/0`` of a client, ``state/0`` at a client."""


def part(weights: Weights, prefix: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in weights.items() if key.startswith(prefix)}


def apart(net: SplitNet, reference: list[Tensor]) -> Tensor:
    pairs = zip(net.parameters(), reference, strict=True)
    return sum(((w - w0) ** 2).sum() for w, w0 in pairs)


def class_means(z: Tensor, y: Tensor) -> dict[int, tuple[Tensor, int]]:
    return {k: (z[y == k].mean(0), int((y == k).sum())) for k in y.unique().tolist()}


def weighted(reported: list[dict[int, tuple[Tensor, int]]]) -> dict[int, Tensor]:
    """Return each class's mean over the clients that have it, by their examples of it."""
    found = {}
    for k in {k for means in reported for k in means}:
        rows = [means[k] for means in reported if k in means]
        found[k] = sum(v * n for v, n in rows) / sum(n for _, n in rows)
    return found


def averaged(world: World, loss_of: Callable[..., Callable[[SplitNet, Tensor], Tensor]]) -> Weights:
    """Return FedAvg's model; ``loss_of`` gives the loss of (client, what it received)."""
    w = world.first
    for number in ROUNDS:
        nets = [world.trained(w, c, number, loss_of(c, w)) for c in CLIENTS]
        w = mean([copied(net) for net in nets], world.sizes)
    return w


# --- the loops ------------------------------------------------------------------------------------


def fedprox(world: World) -> Expected:
    """Li et al., eq. 2, mu = 0.5."""

    def loss_of(c: int, received: Weights) -> Callable[[SplitNet, Tensor], Tensor]:
        (x, y), w0 = world.data[c], [p.detach() for p in world.net(received).parameters()]
        return lambda net, i: F.cross_entropy(net(x[i]), y[i]) + 0.25 * apart(net, w0)

    return {"common": averaged(world, loss_of)}


def fedntd(world: World) -> Expected:
    """Lee et al.: cross-entropy and beta tau² KL over the classes that are not true, tau = 2."""

    def loss_of(c: int, received: Weights) -> Callable[[SplitNet, Tensor], Tensor]:
        (x, y), teacher = world.data[c], world.net(received).eval()

        def loss(net: SplitNet, i: Tensor) -> Tensor:
            logits, other = net(x[i]), torch.arange(10).repeat(len(i), 1)
            other = other[other != y[i][:, None]].view(-1, 9)
            student = F.log_softmax(logits.gather(1, other) / 2, 1)
            wanted = F.softmax(teacher(x[i]).detach().gather(1, other) / 2, 1)
            distance = F.kl_div(student, wanted, reduction="batchmean")
            return F.cross_entropy(logits, y[i]) + 4 * distance

        return loss

    return {"common": averaged(world, loss_of)}


def moon(world: World) -> Expected:
    """Li et al., eq. 3, mu = 2 and tau = 1/2; no term in the first round, as published."""
    last: dict[int, SplitNet] = {}
    w = world.first
    for number in ROUNDS:
        nets = []
        for c in CLIENTS:
            (x, y), teachers = world.data[c], [world.net(w), *([last[c]] if c in last else [])]

            def loss(net: SplitNet, i: Tensor, x=x, y=y, teachers=teachers) -> Tensor:
                z = net.base(x[i])
                likeness = [F.cosine_similarity(z, t.base(x[i]).detach(), -1) for t in teachers]
                first = torch.zeros(len(i), dtype=torch.int64)
                pull = F.cross_entropy(torch.stack(likeness, 1) / 0.5, first)
                return F.cross_entropy(net.head(z), y[i]) + 2 * pull

            nets.append(world.trained(w, c, number, loss))
        last = dict(zip(CLIENTS, nets, strict=True))
        w = mean([copied(net) for net in nets], world.sizes)
    return {"common": w}


def fedproto(world: World) -> Expected:
    """Tan et al., eq. 6 and 7, lambda = 1.5; models never meet."""
    own, everyone = dict.fromkeys(CLIENTS, world.first), dict[int, Tensor]()
    for number in ROUNDS:
        reported = []
        for c in CLIENTS:
            x, y = world.data[c]

            def loss(net: SplitNet, i: Tensor, x=x, y=y, everyone=everyone) -> Tensor:
                z = net.base(x[i])
                rows = zip(y[i].tolist(), z.detach(), strict=True)
                wanted = torch.stack([everyone.get(k, row) for k, row in rows])
                return F.cross_entropy(net.head(z), y[i]) + 1.5 * F.mse_loss(z, wanted)

            net = world.trained(own[c], c, number, loss)
            own[c] = copied(net)
            reported.append(class_means(net.base(x).detach(), y))
        everyone = weighted(reported)
    prototypes = {f"class/{k}": row for k, row in everyone.items()}
    return {"common": prototypes, **{f"state/{c}": w for c, w in own.items()}}


def fedrep(world: World) -> Expected:
    """Collins et al., Algorithm 1: two epochs of the head, then three of the base."""
    w, heads = world.first, dict.fromkeys(CLIENTS, part(world.first, "head/"))
    for number in ROUNDS:
        found = []
        for c in CLIENTS:
            (x, y), net = world.data[c], world.net({**w, **heads[c]})
            rows, per_epoch = world.batches(c, number, 5), -(-len(y) // BATCH)
            for module, epochs, decay in ((net.head, 2, 0.0), (net.base, 3, DECAY)):
                optimizer = sgd(module.parameters(), decay=decay)
                for _ in range(epochs * per_epoch):
                    i = next(rows)
                    descend(optimizer, F.cross_entropy(net(x[i]), y[i]))
            found.append(copied(net))
            heads[c] = part(found[-1], "head/")
        w = mean(found, [1, 1, 1])
    return {"common": part(w, "base/"), **{f"state/{c}": head for c, head in heads.items()}}


def ditto(world: World) -> Expected:
    """Li et al., Algorithm 1, lambda = 0.7; v steps on the batches of w."""
    w, v = world.first, {c: world.net(world.first) for c in CLIENTS}
    for number in ROUNDS:
        found = []
        for c in CLIENTS:
            (x, y), w0 = world.data[c], [p.detach() for p in world.net(w).parameters()]
            own, both = sgd(v[c].parameters()), world.net(w)
            optimizer = sgd(both.parameters())
            for i in world.batches(c, number):
                descend(optimizer, F.cross_entropy(both(x[i]), y[i]))
                descend(own, F.cross_entropy(v[c](x[i]), y[i]) + 0.35 * apart(v[c], w0))
            found.append(copied(both))
        w = mean(found, world.sizes)
    twins = {c: {f"twin/{k}": t for k, t in copied(net).items()} for c, net in v.items()}
    return {"common": w, **{f"state/{c}": twin for c, twin in twins.items()}}


def apfl(world: World) -> Expected:
    """Deng et al., Algorithm 1: alpha begins at 0.6 and moves on the first batch of a round."""
    w, v, alpha = world.first, {c: world.net(world.first) for c in CLIENTS}, [0.6] * 3
    for number in ROUNDS:
        found = []
        for c in CLIENTS:
            (x, y), net = world.data[c], world.net(w)
            optimizer, own, moves = sgd(net.parameters()), sgd(v[c].parameters()), True
            for i in world.batches(c, number):
                descend(optimizer, F.cross_entropy(net(x[i]), y[i]))
                a, pairs = alpha[c], zip(v[c].named_parameters(), net.parameters(), strict=True)
                mixed = {k: (a * p + (1 - a) * q).detach().requires_grad_() for (k, p), q in pairs}
                loss = F.cross_entropy(functional_call(net, mixed, (x[i],)), y[i])
                gradients = torch.autograd.grad(loss, list(mixed.values()))
                triples = list(zip(v[c].parameters(), net.parameters(), gradients, strict=True))
                slope = sum(float(((p - q) * g).detach().sum()) for p, q, g in triples)
                for p, _, g in triples:
                    p.grad = a * g
                own.step()
                alpha[c], moves = min(max(a - LR * slope * moves, 0), 1), False
            found.append(copied(net))
        w = mean(found, [1, 1, 1])
    twins = {c: {f"twin/{k}": t for k, t in copied(net).items()} for c, net in v.items()}
    own_parts = {f"state/{c}": {**t, "alpha": torch.tensor(alpha[c])} for c, t in twins.items()}
    return {"common": w, **own_parts}


def fedem(world: World) -> Expected:
    """Marfoq et al., Algorithm 1, with two components."""
    made = method_of(world.experiment).init_server(world.run).common.weights
    w = [{k.partition("/")[2]: t for k, t in part(made, f"learner{m}/").items()} for m in (0, 1)]
    pi = {c: torch.full((2,), 0.5) for c in CLIENTS}
    for number in ROUNDS:
        found: list[list[Weights]] = [[], []]
        for c in CLIENTS:
            x, y = world.data[c]
            losses = [F.cross_entropy(world.net(each)(x), y, reduction="none") for each in w]
            q = (pi[c].log() - torch.stack(losses, 1).detach()).softmax(1)  # E step
            pi[c] = q.mean(0)  # M step
            for m in (0, 1):

                def loss(net: SplitNet, i: Tensor, x=x, y=y, q=q[:, m]) -> Tensor:
                    return F.cross_entropy(net(x[i]), y[i], reduction="none") @ q[i] / len(i)

                found[m].append(copied(world.trained(w[m], c, number, loss)))
        w = [mean(each, world.sizes) for each in found]
    both = {f"learner{m}/{k}": t for m in (0, 1) for k, t in w[m].items()}
    return {"common": both, **{f"state/{c}": {"pi": each} for c, each in pi.items()}}


def best_on_simplex(quadratic: Tensor, linear: Tensor) -> Tensor:
    """Return alpha (3,) on the simplex, of least alpha' Q alpha + b' alpha: steps by pairs.

    In numbers of Python: 10,000 operations of torch, each of which gives the interpreter away, take
    minutes once any other thread of the process is busy.
    """
    q, b, alpha = quadratic.double().tolist(), linear.double().tolist(), [1 / 3] * 3
    for _ in range(300):
        for i, j in ((0, 1), (0, 2), (1, 2)):
            along = [2 * sum(q[k][m] * alpha[m] for m in range(3)) + b[k] for k in (i, j)]
            slope, bend = along[0] - along[1], 2 * (q[i][i] - q[i][j] - q[j][i] + q[j][j])
            step = -slope / bend if bend > 0 else -math.copysign(1.0, slope) * (slope != 0)
            step = min(max(step, -alpha[i]), alpha[j])
            alpha[i], alpha[j] = alpha[i] + step, alpha[j] - step
    return torch.tensor(alpha, dtype=torch.float64)


def pfedgraph(world: World) -> Expected:
    """Ye et al., eq. 3 to 5, alpha = 0.8 and lambda = 0.05; a client is drawn to its neighbours."""

    def flat(weights: Weights) -> Tensor:
        return torch.cat([weights[k].flatten() for k in world.first])

    models, near = dict.fromkeys(CLIENTS, world.first), dict[int, Tensor]()
    p = torch.tensor(world.sizes).double() / sum(world.sizes)
    for number in ROUNDS:
        new = []
        for c in CLIENTS:
            (x, y), u = world.data[c], near.get(c)

            def loss(net: SplitNet, i: Tensor, x=x, y=y, u=u) -> Tensor:
                plain, theta = F.cross_entropy(net(x[i]), y[i]), flat(net.tensors())
                return plain if u is None else plain - 0.05 * (u @ theta) / theta.norm()

            new.append(copied(world.trained(models[c], c, number, loss)))
        moves = torch.stack([(flat(w) - flat(world.first)).double() for w in new])
        d = -F.cosine_similarity(moves[:, None], moves, -1)
        d[d < -0.9] = -1
        for c in CLIENTS:
            row = best_on_simplex(0.8 * torch.eye(3), d[c] - 1.6 * p).tolist()
            models[c] = mean(new, row)
            near[c] = sum(a * flat(w) / flat(w).norm() for a, w in zip(row, new, strict=True))
    return {f"server/{c}": w for c, w in models.items()}


def fedpac(world: World) -> Expected:
    """Xu et al., Algorithm 1: statistics, one epoch of the head at ten times the rate, the base."""
    base, heads = world.first, dict.fromkeys(CLIENTS, part(world.first, "head/"))
    everyone: dict[int, Tensor] = {}
    for number in ROUNDS:
        found, h, variances, reported = [], [], [], []
        for c in CLIENTS:
            (x, y), net = world.data[c], world.net({**base, **heads[c]})
            z = net.base(x).detach()
            own = class_means(z, y)
            h.append(torch.zeros(10, z.shape[1]))
            total = 0.0
            for k, (mu, n) in own.items():
                share, rows = n / len(y), z[y == k]
                h[-1][k] = share * mu
                total += share * float(torch.trace(rows.T @ rows / n)) - share**2 * float(mu @ mu)
            variances.append(total / len(y))
            rows, per_epoch = world.batches(c, number, 1 + EPOCHS), -(-len(y) // BATCH)
            for module, epochs, lr in ((net.head, 1, 10 * LR), (net.base, EPOCHS, LR)):
                optimizer = sgd(module.parameters(), lr)
                for _ in range(epochs * per_epoch):
                    i = next(rows)
                    z = net.base(x[i])
                    loss = F.cross_entropy(net.head(z), y[i])
                    if number:
                        wanted = [everyone.get(k, own[k][0]) for k in y[i].tolist()]
                        loss = loss + F.mse_loss(z, torch.stack(wanted))
                    descend(optimizer, loss)
            reported.append(class_means(net.base(x).detach(), y))
            found.append(copied(net))
        base, everyone = mean(found, world.sizes), weighted(reported)
        for c in CLIENTS:
            to = torch.stack([(h[c] - each).flatten() for each in h])
            alpha = best_on_simplex(torch.diag(torch.tensor(variances)) + to @ to.T, torch.zeros(3))
            kept = torch.where(alpha > 1e-3, alpha, 0.0).tolist()
            heads[c] = part(mean(found, kept), "head/")
    prototypes = {f"class/{k}": row for k, row in everyone.items()}
    own_heads = {f"server/{c}": head for c, head in heads.items()}
    return {"common": {**part(base, "base/"), **prototypes}, **own_heads}


def creff(world: World) -> Expected:
    """Shang et al.: ten steps on the features at a head that is not re-trained, by autograd."""

    def gradients(z: Tensor, k: int, *, create_graph: bool = False) -> list[Tensor]:
        labels = torch.full((len(z),), k)
        loss = F.cross_entropy(F.linear(z, *head), labels)
        weight, bias = torch.autograd.grad(loss, head, create_graph=create_graph)
        return [weight, bias[None]]

    def plain(c: int, received: Weights) -> Callable[[SplitNet, Tensor], Tensor]:
        x, y = world.data[c]
        return lambda net, i: F.cross_entropy(net(x[i]), y[i])

    head = [world.first[f"head/{name}"].clone().requires_grad_() for name in ("weight", "bias")]
    features = method_of(world.experiment).init_server(world.run).own.weights["features"].clone()
    w = world.first
    for number in ROUNDS:
        reported: dict[int, list[list[Tensor]]] = {}
        for x, y in world.data.values():
            z = world.net(w).base(x).detach()
            for k in y.unique().tolist():
                reported.setdefault(k, []).append(gradients(z[y == k], k))
        for _ in range(10):
            for k, found in reported.items():
                wanted = [sum(each) / len(found) for each in zip(*found, strict=True)]
                free = features[k].clone().requires_grad_()
                pairs = zip(gradients(free, k, create_graph=True), wanted, strict=True)
                apart = sum((1 - F.cosine_similarity(a, b, -1)).sum() for a, b in pairs)
                features[k] -= 0.1 * torch.autograd.grad(apart, free)[0]
        nets = [world.trained(w, c, number, plain(c, w)) for c in CLIENTS]
        w = mean([copied(net) for net in nets], world.sizes)
    return {"common": w, "server": {"features": features}}


def scaffold(world: World) -> Expected:
    """Karimireddy et al., Algorithm 1, eta_g = 0.7; a client's c is the mean of its gradients."""
    w, keys = world.first, list(world.first)
    nothing = {k: torch.zeros_like(t) for k, t in w.items()}
    everyones, own = nothing, dict.fromkeys(CLIENTS, nothing)
    for number in ROUNDS:
        nets, changes = [], []
        for c in CLIENTS:
            (x, y), net = world.data[c], world.net(w)
            live = dict(zip(keys, net.parameters(), strict=True))
            optimizer, seen = sgd(net.parameters()), []
            for i in world.batches(c, number):
                gradients = torch.autograd.grad(F.cross_entropy(net(x[i]), y[i]), live.values())
                seen.append(gradients)
                for (k, p), g in zip(live.items(), gradients, strict=True):
                    p.grad = g - own[c][k] + everyones[k]
                optimizer.step()
            new = {
                k: sum(gs) / len(gs) for k, gs in zip(keys, zip(*seen, strict=True), strict=True)
            }
            changes.append({k: new[k] - own[c][k] for k in keys})
            own[c] = new
            nets.append(copied(net))
        average = mean(nets, [1, 1, 1])
        w = {k: w[k] + 0.7 * (average[k] - w[k]) for k in keys}
        step = mean(changes, [1, 1, 1])
        everyones = {k: everyones[k] + step[k] for k in keys}

    def named(weights: Weights) -> dict[str, Tensor]:
        return {f"control/{k}": t for k, t in weights.items()}

    return {"common": {**w, **named(everyones)}, **{f"state/{c}": named(own[c]) for c in CLIENTS}}


def fedbabu(world: World) -> Expected:
    """Oh et al., Algorithm 1: the body alone moves."""
    w = world.first
    for number in ROUNDS:
        found = []
        for c in CLIENTS:
            (x, y), net = world.data[c], world.net(w)
            optimizer = sgd(net.base.parameters())
            for i in world.batches(c, number):
                descend(optimizer, F.cross_entropy(net(x[i]), y[i]))
            found.append(copied(net))
        w = mean(found, [1, 1, 1])
    return {"common": w}


def pfedme(world: World) -> Expected:
    """Dinh et al., Algorithm 1: K = 3, lambda = 2, eta = 0.1, beta = 0.8."""
    w, keys = world.first, list(world.first)
    thetas: dict[int, Weights] = {}
    for number in ROUNDS:
        found = []
        for c in CLIENTS:
            (x, y), net, local = world.data[c], world.net(w), dict(w)
            optimizer = sgd(net.parameters())
            for i in world.batches(c, number):
                for _ in range(3):
                    near = apart(net, [local[k] for k in keys])
                    descend(optimizer, F.cross_entropy(net(x[i]), y[i]) + near)
                theta = copied(net)
                local = {k: local[k] - 0.2 * (local[k] - theta[k]) for k in keys}
            thetas[c] = theta
            found.append(local)
        average = mean(found, [1, 1, 1])
        w = {k: 0.2 * w[k] + 0.8 * average[k] for k in keys}
    own = {f"state/{c}": {f"twin/{k}": t for k, t in thetas[c].items()} for c in CLIENTS}
    return {"common": w, **own}


def flash(world: World) -> Expected:
    """Panchal et al., Algorithm 1: eta = 0.02, gamma = 0.2, tau = 0.01; every ninth is held."""
    w, keys = world.first, list(world.first)
    m, d = ({k: torch.zeros_like(t) for k, t in w.items()} for _ in range(2))
    v = {k: torch.full_like(t, 0.01**2) for k, t in w.items()}
    for number in ROUNDS:
        found = []
        for c, (x, y) in world.data.items():
            held = torch.arange(len(y)) % 9 == 8
            net, own, order = world.net(w), torch.arange(len(y))[~held], world.order(c, number)
            optimizer, last = sgd(net.parameters()), float("inf")
            for epoch in range(1, world.epochs + 1):
                for i in torch.split(own[torch.randperm(len(own), generator=order)], BATCH):
                    descend(optimizer, F.cross_entropy(net(x[i]), y[i]))
                now = F.cross_entropy(net(x[held]), y[held]).item()
                if last - now < 0.2 / epoch:
                    break
                last = now
            found.append(copied(net))
        average = mean(found, [1, 1, 1])
        for k in keys:
            delta = average[k] - w[k]
            m[k], before = 0.9 * m[k] + 0.1 * delta, v[k]
            v[k] = 0.99 * v[k] + 0.01 * delta**2
            share = before / ((delta**2 - v[k]).abs() + before)
            d[k] = share * d[k] + (1 - share) * (delta**2 - v[k])
        w = {k: w[k] + 0.02 * m[k] / ((v[k].sqrt() - d[k]).clamp(min=0) + 0.01) for k in keys}
    moments = {
        f"{name}/{k}": t
        for name, each in zip("mvd", (m, v, d), strict=True)
        for k, t in each.items()
    }
    return {"common": w, "server": moments}


def per_fedavg(world: World) -> Expected:
    """Fallah et al., Algorithm 1 with the difference of HF: alpha = 0.2, delta = 0.01."""
    w = world.first
    for number in ROUNDS:
        found = []
        for c, (x, y) in world.data.items():
            net, draws = world.net(w), world.drawn(c, number)
            live, optimizer = [*net.parameters()], sgd(net.parameters())
            for i in world.batches(c, number):
                first, third = (torch.randperm(len(y), generator=draws)[: len(i)] for _ in range(2))

                def gradient(rows: Tensor, moves: list[Tensor], net=net, live=live, x=x, y=y):
                    begun = [p.detach().clone() for p in live]
                    with torch.no_grad():
                        for p, move in zip(live, moves, strict=True):
                            p += move
                    got = torch.autograd.grad(F.cross_entropy(net(x[rows]), y[rows]), live)
                    with torch.no_grad():
                        for p, old in zip(live, begun, strict=True):
                            p.copy_(old)
                    return got

                own = gradient(first, [torch.zeros_like(p) for p in live])
                far = gradient(i, [-0.2 * g for g in own])
                up, down = (gradient(third, [sign * g for g in far]) for sign in (0.01, -0.01))
                for p, g, a, b in zip(live, far, up, down, strict=True):
                    p.grad = g - 0.2 * (a - b) / 0.02
                optimizer.step()
            found.append(copied(net))
        w = mean(found, [1, 1, 1])
    return {"common": w}


def fedtgp(world: World) -> Expected:
    """Zhang et al.: lambda = 1.5, S = 3, batches of 4 at rate 0.2, a margin of 50 at most."""
    own, everyone = dict.fromkeys(CLIENTS, world.first), dict[int, Tensor]()
    tgp = dict(init_server(method_of(world.experiment), world.run).own.weights)
    for number in ROUNDS:
        reported = []
        for c, (x, y) in world.data.items():

            def loss(net: SplitNet, i: Tensor, x=x, y=y, everyone=everyone) -> Tensor:
                z = net.base(x[i])
                rows = zip(y[i].tolist(), z.detach(), strict=True)
                wanted = torch.stack([everyone.get(k, row) for k, row in rows])
                return F.cross_entropy(net.head(z), y[i]) + 1.5 * F.mse_loss(z, wanted)

            net = world.trained(own[c], c, number, loss)
            own[c] = copied(net)
            reported.append(class_means(net.base(x).detach(), y))
        pairs = [(k, v) for means in reported for k, (v, _) in sorted(means.items())]
        centres = {
            k: torch.stack([v for j, v in pairs if j == k]).mean(0) for k in {k for k, _ in pairs}
        }
        apart = [(v - w).norm().item() for v in centres.values() for w in centres.values()]
        delta, draws = min(max(apart), 50.0), world.drawn("server", number)
        live = {k: t.clone().requires_grad_() for k, t in tgp.items()}

        def prototypes(live=live) -> Tensor:
            inner, outer = (
                [live[f"tgp/{name}.weight"], live[f"tgp/{name}.bias"]]
                for name in ("inner", "outer")
            )
            return F.linear(F.linear(live["tgp/vectors.weight"], *inner).relu(), *outer)

        for _ in range(3):
            for rows in torch.split(torch.randperm(len(pairs), generator=draws), 4):
                now, each = prototypes(), []
                for k, v in (pairs[row] for row in rows.tolist()):
                    far = torch.stack([(v - p).norm() for p in now])
                    e = torch.exp(-far)
                    mine = torch.exp(-far[k] - delta)
                    each.append(-torch.log(mine / (mine + e.sum() - e[k])))
                gradients = torch.autograd.grad(sum(each) / len(each), [*live.values()])
                with torch.no_grad():
                    for t, g in zip(live.values(), gradients, strict=True):
                        t -= 0.2 * g
        tgp = {k: t.detach() for k, t in live.items()}
        everyone = dict(enumerate(prototypes().detach()))
    common = {f"class/{k}": row for k, row in everyone.items()}
    return {"common": common, "server": tgp, **{f"state/{c}": w for c, w in own.items()}}


LOOPS: Mapping[str, tuple[Callable[[World], Expected], Mapping[str, Any]]] = {
    "fedprox": (fedprox, {"mu": 0.5}),
    "fedntd": (fedntd, {"tau": 2.0}),
    "moon": (moon, {"mu": 2.0}),
    "fedproto": (fedproto, {"lam": 1.5}),
    "fedrep": (fedrep, {"head_epochs": 2, "base_epochs": 3}),
    "ditto": (ditto, {"lam": 0.7}),
    "apfl": (apfl, {"alpha": 0.6}),
    "fedem": (fedem, {"learners": 2}),
    "pfedgraph": (pfedgraph, {"lam": 0.05}),
    "fedpac": (fedpac, {}),
    "creff": (creff, {"match_steps": 10, "crt_epochs": 0, "num_features": 8}),
    "scaffold": (scaffold, {"server_lr": 0.7}),
    "fedbabu": (fedbabu, {}),
    "pfedme": (pfedme, {"lam": 2.0, "eta": 0.1, "inner_steps": 3, "beta": 0.8}),
    "per-fedavg": (per_fedavg, {"alpha": 0.2, "delta": 0.01}),
    "fedtgp": (
        fedtgp,
        {"lam": 1.5, "server_epochs": 3, "server_batch": 4, "server_lr": 0.2, "margin": 50.0},
    ),
    "flash": (flash, {"eta": 0.02, "gamma": 0.2, "tau": 0.01, "watched": 9}),
}
LONG = {"flash": 5}
"""Epochs of local training of methods that may stop before the last one."""


@pytest.mark.parametrize("name", LOOPS)
def test_a_run_comes_to_what_a_plain_loop_comes_to(name, digits):
    loop, switches = LOOPS[name]
    world = World(digits, {"name": name, **switches}, LONG.get(name, EPOCHS))
    expected, found = loop(world), world.found()
    assert expected
    for place, weights in expected.items():
        for key, tensor in weights.items():
            torch.testing.assert_close(
                found[place][key].float(), tensor.float(), rtol=1e-8, atol=1e-10,
                msg=lambda text, at=f"{place} {key}": f"{at}: {text}",
            )  # fmt: skip
