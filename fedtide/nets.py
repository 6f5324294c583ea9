"""The networks and layers of the papers."""

from __future__ import annotations

from fedmodels.nets import make_net, net_names
from fedmodels.nets.adapters import add_adapters
from fedmodels.nets.alp import ALP
from fedmodels.nets.kept_copies import kept_copy
from fedmodels.nets.split import SplitNet

__all__ = ["ALP", "SplitNet", "add_adapters", "kept_copy", "make_net", "net_names"]
