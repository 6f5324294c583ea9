"""Classes that come while a run goes on: what has a row for each class gets one more.

The shapes of what a method gives for K, K + 1 and K + 2 classes tell which tensors have such rows.
Where shapes cannot tell, the method's function ``grown`` returns the larger tensor. A run grows by
one class at a time, and the row of class c is row c of what the run's seed gives for c + 1 classes.
So it does not matter which classes come together.

A state may hold more than ``init_server`` and ``init_client`` give. A tensor with the name of
another one, as ``twin/head/weight`` has the name ``head/weight``, has rows where that one has rows.
A new row of it is that of initial weights; it is zero in what the server keeps for itself, and in
what a client still owes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedmodels.errors import ConfigError
from fedmodels.nets.split import load_weights, weights_of
from fedmodels.numerics.randomness import generator
from fedmodels.parts.growth_by_method import grown
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.bundle_spec import TensorSpec
from fedmodels.training.asked import asked, needs_server_data
from fedmodels.training.contexts import ServerState
from fedmodels.training.hooks import init_client, init_server
from fedmodels.training.initial_weights import with_rows
from fedmodels.training.method import Method
from fedmodels.training.run import RunFacts
from fedmodels.training.server_optimizer import grown_moments

Form = Tensor | TensorSpec
Forms = Mapping[str, Form]
"""Tensors, or what is known of them, by the flat keys of a bundle."""
Thrice = Sequence[Forms]
"""The same for K, K + 1 and K + 2 classes."""


def check_grows(method: Method, run: RunFacts) -> None:
    """Check that a class beyond those of a run may come while it goes on.

    Raises:
        ConfigError: the method, or the net, cannot take one more.
    """
    try:
        if not asked(method, "grows_classes", {}, True):
            raise ConfigError("its class says grows_classes = False")
        if needs_server_data(method):
            raise ConfigError("its server half trains on examples of its own, which lack the class")
        _check_net(run)
        growth = StateGrowth(method, run, run.for_classes(run.problem.num_classes + 1))
        first = InitialStates.of(method, run)
        growth.server(first.server)
        growth.client(0, init_client(method, first.run, 0))
    except ConfigError as error:
        raise ConfigError(
            f"method {method.name!r} with net {run.experiment.net.name!r} takes no class that "
            f"comes while a run goes on: {error}; list every class in [data] classes from the start"
        ) from None


@dataclass(frozen=True)
class StateGrowth:
    """Grows the states of a run; what the method gives is built once for all its clients."""

    method: Method
    before: RunFacts
    now: RunFacts
    _given: dict[int, InitialStates] = field(default_factory=dict)
    """By number of classes."""

    def server(self, state: ServerState) -> ServerState:
        """Return a server's state for the classes of ``now``; rows of earlier ones keep their bits.

        Raises:
            ConfigError: nothing tells which tensors have a row for each class.
        """
        for given in self._steps():
            first = [each.server for each in given]
            nobody = Bundle()
            clients = {
                c: self._grown(held, given, [each.clients.get(c, nobody) for each in first])
                for c, held in state.clients.items()
            }
            common = self._grown(state.common, given, [each.common for each in first])
            state = ServerState(
                common,
                self._grown(state.own, given, [each.own for each in first], zeros=True),
                clients,
                grown_moments(self.now, state.optimizer, common),
            )
        return state

    def client(self, client: int, state: Bundle, owed: tuple[str, ...] = ()) -> Bundle:
        """Return a client's private state as it is stored, as :meth:`server` does.

        New rows of weights under the prefixes ``owed`` are zero.
        """
        for given in self._steps():
            first = [init_client(self.method, each.run, client) for each in given]
            state = self._grown(state, given, first, owed=owed)
        return state

    def _steps(self) -> Iterator[list[InitialStates]]:
        """Yield what the method gives for K, K + 1 and K + 2 classes, for each class that came."""
        for classes in range(self.before.problem.num_classes, self.now.problem.num_classes):
            for n in range(classes, classes + 3):
                if n not in self._given:
                    self._given[n] = InitialStates.of(self.method, self.before.for_classes(n))
            yield [self._given[n] for n in range(classes, classes + 3)]

    def _grown(
        self,
        held: Bundle,
        given: Sequence[InitialStates],
        first: Sequence[Bundle],
        *,
        zeros: bool = False,
        owed: tuple[str, ...] = (),
    ) -> Bundle:
        """Return a bundle with room for one more class; the method gives ``first`` in its place.

        With ``zeros`` a new row is zero where the method gives none in this place.
        """
        owed = tuple(f"weights/{prefix}" for prefix in owed)
        own = [bundle.by_key() for bundle in first]
        sources = [own, *zip(*(each.forms for each in given), strict=True)]
        told = grown(self.method, given[1].run, held)
        found = {key: tensor for key, tensor in own[1].items() if key not in own[0]}
        for key, tensor in held.by_key().items():
            if key in told:
                found[key] = told[key]
            elif row := _row_of(key, tensor, sources, given[0].run.problem.num_classes):
                axis, new = row
                is_zero = key.startswith(owed) or (zeros and key not in own[0])
                found[key] = torch.cat([tensor, torch.zeros_like(new) if is_zero else new], axis)
            else:
                found[key] = tensor
        made = Bundle.from_keys(found)
        names = dict.fromkeys([*held.weights, *made.weights])  # in the order that they had
        return replace(made, weights={name: made.weights[name] for name in names})


@dataclass(frozen=True)
class InitialStates:
    """What a method gives for a number of classes, before anything is learnt."""

    run: RunFacts
    server: ServerState
    forms: Sequence[Forms]
    """Where the form of a tensor is looked up, in this order."""

    @classmethod
    def of(cls, method: Method, run: RunFacts) -> InitialStates:
        """Ask the method; initial weights are the seed's, also where the run has a file of them."""
        run = run.beginning_with(weights_of(run.make_net()))
        server = init_server(method, run)
        bundles = (server.common, server.own, Bundle(run.initial_weights))
        specs = (*method.payload_spec(run), method.upload_spec(run))
        known = [{**spec.required, **spec.optional} for spec in specs]
        return cls(run, server, [*(bundle.by_key() for bundle in bundles), *known])


def _row_of(
    key: str, tensor: Tensor, sources: Iterable[Thrice], classes: int
) -> tuple[int, Tensor] | None:
    """Return the axis along which a tensor has a row for each class, and the row of the next one.

    None if it has no such rows.

    Raises:
        ConfigError: it may have such rows, and nothing tells.
    """
    known = [
        [forms.get(name) for forms in thrice]
        for name in _names(key)
        for thrice in sources
        if name in thrice[0]
    ]
    fitting = [forms for forms in known if _fits(tensor, forms[0])]
    if not fitting:
        by_label = key.startswith(("prototypes/", "generators/"))
        if any(_axis(key, forms) is not None for forms in known) or (
            not known and not by_label and classes in tensor.shape
        ):
            raise ConfigError(
                f"nothing tells whether {key!r} of shape {list(tensor.shape)} has a row for each "
                f"of {classes} classes: give it in init_server or init_client, or override grown"
            )
        return None
    forms = min(fitting, key=lambda each: isinstance(each[0], TensorSpec))  # values come first
    axis, larger = _axis(key, forms), forms[1]
    if axis is None:
        return None
    if isinstance(larger, Tensor):
        return axis, larger.narrow(axis, tensor.shape[axis], 1)
    return axis, torch.zeros_like(tensor.narrow(axis, 0, 1))


def _names(key: str) -> Iterator[str]:
    """Yield a key, and the keys that it has without its first roles."""
    field_name, *parts = key.split("/")
    for first in range(len(parts)):
        yield "/".join([field_name, *parts[first:]])


def _fits(tensor: Tensor, form: Form | None) -> bool:
    """Tell whether a tensor has the shape of a form."""
    return (
        form is not None
        and tensor.dim() == len(form.shape)
        and all(n in (None, m) for n, m in zip(form.shape, tensor.shape, strict=True))
    )


def _axis(key: str, forms: Sequence[Form | None]) -> int | None:
    """Return the axis that is longer by one for each class more; None if all forms are alike.

    Raises:
        ConfigError: they differ in another way.
    """
    small, larger, largest = (() if form is None else tuple(form.shape) for form in forms)
    values = [form for form in forms if isinstance(form, Tensor) and key.startswith("scalars/")]
    if small == larger == largest and None not in forms and len({*map(float, values)}) < 2:
        return None
    for axis, size in enumerate(small):
        after = [(*small[:axis], size + more, *small[axis + 1 :]) for more in (1, 2) if size]
        if [larger, largest] == after:
            return axis
    raise ConfigError(
        f"{key!r} of shape {list(small)} has the shapes {list(larger)} and {list(largest)} for one "
        "class more and for two, or another value: override grown"
    )


def _check_net(run: RunFacts) -> None:
    """Check that a class more is a row more of a net, and changes no score of another class.

    Raises:
        ConfigError: names the first tensor that is in the way.
    """
    classes = run.problem.num_classes
    nets = [run.for_classes(n).make_net().eval() for n in range(classes, classes + 3)]
    small, larger, largest = (weights_of(net) for net in nets)
    if not small.keys() == larger.keys() == largest.keys():
        raise ConfigError("with one more class, the net has other tensors")
    for key, tensor in small.items():
        rows = [len(w[key]) if tensor.dim() else 0 for w in (small, larger, largest)]
        same_rows = all(w[key].shape[1:] == tensor.shape[1:] for w in (larger, largest))
        if not same_rows or (len({*rows}) > 1 and rows != [classes, classes + 1, classes + 2]):
            raise ConfigError(
                f"tensor {key!r} of the net is {list(tensor.shape)} for {classes} classes and "
                f"{list(larger[key].shape)} for one more, which is no row of that class"
            )
    load_weights(nets[1], with_rows(small, larger))
    x = torch.randn(2, *run.problem.input_shape, generator=generator(0))
    with torch.no_grad():
        before, after = nets[0](x), nets[1](x)[:, :classes]
    if not torch.allclose(before, after, rtol=1e-3, atol=1e-4):
        raise ConfigError("the net's scores of old classes change with the number of classes")
