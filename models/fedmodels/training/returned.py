"""What the functions of a method return: checked at once, so that an error names the function.

A custom method may return anything. Unchecked, that would show later: in code that its author
does not know, at other processes, or in no error at all.

Shapes: B batch, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real

import torch
from torch import Tensor

from fedmodels.errors import ConfigError, PayloadError, TrainingFailed, suggestion
from fedmodels.tensors.bundle import Bundle, ClientId
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.declared_counts import MAX_WEIGHT
from fedmodels.training.asked import reported
from fedmodels.training.contexts import ClientContext, Metrics, ServerState
from fedmodels.training.method import Method
from fedmodels.training.run import RunFacts

SURELY_TAKEN = MAX_WEIGHT / 2
"""A 2-norm up to this is of weights within the bound, however its computation rounds."""


def check_loss(method: Method, loss: object) -> None:
    """Check that a loss is one number, with a gradient; raise ConfigError if not."""
    if not isinstance(loss, Tensor):
        raise _wrong(method, "loss", f"a {type(loss).__name__}", "a tensor with one number")
    if loss.shape:
        found = f"a tensor of shape {list(loss.shape)}"
        raise _wrong(method, "loss", found, "one number, such as the mean over the batch")
    if not loss.requires_grad:
        wanted = "one that depends on out.logits or out.features, without detach() or item()"
        raise _wrong(method, "loss", "a tensor without a gradient", wanted)


def check_weights(ctx: ClientContext) -> None:
    """Check that a coordinator takes the weights of a trained net; raise TrainingFailed.

    The 2-norm of a tensor bounds each of its weights, and is several times cheaper on a CPU than
    their largest magnitude. That is looked at only where the norm leaves it open.
    """
    weights = ctx.net.parameters_by_key()
    held = {name: w.detach() for name, w in weights.items() if w.numel()}
    if not held or bool(torch.stack(torch._foreach_norm([*held.values()])).max() <= SURELY_TAKEN):
        return
    for name, weight in held.items():
        if not bool(torch.linalg.vector_norm(weight, math.inf) <= MAX_WEIGHT):
            raise TrainingFailed(f"training diverged: {_worst_of(name, weight)}")


def _worst_of(name: str, weights: Tensor) -> str:
    if not bool(torch.isfinite(weights).all()):
        return f"{name!r} holds NaN or infinite weights"
    return f"a weight of {name!r} is {float(weights.abs().max()):.4g}, beyond {MAX_WEIGHT:g}"


def check_trained(method: Method, ctx: ClientContext, state: object, upload: object) -> None:
    """Check what a client keeps, sends and reports; raise ConfigError that names the function."""
    if not isinstance(state, Bundle):
        raise _wrong(
            method, "after_local", f"a {type(state).__name__}", "a Bundle; Bundle() is empty"
        )
    if not isinstance(upload, Bundle):
        raise _wrong(method, "uplink", f"a {type(upload).__name__}", "a Bundle")
    known = reported(method, ctx.run) if ctx.metrics else ()
    for name, value in ctx.metrics.items():
        what = f"ctx.metrics of {type(method).__name__} holds {name!r}"
        if name not in known:
            raise ConfigError(
                f"{what}, which its function reported does not name.{suggestion(str(name), known)}"
            )
        ctx.metrics[name] = _number(value, what)


def check_asked(method: Method, ctx: ClientContext) -> None:
    """Check that training took steps as the config says; ConfigError for a loop of its own."""
    if "optimizer" in ctx.asked:
        return
    training = ctx.run.experiment.training
    for key in ("lr_schedule", "clip_norm", "optimizer_options"):
        if getattr(training, key) is not None:
            raise ConfigError(
                f"[training] {key} has no effect: {type(method).__name__} trains with steps of "
                "its own; leave it out"
            )


def check_upload(method: Method, spec: BundleSpec, upload: Bundle) -> None:
    """Check an upload by the method's ``upload_spec``; raise ConfigError for the first tensor."""
    _check_spec(method, "uplink", "upload_spec", upload, spec)


def check_finished(method: Method, found: object) -> tuple[ServerState, Metrics]:
    """Return what ``finish`` returned, with plain numbers as metrics; ConfigError for all else."""
    wanted = "a ServerState and a dict of metrics: return state, {}"
    if not isinstance(found, tuple) or len(found) != 2:
        raise _wrong(method, "finish", f"a {type(found).__name__}", wanted)
    state, metrics = found
    if not isinstance(state, ServerState):
        what = f"a {type(state).__name__} as the state"
        raise _wrong(method, "finish", what, "what aggregate returned, which is a ServerState")
    if not isinstance(metrics, Mapping):
        raise _wrong(method, "finish", f"a {type(metrics).__name__} as metrics", wanted)
    said = f"finish of {type(method).__name__} reports"
    return state, {name: _number(value, f"{said} {name!r}") for name, value in metrics.items()}


def check_sent(
    method: Method, run: RunFacts, common: Bundle, personal: Mapping[ClientId, Bundle]
) -> None:
    """Check what the server sends by ``payload_spec``; raise ConfigError for the first tensor."""
    for_all, for_one = method.payload_spec(run)
    _check_spec(method, "broadcast", "payload_spec", common, for_all)
    for part in {id(part): part for part in personal.values()}.values():
        _check_spec(method, "broadcast", "payload_spec", part, for_one)


def check_scores(method: Method, ctx: ClientContext, found: object, examples: int) -> None:
    """Check that ``predict`` gives scores (B, K) by each rule; ConfigError says what it gives."""
    if not isinstance(found, Mapping):
        wanted = "a dict from the name of a rule to its scores"
        raise _wrong(method, "predict", f"a {type(found).__name__}", wanted)
    shape = (examples, ctx.run.problem.num_classes)
    for rule, scores in found.items():
        if rule not in method.rules:
            raise ConfigError(
                f"predict of {type(method).__name__} answers with the rule {rule!r}, which its "
                f"property rules does not name: {', '.join(method.rules)}"
            )
        if not isinstance(scores, Tensor) or scores.shape != shape:
            is_tensor = isinstance(scores, Tensor)
            what = f"scores of shape {list(scores.shape)}" if is_tensor else type(scores).__name__
            wanted = f"a tensor of shape {list(shape)}: one score for each example and class"
            raise _wrong(method, "predict", f"{what} by the rule {rule!r}", wanted)


def check_rules(method: Method, found: Mapping[str, Tensor], before: Mapping[str, object]) -> None:
    """Check that ``predict`` answers by the rules that it gave ``before``; ConfigError if not."""
    if before and found.keys() != before.keys():
        one, other = (", ".join(rules) or "none" for rules in (before, found))
        raise _wrong(method, "predict", f"the rules {one}, then {other}", "the same ones each time")


def check_numbers(ctx: ClientContext, rule: str, has_nan: bool) -> None:
    """Check that the scores by a rule are numbers; TrainingFailed if some are NaN."""
    if has_nan:
        raise TrainingFailed(
            f"predict gives NaN scores by the rule {rule!r}, of client {ctx.client} in "
            f"round {ctx.round + 1} ({ctx.view or 'after_local'}); give -inf to a class that "
            "is ruled out"
        )


def _check_spec(method: Method, hook: str, spec: str, bundle: Bundle, expected: BundleSpec) -> None:
    try:
        expected.check_bundle(bundle)
    except PayloadError as error:
        line = str(error).removesuffix(".")
        raise ConfigError(
            f"{hook} of {type(method).__name__} does not fit its {spec}: {line}"
        ) from None


def _wrong(method: Method, hook: str, found: str, wanted: str) -> ConfigError:
    return ConfigError(f"{hook} of {type(method).__name__} returns {found}; return {wanted}")


def _number(value: object, what: str) -> float:
    """Return a metric as a number of Python: JSON takes no numbers of torch or numpy."""
    if isinstance(value, int | float):
        return value
    if isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1):
        return float(value)
    shape = f" of shape {list(value.shape)}" if isinstance(value, Tensor) else ""
    raise ConfigError(f"{what} as a {type(value).__name__}{shape}; give a number")
