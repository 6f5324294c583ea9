"""Prints what ``fedsrv methods NAME`` and ``fedsrv nets`` show, for a file of ``fedsrv/reference``.

python docs/site/catalogue.py > fedsrv/reference/catalogue.json
"""

from __future__ import annotations

import json
from typing import Any

from fedmodels.methods import file_of, names
from fedsrv.reference.catalogue import method_rows
from fedsrv.reference.net_catalogue import USUAL, net_rows


def content() -> dict[str, Any]:
    """Return the tables of all methods and nets that come with fedtide."""
    methods = {name: method_rows(name) for name in names() if file_of(name)}
    return {"methods": methods, "nets": {name: net_rows(name) for name in USUAL}}


if __name__ == "__main__":
    print(json.dumps(content(), indent=1, ensure_ascii=False, sort_keys=True))
