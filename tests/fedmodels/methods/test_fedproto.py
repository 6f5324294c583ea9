import pytest
import torch

from fedmodels.methods import make
from fedmodels.nets.split import embeddings
from fedmodels.numerics.prototypes import ByClass, class_prototypes, uncounted
from fedmodels.techniques.class_prototypes import PullReferences
from fedmodels.tensors.archive import load
from fedmodels.tensors.bundle import Bundle, Problem, Prototypes, tensor_bytes
from fedmodels.training.contexts import START, ServerContext, ServerState
from fedmodels.training.hooks import as_uploads
from fedmodels.training.loop import train_locally
from fedmodels.training.run import RunFacts
from fedmodels.training.stepped import Batch, Output
from fedtide.inprocess import run_in_process
from tests.conftest import context_of, linear_context, payload_of, tiny_experiment


def fedproto(tables=None, **switches):
    return tiny_experiment(method={"name": "fedproto", **switches}, **(tables or {}))


def personal(out):
    found = [load(out / "clients" / c / "personal.safetensors")[0].weights for c in "012"]
    return [{k: bytes(tensor_bytes(t)) for k, t in weights.items()} for weights in found]


def prototypes(rows, width=1):
    return Prototypes.of({k: (torch.tensor(v), n) for k, (v, n) in rows.items()}, width)


def test_without_pull_it_is_local(digits, tmp_path):
    training = {"local_epochs": 2, "momentum": 0.5}
    one = run_in_process(fedproto({"training": training}, lam=0.0), digits, tmp_path / "proto")
    local = tiny_experiment(method="local", training=training)
    other = run_in_process(local, digits, tmp_path / "local")
    assert personal(tmp_path / "proto") == personal(tmp_path / "local")
    assert one["metrics"]["a_loc_classifier"] == other["metrics"]["a_loc"]
    assert "a_glo" not in one["metrics"]


def test_pull_matters(digits, tmp_path):
    for lam in (0.0, 5.0):
        run_in_process(fedproto(lam=lam), digits, tmp_path / str(lam))
    assert personal(tmp_path / "0.0") != personal(tmp_path / "5.0")


def test_loss_by_hand():
    """z = (1, 2) and (9, 9); class 0 has (0, 0): (1 + 4) / 2 over two examples, lam 3: 3.75."""
    z = torch.tensor([[1.0, 2.0], [9.0, 9.0]], requires_grad=True)
    batch, out = Batch(z, torch.tensor([0, 1]), torch.arange(2)), Output(z, torch.zeros(2, 2))
    refs = PullReferences(ByClass(torch.zeros(2, 2), torch.tensor([True, False])))
    ctx = linear_context(fedproto(), [[0.0, 0.0]], [0])
    plain = make("fedproto", lam=0.0).loss(ctx, batch, out, refs)
    loss = make("fedproto", lam=3.0).loss(ctx, batch, out, refs) - plain
    assert loss.item() == pytest.approx(3.75)
    loss.backward()
    assert z.grad[0].tolist() == pytest.approx([1.5, 3.0])
    assert not z.grad[1].any()  # an absent class pulls nothing


def aggregated(reports, known=None, **switches):
    method = make("fedproto", **switches)
    run = RunFacts(tiny_experiment(net={"name": "mlp", "hidden": [1]}), Problem((1, 2, 2), 10))
    state = ServerState(Bundle(prototypes={"class": uncounted(prototypes(known or {}))}))
    uploads = {c: Bundle(prototypes={"class": prototypes(r)}) for c, r in enumerate(reports)}
    ctx = ServerContext(run, START, tuple(uploads))
    found = method.aggregate(ctx, state, as_uploads(method, uploads)).common.prototypes["class"]
    return dict(zip(found.labels.tolist(), found.vectors.flatten().tolist(), strict=True))


def test_two_clients_by_hand():
    """Class 2: (1 * 1 + 3 * 5) / 4 = 4 by examples, 3 uniformly; class 7 from one client alone."""
    reports = [{2: ((1.0,), 1)}, {2: ((5.0,), 3), 7: ((9.0,), 2)}]
    assert aggregated(reports) == {2: 4.0, 7: 9.0}
    assert aggregated(reports, weighting="uniform") == {2: 3.0, 7: 9.0}


def test_absent_classes_keep_what_they_have_or_stay_absent():
    assert aggregated([{2: ((1.0,), 1)}], {5: ((0.1,), 1)}) == {2: 1.0, 5: torch.tensor(0.1).item()}
    assert aggregated([{}]) == {}


def test_one_model_on_all_clients_gives_pooled_class_means(digits):
    """Weighed by examples; with lr so small that nobody's model moves."""
    experiment = fedproto({"training": {"lr": 1e-30}})
    method, uploads, examples = make("fedproto"), {}, []
    for client in range(3):
        ctx = context_of(experiment, digits, client)
        uploads[client] = train_locally(method, ctx, *payload_of(experiment, ctx)).upload
        examples.append(ctx.stream.train(0))
    state = method.init_server(ctx.run)
    after = method.aggregate(
        ServerContext(ctx.run, START, (0, 1, 2)), state, as_uploads(method, uploads)
    )
    x, y = (torch.cat(parts) for parts in zip(*examples, strict=True))
    pooled = class_prototypes(embeddings(ctx.net, x), y, 10)
    found = after.common.prototypes["class"]
    assert torch.equal(found.labels, pooled.labels)
    torch.testing.assert_close(found.vectors, pooled.vectors)


def test_only_prototypes_travel(digits):
    experiment = fedproto()
    ctx = context_of(experiment, digits)
    payload, state = payload_of(experiment, ctx)
    result = train_locally(make("fedproto"), ctx, payload, state)
    assert payload.weights == result.upload.weights == {}
    assert result.upload.scalars == {}
    classes = len(set(ctx.stream.train(0)[1].tolist()))
    assert result.upload.num_bytes() == classes * (4 * 16 + 8)
    assert result.state.weights.keys() == ctx.run.initial_weights.keys()


def test_nearest_global_prototype_by_hand():
    """z = 1; own classes {0, 1}; global prototypes 0, 3 and 1: 0 among the own, 2 among all.

    The logits know no limit: by the classifier both are the same.
    """
    everyone = prototypes({0: ((0.0,), 1), 1: ((3.0,), 1), 2: ((1.0,), 1)})
    own = prototypes({0: ((8.0,), 1), 1: ((8.0,), 1)})
    ctx = linear_context(fedproto(), [[1.0]], [0])
    ctx.net.head = torch.nn.Linear(1, 3)
    ctx.run = RunFacts(fedproto(), Problem((1,), 3))
    state = Bundle(prototypes={"class": own})
    payload = Bundle(prototypes={"class": uncounted(everyone)})
    scores = make("fedproto").predict(ctx, payload, state, torch.tensor([[1.0]]))
    assert (scores["nearest"].argmax(), scores["all_classes"].argmax()) == (0, 2)
    assert scores.keys() == {"nearest", "all_classes", "classifier"}
    by_logits = make("fedproto", inference="classifier")
    scores = by_logits.predict(ctx, payload, state, torch.tensor([[1.0]]))
    assert torch.equal(scores["all_classes"], scores["classifier"])
    assert make("fedproto").rules == ("nearest", "all_classes", "classifier")
    assert by_logits.rules == ("classifier", "nearest", "all_classes")


def test_what_leaves_can_be_held_back():
    ctx = linear_context(fedproto(), [[3.0]], [0])
    refs = PullReferences(ByClass(torch.zeros(2, 1), torch.zeros(2, dtype=torch.bool)))
    refs.fresh = prototypes({0: ((3.0,), 5), 1: ((4.0,), 1)})
    sent = make("fedproto", clip_norm=2.0, min_count=2).uplink(ctx, Bundle(), refs)
    assert sent.prototypes["class"].rows() == {0: (torch.tensor([2.0]), 5)}
