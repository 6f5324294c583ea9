"""What a relay does with a result: it tells the coordinator above, and keeps the weights."""

from __future__ import annotations

from dataclasses import replace

from fedmodels.errors import PayloadError
from fedmodels.tensors.bundle import Bundle, ClientId
from fedmodels.tensors.differences import STATISTICS, WEIGHTS
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.cohort import Answer
from fedsrv.relay.trips import RelayedTrips
from fedsrv.relay.uplink import CallFailed, Uplink, meaning_of
from fedsrv.transport.inbox import Push
from fedsrv.transport.open_trip import OpenTrip
from fedsrv.transport.sessions import NotReady, UnknownSession


class PassedOn:
    """Passes checked results on. The weights of a group stay here until their sum goes up.

    A client is answered once the coordinator above has taken all but its weights. It keeps its
    upload until the interaction is committed, so a relay that dies loses nothing.
    """

    takes_sums = False

    def __init__(self, trips: RelayedTrips, uplink: Uplink) -> None:
        self.trips, self.uplink = trips, uplink

    def refuse(self, client: ClientId, trip: OpenTrip, push: Push, reason: str) -> None:
        """Tell the coordinator above that a client failed, as its upload is refused."""
        self._tell(push.header, Bundle(), failure=reason)
        self.trips.told(client, trip, None, reason)

    def accept(self, client: ClientId, trip: OpenTrip, push: Push, outcome: Answer | str) -> None:
        """Tell the coordinator above of a result, or of the reason of a failure."""
        if isinstance(outcome, str):
            return self.refuse(client, trip, push, outcome)
        group = self.trips.group_for(client, trip)
        try:
            known = self._tell(push.header, outcome.upload, stays=outcome if group else None)
        except PayloadError as error:
            self.trips.told(client, trip, group, f"its upload was refused: {error}")
            raise
        except (NotReady, UnknownSession):  # the client brings it again, maybe after joining anew
            self.trips.not_told(client, group)
            raise
        except Exception as error:
            self.trips.told(client, trip, group, str(error))
            raise
        late = "the coordinator above had its result before"
        self.trips.told(client, trip, group, late if known and group else outcome)
        return None

    def _tell(
        self,
        header: rpc.PushHeader,
        upload: Bundle,
        *,
        stays: Answer | None = None,
        failure: str = "",
    ) -> bool:
        """Tell the coordinator above of a result; return whether it had it before.

        Args:
            header: what it began with. All of it goes up, but for what a relay alone may say.
            upload: what goes up.
            stays: the answer whose weights stay here for a sum; None if nothing stays.
            failure: why there is no upload.

        Raises:
            Exception: what its answer means for the client's call.
        """
        told = rpc.PushHeader()
        told.CopyFrom(header)
        for field in ("bundle", "members", "distance"):
            told.ClearField(field)
        told.failure, told.summed = failure, stays is not None
        if stays is not None:
            assert stays.measured is not None, "a group trains"
            norms, upload = stays.measured.norms, replace(upload, weights={})
            told.distance.weights = norms.get(WEIGHTS, 0.0)
            told.distance.statistics = norms.get(STATISTICS, 0.0)
        try:
            return self.uplink.push(told, upload).repeated_upload
        except CallFailed as error:
            raise meaning_of(error) from None
