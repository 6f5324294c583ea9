"""A client whose noise hides the whole of it (``[privacy] level = "client"``)."""

from __future__ import annotations

from collections.abc import Iterable

from fedcli.gate.gate import NOISED, TRUSTED
from fedcli.parts.privacy import FAILED, blur
from fedcli.parts.privacy.floor import FloorLedger
from fedcli.runtime.client_part import Client, ClientPart, Training
from fedmodels.errors import PayloadError
from fedmodels.privacy.accounting import GaussianReleases
from fedmodels.privacy.ledger import Charge
from fedmodels.tensors.bundle import Bundle
from fedmodels.training.asked import bare_views
from fedmodels.training.private_uploads import contributions, noise_of_client, with_own_noise
from fedpb.v1 import coordinator_pb2 as rpc


class ClientPrivacy(ClientPart):
    """Adds the client's share of the noise, and charges what the site itself counts.

    The client takes part for certain, as it cannot check with what chance it was drawn.
    """

    hides = True

    def __init__(self, client: Client) -> None:
        """Take the site's floor, where it has one."""
        super().__init__(client)
        self._floor: FloorLedger | None = client.brought.get("floor")

    def follows(self, order: rpc.Order) -> None:
        """Refuse to score a model that no noise covers, where the site counts.

        Raises:
            PayloadError: the order asks for that; nothing is trained.
        """
        if self._floor is None:
            return
        for view in order.views:
            if view in bare_views(self.client.method, self.client.run):
                raise PayloadError(
                    f"an order to score {view}, a model that was trained here without noise"
                )

    def begins(self, half: Training) -> None:
        """Check that a training keeps within the site's floor."""
        if self._floor is not None:
            self._floor.check(self._charge(half), self.client.states.path)

    def charges(self, half: Training) -> None:
        """Charge a training in the site's ledger."""
        if self._floor is not None:
            self._floor.note(self._charge(half, half.made), self.client.states.path)

    def fails(self, half: Training) -> None:
        """Charge a training that failed, as whether it does may be asked with any payload."""
        if self._floor is not None:
            self._floor.note(self._charge(half, FAILED), self.client.states.path)

    def tries(self, order: rpc.Order) -> None:
        """Refuse a training for a score alone where the site counts."""
        if self._floor is not None:
            raise PayloadError("an order to train for a score, which nobody would charge")

    def _charge(self, half: Training, made: str = "") -> Charge:
        assert self._floor is not None, "there is something to charge"
        client, order, secret = self.client, half.order, self.client.states.secret()
        noise = noise_of_client(client.method, client.run, self._floor.floor.colluders)
        what = f"client {order.client_id}, round {order.round + 1}, task {order.task}"
        name, made = half.release.name(secret), secret.keyed(made) if made else ""
        return Charge(name, (GaussianReleases(noise),), what=what, made=made)

    def leaves(self, half: Training, upload: Bundle) -> Bundle:
        """Return an upload with noise, where clients add it."""
        client, secret = self.client, self.client.states.secret
        privacy = client.run.experiment.privacy
        if privacy is None or not privacy.noise_at_clients:
            return upload
        name = half.release.name(secret())
        return with_own_noise(client.method, client.run, upload, half.payload, secret(), name)

    def covers(self, half: Training, upload: Bundle) -> Iterable[tuple[str, str]]:
        """Return what the client's noise covers, or what the server is trusted to cover."""
        experiment = self.client.experiment
        privacy = experiment.privacy
        how = NOISED if privacy is not None and privacy.noise_at_clients else TRUSTED
        known = contributions(self.client.method, self.client.run).covered_keys
        return [(key, how) for key in upload.by_key() if key in known]

    def reports(self, order: rpc.Order, report: rpc.Report) -> None:
        """Blur what tells of the client."""
        blur(self.client, order, report)
