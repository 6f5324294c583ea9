"""pFedGRP from its paper: replay volumes, eq. 6, the filter and eq. 8, in plain torch.

Only what a generator draws from a seed is ours, as both sides must see the same images.
"""

import copy

import numpy as np
import torch
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from tests.independent.rounds import Descent


def volumes(history, now, cap_of_generated=False):
    """Return Y_A (section 4.1): the history shrunk until it holds all real data, capped, less Y."""
    shrunk = history * (now[now > 0] / history[now > 0]).max()
    if cap_of_generated:
        return np.floor(np.minimum(np.maximum(shrunk - now, 0), now.max()) + 1e-9).astype(int)
    return np.floor(np.maximum(np.minimum(shrunk, now.max()) - now, 0) + 1e-9).astype(int)


def accepted(images, label, count, judge, *, attempts=10, filters=True, fills=False):
    """Return images (n, …) of a class that the judge takes for it, out of endless batches."""
    good, bad, looked = [], [], 0
    limit = attempts * count if filters else count
    judge = copy.deepcopy(judge).eval()
    while len(good) < count and looked < limit:
        drawn = next(images)[: limit - looked]
        looked += len(drawn)
        with torch.no_grad():
            found = judge(drawn)
        for image, scores in zip(drawn, found, strict=True):
            if not filters or int(scores.argmax()) == label:
                good.append(image)
            else:
                bad.append((float(scores.log_softmax(0)[label]), image))
    good = good[:count]
    if fills:
        likeliest = sorted(bad, key=lambda pair: -pair[0])
        good += [image for _, image in likeliest[: count - len(good)]]
    return good


def gathered(parts, shape):
    """Return (x, y) of ``{class: images}``."""
    x = [image for images in parts.values() for image in images]
    y = [label for label, images in parts.items() for _ in images]
    return torch.stack(x) if x else torch.zeros(0, *shape), torch.tensor(y, dtype=torch.int64)


def trained(
    net, personal, real, replayed, *, epochs, lr, momentum, decay, lam
):  # fmt: skip
    """Return C_i after eq. 6, with both sums over the number of all examples."""
    net, first = copy.deepcopy(net), len(real[1])
    x, y = torch.cat([real[0], replayed[0]]), torch.cat([real[1], replayed[1]])
    with torch.no_grad():
        target = copy.deepcopy(personal).eval()(x)[first:]
    descent = Descent([(list(net.parameters()), decay)], lr, momentum)
    net.train()
    for _ in range(epochs):
        out = net(x)
        loss = cross_entropy(out, y, reduction="sum") / len(y)
        if len(target):
            held = (out[first:] - target).square().mean(1).sum()
            loss = loss + lam * held / len(y)
        descent.step(loss)
    return net


def mixed(nets, weights):
    """Return C_{g,i}, the weighted sum of all models."""
    tables = [net.state_dict() for net in nets]
    out = copy.deepcopy(nets[0])
    out.load_state_dict(
        {
            name: sum(w * t[name] for w, t in zip(weights, tables, strict=True))
            if first.is_floating_point()
            else torch.stack([t[name] for t in tables]).amax(0)
            for name, first in tables[0].items()
        }
    )
    return out


def aggregation_weights(nets, x, y, *, epochs, lr, first):
    """Return the best w = softmax(a) of eq. 8 among uniform, first, and those after each step.

    Adam with betas .5 and .999; the graph goes through all models. Statistics take no gradient.
    """
    tables = [{k: t.double() for k, t in net.state_dict().items()} for net in nets]
    judge, x = copy.deepcopy(nets[0]).double().eval(), x.double()

    def loss(a):
        w, still = a.softmax(0), a.softmax(0).detach()
        state = {
            name: sum(
                (still if "running" in name else w)[j] * t[name] for j, t in enumerate(tables)
            )
            for name in tables[0]
            if "num_batches" not in name
        }
        return cross_entropy(functional_call(judge, state, (x,)), y)

    a = torch.tensor(first, dtype=torch.float64).log()
    seen = [torch.zeros_like(a), a]
    m, v = torch.zeros_like(a), torch.zeros_like(a)
    for t in range(1, epochs + 1):
        a = a.detach().requires_grad_()
        (slope,) = torch.autograd.grad(loss(a), a)
        m, v = 0.5 * m + 0.5 * slope, 0.999 * v + 0.001 * slope**2
        a = a.detach() - lr * (m / (1 - 0.5**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        seen.append(a)
    return min(seen, key=lambda each: float(loss(each))).softmax(0)
