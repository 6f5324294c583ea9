"""The benchmark of GPUs runs without one, on tiny sizes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, measured
from benchmarks.training import as_torch_is
from fedmodels.host.devices import repeat_bits

QUICK = ["--device", "cpu", "--quick"]


@pytest.fixture(autouse=True)
def _settings(monkeypatch) -> Iterator[None]:
    """Put back what the benchmark sets."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    threads, cudnn = torch.get_num_threads(), torch.backends.cudnn
    before = cudnn.deterministic, cudnn.allow_tf32, cudnn.benchmark
    filled = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled
    cudnn.deterministic, cudnn.allow_tf32, cudnn.benchmark = before


def test_every_part_but_the_launches_on_the_processor(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "RECORDS", tmp_path / "records")
    (tmp_path / "records").mkdir()
    monkeypatch.setattr(measured, "made_with", lambda **others: others)
    parts = [part for part in gpu.PARTS if part != "layouts"]
    gpu.main([*QUICK, "--keep", "--parts", *parts])
    said = capsys.readouterr().out
    record = json.loads((tmp_path / "records" / "gpu.json").read_text())
    assert record["versions"] == {"device": "no GPU"}
    for part in parts:
        title = gpu.PARTS[part][0]
        rows = record["tables"][title]["rows"]
        times = [value for row in rows for key, value in row.items() if key.endswith("_ms")]
        assert times, part
        assert min(times) > 0, part
        assert f"**{title}**\n\n{measured.markdown(rows)}" in said
        assert {*rows[0]} <= {*measured.LABELS}, "no column is left out of the page"


def test_launches_are_told_the_device_and_how_many_hosts(capsys, monkeypatch):
    commands = []

    def launched(command: list[str], **_: object) -> None:
        commands.append(command)
        out = Path(command[command.index("--out") + 1])
        (out / "data").mkdir(parents=True)
        record = json.dumps({"seconds": {"wall": 0.5}})
        (out / "rounds.jsonl").write_text("\n".join([record] * 4))

    monkeypatch.setattr(subprocess, "run", launched)
    gpu.main([*QUICK, "--parts", "layouts"])
    assert [command[command.index("--hosts") + 1] for command in commands] == ["1", "2"]
    assert all(c[c.index("--device") + 1] == "cpu" for c in commands)
    assert ["--data" in command for command in commands] == [False, True]
    assert "| 1 | 4 | 0.500 | 8.00 |" in capsys.readouterr().out


def test_a_case_that_fails_and_one_without_time_are_told(capsys, monkeypatch):
    def ended(command: list[str], timeout: float, **_: object) -> None:
        assert timeout <= gpu.LAUNCH_S
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", ended)
    gpu.main([*QUICK, "--parts", "layouts"])
    gpu.main([*QUICK, "--parts", "sums", "--seconds", "0"])
    said = capsys.readouterr().out
    assert "layouts 2 hosts: TimeoutExpired: Command" in said
    assert "sums 10000: left out, there is no time left" in said
    assert "|" not in said.partition("On no GPU")[2], "no table without a row"


def test_a_machine_without_a_gpu_is_told(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "no CUDA device; --device cpu --quick runs the same code" in capsys.readouterr().err


def test_a_loop_by_hand_has_the_settings_of_torch():
    def told() -> tuple[bool, ...]:
        cudnn = torch.backends.cudnn
        return torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.allow_tf32

    before = told()
    with as_torch_is(torch.device("cpu")):
        assert told() == before
    assert told() == before, "a processor has nothing to be set"
    repeat_bits()
    with as_torch_is(torch.device("cuda")):
        assert told() == before == (False, False, True)
    assert told() == (True, True, False)
