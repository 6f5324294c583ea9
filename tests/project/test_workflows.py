"""What the host of the repository runs and shows: workflows, forms, owners, versions."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from yaml import safe_load

ROOT = Path(__file__).parent.parent.parent
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, VERSION = PYPROJECT["project"], PYPROJECT["tool"]["fedtide"]["version"]
MAKEFILE = (ROOT / "Makefile").read_text()


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in safe_load(path.read_text())["jobs"].values():
        yield from job.get("steps", ())


def test_what_workflows_run_is_there():
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.MULTILINE))
    run = [step["run"] for path in WORKFLOWS for step in steps(path) if "run" in step]
    made = {word for line in run for word in re.findall(r"make ((?:[a-z-]+ ?)+)", line)}
    named = {name for words in made for name in words.split()}
    assert {"check", "demo"}.isdisjoint(named), "parts of check run beside each other"
    assert {"lint", "types", "proto-check", "test", "docs", "build", "test-beside"} <= named
    assert {"test-lowest", "test-flower", "test-sdist", "coverage", "soak", "fuzz"} <= named
    assert named <= targets
    extras = {name for line in run for names in re.findall(r"\.\[(.*?)\]", line)
              for name in names.split(",")}  # fmt: skip
    assert extras <= PROJECT["optional-dependencies"].keys()


def test_tests_run_on_every_python_that_is_named():
    jobs = safe_load((GITHUB / "workflows" / "ci.yml").read_text())["jobs"]
    tried = set(jobs["tests"]["strategy"]["matrix"]["python"])
    named = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if "Python :: 3." in c]
    assert set(named) <= tried
    badges = re.findall(r"badge/([\w.-]+)-blue", (ROOT / "README.md").read_text())
    license_of = PROJECT["license"].replace("-", "--")
    assert badges == [f"python-{named[0]}_to_{named[-1]}", f"license-{license_of}"]
    assert f">={min(named, key=lambda v: int(v.partition('.')[2]))}" == PROJECT["requires-python"]


def test_each_plugin_is_left_out_once_a_week():
    jobs = safe_load((GITHUB / "workflows" / "weekly.yml").read_text())["jobs"]
    (all_of_them, *without) = jobs["core"]["strategy"]["matrix"]["without"]
    folders = {path.parent.name for path in (ROOT / "fedplugins").glob("*/__init__.py")}
    assert (all_of_them, {*without}) == ("", folders)


def test_constraints_hold_all_that_the_suite_needs():
    """They bind where CI runs on the oldest Python, and nowhere where other releases are tried."""
    jobs = safe_load((GITHUB / "workflows" / "ci.yml").read_text())["jobs"]
    bound = {name for name, job in jobs.items() if "PIP_CONSTRAINT" in job.get("env", {})}
    assert bound == {"form", "tests", "instructions"}
    lines = (ROOT / "constraints.txt").read_text().split()
    pinned = {canonicalize_name(name): version for name, version in (x.split("==") for x in lines)}
    for line in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]:
        wanted = Requirement(line)
        assert wanted.specifier.contains(pinned[canonicalize_name(wanted.name)]), line


def test_a_workflow_may_do_little():
    for path in WORKFLOWS:
        text = safe_load(path.read_text())
        assert text["permissions"] == {"contents": "read"}, path.name
        for name, job in text["jobs"].items():
            assert "timeout-minutes" in job or "uses" in job, name
    release = safe_load((GITHUB / "workflows" / "release.yml").read_text())["jobs"]
    writers = {name: job["permissions"] for name, job in release.items() if "permissions" in job}
    assert writers == {
        "attest": {"id-token": "write", "attestations": "write"},
        "publish": {"id-token": "write"},
        "announce": {"contents": "write"},
        "images": {"packages": "write"},
        "attest-images": {"id-token": "write", "attestations": "write"},
        "site": {"pages": "write", "id-token": "write"},
    }
    assert set(release["contents"]["needs"]) == {"ci", "check"}
    assert release["attest"]["needs"] == "contents"
    for name in ("attest", "attest-images"):
        assert not [step for step in release[name]["steps"] if "run" in step], "it signs alone"
    after = {name: job["needs"] for name, job in release.items() if "needs" in job}
    del after["attest"], after["contents"]
    assert after.pop("publish") == "attest"
    assert after.pop("attest-images") == "images"
    assert after.pop("announce") == ["publish", "images"], "its notes have the images' digests"
    assert set(after.values()) == {"publish"}
    assert release["publish"]["environment"] == "release"
    assert "secrets." not in (GITHUB / "workflows" / "release.yml").read_text()


def test_nothing_moves_under_an_action_and_no_credential_is_kept():
    for path in WORKFLOWS:
        for step in steps(path):
            if "uses" in step:
                assert re.search("@[0-9a-f]{40}$", step["uses"]), f"{path.name}: {step['uses']}"
            if step.get("uses", "").startswith("actions/checkout"):
                assert step["with"]["persist-credentials"] is False, path.name
        for line in re.findall(r"uses: \w+/.*", path.read_text()):
            assert re.search(r"  # v\d+\.\d+\.\d+$", line), line


def test_images_are_built_of_the_source_archive_and_name_what_they_hold():
    """A clone without .git, as Docker sees it, does not carry the release's number."""
    release = safe_load((GITHUB / "workflows" / "release.yml").read_text())["jobs"]
    uses = [step.get("uses", "") for step in release["images"]["steps"]]
    assert not [one for one in uses if "checkout" in one]
    (build,) = [step["run"] for step in release["images"]["steps"] if step.get("id") == "push"]
    assert {"--sbom=true", "--provenance=mode=max", "--push"} <= {*build.split()}
    for step in release["attest-images"]["steps"]:
        assert {"subject-name", "subject-digest"} == set(step["with"])
    hatch = PYPROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    docker = (ROOT / "deploy" / "Dockerfile").read_text()
    copied = re.findall(r"^COPY (\S+) /$", docker, flags=re.MULTILINE)
    assert "constraints.txt" in copied
    assert {*copied, "deploy"} <= {*hatch}


def test_tools_of_node_are_those_of_their_lock():
    """npm install took whatever the registry had that day."""
    texts = [*WORKFLOWS, ROOT / ".ci" / "run", ROOT / ".devcontainer" / "devcontainer.json"]
    assert [path.name for path in texts if re.search(r"npm (install|i)\b", path.read_text())] == []
    asked = json.loads((GITHUB / "node" / "package.json").read_text())["dependencies"]
    lock = json.loads((GITHUB / "node" / "package-lock.json").read_text())["packages"]
    assert lock[""]["dependencies"] == asked
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in asked.values())
    assert [name for name, one in lock.items() if name and "integrity" not in one] == []


def test_alerts_are_tried_by_prometheus_itself():
    """Without promtool the tests of alerts and of the board are skipped."""
    beside = safe_load((GITHUB / "workflows" / "ci.yml").read_text())["jobs"]["beside"]["steps"]
    run = "\n".join(step.get("run", "") for step in beside)
    assert re.search(r"apt-get install .*\bprometheus\b", run)
    assert re.search(r"command -v .*\bpromtool\b", run)
    (recipe,) = re.findall(r"^test-beside:.*\n((?:\t.*\n)+)", MAKEFILE, flags=re.MULTILINE)
    assert "tests/project/test_deploy.py" in recipe


def test_forms_are_ones():
    for form in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml"):
        text = safe_load(form.read_text())
        if form.name != "config.yml":
            assert {"name", "description", "body"} <= text.keys(), form.name
            ids = [part["id"] for part in text["body"] if part["type"] != "markdown"]
            assert len(ids) == len({*ids})


def test_owned_paths_are_there():
    lines = (GITHUB / "CODEOWNERS").read_text().splitlines()
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    assert rows[0][0] == "*"
    for path, *owners in rows:
        assert owners
        assert path == "*" or (ROOT / path.strip("/")).exists(), path


def test_the_container_of_developers_begins_with_the_oldest_python():
    place = ROOT / ".devcontainer"
    found = json.loads((place / "devcontainer.json").read_text())
    assert (place / found["build"]["dockerfile"]).exists()
    oldest = PROJECT["requires-python"].removeprefix(">=")
    assert f"ARG PYTHON=python:{oldest}-slim" in (place / "Dockerfile").read_text()


def test_versions_agree():
    chart = safe_load((ROOT / "deploy" / "helm" / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)
    assert safe_load((ROOT / "CITATION.cff").read_text())["version"] == VERSION
    sections = re.findall(r"^## (\S+) - (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0][0] == VERSION
    assert all(re.fullmatch(r"unreleased|\d{4}-\d\d-\d\d", date) for _, date in sections)


@pytest.mark.parametrize(
    ("version", "date", "status"),
    [(VERSION, "2030-01-02", 0), (VERSION, "unreleased", 2),
     ("9.9.9", "2030-01-02", 2)],
    ids=["this", "undated", "another"],
)  # fmt: skip
def test_release_notes_are_those_of_the_version(version, date, status, tmp_path):
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    text = (ROOT / "CHANGELOG.md").read_text()
    dated = re.sub(r"^(## \S+ - ).*$", rf"\g<1>{date}", text, count=1, flags=re.MULTILINE)
    (tmp_path / "CHANGELOG.md").write_text(dated)
    env = {**os.environ, "MAKEFLAGS": ""}
    command = ["make", "release-notes", f"VERSION={version}"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    if status == 0:
        notes = (tmp_path / "build" / "notes.md").read_text()
        assert "### Added" in notes
        assert "## " + version not in notes
        assert len(re.findall(r"^## ", notes, re.MULTILINE)) == 0


def test_a_first_version_breaks_nothing():
    text = (ROOT / "CHANGELOG.md").read_text()
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert "**Breaking" not in sections[-1], "no release took what it breaks"
