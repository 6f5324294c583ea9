from fedmodels.tensors.bundle import Problem
from fedmodels.training import run as run_facts
from fedmodels.training.run import RunFacts
from tests.conftest import tiny_experiment


def test_one_net_says_all_that_is_known_without_values(monkeypatch):
    """A net of 48 million parameters takes half a second, and its memory."""
    built, make_net = [], run_facts.make_net
    monkeypatch.setattr(run_facts, "make_net", lambda *a, **k: built.append(a) or make_net(*a, **k))
    run = RunFacts(tiny_experiment(), Problem((1, 8, 8), 10))
    weights = run.initial_weights
    assert [*run.forms] == [*weights]
    assert all(form.is_meta for form in run.forms.values())
    assert {*run.parameters} | run.batch_norm_weights <= weights.keys()
    assert run.beginning_with(run.forms).width == run.width
    assert len(built) == 1
