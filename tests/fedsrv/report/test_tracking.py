"""TensorBoard gets every score, and its absence one line."""

from __future__ import annotations

import sys
import types

import pytest

from fedmodels.errors import ConfigError
from fedsrv.events import EventLog
from fedsrv.tracking import track


def test_every_score_is_written(monkeypatch, tmp_path):
    told: list[tuple[object, ...]] = []

    class Writer:
        def __init__(self, place):
            told.append(("opened", place))

        def add_scalar(self, *facts):
            told.append(facts)

        def close(self):
            told.append(("closed",))

    fake = types.SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    events = EventLog()
    end = track(events, tmp_path)
    events.tell("commit", interaction=0)
    events.tell("scores", interaction=3, metrics={"a_glo": 0.5, "loss": 1.0})
    end()
    assert told == [("opened", str(tmp_path)), ("a_glo", 0.5, 3), ("loss", 1.0, 3), ("closed",)]


def test_without_tensorboard_there_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'fedtide\[tensorboard\]'"):
        track(EventLog(), tmp_path)
