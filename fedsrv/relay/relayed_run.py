"""What a relay knows of the run whose orders it passes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from fedmodels.errors import ConfigError
from fedmodels.methods import make
from fedmodels.resolution import experiment_of
from fedmodels.tensors.bundle import BundleSpec, Problem
from fedmodels.training.compression import Compression
from fedmodels.training.method import Method, RunFacts


@dataclass(frozen=True)
class RelayedRun:
    """The parts of a run that say what travels to and from clients of one problem."""

    problem: Problem
    method: Method
    upload_spec: BundleSpec
    payload_spec: Mapping[str, BundleSpec]
    """Of the parts of a payload, by role."""
    deadline_s: float | None
    together: int
    """Clients that a process trains together."""
    zstd: bool

    @classmethod
    def of(cls, table: Mapping[str, Any], problem: Problem, code: Sequence[Path]) -> Self:
        """Return what an experiment says.

        Args:
            table: the resolved experiment, as the coordinator above sends it.
            problem: of the clients.
            code: files of one's own whose code may run, if the experiment asks for it.

        Raises:
            ConfigError: relays cannot carry this run.
        """
        experiment = experiment_of(table, "the coordinator's experiment", code)
        if experiment.schedule.order == "asynchronous":
            raise ConfigError(
                "asynchronous rounds take no relay: let the clients join the coordinator itself"
            )
        method = make(experiment.method.name, **experiment.method.hyper_parameters())
        run = RunFacts(experiment, problem)
        how = Compression.of(method, run)
        common, personal = method.payload_spec(run)
        return cls(
            problem,
            method,
            how.upload_spec(method.upload_spec(run)),
            {"common": how.payload_spec(common), "personal": personal},
            experiment.server.deadline_s,
            experiment.training.together,
            experiment.zstd,
        )
