"""The model that a client keeps of a run: the one that stands for it in ``a_loc``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from fedcli.data.store.client_data import ClientData
from fedcli.runtime.state import StateDirectory
from fedmodels.config.experiment import Experiment
from fedmodels.errors import ArchiveError
from fedmodels.nets.split import SplitNet, weights_of
from fedmodels.nets.trained import ModelFacts, header_of
from fedmodels.tensors.bundle import Bundle, ClientId
from fedmodels.training.method import Method
from fedpb.v1 import coordinator_pb2 as rpc

log = logging.getLogger(__name__)


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

    def keep_scored(self, order: rpc.Order, net: SplitNet) -> None:
        """Keep a model that was scored after local training, if it may be the client's last one.

        Where all clients train in every round, only those of the last round may be.
        """
        if self.method.local_view != "after_local" or not isinstance(self.client, int):
            return
        how = self.experiment.schedule
        per_task = how.order != "rounds_outer"
        last = how.rounds * (self.data.num_tasks if per_task else 1) - 1
        if how.selects or how.is_asynchronous or order.round == last:
            model = self._described(net, order, "after_local")
            self.states.keep_scored(order.interaction, order.base, *model)

    def store(self, order: rpc.Order, net: SplitNet, view: str) -> None:
        """Store the model that was scored last; where none was kept, the net as this view has it.

        Args:
            order: the last one of the run.
            net: the client's model after the downlink.
            view: the view that the net was loaded for.
        """
        self.states.save_personal(*(self._scored(order.base) or self._described(net, order, view)))

    def _scored(self, interaction: int) -> tuple[Bundle, Mapping[str, str]] | None:
        """Return the model that was scored after an interaction, where it was kept."""
        try:
            return self.states.scored(interaction)
        except ArchiveError as error:
            log.warning("%s; the model after the downlink is stored instead", error)
            return None

    def _described(
        self, net: SplitNet, order: rpc.Order, view: str
    ) -> tuple[Bundle, Mapping[str, str]]:
        """Return a net's weights, and the header of their file."""
        file, asked = self.data.file, self.experiment.net
        facts = ModelFacts(
            asked.name, asked.options(), file.input_shape, file.num_classes, file.scale, file.mean,
            file.std, file.class_names, self.method.name, view, order.round, self.method.rules[0],
            asked.code_sha256 or "", file.transform,
        )  # fmt: skip
        return Bundle(weights=weights_of(net)), header_of(facts)
