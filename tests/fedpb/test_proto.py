"""The committed stubs are what the schema gives."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PROTO = ROOT / "proto"


def test_stubs_are_those_of_the_schema(tmp_path):
    files = sorted(str(p.relative_to(PROTO)) for p in (PROTO / "fedpb" / "v1").glob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(PROTO)]
    outputs = [f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", f"--grpc_python_out={tmp_path}"]
    subprocess.run([*command, *outputs, *files], check=True, cwd=PROTO)
    made = {p.name: p.read_text() for p in (tmp_path / "fedpb" / "v1").iterdir()}
    committed = {p.name: p.read_text() for p in (PROTO / "fedpb" / "v1").glob("*_pb2*")}
    assert len(committed) >= 5
    for name, text in committed.items():
        assert made[name] == text, f"{name} is stale: make proto"
