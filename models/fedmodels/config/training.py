"""What a config may say of training: steps and losses of clients, and the step of the server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from fedmodels.config.bounds import Count, NonNegative, Positive, PositiveCount, Share, StrictTable

Optimizer = Literal[
    "sgd", "adam", "adamw", "adadelta", "adafactor", "adagrad", "adamax", "asgd", "nadam", "radam",
    "rmsprop", "rprop",
]  # fmt: skip
"""Classes of ``torch.optim`` whose step needs a gradient of any shape, and nothing else."""
Numbers = Annotated[tuple[float, ...], Field(strict=False)]
OF_CLASSES = ("cross-entropy", "focal")
"""Losses of classes."""
OF_NUMBERS = ("squared", "huber")
"""Losses of numbers."""
ClassWeights = Literal["balanced"] | Annotated[tuple[Positive, ...], Field(strict=False)]


class LrSchedule(StrictTable):
    """``[training.lr_schedule]``: how the learning rate changes.

    Its factor depends on the number of the round or of the local epoch alone.
    """

    kind: Literal["constant", "linear", "cosine", "step", "exponential"]
    """Course after the warm-up, as in ``torch.optim.lr_scheduler``."""
    over: Literal["rounds", "epochs"] = "rounds"
    """What it counts: rounds, on each task anew with ``tasks_outer`` and ``asynchronous`` (of an
    open run, on each task of a client), or the epochs of one local training."""
    warmup: Count = 0
    """So many rounds or epochs at first, over which the rate rises evenly to ``lr``."""
    length: PositiveCount | None = None
    """Rounds or epochs, with the warm-up, at which ``linear`` and ``cosine`` end; by default all
    rounds of ``[schedule]``, or ``local_epochs``."""
    final: Share = 0.0
    """What ``linear`` and ``cosine`` end with, as a part of ``lr``."""
    every: PositiveCount | None = None
    """Rounds or epochs after which ``step`` multiplies the rate by ``gamma``."""
    gamma: Annotated[float, Field(gt=0, le=1)] | None = None
    """Factor of each step of ``step``, and of each round or epoch of ``exponential``."""

    @model_validator(mode="after")
    def _has_its_numbers(self) -> LrSchedule:
        decays = self.kind in ("linear", "cosine")
        uses = {"step": ("every", "gamma"), "exponential": ("gamma",)}.get(self.kind, ())
        for key in ("every", "gamma"):
            if (getattr(self, key) is not None) != (key in uses):
                belongs = "needs" if key in uses else "knows no"
                raise ValueError(f"kind = {self.kind!r} {belongs} {key}")
        if not decays and (self.length is not None or self.final):
            raise ValueError(f"length and final belong to linear and cosine, not to {self.kind!r}")
        if self.length is not None and self.length <= self.warmup:
            raise ValueError(f"length = {self.length} ends within warmup = {self.warmup}")
        return self

    @property
    def follows_rounds(self) -> bool:
        """Whether the rate of a round depends on how many rounds the run has."""
        ends = self.kind in ("linear", "cosine") and self.length is None
        return ends and self.over == "rounds"


class Training(StrictTable):
    """``[training]``: the local work every method's stock loop does."""

    local_epochs: PositiveCount = 1
    """Passes over the data of a task in one interaction."""
    batch_size: PositiveCount = 32
    """Examples of a training step; 2 or more for nets with batch normalisation, which leave a batch
    of one out."""
    optimizer: Optimizer = "sgd"
    """The optimiser of ``torch.optim``; its state lives for one phase of local training."""
    optimizer_options: dict[str, bool | int | float | Numbers] | None = None
    """Further arguments of that optimiser, such as ``{betas = [0.9, 0.99]}``."""
    lr: Annotated[float, Field(gt=0)] = 0.01
    """Learning rate."""
    lr_schedule: LrSchedule | None = None
    """How the learning rate changes; by default it stays."""
    clip_norm: Positive | None = None
    """Largest norm of the gradient of a step, which is scaled down to it."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Momentum of SGD."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay of the optimiser."""
    loss: Literal["cross-entropy", "focal", "squared", "huber", "quantile", "sigmoid"] = (
        "cross-entropy"
    )
    """Loss where the method trains on it. Of classes ``cross-entropy``, or ``focal``, which
    multiplies that of an example by (1 - p)^``focal_gamma``, p the probability of its label (Lin et
    al., 2017). Of ``[data.columns] target`` ``squared`` unless given, or ``huber``; with
    ``quantiles`` there ``quantile``, the pinball loss. Of ``labels`` there ``sigmoid``, the
    cross-entropy of each label by itself."""
    huber_delta: Positive = 1.0
    """Error from which the Huber loss is linear, in deviations of the target."""
    focal_gamma: NonNegative = 2.0
    """Exponent of the focal loss."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Part of a label that is spread over all classes."""
    class_weights: ClassWeights | None = None
    """Weight of each class in the loss. ``balanced`` is n / (K n_c) of the n examples that a client
    trains on, n_c of them of class c, of K classes that it has."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """Torch threads of a client process; the count changes floats, so it belongs to the run."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """What nets compute in on the way to their embeddings, in training and in scoring; weights,
    losses and what travels stay float32. It changes floats, and pays on CPUs with
    AMX and on AMD's with ``avx512_bf16``, but for the smallest nets: docs/results/speed.md."""
    augment: Literal["none", "flip", "crop-flip", "turn-flip", "affine-flip", "jitter-flip"] = (
        "none"
    )
    """Random changes of training images, each of which mirrors some of them as well. ``crop-flip``
    shifts by up to 4 pixels; ``turn-flip`` turns by quarters of a circle, for images without an
    upright; ``affine-flip`` turns by up to 15 degrees, shifts and zooms by up to a tenth;
    ``jitter-flip`` changes brightness and contrast."""
    capture: Literal["auto", "off"] = "auto"
    """Whether a GPU repeats the steps of the stock loop as CUDA graphs, which have the same bits
    and are faster. ``auto``: where a step can be one; ``off``: never."""

    @model_validator(mode="before")
    @classmethod
    def _in_turn(cls, table: Any) -> Any:
        """Take a table with ``together = 1``, which was its default: clients train in turn."""
        if isinstance(table, Mapping) and "together" in table:
            if table["together"] != 1:
                raise ValueError("together was removed in 0.2: hosts by cores are as fast")
            return {key: value for key, value in table.items() if key != "together"}
        return table

    @model_validator(mode="after")
    def _loss_fits(self) -> Training:
        if self.loss != "focal" and self.differs("focal_gamma"):
            raise ValueError('focal_gamma belongs to loss = "focal"')
        for key in ("label_smoothing", "class_weights"):
            of_classes = ("cross-entropy",) if key == "label_smoothing" else OF_CLASSES
            if self.differs(key) and self.loss not in of_classes:
                raise ValueError(f"{key} belongs to loss = {' or '.join(map(repr, of_classes))}")
        if self.loss != "huber" and self.differs("huber_delta"):
            raise ValueError('huber_delta belongs to loss = "huber"')
        return self

    @property
    def own_loss(self) -> bool:
        """Whether labels have another loss than the plain cross-entropy."""
        return bool(self.loss != "cross-entropy" or self.label_smoothing or self.class_weights)

    @property
    def follows_rounds(self) -> bool:
        """Whether the rate of a round depends on how many rounds the run has."""
        return self.lr_schedule is not None and self.lr_schedule.follows_rounds

    @property
    def follows_epochs(self) -> bool:
        """Whether the rate changes within a local training."""
        return self.lr_schedule is not None and self.lr_schedule.over == "epochs"

    @property
    def mixed_precision(self) -> bool:
        """Whether nets compute in bfloat16 where they may."""
        return self.precision == "bfloat16"


class ServerOptimizer(StrictTable):
    """``[server_optimizer]``: a step of the server along what the clients' mean would change.

    Reddi et al., Adaptive Federated Optimization, ICLR 2021, algorithm 2; FedAvgM is of Hsu et al.,
    2019. Left out, the mean is the next model.
    """

    name: Literal["fedavgm", "fedadam", "fedyogi", "fedadagrad"]
    """Which one, for every method whose server keeps a mean of weights that clients share."""
    lr: Positive
    """Learning rate of the server: 1 is usual with ``fedavgm``, 0.001 to 0.1 with the others."""
    beta_1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum; FedAdaGrad has 0 in the paper."""
    beta_2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """Memory of the squares of FedAdam and FedYogi."""
    tau: Positive = 1e-3
    """Degree of adaptivity: it is added to the root of the squares, which begin at its square."""

    @model_validator(mode="after")
    def _moments_are_used(self) -> ServerOptimizer:
        for key in ("beta_2", "tau"):
            if self.name == "fedavgm" and self.differs(key):
                raise ValueError(f'{key} does nothing with name = "fedavgm": leave it out')
        return self
