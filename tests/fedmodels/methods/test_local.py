import json

from fedmodels.tensors.archive import load
from fedmodels.tensors.bundle import Bundle, tensor_bytes
from fedmodels.training.contexts import START, ServerContext
from fedtide.inprocess import run_in_process
from tests.conftest import context_of, method_of, payload_of, tiny_experiment


def local(**tables):
    return tiny_experiment(method="local", **tables)


def clients_of(out):
    """Return what the records say of each client.

    Left out are the time and memory it took, and its score on rare classes: which classes are rare
    depends on everybody.
    """
    found = {}
    for line in (out / "rounds.jsonl").read_text().splitlines():
        for client, row in json.loads(line)["clients"].items():
            row.pop("seconds", None)
            row.pop("peak_rss_bytes", None)
            for view in row["views"].values():
                view.pop("minority", None)
            found.setdefault(client, []).append(row)
    return found


def personal(out, client):
    weights = load(out / "clients" / client / "personal.safetensors")[0].weights
    return {key: bytes(tensor_bytes(t)) for key, t in weights.items()}


def test_adding_clients_changes_nobody(digits, tmp_path):
    few, many = tmp_path / "few", tmp_path / "many"
    run_in_process(local(schedule={"clients": 2}), digits, few)
    run_in_process(local(schedule={"clients": 3}), digits, many)
    rows = clients_of(many)
    assert rows.keys() == {"0", "1", "2"}
    for client, series in clients_of(few).items():
        assert rows[client] == series
        assert personal(many, client) == personal(few, client)


def test_clients_differ(digits, tmp_path):
    run_in_process(local(), digits, tmp_path / "out")
    models = [personal(tmp_path / "out", client) for client in "012"]
    assert all(models[0][key] != models[1][key] for key in models[0])


def test_nothing_travels(digits, tmp_path):
    summary = run_in_process(local(), digits, tmp_path / "out")
    assert summary["bytes"]["down"] == summary["bytes"]["up"] == 0
    experiment = local()
    ctx = context_of(experiment, digits)
    method = method_of(experiment)
    assert not any(spec.required or spec.optional for spec in method.payload_spec(ctx.run))
    assert method.uplink(ctx, Bundle(weights=ctx.run.initial_weights), None) == Bundle()
    server = ServerContext(ctx.run, START, (0,))
    assert method.broadcast(server, method.init_server(ctx.run)) == (Bundle(), {})


def test_everybody_starts_from_the_same_weights(digits):
    states = []
    for client in range(3):
        ctx = context_of(local(), digits, client)
        states.append(payload_of(local(), ctx)[1].weights)
    for other in states[1:]:
        assert all((other[k] == states[0][k]).all() for k in states[0])


def test_no_global_model_is_scored(digits, tmp_path):
    metrics = run_in_process(local(), digits, tmp_path / "out")["metrics"]
    assert "a_glo" not in metrics
    assert "a_loc" in metrics
