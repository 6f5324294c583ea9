"""Nets of torchvision and timm by name, split into base and head; nothing is ever downloaded."""

from __future__ import annotations

from collections.abc import Sequence

from fedmodels.errors import ConfigError, suggestion
from fedmodels.nets.classifier import split_classifier
from fedmodels.nets.split import SplitNet


def torchvision(
    num_classes: int,
    input_shape: tuple[int, ...],
    *,
    model: str = "resnet18",
    head: str = "",
    frozen: Sequence[str] = (),
    adapters: int = 0,
    adapter_alpha: float = 0.0,
    adapter_a: str = "trained",
) -> SplitNet:
    """Build a classifier of torchvision; ``[net] weights`` begins it with a file of yours.

    Args:
        num_classes: K.
        input_shape: of one example; most of these nets take (3, height, width).
        model: a name of ``torchvision.models.list_models()``.
        head: the layer that gives the logits; by default the last linear layer with K outputs.
        frozen: beginnings of the names of parameters that stay as they are, such as ``base/``.
        adapters: rank of LoRA adapters beside the layers of the base, which is frozen then.
        adapter_alpha: alpha of the adapters; 0 is their rank.
        adapter_a: ``frozen`` keeps A as it was drawn, and B alone trains and travels (FFA-LoRA).
    """
    from torchvision import models

    known = models.list_models(module=models)
    _check_name("torchvision", model, known)
    made = models.get_model(model, weights=None, num_classes=num_classes)
    return split_classifier(
        made, model, num_classes, input_shape, head=head, frozen=frozen, adapters=adapters,
        adapter_alpha=adapter_alpha, adapter_a=adapter_a,
    )  # fmt: skip


def timm(
    num_classes: int,
    input_shape: tuple[int, ...],
    *,
    model: str = "resnet18",
    head: str = "",
    frozen: Sequence[str] = (),
    adapters: int = 0,
    adapter_alpha: float = 0.0,
    adapter_a: str = "trained",
) -> SplitNet:
    """Build a classifier of timm (extra ``timm``), as ``torchvision`` does.

    Args:
        num_classes: K.
        input_shape: of one example; the first number is the net's count of channels.
        model: a name of ``timm.list_models()``.
        head: the layer that gives the logits; by default the last linear layer with K outputs.
        frozen: beginnings of the names of parameters that stay as they are, such as ``base/``.
        adapters: rank of LoRA adapters beside the layers of the base, which is frozen then.
        adapter_alpha: alpha of the adapters; 0 is their rank.
        adapter_a: ``frozen`` keeps A as it was drawn, and B alone trains and travels (FFA-LoRA).
    """
    try:
        import timm as library
    except ImportError:
        raise ConfigError("net 'timm' needs timm: pip install 'fedtide[timm]'") from None
    _check_name("timm", model, library.list_models())
    made = library.create_model(
        model, pretrained=False, num_classes=num_classes, in_chans=input_shape[0]
    )
    return split_classifier(
        made, model, num_classes, input_shape, head=head, frozen=frozen, adapters=adapters,
        adapter_alpha=adapter_alpha, adapter_a=adapter_a,
    )  # fmt: skip


def _check_name(library: str, model: str, known: Sequence[str]) -> None:
    """Check that a library has a model; other names would be places that it downloads from."""
    if model not in known:
        raise ConfigError(
            f"{library} has no model {model!r}; it has {len(known)}.{suggestion(model, known)}"
        )
