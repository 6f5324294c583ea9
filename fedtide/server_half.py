"""The server half of a method, for rounds that another system runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fedmodels.config.combinations import parts_on
from fedmodels.errors import ConfigError, PayloadError
from fedmodels.facts.position import Interaction, Round
from fedmodels.methods import make
from fedmodels.tensors.bundle import Bundle, Problem, check_finite
from fedmodels.training.asked import asked
from fedmodels.training.contexts import Position, ServerContext
from fedmodels.training.hooks import (
    as_uploads,
    broadcast,
    init_server,
    learns_at_task_end,
    reduce,
    takes_means,
)
from fedmodels.training.run import RunFacts
from fedtide.runs import Config, experiment_from

SERVED = "server optimiser"
"""The part of a run that is there without a coordinator."""


class ServerHalf:
    """What a method does on the server, without a coordinator: weights out, uploads in.

    It is for methods whose clients and server send each other weights of the net and a number of
    examples, such as ``fedavg``, ``fedprox``, ``fedper`` and ``fedbn``, with any
    ``[server_optimizer]``. Of the config it takes ``seed`` and this table beside ``[method]`` and
    ``[net]``; how clients train is their own affair.
    """

    def __init__(
        self,
        config: Config,
        input_shape: tuple[int, ...],
        num_classes: int,
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin with the weights that a run of this config begins with.

        Args:
            config: as of :func:`fedtide.run`.
            input_shape: the shape of one example, such as ``(1, 28, 28)``.
            num_classes: how many classes there are.
            overrides: values by dotted key.

        Raises:
            ConfigError: the config is wrong, or the method or the run needs more than weights.
        """
        experiment = experiment_from(config, overrides)
        for part in parts_on(experiment):
            if part.keys and part.name != SERVED:
                raise ConfigError(f"{part.keys} needs a coordinator, not a server half alone")
        table = experiment.method
        self.method = make(table.name, **table.hyper_parameters())
        self.run = RunFacts(experiment, Problem(input_shape, num_classes))
        self.rounds = 0
        """How many rounds were reduced."""
        self._state = init_server(self.method, self.run)
        own = self.run.make_net().own_names
        self._names = {key: own.get(key, key.replace("/", ".", 1)) for key in self.run.forms}
        self._spec = self.method.upload_spec(self.run)
        common, personal = broadcast(self.method, self._context((0, 1)), self._state)
        sent = {*self._spec.required, *self._spec.optional}
        plain = {f"weights/{key}" for key in self._names} | {"scalars/num_examples"}
        ends = learns_at_task_end(self.method)
        is_plain = {*common.by_key(), *sent} <= plain and sent > {"scalars/num_examples"}
        of_all = asked(self.method, "counts_all_clients", {}, False)
        if personal or not is_plain or not takes_means(self.method) or ends or of_all:
            raise ConfigError(
                f"method {table.name!r} is more than a mean of the net's weights by numbers of "
                "examples: it needs fedtide's own clients and coordinator"
            )

    @property
    def weights(self) -> dict[str, Tensor]:
        """Return what clients are to train from, as a state dict of the net that ``[net]`` names.

        What the method keeps private at each client is missing: load it with ``strict=False``.
        """
        common, _ = broadcast(self.method, self._context(()), self._state)
        return {self._names[key]: tensor.clone() for key, tensor in common.weights.items()}

    def reduce(self, sent: Mapping[int, tuple[Mapping[str, Tensor], int]]) -> dict[str, float]:
        """End a round with what clients sent; return the method's own figures.

        Args:
            sent: by client, its state dict and on how many examples it was trained; further
                entries of the state dict stay unread.

        Raises:
            PayloadError: an upload lacks a tensor, has one of another shape or type, or holds what
                is not finite; the line names the client. Nothing has changed then.
        """
        uploads = {client: self._upload(client, *sent[client]) for client in sorted(sent)}
        ctx = self._context(tuple(uploads))
        state, figures = reduce(self.method, ctx, self._state, as_uploads(self.method, uploads))
        for _, bundle in state.named():
            check_finite(bundle)
        self._state, self.rounds = state, self.rounds + 1
        return dict(figures)

    def _context(self, cohort: tuple[int, ...]) -> ServerContext:
        at = Position(Interaction(self.rounds), Round(self.rounds), 0)
        return ServerContext(self.run, at, cohort)

    def _upload(self, client: int, weights: Mapping[str, Tensor], num_examples: int) -> Bundle:
        known = {k: n for k, n in self._names.items() if f"weights/{k}" in self._spec.required}
        found = {key: weights[name] for key, name in known.items() if name in weights}
        try:
            for name in (known[key] for key in found):
                if not isinstance(weights[name], Tensor):
                    raise PayloadError(f"{name!r} is no tensor")
            if not isinstance(num_examples, int):
                raise PayloadError(f"num_examples is {num_examples!r}, and no whole number")
            upload = Bundle(found, scalars={"num_examples": float(num_examples)})
            self._spec.check_bundle(upload)
            check_finite(upload)
            if num_examples < 0:
                raise PayloadError(f"num_examples is {num_examples}")
        except PayloadError as error:
            raise PayloadError(f"client {client}: {error}") from None
        return upload
