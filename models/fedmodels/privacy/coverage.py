"""What leaves clients beside what noise covers; a run names it in ``[privacy] allow``, or stops."""

from __future__ import annotations

from collections.abc import Iterable

from fedmodels.config.experiment import Experiment
from fedmodels.errors import ConfigError, suggestion

BESIDE = {
    "announced": "its classes, and how many examples of each a client has, told when it joins",
    "examples": "how many examples a client trained on",
    "loss": "a client's training loss",
    "scores": "how many test examples of each class a client's models got right",
    "metrics": "numbers of the method's own in reports",
    "stopping": "the round that a run ends after, by patience or target: it follows from scores",
    "trigger": "when an open run goes on, by score_drop or drift: it follows from scores or inputs",
}
"""What clients tell beside uploads, by the name that ``allow`` knows. What of messages and records
each name stands for is in ``tests/fedmodels/privacy/told.py``."""


def told_beside(experiment: Experiment, *, scores: bool, metrics: bool) -> list[str]:
    """Return the names of what clients of a run tell beside uploads."""
    schedule = experiment.schedule
    tells = {
        "scores": scores,
        "metrics": metrics,
        "stopping": schedule.patience is not None or schedule.target is not None,
        "trigger": experiment.begins.score_drop is not None or experiment.begins.drift,
    }
    return [name for name in BESIDE if tells.get(name, True)]


def check_allowed(method: str, uncovered: Iterable[str], allow: Iterable[str]) -> None:
    """Check that a run names all that leaves clients without noise, and nothing else.

    Raises:
        ConfigError: a name is missing, or nothing of a name leaves.
    """
    found, named = [*uncovered], [*allow]
    if missing := [name for name in found if name not in named]:
        said = ", ".join(f"{name} ({BESIDE.get(name, 'of the upload')})" for name in missing)
        raise ConfigError(
            f"[privacy] adds no noise to all that leaves a client with method {method!r}: {said}. "
            f"To run with that, name it: allow = {[*dict.fromkeys([*named, *missing])]}"
        )
    for name in named:
        if name not in found:
            raise ConfigError(
                f"[privacy] allow names {name!r}, which does not leave a client here; these do: "
                f"{', '.join(found)}.{suggestion(name, found)}"
            )


def assumptions(experiment: Experiment) -> str:
    """Return whom an epsilon hides, from whom, and what it counts on."""
    privacy = experiment.privacy
    assert privacy is not None, "there is something to hide"
    named = ", ".join(privacy.allow)
    left = f"not covered, and allowed: {named}" if named else "nothing else leaves a client"
    if experiment.schedule.sampling == "weighted":
        left += "; cohorts are drawn by announced numbers of examples, which have no noise"
    if privacy.hides_examples:
        return (
            "hides one training example of a client (add or remove one) from everybody but the "
            "client; of the example that all trainings that it was in cost most; inputs of the "
            f"same content at one client are one example; {left}"
        )
    sampled = experiment.schedule.sampling == "poisson" and privacy.noise_at_server
    parts = ["hides what a client contributes to the run (all of it or nothing: one client)"]
    if privacy.noise_at_server:
        parts.append("from whoever sees the models; the server is trusted, and sees every upload")
    else:
        parts.append(
            "from whoever sees sums of uploads alone; a single upload has its client's share of "
            "the noise, unless the method reads single uploads: then each has all of it"
        )
        parts.append(
            f"of sums, from up to {privacy.colluders} clients that take part and put together what "
            f"they know; a sum has the noise of {experiment.fewest_summed} clients at least"
        )
    if sampled:
        parts.append(
            "who takes part is drawn from the run's secret, anew for each release, and stays secret"
        )
    else:
        parts.append("no chance of being left out is counted")
    parts.append(left)
    return "; ".join(parts)
