"""The files of deploy/: what containers may read, and that a coordinator starts again."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from yaml import safe_load

import fedsrv.cli
from fedmodels.facts.config_file import parse_experiment
from fedplugins.serving.figures import Figures
from fedplugins.trackers.prometheus import Exporter
from tests.conftest import script_of

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
STARTS = {
    "fedsrv.service": DEPLOY / "fedsrv.service",
    "compose.yml": DEPLOY / "compose.yml",
    "coordinator.yaml": DEPLOY / "helm" / "templates" / "coordinator.yaml",
}


@pytest.fixture
def services() -> dict[str, Any]:
    found: dict[str, Any] = safe_load((DEPLOY / "compose.yml").read_text())["services"]
    return found


def resumed(start: Path, place: Path) -> str:
    """Return what a file of deploy/ adds to the command of a coordinator that starts in a place."""
    (script,) = re.findall(r"resume=;.*?(?=; exec)", start.read_text())
    script += "; echo $resume"
    return subprocess.check_output(["/bin/sh", "-c", script], cwd=place, text=True).strip()


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_a_run_that_was_begun_goes_on_and_an_empty_directory_gets_a_new_one(start, tmp_path):
    assert resumed(start, tmp_path) == ""
    (tmp_path / "run").mkdir()
    assert resumed(start, tmp_path) == ""
    (tmp_path / "run" / ".lock").touch()
    assert resumed(start, tmp_path) == "--resume"


@pytest.mark.parametrize("more", [[], ["--resume"]], ids=["empty", "locked"])
def test_a_coordinator_starts_where_these_commands_start_it(more, tmp_path, monkeypatch):
    run = tmp_path / "run"
    run.mkdir()
    if more:
        (run / ".lock").touch()
    begun = list[str]()

    def begin(self: object, address: str, events: object) -> None:
        begun.append(address)
        raise KeyboardInterrupt

    monkeypatch.setattr("fedsrv.progress.event_lines.EventPrinter.begin", begin)
    config = ROOT / "examples" / "start" / "quickstart.toml"
    monkeypatch.setattr(sys, "argv", ["fedsrv", "serve", str(config), "--out", str(run), *more])
    with pytest.raises(SystemExit) as ended:
        fedsrv.cli.main()
    assert (ended.value.code, len(begun)) == (130, 1)


def test_compose_gives_each_its_own_volume_and_starts_again(services):
    sites = [f"site-{number}" for number in range(3)]
    assert sorted(services) == ["coordinator", "grafana", "prepare", "prometheus", *sites]
    demo = parse_experiment((DEPLOY / "demo.toml").read_text(), "demo.toml")
    assert demo.schedule.clients == len(sites)
    for name in ("coordinator", *sites):
        (own,) = (one for one in services[name]["volumes"] if not one.startswith("./"))
        assert own.partition(":")[0] == name
        assert services[name]["restart"] == "on-failure"
        assert services[name]["depends_on"]["prepare"]["condition"].endswith("successfully")
    holders = [name for name in services if "authority:" in str(services[name].get("volumes"))]
    assert holders == ["prepare"]


def test_what_watches_a_demo_reads_files_that_are_there(services):
    for name in ("prometheus", "grafana"):
        for volume in services[name]["volumes"]:
            place = volume.partition(":")[0]
            assert not place.startswith(".") or (DEPLOY / place).exists()
    scraped = safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    assert scraped["rule_files"] == ["alerts.yml"]
    ((target,),) = [one["static_configs"][0]["targets"] for one in scraped["scrape_configs"]]
    assert target == "coordinator:9100"
    assert services["coordinator"]["hostname"] == "coordinator", "the page refuses other names"
    assert "--metrics-port 0.0.0.0:9100" in services["coordinator"]["command"][0]
    source = safe_load((DEPLOY / "grafana" / "prometheus.yml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"


@pytest.mark.slow
def test_what_compose_prepares_goes_where_its_user_reads_it(services, tmp_path, monkeypatch):
    (script,) = services["prepare"]["command"]
    for place in ("/authority", "/coordinator", "/sites", "/etc/fedtide"):
        script = script.replace(place, f"{tmp_path}{place}")
    for place in ("authority", "coordinator", "sites/0", "sites/1", "sites/2", "etc/fedtide", "it"):
        (tmp_path / place).mkdir(parents=True)
    for left in ("data", "certs"):  # by a try that was ended
        (tmp_path / "it" / left).mkdir()
        (tmp_path / "it" / left / "ca.pem").touch()
    shutil.copy(DEPLOY / "demo.toml", tmp_path / "etc" / "fedtide" / "config.toml")
    script = script.replace("$$", "$").replace("chown -R 10001", "ls")
    for name in ("fedsrv", "fedcli"):
        script = script.replace(f"{name} ", f"{sys.executable} -m {name} ")
    subprocess.run(["/bin/sh", "-ec", script], cwd=tmp_path / "it", check=True)
    assert {one.name for one in (tmp_path / "coordinator").iterdir()} == {
        "ca.pem", "server.pem", "server.key", "watcher.pem", "watcher.key",
    }  # fmt: skip
    for site in "012":
        own = {one.name for one in (tmp_path / "sites" / site).iterdir()}
        assert own == {"ca.pem", f"client-{site}.pem", f"client-{site}.key", "data"}
        assert [one.name for one in (tmp_path / "sites" / site / "data").iterdir()] == [site]


def test_what_stays_changes_the_demo_and_nothing_else(services):
    """A front, sites that stay, and a model that is served, over the files of compose.yml."""
    changes = safe_load((DEPLOY / "compose-stays.yml").read_text())
    assert set(changes) == {"services", "networks"}
    stays = changes["services"]
    sites = [f"site-{number}" for number in range(3)]
    assert sorted(stays) == ["coordinator", "models-0", *sites]
    assert all(one["restart"] == "always" for one in stays.values())
    (serve,) = stays["coordinator"]["command"]
    assert serve.startswith("mkdir -p queue; exec fedsrv serve queue --listen 0.0.0.0:5055 ")
    assert stays["coordinator"]["healthcheck"]["test"][:3] == ["CMD", "fedsrv", "health"]
    for site in sites:
        assert stays[site]["command"].split() == [*services[site]["command"].split(), "--stay"]
    models, site = stays["models-0"], services["site-0"]
    for key in ("image", "read_only", "tmpfs", "cap_drop", "security_opt", "environment"):
        assert models[key] == site[key], key
    assert (models["working_dir"], models["volumes"]) == (site["working_dir"], site["volumes"])
    assert "/v2/health/live" in models["healthcheck"]["test"][-1]
    assert models["networks"] == ["models"], "callers of a model do not reach the coordinator"
    assert all(port.startswith("127.0.0.1:") for port in models["ports"])


def test_no_key_and_no_data_get_into_an_image():
    left_out = set((ROOT / ".dockerignore").read_text().split())
    assert {"deploy/certs", "deploy/data", "**/*.key"} <= left_out


UNITS = sorted(DEPLOY.glob("*.service"))


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_systemd_takes_a_stop_for_success_and_repeats_no_mistake(unit):
    lines = unit.read_text().splitlines()
    assert "SuccessExitStatus=143" in lines
    (codes,) = (line for line in lines if line.startswith("RestartPreventExitStatus="))
    wanted = {"2", "3"} if "join --stay" in unit.read_text() else {"2"}
    assert {*codes.partition("=")[2].split()} == wanted
    assert {"NoNewPrivileges=yes", "ProtectSystem=strict"} <= set(lines)


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_reads_the_units(unit, tmp_path):
    """Every program is replaced by one that is there: the units name a place to be made."""
    place = tmp_path / unit.name
    program = re.compile(r"^ExecStart=\S+", re.MULTILINE)
    place.write_text(program.sub("ExecStart=/bin/true", unit.read_text()))
    words = ["systemd-analyze", "verify", "--man=no", str(place)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert unit.stem not in done.stderr, done.stderr


def test_who_takes_part_in_a_demo_writes_its_own_volume_alone(services):
    for name in ("coordinator", "site-0", "site-1", "site-2"):
        one = services[name]
        assert one["read_only"]
        assert (one["cap_drop"], one["tmpfs"]) == (["ALL"], ["/tmp"])
        assert one["environment"]["HOME"] == "/tmp"


PROMETHEUS = """
rule_files: [{rules}]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {{series: fedtide_interactions_committed, values: "1+1x20 21x60"}}
      - {{series: fedtide_finished, values: "0x100"}}
      - {{series: fedtide_resting, values: "0x100"}}
      - {{series: 'fedtide_models_refused_total{{client="3"}}', values: "0x50 1x60"}}
      - {{series: 'fedtide_client_failures_total{{client="3"}}', values: "3x20 0x20 1x60"}}
      - {{series: 'up{{job="fedtide",instance="ended"}}', values: "1x10 0x90"}}
      - {{series: 'fedtide_finished{{job="fedtide",instance="ended"}}', values: "0x8 1x1 _x90"}}
      - {{series: 'up{{job="fedtide",instance="crashed"}}', values: "1x40 0x60"}}
      - {{series: 'fedtide_finished{{job="fedtide",instance="crashed"}}', values: "0x40 _x60"}}
      - {{series: 'up{{job="fedtide",instance="failed"}}', values: "1x10 0x90"}}
      - {{series: 'fedtide_failed{{job="fedtide",instance="failed"}}', values: "0x8 1x1 _x90"}}
      - {{series: 'up{{job="fedtide",instance="restarted"}}', values: "1x24 0x3 1x80"}}
      - {{series: 'up{{job="fedtide",instance="front"}}', values: "1x70 0x40"}}
      - series: 'fedtide_queue_runs_served{{job="fedtide",instance="front"}}'
        values: "1x70 _x40"
      - series: 'fedtide_finished{{job="fedtide",instance="front",run="a"}}'
        values: "0x8 1x15 _x90"
      - {{series: fedtide_clients_joined, values: "3x100"}}
      - {{series: fedtide_clients_present, values: "3x60 2x40"}}
    promql_expr_test:
"""
FIRE = [
    (19, "FedtideNoCommit", 0), (65, "FedtideNoCommit", 1), (45, "FedtideModelRefused", 0),
    (55, "FedtideModelRefused", 1), (55, "FedtideClientGone", 0), (70, "FedtideClientGone", 1),
    (27, "FedtideDown", 0), (30, "FedtideDown", 0), (60, "FedtideDown", 1),
    (90, "FedtideDown", 2), (5, "FedtideRunFailed", 0),
    (15, "FedtideRunFailed", 1), (35, "FedtideClientFailed", 0), (50, "FedtideClientFailed", 1),
]  # fmt: skip


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
def test_prometheus_raises_the_alerts(tmp_path):
    lines = [
        f"      - {{eval_time: {minute}m, expr: {firing(name)!r}, "
        f"exp_samples: [{{labels: '{{}}', value: {count}}}]}}"
        for minute, name, count in FIRE
    ]
    rules = DEPLOY / "prometheus" / "alerts.yml"
    (tmp_path / "test.yml").write_text(PROMETHEUS.format(rules=rules) + "\n".join(lines) + "\n")
    subprocess.run(["promtool", "check", "rules", rules], check=True)
    subprocess.run(["promtool", "test", "rules", tmp_path / "test.yml"], check=True)


def test_alerts_ask_for_figures_that_are_there():
    figures = script_of("monitoring").figures
    told = {re.split(r"[{]", name)[0] for one in tellers() for name in figures(one)}
    told |= {"fedtide_queue_runs_served"}  # of the front of a queue
    rules = safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"][0]["rules"]
    asked = {name for rule in rules for name in re.findall(r"fedtide_\w+", rule["expr"])}
    assert asked <= told
    assert len(asked) > 5
    page = (ROOT / "docs" / "monitoring.md").read_text()
    assert re.findall(r"^\| `(Fedtide\w+)`", page, re.MULTILINE) == [r["alert"] for r in rules]


def test_the_board_asks_for_figures_that_are_there():
    board = json.loads((DEPLOY / "grafana" / "fedtide.json").read_text("utf-8"))
    asked = [one["expr"] for panel in board["panels"] for one in panel.get("targets", ())]
    figures = script_of("monitoring").figures
    run, served = ({re.split("[{]", name)[0] for name in figures(one)} for one in tellers())
    names = {re.sub("_bucket$", "", n) for expr in asked for n in re.findall(r"fedtide_\w+", expr)}
    shown_by_none = {
        "fedtide_live_model_reads", "fedtide_task", "fedtide_served_windows", "fedtide_info",
        "fedtide_failed", "fedtide_stopped",
    }  # fmt: skip
    assert names == (run | served) - shown_by_none
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
def test_prometheus_reads_every_query_of_the_board(tmp_path):
    text = (
        (DEPLOY / "grafana" / "fedtide.json").read_text("utf-8").replace("$__rate_interval", "1m")
    )
    panels = json.loads(text)["panels"]
    rules = [
        {"record": f"panel:{panel['id']}:{number}", "expr": one["expr"]}
        for panel in panels for number, one in enumerate(panel.get("targets", ()))
    ]  # fmt: skip
    (tmp_path / "board.json").write_text(json.dumps({"groups": [{"name": "it", "rules": rules}]}))
    subprocess.run(["promtool", "check", "rules", tmp_path / "board.json"], check=True)


def firing(alert: str) -> str:
    return f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)'


def exporter() -> Exporter:
    return Exporter(pytest.importorskip("prometheus_client"))


def tellers() -> tuple[Exporter, Figures]:
    return exporter(), Figures()
