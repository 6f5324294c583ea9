"""A client's half of ``[compression]``: differences leave, and what they leave out is owed."""

from __future__ import annotations

from fedcli.runtime.client_part import ClientPart, Training
from fedmodels.tensors.bundle import Bundle
from fedmodels.training.compression import Compression


class Compressed(ClientPart):
    """Packs what leaves, and keeps the residual."""

    def leaves(self, half: Training, upload: Bundle) -> Bundle:
        """Return an upload in the run's form."""
        form = self.client.set_up.wire.part(Compression)
        packed, residual = form.returned_by(upload, half.payload, half.kept)
        half.sections.update(residual)
        return packed
