"""A plain classifier as a net in two parts: its last linear layer is the head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedmodels.errors import ConfigError
from fedmodels.nets.adapters import add_adapters
from fedmodels.nets.split import SplitNet

BATCH = 2
"""Examples of the batch that a cut is tried with."""


def split_classifier(
    made: nn.Module,
    name: str,
    num_classes: int,
    input_shape: tuple[int, ...],
    *,
    head: str = "",
    frozen: Sequence[str] = (),
    adapters: int = 0,
    adapter_alpha: float = 0.0,
    adapter_a: str = "trained",
) -> SplitNet:
    """Return a classifier in two parts; what it computes stays the same.

    Args:
        made: gives logits (B, K) of inputs (B, *input_shape). It is taken apart.
        name: the net's, for error lines.
        num_classes: K.
        input_shape: of one example.
        head: name of the layer that gives the logits; by default the last one with K outputs.
        frozen: beginnings of the names of parameters that stay as they are.
        adapters: rank of adapters beside the layers of the base, which is frozen then; 0 is none.
        adapter_alpha: alpha of the adapters; 0 is their rank.
        adapter_a: ``frozen`` keeps A as it was drawn, and B alone trains and travels (FFA-LoRA).

    Raises:
        ConfigError: there is no such layer, it is not the last step, or nothing is left to train.
    """
    path = head or last_layer(made, num_classes)
    if path is None:
        raise ConfigError(
            f"net {name!r} has no linear layer with {num_classes} outputs: name its last one by "
            "[net] head"
        )
    names = {id(t): key for key, t in made.state_dict(keep_vars=True).items()}
    x = torch.ones(BATCH, *input_shape)
    before = called(made.eval(), x, name, "forward")
    top = _taken_off(made, path, name)
    if adapter_a not in ("trained", "frozen") or (adapter_a == "frozen" and not adapters):
        raise ConfigError(
            f"[net] adapter_a = {adapter_a!r}: it is 'trained', or 'frozen' where adapters are"
        )
    if adapters:
        add_adapters(made, adapters, adapter_alpha or None, freeze_a=adapter_a == "frozen")
    _freeze(made, top, name, frozen)
    net = SplitNet(made, top, top.in_features)
    after = called(net.eval(), x, name, "forward")
    if before.shape != after.shape or not torch.allclose(before, after, atol=1e-5, equal_nan=True):
        raise ConfigError(
            f"net {name!r} does more after its layer {path} than to return what that gives: name "
            "the last layer by [net] head"
        )
    net.own_names = {key: names[id(t)] for key, t in net.everything().items() if id(t) in names}
    return net.train()


def last_layer(made: nn.Module, num_classes: int) -> str | None:
    """Return the name of the last linear layer with so many outputs."""
    linear = [key for key, part in made.named_modules() if isinstance(part, nn.Linear)]
    fitting = [key for key in linear if made.get_submodule(key).out_features == num_classes]
    return fitting[-1] if fitting and fitting[-1] else None


def _taken_off(made: nn.Module, path: str, name: str) -> nn.Linear:
    """Put nothing in the place of a layer, and return the layer."""
    above, _, own = path.rpartition(".")
    try:
        parent, layer = made.get_submodule(above), made.get_submodule(path)
    except AttributeError:
        raise ConfigError(f"[net] head = {path!r}: net {name!r} has no such layer") from None
    if not isinstance(layer, nn.Linear):
        kind = type(layer).__name__
        raise ConfigError(f"[net] head = {path!r} of net {name!r} is {kind}, not a linear layer")
    setattr(parent, own, nn.Identity())
    return layer


def _freeze(base: nn.Module, top: nn.Module, name: str, frozen: Sequence[str]) -> None:
    """Freeze the parameters whose names begin so."""
    keys = {f"base/{key}": p for key, p in base.named_parameters()}
    keys |= {f"head/{key}": p for key, p in top.named_parameters()}
    for prefix in frozen:
        found = [p for key, p in keys.items() if key.startswith(prefix)]
        if not found:
            few = ", ".join(list(keys)[:3])
            raise ConfigError(
                f"[net] frozen: no parameter of net {name!r} begins with {prefix!r}; some: {few}"
            )
        for parameter in found:
            parameter.requires_grad_(False)
    if not any(p.requires_grad for p in keys.values()):
        raise ConfigError(f"[net] frozen: nothing of net {name!r} is left to train")


@torch.no_grad()
def called(part: object, x: Tensor, name: str, what: str) -> Tensor:
    """Call a part of a user's net on a batch."""
    assert callable(part)
    try:
        out = part(x)
    except Exception as error:  # whatever the user's code raises
        reason = str(error).splitlines()[0] if str(error) else ""
        raise wrong(
            name, f"{what} fails on a batch {form_of(x)}: {type(error).__name__}: {reason}"
        ) from error
    if not isinstance(out, Tensor):
        raise wrong(name, f"{what} gives {type(out).__name__}, not a tensor")
    return out


def form_of(tensor: Tensor) -> str:
    """Return the shape of a tensor in words."""
    return " x ".join(str(size) for size in tensor.shape) or "a scalar"


def wrong(name: str, what: str) -> ConfigError:
    """Return the error of a net."""
    return ConfigError(f"net {name!r} {what}")
