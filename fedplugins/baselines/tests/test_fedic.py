"""FEDIC by hand, what its paper promises, and the server's data on their way to the method."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console
from torch.nn.functional import cross_entropy

from fedcli.data.store.client_data import ClientData
from fedcli.data.store.commands import run_partition
from fedmodels.config.data import Data
from fedmodels.errors import ConfigError, DataError
from fedmodels.methods import make
from fedmodels.nets.split import load_weights, weights_of
from fedmodels.numerics.distances import distillation
from fedmodels.tensors.archive import load_named
from fedmodels.tensors.bundle import Bundle, Problem
from fedmodels.training.hooks import as_uploads, reduce
from fedmodels.training.run import RunFacts
from fedplugins.baselines.fedic import (
    Ensemble,
    ask,
    calibrate,
    client_weights,
    identity_calibrator,
)
from fedsrv.parts import server_data_for
from fedsrv.parts.server_data import check_fits, read_server_data
from fedtide.inprocess import run_in_process
from tests.conftest import server_context, tiny_experiment, write_server_data
from tests.integration.harness import summary_of, write_config

FEW = {"fine_tuning_steps": 3, "calibration_steps": 3, "distillation_steps": 3}
QUIET = Console(quiet=True)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_calibrator(classes, width):
    empty = identity_calibrator(classes, width)
    return {k: drawn(*v.shape, seed=i) for i, (k, v) in enumerate(empty.items())}


def cohort(**more):
    """Return a method, a context, a state and the uploads of two clients."""
    method = make("fedic", **more)
    run = RunFacts(tiny_experiment(method="fedic"), Problem((1, 8, 8), 10))
    uploads = {
        c: Bundle(
            {k: w + 0.1 * drawn(*w.shape, seed=c) for k, w in run.initial_weights.items()},
            scalars={"num_examples": 5.0 + c},
        )
        for c in (0, 1)
    }
    ctx = server_context(run, 0, (0, 1))
    return (
        method,
        ctx,
        method.aggregate(ctx, method.init_server(run), as_uploads(method, uploads)),
        uploads,
    )


def committed(out):
    return load_named(max((out / "server").glob("state-*.safetensors")))[0]


# --- the calibration -----------------------------------------------------------------------------


def test_calibrated_by_hand():
    """Two clients, one example, two classes, one feature.

    s = (1, 0), b = 0: scores 0 and ln 3, sigmoids 1/2 and 3/4, weights 2/5 and 3/5; z_e = 2/5
    (0, 5) + 3/5 (ln 3, 0) = (.659167, 2); w = (2, 1), b' = (0, 1): (1.318335, 3); feature 1,
    u = 0, b'' = ln 3: gate 3/4; with the fine-tuned (4, 0): 3/4 (1.318335, 3) + 1/4 (4, 0) =
    (1.988751, 2.25).
    """
    calibrator = {
        "ensemble_scale": torch.tensor([1.0, 0.0]),
        "ensemble_bias": torch.zeros(1),
        "logit_scale": torch.tensor([2.0, 1.0]),
        "logit_bias": torch.tensor([0.0, 1.0]),
        "gate_scale": torch.zeros(1),
        "gate_bias": torch.tensor([math.log(3)]),
    }
    ensemble = Ensemble(torch.tensor([[[0.0, 5.0]], [[math.log(3), 0.0]]]), torch.ones(1, 1))
    found = calibrate(calibrator, ensemble, torch.tensor([[4.0, 0.0]]))
    torch.testing.assert_close(found, torch.tensor([[1.988751, 2.25]]))


def test_clients_weights_sum_to_one():
    for scale in (1.0, 1e4):  # the sigmoids of the latter underflow
        a = client_weights(random_calibrator(5, 3), scale * drawn(4, 7, 5))
        torch.testing.assert_close(a.sum(0), torch.ones(7))
        assert (a >= 0).all()


def test_a_neutral_calibration_is_the_plain_ensemble():
    calibrator = identity_calibrator(5, 3)
    calibrator["ensemble_scale"] = torch.zeros(5)  # equal weights
    calibrator["gate_bias"] = torch.full((1,), 50.0)  # nothing of the fine-tuned model
    logits = drawn(4, 7, 5)
    found = calibrate(calibrator, Ensemble(logits, drawn(7, 3)), drawn(7, 5, seed=9))
    torch.testing.assert_close(found, logits.mean(0))


def test_it_begins_halfway():
    ensemble, fine_tuned = Ensemble(drawn(1, 7, 5), drawn(7, 3)), drawn(7, 5, seed=9)
    found = calibrate(identity_calibrator(5, 3), ensemble, fine_tuned)
    torch.testing.assert_close(found, (ensemble.logits[0] + fine_tuned) / 2)


def test_permuted_classes_permute_the_result():
    calibrator, order = random_calibrator(5, 3), torch.tensor([3, 0, 4, 1, 2])
    permuted = {
        k: v[order] if k in ("ensemble_scale", "logit_scale", "logit_bias") else v
        for k, v in calibrator.items()
    }
    ensemble, fine_tuned = Ensemble(drawn(4, 7, 5), drawn(7, 3)), drawn(7, 5, seed=9)
    moved = Ensemble(ensemble.logits[..., order], ensemble.features)
    torch.testing.assert_close(
        calibrate(permuted, moved, fine_tuned[:, order]),
        calibrate(calibrator, ensemble, fine_tuned)[:, order],
    )


# --- the three parts -----------------------------------------------------------------------------


def test_without_server_steps_it_is_fedavg(digits, tmp_path):
    off = dict.fromkeys(FEW, 0)
    for name, more in (("fedavg", {}), ("fedic", off), ("on", FEW)):
        method = {"name": "fedic" if name == "on" else name, **more}
        run_in_process(tiny_experiment(method=method), digits, tmp_path / name)
    expected = committed(tmp_path / "fedavg")["common"].weights
    found = committed(tmp_path / "fedic")["common"].weights
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[k], w) for k, w in expected.items())
    on = committed(tmp_path / "on")["common"].weights
    assert not all(torch.equal(on[k], w) for k, w in expected.items())


def test_the_student_begins_as_the_mean_not_as_the_fine_tuned_copy():
    """Adam's first step moves a weight by the learning rate at most; the copy goes 40 of them."""
    method, ctx, state, uploads = cohort(
        fine_tuning_steps=40, calibration_steps=1, distillation_steps=1, lr_server=0.01
    )
    after, metrics = method.finish(ctx, state, as_uploads(method, uploads))
    for name, w in state.common.weights.items():
        assert (after.common.weights[name] - w).abs().max() <= 0.0101, name
    assert 0 <= metrics["teacher_accuracy"] <= 1


def test_the_copy_that_calibrates_learns_the_labels():
    method, ctx, state, _ = cohort(fine_tuning_steps=60, lr_server=0.01)
    net, held = ctx.run.make_net(), ctx.server_data
    load_weights(net, state.common.weights)
    labelled, unlabelled = method._fine_tuned(net, held, ctx.generator("method"))
    before = cross_entropy(logits_of(ctx, state.common.weights, held.x), held.y)
    assert cross_entropy(labelled, held.y) < 0.5 * before
    after = weights_of(net)
    torch.testing.assert_close(labelled, logits_of(ctx, after, held.x))
    torch.testing.assert_close(unlabelled, logits_of(ctx, after, held.unlabelled))


def test_the_student_learns_the_labels():
    method, ctx, state, uploads = cohort(distillation_steps=60, ld=0.0, lr_server=0.01)
    after, _ = method.finish(ctx, state, as_uploads(method, uploads))
    loss = [
        float(cross_entropy(logits_of(ctx, s.common.weights, ctx.server_data.x), ctx.server_data.y))
        for s in (state, after)
    ]
    assert loss[1] < 0.5 * loss[0]


def test_the_student_learns_the_teachers_answers():
    """No step on copy and calibrator: the teacher is halfway from the mean to the ensemble."""
    method, ctx, state, uploads = cohort(
        fine_tuning_steps=0, calibration_steps=0, distillation_steps=60, ld=1.0, lr_server=0.01
    )
    x, net = ctx.server_data.unlabelled, ctx.run.make_net()
    mean = logits_of(ctx, state.common.weights, x)
    teacher = calibrate(identity_calibrator(10, 16), ask(net, uploads, x), mean)
    after, _ = method.finish(ctx, state, as_uploads(method, uploads))
    apart = [
        float(distillation(teacher, logits_of(ctx, s.common.weights, x), method.temperature))
        for s in (state, after)
    ]
    assert apart[1] < 0.2 * apart[0]


def logits_of(ctx, weights, x):
    return ask(ctx.run.make_net(), {0: Bundle(weights=weights)}, x).logits[0]


def test_calibrator_lives_on():
    method, ctx, state, uploads = cohort(**FEW)
    first, _ = method.finish(ctx, state, as_uploads(method, uploads))
    fresh = identity_calibrator(10, 16)
    assert first.own.weights.keys() == fresh.keys()
    assert all(not torch.equal(first.own.weights[k], t) for k, t in fresh.items())
    frozen = replace(method, calibration_steps=0)
    second, _ = frozen.finish(ctx, first, as_uploads(frozen, uploads))
    assert all(torch.equal(second.own.weights[k], t) for k, t in first.own.weights.items())


def test_features_are_the_mean_over_clients():
    _, ctx, _, uploads = cohort()
    net, x = ctx.run.make_net(), ctx.server_data.x
    both = ask(net, uploads, x)
    each = [ask(net, {c: u}, x) for c, u in uploads.items()]
    torch.testing.assert_close(both.features, (each[0].features + each[1].features) / 2)
    assert torch.equal(both.logits[1], each[1].logits[0])


def test_a_client_without_examples_teaches_nothing():
    """It says what everyone's model said before: that counts neither in the mean nor as a teacher.

    Where nobody has an example, nothing is taught at all.
    """
    method, ctx, state, uploads = cohort(**FEW)
    idle = replace(uploads[1], scalars={"num_examples": 0.0})
    one, _ = reduce(method, ctx, state, as_uploads(method, {0: uploads[0]}))
    both, _ = reduce(method, ctx, state, as_uploads(method, {0: uploads[0], 1: idle}))
    assert all(torch.equal(both.common.weights[k], w) for k, w in one.common.weights.items())
    assert all(torch.equal(both.own.weights[k], w) for k, w in one.own.weights.items())
    nobody, metrics = reduce(method, ctx, state, as_uploads(method, {1: idle}))
    assert nobody is state
    assert not metrics


def test_nothing_unlabelled_is_no_error():
    method, ctx, state, uploads = cohort(**FEW)
    held = replace(ctx.server_data, unlabelled=ctx.server_data.unlabelled[:0])
    after, _ = method.finish(replace(ctx, server_data=held), state, as_uploads(method, uploads))
    assert all(torch.isfinite(w).all() for w in after.common.weights.values())


def test_server_draws_from_its_own_generators():
    method, ctx, state, uploads = cohort(**FEW)
    before = torch.random.get_rng_state()
    one, _ = method.finish(ctx, state, as_uploads(method, uploads))
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(3)
    two, _ = method.finish(ctx, state, as_uploads(method, uploads))
    assert all(torch.equal(two.common.weights[k], w) for k, w in one.common.weights.items())


# --- the server's data ---------------------------------------------------------------------------


def partition_of(root, **data):
    experiment = tiny_experiment(data=data)
    run_partition(experiment.data, experiment.scenario, 3, experiment.seed, root, QUIET)
    return root


def images(root, *names):
    return {x.tobytes() for name in names for x in np.load(root / f"{name}.npy")}


def test_server_part_is_balanced_and_nobody_elses(tmp_path):
    root = partition_of(tmp_path / "a", server_examples=4, server_unlabelled=6, max_per_class=None)
    y = np.load(root / "server" / "y.npy")
    assert np.bincount(y).tolist() == [4] * 10
    assert len(np.load(root / "server" / "unlabelled_x.npy")) == 60
    labelled, hidden = images(root / "server", "x"), images(root / "server", "unlabelled_x")
    assert len(labelled | hidden) == 100
    places = [p for c in "012" for p in sorted((root / c).glob("task-*"))]
    held = set().union(*(images(p, "train_x", "test_x") for p in places))
    held |= images(root / "global-test", "x")
    assert len(places) == 6
    assert not held & (labelled | hidden)


def test_partition_says_what_the_server_got(tmp_path):
    """Clients have the same ids and as many examples; it is another partition all the same."""
    plain, with_server = (
        partition_of(tmp_path / "a"),
        partition_of(tmp_path / "b", server_examples=4),
    )
    tables = [json.loads((r / "partition.json").read_text()) for r in (plain, with_server)]
    assert tables[0]["digest"] != tables[1]["digest"]
    totals = [[[sum(t["train"]) for t in c] for c in table["clients"]] for table in tables]
    assert totals[0] == totals[1]
    assert not (plain / "server").exists()
    assert len(np.load(with_server / "server" / "unlabelled_x.npy")) == 40
    with pytest.raises(DataError, match=r"data\.server_examples"):
        partition_of(tmp_path / "a", server_examples=4)


def test_server_reads_what_clients_would(tmp_path):
    root = partition_of(tmp_path / "a", server_examples=4)
    data = read_server_data(root / "server")
    raw = np.load(root / "server" / "x.npy")
    assert torch.equal(data.x, torch.from_numpy(ClientData(root / "0").normaliser(raw)))
    assert data.x.dtype == torch.float32
    check_fits(data, Problem((1, 8, 8), 10))
    for problem in (Problem((1, 8, 9), 10), Problem((1, 8, 8), 9)):
        with pytest.raises(DataError, match="the server's data have"):
            check_fits(data, problem)


def test_too_large_a_server_part(tmp_path):
    with pytest.raises(ConfigError, match="would get 200 training examples of each class"):
        partition_of(tmp_path / "a", server_examples=100)
    with pytest.raises(ConfigError, match="server_unlabelled needs server_examples"):
        Data(name="digits", server_unlabelled=3)


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("x", None, "not a directory of server data"),
        ("x", np.zeros((20, 8, 8), np.float32), "expected uint8 or uint16"),
        ("unlabelled_x", np.zeros((2, 1, 8, 8), int), "unlabelled_x.npy holds int64"),
        ("y", np.zeros(3, np.int64), "one int64 label for each example"),
        ("unlabelled_x", np.full((2, 1, 8, 8), np.nan, np.float32), "holds NaN or infinity"),
        ("x", np.array([{}], dtype=object), "not a directory of server data"),
    ],
)
def test_damaged_server_data(digits, tmp_path, name, content, line):
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "client.json").write_text((digits / "0" / "client.json").read_text())
    write_server_data(tmp_path)
    read_server_data(tmp_path / "server")
    path = tmp_path / "server" / f"{name}.npy"
    path.unlink()
    if content is not None:
        np.save(path, content, allow_pickle=True)
    with pytest.raises(DataError, match=line):
        read_server_data(tmp_path / "server")


def test_without_server_data_nothing_begins(tmp_path):
    root = partition_of(tmp_path / "data")
    with pytest.raises(ConfigError, match="fedic trains on data of the server's own: give"):
        run_in_process(tiny_experiment(method="fedic"), root, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    from fedsrv.launch.launcher import launch

    with pytest.raises(ConfigError, match="server_examples = N per class"):
        launch(tiny_experiment(method="fedic"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_methods_that_need_none_are_given_none(digits):
    assert server_data_for(tiny_experiment(), digits / "server") is None
    assert server_data_for(tiny_experiment(method="fedic"), digits / "server") is not None


@pytest.mark.loopback
def test_launched(tmp_path, fork_server, whole_run):
    """From the config to the table with real processes; equal to a run in one process."""
    data = {"server_examples": 3, "server_unlabelled": 3}
    schedule = {"rounds": 1}
    experiment = tiny_experiment(method={"name": "fedic", **FEW}, data=data, schedule=schedule)
    write_config(tmp_path / "config.toml", experiment)
    words = ("launch", "config.toml", "--out", "run", "--hosts", "1")
    status, said = fork_server.typed(tmp_path, "fedsrv", *words)
    assert status == 0, said
    inside = whole_run(experiment, tmp_path / "run" / "data").summary
    assert summary_of(tmp_path / "run")["state_sha256"] == inside["state_sha256"]
