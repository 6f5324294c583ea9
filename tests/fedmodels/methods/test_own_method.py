"""A custom method that declares something wrong gets one line."""

from __future__ import annotations

import io
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fedmodels import methods
from fedmodels.errors import ConfigError
from fedmodels.methods import make
from fedmodels.nets import check_net
from fedtide.runs import _tables
from tests.conftest import tiny_experiment

START = """
from __future__ import annotations
import torch
from dataclasses import dataclass, field
from fedtide import FedAvg

@dataclass(frozen=True, kw_only=True)
class Mine(FedAvg):
    '''Mine.'''

"""


def own(folder: Path, body: str) -> str:
    """Return the name of a class with these lines in a file of its own."""
    (folder / "mine.py").write_text(START + "".join(f"    {line}\n" for line in body.splitlines()))
    return f"{folder / 'mine.py'}:Mine"


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (
            "mu: float = 1.0\ndef __post_init__(self):\n    raise ValueError('mu is odd')",
            "refuses its values: ValueError: mu is odd",
        ),
        ("mu: float", "key 'mu' is missing in [method]: "),
        ("name: str = 'x'", "no field may be called 'name'"),
        ("def views(self):\n    return ('global',)", "views must be a property: put @property"),
        (
            "def shares(self, name):\n    return True",
            "shares takes (self, name), and is called with (self, run, name)",
        ),
        ("mu: Unknown = 1", "the type of a field cannot be read: name 'Unknown' is not defined"),
        ("mu: torch.Tensor = torch.zeros(2)", "the field 'mu' holds a Tensor, which no config"),
        ("mu: dict = field(default_factory=lambda: {'a': [object()]})", "'mu.a' holds a object"),
    ],
)
def test_what_is_declared_wrong_gets_one_line(tmp_path, body, line):
    name = own(tmp_path, body)
    with pytest.raises(ConfigError) as caught:
        tiny_experiment(method=name)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "mine.py:Mine" in str(caught.value)


def test_a_class_may_have_the_name_of_a_method_with_readings(tmp_path):
    """Its own table has no readings, though it inherits from the class that has them."""
    file = tmp_path / "gldp.py"
    file.write_text(
        "from fedmodels.methods import gldp\nclass Gldp(gldp.Gldp):\n    mine: int = 3\n"
    )
    found = tiny_experiment(method={"name": f"{file}:Gldp", "t": 1, "s": 1})
    table = found.method.hyper_parameters()
    assert table["mine"] == 3
    assert "reading" not in table
    assert tiny_experiment(method=found.method.model_dump(exclude={"code_sha256"})).method.name


@pytest.mark.needs("reference")
def test_the_page_of_a_method_shows_fields_without_defaults(tmp_path):
    from fedplugins.reference.catalogue import method_table

    name = own(
        tmp_path, "mu: float\nsizes: tuple[int, ...] = field(default_factory=lambda: (1, 2))"
    )
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(method_table(name))
    text = console.export_text()
    assert "(none: give one)" in text
    assert "(1, 2)" in text
    assert "MISSING" not in text


def test_a_class_is_no_name():
    with pytest.raises(ConfigError, match=r"of a class, write FedAvg\(…\)"):
        make(type(make("fedavg")))  # type: ignore[arg-type]


@pytest.mark.needs("reference")
def test_a_broken_entry_point_hides_no_other_method(monkeypatch):
    from fedplugins.reference.catalogue import methods_table

    points = [
        EntryPoint("broken", "no_such_module:Method", "fedtide.methods"),
        EntryPoint("unsaid", "fractions", "fedtide.methods"),
    ]

    def found(group: str, name: str | None = None) -> list[EntryPoint]:
        return [p for p in points if name in (None, p.name)]

    monkeypatch.setattr(methods, "offered", found)
    with pytest.raises(
        ConfigError, match=r"'broken' of fedtide\.methods, no_such_module:Method, ca"
    ):
        make("broken")
    console = Console(record=True, width=300, file=io.StringIO())
    console.print(methods_table())
    text = console.export_text()
    assert "cannot be loaded: ModuleNotFoundError" in text
    assert "registers no method of that name" in text
    assert "fedprox" in text


def test_what_builds_a_net_is_callable_and_may_take_any_option(tmp_path):
    (tmp_path / "net.py").write_text(
        "number = 3\ndef net(num_classes, input_shape, **options):\n    return options\n"
        "def few(num_classes, input_shape, width=3):\n    return width\n"
    )
    place = f"{tmp_path / 'net.py'}"
    with pytest.raises(ConfigError, match=r"net.py:number' is int; it must be a function"):
        check_net(f"{place}:number", [])
    assert check_net(f"{place}:net", ["width", "depth"])(3, (2,), width=4) == {"width": 4}
    with pytest.raises(ConfigError, match="unknown option 'depth'"):
        check_net(f"{place}:few", ["depth"])


def test_a_mapping_may_hold_paths_and_numbers_of_numpy(tmp_path):
    found = _tables({"data": {"root": tmp_path}}, {"data.name": tmp_path / "a.py"})
    assert found == {"data": {"root": str(tmp_path), "name": str(tmp_path / "a.py")}}
    found = _tables({}, {"seed": np.int64(3), "training.lr": np.float32(0.5)})
    assert found == {"seed": 3, "training": {"lr": 0.5}}
    with pytest.raises(ConfigError, match=r"method\.mu holds what no TOML file can: expected str"):
        _tables({}, {"method.mu": object()})
