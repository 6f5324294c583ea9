"""What leaves a site: each field has a class, each call passes the gate, and rules hold back."""

from __future__ import annotations

import ast
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from google.protobuf import descriptor_pb2, descriptor_pool

from fedcli.gate.gate import MASKED, NOISED, TRUSTED, Gate
from fedcli.gate.rules import Rules
from fedcli.joining import host_of
from fedcli.runtime.link import Link, Membership
from fedcli.runtime.worker import Result
from fedmodels import methods
from fedmodels.config.combinations import LISTED
from fedmodels.errors import ConfigError, LinkError
from fedmodels.facts.config_file import parse_experiment
from fedmodels.nets.alp import INFLUENCE
from fedmodels.tensors.bundle import Bundle, Problem
from fedmodels.training import asked
from fedmodels.training.run import RunFacts
from fedpb.tables import table_of
from fedpb.told import (
    FREE,
    HELD_BACK,
    Door,
    Passed,
    Pushed,
    check_schema,
    classes,
    figures,
    without_number,
)
from fedpb.v1 import coordinator_pb2 as rpc
from fedpb.v1.description_pb2 import ClientDescription, TaskCounts
from fedpb.v1.enrolment_pb2 import EnrolRequest
from tests.conftest import tiny_experiment
from tests.fedcli.gate.test_rules import RUN
from tests.sizes import ROOT

FLOOR = "level=client,epsilon=2,delta=1e-5"
SENT = (
    rpc.PrepareRequest, rpc.JoinRequest, rpc.JoinSeveralRequest, rpc.PullRequest, rpc.PushHeader,
    rpc.BeatRequest, rpc.AnnounceRequest, rpc.LeaveRequest, EnrolRequest,
)  # fmt: skip
"""What a client sends; a PushSeveralRequest is put together of results that have passed."""
CPU = torch.device("cpu")
PROBLEM = Problem((1, 8, 8), 10)


def gate(**options: Any) -> Gate:
    return Gate(Rules.of(**options))


# --- what is an echo ------------------------------------------------------------------------------


def test_what_a_coordinator_says_later_of_its_config_is_a_guess() -> None:
    one = gate(require_privacy=FLOOR)
    one.heard({"data": {"classes": ["a"], "mean": [0.5]}})
    one.heard({"data": {"classes": ["a", "Miller"], "mean": [0.25]}})
    assert one.holds_back(["a", "Miller"])
    assert not one.holds_back(["a"])
    with pytest.raises(ConfigError, match="has mean"):
        one.passed(rpc.JoinRequest(description=ClientDescription(mean=[0.25])))


# --- the only way out -----------------------------------------------------------------------------


def test_each_field_that_a_client_sends_has_a_class() -> None:
    for message in SENT:
        check_schema(message.DESCRIPTOR)
    assert {*classes().values()} == {*FREE, *HELD_BACK, "parts", "tensors", "relay"}


def test_a_new_field_without_a_class_does_not_become_bytes() -> None:
    """As if somebody had added Report.heart_rate, three messages below a PushHeader."""
    file = descriptor_pb2.FileDescriptorProto()
    rpc.DESCRIPTOR.CopyToProto(file)
    report = next(one for one in file.message_type if one.name == "Report")
    report.field.add(name="heart_rate", number=99, type=1, label=1)
    pool = descriptor_pool.DescriptorPool()
    for known in rpc.DESCRIPTOR.dependencies:
        other = descriptor_pb2.FileDescriptorProto()
        for below in (*known.dependencies, known):
            below.CopyToProto(other)
            pool.Add(other)
            other = descriptor_pb2.FileDescriptorProto()
    pool.Add(file)
    with pytest.raises(ConfigError, match=r"Report\.heart_rate has no class"):
        check_schema(pool.FindMessageTypeByName("fedpb.v1.PushHeader"))


@pytest.mark.parametrize(
    ("place", "stubs"),
    [("fedcli", 6), pytest.param("fedplugins/relays", 3, marks=pytest.mark.needs("relays"))],
)
def test_no_stub_of_a_site_or_a_relay_takes_what_has_passed_no_door(place: str, stubs: int) -> None:
    kinds = {"unary_unary", "unary_stream", "stream_unary", "stream_stream"}
    found = list[str]()
    for path in (path for path in (ROOT / place).rglob("*.py") if path.parent.name != "tests"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr not in kinds:
                continue
            written = [ast.unparse(one) for one in node.args]
            is_health = written == ["'/grpc.health.v1.Health/Check'"]
            found += [f"{path.name} {written[0]}"] * (not is_health)
            assert is_health or written[1] == "Passed.encoded", f"{path}: {written}"
    assert len(found) == stubs, found


def test_whoever_is_no_door_makes_no_bytes() -> None:
    for make in (lambda: Passed(object(), b"x"), lambda: Pushed(None, rpc.PushHeader(), Bundle())):
        with pytest.raises(TypeError, match=r"door of fedpb\.told"):
            make()
    for other in (b"x", rpc.JoinRequest()):
        with pytest.raises(TypeError, match="has passed no door"):
            Passed.encoded(other)  # type: ignore[arg-type]
    message = rpc.JoinRequest(client_id="3")
    assert Passed.encoded(Door().passed(message)) == message.SerializeToString()


# --- what a description tells ---------------------------------------------------------------------

SAID = {"data": {"classes": ["a", "b"], "mean": [0.5], "std": [0.25]}}


def described(**facts: Any) -> rpc.JoinRequest:
    return rpc.JoinRequest(client_id="3", description=ClientDescription(num_classes=2, **facts))


@pytest.mark.parametrize("key", ["mean", "std"])
def test_with_a_floor_moments_leave_only_as_an_echo(key: str) -> None:
    """From the exact mean of a table, a single cell can be read off."""
    for message in (
        described(**{key: [0.123]}),
        rpc.AnnounceRequest(description=ClientDescription(**{key: [0.123]})),
        rpc.JoinSeveralRequest(descriptions=[ClientDescription(**{key: [0.123]})]),
    ):
        held = gate(require_privacy=FLOOR)
        held.heard(SAID)
        with pytest.raises(ConfigError, match=f"has {key}.*--tell moments"):
            held.passed(message)
        gate(require_privacy=FLOOR, tell=["moments"]).passed(message)
        Gate().passed(message)
    held.passed(described(**{key: SAID["data"][key]}))
    held.passed(described(mean=[0.0], std=[1.0]))


DEALT = {"seed": 1, "data": {"name": "digits"}, "scenario": {"kind": "per_class_shards"}}


@pytest.mark.parametrize(
    "made",
    [
        {"seed": 1},
        {**DEALT, "data": {"name": "table"}},
        {**DEALT, "data": {"name": "site.py:rows"}},
        {**DEALT, "scenario": {"kind": "natural", "zscore": "per_client_channel"}},
        {**DEALT, "scenario": {"kind": "cut.py:apart"}},
        {**DEALT, "data": "digits"},
    ],
)
def test_a_table_of_how_data_were_dealt_out_lets_no_moments_of_a_client_pass(made: Any) -> None:
    """A published data set has moments that anybody knows, unless each client has its own."""
    for key in ("mean", "std"):
        held = gate(require_privacy=FLOOR)
        with pytest.raises(ConfigError, match=r"--tell moments|malformed"):
            held.passed(described(**{key: [0.123]}, partition=table_of(made)))
    gate(require_privacy=FLOOR).passed(described(mean=[0.123], partition=table_of(DEALT)))


def test_a_table_of_how_data_were_dealt_out_has_no_moments_but_those_said() -> None:
    targets = {"columns": {"target_mean": [3.0], "target_std": [1.5]}}
    for data in (SAID["data"], targets):
        message = described(partition=table_of({**DEALT, "data": {"name": "digits", **data}}))
        with pytest.raises(ConfigError, match=r"has partition.*--tell moments"):
            gate(require_privacy=FLOOR).passed(message)
        held = gate(require_privacy=FLOOR)
        held.heard({"data": data})
        held.passed(message)


def test_a_table_of_how_data_were_dealt_out_lets_no_names_of_own_data_pass() -> None:
    names, held = ["Name 1962-04-03"], gate(allow_column=["diag:label"])
    held.passed(described(class_names=names, partition=table_of(DEALT)))
    made = table_of({**DEALT, "data": {"name": "table"}})
    with pytest.raises(ConfigError, match=r"has class_names.*--tell labels"):
        held.passed(described(class_names=names, partition=made))


@pytest.mark.parametrize("rules", [{"require_privacy": FLOOR}, {"allow_column": ["diag:label"]}])
def test_names_of_classes_leave_only_as_an_echo(rules: dict[str, Any]) -> None:
    held = gate(**rules)
    held.heard(SAID)
    held.passed(described(class_names=["b", "a"]))
    held.heard_names(["c"])
    held.passed(described(class_names=["a", "c"]))
    with pytest.raises(ConfigError, match=r"has class_names.*--tell labels"):
        held.passed(described(class_names=["a", "Name 1962-04-03"]))
    gate(**rules, tell=["labels"]).passed(described(class_names=["Name 1962-04-03"]))


@pytest.mark.parametrize("rules", [{"require_privacy": FLOOR}, {"allow_column": ["diag:label"]}])
def test_a_refusal_for_a_label_is_one_bit_and_later_guesses_change_nothing(
    rules: dict[str, Any],
) -> None:
    """By names in one order after the other, a coordinator would find the site's labels."""
    held, message = gate(**rules), described(class_names=["a", "flu", "gout"])
    held.heard(SAID)
    lines = set[str]()
    for guess in (["flu"], ["gout"], ["flu", "gout", "c"]):
        with pytest.raises(ConfigError, match="has class_names") as refused:
            held.passed(message)
        lines.add(str(refused.value))
        held.heard_names(guess)
    (line,) = lines
    assert not any(name in line for name in ("flu", "gout"))
    with pytest.raises(ConfigError, match="has class_names"):
        held.passed(message)
    held.passed(described(class_names=["b", "a"]))


def test_with_a_floor_texts_of_tasks_are_left_out() -> None:
    tasks = [TaskCounts(train=[3, 1], unusual="column age 3.1 times", drifted="age", why="age")]
    told = described(tasks=tasks)
    gate(require_privacy=FLOOR).passed(told)
    assert told == described(tasks=[TaskCounts(train=[3, 1])])
    told = described(tasks=tasks)
    gate(require_privacy=FLOOR, tell=["text"]).passed(told)
    assert told == described(tasks=tasks)


# --- what a report tells --------------------------------------------------------------------------


def reported() -> rpc.PushHeader:
    report = rpc.Report(
        loss=0.5, seconds=2.0, peak_rss_bytes=64, num_examples=7,
        extra={"generator_loss": 1.0, "epsilon": 2.0, "epsilon_next": 3.0},
    )  # fmt: skip
    return rpc.PushHeader(client_id="3", report=report, failure="the patient is 42")


def test_with_a_floor_a_report_tells_numbers_of_examples_and_what_was_spent() -> None:
    header = reported()
    gate(require_privacy=FLOOR).pushed(header, Bundle())
    withheld = ["loss", "seconds", "extra", "peak_rss_bytes"]
    assert sorted(header.report.withheld) == sorted(withheld)
    assert header == rpc.PushHeader(
        client_id="3",
        report=rpc.Report(
            num_examples=7, extra={"epsilon": 2.0, "epsilon_next": 3.0},
            withheld=header.report.withheld,
        ),
    )  # fmt: skip
    header = reported()
    gate(require_privacy=FLOOR, tell=["loss", "timing", "metrics", "failure"]).pushed(
        header, Bundle()
    )
    assert header == reported()


def test_what_is_held_back_is_so_while_another_thread_finds_out_what_that_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second message of a kind came while the fields of the first were looked up, and left."""
    one, others = gate(require_privacy=FLOOR), list[rpc.PushHeader]()

    def meanwhile() -> None:
        others.append(reported())
        one.pushed(others[0], Bundle())

    class Slow(dict[str, str]):
        def __getitem__(self, key: str) -> str:
            if key == "Report.loss" and not others:
                thread = threading.Thread(target=meanwhile)
                thread.start()
                thread.join()
            return super().__getitem__(key)

    slow = Slow(classes())
    monkeypatch.setattr("fedcli.gate.gate.classes", lambda: slow)
    one.pushed(reported(), Bundle())
    assert "loss" in others[0].report.withheld


def figures_left(held: Gate, **extra: float) -> set[str]:
    header = rpc.PushHeader(report=rpc.Report(extra=extra))
    held.pushed(header, Bundle())
    assert ("extra" in header.report.withheld) == (len(header.report.extra) < len(extra))
    return {*header.report.extra}


@pytest.mark.needs
def test_each_figure_of_each_method_and_part_has_a_class() -> None:
    """At the most of what their settings make them report."""
    found = {name for part in LISTED for name in part.tells}
    for name in methods.names():
        if name != "fedali":
            run = RunFacts(tiny_experiment(method=name), PROBLEM)
            found |= asked.reported(methods.make(name), run)
    found |= {f"{one}_0" for one in INFLUENCE}  # of FedAli, by [evaluate] influence
    assert {*map(without_number, found)} == {*figures()}
    assert {*figures().values()} <= {*HELD_BACK, *FREE}


def test_a_figure_without_a_class_does_not_leave() -> None:
    for rules in ({}, {"require_privacy": FLOOR, "tell": ["metrics"]}):
        with pytest.raises(ConfigError, match="the report has patients, which has no class"):
            figures_left(gate(**rules), patients=42.0)
        held = gate(**rules)
        held.declare(["patients_0"])
        assert figures_left(held, patients_7=42.0) == {"patients_7"}
    held = gate(require_privacy=FLOOR)
    held.declare(["patients"])
    assert figures_left(held, patients=42.0, epsilon=1.0) == {"epsilon"}


def test_a_figure_is_held_back_by_its_own_class() -> None:
    said = {"generator_loss": 1.0, "alpha": 0.5, "prequential": 0.9, "replay_acceptance_3": 0.1}
    assert figures_left(Gate(), **said) == {*said}
    assert figures_left(gate(require_privacy=FLOOR), **said) == set()
    told = gate(require_privacy=FLOOR, tell=["loss"])
    assert figures_left(told, **said) == {"generator_loss"}
    told = gate(require_privacy=FLOOR, tell=["metrics"])
    assert figures_left(told, **said) == {"alpha", "replay_acceptance_3"}
    for scores in (3, "none"):  # an accuracy is no model that the site counts
        assert figures_left(gate(scores=scores), **said) == {*said} - {"prequential"}


@pytest.mark.parametrize(
    ("rules", "leaves"),
    [
        ({}, True),
        ({"require_privacy": FLOOR}, False),
        ({"require_privacy": FLOOR, "scores": 3}, True),
        ({"scores": "none"}, False),
        ({"scores": 3}, True),
    ],
)
def test_scores_are_off_under_a_floor_unless_a_number_of_models_is_allowed(
    rules: dict[str, Any], leaves: bool
) -> None:
    header = rpc.PushHeader(report=rpc.Report(counts=[rpc.Counts(correct=[3], support=[4])]))
    if leaves:
        gate(**rules).pushed(header, Bundle())
    else:
        with pytest.raises(ConfigError, match=r"Counts has support.*--scores N"):
            gate(**rules).pushed(header, Bundle())


UPLOAD = Bundle({"base/w": torch.ones(2)}, scalars={"num_examples": 3.0})


@pytest.mark.parametrize(
    ("rules", "covers", "why"),
    [
        ({}, "", None),
        ({"require_privacy": FLOOR}, "", "no noise covers: --require-privacy; --tell weights/base"),
        ({"require_privacy": FLOOR}, NOISED, None),
        ({"require_privacy": FLOOR}, MASKED, "no noise covers: --require-privacy"),
        ({"require_privacy": FLOOR, "min_cohort": 3}, MASKED, "no noise covers"),
        ({"require_privacy": FLOOR, "min_cohort": 3}, NOISED, "no mask covers"),
        ({"require_privacy": FLOOR}, TRUSTED, "no noise covers"),
        ({"require_privacy": f"{FLOOR},where=server"}, TRUSTED, None),
        ({"require_privacy": FLOOR, "tell": ["weights/base"]}, "", None),
        ({"require_privacy": FLOOR, "tell": ["bare"]}, "", None),
        ({"min_cohort": 3}, NOISED, "no mask covers: --min-cohort"),
        ({"min_cohort": 3}, MASKED, None),
        ({"allow_method": ["fedavg"]}, "", None),
    ],
)
def test_a_key_of_an_upload_that_nothing_hides_does_not_leave(
    rules: dict[str, Any], covers: str, why: str | None
) -> None:
    hidden = {"weights/base/w": covers} if covers else {}
    if why is None:
        gate(**rules).pushed(rpc.PushHeader(), UPLOAD, hidden)
    else:
        with pytest.raises(ConfigError, match=why):
            gate(**rules).pushed(rpc.PushHeader(), UPLOAD, hidden)


@pytest.mark.parametrize("rules", [{}, {"min_cohort": 3}])
@pytest.mark.parametrize("how", [NOISED, TRUSTED, MASKED, ""])
def test_masks_stand_for_no_noise(rules: dict[str, Any], how: str) -> None:
    """They fall in the sum, which a coordinator that deviates makes over whom it likes."""
    masked, inside = Bundle({"masked": torch.ones(2)}), ["weights/a", "weights/b"]
    covers = {"weights/masked": MASKED, "weights/a": NOISED, "weights/b": how}
    held = gate(require_privacy=FLOOR, **rules)
    if how == NOISED:
        held.pushed(rpc.PushHeader(), masked, covers, inside)
    else:
        with pytest.raises(ConfigError, match="the upload has weights/b, which no noise covers"):
            held.pushed(rpc.PushHeader(), masked, covers, inside)
    gate(min_cohort=3).pushed(rpc.PushHeader(), masked, covers, inside)


def test_a_result_that_does_not_leave_is_declined() -> None:
    sent = list[rpc.PushRequest]()

    def push(piece: Passed) -> rpc.PushResponse:
        sent.append(rpc.PushRequest.FromString(Passed.encoded(piece)))
        return rpc.PushResponse()

    result = Result(rpc.Order(client_id="3"), UPLOAD, rpc.Report(loss=0.5, num_examples=3))
    with closing(Link("127.0.0.1:1", gate=gate(require_privacy=FLOOR))) as link:
        link._push_whole = push
        link.push(Membership(3, "run", b"token"), result)
    (one,) = sent
    assert one.header.reason == rpc.FAILURE_REASON_DECLINED
    assert not one.HasField("frame")
    assert one.header.report == rpc.Report()
    assert not one.header.bundle.scalars


# --- before a site joins --------------------------------------------------------------------------


def told_by(monkeypatch: pytest.MonkeyPatch, text: str, **more: Any) -> None:
    """Have each Prepare answer that the run's config is this one, or what ``more`` says of it."""
    experiment = parse_experiment(text).to_dict()
    facts = {"data": table_of(experiment["data"]), "experiment": table_of(experiment)}
    answer = rpc.PrepareResponse(**{"run_id": "0" * 32, **facts, **more})
    monkeypatch.setattr(Link, "_unary", lambda self, name, reply: lambda request: answer)


MEASURED = RUN.replace("[data]", "[data]\nmean = [0.5]\nstd = [0.25]") + """
[privacy]
level = "client"
where = "clients"
noise_multiplier = 4.0
delta = 1e-5
allow = ["announced", "examples", "loss"]
[evaluate]
views = []
"""  # fmt: skip


def test_a_table_without_the_moments_that_the_config_has_is_no_table_to_cut_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.csv").write_text("ax,ay,kind,walk\n" + "1,2,a,1\n" * 40)
    data = parse_experiment(MEASURED).to_dict()["data"]
    del data["mean"], data["std"]
    told_by(monkeypatch, MEASURED, data=table_of(data))
    with pytest.raises(ConfigError, match=r"says another \[data\]"):
        host_of([0], "127.0.0.1:1", tmp_path / "own.csv", tmp_path / "states", CPU,
                rules=Rules.of(require_privacy=FLOOR))  # fmt: skip


@pytest.mark.parametrize(
    "rules", [{"require_privacy": FLOOR}, {"min_cohort": 3}, {"allow_method": ["fedrep"]}]
)
def test_a_server_that_does_not_say_what_its_run_is_learns_nothing(
    rules: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told_by(monkeypatch, RUN, run_id="")
    (tmp_path / "own.csv").write_text("ax,ay,kind,walk\n" + "1,2,a,1\n" * 40)
    with pytest.raises(LinkError, match="does not show its config"):
        host_of([0], "127.0.0.1:1", tmp_path / "own.csv", tmp_path / "states", CPU,
                rules=Rules.of(**rules))  # fmt: skip


@pytest.mark.parametrize("tell", [(), ("labels",)])
def test_labels_that_the_run_does_not_list_are_found_before_anything_leaves(
    tell: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = "".join(f"1,2,{kind},1\n" for kind in ["a"] * 40 + ["Name 1962-04-03"] * 40)
    (tmp_path / "own.csv").write_text(f"ax,ay,kind,walk\n{rows}")
    told_by(monkeypatch, RUN)

    def host() -> None:
        host_of([0], "127.0.0.1:1", tmp_path / "own.csv", tmp_path / "states", CPU,
                rules=Rules.of(allow_column=["ax", "ay", "walk", "kind:label"], tell=tell),
                ).link.close()  # fmt: skip

    if tell:
        host()
    else:
        with pytest.raises(ConfigError, match=r"labels are not those of the run.*--tell") as caught:
            host()
        assert "Name" not in str(caught.value)
