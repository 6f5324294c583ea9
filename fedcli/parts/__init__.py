"""The parts of a client: each is one capability that a config can leave out.

The order of ``PARTS`` is the order at every seam (:class:`fedcli.runtime.client_part.ClientPart`):
what is live is offered before a training moves the net, noise is added before a difference is
compressed, and masks come last. A module is imported where the config asks for it, and not before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fedcli.runtime.client_part import Client, ClientPart
from fedmodels.tensors.bundle import EVALUATOR
from fedmodels.training.wire import part_at

IsOn = Callable[[Client], bool]
PARTS: Sequence[tuple[str, IsOn]] = (
    ("open_runs:OpenRuns", lambda c: c.experiment.schedule.open),
    ("privacy.examples:ExamplePrivacy",
     lambda c: c.experiment.privacy is not None and c.experiment.privacy.hides_examples),
    ("privacy.clients:ClientPrivacy",
     lambda c: c.experiment.privacy is not None and c.experiment.privacy.hides_clients),
    ("kept_models:FinalModel", lambda c: c.client != EVALUATOR),
    ("deployment:Deployment",
     lambda c: c.experiment.deploy is not None and c.client != EVALUATOR),
    ("drift:DriftMeter", lambda c: c.experiment.evaluate.drift),
    ("compression:Compressed",
     lambda c: (t := c.experiment.compression) is not None and t.changes_tensors),
    ("secure_client:SecureSums",
     lambda c: c.experiment.secure_sum is not None and c.client != EVALUATOR),
    ("probabilities:ProbabilityScores",
     lambda c: c.experiment.evaluate.probabilities and c.client != EVALUATOR),
    ("pictures:Pictures",
     lambda c: isinstance(c.client, int) and c.client < c.experiment.evaluate.pictures),
)  # fmt: skip
"""The module and class of each part, and whether a client has it."""


def parts_of(client: Client) -> list[ClientPart]:
    """Return the parts of a client that its run asks for.

    Raises:
        ConfigError: this installation lacks one of them, or the client cannot take part.
    """
    return [part_at(f"fedcli.parts.{place}")(client) for place, is_on in PARTS if is_on(client)]
