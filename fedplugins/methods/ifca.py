"""IFCA — Ghosh, Chung, Yin, Ramchandran, An Efficient Framework for Clustered Federated Learning,
NeurIPS 2020, Algorithm 1 with option II (model averaging). https://arxiv.org/abs/2006.04088

    paper      here                               paper     here
    k          models                             tau       training.local_epochs
    theta_j    weights "model{j}/…"               M_t       ctx.cohort
    j-hat      the model in ctx.net               s_i       the names of an upload's weights
    F_i        mean loss of the task's examples   layers of all clusters    common

Deviations: statistics of batch normalisation belong to their layer; a model that nobody trained
stays as it is; clients are scored with the model of least loss on what they train on, where the
paper's experiments look at the loss on test data (docs/methods/ifca.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedmodels.config.bounds import PositiveCount
from fedmodels.errors import ConfigError
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.split import check_prefixes, load_weights, weights_of
from fedmodels.techniques.several_models import losses_of, role_in, side_by_side
from fedmodels.tensors.bundle import Bundle, Weights
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.declared_counts import DeclaredCounts
from fedmodels.tensors.roles import of_role, part_of
from fedmodels.tensors.uploads import Reduction, Uploads
from fedmodels.training.contexts import ClientContext, ServerContext, ServerState
from fedmodels.training.method import Reduced
from fedmodels.training.run import RunFacts

NO_TASK = -1.0
"""Of a client that has not trained."""


@register("ifca")
class Ifca(FedAvg):
    """Clients train the one of k models that fits their data best; each model has its own mean."""

    citation: ClassVar[str] = "Ghosh et al., NeurIPS 2020"
    takes_targets: ClassVar[bool] = True
    views: ClassVar[tuple[str, ...]] = ("after_local", "after_downlink")  # k of them, none global
    reduction: ClassVar[Reduction] = "each"

    models: PositiveCount = 2
    """k, the models; 1 is FedAvg with uniform weights."""
    common: tuple[str, ...] = ()
    """Prefixes of the weights that all models have in common, such as ``base/``: weight sharing."""
    weighting: Literal["examples", "uniform"] = "uniform"

    # --- server half ---------------------------------------------------------------------------

    def init_server(self, run: RunFacts) -> ServerState:
        self._check_common(run.forms)
        others = (run.make_net(role=f"model{j}") for j in range(1, self.models))
        return ServerState(self._laid_out([run.initial_weights, *map(weights_of, others)]))

    def payload_spec(self, run: RunFacts) -> tuple[BundleSpec, BundleSpec]:
        return BundleSpec.of(self._laid_out([run.forms] * self.models)), BundleSpec()

    def upload_spec(self, run: RunFacts) -> BundleSpec:
        every = self.payload_spec(run)[0].required
        all_have = super().upload_spec(run).required
        required = {k: spec for k, spec in all_have.items() if k in every or "scalars/" in k}
        return BundleSpec(required, {k: spec for k, spec in every.items() if k not in required})

    def check_upload(
        self, ctx: ServerContext, state: ServerState, upload: Bundle, announced: DeclaredCounts
    ) -> None:
        super().check_upload(ctx, state, upload, announced)
        role_in(upload, self._own(ctx.run.forms))

    def _laid_out(self, models: list[Weights]) -> Bundle:
        """Return the weights of all models, and those that they have in common."""
        common = {k: t for k, t in models[0].items() if self._is_common(k)}
        return Bundle({**common, **side_by_side("model", [*map(self._own, models)])})

    def _check_common(self, forms: Weights) -> None:
        """Check that prefixes name some weights, and not all; ConfigError otherwise."""
        check_prefixes(forms, self.common, "common")
        if not self._own(forms):
            raise ConfigError(
                "[method] common names all weights of the net, so there is only one model: "
                "leave some out, or use fedavg"
            )

    def _is_common(self, name: str) -> bool:
        return bool(self.common) and name.startswith(self.common)

    def _own(self, weights: Weights) -> Weights:
        """Return the part of a model's weights that no other model has."""
        return {k: t for k, t in weights.items() if not self._is_common(k)}

    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        groups: dict[str, dict[int, Weights]] = {}
        for client, upload in uploads.items():
            role = role_in(upload, self._own(ctx.run.forms))  # s_i
            groups.setdefault(role, {})[client] = of_role(upload.weights, role)
            if self.common:
                rest = {k: t for k, t in upload.weights.items() if self._is_common(k)}
                groups.setdefault("", {})[client] = rest
        means = uploads.means(groups)  # sum_i s_ij theta_i / sum_i s_ij
        moved = {key: tensor for mean in means.values() for key, tensor in mean.items()}
        return replace(state, common=Bundle({**state.common.weights, **moved}))

    def models_of(self, ctx: ServerContext, upload: Bundle) -> Sequence[str]:
        return (role_in(upload, self._own(ctx.run.forms)),)

    def finish(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> Reduced:
        own = self._own(ctx.run.forms)
        trained = {role_in(upload, own) for upload in uploads.values() if self.count(upload)}
        return state, {"models_trained": len(trained) / self.models}

    # --- client half ---------------------------------------------------------------------------

    def init_client(self, run: RunFacts, client: int) -> Bundle:
        return Bundle(scalars={"model": 0.0, "task": NO_TASK})

    def load(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        load_weights(ctx.net, self._model(payload, ctx.once(self._best, payload, state)))

    def _model(self, payload: Bundle, j: int) -> Weights:
        common = {k: t for k, t in payload.weights.items() if self._is_common(k)}
        return {**common, **part_of(payload.weights, f"model{j}")}

    def _best(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> int:
        """Return j-hat = argmin_j F_i(theta_j).

        A client that is scored on a task before it trains on it keeps the model that it had.
        """
        x, y = ctx.stream.train(ctx.task)
        if not len(y) or (ctx.view and state.scalars["task"] not in (NO_TASK, ctx.task)):
            return int(state.scalars["model"])
        models = [self._model(payload, j) for j in range(self.models)]
        return int(losses_of(ctx, models, x, y).double().mean(0).nan_to_num(float("inf")).argmin())

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> Tensor:
        return torch.tensor(ctx.once(self._best, payload, state))

    def after_local(self, ctx: ClientContext, state: Bundle, refs: Tensor) -> Bundle:
        return Bundle(scalars={"model": float(refs), "task": float(ctx.task)})

    def uplink(self, ctx: ClientContext, state: Bundle, refs: Tensor) -> Bundle:
        sent = super().uplink(ctx, state, refs)
        common = {k: t for k, t in sent.weights.items() if self._is_common(k)}
        own = {f"model{int(refs)}/{k}": t for k, t in self._own(sent.weights).items()}
        return replace(sent, weights={**common, **own})
