"""What the figures are called that a run writes itself: a method's own have other names.

:mod:`fedmodels.numerics.metric_tables` says what each means.
"""

from __future__ import annotations

import re

from fedmodels.plugins import loaded

DEFINITIONS = 1
"""Number of the definitions in the tables, which every record of a run carries.

Raise it where a metric of records that exist gets another meaning or formula, or goes: a report
then says of a run that was resumed across the change that it holds both."""
OF_TARGETS = (
    "mae", "rmse", "r2", "mae_of_mean", "pinball", "auroc", "average_precision", "auroc_micro",
    "average_precision_micro", "base_rate",
)  # fmt: skip
"""The figures of runs that learn targets."""
OF_UPLOADS = (
    "difference_norm", "given_norm", "difference_cosine", "aggregation_weight", "statistics_norm",
    "prototype_norm", "generator_norm",
)  # fmt: skip
"""What the coordinator measures of each client's upload."""
CHOSEN = (
    "a_glo", "a_glo_balanced", "a_loc", "a_loc_received", "a_loc_trained", "iaa",
    "personalization", "generalization", "global_f1", "validation_accuracy", "validation_f1",
)  # fmt: skip
"""Scores that a summary has of the round that is best on validation parts, too."""
VIEWS = ("a_glo", "a_loc", "a_loc_received", "a_loc_trained")
BEST = (*VIEWS, *(f"{view}_pooled" for view in VIEWS), "iaa")
"""Scores that a summary has of the round in which each is highest on test data, too."""

SCORED = (
    "a_glo", "a_loc", "a_loc_received", "a_loc_trained", "a_sel", "a_sel_received_task",
    "a_sel_trained_task", "a_sel_received_minority_task", "a_sel_trained_minority_task", "iaa",
    "aa", "aa_scored", "afm", "forgetting", "forgetting_received", "forgetting_trained",
    "forgetting_scored", "prequential", "prequential_mae", "prequential_auroc", "present",
    "present_trained", "recovery_rounds", "recovered", "forgetting_domains",
    "backward_transfer_domains", "personalization", "personalization_std", "generalization",
    "generalization_std", "global_f1", "best_personalization", "best_personalization_std",
    "best_generalization", "best_generalization_std", "best_global_f1", "best_a_glo_balanced",
    "validation_accuracy", "validation_f1", "validation_loss", "epsilon", "chosen_round",
    "prototype_drift", "loss",
)  # fmt: skip
"""The families of what the coordinator computes from the clients' counts, beside accuracies by
their endings and the scores of a chosen round."""
OF_FIGURE = re.compile(
    rf"(?:(chosen)_)?(?:(validation)_)?({'|'.join(sorted(OF_TARGETS, reverse=True))})"
    "(?:_(glo|loc_received|loc_trained|loc)(_balanced)?)?"
)
"""A figure of targets, by model and test set: ``mae_loc_trained_balanced``."""

ACCURACY = re.compile(r"(best_)?(a_glo|a_loc_received|a_loc_trained|a_loc)_(.+)")
"""An accuracy by its ending."""


def is_written_by_runs(name: str) -> bool:
    """Tell whether a run writes a metric of this name itself, so that no method may."""
    of_plugins = (name for part in loaded("fedtide.parts") for name in part.computes)
    own = {*SCORED, *OF_UPLOADS, *of_plugins, *(f"chosen_{chosen}" for chosen in CHOSEN)}
    own |= {f"best_{name}" for name in BEST}
    of_models = ACCURACY.fullmatch(name) or OF_FIGURE.fullmatch(name)
    return family_of(name) in own or of_models is not None


def family_of(name: str) -> str:
    """Return a name without the class or task at its end."""
    return re.sub(r"_(\d+|all)$", "", name)
