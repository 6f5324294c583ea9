"""What a run would have a client tell beside what noise covers, held against the site's rules.

It is known from the config, before the client joins: the run's own ``[privacy] allow`` is the word
of its coordinator.
"""

from __future__ import annotations

from fedcli.gate.gate import group_of
from fedcli.gate.rules import Rules
from fedmodels.config.experiment import Experiment
from fedmodels.errors import ConfigError
from fedmodels.methods import make
from fedmodels.tensors.bundle import Problem
from fedmodels.training.asked import bare_views
from fedmodels.training.private_uploads import contributions
from fedmodels.training.run import RunFacts

SHOWN = 5
"""Keys that a line names."""


def check_told(rules: Rules, experiment: Experiment, problem: Problem) -> None:
    """Check that a run needs nothing that a site with a floor does not tell.

    Raises:
        ConfigError: its uploads have keys that no noise covers, with the option that would allow
            it; or it scores models that were trained here without noise.
    """
    table = experiment.method
    method = make(table.name, **table.hyper_parameters())
    found = set[str]()
    for run in RunFacts(experiment, problem).of_each_net:
        _check_hides(experiment, run)
        _check_scored(experiment, run)
        found |= {key for key in _uncovered(experiment, run) if not rules.tells(key)}
    if found:
        groups = sorted({group_of(key) for key in found})
        more = f" and {len(groups) - SHOWN} more" if len(groups) > SHOWN else ""
        allowed = " ".join(f"--tell {group}" for group in groups)
        raise ConfigError(
            f"--require-privacy: no noise covers {', '.join(groups[:SHOWN])}{more} of the uploads "
            f"of method {method.name!r}: {allowed} would allow it"
        )


def _check_hides(experiment: Experiment, run: RunFacts) -> None:
    """Check that examples can be hidden at all; ConfigError where a method looks at them else."""
    if experiment.privacy is not None and experiment.privacy.hides_examples:
        from fedmodels.training.private_steps import check_hides_examples

        table = experiment.method
        check_hides_examples(make(table.name, **table.hyper_parameters()), run)


def _check_scored(experiment: Experiment, run: RunFacts) -> None:
    """Check that no model is scored which was trained here without noise; ConfigError for one."""
    if experiment.privacy is None or experiment.privacy.hides_examples:
        return  # each step of a training has noise
    method = make(experiment.method.name, **experiment.method.hyper_parameters())
    views = [view for view in experiment.evaluate.views if view in method.views]
    if bare := [view for view in views if view in bare_views(method, run)]:
        rest = [view for view in views if view not in bare]
        raise ConfigError(
            f"--require-privacy: the run scores {', '.join(bare)} of method {method.name!r}, which "
            f"was trained here without noise: it needs [evaluate] views = {rest}, or level=example"
        )


def _uncovered(experiment: Experiment, run: RunFacts) -> list[str]:
    """Return what of a method's uploads no noise covers."""
    table = experiment.method
    found = contributions(make(table.name, **table.hyper_parameters()), run).uncovered
    privacy = experiment.privacy
    if privacy is not None and privacy.hides_examples:  # all else follows from private steps
        return [key for key in found if key == "generators"]
    return found
