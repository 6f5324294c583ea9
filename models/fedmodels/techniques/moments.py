"""Adam's moments as named tensors, for optimisers whose state outlives one training.

    moments/<role>/<n>/exp_avg      and exp_avg_sq, step: of the n-th parameter of an optimiser

A private state keeps them; they never travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedmodels.numerics.algebra import padded
from fedmodels.tensors.bundle import Weights


def moments_of(adams: Mapping[str, torch.optim.Adam]) -> Weights:
    """Return the moments of optimisers as named tensors."""
    return {
        f"moments/{role}/{number}/{name}": torch.as_tensor(value).detach().to("cpu", copy=True)
        for role, adam in adams.items()
        for number, state in adam.state_dict()["state"].items()
        for name, value in state.items()
    }


def load_moments(adams: Mapping[str, torch.optim.Adam], tensors: Mapping[str, Tensor]) -> None:
    """Put kept moments back into fresh optimisers, in their parameters' order in memory.

    A fused step goes through parameters, gradients and moments in that order.
    """
    for role, adam in adams.items():
        prefix, states = f"moments/{role}/", dict[int, dict[str, Tensor]]()
        held = [p for group in adam.param_groups for p in group["params"]]
        for key, tensor in tensors.items():
            if key.startswith(prefix):
                number, name = key.removeprefix(prefix).split("/")
                like = held[int(number)].detach() if tensor.dim() else tensor
                moment = torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
                states.setdefault(int(number), {})[name] = moment
        if states:
            groups = adam.state_dict()["param_groups"]
            adam.load_state_dict({"state": states, "param_groups": groups})


def grown_moments(
    tensors: Mapping[str, Tensor], parameters: Mapping[str, Sequence[Tensor]]
) -> Weights:
    """Return kept moments with zeros for what the parameters of their optimisers came to have."""
    found = {}
    for key, tensor in tensors.items():
        if key.startswith("moments/") and tensor.dim():
            _, role, number, _ = key.split("/")
            found[key] = padded(tensor, parameters[role][int(number)].shape)
    return found
