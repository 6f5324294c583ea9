"""``python -m tests.faults.nursery``: the fork server of the clients, for coordinators as well.

A coordinator that starts by a fork takes milliseconds instead of seconds, so that a suite can kill
it often. The hooks of ``inside`` come in with ``PYTHONPATH``, before anything else.
"""

from __future__ import annotations

import sys

import fedcli.cli
import fedcli.hosts
import fedsrv.cli

PRELOADED = ("fedsrv.coordinator", "fedsrv.launcher", "fedsrv.summary", "fedmodels.nets.mlp")
CLIENT = fedcli.cli.main


def run(arguments: list[str]) -> None:
    """Run ``fedcli join``, ``fedsrv serve`` or ``fedsrv launch``."""
    if arguments[0] == "join":
        CLIENT(arguments)
    else:
        sys.argv = ["fedsrv", *arguments]
        fedsrv.cli.main()


if __name__ == "__main__":
    fedcli.cli.main = run
    fedcli.hosts.PRELOADED = (*fedcli.hosts.PRELOADED, *PRELOADED)  # type: ignore[assignment]
    fedcli.hosts.main()
