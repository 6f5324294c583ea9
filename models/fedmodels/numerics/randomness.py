"""Every random number of training, drawn from the run's seed.

How data are dealt out draws from ``fedcli/data/cuts/cut_input.py``.

Nothing draws from a global generator but inside :func:`seeded`, which restores it: what one part of
a run draws never shifts what another part draws.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedmodels.errors import ConfigError, suggestion
from fedmodels.plugins import loaded

OF_THE_CORE = ("init", "order", "augment", "dropout", "method", "cohort", "evaluate")
PURPOSES = (*OF_THE_CORE, *(name for part in loaded("fedtide.parts") for name in part.draws))
"""What a seed may be for; two purposes never share a stream. A plugin's part brings its own."""
_default_generators = threading.RLock()


def derive_seed(run_seed: int, client: int | str, interaction: int, purpose: str) -> int:
    """Return the 63-bit seed of one stream of random numbers.

    Args:
        run_seed: the ``seed`` of the config.
        client: a client's id, or a name such as ``"server"``; never a client's for initial weights.
        interaction: the number of the interaction, of a cohort that of its round; 0 for what
            happens once.
        purpose: one of :data:`PURPOSES`.

    Raises:
        ConfigError: ``purpose`` is unknown.
    """
    if purpose not in PURPOSES:
        known = ", ".join(PURPOSES)
        raise ConfigError(
            f"unknown purpose {purpose!r} of random numbers; known: {known}."
            f"{suggestion(purpose, PURPOSES)}"
        )
    words = f"fedtide/{run_seed}/{client}/{interaction}/{purpose}"
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "big") >> 1


def generator(seed: int) -> torch.Generator:
    """Return a fresh CPU generator that starts at ``seed``."""
    fresh = torch.Generator()
    fresh.manual_seed(seed)
    return fresh


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's default generators inside the block and restore them after it.

    For what takes no generator: constructors of layers, dropout, torchvision's transforms. CUDA's
    generators take part once CUDA is in use; saving their state creates no context on a device.
    All threads share these generators, so a second thread waits until the block has ended.
    """
    with _default_generators, started(seed):
        yield


@contextmanager
def started(seed: int) -> Iterator[None]:
    """Do what :func:`seeded` does for work with threads of its own, which may call that one.

    No other thread waits, so two threads that draw from the default generators here share them.
    """
    with _default_generators:
        used = [torch.default_generator]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            used += torch.cuda.default_generators
        before = [each.get_state() for each in used]
        for each in used:
            each.manual_seed(seed)
    try:
        yield
    finally:
        with _default_generators:
            for each, state in zip(used, before, strict=True):
                each.set_state(state)


@contextmanager
def apart(part: str) -> Iterator[None]:
    """Draw what is beyond a plain net from a stream of its own, and shift no other draw.

    So a net starts from the same weights with and without that part. The stream follows from the
    seed that torch's default generator last got.
    """
    words = f"fedtide/{torch.default_generator.initial_seed()}/{part}"
    with seeded(int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "big") >> 1):
        yield
