"""The networks and layers of the papers."""

from __future__ import annotations

from fedmodels.nets import make_net, net_names
from fedmodels.nets.adapters import add_adapters
from fedmodels.nets.alp import ALP
from fedmodels.nets.split import SplitNet

__all__ = ["ALP", "SplitNet", "add_adapters", "make_net", "net_names"]
