"""The model that a client keeps of a run: the one that stands for it in ``a_loc``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedcli.data.store.client_data import ClientData
from fedcli.runtime.state import PERSONAL, StateDirectory
from fedmodels.config.experiment import Experiment
from fedmodels.errors import ArchiveError
from fedmodels.nets.split import SplitNet, whole
from fedmodels.nets.trained import ModelFacts, header_of
from fedmodels.tensors.bundle import Bundle, ClientId, state_digest
from fedmodels.training.method import Method
from fedpb.v1 import coordinator_pb2 as rpc

log = logging.getLogger(__name__)


@dataclass
class LastStored:
    """Everybody's model, where a client of this process has stored it last."""

    stored: tuple[Mapping[str, str], str] | None = None
    """What it is, and its digest."""
    file: Path = field(default_factory=Path)


@dataclass(frozen=True)
class FinalModel:
    """One client's last model, stored in its state directory.

    Where ``a_loc`` is scored after local training, it is the model that was scored last. Elsewhere
    it is the model after the last downlink.
    """

    client: ClientId
    data: ClientData
    states: StateDirectory
    experiment: Experiment
    method: Method
    last: LastStored

    def keep_scored(self, order: rpc.Order, net: SplitNet) -> None:
        """Keep a model that was scored after local training, if it may be the client's last one.

        Where all clients train in every round, only those of the last round may be.
        """
        if self.method.local_view != "after_local" or not isinstance(self.client, int):
            return
        how = self.experiment.schedule
        per_task = how.order != "rounds_outer"
        last = how.rounds * (self.data.num_tasks if per_task else 1) - 1
        any_round = how.selects or how.is_asynchronous or how.open
        if any_round or order.round == last:
            model = self.described(net, "after_local", order.round)
            self.states.keep_scored(order.interaction, order.base, *model)

    def store(self, order: rpc.Order, net: SplitNet, view: str, *, shared: bool) -> None:
        """Store the model that was scored last; where none was kept, the net as this view has it.

        Args:
            order: the last one of the run.
            net: the client's model after the downlink.
            view: the view that the net was loaded for.
            shared: whether the net is the same at all clients; it is one file then.
        """
        if scored := self._scored(order.base):
            return self.states.save_personal(*scored)
        weights, facts = self.described(net, view, order.round)
        found = (facts, state_digest([("", weights)])) if shared else None
        same = found is not None and found == self.last.stored
        self.states.save_personal(weights, facts, self.last.file if same else None)
        self.last.stored, self.last.file = found, self.states.path / PERSONAL

    def _scored(self, interaction: int) -> tuple[Bundle, Mapping[str, str], Path] | None:
        """Return the model that was scored after an interaction, where it was kept."""
        try:
            return self.states.scored(interaction)
        except ArchiveError as error:
            log.warning("%s; the model after the downlink is stored instead", error)
            return None

    def described(self, net: SplitNet, view: str, round: int) -> tuple[Bundle, Mapping[str, str]]:
        """Return a net's weights, and the header of their file."""
        file, asked = self.data.file, self.experiment.net
        facts = ModelFacts(
            asked.name, asked.options(), file.input_shape, self.data.num_classes, file.scale,
            file.mean, file.std, self.data.class_names, self.method.name, view, round,
            self.method.rules[0], asked.code_sha256 or "", file.transform,
        )  # fmt: skip
        return Bundle(weights=whole(net)), header_of(facts)
