"""A run from its start to its end: coordinator and hosts, watched, restarted and cleaned up."""

from __future__ import annotations

import json
import logging
import math
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import tomli_w

from fedmodels.config.changes import another_config, forbidden_changes
from fedmodels.config.experiment import Experiment
from fedmodels.config.places import gpu_of
from fedmodels.console.log_lines import LogLevel
from fedmodels.errors import (
    ConfigError,
    DataError,
    Interrupted,
    RunFailed,
    RunStopped,
    SetOut,
)
from fedmodels.facts.config_file import parse_experiment
from fedmodels.host.processes import Box, Child, ProcessLine, next_said, started
from fedmodels.own.code_names import is_own
from fedmodels.tensors.bundle import EVALUATOR
from fedmodels.times import CLIENTS_LEAVING_S
from fedmodels.training.asked import AHEAD
from fedsrv import parts
from fedsrv.launch.forked import (
    fork_coordinator,
    fork_fedcli,
    open_standard_streams,
    share_memory,
)
from fedsrv.launch.given_data import check_given_data, check_net, clients_here, name_of
from fedsrv.launch.hosts import FORECAST, Hosts, Joining, LocalHosts, error_in, notes_in
from fedsrv.launch.layout import Crowd
from fedsrv.launch.progress import PlainLines, display_of
from fedsrv.parts.server_data import check_given
from fedsrv.progress.events import HAS_FAILED, Event
from fedsrv.ray.ray_cluster import RayPlace
from fedsrv.report.tables import PageNotWritten, write_page
from fedsrv.state.run_directory import (
    beginning,
    launching,
    make_directory,
    refuse_existing,
    require_run,
    using,
)
from fedsrv.state.run_record import read_run

MAX_RESTARTS = 3
"""Restarts of one process without progress of the run, after which the run has failed."""
log = logging.getLogger(__name__)


def launch(
    experiment: Experiment,
    out: Path,
    *,
    hosts: int | None = None,
    resume: bool = False,
    data: Path | None = None,
    device: str = "auto",
    server_data: Path | None = None,
    log_level: LogLevel = LogLevel.INFO,
    as_json: bool = False,
    serve_options: Sequence[str] = (),
    ray: RayPlace | None = None,
    strict: bool = False,
    forecasts: bool = False,
) -> None:
    """Run an experiment to its end; print the final table and write ``report.html``.

    A launch forks. Call it in a process that has made no channel or server of gRPC, as
    ``fedtide.run`` does.

    Args:
        experiment: what to run.
        out: the run directory.
        hosts: client host processes; by default as many as pay here.
        resume: go on with the run in ``out``.
        data: a partition root made before.
        device: ``auto``, ``cpu`` or ``cuda:K``.
        server_data: the server's own examples; by default those of the partition, if any.
        log_level: what is said at least, here and in the logs of the processes.
        as_json: say it as one object a line.
        serve_options: more options of ``fedsrv serve``.
        ray: the cluster on which the hosts run; by default this machine.
        strict: refuse data in which something may not be meant.
        forecasts: try a client's work beside the first rounds, and say how long the run takes.

    Raises:
        FedtideError: the run failed; says why.
        RunStopped: SIGTERM or Ctrl-C came; the run can be resumed.
        KeyboardInterrupt: the user stopped it before there was a run.
    """
    open_standard_streams()
    root = data or out / "data"
    if server_data is not None and not server_data.is_dir():
        raise DataError(f"--server-data {server_data} is no directory")
    held = server_data or root / "server"
    if resume:
        require_run(out)
        check_resumed(experiment, out / "config.toml")
    else:
        refuse_existing(out)
    if experiment.net.begin_from is not None:
        from fedsrv.trained.begin_from import begun

        experiment = begun(experiment, out)
    check_start(experiment, data, held, device)
    title = f"{experiment.method.name} on {name_of(experiment, data)}"
    display = display_of(title, log_level.number, as_json=as_json)
    logs = min(log_level, LogLevel.INFO, key=lambda level: level.number)
    with beginning(out) as began:
        make_directory(out / "logs", out)
        made_before = data is not None
        joining = _joining(experiment, root, out / "clients", device, logs)
        place = _hosts_of(experiment, joining, out, ray, deals=not made_before)
        processes = Launch(
            experiment,
            out,
            root,
            place,
            display,
            held,
            made_before,
            began,
            logs,
            serve_options,
            strict,
            forecasts,
        )
        with launching(out), processes as run:
            run.partition()
            check_net(experiment, root)
            run.follow(hosts)
    show_end(out, display)


def show_end(out: Path, display: PlainLines) -> None:
    """Show the table of a run that has finished, and write its page."""
    record = read_run(out)
    try:
        display.end(record)
    except Exception as error:  # the run has finished all the same
        log.exception("the table of %s", out)
        display.say(f"the table cannot be shown: {type(error).__name__}", logging.WARNING)
    display.say("drawing the report")
    try:
        display.say_page(write_page(record))
    except PageNotWritten as error:
        display.say(str(error), logging.WARNING)


def _joining(
    experiment: Experiment, data: Path, states: Path, device: str, log_level: LogLevel
) -> Joining:
    """Return what every host of an experiment is told."""
    names = dict.fromkeys((experiment.method.name, *(net.name for net in experiment.net.each)))
    code = [word for n in names if is_own(n) for word in ("--code", n.rpartition(":")[0])]
    weights = experiment.net.weights
    given = ["--weights", str(Path(weights).resolve())] if weights else []
    how = experiment.announced
    told = () if how == "exact" else ("--announce", how)
    options = ("--log-level", log_level, "--no-check", *code, *given, *told)  # launch looks itself
    ahead = AHEAD["client"].get(experiment.method.name, ())
    return Joining(data, states, device, options, ahead)


def _hosts_of(
    experiment: Experiment, joining: Joining, out: Path, ray: RayPlace | None, *, deals: bool
) -> Hosts:
    """Return where the hosts of a run are: on this machine, or on a Ray cluster.

    ``deals`` says whether the data are dealt out for this run.
    """
    if ray is None:
        return LocalHosts(joining, out / "logs")
    from fedsrv.launch.ray_hosts import RayHosts

    return RayHosts(ray, joining, out, tomli_w.dumps(experiment.to_dict()), deals=deals)


@contextmanager
def draining(run: Launch) -> Iterator[None]:
    """Let SIGTERM drain a run; what is begun as a fork must not inherit that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: run.drain())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass
class Launch:
    """The processes of one launched run."""

    experiment: Experiment
    out: Path
    data: Path
    hosts: Hosts
    display: PlainLines
    server_data: Path
    """The server's own examples; only where there are any."""
    made_before: bool = False
    """Whether the clients' directories exist already."""
    began: threading.Event = field(default_factory=threading.Event)
    """Set when clients can join: from then on nothing of the run is taken back."""
    log_level: LogLevel = LogLevel.INFO
    """The lowest level of messages in the logs of the processes."""
    serve_options: Sequence[str] = ()
    """More options of ``fedsrv serve``."""
    strict: bool = False
    """Whether data are refused in which something may not be meant."""
    forecasts: bool = False
    """Whether a trial says how long a run that begins will take."""
    is_tried: bool = False
    """Whether that trial goes on, beside the first rounds."""
    box: Box = field(default_factory=Box)
    address: str = ""
    """Where the coordinator listens; empty until it does."""
    clients: list[str] = field(default_factory=list)
    """The ``--client-id`` of each host."""
    ended: set[str] = field(default_factory=set)
    dismissed: set[str] = field(default_factory=set)
    """The hosts that ended because the coordinator told them of the run's failure."""
    set_out: set[str] = field(default_factory=set)
    """The hosts of which no client takes part any more, as the coordinator told them."""
    restarts: dict[str, int] = field(default_factory=dict)
    failure: str = ""
    """Why the coordinator ends, in its own words."""
    finished: bool = False
    is_draining: bool = False
    without_room: dict[str, None] = field(default_factory=dict)
    """The hosts for which no node has room, in order."""

    def __enter__(self) -> Launch:
        """Start dealing out the data, or looking at them where they were dealt out before.

        Meanwhile the hosts' place and a coordinator get ready.
        """
        self.config = self.out / "logs" / "launch.toml"
        with using(self.out):
            self.config.write_text(tomli_w.dumps(self.experiment.to_dict()), "utf-8")
        self._end_trial()  # of a launch that was killed
        share_memory()
        argv = ["partition", str(self.config), "--out", str(self.data), "--no-picture"]
        if self.made_before:
            argv = ["check", str(self.data), "--brief"]
        strict = ["--strict"] if self.strict else []
        self.dealing = fork_fedcli([*argv, *strict], self._log("partition"))
        waiting = fork_coordinator(self._log("server"))
        try:
            self.hosts.begin(self.box)  # threads from here on
        except BaseException:
            for fork in (waiting, self.dealing):
                fork.kill()
                fork.close()
            raise
        self.coordinator = Child("server", waiting, self.box)
        return self

    def __exit__(self, *_: object) -> None:
        """End everything that was started."""
        self.dealing.kill()
        self.dealing.close()
        self.hosts.end()
        self.coordinator.end()
        self._end_trial()

    def _log(self, source: str) -> Path:
        return self.out / "logs" / f"{source}.log"

    # --- beginnings -------------------------------------------------------------------------------

    def partition(self) -> None:
        """Wait until the data are dealt out to client directories, or have been looked at.

        Raises:
            ConfigError, DataError: as ``fedcli partition`` says.
        """
        work = "looking at the data of" if self.made_before else "dealing out data to"
        self.display.say(f"{work} {self.experiment.schedule.clients} clients")
        status, log = self.dealing.wait(), self._log("partition")
        for line in notes_in(log):
            self.display.say(line)
        if status:
            command = "fedcli check" if self.made_before else "fedcli partition"
            if status < 0:
                raise DataError(f"{command} was {self._why('partition', status)}")
            kind = ConfigError if status == ConfigError.exit_code else DataError
            raise kind(error_in(log) or f"{command} ended with {status}, without a word")

    def start(self, hosts: int | None) -> None:
        """Start the coordinator; the clients follow when it listens."""
        evaluator = (self.data / "global-test").is_dir()
        clients = clients_here(self.experiment, self.data)
        cohort = min(self.experiment.cohort_size, clients)
        self.clients = self.hosts.divide(Crowd(clients, cohort, hosts, evaluator))
        if not (self.out / "config.toml").exists():
            self.is_tried = self.forecasts and not self.hosts.gpus  # a card's memory is the run's
        self.coordinator.tell(self._arguments())

    def _arguments(self) -> list[str]:
        """Return the arguments of ``fedsrv``; resuming an empty directory starts afresh."""
        listen = self.address or self.hosts.listen
        found = ["serve", str(self.config), "--listen", listen, "--out", str(self.out)]
        found += ["--resume", "--events", "--log-level", self.log_level]
        found += ["--evaluator"] if EVALUATOR in self.clients else []
        if self.server_data.is_dir():
            found += ["--server-data", str(self.server_data)]
        return [*found, *self.hosts.serve_options, *self.serve_options]

    # --- watching ---------------------------------------------------------------------------------

    def follow(self, hosts: int | None) -> None:
        """Start coordinator and clients, and follow the run to its end.

        Raises:
            FedtideError: as :meth:`watch`.
            Interrupted: Ctrl-C came; the run can be resumed.
        """
        try:
            with self.display, draining(self):
                self.start(hosts)
                self.watch()
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the processes are ended in any case
            self.began.set()
            line = f"stopped; add --resume to continue the run in {self.out}"
            raise Interrupted(line) from None

    def watch(self) -> None:
        """Follow the run to its end, restarting what dies.

        Raises:
            RunFailed: the run failed, or a process died again and again without progress.
            RunStopped: :meth:`drain` was called.
        """
        until = math.inf
        while not (self.finished and self.ended >= set(self.clients)):
            if self.finished:
                until = min(until, time.monotonic() + CLIENTS_LEAVING_S)
            said = next_said(self.box, until)
            if said is None:  # a client that missed the end would wait for ever
                return
            if said.source == "server":
                self._server_said(said)
            elif said.status is not None and self.is_draining:
                log.info("the clients have ended with %d", said.status)
            elif said.status is not None:
                self._restart(self.hosts.name, self.hosts.why(said.status))
                self.hosts.begin_again()
                self._end_trial()
                self._start_hosts()
            else:
                self._client_said(json.loads(said.line))

    def drain(self) -> None:
        """Tell the coordinator to stop; its end ends :meth:`watch`."""
        self.is_draining = True
        self.coordinator.terminate()

    def _server_said(self, said: ProcessLine) -> None:
        if said.line.startswith("listening on "):
            self.began.set()
            fresh = not self.address
            self.address = said.line.removeprefix("listening on ")
            if fresh:
                self._start_hosts()
                self._try_beside()
        elif said.line.startswith("{"):
            event = Event.from_json(said.line)
            if event.kind == "commit":
                self.restarts.clear()
            if event.kind == "note" and event.client:
                self._start_set_out()
            if event.kind == "waiting" and self.without_room:
                hosts = ", ".join(f"client-{host}" for host in self.without_room)
                line = f"{event.detail['line']} (no room for {hosts})"
                event = replace(event, detail={**event.detail, "line": line})
            self.display.take(event)
        elif said.line.startswith("error: "):
            self.failure = said.line.removeprefix("error: ")
        elif said.status == 0:
            self.finished = True
        elif said.status is not None and self.is_draining:
            raise RunStopped(f"stopped as asked; add --resume to continue the run in {self.out}")
        elif said.status is not None and said.status > 0:
            raise RunFailed(self.failure or error_in(self._log("server")))
        elif said.status is not None:
            self._restart("server", self._why("server", said.status))
            process = started(["-m", "fedsrv", *self._arguments()], self._log("server"))
            self.coordinator = Child("server", process, self.box)
            while self.dismissed:
                self.hosts.start(self.dismissed.pop(), self.address)

    def _start_hosts(self) -> None:
        """Start all hosts, once there is an address."""
        for client in self.clients if self.address else ():
            if client not in self.ended:
                self.hosts.start(client, self.address)

    def _start_set_out(self) -> None:
        """Start those that were out: the run went back to before a client was set out."""
        while self.set_out:
            client = self.set_out.pop()
            self.ended.discard(client)
            self.hosts.start(client, self.address)

    def _client_said(self, fact: dict[str, object]) -> None:
        client = str(fact.get("id", ""))
        if "waits" in fact:
            self.without_room[client] = None
            self.display.say(f"client-{client} waits: {fact['waits']}", logging.WARNING)
        elif "node" in fact and client in self.without_room:
            self.without_room.pop(client)
            self.display.say(f"client-{client} has found room on {fact['node']}")
        if "status" not in fact:
            return
        if client == FORECAST:
            return self._forecast_said(int(str(fact["status"])))
        self.without_room.pop(client, None)
        if fact["status"] == 0 or self.finished or self.is_draining:
            self.ended.add(client)
            return
        source = f"client-{client}"
        status = int(str(fact["status"]))
        why = str(fact.get("why") or self._why(source, status))
        all_are_needed = self.experiment.server.min_clients is None
        if status == ConfigError.exit_code and all_are_needed:  # a restart is in vain
            raise RunFailed(f"{source}: {why}; fix that, then --resume continues the run")
        if status == SetOut.exit_code:
            self.ended.add(client)
            self.set_out.add(client)
            self.display.say(f"{source}: {why}", logging.WARNING)
            return
        if HAS_FAILED in why:  # the coordinator ends too, and says it
            self.dismissed.add(client)
            return
        self._restart(source, why)
        self.hosts.start(client, self.address)

    @property
    def told(self) -> Path:
        """Where the trial says how long the run will take; its directory lies beside."""
        return self.out / "logs" / FORECAST / "told.json"

    def _forecast_said(self, status: int) -> None:
        """Say how long the run will take, or why nobody knows."""
        if status:
            lines = [f"not known: {self._why(FORECAST, status)}"]
        else:
            lines = json.loads(self.told.read_text("utf-8"))["lines"]
        for line in lines if not self.finished else ():
            self.display.say(f"forecast: {line}")
        self._end_trial()

    def _try_beside(self) -> None:
        """Start the trial of a client's work; the hosts do not wait for it."""
        if self.is_tried:
            self.told.parent.mkdir()
            self.is_tried = self.hosts.forecast(self.config, self.data, self.told)

    def _end_trial(self) -> None:
        """Leave nothing of a trial that has ended, or whose run has."""
        self.is_tried = False
        shutil.rmtree(self.told.parent, ignore_errors=True)

    def _why(self, source: str, status: int) -> str:
        """Return why a process ended, by its exit status and its log."""
        return error_in(self._log(source)) if status > 0 else f"killed by signal {-status}"

    def _restart(self, source: str, why: str) -> None:
        """Count a restart; three without progress are too many."""
        self.restarts[source] = self.restarts.get(source, 0) + 1
        if self.restarts[source] > MAX_RESTARTS:
            raise RunFailed(f"{source} died {MAX_RESTARTS + 1} times without progress: {why}")
        self.display.say(f"{source} died ({why}); starting it again", logging.WARNING)


def check_start(experiment: Experiment, data: Path | None, held: Path, device: str) -> None:
    """Check what can be known before anything starts.

    Raises:
        FedtideError: the first thing that is wrong.
    """
    gpu_of(device)  # whether it is there, a fork will say
    parts.check(experiment)
    check_given_data(experiment, data)
    asked = experiment.data is not None and experiment.data.server_examples is not None
    check_given(experiment, (data is None and asked) or held.is_dir())


def check_resumed(experiment: Experiment, config: Path) -> None:
    """Check that a resumed run has its config, before data are dealt out for another one.

    Raises:
        ConfigError: names the keys that differ.
    """
    try:
        before = parse_experiment(config.read_text("utf-8"), str(config))
    except (OSError, UnicodeDecodeError, ConfigError):
        return  # the coordinator has the config in its database, and looks again
    changed = [key for key in forbidden_changes(before, experiment) if "sha256" not in key]
    if changed:
        raise another_config(config.parent, changed, experiment)
