"""A workbook is read in a process of its own that may not use more than so much, before it is here.

    python -m fedplugins.serving.workbook_trial FILE SECONDS

What a workbook costs does not follow from its size: of 162 kB, a million shared strings or styles
take a minute. Nothing heavy is imported, as each trial begins with it.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from contextlib import closing
from pathlib import Path

MEMORY = 2 << 30
"""Bytes of address space that reading may take."""


def is_cheap(file: Path, cpu_s: int, patience_s: float) -> bool:
    """Tell whether a workbook can be read within the bounds; a damaged one can, as far as it goes.

    The process is killed once it has used ``cpu_s`` seconds of the processor, or after
    ``patience_s`` seconds in any case.
    """
    command = [sys.executable, "-m", "fedplugins.serving.workbook_trial", str(file), str(cpu_s)]
    try:
        ended = subprocess.run(
            command, timeout=patience_s, check=False, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False
    return ended.returncode == 0


def main(file: str, cpu_s: int) -> int:
    """Read all that :mod:`fedcli.data.own.workbooks` may; return the process's status."""
    try:
        resource = importlib.import_module("resource")
    except ImportError:  # Windows: the patience alone holds
        pass
    else:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    openpyxl = importlib.import_module("openpyxl")
    importlib.import_module("defusedxml")
    try:
        for data_only in (True, False):  # with what formulas come to, and with the formulas
            with open(file, "rb") as opened, closing(
                openpyxl.load_workbook(opened, read_only=True, data_only=data_only,
                                       keep_links=False)
            ) as book:  # fmt: skip
                for sheet in book.worksheets:
                    sheet.reset_dimensions()
                    for _ in sheet.iter_rows(values_only=True):
                        pass
    except MemoryError:
        return 1
    except Exception:  # it is damaged, which its reader says in a line
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
