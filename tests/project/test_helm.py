"""The chart of deploy/helm: rendered by Helm, and held against the schemas of Kubernetes."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHART = Path(__file__).parent.parent.parent / "deploy" / "helm"
SITES = """
coordinator: {evaluator: true}
sites:
  - {name: a, clients: 0-4, dataClaim: a-data, tlsSecret: a, nodeSelector: {site: a},
     resources: {limits: {memory: 8Gi, nvidia.com/gpu: 1}}}
  - {name: scores, clients: evaluator, dataClaim: test-data, tlsSecret: scores}
"""
VERSIONS = ("1.27", "1.37")

pytestmark = pytest.mark.skipif(
    shutil.which("helm") is None or importlib.util.find_spec("kubernetes_validate") is None,
    reason="needs helm, and pip install kubernetes-validate",
)


def helm(*words: str) -> subprocess.CompletedProcess[str]:
    """Run Helm on the chart."""
    command, *options = words
    name = ["one"] if command == "template" else []
    return subprocess.run(
        ["helm", command, *name, str(CHART), *options], capture_output=True, text=True
    )


@pytest.fixture
def sites(tmp_path: Path) -> str:
    """Return the option that gives two sites."""
    (tmp_path / "sites.yaml").write_text(SITES)
    return f"--values={tmp_path / 'sites.yaml'}"


@pytest.fixture
def objects(sites: str) -> list[dict[str, Any]]:
    """Return what is rendered for two sites."""
    import yaml

    done = helm("template", sites)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def test_lint_finds_nothing(sites: str) -> None:
    for more in ([], [sites]):
        done = helm("lint", "--strict", *more)
        assert done.returncode == 0, done.stdout
        assert "[WARNING]" not in done.stdout


@pytest.mark.filterwarnings("ignore")  # of the validator's own
@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_rendered_fits_the_schemas(objects: list[dict[str, Any]], version: str) -> None:
    import kubernetes_validate

    kinds = [one["kind"] for one in objects]
    assert sorted(kinds) == sorted(
        ["ConfigMap", "Service", "StatefulSet", *2 * ["PersistentVolumeClaim", "Job"]]
    )
    for one in objects:
        kubernetes_validate.validate(one, version, strict=True)


def test_every_pod_is_bounded_and_nobody_is_root(objects: list[dict[str, Any]]) -> None:
    pods = [one["spec"]["template"]["spec"] for one in objects if "template" in one.get("spec", {})]
    assert len(pods) == 3
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"]
        (container,) = pod["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert container["resources"]["limits"]["memory"]
        assert [v["secret"]["secretName"] for v in pod["volumes"] if "secret" in v]
    coordinator, first, _ = (pod["containers"][0] for pod in pods)
    assert "--evaluator" in coordinator["args"][0].split()
    assert {"readinessProbe", "livenessProbe"} <= coordinator.keys()
    assert first["args"][:3] == ["join", "--client-id=0-4", "--server=one-coordinator:5055"]
    assert pods[1]["nodeSelector"] == {"site": "a"}


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--set", "coordinator.enabled=false"], "give server, the HOST:PORT that clients reach"),
        (["--set", "coordinator.prot=1"], "'prot' not allowed"),
        (["--set", "sites[0].clients=x"], "'/sites/0/clients'"),
    ],
)
def test_wrong_values_are_refused(options: list[str], line: str, sites: str) -> None:
    done = helm("template", sites, *options)
    assert done.returncode != 0
    assert line in done.stderr
