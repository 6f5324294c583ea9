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
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from fedmodels.config.bounds import Count, NonNegative, Share
from fedmodels.errors import PayloadError
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.split import embeddings, load_weights
from fedmodels.numerics.algebra import class_means, nnls_simplex
from fedmodels.tensors.bundle import Bundle, Prototypes
from fedmodels.tensors.bundle_spec import BundleSpec, prototype_spec, scalar_spec
from fedmodels.tensors.declared_counts import DeclaredCounts
from fedmodels.tensors.roles import of_role
from fedmodels.tensors.uploads import Reduction, Uploads
from fedmodels.tensors.weighted_mean import weighted_mean
from fedmodels.training.contexts import ClientContext, ServerContext, ServerState
from fedmodels.training.method import Payload, Reduced
from fedmodels.training.run import RunFacts
from fedmodels.training.stepped import Batch, Output, Phase


@dataclass(frozen=True)
class Statistics:
    """What a client's examples look like to one model."""

    means: dict[int, tuple[Tensor, int]]
    """Mean feature (d,) and number of examples of each class it has."""
    h: Prototypes
    """p_k mu_k of each class."""
    variance: float
    """V: variance of the mean of one-hot label times feature, over the examples."""


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


def mixtures(
    uploads: Mapping[int, Bundle], run: RunFacts, *, min_weight: float
) -> list[list[float]]:
    """Return alpha, a row on the simplex for each client (eq. 13).

    min over alpha of alpha^T (diag(V) + H_i H_i^T) alpha, where row j of H_i is h_i - h_j. With
    h^T = Q R, the columns of R are as far from each other as the rows of h are.

    Args:
        uploads: h in ``prototypes["statistics"]`` and V in ``scalars["variance"]`` of each client.
        run: the run.
        min_weight: weights below it become 0.

    Raises:
        PayloadError: a client reports statistics of a class that does not exist.
    """
    classes = run.problem.num_classes
    h = np.zeros((len(uploads), classes, run.width))
    for row, (client, upload) in zip(h, uploads.items(), strict=True):
        for k, (vector, _) in upload.prototypes["statistics"].rows().items():
            if not 0 <= k < classes:
                raise PayloadError(f"client {client} reports statistics of class {k}")
            row[k] = vector.numpy()
    corner = np.asarray(np.linalg.qr(h.reshape(len(uploads), -1).T, mode="r"))
    deviations = np.diag(np.sqrt([max(u.scalars["variance"], 0.0) for u in uploads.values()]))
    found = []
    for i in range(len(uploads)):
        apart = corner[:, i, None] - corner
        apart[np.abs(apart) < 1e-12 * np.abs(corner).max()] = 0  # rounding of equal rows of h
        alpha = nnls_simplex(np.vstack([deviations, apart]))
        kept = np.where(alpha < min_weight, 0.0, alpha)
        kept = kept if kept.any() else alpha  # many alike clients have small weights each
        found.append((kept / kept.sum()).tolist())
    return found


@dataclass(frozen=True)
class References:
    """What a client knows before it trains."""

    received: Statistics
    targets: Tensor | None
    """Where features of each class are drawn to (K, d); None before there are global prototypes."""


@register("fedpac")
class FedPAC(FedAvg):
    """A shared base, aligned by class; each client gets the mixture of heads best for it."""

    citation: ClassVar[str] = "Xu et al., ICLR 2023"
    takes_targets: ClassVar[bool] = False
    reads_singly: ClassVar[str] = "each client's head is mixed from the heads of others"
    views: ClassVar[tuple[str, ...]] = ("after_local", "after_downlink")
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

    # --- server half ---------------------------------------------------------------------------

    def init_server(self, run: RunFacts) -> ServerState:
        nothing = {"class": Prototypes.of({}, run.width)}
        return ServerState(Bundle(of_role(run.initial_weights, "base"), nothing))

    def broadcast(self, ctx: ServerContext, state: ServerState) -> Payload:
        return state.common, {c: state.clients[c] for c in ctx.cohort if c in state.clients}

    def payload_spec(self, run: RunFacts) -> tuple[BundleSpec, BundleSpec]:
        return super().payload_spec(run)[0], BundleSpec.of(Bundle(of_role(run.forms, "head")))

    def upload_spec(self, run: RunFacts) -> BundleSpec:
        width, classes = run.width, run.problem.num_classes
        c, h = (prototype_spec(level, width, classes) for level in ("class", "statistics"))
        return super().upload_spec(run) | c | h | scalar_spec("variance")

    def check_upload(
        self, ctx: ServerContext, state: ServerState, upload: Bundle, announced: DeclaredCounts
    ) -> None:
        super().check_upload(ctx, state, upload, announced)
        if upload.scalars["variance"] < 0:
            raise PayloadError("tensor 'scalars/variance' is below zero")

    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        mean = uploads.mean()
        if mean is None:
            return state
        theta = of_role(mean, "base")  # theta <- sum_i n_i/n theta_i
        classes, width = ctx.run.problem.num_classes, ctx.run.width
        c = uploads.mean_prototypes("class", classes, width, uniform=False)  # c^k: n_ik / n_k
        return ServerState(Bundle(theta, {"class": c}), state.own, state.clients)

    def finish(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> Reduced:
        voters = {c: u for c, u in uploads.items() if u.scalars["num_examples"]}
        if not voters:
            return state, {}
        alpha = mixtures(voters, ctx.run, min_weight=self.min_weight)  # eq. 13
        heads = [of_role(u.weights, "head") for u in voters.values()]
        own = {
            c: Bundle(weighted_mean(heads, row))  # phi_i = sum_j alpha_ij phi_j
            for c, row in zip(voters, alpha, strict=True)
        }
        if len(voters) == len(ctx.cohort):
            ctx.series["aggregation_weights"] = alpha
        return ServerState(state.common, state.own, {**state.clients, **own}), {}

    # --- client half ---------------------------------------------------------------------------

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
        head = Phase(self.head_epochs, ("head/",), lr=training.lr * self.head_lr_factor)
        return [head, Phase(training.local_epochs, ("base/",))]

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: References) -> Tensor:
        supervised = super().loss(ctx, batch, out, refs)
        if refs.targets is None:
            return supervised
        return supervised + self.lam * mse_loss(out.features, refs.targets[batch.y])  # eq. 6

    def uplink(self, ctx: ClientContext, state: Bundle, refs: References) -> Bundle:
        trained = statistics_of(ctx)
        told = trained if self.statistics == "after" else refs.received
        upload = super().uplink(ctx, state, refs)
        means = Prototypes.of(trained.means, ctx.run.width)
        scalars = {**upload.scalars, "variance": told.variance}
        return Bundle(upload.weights, {"class": means, "statistics": told.h}, scalars=scalars)
