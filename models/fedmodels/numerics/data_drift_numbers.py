"""The numbers of an example that are watched for drift, and what people call them.

An example of no more than ``MAX_VALUES`` numbers is watched number by number, a longer one in that
many neighbourhoods at most. Windows and images are also watched by the mean and the spread of each
channel within an example: of a recording, these say more than what stands at one place of a window.
Of windows the spectrum of each channel is watched, too: the logarithm of the share of its power in
each octave (Hann window, without the mean), so that another sampling rate shows.

Shapes: n examples; v watched values of each; q of them, the first ones, whose spread from example
to example is watched, too; K classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor
from torch.nn import functional

from fedmodels.console.printable import printable
from fedmodels.facts.data_description import channel_axis

MAX_VALUES = 784
"""Numbers of an example that are watched at most, beside those of channels."""
MAX_CHANNELS = 64
"""Channels, or numbers of a flat example, whose spread is watched at most."""
MAX_OCTAVES, SILENCE = 8, 1e-8
"""Octaves at most, the lowest together; and a power of each frequency below which it is noise."""
MOST = 0.98
"""A gap beyond which more deviations hardly show."""
SHOWN = 5
"""Numbers that a line names beside the first."""
MAX_LETTERS = 40
"""Letters of a name of people's own in a line, at most."""


@dataclass(frozen=True)
class Numbers:
    """Which numbers of examples of one shape are watched, and in which order."""

    shape: tuple[int, ...]
    """Of one example: ``(F,)``, windows ``(L, C)``, or images ``(C, H, W)``."""

    @property
    def channels(self) -> int:
        """Return how many channels are watched: none of flat examples."""
        count = self.shape[channel_axis(self.shape)] if len(self.shape) > 1 else 0
        return count if count <= MAX_CHANNELS else 0

    @property
    def grid(self) -> tuple[int, ...]:
        """Return what the places of an example are put together to: channels first, then places."""
        if not self.channels:
            return (min(math.prod(self.shape), MAX_VALUES),)
        places = [n for axis, n in enumerate(self.shape) if axis != channel_axis(self.shape)]
        most = max(MAX_VALUES // self.channels, 1)
        if len(places) == 1:
            return (self.channels, min(places[0], most))
        while math.prod(places) > most:
            longest = places.index(max(places))
            places[longest] //= 2
        return (self.channels, *places)

    @property
    def spreads(self) -> int:
        """Return q."""
        return self.channels or (self.grid[0] if self.grid[0] <= MAX_CHANNELS else 0)

    @property
    def octaves(self) -> tuple[int, ...]:
        """Return where the octaves of a window's frequencies begin, in cycles; none: no window."""
        highest = self.shape[0] // 2 if len(self.shape) == 2 and self.channels else 1
        starts = [1 << power for power in range((highest - 1).bit_length())]
        return (1, *starts[1:][1 - MAX_OCTAVES :]) if len(starts) > 2 else ()

    @property
    def count(self) -> int:
        """Return how many numbers are watched of inputs, without classes: v + q."""
        return self._places + len(self.octaves) * self.channels + self.spreads

    @property
    def _places(self) -> int:
        return 2 * self.channels + math.prod(self.grid)

    def of(self, x: Tensor) -> Tensor:
        """Return the watched values (n, v) of examples (n, *shape)."""
        x = x.detach().float().cpu()
        if not self.channels:
            return _pooled(x.flatten(1)[:, None], self.grid).flatten(1)
        by_channel = x.movedim(1 + channel_axis(self.shape), 1)  # (n, C, …)
        flat = by_channel.flatten(2)
        inner = flat.std(2, correction=0) if flat.shape[2] > 1 else torch.zeros_like(flat[:, :, 0])
        pooled = _pooled(by_channel, self.grid[1:]).flatten(1)
        return torch.cat([flat.mean(2), inner, pooled, *self._spectrum(flat)], 1)

    def _spectrum(self, x: Tensor) -> list[Tensor]:
        """Return the logarithms of shares of power (n, C) of windows (n, C, L), by octave."""
        if not self.octaves:
            return []
        waves = (x - x.mean(2, keepdim=True)) * torch.hann_window(x.shape[2], periodic=False)
        power = torch.fft.rfft(waves).abs().square()[:, :, 1:] + SILENCE
        ends = [*(start - 1 for start in self.octaves[1:]), power.shape[2]]
        shares = [
            power[:, :, start - 1 : end].sum(2) / power.sum(2)
            for start, end in zip(self.octaves, ends, strict=True)
        ]
        return [share.log() for share in shares]

    def name(self, place: int, channels: Sequence[str] = (), classes: Sequence[str] = ()) -> str:
        """Return what people call a number.

        Args:
            place: from 0 on: means of watched values, then spreads, then shares of classes.
            channels: names of channels, or of the numbers of a flat example, where they are known.
            classes: names of the classes, where they are known.
        """
        named = len(channels) == (self.channels or math.prod(self.shape))
        own, c = [_quoted(name) for name in channels] if named else [], self.channels
        if place >= self.count:
            label = place - self.count
            return (
                f"the share of class {_quoted(classes[label]) if label < len(classes) else label}"
            )
        if place >= self.count - self.spreads:
            place -= self.count - self.spreads
            what = own[place] if own else f"{'channel' if c else 'number'} {place}"
            means = f"the mean of {what}" if c else what
            return f"how much {means} varies from example to example"
        if place < 2 * c:
            what = own[place % c] if own else f"channel {place % c}"
            return f"the {'mean' if place < c else 'spread'} of {what} within an example"
        if place >= self._places:
            octave, place = divmod(place - self._places, c)
            what = own[place] if own else f"channel {place}"
            return f"the power of {what} in octave {octave + 1} of {len(self.octaves)}"
        return self._place(place - 2 * c, own)

    def _place(self, place: int, own: Sequence[str]) -> str:
        """Return what people call a number of an example, or a neighbourhood of numbers."""
        if not self.channels:
            whole = self.grid[0] == math.prod(self.shape)
            if own and whole:
                return f"the mean of {own[place]}"
            return (
                f"the mean of number {place}"
                if whole
                else (f"the mean of neighbourhood {place} of {self.grid[0]}")
            )
        sides, at = self.grid[1:], list[int]()
        for side in reversed(sides):
            place, here = divmod(place, side)
            at.insert(0, here)
        what = own[place] if own else f"channel {place}"
        words = ("row", "column") if len(at) == 2 else ("step",)
        where = ", ".join(f"{w} {i} of {n}" for w, i, n in zip(words, at, sides, strict=True))
        return f"{what} at {where}"


@dataclass(frozen=True)
class Words:
    """What people call the watched numbers of a part of a run, as far as it is known here."""

    part: str
    """``input``, or ``prediction``: the probabilities of all classes, then their shares."""
    shape: tuple[int, ...]
    num_classes: int
    """K."""
    channels: Sequence[str] = ()
    classes: Sequence[str] = ()
    says: str = "the probability of class"
    """What is predicted of each."""

    @property
    def of_all(self) -> int:
        """Return how many numbers are watched of all classes together: v + q."""
        return Numbers(self.shape).count if self.part == "input" else self.num_classes

    @property
    def count(self) -> int:
        """Return how many numbers are watched of this part."""
        return self.of_all + self.num_classes

    def name(self, place: int) -> str:
        """Return what people call a number."""
        if self.part == "input":
            return Numbers(self.shape).name(place, self.channels, self.classes)
        label = place % self.num_classes
        name = _quoted(self.classes[label]) if label < len(self.classes) else str(label)
        if place < self.num_classes:
            return f"{self.says} {name}"
        return f"how often class {name} is predicted"

    def line(self, place: int, amount: float, p: float, others: Sequence[int] = ()) -> str:
        """Return a line on what moved, how far, how sure that is, and what else did."""
        names = [*dict.fromkeys(self.name(n) for n in others if n != place)]
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        beside = f"; so did {', '.join(names[:SHOWN])}{more}" if names else ""
        return f"{self.name(place)}, by {self.by(place, amount)} (p = {p:.1g}){beside}"

    def by(self, place: int, amount: float) -> str:
        """Return how far a number moved, given the gap between two distributions."""
        numbers = Numbers(self.shape)
        if place >= self.of_all:
            return f"{100 * amount:.0f} points"
        if self.part == "input" and place >= numbers.count - numbers.spreads:
            return f"{amount:.2f} of 1"
        if amount > MOST:
            return "more than 4.6 standard deviations"
        return f"{2 * NormalDist().inv_cdf((1 + amount) / 2):.2g} standard deviations"


def _pooled(x: Tensor, sides: tuple[int, ...]) -> Tensor:
    """Return means over neighbourhoods of (n, C, *places), as many as the sides say."""
    if tuple(x.shape[2:]) == sides:
        return x
    pools = {1: functional.adaptive_avg_pool1d, 2: functional.adaptive_avg_pool2d}
    if len(sides) not in pools:
        return functional.adaptive_avg_pool1d(x.flatten(2), math.prod(sides))
    found: Tensor = pools[len(sides)](x, sides)  # type: ignore[arg-type]
    return found


def _quoted(name: str) -> str:
    return repr(printable(name, MAX_LETTERS))
