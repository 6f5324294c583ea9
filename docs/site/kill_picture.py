"""Draws docs/img/kill.svg from a real run: killed, resumed, and compared with one left alone.

python docs/site/kill_picture.py
"""

from __future__ import annotations

import html
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

PICTURE = Path(__file__).parents[1] / "img" / "kill.svg"
LAUNCH = "fedsrv launch quickstart --out"
KILLED_AFTER = "interaction 12 of 20"
SHOWN = (1, 2, 11, 12, 13, 14, 19, 20)
"""Interactions whose lines are drawn; dots stand for the others."""
DIGEST = re.compile(r"state digest: \w{64}")
COLOURS = {"typed": "#e6edf3", "kill": "#ff7b72", "said": "#8b949e", "good": "#7ee787"}
WIDTH, LINE, TOP = 860, 20, 56
LONGEST_PAUSE_S = 1.2
READING_S = 5.0

Line = tuple[float, str, str]
"""Seconds of the picture at which it appears, its kind (a key of ``COLOURS``), its text."""


def lines(folder: Path) -> Iterator[tuple[str, str]]:
    """Do what the picture shows, and yield kind and text of each line when it comes."""
    yield from ran(f"{LAUNCH} whole", folder, brief=True)
    yield from ran(f"{LAUNCH} run", folder, kill=True)
    yield from ran(f"{LAUNCH} run --resume", folder)


def ran(
    line: str, folder: Path, brief: bool = False, kill: bool = False
) -> Iterator[tuple[str, str]]:
    """Run a command and yield what is drawn of it; ``kill`` kills every process of it."""
    yield "typed", f"$ {line}"
    command = subprocess.Popen(
        line.split(), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert command.stdout is not None
    for said in map(str.rstrip, command.stdout):
        shown = drawn(said, brief)
        if shown is not None:
            yield shown
        if kill and KILLED_AFTER in said and "committed" in said:
            started = psutil.Process(command.pid)
            processes = [started, *started.children(recursive=True)]
            numbers = " ".join(str(process.pid) for process in processes)
            for process in processes:
                process.kill()
            yield "kill", f"$ kill -9 {numbers}   # the coordinator and all clients"
            break
    command.wait()


def drawn(said: str, brief: bool) -> tuple[str, str] | None:
    """Return kind and text of a line that a run printed, or None if it is not drawn."""
    if DIGEST.fullmatch(said):
        return "good", said
    if said.startswith("the run has finished"):
        return "said", said
    committed = re.match(r"(interaction (\d+) of \d+: round \d+), .*?(loss [\d.]+)", said)
    if committed and not brief:
        return "said", f"{committed[1]}, {committed[3]}" if int(committed[2]) in SHOWN else "…"
    return ("good", said) if "goes on after" in said else None


def timed(folder: Path) -> list[Line]:
    """Return the lines with the times at which they appear; long pauses are cut."""
    found: list[Line] = []
    clock, last = 0.3, time.monotonic()
    for kind, text in lines(folder):
        now = time.monotonic()
        clock, last = clock + min(now - last, LONGEST_PAUSE_S), now
        if not (found and text == found[-1][2] == "…"):
            found.append((clock, kind, text))
    return found


def svg(found: list[Line]) -> str:
    """Return the animated picture; it rests on its last frame where nothing may move."""
    total = found[-1][0] + READING_S
    styles = [
        "text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre}"
    ]
    rows = []
    for i, (at, kind, text) in enumerate(found):
        share = 100 * at / total
        styles.append(
            f"@keyframes a{i}{{0%,{share:.2f}%{{opacity:0}}{share + 0.01:.2f}%,100%{{opacity:1}}}}"
            f".a{i}{{animation:a{i} {total:.1f}s infinite}}"
        )
        bold = ' font-weight="700"' if kind in ("typed", "kill") else ""
        rows.append(
            f'<text class="a{i}" x="18" y="{TOP + i * LINE}" fill="{COLOURS[kind]}"{bold}>'
            f"{html.escape(text)}</text>"
        )
    height = TOP + len(found) * LINE + 6
    styles.append("@media (prefers-reduced-motion:reduce){text{animation:none!important}}")
    buttons = zip((20, 40, 60), ("#ff5f57", "#febc2e", "#28c840"), strict=True)
    circles = "".join(f'<circle cx="{x}" cy="18" r="6" fill="{fill}"/>' for x, fill in buttons)
    said = "A federated run is killed and resumed; its digest equals that of an undisturbed run"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
        f' height="{height}" role="img" aria-label="{said}">\n<style>{"".join(styles)}</style>\n'
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#0d1117"/>{circles}\n'
        + "\n".join(rows)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    os.environ |= {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "100"}
    with tempfile.TemporaryDirectory() as place:
        told = timed(Path(place))
    digests = [text for _, _, text in told if DIGEST.fullmatch(text)]
    assert len(digests) == 2, told
    assert digests[0] == digests[1], told
    PICTURE.write_text(svg(told))
