"""The conformance suite: what every method must do, whatever it computes.

>>> from fedtide.testing import check_method
>>> check_method("fedavg", checks=["hyper_parameters_survive_toml", "loss_leaves_inputs_alone"])

A check raises an ``AssertionError`` that says what a method does not do.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedmodels.errors import ConfigError, suggestion
from fedmodels.training.method import Method
from fedtide.testing.case import Case
from fedtide.testing.detectors import check_detector
from fedtide.testing.suite import CHECKS
from fedtide.testing.trial import digits_in, registered

__all__ = ["CHECKS", "Case", "check_detector", "check_method"]


def check_method(
    method: str | type[Method],
    *,
    tables: Mapping[str, Any] | None = None,
    checks: Iterable[str] | None = None,
    **hyper_parameters: Any,
) -> None:
    """Check a method on three small clients that share scikit-learn's digits.

    Args:
        method: a class, a registered name, or ``file.py:Name``.
        tables: config tables that the method cannot do without, such as a net of its own.
        checks: which of :data:`CHECKS`; by default all.
        **hyper_parameters: small ones make the suite quick.

    Raises:
        AssertionError: the method fails a check; its name and the reason are in the message.
        ConfigError: no check has such a name.
    """
    wanted = CHECKS if checks is None else _known(checks)
    with tempfile.TemporaryDirectory() as place, registered(method) as name:
        root = Path(place)
        case = Case(name, hyper_parameters, tables or {}, digits_in(root / "data"), root)
        for check in wanted:
            try:
                CHECKS[check](case)
            except Exception as error:  # whatever the method's code raises
                label = method if isinstance(method, str) else method.name
                raise AssertionError(f"{label} fails {check!r}: {case.why(error)}") from error


def _known(checks: Iterable[str]) -> list[str]:
    found = list(checks)
    for name in found:
        if name not in CHECKS:
            known = ", ".join(CHECKS)
            raise ConfigError(f"unknown check {name!r}; known: {known}.{suggestion(name, CHECKS)}")
    return found
