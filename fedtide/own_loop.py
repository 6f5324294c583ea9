"""A client around a custom training loop.

    import fedtide

    for task in fedtide.client("127.0.0.1:5055", 0, "data"):
        task.load(model)                    # everybody's weights
        loss = train(model, task.data)      # as ever
        task.send(model, loss=loss)

All else is what ``fedcli join`` does: joining, TLS, checks, recovery, scores, the final model.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedcli.data.kept_runs import make_room
from fedcli.gate.rules import Rules
from fedcli.joining import host_of
from fedcli.runtime.host import Host
from fedcli.runtime.staying import Address, each_run
from fedcli.runtime.worker import GivenOrder, Result
from fedmodels.config.bounds import DETAILS, CountDetail
from fedmodels.config.places import check_address
from fedmodels.config.privacy import LEDGER
from fedmodels.errors import ConfigError, FedtideError, TrainingFailed
from fedmodels.host.files import require_utf8
from fedmodels.host.staying import Outcome
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.split import SplitNet, load_weights
from fedmodels.numerics.randomness import seeded
from fedmodels.training.loop import ClientHalf
from fedmodels.training.method import Method
from fedpb.v1 import coordinator_pb2 as rpc

PathLike = str | os.PathLike[str]
log = logging.getLogger(__name__)
LOOP = ("fit", "phases", "loss", "after_step", "training_data")
"""What a custom loop does in place of the method's functions."""


@dataclass
class LoopTask:
    """One interaction: weights and data to train with, and the way back."""

    client: int
    round: int
    """From 0, as all numbers in Python."""
    task: int
    """The number of the client's task, from 0."""
    model: nn.Module
    """The run's net with the weights to train from; an own module may take its place."""
    data: TensorDataset
    """Normalised inputs (n, …) and labels (n,) of the task."""
    run: str
    """The id of the run."""
    seed: int
    """A seed of this client in this interaction, for random numbers other than torch's; torch's
    generators are seeded already, with another number."""
    _net: SplitNet = field(repr=False)
    _loss: float | None = None

    def load(self, model: nn.Module) -> None:
        """Copy the weights to train from into a module that has the run's net's tensors.

        Raises:
            ConfigError: it has others.
        """
        everything = self._net.everything()
        held = self._held_by(model, everything)
        with torch.no_grad():
            for key, tensor in everything.items():
                held[key].copy_(tensor)

    def send(self, model: nn.Module | None = None, *, loss: float | Tensor) -> None:
        """End the interaction with the weights of a module, by default those of ``model``.

        Args:
            model: has the run's net's tensors, trained.
            loss: the mean training loss, for the run's records.

        Raises:
            ConfigError: the module has other tensors.
        """
        if model is not None and model is not self.model:
            held = self._held_by(model, self._net.tensors())
            load_weights(self._net, {key: tensor.detach() for key, tensor in held.items()})
        self._loss = float(loss)

    def _held_by(self, model: nn.Module, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return those tensors of an own module that have keys of the run's net."""
        state, names, found = model.state_dict(keep_vars=True), self._net.own_names, {}
        for key, tensor in wanted.items():
            name = names.get(key, key.replace("/", ".", 1))
            held = state.get(name)
            if held is None or held.shape != tensor.shape:
                has = "no such tensor" if held is None else f"one of {list(held.shape)}"
                raise ConfigError(
                    f"the run's net has {name} of {list(tensor.shape)}, and "
                    f"{type(model).__name__} has {has}: give the module that [net] name names"
                )
            found[key] = held
        return found


def client(
    server: str,
    client_id: int,
    data: PathLike,
    *,
    state_dir: PathLike = "fedtide-state",
    device: str = "cpu",
    tls_ca: PathLike | None = None,
    tls_cert: PathLike | None = None,
    tls_key: PathLike | None = None,
    code: Sequence[PathLike] = (),
    weights: Sequence[PathLike] = (),
    give_up_after: float | None = None,
    start_over: bool = False,
    require_privacy: str | None = None,
    ledger: PathLike | None = None,
    tls_crl: PathLike | None = None,
    recipe: PathLike | None = None,
    deploy: bool = False,
    watch: PathLike | None = None,
    show_uploads: PathLike | None = None,
    show_tensors: bool = False,
    announce: CountDetail = "exact",
    min_cohort: int = 0,
    changing_cohorts: bool = False,
    check: bool = True,
    strict: bool = False,
    allow_method: Sequence[str] = (),
    allow_column: Sequence[str] = (),
    tell: Sequence[str] = (),
    scores: str | int | None = None,
    rules: PathLike | None = None,
    stay: bool = False,
) -> Iterator[LoopTask]:
    """Take part in a run as one client; yield each interaction to train, until the run is over.

    The method's server half does the rest, so it must leave the loop to FedAvg: ``fedavg``,
    ``fedper``, ``fedbn`` and the like. Options are those of ``fedcli join``.

    Args:
        server: ``HOST:PORT`` of the coordinator.
        client_id: the client's id.
        data: the client's own recordings or photos, or a partition's root.
        state_dir: where the private state and the session are kept; a loop that was killed goes on
            from there.
        device: where the data lie and the client is scored; a loop trains where it likes.
        tls_ca: authority of the server.
        tls_cert: this client's certificate.
        tls_key: its key.
        code: custom files that the run's config may name, such as that of the net.
        weights: a copy of the file of weights that the run's config may begin with.
        give_up_after: seconds without the server; by default never.
        start_over: go on from the initial private state where a lost one is too far back.
        require_privacy: what this site itself wants of privacy, such as
            ``"level=client,epsilon=4,delta=1e-5"``.
        ledger: the file of what the site has spent in all its runs.
        tls_crl: certificates that are revoked: no such server is joined.
        recipe: how the site's files say what the run asks for; by default ``site.toml`` beside
            them.
        deploy: keep a model live while the loop trains.
        watch: a folder in which what is complete becomes a task of an open run.
        show_uploads: a directory for what is sent, a line for each field, before it is sent; ``-``
            prints it.
        show_tensors: write the tensors of the last uploads into that directory as well.
        announce: how exactly to tell how many examples of each class there are: ``exact``,
            ``rounded`` or ``none``.
        min_cohort: take part in secure sums alone, and of so many clients or more.
        changing_cohorts: with ``min_cohort``, take sums whose clients change from round to round.
        check: warn about data that look like a mistake.
        strict: treat these warnings as errors.
        allow_method: take part only in runs of these methods; none allows any.
        allow_column: take part only in runs that read no other columns of the site's tables;
            ``"diagnosis:label"`` allows one as label.
        tell: what may leave although no noise covers it, with ``require_privacy``.
        scores: how many models are scored here over all runs, or ``"none"``.
        rules: a file with these conditions, whose keys are the names of these arguments.
        stay: take part in one run after the other at the address, for good, each with states in
            ``state_dir``/RUN. ``task.run`` says which run it is. A run that ends the client's part
            by a fault is a line in the log, and is joined again later.

    Raises:
        FedtideError: an argument is no good, the server refuses the client, or the run failed.
    """
    if announce not in DETAILS:
        raise ConfigError(f"announce={announce!r} is none of {', '.join(DETAILS)}")
    if min_cohort < 0:
        raise ConfigError(f"min_cohort={min_cohort} is no number of clients")
    if show_tensors and show_uploads is None:
        raise ConfigError("show_tensors goes with show_uploads")
    if stay and start_over:
        raise ConfigError("stay takes part in many runs, and start_over is for one")
    tls, states = (_given(tls_ca), _given(tls_cert), _given(tls_key)), _path(state_dir)
    spent = _given(ledger)
    allowed = Rules.read(
        _given(rules), require_privacy=require_privacy, min_cohort=min_cohort,
        changing_cohorts=changing_cohorts,
        allow_method=allow_method, allow_column=allow_column, tell=tell, scores=scores,
    )  # fmt: skip
    if stay and allowed.counts and spent is None:  # one for all runs
        spent = states.absolute().parent / LEDGER

    def host(run: str = "") -> Host:
        """Return what is ready to join the run that is served, or this one alone."""
        shown = None
        if show_uploads is not None:
            from fedcli.runtime.shown import Shown

            place = None if show_uploads == "-" else _path(show_uploads) / run
            shown = Shown(place, [client_id], tensors=show_tensors, asks=False)
        if run:
            make_room(states, run)
        found = host_of(
            [client_id], server, _path(data), states / run, torch.device(device), tls=tls,
            give_up_after=give_up_after, start_over=start_over, code=[*map(_path, code)],
            weights=[*map(_path, weights)], rules=allowed, ledger=spent,
            crl=_given(tls_crl), recipe=_given(recipe), deploys=deploy, incoming=_given(watch),
            show=shown, announce=announce, strict=strict, run_id=run,
        )  # fmt: skip
        if check or strict:
            from fedcli.data.sets.registry import is_published
            from fedcli.data.store.findings import tell_own

            if not is_published(found.data):
                tell_own(found.data, [client_id], strict=strict)
        return found

    if not stay:
        return _interactions(host())
    from fedcli.runtime.own_certificate import channel_credentials

    check_address(server, "--server")
    credentials = partial(channel_credentials, *tls)
    credentials()
    return _of_each_run(Address(server, str(client_id), credentials), host)


def _of_each_run(address: Address, host: Callable[[str], Host]) -> Iterator[LoopTask]:
    """Yield what is to be trained in one run after the other."""
    runs = each_run(address.run)
    run = next(runs)
    while True:
        outcome = Outcome.OVER
        try:
            yield from _interactions(host(run))
        except (FedtideError, OSError) as error:
            log.error("run %s: %s", run, error)
            outcome = Outcome.of(getattr(error, "exit_code", 1))
        run = runs.send(outcome)


def _path(given: PathLike) -> Path:
    require_utf8(given)
    return Path(os.fspath(given))


def _given(file: PathLike | None) -> Path | None:
    return None if file is None else _path(file)


def _interactions(host: Host) -> Iterator[LoopTask]:
    """Yield what is to be trained, and do all other orders."""
    with host.taking_part():
        _check_leaves_the_loop(host.workers.of(host.workers.clients[0]).method)
        for given in host.orders():
            if given.order.kind == rpc.ORDER_KIND_TRAIN:
                run = host.enrolment.members[given.worker.client].run_id
                host.hand_on((yield from _trained(given, run)))
            else:
                host.hand_on(host.execute(given))


def _check_leaves_the_loop(method: Method) -> None:
    """Raise ConfigError if a method has a function of its own for steps of local training."""
    own = [name for name in LOOP if getattr(type(method), name) is not getattr(FedAvg, name)]
    if own:
        raise ConfigError(
            f"method {method.name!r} trains in a way of its own ({own[0]}), which a loop of yours "
            "would replace: take a method that leaves the loop to FedAvg, such as fedavg, fedper "
            "or fedbn, or join by fedcli join"
        )


def _trained(found: GivenOrder, run: str) -> Generator[LoopTask, None, list[Result]]:
    """Let the loop train; return its result, none where nobody waits for it any more."""
    worker, order = found.worker, found.order
    try:
        half = worker.begin(order, found.payload)
        if isinstance(half, Result):  # of an earlier order for the same training
            return [half]
        half.begin_apart()
    except Exception as error:  # the client fails, and goes on
        return [done] if (done := worker.failed(order, error)) else []
    begun, task = time.monotonic(), _task_of(half, run)
    with seeded(half.ctx.seed("dropout")):
        torch.set_rng_state(half.drawn)
        yield task
    if worker.progress.superseded:
        return []
    if task._loss is None:
        raise ConfigError(
            f"round {task.round + 1} of client {task.client} was not sent: end what the loop does "
            "with task.send(model, loss=loss)"
        )
    try:
        if not math.isfinite(task._loss):
            raise TrainingFailed(f"the loss of client {task.client} is {task._loss}")
        _as_before(half.ctx.net.to(half.ctx.device))
        done = worker.end(half, half.end_apart(task._loss), time.monotonic() - begun)
    except Exception as error:
        done = worker.failed(order, error)
    return [] if done is None else [done]


def _task_of(half: ClientHalf, run: str) -> LoopTask:
    ctx = half.ctx
    assert isinstance(ctx.client, int)
    net, data = ctx.net.train(), TensorDataset(half.x, half.y)
    return LoopTask(ctx.client, ctx.round, ctx.task, net, data, run, ctx.seed("order"), net)


def _as_before(net: SplitNet) -> None:
    """Undo what a loop may have set: frozen parameters, and gradients."""
    for parameter in net.parameters_by_key().values():
        parameter.requires_grad_(True)
        parameter.grad = None
