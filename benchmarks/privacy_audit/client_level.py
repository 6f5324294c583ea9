"""Games with ``level = "client"``: one client, the canary, is in a run or not; who can tell?

The engine's own code adds the noise: who takes part (:mod:`fedsrv.engine.schedule`), what a client
sends (:mod:`fedmodels.training.private_uploads`), what is released (``ClientPrivacy``) and what a
group of a secure sum is opened to (``SecureUpload``). Training is left out: the canary sends the
longest change that its bound lets through, and always the same. The others send what the attacker
knows. The attacker sees every release, as whoever has the models of all rounds does. It adds up
the logarithms of the likelihood ratios, which is the best test of known means.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from fedmodels.config.experiment import Experiment
from fedmodels.config.privacy import masks_of
from fedmodels.facts.resolution import experiment_of
from fedmodels.methods import make
from fedmodels.numerics.secrecy import Secret
from fedmodels.privacy.contributions import Contributions
from fedmodels.privacy.mechanism import clipped, noise_stds
from fedmodels.privacy.releases import ReleaseLog
from fedmodels.secure_sum.fixed_point import added
from fedmodels.tensors.bundle import Bundle, Problem, Prototypes, Weights
from fedmodels.training.contexts import ServerContext
from fedmodels.training.private_uploads import contributions, noise_share, with_own_noise
from fedmodels.training.run import RunFacts
from fedmodels.training.secure_upload import SecureUpload
from fedsrv.engine import schedule
from fedsrv.engine.plan import Plan
from fedsrv.parts import private_rounds
from fedsrv.parts.private_rounds import FRACTION, WEIGHTS, ClientPrivacy
from fedsrv.progress.events import EventLog
from fedsrv.state.store import Store

CANARY = 0
PROBLEM = Problem((1, 2, 2), 2)
TABLES: dict[str, dict[str, Any]] = {
    "data": {"name": "digits"},
    "scenario": {"kind": "iid"},
    "net": {"name": "mlp", "hidden": [2]},
    "method": {"name": "fedavg"},
    "schedule": {"clients": 3, "rounds": 1},
    "evaluate": {"views": []},
}
NOISE = {"level": "client", "noise_multiplier": 1.0, "delta": 1e-3, "clip": 0.5,
         "allow": ["announced", "examples", "loss"]}  # fmt: skip
FAR = 20.0
"""Times its bound that an upload is long, before it is bounded."""
Drawn = tuple[Mapping[str, Tensor], Mapping[str, float]]
"""Released sums by part, and the deviations of their noise."""


class Releases:
    """A secret of one play, and what was released with it: no file keeps it."""

    def __init__(self) -> None:
        """Draw a secret."""
        self.secret, self.contents = Secret.fresh(), list[Tensor]()

    def __len__(self) -> int:
        """Return how many releases there are."""
        return len(self.contents)

    def until(self, *_: object) -> int:
        """Return all of them: no play repeats an interaction."""
        return len(self.contents)

    def note(self, interaction: int, content: Tensor, *_: object) -> None:
        """Keep a release."""
        self.contents.append(content.clone())

    def has(self, *_: object) -> bool:
        """Say that no release was made before: no play repeats an interaction."""
        return False

    def others(self, *_: object) -> tuple[int, ...]:
        """Return nobody: no play repeats an interaction."""
        return ()


class PlayedPrivacy(ClientPrivacy):
    """The engine's part, whose releases a play keeps."""

    @staticmethod
    def releases_of(store: Store) -> ReleaseLog:
        return cast(ReleaseLog, store.releases)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class ClientGame:
    """A config, and the attacker's test of it."""

    name: str
    privacy: Mapping[str, Any] = field(default_factory=dict)
    schedule: Mapping[str, Any] = field(default_factory=dict)
    method: str = "fedavg"
    step_of_fraction: float = 0.5
    """How far the canary moves the count of an adaptive bound."""
    is_sure_alone: bool = False
    """Whether the canary surely takes part where nobody else is drawn: a fault of old."""

    @cached_property
    def experiment(self) -> Experiment:
        """The config."""
        allow = [*NOISE["allow"], *(["metrics"] if self.method == "apfl" else [])]
        return experiment_of({
            **TABLES, "method": {"name": self.method},
            "schedule": {**TABLES["schedule"], **self.schedule},
            "privacy": {**NOISE, "allow": allow, **self.privacy},
        })  # fmt: skip

    @cached_property
    def run(self) -> RunFacts:
        """The facts of the run."""
        return RunFacts(self.experiment, PROBLEM)

    @cached_property
    def plan(self) -> Plan:
        """As much of a plan as is looked at."""
        method = make(self.method, **self.experiment.method.hyper_parameters())
        tasks = dict.fromkeys(range(self.experiment.schedule.clients), 1)
        wire = SimpleNamespace(tells=frozenset())
        facts = {
            "method": method,
            "run": self.run,
            "tasks": tasks,
            "steps": (),
            "aside": {},
            "wire": wire,
        }
        return cast(Plan, SimpleNamespace(**facts))

    @cached_property
    def covered(self) -> Contributions:
        """What the noise covers."""
        return contributions(self.plan.method, self.run)

    @cached_property
    def given(self) -> Weights:
        """What clients train from."""
        forms = {name: self.run.forms[name] for name in self.covered.weights}
        return {name: torch.zeros(form.shape) for name, form in forms.items()}

    @property
    def rate(self) -> float:
        """The canary's chance to take part, as the attacker counts it."""
        drawn = self.experiment.schedule.sampling == "poisson"
        return self.experiment.cohort_size / self.experiment.schedule.clients if drawn else 1.0

    @property
    def delta(self) -> float:
        """The promise's delta."""
        assert self.experiment.privacy is not None, "it is in the config"
        return self.experiment.privacy.chance

    @property
    def is_gaussian(self) -> bool:
        """Whether all of it is one Gaussian release."""
        return self.experiment.schedule.sampling != "poisson"

    def charged(self) -> float:
        """Return the epsilon that the run says."""
        return self._private(Releases()).cost(self.experiment.schedule.rounds)

    def _private(self, releases: Releases) -> ClientPrivacy:
        store = SimpleNamespace(experiment=self.experiment, releases=releases)
        store.ledger = SimpleNamespace(record=lambda number: None)
        private = PlayedPrivacy(cast(Store, store), EventLog())
        private.gathered(self.plan)
        return private

    # --- a play -----------------------------------------------------------------------------------

    def play(self, is_there: bool) -> float:
        """Play a run, with the canary or without; return the attacker's score."""
        releases = Releases()
        private, secret = self._private(releases), releases.secret
        clients, score = range(self.experiment.schedule.clients), 0.0
        steps = schedule.steps(
            self.experiment, clients, self.plan.tasks, None, None,
            lambda number, client: secret.chance(f"cohort/{number}/{client}"),
        )  # fmt: skip
        for step in steps:
            others = [client for client in step.cohort if client != CANARY]
            takes_part = is_there and CANARY in step.cohort
            cohort = (CANARY, *others) if takes_part else tuple(others)
            if self.rate == 1 and CANARY not in step.cohort:
                continue  # cohorts of a fixed size follow from the seed, which everybody knows
            ctx = ServerContext(self.run, step, cohort)
            ratio = self._ratio(private, ctx, float(len(step.cohort)))
            rate = 1.0 if self.is_sure_alone and not others else self.rate
            score += ratio if rate == 1 else math.log1p(rate * math.expm1(min(ratio, 700.0)))
        return score

    def _ratio(self, private: ClientPrivacy, ctx: ServerContext, size: float) -> float:
        """Return the logarithm of the ratio of a release's likelihoods, with a canary in it."""
        expected = self.rate * self.experiment.schedule.clients if self.rate < 1 else size
        clip = private._clip_at(ctx.interaction) if self._adapts else None
        sent = self._upload(CANARY, clip)
        canary = clipped(self.covered.vectors(sent, self.given), self._clips(clip))
        if self._noise_at_clients:
            found, stds = self._of_clients(private, ctx, int(size))
            return likelihood_ratio(found, canary, stds)
        sent = {client: self._upload(client, clip) for client in ctx.cohort}
        with recorded() as drawn:
            private.released(ctx, expected, self.given, sent, None)
        if not drawn:
            return 0.0
        ratio = likelihood_ratio(drawn[0][0], canary, drawn[0][1])
        return ratio + self._of_fraction(private, ctx, expected) if self._adapts else ratio

    def _of_clients(
        self, private: ClientPrivacy, ctx: ServerContext, size: int
    ) -> tuple[Mapping[str, Tensor], Mapping[str, float]]:
        """Return the sum of the canary's company as colluders see it, and its noise.

        A canary that is not there sends noise alone: a sum under masks is of all that were asked.
        Colluders take off what they sent themselves.
        """
        sent = {}
        for client in range(size):
            upload = self._upload(client) if client in ctx.cohort else self._still()
            sent[client] = with_own_noise(
                self.plan.method, self.run, upload, Bundle(self.given), Secret.fresh(),
                str(ctx.interaction),
            )  # fmt: skip
        rules, privacy = masks_of(self.experiment.privacy), self.experiment.privacy
        assert privacy is not None, "it is in the config"
        share, whole = (
            noise_share(self.plan.method, self.run),
            noise_stds(self.covered.clips, self._z),
        )
        if self.plan.method.reduction == "each":
            stds = {part: share * std for part, std in whole.items()}
            return self.covered.received(sent[CANARY], self.given), stds
        company = range(0, size, rules.groups if rules is not None else 1)
        if rules is None or rules.groups == 1:
            mean = self._released(private, ctx, sent)
        else:
            mean = self._opened([sent[client] for client in company], size)
        colluders = company[len(company) - privacy.colluders :]
        known = [self.covered.received(sent[client], self.given) for client in colluders]
        seen = {
            part: len(company) * one - sum(other[part] for other in known)
            for part, one in mean.items()
        }
        left = share * math.sqrt(len(company) - len(colluders))
        return seen, {part: left * std for part, std in whole.items()}

    def _released(
        self, private: ClientPrivacy, ctx: ServerContext, sent: Mapping[int, Bundle]
    ) -> Mapping[str, Tensor]:
        """Return the mean of all uploads, as the engine releases it."""
        private.released(ctx, len(sent), self.given, sent, None)
        content = cast(Releases, private.releases).contents[-1]
        sizes = {part: len(one) for part, one in self.covered.zeros().items()}
        parts = torch.split(content, [*sizes.values()])
        return dict(zip(sizes, parts, strict=True))

    def _opened(self, sent: Sequence[Bundle], asked: int) -> Mapping[str, Tensor]:
        """Return the mean of a group, as a secure sum is opened to it."""
        secure = SecureUpload.of(self.plan.method, self.run)
        assert secure is not None, "groups are of a secure sum"
        numbers = secure.numbers(asked, 1)
        total = added([secure.encoded(one, self.given, numbers) for one in sent])
        said = [Bundle(scalars=one.scalars) for one in sent]
        opened = secure.summed_up(total, numbers, self.given, said)
        assert opened is not None, "clients count"
        return self.covered.received(opened.mean, self.given)

    def _of_fraction(self, private: ClientPrivacy, ctx: ServerContext, expected: float) -> float:
        """Return what the next bound tells of the canary, which lies within the present one."""
        clip, after = private.facts["clip"], private.facts["clip_next"]
        quantile = private.privacy.clip_quantile
        assert quantile is not None, "it adapts"
        told = expected * (math.log(clip / after) / private_rounds.RATE + quantile)
        known = [client for client in ctx.cohort if client != CANARY]
        absent = expected - len(known)
        is_half = self.step_of_fraction == 0.5
        plain = sum(map(is_within, known)) + (0.5 * absent if is_half else 0.0)
        std, step = private._fraction_noise(expected) / 2, self.step_of_fraction
        return (step * (told - plain) - step * step / 2) / std**2

    # --- uploads ----------------------------------------------------------------------------------

    @property
    def _z(self) -> float:
        assert self.experiment.privacy is not None, "it is in the config"
        return self.experiment.privacy.noise

    @property
    def _adapts(self) -> bool:
        assert self.experiment.privacy is not None, "it is in the config"
        return self.experiment.privacy.clip_quantile is not None

    @property
    def _noise_at_clients(self) -> bool:
        assert self.experiment.privacy is not None, "it is in the config"
        return self.experiment.privacy.noise_at_clients

    def _clips(self, clip: float | None) -> dict[str, float]:
        return {**self.covered.clips, **({} if clip is None else {WEIGHTS: clip})}

    @cached_property
    def _uploads(self) -> dict[tuple[bool, bool, float | None], Bundle]:
        return {}

    def _upload(self, client: int, clip: float | None = None) -> Bundle:
        """Return what a client sends; of the others, what an adaptive bound counts differs."""
        key = client == CANARY, is_within(client), clip
        if key not in self._uploads:
            self._uploads[key] = self._made(client, clip)
        return self._uploads[key]

    def _made(self, client: int, clip: float | None) -> Bundle:
        if client == CANARY:
            return self._canary(clip)
        beyond = 0.0 if is_within(client) else FAR * self._clips(clip).get(WEIGHTS, 0.0)
        return self._moved(1, beyond)

    def _canary(self, clip: float | None) -> Bundle:
        """Return the longest contribution; one that an adaptive bound counts as within."""
        clips = self._clips(clip)
        length = clips.get(WEIGHTS, 0.0) * (FAR if clip is None else 1 - 1e-6)
        moved = self._moved(0, length)
        levels = {}
        for level in self.covered.levels:
            width = self.covered._width(level)
            row = torch.full((width,), FAR * clips[f"prototypes/{level}"])
            levels[level] = Prototypes.of({0: (row, 1), 1: (row, 1)}, width)
        return Bundle(moved.weights, levels, scalars=moved.scalars)

    def _still(self) -> Bundle:
        """Return the upload of a client that moves nothing and has no class."""
        return self._moved(0, 0.0)

    def _moved(self, place: int, length: float) -> Bundle:
        """Return an upload that moves one number of the first of the weights."""
        weights = {name: value.clone() for name, value in self.given.items()}
        if weights:
            weights[min(weights)].view(-1)[place] += length
        none = {k: Prototypes.of({}, self.covered._width(k)) for k in self.covered.levels}
        scalars = (
            {"num_examples": 1.0} if "scalars/num_examples" in self.covered.spec.required else {}
        )
        return Bundle(weights, none, scalars=scalars)


def is_within(client: int) -> bool:
    """Tell whether another client's upload lies within an adaptive bound: every second one."""
    return client % 2 == 0


def likelihood_ratio(
    seen: Mapping[str, Tensor], canary: Mapping[str, Tensor], stds: Mapping[str, float]
) -> float:
    """Return the log of the ratio of likelihoods of a sum, with the canary over without it."""
    return sum(
        float((one * seen[part]).sum() - one.square().sum() / 2) / stds[part] ** 2
        for part, one in canary.items()
        if part != FRACTION
    )


@contextmanager
def recorded() -> Iterator[list[Drawn]]:
    """Keep what the engine releases meanwhile."""
    found, real = list[Drawn](), private_rounds.noised

    def noised(sums: Any, stds: Any, secret: Secret, purpose: str) -> dict[str, Tensor]:
        drawn = real(sums, stds, secret, purpose)
        found.append((drawn, stds))
        return drawn

    private_rounds.noised = noised
    try:
        yield found
    finally:
        private_rounds.noised = real
