"""The nets, as tables for the terminal and for a page: size, inputs, source and options."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from rich.table import Column, Table

from fedmodels.errors import ConfigError, suggestion
from fedmodels.nets import check_net, make_net, net_names
from fedplugins.reference.catalogue import markdown_of, setting_of, stored
from fedplugins.reference.rows import NetLine, Setting

FIXED = ("num_classes", "input_shape")
_ACGAN = "Odena et al., ICML 2017, https://arxiv.org/abs/1610.09585"
_RESNET = "He et al., CVPR 2016, https://arxiv.org/abs/1512.03385"
_VIT = "Dosovitskiy et al., ICLR 2021, https://arxiv.org/abs/2010.11929"


@dataclass(frozen=True)
class Usual:
    """Inputs that a net is made for, by which its size is told."""

    inputs: str
    shape: tuple[int, ...]
    classes: int
    source: str = ""


USUAL: dict[str, Usual | None] = {
    "acgan": Usual("images", (3, 32, 32), 10, _ACGAN),
    "cnn5": Usual("images", (1, 28, 28), 10, "FedMLP; the widths are ours"),
    "digits-cnn": Usual("images", (1, 8, 8), 10),
    "hart": Usual("windows, 6 channels", (128, 6), 6, "Ek et al., https://arxiv.org/abs/2209.11750"),
    "mlp": Usual("any", (1, 8, 8), 10),
    "resnet18": Usual("images", (3, 32, 32), 10, _RESNET),
    "resnet18-imagenet": Usual("images", (3, 64, 64), 200, _RESNET),
    "resnet20": Usual("images", (3, 32, 32), 10, _RESNET),
    "resnet20-b": Usual("images", (3, 32, 32), 10, _RESNET),
    "timm": None,
    "torchvision": None,
    "vit-tiny": Usual("images", (3, 32, 32), 10, f"{_VIT}; the size is FedAli's"),
}  # fmt: skip
"""None where the size is that of the model that is asked for."""
HEADS = ("net", "what it is", "inputs", "size of", "parameters", "multiply-adds", "source")


def nets_told() -> list[NetLine]:
    """Return one line for each net."""
    told = []
    for name in net_names():
        _, about, inputs, _, parameters, macs, source = _stored_or_read(name)[0]
        usual = USUAL.get(name)
        told.append(
            NetLine(
                name=name, about=about, inputs=inputs, source=source,
                input_shape=[*usual.shape] if usual else None,
                classes=usual.classes if usual else None,
                parameters=_number(parameters), multiply_adds=_number(macs),
            )
        )  # fmt: skip
    return told


def _number(text: str) -> int | None:
    return int(text.replace(",", "")) if text else None


def nets_table() -> Table:
    """Return the nets as a table."""
    table = Table("net", "what it is", "inputs", Column("parameters", justify="right"))
    for name in net_names():
        _, about, inputs, size, parameters, *_ = _stored_or_read(name)[0]
        table.add_row(name, about, inputs, f"{parameters} ({size})" if size else "")
    return table


def net_told(name: str) -> list[Setting]:
    """Return a net's options, as :func:`net_table` has them."""
    _check_known(name)
    return [setting_of(row, "setting") for row in _stored_or_read(name)[1]]


def _check_known(name: str) -> None:
    if name not in net_names():
        raise ConfigError(f"{name!r} is no net.{suggestion(name, net_names())} fedsrv nets lists")


def net_table(name: str) -> Table:
    """Return a net's options, their defaults and what they mean; ConfigError if it is unknown."""
    _check_known(name)
    cells, options = _stored_or_read(name)
    table = Table("option", "default", "meaning", title=f"{name}: {cells[1]}")
    for row in options:
        table.add_row(*row)
    return table


def _stored_or_read(name: str) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    cells, options = stored("nets").get(name) or net_rows(name)
    return cells, options


def net_rows(name: str) -> list[Any]:
    """Return the line of a net in the table of nets, and the rows of its options."""
    rows = [[key, repr(default), meaning] for key, (default, meaning) in options_of(name).items()]
    return [[*_cells(name)], rows]


def nets_markdown() -> str:
    """Return every net with its options as the tables of ``docs/nets.md``."""
    blocks = [markdown_of(HEADS, [(f"`{name}`", *_cells(name)[1:]) for name in net_names()])]
    for name in net_names():
        rows = [(f"`{key}`", f"`{d!r}`", text) for key, (d, text) in options_of(name).items()]
        if rows:
            blocks.append(f"## {name}\n\n" + markdown_of(("option", "default", "meaning"), rows))
    return "\n\n".join(blocks) + "\n"


def options_of(name: str) -> Mapping[str, tuple[Any, str]]:
    """Return the options of a net: for each its default, and what it means."""
    build = check_net(name, ())
    text = inspect.cleandoc(build.__doc__ or "").partition("Args:\n")[2].partition("\n\n")[0]
    said = dict(re.findall(r"^    (\w+): (.*(?:\n     .*)*)", text, re.MULTILINE))
    return {
        key: (parameter.default, " ".join(said.get(key, "").replace("``", "`").split()))
        for key, parameter in inspect.signature(build).parameters.items()
        if key not in FIXED and parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


@cache
def _cells(name: str) -> tuple[str, ...]:
    usual = USUAL.get(name)
    if usual is None:  # of another package, or many
        return name, _about(name), "", "", "", "", ""
    import torch  # takes seconds

    from fedmodels.nets.cost import multiply_adds

    with torch.random.fork_rng(devices=()):
        net = make_net(name, num_classes=usual.classes, input_shape=usual.shape)
    count = sum(p.numel() for p in net.parameters())
    shape = "×".join(map(str, usual.shape))
    size = f"{shape}, {usual.classes} classes"
    macs = multiply_adds(net, usual.shape)
    return name, _about(name), usual.inputs, size, f"{count:,}", f"{macs:,}", usual.source


def _about(name: str) -> str:
    """Return the first sentence of what builds a net, without its verb."""
    line = inspect.cleandoc(check_net(name, ()).__doc__ or "").partition("\n")[0]
    return line.removeprefix("Build ").replace("``", "`")
