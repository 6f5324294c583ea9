"""``fedsrv doctor`` tells what a report of a fault needs, and nothing of whose machine it is."""

import getpass
import json
import socket
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from fedsrv import cli
from fedsrv.identity.certificates import init_authority


def said(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", *words])
    return ended.value.code, capsys.readouterr()


def test_a_page_for_a_report(capsys, monkeypatch, tmp_path):
    authority, _ = init_authority(tmp_path / "certs")
    monkeypatch.setenv("https_proxy", "http://ann:s3cret@proxy.example:3128")
    monkeypatch.setenv("FEDSRV_LAUNCH_OUT", "/srv/ann/run")
    code, out = said(capsys, "--json", "--certificate", str(authority))
    assert code == 0
    found = json.loads(out.out)
    assert found["versions"]["torch"] == version("torch")
    assert torch.backends.cpu.get_cpu_capability() in found["machine"]["processor"]
    assert found["network"]["127.0.0.1"] == "can be listened on"
    assert found["variables"]["https_proxy"] == "http://***@proxy.example:3128"
    assert found["variables"]["FEDSRV_LAUNCH_OUT"] == "is set"
    assert found["certificates"][authority.name].startswith("ends on 20")
    values = " ".join(v for lines in found.values() for v in lines.values())
    for own in (socket.gethostname(), getpass.getuser(), str(Path.cwd()), str(tmp_path), "s3cret"):
        assert own not in values, f"it tells {own}"
    code, out = said(capsys)
    assert code == 0
    assert any(line.split()[:2] == ["machine", "cores"] for line in out.out.splitlines())


def test_a_file_that_is_no_certificate_gets_one_line(capsys, tmp_path):
    (tmp_path / "no.pem").write_text("no")
    code, out = said(capsys, "--certificate", str(tmp_path / "no.pem"))
    assert code != 0
    assert out.err.startswith("error: --certificate ")
    assert out.err.count("\n") == 1
