"""The committed stubs are what the schema gives, and run with the oldest packages allowed."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from fedpb import PROTOCOL

ROOT = Path(__file__).parent.parent.parent
PROTO = ROOT / "proto"
PROTOC = Path(sys.prefix) / "protoc"
"""Where ``make setup`` puts the compiler, which asks for an older protobuf than runs here."""


def test_stubs_are_those_of_the_schema(tmp_path):
    files = sorted(str(p.relative_to(PROTO)) for p in (PROTO / "fedpb" / "v1").glob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(PROTO)]
    outputs = [f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", f"--grpc_python_out={tmp_path}"]
    there = {**os.environ, "PYTHONPATH": str(PROTOC)}
    subprocess.run([*command, *outputs, *files], check=True, cwd=PROTO, env=there)
    made = {p.name: p.read_text() for p in (tmp_path / "fedpb" / "v1").iterdir()}
    committed = {p.name: p.read_text() for p in (PROTO / "fedpb" / "v1").glob("*_pb2*")}
    assert len(committed) >= 5
    for name, text in committed.items():
        assert made[name] == text, f"{name} is stale: make proto"


def test_the_oldest_packages_allowed_are_those_of_the_stubs():
    """Stubs refuse a runtime that is older than their compiler."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    floors = dict(line.split(">=") for line in project["dependencies"])
    made = (PROTO / "fedpb" / "v1" / "coordinator_pb2.py").read_text()
    assert re.findall("# Protobuf Python Version: (.+)", made) == [floors["protobuf"]]
    calls = (PROTO / "fedpb" / "v1" / "coordinator_pb2_grpc.py").read_text()
    (version,) = re.findall("GRPC_GENERATED_VERSION = '(.+)'", calls)
    assert version == f"{floors['grpcio']}.0"


def test_the_page_of_the_protocol_names_its_number():
    page = (ROOT / "docs" / "protocol.md").read_text()
    assert f"The version of the protocol is a number, {PROTOCOL}, that" in page
