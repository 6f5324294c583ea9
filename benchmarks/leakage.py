"""What weights, prototypes and generators tell of a client's examples: rebuilt images, members.

    python -m benchmarks.leakage [--keep]

Handwritten digits dealt to ten clients. Whoever reads an upload has what a coordinator has besides:
the payload, the config, the code. Two questions:

- **Rebuilt images.** From an update of weights: a search for images whose gradient points where the
  update points (Geiping et al., NeurIPS 2020: cosine distance, total variation, signed Adam steps),
  and the first layer read off: each unit of a fully connected one holds a weighted mean of the
  images, as a quotient of two gradients; of all units the one most like an image counts. From a
  prototype: a search for an image with that embedding, and the image of the whole data set whose
  embedding is nearest, each through the client's own net, and through the net that every client
  began with. The reader is told the labels.
- **Members.** Which images did the client train on? A threshold on a number parts its training
  images from others of the same class: the loss of the uploaded model (Yeom et al., CSF 2018), the
  distance of the embedding to the prototype of the class, the distance to the nearest image that
  the generator draws. The others are all clients' test images. Classes are compared each by itself,
  as training images of a client have other shares of classes than test images.

Recognised: of all digits, the one most like a rebuilt image (by correlation) is one that the
message was made from. By chance: the share that these are of all digits of the class. Likeness: the
correlation with the true image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.attacks.inversion import Rebuilt, embedded, judged, read_off, searched, update_of
from benchmarks.attacks.uploads import (
    CLIENTS,
    Client,
    all_digits,
    dealt,
    experiment,
    played,
    trained_on,
)
from benchmarks.measure import parser_of, tell
from benchmarks.measured import given_as, keep
from fedmodels.config.experiment import Experiment
from fedmodels.nets.split import embeddings, load_weights
from fedmodels.techniques.generator_training import Lesson
from fedmodels.techniques.generators import Family, Painter, to_images
from fedmodels.tensors.bundle import Weights
from fedmodels.training.contexts import ClientContext
from fedtide.testing.trial import context_of

TRIALS, SHOWN = 8, 16
"""Clients whose uploads are inverted, and the most images that are rebuilt of one."""
Examples = tuple[Tensor, Tensor]
Score = Callable[[Tensor, Tensor], Tensor]
"""Of images (n, …) and classes (n,), higher for members: (n,)."""


def main() -> None:
    """Print the tables, and keep them as a record where that is asked for."""
    parser = parser_of("leakage", __doc__, "leakage")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with TemporaryDirectory() as place:
        root = Path(place)
        rebuilt = [*from_weights(root), *from_prototypes(root)]
        tell("leakage: rebuilt images", rebuilt)
        kinds = (members_of_weights, members_of_prototypes, members_of_generators)
        found = [row for kind in kinds for row in kind(root)]
        tell("leakage: members", found)
    if options.keep:
        keep(options.keep, given_as("leakage"), {"Rebuilt images": rebuilt, "Members": found})


# --- rebuilt images -----------------------------------------------------------------------------


def from_weights(root: Path) -> Iterator[dict[str, Any]]:
    """Yield what updates of FedAvg's weights are worth, by what the client trained on."""
    one_step = {"local_epochs": 1, "momentum": 0.0}
    for count, what in ((1, "one image, one step"), (8, "8 images, one step")):
        for net, how in (("digits-cnn", "gradient search"), ("mlp", "first layer read off")):
            run = experiment("fedavg", net, batch_size=count, **one_step)
            rebuild = _searched if net == "digits-cnn" else _read_off
            yield _row("weights", what, how, _of_clients(run, root, rebuild, count))
    run = experiment("fedavg", "digits-cnn")
    for count, what in ((8, "8 images, two epochs"), (None, "all images, two epochs")):
        found = _of_clients(run, root, _searched, count)
        yield _row("weights", what, "gradient search", found)


def _of_clients(
    run: Experiment,
    root: Path,
    rebuild: Callable[[Client, Examples, Examples], list[Rebuilt]],
    count: int | None,
) -> list[Rebuilt]:
    """Return what is rebuilt of clients that train on their first images."""
    found, every = list[Rebuilt](), all_digits(run, root)
    for client in range(TRIALS):
        ctx = context_of(run, dealt(run, root), client)
        x, y = ctx.stream.train(0)
        own = x[:count], y[:count]
        found += rebuild(trained_on(run, ctx, *own), own, every)
    return found


def _searched(client: Client, own: Examples, every: Examples) -> list[Rebuilt]:
    labels = own[1][:SHOWN]  # a search for more takes long, and finds less
    guess = searched(client.ctx, update_of(client), labels, seed=cast("int", client.ctx.client))
    return judged(guess, labels, own, every)


def _read_off(client: Client, own: Examples, every: Examples) -> list[Rebuilt]:
    return read_off(update_of(client), own, every)


def from_prototypes(root: Path) -> Iterator[dict[str, Any]]:
    """Yield what FedProto's prototypes are worth, by how many images are behind one."""
    run = experiment("fedproto", "mlp")
    for count, what in ((1, "prototype of one image"), (None, "prototype of all of a class")):
        for knows, own_net in (("client's net", True), ("first net", False)):
            pairs = [_of_prototype(run, root, c, count, own_net) for c in range(TRIALS)]
            for how, found in zip(
                ("search", "nearest image"), zip(*pairs, strict=True), strict=True
            ):
                yield _row("prototypes", what, f"{how}, {knows}", list(found))


def _of_prototype(
    run: Experiment, root: Path, client: int, count: int | None, own_net: bool
) -> tuple[Rebuilt, Rebuilt]:
    """Return what the prototype of a client's commonest class is worth, by both attacks."""
    ctx, every = context_of(run, dealt(run, root), client), all_digits(run, root)
    x, y = ctx.stream.train(0)
    label = y.mode().values
    keeps = (y != label) | (torch.cumsum(y == label, 0) <= (count or len(y)))
    x, y = x[keeps], y[keeps]
    done = trained_on(run, ctx, x, y)
    target = done.done.upload.prototypes["class"].rows()[int(label)][0]
    net = done.ctx.net if own_net else ctx.run.make_net()
    made = embedded(net, ctx, target, seed=client)
    nearest = (embeddings(net, every[0]) - target).norm(dim=1).argmin()
    own = x[y == label], y[y == label]
    return tuple(judged(g, label[None], own, every)[0] for g in (made, every[0][nearest][None]))


def _row(sent: str, what: str, how: str, found: Sequence[Rebuilt]) -> dict[str, Any]:
    shares = {
        "recognised": 100 * fmean(one.recognised for one in found),
        "chance": 100 * fmean(one.chance for one in found),
        "likeness": fmean(one.likeness for one in found),
    }
    return {"sent": sent, "of": what, "attack": how, "rebuilt": len(found), **shares}


# --- members ------------------------------------------------------------------------------------


def members_of_weights(root: Path) -> Iterator[dict[str, Any]]:
    """Yield how well losses tell members: under a client's upload, and under everyone's model."""
    for net in ("mlp", "digits-cnn"):
        clients = played(experiment("fedavg", net), root)
        for what, weights in (
            ("upload", lambda client: client.done.upload.weights),
            ("everyone's model", lambda client: client.payload.weights),
        ):
            found = [
                _by_class(clients, client, _losses(client, weights(client))) for client in clients
            ]
            yield _membership("weights", f"{net}: {what}", "loss", found)


def _losses(client: Client, weights: Weights) -> Score:
    """Return minus the loss under these weights."""
    net = client.ctx.run.make_net()
    load_weights(net, weights)
    net.eval()

    def score(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            return -cross_entropy(net(x), y, reduction="none")

    return score


def members_of_prototypes(root: Path) -> Iterator[dict[str, Any]]:
    """Yield how well the distance to FedProto's prototypes tells members."""
    clients = played(experiment("fedproto", "mlp"), root)
    for what, knows_net in (("client's net", True), ("first net", False)):
        found = [_by_class(clients, c, _distances(c, knows_net=knows_net)) for c in clients]
        yield _membership("prototypes", f"mlp: upload, {what}", "distance", found)


def _distances(client: Client, *, knows_net: bool) -> Score:
    """Return minus the distance of an embedding to the prototype that the client sent."""
    net = client.ctx.net if knows_net else client.ctx.run.make_net()
    rows = client.done.upload.prototypes["class"].rows()
    return lambda x, y: (
        -(embeddings(net, x) - torch.stack([rows[int(k)][0] for k in y])).norm(dim=1)
    )


def members_of_generators(root: Path) -> Iterator[dict[str, Any]]:
    """Yield how well the distance to a generator's images tells what it was trained on."""
    run = experiment("fedavg", "mlp")
    contexts = [context_of(run, dealt(run, root), client) for client in range(CLIENTS)]
    for epochs in (20, 100):
        own = [_commonest(ctx) for ctx in contexts]
        found = []
        made = _drawn(contexts[0], [x for x, _ in own], epochs)
        for drawn, (x, label) in zip(made, own, strict=True):
            found.append([(_near(x, drawn), _near(_tests(contexts, label), drawn))])
        yield _membership("generators", f"WGAN, {epochs} epochs", "nearest drawn", found)


def _commonest(ctx: ClientContext) -> tuple[Tensor, int]:
    """Return the training images of a client's commonest class, and the class."""
    x, y = ctx.stream.train(0)
    label = int(y.mode().values)
    return x[y == label], label


def _drawn(ctx: ClientContext, learnt_from: Sequence[Tensor], epochs: int) -> list[Tensor]:
    """Return 500 images of a generator for each set of images, trained on that set."""
    family = Family(input_shape=ctx.run.problem.input_shape, width=8, epochs=epochs, batch_size=16)
    lessons = []
    for seed, x in enumerate(learnt_from):
        fresh = family.fresh(seed, ctx.stream.limits())
        lessons.append(Lesson(fresh, to_images(fresh, x), seed))
    made = enumerate(family.trained(lessons))
    return [Painter(family, each).inputs(500, seed) for seed, each in made]


def _near(images: Tensor, drawn: Tensor) -> Tensor:
    """Return minus the distance of each image to the nearest drawn one."""
    return -torch.cdist(images.flatten(1), drawn.flatten(1)).min(1).values


def _by_class(
    clients: Sequence[Client], client: Client, score: Score
) -> list[tuple[Tensor, Tensor]]:
    """Return the scores of a client's training images, and of others of the class, by class."""
    x, y = cast("Any", client.ctx.stream).train(0)
    contexts = [each.ctx for each in clients]
    found = []
    for label in y.unique():
        others = _tests(contexts, int(label))
        found.append(
            (score(x[y == label], y[y == label]), score(others, label.expand(len(others))))
        )
    return found


def _tests(contexts: Sequence[ClientContext], label: int) -> Tensor:
    """Return all clients' test images of a class: nobody trained on them."""
    tests = [cast("Any", ctx.stream).test(0) for ctx in contexts]
    return torch.cat([x[y == label] for x, y in tests])


def _membership(
    sent: str, what: str, by: str, clients: Sequence[Sequence[tuple[Tensor, Tensor]]]
) -> dict[str, Any]:
    """Return a row: AUC by client, and members found at one threshold for all clients."""
    areas = [area(pairs) for pairs in clients]
    scaled = [alike(*pair) for pairs in clients for pair in pairs]
    members, others = (torch.cat(each) for each in zip(*scaled, strict=True))
    return {
        "sent": sent,
        "of": what,
        "attack": by,
        "auc": fmean(areas),
        "auc_least": min(areas),
        "auc_most": max(areas),
        "found": 100 * at_false_alarms(members, others),
    }


def area(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the chance that a member scores above another image of its class; ties count half."""
    won = sum(float((m[:, None] > o).sum() + 0.5 * (m[:, None] == o).sum()) for m, o in pairs)
    return won / sum(len(m) * len(o) for m, o in pairs)


def alike(members: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores of a class in deviations of the others, so that classes compare."""
    centre, spread = others.mean(), others.std().clamp_min(1e-12)
    return (members - centre) / spread, (others - centre) / spread


def at_false_alarms(members: Tensor, others: Tensor, share: float = 0.01) -> float:
    """Return the share of members above a score that at most this share of the others is above."""
    ranked = others.sort(descending=True).values
    return float((members > ranked[int(share * len(ranked))]).double().mean())


if __name__ == "__main__":
    main()
