"""What training costs on a GPU, beside what one would write by hand.

    python -m benchmarks.gpu [--keep]                    # on cuda:0, below ten minutes
    python -m benchmarks.gpu --device cpu --quick        # the same code, tiny, without a GPU

- **loops**: a client's epoch by the training loop, of a hand-written loop's time, for each net. By
  hand means torch's own settings; "repeatable" is that loop with deterministic algorithms.
- **stacks**: clients that train as one step, of their time in turn.
- **layouts**: clients of digits that are trained a second, by processes on the GPU.
- **generators**: pFedGRP's GANs of ten classes as one, of their time in turn.
- **transfers**: a net's weights to the GPU and back, beside plain copies of as many bytes.
- **sums**: the mean of ten uploads on the processor, as the coordinator takes it, beside a sum on
  the GPU that has to copy them there.

``--parts`` chooses among them. The tables go to docs/results/speed.md as they are printed last.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.aggregate import running_sum
from benchmarks.measure import config_in, in_turn, launching, parser_of, tell
from benchmarks.measured import given_as, keep, markdown
from benchmarks.training import (
    DIGITS,
    NETS,
    STACKS,
    experiment_tables,
    loop_row,
    stacked_row,
    wait_for,
    walls_of,
)
from fedmodels.devices import device_of
from fedmodels.nets import make_net
from fedmodels.nets.split import load_weights, weights_of
from fedmodels.techniques.generator_training import Lesson
from fedmodels.techniques.generators import Family
from fedmodels.tensors.weighted_mean import weighted_mean

Rows = list[dict[str, Any]]
LAYOUTS = (("auto", 1), (1, 1), (2, 1), (4, 1), (8, 1), (1, 25), (2, 25))
"""Processes, and how many clients of each train as one step."""
GANS = ((8, 20, 16, 30), (28, 64, 16, 30), (32, 64, 64, 10))
"""Pixels of a side, images of each class, batch, epochs."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for, and print a table of each part."""
    parser = parser_of("gpu", __doc__, "gpu")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does the code run?")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    options = parser.parse_args(arguments)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("this machine has no CUDA device; --device cpu --quick runs the same code")
    torch.set_num_threads(1)
    device_of(options.device)  # as processes of clients: the same bits each time, no TF32
    tables = {}
    for part in options.parts:
        title, rows_of = PARTS[part]
        tables[title] = rows_of(options.device, options.quick)
        tell(part, tables[title])
    print(f"On {name_of(options.device)}, torch {torch.__version__}, CUDA {torch.version.cuda}:\n")
    for title, rows in tables.items():
        print(f"**{title}**\n\n{markdown(rows)}\n")
    if options.keep:
        keep(options.keep, given_as("gpu"), tables, device=name_of(options.device))


def name_of(device: str) -> str:
    """Return the model of a GPU, or that there is none."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else "no GPU"


def _loops(device: str, quick: bool) -> Rows:
    nets = ["digits-cnn"] if quick else list(NETS)
    return [loop_row(net, device, *((2, 1) if quick else (20, 7))) for net in nets]


def _stacks(device: str, quick: bool) -> Rows:
    cases = [("digits-cnn", 2, 16, 8)] if quick else STACKS
    return [stacked_row(*case, device, 1 if quick else 7) for case in cases]


def _layouts(device: str, quick: bool) -> Rows:
    clients, rounds = (4, 4) if quick else (50, 20)
    layouts = [(1, 1), (2, 1), (1, 2)] if quick else LAYOUTS
    tables = experiment_tables({**DIGITS, "clients": clients}, rounds)
    rows = []
    with tempfile.TemporaryDirectory() as root:
        config = config_in(Path(root), tables)
        for number, (hosts, together) in enumerate(layouts):
            out, first = Path(root) / str(number), Path(root) / "0" / "data"
            dealt = ["--data", first] if number else []
            sets = ["--set", f"training.together={together}", "--device", device]
            command = launching(config, out, "--hosts", hosts, *sets, *dealt)
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            wall = statistics.median(walls_of(out))
            row = {"hosts": str(hosts), "clients": clients, "together": together}
            rows.append({**row, "round_s": wall, "per_s": clients / wall})
    return rows


def _generators(device: str, quick: bool) -> Rows:
    found = []
    for side, images, batch, epochs in [(8, 8, 4, 1)] if quick else GANS:
        shape, classes = (1 if side < 32 else 3, side, side), 2 if quick else 10
        family = Family(input_shape=shape, width=8, epochs=epochs, batch_size=batch, lr=1e-3)
        lessons = _lessons_of(family, classes, images, device)
        took = _beside(
            device,
            1 if quick else 3,
            in_turn=partial(_trained_in_turn, family, lessons),
            as_one=partial(family.trained, lessons),
        )
        row = {"side": side, "classes": classes, "images": images, "batch": batch}
        stacked = took["as_one"] / took["in_turn"]
        found.append({**row, "in_turn_ms": took["in_turn"], "stacked": stacked})
    return found


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


def _transfers(device: str, quick: bool) -> Rows:
    rows = []
    for name in ["digits-cnn"] if quick else ["digits-cnn", "resnet20", "resnet18"]:
        net = make_net(name, num_classes=10, input_shape=NETS[name][0]).to(device).pack()
        weights = weights_of(net)
        count = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
        block = torch.zeros(count, dtype=torch.uint8)
        block = block.pin_memory() if device.startswith("cuda") else block
        there = block.to(device)
        both = {
            "weights": (partial(load_weights, net, weights), partial(weights_of, net)),
            "a plain copy": (partial(there.copy_, block), partial(block.copy_, there)),
        }
        for what, (to, back) in both.items():
            took = _beside(device, 2 if quick else 20, to=to, back=back)
            facts = {"net": name, "what": what, "mb": count / 1e6}
            rows.append({**facts, "to_ms": took["to"], "from_ms": took["back"]})
    return rows


def _sums(device: str, quick: bool) -> Rows:
    rows = []
    for parameters in [10_000] if quick else [269_722, 11_178_562]:
        uploads = [torch.full((parameters,), float(client)) for client in range(10)]
        shares = [0.1] * len(uploads)
        took = _beside(
            device,
            2 if quick else 5,
            by_hand=partial(running_sum, uploads, shares, device),
            here=partial(weighted_mean, [{"w": upload} for upload in uploads], shares),
        )
        row = {"clients": len(uploads), "parameters": parameters, "plain_ms": took["by_hand"]}
        rows.append({**row, "here_ms": took["here"], "ratio": took["here"] / took["by_hand"]})
    return rows


def _beside(device: str, times: int, **work: Callable[[], object]) -> Mapping[str, float]:
    """Return the median milliseconds of each way."""
    there = torch.device(device)
    took = in_turn(work, times, 1, lambda: wait_for(there))
    return {way: 1e3 * seconds for way, seconds in took.items()}


PARTS: Mapping[str, tuple[str, Callable[[str, bool], Rows]]] = {
    "loops": ("A client's epoch, of a hand-written loop's time", _loops),
    "stacks": ("Clients that train as one step, of their time in turn", _stacks),
    "layouts": ("Clients of digits that are trained a second", _layouts),
    "generators": ("GANs of several classes as one, of their time in turn", _generators),
    "transfers": ("A net's weights to the GPU and back", _transfers),
    "sums": ("The mean of ten uploads on the processor, of a sum's time on the GPU", _sums),
}


if __name__ == "__main__":
    main()
