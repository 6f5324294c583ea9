"""What a release follows from: the identity of a training or of a score at one client.

A ledger asks whether a release was charged before. Two releases have one name only if a client
cannot tell what they follow from apart: then they are the same bytes with the same noise, and
whoever has both knows no more. So whatever a coordinator may vary belongs here. An input that is
missing is a release that nobody pays for; one too many is charged twice.

The draws of noise and batches take their streams from the name as well. So two releases of
different names have independent noise, also where what they hide is equal, and its scale is not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from fedmodels.config.sent import whole_digest
from fedmodels.nets.split import weights_of
from fedmodels.numerics.secrecy import Secret
from fedmodels.tensors.bundle import Bundle, state_digest, tensor_bytes
from fedmodels.training.contexts import ClientContext
from fedmodels.training.method import Method
from fedmodels.training.run import RunFacts

if TYPE_CHECKING:
    from fedmodels.training.scoring import TestSets


@dataclass(frozen=True)
class Release:
    """One training, or one score, by digests of all that it follows from."""

    purpose: Literal["train", "score"]
    place: str
    """Whose it is, its interaction, round and task, the problem, and what else was ordered."""
    settings: bytes
    """Of the whole experiment."""
    payload: str
    """What the client was given."""
    state: str
    """Its private state, and the model where that is scored."""
    contents: bytes
    """Of the examples, and how inputs are normalised."""
    labels: bytes
    """Of the labels, as the classes of the run are now."""

    def name(self, secret: Secret) -> str:
        """Return a name, 32 hex digits, that nobody without the secret can compute."""
        made = hashlib.blake2b(key=secret.key, digest_size=16, person=b"release")
        for each in fields(self):
            value = getattr(self, each.name)
            known = value if isinstance(value, bytes) else value.encode()
            made.update(f"{each.name}/{len(known)}/".encode() + known)
        return made.hexdigest()


def release_of_training(
    method: Method, ctx: ClientContext, payload: Bundle, state: Bundle, beside: str
) -> Release:
    """Return what a training follows from; its task is open, and ``beside`` is what else counts."""
    reads_all = method.trains_on == "history"
    read = ctx.stream.train_up_to if reads_all else ctx.stream.train
    return Release(
        purpose="train",
        place=_place(ctx, beside),
        settings=ctx.run.once(_settings),
        payload=state_digest([("payload", payload)]),
        state=state_digest([("state", state)]),
        contents=ctx.stream.contents(ctx.task, up_to=reads_all).tobytes(),
        labels=_digest({"y": read(ctx.task)[1]}),
    )


def release_of_score(
    ctx: ClientContext, payload: Bundle, state: Bundle, sets: TestSets, beside: str
) -> Release:
    """Return what a score follows from; ``ctx.net`` holds the model, and ``beside`` is as ordered.

    The private state counts for every view, as a method may predict with it.
    """
    model = state_digest([("net", Bundle(weights_of(ctx.net))), ("state", state)])
    return Release(
        purpose="score",
        place=_place(ctx, f"{ctx.view}/{[*sets]}/{beside}"),
        settings=ctx.run.once(_settings),
        payload=state_digest([("payload", payload)]),
        state=model,
        contents=_digest({name: x for name, (x, _) in sets.items()}),
        labels=_digest({name: y for name, (_, y) in sets.items()}),
    )


def _settings(run: RunFacts) -> bytes:
    return whole_digest(run.experiment)


def _place(ctx: ClientContext, beside: str) -> str:
    run = ctx.run
    problem = [*asdict(run.problem).items(), run.began_with, run.merged]
    facts: list[Any] = [str(ctx.client), asdict(ctx.at), problem, beside]
    return json.dumps(facts)


def _digest(tensors: Mapping[str, Tensor]) -> bytes:
    made = hashlib.sha256()
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        made.update(f"{name}/{plain.dtype}/{tuple(plain.shape)}/".encode())
        made.update(tensor_bytes(plain))
    return made.digest()
