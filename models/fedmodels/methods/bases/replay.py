"""The base of the methods with class replay: FedAvg whose clients hold private generators.

Tan and Liu (pFedGRP), arXiv 2410.01502v2, section 4. The replay itself is
:mod:`fedmodels.techniques.class_replay`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedmodels.config.bounds import Count, NonNegative, PositiveCount
from fedmodels.methods.fedavg import FedAvg
from fedmodels.techniques.class_replay import METRICS, ClassReplay, Rehearsal
from fedmodels.techniques.generators import Arch, Family
from fedmodels.tensors.bundle import Bundle, Histogram
from fedmodels.training.contexts import ClientContext
from fedmodels.training.pictures import Picture
from fedmodels.training.run import RunFacts


@dataclass(frozen=True, kw_only=True)
class GenerativeReplay(FedAvg):
    """FedAvg whose clients replay the classes they met; its fields are settings of the replay."""

    replays: ClassVar[bool] = True
    replaces_old_data: ClassVar[bool] = True
    trains_together: ClassVar[bool] = False

    cap: Literal["total", "generated"] = "total"
    """The largest real class bounds every class: its real and replayed examples together, or its
    replayed ones alone."""
    replay_filter: bool = True
    """Keep only images that the received model takes for their class (false: ablation AS1)."""
    replay_attempts: PositiveCount = 10
    """Limit of images drawn for each one that is wanted."""
    shortage: Literal["truncate", "fill_top"] = "truncate"
    """Go without what the filter rejects, or take the rejected images nearest to the class."""
    th_g: NonNegative = 0.25
    """TH_G: a generator is trained again when the net recognises a smaller share of its images."""
    th_g_of: Literal["all", "fresh"] = "all"
    """``all``: th_g is the threshold. ``fresh``: the threshold is th_g times the share that was
    recognised right after the generator's last training, so data calibrate it."""
    n_check: PositiveCount = 200
    """Images drawn to measure the share."""
    generator_update: Literal["drift", "always"] = "drift"
    """Train a generator that fell below the threshold, or whenever its class is met (pFedGRP's
    ablation AS2)."""
    generator_arch: Arch = "wgan"
    """WGAN-GP, its DCGAN form, or a diffusion model sampled by DPM-Solver."""
    generator_width: Count = 0
    """Channels; 0 stands for 16 for GANs (64 where images are in colour), 32 for diffusion."""
    generator_epochs: Count = 0
    """Epochs of one training; 0 stands for 200 for GANs (1000 where images are in colour), 6000
    for diffusion."""
    generator_batch: PositiveCount = 64
    """Batch size of training and of drawing."""
    generator_lr: NonNegative = 0.0
    """Adam's learning rate; 0 stands for 1e-3 for the WGAN-GP of grey images, 1e-4 for other GANs,
    2e-4 for diffusion. The paper gives none (docs/results/pfedgrp.md)."""
    generator_restart: bool = False
    """Train from scratch each time, and not from the weights of before."""
    generator_moments: bool = False
    """Keep Adam's moments in the private state, which triples it."""

    def class_replay(self, run: RunFacts) -> ClassReplay:
        """Return the settings of the replay."""
        family = Family(
            input_shape=run.problem.input_shape,
            arch=self.generator_arch,
            width=self.generator_width,
            epochs=self.generator_epochs,
            batch_size=self.generator_batch,
            lr=self.generator_lr,
            moments=self.generator_moments,
            mixed_precision=run.experiment.training.mixed_precision,
        )
        return ClassReplay(
            family=family,
            filtered=self.replay_filter,
            attempts=self.replay_attempts,
            shortage=self.shortage,
            update=self.generator_update,
            th_g=self.th_g,
            relative=self.th_g_of == "fresh",
            n_check=self.n_check,
            restart=self.generator_restart,
            cap=self.cap,
            batch=self.generator_batch,
        )

    def reported(self, run: RunFacts) -> frozenset[str]:
        names = ("generator_ratio", "replay_acceptance")
        ratios = (f"{name}_{k}" for name in names for k in range(run.problem.num_classes))
        return frozenset((*METRICS, *ratios))

    def keeps_state(self, run: RunFacts) -> bool:
        return True

    def init_client(self, run: RunFacts, client: int) -> Bundle:
        nobody = torch.zeros(run.problem.num_classes, dtype=torch.int32)
        return Bundle(histogram=Histogram(nobody, nobody.clone()))

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> Rehearsal:
        return self.class_replay(ctx.run).prepared(ctx, state)

    def training_data(self, ctx: ClientContext, refs: Rehearsal) -> tuple[Tensor, Tensor]:
        return refs.training_data()

    def after_local(
        self, ctx: ClientContext, payload: Bundle, state: Bundle, refs: Rehearsal
    ) -> Bundle:
        return self.class_replay(ctx.run).kept(ctx, state, refs)

    def pictures(
        self, ctx: ClientContext, payload: Bundle, state: Bundle, x: Tensor, y: Tensor
    ) -> Mapping[str, Picture]:
        return self.class_replay(ctx.run).pictures(ctx, state)
