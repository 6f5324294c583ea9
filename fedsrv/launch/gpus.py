"""The GPUs of this machine, as a process that ends again sees them.

The launcher opens no GPU and asks CUDA for nothing: its forks could not use a GPU then. So a fork
looks, before there are threads. It numbers GPUs as hosts will (``CUDA_VISIBLE_DEVICES``, parts of
a GPU, GPUs of AMD), which ``nvidia-smi`` does not, and what it takes of a GPU is free again when
it has ended.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedmodels.config.places import check_gpu, gpu_of
from fedmodels.errors import ConfigError
from fedmodels.times import LOOKING_S
from fedsrv.launch.forked import Forked


@dataclass(frozen=True)
class Gpu:
    """A GPU as it is before the hosts start."""

    number: int
    """K of ``cuda:K``."""
    model: str
    free: int
    """Bytes that nobody has; 0 where the GPU cannot be used."""
    why: str = ""
    """Why the GPU cannot be used."""

    @property
    def device(self) -> str:
        """The GPU as ``--device`` names it."""
        return f"cuda:{self.number}"


class Look:
    """A look at the GPUs, under way in a fork."""

    def __init__(self, device: str, log: Path) -> None:
        """Begin: at one GPU where the device names it, at all for ``auto``, at none for a CPU."""
        self._device = device
        self._fork = None if device == "cpu" else Forked("fedsrv-gpus", self._tell, log)
        self._found: list[Gpu] = []

    def _tell(self) -> None:
        try:
            count, only = torch.cuda.device_count(), gpu_of(self._device)
            numbers = range(count) if only is None else [only] if only < count else []
            told = {"count": count, "gpus": [vars(gpu_at(number)) for number in numbers]}
        except RuntimeError as error:
            told = {"why": _first_line(error)}
        print(json.dumps(told))

    def gpus(self) -> list[Gpu]:
        """Return what was seen: the GPUs that hosts are spread over, all of one model.

        Another model rounds otherwise, and who trains where must change no bit.

        Raises:
            ConfigError: the GPU is not there, or none of the GPUs can be used; says why.
        """
        if self._fork is not None:
            told = self._told()
            if why := told.get("why"):
                raise ConfigError(
                    f"--device {self._device}: CUDA does not say which GPUs there are ({why}); "
                    "--device cpu uses none"
                )
            check_gpu(self._device, told["count"])
            self._found = of_one_model(self._device, [Gpu(**facts) for facts in told["gpus"]])
        return self._found

    def _told(self) -> dict[str, Any]:
        """Wait for what the fork says, or return why it says nothing."""
        fork, self._fork = self._fork, None
        assert fork is not None
        assert fork.stdout is not None
        try:
            status = fork.wait(LOOKING_S)
            found = {"why": f"it ended with {status}"} if status else json.load(fork.stdout)
        except subprocess.TimeoutExpired:
            fork.kill()
            found = {"why": f"no answer within {LOOKING_S:.0f} s"}
        fork.close()
        return dict(found)

    def end(self) -> None:
        """End it if nobody asked what it saw."""
        if self._fork is not None:
            self._fork.kill()
            self._fork.close()


def gpu_at(number: int) -> Gpu:
    """Look at a GPU; this process has a part of its memory from then on."""
    model = torch.cuda.get_device_name(number)
    try:
        free, _ = torch.cuda.mem_get_info(number)
    except RuntimeError as error:  # another process has it for itself, or all of its memory
        return Gpu(number, model, 0, _first_line(error))
    return Gpu(number, model, free, "" if free else "no memory is free")


def of_one_model(device: str, gpus: Sequence[Gpu]) -> list[Gpu]:
    """Return the usable GPUs of the first one's model; ConfigError if none of them can be used."""
    usable = [gpu for gpu in gpus if gpu.free]
    if gpus and not usable:
        raise ConfigError(
            f"--device {device}: {gpus[0].device} cannot be used ({gpus[0].why}); "
            "--device cpu uses no GPU"
        )
    return [gpu for gpu in usable if gpu.model == usable[0].model]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
