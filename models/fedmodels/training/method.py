"""What a method is: the functions of its two halves, and what each does unless overridden.

A method is a frozen dataclass whose fields are the paper's hyper-parameters. It holds no state:
server state and client state go in and come out. ``training/contexts.py`` has what else its
functions are given. ``methods/fedavg.py`` has the functions without a default; other methods
inherit from it and override whole functions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from torch import Tensor

from fedmodels.devices import to_device
from fedmodels.nets.embedding import embeddings
from fedmodels.nets.split import weights_of
from fedmodels.tensors.bundle import Bundle, ClientId, Weights
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.declared_counts import DeclaredCounts, TrainsOn, check_upload
from fedmodels.tensors.uploads import Reduction, Uploads
from fedmodels.training.contexts import ClientContext, Metrics, ServerContext, ServerState
from fedmodels.training.pictures import Picture, PrototypeMap
from fedmodels.training.run import RunFacts

Payload = tuple[Bundle, Mapping[ClientId, Bundle]]
"""What the server sends: a common part, and a part for each client that needs one."""
Reduced = tuple[ServerState, Metrics]
"""The server's next state, and numbers for the run's records."""
Scores = Mapping[str, Tensor]
"""Scores (B, K) by rule."""


@dataclass(frozen=True)
class Phase:
    """One part of local training: which weights train, for how long, and how."""

    epochs: int
    trains: tuple[str, ...] = ("",)
    """Prefixes of the weights that train, e.g. ``("base/",)``; the rest is frozen."""
    lr: float | None = None
    """Learning rate; by default the run's."""
    weight_decay: Mapping[str, float] = field(default_factory=dict)
    """By prefix of the weights; the run's for all other weights."""
    bn_of_frozen: Literal["train", "eval"] = "train"
    """Mode of frozen submodules: in ``train`` their running statistics still move."""


@dataclass(frozen=True)
class Batch:
    """A mini-batch."""

    x: Tensor  # (B, …)
    y: Tensor  # (B,) int64
    index: Tensor  # (B,) position in the training set of this interaction
    drawn: Tensor | None = None
    """``index`` on the processor, where the stock loop has drawn it."""

    @property
    def positions(self) -> Tensor:
        """Return ``index`` on the processor; of the stock loop's batches, nobody waits for it."""
        return self.index.cpu() if self.drawn is None else self.drawn

    def rows(self, wanted: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the rows of the batch (r,) whose positions are wanted.

        The processor chooses them: whoever indexes by a mask of a GPU waits for the GPU.

        Args:
            wanted: tells of positions (B,) on the processor which are wanted, (B,) bool.
        """
        return to_device(wanted(self.positions).nonzero().flatten(), self.index.device)


@dataclass(frozen=True)
class Output:
    """The net's output for a mini-batch."""

    features: Tensor  # (B, d)
    logits: Tensor  # (B, K)


@dataclass(frozen=True)
class LocalResult:
    """The result of local training: upload, new private state, and the last epoch's mean loss."""

    upload: Bundle
    state: Bundle
    loss: float
    num_examples: int


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """The functions of a method, server half first. Uploads come in client-id order."""

    name: ClassVar[str]
    citation: ClassVar[str] = ""
    reduction: ClassVar[Reduction] = "each"
    """What the server half reads of the uploads' weights: ``uploads.mean()`` alone, where each
    upload counts what ``count`` says, or the weights of ``each`` upload. Large uploads of which the
    mean is enough are added up as they come and leave memory."""
    takes_means: ClassVar[bool] = True
    """Whether the server half takes means from its uploads, so that another rule than the mean
    (``[server] reduce``) has a meaning."""
    reads_singly: ClassVar[str] = ""
    """What the server half makes of single uploads, beside means, in words; empty if nothing.
    ``[server] reduce`` has no effect on that."""
    trains_on: ClassVar[TrainsOn] = "task"
    """The examples that clients train on: those of the order's ``task``, or of the ``history`` of
    all tasks so far. With ``memory`` something stands in for earlier tasks, whose data the method
    must not see; with ``replay`` it is generated examples, which count as examples."""
    learns_at_task_end: ClassVar[bool] = False
    """Whether the server half reads ``ctx.ends_task``. An open run then goes on to new tasks only
    after the last round of a stage."""
    tells_classes: ClassVar[bool] = False
    """Whether the server half reads ``ctx.labels``, or clients report figures by class, neither of
    which goes with ``[privacy] announce = "none"``."""
    needs_server_data: ClassVar[bool] = False
    """Whether the server half trains on examples of its own."""
    grows_classes: ClassVar[bool] = True
    """Whether classes may come while a run goes on. A method whose tensors cannot grow is found out
    (``training/class_growth.py``); False is for one that can grow and would not learn the class."""
    takes_frozen: ClassVar[bool] = True
    """Whether parts of the net may be frozen: they are no weights, and neither travel nor train."""
    chosen: ClassVar[Mapping[str, Any]] = {}
    """The value of each key that picks a variant (``fedmodels.methods.variants``)."""

    # --- what there is to score ----------------------------------------------------------------

    @property
    def views(self) -> tuple[str, ...]:
        """Return the models the method has; ``after_downlink`` if clients hold their own."""
        return ("global", "after_local")

    @property
    def rules(self) -> tuple[str, ...]:
        """Return the names of the rules that ``predict`` answers with, the method's own first.

        Trained models predict by the first one. ``classifier`` is the net.
        """
        return ("classifier",)

    @property
    def local_view(self) -> str:
        """Return the view that ``a_loc`` is taken from.

        ``global`` says that a client has no model of its own to score: there is no ``a_loc``, and
        ``a_sel`` is everyone's model on the data of the cohort.
        """
        return "after_downlink" if "after_downlink" in self.views else "after_local"

    def reported(self, run: RunFacts) -> frozenset[str]:
        """Return the names that clients may put into ``ctx.metrics``."""
        return frozenset()

    @property
    def weighs_prototypes(self) -> bool:
        """Tell whether ``uploads.mean_prototypes`` counts a prototype by its examples.

        A secure sum has to know before it adds them up. Otherwise clients count alike.
        """
        return False

    def grown(self, run: RunFacts, state: Bundle) -> Mapping[str, Tensor]:
        """Return tensors of a state with room for one class more, by the flat keys of a bundle.

        Only the tensors whose shapes do not tell how they grow (``training/class_growth.py``).

        Args:
            run: the facts with that class.
            state: a client's, or a part of the server's.
        """
        return {}

    # --- server half ---------------------------------------------------------------------------

    @abstractmethod
    def init_server(self, run: RunFacts) -> ServerState:
        """Return the state before the first interaction."""

    def broadcast(self, ctx: ServerContext, state: ServerState) -> Payload:
        """Return what the clients of ``ctx.cohort`` get; clients that get one object share it.

        ``ctx.scores`` says that the payload is for scores alone: the cohort is everybody then, and
        tensors that nobody trains from (``eval/…``) may come in the clients' parts.
        """
        return state.common, {}

    def payload_spec(self, run: RunFacts) -> tuple[BundleSpec, BundleSpec]:
        """Return what a payload's common part and its part for one client may hold.

        Unless overridden, the common part has the tensors of ``init_server``; one without a row
        there may have a row for each class later.
        """
        try:
            common = self.init_server(run.beginning_with(run.forms)).common
        except (RuntimeError, NotImplementedError):  # init_server calculates with the weights
            common = self.init_server(run.beginning_with(weights_of(run.make_net()))).common
        return BundleSpec.growing(common, run.problem.num_classes), BundleSpec()

    @abstractmethod
    def upload_spec(self, run: RunFacts) -> BundleSpec:
        """Return what an upload must hold."""

    def check_upload(
        self, ctx: ServerContext, state: ServerState, upload: Bundle, announced: DeclaredCounts
    ) -> None:
        """Check the values of an upload whose shapes are right; raise PayloadError for a lie."""
        check_upload(upload, announced, announced.most_examples(self.trains_on))

    def count(self, upload: Bundle) -> float:
        """Return what an upload's weights count in ``uploads.mean()``."""
        return 1.0

    @abstractmethod
    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        """Reduce the uploads to the next state; a pure function of its arguments."""

    def finish(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> Reduced:
        """Optimise on the server after ``aggregate``; return the state to commit, and metrics.

        ``ctx.before`` is the state that ``aggregate`` was given.
        """
        return state, {}

    def forgotten(self, state: ServerState, clients: Collection[int]) -> ServerState:
        """Return a state without what it holds of these clients alone; they left an open run."""
        kept = {c: part for c, part in state.clients.items() if c not in clients}
        return replace(state, clients=kept)

    def global_weights(self, common: Bundle) -> Weights:
        """Return the global model's weights, of the common part of a payload or of the state."""
        return common.weights

    # --- client half ---------------------------------------------------------------------------

    def keeps_state(self, run: RunFacts) -> bool:
        """Tell whether clients keep a private state from one interaction to the next."""
        return type(self).after_local is not Method.after_local

    def init_client(self, run: RunFacts, client: int) -> Bundle:
        """Return the private state of a client before its first order: private parts only."""
        return Bundle()

    @abstractmethod
    def load(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        """Load a model into ``ctx.net``: the one to train from, or the one that is scored.

        ``ctx.view`` names the model that is scored. ``global`` is everyone's, also at the
        evaluator; the private state is empty then.
        """

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> Any:
        """Return the references of the loss: the broadcast, teachers, prototypes, replay."""
        return None

    def training_data(self, ctx: ClientContext, refs: Any) -> tuple[Tensor, Tensor]:
        """Return inputs and labels to train on, replayed ones last."""
        return ctx.stream.train(ctx.task)

    @abstractmethod
    def fit(self, ctx: ClientContext, x: Tensor, y: Tensor, refs: Any) -> float:
        """Train ``ctx.net`` (FedAvg's runs the phases); return the last epoch's mean loss."""

    def phases(self, ctx: ClientContext) -> Sequence[Phase]:
        """Return the phases of local training, in order."""
        return [Phase(epochs=ctx.run.experiment.training.local_epochs)]

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: Any) -> Tensor:
        """Return the scalar loss of a mini-batch: a mean over its examples."""
        return ctx.criterion(out.logits, batch.y)

    def after_step(self, ctx: ClientContext, batch: Batch, refs: Any) -> None:
        """Act after an optimiser step."""
        return None

    def after_local(self, ctx: ClientContext, state: Bundle, refs: Any) -> Bundle:
        """Return the private state after local training."""
        return Bundle()

    @abstractmethod
    def uplink(self, ctx: ClientContext, state: Bundle, refs: Any) -> Bundle:
        """Return the upload. Beside it only loss, scores and ``ctx.metrics`` leave the client."""

    def predict(self, ctx: ClientContext, payload: Bundle, state: Bundle, x: Tensor) -> Scores:
        """Return scores (B, K) by rule; the evaluator's state is empty."""
        return {"classifier": ctx.net(x)}

    def pictures(
        self, ctx: ClientContext, payload: Bundle, state: Bundle, x: Tensor, y: Tensor
    ) -> Mapping[str, Picture]:
        """Return pictures that the client may draw for itself at the end, by file name.

        ``ctx.net`` holds the client's last model, in evaluation mode; ``x`` (n, …) and ``y`` (n,)
        are all its test data. No picture is sent. The default shows prototypes of embeddings, if
        there are any, among the embeddings.
        """
        known = {
            f"{whose} {name}": found
            for whose, bundle in (("everyone's", payload), ("own", state))
            for name, found in bundle.prototypes.items()
            if len(found.vectors) and found.vectors.shape[1] == ctx.net.width
        }
        if not known or len(x) < 2:
            return {}
        return {"prototypes": PrototypeMap.of(embeddings(ctx.net, x).cpu(), y.cpu(), known)}
