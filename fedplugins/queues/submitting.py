"""``python -m fedplugins.queues.submitting QUEUE``: checks a submitted run and puts it in a queue.

A process of its own does so, since methods import torch: the front stays small, and answers others
meanwhile. Standard input has a ``SubmitRunRequest``; standard output the run's name, or what is
wrong with it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from fedmodels.config.sent import without_places
from fedmodels.console.printable import printable
from fedmodels.errors import ConfigError, PayloadError, RunFailed
from fedmodels.host.processes import program
from fedmodels.times import SUBMIT_S
from fedpb.v1 import front_pb2 as pb
from fedplugins.queues.run_queue import submit


def put(request: pb.SubmitRunRequest, queue: Path) -> str:
    """Put a run that came over the network at the end of a queue; return its name there.

    Raises:
        ConfigError: its config is no good or names files, which could be code.
        PayloadError: it is no table.
    """
    from fedmodels.facts.resolution import experiment_of
    from fedpb.tables import values_of

    values = values_of(request.config)
    if without_places(values) != values:
        raise ConfigError("a config that names files must be submitted on the queue's machine")
    experiment = experiment_of(values, "the submitted config", code=())
    return submit(experiment, queue, request.name).place.name


def put_apart(request: pb.SubmitRunRequest, queue: Path) -> str:
    """Do as :func:`put` by another process.

    Raises:
        ConfigError: what that process said.
        RunFailed: it ended otherwise, or took too long.
    """
    pipe = subprocess.PIPE
    with program("fedplugins.queues.submitting", [str(queue)], stdin=pipe, stdout=pipe) as process:
        try:
            told, _ = process.communicate(request.SerializeToString(), SUBMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise RunFailed(f"the config could not be checked within {SUBMIT_S:g} s") from None
    lines = told.decode(errors="replace").splitlines()
    if process.returncode == ConfigError.exit_code and lines:
        raise ConfigError(printable(lines[-1]))
    if process.returncode or not lines:
        raise RunFailed(f"the config could not be checked: status {process.returncode}")
    return lines[-1]


def main() -> int:
    """Put the run of standard input in the queue of the command line; return the exit status."""
    try:
        request = pb.SubmitRunRequest.FromString(sys.stdin.buffer.read())
        print(put(request, Path(sys.argv[1])))
    except (ConfigError, PayloadError) as error:
        print(error)
        return ConfigError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
