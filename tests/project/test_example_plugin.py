"""The plugin of ``examples/extend/spread`` works where it is installed, as its own tests say."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

PLUGIN = Path(__file__).parents[2] / "examples" / "extend" / "spread"


def installed(place: Path) -> None:
    """Write the metadata that pip writes, with the entry points of ``pyproject.toml``."""
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text("utf-8"))["project"]
    made = place / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    made.mkdir()
    said = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (made / "METADATA").write_text(said)
    groups = project["entry-points"].items()
    lines = (f"[{g}]\n" + "".join(f"{k} = {v}\n" for k, v in of.items()) for g, of in groups)
    (made / "entry_points.txt").write_text("\n".join(lines))


def test_the_example_of_a_plugin_passes_its_own_tests(tmp_path):
    installed(tmp_path)
    before = os.environ.get("PYTHONPATH", "")
    there = os.pathsep.join(filter(None, (str(tmp_path), str(PLUGIN), before)))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0",
         f"--rootdir={PLUGIN}", "-c", os.devnull, "test_spread.py"],
        cwd=PLUGIN, env={**os.environ, "PYTHONPATH": there}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
