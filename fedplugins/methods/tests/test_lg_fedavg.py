import pytest
import torch

from fedmodels.errors import ConfigError
from fedmodels.training.hooks import as_uploads, reduce
from fedmodels.training.loop import train_locally
from tests.conftest import context_of, method_of, payload_of, server_context, tiny_experiment


def test_heads_have_a_mean_and_bases_stay(digits):
    """Of 10 and 30 examples the head is 1/4 of the first client's and 3/4 of the second's."""
    experiment = tiny_experiment(method={"name": "lg-fedavg"})
    method, uploads, states = method_of(experiment), {}, {}
    for client in (0, 1):
        ctx = context_of(experiment, digits, client)
        result = train_locally(method, ctx, *payload_of(experiment, ctx))
        uploads[client], states[client] = result.upload, result.state
        uploads[client].scalars["num_examples"] = [10.0, 30.0][client]
    assert {k.split("/")[0] for k in uploads[0].weights} == {"head"}
    assert {k.split("/")[0] for k in states[0].weights} == {"base"}
    ctx = server_context(ctx.run, 0, (0, 1))
    after, _ = reduce(method, ctx, method.init_server(ctx.run), as_uploads(method, uploads))
    for key, tensor in after.common.weights.items():
        expected = 0.25 * uploads[0].weights[key] + 0.75 * uploads[1].weights[key]
        torch.testing.assert_close(tensor, expected)
    assert not all(torch.equal(states[0].weights[k], t) for k, t in states[1].weights.items())


def test_no_private_weight_is_fedavg(digits):
    found = []
    for table in ({"name": "lg-fedavg", "private": []}, {}):
        experiment = tiny_experiment(method=table)
        ctx = context_of(experiment, digits)
        found.append(train_locally(method_of(experiment), ctx, *payload_of(experiment, ctx)))
    mine, theirs = (result.upload.weights for result in found)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], tensor) for key, tensor in theirs.items())


@pytest.mark.parametrize("name", ["lg-fedavg", "fedper", "fedrep"])
def test_a_prefix_that_names_nothing_is_refused(digits, name):
    experiment = tiny_experiment(method={"name": name, "private": ("head/", "bse/")})
    run = context_of(experiment, digits).run
    with pytest.raises(ConfigError, match="private: no weight of the net begins with 'bse/'"):
        method_of(experiment).init_server(run)
