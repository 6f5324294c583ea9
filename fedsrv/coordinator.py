"""One coordinator: the parts of a served run put together, and taken down again."""

from __future__ import annotations

import json
import logging
import os
import platform
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w
import torch

from fedmodels.config.experiment import Experiment
from fedmodels.config.sent import without_places
from fedmodels.console.printable import printable
from fedmodels.errors import ArchiveError, ConfigError, FedtideError, RunStopped
from fedmodels.facts.position import Interaction
from fedmodels.facts.usual import usual_keys
from fedmodels.host.files import write_atomically
from fedmodels.host.machine import tells_traces
from fedmodels.own.code_names import refuse_exits
from fedmodels.times import DRAIN_S
from fedmodels.training.asked import load_ahead
from fedmodels.training.fault import name_faults
from fedsrv import parts
from fedsrv.engine.admission import Admission
from fedsrv.engine.round_parts import means_told
from fedsrv.engine.rounds import Engine
from fedsrv.engine.server_part import ServerPart
from fedsrv.identity.listen import Listen
from fedsrv.progress.events import HAS_FAILED, Ending, EventLog
from fedsrv.state.record import MeansOver
from fedsrv.state.run_directory import beginning, writing
from fedsrv.state.store import Store
from fedsrv.transport.journal import Journal
from fedsrv.transport.remote_cohort import RemoteCohort
from fedsrv.transport.server import start_server, stop_server
from fedsrv.transport.service import Service
from fedsrv.transport.spool import Spool

if TYPE_CHECKING:
    from fedpb.peer_certificates import PeerCertificates

log = logging.getLogger(__name__)


def serve(
    experiment: Experiment,
    out: Path,
    listen: Listen,
    *,
    resume: bool = False,
    without: Sequence[int] = (),
    forgets: Sequence[int | tuple[int, int]] = (),
    expects_evaluator: bool = False,
    server_data: Path | None = None,
    on_ready: Callable[[str, EventLog], None] = lambda address, events: None,
    stop: threading.Event | None = None,
    watchers: Sequence[Callable[[EventLog], Ending]] = (),
) -> dict[str, Any]:
    """Serve one run to its end and return its summary.

    Args:
        experiment: what to run.
        out: the run directory.
        listen: where.
        resume: go on with the run in ``out``.
        without: clients that take no part from now on, of a run that is resumed.
        forgets: clients, or tasks of clients, without which such a run is computed again from its
            beginning.
        expects_evaluator: wait for the evaluator before the first round.
        server_data: directory of the server's own examples, for methods that train on them.
        on_ready: told the address, once clients can join.
        stop: set to end the run where it can be resumed.
        watchers: begin to follow the run's events, and return what ends that.

    Raises:
        RunStopped: ``stop`` was set.
        FedtideError: the run could not start, or could not go on; clients that are there were told.
    """
    listen.check()
    parts.check(experiment, certified=listen.requires_identity)
    if experiment.net.begin_from is not None:
        from fedsrv.trained.begin_from import begun

        experiment = begun(experiment, out)
    experiment = parts.with_digests(experiment)
    held = parts.server_data_for(experiment, server_data)
    torch.set_num_threads(experiment.server.threads)
    with ExitStack() as stack:
        began = stack.enter_context(beginning(out))
        store = Store(out, experiment, resume)
        stack.callback(store.close)
        if listen.revoked is not None:
            listen.revoked.kept_by(store.revocations, store.keep_revocations)
        forgotten = set_aside(store, without, forgets)
        events = EventLog()
        store.expect("config.toml", config_text(experiment))
        with writing(out):
            changed = write_facts(out, experiment, computes=store.ended() is None)
        options = parts.parts_of(store, events, server_data=held)
        for ending in filter(None, (one.follows() for one in options)):
            stack.callback(ending)
        for watcher in watchers:
            stack.callback(watcher(events))
        if tells_traces():
            from fedsrv.progress.traces import trace

            stack.callback(trace(events, store))
        cohort = _cohort_of(store, events, options, expects_evaluator, listen.peers)
        engine = Engine(experiment, cohort, store, events, options)
        told = _joined_with(store)
        service = Service(
            store.run_id,
            without_places(told.to_dict()),
            cohort,
            events,
            usual=usual_keys(told),
            guard=listen.guard(),
            journal=Journal.of(store),
            **{name: ask for one in options for name, ask in one.offers().items()},
        )
        address = listen.at(open_server(stack, service, listen))
        stack.callback(cohort.stop, "the server is shutting down")
        stack.enter_context(telling_the_end(events))
        began.set()
        caveats = [*listen.caveats(), *forgotten]
        _tell_the_beginning(events, store, cohort, address, caveats, changed)
        load_ahead(experiment.method.name, "server")  # while clients join
        if stop is not None:
            begin_drain = partial(_drain, stop, service, out)
            threading.Thread(target=begin_drain, name="drain", daemon=True).start()
        on_ready(address, events)
        return _run_to_the_end(engine, cohort, store, events)


def set_aside(
    store: Store, clients: Sequence[int], forgets: Sequence[int | tuple[int, int]] = ()
) -> list[str]:
    """Let clients take no part in a run from its next interaction on, or forget them, or tasks.

    Returns:
        What is computed again without what is forgotten, and what remains of it.

    Raises:
        ConfigError: the run has no such client, or none is left, or it cannot be computed again.
    """
    number = store.experiment.schedule.clients
    gone = [one for one in forgets if isinstance(one, int)]
    named = [one if isinstance(one, int) else one[0] for one in forgets]
    if wrong := [client for client in (*clients, *named) if not 0 <= client < number]:
        option = "--forget" if wrong[0] in named else "--without"
        raise ConfigError(f"{option} {wrong[0]}: the clients of this run are 0 to {number - 1}")
    if len({*store.aside(), *clients, *gone}) >= number:
        option = "--forget" if gone else "--without"
        raise ConfigError(f"{option}: no client would be left")
    if clients:
        store.set_aside(dict.fromkeys(clients, "the run continues without it (--without)"))
    if not store.aside() and not forgets and not store.forgotten():
        return []
    from fedsrv.state.forgetting import forget

    return forget(store, forgets)


def _joined_with(store: Store) -> Experiment:
    """Return what clients are told when they join: orders say what has changed since.

    Files that a site cuts are cut as the run is started with now.
    """
    return store.began.model_copy(update={"data": store.wished.data})


def _tell_the_beginning(
    events: EventLog,
    store: Store,
    cohort: RemoteCohort,
    address: str,
    caveats: Sequence[str],
    changed: str,
) -> None:
    """Tell where clients may join, and what a user may have to act on."""
    experiment = store.experiment
    clients = len(store.began.schedule.beginners)
    all_are_needed = experiment.server.deadline_s is None  # to begin with
    needed = clients if all_are_needed else min(experiment.min_clients, clients)
    events.tell("listening", address=address, clients=clients, needed=needed)
    events.tell("present", **cohort.present())
    if (record := store.ledger.record(store.committed)) is not None:
        place = {key: record[key] for key in ("interaction", "round", "task")}
        over = MeansOver(found for found, _ in store.ledger.records())
        loss = record["metrics"].get("loss")
        events.tell("resumed", **place, loss=loss, **means_told(record, over))
    lines = [*caveats, *store.evidence.differences]
    lines += [
        f"client {client} is excluded from interaction {first + 1} on"
        for client, first in store.aside().items()
    ]
    if changed:
        lines.append(f"the run was computed so far with {changed}: others may round differently")
    for line in lines:
        events.tell("note", line=line)


def open_server(stack: ExitStack, service: Any, listen: Listen) -> int:
    """Start a server, stop it when the stack ends; return its port."""
    stack.callback(service.complaints.close)
    server, port = start_server(service, listen.address, listen.credentials)
    stack.callback(service.gate.close)
    stack.callback(stop_server, server)
    stack.callback(service.events.close)  # first of all, so that watchers see the end
    return port


def _cohort_of(
    store: Store,
    events: EventLog,
    options: Sequence[ServerPart],
    expects_evaluator: bool,
    peers: PeerCertificates | None,
) -> RemoteCohort:
    """Return the cohort of a run; nobody has joined it."""
    experiment, by_part = store.experiment, parts.admission_by(options, store)
    budget = experiment.server.upload_memory_mb << 20
    return RemoteCohort(
        experiment.schedule.clients,
        Spool(store.path / "server" / "spool", budget),
        events,
        deadline_s=experiment.server.deadline_s,
        min_clients=experiment.min_clients,
        admission=by_part or Admission.of(experiment, store.ledger.profiles()),
        expects_evaluator=expects_evaluator,
        out=store.gone(Interaction(store.committed + 1)),
        beginners=store.began.schedule.beginners,
        peers=peers,
        known={client: {"state": "present"} for client in store.ledger.profiles()}
        | store.ledger.standings(),
        keep=store.keep_standings,
    )


def _run_to_the_end(
    engine: Engine, cohort: RemoteCohort, store: Store, events: EventLog
) -> dict[str, Any]:
    """Run what is left of a run, store its summary, and let the clients go."""
    before = store.ended()
    with _telling_failures(cohort), name_faults(engine.method), refuse_exits():
        summary = before or engine.run()
    if before is None:
        store.end(summary)
    else:  # the engine did not
        events.tell("finished", metrics=before["metrics"], state_sha256=before["state_sha256"])
        line = (
            f"the run in {store.path} had finished before: it waits up to {cohort.lease_s:g} s to "
            "tell clients that were away at its end"
        )
        events.tell("note", line=line)
    publish_lineage(store)
    store.publish("summary.json", json.dumps(summary, indent=2) + "\n")
    cohort.end(returning=before is not None)
    return summary


def publish_lineage(store: Store) -> None:
    """Write which data made which version of the model, at the end of a run.

    A record that it cannot be made of, as of an earlier version, ends no run that has finished.
    """
    from fedsrv.state import lineage

    try:
        found = lineage.lineage_of(store.path).to_json()
    except ArchiveError as error:
        log.warning("%s is not written: %s", lineage.FILE, error)
        return
    store.publish(lineage.FILE, json.dumps(found) + "\n")


def _drain(stop: threading.Event, service: Service, out: Path) -> None:
    """Wait until the run is to stop, then let the interaction under way end."""
    stop.wait()
    service.health.enter_graceful_shutdown()
    line = (
        f"stopping: clients have {DRAIN_S:g} s to end the interaction under way, then it is "
        "abandoned; what the method computes here now ends first"
    )
    service.events.tell("draining", line=line)
    done = f"stopped as asked: the same command with --resume continues the run in {out}"
    service.cohort.stop(done, RunStopped, DRAIN_S)


@contextmanager
def telling_the_end(events: EventLog) -> Iterator[None]:
    """Tell watchers why a run ends before its end; the command says it itself."""
    try:
        yield
    except RunStopped as stopped:
        events.tell("ended", reason=printable(str(stopped)))
        raise
    except KeyboardInterrupt:
        events.tell("ended", reason="stopped by Ctrl-C: the same command with --resume continues")
        raise
    except Exception as error:
        events.tell("ended", reason=f"{HAS_FAILED}{_said_of(error)}")
        raise


def _said_of(error: Exception) -> str:
    """Return what others are told of an error."""
    return printable(str(error)) if isinstance(error, FedtideError) else type(error).__name__


@contextmanager
def _telling_failures(cohort: RemoteCohort) -> Iterator[None]:
    """Tell clients why a run failed; clients of a run that was stopped wait until it is resumed."""
    try:
        yield
    except RunStopped:
        raise
    except Exception as error:
        cohort.end(f"{HAS_FAILED}{_said_of(error)}")
        raise


def config_text(experiment: Experiment) -> str:
    """Return the text of ``config.toml``: the resolved config."""
    return tomli_w.dumps(experiment.to_dict())


def write_facts(out: Path, experiment: Experiment, *, computes: bool = True) -> str:
    """Write the resolved config, which a resume and a recovery read, and what made the run.

    Args:
        out: the run directory.
        experiment: what is run.
        computes: False of a run that has ended; what made it stays as it is.

    Returns:
        Versions and machine of an earlier part of the run where they differ; nothing if they are
        the same. ``env.json`` keeps them as ``earlier``.
    """
    write_atomically(out / "config.toml", config_text(experiment), sync=True, private=True)
    before = _made_by(out)
    if before and not computes:
        return ""
    facts: dict[str, Any] = {
        "fedtide": version("fedtide"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "grpcio": version("grpcio"),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "git_commit": _git_commit(),
    }
    said = {key: before[key] for key in facts if key in before}
    changed = ", ".join(f"{key} {value}" for key, value in said.items() if value != facts[key])
    if earlier := "; ".join(filter(None, (str(before.get("earlier") or ""), changed))):
        facts["earlier"] = earlier
    write_atomically(out / "env.json", json.dumps(facts, indent=2) + "\n", private=True)
    return changed


def _made_by(out: Path) -> dict[str, Any]:
    """Return what ``env.json`` says; nothing where it is not there or damaged."""
    try:
        found = json.loads((out / "env.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _git_commit() -> str | None:
    """Return the commit of the checkout this package runs from, if it is one."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
            timeout=5,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
