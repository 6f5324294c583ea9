"""The table of docs/results/pfllib.md: published, PFLlib's code, ours, and the difference."""

from __future__ import annotations

import json
from pathlib import Path

RECORDS = Path(__file__).parents[1] / "records" / "pfllib"
PUBLISHED = {
    "practical": {
        **{"FedAvg": 85.85, "FedRep": 97.56, "FedPer": 97.44, "FedBABU": 97.46},
        **{"FedALA": 97.66, "FedProto": 97.40},
    },
    "pathological": {
        **{"FedAvg": 80.41, "FedRep": 99.56, "FedPer": 99.47, "FedBABU": 99.41},
        **{"FedALA": 99.57, "FedProto": 99.49},
    },
}
"""Per cent, of PFLlib's page at the pinned commit: the best of 2,000 rounds, all rows."""
VIEW = {"FedAvg": "global", "FedProto": "after_downlink:all_classes"}
"""What is compared with PFLlib's score: its FedProto answers among all classes."""


def page(name: str) -> str:
    """Return the table of a record, ``SPLIT-SHARE``."""
    record = json.loads((RECORDS / f"{name}.json").read_text())
    published, lines = PUBLISHED[name.partition("-")[0]], list[str]()
    for row, sides in record["rows"].items():
        theirs = sides["theirs"]
        own = sides["ours"]["0"][VIEW.get(row, "after_downlink")]
        rounds = [k for k in own if k in theirs]
        cells = [f"{published[row]:.2f}" if row in published else "–"]
        cells += [" / ".join(f"{100 * side[k]:.2f}" for k in rounds) for side in (theirs, own)]
        cells.append(" / ".join(f"{100 * (own[k] - theirs[k]):+.2f}" for k in rounds))
        lines.append(f"| {row} | {rounds and ' / '.join(rounds)} | " + " | ".join(cells) + " |")
    head = "| | rounds | published | their code | ours | ours − theirs |\n|---|---|---|---|---|---|"
    always = (
        f"| always the client's commonest class | – | – | | {100 * record['commonest']:.2f} | |"
    )
    return "\n".join(["", head, *lines, always, ""])
