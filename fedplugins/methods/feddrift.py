"""FedDrift and FedDrift-Eager — Jothimurugesan, Hsieh, Wang, Joshi, Gibbons, Federated Learning
under Distributed Concept Drift, AISTATS 2023. https://arxiv.org/abs/2206.00799
Facts from the authors' code, https://github.com/microsoft/FedDrift (``mmacc``; ``H_A_F_1_06_0``,
which its README calls theirs, and ``H_A_C_1`` for ``reading.begins = "one"``).

    paper, code          here                             paper, code     here
    h_m                  weights "model{m}/…"             delta           delta
    w[t][m][c]           "models" of client c, by task    M               models
    L_ij                 correct[i, j] / examples[j]      time step       task

The loss of a model is the share of examples that it takes for another class. Deviations: no extra
exchange comes before a step's first round, so models merge after it, by what the clients found
before it; a new model begins where each of its clients began (docs/methods/feddrift.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedmodels.config.bounds import Positive, PositiveCount
from fedmodels.errors import PayloadError
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.split import load_weights, weights_of
from fedmodels.techniques.several_models import correct_of, roles_in
from fedmodels.tensors.bundle import Bundle, ClientId, Weights
from fedmodels.tensors.bundle_spec import BundleSpec, TensorSpec, scalar_spec
from fedmodels.tensors.declared_counts import DeclaredCounts, TrainsOn, check_examples
from fedmodels.tensors.roles import part_of, under
from fedmodels.tensors.uploads import Reduction, Uploads
from fedmodels.tensors.weighted_mean import weighted_mean
from fedmodels.training.contexts import ClientContext, ServerContext, ServerState
from fedmodels.training.loop import EpochLoop
from fedmodels.training.method import Payload, Reduced
from fedmodels.training.run import RunFacts

NEW = "new"
"""The role of a model that a client began as none of the others fits."""
UNKNOWN = -1.0
"""Of a client that has not trained: lower than every accuracy, so that nothing falls from it."""
MOST_TASKS = 1 << 16
WITNESSES = 3
"""Of so many clients, one cannot move the median beyond what the others say."""


@dataclass
class Work:
    """A client's work in one interaction."""

    model: int
    """The model that fits the present task best."""
    accuracy: float
    """Its share of right answers to the task's examples, when the client met them."""
    drifted: bool
    examples: Tensor  # (M + 1,) int64, the client's by model, the new one's last
    data: dict[str, tuple[Tensor, Tensor]]
    """By role of the models to train; the present task's comes last."""
    starts: dict[str, Weights]
    correct: Tensor | None = None  # (M, M) int64, right answers of model i to the data of model j
    trained: dict[str, Weights] = field(default_factory=dict)

    @property
    def role(self) -> str:
        """Return the role of the model that learns the present task."""
        return NEW if self.drifted else f"model{self.model}"


@register("feddrift")
class FedDrift(FedAvg):
    """Each client that no model fits begins one of its own; models that fit alike are merged."""

    citation: ClassVar[str] = "Jothimurugesan et al., AISTATS 2023"
    takes_targets: ClassVar[bool] = False
    views: ClassVar[tuple[str, ...]] = ("after_local", "after_downlink")
    reduction: ClassVar[Reduction] = "each"
    trains_on: ClassVar[TrainsOn] = "history"
    variants_in: ClassVar[str] = "fedplugins.methods.feddrift_variants"
    begins_alone: ClassVar[bool] = True
    """Whether a client begins with a model of its own; in the paper's code, ``H_A_F_1_06_0``."""

    delta: Positive = 0.1
    """How far accuracy must fall from one task to the next for a drift; the paper's by data set."""
    models: PositiveCount = 6
    """M, the most models; then the one that is longest unused makes room."""

    def global_weights(self, common: Bundle) -> Weights:
        """Return nothing: no model is everybody's, and none keeps its number."""
        return {}

    # --- server half ---------------------------------------------------------------------------

    def init_server(self, run: RunFacts) -> ServerState:
        never = torch.full((self.models,), -1)
        own = Bundle({"used": never, "born": never.clone(), "step": torch.tensor([-1])})
        return ServerState(Bundle(under("model0", run.initial_weights)), own)

    def broadcast(self, ctx: ServerContext, state: ServerState) -> Payload:
        born, known = state.own.weights["born"].tolist(), _models(state)
        newest = {int(held.weights["models"][-1]) for held in state.clients.values()}
        offered = [m for m in known if born[m] != ctx.task]  # a new one is apart in its step
        flags = {"open": self._flags(offered), "active": self._flags(newest)}
        tables: dict[ClientId, Bundle] = {
            c: state.clients[c] for c in ctx.cohort if c in state.clients
        }
        return Bundle({**state.common.weights, **flags}), tables

    def payload_spec(self, run: RunFacts) -> tuple[BundleSpec, BundleSpec]:
        flags = BundleSpec.of(Bundle(dict.fromkeys(("open", "active"), self._flags(()))))
        first, *rest = (self._spec(run, f"model{m}") for m in range(self.models))
        table = TensorSpec(torch.int64, (None,), MOST_TASKS)
        others = {key: each for spec in rest for key, each in spec.items()}
        common = BundleSpec({**first, **flags.required}, others)
        return common, BundleSpec({}, {"weights/models": table})

    def upload_spec(self, run: RunFacts) -> BundleSpec:
        n = self.models
        counts = {"examples": torch.zeros(n + 1).long(), "correct": torch.zeros(n, n).long()}
        roles = (*(f"model{m}" for m in range(n)), NEW)
        nets = {key: each for role in roles for key, each in self._spec(run, role).items()}
        optional = {**nets, **BundleSpec.of(Bundle(counts)).required}
        return scalar_spec("num_examples", "model", "drifted") | BundleSpec({}, optional)

    def _flags(self, chosen: Collection[int]) -> Tensor:
        """Return 1 for each of the models (M,) that is chosen, else 0."""
        return torch.tensor([int(m in chosen) for m in range(self.models)])

    def _spec(self, run: RunFacts, role: str) -> dict[str, TensorSpec]:
        return dict(BundleSpec.of(Bundle(under(role, run.forms))).required)

    def check_upload(
        self, ctx: ServerContext, state: ServerState, upload: Bundle, announced: DeclaredCounts
    ) -> None:
        super().check_upload(ctx, state, upload, announced)
        model, drifted = upload.scalars["model"], upload.scalars["drifted"]
        given = _models(state)
        if model not in given or drifted not in (0, 1):
            raise PayloadError(f"an upload names model {model:g}, and there are {given}")
        examples = upload.weights.get("examples", torch.zeros(self.models + 1).long())
        most = announced.most_examples(self.trains_on)
        check_examples(float(examples.sum()), most, "the sum of tensor 'weights/examples'")
        if int(examples.min()) < 0:
            raise PayloadError("tensor 'weights/examples' holds a number below 0")
        for role in roles_in(upload, ctx.run.forms):
            place = self.models if role == NEW else int(role.removeprefix("model"))
            if not int(examples[place]) or (not drifted if role == NEW else place not in given):
                raise PayloadError(f"an upload holds {role!r}, which the client has no data for")
        correct = upload.weights.get("correct", torch.zeros(1, self.models).long())
        if bool(((correct < 0) | (correct > examples[:-1])).any()):
            raise PayloadError("tensor 'weights/correct' counts more than 'weights/examples'")

    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        groups: dict[str, dict[int, Weights]] = {}
        counts: dict[str, dict[int, float]] = {}
        given = self._starts(ctx, uploads)
        for client, upload in uploads.items():
            for role in roles_in(upload, ctx.run.forms):
                if role == NEW and not _may_drift(ctx, state, client):
                    continue
                place = self.models if role == NEW else int(role.removeprefix("model"))
                n, key = float(upload.weights["examples"][place]), self._group(role, client)
                counts.setdefault(key, {})[client] = n if self.weighting == "examples" else 1.0
                own = under(given[key], part_of(upload.weights, role))
                groups.setdefault(key, {})[client] = own  # named like what it was trained from
        means = {k: part_of(m, given[k]) for k, m in uploads.means(groups, counts).items()}
        trained = {k: t for role, mean in means.items() for k, t in under(role, mean).items()}
        known = {k: t for k, t in trained.items() if not k.startswith(NEW)}
        begun = {k: t for k, t in trained.items() if k.startswith(NEW)}
        common = Bundle({**state.common.weights, **known})
        return replace(state, common=common, own=Bundle({**state.own.weights, **begun}))

    def _starts(self, ctx: ServerContext, uploads: Uploads) -> dict[str, str]:
        """Return by group of uploads the model that most of them were trained from."""
        named: dict[str, Counter[str]] = {}
        for client, upload in uploads.items():
            best = f"model{upload.scalars['model']:.0f}"
            for role in roles_in(upload, ctx.run.forms):
                of_group = named.setdefault(self._group(role, client), Counter())
                of_group[best if role == NEW else role] += 1
        return {group: votes.most_common(1)[0][0] for group, votes in named.items()}

    def models_of(self, ctx: ServerContext, upload: Bundle) -> Sequence[str]:
        return roles_in(upload, ctx.run.forms)

    def _group(self, role: str, client: int) -> str:
        """Return what names the mean that a client's model is a part of."""
        return f"{NEW}{client}" if role == NEW else role

    def finish(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> Reduced:
        """Keep who has which model, and the new ones; count the drifts."""
        board = Board.of(state, ctx)
        told = [c for c, upload in uploads.items() if upload.scalars["drifted"]]
        moved = {c: self._group(NEW, c) for c in told if _may_drift(ctx, state, c)}
        for client, upload in uploads.items():
            if client not in moved:
                board.takes(client, ctx.task_of(client), int(upload.scalars["model"]))
        places: dict[str, int | None] = {}
        for client, group in moved.items():
            if group not in places:
                places[group] = self._place(board, group, part_of(state.own.weights, group))
            model = places[group]
            known = int(uploads[client].scalars["model"])
            board.takes(client, ctx.task_of(client), known if model is None else model)
        found = {"clients_drifted": len(moved) / max(1, len(uploads))}
        found["models_merged"] = float(self._merged(ctx, board, uploads))
        return board.state(state), {**found, "models_kept": float(len(board.nets))}

    def _place(self, board: Board, group: str, weights: Weights) -> int | None:
        """Return the number of a new model; None where there is no room, or no mean of it."""
        return board.begin(weights)

    def _merged(self, ctx: ServerContext, board: Board, uploads: Uploads) -> int:
        """Merge models that fit alike; return how many went into another one."""
        told = [u.weights for u in uploads.values() if "correct" in u.weights]
        if board.was_here or not told:  # once a step, by what clients found before its first round
            return 0
        examples = torch.stack([weights["examples"][:-1] for weights in told])[:, None].double()
        rates = torch.stack([weights["correct"] for weights in told]) / examples
        holders = (examples > 0).sum(0).flatten().tolist()
        whose = {m for row in board.tables.values() for m in row}  # what clients claim beyond it
        met = [m for m in board.nets if board.born[m] != ctx.task and holders[m] and m in whose]
        accuracy = rates.nanquantile(0.5, 0)[met][:, met].numpy()  # nan of who has no such data
        groups = clusters(accuracy, self.delta, [holders[m] for m in met])
        return sum(board.merge([met[place] for place in group]) for group in groups)

    # --- client half ---------------------------------------------------------------------------

    def init_client(self, run: RunFacts, client: int) -> Bundle:
        return Bundle(scalars={"task": UNKNOWN, "accuracy": UNKNOWN, "before": UNKNOWN})

    def load(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        kept = [m for m in _table(payload)[: ctx.task + 1].tolist() if m >= 0]
        scored = ctx.view and kept  # before it trains on a task, a client answers as it did
        model = kept[-1] if scored else ctx.once(self._best, payload, state)[0]
        load_weights(ctx.net, part_of(payload.weights, f"model{model}"))

    def _best(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> tuple[int, float]:
        """Return the model that is right most often on the task, and how often."""
        table, (x, y) = _table(payload), ctx.stream.train(ctx.task)
        if len(table) > ctx.task and table[ctx.task] >= 0:
            return int(table[ctx.task]), state.scalars["accuracy"]
        offered = payload.weights["open"].nonzero().flatten().tolist()
        if not len(y):
            earlier = [m for m in table.tolist() if m in offered]
            return (earlier or offered)[-1], state.scalars["accuracy"]
        models = [part_of(payload.weights, f"model{m}") for m in offered]
        right = correct_of(ctx, models, x, y)
        return offered[int(right.argmax())], float(right.max()) / len(y)

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> Work:
        table, now = _table(payload), ctx.task
        is_known = len(table) > now and table[now] >= 0
        model, accuracy = ctx.once(self._best, payload, state)
        drifted = not is_known and self._drifts(ctx, state, accuracy)
        drifted &= len(ctx.stream.train(now)[1]) > 0
        own, held = self.models if drifted else model, dict[int, list[tuple[Tensor, Tensor]]]()
        for task, part in ctx.stream.train_each(now).items():
            at = own if task == now else int(table[task]) if task < len(table) else -1
            if at >= 0:
                held.setdefault(at, []).append(part)
        joined = {m: _joined(parts) for m, parts in held.items()}
        examples = torch.zeros(self.models + 1).long()
        for m, (_, y) in joined.items():
            examples[m] = len(y)
        work = Work(model, accuracy, drifted, examples, {}, {})
        if not is_known:
            work.correct = self._correct(ctx, payload, joined)
        for m in [*(m for m in sorted(joined) if m != own), own]:
            if m == own or payload.weights["active"][m]:
                role, start = (NEW, model) if m == self.models else (f"model{m}", m)
                work.data[role] = joined.get(m, ctx.stream.train(now))
                work.starts[role] = part_of(payload.weights, f"model{start}")
        return work

    def _drifts(self, ctx: ClientContext, state: Bundle, accuracy: float) -> bool:
        """Tell whether the best model is too much worse on a task than one was on the last.

        Clients for whose first model there is no room have the one of least loss.
        """
        is_first = self.begins_alone and ctx.task == 0
        return is_first or _before(ctx, state) - accuracy > self.delta

    def _correct(
        self, ctx: ClientContext, payload: Bundle, held: dict[int, tuple[Tensor, Tensor]]
    ) -> Tensor | None:
        """Return the right answers of each model to the client's data of each, (M, M)."""
        found = torch.zeros(self.models, self.models).long()
        offered = payload.weights["open"].nonzero().flatten().tolist()
        models = [part_of(payload.weights, f"model{m}") for m in offered]
        for j, (x, y) in held.items():
            if j in offered:
                found[offered, j] = correct_of(ctx, models, x, y)
        return found

    def training_data(self, ctx: ClientContext, refs: Work) -> tuple[Tensor, Tensor]:
        return _joined([*refs.data.values()])

    def fit(self, ctx: ClientContext, x: Tensor, y: Tensor, refs: Work) -> float:
        loss = 0.0
        for role, (own_x, own_y) in refs.data.items():
            load_weights(ctx.net, refs.starts[role])
            if len(own_y):
                loss = EpochLoop(self, ctx, own_x, own_y, refs).run()
                refs.trained[role] = weights_of(ctx.net)
        return loss

    def after_local(self, ctx: ClientContext, state: Bundle, refs: Work) -> Bundle:
        before, task = _before(ctx, state), float(ctx.task)
        return Bundle(scalars={"task": task, "accuracy": refs.accuracy, "before": before})

    def uplink(self, ctx: ClientContext, state: Bundle, refs: Work) -> Bundle:
        nets = {k: t for role, own in refs.trained.items() for k, t in under(role, own).items()}
        counts = {"examples": refs.examples}
        if refs.correct is not None:
            counts["correct"] = refs.correct
        drifted = float(refs.drifted)
        scalars = {"num_examples": float(ctx.num_examples), "model": float(refs.model)}
        return Bundle({**nets, **counts}, scalars={**scalars, "drifted": drifted})


@register("feddrift-eager")
class FedDriftEager(FedDrift):
    """Clients whose data no model fits any more begin one more model, together; none merge."""

    citation: ClassVar[str] = "Jothimurugesan et al., AISTATS 2023"
    variants_in: ClassVar[str] = ""
    begins_alone: ClassVar[bool] = False

    def _group(self, role: str, client: int) -> str:
        return role

    def _place(self, board: Board, group: str, weights: Weights) -> int | None:
        born = [m for m in board.nets if board.born[m] == board.step]  # in an earlier round
        return born[0] if born else board.begin(weights)

    def _correct(
        self, ctx: ClientContext, payload: Bundle, held: dict[int, tuple[Tensor, Tensor]]
    ) -> None:
        return None

    def _merged(self, ctx: ServerContext, board: Board, uploads: Uploads) -> int:
        return 0


def clusters(accuracy: np.ndarray, delta: float, holders: Sequence[int]) -> list[list[int]]:
    """Return groups of models by complete linkage, as places (n,).

    The distance of i and j is ``max(L_ij - L_ii, L_ji - L_jj, 0)``: how much less often a model is
    right on the other's data than on its own. Models with ``WITNESSES`` or more are grouped first,
    by themselves: what one or two clients say of a model of theirs neither joins nor parts those.

    Args:
        accuracy: (n, n), of model i on the data of model j.
        delta: the largest distance within a group.
        holders: how many clients told of their data of each model.
    """
    worse = accuracy.diagonal()[:, None] - accuracy
    distance = np.maximum(np.maximum(worse, worse.T), 0)
    groups: list[list[int]] = []
    for sure in (True, False):
        groups += [[m] for m, n in enumerate(holders) if (n >= WITNESSES) == sure]
        groups = _linked(groups, distance, delta)
    return sorted(groups)


def _linked(groups: list[list[int]], distance: np.ndarray, delta: float) -> list[list[int]]:
    """Return groups of places, of which the nearest two were joined while they are near enough."""
    from scipy.cluster.hierarchy import fcluster, linkage  # few runs merge
    from scipy.spatial.distance import squareform

    if len(groups) < 2:
        return groups
    apart = np.array([[distance[np.ix_(one, other)].max() for other in groups] for one in groups])
    np.fill_diagonal(apart, 0)
    found = fcluster(linkage(squareform(apart), "complete"), t=delta, criterion="distance")
    return [
        sorted(chain.from_iterable(g for g, of in zip(groups, found, strict=True) if of == label))
        for label in sorted({*found})
    ]


@dataclass
class Board:
    """The server's table of who has which model, while it is written."""

    step: int
    now: int
    """The interaction."""
    was_here: bool
    """Whether the step had a round before."""
    nets: dict[int, Weights]
    tables: dict[int, list[int]]
    """By client the model of each of its tasks; -1 of none."""
    used: list[int]
    """The last interaction in which somebody had the model, by model; -1 of none."""
    born: list[int]
    """The step in which it began."""

    @classmethod
    def of(cls, state: ServerState, ctx: ServerContext) -> Board:
        """Read a state."""
        own, step = state.own.weights, ctx.task
        nets = {m: part_of(state.common.weights, f"model{m}") for m in _models(state)}
        tables = {c: held.weights["models"].tolist() for c, held in state.clients.items()}
        used, born = own["used"].tolist(), own["born"].tolist()
        return cls(step, ctx.interaction, int(own["step"]) == step, nets, tables, used, born)

    def state(self, before: ServerState) -> ServerState:
        """Return the table as a server's state."""
        nets = {k: t for m, own in sorted(self.nets.items())
                for k, t in under(f"model{m}", own).items()}  # fmt: skip
        own = {"used": torch.tensor(self.used), "born": torch.tensor(self.born)}
        own["step"] = torch.tensor([self.step])
        tables = {c: Bundle({"models": torch.tensor(row)}) for c, row in self.tables.items()}
        return replace(before, common=Bundle(nets), own=Bundle(own), clients=tables)

    def takes(self, client: int, task: int, model: int) -> None:
        """Write down which model a client has on a task."""
        row = self.tables.setdefault(client, [])
        row.extend([-1] * (task + 1 - len(row)))
        row[task], self.used[model] = model, self.now

    def begin(self, weights: Weights) -> int | None:
        """Take a new model; return its number, or None where there is no room for it."""
        if not weights:
            return None
        free = [m for m in range(len(self.used)) if m not in self.nets]
        idle = self.nets.keys() - {row[-1] for row in self.tables.values()}
        if not free and not idle:
            return None
        place = free[0] if free else min(sorted(idle), key=self._use)
        self._renamed([place], -1)
        self.nets[place], self.born[place], self.used[place] = weights, self.step, self.now
        return place

    def _use(self, model: int) -> tuple[bool, int]:
        """Return how much a model is of use: one of several clients more than that of one."""
        return sum(model in row for row in self.tables.values()) > 1, self.used[model]

    def merge(self, group: list[int]) -> int:
        """Make one model of several, by the clients' tasks that each has; return how many went."""
        first, *others = sorted(group)
        if not others:
            return 0
        counts = [float(sum(row.count(m) for row in self.tables.values())) for m in sorted(group)]
        nets = [self.nets[m] for m in sorted(group)]
        self.nets[first] = weighted_mean(nets, counts, sum(counts))
        self.used[first] = max(self.used[m] for m in group)
        self._renamed(others, first)
        for m in others:
            del self.nets[m]
            self.used[m] = self.born[m] = -1
        return len(others)

    def _renamed(self, models: list[int], name: int) -> None:
        self.tables = {
            c: [name if m in models else m for m in row] for c, row in self.tables.items()
        }


def _models(state: ServerState) -> list[int]:
    """Return the numbers of the models that there are."""
    roles = {key.partition("/")[0] for key in state.common.weights}
    return sorted(int(role.removeprefix("model")) for role in roles)


def _may_drift(ctx: ServerContext, state: ServerState, client: int) -> bool:
    """Tell whether a client may say that no model fits: it has none on its task yet."""
    row = state.clients[client].weights["models"].tolist() if client in state.clients else []
    return row[ctx.task_of(client) :][:1] in ([], [-1])


def _table(payload: Bundle) -> Tensor:
    """Return the model of each of a client's tasks (T,), as far as the server knows."""
    return payload.weights.get("models", torch.zeros(0).long())


def _before(ctx: ClientContext, state: Bundle) -> float:
    """Return the accuracy on the task before the present one."""
    is_same = state.scalars["task"] == ctx.task
    return state.scalars["before" if is_same else "accuracy"]


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
