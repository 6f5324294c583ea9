"""A net in two parts, and its weights as named tensors.

Every net is a :class:`SplitNet`: ``base`` maps inputs to embeddings, ``head`` maps embeddings to
logits. Its tensors travel under their role, ``base/stem.conv.weight`` or ``head/bias``: the key of
the state dict with the first dot turned into a slash.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedmodels.errors import PayloadError, suggestion
from fedmodels.types import Bundle, BundleSpec, Weights


class SplitNet(nn.Module):
    """A feature extractor and a classifier: ``forward(x) = head(features(x))``.

    Attributes:
        base: maps (B, *input_shape) to embeddings (B, d).
        head: maps (B, d) to logits (B, K).
        width: d, the number of coordinates of an embedding.
        mixes_examples: whether an embedding depends on its batch even in evaluation mode.
    """

    def __init__(
        self, base: nn.Module, head: nn.Module, width: int, *, mixes_examples: bool = False
    ) -> None:
        super().__init__()
        self.mixes_examples = mixes_examples
        self.base, self.head, self.width = base, head, width

    def features(self, x: Tensor) -> Tensor:
        """Return the embeddings (B, d) of a batch (B, *input_shape)."""
        z: Tensor = self.base(x)
        return z

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (B, K) of a batch (B, *input_shape)."""
        logits: Tensor = self.head(self.features(x))
        return logits

    def shared_keys(self) -> frozenset[str]:
        """Return the keys of the representation: every ``base/…``, buffers included."""
        return frozenset(key for key in _tensors(self) if key.startswith("base/"))

    def personal_keys(self) -> frozenset[str]:
        """Return the keys of the classifier: every key that is not shared."""
        return frozenset(_tensors(self)) - self.shared_keys()


def _tensors(net: nn.Module) -> dict[str, Tensor]:
    """Return the live parameters and buffers of a net by role-prefixed key."""
    return {key.replace(".", "/", 1): tensor for key, tensor in net.state_dict().items()}


def weights_of(net: nn.Module) -> Weights:
    """Return copies of a net's parameters and all its buffers on the CPU, by role-prefixed key.

    They are laid out in the order of their shape, whatever the net's memory format.
    """
    plain = torch.contiguous_format
    tensors = _tensors(net).items()
    return {k: t.detach().to("cpu", copy=True, memory_format=plain) for k, t in tensors}


def load_weights(net: nn.Module, weights: Mapping[str, Tensor], *, strict: bool = True) -> None:
    """Copy weights into a net in place; the net keeps its device and its dtypes.

    Args:
        net: the net to fill.
        weights: tensors by role-prefixed key.
        strict: ``False`` allows a part of the net's keys; what is absent keeps its value.

    Raises:
        PayloadError: a key is unknown, or missing while ``strict``, or a shape differs.
    """
    targets = _tensors(net)
    for key, tensor in weights.items():
        target = targets.get(key)
        if target is None:
            raise PayloadError(f"the net has no tensor {key!r}.{suggestion(key, targets)}")
        if target.shape != tensor.shape:
            raise PayloadError(
                f"tensor {key!r} is {list(tensor.shape)}; the net has {list(target.shape)}"
            )
    missing = sorted(set(targets) - set(weights))
    if strict and missing:
        raise PayloadError(f"tensor {missing[0]!r} of the net is missing ({len(missing)} in all)")
    with torch.no_grad():
        for key, tensor in weights.items():
            targets[key].copy_(tensor)


def spec_of(weights: Weights) -> BundleSpec:
    """Return the spec that admits exactly a bundle of such weights."""
    return BundleSpec.of(Bundle(weights=weights))
