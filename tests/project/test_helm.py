"""The chart of deploy/helm: rendered by Helm, and held against the schemas of Kubernetes."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from yaml import safe_load

from fedmodels.errors import ConfigError

CHART = Path(__file__).parent.parent.parent / "deploy" / "helm"
SITES = """
coordinator: {evaluator: true}
sites:
  - {name: a, clients: 0-4, dataClaim: a-data, tlsSecret: a, nodeSelector: {site: a},
     resources: {limits: {memory: 8Gi, nvidia.com/gpu: 1}}}
  - {name: scores, clients: evaluator, dataClaim: test-data, tlsSecret: scores}
"""
EVERYTHING = """
imagePullSecrets: [{name: private}]
coordinator:
  metricsPort: 9100
  dashboardPort: 8080
  serviceAnnotations: {balancer: internal}
  extraArgs: ["--set=tracking.mlflow=true"]
  env: [{name: MLFLOW_TRACKING_URI, value: "http://mlflow:5000"}]
  envFrom: [{secretRef: {name: wandb}}]
  podAnnotations: {a: b}
client: {env: [{name: http_proxy, value: "http://proxy:3128"}], extraArgs: [--json]}
networkPolicy:
  enabled: true
  clients: [{ipBlock: {cidr: 10.0.0.0/8}}]
  pages: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}]
serviceMonitor: {enabled: true, labels: {release: prometheus}}
sites:
  - {name: a, clients: "0", dataClaim: a, tlsSecret: a, env: [{name: B, value: "c"}],
     extraArgs: ["--weights=/data/weights.safetensors"], image: own}
"""
STAYS = """
coordinator: {atOnce: 4, metricsPort: 9100}
networkPolicy: {enabled: true, models: [{podSelector: {}}]}
sites:
  - {name: a, clients: "0", dataClaim: a, tlsSecret: a, stay: true,
     rules: "allow_method = ['fedavg']", models: {client: "0", extraArgs: [--feedback=20]}}
  - {name: b, clients: "1", dataClaim: b, tlsSecret: b}
"""
VERSIONS = ("1.29", "1.37")

pytestmark = pytest.mark.skipif(
    shutil.which("helm") is None or importlib.util.find_spec("kubernetes_validate") is None,
    reason="needs helm, and pip install kubernetes-validate",
)


def helm(*words: str, release: str = "one") -> subprocess.CompletedProcess[str]:
    """Run Helm on the chart."""
    command, *options = words
    name = [release] if command == "template" else []
    return subprocess.run(
        ["helm", command, *name, str(CHART), *options], capture_output=True, text=True
    )


def rendered(place: Path, values: str, release: str = "one") -> list[dict[str, Any]]:
    """Return the objects that the chart makes of values."""
    import yaml

    (place / "values.yaml").write_text(values)
    done = helm("template", f"--values={place / 'values.yaml'}", release=release)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.fixture
def sites(tmp_path: Path) -> str:
    """Return the option that gives two sites."""
    (tmp_path / "sites.yaml").write_text(SITES)
    return f"--values={tmp_path / 'sites.yaml'}"


@pytest.fixture
def objects(tmp_path: Path) -> list[dict[str, Any]]:
    """Return what is rendered for two sites."""
    return rendered(tmp_path, SITES)


@pytest.fixture
def everything(tmp_path: Path) -> list[dict[str, Any]]:
    """Return what is rendered where every value is given."""
    return rendered(tmp_path, EVERYTHING)


@pytest.fixture
def stays(tmp_path: Path) -> list[dict[str, Any]]:
    """Return what is rendered for a front, a site that stays, and its models."""
    return rendered(tmp_path, STAYS)


def of_kind(objects: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    """Return the objects of a kind by name."""
    return {one["metadata"]["name"]: one for one in objects if one["kind"] == kind}


def test_lint_finds_nothing(sites):
    for more in ([], [sites]):
        done = helm("lint", "--strict", *more)
        assert done.returncode == 0, done.stdout
        assert "[WARNING]" not in done.stdout


@pytest.mark.filterwarnings("ignore")  # of the validator's own
@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_rendered_fits_the_schemas(objects, everything, stays, version):
    import kubernetes_validate

    kinds = [one["kind"] for one in objects]
    assert sorted(kinds) == sorted(["ConfigMap", "Service", *3 * ["PersistentVolumeClaim", "Job"]])
    for one in [*objects, *everything, *stays]:
        if one["kind"] != "ServiceMonitor":  # is not of Kubernetes itself
            kubernetes_validate.validate(one, version, strict=True)


@pytest.mark.parametrize("release", ["one", 53 * "r", "1.2", 45 * "9" + ".x"])
def test_names_are_ones_that_kubernetes_takes(release, tmp_path):
    """A service's begins with a letter; a Job's is a label of its pods, of 63 letters at most."""
    sites = [63 * "s", 62 * "s" + "t", "s", "0"]
    rows = [{"name": name, "clients": "0", "dataClaim": "d", "tlsSecret": "t"} for name in sites]
    values = {**safe_load(EVERYTHING), "sites": rows}
    objects = rendered(tmp_path, json.dumps(values), release)
    names = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert len(names) == len({*names}) == 16
    for _, name in names:
        assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name), name
    for one in objects:
        labels = [one["metadata"]["labels"]]
        if one["kind"] == "Job":
            labels.append(one["spec"]["template"]["metadata"]["labels"])
        assert all(len(value) <= 63 for each in labels for value in each.values())
    (service, pages) = of_kind(objects, "Service")
    assert pages == f"{service}-pages"
    jobs = of_kind(objects, "Job")
    pods = [job["spec"]["template"]["spec"] for job in jobs.values()]
    words = [pod["containers"][0]["args"] for pod in pods]
    assert len([one for one in words if f"--server={service}:5055" in one]) == len(sites)


def test_a_run_that_ends_is_not_started_again(objects):
    job = of_kind(objects, "Job")["one-coordinator-1"]["spec"]
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    assert job["podReplacementPolicy"] == "Failed"
    disrupted, mistaken = job["podFailurePolicy"]["rules"]
    assert disrupted["action"] == "Ignore"
    assert mistaken["onExitCodes"]["values"] == [ConfigError.exit_code]
    assert job["backoffLimit"] == 20
    claim = of_kind(objects, "PersistentVolumeClaim")["one-coordinator-run"]
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_every_value_has_its_place(everything):
    jobs = of_kind(everything, "Job")
    pod = jobs["one-coordinator-1"]["spec"]["template"]
    (coordinator,) = pod["spec"]["containers"]
    assert {"--metrics-port=0.0.0.0:9100", "--dashboard=0.0.0.0:8080", "--insecure"} <= {
        *coordinator["args"]
    }
    assert coordinator["args"][-1] == "--set=tracking.mlflow=true"
    assert [one["name"] for one in coordinator["env"]] == ["HOME", "MLFLOW_TRACKING_URI"]
    assert coordinator["envFrom"] == [{"secretRef": {"name": "wandb"}}]
    assert pod["metadata"]["annotations"] == {"a": "b"}
    site = jobs["one-a-1"]["spec"]["template"]["spec"]
    assert site["imagePullSecrets"] == pod["spec"]["imagePullSecrets"] == [{"name": "private"}]
    (host,) = site["containers"]
    assert host["image"] == "own"
    assert host["args"][-2:] == ["--json", "--weights=/data/weights.safetensors"]
    assert [one["name"] for one in host["env"]] == ["HOME", "http_proxy", "B"]
    services = of_kind(everything, "Service")
    assert services["one-coordinator"]["metadata"]["annotations"] == {"balancer": "internal"}
    assert [port["name"] for port in services["one-coordinator"]["spec"]["ports"]] == ["grpc"]
    pages = services["one-coordinator-pages"]
    assert [port["name"] for port in pages["spec"]["ports"]] == ["metrics", "dashboard"]
    (monitor,) = of_kind(everything, "ServiceMonitor").values()
    wanted = monitor["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= pages["metadata"]["labels"].items()
    assert not wanted.items() <= services["one-coordinator"]["metadata"]["labels"].items()
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    policies = of_kind(everything, "NetworkPolicy")
    calls, looks = policies["one-coordinator"]["spec"]["ingress"]
    assert [port["port"] for port in calls["ports"]] == ["grpc"]
    assert calls["from"][1] == {"ipBlock": {"cidr": "10.0.0.0/8"}}
    assert [port["port"] for port in looks["ports"]] == ["metrics", "dashboard"]
    assert "ingress" not in policies["one-sites"]["spec"], "nobody calls a site"
    for name, job in (("one-coordinator", "one-coordinator-1"), ("one-sites", "one-a-1")):
        chosen = policies[name]["spec"]["podSelector"]["matchLabels"]
        assert chosen.items() <= jobs[job]["spec"]["template"]["metadata"]["labels"].items()


def test_the_command_passes_its_words_on(objects, tmp_path):
    job = of_kind(objects, "Job")["one-coordinator-1"]["spec"]["template"]["spec"]
    (container,) = job["containers"]
    fake = tmp_path / "fedsrv"
    fake.write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    fake.chmod(0o755)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").touch()
    words = [*container["command"], *container["args"], "--set=a=two words"]
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    said = subprocess.check_output(words, cwd=tmp_path, env=env, text=True)
    assert said.split("|")[:-1] == [*container["args"], "--set=a=two words", "--resume"]


def test_every_pod_is_bounded_and_nobody_is_root(objects):
    pods = [one["spec"]["template"]["spec"] for one in objects if "template" in one.get("spec", {})]
    assert len(pods) == 3
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"]
        (container,) = pod["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert container["resources"]["limits"]["memory"]
        assert [v["secret"]["secretName"] for v in pod["volumes"] if "secret" in v]
    coordinator, first, _ = (pod["containers"][0] for pod in pods)
    assert "--evaluator" in coordinator["args"]
    assert {"readinessProbe", "livenessProbe"} <= coordinator.keys()
    assert first["args"][:3] == ["join", "--client-id=0-4", "--server=one-coordinator:5055"]
    assert pods[1]["nodeSelector"] == {"site": "a"}


def test_a_front_stays_and_opens_a_port_for_each_run(stays):
    front = of_kind(stays, "StatefulSet")["one-coordinator"]["spec"]
    pod = front["template"]["spec"]
    assert (
        front["template"]["metadata"]["labels"].items() >= front["selector"]["matchLabels"].items()
    )
    assert pod["restartPolicy"] == "Always"
    (container,) = pod["containers"]
    assert container["args"][:4] == ["serve", "queue", "--listen=0.0.0.0:5055", "--at-once=4"]
    opened = {p["name"]: p["containerPort"] for p in container["ports"]}
    runs = {f"run-{number}": 5055 + number for number in range(1, 5)}
    assert opened == {"grpc": 5055, **runs, "metrics": 9100}
    ports = of_kind(stays, "Service")["one-coordinator"]["spec"]["ports"]
    assert {port["targetPort"]: port["port"] for port in ports} == {"grpc": 5055, **runs}
    calls, *_ = of_kind(stays, "NetworkPolicy")["one-coordinator"]["spec"]["ingress"]
    assert calls["ports"] == [{"port": 5055, "endPort": 5059}]
    assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys()
    assert [v["name"] for v in container["volumeMounts"]] == ["run", "certs", "tmp"]
    assert "config.toml" not in json.dumps(stays)


def test_a_site_that_stays_serves_its_models_from_the_same_states(stays):
    site = of_kind(stays, "StatefulSet")["one-a"]["spec"]
    assert site["template"]["metadata"]["labels"].items() >= site["selector"]["matchLabels"].items()
    host, models = site["template"]["spec"]["containers"]
    assert {"--stay", "--rules=/etc/fedtide/rules.toml"} <= {*host["args"]}
    assert models["args"][:3] == ["serve-model", "--run=/state", "--client=0"]
    assert "--allowed-hosts=one-a-models" in models["args"]
    assert models["args"][-1] == "--feedback=20"
    assert models["readinessProbe"]["httpGet"]["path"] == "/v2/health/ready"
    assert not {"certs", "data"} & {v["name"] for v in models["volumeMounts"]}, "it needs neither"
    for container in (host, models):
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert container["resources"]["limits"]["memory"]
    service = of_kind(stays, "Service")["one-a-models"]["spec"]
    assert service["selector"].items() <= site["template"]["metadata"]["labels"].items()
    policies = of_kind(stays, "NetworkPolicy")
    (called,) = policies["one-a-models"]["spec"]["ingress"]
    assert called["ports"] == [{"port": "http"}, {"port": "models-grpc"}]
    assert policies["one-a-models"]["spec"]["podSelector"]["matchLabels"]["fedtide/site"] == "a"
    assert "one-b-1" in of_kind(stays, "Job"), "a site of one run ends with it"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--set", "coordinator.enabled=false"], "give server, the HOST:PORT that clients reach"),
        (["--set", "sites[1].name=a"], "sites: the name a is taken"),
        (["--set", "sites[1].name=coordinator"], "sites: the name coordinator is taken"),
        (["--set", "serviceMonitor.enabled=true"], "needs coordinator.metricsPort"),
        (["--set", "coordinator.prot=1"], "'prot' not allowed"),
        (["--set", "sites[0].clients=x"], "'/sites/0/clients'"),
        (["--set-string", "sites[0].models.client=0"], "models of a need stay"),
        (["--set", "coordinator.atOnce=2"], "coordinator.evaluator is of one run"),
    ],
)
def test_wrong_values_are_refused(options, line, sites):
    done = helm("template", sites, *options)
    assert done.returncode != 0
    assert line in done.stderr
