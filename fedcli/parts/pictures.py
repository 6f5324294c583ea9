"""Pictures of what a client learnt, drawn into its own directory: they show its private data."""

from __future__ import annotations

import logging

import torch

from fedcli.runtime.client_part import Client, ClientPart
from fedmodels.parts.pictures import pictures_of
from fedmodels.tensors.bundle import Bundle
from fedmodels.training.contexts import ClientContext
from fedpb.v1 import coordinator_pb2 as rpc

log = logging.getLogger(__name__)


class Pictures(ClientPart):
    """Draws what the method shows of the client's last model, at the end of the run."""

    @classmethod
    def is_for(cls, client: Client) -> bool:
        """Tell whether the client is among the first ones, of whom pictures are asked."""
        return (
            isinstance(client.client, int) and client.client < client.experiment.evaluate.pictures
        )

    def final(self, order: rpc.Order, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        """Draw into the client's state directory; a fault is no reason to lose a run."""
        try:
            self._draw(ctx, payload, state)
        except Exception as error:
            log.warning("client %s drew no picture: %s", self.client.client, error)

    def _draw(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        client, stream = self.client, self.client.stream
        known = ctx.at.task + 1
        stream.meet(known)
        tests = [stream.test(task) for task in stream.counted(0, known)]
        x, y = (torch.cat(parts) for parts in zip(*tests, strict=True))
        client.net.eval()
        found = pictures_of(client.method, ctx, payload, state, x, y)
        if not found:
            return
        from fedcli.parts.drawing import draw  # charts, where there is something to draw

        for name, picture in found.items():
            path = client.states.path / "pictures" / f"{name}.svg"
            draw(picture, path, client.data.class_names)
