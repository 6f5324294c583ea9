"""``python -m benchmarks``: every benchmark at its small size, one after the other."""

from __future__ import annotations

import subprocess
import sys

SMALL = (
    ["benchmarks.overhead", "--clients", "2", "10", "50", "100", "--rounds", "10"],
    ["benchmarks.overhead", "--clients", "2", "10", "--nets", "resnet18", "--rounds", "6"],
    ["benchmarks.overhead", "--clients", "50", "--hosts", "2", "--rounds", "10"],
    ["benchmarks.memory", "--hidden", "2048", "4096", "1024"],
    ["benchmarks.sides", "--clients", "50", "--turns", "1"],
    ["benchmarks.transport", "--clients", "1", "10", "--tls", "--repeats", "5"],
    ["benchmarks.training", "--steps"],
    ["benchmarks.training", "--jobs", "digits-10", "digits-50"],
    ["benchmarks.training", "--alignment"],
    ["benchmarks.training", "--inprocess"],
    ["benchmarks.costs"],
    ["benchmarks.gpu", "--device", "cpu", "--quick"],
    ["benchmarks.commands", "--repeats", "3"],
    ["benchmarks.aggregate", "--clients", "2", "10", "--prototypes", "128", "512"],
    ["benchmarks.reductions", "--clients", "12", "--parameters", "1000000"],
    ["benchmarks.scale", "--clients", "5", "10", "20", "--widths", "64", "512"],
    ["benchmarks.load", "--clients", "100", "--light", "20", "--hosts", "4", "--rounds", "5"],
    ["benchmarks.serving"],
    ["benchmarks.year", "--form", "tiny", "--methods", "fedavg"],
    ["benchmarks.drift", "--people", "3", "--times", "5"],
    ["benchmarks.aggregation_weights", "--clients", "10", "--examples", "128", "--epochs", "2"],
)


def main() -> int:
    """Run them; return the worst exit status."""
    return max(subprocess.run([sys.executable, "-m", *command]).returncode for command in SMALL)


if __name__ == "__main__":
    sys.exit(main())
