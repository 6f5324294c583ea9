"""Faults that this code had, or might have, to be planted: an audit has to find them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import Tensor

from fedcli.parts.privacy import examples
from fedmodels.config.experiment import Experiment
from fedmodels.numerics.secrecy import Secret
from fedmodels.privacy.ledger import Charge
from fedmodels.training import private_steps
from fedsrv.engine import schedule
from fedsrv.parts import private_rounds
from fedsrv.parts.private_rounds import ClientPrivacy


@contextmanager
def count_in_the_clear() -> Iterator[None]:
    """How many clients came is told beside the count of those within the adaptive bound.

    So a client within it moves the count by 1, and the noise is for 1/2.
    """
    release, adapt, came = ClientPrivacy._at_server, ClientPrivacy._adapt, [0.0]

    def at_server(self: Any, ctx: Any, of: Any, expected: float, given: Any, sent: Any) -> Any:
        came[0] = 0.5 * (len(sent) / expected - 1)
        return release(self, ctx, of, expected, given, sent)

    def adapted(self: Any, interaction: int, clip: float, within: float) -> None:
        adapt(self, interaction, clip, within + came[0])

    with (
        patch.object(ClientPrivacy, "_at_server", at_server),
        patch.object(ClientPrivacy, "_adapt", adapted),
    ):
        yield


@contextmanager
def whole_noise_for_groups() -> Iterator[None]:
    """Epsilon counts on the noise of all clients, and sums of groups are opened."""
    with patch.object(Experiment, "fewest_summed", property(lambda e: e.min_clients)):
        yield


@contextmanager
def first_client_for_nobody() -> Iterator[None]:
    """Where nobody is drawn, the client with the lowest id takes part."""
    draw = schedule.independent_cohort

    def drawn(chance: Any, number: int, candidates: Sequence[int], rate: float) -> Any:
        return draw(chance, number, candidates, rate) or (min(candidates),)

    with patch.object(schedule, "independent_cohort", drawn):
        yield


@contextmanager
def one_part_for_two() -> Iterator[None]:
    """The noise on each of several parts is that of one part alone."""
    real = private_rounds.noise_stds

    def stds(clips: Any, noise: float) -> dict[str, float]:
        return real(clips, noise / math.sqrt(len(clips)))

    with patch.object(private_rounds, "noise_stds", stds):
        yield


@contextmanager
def no_root_of_two() -> Iterator[None]:
    """The noise on a class sum is for the embedding alone, and not for the mark beside it."""
    plain = SimpleNamespace(**{**vars(math), "sqrt": lambda number: 1.0})
    with patch.object(private_steps, "math", plain):
        yield


@contextmanager
def nine_tenths_of_the_noise() -> Iterator[None]:
    """All noise that is drawn from secrets is a tenth too small."""
    real = Secret.normal

    def normal(self: Secret, content: Tensor, purpose: str) -> Tensor:
        return 0.9 * real(self, content, purpose)

    with patch.object(Secret, "normal", normal):
        yield


@contextmanager
def tasks_as_if_disjoint() -> Iterator[None]:
    """The examples of each task count as other ones, whatever they hold."""
    real = examples.charge_of

    def charge_of(client: Any, order: Any, hidden: Any, cut: str) -> Charge:
        charge = real(client, order, hidden, cut)
        assert charge.contents is not None, "it hides examples"
        salt = np.uint64((order.task + 1) * 0x9E3779B97F4A7C15 % 2**64)
        return replace(charge, contents=charge.contents ^ salt)

    with patch.object(examples, "charge_of", charge_of):
        yield
