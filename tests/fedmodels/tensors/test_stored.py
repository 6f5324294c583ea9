"""Files that a client stored, held against the digests beside them."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from zlib_ng import zlib_ng

from fedmodels.errors import ArchiveError, ArchiveReplaced
from fedmodels.host.files import sha256_of
from fedmodels.tensors import archive, stored
from fedmodels.tensors.archive import load, save
from fedmodels.tensors.bundle import Bundle, tensor_bytes

NAME = "state-00000000.safetensors"


def bundle(value):
    return Bundle(weights={"w": torch.full((3,), float(value))})


def negate(path):
    """Replace a file by its negative, with the checksum computed again."""
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["fedtide"])
        tensors = {key: -file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    crc = 0
    for key in sorted(tensors):
        crc = zlib_ng.crc32(tensor_bytes(tensors[key]), zlib_ng.crc32(key.encode(), crc))
    path.unlink()  # it may have another name
    save_file(tensors, path, {"fedtide": json.dumps({**facts, "crc32": crc})})


def test_a_file_replaced_by_its_negative_is_refused(tmp_path):
    path = tmp_path / NAME
    save(path, bundle(1), {}, noted=NAME)
    assert (tmp_path / stored.NOTE).read_text() == f"{sha256_of(path)}  {NAME}\n"
    load(path)
    negate(path)
    with pytest.raises(ArchiveReplaced, match="is not what was stored there") as refused:
        load(path)
    assert "\n" not in str(refused.value)
    assert load(path, verify=False)[0].weights["w"][0] == -1, "its checksum is right"


@pytest.mark.parametrize("dies_at", ["note", "rename"])
def test_a_crash_before_the_new_name_leaves_a_file_that_is_taken(tmp_path, monkeypatch, dies_at):
    path = tmp_path / NAME
    save(path, bundle(1), {}, noted=NAME)
    place = archive.stored if dies_at == "note" else archive.stored.os

    def dies(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if dies_at == "note":
            patched.setattr(place, "note", dies)
        else:
            patched.setattr("fedmodels.host.files.os.replace", dies)
        with pytest.raises(KeyboardInterrupt):
            save(path, bundle(2), {}, noted=NAME)
    assert load(path)[0].weights["w"][0] == 1
    save(path, bundle(3), {}, noted=NAME)
    assert load(path)[0].weights["w"][0] == 3


def test_a_directory_without_a_note_is_taken_and_noted_by_the_first_save(tmp_path):
    old, new = tmp_path / NAME, tmp_path / NAME.replace("0.", "1.")
    save(old, bundle(1), {})
    load(old)
    save(new, bundle(2), {}, noted=new.name)
    assert stored.noted(old) == [sha256_of(old)]
    negate(old)
    with pytest.raises(ArchiveReplaced):
        load(old)


def test_a_line_that_was_cut_counts_for_nothing_and_hides_none(tmp_path):
    path = tmp_path / NAME
    save(path, bundle(1), {}, noted=NAME)
    with (tmp_path / stored.NOTE).open("ab") as note:
        note.write(b"0123456789\0\0")
    load(path)
    save(path, bundle(2), {}, noted=NAME)
    load(path)


def test_a_note_stays_small_and_keeps_what_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "MAX_BYTES", 500)
    path = tmp_path / NAME
    for value in range(30):
        save(path, bundle(value), {}, noted=NAME)
        load(path)
    assert (tmp_path / stored.NOTE).stat().st_size < 600


def test_a_note_that_cannot_be_read_is_a_line(tmp_path):
    path = tmp_path / NAME
    save(path, bundle(1), {}, noted=NAME)
    (tmp_path / stored.NOTE).unlink()
    (tmp_path / stored.NOTE).mkdir()
    with pytest.raises(ArchiveError):
        save(path, bundle(1), {}, noted=NAME)


def test_a_file_that_is_replaced_while_it_is_read_is_read_again(tmp_path, monkeypatch):
    path, real = tmp_path / NAME, stored.noted
    save(path, bundle(1), {}, noted=NAME)

    def late(of):
        monkeypatch.setattr(stored, "noted", real)
        for value in (2, 3):
            save(path, bundle(value), {}, noted=NAME)
        return real(of)

    monkeypatch.setattr(stored, "noted", late)
    stored.check(path)
    assert load(path)[0].weights["w"][0] == 3
