"""Clients with nets of their own (``[net] by_client``): what travels must be the same over nets.

The server half of a method works with the facts of ``[net]``; a client's half works with those of
the client's net. So both know the same of uploads and payloads, and of nothing else.
"""

from __future__ import annotations

from fedmodels.config.experiment import Experiment
from fedmodels.errors import ConfigError
from fedmodels.tensors.bundle_spec import TensorSpec
from fedmodels.training.asked import asked
from fedmodels.training.hooks import check_frozen
from fedmodels.training.method import Method
from fedmodels.training.run import RunFacts
from fedmodels.training.wire import Wire

OWN = dict.fromkeys(("fedproto", "local", "PrototypesAlone"), True)
"""Methods and variants that share nothing of a net but its head or its embeddings' width. A method
of one's own says ``takes_own_nets = True``."""


def takes_own_nets(method: Method | type[Method]) -> bool:
    """Tell whether clients may have nets of their own."""
    return bool(asked(method, "takes_own_nets", OWN, False))


def with_own_nets(experiment: Experiment, method: Method) -> Experiment:
    """Return an experiment whose clients have nets of their own.

    Raises:
        ConfigError: its method trains one net, or has one model for all.
    """
    if not takes_own_nets(method) or "global" in method.views:
        raise ConfigError(
            f"[[net.by_client]] gives clients nets of their own, and method {method.name!r} trains "
            "one net over clients: leave it out, or take fedproto, fedtgp, lg-fedavg, or "
            'gldp and fedmlp with share = "prototypes"'
        )
    return experiment


def check_own_nets(method: Method, run: RunFacts) -> None:
    """Check that a method takes each net of a run's clients.

    Raises:
        ConfigError: it shares what differs between nets, or trains what is frozen in one.
    """
    first, *others = run.of_each_net
    wanted = _travels(method, first)
    for facts in others:
        check_frozen(method, facts)
        found = _travels(method, facts)
        for place in sorted({*wanted, *found}):
            if wanted.get(place) != found.get(place):
                raise ConfigError(
                    f"[[net.by_client]] {method.name} shares {place[1]!r}, which is "
                    f"{_form(wanted.get(place))} with net {first.experiment.net.name!r} and "
                    f"{_form(found.get(place))} with {facts.experiment.net.name!r}: give nets "
                    "embeddings of one width, and leave the rest private"
                )


def _travels(method: Method, run: RunFacts) -> dict[tuple[int, str], TensorSpec]:
    """Return the specification of all that may travel, by its way and key.

    Raises:
        ConfigError: a part of the run does not take the net.
    """
    wire = Wire.of(method, run)
    common, personal = method.payload_spec(run)
    ways = wire.upload_spec(method.upload_spec(run)), wire.payload_spec(common), personal
    return {
        (way, key): one
        for way, spec in enumerate(ways)
        for key, one in {**spec.required, **spec.optional}.items()
    }


def _form(spec: TensorSpec | None) -> str:
    """Say what a tensor is like."""
    if spec is None:
        return "missing"
    return str(["any" if n is None else n for n in spec.shape]).replace("'", "")
