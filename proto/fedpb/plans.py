"""Plans of headers that were checked: to check a large net takes longer than to receive it.

What is remembered is keyed on what a header means: not on bytes that the schema does not know, nor
on the values of scalars, which differ from client to client. It is bounded by bytes.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from threading import Lock

from fedmodels.tensors.bundle_spec import BundleSpec
from fedpb.headers import Plan
from fedpb.v1 import bundle_pb2 as pb

MAX_BYTES = 16 << 20
_PLACE_BYTES = 600
"""Bytes that a plan takes for each tensor besides its name, about."""


class Plans:
    """Remembers the plans of the last headers; safe between threads."""

    def __init__(self, most_bytes: int = MAX_BYTES) -> None:
        self.most_bytes, self.num_bytes = most_bytes, 0
        self._held: OrderedDict[bytes, tuple[Plan, int]] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._held)

    def of(self, header: pb.BundleHeader, spec: BundleSpec) -> Plan:
        """Return the plan of a header; raises as :func:`fedpb.headers.checked_places` does."""
        meaning = pb.BundleHeader()
        meaning.CopyFrom(header)
        meaning.DiscardUnknownFields()
        for name in meaning.scalars:
            meaning.scalars[name] = 0.0
        wire = meaning.SerializeToString(deterministic=True)
        key = hashlib.sha256(wire).digest()
        with self._lock:
            found = self._held.get(key)
        if found is not None and found[0].spec is spec:
            return found[0]
        plan = Plan.of(header, spec)  # what is refused is not remembered
        self._keep(key, plan, 2 * len(wire) + _PLACE_BYTES * (1 + len(plan.places)))
        return plan

    def _keep(self, key: bytes, plan: Plan, size: int) -> None:
        with self._lock:
            if (before := self._held.pop(key, None)) is not None:
                self.num_bytes -= before[1]
            self._held[key] = plan, size
            self.num_bytes += size
            while self.num_bytes > self.most_bytes:
                _, (_, freed) = self._held.popitem(last=False)
                self.num_bytes -= freed


_PLANS = Plans()
plan_of = _PLANS.of
