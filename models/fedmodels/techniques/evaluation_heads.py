"""Private weights that travel for metrics alone, under ``eval/…``.

Some papers score a global model of methods whose heads are private: with the mean of the heads. The
heads then go up beside what the method uploads and come down with evaluation orders. They are
counted apart from the method's own bytes and never trained from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fedmodels.tensors.bundle import EVALUATOR, Bundle, ClientId, Weights
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.roles import part_of, without
from fedmodels.training.run import RunFacts

EVAL = "eval"


def trained_part(bundle: Bundle) -> Bundle:
    """Return a bundle without ``eval/…``; the same object where there is nothing to leave out."""
    kept = without(bundle.weights, EVAL)
    return bundle if kept is bundle.weights else replace(bundle, weights=kept)


def as_scored(bundle: Bundle) -> Bundle:
    """Return a bundle whose weights have the net's names; ``eval/…`` stands in for what it names.

    The same object where there is no ``eval/…``.
    """
    scored = part_of(bundle.weights, EVAL)
    kept = without(bundle.weights, EVAL)
    return replace(bundle, weights={**kept, **scored}) if scored else bundle


def beside_own(
    run: RunFacts, own: Mapping[ClientId, Bundle], weights: Weights
) -> Mapping[ClientId, Bundle]:
    """Return the parts of every client and the evaluator with further weights, as one bundle.

    Without any, the parts stay as they are. So far there are none, or one for all.
    """
    if not weights:
        return own
    before = next(iter(own.values()), Bundle()).weights
    clients: list[ClientId] = [*range(run.experiment.schedule.clients), EVALUATOR]
    return dict.fromkeys(clients, Bundle({**before, **weights}))


def in_own_part(common: BundleSpec, own: BundleSpec) -> tuple[BundleSpec, BundleSpec]:
    """Return the specs of a payload's parts, with ``eval/…`` of the common part in the own one."""
    moved = {k: one for k, one in common.required.items() if k.startswith(f"weights/{EVAL}/")}
    kept = {k: one for k, one in common.required.items() if k not in moved}
    return BundleSpec(kept, common.optional), own | BundleSpec(optional=moved)
