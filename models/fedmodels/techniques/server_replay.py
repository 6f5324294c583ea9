"""Generated examples on the server: what clients' generators draw there, and what clients may send.

Tan and Liu (pFedGRP), arXiv 2410.01502v2, section 4. D_i stands for the data of client i: its
generators draw it, its own model filters it, and its label counts S give its volumes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from threading import Lock

import torch

from fedmodels.errors import PayloadError
from fedmodels.nets.split import load_weights
from fedmodels.numerics.randomness import derive_seed
from fedmodels.techniques.aggregation_weights import Examples, WeightSearch
from fedmodels.techniques.class_replay import ALL, ClassReplay, Judge, ReplayedExamples, publish
from fedmodels.tensors.bundle import Bundle, GeneratorState, Histogram, Weights
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.declared_counts import DeclaredCounts
from fedmodels.tensors.uploads import Uploads
from fedmodels.training.contexts import Metrics, ServerContext, ServerState

_DRAWING = Lock()
"""Held while examples are drawn: building a generator's net touches torch's global generator."""


def sent_spec(replay: ClassReplay, num_classes: int) -> BundleSpec:
    """Return the spec of what an upload brings beside a model: S, and generators if any trained."""
    counts = (torch.zeros(n, dtype=torch.int32) for n in (0, num_classes))
    shapes = replay.family.public_shapes()
    keys = map(str, range(num_classes)) if replay.decoupled else (ALL,)
    generators = {key: GeneratorState(0, shapes) for key in keys}
    optional = BundleSpec.of(Bundle(generators=generators)).required
    return BundleSpec(BundleSpec.of(Bundle(histogram=Histogram(*counts))).required, optional)


def select_sent(state: Bundle, trained: Collection[str]) -> Bundle:
    """Return what goes up of a private state: S, and the generators of these keys."""
    assert state.histogram is not None
    counts = Histogram(torch.zeros(0, dtype=torch.int32), state.histogram.total)  # S, not Y
    new = {key: each for key, each in state.generators.items() if key in trained}
    return Bundle(generators=publish(new), histogram=counts)


def check_generators(
    sent: Mapping[str, GeneratorState], announced: DeclaredCounts, interaction: int
) -> None:
    """Check versions and classes of the generators that a client sent.

    Args:
        sent: the generators by key.
        announced: what the client said of its data.
        interaction: the present one, which bounds how often a generator was trained.

    Raises:
        PayloadError: a version is impossible, or a generator is of a class not announced.
    """
    _check_versions({key: each.version for key, each in sent.items()}, interaction + 1)
    for key in sent:
        if key != ALL and not announced.now[int(key)]:
            raise PayloadError(f"generator {key!r} is of a class that was not announced")


def with_latest(held: Bundle, upload: Bundle) -> Bundle:
    """Return what the server holds of a client after an upload: its newest generators and counts.

    They are copies, as the tensors of an upload lie in receive buffers.
    """
    assert upload.histogram is not None
    new = {
        key: GeneratorState(sent.version, {name: t.clone() for name, t in sent.tensors.items()})
        for key, sent in upload.generators.items()
    }
    counts = Histogram(upload.histogram.round.clone(), upload.histogram.total.clone())
    return replace(held, generators={**held.generators, **new}, histogram=counts)


def searches(
    ctx: ServerContext,
    replay: ClassReplay,
    state: ServerState,
    uploads: Uploads,
    most: int,
    device: torch.device,
) -> tuple[list[WeightSearch], Metrics]:
    """Draw D_i of every client of the cohort, and return the searches for weights on them.

    Args:
        ctx: where in the run.
        replay: how to draw, and whether D_i is drawn anew in each epoch.
        state: holds the generators and label counts of each client.
        uploads: the models of the cohort.
        most: V, the examples of a client's most frequent class.
        device: where the searches compute.

    Returns:
        A search for each client, in the order of the uploads, and the metrics of the drawing.
    """
    found, drawn = [], []
    for own, (client, upload) in enumerate(uploads.items()):
        draw = drawn_by(ctx, replay, state.clients[client], client, upload.weights, most)
        drawn.append(first := draw(0))
        data = as_examples(first, draw, device, renewed=replay.renewed)
        run_seed = ctx.run.experiment.seed
        seed = derive_seed(run_seed, f"server/{client}", ctx.interaction, "method")
        found.append(WeightSearch(data, own, seed))
    return found, drawing_metrics(drawn)


def drawn_by(
    ctx: ServerContext, replay: ClassReplay, held: Bundle, client: int, weights: Weights, most: int
) -> Callable[[int], ReplayedExamples]:
    """Return the function that draws D_i of an epoch.

    Args:
        ctx: where in the run.
        replay: how to draw.
        held: the client's generators and label counts.
        client: whose data.
        weights: the client's own model, which filters what is drawn.
        most: V, the examples of the client's most frequent class; others are in proportion to S.
    """
    assert held.histogram is not None
    total = held.histogram.total.double().clamp_min(0)  # a client may send negative counts
    volumes = (most * total / total.max().clamp_min(1)).round().long()
    net = ctx.run.make_net()
    load_weights(net, weights)
    judge = Judge(net)

    def draw(epoch: int) -> ReplayedExamples:
        purpose = f"server/{client}/{epoch}"
        seed, at = ctx.run.experiment.seed, ctx.interaction
        return replay.replayed(
            held.generators,
            volumes,
            judge,
            lambda word: derive_seed(seed, f"{purpose}/{word}", at, "method"),
        )

    return draw


def as_examples(
    first: ReplayedExamples,
    draw: Callable[[int], ReplayedExamples],
    device: torch.device,
    *,
    renewed: bool,
) -> Examples | Callable[[int], Examples]:
    """Return D_i as the search for weights takes it.

    Args:
        first: D_i of epoch 0.
        draw: draws D_i of any epoch.
        device: where the search computes.
        renewed: draw D_i anew in each epoch.
    """

    def of(epoch: int) -> Examples:
        with _DRAWING:
            now = draw(epoch) if epoch else first
        targets = now.y if now.soft is None else now.soft
        return now.x.to(device), targets.to(device)

    return of if renewed else of(0)


def drawing_metrics(drawn: Sequence[ReplayedExamples]) -> Metrics:
    """Return the shares of images that were accepted, and of examples that are lacking."""
    looked, asked = sum(r.drawn for r in drawn), sum(r.asked for r in drawn)
    if not looked:
        return {}
    return {
        "server_acceptance": sum(r.accepted for r in drawn) / looked,
        "server_shortage": sum(r.shortage for r in drawn) / asked,
    }


def _check_versions(versions: Mapping[str, int], most: int) -> None:
    """Check the versions of uploaded generators.

    A version need not be above the last one: a client that lost its private state, and was allowed
    to start over, counts from 1 again.

    Raises:
        PayloadError: names the first generator with a wrong version.
    """
    for key, version in versions.items():
        if not 1 <= version <= most:
            raise PayloadError(
                f"tensor 'generators/{key}/version' is {version}; expected 1 to {most}"
            )
