"""Which methods and keys go with targets: those that need no class."""

from __future__ import annotations

from fedmodels.config.experiment import Experiment
from fedmodels.errors import ConfigError
from fedmodels.methods import file_of, method_class, names
from fedmodels.own.code_names import is_own
from fedmodels.training.method import Method

TAKE = ("fedavg", "fedprox", "fedper", "fedrep", "local", "centralized")
"""Methods of the core none of whose functions asks for a class; others say ``takes_targets``."""
DEALS = ("natural", "iid")
"""Scenarios that deal examples out without a look at their class, beside those of a user's file."""
BY_CLASS = ("classes", "num_classes", "max_per_class", "max_test_per_class", "server_examples")
"""Keys of ``[data]`` that are of classes."""


def check_method(experiment: Experiment, method: Method) -> Experiment:
    """Return the experiment of a method that learns targets.

    A class of one's own does where the method that it inherits from does. Its first training shows
    whether it takes the loss of the run.

    Raises:
        ConfigError: the method, the scenario or a key needs classes.
    """
    _check_keys(experiment)
    if not _takes_targets(type(method)):
        *taking, last = (n for n in names() if file_of(n) and _takes_targets(method_class(n)))
        raise ConfigError(
            f"method {method.name!r} needs classes, and [data.columns] has target or labels in "
            f"their place: take {', '.join(taking)} or {last}"
        )
    return experiment


def _takes_targets(cls: type[Method]) -> bool:
    """Tell whether the nearest class that says it, or that is in the table, takes targets."""
    for kind in cls.__mro__:
        if "takes_targets" in vars(kind):
            return bool(vars(kind)["takes_targets"])
        if kind.__module__.startswith("fedmodels.methods.") and "name" in vars(kind):
            return vars(kind)["name"] in TAKE
    return False


def _check_keys(experiment: Experiment) -> None:
    data, scenario = experiment.data, experiment.scenario
    assert data is not None, "it names the targets"
    if data.name != "table":
        raise ConfigError(
            f"[data.columns] target and labels are for name = 'table', not for {data.name!r}"
        )
    for key in BY_CLASS:
        if getattr(data, key) is not None:
            raise ConfigError(f"[data] {key} is of classes, and targets are learned: leave it out")
    if scenario is not None and scenario.name not in DEALS and not is_own(scenario.name):
        raise ConfigError(
            f"[scenario] kind = {scenario.name!r} partitions by class, but this run learns "
            "targets: use natural or iid"
        )
    if scenario is not None and scenario.tail_gamma != 1:
        raise ConfigError("[scenario] a long tail is of classes, and targets are learned")
    if experiment.evaluate.differs("select_by"):
        raise ConfigError(
            "[evaluate] select_by is of classes: targets are chosen by R², or AUROC of labels"
        )
