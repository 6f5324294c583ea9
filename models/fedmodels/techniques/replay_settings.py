"""The settings of class replay, as keys of a method, and what methods with replay have in common.

Tan and Liu (pFedGRP), arXiv 2410.01502v2, section 4. The replay itself is
:mod:`fedmodels.techniques.class_replay`, the search for weights
:mod:`fedmodels.techniques.aggregation_weights`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from fedmodels.config.bounds import Count, NonNegative, PositiveCount, Share
from fedmodels.machine import cores
from fedmodels.techniques.aggregation_weights import (
    BestWeights,
    Mixer,
    SearchSettings,
    WeightSearch,
    find_all,
)
from fedmodels.techniques.class_replay import METRICS, ClassReplay
from fedmodels.techniques.generator_training import Arch
from fedmodels.techniques.generators import Family
from fedmodels.tensors.bundle import Bundle, Histogram, Weights
from fedmodels.training.run import RunFacts
from fedmodels.training.settings import Part


@dataclass(frozen=True, kw_only=True)
class Replay(Part):
    """How clients replay the classes they met."""

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
    2e-4 for diffusion."""
    generator_restart: bool = False
    """Train from scratch each time, and not from the weights of before."""
    generator_moments: bool = False
    """Keep Adam's moments in the private state, which triples it."""

    def of(self, run: RunFacts) -> ClassReplay:
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


@dataclass(frozen=True, kw_only=True)
class PersonalReplay(Replay):
    """Replay on clients and on the server, as pFedGRP has it, with its ablation AS3."""

    images: Literal["round", "epoch"] = "round"
    """How long generated images serve: all epochs of a round, or one, after which others are drawn
    for local training and for eq. 8: docs/results/pfedgrp.md has both."""
    replay_labels: Literal["hard", "soft"] = "hard"
    """A replayed example's class, or the classifier's probabilities."""
    generator_decouple: bool = True
    """One generator for each class, or one for all, trained every round (ablation AS3)."""
    generator_width_mult: PositiveCount = 1
    """Factor of the generators' width; 2 in ablation AS3."""

    def of(self, run: RunFacts) -> ClassReplay:
        """Return the settings of the replay, for both halves."""
        plain = super().of(run)
        width = self.generator_width_mult * plain.family.usual()[0]
        return replace(
            plain,
            family=replace(plain.family, width=width),
            decoupled=self.generator_decouple,
            renewed=self.images == "epoch" or not self.generator_decouple,
            soft=self.replay_labels == "soft",
        )


def reported_by_replay(run: RunFacts) -> frozenset[str]:
    """Return the names that clients with replay put into ``ctx.metrics``."""
    names = ("generator_ratio", "replay_acceptance")
    ratios = (f"{name}_{k}" for name in names for k in range(run.problem.num_classes))
    return frozenset((*METRICS, *ratios))


def nothing_met(run: RunFacts) -> Bundle:
    """Return the private state of a client that has met no class yet."""
    nobody = torch.zeros(run.problem.num_classes, dtype=torch.int32)
    return Bundle(histogram=Histogram(nobody, nobody.clone()))


@dataclass(frozen=True, kw_only=True)
class LearnedWeights(Part):
    """How the server looks for the aggregation weights of eq. 8."""

    w_init: Literal["uniform", "self"] = "uniform"
    """Weights that the search of eq. 8 begins with."""
    w_lr: NonNegative = 0.01
    """Learning rate of eq. 8: FedLAW's, as the paper gives none. docs/results/continual.md has runs
    with ten times that."""
    w_epochs: Count = 20
    """Epochs of eq. 8."""
    w_batch: PositiveCount = 64
    """Batch size of eq. 8."""
    w_entropy_floor: Share = 0.0
    """Lower bound of the entropy of a row of weights, as a share of log n, its maximum."""
    w_device: Literal["cpu", "auto"] = "cpu"
    """Where eq. 8 is minimised: on the coordinator's cores, or on its GPU where it has one."""

    @property
    def device(self) -> str:
        """Return where the search computes."""
        return "cuda" if self.w_device == "auto" and torch.cuda.is_available() else "cpu"

    def search(self) -> SearchSettings:
        """Return the settings of eq. 8's minimisation."""
        return SearchSettings(
            epochs=self.w_epochs,
            lr=self.w_lr,
            batch_size=self.w_batch,
            init=self.w_init,
            entropy_floor=self.w_entropy_floor,
        )

    def found(
        self, run: RunFacts, models: Sequence[Weights], searches: Sequence[WeightSearch]
    ) -> list[BestWeights]:
        """Return the weights that each search finds, on a GPU one after the other."""
        threads = cores() if self.device == "cpu" else 1
        mixer = Mixer(run.make_net().to(self.device), models)
        return find_all(mixer, searches, self.search(), threads)
