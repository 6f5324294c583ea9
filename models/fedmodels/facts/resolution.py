"""From tables to a resolved experiment: names are looked up, defaults filled in."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from fedmodels.config.bounds import NAMED
from fedmodels.config.combinations import check_combinations, part_at, parts_on, refusals
from fedmodels.config.experiment import ClientsNet, Experiment, MethodTable, NetTable
from fedmodels.config.part import without_gone
from fedmodels.config.sent import without_places
from fedmodels.errors import ConfigError, suggestion
from fedmodels.own.code_names import is_own

if TYPE_CHECKING:
    from fedmodels.config.data import Data
    from fedmodels.training.method import Method

log = logging.getLogger(__name__)
T = TypeVar("T", MethodTable, NetTable, ClientsNet)


def experiment_of(
    tables: Mapping[str, Any], source: str = "config", code: Sequence[Path] | None = None
) -> Experiment:
    """Check plain tables, resolve the method's hyper-parameters, and return the experiment.

    Args:
        tables: the content of a config.
        source: its name in error lines.
        code: the only files whose code may run; by default any that the config names.

    Raises:
        ConfigError: names the key, what it may be and the nearest known one.
    """
    with _told_of(source, tables):
        experiment = Experiment.model_validate(without_gone(tables))
        check_combinations(experiment)
        from fedmodels.methods import make, settings_of  # methods import torch: only when used
        from fedmodels.nets import check_net
        from fedmodels.training.settings import check_plain

        experiment = _with_own_code(experiment, code)
        table = experiment.method
        method = make(table.name, **table.hyper_parameters())
        _check_declared(method)
        check_plain(table.name, settings := settings_of(method), "")
        for net in experiment.net.each:
            check_net(net.name, net.options())
        _check_method_fits(experiment, method)
        for part in parts_on(experiment):
            if part.settles:
                experiment = part_at(part.at("settles"))(experiment, method)
    resolved = MethodTable(name=table.name, code_sha256=table.code_sha256, **settings)
    return experiment.model_copy(update={"method": resolved})


@contextmanager
def _told_of(source: str, tables: Mapping[str, Any]) -> Iterator[None]:
    """Begin the line of an error with the name of what is wrong."""
    try:
        yield
    except ValidationError as error:
        from fedmodels.config.faults import first_line

        raise ConfigError(f"{source}: {first_line(error, tables)}") from None
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def _check_method_fits(experiment: Experiment, method: Method) -> None:
    """Check that a method can do what the other tables ask for."""
    views = experiment.evaluate.views
    if views and not {*views} & {*method.views}:
        raise ConfigError(
            f"[evaluate] views = {list(views)}: {method.name} only has {list(method.views)}, so "
            "no model would be scored"
        )
    for line in refusals(experiment, reads=method.reduction):
        raise ConfigError(line)
    if experiment.accumulates and method.trains_on in ("memory", "replay"):
        raise ConfigError(
            '[scenario] training_data = "accumulated" keeps the data of old tasks, and method '
            f"{method.name!r} is about their loss: leave it out"
        )


def received_experiment(
    tables: Mapping[str, Any],
    source: str,
    code: Sequence[Path],
    weights: Sequence[Path] = (),
    usual: Sequence[tuple[str, ...]] = (),
) -> Experiment:
    """Check the experiment that a server sent, as :func:`experiment_of` does, and return it.

    It names no place on this machine: code and initial weights are those files of the user that
    have the digests of the experiment. Of the keys whose values are ``usual``, defaults of the
    server's release, those that this one does not know are left out.

    Raises:
        ConfigError: names the key, what it may be and the nearest known one.
    """
    from fedmodels.facts.usual import without_unknown

    known = without_gone(without_unknown(without_places(tables), usual), is_received=True)
    experiment = experiment_of(known, source, code)
    if experiment.net.weights_sha256 is None:
        return experiment
    from fedmodels.training.initial_weights import with_own_weights  # it imports torch

    return with_own_weights(experiment, weights)


def received_data(tables: Mapping[str, Any], source: str) -> Data:
    """Check the table ``[data]`` of a server, which names no place here; or raise ConfigError."""
    table: type[Data] = part_at("fedmodels.config.data:Data")
    with _told_of(source, tables):
        return table.model_validate(without_places(tables, table))


def _check_declared(method: Method) -> None:
    """Refuse words of a method's declarations that nothing knows."""
    from fedmodels.training.asked import local_view

    models = ("global", "after_local", "after_downlink")
    given = {
        "views": (method.views, models),
        "local_view": ((local_view(method),), models),
        "reduction": ((method.reduction,), ("each", "mean")),
    }
    for key, (words, known) in given.items():
        unknown = [words] if isinstance(words, str) else [w for w in words if w not in known]
        if unknown or not words:
            said = f"is {unknown[0]!r}" if unknown else "is empty"
            as_tuple = ", as a tuple" if key == "views" else ""
            raise ConfigError(
                f"method {method.name!r}: {key} {said}; it may be {', '.join(known)}{as_tuple}."
                + suggestion(str(unknown[0]) if unknown else "", known)
            )


def make_method(name: str, **hyper_parameters: Any) -> Method:
    """Return a method; ``make_method("fedprox", mu=0.1)``, or ``"file.py:Name"`` as it is now.

    Raises:
        ConfigError: unknown method or hyper-parameter, or a value of the wrong type.
    """
    from fedmodels.methods import make
    from fedmodels.own.own_code import renew

    renew(name)
    return make(name, **hyper_parameters)


def _with_own_code(experiment: Experiment, code: Sequence[Path] | None) -> Experiment:
    """Say where the files of custom code lie on this machine, and what they hold.

    A client deals out no data, so that their file need not be there.
    """
    found: dict[str, Any] = {}
    data, scenario = experiment.data, experiment.scenario
    tables = (experiment.method, *experiment.net.each, data, scenario)
    further = [*_further_code(experiment)]
    if not further and not any(is_own(one.name) for one in tables if one):
        return experiment
    from fedmodels.own.own_code import check_offered, digest_of, own_name, with_place

    def here(table: T, key: str) -> T:
        if not is_own(table.name):
            return table
        name = own_name(table.name, key, table.code_sha256, code)
        if code is not None:
            check_offered(name)
        return table.model_copy(update={"name": name, "code_sha256": digest_of(name)})

    found["method"], net = here(experiment.method, "method"), here(experiment.net, "net")
    if net.by_client is not None:
        several = tuple(here(one, "net") for one in net.by_client)
        net = net.model_copy(update={"by_client": several})
    found["net"] = net
    if code is None and data is not None and is_own(data.name):
        found["data"] = data.model_copy(update={"name": with_place(data.name)})
    if code is None and scenario is not None and is_own(scenario.name):
        kind = with_place(scenario.name)
        if Path(kind.rpartition(":")[0]).is_file():
            own_name(kind, "scenario", getattr(scenario, "code_sha256", None), None)
            update = {"kind": kind, "code_sha256": digest_of(kind)}
            found["scenario"] = scenario.model_copy(update=update)
    for table, key, value, sha256 in further:
        name = own_name(value, table, sha256, code)
        if code is not None:
            check_offered(name)
        update = {key: name, f"{key}_sha256": digest_of(name)}
        found[table] = getattr(experiment, table).model_copy(update=update)
    return experiment.model_copy(update=found)


def _further_code(experiment: Experiment) -> Iterator[tuple[str, str, str, str | None]]:
    """Yield tables, keys and values that name a file of code, and what ``KEY_sha256`` says of it.

    Plugins add such keys.
    """
    for table, value in experiment:
        for key, field in getattr(type(value), "model_fields", {}).items():
            if NAMED in field.metadata and f"{key}_sha256" in type(value).model_fields:
                name = getattr(value, key)
                if name is not None and is_own(name):
                    yield table, key, name, getattr(value, f"{key}_sha256")
