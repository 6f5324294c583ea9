"""The check of the names of a method's functions."""

from __future__ import annotations

import difflib
import inspect

from fedmodels.methods import method_class
from fedmodels.methods.fedavg import FedAvg
from fedtide.testing.case import Case

ALIKE = 0.9
"""From 0 to 1: two names that are at least as alike count as one name, misspelt."""


def its_functions_are_spelt_as_known(case: Case) -> None:
    """No public function has nearly the name of one that fedtide calls: nothing would call it."""
    cls = method_class(case.name)
    known = {name for owner in cls.__mro__[1:] for name in vars(owner)} | vars(FedAvg).keys()
    for name, value in vars(cls).items():
        is_public = inspect.isfunction(value) and not name.startswith("_")
        if is_public and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=ALIKE)
            assert not near, f"{name} is never called: did you mean {near[0]}? Helpers begin with _"
