"""A program that says what it sees, waits for a line, and ends with the status in it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

MARK = "colorsys"
"""A module that nothing else imports."""


def main() -> None:
    """Say, wait and end."""
    seen = {
        "argv": sys.argv[1:], "cwd": os.getcwd(), "path": sys.path[0], "has": MARK in sys.modules,
        "env": {k: v for k, v in os.environ.items() if k in ("ODD", "FEDSRV_SERVE_PORT")},
        "files": len(os.listdir("/proc/self/fd")) - 1, "leads": os.getsid(0) == os.getpid(),
        "comm": Path("/proc/self/comm").read_text().strip(),
    }  # fmt: skip
    print(json.dumps(seen), flush=True)
    sys.exit(int(sys.stdin.readline()))


if __name__ == "__main__":
    main()
