"""GLFC — Dong, Wang, Fang, Sun, Xu, Wang, Zhu, Federated Class-Incremental Learning, CVPR 2022.
https://arxiv.org/abs/2203.11473. Formulas are those of the authors' code,
https://github.com/conditionWang/FCIL, as no text of the paper was at hand.

    paper, code            here                          paper, code          here
    Theta^t                common                        M_l, exemplars       "memory", by place
    Theta^{t-1}, Theta^t   own "last/…", "best/…"        H, r_h               "entropy", r_h
    G_i / mean of G        compensation                  Gamma, encode_model  encoder
    L_GC, L_RD             compensated, the loss         S_P, monitor set     own "proxy/…"

A head has all K columns from the start; those of classes that nobody has met are not trained, as
the entropy of a new task comes from columns that are fresh. Deviations: docs/methods/glfc.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    normalize,
    one_hot,
    unfold,
)

from fedmodels.config.bounds import Count, NonNegative, Positive, PositiveCount
from fedmodels.errors import PayloadError
from fedmodels.host.devices import to_device
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.split import SplitNet, embed
from fedmodels.numerics.randomness import derive_seed, seeded
from fedmodels.techniques.continual import mask_of
from fedmodels.techniques.datafree import freeze
from fedmodels.techniques.server_memory import with_classes
from fedmodels.tensors.bundle import Bundle, Histogram, Weights
from fedmodels.tensors.bundle_spec import BundleSpec, TensorSpec
from fedmodels.tensors.declared_counts import DeclaredCounts, TrainsOn
from fedmodels.tensors.roles import of_role, part_of, under, without
from fedmodels.tensors.uploads import Reduction, Uploads
from fedmodels.training.contexts import ClientContext, ServerContext, ServerState
from fedmodels.training.method import Payload, Reduced
from fedmodels.training.optimizer import SGD
from fedmodels.training.run import RunFacts
from fedmodels.training.stepped import Batch, Output
from fedplugins.methods.lbfgs import RowsLBFGS

LAST, BEST, KNOWN, PROXY, GRADS = "last", "best", "known", "proxy", "grads"
MEMORY, MET, MOVED = "memory", f"{KNOWN}/met", "moved"
AT_ONCE = 32
"""Prototypes that the proxy rebuilds at a time."""
FEWEST = 10
"""A new task begins if more than one client in so many has met it."""
Examples = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Work:
    """What a client found before it trains, and what its loss refers to."""

    entropy: float
    """H, of the received model on the task's examples."""
    is_transition: bool
    memory: Tensor  # (m, 2) int64, task and place of each exemplar, class by class
    exemplars: Examples
    learnt: Tensor  # (K,) bool, the classes in memory: old ones
    old: SplitNet | None
    known: Tensor  # (K,) bool, the classes that the old model was trained on
    met: Tensor  # (K,) bool, the classes that any client has met: columns that train


@register("glfc")
class GLFC(FedAvg):
    """Old classes weigh like new ones, and an old model that the server chose is distilled."""

    citation: ClassVar[str] = "Dong et al., CVPR 2022"
    takes_targets: ClassVar[bool] = False
    tells_classes: ClassVar[bool] = True
    reduction: ClassVar[Reduction] = "each"
    trains_on: ClassVar[TrainsOn] = "history"

    memory: Count = 2000
    """Exemplars of old classes that a client trains on at most."""
    r_h: NonNegative = 1.2
    """By how much the entropy of predictions must rise from one training to the next for a new
    task."""
    kd: Annotated[float, Field(ge=0, le=1)] = 0.5
    """lambda_2, the weight of L_RD where there is an old model; L_GC has the rest."""
    perturb_steps: Count = 50
    """Steps that change a prototype before its gradient is sent."""
    perturb_lr: Positive = 0.2
    """Their learning rate; the authors' code has a tenth of the training's."""
    rebuild_steps: PositiveCount = 250
    """Iterations of L-BFGS by which the proxy rebuilds a prototype from its gradient."""
    images: PositiveCount = 20
    """Of these iterations, the last ones whose images the proxy keeps."""
    weighting: Literal["examples", "uniform"] = "uniform"

    @property
    def most_recalled(self) -> int:
        """Return how many examples of earlier tasks a training takes at most."""
        return self.memory

    def global_weights(self, common: Bundle) -> Weights:
        return without(common.weights, LAST, BEST, KNOWN)

    # --- server half: the proxy ------------------------------------------------------------------

    def init_server(self, run: RunFacts) -> ServerState:
        nobody = torch.zeros(run.problem.num_classes, dtype=torch.int32)
        met = Bundle(histogram=Histogram(nobody, nobody.clone()))
        return ServerState(super().init_server(run).common, met)

    def broadcast(self, ctx: ServerContext, state: ServerState) -> Payload:
        if ctx.scores:
            return state.common, {}
        kept = state.own.weights
        sent = {k: t for role in (LAST, BEST, KNOWN) for k, t in of_role(kept, role).items()}
        return state.common, dict.fromkeys(ctx.cohort, Bundle({**sent, MET: met(state)}))

    def payload_spec(self, run: RunFacts) -> tuple[BundleSpec, BundleSpec]:
        nets = {k: t for role in (LAST, BEST) for k, t in under(role, run.forms).items()}
        known = TensorSpec(torch.uint8, (run.problem.num_classes,))
        masks = {f"weights/{key}": known for key in (f"{KNOWN}/{LAST}", f"{KNOWN}/{BEST}", MET)}
        own = BundleSpec({}, {**BundleSpec.of(Bundle(nets)).required, **masks})
        return super().payload_spec(run)[0], own

    def upload_spec(self, run: RunFacts) -> BundleSpec:
        grads = {
            f"weights/{GRADS}/{name}": TensorSpec.of(p[None]).growing(run.problem.num_classes)
            for name, p in encoder(run).named_parameters()
        }
        return super().upload_spec(run) | BundleSpec({}, grads)

    def check_upload(
        self, ctx: ServerContext, state: ServerState, upload: Bundle, announced: DeclaredCounts
    ) -> None:
        super().check_upload(ctx, state, upload, announced)
        sent = part_of(upload.weights, GRADS)
        names = [name for name, _ in encoder(ctx.run).named_parameters()]
        if sent and (sent.keys() ^ set(names) or len({len(t) for t in sent.values()}) > 1):
            raise PayloadError("an upload holds gradients of a part of its prototypes")
        rows, most = (len(next(iter(sent.values()))) if sent else 0), int((announced.now > 0).sum())
        if rows > most:
            raise PayloadError(f"an upload holds {rows} prototypes of {most} announced classes")

    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        nets = {c: without(upload.weights, GRADS) for c, upload in uploads.items()}
        mean = uploads.means({"": nets}).get("", state.common.weights)
        return with_classes(ctx, state, replace(state, common=Bundle(mean)), uploads)

    def finish(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> Reduced:
        """Choose the old models: the best one since the last transition, and the best before it."""
        told = self.transitions(ctx, state, uploads)
        own, marks = dict(state.own.weights), dict(state.own.scalars)
        best = marks.get(BEST, 0.0)
        if told and len((shown := self.rebuilt(ctx, told))["y"]):
            moved = under(LAST, part_of(own, BEST))
            masks = {f"{KNOWN}/{LAST}": own[f"{KNOWN}/{BEST}"]} if moved else {}
            own, best = {**moved, **masks, **under(PROXY, shown)}, 0.0
        marks |= {f"{MOVED}/{c}": float(ctx.task_of(c)) for c in told}
        metrics = {"task_transitions": len(told) / max(1, len(uploads))}
        if f"{PROXY}/y" in own:
            found = self.accuracy(ctx.run, state.common.weights, part_of(own, PROXY))
            metrics["proxy_accuracy"] = found
            if found >= best:
                own |= {**under(BEST, state.common.weights), f"{KNOWN}/{BEST}": met(state)}
                best = found
        marks[BEST] = best
        return replace(state, own=replace(state.own, weights=own, scalars=marks)), metrics

    def transitions(
        self, ctx: ServerContext, state: ServerState, uploads: Uploads
    ) -> dict[int, Weights]:
        """Return the gradients of clients that met a new task, if more than a tenth of them did.

        A client meets a task once, whatever it says later.
        """
        told = {}
        for client, upload in uploads.items():
            before = state.own.scalars.get(f"{MOVED}/{client}", -1.0)
            if (grads := part_of(upload.weights, GRADS)) and before < ctx.task_of(client):
                told[client] = grads
        return told if len(told) * FEWEST > len(uploads) else {}

    @torch.no_grad()
    def accuracy(self, run: RunFacts, weights: Weights, shown: Weights) -> float:
        """Return the share of rebuilt prototypes that a model takes for their class.

        It is the median over the clients whose prototypes they are.
        """
        net = freeze(run, weights, "cpu")
        right = (net(shown["x"]).argmax(1) == shown["y"]).double()
        owners = shown.get("of", torch.zeros_like(shown["y"]))  # a state of before has none
        shares = torch.stack([right[owners == client].mean() for client in owners.unique()])  # type: ignore[no-untyped-call]
        return float(shares.quantile(0.5))

    def rebuilt(self, ctx: ServerContext, told: Mapping[int, Weights]) -> Weights:
        """Return images, labels and owners of the prototypes whose gradients clients sent.

        A client has one prototype of each class.
        """
        draw, problem = ctx.generator(), ctx.run.problem
        names = [name for name, _ in encoder(ctx.run).named_parameters()]
        listed = [(c, i) for c, grads in told.items() for i in _rows_by_class(grads, names)]
        owners = torch.tensor([client for client, _ in listed], dtype=torch.int64)
        wanted = {n: torch.stack([told[c][n][i] for c, i in listed]) for n in names}
        y, first = _classes_of(wanted, names), (1, *problem.input_shape)
        x = torch.cat([torch.randn(first, generator=draw) for _ in listed])
        found: list[tuple[Tensor, Tensor]] = []
        for number, rows in enumerate(torch.split(torch.arange(len(y)), AT_ONCE), 1):
            part = {name: tensor[rows] for name, tensor in wanted.items()}
            loss = math.nan
            for images, gap in self._rebuilding(ctx.run, x[rows], y[rows], part):
                loss = gap
                sound = images.flatten(1).isfinite().all(1)
                found.append((images[sound], rows[sound]))
            ctx.tell("prototypes", number, -(-len(y) // AT_ONCE), loss)
        which = torch.cat([rows for _, rows in found])
        return {"x": torch.cat([x for x, _ in found]), "y": y[which], "of": owners[which]}

    def _rebuilding(
        self, run: RunFacts, x: Tensor, y: Tensor, wanted: Weights
    ) -> Iterator[tuple[Tensor, float]]:
        """Yield all images after each of the last iterations, and the largest gap before it."""
        gamma = encoder(run).requires_grad_(False)
        theirs = [wanted[name] for name, _ in gamma.named_parameters()]

        @torch.enable_grad()
        def each(flat: Tensor) -> tuple[Tensor, Tensor]:
            shown = flat.detach().requires_grad_()
            mine = gradients_of_each(gamma, shown.view_as(x), y)
            apart = [(a - b).square().flatten(1).sum(1) for a, b in zip(mine, theirs, strict=True)]
            gaps = torch.stack(apart).sum(0)
            return torch.autograd.grad(gaps.sum(), shown)[0], gaps.detach()

        steps, moves = RowsLBFGS(x.flatten(1).clone(), lr=0.1), True
        for step in range(self.rebuild_steps):
            if moves:
                gaps, moves = steps.step(each)
            if step >= self.rebuild_steps - self.images:
                yield steps.x.view_as(x).clone(), float(gaps.max())

    # --- client half -----------------------------------------------------------------------------

    def init_client(self, run: RunFacts, client: int) -> Bundle:
        return Bundle({MEMORY: torch.zeros(0, 2, dtype=torch.int64)}, scalars={"entropy": 0.0})

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> Work:
        x, y = ctx.stream.train(ctx.task)
        earlier = ctx.stream.train_each(ctx.task)
        earlier = {task: part for task, part in earlier.items() if task != ctx.task}
        before = state.scalars["entropy"]
        now = entropy(ctx, x) if len(y) else before
        is_transition = now - before > self.r_h
        memory = state.weights[MEMORY]
        if is_transition:
            memory = self.stored(ctx.net, earlier, memory)
        exemplars = _taken(earlier, memory, (x[:0], y[:0]))
        learnt = mask_of(exemplars[1], ctx.run.problem.num_classes)
        old, known = self.old_model(ctx, payload, is_transition)
        mine = learnt | mask_of(y, ctx.run.problem.num_classes)
        if MET in payload.weights:
            mine = mine | to_device(payload.weights[MET].bool(), ctx.device)
        return Work(now, is_transition, memory, exemplars, learnt, old, known, mine)

    def old_model(
        self, ctx: ClientContext, payload: Bundle, is_transition: bool
    ) -> tuple[SplitNet | None, Tensor]:
        """Return the old model and its classes.

        The best model so far is one of the last task's where the client has just met a new task.
        """
        role = BEST if is_transition and f"{KNOWN}/{BEST}" in payload.weights else LAST
        if f"{KNOWN}/{role}" not in payload.weights:
            return None, torch.zeros(ctx.run.problem.num_classes, dtype=torch.bool)
        net = freeze(ctx.run, part_of(payload.weights, role), ctx.device)
        return net, to_device(payload.weights[f"{KNOWN}/{role}"].bool(), ctx.device)

    def stored(self, net: SplitNet, earlier: Mapping[int, Examples], memory: Tensor) -> Tensor:
        """Return the memory with the classes of earlier tasks, as many exemplars of each."""
        by_class: dict[int, list[tuple[int, int]]] = {}
        for task, place in memory.tolist():
            if task in earlier:
                by_class.setdefault(int(earlier[task][1][place]), []).append((task, place))
        new: dict[int, list[tuple[int, int]]] = {}
        for task, (_, y) in earlier.items():
            for place, label in enumerate(y.tolist()):
                if label not in by_class:
                    new.setdefault(label, []).append((task, place))
        most = self.memory // max(1, len(by_class) + len(new))
        for label, places in sorted(new.items()):
            x = torch.stack([earlier[task][0][place] for task, place in places])
            by_class[label] = [places[i] for i in herded(normalize(embed(net, x)), most)]
        kept = [place for places in by_class.values() for place in places[:most]]
        return torch.tensor(kept, dtype=torch.int64).reshape(-1, 2)

    def training_data(self, ctx: ClientContext, refs: Work) -> Examples:
        x, y = ctx.stream.train(ctx.task)
        return torch.cat([x, refs.exemplars[0]]), torch.cat([y, refs.exemplars[1]])

    def taught(self, ctx: ClientContext, x: Tensor, refs: Work) -> tuple[Tensor, ...]:
        return () if refs.old is None else (refs.old(x).sigmoid(),)

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: Work) -> Tensor:
        target = one_hot(batch.y, out.logits.shape[1]).to(out.logits.dtype)
        weights = compensation(out.logits.detach(), batch.y, refs.learnt)
        each = binary_cross_entropy_with_logits(out.logits, target, reduction="none")
        compensated = mean_of(weights[:, None] * each, refs.met)  # L_GC
        if refs.old is None:
            return compensated
        (soft,) = batch.taught
        relations = torch.where(refs.known, soft, target)
        each = binary_cross_entropy_with_logits(out.logits, relations, reduction="none")
        return (1 - self.kd) * compensated + self.kd * mean_of(each, refs.met)  # L_RD

    def after_local(self, ctx: ClientContext, state: Bundle, refs: Work) -> Bundle:
        return Bundle({MEMORY: refs.memory}, scalars={"entropy": refs.entropy})

    def uplink(self, ctx: ClientContext, state: Bundle, refs: Work) -> Bundle:
        upload = super().uplink(ctx, state, refs)
        if not refs.is_transition:
            return upload
        gamma = encoder(ctx.run).to(ctx.device)
        x, y = ctx.stream.train(ctx.task)
        sent = [self.gradients_of(ctx.net, gamma, x[y == k], int(k)) for k in y.unique()]  # type: ignore[no-untyped-call]
        names = [name for name, _ in gamma.named_parameters()]
        stacked = [torch.stack(parts).cpu() for parts in zip(*sent, strict=True)]
        grads = under(GRADS, dict(zip(names, stacked, strict=True)))
        return replace(upload, weights={**upload.weights, **grads})

    @torch.enable_grad()
    def gradients_of(self, net: SplitNet, gamma: nn.Module, x: Tensor, k: int) -> list[Tensor]:
        """Return Gamma's gradients of a class's prototype, changed by steps that favour it."""
        net.eval()
        z = normalize(embed(net, x))
        nearest = int((z.mean(0) - z).norm(dim=1).argmin())
        shown = x[nearest : nearest + 1].clone().requires_grad_()
        steps = SGD([shown], lr=self.perturb_lr, weight_decay=1e-5)
        for _ in range(self.perturb_steps):
            logits = net(shown)
            target = one_hot(torch.tensor([k], device=x.device), logits.shape[1])
            loss = binary_cross_entropy_with_logits(logits, target.to(logits.dtype))
            (shown.grad,) = torch.autograd.grad(loss, [shown])
            steps.step()
        return [g.detach() for g in gradients(gamma, shown.detach(), k)]


def met(state: ServerState) -> Tensor:
    """Return which classes (K,) clients have met in training so far, as 0 or 1."""
    assert state.own.histogram is not None
    return (state.own.histogram.total > 0).to(torch.uint8)


def mean_of(each: Tensor, columns: Tensor) -> Tensor:
    """Return the mean of a matrix (B, K) over some of its columns."""
    return (each * columns).sum() / (len(each) * columns.sum())


def compensation(logits: Tensor, y: Tensor, learnt: Tensor) -> Tensor:
    """Return the weight (B,) of each example: its G over the mean G of old, or of new, classes.

    G is how far the sigmoid of the right class is from 1. Without an old class all weights are 1.
    """
    g = 1 - logits.sigmoid().gather(1, y[:, None])[:, 0]
    is_old = learnt[y]
    weights = torch.zeros_like(g)
    for group in (is_old, ~is_old):
        mean = (g * group).sum() / group.sum().clamp_min(1)
        weights = weights + torch.where(group & (mean > 0), g / mean.clamp_min(1e-30), 0.0)
    return torch.where(learnt.any(), weights, torch.ones_like(g))


@torch.no_grad()
def entropy(ctx: ClientContext, x: Tensor) -> float:
    """Return the mean entropy of what the net predicts for examples, as in the authors' code."""
    ctx.net.eval()
    p = torch.cat([ctx.net(part).softmax(1) for part in ctx.net.split(x, 256)])
    return float(-(p * (p + 1e-5).log()).sum(1).mean())


def herded(z: Tensor, most: int) -> list[int]:
    """Return the places of embeddings (n, d) whose mean follows that of all, the best first."""
    mean, total, chosen = z.mean(0), torch.zeros_like(z[0]), list[int]()
    for i in range(min(most, len(z))):
        gaps = (mean - (total + z) / (i + 1)).norm(dim=1)
        gaps[chosen] = math.inf
        chosen.append(int(gaps.argmin()))
        total = total + z[chosen[-1]]
    return chosen


def encoder(run: RunFacts) -> nn.Sequential:
    """Return Gamma, which clients and the proxy know: the LeNet of the authors' code.

    Examples that are no images get a hidden layer in place of the convolutions.
    """
    shape = run.problem.input_shape
    with seeded(derive_seed(run.experiment.seed, "encoder", 0, "init")):
        if len(shape) == 3:
            layers: list[nn.Module] = []
            for channels, stride in ((shape[0], 2), (12, 2), (12, 1)):
                layers += [nn.Conv2d(channels, 12, 5, stride, 2), nn.Sigmoid()]
        else:
            layers = [nn.Flatten(), nn.Linear(math.prod(shape), 12), nn.Sigmoid()]
        body = nn.Sequential(*layers, nn.Flatten())
        width = body(torch.zeros(1, *shape)).shape[1]
        gamma = nn.Sequential(body, nn.Linear(width, run.problem.num_classes))
        for p in gamma.parameters():
            nn.init.uniform_(p, -0.5, 0.5)
    return gamma


def gradients(gamma: nn.Module, x: Tensor, label: int) -> tuple[Tensor, ...]:
    """Return the gradients of Gamma's parameters of the loss of one example."""
    loss = cross_entropy(gamma(x), torch.tensor([label], device=x.device))
    return torch.autograd.grad(loss, [*gamma.parameters()])


def gradients_of_each(gamma: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """Return the gradients (n, …) of Gamma's parameters of each example's loss.

    They have a gradient for the examples (n, …) in turn. A layer's are made of what enters it and
    the gradients of what leaves it: torch.func, which maps over examples, would import the compiler
    of torch.
    """
    layers, entered, left = [], list[Tensor](), list[Tensor]()
    for layer in (m for m in gamma.modules() if not [*m.children()]):
        before, x = x, layer(x)
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            layers.append(layer)
            entered.append(before)
            left.append(x)
    loss = cross_entropy(x, y, reduction="sum")
    found = list[Tensor]()
    deltas = torch.autograd.grad(loss, left, create_graph=True)
    for layer, z, delta in zip(layers, entered, deltas, strict=True):
        if isinstance(layer, nn.Linear):
            found += [delta[:, :, None] * z[:, None, :], delta]
        else:
            places = unfold(z, layer.kernel_size, padding=layer.padding, stride=layer.stride)  # type: ignore[arg-type]
            delta = delta.flatten(2)  # (n, o, T), and the places (n, i, T)
            found += [(delta @ places.mT).view(len(z), *layer.weight.shape), delta.sum(2)]
    return found


def _classes_of(grads: Weights, names: Sequence[str]) -> Tensor:
    """Return the classes (n,) of gradients: only the row of the right class is negative."""
    return grads[names[-2]].sum(2).argmin(1)


def _rows_by_class(grads: Weights, names: Sequence[str]) -> list[int]:
    """Return the rows of a client's gradients that are the first of their class."""
    first: dict[int, int] = {}
    for row, label in enumerate(_classes_of(grads, names).tolist()):
        first.setdefault(label, row)
    return [*first.values()]


def _taken(earlier: Mapping[int, Examples], memory: Tensor, none: Examples) -> Examples:
    """Return the exemplars, of tasks that are still there."""
    held = [(t, i) for t, i in memory.tolist() if t in earlier]
    if not held:
        return none
    x = torch.stack([earlier[task][0][place] for task, place in held])
    return x, torch.stack([earlier[task][1][place] for task, place in held])
