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
from fedmodels.training.run import RunFacts

PREFIX = "eval/"


def trained_part(bundle: Bundle) -> Bundle:
    """Return a bundle without ``eval/…``; the same object where there is nothing to leave out."""
    kept = {k: v for k, v in bundle.weights.items() if not k.startswith(PREFIX)}
    if len(kept) == len(bundle.weights):
        return bundle
    return Bundle(
        kept, bundle.prototypes, bundle.generators, bundle.histogram, dict(bundle.scalars)
    )


def evaluation_part(bundle: Bundle) -> Bundle:
    """Return the ``eval/…`` weights of a bundle alone."""
    return Bundle({k: v for k, v in bundle.weights.items() if k.startswith(PREFIX)})


def for_scores(weights: Weights) -> Weights:
    """Return weights under the names by which they travel for scores alone."""
    return {PREFIX + name: tensor for name, tensor in weights.items()}


def as_scored(bundle: Bundle) -> Bundle:
    """Return a bundle whose weights have the net's names; ``eval/…`` stands in for what it names.

    The same object where there is no ``eval/…``.
    """
    if not any(name.startswith(PREFIX) for name in bundle.weights):
        return bundle
    return replace(bundle, weights=received(bundle))


def beside_own(
    run: RunFacts, own: Mapping[ClientId, Bundle], weights: Weights
) -> Mapping[ClientId, Bundle]:
    """Return the parts of every client and the evaluator with further weights, as one bundle.

    Args:
        run: says who there is.
        own: the parts so far: none, or one for all.
        weights: as ``eval/…``; where there are none, the parts stay as they are.
    """
    if not weights:
        return own
    before = next(iter(own.values()), Bundle()).weights
    clients: list[ClientId] = [*range(run.experiment.schedule.clients), EVALUATOR]
    return dict.fromkeys(clients, Bundle({**before, **weights}))


def in_own_part(common: BundleSpec, own: BundleSpec) -> tuple[BundleSpec, BundleSpec]:
    """Return the specs of a payload's parts, with ``eval/…`` of the common part in the own one."""
    moved = {k: one for k, one in common.required.items() if k.startswith(f"weights/{PREFIX}")}
    kept = {k: one for k, one in common.required.items() if k not in moved}
    return BundleSpec(kept, common.optional), own | BundleSpec(optional=moved)


def received(payload: Bundle) -> Weights:
    """Return a payload's weights by the net's names; ``eval/…`` stands in for what it names."""
    own = {k: v for k, v in payload.weights.items() if not k.startswith(PREFIX)}
    extra = {k.removeprefix(PREFIX): v for k, v in payload.weights.items() if k not in own}
    return own | extra
