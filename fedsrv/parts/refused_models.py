"""The models that clients keep from going live, as their reports tell (``[deploy]``).

What is live at a client does not go back where a run does, so no record of a run has it.
"""

from __future__ import annotations

from fedmodels.console.printable import text_of
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.cohort import Answers
from fedsrv.engine.server_part import ServerPart

LOSS = "its loss on the client's own examples is not finite, or larger than the live one's"


class RefusedModels(ServerPart):
    """Tells of each model that a client's guard refused, whoever asked the client to serve."""

    def answered(self, results: Answers) -> None:
        """Tell what answers say of refused models."""
        for client, answer in results.by_client.items():
            if answer.report.HasField("refused_model"):
                refused, of_targets = answer.report.refused_model, bool(self.experiment.targets)
                line = line_of(client, refused, of_targets=of_targets)
                self.events.tell("refused", client, line=line)


def line_of(client: object, refused: rpc.RefusedModel, *, of_targets: bool = False) -> str:
    """Return what people read of a refused model."""
    line = f"client {client} does not serve its model of round {refused.round + 1}: "
    if not refused.HasField("accuracy"):
        return line + (LOSS if of_targets else "its outputs are not finite")
    line += f"it names {text_of(refused.accuracy, 'percent')} of the client's own examples rightly"
    live = f", the live one {text_of(refused.live, 'percent')}" if refused.HasField("live") else ""
    return line + live
