"""What a relay does with a result: checks it, tells the coordinator above, keeps the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fedmodels.errors import PayloadError
from fedmodels.tensors.bundle import Bundle, ClientId
from fedmodels.tensors.differences import STATISTICS, WEIGHTS, Measured
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.cohort import Answer
from fedsrv.relay.cohort import RelayCohort
from fedsrv.relay.uplink import CallFailed, Uplink, meaning_of
from fedsrv.transport.gate import Gate
from fedsrv.transport.inbox import Inbox, Push
from fedsrv.transport.open_trip import OpenTrip
from fedsrv.transport.sessions import NotReady, UnknownSession


class RelayInbox(Inbox):
    """Passes results on. The weights of a group stay here until their sum goes up.

    A client is answered once the coordinator above has taken all but its weights. It keeps its
    upload until the interaction is committed, so a relay that dies loses nothing.
    """

    def __init__(self, cohort: RelayCohort, gate: Gate, uplink: Uplink) -> None:
        super().__init__(cohort, gate)
        self.clients, self.uplink = cohort, uplink

    def _refuse(self, client: ClientId, trip: OpenTrip, push: Push, reason: str) -> None:
        self._tell(client, push.header, Bundle(), failure=reason)
        self.clients.told(client, trip, None, reason)

    def _accept(self, client: ClientId, trip: OpenTrip, push: Push, outcome: Answer | str) -> None:
        if isinstance(outcome, str):
            return self._refuse(client, trip, push, outcome)
        group = self.clients.group_for(client, trip)
        assert group is None or outcome.measured is not None, "a group trains"
        upload = outcome.upload if group is None else replace(outcome.upload, weights={})
        try:
            known = self._tell(
                client, push.header, upload, measured=outcome.measured if group else None
            )
        except PayloadError as error:
            self.clients.told(client, trip, group, f"its upload was refused: {error}")
            raise
        except (NotReady, UnknownSession):  # the client brings it again, maybe after joining anew
            self.clients.not_told(client, group)
            raise
        except Exception as error:
            self.clients.told(client, trip, group, str(error))
            raise
        late = "the coordinator above had its result before"
        self.clients.told(client, trip, group, late if known and group else outcome)
        return None

    def take_sum(self, clients: Sequence[ClientId], push: Push, context: Any) -> rpc.PushResponse:
        """Refuse a sum: no relay stands behind this one.

        Raises:
            PayloadError: always.
        """
        raise PayloadError("a relay takes no sums: each client brings its own upload")

    def _tell(
        self,
        client: ClientId,
        header: rpc.PushHeader,
        upload: Bundle,
        *,
        measured: Measured | None = None,
        failure: str = "",
    ) -> bool:
        """Tell the coordinator above of a result; return whether it had it before.

        Args:
            client: whose result.
            header: what it began with.
            upload: what goes up.
            measured: how far the weights lie that stay here for a sum; None if nothing stays.
            failure: why there is no upload.

        Raises:
            Exception: what its answer means for the client's call.
        """
        told = rpc.PushHeader(
            client_id=header.client_id, token=header.token, kind=header.kind,
            interaction=header.interaction, trip=header.trip, report=header.report,
            failure=failure, summed=measured is not None,
        )  # fmt: skip
        if measured is not None:
            told.distance.weights = measured.norms.get(WEIGHTS, 0.0)
            told.distance.statistics = measured.norms.get(STATISTICS, 0.0)
        try:
            return self.uplink.push(told, upload).repeated_upload
        except CallFailed as error:
            raise meaning_of(error) from None
