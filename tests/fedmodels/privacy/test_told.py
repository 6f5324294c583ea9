"""What leaves a process of a run with noise: each field of each message, record and event."""

import importlib
import json
import math
import pkgutil
from types import SimpleNamespace

import pytest

import fedpb.v1
from fedcli.parts.privacy import coarse
from fedmodels.errors import FedtideError, PayloadError
from fedmodels.methods.fedavg import FedAvg
from fedmodels.numerics.secrecy import Secret
from fedmodels.privacy.coverage import BESIDE, assumptions, told_beside
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.progress.events import EventLog
from fedsrv.transport.journal import Journal
from fedtide.inprocess import run_in_process
from tests.conftest import records_of, tiny_experiment
from tests.fedmodels.privacy.told import COVERS, cover_of, fields
from tests.fedsrv.engine.test_private_rounds import BESIDE as TOLD
from tests.fedsrv.engine.test_private_rounds import NOISE, SMALL_GLDP
from tests.sizes import ROOT


def messages():
    """Yield each field of each message of the schema."""
    for module in pkgutil.iter_modules(fedpb.v1.__path__):
        if module.name.endswith("_pb2"):
            schema = importlib.import_module(f"fedpb.v1.{module.name}").DESCRIPTOR
            pending = [*schema.message_types_by_name.values()]
            while pending:
                message = pending.pop()
                pending += [m for m in message.nested_types if not m.GetOptions().map_entry]
                yield from (f"{message.name}.{field.name}" for field in message.fields)


def test_each_field_of_each_message_has_a_cover():
    """A new field fails here until somebody says what covers it: told.py beside this file."""
    found = {*messages()}
    assert len(found) > 250
    assert found - fields().keys() == set()
    assert fields().keys() - found == set(), "no message has them any more"
    for level in ("client", "example"):
        for name in found:
            assert cover_of(name, level) in {*COVERS, *BESIDE}, name


def test_what_nobody_has_thought_about_has_no_cover():
    for path in ("Report.heart_rate", "record.heart_rate", "record.clients", "event.heart.rate"):
        with pytest.raises(KeyError):
            cover_of(path, "client")


def paths(value, path):
    """Yield the path of each value; what is listed by numbers or names is one star."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from paths(inner, f"{path}.{'*' if str(key).isdecimal() else key}")
    else:
        yield path


def hiding(method, evaluate=None, **table):
    privacy = {**NOISE, **table}
    return tiny_experiment(
        method=method, privacy=privacy, schedule={"rounds": 1}, evaluate=evaluate or {}
    )


DRIFT = {"evaluate": {"drift": True}, "allow": (*TOLD, "metrics")}
LEVELS = {
    "server": hiding(SMALL_GLDP, **DRIFT),
    "adaptive": hiding("fedavg", clip_quantile=0.5),
    "clients": hiding("fedproto", where="clients"),
    "each": hiding("pfedgraph", where="clients"),
    "example": hiding("fedproto", **DRIFT, level="example"),
}


@pytest.mark.parametrize("name", LEVELS)
def test_what_a_run_writes_and_tells_is_covered_or_allowed(name, digits, tmp_path, monkeypatch):
    """Records, summary and events: the report, pages, trackers and status are made of these."""
    pytest.importorskip("dp_accounting", reason="needs the extra privacy")
    experiment, told = LEVELS[name], []
    tell = EventLog.tell

    def heard(log, kind, client="", **facts):
        told.append({kind: facts} if facts else {kind: ""})
        return tell(log, kind, client, **facts)

    monkeypatch.setattr(EventLog, "tell", heard)
    summary = run_in_process(experiment, digits, tmp_path / "run")
    found = {p for record in records_of(tmp_path / "run") for p in paths(record, "record")}
    found |= {*paths(json.loads(json.dumps(summary)), "summary")}
    found |= {p for event in told for p in paths(event, "event")}
    bare = []
    for path in sorted(found):
        try:
            cover = cover_of(path, experiment.privacy.level)
        except KeyError:
            cover = "nothing"
        if cover not in {*COVERS, *experiment.privacy.allow}:
            bare.append((path, cover))
    assert not bare


def test_the_page_says_what_each_name_of_allow_stands_for():
    page = (ROOT / "docs" / "differential-privacy.md").read_text()
    for name, meaning in BESIDE.items():
        assert f"| `{name}` | {meaning} |" in page


@pytest.mark.parametrize("level", ["client", "example"])
def test_an_error_that_data_may_be_behind_is_not_told(level, digits, tmp_path, monkeypatch):
    def loss(*_):
        raise ValueError("the patient is 42")

    monkeypatch.setattr(FedAvg, "loss", loss)
    with pytest.raises(FedtideError, match="its own log says why") as caught:
        run_in_process(hiding("fedavg", level=level), digits, tmp_path / "run")
    assert "42" not in str(caught.value)


def test_what_is_wrong_with_a_hidden_upload_is_not_told(digits, tmp_path, monkeypatch):
    def check(*_):
        raise PayloadError("the weights are 42")

    monkeypatch.setattr(FedAvg, "check_upload", check)
    with pytest.raises(FedtideError, match="the coordinator's log says why") as caught:
        run_in_process(hiding("fedavg"), digits, tmp_path / "run")
    assert "42" not in str(caught.value)


def test_the_log_of_calls_has_no_digest_of_an_upload_that_noise_hides():
    lines, caller = [], SimpleNamespace(peer=lambda: "ipv4:127.0.0.1:1", auth_context=dict)
    audit = SimpleNamespace(tell=lambda what, **facts: lines.append({"what": what, **facts}))
    header = rpc.PushHeader(interaction=1, kind=rpc.ORDER_KIND_TRAIN, failure="no")
    for secret in (None, Secret(b"1" * 32), Secret(b"2" * 32)):
        Journal(audit, None, secret).sent(caller, [3], header, 100, b"upload")
    digests = [line["sha256"] for line in lines]
    assert digests[0] == b"upload".hex()
    assert len({*digests}) == 3
    assert {cover_of(f"audit.{key}", "client") for key in lines[1]} <= {*COVERS, *TOLD}


@pytest.mark.parametrize("level", ["client", "example"])
def test_time_is_told_up_to_a_power_of_two_and_states_by_a_keyed_digest(digits, tmp_path, level):
    """The clients keep no state, so that their plain digests would be one."""
    reports, experiment = [], hiding("fedavg", level=level)
    run_in_process(
        experiment, digits, tmp_path / "run", after=lambda done: reports.append(done.report)
    )
    digests = [report.state_sha256 for report in reports if report.state_sha256]
    assert len(digests) == len({*digests}) == 3
    assert all(math.log2(one.seconds).is_integer() for one in reports if one.num_examples)
    assert [coarse(s) for s in (0.0, 1.0, 1.01, 4.0, 70.0)] == [1.0, 1.0, 2.0, 4.0, 128.0]


def test_what_a_run_decides_by_scores_is_named():
    held = {"data": {"validation_share": 0.2}}
    stops = tiny_experiment(schedule={"patience": 2}, **held)
    going_on = {"open": True, "order": "tasks_outer"}
    drops = tiny_experiment(schedule=going_on, trigger={"score_drop": 0.1})
    drifts = tiny_experiment(schedule=going_on, trigger={"drift": True})
    names = [told_beside(e, scores=False, metrics=False) for e in (stops, drops, drifts)]
    assert [each[-1] for each in names] == ["stopping", "trigger", "trigger"]
    assert told_beside(tiny_experiment(), scores=True, metrics=False) == [*TOLD]


@pytest.mark.parametrize("sampling", ["uniform", "weighted"])
def test_cohorts_that_follow_from_what_was_announced_are_an_assumption(sampling):
    schedule = {"sampling": sampling, "per_round": 2}
    said = assumptions(tiny_experiment(privacy=NOISE, schedule=schedule))
    assert ("drawn by announced numbers of examples" in said) == (sampling == "weighted")
