"""The facts of a run that all processes share: experiment, problem and initial net."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedmodels.config.combinations import halves_of, part_at
from fedmodels.config.experiment import Experiment
from fedmodels.errors import ConfigError
from fedmodels.nets import make_net
from fedmodels.nets.split import SplitNet, weights_of
from fedmodels.numerics.randomness import derive_seed, seeded
from fedmodels.tensors.bundle import ClientId, Problem, Weights

if TYPE_CHECKING:
    from fedmodels.problems.targets import Targets

T = TypeVar("T")


@dataclass(frozen=True)
class NetShape:
    """What is known of a net without the values of its weights."""

    forms: Weights
    parameters: tuple[str, ...]
    batch_norm_weights: frozenset[str]
    is_frozen: bool
    """Whether a part of it is."""
    width: int
    adapters: Mapping[str, str]
    """The key of B by the key of A, of each adapter whose A and B train."""

    @classmethod
    def of(cls, net: SplitNet) -> NetShape:
        """Return what a net says."""
        tensors = net.tensors()
        norms = {name for name, part in net.named_modules() if isinstance(part, _BatchNorm)}
        is_frozen, adapters = bool(net.frozen_tensors()), dict[str, str]()
        if is_frozen:
            from fedmodels.nets.adapters import adapters_in  # few nets have some

            adapters = adapters_in(net)
        return cls(
            {key: t.detach().to("meta") for key, t in tensors.items()},
            tuple(key for key, t in tensors.items() if isinstance(t, nn.Parameter)),
            frozenset(k for k in tensors if k.replace("/", ".", 1).rpartition(".")[0] in norms),
            is_frozen,
            net.width,
            adapters,
        )


@dataclass(frozen=True)
class RunFacts:
    """The facts of a run that both halves of a method know."""

    experiment: Experiment
    problem: Problem
    began_with: int | None = None
    """How many classes the run had at first, where more came while it went on."""
    merged: tuple[tuple[int, int], ...] = ()
    """Labels of classes that became part of another one, each with the label of that one."""

    def __post_init__(self) -> None:
        """Check training data against the config; ConfigError if examples to crop are no images."""
        shape, augment = self.problem.input_shape, self.experiment.training.augment
        if augment != "none" and len(shape) != 3:
            raise ConfigError(
                f"[training] augment = {augment!r} is for images, and examples have the shape "
                f"{list(shape)}: leave augment out"
            )

    def for_classes(self, number: int) -> RunFacts:
        """Return the facts of the same run when it has so many classes."""
        began_with = self.began_with or self.problem.num_classes
        return replace(
            self, problem=replace(self.problem, num_classes=number), began_with=began_with
        )

    @cached_property
    def of_each_net(self) -> tuple[RunFacts, ...]:
        """Return the facts of the clients of each net, that of ``[net]`` first."""
        if self.experiment.net.by_client is None:
            return (self,)
        tables = ({"net": net} for net in self.experiment.net.each)
        return tuple(replace(self, experiment=self.experiment.model_copy(update=t)) for t in tables)

    def of_client(self, client: ClientId) -> RunFacts:
        """Return the facts that a client's half works with: those of its net."""
        return self.of_each_net[self.experiment.net.number_of(client)]

    @cached_property
    def parts(self) -> tuple[Any, ...]:
        """Return what both halves know of the run's parts: classes, each a ``SharedPart``."""
        return tuple(halves_of(self.experiment, "shared"))

    @cached_property
    def hides_draws(self) -> bool:
        """Return whether what clients draw in training must stay their secret."""
        return any(part.hides_draws for part in self.parts)

    def once(self, find: Callable[[RunFacts], T]) -> T:
        """Return what a function finds out of the run; it is asked the first time alone."""
        known = self.__dict__.setdefault("_found", {})
        if find not in known:
            known[find] = find(self)
        found: T = known[find]
        return found

    def make_net(self, purpose: str = "init", role: str = "server") -> SplitNet:
        """Build the run's net; its initial weights depend on the run's seed, purpose and role.

        What is frozen does not.

        Raises:
            ConfigError: a part is frozen, and ``[net] weights`` is no file for it, or is not here.
        """
        net = self._built(purpose, role)
        with torch.no_grad():
            for key, tensor in net.frozen_tensors().items():
                tensor.copy_(self.frozen_weights[key])
        return net

    @cached_property
    def targets(self) -> Targets | None:
        """Return what is learned in place of classes; None where classes are."""
        if not self.experiment.targets:
            return None
        found: Targets = part_at("fedmodels.problems.targets:Targets").of(self.experiment)
        return found

    @cached_property
    def frozen_weights(self) -> Weights:
        """Return what is frozen: the same for all, never sent, and not moved by later classes."""
        if not self._shape.is_frozen:
            return {}
        return self._first(lambda net: {k: t.detach() for k, t in net.frozen_tensors().items()})

    def _built(self, purpose: str = "init", role: str = "server") -> SplitNet:
        table = self.experiment.net
        with seeded(derive_seed(self.experiment.seed, role, 0, purpose)):
            net = make_net(
                table.name,
                num_classes=self.problem.num_classes,
                input_shape=self.problem.input_shape,
                **table.options(),
            )
        net.check_batches(batch_size=self.experiment.training.batch_size)
        net.mixed_precision = self.experiment.training.mixed_precision
        if "_shape" not in self.__dict__:
            self.__dict__["_shape"] = NetShape.of(net)  # no other net is built for it
        return net

    @cached_property
    def _shape(self) -> NetShape:
        return NetShape.of(self._built())

    @cached_property
    def initial_weights(self) -> Weights:
        """Return the initial weights of all clients and the server.

        Rows of classes that came while the run went on are those of a net of so many classes.

        Raises:
            ConfigError: ``[net] weights`` is no file of weights for this net, or is not here.
        """
        return self._first(weights_of)

    def _first(self, part: Callable[[SplitNet], Weights]) -> Weights:
        """Return a part of the net's tensors as the run began, with rows for later classes."""
        net, classes = self.experiment.net, self.problem.num_classes
        begun = self.began_with or classes
        nets = (run._built() for run in (*map(self.for_classes, range(begun, classes)), self))
        first = next(nets)
        fresh = part(first)
        if begun == classes and net.weights is net.weights_sha256 is None:
            return fresh
        from fedmodels.training.initial_weights import from_file, with_rows  # reads archives

        start = from_file(net, first, fresh) if fresh else fresh
        return reduce(with_rows, map(part, nets), start)

    def forget_initial_weights(self) -> None:
        """Free the initial weights; the next access builds them again."""
        self.__dict__.pop("initial_weights", None)

    @cached_property
    def forms(self) -> Weights:
        """Return the names, shapes and dtypes of the net's weights, as tensors without values.

        They are on torch's meta device, and take no memory for values.
        """
        return self._shape.forms

    def beginning_with(self, weights: Weights) -> RunFacts:
        """Return the same facts with other initial weights; a file of weights is not read."""
        facts = replace(self)
        facts.__dict__.update(initial_weights=weights, _shape=self._shape)
        return facts

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Return the names of the weights that are parameters; the others are buffers."""
        return self._shape.parameters

    @cached_property
    def batch_norm_weights(self) -> frozenset[str]:
        """Return the names of the weights of batch normalisation, statistics included."""
        return self._shape.batch_norm_weights

    @cached_property
    def nets_draw(self) -> bool:
        """Return whether the run's nets draw random numbers in training, as dropout does."""
        net = self._built().train()
        x = torch.zeros(2, *self.problem.input_shape)
        with torch.no_grad(), seeded(0):
            before = torch.get_rng_state()
            net(x)
            return not torch.equal(before, torch.get_rng_state())

    @cached_property
    def width(self) -> int:
        """Return d, the number of coordinates of an embedding."""
        return self._shape.width

    @property
    def adapters(self) -> Mapping[str, str]:
        """Return the key of B by the key of A, of each adapter whose A and B train."""
        return self._shape.adapters
