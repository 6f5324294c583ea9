"""Differentially private rounds: what the method gets of the uploads, and what the run has spent.

The method's server half gets one upload in place of all: the mean of the clients' bounded
contributions with noise (:mod:`fedmodels.privacy`). Whatever it computes from that mean costs no
further privacy. A method that reads uploads one by one gets each of them, with noise of its own.
Nothing else that depends on single uploads enters the state. So no upload is left out for lying far
out of its cohort: the bound of its contribution limits what it can do.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedmodels.config.experiment import Experiment
from fedmodels.errors import ConfigError, PayloadError, RunFailed, TooFewClients
from fedmodels.facts.position import Interaction
from fedmodels.privacy.accounting import (
    GaussianReleases,
    epsilon_of,
    releases_of_clients,
    renyi_epsilon_of,
)
from fedmodels.privacy.contributions import Contributions
from fedmodels.privacy.coverage import assumptions, check_allowed, told_beside
from fedmodels.privacy.mechanism import clipped, noise_stds, noised
from fedmodels.privacy.releases import NAME, Over, ReleaseLog
from fedmodels.tensors.bundle import Bundle, ClientId, Weights, state_digest
from fedmodels.tensors.declared_counts import check_numbers
from fedmodels.tensors.uploads import Uploads
from fedmodels.tensors.weighted_mean import weighted_mean
from fedmodels.training.asked import reported
from fedmodels.training.contexts import ServerContext
from fedmodels.training.method import Method
from fedmodels.training.private_uploads import alike, contributions, noise_share
from fedsrv.engine.client_profile import clients_text
from fedsrv.engine.cohort import Answers
from fedsrv.engine.plan import Plan
from fedsrv.engine.reduction import Reduced
from fedsrv.engine.schedule import Step, end_before, takes_part
from fedsrv.engine.server_part import NOTHING, CheckUpload, CurrentInteraction, ServerPart, Settle
from fedsrv.progress.events import EventLog
from fedsrv.state.record import Record, of_parts
from fedsrv.state.store import Store

WEIGHTS, FRACTION = "weights", "fraction"
"""``fraction`` is a part of one number, by which a bound adapts: the sum over clients of 1/2 for
one within the bound, of -1/2 for another one. So a client moves it by 1/2."""
RATE = 0.2
"""Learning rate of the geometric steps of a bound that adapts (Andrew et al., 2021, Section 3)."""


class PrivacySpent(RunFailed):
    """One release more would pass ``[privacy] epsilon``; nothing of it has left."""


REFUSED = "the method refuses its upload; the coordinator's log says why"
"""What is told of an upload that noise hides: the reason may tell of its values."""
SPENT = {"epsilon", "epsilon_next"}
"""What clients tell of their own privacy, as ``[privacy]`` itself asks."""
NOISE = 2
"""The rule by which clients' noise follows from what they train; another number is another rule."""
OTHER_NOISE = (
    "note: the run began under a release that drew clients' noise by another rule: from here on it "
    "has other noise than a run of one release, and a training that is done again is charged again"
)
log = logging.getLogger(__name__)


def rule_of_noise(store: Store) -> Mapping[str, str]:
    """Return the rule of clients' noise as a fact of a run; say so if it began with another one."""
    if store.committed >= 0 and store.ledger.fact("noise", int) != NOISE:
        log.warning(OTHER_NOISE)
    return {"noise": str(NOISE)}


class ClientPrivacy(ServerPart):
    """What ``[privacy] level = "client"`` adds to the rounds of a run."""

    counts_alike = True
    method: Method

    def __init__(self, store: Store, events: EventLog, given: Mapping[str, Any] = NOTHING) -> None:
        """Begin, or go on after the last commit."""
        super().__init__(store, events, given)
        assert self.experiment.privacy is not None, "there is something to hide"
        self.privacy, self.releases = self.experiment.privacy, self.releases_of(store)
        self.noise, self.delta = self.privacy.noise, self.privacy.chance
        self.needs_each = self.privacy.noise_at_server  # which bounds each
        self.facts: dict[str, Any] = {}
        """What the record of the last release says of privacy."""
        self._clips: dict[int, float] = {}
        """Where the bound adapts: the last interaction, and the bound that it left to the next."""
        self._given: Weights = {}
        """The weights that the present cohort was given."""

    @classmethod
    def takes_up(cls, store: Store, before: Experiment) -> Mapping[str, str]:
        """Let the run draw from the secret of its releases; ArchiveError where they are gone."""
        store.secret = cls.releases_of(store).secret
        store.states_lines(NAME)
        privacy = store.experiment.privacy
        return rule_of_noise(store) if privacy and privacy.noise_at_clients else {}

    @staticmethod
    def releases_of(store: Store) -> ReleaseLog:
        """Return what was released of a run, and its secret."""
        return ReleaseLog(store.path / NAME, store.committed)

    def gathered(self, plan: Plan) -> None:
        """Check that the run can keep what the config promises.

        Raises:
            ConfigError: the method, or the config, does not fit.
        """
        self.method = plan.method
        check_private_rounds(plan, self.experiment)
        if self.privacy.epsilon is not None and self.cost(1) > self.privacy.epsilon:
            raise ConfigError(
                f"[privacy] epsilon = {self.privacy.epsilon:g}: one interaction alone costs "
                f"{self.cost(1):.4g} with noise_multiplier = {self.noise:g}; give more noise"
            )

    # --- at the seams of an interaction -----------------------------------------------------------

    def may_go_on(self, step: Step, plan: Plan, settle: Settle) -> str:
        """Return why the run ends before a step; empty if it may be done.

        After a roll-back that is not known yet: the sum may be the one that was released before.
        """
        why = self._why_not(self.releases.after(step.interaction))
        return why and f"{end_before(plan.steps, step)}: {why}"

    def ends_with(self, error: Exception) -> str:
        """Return why the run ends: a release would pass its limit."""
        return str(error) if isinstance(error, PrivacySpent) else ""

    def gives(self, ctx: ServerContext, common: Bundle) -> None:
        """Check that a cohort is as large as the noise of clients relies on, and note its weights.

        Raises:
            TooFewClients: it is smaller, as where clients left an open run.
        """
        least = self.experiment.min_clients
        adds_up = self.privacy.noise_at_clients and self.method.reduction == "mean"
        if adds_up and len(ctx.cohort) < least:
            raise TooFewClients(
                f"interaction {ctx.interaction + 1} has {len(ctx.cohort)} clients, and their noise "
                f"adds up from {least} on: [privacy] level ends the run before it"
            )
        self._given = common.weights

    def checks(self, ctx: ServerContext, check: CheckUpload) -> CheckUpload:
        """Look at numbers alone where clients add noise; else keep to oneself what is wrong."""
        if self.privacy.noise_at_clients:  # noise takes values beyond all other bounds
            return lambda _, upload: check_numbers(upload)

        def quietly(client: ClientId, upload: Bundle) -> None:
            try:
                check(client, upload)
            except PayloadError as error:
                log.warning("client %s, interaction %d: %s", client, ctx.interaction + 1, error)
                raise PayloadError(REFUSED) from None

        return quietly

    def leaves_out(self, at: CurrentInteraction, results: Answers) -> dict[int, str]:
        """Forget how far uploads lie from others: who counts, and records, would tell of it."""
        results.forget_measured()
        return {}

    def uploads(self, at: CurrentInteraction, uploads: Uploads) -> Uploads:
        """Return the mean with noise, or each upload with its own."""
        results = at.results
        sums = results.sums
        sent = {c: r.upload for c, r in results.by_client.items() if isinstance(c, int)}
        folded = sums[0].mean.weights if sums else results.mean
        came = {} if sums == [] else sent
        expected = self.expected(at.step, at.plan)
        return self.released(at.ctx, expected, self._given, came, folded) or uploads

    def records(self, at: CurrentInteraction, found: Reduced, record: Record) -> None:
        """Put down what is spent, ``privacy``: ``epsilon`` at ``delta`` after so many ``releases``.

        ``epsilon_renyi`` is the coarser figure of Renyi accounting. Where the bound adapts, also
        the bound here and after: ``clip`` and ``clip_next``.
        """
        of_parts(record)["privacy"] = {**self.facts}
        record["metrics"]["epsilon"] = self.facts["epsilon"]

    def tells(self, record: Record) -> Mapping[str, Any]:
        """Tell what is spent."""
        return {"privacy": of_parts(record)["privacy"]}

    def ended(self, records: Sequence[Record]) -> Mapping[str, Any]:
        """Return what the run spent, and under which assumptions."""
        if not (spent := [r["privacy"] for r in map(of_parts, records) if "privacy" in r]):
            return {}
        noise = {"noise_multiplier": self.privacy.noise_multiplier}
        whole = {**spent[-1], **self._spent(len(self.releases))}  # also of what nobody committed
        return {"privacy": {**whole, **noise, "assumes": assumptions(self.experiment)}}

    # --- what it costs ----------------------------------------------------------------------------

    def cost(self, times: int) -> float:
        """Return the epsilon of a number of releases, at the run's delta."""
        return epsilon_of(self._released(times), self.delta)

    def _spent(self, times: int) -> dict[str, Any]:
        """Return what a number of releases cost, as records have it."""
        renyi = renyi_epsilon_of(self._released(times), self.delta)
        costs = {"epsilon": self.cost(times), "epsilon_renyi": renyi}
        return {**costs, "delta": self.delta, "releases": times}

    def _released(self, times: int) -> tuple[GaussianReleases, ...]:
        """Return a number of releases, as the accountant takes them."""
        reads_each = self.method.reduction == "each"
        return releases_of_clients(self.experiment, self.noise, times, reads_each=reads_each)

    def _note(self, interaction: Interaction, content: Tensor, over: Over | None = None) -> None:
        """Write down a release, before anything of it leaves.

        Raises:
            PrivacySpent: it is another one than that of a first try, and one too many.
        """
        if not self.releases.has(interaction, content):
            why = self._why_not(len(self.releases) + 1)
            if why:
                raise PrivacySpent(why)
        self.releases.note(interaction, content, over)

    def _why_not(self, times: int) -> str:
        """Return why there may not be so many releases; empty if there may be."""
        limit, after = self.privacy.epsilon, self.cost(times)
        if limit is None or after <= limit * (1 + 1e-9):
            return ""
        return (
            f"the privacy of the run is spent: epsilon is {self.cost(len(self.releases)):.4g} at "
            f"delta {self.delta:g}, and one more interaction would make it {after:.4g}, beyond "
            f"[privacy] epsilon = {limit:g}"
        )

    # --- who takes part ---------------------------------------------------------------------------

    def expected(self, step: Step, plan: Plan) -> float:
        """Return the expected number of clients of an interaction.

        Neither who has joined nor who answers changes it: it is told without noise. Where chances
        draw clients, all have the same number of tasks.
        """
        schedule = self.experiment.schedule
        if schedule.sampling != "poisson":
            return float(len(step.cohort))
        rate = self.experiment.cohort_size / schedule.clients
        return rate * sum(takes_part(c, step.interaction, plan.aside) for c in plan.tasks)

    # --- the release ------------------------------------------------------------------------------

    def released(
        self,
        ctx: ServerContext,
        expected: float,
        given: Weights,
        sent: Mapping[int, Bundle],
        folded: Weights | None,
    ) -> Uploads | None:
        """Return what the method's server half gets in place of the uploads.

        At the server it is noise alone where nobody came, so that this does not show. Of clients
        that add the noise themselves it is None then; the interaction counts all the same.

        ``folded`` is the mean of the uploads' weights, where it was taken as they came.
        """
        of, found = contributions(self.method, ctx.run), None
        self.facts = {}
        if self.privacy.noise_at_server:
            found = self._at_server(ctx, of, expected, given, sent)
        elif sent:
            found = self._of_clients(ctx, of, given, sent, folded)
        else:
            self._note(ctx.interaction, torch.zeros(0))
        self.facts |= self._spent(self.releases.until(ctx.interaction))
        return found

    def _at_server(
        self,
        ctx: ServerContext,
        of: Contributions,
        expected: float,
        given: Weights,
        sent: Mapping[int, Bundle],
    ) -> Uploads:
        clips, noise = dict(of.clips), self.noise
        if adapts := self.privacy.clip_quantile is not None:
            clips[WEIGHTS] = self._clip_at(ctx.interaction)
            # so that all parts cost what one sum does
            noise = 1 / math.sqrt(self.noise**-2 - self._fraction_noise(expected) ** -2)
        stds, sums = noise_stds(clips, noise), of.zeros()
        if adapts:
            clips[FRACTION], stds[FRACTION] = 0.5, self._fraction_noise(expected) / 2
            sums[FRACTION] = torch.zeros(1, dtype=torch.float64)
        for upload in sent.values():
            vectors = of.vectors(upload, given)
            if adapts:
                within = float(vectors[WEIGHTS].norm() <= clips[WEIGHTS])
                vectors[FRACTION] = torch.tensor([within - 0.5], dtype=torch.float64)
            for part, vector in clipped(vectors, clips).items():
                sums[part] = sums[part] + vector
        self._note(ctx.interaction, torch.cat([*sums.values()]))
        drawn = noised(sums, stds, self.releases.secret, str(ctx.interaction))
        mean = {part: vector / expected for part, vector in drawn.items()}
        if adapts:
            share = float(mean.pop(FRACTION)) + 0.5  # who did not come counts as half within
            self._adapt(ctx.interaction, clips[WEIGHTS], min(max(share, 0.0), 1.0))
        deviations = {part: std / expected for part, std in stds.items()}
        return self._as_uploads(of, of.upload(mean, given, deviations), sent, expected)

    def _of_clients(
        self,
        ctx: ServerContext,
        of: Contributions,
        given: Weights,
        sent: Mapping[int, Bundle],
        folded: Weights | None,
    ) -> Uploads:
        """Return the mean of uploads that came with noise; or each, if the method reads each."""
        stds, is_mean = noise_stds(of.clips, self.noise), self.method.reduction == "mean"
        if is_mean:
            arrived = [folded or weighted_mean([*sent.values()], [1.0] * len(sent), len(sent))]
        else:
            arrived = [upload.weights for upload in sent.values()]
        vectors = [of.received(Bundle(weights), given) for weights in arrived]
        content = torch.cat([v for found in vectors for v in found.values()])
        over = self._over(ctx.interaction, given, sent) if is_mean else None
        self._note(ctx.interaction, content, over)
        if is_mean:
            share = noise_share(self.method, ctx.run) / math.sqrt(len(sent))
            deviations = {part: share * std for part, std in stds.items()}
            return self._as_uploads(of, of.upload(vectors[0], given, deviations), sent)
        each = {
            client: of.joined(of.upload(found, given, stds), of.rest(upload))
            for (client, upload), found in zip(sent.items(), vectors, strict=True)
        }
        return Uploads(each, alike, "each")

    def _over(self, interaction: Interaction, given: Weights, sent: Mapping[int, Bundle]) -> Over:
        """Return what a sum is over; clients' noise is the same whenever they train from the same.

        Raises:
            TooFewClients: a sum over others was released of the same training.
        """
        over = Over(state_digest([("given", Bundle(given))]), tuple(sorted(sent)))
        if others := self.releases.others(interaction, over):
            raise TooFewClients(
                f"interaction {interaction + 1} was released as a sum over {clients_text(others)}, "
                f"and now uploads of {clients_text(over.clients)} came with the same noise: both "
                "sums would tell the upload of whoever is in one of them alone; --resume goes on "
                "with the first ones"
            )
        return over

    def _as_uploads(
        self,
        of: Contributions,
        covered: Bundle,
        sent: Mapping[int, Bundle],
        expected: float | None = None,
    ) -> Uploads:
        """Return one upload that stands for all.

        Where ``[privacy] allow`` lets parts travel without noise, return one for each client: what
        the noise covers is the same in all, and the other parts are the client's own.
        """
        if not of.uncovered:
            one = {min(sent, default=0): covered}
            return Uploads(one, alike, self.method.reduction, stands_for=sent, expected=expected)
        each = {client: of.joined(covered, of.rest(u)) for client, u in sent.items()}
        return Uploads(each, alike, self.method.reduction, expected=expected)

    # --- the bound that adapts --------------------------------------------------------------------

    def _clip_at(self, interaction: Interaction) -> float:
        """Return the bound of an interaction: the config's, then what the one before it left."""
        if interaction - 1 not in self._clips:
            record = self.store.ledger.record(Interaction(interaction - 1)) if interaction else None
            told = of_parts(record).get("privacy", {}) if record else {}
            return float(told.get("clip_next", self.privacy.clip))
        return self._clips[interaction - 1]

    def _adapt(self, interaction: Interaction, clip: float, within: float) -> None:
        """Let the bound of the weights follow the share of clients that lie within it."""
        assert self.privacy.clip_quantile is not None, "it adapts"
        following = clip * math.exp(-RATE * (within - self.privacy.clip_quantile))
        self._clips = {interaction: following}
        self.facts = {"clip": clip, "clip_next": following}

    def _fraction_noise(self, expected: float) -> float:
        """Return the noise multiplier of the fraction.

        It is a tenth of the clients, as in the paper, and at least three times the run's.
        """
        return max(expected / 10, 3 * self.noise)


def check_private_rounds(plan: Plan, experiment: Experiment) -> None:
    """Check that a run can keep what ``[privacy] level = "client"`` promises.

    Raises:
        ConfigError: says what stands against it.
    """
    method, privacy, schedule = plan.method, experiment.privacy, experiment.schedule
    assert privacy is not None, "there is something to hide"
    of = contributions(method, plan.run)
    if not of.clips:
        raise ConfigError(
            "[privacy] has nothing to hide: no weights, prototypes or histograms are part of every "
            f"upload of method {method.name!r}"
        )
    if method.reduction == "each" and not privacy.noise_at_clients:
        raise ConfigError(
            f"method {method.name!r} reads uploads one by one, and noise at the server covers "
            'their sum alone: [privacy] where = "clients" adds all of the noise to each upload'
        )
    if privacy.clip_quantile is not None and WEIGHTS not in of.clips:
        raise ConfigError("[privacy] clip_quantile follows weights, and the method sends none")
    if schedule.sampling == "poisson" and len({*plan.tasks.values()}) > 1:
        raise ConfigError(
            '[privacy] with sampling = "poisson" needs the same number of tasks at all clients'
        )
    if schedule.sampling == "poisson" and privacy.noise_at_server and of.uncovered:
        raise ConfigError(
            f'[privacy] with sampling = "poisson" hides who takes part, and {of.uncovered[0]} of '
            f"method {method.name!r} has no noise and would tell: leave out sampling"
        )
    check_allowed(method.name, [*told(plan, experiment), *of.uncovered], privacy.allow)
    if privacy.noise_at_clients:
        _check_noise_of_clients(plan, experiment)


def told(plan: Plan, experiment: Experiment) -> list[str]:
    """Return the names of what clients tell beside uploads."""
    views = {*experiment.evaluate.views} & {*plan.method.views}
    metrics = bool(reported(plan.method, plan.run)) or bool(plan.wire.tells - SPENT)
    scores = bool(views) or experiment.guards_models
    return told_beside(experiment, scores=scores, metrics=metrics)


def _check_noise_of_clients(plan: Plan, experiment: Experiment) -> None:
    if plan.method.reduction == "each":
        if experiment.privacy is not None and experiment.privacy.differs("colluders"):
            raise ConfigError(
                f"[privacy] colluders does nothing with method {plan.method.name!r}: it reads "
                "uploads one by one, and each has all of the noise"
            )
        return
    least = experiment.min_clients
    if few := next((s for s in plan.steps if len(s.cohort) < least), None):
        raise ConfigError(
            f'[privacy] where = "clients": interaction {few.interaction + 1} has '
            f"{len(few.cohort)} clients, and the noise adds up from {least} on; give [server] "
            "min_clients, or all clients the same number of tasks"
        )
