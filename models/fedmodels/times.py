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
"""A client or relay pings a silent connection."""
KEEPALIVE_TIMEOUT_MS = round(10_000 * PATIENCE)
"""A connection on which the other machine acknowledges nothing is closed, and the caller
reconnects (on Linux)."""
PONG_MS = round(120_000 * PATIENCE)
"""An unanswered ping closes a connection: over a slow link its answer waits behind data."""
CERTIFICATE_SHOWN_S = 5.0 * PATIENCE
"""With `--tls-crl` or `--up-crl`: the check of the server's certificate gives up and leaves it to
gRPC."""
HEAD_S = 15 * PATIENCE
"""`serve-model` or a page closes a connection without a complete request line and headers."""
SLOW_READER_S = 90.0 * PATIENCE
"""A connection is closed whose request is still unanswered, or its answer unread."""
LEDGER_WAIT_S = 60.0 * PATIENCE
"""A process stops waiting for another one that writes the privacy ledger."""
RUN_LEAVING_S = 30.0 * PATIENCE
"""A queue, or a site that stays, ends the process of a run that has not ended after SIGTERM."""
LAST_SPANS_S = 10.0 * PATIENCE
"""An ending process stops waiting for a collector of traces."""
DOCTOR_S = 5 * PATIENCE
"""`doctor --server` gives up on an address that does not answer."""
DRAIN_S = 20.0 * PATIENCE
"""The current interaction is abandoned after SIGTERM."""
LAST_WORDS_S = 5.0 * PATIENCE
"""Messages still unsent at the end are dropped."""
LOOKING_S = 60.0 * PATIENCE
"""A launch fails if CUDA has not listed the GPUs."""
CLIENTS_LEAVING_S = 10.0 * PATIENCE
"""`launch` ends clients that are still running."""
REACHED_S = 5.0 * PATIENCE
"""A Ray cluster's address counts as unreachable."""
CONNECTED_S = 60.0 * PATIENCE
"""What answers there counts as no Ray cluster."""
RAY_LEAVING_S = 10.0 * PATIENCE
"""`launch` stops waiting for Ray to end its tasks."""
LEFT_OUT_S = 15.0 * PATIENCE
"""A client that its relay omitted from the sum fails, and the relay is named; plus the time of its
upload, once to the relay and once from there."""
SUM_S = 90.0 * PATIENCE
"""Clients fail whose relay brings no sum although all have answered; plus the time of the sum."""
QUIET_S = 15.0 * PATIENCE
"""A relay requests orders again of which only some have arrived; plus the time of one message."""
CHECK_S = 1.0 * PATIENCE
"""A starting relay reports that the coordinator is away."""
JOIN_S = 60.0 * PATIENCE
"""A relay tells a joining client that the coordinator is away."""
BEAT_S = 5.0 * PATIENCE
"""A relay tells a client that beats that the coordinator is away."""
LEAVE_S = 2.0 * PATIENCE
"""A leaving client stops waiting for the answer, and a relay stops forwarding it."""
SLURM_ANSWER_S = 60.0 * PATIENCE
"""A Slurm command fails."""
CLOSE_S = 60.0 * PATIENCE
"""A run ends without waiting further for a tracker."""
FIRST_MESSAGE_S = 30.0 * PATIENCE
"""A call without a first message ends."""
FIRST_UPLOAD_S = 300.0 * PATIENCE
"""A `Push` or `PushSeveral` without a first message ends."""
REPLACED_S = 5.0 * PATIENCE
"""A call must have ended that another one replaces."""
PUSH_S = 60.0 * PATIENCE
"""A call with an upload or a relay's sum ends if nothing comes; plus the time of one frame."""
FAILED_S = 5.0 * PATIENCE
"""Clients must have left a failed run."""
LEASE_S = 15.0 * PATIENCE
"""A client that neither waits nor was heard of counts as disconnected; clients are awaited as long
at the end of a run and when it resumes."""
KEEPALIVE_S = 15.0 * PATIENCE
"""The coordinator or relay pings a silent connection."""
ANSWERED_S = 10.0 * PATIENCE
"""Such a connection is closed if the other machine acknowledges nothing (on Linux)."""
CONNECT_S = 10.0 * PATIENCE
"""`status` and `watch` give up on a silent coordinator."""
HEALTH_S = 5.0 * PATIENCE
"""`health` gives up on a silent coordinator."""
REFUSED_S = 1.0 * PATIENCE
"""`status` and `watch` give up on a port that refuses connections."""
QUERY_S = 600 * PATIENCE
"""A query (`*.sql`) is stopped."""
DOWNLOAD_S = 20.0 * PATIENCE
"""A download without data fails."""
ENROL_S = 20.0 * PATIENCE
"""`enrol` gives up on a silent CA."""
LOCK_S = 30.0 * PATIENCE
"""A change of a client's live model stops waiting for that of another process."""
PATIENCE_S = 600.0 * PATIENCE
"""A client whose order still fails for lack of space exits."""
BODY_S = 15.0 * PATIENCE
"""A request without its body gets 408."""
ANSWER_S = 30.0 * PATIENCE
"""A request without an answer gets 503."""
LAST_ANSWERS_S = 10 * PATIENCE
"""A stopped `serve-model` stops waiting for running requests."""

# --- how often something is looked at or told, and limits of the machine itself -------------------

OPEN_DEADLINE_S = 3600.0
"""An open run without `min_clients` continues with the clients that have answered."""
SLACK_S = 2
"""A stopped `serve-model` exits after its last answers, whatever its threads do."""
WANTED_LOOK_S = 1.0
"""A queue checks whether its run was withdrawn."""
LONG_S = 600.0
"""Work expected to take longer is announced."""
FRESH_S = 1.0
"""The live page rereads records at the earliest."""
WATCHED_S = 5.0
"""A live page requested within this time counts as open: its last state is sent."""
LAST_LOOK_S = 3.0
"""A finished coordinator stops waiting for an open live page."""
LINES_WITHIN_S = 60.0
"""Within this time at most 20 messages about one joining or leaving client are logged, and in the
audit log at most 300 of each kind that callers can cause."""
NO_ROOM_S = 5.0
"""A host or run that has not started is reported as waiting for space on Ray."""
PAUSE_S = 0.1
"""A relay calls an absent coordinator again at the earliest."""
MAX_WAIT_S = 2.0
"""A relay calls an absent coordinator again at the latest."""
QUEUE_LOOK_S = 2.0
"""An empty queue is checked for a run."""
SUBMIT_S = 120.0 * PATIENCE
"""The front of a queue gives up on the process that checks a submitted config."""
POLL_S = 0.5
"""A search checks whether a run can be stopped."""
LOGS_LOOK_S = 1.0
"""A sweep rereads its runs' logs."""
SAID_EVERY_S = 10.0
"""A sweep without a terminal reports progress."""
JOBS_LOOK_S = 1.0
"""A sweep checks its jobs for results."""
SLURM_ASK_S = (2.0, 60.0)
"""Slurm is asked for the states of jobs: the interval for one job, and for very many."""
STREAM_S = 300.0
"""A health or reflection stream ends."""
CALLS_LOOK_S = 0.5
"""Calls are checked for being open too long."""
REFUSALS_EVERY_S = 60.0
"""Rejected calls are summarised in one message."""
BORNE_PING_MS = 5000
"""A connection that is pinged more often is closed."""
BEAT_EVERY_S = 2.0
"""A training client reports that it is alive; a waiting one reports what became safe on its
disk."""
AGAIN_AFTER_MS = 500
"""A caller that was told to retry does so."""
NEWS_EVERY_S = 1.0
"""A client's progress is forwarded again at the earliest."""
AWAY_AFTER_S = 10.0
"""A message names disconnected clients."""
LINE_EVERY_S = 60.0
"""A message names working clients, and separately those that have reported no progress for that
long; repeatedly."""
LOOK_EVERY_S = 1.0
"""Missing clients are checked again."""
GONE_EVERY_S = 2.0
"""Silently disconnected clients are checked again."""
REFUSED_AGAIN_S = 0.05
"""They retry a port that refuses connections."""
SETTLE_S = 5.0
"""An unchanged file or folder of `join --watch` and `predict --watch` counts as complete."""
LOOK_AGAIN_S = 0.05
"""A process that adds a task checks whether another one has finished."""
ASK_AGAIN_S = 0.02
"""It checks whether the other change has ended."""
IDLE_TOLD_S = 60.0
"""A client without an order reports that, once."""
WAKE_S = 1.0
"""A waiting client checks whether it was stopped."""
CERTIFICATE_EVERY_S = 24 * 3600.0
"""A staying client is reminded of its certificate's expiry."""
FIRST_WAIT_S = 1.0
"""An order that failed for lack of space is retried; the pause doubles each time."""
LONGEST_WAIT_S = 30.0
"""The longest such pause."""
ORDER_LOOK_S = 0.1
"""Meanwhile, the client checks whether the order is still wanted."""
SITE_LOOK_S = 5.0
"""A staying site asks which run is served, and stops waiting for the answer."""
FIRST_PAUSE_S = 5.0
"""After a fault it rejoins the run, and a staying relay restarts; the pause doubles each time."""
LAST_PAUSE_S = 300.0
"""The longest such pause."""
A_NEW_RUN_S = 60.0
"""After 20 new runs, a staying site or relay joins another one."""
OVER_S = 60.0
"""It rejoins a finished run that is still served."""
WORKBOOK_CPU_S = 10
"""A workbook is rejected that takes more processor time to read."""
WORKBOOK_S = 30.0
"""Or longer in total."""
FEEDBACK_KEPT_S = 30 * 86400
"""Requests that `serve-model` keeps for later feedback are deleted."""
RETRY_AFTER_S = 1
"""`Retry-After` of a request without an answer."""
FOLDER_LOOK_S = 0.5
"""`predict --watch` checks its folder again."""
STORED_EVERY_S = 60.0
"""The status of a client that keeps changing is stored again, after ten changes at once."""
PART_S = 4.0
"""A part of an upload takes this on its way; the next one is longer or shorter by that."""
PIECE_S = 1.0
"""A piece of an order takes this on its way over a slow link."""
SLOW_S = 10.0
"""A transfer that takes longer so far, or will, is told of as slow."""
