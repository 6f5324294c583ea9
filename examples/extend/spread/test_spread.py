"""Tests of the plugin, by what fedtide offers everyone: pytest examples/extend/spread."""

import os
import subprocess
import sys

import pytest

import fedtide


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    short = {"schedule.rounds": 2, "schedule.clients": 3, "training.local_epochs": 1}
    out = tmp_path_factory.mktemp("spread") / "run"
    return fedtide.run("quickstart", overrides=short, out=out, backend="inprocess")


def fedsrv(*arguments):
    command = [sys.executable, "-m", "fedsrv", *map(str, arguments)]
    wide = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, env=wide)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_each_record_and_the_summary_have_the_spread(run):
    rows = run.record.rows
    clients = [row["clients"].values() for row in rows]
    losses = [[each["loss"] for each in of_round if "loss" in each] for of_round in clients]
    spreads = [row["metrics"]["loss_spread"] for row in rows]
    assert spreads == [max(of_round) - min(of_round) for of_round in losses]
    assert run.summary["metrics"]["loss_spread_last"] == spreads[-1] > 0


def test_the_command_lists_the_largest_first(run):
    lines = fedsrv("spread", run.path, "--rounds", 2).splitlines()
    shown = [float(line.split(": ")[1]) for line in lines]
    assert shown == sorted(shown, reverse=True)
    assert len(shown) == 2


def test_the_report_has_the_panel_and_the_figure_is_explained(run, tmp_path):
    fedsrv("report", run.path, "--all", "--html", tmp_path / "report.html")
    assert "spread of losses" in (tmp_path / "report.html").read_text("utf-8")
    assert "largest minus smallest loss" in fedsrv("metrics", "loss_spread")
