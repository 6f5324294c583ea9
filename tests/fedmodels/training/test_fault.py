"""An error of a method's code names the function and the line; no error of it ends a client."""

from __future__ import annotations

import builtins
import inspect
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from fedcli.data.store.opened_data import open_data
from fedcli.runtime.state import StateDirectory
from fedcli.runtime.worker import Worker
from fedcli.runtime.workers import Workers
from fedmodels.errors import ClientFailed, ConfigError, RunFailed
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.tensors.bundle import Bundle, Problem
from fedmodels.tensors.uploads import Reduction
from fedmodels.training.contexts import Position, ServerContext, ServerState
from fedmodels.training.fault import fault_in, name_faults
from fedmodels.training.hooks import as_uploads
from fedmodels.training.run import RunFacts
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.reduction import reduced
from fedsrv.launch.given_data import check_net
from fedtide.inprocess import run_in_process
from tests.conftest import tiny_experiment


class OwnError(Exception):
    """What somebody's code may raise."""


@register("raises-for-tests")
@dataclass(frozen=True, kw_only=True)
class Raises(FedAvg):
    """Raises what ``raised`` says, where ``where`` says."""

    citation: ClassVar[str] = "none"
    reduction: ClassVar[Reduction] = "each"
    where: str = ""
    raised: str = "AttributeError"

    def _maybe(self, where):
        if where == self.where:
            raise {**vars(builtins), "OwnError": OwnError}[self.raised]("boom")

    def prepare(self, ctx, payload, state):
        self._maybe("prepare")
        return super().prepare(ctx, payload, state)

    def loss(self, ctx, batch, out, refs):
        self._maybe("loss")
        return super().loss(ctx, batch, out, refs)

    def predict(self, ctx, payload, state, x):
        self._maybe("predict")
        return super().predict(ctx, payload, state, x)

    def payload_spec(self, run):
        self._maybe("payload_spec")
        return super().payload_spec(run)

    def check_upload(self, ctx, state, upload, announced):
        self._maybe("check_upload")

    def pictures(self, ctx, payload, state, x, y):
        self._maybe("pictures")
        return {}

    def broadcast(self, ctx, state):
        self._maybe("broadcast")
        return super().broadcast(ctx, state)

    def finish(self, ctx, state, uploads):
        self._maybe("finish")
        return state, {}


def worker_of(digits, tmp_path, **switches):
    experiment = tiny_experiment(
        method={"name": "raises-for-tests", **switches}, evaluate={"pictures": 1}
    )
    states = StateDirectory(tmp_path / "0")
    return Worker(0, open_data(digits, 0), states, experiment, torch.device("cpu"))


ORDER = rpc.Order(
    kind=rpc.ORDER_KIND_TRAIN, client_id="0", interaction=0, base=-1, committed=-1, durable=-1,
    views=["after_local"], tasks_seen=1,
)  # fmt: skip
ERRORS = (
    "AttributeError", "NameError", "AssertionError", "ImportError", "OSError", "StopIteration",
    "OwnError",
)  # fmt: skip


@pytest.mark.parametrize("raised", ERRORS)
@pytest.mark.parametrize("where", ["prepare", "loss", "predict"])
def test_an_error_fails_one_client_for_one_interaction(digits, tmp_path, caplog, where, raised):
    worker = worker_of(digits, tmp_path, where=where, raised=raised)
    payload = payload_for(worker)
    done = worker.execute(ORDER, payload)
    assert done.failure.startswith(f"method raises-for-tests: {where} failed (test_fault.py:")
    assert done.failure.endswith(f"{raised}: boom")
    assert "Traceback" in caplog.text


def payload_for(worker):
    server = worker.method.init_server(worker.run)
    ctx = ServerContext(worker.run, Position(0, 0, 0), (0,))
    return FedAvg().broadcast(ctx, server)[0]


def test_a_picture_that_fails_loses_no_run(digits, tmp_path, caplog):
    worker = worker_of(digits, tmp_path, where="pictures")
    order = rpc.Order(kind=rpc.ORDER_KIND_FINISH, client_id="0", base=-1, committed=-1, durable=-1)
    assert worker.execute(order, payload_for(worker)).failure == ""
    assert "client 0 drew no picture: boom" in caplog.text


@pytest.mark.parametrize("raised", ["MemoryError", "KeyboardInterrupt", "SystemExit"])
def test_what_ends_the_process_still_does(digits, tmp_path, raised):
    worker = worker_of(digits, tmp_path, where="prepare", raised=raised)
    with pytest.raises((MemoryError, KeyboardInterrupt, SystemExit)):
        worker.execute(ORDER, payload_for(worker))


@pytest.mark.parametrize("raised", ["AttributeError", "NameError", "OwnError"])
def test_no_client_is_behind_what_fails_for_everybody(raised):
    run = RunFacts(tiny_experiment(), Problem((1, 8, 8), 10))
    ctx = ServerContext(run, Position(4, 2, 0), (0, 1))
    weights = {"w": torch.zeros(2)}
    sent = {c: Bundle(weights, scalars={"num_examples": 1.0}) for c in (0, 1)}
    method = Raises(where="finish", raised=raised)
    with pytest.raises(RunFailed) as caught:
        reduced(method, ctx, ServerState(Bundle(weights)), as_uploads(method, sent), 1)
    line = str(caught.value)
    assert "no single client's fault: method raises-for-tests: finish failed (test_f" in line
    assert f"{raised}: boom" in line


def test_the_server_half_is_named_wherever_it_fails(digits, tmp_path):
    experiment = tiny_experiment(method={"name": "raises-for-tests", "where": "broadcast"})
    with pytest.raises(RunFailed, match=r"broadcast failed \(test_fault.py:\d+\): AttributeError"):
        run_in_process(experiment, digits, tmp_path / "run")


def test_an_upload_that_cannot_be_checked_is_refused(digits, tmp_path):
    experiment = tiny_experiment(method={"name": "raises-for-tests", "where": "check_upload"})
    line = r"^client 0 failed .* check_upload failed \(test_fault.py:\d+\): Attrib"
    with pytest.raises(ClientFailed, match=line):
        run_in_process(experiment, digits, tmp_path / "run")


def test_what_everybody_needs_is_named_before_a_run_begins(digits, tmp_path):
    where = "payload_spec"
    experiment = tiny_experiment(method={"name": "raises-for-tests", "where": where})
    workers = Workers([0], digits, tmp_path / "states", torch.device("cpu"))
    for begin in (lambda: workers.begin(experiment), lambda: check_net(experiment, digits)):
        with pytest.raises(RunFailed, match=rf"{where} failed \(test_fault.py:\d+\): Attrib"):
            begin()


def test_the_line_is_the_last_one_in_the_methods_file():
    @dataclass(frozen=True, kw_only=True)
    class Mine(Raises):
        def finish(self, ctx, state, uploads):
            return torch.zeros(2).reshape(3)

    method = Mine()
    source, first = inspect.getsourcelines(Mine.finish)
    with pytest.raises(RuntimeError) as caught:
        method.finish(None, None, None)
    line = first + len(source) - 1
    found = fault_in(replace(method), caught.value)
    assert f"finish failed (test_fault.py:{line}): RuntimeError: shape" in found


def test_other_errors_are_left_as_they_are():
    for error in (ConfigError("one line"), ValueError("not of the method"), MemoryError()):
        with pytest.raises(type(error)) as caught, name_faults(FedAvg()):
            raise error
        assert caught.value is error
