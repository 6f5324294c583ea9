"""``[evaluate]``: when, and which models, are scored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from fedmodels.config.bounds import Count, Place, PositiveCount, StrictTable
from fedmodels.config.part import with_keys

View = Literal["global", "after_local", "after_downlink"]

AT_ONCE = 256
"""Examples that are scored together unless a config says how many."""


class Evaluate(StrictTable):
    """``[evaluate]``: when, and which models, are scored."""

    every: Count = 1
    """Score each time this many rounds have passed, and after the last; 0: after the last only."""
    clients: PositiveCount | None = None
    """How many clients score the models, the same ones in every round, beside the round's cohort;
    all clients unless given. Metrics are means over the clients that score."""
    views: Annotated[tuple[View, ...], Field(strict=False)] = (  # TOML has lists only
        "global",
        "after_local",
        "after_downlink",
    )
    """Which of a client's models are scored: docs/metrics.md."""
    last_rounds: PositiveCount = 1
    """Summary metrics are means over this many last scored rounds."""
    reference: Place = None
    """Run directory against which the average forgetting measure is taken."""
    batch_size: PositiveCount | None = None
    """Examples that are scored together; unless given 256, and on a GPU more where examples are
    small: as many as have 8 MiB of inputs."""
    generalization: bool = False
    """Score clients' models on the global test set too, where there is one: costly. It gives
    FedAli's Generalization and FedMLP's A_loc (``a_loc_own_classes``)."""
    trained: Literal["cohort", "all"] = "cohort"
    """Whose models are scored right after local training. With ``all``, the clients beside the
    cohort train in the last interaction of a scored round as well, and keep and send nothing of it.
    Then ``a_loc_trained`` is of the same clients as ``a_loc_received``."""
    class_masks: bool = False
    """Score clients' models twice more by the method's own rule: among the classes a client has
    met (``…_seen_classes``), as GLDP does, and among all (``…_all_classes``), as others do."""
    pictures: Count = 2
    """Clients, from the first on, that draw what they learnt into their own directory in the end:
    prototypes among the embeddings of their test data, images they replay."""
    probabilities: bool = False
    """Let clients report how good the probabilities of their models are on their own test data:
    ``…_auroc`` and ``…_ece``."""
    influence: bool = False
    """Let FedAli's clients measure after training how much prototypes change their tokens
    (``prototype_share``, ``prototype_angle``): a further forward pass."""
    last_tasks: PositiveCount | None = None
    """Score clients on their last so many tasks alone; by default on all so far. In an open run the
    cost of scoring then does not grow with its past."""
    prequential: bool = False
    """Score the model that a client holds on each new task before it trains on it: a forward pass
    of all examples of the task, from a client's second task on. Test, then train: docs/metrics.md.
    """
    select_by: Literal["f1", "accuracy"] = "f1"
    """What makes a round the best: mean macro-F1, or mean accuracy as FedAli's published code. With
    ``validation_share`` the scores are those of validation parts; ``best_…`` looks at test data
    in any case."""

    @property
    def scored_by(self) -> str:
        """Return the key by which models are looked at with clients' examples; empty if none is."""
        keys = {"views": self.views, "prequential": self.prequential}
        return next((f"[evaluate] {key}" for key, is_on in keys.items() if is_on), "")

    @property
    def at_once(self) -> int:
        """Return how many examples are scored together where nothing else decides."""
        return self.batch_size or AT_ONCE

    @model_validator(mode="after")
    def _views_are_named_once(self) -> Evaluate:
        for view in self.views:
            if self.views.count(view) > 1:
                raise ValueError(f"views names {view!r} twice; name it once")
        return self


if not TYPE_CHECKING:  # types know the core's own keys alone
    Evaluate = with_keys(Evaluate, "evaluate")
