"""The check of the names of a method's functions."""

from __future__ import annotations

import difflib
import inspect

from fedmodels.methods import method_class
from fedmodels.methods.fedavg import FedAvg
from fedtide.case import Case

ALIKE = 0.9
"""Of 1: how alike two names are where one is a slip of the pen."""


def its_functions_are_spelt_as_known(case: Case) -> None:
    """No public function has nearly the name of one that is called: nobody would call it."""
    cls = method_class(case.name)
    known = {name for owner in cls.__mro__[1:] for name in vars(owner)} | vars(FedAvg).keys()
    for name, value in vars(cls).items():
        is_public = inspect.isfunction(value) and not name.startswith("_")
        if is_public and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=ALIKE)
            assert not near, f"{name} is never called: did you mean {near[0]}? Else give it a _"
