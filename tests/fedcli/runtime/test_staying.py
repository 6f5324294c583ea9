"""A site that stays: which runs it joins, and when again; and what it allows of a run."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from fedcli import joining
from fedcli.cli import join, main
from fedcli.gate.rules import Rules
from fedcli.joining import host_of
from fedcli.runtime import staying
from fedcli.runtime.link import Link
from fedcli.runtime.staying import OVER_S, SITE_LOOK_S, Address, Outcome, each_run, stay
from fedmodels.console.options import words_of
from fedmodels.errors import ConfigError, LinkError
from fedmodels.facts.config_file import parse_experiment
from fedmodels.host.staying import NEW_RUNS
from fedpb.tables import table_of
from fedpb.told import Passed
from fedpb.v1 import coordinator_pb2 as rpc


class Enough(Exception):
    """The runs of a test are all served."""


def joined(
    served: list[str | None], statuses: dict[str, list[int]]
) -> tuple[list[str], list[float]]:
    """Return which runs a site joins, and how long it waits, as runs are served look by look."""
    looks: Iterator[str | None] = iter(served)
    parts, waits = list[str](), list[float]()

    def runs() -> str | None:
        try:
            return next(looks)
        except StopIteration:
            raise Enough from None

    def take_part(run: str) -> Outcome:
        parts.append(run)
        return Outcome.of(statuses[run].pop(0))

    def take_part_in_all() -> None:
        each = each_run(runs, waits.append)
        run = next(each)
        while True:
            run = each.send(take_part(run))

    with pytest.raises(Enough):
        take_part_in_all()
    return parts, waits


def test_a_site_takes_part_in_one_run_after_the_other() -> None:
    parts, waits = joined([None, "a", "a", None, None, "b", "c"], {"a": [0], "b": [0], "c": [0]})
    assert parts == ["a", "b", "c"]
    assert waits == [SITE_LOOK_S] * 4


def test_a_run_that_is_over_is_joined_again_after_a_minute_or_once_it_was_away() -> None:
    looks = int(OVER_S / SITE_LOOK_S)
    assert joined(["a", *["a"] * looks], {"a": [0]})[0] == ["a"]
    assert joined(["a", *["a"] * (looks + 1)], {"a": [0, 0]})[0] == ["a", "a"]
    assert joined(["a", None, "a"], {"a": [0, 0]})[0] == ["a", "a"]


def test_a_run_that_a_site_stays_out_of_is_left_alone_until_another_one_is_served() -> None:
    assert joined(["a", *["a"] * 1000], {"a": [2]})[0] == ["a"]
    assert joined(["a", "a", "b", "a"], {"a": [2, 2], "b": [0]})[0] == ["a", "b", "a"]


@pytest.mark.parametrize(("status", "changes_at", "joins"), [(2, 30, 2), (2, 1, 2), (2, 999, 1),
                                                              (3, 30, 1)])  # fmt: skip
def test_a_site_looks_again_once_its_owner_has_mended_its_files(
    status: int, changes_at: int, joins: int
) -> None:
    """No sooner than after a minute, and never at a run that goes on without it."""
    looks, waits, parts = iter(["a"] * 100), list[float](), list[int]()

    def take_part() -> None:
        each = each_run(lambda: next(looks), waits.append, files=lambda: len(waits) >= changes_at)
        next(each)
        while True:
            parts.append(len(waits))
            each.send(Outcome.of(status))

    with pytest.raises(RuntimeError):  # no more looks
        take_part()
    assert len(parts) == joins
    assert all(later - first >= OVER_S / SITE_LOOK_S - 1 for first, later in pairwise(parts))


def test_the_files_of_a_site_are_its_data_and_what_it_says_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.csv").write_text("a,b\n1,2\n")
    (tmp_path / "site.toml").write_text("")
    seen = list[object]()

    def each_run(runs: object, wait: object, files: Any) -> Iterator[str]:
        for content in ("1,2\n", "1,2\n3,4\n"):
            (tmp_path / "own.csv").write_text(content)
            seen.append(files())
        raise Enough
        yield ""

    monkeypatch.setattr(staying, "each_run", each_run)
    monkeypatch.setattr(staying, "end_on_sigterm", lambda: None)
    words = ("--data", str(tmp_path / "own.csv"), "--recipe", str(tmp_path / "site.toml"))
    with pytest.raises(Enough):
        stay(context_of("--stay", *words), Address("127.0.0.1:1", "3"), Rules())
    assert seen[0] != seen[1]
    assert len(seen[0]) == 2  # type: ignore[arg-type]


def test_after_a_fault_a_site_joins_again_after_a_longer_time_each_time() -> None:
    parts, waits = joined(["a"] * 8, {"a": [1, -9, 1, 0]})
    assert parts == ["a", "a", "a"]  # 5 s, 10 s, and 20 s of which three looks are left
    assert waits == [SITE_LOOK_S] * 5


def test_a_run_that_goes_on_without_the_site_is_never_joined_again() -> None:
    """Its process ends with 3: a client that was excluded knocked every five minutes, for ever."""
    served = ["a", *["a"] * 200, None, "a", "b", "a", None, "a"]
    assert joined(served, {"a": [3], "b": [0]})[0] == ["a", "b"]


def test_a_server_that_names_run_after_run_costs_a_process_a_minute() -> None:
    names, clock = [f"run-{n}" for n in range(NEW_RUNS + 50)], [0.0]
    looks, parts = iter([name for name in names for _ in range(12)]), list[str]()

    def runs() -> str | None:
        clock[0] += SITE_LOOK_S
        return next(looks, None)

    each = each_run(runs, lambda seconds: None, lambda: clock[0])
    run = next(each)
    while clock[0] < 3600:
        parts.append(run)
        run = each.send(Outcome.NOT_ALLOWED)
    minutes = clock[0] / 60
    assert NEW_RUNS + 0.5 * minutes < len(parts) <= NEW_RUNS + minutes + 1


def test_what_is_not_a_run_names_no_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Channel:
        def __enter__(self) -> Channel:
            return self

        def __exit__(self, *given: object) -> None:
            pass

        def unary_unary(self, *given: object) -> object:
            return lambda asked, timeout: rpc.PrepareResponse(run_id=self.run_id)

        run_id = ""

    channel = Channel()
    monkeypatch.setattr(Address, "_channel", lambda self: channel)
    for channel.run_id in ("", "../../etc", "a" * 65, "ab/cd-efgh"):
        assert Address("127.0.0.1:1", "0").run() is None
    channel.run_id = "4ed6b866b76b4ef8999da76c60f52b83"
    assert Address("127.0.0.1:1", "0").run() == channel.run_id


def test_certificates_that_are_renewed_while_a_site_stays_are_the_ones_it_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In between, the key is not that of the certificate."""

    class Shown(Exception):
        """A channel is opened with these credentials."""

    def opened(server: str, credentials: object, options: object) -> None:
        raise Shown(credentials)

    def now() -> Any:
        if isinstance(found := held.pop(0), ConfigError):
            raise found
        return found

    held: list[object] = ["old", ConfigError("--tls-key own.key is not the certificate's"), "new"]
    monkeypatch.setattr("grpc.secure_channel", opened)
    address = Address("127.0.0.1:1", "0", now)
    with pytest.raises(Shown, match="old"):
        address.run()
    assert address.run() is None
    assert address.told == "--tls-key own.key is not the certificate's"
    with pytest.raises(Shown, match="new"):
        address.run()


def context_of(*words: str) -> typer.Context:
    """Return the context of ``fedcli join`` with these words."""
    app = typer.Typer()
    app.command()(join)
    given = ["--client-id", "3", "--server", "127.0.0.1:1", "--data", "d", *words]
    made: typer.Context = typer.main.get_command(app).make_context("join", given)  # type: ignore[assignment]
    return made


def test_each_run_gets_the_options_of_the_site_and_a_state_directory_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = list[list[str]]()

    def run_program(module: str, words: list[str], is_wanted: object) -> int:
        said.append([module, *words])
        raise Enough

    monkeypatch.setattr(staying, "run_program", run_program)
    monkeypatch.setattr(Address, "run", lambda self: "0" * 32)
    monkeypatch.setattr(staying, "end_on_sigterm", lambda: None)
    words = ("--allow-method", "fedavg", "--allow-method", "gldp", "--no-check", "--deploy",
             "--show-uploads", "seen", "--min-cohort", "3", "--watch", "in")  # fmt: skip
    context = context_of("--stay", "--state-dir", "own", *words)
    with pytest.raises(Enough):
        stay(context, Address("127.0.0.1:1", "3"), Rules())
    assert said[0][:2] == ["fedcli", "join"]
    again = context_of(*said[0][8:])
    expected = context_of(*words, "--state-dir", f"own/{'0' * 32}")
    expected.params |= {"show_uploads": f"seen/{'0' * 32}", "run_id": "0" * 32}
    assert again.params == expected.params
    assert words_of(context_of()) == ["--client-id", "3", "--server", "127.0.0.1:1", "--data", "d"]


@pytest.mark.parametrize("option", ["--dry-run", "--start-over", "--ask"])
def test_an_option_of_one_run_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option.partition('=')[0]} is for one"):
        stay(context_of("--stay", option), Address("127.0.0.1:1", "3"), Rules())


def test_what_a_site_allows_is_checked_before_a_run_is_served() -> None:
    """By a process that imports no torch, which a mistyped method keeps from waiting for ever."""
    code = (
        "import sys; from fedcli.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: assert 'torch' not in sys.modules\n"
    )
    words = ("join", "--client-id", "3", "--server", "127.0.0.1:1", "--data", "d", "--stay")
    ended = subprocess.run(
        [sys.executable, "-c", code, *words, "--allow-method", "fedavgg"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    assert "'fedavgg' is no method" in ended.stderr
    assert "Did you mean 'fedavg'" in ended.stderr


def test_data_that_are_away_for_a_moment_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit status 2 would mean that the site stays out of the run."""
    said_by_the_server(monkeypatch, RUN)
    words = ["join", "--client-id", "0", "--server", "127.0.0.1:1", "--state-dir",
             str(tmp_path / "states"), "--data", str(tmp_path / "own.csv")]  # fmt: skip
    for more, outcome in (([], Outcome.NOT_ALLOWED), (["--run-id", "0" * 32], Outcome.LATER)):
        with pytest.raises(SystemExit) as ended:
            main([*words, *more])
        assert Outcome.of(int(str(ended.value.code))) is outcome


RUN = """
[data]
name = "table"
classes = ["a", "b"]
[data.columns]
label = "kind"
session = "walk"
features = ["ax", "ay"]
window = 8
[net]
name = "mlp"
[method]
name = "fedrep"
[schedule]
clients = 2
rounds = 1
"""


CPU = torch.device("cpu")


def said_by_the_server(monkeypatch: pytest.MonkeyPatch, text: str, **more: Any) -> None:
    """Have each Prepare answer that the run's config is this one, or what ``more`` says of it."""
    experiment = parse_experiment(text).to_dict()
    facts = {"data": table_of(experiment["data"]), "experiment": table_of(experiment), **more}
    answer = rpc.PrepareResponse(run_id="0" * 32, **facts)
    monkeypatch.setattr(Link, "prepare", lambda self, client, has_cut=False: answer)


def test_files_are_cut_by_allowed_columns_alone_whatever_the_config_of_the_run_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server shows one config, and says another [data] to cut by."""
    (tmp_path / "own.csv").write_text("ax,ay,secret,kind,walk\n" + "1,2,3,a,1\n" * 40)
    other = parse_experiment(RUN.replace('"ay"', '"secret"')).to_dict()["data"]
    said_by_the_server(monkeypatch, RUN, data=table_of(other))
    monkeypatch.setattr("fedcli.data.store.site.cut", lambda *given: pytest.fail("it was cut"))
    with pytest.raises(ConfigError, match=r"says another \[data\]"):
        host_of([0], "127.0.0.1:1", tmp_path / "own.csv", tmp_path / "states", CPU,
                rules=Rules.of(allow_column=["ax", "ay", "kind:label", "walk"]))  # fmt: skip


def test_a_floor_of_cohorts_is_held_against_a_run_before_it_is_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said_by_the_server(monkeypatch, RUN)
    monkeypatch.setattr(joining, "_brought", lambda *given: pytest.fail("files were read"))
    with pytest.raises(ConfigError, match="--min-cohort 3: this run has no"):
        host_of([0], "127.0.0.1:1", tmp_path, tmp_path / "states", CPU, rules=Rules(min_cohort=3))


def test_a_run_that_takes_the_place_of_the_one_that_was_looked_at_is_not_joined() -> None:
    """A site would bring it the states, or the files as they were cut, of another run."""
    link, joined = Link("127.0.0.1:1"), list[str]()
    served = iter([rpc.PrepareResponse(run_id="first"), rpc.PrepareResponse(run_id="second")])

    def join(passed: Passed) -> rpc.JoinResponse:
        request = rpc.JoinRequest.FromString(Passed.encoded(passed))
        joined.append(request.run_id)
        return rpc.JoinResponse(run_id=request.run_id)

    with closing(link), pytest.MonkeyPatch.context() as patch:
        patch.setattr(link, "_prepare", lambda request: next(served))
        patch.setattr(link, "_join", join)
        link.prepare(3)
        link.join(rpc.JoinRequest(client_id="3"))
        link.join(rpc.JoinRequest(client_id="3", run_id="of its states"))
        with pytest.raises(LinkError, match="another run is served"):
            link.prepare(3)
    assert joined == ["first", "of its states"]


def test_a_site_stays_at_each_port_behind_a_front_and_leaves_all_of_them() -> None:
    """In two runs at a time; the third waits for one of them to end."""
    front, joined = Address("hub:5055", "0"), list[tuple[str, str]]()
    changed, ends = threading.Condition(), dict[str, bool]()
    asked = list[str]()

    def run(address: Address) -> str | None:
        with changed:
            asked.append(address.server)
            changed.notify_all()
        if address is front:
            front.on_places([1, 2, 3, 1, 99])
            return None
        return address.server.rpartition(":")[2] * 8

    def join(
        server: str, run: str, beside: Collection[str], is_wanted: Callable[[], bool]
    ) -> Outcome:
        assert len(beside) == len(joined) - len(ends)
        with changed:
            joined.append((server, run))
            changed.notify_all()
            while is_wanted() and not ends.get(server):
                changed.wait(0.01)
        return Outcome.OVER

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Address, "run", run)
        patch.setattr(staying, "SITE_LOOK_S", 0.01)
        places = staying.Places(front, join, 2)
        threading.Thread(target=places._stay_until_left, args=(front,), daemon=True).start()
        with changed:
            assert changed.wait_for(lambda: len(joined) == 2, 20)
            assert changed.wait_for(lambda: "hub:5058" in asked, 20)
            assert len(joined) == 2
            ends[joined[0][0]] = True
            assert changed.wait_for(lambda: len(joined) >= 3, 20)
        places.leave()
    assert {server for server, _ in joined} == {"hub:5056", "hub:5057", "hub:5058"}
    assert not any(thread.is_alive() for thread in places._threads.values())


def test_a_front_names_ports_and_no_other_host_and_few_of_them() -> None:
    front = Address("hub:5055", "0")
    places = staying.Places(front, lambda *given: Outcome.OVER, 1)
    places.leave()  # whoever is begun now ends at once
    front.on_places([*range(1, 500)])
    assert len(places._threads) == staying.MAX_PLACES
    places.leave()


def test_a_run_that_the_front_serves_elsewhere_now_is_left_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its process would wait at a port where nothing listens, and hold the states of the run."""
    front, now, ended, begun = Address("hub:5055", "0"), [0.0], threading.Event(), []

    def join(
        server: str, run: str, beside: Collection[str], is_wanted: Callable[[], bool]
    ) -> Outcome:
        begun.append(server)
        if server != "hub:5056" or len(begun) > 1:
            raise staying._Left
        front.on_places([1, 2])
        assert is_wanted()
        front.on_places([2])
        now[0] += staying.OVER_S - 1
        front.on_places([2])
        assert is_wanted(), "it may be about to end"
        now[0] += 1
        assert not is_wanted()
        front.on_places([1])
        assert is_wanted()
        ended.set()
        return Outcome.LATER

    monkeypatch.setattr(Address, "run", lambda address: address.server[-1] * 8)
    places = staying.Places(front, join, 4, lambda: now[0])
    front.on_places([1])
    assert ended.wait(20)
    places.leave()


def test_a_thread_of_a_port_that_has_ended_by_a_fault_is_begun_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    front, tries = Address("hub:5055", "0"), threading.Semaphore(0)

    def stay(places: object, address: Address) -> None:
        tries.release()
        raise staying._Left

    monkeypatch.setattr(staying.Places, "stay", stay)
    places = staying.Places(front, lambda *given: Outcome.OVER, 1)
    for _ in range(2):
        front.on_places([1])
        assert tries.acquire(timeout=20)
        places._threads[1].join()


def test_a_site_that_cannot_start_a_process_tries_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def run_program(module: str, words: list[str], is_wanted: object) -> int:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(staying, "run_program", run_program)
    monkeypatch.setattr(staying, "words_of", lambda *given, **more: [])
    given = {"state_dir": tmp_path, "watch": None, "show_uploads": None, "ledger": tmp_path}
    context: Any = type("Context", (), {"params": given})
    found = staying._joined(context, Rules(), "hub:5056", "a" * 8, (), lambda: True)
    assert found is Outcome.LATER
    assert "temporarily unavailable" in caplog.text


def test_who_joins_one_run_is_told_of_a_front(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Link("hub:5055")) as link:
        monkeypatch.setattr(link, "_prepare", lambda passed: rpc.PrepareResponse(places=[2, 1]))
        with pytest.raises(LinkError, match=r"--stay takes part in its runs; one is .* hub:5057"):
            link.prepare(0)
