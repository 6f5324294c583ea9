"""What a method is: the functions of its two halves, and what each does unless overridden.

A method is a frozen dataclass whose fields are the paper's hyper-parameters. It holds no state:
server state and client state go in and come out. ``training/contexts.py`` has what else its
functions are given, ``training/stepped.py`` the steps of local training, and ``methods/fedavg.py``
the functions without a default; other methods inherit from it and override whole functions. What
capabilities ask of some methods, which a config may leave out, is in ``training/asked.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from fedmodels.nets.split import weights_of
from fedmodels.tensors.bundle import Bundle, ClientId
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.declared_counts import DeclaredCounts, TrainsOn, check_upload
from fedmodels.tensors.uploads import Reduction, Uploads
from fedmodels.training.contexts import ClientContext, Metrics, ServerContext, ServerState
from fedmodels.training.run import RunFacts

Payload = tuple[Bundle, Mapping[ClientId, Bundle]]
"""What the server sends: a common part, and a part for each client that needs one."""
Reduced = tuple[ServerState, Metrics]
"""The server's next state, and numbers for the run's records."""
Scores = Mapping[str, Tensor]
"""Scores (B, K) by rule."""


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
    trains_on: ClassVar[TrainsOn] = "task"
    """The examples that clients train on: those of the order's ``task``, or of the ``history`` of
    all tasks so far. With ``memory`` something stands in for earlier tasks, whose data the method
    must not see; with ``replay`` it is generated examples, which count as examples."""
    rules_of_met: ClassVar[tuple[str, ...]] = ()
    """Rules that choose among the classes that a client has met; others choose among all."""
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
    def chooses_among(self) -> Literal["all classes", "classes met"]:
        """Return the classes among which the method's own rule chooses."""
        return "classes met" if self.rules[0] in self.rules_of_met else "all classes"

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

    def models_of(self, ctx: ServerContext, upload: Bundle) -> Sequence[str]:
        """Return which of several models an upload trained; nothing where there is one alone."""
        return ()

    @abstractmethod
    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        """Reduce the uploads to the next state; a pure function of its arguments."""

    def finish(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> Reduced:
        """Optimise on the server after ``aggregate``; return the state to commit, and metrics.

        ``ctx.before`` is the state that ``aggregate`` was given.
        """
        return state, {}

    # --- client half ---------------------------------------------------------------------------

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
        """Train ``ctx.net``; return the last epoch's mean loss. FedAvg's runs the phases."""

    def after_local(self, ctx: ClientContext, state: Bundle, refs: Any) -> Bundle:
        """Return the private state after local training."""
        return Bundle()

    @abstractmethod
    def uplink(self, ctx: ClientContext, state: Bundle, refs: Any) -> Bundle:
        """Return the upload. Beside it only loss, scores and ``ctx.metrics`` leave the client."""

    def predict(self, ctx: ClientContext, payload: Bundle, state: Bundle, x: Tensor) -> Scores:
        """Return scores (B, K) by rule; the evaluator's state is empty.

        An example's scores depend on no other example: a batch may hold several test sets'.
        ``ctx.once`` keeps what all batches need of payload and state.
        """
        return {"classifier": ctx.net(x)}
