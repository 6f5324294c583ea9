"""What fuzzing starts from: one well-formed input or more for each target, made here."""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from fedmodels.facts.resolution import experiment_of
from fedmodels.tensors.archive import save, save_named
from fedmodels.tensors.bundle import Bundle
from fedpb import PROTOCOL
from fedpb.codec import encode
from fedpb.tables import description_of, table_of
from fedpb.v1 import coordinator_pb2 as rpc
from tests.conftest import TABLES
from tests.fuzz.targets import CLASSES, SPLIT, rich_bundle

PROFILE = json.dumps(
    {"format": 1, "input_shape": [1, 2, 2], "num_classes": CLASSES, "scale": 16.0,
     "mean": [0.5], "std": [0.25], "class_names": ["a", "b", "c"],
     "tasks": [{"train": [1, 1, 0], "test": [1, 0, 0]}]}
)  # fmt: skip


def push_header(bundle: Bundle) -> rpc.PushHeader:
    """Return an honest header of a result, with something in every field of its report."""
    scores = rpc.Counts(
        view="global", rule="classifier", test_set="task/0",
        support=[1, 0, 0], predicted=[1, 0, 0], correct=[1, 0, 0], loss_sum=0.5,
    )  # fmt: skip
    report = rpc.Report(
        loss=0.5, seconds=0.1, num_examples=2, counts=[scores], state_sha256="0" * 64,
        extra={"gap": 0.5}, durable=-1, peak_rss_bytes=1 << 20,
        confusions=[rpc.Confusion(view="global", counts=[1, *[0] * 8])],
    )  # fmt: skip
    return rpc.PushHeader(
        client_id="2", token=b"0123456789abcdef", kind=rpc.ORDER_KIND_TRAIN, interaction=0,
        report=report, bundle=encode(bundle).header,
    )  # fmt: skip


def codec() -> list[bytes]:
    found = []
    for bundle in (rich_bundle(), Bundle(), Bundle(weights=rich_bundle().weights)):
        encoded = encode(bundle)
        frames = list(encoded.chunks())
        pull = rpc.PullHeader(order=rpc.Order(kind=rpc.ORDER_KIND_TRAIN, client_id="2"))
        pull.parts.add(role="common", digest=encoded.digest, bundle=encoded.header)
        for chunk in (rpc.PushRequest(header=push_header(bundle)), rpc.PullResponse(header=pull)):
            head = chunk.SerializeToString()
            found += [SPLIT.join([head, *frames]), head + b"".join(frames)]
    return found


def headers() -> list[bytes]:
    join = rpc.JoinRequest(
        client_id="2",
        description=description_of(PROFILE),
        token=b"0" * 16,
        versions=[0, 1],
        protocol=PROTOCOL,
    )
    return [push_header(rich_bundle()).SerializeToString(), join.SerializeToString()]


def archive() -> list[bytes]:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "a"
        save(path, rich_bundle(), {"interaction": "3", "parts": {"clients/0": "part-a"}})
        found = [path.read_bytes()]
        save_named(path, {"common": rich_bundle(), "own": Bundle(scalars={"s": 1.0})}, {})
        return [*found, path.read_bytes()]


def _array(values: object, dtype: str) -> bytes:
    out = io.BytesIO()
    np.save(out, np.array(values, dtype=dtype))
    return out.getvalue()


def directories() -> list[bytes]:
    x, y = np.arange(8).reshape(2, 1, 2, 2), [0, 1]
    arrays = [
        _array(x, "uint8"), _array(y, "int64"), _array(x[:1], "float32"), _array(y[:1], "int64"),
    ]  # fmt: skip
    image = io.BytesIO()
    Image.new("L", (2, 2), 7).save(image, "PNG")
    own = json.loads(PROFILE)
    del own["tasks"]
    plain, counted = PROFILE.encode(), json.dumps(own).encode()
    images = [image.getvalue()] * 2
    return [
        SPLIT.join([plain, *arrays]), SPLIT.join([counted, *arrays]),
        SPLIT.join([counted, *arrays, *images]),
    ]  # fmt: skip


def config() -> list[bytes]:
    import tomli_w

    full = tomli_w.dumps(experiment_of(TABLES).to_dict())
    short = tomli_w.dumps(TABLES)
    return [full.encode(), short.encode(), f"{short}\0method.lr=0.3".encode()]


def experiment() -> list[bytes]:
    """Return experiments as an honest server sends them, and as one does that names places."""
    honest = experiment_of(TABLES).to_dict()
    lying = {
        **honest,
        "method": {"name": "/etc/method.py:Method", "code_sha256": "0" * 64},
        "net": {"name": "mlp", "weights": "/dev/zero", "weights_sha256": "0" * 64},
        "evaluate": {"reference": "/dev/zero"},
    }
    return [
        rpc.JoinResponse(experiment=table_of(tables)).SerializeToString()
        for tables in (honest, lying)
    ]


def request() -> list[bytes]:
    """Return requests of a browser, of a scraper, and of somebody else's page."""
    lines = (
        "GET / HTTP/1.1\r\nHost: localhost:8080\r\nAccept: text/html\r\n\r\n",
        "HEAD /metrics HTTP/1.0\r\nHost: [::1]\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 3\r\n\r\nabc",
        "POST /state.json HTTP/1.1\r\nHost: 127.0.0.1\r\nExpect: 100-continue\r\n\r\n",
    )
    return [line.encode() for line in lines]


SEEDS = {
    "codec": codec, "headers": headers, "archive": archive, "directories": directories,
    "config": config, "experiment": experiment, "request": request,
}  # fmt: skip
