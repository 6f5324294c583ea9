"""What noise covers of a method's uploads, and the upload as it leaves a client that adds noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from fedmodels.config.privacy import masks_of
from fedmodels.numerics.secrecy import Secret
from fedmodels.privacy.contributions import Contributions
from fedmodels.privacy.mechanism import leaving
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.training.method import Method
from fedmodels.training.run import RunFacts
from fedmodels.training.wire import SharedPart


def contributions(method: Method, run: RunFacts) -> Contributions:
    """Return what the noise of a run covers."""
    privacy = run.experiment.privacy
    assert privacy is not None, "there is nothing to hide"
    return Contributions(privacy, method.upload_spec(run), run.problem.num_classes)


@dataclass(frozen=True)
class NoiseOfClients(SharedPart):
    """Clients add noise to what leaves them: it travels as vectors."""

    covered: Contributions

    @classmethod
    def of(cls, method: Method, run: RunFacts) -> Self:
        """Return what the noise of a run covers."""
        return cls(contributions(method, run))

    def upload_spec(self, upload: BundleSpec) -> BundleSpec:
        """Return the specification of an upload with noise."""
        return self.covered.sent_spec


def alike(upload: Bundle) -> float:
    """Return 1: in a sum of bounded parts every upload counts alike."""
    return 1.0


def count_of(method: Method, run: RunFacts) -> Callable[[Bundle], float]:
    """Return the function that gives what an upload counts in the mean."""
    privacy = run.experiment.privacy
    hides = privacy is not None and privacy.hides_clients
    return alike if hides else method.count


def noise_share(method: Method, run: RunFacts) -> float:
    """Return the part of the noise's standard deviation that each client adds.

    The noise of the fewest uploads that an interaction may end with adds up to all of it. Where
    the server reads single uploads, each has all of it.
    """
    fewest = 1 if method.reduction == "each" else run.experiment.min_clients
    return 1 / math.sqrt(fewest)


def noise_of_client(method: Method, run: RunFacts, colluders: int | None = None) -> float:
    """Return the noise multiplier that hides a client in what others see of its upload.

    It is that of the client's own noise, which it knows to be there. Where it checks by their
    certificates who the others of a sum are, and says how many of them may be ``colluders``, that
    of all others counts as well. Noise at the server is a matter of trust, and so counts whole.
    """
    experiment, privacy = run.experiment, run.experiment.privacy
    assert privacy is not None, "there is something to hide"
    if privacy.noise_at_server:
        return privacy.noise
    own, masks = privacy.noise * noise_share(method, run), masks_of(privacy)
    if colluders is None or masks is None or not masks.signs or method.reduction == "each":
        return own
    return own * math.sqrt(max(1, experiment.fewest_summed - colluders))


def with_own_noise(
    method: Method, run: RunFacts, upload: Bundle, payload: Bundle, secret: Secret, release: str
) -> Bundle:
    """Return an upload as it leaves a client that adds noise.

    ``release`` is the name of the training's release. Its noise is of no use to take off that of
    another one, as of the same upload under other settings.
    """
    share = noise_share(method, run)
    return leaving(contributions(method, run), upload, payload, share, secret, release)
