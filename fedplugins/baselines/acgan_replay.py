"""The training of an auxiliary-classifier GAN on real images, on generated ones, or on both.

Odena et al., ICML 2017, section 4. https://arxiv.org/abs/1610.09585. The nets and their losses are
:mod:`fedmodels.nets.generative.acgan`. Labels are (B,), inputs (B, C, H, W) as the classifier sees
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedmodels.nets.generative import acgan
from fedmodels.nets.generative.gan import Generator
from fedmodels.nets.split import SplitNet
from fedmodels.techniques.continual import labels_from
from fedmodels.training.optimizer import Adam, descend


class ConditionalGenerator:
    """A conditional generator, and what turns its images in [-1, 1] into inputs.

    Args:
        net: the generator.
        classes: K.
        latent: coordinates of z.
        limits: the inputs that stand for black and for white, (C,) or (1,) each; -1 and 1 unless
            given.
    """

    def __init__(
        self, net: Generator, classes: int, latent: int, limits: tuple[Tensor, Tensor] | None
    ) -> None:
        self.net, self.classes, self.latent = net, classes, latent
        low, high = limits or (torch.tensor([-1.0]), torch.tensor([1.0]))
        low, high = (t.to(next(net.parameters()).device).view(-1, 1, 1) for t in (low, high))
        self.scale, self.shift = (high - low) / 2, (high + low) / 2

    def __call__(self, y: Tensor, draw: torch.Generator) -> Tensor:
        """Return inputs (B, C, H, W) of labels (B,), with gradient where the net has one."""
        images: Tensor = self.net(acgan.latents(y, self.classes, self.latent, draw))
        return images * self.scale + self.shift

    def frozen(self) -> ConditionalGenerator:
        """Put the net into evaluation mode, without gradient; return this maker."""
        self.net.eval().requires_grad_(False)
        return self


class Acgan:
    """Critic and generator while they train, with an optimiser each.

    Args:
        net: the classifier; with ``source`` it is the critic.
        source: the head that tells real inputs from fakes.
        maker: the generator.
        importance: weight of the batch of new classes in a loss that has two batches; the batch of
            past classes has the rest to 1.
        **adam: the options of both optimisers.
    """

    def __init__(
        self,
        net: SplitNet,
        source: acgan.SourceHead,
        maker: ConditionalGenerator,
        importance: float,
        **adam: object,
    ) -> None:
        self.net, self.source, self.maker, self.importance = net, source, maker, importance
        for module in (net, source, maker.net):
            module.requires_grad_(True).train()
        held: dict[str, list[nn.Parameter]] = {
            "critic": [*net.parameters(), *source.parameters()],
            "generator": list(maker.net.parameters()),
        }
        self.adams = {role: Adam(p, **adam) for role, p in held.items()}  # type: ignore[arg-type]

    def train_critic(
        self,
        parts: Sequence[tuple[Tensor, Tensor]],
        fakes: Sequence[Tensor],
        draw: torch.Generator,
        further: Tensor | float = 0.0,
    ) -> Tensor:
        """Step the critic; return its loss, a scalar.

        Args:
            parts: batches of inputs (B, C, H, W) and labels (B,) that count as real: one of new
                classes, and where there are past classes one of these.
            fakes: labels (m,) of the images to generate, for each of these batches.
            draw: draws the noise.
            further: a term to add to the loss.
        """
        loss = torch.as_tensor(further)
        for share, (x, y), labels in zip(self._shares(parts), parts, fakes, strict=True):
            with torch.no_grad():
                fake = self.maker(labels, draw)
            loss = loss + share * acgan.critic_loss(self.net, self.source, x, y, fake, labels)
        return descend(loss, self.adams["critic"])

    def train_generator(self, fakes: Sequence[Tensor], draw: torch.Generator) -> Tensor:
        """Step the generator on fakes of these labels, (m,) a batch; return its loss, a scalar."""
        total = torch.zeros(())
        for share, labels in zip(self._shares(fakes), fakes, strict=True):
            fake = self.maker(labels, draw)
            loss = acgan.generator_loss(self.net, self.source, fake, labels)
            total = total.to(loss.device) + share * loss
        return descend(total, self.adams["generator"])

    def _shares(self, parts: Sequence[object]) -> tuple[float, ...]:
        """Return the weight of each batch in a loss."""
        return (1.0,) if len(parts) == 1 else (self.importance, 1 - self.importance)


@dataclass(frozen=True)
class GeneratorPool:
    """Generators of several clients, and for each label the clients whose generators know it."""

    makers: Mapping[int, ConditionalGenerator]
    """By client."""
    holders: Mapping[int, Sequence[int]]
    """Clients by label, ascending."""

    def batch(self, count: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return inputs (m, C, H, W) and labels (m,), balanced over the labels; m is ``count``.

        A client may have sent any generator, so values that are not finite become 0.
        """
        labels, clients = balanced(self.holders, count, draw)
        rows_of = {c: (clients == c).nonzero().flatten() for c in sorted(set(clients.tolist()))}
        device = next(self.makers[min(rows_of)].net.parameters()).device
        y = labels.to(device)
        parts = [self.makers[c](y[rows.to(device)], draw) for c, rows in rows_of.items()]
        places = torch.cat(list(rows_of.values())).argsort().to(device)
        return torch.cat(parts)[places].nan_to_num(0.0, 0.0, 0.0), y


def balanced(
    holders: Mapping[int, Sequence[int]], count: int, draw: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw labels uniformly, and for each label uniformly one of the clients that hold it.

    Returns:
        Labels (m,) and clients (m,).
    """
    y = labels_from(torch.tensor(sorted(holders)), count, draw)
    chances = torch.rand(count, generator=draw).double().tolist()
    held = [holders[label] for label in y.tolist()]
    clients = [them[int(u * len(them))] for them, u in zip(held, chances, strict=True)]
    return y, torch.tensor(clients)
