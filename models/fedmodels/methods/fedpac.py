"""FedPAC — Xu, Tong, Huang, Personalized Federated Learning with Feature Alignment and Classifier
Collaboration, ICLR 2023, Algorithm 1. https://arxiv.org/abs/2306.11867

    paper    here                          paper    here
    theta    weights "base/…"              lambda   lam
    phi_i    weights "head/…"              alpha_i  a row of series["aggregation_weights"]
    c_i^k    upload.prototypes["class"]    h_i^k    upload.prototypes["statistics"]: p_k mu_k
    c^k      payload.prototypes["class"]   V_i      upload.scalars["variance"]

Deviations: the quadratic program is solved exactly by non-negative least squares on a factor made
in float64, positive semi-definite by construction, where the published code clips eigenvalues; a
class without a global prototype uses the client's own, where it stops (docs/methods/fedpac.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from fedmodels.config.bounds import Count, NonNegative, Share
from fedmodels.errors import PayloadError
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.embedding import embeddings
from fedmodels.nets.split import load_weights, weights_of
from fedmodels.numerics.algebra import class_means, nnls_simplex, weighted_mean
from fedmodels.numerics.prototypes import mean_prototypes
from fedmodels.tensors.announced import Announced
from fedmodels.tensors.bundle import Bundle, ClientId, Prototypes
from fedmodels.tensors.bundle_spec import BundleSpec, prototype_spec, scalar_spec
from fedmodels.tensors.uploads import Reduction, Uploads
from fedmodels.training.contexts import ClientContext, Metrics, ServerContext, ServerState
from fedmodels.training.method import Batch, Output, Phase
from fedmodels.training.run import RunFacts


@dataclass(frozen=True)
class Statistics:
    """What a client's examples look like to one model."""

    means: dict[int, tuple[Tensor, int]]
    """Mean feature (d,) and number of examples of each class it has."""
    h: Prototypes
    """p_k mu_k of each class."""
    variance: float
    """V: variance of the mean of one-hot label times feature, over the examples."""


@dataclass(frozen=True)
class References:
    """What a client knows before it trains."""

    received: Statistics
    targets: Tensor | None
    """Where features of each class are drawn to (K, d); None before there are global prototypes."""


@register("fedpac")
@dataclass(frozen=True, kw_only=True)
class FedPAC(FedAvg):
    """A shared base, aligned by class; each client gets the mixture of heads best for it."""

    citation: ClassVar[str] = "Xu et al., ICLR 2023"
    reduction: ClassVar[Reduction] = "each"

    lam: NonNegative = 1.0
    """Weight of the alignment to prototypes."""
    head_epochs: Count = 1
    """Epochs on the head alone, before the base's."""
    head_lr_factor: NonNegative = 10.0
    """The head's learning rate over the run's."""
    statistics: Literal["before", "after"] = "before"
    """Whether h and V describe the received model, as in the paper, or the trained one."""
    min_weight: Share = 1e-3
    """Aggregation weights below it become 0."""

    @property
    def views(self) -> tuple[str, ...]:
        return ("after_local", "after_downlink")

    def shares(self, name: str) -> bool:
        return name.startswith("base/")

    # --- server half ---------------------------------------------------------------------------

    def init_server(self, run: RunFacts) -> ServerState:
        nothing = {"class": Prototypes.of({}, run.width)}
        return ServerState(Bundle(self.shared(run.initial_weights), nothing))

    def broadcast(
        self, ctx: ServerContext, state: ServerState
    ) -> tuple[Bundle, Mapping[ClientId, Bundle]]:
        return state.common, {c: state.clients[c] for c in ctx.cohort if c in state.clients}

    def evaluation(
        self, ctx: ServerContext, state: ServerState
    ) -> tuple[Bundle, Mapping[ClientId, Bundle]]:
        return state.common, {c: state.clients[c] for c in state.clients}

    def upload_spec(self, run: RunFacts) -> BundleSpec:
        classes = run.problem.num_classes
        return (
            BundleSpec.of(Bundle(run.forms))
            | prototype_spec("class", run.width, classes)
            | prototype_spec("statistics", run.width, classes)
            | scalar_spec("num_examples", "variance")
        )

    def check_upload(
        self, ctx: ServerContext, state: ServerState, upload: Bundle, announced: Announced
    ) -> None:
        super().check_upload(ctx, state, upload, announced)
        if upload.scalars["variance"] < 0:
            raise PayloadError("tensor 'scalars/variance' is below zero")

    def payload_spec(self, run: RunFacts) -> tuple[BundleSpec, BundleSpec]:
        weights, classes = run.forms, run.problem.num_classes
        common = BundleSpec.of(Bundle(self.shared(weights)))
        own = {name: t for name, t in weights.items() if not self.shares(name)}
        return common | prototype_spec("class", run.width, classes), BundleSpec.of(Bundle(own))

    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        after = super().aggregate(ctx, state, uploads)  # theta <- sum_i n_i/n theta_i
        if after is state:
            return state
        own, classes = (
            {c: u.prototypes["class"] for c, u in uploads.items()},
            ctx.run.problem.num_classes,
        )
        prototypes = mean_prototypes(own, classes, ctx.run.width, uniform=False)  # c^k: n_ik / n_k
        common = Bundle(self.shared(after.common.weights), {"class": prototypes})
        return ServerState(common, state.own, state.clients)

    def finish(
        self, ctx: ServerContext, state: ServerState, uploads: Uploads
    ) -> tuple[ServerState, Metrics]:
        voters = {c: u for c, u in uploads.items() if u.scalars["num_examples"]}
        if not voters:
            return state, {}
        mixtures = self._mixtures(voters, ctx.run)
        heads = [
            {name: t for name, t in u.weights.items() if not self.shares(name)}
            for u in voters.values()
        ]
        own = {
            c: Bundle(weighted_mean(heads, mixture))  # phi_i = sum_j alpha_ij phi_j
            for c, mixture in zip(voters, mixtures, strict=True)
        }
        if len(voters) == len(ctx.cohort):
            ctx.series["aggregation_weights"] = mixtures
        return ServerState(state.common, state.own, {**state.clients, **own}), {}

    def _mixtures(self, voters: Mapping[int, Bundle], run: RunFacts) -> list[list[float]]:
        """Return alpha, a row on the simplex for each client (eq. 13).

        min over alpha of alpha^T (diag(V) + H_i H_i^T) alpha, where row j of H_i is h_i - h_j. With
        h^T = Q R, the columns of R are as far from each other as the rows of h are.
        """
        classes = run.problem.num_classes
        h = np.zeros((len(voters), classes, run.width))
        for row, (client, upload) in zip(h, voters.items(), strict=True):
            for k, (vector, _) in upload.prototypes["statistics"].rows().items():
                if not 0 <= k < classes:
                    raise PayloadError(f"client {client} reports statistics of class {k}")
                row[k] = vector.numpy()
        corner = np.asarray(np.linalg.qr(h.reshape(len(voters), -1).T, mode="r"))
        deviations = np.diag(np.sqrt([max(u.scalars["variance"], 0.0) for u in voters.values()]))
        mixtures = []
        for i in range(len(voters)):
            apart = corner[:, i, None] - corner
            apart[np.abs(apart) < 1e-12 * np.abs(corner).max()] = 0  # rounding of equal rows of h
            alpha = nnls_simplex(np.vstack([deviations, apart]))
            kept = np.where(alpha < self.min_weight, 0.0, alpha)
            kept = kept if kept.any() else alpha  # many alike clients have small weights each
            mixtures.append((kept / kept.sum()).tolist())
        return mixtures

    # --- client half ---------------------------------------------------------------------------

    def keeps_state(self, run: RunFacts) -> bool:
        return False  # the head is the server's until it comes down

    def init_client(self, run: RunFacts, client: int) -> Bundle:
        return Bundle()

    def load(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        load_weights(ctx.net, {**ctx.run.initial_weights, **payload.weights})

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> References:
        received = statistics_of(ctx)
        of_all, targets = payload.prototypes["class"].rows(), None
        if of_all:
            targets = torch.zeros(ctx.run.problem.num_classes, ctx.run.width, device=ctx.device)
            for k, (vector, _) in {**received.means, **of_all}.items():
                targets[k] = vector.to(ctx.device)
        return References(received, targets)

    def phases(self, ctx: ClientContext) -> Sequence[Phase]:
        training = ctx.run.experiment.training
        lr = training.lr * self.head_lr_factor
        return [
            Phase(epochs=self.head_epochs, trains=("head/",), lr=lr),
            Phase(epochs=training.local_epochs, trains=("base/",)),
        ]

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: References) -> Tensor:
        supervised = super().loss(ctx, batch, out, refs)
        if refs.targets is None:
            return supervised
        return supervised + self.lam * mse_loss(out.features, refs.targets[batch.y])  # eq. 6

    def after_local(self, ctx: ClientContext, payload: Bundle, state: Bundle, refs: Any) -> Bundle:
        return Bundle()

    def uplink(
        self, ctx: ClientContext, state: Bundle, refs: References, num_examples: int
    ) -> Bundle:
        trained = statistics_of(ctx)
        described = trained if self.statistics == "after" else refs.received
        return Bundle(
            weights_of(ctx.net),
            {"class": Prototypes.of(trained.means, ctx.run.width), "statistics": described.h},
            scalars={"num_examples": float(num_examples), "variance": described.variance},
        )


def statistics_of(ctx: ClientContext) -> Statistics:
    """Describe a client's training data as the net in its present state sees them (eq. 11, 12)."""
    x, y = ctx.stream.train(ctx.task)
    classes, width, n = ctx.run.problem.num_classes, ctx.run.width, len(y)
    if not n:
        return Statistics({}, Prototypes.of({}, width), 0.0)
    z = embeddings(ctx.net, x)  # (n, d)
    means = class_means(z, y, classes)
    h = {k: (mean.double() * (count / n), count) for k, (mean, count) in means.items()}
    squares = sum(float(row.square().sum()) for row, _ in h.values())
    variance = (float(z.double().square().sum(1).mean()) - squares) / n
    return Statistics(means, Prototypes.of(h, width), max(variance, 0.0))
