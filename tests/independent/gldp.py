"""GLDP from its paper: equations 2 to 13 and Algorithm 1, in plain torch.

Prototypes are ``{class: vector}``. A model is a representation f and a head g.
"""

import copy

import torch
from torch.nn.functional import cross_entropy

from tests.independent.rounds import Descent, mean_of


def local_relation(z, y, own, tau=1.0, head=None):
    """Return eq. 8, one example after the other: KL(softmax(C / tau) || softmax(z / tau))."""
    total = 0 * z.sum()
    for row, k in zip(z, y.tolist(), strict=True):
        if k in own:
            target = own[k]
            if head is not None:
                target, row = head(target[None])[0].detach(), head(row[None])[0]
            p = torch.softmax(target / tau, 0)
            total = total + (p * (p.log() - torch.log_softmax(row / tau, 0))).sum()
    return total / len(z)


def global_relation(z, y, everyone, per_sample=False):
    """Return eq. 10: squared distances over d to the global prototypes, weighed by b_n / b."""
    total = 0 * z.sum()
    for k in set(y.tolist()) & everyone.keys():
        mine = z[y == k]
        apart = mine if per_sample else mine.mean(0, keepdim=True)
        total = total + len(mine) / len(z) * (apart - everyone[k]).square().mean()
    return total


def class_means(f, x, y):
    """Return eq. 6 in evaluation mode."""
    f.eval()
    with torch.no_grad():
        return means(f(x), y)


def means(z, y):
    return {k: z[y == k].mean(0) for k in sorted(set(y.tolist()))}


def moving(old, new, beta):
    """Return eq. 9 and 11: ``beta old + (1 - beta) new``; a new class is added directly."""
    both = {k: beta * old[k] + (1 - beta) * v if k in old else v for k, v in new.items()}
    return {**old, **both}


def trained(
    f, g, own, everyone, x, y, *, t, s, lr, momentum, decay, beta=0.5, lam=0.5,
    tau=1.0, use_lp=True, use_gp=True, head_first=False, per_sample=False, in_head_space=False,
    moves_each_epoch=False, running=False, batches=None,
):  # fmt: skip
    """Return f, g, the client's own prototypes and this task's class means after local training."""
    f, g = copy.deepcopy(f), copy.deepcopy(g)
    groups = [(list(f.parameters()), decay), (list(g.parameters()), 0.0)]
    descent = Descent(groups, lr, momentum)
    phases = [("base", t), ("head", s)]
    whole = [torch.arange(len(y))]
    for which, epochs in reversed(phases) if head_first else phases:
        f.train(which == "base")
        for part, module in (("base", f), ("head", g)):
            module.requires_grad_(part == which)
        for epoch in range(epochs):
            for index in whole if batches is None else batches():
                z = f(x[index])
                loss = cross_entropy(g(z), y[index])  # eq. 2
                if use_lp:
                    head = g if in_head_space else None
                    loss = loss + lam * local_relation(z, y[index], own, tau, head)
                if use_gp:
                    loss = loss + (1 - lam) * global_relation(z, y[index], everyone, per_sample)
                descent.step(loss)  # eq. 12
            if which == "base" or not head_first:
                latest = means(z.detach(), y[index])
            if moves_each_epoch and which == "base" and epoch < epochs - 1:
                own = moving(own, latest, beta)  # Algorithm 1, line 15
    found = latest if running else class_means(f, x, y)
    return f.requires_grad_(True), g.requires_grad_(True), moving(own, found, beta), found


def aggregated(representations, reported, everyone, beta=0.5, weights=None):
    """Return eq. 5 and 11."""
    named = sorted({k for rows in reported for k in rows})
    new = {k: torch.stack([r[k] for r in reported if k in r]).mean(0) for k in named}
    return mean_of(representations, weights), moving(everyone, new, beta)


def nearest(f, x, prototypes, among=None):
    """Return eq. 13 among some classes; among all that have a prototype where there is no such."""
    f.eval()
    with torch.no_grad():
        z = f(x)
    wanted = sorted(prototypes.keys() & among) if among is not None else []
    wanted = wanted or sorted(prototypes)
    distances = torch.stack([(z - prototypes[k]).norm(dim=1) for k in wanted], 1)
    return torch.tensor(wanted)[distances.argmin(1)]
