"""Noise for privacy: drawn from a secret of whoever adds it, never from the seed of the run.

That is a client or the coordinator. Everybody knows the seed of a run, so noise that came from it
could be subtracted. A secret is 32 bytes of the operating system's entropy. What it draws is a
keyed function of what is blurred: the same content gets the same noise, as after a crash; other
content gets independent noise, so that no difference of two uploads is free of it. The generator of
torch has 32 bits of state to guess, and is not used here.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmodels.tensors.bundle import tensor_bytes

SECRET_BYTES = 32
Floats = np.ndarray[tuple[Any, ...], np.dtype[np.float64]]


@dataclass(frozen=True)
class Secret:
    """What one client, or the coordinator, knows alone."""

    key: bytes = field(repr=False)

    @classmethod
    def fresh(cls) -> Secret:
        """Draw a secret from the operating system's entropy."""
        return cls(os.urandom(SECRET_BYTES))

    def keyed(self, digest: str) -> str:
        """Return a digest that nobody without the secret can compute from another one, as hex."""
        text = f"fedtide/digest/{digest}".encode()
        return hashlib.blake2b(text, key=self.key, digest_size=32).hexdigest()

    def chance(self, purpose: str) -> float:
        """Return a number in [0, 1), uniform over purposes."""
        return float(self.chances(purpose, 1)[0])

    def chances(self, purpose: str, number: int) -> Floats:
        """Return so many numbers in [0, 1), uniform and independent (n,)."""
        stream = hashlib.shake_256(self.key + f"fedtide/chance/{purpose}".encode())
        words = np.frombuffer(stream.digest(8 * number), dtype="<u8")
        return np.asarray((words >> np.uint64(11)) * 2.0**-53, dtype=np.float64)

    def normal(self, content: Tensor, purpose: str) -> Tensor:
        """Return N(0, 1) numbers of a tensor's shape and dtype, for this content and purpose alone.

        Args:
            content: what the noise is to hide.
            purpose: what the content is, and of which interaction.
        """
        plain = content.detach().cpu().contiguous()
        label = f"fedtide/noise/{purpose}/{plain.dtype}/{tuple(plain.shape)}/".encode()
        stream = hashlib.shake_256(self.key + label)
        stream.update(tensor_bytes(plain))
        pairs = (plain.numel() + 1) // 2
        words = np.frombuffer(stream.digest(16 * pairs), dtype="<u8").reshape(2, pairs)
        uniform = ((words >> np.uint64(11)) + 0.5) * 2.0**-53  # in (0, 1), 53 bits
        radius, angle = np.sqrt(-2 * np.log(uniform[0])), 2 * np.pi * uniform[1]  # Box and Muller
        drawn = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
        noise = torch.from_numpy(drawn[: plain.numel()]).reshape(plain.shape)
        return noise.to(content.dtype).to(content.device)
