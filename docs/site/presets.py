"""Writes docs/presets.md from the configs in ``examples/`` and the times measured for them.

python docs/site/presets.py > docs/presets.md
python docs/site/presets.py --measure NAME…     runs each here, and notes its seconds
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fedmodels.config.presets import FOLDERS, preset_files
from fedplugins.presets.presets import about, command_of

TIMES = Path(__file__).with_name("presets.json")
"""Seconds of the whole command by preset: on two cores without a GPU, beside other work."""
HEAD = """\
# Presets

Configs that come with fedtide, to run by name and to start your own from:

```
fedsrv launch quickstart --out run      # run one
fedsrv init quickstart                  # copy it to quickstart.toml
fedsrv init ditto                       # a small run of any method
```

From Python: `fedtide.run("quickstart", {"schedule.rounds": 5})`. Times are those of the
whole command on two cores without a GPU, shared with other work; presets without a time have not
been timed there. `examples/` also has [extensions](../examples/extend) (methods, nets, plugins,
clients around your own loop, Flower, JavaScript) and [notebooks](../examples/notebooks).
"""


def page() -> str:
    """Return the page: a table for each folder."""
    seconds = json.loads(TIMES.read_text())
    parts = [HEAD]
    for folder, content in FOLDERS.items():
        rows = [
            f"| [{name}](../examples/{folder}/{path.name}) "
            f"| {_said(seconds.get(name))} | {about(name)} |"
            for name, path in preset_files().items()
            if path.parent.name == folder
        ]
        heading = f"\n## {folder}: {content}\n\n| preset | time | what you see |\n|---|---|---|\n"
        parts.append(heading + "\n".join(rows) + "\n")
    return "".join(parts)


def _said(seconds: int | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def measure(names: list[str]) -> None:
    """Run each preset from its command to its report, and note the seconds."""
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            done = subprocess.run(["fedsrv", command_of(name), name, "--out", "run"], cwd=folder)
            took = round(time.monotonic() - began)
        if done.returncode == 0:
            seconds = json.loads(TIMES.read_text()) | {name: took}
            TIMES.write_text(json.dumps(seconds, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2:])
    else:
        print(page(), end="")
