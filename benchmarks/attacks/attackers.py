"""Methods in which some clients attack: they change what they upload, or what they train on.

    fedsrv launch quickstart --out run \
        --set method.name=benchmarks/attacks/attackers.py:AttackedFedAvg \
        --set method.attack=sign_flip --set method.attackers=2

The attackers are the clients with the highest ids. Their answers pass the coordinator's checks: no
class and no count goes beyond what an attacker announced. An update is what a client sends minus
what it got. Symbols: n clients, f attackers, u the attacker's own update, m and s mean and standard
deviation of the honest updates in each coordinate.

    attack                what the attackers send, or train on
    sign_flip             -u
    scaling               strength * u
    negation              minus the weights themselves
    a_little_is_enough    m - strength * s   (Baruch et al., NeurIPS 2019)
    inner_product         -strength * m      (Xie et al., UAI 2020)
    min_max, min_sum      as far from m as honest updates are apart (optimised.py)
    tailored              what moves the run's own rule farthest from m (optimised.py)
    label_flip            class K - 1 - y in place of class y
    backdoor              a share of the examples has a white patch and the target's class
    prototype_flip        prototypes times -1
    prototype_scaling     prototypes times strength
    prototype_constant    prototypes with strength in each coordinate
    prototype_swap        each class has the prototype of the next class

Updates are of weights; a method that sends none has updates of prototypes. The three attacks of
``optimised.py`` change both. They, ``a_little_is_enough`` and ``inner_product`` know all honest
uploads of the interaction: the clients of such a run live in one process, which the attackers' code
shares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from benchmarks.attacks.optimised import Conspiracy, Deviation
from fedmodels.config.bounds import Count
from fedmodels.errors import ConfigError
from fedmodels.methods import fedali, fedavg, fedmlp, fedproto, gldp, pfedgrp
from fedmodels.numerics.randomness import derive_seed
from fedmodels.tensors.bundle import Bundle, Histogram, Prototypes
from fedmodels.tensors.declared_counts import MAX_WEIGHT, STATISTICS
from fedmodels.training.contexts import ClientContext, ServerState, Stream
from fedmodels.training.method import Scores
from fedmodels.training.run import RunFacts
from fedmodels.training.settings import SharedSettings

Kind = Literal[
    "none", "sign_flip", "scaling", "negation", "a_little_is_enough", "inner_product", "label_flip",
    "backdoor", "prototype_flip", "prototype_scaling", "prototype_constant", "prototype_swap",
    "min_max", "min_sum", "tailored",
]  # fmt: skip
OPTIMISED = ("min_max", "min_sum", "tailored")
STRENGTH = {
    "scaling": -10.0,
    "a_little_is_enough": 1.5,
    "inner_product": 2.0,
    "backdoor": 0.5,
    "prototype_scaling": 50.0,
    "prototype_constant": 1e5,
}
"""What ``strength = "usual"`` stands for, by attack; it is 1 for an attack that is not listed.

It is a factor, except for z of Baruch et al. (``a_little_is_enough``), the share of an attacker's
examples that get the patch (``backdoor``), and a coordinate's value (``prototype_constant``).
"""
HIT = "backdoor"
"""The prediction rule that scores a backdoor: a prediction is correct where the backdoor hits."""
Numbers = dict[tuple[str, ...], Tensor]
"""The tensors of an upload that an attack on updates changes, by their place."""


@dataclass(frozen=True, kw_only=True)
class Attack(SharedSettings):
    """Who attacks, and how."""

    attack: Kind = "none"
    """What attackers do."""
    attackers: Count = 0
    """How many clients attack: those with the highest ids."""
    strength: float | Literal["usual"] = "usual"
    """The ``strength`` in the table of attacks above; :data:`STRENGTH` holds the usual ones."""
    target: Count = 0
    """The class that a backdoor's patch stands for."""
    deviation: Deviation = "std"
    """Along what ``min_max`` and ``min_sum`` leave the mean of the honest updates."""

    def by(self, run: RunFacts, client: object) -> bool:
        """Tell whether a client attacks."""
        first = run.experiment.schedule.clients - self.attackers
        return self.attack != "none" and isinstance(client, int) and client >= first

    @property
    def size(self) -> float:
        """The strength as a number."""
        return STRENGTH.get(self.attack, 1.0) if self.strength == "usual" else self.strength

    @property
    def knows_all(self) -> bool:
        """Whether the attackers have to know the honest uploads."""
        return self.attack in ("a_little_is_enough", "inner_product", *OPTIMISED)

    @property
    def poisons_data(self) -> bool:
        """Whether the attackers change what they train on."""
        return self.attack in ("label_flip", "backdoor")


def numbers(upload: Bundle, *, both: bool = False) -> Numbers:
    """Return the weights of an upload, or its prototypes where it has no weights.

    Integers, running statistics and weights that serve scores alone are left out. ``both`` are the
    weights and the prototypes.
    """
    weights = {
        ("weights", name): tensor
        for name, tensor in upload.weights.items()
        if tensor.is_floating_point()
        and not name.startswith("eval/")
        and not name.endswith(STATISTICS)
    }
    return {**weights, **({} if weights and not both else prototype_numbers(upload))}


def prototype_numbers(bundle: Bundle) -> Numbers:
    """Return a vector (D,) by level and label; the set (P, D) by level where rows have no label."""
    found: Numbers = {}
    for level, rows in bundle.prototypes.items():
        if len(rows.labels):
            found |= {
                (level, str(int(k))): v for k, v in zip(rows.labels, rows.vectors, strict=True)
            }
        else:
            found[level,] = rows.vectors
    return found


def with_numbers(upload: Bundle, changed: Numbers) -> Bundle:
    """Return an upload with other numbers in these places, as large as the checks let pass."""
    changed = {key: tensor.clamp(-MAX_WEIGHT, MAX_WEIGHT) for key, tensor in changed.items()}
    weights = {name: changed.get(("weights", name), w) for name, w in upload.weights.items()}
    prototypes = {
        level: replace(rows, vectors=_vectors(level, rows, changed))
        for level, rows in upload.prototypes.items()
    }
    return replace(upload, weights=weights, prototypes=prototypes)


def _vectors(level: str, rows: Prototypes, changed: Numbers) -> Tensor:
    if not len(rows.labels):
        return changed.get((level,), rows.vectors)
    labels = [str(int(k)) for k in rows.labels]
    return torch.stack(
        [changed.get((level, k), v) for k, v in zip(labels, rows.vectors, strict=True)]
    )


def updates(upload: Bundle, received: Bundle, *, both: bool = False) -> Numbers:
    """Return an upload minus what its client received; a tensor it did not receive counts whole.

    ``both``: of weights and of prototypes.
    """
    got = {("weights", name): w for name, w in received.weights.items()}
    got |= prototype_numbers(received)
    sent = numbers(upload, both=both)
    return {key: w - got[key] if key in got else w for key, w in sent.items()}


def attacked_updates(how: Attack, own: Numbers, honest: Sequence[Numbers]) -> Numbers:
    """Return the updates that an attacker sends.

    Args:
        how: the attack.
        own: the attacker's update, as its training left it.
        honest: the updates of the honest clients, for attacks that know them.
    """
    if how.attack == "sign_flip":
        return {key: -u for key, u in own.items()}
    if how.attack == "scaling":
        return {key: how.size * u for key, u in own.items()}
    return {
        key: _of_honest(how, u, [each[key] for each in honest if key in each])
        for key, u in own.items()
    }


def _of_honest(how: Attack, own: Tensor, honest: Sequence[Tensor]) -> Tensor:
    """Return an attack's update of one tensor; with fewer than two honest ones, the attacker's."""
    if len(honest) < 2:
        return own
    known = torch.stack(list(honest)).double()
    if how.attack == "inner_product":
        return (-how.size * known.mean(0)).to(own.dtype)
    return (known.mean(0) - how.size * known.std(0, correction=0)).to(own.dtype)


def attacked_upload(
    how: Attack,
    upload: Bundle,
    received: Bundle,
    honest: Sequence[Numbers] = (),
    together: Conspiracy | None = None,
) -> Bundle:
    """Return what an attacker sends in place of an upload, by itself or together with others."""
    if how.attack == "negation":
        return with_numbers(upload, {key: -w for key, w in numbers(upload).items()})
    if how.attack.startswith("prototype_"):
        return replace(upload, prototypes=attacked_prototypes(how, upload.prototypes))
    both = together is not None
    own, sent = updates(upload, received, both=both), numbers(upload, both=both)
    changed = attacked_updates(how, own, honest) if together is None else together.updates(own)
    return with_numbers(upload, {key: w - own[key] + changed[key] for key, w in sent.items()})


def attacked_prototypes(how: Attack, sets: Mapping[str, Prototypes]) -> dict[str, Prototypes]:
    """Return the prototypes that an attacker sends, at every level."""
    change: dict[str, Callable[[Tensor], Tensor]] = {
        "prototype_flip": torch.neg,
        "prototype_scaling": lambda v: how.size * v,
        "prototype_constant": lambda v: torch.full_like(v, how.size),
        "prototype_swap": lambda v: v.roll(-1, 0),
    }
    return {
        level: replace(rows, vectors=change[how.attack](rows.vectors))
        for level, rows in sets.items()
    }


def flipped(y: Tensor, classes: int) -> Tensor:
    """Return labels (n,) with class K - 1 - y in place of class y."""
    return classes - 1 - y


def patched(x: Tensor, white: Tensor) -> Tensor:
    """Return images (n, C, H, W) with a white square in the last corner, a seventh as wide.

    Args:
        x: the images.
        white: the brightest value of each channel, (C,) or (1,).
    """
    side, out = max(2, x.shape[-1] // 7), x.clone()
    out[..., -side:, -side:] = white.to(x).view(-1, 1, 1)
    return out


def backdoored(
    x: Tensor, y: Tensor, how: Attack, white: Tensor, seed: int
) -> tuple[Tensor, Tensor]:
    """Return examples of which a share, drawn by the seed, has the patch and the target's class."""
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    chosen = order[: round(how.size * len(y))]
    x, y, marked = x.clone(), y.clone(), patched(x[chosen], white)
    x[chosen], y[chosen] = marked, how.target
    return x, y


@dataclass(frozen=True)
class Watched:
    """A client's data as its training sees them, and the payload that it trains from."""

    stream: Any
    received: Bundle
    change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda x, y: (x, y)

    def train(self, task: int) -> tuple[Tensor, Tensor]:
        return self.change(*self.stream.train(task))

    def train_up_to(self, task: int) -> tuple[Tensor, Tensor]:
        return self.change(*self.stream.train_up_to(task))

    def train_each(self, task: int) -> dict[int, tuple[Tensor, Tensor]]:
        return {at: self.change(*part) for at, part in self.stream.train_each(task).items()}

    def limits(self) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self.stream.limits()
        return found


def within_announced(upload: Bundle, counts: Tensor, visits: int) -> Bundle:
    """Return an upload that says nothing beyond what its client announced.

    Args:
        upload: the upload of a training on changed labels.
        counts: (K,) examples of each class that the client announced.
        visits: how often the client has trained on them.
    """
    sets = {}
    for level, rows in upload.prototypes.items():
        kept = rows.labels.long()[counts[rows.labels.long()] > 0] if len(rows.labels) else None
        sets[level] = rows if kept is None else _rows_of(rows, kept, counts)
    told = upload.histogram
    if told is not None:
        pairs = ((told.round, counts), (told.total, visits * counts))
        told = Histogram(*(p.minimum(most.to(p)) if len(p) else p for p, most in pairs))
    held = {
        key: made
        for key, made in upload.generators.items()
        if not key.isdigit() or counts[int(key)]
    }
    return replace(upload, prototypes=sets, histogram=told, generators=held)


def _rows_of(rows: Prototypes, labels: Tensor, counts: Tensor) -> Prototypes:
    held = rows.rows()
    kept = {int(k): (held[int(k)][0], min(held[int(k)][1], int(counts[k]))) for k in labels}
    return Prototypes.of(kept, rows.vectors.shape[1])


class _Round:
    """The honest updates of the present interaction, of the clients of this process."""

    run: RunFacts | None = None
    interaction = -1
    honest: dict[object, Numbers] = {}  # noqa: RUF012
    conspiracy: Conspiracy | None = None

    @classmethod
    def of(cls, ctx: ClientContext) -> dict[object, Numbers]:
        """Return the table of a client's interaction; one of another interaction is dropped."""
        if cls.run is not ctx.run or cls.interaction != ctx.interaction:
            cls.run, cls.interaction, cls.honest = ctx.run, ctx.interaction, {}
            cls.conspiracy = None
        return cls.honest

    @classmethod
    def together(cls, ctx: ClientContext, how: Attack) -> Conspiracy:
        """Return what all attackers of a client's interaction send."""
        if cls.conspiracy is None:
            honest, rule = [*cls.honest.values()], ctx.run.experiment.server
            cls.conspiracy = Conspiracy(how.attack, how.deviation, honest, rule, how.attackers)
        return cls.conspiracy


if TYPE_CHECKING:
    Base = fedavg.FedAvg
else:
    Base = object


@dataclass(frozen=True, kw_only=True)
class Attacked(Base):
    """Adds attackers to a method; a class names it before the method's class."""

    by: Attack = field(default_factory=Attack)
    """Who attacks, and how."""

    @property
    def rules(self) -> tuple[str, ...]:
        first, *others = super().rules
        hits = (HIT,) if self.by.attack == "backdoor" else ()
        return (first, *hits, *others)  # the last one may be missing, where there is no head

    def init_server(self, run: RunFacts) -> ServerState:
        how, sent = self.by, self.upload_spec(run).required
        if how.attackers >= run.experiment.schedule.clients:
            raise ConfigError(f"[method] attackers = {how.attackers}: nobody is left who is honest")
        wanted = "prototypes/" if how.attack.startswith("prototype_") else "weights/"
        part = wanted if how.attack == "negation" or wanted == "prototypes/" else ""
        if not any(key.startswith(part) for key in sent):
            raise ConfigError(f"[method] attack = {how.attack!r}: uploads hold no {part[:-1]}")
        return super().init_server(run)

    def load(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        if not ctx.view:  # it trains
            held = ctx.stream.stream if isinstance(ctx.stream, Watched) else ctx.stream
            change = self._change(ctx, held) if self.by.by(ctx.run, ctx.client) else None
            ctx.stream = Watched(held, payload, *([change] if change else []))
        super().load(ctx, payload, state)

    def _change(
        self, ctx: ClientContext, stream: Stream
    ) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
        """Return what an attacker does to its training data."""
        how, classes = self.by, ctx.run.problem.num_classes
        if how.attack == "label_flip":
            return lambda x, y: (x, flipped(y, classes))
        if how.attack != "backdoor":
            return None
        if how.target >= classes or len(ctx.run.problem.input_shape) != 3:
            raise ConfigError(f"[method] target = {how.target}: a backdoor needs images, a class")
        seed = derive_seed(ctx.run.experiment.seed, ctx.client, 0, "method")
        white = stream.limits()[1]
        return lambda x, y: backdoored(x, y, how, white, seed)

    def uplink(self, ctx: ClientContext, state: Bundle, refs: Any) -> Bundle:
        upload, how = super().uplink(ctx, state, refs), self.by
        assert isinstance(ctx.stream, Watched)
        received = ctx.stream.received
        if not how.by(ctx.run, ctx.client):
            if how.knows_all:
                both = how.attack in OPTIMISED
                _Round.of(ctx)[ctx.client] = updates(upload, received, both=both)
            return upload
        if how.poisons_data:
            y = ctx.stream.stream.train(ctx.task)[1]
            counts = torch.bincount(y, minlength=ctx.run.problem.num_classes)
            return within_announced(upload, counts, ctx.round + 1)
        honest = _Round.of(ctx) if how.knows_all else {}
        wanted = ctx.run.experiment.cohort_size - how.attackers
        if how.knows_all and len(honest) < wanted:
            raise ConfigError(
                f"[method] attack = {how.attack!r} knows all honest uploads: one process has to "
                "hold all clients (--hosts=1), and all of them take part"
            )
        together = _Round.together(ctx, how) if how.attack in OPTIMISED else None
        return attacked_upload(how, upload, received, list(honest.values()), together)

    def predict(self, ctx: ClientContext, payload: Bundle, state: Bundle, x: Tensor) -> Scores:
        found = super().predict(ctx, payload, state, x)
        if self.by.attack != "backdoor":
            return found
        marked = patched(x, ctx.stream.limits()[1])
        own = next(iter(super().predict(ctx, payload, state, marked).values()))
        return {**found, HIT: self._hits(ctx, x, own.argmax(1), own)}

    def _hits(self, ctx: ClientContext, x: Tensor, taken: Tensor, like: Tensor) -> Tensor:
        """Return scores (B, K): the true class is best where the backdoor hits, and only there.

        An image of the target's class is never a hit.
        """
        y, classes = true_classes(ctx.stream, x), like.shape[1]
        hit = (taken == self.by.target) & (y != self.by.target)
        shown = torch.where(hit, y, (y + 1) % classes)
        return torch.nn.functional.one_hot(shown, classes).to(like)


def true_classes(stream: Any, x: Tensor) -> Tensor:
    """Return the class (B,) of each test input, which is looked up in the client's test data."""
    held = stream.stream if isinstance(stream, Watched) else stream
    sets = [held.test(task) for task in range(held.num_seen)]
    sets += [found] if (found := held.global_test()) is not None else []
    known = {
        row.numpy().tobytes(): int(label)
        for inputs, labels in sets
        for row, label in zip(inputs.cpu(), labels, strict=True)
    }
    return torch.tensor([known[row.numpy().tobytes()] for row in x.cpu()])


@dataclass(frozen=True, kw_only=True)
class AttackedFedAvg(Attacked, fedavg.FedAvg):
    """FedAvg with attackers."""


@dataclass(frozen=True, kw_only=True)
class AttackedFedProto(Attacked, fedproto.FedProto):
    """FedProto with attackers."""


@dataclass(frozen=True, kw_only=True)
class AttackedGldp(Attacked, gldp.Gldp):
    """GLDP with attackers."""


@dataclass(frozen=True, kw_only=True)
class AttackedFedMLP(Attacked, fedmlp.FedMLP):
    """FedMLP with attackers."""


@dataclass(frozen=True, kw_only=True)
class AttackedFedAli(Attacked, fedali.FedAli):
    """FedAli with attackers."""


@dataclass(frozen=True, kw_only=True)
class AttackedPFedGRP(Attacked, pfedgrp.PFedGRP):
    """pFedGRP with attackers."""
