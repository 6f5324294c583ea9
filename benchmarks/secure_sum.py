"""Uploads under masks beside plain ones: work of a client and of the coordinator, and bytes.

    python -m benchmarks.secure_sum [--clients 10] [--parameters 11178562] [--gone 0 1 3] [--keep]

One process does the work of every client and of the coordinator, one after the other, so that the
seconds of a client are those without others beside it; they are seconds of one core. "Plain" is
encoding an upload for the wire, and the weighted mean of all. "Masked" is the same with keys,
shares and masks, by the coordinator's word; "signed" is that with certificates and signatures, as
clients over mutual TLS have them. Some clients drop out after they shared their secrets.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from benchmarks.measure import parser_of, tell
from benchmarks.measured import given_as, keep
from fedcli.parts.secure_client import SecureClient
from fedcli.parts.secure_peers import SecurePeers
from fedmodels.config.privacy import SecureSum
from fedmodels.secure_sum.fixed_point import added
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.bundle_spec import scalar_spec
from fedmodels.tensors.weighted_mean import weighted_mean
from fedmodels.training.secure_upload import SecureUpload
from fedpb.codec import encode
from fedpb.peer_certificates import PeerCertificates
from fedpb.pem import authorities_of
from fedpb.secure_terms import payload_digest
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.identity.certificates import init_authority, issue
from fedsrv.parts.secure_group import SecureGroup

T = TypeVar("T")
TITLE = "Masked uploads beside plain ones"


def main() -> None:
    """Measure both ways; print the table."""
    parser = parser_of("secure_sum", __doc__, "secure-sum")
    parser.add_argument("--clients", type=int, nargs="+", default=[10])
    parser.add_argument("--parameters", type=int, default=11_178_562, help="ResNet-18's")
    parser.add_argument("--gone", type=int, nargs="+", default=[0, 1, 3])
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [_plain(n, options.parameters) for n in options.clients]
    for clients in options.clients:
        for way in ("masked", "signed"):
            rows += [_masked(way, clients, options.parameters, gone) for gone in options.gone]
    tell(TITLE, rows)
    if options.keep:
        keep(options.keep, given_as("secure_sum"), {TITLE: rows})


def _plain(clients: int, parameters: int) -> dict[str, Any]:
    uploads = [_upload(parameters, client) for client in range(clients)]
    size, client_s = _timed(lambda: _sent(uploads[0]))
    counts = [upload.scalars["num_examples"] for upload in uploads]
    _, server_s = _timed(lambda: weighted_mean(uploads, counts, sum(counts)))
    return _row("plain", clients, 0, client_s, server_s, size, 0)


def _masked(way: str, clients: int, parameters: int, gone: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        world = World(Path(place), clients, parameters, signs=way == "signed")
        world.share()
        stay = [*range(clients - gone)]
        up = world.train(stay)
        world.agree(stay)
        world.unmask(stay)
        facts = world.client_s / len(stay), world.server_s, up, world.messages // clients
        return _row(way, clients, gone, *facts)


def _row(
    way: str, clients: int, gone: int, client_s: float, server_s: float, up: int, more: int
) -> dict[str, Any]:
    facts = {"upload": way, "clients": clients, "gone": gone, "a_client_s": client_s}
    return {**facts, "coordinator_s": server_s, "upload_bytes": up, "key_bytes": more}


class World:
    """Clients and a coordinator in one process, and what each took."""

    def __init__(self, place: Path, clients: int, parameters: int, *, signs: bool) -> None:
        rules = SecureSum(trust="certificates" if signs else "coordinator", clip=0.0)
        forms = {"w": torch.empty(parameters, device="meta")}
        self.form = SecureUpload(
            rules, forms, (), {}, False, scalar_spec("num_examples"),
            lambda upload: upload.scalars["num_examples"],
        )  # fmt: skip
        self.numbers, self.parameters, self.signs = (
            self.form.numbers(clients, 1000), parameters, signs,
        )  # fmt: skip
        self.given = Bundle({"w": torch.zeros(parameters)})
        self.declared: list[Bundle] = []
        self.client_s = self.server_s = 0.0
        self.messages = 0
        init_authority(place)
        certificates = PeerCertificates(
            partial(authorities_of, place / "ca.pem", "--tls-client-ca"), "--tls-client-ca"
        )
        self.clients = []
        for client in range(clients):
            (place / str(client)).mkdir()
            peers = None
            if signs:
                pair = issue(place, str(client))
                peers = SecurePeers.of(place / "ca.pem", *pair, None, 0)
            secret = os.urandom(32)
            self.clients.append(
                SecureClient(client, place / str(client), secret, rules, peers=peers)
            )
        advertise = self._order(rpc.ORDER_KIND_ADVERTISE, rpc.SecureSum())
        keys = {one.client: self._answer(one, advertise) for one in self.clients}
        for client, said in keys.items() if signs else ():
            self._timed_server(partial(certificates.signer_of, "", client, said))
        payload = self._timed_server(partial(payload_digest, self.given))
        self.group = SecureGroup.begun(
            rpc.Order(), b"", rules.needed(clients), keys, self.numbers, payload
        )

    def _timed_server(self, work: Callable[[], T]) -> T:
        found, seconds = _timed(work)
        self.server_s += seconds
        return found

    def share(self) -> None:
        """Let everybody share secrets."""
        for client in self.clients:
            order = self._order(rpc.ORDER_KIND_SHARE, self.group.to_share())
            self.group.shared[client.client] = self._answer(client, order)

    def train(self, stay: list[int]) -> int:
        """Let some clients mask uploads, and add them up; return the bytes of one."""
        sent, size = list[Bundle](), 0
        for client in stay:
            order = self._order(rpc.ORDER_KIND_TRAIN, self.group.to_train(client))
            upload, one = _upload(self.parameters, client), self.clients[client]
            masked, seconds = _timed(partial(one.masked, order, upload, self.given, self.form))
            size, more = _timed(lambda m=masked: _sent(m))
            self.client_s += seconds + more
            self.messages += order.ByteSize()
            sent.append(masked)
        self.group.counted, self.declared = tuple(stay), [self.form.declared(one) for one in sent]
        vectors = [self.form.integers(each) for each in sent]
        self.group.total = self._timed_server(lambda: added(vectors))
        return size

    def agree(self, stay: list[int]) -> None:
        """Let those that stayed sign whose uploads came."""
        for client in stay if self.signs else ():
            order = self._order(rpc.ORDER_KIND_AGREE, self.group.to_agree())
            self.group.agreed[client] = self._answer(self.clients[client], order).signature

    def unmask(self, stay: list[int]) -> None:
        """Open the sum, and compare it with that of plain integers."""
        said = {}
        for client in stay:
            asked = self.group.to_unmask(client)
            order = self._order(rpc.ORDER_KIND_UNMASK, asked)
            said[client] = self._answer(self.clients[client], order)
        (total, _), opening = _timed(lambda: self.group.open(said))
        assert total is not None, "everybody is honest"
        found, reading = _timed(lambda: self.form.summed_up(total, self.numbers, {}, self.declared))
        assert found is not None, "everybody counts"
        self.server_s += opening + reading
        uploads = (_upload(self.parameters, client) for client in stay)
        plain = added([self.form.encoded(one, {}, self.numbers) for one in uploads])
        assert np.array_equal(total, plain), "masks change no bit"

    def _order(self, kind: rpc.OrderKind, asked: rpc.SecureSum) -> rpc.Order:
        return rpc.Order(kind=kind, committed=-1, secure_sum=asked)

    def _answer(self, client: SecureClient, order: rpc.Order) -> rpc.SecureAnswer:
        said, seconds = _timed(lambda: client.answer(order))
        self.client_s += seconds
        self.messages += order.ByteSize() + said.ByteSize()
        return said


def _upload(parameters: int, client: int) -> Bundle:
    weights = torch.randn(parameters, generator=torch.Generator().manual_seed(client))
    return Bundle({"w": weights}, scalars={"num_examples": 100.0 + client})


def _sent(upload: Bundle) -> int:
    """Return the bytes of an upload on the wire."""
    encoded = encode(upload)
    return sum(map(len, encoded.chunks()), len(encoded.header.SerializeToString()))


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    """Return what work comes to, and its seconds of a core."""
    begun = time.process_time()
    found = work()
    return found, time.process_time() - begun


if __name__ == "__main__":
    main()
