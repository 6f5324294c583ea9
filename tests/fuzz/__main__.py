"""``python -m tests.fuzz TARGET``: fuzz one target, guided by the code it reaches.

Needs the extra ``fuzz``. The corpus starts from ``seeds.py``; the input of a finding goes into
``--findings``. Ends with status 0 when all inputs ran and nothing was found.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import os
import sys
import tempfile
from pathlib import Path

import atheris

# installed plugins are looked up for every config; they do not change meanwhile
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
with atheris.instrument_imports(include=["fedmodels", "fedpb", "fedcli", "fedsrv"]):
    from tests.fuzz.seeds import SEEDS
    from tests.fuzz.targets import TARGETS

MAX_BYTES = 4096
"""Size of an input: enough for each seed, with room to grow."""


def main() -> None:
    """Fuzz one target for so many inputs."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--findings", type=Path, default=Path("build/fuzz"))
    asked = parser.parse_args()
    asked.findings.mkdir(parents=True, exist_ok=True)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as place:
        child = os.fork()  # the fuzzer ends its process without cleaning up
        if not child:
            tempfile.tempdir = place
            fuzz(asked, Path(place) / "corpus")
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    sys.exit(abs(status))


def fuzz(asked: argparse.Namespace, corpus: Path) -> None:
    """Fuzz until all inputs ran or something is found; end the process."""
    corpus.mkdir()
    for number, seed in enumerate(SEEDS[asked.target]()):
        (corpus / f"seed-{number}").write_bytes(seed)
    atheris.Setup(
        [
            sys.argv[0], f"-runs={asked.runs}", f"-seed={asked.seed}", f"-max_len={MAX_BYTES}",
            "-timeout=20", "-rss_limit_mb=3072", "-print_final_stats=1",
            f"-artifact_prefix={asked.findings}/", str(corpus),
        ],
        TARGETS[asked.target],
    )  # fmt: skip
    atheris.Fuzz()


if __name__ == "__main__":
    main()
