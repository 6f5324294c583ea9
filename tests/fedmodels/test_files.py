"""Files that are replaced: whole, of the right mode, safe, and without leftovers."""

from __future__ import annotations

import ast
import errno
import os
from pathlib import Path

import pytest

from fedmodels.host.files import (
    LEFTOVER,
    lies_below,
    replacing,
    why_file_is_no_good,
    write_atomically,
    write_once,
)


def test_small_files_are_whole(tmp_path):
    path = tmp_path / "file"
    for text in ("one", "another"):
        write_atomically(path, text)
        assert path.read_text() == text
    assert os.listdir(tmp_path) == ["file"]


def test_an_error_leaves_the_old_content_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def write_half() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise ValueError("full")

    with pytest.raises(ValueError, match="full"):
        write_half()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_link_stays_and_what_it_stands_for_is_replaced(tmp_path):
    (tmp_path / "there").mkdir()
    file, link = tmp_path / "there" / "file", tmp_path / "link"
    link.symlink_to("there/file")
    for text in ("one", "another"):  # a file that is not there yet, and one that is
        write_atomically(link, text)
        assert link.is_symlink()
        assert file.read_text() == text
    assert os.listdir(tmp_path / "there") == ["file"]


def test_a_file_beside_it_is_what_a_crash_leaves(tmp_path):
    with replacing(tmp_path / "file") as one, replacing(tmp_path / "file") as other:
        assert one != other
        assert set(tmp_path.glob(LEFTOVER)) == {one, other}


@pytest.mark.parametrize(("private", "mode"), [(True, 0o600), (False, 0o640)])
def test_private_files_are_their_owner_s(tmp_path, private, mode):
    before = os.umask(0o027)
    try:
        with replacing(tmp_path / "file", private=private) as temporary:
            temporary.write_text("text")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode


@pytest.mark.usefixtures("synced")
def test_content_is_safe_before_its_name(tmp_path, monkeypatch):
    done = list[str]()
    fsync, replace = os.fsync, os.replace

    def noted_fsync(handle: int) -> None:
        place = Path(os.readlink(f"/proc/self/fd/{handle}"))
        done.append("content" if place.is_file() else "name")
        fsync(handle)

    def noted_replace(source: Path, target: Path) -> None:
        done.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    with replacing(tmp_path / "file", sync=True):
        pass
    assert done == ["content", "rename", "name"]


def test_a_pipe_or_a_device_is_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="no regular file"):
        write_atomically(pipe, "text")
    assert pipe.is_fifo()
    assert os.listdir(tmp_path) == ["pipe"]


def test_text_files_do_not_depend_on_the_locale():
    """A config that one machine wrote as Latin-1 is no TOML to the next process."""
    root = Path(__file__).parents[2]
    places = ("fedtide", "fedsrv", "fedcli", "models/fedmodels", "proto/fedpb")
    before = {"read_text": 0, "write_text": 1}
    for path in (path for place in places for path in (root / place).rglob("*.py")):
        text = path.read_text("utf-8")
        if not any(name in text for name in before):
            continue  # to parse all takes seconds
        for call in ast.walk(ast.parse(text)):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            if (name := call.func.attr) in before:
                named = any(keyword.arg == "encoding" for keyword in call.keywords)
                told = named or len(call.args) > before[name]
                assert told, f"{path}:{call.lineno}: {name} names no encoding"


@pytest.mark.parametrize(
    ("number", "path", "line"),
    [
        (errno.EROFS, "run/.lock", "run/.lock: Read-only file system"),
        (errno.EACCES, "run/.lock", "run/.lock: Permission denied"),
        (errno.ENOSPC, None, "cannot write output: No space left on device"),
        (errno.EROFS, None, ""),
        (errno.ENOENT, "run/.lock", ""),
    ],
)
def test_an_error_of_a_path_or_a_full_disk_has_a_line(number, path, line):
    assert why_file_is_no_good(OSError(number, os.strerror(number), path)) == line


@pytest.mark.parametrize(
    ("path", "root", "lies"),
    [
        ("in/a/f", "in", True),
        ("in/no/such", "in", True),
        ("in/loop/f", "in", True),
        ("in/out/f", "in", False),
        ("in/out", "in", False),
        ("in/a/../../beside/f", "in", False),
        ("in/out/../in/f", "in", True),
        ("inner/f", "in", False),
        ("led/a/f", "led", True),
        ("led/out/f", "led", False),
        ("led/a/f", "in", True),
        ("in/a", ".", True),
        ("../f", ".", False),
        (".", ".", True),
    ],
)
def test_what_lies_below_a_directory(path, root, lies, tmp_path, monkeypatch):
    """Links may lead anywhere below, also where the directory itself is reached by one."""
    monkeypatch.chdir(tmp_path)
    for folder in ("in/a", "beside"):
        Path(folder).mkdir(parents=True)
    for link, to in (("in/out", "beside"), ("in/loop", "in/a"), ("led", "in")):
        Path(link).symlink_to(tmp_path / to)
    for start in ("", str(tmp_path)):
        assert lies_below(start / Path(path), start / Path(root)) is lies


def test_of_those_who_write_a_file_once_the_first_one_does(tmp_path):
    path = tmp_path / "note"
    assert write_once(path, b"one\n", private=True)
    assert not write_once(path, b"two\n")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("one\n", 0o600)
    assert [*tmp_path.iterdir()] == [path]


def test_a_file_is_written_once_without_hard_links_too(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(os, "link", none)
    assert write_once(tmp_path / "note", b"one\n")
    assert not write_once(tmp_path / "note", b"two\n")
    assert (tmp_path / "note").read_text() == "one\n"
