"""What comes to clients' data while a run goes on: made into tasks, and told to the server."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from fedcli.data.store.client_data import ABOUT
from fedcli.data.store.growing import Incoming
from fedcli.data.store.own_files import How, how_of, remembered
from fedcli.gate.rules import ANY, Rules
from fedcli.runtime.answers import RunOver, SessionGone, Superseded, UploadRefused
from fedcli.runtime.enrolment import Enrolment
from fedcli.runtime.link import Link
from fedmodels.config.experiment import Experiment
from fedmodels.errors import ConfigError, FedtideError, LinkError
from fedmodels.host.files import Stamp, stamp_of
from fedmodels.tensors.bundle import ClientId
from fedpb.tables import values_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Watched:
    """A folder of the site in which what is complete becomes a task, while a run goes on."""

    incoming: Path
    strict: bool = False
    stays: bool = False
    """Whether the site takes part in other runs, too: each of them takes what is there."""

    def joined(self, experiment: Experiment, run_id: str, clients: Sequence[ClientId]) -> None:
        """Refuse a run that takes no new tasks; a site that stays takes part in it without."""
        if not experiment.schedule.open and not self.stays:
            raise ConfigError(
                f"--watch {self.incoming} is for a run that goes on with new tasks, and this one "
                "has none: its config lacks [schedule] open = true"
            )


class Announcer:
    """Tells the server of tasks that were added to clients' data while the run goes on.

    The data directory is the only truth: whoever added the task, its ``client.json`` was written. A
    process looks at that file every few seconds, reads the longer description, and announces it.
    Orders of the new task come after that; a worker reads the description again before its next
    order.
    """

    def __init__(
        self,
        enrolment: Enrolment,
        incoming: Path | None = None,
        strict: bool = False,
        stays: bool = False,
    ) -> None:
        """Look at nothing yet.

        ``incoming`` is a folder in which what is complete becomes a task; of several clients, each
        has one of its own in it. With ``strict``, what ``fedcli check`` would have a word on is
        refused. What becomes a task of a site that ``stays`` is left for its other runs.
        """
        self._enrolment, self._link = enrolment, enrolment.link
        workers = enrolment.workers
        self._clients = [client for client in workers.clients if isinstance(client, int)]
        self._folders = [] if incoming is None else [
            Incoming(
                incoming if len(workers.clients) == 1 else incoming / str(client),
                workers.root, client,
                cache(partial(how_cut, workers.root, client, self._link, workers.joined)),
                strict=strict, stays=stays,
            )
            for client in self._clients
        ]  # fmt: skip

    def look(self) -> None:
        """Make tasks of what has come, and announce the clients whose data have changed."""
        for folder in self._folders:
            folder.take()
        for client in self._clients:
            now = stamp_of(self._enrolment.workers.root / str(client) / ABOUT)
            if now != self._enrolment.announced[client]:
                self._announce(client, now)

    def _announce(self, client: ClientId, stamp: Stamp | None) -> None:
        """Tell the server what data a client has now; a refusal is a line, and no end."""
        member = self._enrolment.members[client]
        try:
            description = self._enrolment.description(client)
            try:
                refused = self._link.announce(member, description)
                self._enrolment.taken(client)
                self._enrolment.tell_refused(refused)
            except SessionGone:  # joining again tells the server as well
                self._enrolment.rejoin({client: member})
            tasks = len(description.tasks)
            log.info("client %s: the server now knows its %d tasks", client, tasks)
        except (RunOver, Superseded):
            pass
        except FedtideError as error:
            if isinstance(error, UploadRefused):
                self._enrolment.refused(client)
            if not self._link.is_closed:
                log.error("client %s: its new tasks are not announced: %s", client, error)
            self._enrolment.announced[client] = stamp  # not again before it changes


def how_cut(
    root: Path,
    client: int,
    link: Link | None,
    joined: Experiment | None = None,
    rules: Rules = ANY,
) -> How | None:
    """Return by which ``[data]`` files are cut: as the first ones, or as the server says.

    None where nobody says it. Of a run that was ``joined``, it is that of its config, and that was
    held against the site's rules.

    Raises:
        ConfigError: the ``rules`` do not allow it.
        LinkError: the server does not say it now, or says another one than that run has.
    """
    if (found := remembered(root)) is not None:
        rules.check_data(found[0])
        return found
    if link is None:
        return None
    try:
        wanted = link.prepare(client)
    except ConfigError:  # the run's config has no [data]
        return None
    how = how_of(values_of(wanted.data), wanted.seed)
    rules.check_data(how[0])
    if joined is not None and how != (joined.data, joined.seed):
        raise LinkError(
            "the server says another [data] to cut files by than that of the run which this client "
            "joined: nothing is cut by it"
        )
    return how
