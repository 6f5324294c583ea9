"""Prints what ``fedsrv methods NAME`` and ``fedsrv nets`` show, for the plugin ``reference``.

python docs/site/catalogue.py > fedplugins/reference/catalogue.json
"""

from __future__ import annotations

import json
from typing import Any

from fedmodels.methods import file_of, names
from fedplugins.reference.catalogue import method_rows
from fedplugins.reference.net_catalogue import USUAL, net_rows


def content() -> dict[str, Any]:
    """Return the tables of all methods and nets that come with fedtide."""
    methods = {name: method_rows(name) for name in names() if file_of(name)}
    return {"methods": methods, "nets": {name: net_rows(name) for name in USUAL}}


if __name__ == "__main__":
    print(json.dumps(content(), indent=1, ensure_ascii=False, sort_keys=True))
