"""What a method is: the functions of its two halves.

A method is a frozen dataclass whose fields are the paper's hyper-parameters. It holds no state:
server state and client state go in and come out. ``training/contexts.py`` has what else its
functions are given. ``methods/fedavg.py`` writes every function out; other methods override whole
functions of it.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar, Literal

from torch import Tensor

from fedmodels.nets.embedding import embeddings
from fedmodels.tensors.announced import Announced
from fedmodels.tensors.bundle import Bundle, ClientId, Weights
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.uploads import Reduction, Uploads
from fedmodels.training.contexts import ClientContext, Metrics, ServerContext, ServerState
from fedmodels.training.pictures import Picture, PrototypeMap
from fedmodels.training.run import RunFacts

TRAINING = ("fit", "loss", "after_step")
"""The functions of a method that say how a client's steps go."""


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
    """The functions of a method. Uploads come as a mapping in client-id order."""

    name: ClassVar[str]
    citation: ClassVar[str]
    keeps_history: ClassVar[bool] = False
    """Whether clients may look at the training data of earlier tasks."""
    replays: ClassVar[bool] = False
    """Whether clients train on generated examples too, of no class more than of the largest one."""
    replaces_old_data: ClassVar[bool] = False
    """Whether the method makes up for training data that are gone, and so must not see them."""
    needs_server_data: ClassVar[bool] = False
    """Whether the server half trains on examples of its own."""
    reduction: ClassVar[Reduction] = "each"
    """What the server half reads of the uploads' weights: ``uploads.mean()`` alone, where each
    upload counts what ``count`` says, or the weights of ``each`` upload. Large uploads of which the
    mean is enough are added up as they come and leave memory."""
    trains_together: ClassVar[bool] = False
    """Whether ``loss`` may be mapped over clients (``fedmodels.training.stack``). The loss then
    calculates with tensors only, of the batch, the net's output and parameters, and of references
    laid out alike for all clients; it decides nothing by their values and keeps nothing. ``fit`` is
    FedAvg's. A class with its own ``fit``, ``loss`` or ``after_step`` declares it anew."""
    trains_alone_with: ClassVar[Mapping[str, object]] = {}
    """Switches by name, such as ``reading.NAME``, each with the value with which clients train in
    turn although ``trains_together`` is true."""

    chosen: ClassVar[Mapping[str, Any]] = {}
    """The value of each key that picks a variant (``fedmodels.methods.variants``)."""

    @property
    def views(self) -> tuple[str, ...]:
        """Return the models the method has; ``after_downlink`` if clients hold their own."""
        return ("global", "after_local")

    @property
    def rules(self) -> tuple[str, ...]:
        """Return the names of the rules that ``predict`` answers with, in its order.

        The first is the method's own: trained models predict by it. ``classifier`` is the net.
        """
        return ("classifier",)

    def reported(self, run: RunFacts) -> frozenset[str]:
        """Return the names that clients may put into ``ctx.metrics``."""
        return frozenset()

    @property
    def local_view(self) -> str:
        """Return the view that ``a_loc`` is taken from.

        ``global`` says that a client has no model of its own to score: there is no ``a_loc``, and
        ``a_sel`` is everyone's model on the data of the cohort.
        """
        return "after_downlink" if "after_downlink" in self.views else "after_local"

    def __init_subclass__(cls) -> None:
        """Take back ``trains_together`` where a class trains in its own way and says no more."""
        own = vars(cls)
        if "trains_together" not in own and not own.keys().isdisjoint(TRAINING):
            cls.trains_together = False

    def may_train_together(self) -> bool:
        """Tell whether clients may train together with these switches."""
        held = self.trains_alone_with.items()
        return self.trains_together and all(attrgetter(key)(self) != value for key, value in held)

    # --- server half ---------------------------------------------------------------------------

    @abstractmethod
    def init_server(self, run: RunFacts) -> ServerState:
        """Return the state before the first interaction."""

    @abstractmethod
    def trainers(self, run: RunFacts) -> list[int]:
        """Return the clients that train; cohorts are drawn from them."""

    @abstractmethod
    def broadcast(
        self, ctx: ServerContext, state: ServerState
    ) -> tuple[Bundle, Mapping[ClientId, Bundle]]:
        """Return the payload: a common part, and a part for each client that needs one."""

    @abstractmethod
    def evaluation(
        self, ctx: ServerContext, state: ServerState
    ) -> tuple[Bundle, Mapping[ClientId, Bundle]]:
        """Return what clients need to score their models; the common part as in ``broadcast``.

        Tensors for evaluation alone (``eval/…``) go into the clients' parts. Clients that get the
        same bundle object share its encoding.
        """

    @abstractmethod
    def upload_spec(self, run: RunFacts) -> BundleSpec:
        """Return what an upload must hold."""

    @abstractmethod
    def check_upload(
        self, ctx: ServerContext, state: ServerState, upload: Bundle, announced: Announced
    ) -> None:
        """Check the values of an upload whose shapes are right; raise PayloadError for a lie."""

    @abstractmethod
    def payload_spec(self, run: RunFacts) -> tuple[BundleSpec, BundleSpec]:
        """Return what a broadcast's common part and its part for one client may hold."""

    @abstractmethod
    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        """Reduce the uploads to the next state; a pure function of its arguments."""

    def count(self, upload: Bundle) -> float:
        """Return what an upload's weights count in ``uploads.mean()``."""
        return 1.0

    def received(self, sent: Mapping[int, Bundle], folded: Weights | None = None) -> Uploads:
        """Return uploads as ``aggregate`` and ``finish`` get them.

        Args:
            sent: the uploads by client.
            folded: the mean of their weights, if it was taken as they came.
        """
        return Uploads(sent, self.count, self.reduction, folded)

    @abstractmethod
    def finish(
        self, ctx: ServerContext, state: ServerState, uploads: Uploads
    ) -> tuple[ServerState, Metrics]:
        """Optimise on the server after ``aggregate``; return the state to commit, and metrics.

        ``ctx.before`` is the state that ``aggregate`` was given.
        """

    def reduce(
        self, ctx: ServerContext, state: ServerState, uploads: Uploads
    ) -> tuple[ServerState, Metrics]:
        """Aggregate and finish."""
        ctx = dataclasses.replace(ctx, before=state)
        return self.finish(ctx, self.aggregate(ctx, state, uploads), uploads)

    # --- client half ---------------------------------------------------------------------------

    @abstractmethod
    def keeps_state(self, run: RunFacts) -> bool:
        """Tell whether clients keep a private state from one interaction to the next."""

    @abstractmethod
    def init_client(self, run: RunFacts, client: int) -> Bundle:
        """Return the private state of a client before its first order: private parts only."""

    @abstractmethod
    def load(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        """Load the client's model after a downlink into ``ctx.net``."""

    @abstractmethod
    def load_global(self, ctx: ClientContext, payload: Bundle) -> None:
        """Load the global model into ``ctx.net``, also at the evaluator."""

    def global_weights(self, common: Bundle) -> Weights:
        """Return the global model's weights, taken from the common part of the server's state."""
        return common.weights

    @abstractmethod
    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> Any:
        """Return the references of the loss: the broadcast, teachers, prototypes, replay."""

    @abstractmethod
    def training_data(self, ctx: ClientContext, refs: Any) -> tuple[Tensor, Tensor]:
        """Return inputs and labels to train on, replayed ones last."""

    @abstractmethod
    def fit(self, ctx: ClientContext, x: Tensor, y: Tensor, refs: Any) -> float:
        """Train ``ctx.net`` (FedAvg's runs the phases); return the last epoch's mean loss."""

    @abstractmethod
    def phases(self, ctx: ClientContext) -> Sequence[Phase]:
        """Return the phases of local training, in order."""

    @abstractmethod
    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: Any) -> Tensor:
        """Return the scalar loss of a mini-batch: a mean over its examples."""

    @abstractmethod
    def after_step(self, ctx: ClientContext, batch: Batch, refs: Any) -> None:
        """Act after an optimiser step."""

    @abstractmethod
    def after_local(self, ctx: ClientContext, payload: Bundle, state: Bundle, refs: Any) -> Bundle:
        """Return the private state after local training."""

    @abstractmethod
    def uplink(self, ctx: ClientContext, state: Bundle, refs: Any, num_examples: int) -> Bundle:
        """Return the upload. Beside it only loss, scores and ``ctx.metrics`` leave the client."""

    @abstractmethod
    def predict(
        self, ctx: ClientContext, payload: Bundle, state: Bundle, x: Tensor
    ) -> Mapping[str, Tensor]:
        """Return scores (B, K) by rule, the method's own first; the evaluator's state is empty."""

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
