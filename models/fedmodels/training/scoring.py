"""The scoring of a model on named test sets.

Shapes: B batch, n test set, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedmodels.numerics.metrics import ClassCounts
from fedmodels.numerics.randomness import seeded
from fedmodels.tensors.bundle import Bundle
from fedmodels.training.class_masks import mask_scores
from fedmodels.training.contexts import ClientContext
from fedmodels.training.method import Method
from fedmodels.training.returned import check_numbers, check_scores

TestSets = Mapping[str, tuple[Tensor, Tensor]]


@torch.no_grad()
def score(
    method: Method,
    ctx: ClientContext,
    payload: Bundle,
    state: Bundle,
    sets: TestSets,
    seen: Tensor | None = None,
    confusion: bool = False,
    kept: dict[str, list[Tensor]] | None = None,
) -> dict[tuple[str, str], ClassCounts]:
    """Score the model in ``ctx.net`` on named test sets; return counts by (rule, test set).

    Args:
        method: predicts.
        ctx: the place in the run, and the net.
        payload: the server's payload, common and personal parts merged.
        state: the client's private state.
        sets: inputs and labels by name.
        seen: (K,) bool, the classes a client has met, to score it among them too.
        confusion: count what each class was taken for, by the method's first rule.
        kept: gets the scores (n, K) by that rule, in pieces, by the name of the test set.

    Raises:
        TrainingFailed: scores are NaN, of which no class would be the largest.
    """
    classes = ctx.run.problem.num_classes
    size = ctx.run.experiment.evaluate.batch_size
    ctx.net.eval()
    out: dict[tuple[str, str], ClassCounts] = {}
    with seeded(ctx.seed("evaluate")):
        for name, (x, y) in sets.items():
            answers: dict[str, list[Answers]] = {}
            for xs, ys in zip(ctx.net.split(x, size), ctx.net.split(y, size), strict=True):
                found = method.predict(ctx, payload, state, xs)
                check_scores(method, ctx, found, len(xs))
                found = {rule: found[rule] for rule in method.rules if rule in found}
                found = found if seen is None else mask_scores(found, seen)
                if kept is not None:
                    kept.setdefault(name, []).append(next(iter(found.values())))
                for rule, scores in found.items():
                    answers.setdefault(rule, []).append(Answers.of(scores, ys))
            for place, (rule, parts) in enumerate(answers.items()):
                check_numbers(ctx, rule, [part.nan for part in parts])
                out[rule, name] = _counted(parts, y, classes, confusion and place == 0)
    return out


@dataclass(frozen=True)
class Answers:
    """A rule's answers to a batch, where they were calculated: reading them waits for a GPU."""

    guess: Tensor  # (B,)
    loss: Tensor  # (), sum over the batch
    nan: Tensor  # (), whether a score is none

    @classmethod
    def of(cls, scores: Tensor, y: Tensor) -> Answers:
        """Take the scores (B, K) of examples of the classes ``y`` (B,)."""
        loss = cross_entropy(scores.float(), y, reduction="sum")
        return cls(scores.argmax(1), loss, scores.isnan().any())


def _counted(parts: Sequence[Answers], y: Tensor, classes: int, confusion: bool) -> ClassCounts:
    """Return the counts of answers to a whole test set, of the classes ``y`` (n,)."""
    counts = ClassCounts.of(torch.cat([part.guess for part in parts]), y, classes, confusion)
    return replace(counts, loss_sum=sum(torch.stack([part.loss for part in parts]).tolist()))
