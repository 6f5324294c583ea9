"""What a relay knows of the run whose orders it passes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from fedmodels.config.experiment import Experiment
from fedmodels.errors import ConfigError
from fedmodels.methods import make
from fedmodels.resolution import experiment_of
from fedmodels.tensors.bundle import BundleSpec, Problem
from fedmodels.training.compression import Compression
from fedmodels.training.method import Method, RunFacts


@dataclass(frozen=True)
class RelayedRun:
    """What a run says of what travels to and from clients of one problem.

    What a net is needed for is found out when the first order comes, not when a client joins: the
    coordinator above gives no order to a client whose problem is not the run's, and such a problem
    may be one that no memory holds a net for.
    """

    run: RunFacts
    method: Method

    @cached_property
    def upload_spec(self) -> BundleSpec:
        """Return what an upload must hold."""
        return self._compression.upload_spec(self.method.upload_spec(self.run))

    @cached_property
    def payload_spec(self) -> Mapping[str, BundleSpec]:
        """Return what the parts of a payload must hold, by role."""
        common, personal = self.method.payload_spec(self.run)
        return {"common": self._compression.payload_spec(common), "personal": personal}

    @cached_property
    def _compression(self) -> Compression:
        return Compression.of(self.method, self.run)

    @property
    def problem(self) -> Problem:
        """Return the clients' problem."""
        return self.run.problem

    @property
    def experiment(self) -> Experiment:
        """Return the run's config."""
        return self.run.experiment

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
        return cls(RunFacts(experiment, problem), method)
