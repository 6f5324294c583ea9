"""A custom net: any module with ``features`` and ``head``, checked when it is built."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedmodels.nets.classifier import called, form_of, last_layer, split_classifier, wrong
from fedmodels.nets.split import SplitNet
from fedmodels.numerics.randomness import seeded
from fedmodels.tensors.bundle import DTYPES, tensor_bytes

BATCH = 2
"""Examples of the batch that a net is tried with."""


class Features(nn.Module):
    """The base of a user's net: its ``features``, without its head."""

    rows_are_independent: ClassVar[bool] = True

    net: Any

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """Return the embeddings (B, d) of a batch (B, *input_shape)."""
        z: Tensor = self.net.features(x)
        return z


def as_split_net(
    built: object, name: str, num_classes: int, input_shape: tuple[int, ...]
) -> SplitNet:
    """Return what a user's builder gave as a net in two parts.

    Args:
        built: a module whose ``features`` gives embeddings (B, d) of inputs (B, *input_shape), and
            whose module ``head`` gives logits (B, K) of embeddings; or a classifier that ends with
            a linear layer of K outputs, as those of torchvision.
        name: the net's, for error lines.
        num_classes: K.
        input_shape: of one example.

    Raises:
        ConfigError: it is no such module, or does not fit; says which part and which shape.
    """
    if not isinstance(built, nn.Module):
        raise wrong(name, f"is {type(built).__name__}, not a torch.nn.Module")
    if _is_plain(built) and last_layer(built, num_classes):
        _check_tensors(built, name)
        return split_classifier(built, name, num_classes, input_shape)
    if not callable(getattr(built, "features", None)):
        raise wrong(name, "has no features(x), which gives embeddings of shape (batch, d)")
    if not isinstance(getattr(built, "head", None), nn.Module):
        raise wrong(name, "has no module head, which gives logits, such as nn.Linear(d, classes)")
    _check_tensors(built, name)
    x = torch.ones(BATCH, *input_shape)
    was_training = built.training
    built.eval()
    with torch.no_grad():
        z = called(built.features, x, name, "features")
        if z.dim() != 2 or len(z) != BATCH or not z.is_floating_point():
            raise wrong(
                name, f"features gives {form_of(z)} for a batch of {BATCH}; flatten to 2 x d"
            )
        assert isinstance(built.head, nn.Module)
        logits = called(built.head, z, name, "head")
        if logits.shape != (BATCH, num_classes):
            raise wrong(name, f"head gives {form_of(logits)}; {BATCH} x {num_classes} are needed")
        if not isinstance(built, SplitNet) and type(built).forward is not nn.Module.forward:
            whole = called(built, x, name, "forward")
            if whole.shape != logits.shape or not torch.allclose(whole, logits, equal_nan=True):
                raise wrong(name, "forward(x) is not head(features(x)), which is what is trained")
    built.train(was_training)
    return built if isinstance(built, SplitNet) else _split(built, z.shape[1], x, name)


def _is_plain(net: nn.Module) -> bool:
    """Tell whether a module has neither a head nor a function of features, as torchvision's."""
    features = getattr(net, "features", None)
    has_function = callable(features) and not isinstance(features, nn.Module)
    return not has_function and not isinstance(getattr(net, "head", None), nn.Module)


def check_repeats(one: SplitNet, other: SplitNet, name: str) -> None:
    """Check that two nets built under one seed begin alike; ConfigError if a tensor differs."""
    again = other.tensors()
    for key, tensor in one.tensors().items():
        if key not in again or tensor_bytes(tensor) != tensor_bytes(again[key]):
            raise wrong(
                name,
                f"draws random numbers outside of torch: {key} differs when it is built again "
                "under one seed, and would in every process; draw by torch, such as torch.randn",
            )


@dataclass(frozen=True)
class Batches:
    """What batches a net takes."""

    takes_one: bool
    mixes_examples: bool
    normalises_batches: bool

    @classmethod
    def of(cls, net: SplitNet, input_shape: tuple[int, ...], name: str) -> Self:
        """Try a net with two examples and with one, in both modes; ConfigError where it fails."""
        x = torch.ones(BATCH, *input_shape)
        x[1] *= 0.5
        trial = copy.deepcopy(net)
        with seeded(0), torch.no_grad():
            called(trial.train(), x, name, "training mode")
            trains_one = not _needs_two(trial, x)
            z = trial.eval().base(x)
            takes_one = not _needs_two(trial.base, x)
            if _needs_two(trial.head, z):
                raise wrong(
                    name,
                    "has a head that normalises over the batch and keeps no statistics: it could "
                    "predict no single example; keep them (track_running_stats=True)",
                )
        norms = [part for part in net.parts if isinstance(part, _BatchNorm)]
        mixes = net.mixes_examples or any(part.running_mean is None for part in norms)
        return cls(takes_one, mixes or not takes_one, net.normalises_batches or not trains_one)

    def tell(self, net: SplitNet) -> None:
        """Let a net know what batches it takes."""
        net.takes_one, net.mixes_examples = self.takes_one, self.mixes_examples
        net.normalises_batches = self.normalises_batches


def _needs_two(part: nn.Module, x: Tensor) -> bool:
    """Tell whether a part gives numbers for two examples (2, …), and none for one of them."""
    if not bool(part(x).isfinite().all()):
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a deviation of one number
            return not bool(part(x[:1]).isfinite().all())
    except (RuntimeError, ValueError):  # torch's, of layers that normalise over the batch
        return True


def _split(net: nn.Module, width: int, x: Tensor, name: str) -> SplitNet:
    """Take the head off a module, and put both parts side by side."""
    head, names = net.head, {id(t): key for key, t in net.state_dict(keep_vars=True).items()}
    assert isinstance(head, nn.Module)
    shared = {id(p) for p in head.parameters()}
    del net.head
    if any(id(parameter) in shared for parameter in net.parameters()):
        raise wrong(name, "features and head share a parameter: give each its own")
    outside = any(not key.startswith("features.") for key in net.state_dict())
    if isinstance(net.features, nn.Module) and not outside:
        base: nn.Module = net.features
    else:
        base = Features(net)
    with torch.no_grad():
        called(base.eval(), x, name, "features without the head")
    split = SplitNet(base.train(), head, width)
    split.own_names = {key: names[id(tensor)] for key, tensor in split.everything().items()}
    return split


def _check_tensors(net: nn.Module, name: str) -> None:
    """Check that there are parameters, and that every tensor has a shape and a type that travel."""
    if next(net.parameters(), None) is None:
        raise wrong(name, "has no parameter: there is nothing to train")
    if not any(parameter.requires_grad for parameter in net.parameters()):
        raise wrong(name, "is frozen as a whole: there is nothing to train")
    for key, tensor in [*net.named_parameters(), *net.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise wrong(name, f"{key} has no shape yet: use no lazy layer")
        if tensor.dtype not in DTYPES.values() or tensor.layout != torch.strided:
            raise wrong(
                name, f"{key} is a tensor {tensor.dtype} {tensor.layout}, and cannot travel"
            )
        if tensor.device.type != "cpu":
            raise wrong(name, f"{key} is on {tensor.device}: build nets on the CPU")
    try:
        copy.deepcopy(net)
    except Exception as error:
        raise wrong(name, f"cannot be copied: {type(error).__name__}: {error}") from error
