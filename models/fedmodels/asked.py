"""What a method says to a part of a run that the contract of all methods does not know.

The part keeps a table by method, which holds for classes that inherit from it as well. A class of
one's own says it by an attribute of that name.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

HOOKS: Mapping[str, str] = {
    "global_weights": "serving.md",
    "local_view": "metrics.md",
    "reported": "metrics.md",
    "pictures": "metrics.md",
    "reads_singly": "robustness.md",
    "weighs_prototypes": "secure-aggregation.md",
    "tells_classes": "privacy.md",
    "takes_frozen": "nets.md",
    "needs_server_data": "data.md",
    "learns_at_task_end": "streams.md",
    "grows_classes": "streams.md",
    "grown": "streams.md",
    "forgotten": "streams.md",
}
"""Attributes that parts ask for, and the page under ``docs/`` of each."""


def asked(method: object, hook: str, table: Mapping[str, Any], default: Any) -> Any:
    """Return what a method, or its class, says to a part.

    Args:
        method: an instance or a class.
        hook: the attribute, one of :data:`HOOKS`.
        table: by name of a method, or of a class of its file; a function takes the method first.
        default: for every other method.
    """
    cls = method if isinstance(method, type) else type(method)
    for kind in cls.__mro__:
        if hook in vars(kind):
            return getattr(method, hook)
        if kind.__module__.startswith("fedmodels.methods"):
            for name in (kind.__name__, str(vars(kind).get("name"))):
                if name in table:
                    told = table[name]
                    return partial(told, method) if callable(told) else told
    return default
