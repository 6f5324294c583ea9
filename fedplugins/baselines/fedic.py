"""FEDIC — Shang et al., FEDIC: Federated Learning on Non-IID and Long-Tailed Data via Calibrated
Distillation, ICME 2022. https://arxiv.org/abs/2205.00172

    paper, released code              here
    balanced labelled server data     ctx.server_data.x, .y
    unlabelled server data            ctx.server_data.unlabelled
    client-wise calibration s, b      calibrator ensemble_scale (K,), ensemble_bias
    class-wise calibration w, b'      calibrator logit_scale (K,), logit_bias (K,)
    calibration gate u, b''           calibrator gate_scale (d,), gate_bias
    ensemble, fine-tuned, student     uploads, _fine_tuned, _distilled

The models of a cohort are asked once for all the server's examples and only what they answer is
kept, so one net's memory serves any cohort.

Deviations: steps see batches without augmentation; Adam begins afresh in every interaction; the
gate begins at one half, where the released code draws it; unlabelled examples come from the same
data set as the labelled ones, where the paper takes another's; a soft loss of 0 weight is left out
where there is nothing unlabelled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid

from fedmodels.config.bounds import Count, NonNegative, Positive, PositiveCount, Share
from fedmodels.errors import ConfigError
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.split import SplitNet, embeddings, load_weights, weights_of
from fedmodels.numerics.distances import distillation
from fedmodels.numerics.randomness import seeded
from fedmodels.tensors.bundle import Bundle, Weights
from fedmodels.tensors.uploads import Reduction, Uploads
from fedmodels.training.contexts import ServerContext, ServerData, ServerState
from fedmodels.training.method import Reduced
from fedmodels.training.optimizer import Adam, descend
from fedmodels.training.run import RunFacts


@dataclass(frozen=True)
class Ensemble:
    """Answers of a cohort's models to n examples."""

    logits: Tensor  # (C, n, K) of each client
    features: Tensor  # (n, d) mean over the clients


def identity_calibrator(num_classes: int, width: int) -> Weights:
    """Return the calibrator before any step: logits weigh by their sum, the gate is one half."""
    return {
        "ensemble_scale": torch.ones(num_classes),
        "ensemble_bias": torch.zeros(1),
        "logit_scale": torch.ones(num_classes),
        "logit_bias": torch.zeros(num_classes),
        "gate_scale": torch.zeros(width),
        "gate_bias": torch.zeros(1),
    }


def client_weights(calibrator: Mapping[str, Tensor], logits: Tensor) -> Tensor:
    """Return how much each client counts for each example: (C, n, K) give (C, n), summing to 1."""
    score = logits @ calibrator["ensemble_scale"] + calibrator["ensemble_bias"]
    return logsigmoid(score).softmax(0)  # sigmoids over their sum, where they underflow too


def calibrate(calibrator: Mapping[str, Tensor], ensemble: Ensemble, fine_tuned: Tensor) -> Tensor:
    """Return the teacher's logits (n, K), between the calibrated ensemble and the fine-tuned model.

    Args:
        calibrator: s, b, w, b', u, b'' under their names.
        ensemble: what the cohort says.
        fine_tuned: logits (n, K) of the model fine-tuned on balanced data.
    """
    a = client_weights(calibrator, ensemble.logits)
    z = (a[..., None] * ensemble.logits).sum(0)  # client-wise
    z = calibrator["logit_scale"] * z + calibrator["logit_bias"]  # class-wise
    gate = (ensemble.features @ calibrator["gate_scale"] + calibrator["gate_bias"]).sigmoid()
    return gate[:, None] * z + (1 - gate[:, None]) * fine_tuned


@register("fedic")
class FEDIC(FedAvg):
    """FedAvg whose mean is distilled, on the server's balanced data, from a calibrated ensemble."""

    citation: ClassVar[str] = "Shang et al., ICME 2022"
    takes_targets: ClassVar[bool] = False
    takes_frozen: ClassVar[bool] = False
    needs_server_data: ClassVar[bool] = True
    reads_singly: ClassVar[str] = "the teachers are the models of single clients"
    local_view: ClassVar[str] = "global"  # all clients get one model
    reduction: ClassVar[Reduction] = "each"

    fine_tuning_steps: Count = 100
    """Steps on a copy of the mean, which helps the teacher; the copy is dropped."""
    calibration_steps: Count = 100
    """Steps on the calibrator, which lives from interaction to interaction."""
    distillation_steps: Count = 100
    """Steps on the student, which begins as the mean; 0 is FedAvg."""
    lr_server: NonNegative = 1e-3
    """Learning rate of all three, with Adam."""
    weight_decay: NonNegative = 2e-4
    """Of the copy and of the student."""
    ld: Share = 0.5
    """Weight of the distillation; 1 - ld is that of the labels."""
    temperature: Positive = 2.0
    """Of teacher and student; the loss is not multiplied by its square, as in the released code."""
    labelled_batch: PositiveCount = 20
    """Labelled examples of a step."""
    unlabelled_batch: PositiveCount = 128
    """Unlabelled examples of a step."""

    # --- server half ---------------------------------------------------------------------------

    def init_server(self, run: RunFacts) -> ServerState:
        run.make_net().check_batches(
            labelled_batch=self.labelled_batch, unlabelled_batch=self.unlabelled_batch
        )
        calibrator = identity_calibrator(run.problem.num_classes, run.width)
        return replace(super().init_server(run), own=Bundle(weights=calibrator))

    def finish(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> Reduced:
        held = ctx.server_data
        if held is None:
            raise ConfigError("fedic needs data of the server's own, and the run has none")
        teachers = uploads.of({c for c, u in uploads.items() if self.count(u)})
        if not self.distillation_steps or not teachers:
            return state, {}
        with seeded(ctx.seed("dropout")):  # layers with randomness of their own draw from here
            draw, net = ctx.generator("method"), ctx.run.make_net()
            labelled = ask(net, teachers, held.x)
            unlabelled = ask(net, teachers, held.unlabelled)
            load_weights(net, state.common.weights)
            of_labelled, of_unlabelled = self._fine_tuned(net, held, draw)
            calibrator = self._calibrator(state.own.weights, labelled, of_labelled, held.y, draw)
            with torch.no_grad():
                teacher = calibrate(calibrator, unlabelled, of_unlabelled)  # (m, K)
                right = calibrate(calibrator, labelled, of_labelled).argmax(1) == held.y
            load_weights(net, state.common.weights)  # the student begins as the mean
            self._distil(net, held, teacher, draw)
        common = Bundle(weights=weights_of(net))
        metrics = {"teacher_accuracy": float(right.float().mean())}
        return replace(state, common=common, own=Bundle(weights=calibrator)), metrics

    def _fine_tuned(
        self, net: SplitNet, held: ServerData, draw: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Fine-tune the net on the labels; return its logits (n, K) and (m, K)."""
        net.train()
        optimizer = self._adam(list(net.parameters()), self.weight_decay)
        steps = trainable(net, len(held.y), self.fine_tuning_steps)
        for index in draw_batches(len(held.y), self.labelled_batch, steps, draw):
            descend(cross_entropy(net(held.x[index]), held.y[index]), optimizer)
        return answers(net, held.x)[0], answers(net, held.unlabelled)[0]

    def _calibrator(
        self,
        before: Weights,
        labelled: Ensemble,
        fine_tuned: Tensor,
        y: Tensor,
        draw: torch.Generator,
    ) -> Weights:
        """Train the calibrator on the labels; return its next state."""
        free = {name: t.clone().requires_grad_(True) for name, t in before.items()}
        optimizer = self._adam(list(free.values()), 0.0)
        for index in draw_batches(len(y), self.labelled_batch, self.calibration_steps, draw):
            part = Ensemble(labelled.logits[:, index], labelled.features[index])
            teacher = calibrate(free, part, fine_tuned[index])
            descend(cross_entropy(teacher, y[index]), optimizer)
        return {name: t.detach() for name, t in free.items()}

    def _distil(
        self, net: SplitNet, held: ServerData, teacher: Tensor, draw: torch.Generator
    ) -> None:
        """Train the net on the teacher's logits of the unlabelled and on the labels, in place."""
        net.train()
        optimizer = self._adam(list(net.parameters()), self.weight_decay)
        steps = self.distillation_steps
        n, m = len(held.y), len(teacher)
        soft = draw_batches(m, self.unlabelled_batch, trainable(net, m, steps), draw)
        hard = draw_batches(n, self.labelled_batch, trainable(net, n, steps), draw)
        for index in hard:
            loss = (1 - self.ld) * cross_entropy(net(held.x[index]), held.y[index])
            unseen = next(soft, None)
            if unseen is not None:
                student = net(held.unlabelled[unseen])
                loss = loss + self.ld * distillation(teacher[unseen], student, self.temperature)
            descend(loss, optimizer)

    def _adam(self, parameters: list[Tensor], weight_decay: float) -> torch.optim.Optimizer:
        return Adam(parameters, lr=self.lr_server, weight_decay=weight_decay, fused=True)


def trainable(net: SplitNet, n: int, steps: int) -> int:
    """Return how many steps a net can train on n examples: none on one that it cannot normalise."""
    return 0 if n == 1 and net.normalises_batches else steps


def draw_batches(n: int, size: int, steps: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield the positions of one batch for each step, without repetition inside of a batch."""
    for _ in range(steps if n else 0):
        yield torch.randperm(n, generator=generator)[:size]


@torch.no_grad()
def answers(net: SplitNet, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits (n, K) and embeddings (n, d); puts the net into evaluation mode."""
    z = embeddings(net, x)
    return net.head(z), z


def ask(net: SplitNet, uploads: Uploads, x: Tensor) -> Ensemble:
    """Return the answers of a cohort's models to the same examples."""
    logits, total = [], torch.zeros(len(x), net.width, dtype=torch.float64)
    for upload in uploads.values():
        load_weights(net, upload.weights)
        found, features = answers(net, x)
        logits.append(found)
        total += features
    return Ensemble(torch.stack(logits), (total / len(uploads)).float())
