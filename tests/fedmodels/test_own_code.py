"""Code of a user's file: the bytes whose digest was checked are the ones that run."""

from __future__ import annotations

import os
import py_compile
import subprocess
import sys
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from fedmodels.errors import ConfigError
from fedmodels.own import own_code
from fedmodels.own.own_code import digest_of, own, own_name, renew


def code(path: Path, answer: int) -> Path:
    path.write_text(f"class Net:\n    answer = {answer}\n")
    os.utime(path, (1_700_000_000, 1_700_000_000))  # as two edits within a second
    return path


def test_two_edits_of_one_size_within_a_second_run_each(tmp_path):
    for answer in range(1, 7):
        file = code(tmp_path / "mine.py", answer)
        name = own_name(f"{file}:Net", "net", None, None)
        assert own(name).answer == answer
    assert os.listdir(tmp_path) == ["mine.py"], "no bytecode is left beside it"


def test_planted_bytecode_does_not_run(tmp_path):
    """In a process of its own, as a client that is started again."""
    planted, file = code(tmp_path / "planted.py", 6), tmp_path / "mine.py"
    Path(cache_from_source(str(file))).parent.mkdir()
    py_compile.compile(str(planted), cfile=cache_from_source(str(file)))
    code(file, 1)
    script = "import sys; from fedmodels.own.own_code import own; print(own(sys.argv[1]).answer)"
    found = subprocess.run(
        [sys.executable, "-c", script, f"{file}:Net"], capture_output=True, text=True, check=True
    )
    assert found.stdout == "1\n"


def test_what_was_checked_runs_though_the_file_changes_meanwhile(tmp_path):
    file = code(tmp_path / "mine.py", 1)
    digest = digest_of(f"{file}:Net")
    for trusted in (None, [file]):
        name = own_name(f"{file}:Net", "net", digest, trusted)
        code(file, 2)
        assert own(name).answer == 1
        assert digest_of(name) == digest
        code(file, 1)
    code(file, 2)
    renew(name)
    assert own(name).answer == 2
    with pytest.raises(ConfigError, match="has changed since this run started"):
        own_name(f"{file}:Net", "net", digest, None)
    with pytest.raises(ConfigError, match="has other content"):
        own_name(f"{file}:Net", "net", digest, [file])


def test_a_line_of_code_can_be_shown(tmp_path):
    import inspect

    found = own(own_name(f"{code(tmp_path / 'mine.py', 77)}:Net", "net", None, None))
    assert "answer = 77" in inspect.getsource(sys.modules[found.__module__])
    assert found.__module__.startswith(own_code.OWN_MODULE)
