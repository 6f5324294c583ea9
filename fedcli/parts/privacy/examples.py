"""What a client spends of its examples' privacy, beside its state: checked, charged, and told."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedcli.gate.gate import NOISED
from fedcli.parts.privacy import FAILED, blur
from fedcli.parts.privacy.floor import FloorLedger
from fedcli.parts.privacy.ledger_marks import LedgerMark
from fedcli.runtime.client_part import Client, ClientPart, Training
from fedmodels.errors import ArchiveError, OrderDeclined, PayloadError
from fedmodels.privacy.ledger import Charge, PrivacyLedger
from fedmodels.tensors.bundle import Bundle, ClientId
from fedmodels.training.private_steps import HiddenExamples, check_looks
from fedmodels.training.private_uploads import contributions
from fedpb.v1 import coordinator_pb2 as rpc

NAME = "privacy.db"
"""The file in the state directory of a client that hides its examples."""
OF_DATA = ("fill",)
"""What a description says of how files are cut that follows from the examples themselves."""


class ExamplePrivacy(ClientPart):
    """Refuses a training that would spend too much, and tells what was spent."""

    hides = True

    def __init__(self, client: Client) -> None:
        """Open nothing yet."""
        super().__init__(client)
        floor: FloorLedger | None = client.brought.get("floor")
        check_looks(client.method)  # for a score alone as well, which nobody charges
        self._spending = Spending(client.client, client.states.path, floor)

    def begins(self, half: Training) -> None:
        """Let the training be checked once its examples are known, before its first step."""
        half.ctx.may_train = lambda hidden: self._spending.check(half.order, hidden, self._cut)

    def tries(self, order: rpc.Order) -> None:
        """Refuse a training for a score alone."""
        raise PayloadError("an order to train for a score, which nobody would charge")

    def charges(self, half: Training) -> None:
        """Charge a training that has hidden its examples."""
        if half.ctx.hidden is not None:
            half.figures |= self._spending.note(half.order, half.ctx.hidden, self._cut, half.made)

    def fails(self, half: Training) -> None:
        """Charge a training that failed, as whether it does may be asked with any payload."""
        if half.ctx.hidden is not None:
            self._spending.note(half.order, half.ctx.hidden, self._cut, FAILED)

    def covers(self, half: Training, upload: Bundle) -> Iterable[tuple[str, str]]:
        """Return what follows from private steps and private prototypes."""
        known = contributions(self.client.method, self.client.run).covered_keys
        return [(key, NOISED) for key in upload.by_key() if key in known]

    def reports(self, order: rpc.Order, report: rpc.Report) -> None:
        """Blur what tells of the client's examples."""
        blur(self.client, order, report)

    def close(self) -> None:
        """Close the ledger."""
        self._spending.close()

    @property
    def _cut(self) -> str:
        """How the client's examples were cut of files."""
        return cut_of(self.client.data.file.transform, self.client.data.file.input_shape)


class Spending:
    """The spending of one client."""

    def __init__(self, client: ClientId, directory: Path, floor: FloorLedger | None) -> None:
        """Open nothing yet; the client's state is in the directory.

        ``floor`` is what the site itself requires, where it requires something.
        """
        self.client, self.path, self._floor = client, directory / NAME, floor
        self._ledger: PrivacyLedger | None = None
        self._mark = LedgerMark(directory, "run", "trainings")

    def check(self, order: rpc.Order, hidden: HiddenExamples, cut: str) -> None:
        """Check that a training keeps within the run's epsilon.

        Raises:
            OrderDeclined: it would spend more; says how much.
            ArchiveError: what was spent before cannot be told.
        """
        charge, privacy = charge_of(self.client, order, hidden, cut), hidden.privacy
        try:
            self._opened(order).check(charge, privacy.epsilon, privacy.chance)
        except OrderDeclined as error:
            raise OrderDeclined(
                f"{error}, which is [privacy] epsilon (client {self.client}, task {order.task})"
            ) from None
        if self._floor is not None:
            self._floor.check(charge, self.path.parent)

    def note(
        self, order: rpc.Order, hidden: HiddenExamples, cut: str, made: str
    ) -> dict[str, float]:
        """Charge a training before anything of it leaves; return what the client tells of it.

        ``made`` is a digest of its upload.

        Raises:
            OrderDeclined: it would spend more than the run's epsilon.
            ArchiveError: the file cannot be written.
        """
        charge, privacy = charge_of(self.client, order, hidden, cut, made), hidden.privacy
        ledger = self._opened(order)
        if self._floor is not None:
            self._floor.note(charge, self.path.parent)
        ledger.note(charge, privacy.epsilon, privacy.chance)
        self._mark.set(ledger)
        spent, after = ledger.epsilons_after(privacy.chance, charge)
        return {"epsilon": spent, "epsilon_next": after}

    def _opened(self, order: rpc.Order) -> PrivacyLedger:
        if self._ledger is None:
            if order.base >= 0 and not self.path.exists():
                raise ArchiveError(
                    f"{self.path} is gone: what client {self.client} has spent of its examples' "
                    "privacy cannot be told; put a copy of it back"
                )
            ledger = PrivacyLedger(self.path, "example")
            self._mark.check(ledger)
            self._ledger = ledger
        return self._ledger

    def close(self) -> None:
        """Close the file; it is opened again when it is needed."""
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None


def charge_of(
    client: ClientId, order: rpc.Order, hidden: HiddenExamples, cut: str, made: str = ""
) -> Charge:
    """Return what a training that hides its examples is charged for."""
    what = f"client {client}, round {order.round + 1}, task {order.task}"
    releases = hidden.releases(hidden.noise, 1)
    return Charge(hidden.name, releases, hidden.contents, cut, what, made)


def cut_of(transform: Mapping[str, Any] | None, input_shape: tuple[int, ...]) -> str:
    """Return how examples were cut of files, in a text that does not follow from the examples."""
    how = {k: v for k, v in (transform or {}).items() if k not in OF_DATA}
    return json.dumps([how, input_shape], sort_keys=True)
