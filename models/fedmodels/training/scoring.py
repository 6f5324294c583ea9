"""The scoring of a model on named test sets.

Shapes: B batch, n test set, N all test sets, K classes, R rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedmodels.config.experiment import Experiment
from fedmodels.host.devices import to_device
from fedmodels.numerics.metrics import ClassCounts, as_one
from fedmodels.numerics.randomness import seeded
from fedmodels.tensors.bundle import Bundle
from fedmodels.training.contexts import ClientContext
from fedmodels.training.method import Method
from fedmodels.training.returned import check_numbers, check_rules, check_scores

TestSets = Mapping[str, tuple[Tensor, Tensor]]
INPUT_BYTES = 8 << 20
"""Of the float32 inputs of a batch on a GPU: smaller batches wait for their calls."""
FULL = 96
"""On a processor an example takes as long in a batch of so many as in one of more."""


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

    Answers stay on the device until the last one is there: a GPU is waited for once. Small test
    sets share batches, but for a net whose embeddings depend on their batch.

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
        ConfigError: ``predict`` answers with something else than its rules say.
    """
    net, size = ctx.net.eval(), batch_size(ctx)
    candidates = None if seen is None else candidates_of(seen, ctx.device)
    most = 0 if net.mixes_examples or kept is not None else size
    answers: dict[str, list[Answers]] = {}
    with seeded(ctx.seed("evaluate")):
        for group in _groups(sets, min(most, FULL) if ctx.device.type == "cpu" else most):
            (name, *_), (x, y) = group, _as_one(group)
            for xs, ys in zip(net.split(x, size), net.split(y, size), strict=True):
                found = method.predict(ctx, payload, state, xs)
                check_scores(method, ctx, found, len(xs))
                found = {rule: found[rule] for rule in method.rules if rule in found}
                if ctx.run.merged:
                    found = {rule: as_one(own, ctx.run.merged) for rule, own in found.items()}
                found = found if candidates is None else mask_scores(found, candidates)
                check_rules(method, found, answers)
                if kept is not None:
                    kept.setdefault(name, []).append(next(iter(found.values())))
                for rule, scores in found.items():
                    answers.setdefault(rule, []).append(Answers.of(ctx, scores, ys))
    return _counts(ctx, answers, sets, confusion)


def batch_size(ctx: ClientContext) -> int:
    """Return how many examples are scored together, whatever else is on the device.

    A GPU gets more of small examples, unless the config says how many, or what a net makes of an
    example depends on its batch.
    """
    evaluate = ctx.run.experiment.evaluate
    if evaluate.batch_size or ctx.device.type == "cpu" or ctx.net.mixes_examples:
        return evaluate.at_once
    return max(evaluate.at_once, INPUT_BYTES // (4 * math.prod(ctx.run.problem.input_shape)))


def _groups(sets: TestSets, most: int) -> Iterator[TestSets]:
    """Yield test sets in their order, neighbours of at most ``most`` examples at once."""
    group, room = dict[str, tuple[Tensor, Tensor]](), 0
    for name, (x, y) in sets.items():
        if group and not 0 < len(y) <= room:
            yield group
            group = {}
        room = (room if group else most) - len(y)
        group[name] = x, y
    if group:
        yield group


def _as_one(group: TestSets) -> tuple[Tensor, Tensor]:
    """Return the inputs and labels of some test sets."""
    if len(group) == 1:
        return next(iter(group.values()))
    inputs, labels = zip(*group.values(), strict=True)
    return torch.cat(inputs), torch.cat(labels)


@dataclass(frozen=True)
class Answers:
    """A rule's answers to a batch, where they were calculated: reading them waits for a GPU."""

    guess: Tensor  # (B,)
    loss: Tensor  # (B,)
    nan: Tensor  # (B,), whether a score is none

    @classmethod
    def of(cls, ctx: ClientContext, scores: Tensor, y: Tensor) -> Answers:
        """Take the scores (B, K) of examples of the classes ``y`` (B,), or of targets (B, T).

        Nothing is guessed of targets: all examples count as of the first class.
        """
        nan = scores.isnan().any(1)
        if ctx.run.targets is not None:
            return cls(torch.zeros_like(nan), ctx.run.targets.losses(scores.float(), y), nan)
        loss = cross_entropy(scores.float(), y, reduction="none")
        return cls(scores.argmax(1), loss, nan)


def _counts(
    ctx: ClientContext, answers: Mapping[str, Sequence[Answers]], sets: TestSets, confusion: bool
) -> dict[tuple[str, str], ClassCounts]:
    """Return the counts of each rule's answers to all test sets, which are in their order."""
    is_guessed = ctx.run.targets is None
    truths = [y if is_guessed else torch.zeros_like(y[:, 0]) for _, y in sets.values()]
    columns = [truths] if answers else []
    for parts in answers.values():
        columns += [[p.guess for p in parts], [p.loss for p in parts], [p.nan for p in parts]]
    if not columns:
        return {}
    table = torch.stack([torch.cat(column).double() for column in columns]).cpu().numpy()
    truth, sizes = table[0].astype(np.int64), [len(y) for _, y in sets.values()]
    classes, cuts = ctx.run.problem.num_classes, np.cumsum(sizes)[:-1]
    found: dict[str, list[ClassCounts]] = {}
    for place, rule in enumerate(answers):
        guess, losses, nan = table[1 + 3 * place : 4 + 3 * place]  # (N,)
        check_numbers(ctx, rule, bool(nan.any()))
        confused = confusion and place == 0
        counts = ClassCounts.each(guess.astype(np.int64), truth, sizes, classes, confused)
        sums = [float(own.sum()) for own in np.split(losses, cuts)]
        found[rule] = [replace(c, loss_sum=own) for c, own in zip(counts, sums, strict=True)]
        if not is_guessed:
            found[rule] = [replace(c, correct=0 * c.correct) for c in found[rule]]
    return {(rule, name): found[rule][k] for k, name in enumerate(sets) for rule in found}


SEEN, ALL = "seen_classes", "all_classes"


def rules_of(method: Method, experiment: Experiment) -> tuple[str, ...]:
    """Return the rules a client's models are scored by, in the order of its report."""
    if not experiment.evaluate.class_masks:
        return method.rules
    first, *others = method.rules
    return (first, SEEN, ALL, *(rule for rule in others if rule != ALL))


def candidates_of(seen: Tensor, device: torch.device) -> Tensor:
    """Return the classes ``seen`` (K,), or all where there is none: a mask on a device."""
    return to_device(seen if bool(seen.any()) else torch.ones_like(seen), device)


def mask_scores(scores: Mapping[str, Tensor], candidates: Tensor) -> dict[str, Tensor]:
    """Return scores with those of the method's own rule among two sets of classes.

    Args:
        scores: (B, K) by rule, the method's own first.
        candidates: (K,) bool, the classes that a client has met.
    """
    (first, own), *others = scores.items()
    among_seen = own.masked_fill(~candidates, -torch.inf)
    # A method that masks by itself says what it scores without its mask.
    return {first: own, SEEN: among_seen, ALL: scores.get(ALL, own), **dict(others)}
