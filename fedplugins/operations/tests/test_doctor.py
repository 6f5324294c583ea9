"""``fedsrv doctor`` tells what a report of a fault needs, and nothing of whose machine it is."""

import getpass
import json
import socket
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from fedplugins.operations.machine_page import reached
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


def test_a_server_is_reached_or_a_line_says_why_not(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        place = listening.getsockname()[:2]
        assert reached(*place).startswith("takes connections")
    assert reached(*place) == "cannot be reached: Connection refused"
    assert reached("x" * 70, 5055) == "its name is not known here"

    def unknown(*_: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", unknown)
    assert reached("nowhere.example", 5055) == "its name is not known here"


def test_a_place_that_is_none_gets_one_line(capsys):
    code, out = said(capsys, "--server", "nowhere:port")
    assert code == 2
    assert out.err.startswith("error: --server ")
    assert out.err.count("\n") == 1
