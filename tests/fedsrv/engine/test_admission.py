"""Who may take part, and who says what the problem is."""

import json

import pytest

from fedmodels.errors import ConfigError, PayloadError, RunFailed
from fedmodels.tensors.bundle import EVALUATOR
from fedsrv.engine.admission import Admission
from fedsrv.progress.events import EventLog
from fedsrv.transport.refusals import UnknownSession
from fedsrv.transport.remote_cohort import RemoteCohort
from fedsrv.transport.spool import Spool
from tests.conftest import tiny_experiment
from tests.fedsrv.engine.test_private_rounds import BESIDE

FACTS = {
    "format": 1,
    "input_shape": [3, 8, 8],
    "num_classes": 2,
    "tasks": [{"train": [3, 1], "test": [1, 0]}, {"train": [0, 5], "test": [0, 2]}],
}


def text(**changes):
    return json.dumps({**FACTS, **changes})


OTHER = text(input_shape=[8])


def of(known=(), **overrides):
    return Admission.of(tiny_experiment(**overrides), dict(known))


def come(admission, client, said):
    admission.check(client, said)
    return admission.admit(client, said)


def test_one_client_states_nothing_for_the_others():
    """More than half of three decide; the one who came first is turned away, and stays so."""
    admission = of()
    assert come(admission, 0, OTHER) == []
    assert come(admission, 1, text()) == []
    assert come(admission, 2, text()) == [0]
    with pytest.raises(PayloadError, match=r"client 0 has inputs \[8\] and 2 classes; the run has"):
        admission.check(0, OTHER)
    with pytest.raises(PayloadError, match="3 classes"):
        admission.check(0, text(num_classes=3, tasks=[]))
    assert come(admission, 0, text()) == []
    assert admission.settle() == []


def test_who_joins_again_takes_back_what_it_said():
    admission = of()
    for _ in range(3):
        assert come(admission, 0, OTHER) == []
    assert come(admission, 0, text()) == []
    assert come(admission, 1, text()) == []


def test_the_evaluator_has_no_say():
    admission = of()
    assert come(admission, EVALUATOR, text(input_shape=[8], tasks=[])) == []
    assert come(admission, 0, OTHER) == []
    assert come(admission, 1, text()) == []
    assert come(admission, 2, text()) == [EVALUATOR, 0]


def test_where_nobody_agrees_the_run_says_what_to_do():
    admission = of(schedule={"clients": 2})
    come(admission, 0, text())
    come(admission, 1, OTHER)
    line = r"client 0 has inputs \[3, 8, 8\] and 2 classes; client 1 has inputs \[8\].*\[data\]"
    with pytest.raises(RunFailed, match=line):
        admission.settle()


def test_some_may_decide_where_not_all_come():
    """Two of five that agree, and no more are there."""
    admission = of(schedule={"clients": 5})
    come(admission, 0, text())
    come(admission, 4, text())
    assert admission.settle() == []
    with pytest.raises(PayloadError, match="the run has"):
        admission.check(1, OTHER)


def test_the_config_may_say_the_problem():
    told = {"input_shape": [3, 8, 8], "num_classes": 2}
    admission = of(schedule={"clients": 2}, data=told)
    with pytest.raises(PayloadError, match="client 1 has"):
        admission.check(1, OTHER)
    assert come(admission, 0, text()) == []
    with pytest.raises(ConfigError, match="need each other"):
        tiny_experiment(data={"num_classes": 2})
    experiment = tiny_experiment(data=told)
    assert tiny_experiment(data=experiment.to_dict()["data"]) == experiment


@pytest.mark.parametrize(
    ("scenario", "client", "tasks", "most"),
    [
        ({"tasks": 2}, 0, 4000, 2),
        ({"tasks": [1, 2, 2]}, 0, 2, 1),
        ({"kind": "replay_circulating"}, 1, 1000, 60),
    ],
)
def test_a_client_has_no_more_tasks_than_the_config_gives_it(scenario, client, tasks, most):
    admission = of(scenario=scenario)
    facts = {"num_classes": 4, "input_shape": [3]}
    one = {"train": [1, 0, 0, 0], "test": [0, 0, 0, 1]}
    with pytest.raises(PayloadError, match=f"announces {tasks} tasks; .* gives it {most}$"):
        admission.check(client, text(tasks=[one] * tasks, **facts))
    admission.check(client, text(tasks=[one] * most, **facts))


def test_a_config_that_does_not_fit_what_is_announced():
    with pytest.raises(PayloadError, match=r"client 0 does not match the config: .* 4 classes"):
        of(scenario={"kind": "replay_circulating"}).check(0, text())


def test_data_may_not_change_within_a_run():
    admission = Admission({1: text()})
    admission.check(1, json.dumps(FACTS, indent=2))  # the same, written otherwise
    with pytest.raises(PayloadError, match="client 1 described other data when it first joined"):
        admission.check(1, text(tasks=FACTS["tasks"][:1]))
    with pytest.raises(PayloadError, match="the run has"):
        admission.check(0, OTHER)


def test_what_was_agreed_on_stays():
    """Both after the run began, and after the coordinator was started again."""
    admission = of()
    for client in range(3):
        come(admission, client, text())
    admission.settle()
    for later in (admission, of({c: text() for c in range(3)})):
        with pytest.raises(PayloadError, match="client 1 described other data"):
            later.check(1, text(tasks=FACTS["tasks"][:1]))
        with pytest.raises(PayloadError, match=r"described other data|the run has"):
            later.check(1, OTHER)


def test_who_is_turned_away_has_no_session_any_more(tmp_path):
    events = EventLog()
    cohort = RemoteCohort(3, Spool(tmp_path, 1 << 20), events, admission=of())
    token = cohort.join(0, OTHER, b"", ())
    cohort.session(0, token)
    cohort.join(1, text(), b"", ())
    cohort.join(2, text(), b"", ())
    with pytest.raises(UnknownSession, match="join again"):
        cohort.session(0, token)
    with pytest.raises(PayloadError, match="client 0 has inputs"):
        cohort.join(0, OTHER, token, ())
    cohort.join(0, text(), b"", ())
    assert list(cohort.gather()) == [0, 1, 2]
    events.close()
    told = {e.client: e.detail["reason"] for e in events.listen(from_start=True) if e.detail}
    assert told == {"0": "turned away: most clients describe another problem"}


NOISY = {"level": "client", "noise_multiplier": 1.0, "delta": 1e-3, "allow": BESIDE}


def test_inputs_of_a_run_with_noise_are_normalised_by_what_its_config_says():
    """An exact mean of training inputs tells of each of them."""
    given = {"name": "directory", "root": "x", "mean": [0.5], "std": [0.25]}
    told = {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]}
    for data, takes, refuses in ((given, told, {"mean": [0.501]}), (None, {}, told)):
        experiment = tiny_experiment(privacy=NOISY, scenario={"kind": "iid"})
        found = experiment.data.model_validate(data) if data else None
        experiment = experiment.model_copy(update={"data": found, "scenario": None})
        admission = Admission.of(experiment, {})
        admission.check(0, text(**takes))
        with pytest.raises(PayloadError, match=r"client 0 has a mean .*by \[data\] mean and std"):
            admission.check(0, text(**{**takes, **refuses}))
    of().check(0, text(**told))


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ({"data": {"name": "directory", "root": "x"}}, r"give \[data\] mean and std"),
        ({"data": {"name": "mine.py:mine", "root": "x"}}, r"give \[data\] mean and std"),
        ({"data": {"name": "uci-har"}, "scenario": {"kind": "natural"}}, r"give \[data\] mean"),
        (
            {
                "data": {
                    "name": "table", "root": "x", "mean": [0], "std": [1],
                    "columns": {"label": "y", "missing": "mean"},
                }
            },
            'missing = "mean" fills empty cells with means of the examples',
        ),
        ({"data": {"name": "digits", "mean": [0.5]}}, "mean and std need each other"),
        ({"data": {"name": "digits", "mean": [0.5], "std": [0.0]}}, "not above 0"),
    ],
)  # fmt: skip
def test_what_follows_from_examples_without_noise_is_refused_at_the_start(overrides, line):
    with pytest.raises(ConfigError, match=line):
        of(privacy=NOISY, **overrides)
