"""pFedGraph-replay — pFedGraph whose clients replay the classes they met, as in pFedGRP.
Tan and Liu, https://arxiv.org/abs/2410.01502v2, section 5

    paper       here                                paper       here
    theta_i     clients[i].weights                  A_{i,c}     private generators, one a class
    u_i         clients[i].weights "neighbours/…"   alpha, lam  alpha, lam

Generators never leave a client. The personal model filters; the model trained from it says which
generators are trained again. Deviations: docs/methods/pfedgraph.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedmodels.collaboration import (
    ROWS,
    collaborated,
    graph_metrics,
    likeness,
    model_spec,
    own_model,
    personal_models,
    reference_in,
)
from fedmodels.generators import Arch, Family
from fedmodels.method import (
    Batch,
    ClientContext,
    Metrics,
    Output,
    Run,
    ServerContext,
    ServerState,
)
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.split import load_weights
from fedmodels.replay import ClassReplay, Rehearsal
from fedmodels.types import Bundle, BundleSpec, ClientId, Histogram, Weights


@register("pfedgraph-replay")
@dataclass(frozen=True, kw_only=True)
class PFedGraphReplay(FedAvg):
    """pFedGraph with class replay; no alignment."""

    citation: ClassVar[str] = "Tan and Liu, arXiv 2410.01502v2, baseline"

    alpha: float = 0.8
    """How much the data shares count against likeness; 0 is likeness alone."""
    lam: float = 0.01
    """Weight of the likeness to the neighbours in the local loss."""
    similarity: Literal["all", "head"] = "all"
    """Parameters that are compared."""
    official_sign: bool = False
    """Repel, as all official ports do by their sign, instead of attract, as the paper says."""
    cap: Literal["total", "generated"] = "total"
    """What the largest real class bounds: real and replayed examples together, or replayed ones."""
    replay_filter: bool = True
    """Keep only images that the personal model takes for their class."""
    replay_attempts: int = 10
    """Images drawn at most for one that is wanted."""
    shortage: Literal["truncate", "fill_top"] = "truncate"
    """Go without what the filter rejects, or take the rejected images nearest to the class."""
    th_g: float = 0.25
    """TH_G: a generator is trained again when less of it is recognised."""
    n_check: int = 200
    """Images drawn for that."""
    generator_update: Literal["drift", "always"] = "drift"
    """Train below th_g, or at every encounter."""
    generator_arch: Arch = "wgan"
    """WGAN-GP, its DCGAN form, or a diffusion model sampled by DPM-Solver."""
    generator_width: int = 0
    """Channels; 0 is 16 for GANs (CIFAR-10: 64), 32 for diffusion."""
    generator_epochs: int = 0
    """Epochs of one training; 0 is 200 for GANs (CIFAR-10: 1000), 6000 for diffusion."""
    generator_batch: int = 64
    """Batch size of training and of drawing."""

    @property
    def views(self) -> tuple[str, ...]:
        return ("after_local", "after_downlink")

    def replay(self, run: Run) -> ClassReplay:
        """Return how replay is done."""
        family = Family(
            input_shape=run.problem.input_shape,
            arch=self.generator_arch,
            width=self.generator_width,
            epochs=self.generator_epochs,
            batch_size=self.generator_batch,
        )
        return ClassReplay(
            family=family,
            filtered=self.replay_filter,
            attempts=self.replay_attempts,
            shortage=self.shortage,
            update=self.generator_update,
            th_g=self.th_g,
            n_check=self.n_check,
            cap=self.cap,
            batch=self.generator_batch,
        )

    # --- server half ---------------------------------------------------------------------------

    def init_server(self, run: Run) -> ServerState:
        return ServerState(Bundle())

    def broadcast(
        self, ctx: ServerContext, state: ServerState
    ) -> tuple[Bundle, Mapping[ClientId, Bundle]]:
        return state.common, personal_models(ctx.run, state, ctx.cohort)

    def evaluation(
        self, ctx: ServerContext, state: ServerState
    ) -> tuple[Bundle, Mapping[ClientId, Bundle]]:
        everybody = range(ctx.run.experiment.schedule.clients)
        return state.common, personal_models(ctx.run, state, everybody)

    def payload_spec(self, run: Run) -> tuple[BundleSpec, BundleSpec]:
        return BundleSpec(), model_spec(run)

    def aggregate(
        self, ctx: ServerContext, state: ServerState, uploads: Mapping[int, Bundle]
    ) -> ServerState:
        return collaborated(ctx, state, uploads, self.alpha, self.similarity)

    def finish(
        self, ctx: ServerContext, state: ServerState, uploads: Mapping[int, Bundle]
    ) -> tuple[ServerState, Metrics]:
        if not uploads:
            return state, {}
        return state, graph_metrics(ctx, state.own.weights[ROWS], uploads)

    # --- client half ---------------------------------------------------------------------------

    def load(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        load_weights(ctx.net, own_model(payload.weights))

    def keeps_state(self, run: Run) -> bool:
        return True

    def init_client(self, run: Run, client: int) -> Bundle:
        nobody = torch.zeros(run.problem.num_classes, dtype=torch.int32)
        return Bundle(histogram=Histogram(nobody, nobody.clone()))

    def prepare(
        self, ctx: ClientContext, payload: Bundle, state: Bundle
    ) -> tuple[Rehearsal, Weights | None]:
        return self.replay(ctx.run).prepared(ctx, state), reference_in(payload.weights, ctx.device)

    def training_data(
        self, ctx: ClientContext, refs: tuple[Rehearsal, Weights | None]
    ) -> tuple[Tensor, Tensor]:
        return refs[0].training_data()

    def loss(
        self,
        ctx: ClientContext,
        batch: Batch,
        out: Output,
        refs: tuple[Rehearsal, Weights | None],
    ) -> Tensor:
        plain = super().loss(ctx, batch, out, refs)
        if refs[1] is None or not self.lam:
            return plain
        sign = 1 if self.official_sign else -1
        return plain + sign * self.lam * likeness(ctx.net, refs[1])  # eq. 5

    def after_local(
        self,
        ctx: ClientContext,
        payload: Bundle,
        state: Bundle,
        refs: tuple[Rehearsal, Weights | None],
    ) -> Bundle:
        return self.replay(ctx.run).kept(ctx, state, refs[0])
