"""The device that a process trains on: chosen in one place, set so that runs can be repeated."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from torch import Tensor

CUBLAS = ":4096:8"
"""Workspaces of cuBLAS with which its results do not depend on what else runs on the card."""


def device_of(text: str) -> torch.device:
    """Return the device of ``auto``, ``cpu`` or ``cuda:K``; ``auto`` is a GPU where there is one.

    Where it is a GPU, the process is set to give the same bits each time, before CUDA starts.
    """
    if text == "auto":
        text = "cuda:0" if torch.cuda.is_available() else "cpu"
    device = torch.device(text)
    if device.type == "cuda":
        repeat_bits()
    return device


def repeat_bits() -> None:
    """Let every operator of this process give the same bits for the same input, or fail.

    Matrix products and convolutions of float32 stay float32: TF32 has 10 bits of a mantissa.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = CUBLAS
    torch.use_deterministic_algorithms(True)
    memory: Any = torch.utils.deterministic
    memory.fill_uninitialized_memory = False  # nothing here reads such memory
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def is_gpu(device: torch.device) -> bool:
    """Tell whether a device takes work while the processor goes on."""
    return device.type != "cpu"


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a small tensor of the processor on a device, without waiting for the device.

    A GPU takes it from pinned memory when it comes to it: the copy is queued like any other work.
    """
    if not tensor.is_cpu or torch.device(device).type == "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def free_on(device: torch.device) -> float:
    """Return the bytes of a GPU that nobody has; infinity for a processor."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else math.inf


def give_back(device: torch.device) -> None:
    """Give memory of a GPU that no tensor holds back to the other processes that use it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
