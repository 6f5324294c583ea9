"""CReFF — Shang et al., Federated Learning on Heterogeneous and Long-Tailed Data via Classifier
Re-Training with Federated Features, IJCAI 2022. https://arxiv.org/abs/2204.13399

    paper                       here                    paper           here
    w^t, the trained model      weights base/ head/     m features      num_features
    phi-hat, re-trained head    weights retrained/      match_epoch     match_steps
    g_c, real gradients         prototypes gradient     crt_epoch       crt_epochs
    federated features          own features            batch_real      gradient_batch

The re-trained head predicts, and is what the next gradients are taken at; training goes on from the
trained head, so the trajectory of ``base/`` and ``head/`` is FedAvg's.

Deviations: gradients are taken without the released code's augmentation, which it seeds from the
clock; the features of classes that nobody has reported yet, noise still, are left out of
re-training (``mask_unknown = false`` lets them take part, as released).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

from fedmodels.config.bounds import Count, NonNegative, PositiveCount
from fedmodels.errors import ConfigError
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.split import embeddings, load_weights
from fedmodels.numerics.randomness import derive_seed, generator, seeded
from fedmodels.tensors.bundle import Bundle, Prototypes, Weights
from fedmodels.tensors.bundle_spec import BundleSpec, prototype_spec
from fedmodels.tensors.uploads import Reduction, Uploads
from fedmodels.training.contexts import ClientContext, ServerContext, ServerState
from fedmodels.training.method import Reduced
from fedmodels.training.run import RunFacts

HEAD = ("head/weight", "head/bias")
RETRAINED = ("retrained/weight", "retrained/bias")
EPSILON = 1e-6
"""The least norm that a cosine divides by."""


def class_gradients(z: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the mean cross-entropy gradient of a linear head, W and b side by side.

    Args:
        z: embeddings (C, m, d) of C classes.
        y: the class of each (C,).
        weight: W (K, d).
        bias: b (K,).

    Returns:
        (C, K, d + 1); differentiable in ``z``.
    """
    error = linear(z, weight, bias).softmax(-1) - torch.eye(len(bias))[y][:, None]  # (C, m, K)
    of_weight = torch.einsum("cmk,cmd->ckd", error, z) / z.shape[1]
    return torch.cat([of_weight, error.mean(1)[..., None]], -1)


def cosines(found: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines of the rows of W and of b, one row, and the slope of all 1 - cosine.

    Args:
        found: gradients (C, K, d + 1).
        wanted: those that they should point along.

    Returns:
        (C, K + 1), and (C, K, d + 1).
    """
    rows = [
        _cosine(found[..., :-1], wanted[..., :-1], -1),
        _cosine(found[..., -1:], wanted[..., -1:], 1),
    ]
    cosine = torch.cat([rows[0][0].flatten(1), rows[1][0].flatten(1)], 1)
    return cosine, torch.cat([slope for _, slope in rows], -1)


def _cosine(a: Tensor, b: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Return the cosine along an axis, and the slope of 1 - cosine at ``a``."""
    unit = b / b.norm(dim=axis, keepdim=True).clamp_min(EPSILON)
    size = a.norm(dim=axis, keepdim=True).clamp_min(EPSILON)
    cosine = (a * unit).sum(axis, keepdim=True) / size
    return cosine, (cosine * normalize(a, dim=axis, eps=1e-30) - unit) / size


@register("creff")
class CReFF(FedAvg):
    """FedAvg whose head is re-trained on the server, on features that match clients' gradients."""

    citation: ClassVar[str] = "Shang et al., IJCAI 2022"
    takes_targets: ClassVar[bool] = False
    local_view: ClassVar[str] = "global"  # all clients get one model
    reduction: ClassVar[Reduction] = "each"

    num_features: PositiveCount = 100
    """m, federated features of each class."""
    match_steps: Count = 100
    """Steps on the features in each interaction."""
    crt_epochs: Count = 300
    """Epochs of re-training the head; 0 leaves it as it is."""
    crt_batch_size: PositiveCount = 32
    """Batch of re-training; larger ones are faster with many classes."""
    lr_feature: NonNegative = 0.1
    """Learning rate of the features."""
    lr_net: NonNegative = 0.01
    """Learning rate of re-training."""
    gradient_batch: PositiveCount = 32
    """Examples of a class behind one gradient, at most."""
    gradient_draws: PositiveCount = 10
    """Gradients averaged for a class."""
    mask_unknown: bool = True
    """Whether re-training leaves out the features of unreported classes."""

    # --- server half ---------------------------------------------------------------------------

    def init_server(self, run: RunFacts) -> ServerState:
        net, classes = run.make_net(), run.problem.num_classes
        if not isinstance(net.head, nn.Linear) or net.head.bias is None:
            name = run.experiment.net.name
            raise ConfigError(f"creff needs a net whose head is one linear layer, unlike {name!r}")
        first = generator(derive_seed(run.experiment.seed, "server", 0, "method"))
        noise = torch.randn(classes, self.num_features, net.width, generator=first)
        weights = run.initial_weights
        heads = {new: weights[old] for new, old in zip(RETRAINED, HEAD, strict=True)}
        own = {"features": noise, "known": torch.zeros(classes, dtype=torch.bool)}
        return ServerState(Bundle(weights={**weights, **heads}), Bundle(weights=own))

    def upload_spec(self, run: RunFacts) -> BundleSpec:
        weight, bias = (run.forms[key] for key in HEAD)
        width = weight.numel() + bias.numel()
        return super().upload_spec(run) | prototype_spec("gradient", width, len(bias))

    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        mean = super().aggregate(ctx, state, uploads).common.weights
        return replace(state, common=Bundle(weights={**state.common.weights, **mean}))

    def finish(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> Reduced:
        weight, bias = (state.common.weights[key] for key in RETRAINED)
        wanted = self._mean_gradients(uploads, weight)
        features, known = state.own.weights["features"], state.own.weights["known"].clone()
        known[list(wanted)] = True
        metrics = {}
        if wanted and self.match_steps:
            features, metrics["gradient_cosine"] = self._match(features, wanted, weight, bias)
        if self.crt_epochs and (bool(known.any()) or not self.mask_unknown):
            weight, bias = self._retrained(ctx, features, known)
        heads = dict(zip(RETRAINED, (weight, bias), strict=True))
        common = Bundle(weights={**state.common.weights, **heads})
        own = Bundle(weights={"features": features, "known": known})
        return replace(state, common=common, own=own), metrics

    def _mean_gradients(self, uploads: Uploads, weight: Tensor) -> dict[int, Tensor]:
        """Return the mean over clients of the gradients of each reported class, (K, d + 1)."""
        classes, width = len(weight), weight.numel() + len(weight)
        found = uploads.mean_prototypes("gradient", classes, width, uniform=True)
        return {k: row.view(classes, -1) for k, (row, _) in found.rows().items()}

    @torch.no_grad()
    def _match(
        self, features: Tensor, wanted: Mapping[int, Tensor], weight: Tensor, bias: Tensor
    ) -> tuple[Tensor, float]:
        """Move the features of reported classes to where the head's gradients are the real ones.

        Returns:
            All features, and the mean cosine between gradients before the last step.
        """
        classes, target = torch.tensor(list(wanted)), torch.stack(list(wanted.values()))
        z, m, moved = features[classes], features.shape[1], features.clone()
        onehot = torch.eye(len(bias))[classes][:, None]
        for _ in range(self.match_steps):
            p = linear(z, weight, bias).softmax(-1)  # (C, m, K)
            error = p - onehot
            found = torch.cat([error.mT @ z, error.sum(1)[..., None]], -1) / m
            cosine, slope = cosines(found, target)
            along, of_bias = slope[..., :-1] / m, slope[..., -1] / m
            back = z @ along.mT + of_bias[:, None]  # to the error, and through the softmax
            back = p * (back - (p * back).sum(-1, keepdim=True))
            z.baddbmm_(error, along, alpha=-self.lr_feature)
            z.view(-1, z.shape[-1]).addmm_(back.flatten(0, 1), weight, alpha=-self.lr_feature)
        moved[classes] = z
        return moved, float(cosine.mean())

    @torch.no_grad()
    def _retrained(
        self, ctx: ServerContext, features: Tensor, known: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return W and b of a fresh head after SGD on the features; gradients in closed form."""
        with seeded(ctx.seed("init")):
            fresh = nn.Linear(features.shape[-1], len(known))
        use = torch.arange(len(known)) if not self.mask_unknown else known.nonzero()[:, 0]
        z = features[use].flatten(0, 1)  # (C m, d)
        x, w = (
            _with_column(*pair) for pair in ((z, z.new_ones(len(z))), (fresh.weight, fresh.bias))
        )
        labels = use.repeat_interleave(features.shape[1]).numpy()
        onehot = np.eye(len(known), dtype=x.dtype)[labels]
        order = ctx.generator("method")
        for _ in range(self.crt_epochs):
            permuted = torch.randperm(len(z), generator=order).numpy()
            for first in range(0, len(z), self.crt_batch_size):
                index = permuted[first : first + self.crt_batch_size]
                batch = x[index]
                error = batch @ w.T  # logits (B, K)
                np.exp(error - error.max(1, keepdims=True), out=error)
                error /= error.sum(1, keepdims=True)
                error -= onehot[index]
                error *= self.lr_net / len(index)
                w -= error.T @ batch
        trained = torch.from_numpy(w)
        return trained[:, :-1].clone(), trained[:, -1].clone()

    # --- client half ---------------------------------------------------------------------------

    def load(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        if ctx.view == "global":
            return super().load(ctx, payload, state)
        load_weights(ctx.net, _net_weights(payload))  # training goes on from the trained head

    def global_weights(self, common: Bundle) -> Weights:
        heads = {old: common.weights[new] for new, old in zip(RETRAINED, HEAD, strict=True)}
        return {**_net_weights(common), **heads}

    @torch.no_grad()
    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> Prototypes:
        """Return g_c of each class of the task, at the received extractor and re-trained head."""
        weight, bias = (payload.weights[key] for key in RETRAINED)
        x, y = ctx.stream.train(ctx.task)
        features, y = embeddings(ctx.net, x).cpu(), y.cpu()
        draw, rows = ctx.generator("method"), {}
        for k, count in enumerate(torch.bincount(y, minlength=len(bias)).tolist()):
            if count:
                z = features[y == k]
                size = min(count, self.gradient_batch)
                picks = [
                    torch.randperm(count, generator=draw)[:size] for _ in range(self.gradient_draws)
                ]
                label = torch.full((len(picks),), k)
                mean = class_gradients(z[torch.stack(picks)], label, weight, bias).mean(0)
                rows[k] = mean.flatten(), count
        return Prototypes.of(rows, weight.numel() + bias.numel())

    def uplink(self, ctx: ClientContext, state: Bundle, refs: Prototypes) -> Bundle:
        upload = super().uplink(ctx, state, refs)
        return replace(upload, prototypes={"gradient": refs})


def _with_column(rows: Tensor, last: Tensor) -> NDArray[Any]:
    """Return a matrix with one more column for NumPy, where a small step costs half as much."""
    return torch.cat([rows, last[:, None]], 1).numpy()


def _net_weights(payload: Bundle) -> Weights:
    return {k: v for k, v in payload.weights.items() if k not in RETRAINED}
