"""FedAli from its paper: the layer (eqs. 3 to 7) and the server's k-means, in plain torch."""

import copy
import math

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from tests.independent.rounds import mean_of


def plan(x, prototypes, epsilon=0.05, iterations=3, samples_last=False):
    """Return eq. 4: both sums divided out, those of the prototypes last."""
    c = (normalize(x, dim=1) @ normalize(prototypes, dim=1).T / epsilon).exp()
    for _ in range(iterations):
        for axis in (0, 1) if samples_last else (1, 0):
            c = c / c.sum(axis, keepdim=True)
    return c


def matched(x, prototypes, match, **options):
    """Return how well tokens and prototypes match, (N, P)."""
    if match == "euclidean":
        return -(x[:, None] - prototypes).square().sum(2).sqrt()
    if match == "cosine":
        return normalize(x, dim=1) @ normalize(prototypes, dim=1).T
    return plan(x, prototypes, **options)


class Alignment(nn.Module):
    """The layer, with the names of our layer's tensors; float64 within."""

    def __init__(
        self, width, count, *, beta=0.2, gamma=0.999, sets="both", match="ot", k=None,
        unit_features=False, raw_weights=False, hard=False, skip_first=False, **options,
    ):  # fmt: skip
        super().__init__()
        self.glu = nn.Linear(width, 2 * width)
        self.register_buffer("local_prototypes", torch.zeros(count, width))
        self.register_buffer("global_prototypes", torch.zeros(count, width))
        self.beta, self.gamma, self.sets, self.match, self.k = beta, gamma, sets, match, k
        self.unit_features, self.raw_weights, self.hard = unit_features, raw_weights, hard
        self.skip_first, self.options = skip_first, options

    def forward(self, tokens):
        tokens = tokens.double()
        kept, seen = tokens[:, :1], tokens[:, 1:] if self.skip_first else tokens
        x, own, everyone = seen.flatten(0, 1), self.local_prototypes, self.global_prototypes
        own, everyone = own.double(), everyone.double()
        active = {"both": torch.cat([own, everyone]), "local_only": own, "global_only": everyone}
        p = active[self.sets] if self.training or self.sets != "both" else own  # eq. 3
        with torch.no_grad():
            c = matched(x, p, self.match, **self.options)
            target = p[c.argmax(1)]
            if self.training:
                towards = own if self.sets == "local_only" else everyone
                target = towards[c[:, -len(own) :].argmax(1)]
                self.local_prototypes.copy_(self.followed(x, c[:, : len(own)], own))
        u, v = (target @ self.glu.weight.double().T + self.glu.bias).chunk(2, 1)
        mixed = self.beta * u * torch.sigmoid(v) + (1 - self.beta) * x  # eqs. 6 and 7
        mixed = mixed.view_as(seen)
        return normalize(torch.cat([kept, mixed], 1) if self.skip_first else mixed, dim=-1).float()

    def followed(self, x, c, own):
        """Return the local prototypes after eq. 5."""
        features = normalize(x, dim=1) if self.unit_features else x
        rows = []
        for g, prototype in enumerate(own):
            if self.hard:
                mine = c.argmax(1) == g
                towards = features[mine].mean(0) if mine.any() else prototype
            else:
                best = c[:, g].argsort(descending=True)[: self.k or math.ceil(len(x) / len(own))]
                weights = c[best, g].clamp(min=0)
                if self.match == "euclidean":
                    weights = torch.ones_like(weights)
                if not self.raw_weights or self.match == "euclidean":
                    weights = weights / weights.sum()
                towards = (weights[:, None] * features[best]).sum(0)
            rows.append(self.gamma * prototype + (1 - self.gamma) * towards)
        return torch.stack(rows)


class Block(nn.Module):
    """Pre-norm block: the residual adds to the block's input, not to the aligned tokens."""

    def __init__(self, alignment, tokens, width):
        super().__init__()
        self.norm, self.alp = nn.LayerNorm(width), alignment
        self.mix, self.mlp = nn.Linear(tokens, tokens), nn.Linear(width, width)

    def forward(self, x):
        x = x + self.mix(self.alp(self.norm(x)).transpose(1, 2)).transpose(1, 2)
        return x + torch.tanh(self.mlp(x))


class Tokens(nn.Module):
    """Blocks, then the mean over tokens."""

    def __init__(self, alignments, tokens, width):
        super().__init__()
        self.blocks = nn.ModuleList(Block(a, tokens, width) for a in alignments)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.mean(1)


def trained(net, x, y, *, epochs, lr, beta, kept=None):
    """Return the net after local training by Adam; P_loc begins as P_glo, or as it was kept."""
    net, slopes = copy.deepcopy(net), {}
    for number, block in enumerate(net.base.blocks):
        begin = block.alp.global_prototypes if kept is None else kept[number]
        block.alp.local_prototypes.copy_(begin)
        block.alp.beta = beta
    net.train()
    for t in range(1, epochs + 1):
        net.zero_grad()
        cross_entropy(net.head(net.base(x)), y).backward()
        with torch.no_grad():
            for p in net.parameters():
                m, v = slopes.get(p, (0.0, 0.0))
                m, v = 0.9 * m + 0.1 * p.grad, 0.999 * v + 0.001 * p.grad**2
                slopes[p] = m, v
                p -= lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
    return net


def prototypes(net):
    return [block.alp.local_prototypes.clone() for block in net.base.blocks]


def clustered(points, centres):
    """Return the centres of Lloyd's algorithm, from these centres until nothing moves."""
    while True:
        nearest = (points[:, None] - centres).square().sum(2).argmin(1)
        groups = [points[nearest == g] for g in range(len(centres))]
        assert all(len(group) for group in groups), "an empty cluster: choose other data"
        moved = torch.stack([group.mean(0) for group in groups])
        if torch.equal(moved, centres):
            return centres
        centres = moved


def aggregated(nets, counts, stops_at_mean=False):
    """Return the mean net, whose P_glo are the clusters' centres (Algorithm 1, lines 8 to 13)."""
    weights = [n / sum(counts) for n in counts]
    mean = mean_of(nets, weights)
    for number, block in enumerate(mean.base.blocks):
        rows = [prototypes(net)[number].double() for net in nets]
        begin = sum(w * p for w, p in zip(weights, rows, strict=True))
        centres = begin if stops_at_mean else clustered(torch.cat(rows), begin)
        block.alp.global_prototypes.copy_(centres)
    return mean
