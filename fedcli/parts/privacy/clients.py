"""A client whose noise hides the whole of it (``[privacy] level = "client"``)."""

from __future__ import annotations

from collections.abc import Iterable

from fedcli.gate.gate import NOISED, TRUSTED
from fedcli.parts.privacy import coarse
from fedcli.parts.privacy.floor import FloorLedger, charge_of_client
from fedcli.runtime.client_part import Client, ClientPart, Training
from fedmodels.privacy.ledger import Charge
from fedmodels.tensors.bundle import Bundle
from fedmodels.training.private_uploads import contributions, with_own_noise
from fedpb.v1 import coordinator_pb2 as rpc


class ClientPrivacy(ClientPart):
    """Adds the client's share of the noise, and charges what the site itself counts."""

    hides = True

    def __init__(self, client: Client) -> None:
        """Take the site's floor, where it has one."""
        super().__init__(client)
        self._floor: FloorLedger | None = client.brought.get("floor")

    def begins(self, half: Training) -> None:
        """Check that a training keeps within the site's floor."""
        if self._floor is not None:
            self._floor.check(self._charge(half))

    def charges(self, half: Training) -> None:
        """Charge a training in the site's ledger."""
        if self._floor is not None:
            self._floor.note(self._charge(half))

    def _charge(self, half: Training) -> Charge:
        client, order = self.client, half.order
        is_history = client.method.trains_on == "history"
        contents = client.stream.contents(order.task, up_to=is_history)
        given, secret = (half.payload, half.state), client.states.secret()
        return charge_of_client(client.method, client.run, order, given, contents, secret)

    def leaves(self, half: Training, upload: Bundle) -> Bundle:
        """Return an upload with noise, where clients add it."""
        client = self.client
        return with_own_noise(
            client.method, client.run, upload, half.payload, client.states.secret,
            half.ctx.interaction,
        )  # fmt: skip

    def covers(self, half: Training, upload: Bundle) -> Iterable[tuple[str, str]]:
        """Return what the client's noise covers, or what the server is trusted to cover."""
        experiment = self.client.experiment
        privacy = experiment.privacy
        how = NOISED if privacy is not None and privacy.noise_at_clients else TRUSTED
        known = contributions(self.client.method, self.client.run).covered_keys
        return [(key, how) for key in upload.by_key() if key in known]

    def reports(self, order: rpc.Order, report: rpc.Report) -> None:
        """Blur what tells of the client: a guess at its state cannot be checked."""
        if order.kind == rpc.ORDER_KIND_TRAIN:
            report.seconds = coarse(report.seconds)
        if report.state_sha256:
            report.state_sha256 = self.client.states.secret().keyed(report.state_sha256)
