"""FedTGP — Zhang, Liu, Hua, Cao, FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced
Contrastive Learning for Data and Model Heterogeneity in Federated Learning, AAAI 2024.
https://arxiv.org/abs/2401.03230, facts from https://github.com/TsingZ0/FedTGP

    paper      here                                paper     here
    P_i^c      uplink, prototypes["class"]         lambda    lam
    P-hat^c    payload.prototypes["class"]         tau       margin
    P-breve^c  own weights "tgp/vectors.weight"    S         server_epochs
    theta_F    own weights "tgp/inner…", "outer…"  delta(t)  _margin
    Q_t^c      own prototypes["class"]

Deviations: docs/methods/fedtgp.md.
"""

from __future__ import annotations

from dataclasses import field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedmodels.config.bounds import NonNegative, Positive, PositiveCount
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.split import weights_of
from fedmodels.numerics.prototypes import (
    distance_per_example,
    moved,
    uncounted,
)
from fedmodels.techniques.class_prototypes import (
    PrototypeLimits,
    PullReferences,
    by_class,
    class_means,
    mean_class_prototypes,
    nearest_and_logits,
    no_prototypes,
    prototype_upload,
)
from fedmodels.tensors.bundle import Bundle, Prototypes, Weights
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.roles import part_of, under
from fedmodels.tensors.uploads import Uploads
from fedmodels.training.contexts import ClientContext, ServerContext, ServerState
from fedmodels.training.method import Reduced, Scores
from fedmodels.training.run import RunFacts
from fedmodels.training.stepped import Batch, Output

TGP = "tgp"
LOUDEST = 2.0
"""By how much one client may raise the margin."""


class TrainablePrototypes(nn.Module):
    """A vector for each class, and the layers F that make it the class's global prototype."""

    def __init__(self, num_classes: int, width: int) -> None:
        """Draw F first: it does not depend on how many classes there are."""
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)
        self.vectors = nn.Embedding(num_classes, width)

    def forward(self) -> Tensor:
        """Return the prototypes (K, d)."""
        found: Tensor = self.outer(self.inner(self.vectors.weight).relu())
        return found


class Steps:
    """SGD on the global prototypes; gradients in closed form.

    In NumPy, where a small step costs half of one in torch, and a fifth of one by autograd. Shapes:
    n prototypes of clients, B of a step, K classes, d coordinates.
    """

    def __init__(
        self, tgp: TrainablePrototypes, p: Tensor, y: Tensor, delta: float, lr: float
    ) -> None:
        """Begin with the weights of a module, which stays as it is.

        Args:
            tgp: the module.
            p: the clients' prototypes (n, d).
            y: the class of each (n,).
            delta: the margin.
            lr: the rate of a step.
        """
        vectors = tgp.vectors.weight.detach()
        self._v = torch.cat([vectors, vectors.new_ones(len(vectors), 1)], 1).numpy()
        self._hidden = self._v.copy()  # (K, d + 1) as well: a column of ones for the biases
        self._inner, self._outer = (
            torch.cat([layer.weight, layer.bias[:, None]], 1).detach().numpy()  # (d, d + 1)
            for layer in (tgp.inner, tgp.outer)
        )
        self._p, self._delta, self._lr = p.to(vectors).numpy(), delta, lr
        self._onehot = np.eye(len(vectors), dtype=self._v.dtype)[y.numpy()]

    @np.errstate(over="ignore", invalid="ignore")  # torch does not warn of inf and NaN either
    def step(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Take a step down the loss of some prototypes; return the share of each one's class."""
        active = self._v @ self._inner.T  # (K, d)
        np.maximum(active, 0, out=self._hidden[:, :-1])
        onehot = self._onehot[rows].T  # (K, B)
        apart = (self._hidden @ self._outer.T)[:, None] - self._p[rows]  # (K, B, d)
        distance = np.sqrt((apart[:, :, None] @ apart[..., None])[:, :, 0, 0])  # (K, B)
        share = -distance - self._delta * onehot  # logits, and then their softmax
        np.exp(share - share.max(0), out=share)
        share /= share.sum(0)
        pull = (onehot - share) * (self._lr / len(rows))
        pull = np.divide(pull, distance, out=np.zeros_like(pull), where=distance > 0)
        moved = (pull[:, None] @ apart)[:, 0]  # (K, d)
        back = (moved @ self._outer[:, :-1]) * (active > 0)
        self._outer -= moved.T @ self._hidden
        moved = back @ self._inner[:, :-1]
        self._inner -= back.T @ self._v
        self._v[:, :-1] -= moved
        return np.asarray((share * onehot).sum(0))

    def weights(self) -> Weights:
        """Return the weights after the steps, by their names in the module."""
        layers = {"inner": torch.from_numpy(self._inner), "outer": torch.from_numpy(self._outer)}
        weights = {f"{name}.weight": layer[:, :-1].clone() for name, layer in layers.items()}
        biases = {f"{name}.bias": layer[:, -1].clone() for name, layer in layers.items()}
        return {**weights, **biases, "vectors.weight": torch.from_numpy(self._v)[:, :-1].clone()}


@register("fedtgp")
class FedTgp(FedAvg):
    """Clients share class means; the server trains prototypes that keep classes apart."""

    citation: ClassVar[str] = "Zhang et al., AAAI 2024"
    rules_of_met: ClassVar[tuple[str, ...]] = ("nearest",)
    takes_targets: ClassVar[bool] = False
    takes_own_nets: ClassVar[bool] = True
    reads_singly: ClassVar[str] = "each client's prototypes train the global ones"
    variants_in: ClassVar[str] = "fedplugins.methods.fedtgp_variants"
    reduction: ClassVar[Literal["each"]] = "each"
    private: ClassVar[tuple[str, ...]] = ("",)  # all weights

    weighting: Literal["examples", "uniform"] = "uniform"
    lam: NonNegative = 1.0
    """Weight of the pull to the global prototypes; 0 is Local-only."""
    margin: NonNegative = 100.0
    """The largest margin; 0 is a contrastive loss without one."""
    server_epochs: PositiveCount = 1000
    """Passes over the clients' prototypes in a round."""
    server_batch: PositiveCount = 10
    """Prototypes of a step."""
    server_lr: Positive = 0.01
    """Learning rate of the global prototypes."""
    inference: Literal["nearest", "classifier"] = "nearest"
    """The rule the method is scored by: nearest global prototype, among the classes that the client
    has trained on, or the logits; both are taken."""
    limits: PrototypeLimits = field(default_factory=PrototypeLimits)
    """What is let out of prototypes."""

    @property
    def rules(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.inference, "nearest", "all_classes", "classifier")))

    # --- server half ---------------------------------------------------------------------------

    def init_server(self, run: RunFacts) -> ServerState:
        first = TrainablePrototypes(run.problem.num_classes, run.width).state_dict()
        own = Bundle(under(TGP, first), prototypes=no_prototypes(run))
        return ServerState(Bundle(prototypes=no_prototypes(run)), own)

    def upload_spec(self, run: RunFacts) -> BundleSpec:
        return prototype_upload(run)

    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        uniform = self.weighting == "uniform"
        found = mean_class_prototypes(ctx.run, uploads, uniform=uniform)  # Q_t
        if not len(found.labels):
            return state
        return replace(state, own=replace(state.own, prototypes={"class": found}))

    def finish(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> Reduced:
        if state is ctx.before:  # nobody reports a class
            return state, {}
        classes, sent = (
            ctx.run.problem.num_classes,
            [u.prototypes["class"] for u in uploads.values()],
        )
        p, y = torch.cat([s.vectors for s in sent]), torch.cat([s.labels.long() for s in sent])
        tgp = TrainablePrototypes(classes, ctx.run.width)
        tgp.load_state_dict(part_of(state.own.weights, TGP))
        means = state.own.prototypes["class"].vectors
        steps = Steps(tgp, p, y, self._delta(ctx.run, means, uploads), self.server_lr)
        draws = ctx.generator()
        for epoch in range(self.server_epochs):
            order = torch.randperm(len(y), generator=draws).numpy()
            for first in range(0, len(y), self.server_batch):
                share = steps.step(order[first : first + self.server_batch])
            loss = -float(np.log(share.clip(1e-30)).mean())
            ctx.tell("prototypes", epoch + 1, self.server_epochs, loss)
        tgp.load_state_dict(steps.weights())
        with torch.no_grad():
            everyone = Prototypes.of({k: (row, 1) for k, row in enumerate(tgp())}, ctx.run.width)
        common = replace(state.common, prototypes={"class": uncounted(everyone)})
        own = replace(state.own, weights=under(TGP, tgp.state_dict()))
        return replace(state, common=common, own=own), {}

    def _delta(self, run: RunFacts, means: Tensor, uploads: Uploads) -> float:
        """Return delta(t), to which no client adds more than it would be without that client."""
        others = [LOUDEST * margin for margin in self._margins_without(run, uploads)]
        return min([self._margin(means), *others])

    def _margins_without(self, run: RunFacts, uploads: Uploads) -> list[float]:
        """Return delta(t) as it would be without each client; none where a rule made the means."""
        if uploads.is_ruled:
            return []
        sums = torch.zeros(run.problem.num_classes, run.width, dtype=torch.float64)
        counts = torch.zeros(run.problem.num_classes, 1, dtype=torch.float64)
        sent, found = list[tuple[Tensor, Tensor, Tensor]](), list[float]()
        for rows in (u.prototypes["class"] for u in uploads.values()):
            n = torch.ones(len(rows.labels)) if self.weighting == "uniform" else rows.counts
            y, n = rows.labels.long(), n[:, None].double()
            sent.append((y, n, rows.vectors.double() * n))
            counts.index_add_(0, y, n)
            sums.index_add_(0, y, sent[-1][2])
        for y, n, own in sent:
            left = counts.index_add(0, y, -n)
            there = left[:, 0] > 0
            if int(there.sum()) > 1:
                means = (sums.index_add(0, y, -own) / left)[there]
                found.append(self._margin(means.to(torch.get_default_dtype())))
        return found

    def _margin(self, means: Tensor) -> float:
        """Return delta(t): how far classes are apart, at most tau."""
        if len(means) < 2:
            return self.margin
        apart = torch.cdist(means, means, compute_mode="donot_use_mm_for_euclid_dist")
        return min(self.largest(apart), self.margin)

    def largest(self, apart: Tensor) -> float:
        """Return the margin that distances between means (K, K) give."""
        return float(apart.max())

    # --- client half ---------------------------------------------------------------------------

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> PullReferences:
        return PullReferences(by_class(ctx, payload))

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: PullReferences) -> Tensor:
        pull = distance_per_example(out.features, batch.y, refs.everyone)
        return super().loss(ctx, batch, out, refs) + self.lam * pull

    def after_local(self, ctx: ClientContext, state: Bundle, refs: PullReferences) -> Bundle:
        refs.fresh = class_means(ctx, *self.training_data(ctx, refs))
        own = moved(state.prototypes.get("class"), refs.fresh, beta=0.0)
        return Bundle(weights=weights_of(ctx.net), prototypes={"class": own})

    def uplink(self, ctx: ClientContext, state: Bundle, refs: PullReferences) -> Bundle:
        return Bundle(prototypes=self.limits.released(ctx, refs.fresh))

    def predict(self, ctx: ClientContext, payload: Bundle, state: Bundle, x: Tensor) -> Scores:
        return nearest_and_logits(ctx, payload, state, x, self.inference)
