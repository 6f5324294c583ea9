"""The keys of ``[server]`` that say how uploads become one: the mean, or a robust rule.

A key that is not given is absent from a resolved config, so that older configs resolve as before.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from fedmodels.config.bounds import Positive, PositiveCount, StrictTable
from fedmodels.errors import ConfigError

Reduce = Literal[
    "mean",
    "median",
    "trimmed_mean",
    "norm_clipped",
    "krum",
    "multi_krum",
    "bulyan",
    "geometric_median",
    "centered_clipping",
]
CLIPS = ("norm_clipped", "centered_clipping")
ITERATES = ("geometric_median", "centered_clipping")
MIN_CLIENTS = {"trimmed_mean": (2, 1), "krum": (2, 3), "multi_krum": (2, 3), "bulyan": (4, 3)}
"""(a, b) of the rules that take a number f of attackers: they need a f + b uploads."""


class Reduction(StrictTable):
    """How the uploads of a round become one; docs/robustness.md says which rule is for what."""

    reduce: Reduce | None = None
    """Rule in place of the clients' mean, of weights and of prototypes by class; by default
    ``mean``. The others are robust to some clients that lie: docs/robustness.md."""
    attackers: PositiveCount | None = None
    """f: how many clients of a round may lie, for ``trimmed_mean``, ``krum``, ``multi_krum``,
    ``bulyan`` and ``mix = "nearest"``. Every other rule but the mean takes it too: it then needs
    2 f + 1 uploads, and classes of prototypes with 2 f holders or fewer are told."""
    rare_classes: Literal["median", "keep"] | None = None
    """What becomes of a class of prototypes that 2 f clients or fewer have, of whom f may lie:
    their ``median``, or ``keep``, which leaves the class as clients were given it; ``median``
    unless given."""
    mix: Literal["nearest", "bucketing"] | None = None
    """What is done before ``reduce``, where clients' data are unlike: each upload becomes the mean
    of the n - f nearest ones, or the mean of a bucket that is drawn."""
    bucket_size: Annotated[int, Field(ge=2, le=1000)] | None = None
    """Uploads in a bucket with ``mix = "bucketing"``; 2 unless given."""
    clip_norm: Positive | None = None
    """Norm to which longer differences from what clients were given are shortened, with
    ``norm_clipped`` and ``centered_clipping``; by default ``clip_factor`` says it."""
    clip_factor: Positive | None = None
    """The same, as a multiple of the median norm of the round's differences; 1 unless given."""
    iterations: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Iterations of ``geometric_median`` and ``centered_clipping``; 3 unless given."""

    @property
    def is_robust(self) -> bool:
        """Whether uploads are reduced by another rule than the mean."""
        return self.reduce not in (None, "mean")

    @property
    def few_holders(self) -> int:
        """How many holders of a class are too few to tell who lies: 2 f; of an unknown f, 2."""
        return 2 * (self.attackers or 1)

    @property
    def named(self) -> str:
        """The rule as a config has it, for a line."""
        f = f" with attackers = {self.attackers}" if self.attackers else ""
        mix = f' after mix = "{self.mix}"' if self.mix else ""
        return f'[server] reduce = "{self.reduce}"{f}{mix}'

    @property
    def fewest_uploads(self) -> int:
        """How many uploads the rule needs."""
        f = self.attackers or 0
        needed = 2 * f + 1
        if self.reduce in MIN_CLIENTS:
            factor, more = MIN_CLIENTS[self.reduce]
            needed = factor * f + more
        if self.mix == "bucketing":  # the last bucket may be smaller
            needed = (needed - 1) * (self.bucket_size or 2) + 1
        return needed

    @model_validator(mode="after")
    def _keys_belong_to_the_rule(self) -> Reduction:
        takes = self.reduce in MIN_CLIENTS or self.mix == "nearest"
        if takes and self.attackers is None:
            what = f"reduce = {self.reduce!r}" if self.reduce in MIN_CLIENTS else 'mix = "nearest"'
            raise ValueError(f"{what} needs attackers, the number of clients that may lie")
        for key, fits, owners in (
            ("mix", self.is_robust, "a rule other than mean: give reduce"),
            ("attackers", self.is_robust, "a rule other than mean: give reduce"),
            ("rare_classes", self.is_robust, "a rule other than mean: give reduce"),
            ("bucket_size", self.mix == "bucketing", 'mix = "bucketing"'),
            ("clip_norm", self.reduce in CLIPS, " and ".join(CLIPS)),
            ("clip_factor", self.reduce in CLIPS, " and ".join(CLIPS)),
            ("iterations", self.reduce in ITERATES, " and ".join(ITERATES)),
        ):
            if getattr(self, key) is not None and not fits:
                raise ValueError(f"{key} belongs to {owners}")
        if self.rare_classes == "keep" and self.attackers is None:
            raise ValueError(
                'rare_classes = "keep" needs attackers: 2 of them may have a class alone'
            )
        if self.clip_norm is not None and self.clip_factor is not None:
            raise ValueError("clip_norm and clip_factor say the same; give one of them")
        return self

    def check_uploads(self, at_once: int, fewest: int | None) -> None:
        """Check that rounds have as many uploads as the rule needs.

        Args:
            at_once: uploads that a round ends with.
            fewest: ``min_clients``.

        Raises:
            ConfigError: there are fewer, or may be.
        """
        needed, named = self.fewest_uploads, self.named
        if needed > at_once:
            raise ConfigError(
                f"{named} needs {needed} uploads in a round, and rounds have {at_once}: take "
                "another rule, fewer attackers or more clients"
            )
        if fewest is not None and fewest < needed:
            raise ConfigError(
                f"[server] min_clients = {fewest} lets a round end with too few uploads: {named} "
                f"needs {needed}"
            )
