"""All times of the programs: what each of them decides, and how long it is.

They are of two kinds. Of what others get, a slow site may need more: ``FEDTIDE_PATIENCE=4`` in the
environment of a process makes all of these four times as long. Nothing else hangs on how often
something is looked at, or told.

Times that a run's records depend on are in its config: ``[server] deadline_s`` is one.
"""

from __future__ import annotations

import math
import os

from fedmodels.errors import ConfigError

VARIABLE = "FEDTIDE_PATIENCE"
LEAST, MOST = 0.01, 1000


def _patience(said: str) -> float:
    """Return how many times as long others get; NaN where what was said is no such number."""
    try:
        number = float(said)
    except ValueError:
        return math.nan
    if not LEAST <= number <= MOST:
        return math.nan
    return int(number) if number == int(number) else number


_said = _patience(os.environ.get(VARIABLE) or "1")
PATIENCE = 1 if math.isnan(_said) else _said
"""How many times as long others get."""


def check() -> None:
    """Check what the environment says of times; ConfigError if it is no good."""
    if math.isnan(_said):
        raise ConfigError(
            f"{VARIABLE} is {os.environ[VARIABLE][:20]!r}: it is how many times as long others are "
            f"waited for, a number from {LEAST} to {MOST}"
        )


SLOWEST_BYTES_PER_S = (16 << 10) / PATIENCE
"""Of the slowest link that is of use: what is sent over it has this time for its bytes."""


def transfer_s(num_bytes: float) -> float:
    """Return how long the slowest link that is of use takes for so many bytes, in seconds."""
    return num_bytes / SLOWEST_BYTES_PER_S


# --- what others get ------------------------------------------------------------------------------

KEEPALIVE_MS = round(20_000 * PATIENCE)
"""A silent link is pinged, a client's or a relay's."""
KEEPALIVE_TIMEOUT_MS = round(10_000 * PATIENCE)
"""A ping without answer ends the link; who pinged connects again."""
CERTIFICATE_SHOWN_S = 5.0 * PATIENCE
"""With `--tls-crl` or `--up-crl`: the server shows its certificate within it, or gRPC judges it
alone."""
HEAD_S = 15 * PATIENCE
"""A connection to `serve-model` or to a page ends that has brought no whole request line with
headers."""
SLOW_READER_S = 90.0 * PATIENCE
"""A connection ends whose request came so long ago and is not answered, or its answer not taken."""
LEDGER_WAIT_S = 60.0 * PATIENCE
"""A process that writes a privacy ledger waits for another one that does."""
RUN_LEAVING_S = 30.0 * PATIENCE
"""A queue, or a site that stays, ends the process of a run that has not ended after SIGTERM."""
LAST_SPANS_S = 10.0 * PATIENCE
"""A process that ends waits no longer for a collector of traces."""
DOCTOR_S = 5 * PATIENCE
"""`doctor --server` gives up on an address that does not answer."""
DRAIN_S = 20.0 * PATIENCE
"""An interaction under way is abandoned after SIGTERM."""
LAST_WORDS_S = 5.0 * PATIENCE
"""What is left to say at the end is dropped."""
LOOKING_S = 60.0 * PATIENCE
"""A launch ends unless CUDA has said which GPUs there are."""
CLIENTS_LEAVING_S = 10.0 * PATIENCE
"""`launch` ends clients that are still there."""
REACHED_S = 5.0 * PATIENCE
"""Nothing answers at a Ray cluster's address."""
CONNECTED_S = 60.0 * PATIENCE
"""What answers there does not answer as Ray does."""
RAY_LEAVING_S = 10.0 * PATIENCE
"""`launch` waits no longer for Ray to end what runs."""
LEFT_OUT_S = 15.0 * PATIENCE
"""A client that its relay left out of its sum has failed, and the relay is named; the time of its
upload is added, once to the relay and once from there."""
SUM_S = 90.0 * PATIENCE
"""Clients fail whose relay brings no sum once all have answered; the time of the sum is added."""
QUIET_S = 15.0 * PATIENCE
"""A relay asks again for orders of which only some have come; the time of one message is added."""
CHECK_S = 1.0 * PATIENCE
"""A relay that starts says that the coordinator is away."""
JOIN_S = 60.0 * PATIENCE
"""A relay tells a client that joins that the coordinator is away."""
BEAT_S = 5.0 * PATIENCE
"""A relay tells a client that beats that the coordinator is away."""
LEAVE_S = 2.0 * PATIENCE
"""A client that leaves waits no longer for the answer, and a relay passes it on no longer."""
SLURM_ANSWER_S = 60.0 * PATIENCE
"""A command of Slurm fails."""
CLOSE_S = 60.0 * PATIENCE
"""A run ends without a tracker that does not close."""
FIRST_MESSAGE_S = 30.0 * PATIENCE
"""A call that has said nothing ends."""
FIRST_UPLOAD_S = 300.0 * PATIENCE
"""A `Push` or `PushSeveral` that has brought no message ends."""
REPLACED_S = 5.0 * PATIENCE
"""A call whose place another one takes must have ended."""
PUSH_S = 60.0 * PATIENCE
"""An upload, or a relay's sum, has this time, and that of its size."""
FAILED_S = 5.0 * PATIENCE
"""Clients have left a run that failed."""
LEASE_S = 15.0 * PATIENCE
"""A client that neither waits nor was heard of counts as gone; at the end of a run, and where it is
resumed, clients are waited for as long."""
KEEPALIVE_S = 15.0 * PATIENCE
"""A silent link is pinged by the coordinator or relay."""
ANSWERED_S = 10.0 * PATIENCE
"""Such a ping without answer ends the link."""
CONNECT_S = 10.0 * PATIENCE
"""`status` and `watch` give up on a silent coordinator."""
HEALTH_S = 5.0 * PATIENCE
"""`health` gives up on a silent coordinator."""
REFUSED_S = 1.0 * PATIENCE
"""`status` and `watch` give up on a port that refuses."""
QUERY_S = 600 * PATIENCE
"""A query `*.sql` that takes longer is stopped."""
DOWNLOAD_S = 20.0 * PATIENCE
"""A download of a data set without a byte fails."""
ENROL_S = 20.0 * PATIENCE
"""`enrol` gives up on a silent authority."""
LOCK_S = 30.0 * PATIENCE
"""A change of a client's live model waits no longer for that of another process."""
PATIENCE_S = 600.0 * PATIENCE
"""A client whose order still fails for want of room ends, as one that died."""
BODY_S = 15.0 * PATIENCE
"""A request whose body has not come gets 408."""
ANSWER_S = 30.0 * PATIENCE
"""A request without an answer gets 503."""
LAST_ANSWERS_S = 10 * PATIENCE
"""`serve-model` that was stopped waits no longer for answers under way."""

# --- how often something is looked at or told, and limits of the machine itself -------------------

OPEN_DEADLINE_S = 3600.0
"""An open run that does not give `min_clients` goes on with the clients that have answered."""
SLACK_S = 2
"""`serve-model` that was stopped ends so long after its last answers, whatever its threads do."""
WANTED_LOOK_S = 1.0
"""A queue looks whether the run that it serves was withdrawn."""
LONG_S = 600.0
"""Work that will take longer is told beforehand."""
FRESH_S = 1.0
"""The live page reads records again at the earliest."""
WATCHED_S = 5.0
"""A live page that was asked for within this time is open: its last state is waited for."""
LAST_LOOK_S = 3.0
"""A coordinator that has ended waits no longer for an open live page."""
LINES_WITHIN_S = 60.0
"""20 lines about one client that joins or leaves, and 300 lines of each kind that callers cause at
will in the audit log, come in this time, and no more."""
NO_ROOM_S = 5.0
"""A host or run that has not begun is said to wait for room on Ray."""
PAUSE_S = 0.1
"""A relay calls a coordinator that is away again at the earliest."""
MAX_WAIT_S = 2.0
"""A relay calls a coordinator that is away again at the latest."""
QUEUE_LOOK_S = 2.0
"""A queue without a run looks for one again."""
POLL_S = 0.5
"""A search looks again whether a run can be stopped."""
LOGS_LOOK_S = 1.0
"""A sweep reads the logs of its runs again."""
SAID_EVERY_S = 10.0
"""A sweep without a terminal says how far its runs are."""
JOBS_LOOK_S = 1.0
"""A sweep looks for the results of its jobs again."""
SLURM_ASK_S = (2.0, 60.0)
"""Slurm is asked for the states of jobs: every so often for one, and for very many."""
STREAM_S = 300.0
"""A health or reflection stream ends."""
CALLS_LOOK_S = 0.5
"""Calls that have been open for too long are looked for again."""
REFUSALS_EVERY_S = 60.0
"""Refused calls are counted into one line."""
BORNE_PING_MS = 5000
"""A link that is pinged more often than that ends."""
BEAT_EVERY_S = 2.0
"""A client that trains says again that it is there; one that does not says what became safe on its
disk."""
AGAIN_AFTER_MS = 500
"""A caller that is told to come again does so."""
NEWS_EVERY_S = 1.0
"""News of a client's progress are passed on again at the earliest."""
AWAY_AFTER_S = 10.0
"""A line names clients that are not connected."""
LINE_EVERY_S = 60.0
"""A line names clients at work, and apart from them those that have told of no work for so long; it
repeats."""
LOOK_EVERY_S = 1.0
"""Missing clients are looked for again."""
GONE_EVERY_S = 2.0
"""Clients that are gone without a word are looked for again."""
REFUSED_AGAIN_S = 0.05
"""They ask a port that refuses again."""
SETTLE_S = 5.0
"""A file or folder of `join --watch` and `predict --watch` that has not changed for so long is
complete."""
LOOK_AGAIN_S = 0.05
"""A process that adds a task looks again whether another one is done."""
ASK_AGAIN_S = 0.02
"""It asks again whether the other change has ended."""
IDLE_TOLD_S = 60.0
"""A client without an order says so, once."""
WAKE_S = 1.0
"""A client that waits looks whether it was stopped."""
CERTIFICATE_EVERY_S = 24 * 3600.0
"""A client that stays is reminded again of its certificate's end."""
FIRST_WAIT_S = 1.0
"""An order that failed for want of room is tried again; then after twice the pause each time."""
LONGEST_WAIT_S = 30.0
"""The longest such pause."""
ORDER_LOOK_S = 0.1
"""Meanwhile it is looked whether the order is still wanted."""
SITE_LOOK_S = 5.0
"""A site that stays asks again which run is served, and waits no longer for the answer."""
FIRST_PAUSE_S = 5.0
"""After a fault it joins the run again, and a relay that stays begins again; then after twice the
pause each time."""
LAST_PAUSE_S = 300.0
"""The longest such pause."""
A_NEW_RUN_S = 60.0
"""After 20 new runs, a site that stays joins a further one."""
OVER_S = 60.0
"""It joins a run that is over again, if it is still served."""
WORKBOOK_CPU_S = 10
"""A workbook that takes more time of the processor to read is refused."""
WORKBOOK_S = 30.0
"""So is one whose trial takes longer in all."""
FEEDBACK_KEPT_S = 30 * 86400
"""What `serve-model` keeps of requests, so that feedback may name them, is deleted."""
RETRY_AFTER_S = 1
"""`Retry-After` of a request without an answer."""
FOLDER_LOOK_S = 0.5
"""`predict --watch` looks at its folder again."""
