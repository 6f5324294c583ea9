"""FedAvg — McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized
Data, AISTATS 2017, Algorithm 1. https://arxiv.org/abs/1602.05629

    paper   here                          paper   here
    w_t     state.common.weights          n_k     scalars["num_examples"]
    w_k     weights_of(ctx.net)           E, B    training.local_epochs, training.batch_size

What a method does unless it says otherwise is in ``training/method.py`` and ``stepped.py``. Here is
what FedAvg adds: weights travel and are averaged. Other methods override whole functions of them.

Deviations: buffers (batch-normalisation statistics) are averaged with the weights, integer
counters by their maximum; the paper's nets have none.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from torch import Tensor

from fedmodels.errors import ConfigError
from fedmodels.methods import register
from fedmodels.nets.split import begins, check_prefixes, load_weights, weights_of
from fedmodels.tensors.bundle import Bundle, Weights
from fedmodels.tensors.bundle_spec import BundleSpec, scalar_spec
from fedmodels.tensors.uploads import Reduction, Uploads
from fedmodels.training.contexts import ClientContext, ServerContext, ServerState
from fedmodels.training.loop import EpochLoop
from fedmodels.training.run import RunFacts
from fedmodels.training.stepped import Stepped


@register("fedavg")
class FedAvg(Stepped):
    """Clients train from the same weights; the server takes the weighted mean."""

    citation: ClassVar[str] = "McMahan et al., AISTATS 2017"
    reduction: ClassVar[Reduction] = "mean"

    weighting: Literal["examples", "uniform"] = "examples"
    """Aggregation weights over the clients that answered: n_k / n, or 1 / their number."""

    @property
    def private(self) -> tuple[str, ...]:
        """Return the prefixes of the weights that stay with their client, such as ``head/``."""
        return ()

    @property
    def views(self) -> tuple[str, ...]:
        return ("after_local", "after_downlink") if self.private else super().views

    def shares(self, run: RunFacts, name: str) -> bool:
        """Tell whether the weight of this role-prefixed name travels; other weights are private."""
        return not begins(name, self.private)

    def shared(self, run: RunFacts, weights: Weights) -> Weights:
        """Return the part of a net's weights that travels."""
        kept = [name for name in weights if self.shares(run, name)]
        return weights if len(kept) == len(weights) else {name: weights[name] for name in kept}

    def global_weights(self, common: Bundle) -> Weights:
        """Return the global model's weights, of the common part of a payload or of the state."""
        return common.weights

    # --- server half ---------------------------------------------------------------------------

    def init_server(self, run: RunFacts) -> ServerState:
        check_prefixes(run.forms, self.private, "private")
        return ServerState(Bundle(weights=self.shared(run, run.initial_weights)))  # w_0

    def upload_spec(self, run: RunFacts) -> BundleSpec:
        shared = Bundle(weights=self.shared(run, run.forms))
        return BundleSpec.of(shared) | scalar_spec("num_examples")

    def count(self, upload: Bundle) -> float:
        """Return n_k; or 1, but 0 of a client that says it has no example."""
        n = upload.scalars.get("num_examples", 1.0)
        return n if self.weighting == "examples" else float(n > 0)

    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        mean = uploads.mean()  # w_{t+1} = sum_k n_k/n w_k
        return state if mean is None else ServerState(Bundle(mean), state.own, state.clients)

    # --- client half ---------------------------------------------------------------------------

    def init_client(self, run: RunFacts, client: int) -> Bundle:
        private = [key for key in run.forms if not self.shares(run, key)]
        return Bundle(weights={key: run.initial_weights[key] for key in private})

    def load(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        received = self.global_weights(payload)
        own = state.weights.items()
        private = {key: w for key, w in own if not self.shares(ctx.run, key)}
        weights = {**received, **private} if private else received
        if ctx.view == "global" and (missing := sorted(ctx.net.tensors().keys() - weights.keys())):
            raise ConfigError(
                f"{type(self).__name__} has no global model: what travels lacks {missing[0]!r} "
                f"({len(missing)} in all); let views leave out 'global', or override load"
            )
        load_weights(ctx.net, weights)

    def fit(self, ctx: ClientContext, x: Tensor, y: Tensor, refs: Any) -> float:
        return EpochLoop(self, ctx, x, y, refs).run()

    def after_local(self, ctx: ClientContext, state: Bundle, refs: Any) -> Bundle:
        own = state.weights.keys()
        private = weights_of(ctx.net, lambda key: key in own and not self.shares(ctx.run, key))
        return Bundle(weights=private)

    def uplink(self, ctx: ClientContext, state: Bundle, refs: Any) -> Bundle:
        scalars = {"num_examples": float(ctx.num_examples)}
        return Bundle(weights=self.shared(ctx.run, weights_of(ctx.net)), scalars=scalars)
