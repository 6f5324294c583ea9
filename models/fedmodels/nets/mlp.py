"""``mlp``: fully connected layers over the flattened input."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from fedmodels.errors import ConfigError
from fedmodels.nets.split import SplitNet


def mlp(
    num_classes: int,
    input_shape: tuple[int, ...],
    *,
    hidden: Sequence[int] = (128, 64),
    adapters: int = 0,
) -> SplitNet:
    """Build a multi-layer perceptron with ReLU; the last of the ``hidden`` widths is d.

    Args:
        num_classes: K.
        input_shape: of one example.
        hidden: widths of the hidden layers. Without any, it is softmax regression: the head sees
            the inputs, and there is no base.
        adapters: rank of LoRA adapters beside the layers of the base, which is frozen then.

    Raises:
        ConfigError: ``hidden`` holds a width below 1, or adapters find no layer.
    """
    if any(width < 1 for width in hidden):
        raise ConfigError(f"option 'hidden' of net 'mlp' must list widths, not {list(hidden)}")
    layers: list[nn.Module] = [nn.Flatten()]
    fan_in = math.prod(input_shape)
    for width in hidden:
        layers += [nn.Linear(fan_in, width), nn.ReLU()]
        fan_in = width
    base = nn.Sequential(*layers)
    if adapters:
        from fedmodels.nets.adapters import add_adapters  # few nets have some

        add_adapters(base, adapters)
    return SplitNet(base, nn.Linear(fan_in, num_classes), fan_in)
