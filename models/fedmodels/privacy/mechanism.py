"""The Gaussian mechanism on sums of bounded vectors; a crash leads to the same noise again."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fedmodels.numerics.secrecy import Secret
from fedmodels.privacy.contributions import Contributions, Vectors, scaled
from fedmodels.tensors.bundle import Bundle


def clipped(vectors: Vectors, clips: Mapping[str, float]) -> dict[str, Tensor]:
    """Return vectors of which none is longer than the bound of its part."""
    return {part: scaled(vector, clips[part]) for part, vector in vectors.items()}


def noise_stds(clips: Mapping[str, float], noise: float) -> dict[str, float]:
    """Return the standard deviation of the noise on the sum of each part.

    The parts are one joint vector, each divided by its bound. Its norm is at most the root of
    their number, so all parts together cost one release with this noise multiplier.
    """
    return {part: noise * math.sqrt(len(clips)) * clip for part, clip in clips.items()}


def noised(
    sums: Vectors, stds: Mapping[str, float], secret: Secret, purpose: str
) -> dict[str, Tensor]:
    """Return sums with Gaussian noise: the same bits for the same sums, secret and purpose."""
    content = torch.cat([sums[part].flatten() for part in sums])
    drawn = secret.normal(content, f"{purpose}/release")
    pieces = torch.split(drawn, [sums[part].numel() for part in sums])
    return {
        part: sums[part] + stds[part] * piece.reshape(sums[part].shape)
        for part, piece in zip(sums, pieces, strict=True)
    }


def leaving(
    of: Contributions, upload: Bundle, payload: Bundle, share: float, secret: Secret, purpose: str
) -> Bundle:
    """Return an upload as it leaves a client that adds noise itself.

    Args:
        of: says what the noise covers.
        upload: the result of the method.
        payload: what the client was given.
        share: the standard deviation of the client's noise over that of all the noise on a sum.
        secret: the client's.
        purpose: tells the release that the upload is of.
    """
    stds = {part: share * std for part, std in noise_stds(of.clips, of.privacy.noise).items()}
    bounded = clipped(of.vectors(upload, payload.weights), of.clips)
    vectors = noised(bounded, stds, secret, purpose)
    return of.sent(vectors, payload.weights, of.rest(upload))
