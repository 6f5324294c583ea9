"""FedPAC: its quadratic program, its statistics, its phases, and whose head goes where."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedmodels.errors import PayloadError
from fedmodels.methods import make
from fedmodels.tensors.bundle import Bundle, Problem, Prototypes
from fedmodels.training.contexts import START, ServerContext
from fedmodels.training.hooks import as_uploads
from fedmodels.training.loop import train_locally
from fedmodels.training.run import RunFacts
from fedmodels.training.stepped import Batch, Output
from fedplugins.baselines import fedpac
from fedplugins.baselines.fedpac import FedPAC, statistics_of
from fedtide.inprocess import run_in_process
from tests.conftest import (
    context_of,
    digest_of,
    linear_context,
    method_of,
    payload_of,
    tiny_experiment,
)

PROBLEM = Problem((2,), 2)
LINEAR = tiny_experiment(method="fedpac", net={"name": "mlp", "hidden": [2]})


def upload_of(h, variance, n=10, head=0.0, base=0.0, means=None):
    """Return an upload; ``h`` and ``means`` are {class: vector}."""
    rows = {k: (torch.tensor(v), 5) for k, v in h.items()}
    means = {k: (torch.tensor(v), c) for k, (v, c) in (means or {}).items()}
    return Bundle(
        {"base/w": torch.tensor([base]), "head/w": torch.tensor([head])},
        {"statistics": Prototypes.of(rows, 2), "class": Prototypes.of(means, 2)},
        scalars={"num_examples": float(n), "variance": variance},
    )


def mixtures(*uploads, min_weight=1e-3):
    run = RunFacts(LINEAR, PROBLEM)
    return fedpac.mixtures(dict(enumerate(uploads)), run, min_weight=min_weight)


def served(*uploads, state=None, cohort=None, method=None):
    """Return the state after aggregation and finish, and the server's context."""
    method, run = method or FedPAC(), RunFacts(LINEAR, PROBLEM)
    cohort = cohort or tuple(range(len(uploads)))
    ctx = ServerContext(run, START, cohort)
    by_client = dict(zip(cohort, uploads, strict=True))
    state = state or method.init_server(run)
    uploads = as_uploads(method, by_client)
    return method.finish(ctx, method.aggregate(ctx, state, uploads), uploads)[0], ctx


# --- the quadratic program ------------------------------------------------------------------------


def test_two_clients_by_hand():
    """h differ by (1, -1): squared distance 2, V = 1 and 1.

    Client 0: min a^2 1 + (1 - a)^2 (1 + 2), so a = 3 / 4; client 1 by symmetry.
    """
    found = mixtures(upload_of({0: [1.0, 0]}, 1.0), upload_of({0: [0.0, 1]}, 1.0))
    np.testing.assert_allclose(found, [[0.75, 0.25], [0.25, 0.75]], atol=1e-9)


def test_one_client_has_its_own_head():
    assert mixtures(upload_of({0: [1.0, 2]}, 0.3)) == [[1.0]]


@pytest.mark.parametrize("variance", [0.0, 1e-12, 0.5])
def test_equals_count_alike(variance):
    alike = [upload_of({0: [1.0, 2], 1: [3.0, 0]}, variance) for _ in range(4)]
    np.testing.assert_allclose(mixtures(*alike), np.full((4, 4), 0.25), atol=1e-6)


def test_groups_keep_to_themselves():
    """Equal h within two groups, and nearly no variance: no weight crosses."""
    one, other = {0: [1.0, 0]}, {1: [0.0, 1]}
    found = np.array(mixtures(*(upload_of(h, 1e-6) for h in (one, other, one, other))))
    np.testing.assert_allclose(found[0], [0.5, 0, 0.5, 0], atol=1e-6)
    np.testing.assert_allclose(found[1], [0, 0.5, 0, 0.5], atol=1e-6)


def test_small_weights_become_nothing():
    """a = (2 + 1e-3) / (2 + 2e-3): the other weight is 5e-4, below the least one that counts."""
    far = upload_of({0: [1.0, 0]}, 1e-3), upload_of({0: [0.0, 1]}, 1e-3)
    assert mixtures(*far) == [[1.0, 0.0], [0.0, 1.0]]
    assert mixtures(*far, min_weight=0.0)[0][1] == pytest.approx(4.995e-4, abs=1e-6)


@given(data=st.data())
def test_mixtures_lie_on_the_simplex_and_are_best(data):
    size = data.draw(st.integers(1, 4))
    cells = st.floats(-2, 2, width=32)
    uploads = [
        upload_of(
            {k: [data.draw(cells), data.draw(cells)] for k in range(2)},
            data.draw(st.floats(0.01, 2)),
        )
        for _ in range(size)
    ]
    found = np.array(mixtures(*uploads, min_weight=0.0))
    assert (found >= 0).all()
    np.testing.assert_allclose(found.sum(1), 1)
    h = np.stack([u.prototypes["statistics"].vectors.numpy().ravel() for u in uploads])
    noise = np.diag([u.scalars["variance"] for u in uploads])
    others = np.random.default_rng(0).dirichlet(np.ones(size), 50)
    for i, alpha in enumerate(found):
        gram = noise + (h[i] - h).astype(np.float64) @ (h[i] - h).astype(np.float64).T
        best = alpha @ gram @ alpha
        assert (best <= np.einsum("na,ab,nb->n", others, gram, others) + 1e-7).all()


def test_classes_that_do_not_exist_are_refused():
    with pytest.raises(PayloadError, match=r"client 1 .* class 2"):
        mixtures(upload_of({0: [1.0, 0]}, 1.0), upload_of({2: [1.0, 0]}, 1.0))


# --- the server -----------------------------------------------------------------------------------


def test_what_the_server_makes_of_two_clients():
    """Bases by n_i: (10 * 0 + 30 * 4) / 40 = 3; class 0 by n_ic: (1 * 2 + 3 * 6) / 4 = 5.

    Heads 8 and 0 are mixed by 3/4 and 1/4 as above: 6 and 2.
    """
    state, ctx = served(
        upload_of({0: [1.0, 0]}, 1.0, 10, 8.0, 0.0, {0: ([2.0, 0], 1)}),
        upload_of({0: [0.0, 1]}, 1.0, 30, 0.0, 4.0, {0: ([6.0, 0], 3), 1: ([0.0, 7], 9)}),
    )
    assert state.common.weights == {"base/w": torch.tensor([3.0])}
    rows = state.common.prototypes["class"].rows()
    assert rows[0][0].tolist() == [5.0, 0.0]
    assert rows[1][0].tolist() == [0.0, 7.0]
    assert [float(state.clients[c].weights["head/w"]) for c in (0, 1)] == pytest.approx([6, 2])
    np.testing.assert_allclose(ctx.series["aggregation_weights"], [[0.75, 0.25], [0.25, 0.75]])


def test_who_does_not_take_part_keeps_its_head():
    one = upload_of({0: [1.0, 0]}, 1.0, head=8.0)
    state, _ = served(one, one, cohort=(0, 2))
    later, ctx = served(upload_of({}, 0.0, head=5.0), state=state, cohort=(2,))
    assert float(later.clients[0].weights["head/w"]) == 8
    assert float(later.clients[2].weights["head/w"]) == 5
    assert FedPAC().broadcast(ctx, later)[1].keys() == {2}
    everybody = replace(ctx, cohort=range(3), scores=True)
    assert FedPAC().broadcast(everybody, later)[1].keys() == {0, 2}


def test_a_client_without_examples_changes_nothing():
    start = FedPAC().init_server(RunFacts(LINEAR, PROBLEM))
    state, _ = served(upload_of({}, 0.0, n=0), state=start)
    assert state is start


# --- the client -----------------------------------------------------------------------------------


def test_statistics_by_hand():
    """z = (1,0), (3,0) of class 0 and (0,2) of class 1: means (2,0), (0,2); p = 2/3, 1/3.

    h = (4/3, 0), (0, 2/3); V = ((1 + 9 + 4) / 3 - 16/9 - 4/9) / 3 = 22 / 27.
    """
    ctx = linear_context(LINEAR, [[1.0, 0], [3.0, 0], [0.0, 2]], [0, 0, 1])
    found = statistics_of(ctx)
    assert {k: (m.tolist(), n) for k, (m, n) in found.means.items()} == {
        0: ([2.0, 0.0], 2),
        1: ([0.0, 2.0], 1),
    }
    torch.testing.assert_close(found.h.vectors, torch.tensor([[4 / 3, 0], [0, 2 / 3]]))
    assert found.variance == pytest.approx(22 / 27)


@given(st.lists(st.tuples(st.floats(-9, 9, width=32), st.integers(0, 1)), min_size=1, max_size=8))
def test_variance_is_never_below_zero(rows):
    ctx = linear_context(LINEAR, [[x, 1.0] for x, _ in rows], [y for _, y in rows])
    assert statistics_of(ctx).variance >= 0


@pytest.mark.parametrize("when", ["before", "after"])
def test_which_model_the_statistics_are_of(digits, when):
    experiment = tiny_experiment(method={"name": "fedpac", "statistics": when})
    method, ctx = method_of(experiment), context_of(experiment, digits)
    payload, state = payload_of(experiment, ctx)
    method.load(ctx, payload, state)
    received = statistics_of(ctx)
    upload = train_locally(method, ctx, payload, state).upload
    trained = statistics_of(ctx)
    assert not torch.equal(received.h.vectors, trained.h.vectors)
    expected = received if when == "before" else trained
    assert torch.equal(upload.prototypes["statistics"].vectors, expected.h.vectors)
    assert upload.scalars["variance"] == expected.variance
    assert torch.equal(
        upload.prototypes["class"].vectors, torch.stack([m for m, _ in trained.means.values()])
    )


def test_head_first_then_base(digits):
    experiment = tiny_experiment(
        method={"name": "fedpac", "head_epochs": 2}, training={"local_epochs": 3, "batch_size": 16}
    )
    method, ctx = method_of(experiment), context_of(experiment, digits)
    seen = []

    def tick(epoch, number, loss):
        seen.append((epoch, {k: t.detach().clone() for k, t in ctx.net.state_dict().items()}))

    ctx.tick = tick
    payload, state = payload_of(experiment, ctx)
    train_locally(method, ctx, payload, state)
    assert {epoch for epoch, _ in seen} == {0, 1, 2, 3, 4}
    last_of_head = [net for epoch, net in seen if epoch == 1][-1]
    for key, tensor in seen[0][1].items():
        if key.startswith("base."):
            assert torch.equal(tensor, last_of_head[key])
            assert not torch.equal(tensor, seen[-1][1][key])
        else:
            assert not torch.equal(tensor, last_of_head[key])
            assert torch.equal(last_of_head[key], seen[-1][1][key])
    head, base = method.phases(ctx)
    assert head.lr == pytest.approx(10 * experiment.training.lr)
    assert base.lr is None


def test_features_are_drawn_to_prototypes():
    """Class 0 has a global prototype (3, 0), class 1 only the client's own mean (0, 1).

    z = (1, 0) and (0, 1): mean over 4 coordinates of (4, 0, 0, 0) is 1; lam = 0.5 halves it.
    """
    ctx = linear_context(LINEAR, [[1.0, 0], [0.0, 1]], [0, 1])
    method = make("fedpac", lam=0.5)
    of_all = Prototypes.of({0: (torch.tensor([3.0, 0]), 9)}, 2)
    refs = method.prepare(ctx, Bundle(prototypes={"class": of_all}), Bundle())
    x, y = ctx.stream.train(0)
    batch, out = Batch(x, y, torch.arange(2)), Output(x, torch.zeros(2, 2))
    assert float(method.loss(ctx, batch, out, refs)) == pytest.approx(np.log(2) + 0.5, abs=1e-6)
    nothing = Bundle(prototypes={"class": Prototypes.of({}, 2)})
    refs = method.prepare(ctx, nothing, Bundle())
    assert refs.targets is None  # round 0
    assert float(method.loss(ctx, batch, out, refs)) == pytest.approx(np.log(2), abs=1e-6)


def test_everyone_for_itself_is_fedrep(digits, tmp_path, monkeypatch):
    """lam = 0 and alpha_i = e_i: FedRep with one epoch of the head and E of the base, bit for bit.

    Its private head lies with the client, FedPAC's with the server: the personal models agree.
    """
    training = {"local_epochs": 2, "batch_size": 16, "lr": 0.05}
    alone = lambda voters, run, min_weight: np.eye(len(voters)).tolist()  # noqa: E731
    monkeypatch.setattr("fedplugins.baselines.fedpac.mixtures", alone)
    pac = {"name": "fedpac", "lam": 0.0, "head_lr_factor": 1.0}
    rep = {"name": "fedrep", "weighting": "examples", "head_epochs": 1, "base_epochs": 2}
    found = [
        run_in_process(
            tiny_experiment(method=method, training=training), digits, tmp_path / method["name"]
        )
        for method in (pac, rep)
    ]
    names = ("a_loc", "personalization", "loss")
    assert [found[0]["metrics"][k] for k in names] == [found[1]["metrics"][k] for k in names]
    for client in range(3):
        models = [
            digest_of(tmp_path / name / "clients" / str(client) / "personal.safetensors")
            for name in ("fedpac", "fedrep")
        ]
        assert models[0] == models[1]


def test_many_alike_clients_mix_with_small_weights_each():
    """None has ``min_weight`` then; nobody is to blame, and nothing is divided by zero."""
    alike = [upload_of({0: [0.0, 0.0]}, 1.0) for _ in range(3)]
    found = np.array(mixtures(*alike, min_weight=0.34))
    np.testing.assert_allclose(found, 1 / 3)
