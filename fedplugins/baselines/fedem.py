"""FedEM — Marfoq et al., Federated Multi-Task Learning under a Mixture of Distributions,
NeurIPS 2021, Algorithm 1. https://arxiv.org/abs/2108.10252

    paper       here                                paper       here
    theta_m     weights "learner{m}/…"              pi_m        private weights["pi"]
    q_s(m)      refs.q (n, M)                       l           cross-entropy, in evaluation mode

Deviations: a learner's mean is over the clients that answered; the loss is that of the run's local
epochs with q fixed; see docs/methods/fedem.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedmodels.config.bounds import PositiveCount
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.split import load_weights, weights_of
from fedmodels.techniques.several_models import logits_of, losses_of, placed, side_by_side
from fedmodels.tensors.bundle import Bundle, Weights
from fedmodels.tensors.bundle_spec import BundleSpec, scalar_spec
from fedmodels.tensors.roles import part_of
from fedmodels.training.contexts import ClientContext, ServerState
from fedmodels.training.loop import EpochLoop
from fedmodels.training.method import Scores
from fedmodels.training.run import RunFacts
from fedmodels.training.stepped import Batch, Output


@dataclass
class FedEmReferences:
    """References of the loss in one interaction."""

    learners: list[Weights]
    """theta_m as received; training replaces them one after the other."""
    pi: Tensor  # (M,) float64
    q: Tensor  # (n, M)
    now: int = 0
    """The learner that trains."""


@register("fedem")
class FedEM(FedAvg):
    """Every client's data come from a mixture; all clients learn its components together."""

    citation: ClassVar[str] = "Marfoq et al., NeurIPS 2021"
    takes_targets: ClassVar[bool] = False
    views: ClassVar[tuple[str, ...]] = ("after_downlink",)  # a mixture has no single net
    rules: ClassVar[tuple[str, ...]] = ("mixture",)  # of all learners

    learners: PositiveCount = 3
    """M, the components."""
    mixture: Literal["trained", "received"] = "trained"
    """The pi that predicts: that of the last training, as Algorithm 1 leaves it; or one estimated
    anew under the learners that came back from the server, as appendix B of pFedGRP's paper
    describes FedEM: docs/results/continual.md has both."""

    # --- server half ---------------------------------------------------------------------------

    def init_server(self, run: RunFacts) -> ServerState:
        return ServerState(Bundle(weights=self._initial(run)))

    def upload_spec(self, run: RunFacts) -> BundleSpec:
        return self._spec(run) | scalar_spec("num_examples")

    def payload_spec(self, run: RunFacts) -> tuple[BundleSpec, BundleSpec]:
        return self._spec(run), BundleSpec()

    def _spec(self, run: RunFacts) -> BundleSpec:
        return BundleSpec.of(Bundle(side_by_side("learner", [run.forms] * self.learners)))

    def _initial(self, run: RunFacts) -> Weights:
        """Return M different sets of weights: equal learners would stay equal for ever."""
        others = (run.make_net(role=f"learner{m}") for m in range(1, self.learners))
        return side_by_side("learner", [run.initial_weights, *map(weights_of, others)])

    # --- client half ---------------------------------------------------------------------------

    def init_client(self, run: RunFacts, client: int) -> Bundle:
        return Bundle(weights={"pi": torch.full((self.learners,), 1 / self.learners).double()})

    def load(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        pi = self._mixture(ctx, payload, state)
        load_weights(ctx.net, self._learners(payload)[int(pi.argmax())])

    def _learners(self, payload: Bundle) -> list[Weights]:
        return [part_of(payload.weights, f"learner{m}") for m in range(self.learners)]

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> FedEmReferences:
        learners, pi = self._learners(payload), state.weights["pi"]
        q = self._explained(ctx, learners, pi)  # E step
        return FedEmReferences(learners, _mean(q, pi), q.float())  # M step

    def _explained(self, ctx: ClientContext, learners: list[Weights], pi: Tensor) -> Tensor:
        """Return q (n, M) of the task's training examples under learners."""
        x, y = ctx.stream.train(ctx.task)
        if not len(y):
            return torch.zeros(0, self.learners)
        return responsibilities(losses_of(ctx, learners, x, y), pi)

    def _mixture(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> Tensor:
        """Return the pi (M,) that predicts."""
        pi = state.weights["pi"]
        if self.mixture == "trained" or not ctx.view:  # a client about to train has its own E step
            return pi
        return _mean(self._explained(ctx, self._learners(payload), pi), pi)

    @property
    def steps_per_batch(self) -> int:
        return self.learners

    def fit(self, ctx: ClientContext, x: Tensor, y: Tensor, refs: FedEmReferences) -> float:
        total = 0.0
        for m, start in enumerate(list(refs.learners)):
            refs.now = m
            load_weights(ctx.net, start)
            total += EpochLoop(self, ctx, x, y, refs).run()
            refs.learners[m] = weights_of(ctx.net)
        return total

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: FedEmReferences) -> Tensor:
        q = refs.q[batch.index, refs.now]
        return (q * cross_entropy(out.logits, batch.y, reduction="none")).mean()

    def after_local(self, ctx: ClientContext, state: Bundle, refs: FedEmReferences) -> Bundle:
        return Bundle(weights={"pi": refs.pi.clone()})

    def uplink(self, ctx: ClientContext, state: Bundle, refs: FedEmReferences) -> Bundle:
        scalars = {"num_examples": float(ctx.num_examples)}
        return Bundle(side_by_side("learner", refs.learners), scalars=scalars)

    def predict(self, ctx: ClientContext, payload: Bundle, state: Bundle, x: Tensor) -> Scores:
        pi, learners = ctx.once(self._model, payload, state)
        parts = [logits_of(ctx, learner, x).softmax(1) for learner in learners]
        mixture = torch.stack([p * part for p, part in zip(pi, parts, strict=True)]).sum(0)
        return {"mixture": mixture.clamp_min(1e-30).log()}  # logs, for the loss

    def _model(
        self, ctx: ClientContext, payload: Bundle, state: Bundle
    ) -> tuple[list[float], list[dict[str, Tensor]]]:
        """Return the pi (M,) that predicts, and the learners."""
        learners = [placed(ctx, learner) for learner in self._learners(payload)]
        return self._mixture(ctx, payload, state).tolist(), learners


def responsibilities(losses: Tensor, pi: Tensor) -> Tensor:
    """Return q (n, M), proportional to ``pi_m exp(-l_m)``, of losses (n, M) and pi (M,)."""
    return (pi.to(losses.device).log() - losses.double()).softmax(1)


def _mean(q: Tensor, pi: Tensor) -> Tensor:
    """Return the mean responsibilities (M,); ``pi`` where there is no example."""
    return q.mean(0).cpu() if len(q) else pi
