"""Masked autoencoding of HART, so that a run may start from weights that have seen movement.

Ek et al., FedAli, section 5 and figure 3, with the masked autoencoder of He et al., Masked
Autoencoders Are Scalable Vision Learners, CVPR 2022. https://arxiv.org/abs/2111.06377

Of each window's tokens most are hidden; the blocks see the rest, and a small decoder, thrown away
in the end, says what was hidden. Labels are not used. What is written are the weights of patches,
positions, blocks and the last normalisation, prototypes included: a run starts from them with
``[net] weights = "FILE"``; its wide layer and its head begin afresh.

Shapes: B batch, Z tokens of which V are visible, d width, p = 16 steps x 6 channels.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from fedcli.data.sets.dataset import Dataset
from fedcli.data.sets.registry import load
from fedmodels.config.experiment import Experiment
from fedmodels.config.origin import data_and_scenario
from fedmodels.errors import ConfigError, TrainingFailed
from fedmodels.nets.alp import alp_layers
from fedmodels.nets.hart import DIM, PATCH
from fedmodels.nets.split import weights_of
from fedmodels.nets.transformer import Attention, FeedForward
from fedmodels.numerics.randomness import derive_seed, seeded
from fedmodels.tensors.archive import save
from fedmodels.tensors.bundle import Bundle, Problem
from fedmodels.training.run import RunFacts

FRESH = ("base/fc.", "head/")
"""What a run does not take over: it stands between tokens and classes."""


@dataclass(frozen=True)
class Pretraining:
    """How long, and how much is hidden; the paper's numbers."""

    epochs: int = 200
    batch_size: int = 128
    lr: float = 3e-4
    mask: float = 0.6
    "Share of tokens that are masked."


class _DecoderBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, 3, width // 3)
        self.mlp = FeedForward(width, 2 * width, F.gelu, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class MaskedAutoencoder(nn.Module):
    """HART's blocks over the visible tokens, and a decoder over all of them."""

    def __init__(self, base: Any, steps: int, mask: float, width: int = DIM) -> None:
        """Take the base of a HART for windows of ``steps`` steps.

        The decoder is as deep and wide as the published one; its blocks are plain ones, where
        those are HART's.

        Raises:
            ConfigError: the base is not HART's, or the mask would hide no token or all tokens.
        """
        super().__init__()
        if not all(hasattr(base, part) for part in ("accelerometer", "gyroscope", "blocks")):
            raise ConfigError("fedcli pretrain needs [net] name = 'hart'")
        if not 0 < mask < 1:
            raise ConfigError(f"--mask {mask:g} is no share of the tokens; it lies between 0 and 1")
        tokens = steps // PATCH
        self.base, self.hidden = base, int(mask * tokens)  # 4 of 8, as published
        if not 0 < self.hidden < tokens:
            raise ConfigError(f"--mask {mask:g} hides {self.hidden} of {tokens} tokens")
        self.embed = nn.Linear(DIM, width)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, tokens, width) * 0.02)
        self.decoder = nn.Sequential(*(_DecoderBlock(width) for _ in range(4)))
        self.patches = nn.Linear(width, PATCH * 6)

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean squared error over the hidden tokens of windows (B, steps, 6)."""
        acc, gyro = x.transpose(1, 2).chunk(2, 1)
        parts = [self.base.accelerometer(acc), self.base.gyroscope(gyro)]
        tokens = torch.cat(parts, 1).transpose(1, 2) + self.base.positions  # (B, Z, d)
        order = torch.rand(tokens.shape[:2]).argsort(1).to(x.device)
        visible, hidden = order[:, self.hidden :], order[:, : self.hidden]
        seen = tokens.gather(1, visible[..., None].expand(-1, -1, DIM))  # (B, V, d)
        for block in self.base.blocks:
            seen = block(seen)
        known = self.embed(self.base.norm(seen))  # (B, V, w)
        all_tokens = self.mask_token.expand(*tokens.shape[:2], -1)
        places = visible[..., None].expand(-1, -1, known.shape[-1])
        predicted = self.patches(
            self.decoder(all_tokens.scatter(1, places, known) + self.positions)
        )
        wanted = x.reshape(*tokens.shape[:2], -1)  # (B, Z, p)
        wanted, predicted = (
            t.gather(1, hidden[..., None].expand(-1, -1, PATCH * 6)) for t in (wanted, predicted)
        )
        return F.mse_loss(predicted, wanted)


def windows_of(dataset: Dataset) -> NDArray[np.float32]:
    """Return the training windows (n, steps, 6), normalised per natural client and channel.

    Raises:
        ConfigError: the data set holds no such windows.
    """
    x = np.asarray(dataset.train.x, dtype=np.float32)
    if x.ndim != 3 or x.shape[2] != 6:
        raise ConfigError(f"fedcli pretrain needs sensor windows; {dataset.name} has {x.shape[1:]}")
    groups = np.zeros(len(x)) if dataset.train.groups is None else dataset.train.groups
    out = np.empty_like(x)
    for group in np.unique(groups):
        rows = groups == group
        mean, std = x[rows].mean((0, 1)), x[rows].std((0, 1))
        out[rows] = (x[rows] - mean) / np.maximum(std, 1e-6)
    return out


def pretrain(
    experiment: Experiment,
    names: Sequence[str],
    out: Path,
    how: Pretraining,
    device: torch.device,
    tell: Callable[[str], None],
) -> list[float]:
    """Train the autoencoder on pooled windows and write the encoder's weights to ``out``.

    ``[data]`` of the experiment says where data lie, and which they are unless data sets are named.
    Each epoch is told in a line. Returns the mean loss of each epoch.

    Raises:
        ConfigError: net or data do not fit.
        DataError: a data set is missing.
        TrainingFailed: the loss or a weight is not finite; nothing is written.
    """
    if out.is_dir() or not os.access(out.parent, os.W_OK):
        raise ConfigError(f"cannot write {out}: name a file in a directory that can be written")
    data, _ = data_and_scenario(experiment)
    wanted = list(names) or [data.name]
    tables = [data.model_copy(update={"name": name}) for name in wanted]
    x = torch.from_numpy(np.concatenate([windows_of(load(table)) for table in tables]))
    net = RunFacts(experiment, Problem(tuple(x.shape[1:]), 2)).make_net()
    losses = []
    with seeded(derive_seed(experiment.seed, "server", 0, "method")):
        model = MaskedAutoencoder(net.base, x.shape[1], how.mask).to(device).train()
        optimizer = torch.optim.Adam(model.parameters(), how.lr)
        for epoch in range(how.epochs):
            losses.append(_train_epoch(model, optimizer, x, how.batch_size, device))
            for layer in alp_layers(net):  # as a round does, with a single client
                layer.global_prototypes.copy_(layer.local_prototypes)
            tell(f"epoch {epoch + 1} of {how.epochs}: loss {losses[-1]:.4f}")
            if not math.isfinite(losses[-1]):
                raise TrainingFailed(f"the loss of epoch {epoch + 1} is not finite; lower --lr")
    kept = {name: t for name, t in weights_of(net).items() if not name.startswith(FRESH)}
    if not all(tensor.isfinite().all() for tensor in kept.values()):
        raise TrainingFailed("the weights are not finite; lower --lr")
    header = {"kind": "weights", "net": experiment.net.name, "data": wanted, "epochs": how.epochs}
    save(out, Bundle(kept), header)
    return losses


def _train_epoch(
    model: MaskedAutoencoder,
    optimizer: torch.optim.Optimizer,
    x: Tensor,
    batch_size: int,
    device: torch.device,
) -> float:
    """Pass once over windows (n, steps, 6) in a random order; return the mean loss."""
    total = 0.0
    for index in torch.split(torch.randperm(len(x)), batch_size):
        loss = model(x[index].to(device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        total += float(loss.detach()) * len(index)
    return total / len(x)
