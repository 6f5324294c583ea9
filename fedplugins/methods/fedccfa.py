"""FedCCFA — Chen, Xue, Wang, Liu, Huang, Classifier Clustering and Feature Alignment for Federated
Learning under Distributed Concept Drift, NeurIPS 2024. https://arxiv.org/abs/2410.18478
Facts from the authors' code, https://github.com/Chen-Junbao/FedCCFA.

    paper            here                              paper      here
    theta            weights "base/…"                  gamma      gamma
    phi_i            weights "head/…"                  tau        temperature
    phi-hat_i        upload weights "balanced/head/…"  eps        eps
    p_i^k, P^k       prototypes["class"]               E_b        balanced_epochs

A class of the head is a row of its weights and its bias. Deviations: docs/methods/fedccfa.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy

from fedmodels.config.bounds import Count, NonNegative, Positive
from fedmodels.errors import ConfigError
from fedmodels.host.devices import to_device
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.split import embeddings, load_weights, weights_of
from fedmodels.numerics.algebra import class_means
from fedmodels.numerics.prototypes import ByClass, uncounted
from fedmodels.techniques.class_prototypes import by_class
from fedmodels.tensors.bundle import Bundle, Prototypes, Weights
from fedmodels.tensors.bundle_spec import BundleSpec, prototype_spec
from fedmodels.tensors.roles import of_role, part_of, under
from fedmodels.tensors.uploads import Reduction, Uploads
from fedmodels.tensors.weighted_mean import weighted_mean
from fedmodels.training.contexts import ClientContext, ServerContext, ServerState
from fedmodels.training.method import Payload, Reduced
from fedmodels.training.optimizer import SGD, descend
from fedmodels.training.run import RunFacts
from fedmodels.training.stepped import Batch, Output, Phase

BALANCED = "balanced"
MOST_BALANCED = 5
"""Examples of a class that the balanced head trains on, at most."""


@dataclass
class Aligned:
    """What the loss of one interaction aligns to, and the head that the server clusters."""

    targets: ByClass | None
    """The prototypes of the client's clusters; None before there are any."""
    weight: float
    """Of the alignment: the entropy of the client's classes over gamma."""
    balanced: Weights


@register("fedccfa")
class FedCcfa(FedAvg):
    """A shared base; each class of the clients' heads is averaged within clusters of clients."""

    citation: ClassVar[str] = "Chen et al., NeurIPS 2024"
    takes_targets: ClassVar[bool] = False
    reads_singly: ClassVar[str] = "the rows of each client's head are clustered and averaged"
    looks_at_examples: ClassVar[str] = "trains a head on a balanced draw of them, without noise"
    views: ClassVar[tuple[str, ...]] = ("after_local", "after_downlink")
    reduction: ClassVar[Reduction] = "each"

    head_epochs: Count = 1
    """Epochs of the head alone, before the base's ``local_epochs``."""
    head_lr_factor: NonNegative = 10.0
    """The head's learning rate over the run's, also for balanced training."""
    balanced_epochs: Count = 5
    """Epochs of the head that is clustered."""
    eps: Positive = 0.1
    """Clients nearer than this are in one cluster, by chains."""
    gamma: Positive = 20.0
    """The alignment's weight is the entropy of the client's classes in nats over it."""
    temperature: Positive = 0.1
    """Of the contrastive alignment."""
    align_from: Count = 20
    """The first round with alignment."""
    averages: Literal["uniform", "examples"] = "uniform"
    """How members of a cluster weigh: alike, or by their examples of the class."""

    # --- server half ---------------------------------------------------------------------------

    def init_server(self, run: RunFacts) -> ServerState:
        _check_head(run)
        return ServerState(Bundle(of_role(run.initial_weights, "base")))

    def broadcast(self, ctx: ServerContext, state: ServerState) -> Payload:
        return state.common, {c: state.clients[c] for c in ctx.cohort if c in state.clients}

    def payload_spec(self, run: RunFacts) -> tuple[BundleSpec, BundleSpec]:
        own = BundleSpec.of(Bundle(of_role(run.forms, "head"))).required
        protos = prototype_spec("class", run.width, run.problem.num_classes, counted=False)
        return super().payload_spec(run)[0], BundleSpec({}, {**own, **protos.required})

    def upload_spec(self, run: RunFacts) -> BundleSpec:
        head = Bundle(under(BALANCED, of_role(run.forms, "head")))
        protos = prototype_spec("class", run.width, run.problem.num_classes)
        return super().upload_spec(run) | BundleSpec.of(head) | protos

    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        mean = uploads.mean()
        if mean is None:
            return state
        return ServerState(Bundle(of_role(mean, "base")), state.own, state.clients)

    def finish(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> Reduced:
        """Average each class's row and prototype within clusters; keep who has which head."""
        sent = {c: u for c, u in uploads.items() if u.scalars["num_examples"]}
        if not sent:
            return state, {}
        members, classes = [*sent], ctx.run.problem.num_classes
        heads = {c: {k: t.clone() for k, t in of_role(u.weights, "head").items()}
                 for c, u in sent.items()}  # fmt: skip
        rows = {c: u.prototypes["class"].rows() for c, u in sent.items()}
        found = {c: dict(own) for c, own in rows.items()}
        trained = [part_of(u.weights, BALANCED) for u in sent.values()]
        groups = 0
        for label in range(classes):
            vectors = np.stack([_row(head, label) for head in trained])
            for places in clusters(vectors, self.eps):
                groups += 1
                group = [members[place] for place in places]
                if len(group) > 1:
                    self._average(label, group, sent, heads, rows, found)
        width = ctx.run.width
        own = {c: Bundle(heads[c], {"class": uncounted(Prototypes.of(found[c], width))})
               for c in members}  # fmt: skip
        after = ServerState(state.common, state.own, {**state.clients, **own})
        return after, {"clusters": groups / classes}

    def _average(
        self,
        label: int,
        group: Sequence[int],
        sent: dict[int, Bundle],
        heads: Mapping[int, dict[str, Tensor]],
        rows: dict[int, dict[int, tuple[Tensor, int]]],
        found: dict[int, dict[int, tuple[Tensor, int]]],
    ) -> None:
        """Give the members of a cluster the mean of a class's row, and of its prototype."""
        has = [c for c in group if label in rows[c]]
        by_count = self.averages == "examples" and bool(has)
        counts = [float(rows[c][label][1]) if label in rows[c] else 0.0 for c in group]
        weights = counts if by_count else [1.0] * len(group)
        given = [{k: t[label] for k, t in of_role(sent[c].weights, "head").items()} for c in group]
        for key, row in weighted_mean(given, weights, sum(weights)).items():
            for client in group:
                heads[client][key][label] = row
        if not has:
            return
        total = [w for w, c in zip(weights, group, strict=True) if label in rows[c]]
        vectors = [{"": rows[c][label][0]} for c in has]
        mean = weighted_mean(vectors, total, sum(total))[""]
        for client in group:
            found[client][label] = mean, 1

    # --- client half ---------------------------------------------------------------------------

    def load(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        load_weights(ctx.net, {**ctx.run.initial_weights, **payload.weights})

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> Aligned:
        classes, (_, y) = ctx.run.problem.num_classes, ctx.stream.train(ctx.task)
        share = torch.bincount(y.cpu(), minlength=classes).double() / max(len(y), 1)
        entropy = -float(torch.xlogy(share, share).sum())
        given = payload.prototypes.get("class")
        is_time = ctx.at.round >= self.align_from and given is not None and len(given.labels) > 0
        return Aligned(by_class(ctx, payload) if is_time else None, entropy / self.gamma, {})

    def phases(self, ctx: ClientContext) -> Sequence[Phase]:
        training = ctx.run.experiment.training
        head = Phase(self.head_epochs, ("head/",), lr=training.lr * self.head_lr_factor)
        return [head, Phase(training.local_epochs, ("base/",))]

    def fit(self, ctx: ClientContext, x: Tensor, y: Tensor, refs: Aligned) -> float:
        if len(y):
            self._balance(ctx, x, y, refs)
        return super().fit(ctx, x, y, refs)

    def _balance(self, ctx: ClientContext, x: Tensor, y: Tensor, refs: Aligned) -> None:
        """Train the run's first head on equally many examples of each class; keep it apart."""
        received, training = weights_of(ctx.net), ctx.run.experiment.training
        load_weights(ctx.net, {**received, **of_role(ctx.run.initial_weights, "head")})
        draws = ctx.generator()
        rows = to_device(balanced_rows(y, draws), y.device)
        z, labels, head = embeddings(ctx.net, x[rows]), y[rows], ctx.net.head
        steps = SGD(
            head.parameters(),
            lr=training.lr * self.head_lr_factor,
            momentum=training.momentum,
            weight_decay=training.weight_decay,
        )
        for _ in range(self.balanced_epochs):
            order = torch.randperm(len(labels), generator=draws)
            for index in torch.split(to_device(order, y.device), training.batch_size):
                descend(ctx.criterion(head(z[index]), labels[index]), steps)
        steps.zero_grad()
        refs.balanced = weights_of(ctx.net, lambda key: key.startswith("head/"))
        load_weights(ctx.net, received)

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: Aligned) -> Tensor:
        supervised = super().loss(ctx, batch, out, refs)
        if refs.targets is None or not out.features.requires_grad:  # the head trains
            return supervised
        alike = cosine_similarity(out.features[:, None], refs.targets.vectors[None], dim=2)
        known = refs.targets.known
        logits = (alike / self.temperature).masked_fill(~known, -math.inf)
        met = known[batch.y]
        rows = cross_entropy(logits[met], batch.y[met], reduction="sum") / len(met)
        return supervised + refs.weight * rows

    def uplink(self, ctx: ClientContext, state: Bundle, refs: Aligned) -> Bundle:
        upload = super().uplink(ctx, state, refs)
        x, y = ctx.stream.train(ctx.task)
        means = (
            class_means(embeddings(ctx.net, x), y, ctx.run.problem.num_classes) if len(y) else {}
        )
        first = of_role(ctx.run.initial_weights, "head")
        balanced = under(BALANCED, refs.balanced or first)
        protos = {"class": Prototypes.of(means, ctx.run.width)}
        return Bundle({**upload.weights, **balanced}, protos, scalars=upload.scalars)


def balanced_rows(y: Tensor, draws: torch.Generator) -> Tensor:
    """Return rows (m,) with equally many of each class: as many as the rarest has, at most five."""
    labels = y.cpu()
    order = torch.randperm(len(labels), generator=draws)
    each = [order[labels[order] == label] for label in sorted({*labels.tolist()})]
    few = min(MOST_BALANCED, *map(len, each))
    return torch.cat([rows[:few] for rows in each])


def clusters(vectors: np.ndarray, eps: float) -> list[list[int]]:
    """Return the places of vectors (n, d) by cluster: chains of distances of at most ``eps``.

    The distance of i and j is ``1 / (n - 2) sum_z |cos(v_i, v_z) - cos(v_j, v_z)|`` over all others
    z: who is alike to the same others is near. Of one or two vectors each is alone.
    """
    n = len(vectors)
    if n < 3:
        return [[place] for place in range(n)]
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > 0)
    cos = unit @ unit.T
    near = np.stack([_apart(cos, place) / (n - 2) <= eps for place in range(n)])
    chained = np.zeros_like(near)
    while (near != chained).any():
        chained, near = near, near.astype(np.float32) @ near > 0
    firsts = near.argmax(1)  # each cluster's first place
    return [np.flatnonzero(firsts == first).tolist() for first in sorted({*firsts.tolist()})]


def _apart(cos: np.ndarray, i: int) -> np.ndarray:
    """Return the sums (n,) over others z of how far cosines of place i and of each j differ."""
    each = np.abs(cos[i] - cos)  # (j, z): one place at a time, as all at once grow by n cubed
    each[:, i] = 0  # z = i
    np.fill_diagonal(each, 0)  # z = j
    sums: np.ndarray = each.sum(1)
    return sums


def _row(head: Weights, label: int) -> np.ndarray:
    """Return a class's weights and bias of a head, in one vector of float64."""
    parts = [tensor[label].double().flatten() for _, tensor in sorted(head.items())]
    return torch.cat(parts).numpy()


def _check_head(run: RunFacts) -> None:
    """Check that each tensor of the head has a row for each class; ConfigError otherwise."""
    classes = run.problem.num_classes
    for key, tensor in of_role(run.initial_weights, "head").items():
        if not tensor.ndim or len(tensor) != classes:
            raise ConfigError(
                f"fedccfa averages the rows of single classes, and the head's {key!r} has no row "
                f"for each of {classes} classes: take a net with a linear head"
            )
