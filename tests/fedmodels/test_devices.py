"""What a process that trains on a GPU sets before CUDA starts, and what stays on a processor."""

from __future__ import annotations

import os
from contextlib import suppress

import pytest
import torch

from fedcli import cli
from fedmodels.errors import ConfigError
from fedmodels.host.devices import CUBLAS, device_of
from fedmodels.methods import make
from fedmodels.numerics import neighbour_clustering

VARIABLE = "CUBLAS_WORKSPACE_CONFIG"


def settings():
    """Return what decides whether a GPU gives the same bits each time."""
    backends = torch.backends
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warns only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "filled": torch.utils.deterministic.fill_uninitialized_memory,
        "benchmark": backends.cudnn.benchmark,
        "cudnn": backends.cudnn.deterministic,
        "tf32": (backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32),
        "cublas": os.environ.get(VARIABLE),
    }


REPEATS = {
    "deterministic": True, "warns only": False, "filled": False, "benchmark": False, "cudnn": True,
    "tf32": (False, False), "cublas": CUBLAS,
}  # fmt: skip


@pytest.fixture
def defaults(monkeypatch):
    """Torch's own settings, before and after a test."""
    monkeypatch.delenv(VARIABLE, raising=False)
    before = settings()
    yield before
    torch.use_deterministic_algorithms(before["deterministic"])
    torch.utils.deterministic.fill_uninitialized_memory = before["filled"]
    torch.backends.cudnn.benchmark = before["benchmark"]
    torch.backends.cudnn.deterministic = before["cudnn"]
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before["tf32"]


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU, as far as anybody asks."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)


@pytest.mark.parametrize("text", ["cpu", "auto"])
def test_a_processor_keeps_the_settings_of_torch(text, defaults, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert device_of(text) == torch.device("cpu")
    assert settings() == defaults


def test_what_torch_would_do_on_a_gpu_is_something_else(defaults):
    """TF32 in convolutions and the freedom to choose algorithms are on in torch."""
    assert {name for name in defaults if defaults[name] != REPEATS[name]} == {
        "deterministic", "filled", "cudnn", "tf32", "cublas"
    }  # fmt: skip


@pytest.mark.parametrize(
    "choose",
    [
        lambda: device_of("auto"),
        lambda: device_of("cuda:0"),
        lambda: cli._device("auto"),
        lambda: cli._device("cuda:0"),
        lambda: make("pfedgrp", w_device="auto").learned.device,
    ],
    ids=["auto", "named", "join", "join by name", "coordinator"],
)
def test_whoever_trains_on_a_gpu_asks_for_equal_bits(choose, gpu, defaults):
    assert choose().type == "cuda"
    assert settings() == REPEATS
    assert not torch.cuda.is_initialized()  # cuBLAS reads its variable when it starts


def test_a_clustering_on_a_gpu_asks_too(gpu, defaults, monkeypatch):
    monkeypatch.setattr(neighbour_clustering, "cluster_near", lambda *_, device, **__: device)
    points = [torch.zeros(2, 2)]
    found = neighbour_clustering.cluster_sets(points, points[0], "torch", neighbours=1, max_iter=1)
    assert found.type == "cuda"
    assert settings() == REPEATS


def test_a_device_that_is_not_there_sets_nothing(defaults):
    with suppress(ConfigError):
        cli._device("cuda:0")
    assert settings() == defaults
