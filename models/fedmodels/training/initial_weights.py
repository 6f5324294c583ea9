"""Initial weights from a file, and the digest that binds a run to it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedmodels.config.experiment import Experiment, NetTable
from fedmodels.errors import ArchiveError, ConfigError
from fedmodels.host.files import sha256_of
from fedmodels.nets.split import SplitNet
from fedmodels.tensors.archive import is_plain, load, plain_tensors
from fedmodels.tensors.bundle import Weights


def pin_weights(experiment: Experiment) -> Experiment:
    """Return the experiment with the digest of its file of initial weights, if it names one.

    Raises:
        ConfigError: the file cannot be read, or its digest differs from the experiment's.
    """
    net = experiment.net
    if net.weights is None:
        if net.weights_sha256 is not None:
            raise ConfigError("[net] weights_sha256 needs weights, the file that has this digest")
        return experiment
    found = net.model_copy(update={"weights_sha256": _digest(net.weights, net.weights_sha256)})
    return experiment.model_copy(update={"net": found})


def with_own_weights(experiment: Experiment, files: Sequence[Path]) -> Experiment:
    """Return the experiment with the one of these files that has the digest of initial weights.

    A run may do without the file: where every weight travels, a client needs none of its own.
    """
    sha256 = experiment.net.weights_sha256
    if sha256 is None:
        return experiment
    fitting = [str(file) for file in files if _digest(str(file)) == sha256]
    net = experiment.net.model_copy(update={"weights": fitting[0] if fitting else None})
    return experiment.model_copy(update={"net": net})


def from_file(table: NetTable, net: SplitNet, fresh: Weights) -> Weights:
    """Return initial weights: fresh ones, with the tensors of the net's file in their place.

    Raises:
        ConfigError: the file is missing, is not the expected one, or does not fit the net.
    """
    if table.weights is None and table.weights_sha256 is None:
        return fresh
    if table.weights is None:
        raise ConfigError(
            "this run begins with a file of weights, which a part of the net that stays here needs "
            f"(sha256 {table.weights_sha256}): join with --weights FILE, where FILE is your copy"
        )
    _digest(table.weights, table.weights_sha256)
    return _replace(table.weights, net, fresh)


def with_rows(weights: Weights, larger: Weights) -> Weights:
    """Return weights with the rows that those of a net of more classes have beyond theirs."""
    return {
        name: torch.cat([tensor, larger[name][len(tensor) :]])
        if tensor.shape != larger[name].shape
        else tensor
        for name, tensor in weights.items()
    }


def _digest(path: str, expected: str | None = None) -> str:
    """Return the SHA-256 of a file of weights; ConfigError if it is not the expected one."""
    try:
        found = sha256_of(Path(path))
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


def _replace(path: str, net: SplitNet, fresh: Weights) -> Weights:
    """Return fresh weights with the tensors of a file in their place.

    Raises:
        ConfigError: the file is no archive, or does not fit the net.
    """
    try:
        found, wanted = _tensors_in(path, net), net.everything()
    except ArchiveError as error:
        raise ConfigError(f"[net] weights: {error}") from None
    strange = sorted(found.keys() - wanted.keys())
    if strange or not found:
        what = f"tensor {strange[0]!r}, which the net has not" if strange else "no weights"
        raise ConfigError(f"[net] weights: {path} holds {what}")
    found = {name: _widened(name, tensor, wanted[name]) for name, tensor in found.items()}
    for name, tensor in found.items():
        if tensor.shape != wanted[name].shape or tensor.dtype != wanted[name].dtype:
            raise ConfigError(
                f"[net] weights: tensor {name!r} of {path} is {tensor.dtype} {list(tensor.shape)}; "
                f"the net has {wanted[name].dtype} {list(wanted[name].shape)}"
            )
    own = net.own_names or wanted  # a frozen A of adapters is in no file, and drawn from the seed
    lacking = [k for k in net.frozen - found.keys() if k in own and wanted[k].is_floating_point()]
    if lacking:
        raise ConfigError(
            f"[net] weights: {path} lacks {min(lacking)!r}, which is frozen and would stay random"
        )
    return {name: found.get(name, tensor) for name, tensor in fresh.items()}


def _widened(name: str, tensor: Tensor, wanted: Tensor) -> Tensor:
    """Return a head of fewer classes with the rows of the net for the others."""
    fewer = 0 < tensor.ndim == wanted.ndim and len(tensor) < len(wanted)
    if not (fewer and name.startswith("head/") and tensor.shape[1:] == wanted.shape[1:]):
        return tensor
    return torch.cat([tensor, wanted.detach()[len(tensor) :].to(tensor.dtype)])


def _tensors_in(path: str, net: SplitNet) -> Weights:
    """Return the tensors of a file by the net's keys.

    A plain safetensors file has the names of the module that the net is made from. A head for
    other classes than the run's is left out.

    Raises:
        ArchiveError: it is neither that nor an archive.
    """
    if not is_plain(path):
        return load(path)[0].weights
    own = net.own_names or {key: key.replace("/", ".", 1) for key in net.everything()}
    keys, wanted = {name: key for key, name in own.items()}, net.everything()
    found = {keys.get(name, name): tensor for name, tensor in plain_tensors(path).items()}
    heads = {key: t for key, t in wanted.items() if key.startswith("head/") and key in found}
    if all(found[key].shape[1:] == t.shape[1:] for key, t in heads.items()):
        for key in [key for key, t in heads.items() if found[key].shape != t.shape]:
            del found[key]
    return found
