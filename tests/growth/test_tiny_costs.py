"""A tiny run and each method cost what they did: a guard, a help or an import has to be counted.

``FEDTIDE_REWRITE_COSTS=1`` stores the counts anew; review the diff.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.fedmodels.methods.test_conformance import NAMES, NEEDS, SMALL

STORED = Path(__file__).with_name("tiny_costs.json")
REWRITE = os.environ.get("FEDTIDE_REWRITE_COSTS") == "1"
MORE = 1.05
"""Of a stored count; packages of other releases have a few modules and operators more."""
LESS = 0.85
"""Below that the stored count would no longer notice what comes back."""


def counts() -> dict[str, dict[str, int]]:
    """Return what a tiny run and every method cost here."""
    asked = {name: (SMALL.get(name, {}), NEEDS.get(name, {})) for name in NAMES}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.growth.tiny_costs"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert not done.returncode, done.stderr
    return dict(json.loads(done.stdout))


def test_a_run_and_each_method_cost_what_they_did():
    found = counts()
    if REWRITE:
        lines = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in found.items())
        STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    stored = json.loads(STORED.read_text())
    assert found.keys() <= stored.keys(), "store the counts anew"  # a plugin may be gone
    moved = [
        f"{name}: {kind} {row[kind]}, stored {count}"
        for name, row in found.items()
        for kind, count in stored[name].items()
        if not LESS * count <= row[kind] <= MORE * count
    ]
    assert moved == []
