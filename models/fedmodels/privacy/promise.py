"""What an epsilon of a run promises, in a sentence that stands beside the figure."""

from __future__ import annotations

from fedmodels.config.experiment import Experiment


def assumptions(experiment: Experiment) -> str:
    """Return whom an epsilon hides, from whom, and what it counts on."""
    privacy = experiment.privacy
    assert privacy is not None, "there is something to hide"
    named = ", ".join(privacy.allow)
    left = f"not covered, and allowed: {named}" if named else "nothing else leaves a client"
    if privacy.hides_examples:
        return (
            "hides one training example of a client (add or remove one) from everybody but the "
            f"client; of each client's most costly task, as tasks have other examples; {left}"
        )
    sampled = experiment.schedule.sampling == "poisson"
    parts = ["hides whether a client takes part in the run (add or remove one client)"]
    if privacy.noise_at_server:
        parts.append("from whoever sees the models; the server is trusted, and sees every upload")
    else:
        parts.append(
            "from whoever sees sums of uploads alone; a single upload has its client's share of "
            "the noise, unless the method reads single uploads: then each has all of it"
        )
    if sampled:
        parts.append("who takes part in a round is drawn from the run's secret, and stays secret")
    else:
        parts.append("no chance of being left out is counted")
    parts.append(left)
    return "; ".join(parts)
