"""What training costs on a GPU, beside what one would write by hand.

    python -m benchmarks.gpu [--keep]                    # on cuda:0, five minutes at most
    python -m benchmarks.gpu --device cpu --quick        # the same code, tiny, without a GPU

- **loops**: a client's epoch by the training loop, of a hand-written loop's time, for each net. By
  hand means torch's own settings; "repeatable" is that loop with deterministic algorithms; eager
  and captured are the training loop with ``capture = "off"`` and ``"auto"``.
- **steps**: a client's epoch of each of several methods, captured, of its time eager.
- **layouts**: clients of digits that are trained a second, by processes on the GPU.
- **generators**: pFedGRP's GANs of ten classes as one, of their time in turn.
- **transfers**: a net's weights to the GPU and back, beside plain copies of as many bytes.
- **sums**: the mean of ten uploads in blocks on the processor, as the coordinator takes it, beside
  a sum on the GPU that has to copy them there.

``--parts`` chooses among them. What has not begun after ``--seconds`` is left out, and named; a
launch that lasts longer is stopped. The tables go to docs/results/speed.md as they are printed
last.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.aggregate import running_sum
from benchmarks.measure import config_in, in_turn, launching, parser_of, tell
from benchmarks.measured import given_as, keep, markdown
from benchmarks.training import (
    DIGITS,
    NETS,
    experiment_tables,
    loop_row,
    method_row,
    wait_for,
    walls_of,
)
from fedmodels.host.devices import device_of
from fedmodels.nets import make_net
from fedmodels.nets.split import load_weights, weights_of
from fedmodels.techniques.generator_training import Lesson
from fedmodels.techniques.generators import Family
from fedmodels.tensors.packed_weights import PackedWeights, packed
from fedmodels.tensors.weighted_mean import weighted_mean

Row = dict[str, Any]
LAYOUTS = ("auto", 1, 4)
"""Processes."""
LAUNCH_S = 60.0
"""After which a launch is stopped."""
GANS = ((8, 20, 16, 10), (28, 64, 16, 10), (32, 64, 64, 10))
"""Pixels of a side, images of each class, batch, epochs."""
PLAIN, ARRIVED = "a plain copy", "weights as they arrive"
METHODS = ("fedavg", "fedprox", "ditto", "scaffold", "moon", "gldp", "fedmlp")
"""Whose steps are measured eager and captured."""


class Case(NamedTuple):
    """A row of a table that can be left out."""

    name: str
    row: Callable[[float], Row]
    """Measures it, given the seconds that are left."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for, and print a table of each part."""
    parser = parser_of("gpu", __doc__, "gpu")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does the code run?")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--seconds", type=float, default=270, help="of all parts, by default 270")
    options = parser.parse_args(arguments)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("this machine has no CUDA device; --device cpu --quick runs the same code")
    torch.set_num_threads(1)
    device_of(options.device)  # as processes of clients: the same bits each time, no TF32
    tables, ends = {}, time.monotonic() + options.seconds
    for part in options.parts:
        title, cases_of = PARTS[part]
        cases = cases_of(options.device, options.quick)
        rows = [row for case in cases if (row := _measured(part, case, ends)) is not None]
        tell(part, rows)
        tables |= {title: rows} if rows else {}
    print(f"On {name_of(options.device)}, torch {torch.__version__}, CUDA {torch.version.cuda}:\n")
    for title, rows in tables.items():
        print(f"**{title}**\n\n{markdown(rows)}\n")
    if options.keep:
        keep(options.keep, given_as("gpu"), tables, device=name_of(options.device))


def _measured(part: str, case: Case, ends: float) -> Row | None:
    """Return the row of a case; None if it failed or there was no time for it, which is told."""
    left = ends - time.monotonic()
    if left <= 0:
        print(f"{part} {case.name}: left out, there is no time left", flush=True)
        return None
    try:
        return case.row(left)
    except Exception as error:  # of one case: the other ones still say something
        print(f"{part} {case.name}: {type(error).__name__}: {error}", flush=True)
        return None


def name_of(device: str) -> str:
    """Return the model of a GPU, or that there is none."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else "no GPU"


def _loops(device: str, quick: bool) -> list[Case]:
    nets, sizes = (["digits-cnn"], (2, 1)) if quick else (list(NETS), (10, 5))
    return [Case(net, lambda _, net=net: loop_row(net, device, *sizes)) for net in nets]


def _steps(device: str, quick: bool) -> list[Case]:
    methods, sizes = (["fedavg"], (2, 1)) if quick else (METHODS, (10, 5))
    return [
        Case(method, lambda _, method=method: method_row(method, "cnn5", device, *sizes))
        for method in methods
    ]


def _layouts(device: str, quick: bool) -> Iterator[Case]:
    clients, rounds = (4, 4) if quick else (50, 8)
    layouts = [1, 2] if quick else LAYOUTS
    tables = experiment_tables({**DIGITS, "clients": clients}, rounds)
    with tempfile.TemporaryDirectory() as root:
        config = config_in(Path(root), tables)

        def row(hosts: object, left: float) -> Row:
            out, first = Path(root) / f"{hosts}-hosts", Path(root) / "data"
            dealt = ["--data", first] if first.exists() else []
            command = launching(config, out, "--hosts", hosts, "--device", device, *dealt)
            quiet = subprocess.DEVNULL
            subprocess.run(command, check=True, stdout=quiet, timeout=min(left, LAUNCH_S))
            if not dealt:
                (out / "data").rename(first)
            wall = statistics.median(walls_of(out))
            facts = {"hosts": str(hosts), "clients": clients}
            return {**facts, "round_s": wall, "per_s": clients / wall}

        for hosts in layouts:
            yield Case(f"{hosts} hosts", partial(row, hosts))


def _generators(device: str, quick: bool) -> list[Case]:
    def row(side: int, images: int, batch: int, epochs: int, left: float) -> Row:
        shape, classes = (1 if side < 32 else 3, side, side), 2 if quick else 10
        family = Family(input_shape=shape, width=8, epochs=epochs, batch_size=batch, lr=1e-3)
        lessons = _lessons_of(family, classes, images, device)
        took = _beside(
            device,
            1 if quick else 3,
            in_turn=partial(_trained_in_turn, family, lessons),
            as_one=partial(family.trained, lessons),
        )
        facts = {"side": side, "classes": classes, "images": images, "batch": batch}
        stacked = took["as_one"] / took["in_turn"]
        return {**facts, "in_turn_ms": took["in_turn"], "stacked": stacked}

    return [Case(str(gan[0]), partial(row, *gan)) for gan in ([(8, 8, 4, 1)] if quick else GANS)]


def _trained_in_turn(family: Family, lessons: Sequence[Lesson]) -> None:
    for lesson in lessons:
        family.trained([lesson])


def _lessons_of(family: Family, classes: int, images: int, device: str) -> list[Lesson]:
    """Return what an untrained generator of each class learns from: noise."""
    draw, channels = torch.Generator().manual_seed(0), family.input_shape[0]
    limits = torch.zeros(channels), torch.ones(channels)
    return [
        Lesson(
            family.fresh(label, limits),
            (2 * torch.rand(images, *family.input_shape, generator=draw) - 1).to(device),
            label,
        )
        for label in range(classes)
    ]


def _transfers(device: str, quick: bool) -> list[Case]:
    def row(name: str, what: str, left: float) -> Row:
        net = make_net(name, num_classes=10, input_shape=NETS[name][0]).to(device).pack()
        told = weights_of(net)
        assert isinstance(told, PackedWeights)
        block = told.block.clone()
        block = block.pin_memory() if device.startswith("cuda") else block
        there = block.to(device)
        if what == PLAIN:
            to, back = partial(there.copy_, block), partial(block.copy_, there)
        else:
            other = PackedWeights(told.names, told.layout, block.clone())
            came = told if what == ARRIVED else other
            to, back = partial(load_weights, net, came), partial(weights_of, net)
        took = _beside(device, 2 if quick else 20, to=to, back=back)
        facts = {"net": name, "what": what, "mb": block.nbytes / 1e6}
        return {**facts, "to_ms": took["to"], "from_ms": took["back"]}

    nets = ["digits-cnn"] if quick else ["digits-cnn", "resnet20", "resnet18"]
    kinds = (PLAIN, ARRIVED, "weights from other memory")
    return [Case(f"{net}, {what}", partial(row, net, what)) for net in nets for what in kinds]


def _sums(device: str, quick: bool) -> list[Case]:
    def row(parameters: int, left: float) -> Row:
        uploads = [torch.full((parameters,), float(client)) for client in range(10)]
        shares = [0.1] * len(uploads)
        took = _beside(
            device,
            2 if quick else 5,
            by_hand=partial(running_sum, uploads, shares, device),
            here=partial(weighted_mean, [packed({"w": upload}) for upload in uploads], shares),
        )
        facts = {"clients": len(uploads), "parameters": parameters, "plain_ms": took["by_hand"]}
        return {**facts, "here_ms": took["here"], "ratio": took["here"] / took["by_hand"]}

    sizes = [10_000] if quick else [269_722, 11_178_562]
    return [Case(str(size), partial(row, size)) for size in sizes]


def _beside(device: str, times: int, **work: Callable[[], object]) -> Mapping[str, float]:
    """Return the median milliseconds of each way."""
    there = torch.device(device)
    took = in_turn(work, times, 1, lambda: wait_for(there))
    return {way: 1e3 * seconds for way, seconds in took.items()}


PARTS: Mapping[str, tuple[str, Callable[[str, bool], Iterable[Case]]]] = {
    "transfers": ("A net's weights to the GPU and back", _transfers),
    "sums": ("The mean of ten uploads on the processor, of a sum's time on the GPU", _sums),
    "loops": ("A client's epoch, of a hand-written loop's time", _loops),
    "steps": ("A client's epoch by method, captured, of its time eager", _steps),
    "layouts": ("Clients of digits that are trained a second", _layouts),
    "generators": ("GANs of several classes as one, of their time in turn", _generators),
}


if __name__ == "__main__":
    main()
