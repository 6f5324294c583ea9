"""The nets, by name.

A net is built by a function ``(num_classes, input_shape, **options) -> SplitNet``; its module is
imported when the net is asked for. Third parties add nets by a path, ``file.py:Name``, or by entry
points, group ``fedtide.nets``: a class or function whose result is any module with ``features`` and
``head``.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from fedmodels.errors import ConfigError, suggestion
from fedmodels.own.code_names import is_own, of_a_file

if TYPE_CHECKING:
    from fedmodels.nets.own_net import Batches
    from fedmodels.nets.split import SplitNet

_BUILDERS = {
    "acgan": "fedmodels.nets.generative.acgan:acgan",
    "cnn5": "fedmodels.nets.cnn:cnn5",
    "digits-cnn": "fedmodels.nets.cnn:digits_cnn",
    "hart": "fedmodels.nets.hart:hart",
    "mlp": "fedmodels.nets.mlp:mlp",
    "resnet18": "fedmodels.nets.resnet:resnet18",
    "resnet18-imagenet": "fedmodels.nets.resnet:resnet18_imagenet",
    "resnet20": "fedmodels.nets.resnet:resnet20",
    "resnet20-b": "fedmodels.nets.resnet:resnet20_b",
    "timm": "fedmodels.nets.published:timm",
    "torchvision": "fedmodels.nets.published:torchvision",
    "vit-tiny": "fedmodels.nets.vit:vit_tiny",
}
"""Every net with a name: ``module:function``."""
_PUBLISHED = ("timm", "torchvision")
"""Nets of other libraries, which are tried as custom nets are."""


def net_names() -> list[str]:
    """Return the name of every net that :func:`make_net` builds, sorted."""
    return sorted({*_BUILDERS, *(point.name for point in entry_points(group="fedtide.nets"))})


def make_net(
    name: str, *, num_classes: int, input_shape: tuple[int, ...], **options: object
) -> SplitNet:
    """Build a net with fresh weights, drawn from torch's global generator: seed around the call.

    Args:
        name: one of :func:`net_names`.
        num_classes: K, the width of the logits.
        input_shape: shape of one example, e.g. ``(3, 32, 32)`` or ``(128, 6)``.
        **options: what the net's own function takes beyond these.

    Raises:
        ConfigError: the name or an option is unknown, an option has a wrong value, the net does
            not fit the inputs, or torch makes tensors of another type than float32.
    """
    import torch  # the listing of names needs it not

    if (dtype := torch.get_default_dtype()) is not torch.float32:
        raise ConfigError(
            f"torch's default dtype was set to {dtype} outside fedtide, which trains in "
            "float32: call torch.set_default_dtype(torch.float32)"
        )
    build = check_net(name, options)
    shape = tuple(input_shape)
    before = torch.get_rng_state()
    try:
        built = build(num_classes=num_classes, input_shape=shape, **options)
    except ConfigError:
        raise
    except Exception as error:  # torch refuses sizes and types in many ways
        said = ", ".join(f"{key} = {value!r}" for key, value in options.items()) or "no options"
        raise ConfigError(
            f"[net] {name!r} cannot be built with {said} for inputs {shape} and {num_classes} "
            f"classes: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        ) from error
    if name in _BUILDERS and name not in _PUBLISHED:
        return built
    from fedmodels.nets.own_net import Batches, as_split_net, check_repeats

    net = as_split_net(built, name, num_classes, shape)
    made_as = (build, shape, repr(sorted(options.items())))
    if made_as not in _TRIED:
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        again = build(num_classes=num_classes, input_shape=shape, **options)
        torch.set_rng_state(after)
        check_repeats(net, as_split_net(again, name, num_classes, shape), name)
        _TRIED[made_as] = Batches.of(net, shape, name)
    _TRIED[made_as].tell(net)
    return net


_TRIED: dict[tuple[Callable[..., SplitNet], tuple[int, ...], str], Batches] = {}
"""Custom nets that were seen to begin alike under one seed, by builder, inputs and options;
and what batches they take."""


def check_net(name: str, options: Iterable[str]) -> Callable[..., SplitNet]:
    """Check that a net takes these options; return what builds it.

    Raises:
        ConfigError: the name or an option is unknown, or what builds the net takes other arguments.
    """
    build = _builder(name)
    if not callable(build):
        raise ConfigError(
            f"[net] {name!r} is {type(build).__name__}; it must be a function or a class that "
            "takes num_classes and input_shape"
        )
    parameters = inspect.signature(build).parameters.values()
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    if not takes_any and (lacks := [n for n in _FIXED if n not in (p.name for p in parameters)]):
        raise ConfigError(
            f"[net] {name!r} takes no {' and no '.join(lacks)}: what builds a net is called with "
            "num_classes=, input_shape= and the options of [net]"
        )
    known = [p.name for p in parameters if p.name not in _FIXED and p.kind not in _ANY]
    for option in options:
        if option not in known and not takes_any:
            has = ", ".join(known) or "no options"
            raise ConfigError(
                f"unknown option {option!r} of net {name!r}, which has: {has}."
                f"{suggestion(option, [*known, 'name', 'weights'])}"
            )
    return build


_FIXED = ("num_classes", "input_shape")
_ANY = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def _builder(name: str) -> Callable[..., SplitNet]:
    """Import and return the function that builds the net."""
    build: Callable[..., SplitNet]
    if name in _BUILDERS:
        module, function = _BUILDERS[name].split(":")
        build = getattr(importlib.import_module(module), function)
        return build
    if is_own(name):  # looking through installed packages takes milliseconds
        from fedmodels.own.own_code import own

        build = own(name)
        return build
    for point in entry_points(group="fedtide.nets", name=name):
        from fedmodels.own.own_code import load_entry_point

        build = load_entry_point(point)
        return build
    names = net_names()
    raise ConfigError(
        f"unknown net {name!r} in [net]; known: {', '.join(names)}."
        f"{of_a_file(name) or suggestion(name, names)}"
    )
