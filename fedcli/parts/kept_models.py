"""The last model of a client: what its run leaves behind."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcli.runtime.client_part import Client, ClientPart, Scored
from fedmodels.errors import ArchiveError, DataError
from fedmodels.nets.split import SplitNet, whole
from fedmodels.nets.trained import KEY, SEEN, ModelFacts, header_of
from fedmodels.tensors.archive import PERSONAL
from fedmodels.tensors.bundle import Bundle, Prototypes, state_digest
from fedmodels.training.asked import local_view
from fedmodels.training.contexts import ClientContext
from fedpb.v1 import coordinator_pb2 as rpc

if TYPE_CHECKING:
    from fedmodels.nets.calibration import Calibration

log = logging.getLogger(__name__)


@dataclass
class LastStored:
    """Everybody's model, where a client of this process has stored it last."""

    stored: tuple[Mapping[str, str], str] | None = None
    """What it is, and its digest."""
    file: Path = field(default_factory=Path)


class FinalModel(ClientPart):
    """One client's last model, stored in its state directory.

    Where ``a_loc`` is scored after local training, it is the model that was scored last. Elsewhere
    it is the model after the last downlink.
    """

    for_evaluator = False

    def __init__(self, client: Client) -> None:
        """Share what was stored last with the clients of the process."""
        super().__init__(client)
        self._keeps_scored = local_view(client.method) == "after_local"
        how, tasks = client.experiment.schedule, client.data.num_tasks
        last = how.rounds * (1 if how.order == "rounds_outer" else tasks) - 1
        self._last_round = last if how.trains_all else None
        """Where all clients train in every round: only models of the last one may be kept."""
        self._last: LastStored = client.set_ups.shared.setdefault("last stored", LastStored())

    def scored(self, at: Scored) -> None:
        """Keep a model that was scored after local training, if it may be the client's last one."""
        client, order = self.client, at.order
        if order.kind != rpc.ORDER_KIND_TRAIN or not self._keeps_scored:
            return
        if self._last_round in (None, order.round):
            model = described(client, at.ctx.net, "after_local", order.round)
            client.states.keep_scored(order.interaction, order.base, *model)

    def final(self, order: rpc.Order, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        """Store the model that was scored last; where none was kept, the net.

        A net that is the same at all clients is one file.
        """
        client, states = self.client, self.client.states
        if scored := self._scored(order.base):
            model, header, place = scored
            now = with_names(header, client.data.class_names, client.run.merged)
            return states.save_personal(model, now, place if now == header else None)
        weights, facts = described(client, ctx.net, ctx.view, order.round)
        is_shared = ctx.view == "global" or not client.set_up.keeps
        stored = (facts, state_digest([("", weights)])) if is_shared else None
        same = stored is not None and stored == self._last.stored
        states.save_personal(weights, facts, self._last.file if same else None)
        self._last.stored, self._last.file = stored, states.path / PERSONAL

    def _scored(self, interaction: int) -> tuple[Bundle, Mapping[str, str], Path] | None:
        """Return the model that was scored after an interaction, where it was kept."""
        try:
            return self.client.states.scored(interaction)
        except ArchiveError as error:
            log.warning("%s; the model after the downlink is stored instead", error)
            return None


def with_names(
    header: Mapping[str, str], names: Sequence[str], merged: Sequence[tuple[int, int]] = ()
) -> Mapping[str, str]:
    """Return the header of a model's file with what its classes are called, and are, by now."""
    facts = json.loads(header[KEY])
    classes = facts["num_classes"]
    parts = [pair for pair in merged if max(pair) < classes]
    now = {"class_names": names[:classes], **({"merged": parts} if parts else {})}
    return {**header, KEY: json.dumps({**facts, **now})}


def described(
    client: Client, net: SplitNet, view: str, round: int
) -> tuple[Bundle, Mapping[str, str]]:
    """Return a net's weights, and the header of their file."""
    data, file, asked = client.data, client.data.file, client.run.experiment.net
    facts = ModelFacts(
        asked.name, asked.options(), file.input_shape, data.num_classes, file.scale,
        file.mean, file.std, data.class_names, client.method.name, view, round,
        client.method.rules[0], asked.code_sha256 or "", _transform(file.transform),
        _ranges(client), merged=client.run.merged,
    )  # fmt: skip
    found = _calibration(client, net)
    if found is None:
        return Bundle(weights=whole(net)), header_of(facts)
    facts = replace(
        facts, temperature=found.temperature, calibrated_on=found.examples, reach=found.reach,
        widths=found.widths,
    )  # fmt: skip
    seen = {SEEN: Prototypes.by_position(found.means)}
    return Bundle(weights=whole(net), prototypes=seen), header_of(facts)


def _calibration(client: Client, net: SplitNet) -> Calibration | None:
    """Return what the validation part tells of a net; None where noise hides something."""
    from fedmodels.problems.targets import targets_in  # a run without targets does not load it

    stream = client.stream
    if stream.kept is None or client.experiment.privacy is not None:
        return None
    from fedmodels.nets.calibration import calibrated, calibrated_targets

    first = max(0, stream.num_seen - (client.experiment.evaluate.last_tasks or stream.num_seen))
    sets = (stream.validation(task) for task in stream.counted(first, stream.num_seen))
    found = (one for one in sets if one is not None)
    targets = targets_in(client.data.file.transform, client.data.directory)
    if targets is not None:
        return calibrated_targets(net, found, targets)
    return calibrated(net, found, client.run.merged)


def _transform(facts: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return a transform without what was read last, which is nothing of a model."""
    return facts and {key: value for key, value in facts.items() if key != "mark"}


def _ranges(client: Client) -> Sequence[Sequence[float]]:
    """Return the plausible range of each column of a table; none where noise hides something.

    A level of a category may be rare, and is plausible all the same.
    """
    data = client.data
    if client.experiment.privacy is not None or data.file.transform is None:
        return ()
    from fedmodels.config.columns import OTHER
    from fedmodels.config.transforms import TableTransform, parse_transform

    how = parse_transform(data.file.transform, data.directory)
    if not isinstance(how, TableTransform):
        return ()
    columns = how.columns
    levels = {
        name
        for name, is_level in zip(columns.channels, columns.are_levels, strict=True)
        if is_level and not name.endswith(f"={OTHER}")
    }
    try:
        found = data.ranges()
    except DataError as error:  # they are not needed for training any more
        log.warning("the model has no value ranges of columns: %s", error)
        return ()
    if len(found) != len(columns.channels):
        return found
    return [
        [0.0, 1.0] if name in levels else pair
        for name, pair in zip(columns.channels, found, strict=True)
    ]
