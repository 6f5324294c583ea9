"""Under which heading ``--help`` lists each command and option; those used most stand first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

Panels = Mapping[str, Sequence[str]]

COMMANDS: Panels = {
    "Run": ("init", "launch", "serve", "join", "relay", "forecast"),
    "Results": ("report", "predict", "export", "serve-model", "rollback", "lineage"),
    "Watch": ("status", "watch", "health"),
    "Steer a run": ("exclude", "retire", "set-aside", "classes", "close"),
    "Data": (
        "check", "add-task", "drop-task", "partition", "export-partition", "data", "pretrain",
    ),
    "Keep": ("backup", "restore", "recover"),
    "Trust": ("certs", "enrol", "rules", "verify", "audit"),
    "About": ("methods", "nets", "metrics", "schema", "plugins", "doctor"),
}  # fmt: skip
"""The commands of ``fedsrv`` and ``fedcli``, by what people do with them."""

OPTIONS: Panels = {
    "Run": (
        "--client-id", "--server", "--listen", "--out", "--state-dir", "--set", "--resume",
        "--device", "--hosts", "--stay", "--at-once", "--wait-for-sites", "--deploy",
        "--give-up-after", "--start-over", "--without", "--forget", "--evaluator", "--forecast",
        "--code", "--weights",
    ),
    "Data": (
        "--data", "--recipe", "--watch", "--dry-run", "--check", "--strict", "--announce",
        "--server-data",
    ),
    "What may leave this site": (
        "--rules", "--require-privacy", "--ledger", "--min-cohort", "--allow-method",
        "--allow-column", "--tell", "--scores", "--changing-cohorts", "--ask", "--show-uploads",
        "--show-tensors",
    ),
    "TLS": ("--tls-ca", "--tls-cert", "--tls-key", "--tls-client-ca", "--tls-crl", "--insecure"),
    "Watching": ("--dashboard", "--quiet", "--log-level", "--json"),
    "Ray": ("--on", "--host-cpus", "--host-gpus", "--node-dir"),
}  # fmt: skip
"""The options of commands that have many."""
MANY = 12
"""A command with fewer options has them in one list."""


def panel_of(name: str, panels: Panels) -> str | None:
    """Return the heading of a command or an option; None for one that no heading lists."""
    return next((panel for panel, names in panels.items() if name in names), None)


def in_order(names: Sequence[str], panels: Panels) -> list[str]:
    """Return names in the order of their headings; others follow as they are."""
    places = {name: place for place, name in enumerate(chain.from_iterable(panels.values()))}
    return sorted(names, key=lambda name: places.get(name, len(places)))
