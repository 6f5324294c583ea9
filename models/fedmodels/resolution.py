"""From a config to a resolved experiment: names are looked up, defaults filled in."""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, ValidationError

from fedmodels.config.combinations import check_combinations, refusals
from fedmodels.config.data import Data
from fedmodels.config.experiment import Experiment, MethodTable, NetTable
from fedmodels.config.faults import fault_of
from fedmodels.config.presets import suggest_config
from fedmodels.config.scenario import Scenario
from fedmodels.config.sent import tables_in, without_places
from fedmodels.errors import ConfigError, reason_of, suggestion
from fedmodels.own_code import (
    check_offered,
    digest_of,
    is_own,
    own_name,
    renew,
    with_place,
)
from fedmodels.printable import shown

if TYPE_CHECKING:
    from fedmodels.training.method import Method

log = logging.getLogger(__name__)


def read_experiment(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """Read and check a config file; ``overrides`` are those of :func:`parse_experiment`.

    Raises:
        ConfigError: it cannot be read, or says what it must not.
    """
    try:
        text = path.read_text("utf-8-sig")  # some editors begin a file with a mark
    except (OSError, UnicodeDecodeError) as error:
        meant = suggest_config(path) if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"cannot read the config {path}: {reason_of(error)}{meant}") from None
    return parse_experiment(text, str(path), overrides)


def parse_experiment(
    text: str, source: str = "config", overrides: Sequence[str] = ()
) -> Experiment:
    """Parse and check a TOML experiment.

    Args:
        text: the TOML.
        source: its name in error lines.
        overrides: ``key.path=value`` items that replace or add keys; a value is read as TOML and
            taken as a string where it is none.

    Raises:
        ConfigError: names the key, what it may be and the nearest known one.
    """
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not valid TOML: {error}") from None
    if "methods" in tables and "method" not in tables:
        raise ConfigError(f"{source} is a sweep, not the config of one run: use fedsrv sweep")
    drop_former_keys(tables, overrides)
    for item in overrides:
        override(tables, item)
    experiment = experiment_of(tables, source)
    _note_moved(tables["method"], experiment.method, source)
    return experiment


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
        experiment = Experiment.model_validate(tables)
        check_combinations(experiment)
        from fedmodels.methods import make, settings_of  # methods import torch: only when used
        from fedmodels.nets import check_net
        from fedmodels.training.declaration import check_plain

        experiment = _with_own_code(experiment, code)
        table = experiment.method
        method = make(table.name, **table.hyper_parameters())
        _check_declared(method)
        check_plain(table.name, settings := settings_of(method), "")
        check_net(experiment.net.name, experiment.net.options())
        _check_method_fits(experiment, method)
        if experiment.privacy is not None:
            from fedmodels.privacy.accounting import with_noise

            experiment = with_noise(experiment, reads_each=method.reduction == "each")
    resolved = MethodTable(name=table.name, code_sha256=table.code_sha256, **settings)
    return experiment.model_copy(update={"method": resolved})


@contextmanager
def _told_of(source: str, tables: Mapping[str, Any]) -> Iterator[None]:
    """Begin the line of an error with the name of what is wrong."""
    try:
        yield
    except ValidationError as error:
        raise ConfigError(f"{source}: {_one_line(error, tables)}") from None
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def _check_method_fits(experiment: Experiment, method: Method) -> None:
    """Check that a method can do what the other tables ask for."""
    from fedmodels.training.hooks import not_by_rule, takes_means

    views = experiment.evaluate.views
    if views and not {*views} & {*method.views}:
        raise ConfigError(
            f"[evaluate] views = {list(views)}: {method.name} has {list(method.views)} alone, "
            "so no model would be scored"
        )
    for line in refusals(experiment, reads=method.reduction):
        raise ConfigError(line)
    if experiment.server.is_robust and not takes_means(method):
        raise not_by_rule(method)
    if experiment.secure_sum is not None:
        from fedmodels.training.secure_upload import not_by_sums

        if why := not_by_sums(method):
            raise ConfigError(f"[privacy] secure_sum: {method.name} {why}")
    if experiment.accumulates and method.trains_on in ("memory", "replay"):
        raise ConfigError(
            '[scenario] training_data = "accumulated" keeps the data of old tasks, and method '
            f"{method.name!r} is about their loss: leave it out"
        )


def received_experiment(
    tables: Mapping[str, Any], source: str, code: Sequence[Path], weights: Sequence[Path] = ()
) -> Experiment:
    """Check the experiment that a server sent, as :func:`experiment_of` does, and return it.

    It names no place on this machine: code and initial weights are those files of the user that
    have the digests of the experiment.

    Raises:
        ConfigError: names the key, what it may be and the nearest known one.
    """
    from fedmodels.training.initial_weights import with_own_weights  # it imports torch

    experiment = experiment_of(without_places(tables), source, code)
    return with_own_weights(experiment, weights)


def received_data(tables: Mapping[str, Any], source: str) -> Data:
    """Check the table ``[data]`` that a server sent; it names no place on this machine.

    Raises:
        ConfigError: it is malformed.
    """
    with _told_of(source, tables):
        return Data.model_validate(without_places(tables, Data))


def _check_declared(method: Method) -> None:
    """Refuse words of a method's declarations that nothing knows."""
    from fedmodels.training.private_state import local_view

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

    renew(name)
    return make(name, **hyper_parameters)


def _with_own_code(experiment: Experiment, code: Sequence[Path] | None) -> Experiment:
    """Say where the files of custom code lie on this machine, and what they hold.

    A client deals out no data, so that their file need not be there.
    """
    found: dict[str, Any] = {}
    for key in ("method", "net"):
        table: MethodTable | NetTable = getattr(experiment, key)
        if is_own(table.name):
            name = own_name(table.name, key, table.code_sha256, code)
            if code is not None:
                check_offered(name)
            update = {"name": name, "code_sha256": digest_of(name)}
            found[key] = table.model_copy(update=update)
    data = experiment.data
    if code is None and data is not None and is_own(data.name):
        found["data"] = data.model_copy(update={"name": with_place(data.name)})
    return experiment.model_copy(update=found)


def _note_moved(given: Mapping[str, Any], resolved: MethodTable, source: str) -> None:
    """Say which keys of ``[method]`` belong into ``[method.reading]``, or the other way round."""
    found = resolved.hyper_parameters()
    readings, inside = found.get("reading", {}), given.get("reading", {})
    there, former = "[method]", "[method.reading]"
    for keys, table, other in (
        (given.keys() & readings.keys(), former, there),
        (inside.keys() & found.keys(), there, former),
    ):
        if keys:
            verb = "belongs" if len(keys) == 1 else "belong"
            _say_once(
                f"note: {source}: {', '.join(sorted(keys))} of {other} {verb} into {table} now; a "
                "later release knows no other place"
            )


@cache
def _say_once(line: str) -> None:
    """Log a warning, once however often a sweep reads the same config."""
    log.warning("%s", line)


def drop_former_keys(tables: dict[str, Any], overrides: Sequence[str]) -> None:
    """Where another method, net or scenario is asked for, leave out what belongs to the former.

    All hyper-parameters of the former method go. Keys of a net or of a scenario stay where the
    new one has them as well.
    """
    for name, key in (("method", "name"), ("net", "name"), ("scenario", "kind")):
        table = tables.get(name)
        asked = [item for item in overrides if item.partition("=")[0].strip() == f"{name}.{key}"]
        if not asked or not isinstance(table, dict) or not isinstance(table.get(key), str):
            continue
        there: dict[str, Any] = {}
        override(there, asked[-1])
        former, new = table[key], there[name][key]
        if not isinstance(new, str) or new == former:
            continue
        dropped = sorted(k for k in table if k != key and not _stays(name, k, new))
        if dropped:
            tables[name] = {k: value for k, value in table.items() if k not in dropped}
            log.warning(
                "note: %s.%s is set to %s: %s of %s in the file %s left out",
                name, key, new, ", ".join(dropped), former, "is" if len(dropped) == 1 else "are",
            )  # fmt: skip


def _stays(table: str, key: str, new: str) -> bool:
    """Whether a key of a table still means something to the method, net or scenario ``new``."""
    if table == "method":
        return False
    if table == "scenario":
        return key in _known_keys([table], new)
    from fedmodels.nets import check_net  # it imports torch

    try:
        check_net(new, [key])
    except ConfigError:
        return key in NetTable.model_fields
    return True


def override(tables: dict[str, Any], item: str) -> None:
    """Put what one ``KEY=VALUE`` says into plain tables.

    Raises:
        ConfigError: it is not of that form, or a part of the path is a value.
    """
    path, equals, text = item.partition("=")
    if not equals or not path.strip():
        raise ConfigError(f"--set {item!r} is not key=value, such as --set method.lam=0.3")
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text
    put(tables, path.strip(), value)


def put(tables: dict[str, Any], path: str, value: Any) -> None:
    """Put a value under a dotted key of plain tables.

    Raises:
        ConfigError: a part of the path is a value.
    """
    *parents, leaf = path.split(".")
    table = tables
    for name in parents:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{path} cannot be set: {name!r} is a value, not a table")
    table[leaf] = value


def _one_line(error: ValidationError, tables: Mapping[str, Any]) -> str:
    """Turn the first finding of pydantic into a line a user can act on."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    scenario = tables.get("scenario")
    if path[:1] == ["scenario"] and isinstance(scenario, Mapping):
        kind = scenario.get("kind")
    else:
        kind = None
    if kind in path[1:2]:  # the tag of the scenario's union is no key of the file
        path.pop(1)
    where = f"[{'.'.join(path[:-1])}]" if path[:-1] else "the top level"
    if first["type"] == "extra_forbidden":
        known = _known_keys(path[:-1], kind)
        line = f"unknown key {path[-1]!r} in {where}; known: {', '.join(known)}."
        return line + suggestion(path[-1], known)
    if first["type"] == "missing":
        return f"key {path[-1]!r} is missing in {where}"
    if first["type"] in ("union_tag_invalid", "union_tag_not_found"):
        tag, known = str(first.get("ctx", {}).get("tag", "")), _kinds()
        given = f"unknown kind {tag!r}" if tag else "key 'kind' is missing"
        return f"{given} in [scenario]; known: {', '.join(known)}.{suggestion(tag, known)}"
    fault = fault_of(error, tables)
    given = "" if isinstance(fault.given, dict) else f" (given: {shown(fault.given)})"
    return f"{'.'.join(fault.path) or 'config'}: {fault.message}{given}"


def _kinds() -> list[str]:
    """Return the kinds of scenarios."""
    return [_kind_of(table) for table in tables_in(Scenario)]


def _kind_of(scenario: type[BaseModel]) -> str:
    return str(get_args(scenario.model_fields["kind"].annotation)[0])


def _known_keys(path: list[str], kind: str | None) -> list[str]:
    """Return the keys of a table; of a scenario, those of its kind."""
    table: type[BaseModel] = Experiment
    for name in path:
        field = table.model_fields.get(name)
        inner = tables_in(field.annotation) if field else []
        if len(inner) > 1:
            inner = [
                each for each in inner if kind in get_args(each.model_fields["kind"].annotation)
            ]
        if not inner:
            return []
        table = inner[0]
    return sorted(table.model_fields)
