"""What a relay knows of the run whose orders it passes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from fedmodels.errors import ConfigError
from fedmodels.methods import make
from fedmodels.resolution import received_experiment
from fedmodels.tensors.bundle import Problem
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.training.compression import Compression
from fedmodels.training.method import Method
from fedmodels.training.run import RunFacts


@dataclass(frozen=True)
class RelayedRun:
    """What a run says of what travels to and from clients of one problem.

    The specs need a net. They are made when the first order comes, not when a client joins: a
    client may state a problem whose net no memory holds. The coordinator above gives such a client
    no order.
    """

    facts: RunFacts
    method: Method

    @cached_property
    def upload_spec(self) -> BundleSpec:
        """Return what an upload must hold."""
        return self._compression.upload_spec(self.method.upload_spec(self.facts))

    @cached_property
    def payload_spec(self) -> Mapping[str, BundleSpec]:
        """Return what the parts of a payload must hold, by role."""
        common, personal = self.method.payload_spec(self.facts)
        return {"common": self._compression.payload_spec(common), "personal": personal}

    @cached_property
    def _compression(self) -> Compression:
        return Compression.of(self.method, self.facts)

    @classmethod
    def of(cls, table: Mapping[str, Any], problem: Problem, code: Sequence[Path]) -> Self:
        """Return what an experiment says.

        Args:
            table: the resolved experiment, as the coordinator above sends it.
            problem: of the clients.
            code: custom files whose code may run, if the experiment asks for it.

        Raises:
            ConfigError: relays cannot carry this run.
        """
        experiment = received_experiment(table, "the coordinator's experiment", code)
        if experiment.schedule.order == "asynchronous":
            raise ConfigError(
                "asynchronous rounds take no relay: let the clients join the coordinator itself"
            )
        method = make(experiment.method.name, **experiment.method.hyper_parameters())
        return cls(RunFacts(experiment, problem), method)
