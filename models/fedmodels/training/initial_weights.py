"""Initial weights from a file, and the digest that binds a run to it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from fedmodels.config.experiment import Experiment
from fedmodels.errors import ArchiveError, ConfigError
from fedmodels.tensors.archive import load
from fedmodels.tensors.bundle import Weights


def pinned(experiment: Experiment) -> Experiment:
    """Return the experiment with the digest of its file of initial weights, if it names one.

    Raises:
        ConfigError: the file cannot be read, or its digest differs from the experiment's.
    """
    net = experiment.net
    if net.weights is None:
        return experiment
    found = net.model_copy(update={"weights_sha256": _digest(net.weights, net.weights_sha256)})
    return experiment.model_copy(update={"net": found})


def _digest(path: str, expected: str | None) -> str:
    """Return the SHA-256 of a file of weights.

    Raises:
        ConfigError: the file cannot be read, or its digest is not the expected one.
    """
    try:
        found = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except FileNotFoundError:
        raise ConfigError(f"[net] weights: {path} is missing") from None
    except OSError as error:
        raise ConfigError(f"[net] weights: {path} cannot be read: {error.strerror}") from None
    if expected not in (None, found):
        raise ConfigError(
            f"[net] weights: {path} is not the file this run began with: its sha256 begins with "
            f"{found[:12]}, not with {str(expected)[:12]}"
        )
    return found


def pretrained(path: str, fresh: Weights, sha256: str | None = None) -> Weights:
    """Return initial weights, with the tensors of a file in place of fresh ones.

    Raises:
        ConfigError: the file cannot be read, is not the expected one, or does not fit the net.
    """
    _digest(path, sha256)
    try:
        found = load(path)[0].weights
    except ArchiveError as error:
        raise ConfigError(f"[net] weights: {error}") from None
    strange = sorted(found.keys() - fresh.keys())
    if strange or not found:
        what = f"tensor {strange[0]!r}, which the net has not" if strange else "no weights"
        raise ConfigError(f"[net] weights: {path} holds {what}")
    for name, tensor in found.items():
        if tensor.shape != fresh[name].shape or tensor.dtype != fresh[name].dtype:
            raise ConfigError(
                f"[net] weights: tensor {name!r} of {path} is {tensor.dtype} {list(tensor.shape)}; "
                f"the net has {fresh[name].dtype} {list(fresh[name].shape)}"
            )
    return {name: found.get(name, tensor) for name, tensor in fresh.items()}
