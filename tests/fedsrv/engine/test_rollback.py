"""How far a run goes back for what a client lost, what is kept, and who may start over."""

import json
from contextlib import closing
from types import SimpleNamespace

import pytest

from fedmodels.errors import RunFailed
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.admission import Admission
from fedsrv.engine.cohort import StateLost
from fedsrv.engine.commits import Commits, Syncer
from fedsrv.engine.rounds import Engine
from fedsrv.parts import parts_of
from fedsrv.progress.events import EventLog
from fedsrv.state.history import History, LossTooLarge
from fedsrv.state.store import Store
from fedsrv.transport.remote_cohort import RemoteCohort
from fedsrv.transport.spool import Spool
from fedtide.inprocess import InProcessCohort, run_in_process
from tests.conftest import tiny_experiment
from tests.fedsrv.state.test_store import committed, digest, files, lines, record, state
from tests.runs import dies, ends_as, killed

LOCAL = tiny_experiment(method="local", schedule={"rounds": 3})
"""Six interactions of all three clients, who keep their whole model."""


def lose(out, client, newer_than=-1):
    for path in (out / "clients" / str(client)).glob("state-*"):
        if int(path.stem[-8:]) > newer_than:
            path.unlink()


def interactions(out):
    lines = (out / "rounds.jsonl").read_text().splitlines()
    return [json.loads(line)["interaction"] for line in lines]


@pytest.fixture
def whole(digits, whole_run):
    """The summary of the run that nothing happened to."""
    return whole_run(LOCAL, digits).summary


def break_off(out, digits, at, experiment=LOCAL, **options):
    """Run until client 2 is to train in an interaction, and die there."""
    point = dies(kind=rpc.ORDER_KIND_TRAIN, interaction=at, client_id="2")
    killed(experiment, digits, out, before=point, **options)


# --- how far --------------------------------------------------------------------------------------


def test_a_client_without_its_states_erases_no_run(digits, tmp_path, whole):
    out = tmp_path / "run"
    run_in_process(LOCAL, digits, out)
    lose(out, 1)
    before = (out / "rounds.jsonl").read_bytes(), sorted(out.rglob("*.safetensors"))
    with pytest.raises(RunFailed, match=r"client 1 lost .* holds .* none.*--start-over") as caught:
        run_in_process(LOCAL, digits, out, resume=True)
    assert "\n" not in str(caught.value)
    assert before == ((out / "rounds.jsonl").read_bytes(), sorted(out.rglob("*.safetensors")))
    told = str(caught.value).partition("server.max_rollback=")[2].partition(";")[0]
    farther = tiny_experiment(
        method="local", schedule={"rounds": 3}, server={"max_rollback": int(told)}
    )
    ends_as(whole, farther, digits, out)
    assert interactions(out) == [*range(6)]


@pytest.mark.parametrize("kept", [4, 3])
def test_a_small_loss_is_made_up_for(digits, tmp_path, whole, kept):
    """Everybody keeps the states of two interactions (the default) beyond what is safe."""
    out = tmp_path / "run"
    run_in_process(LOCAL, digits, out)
    lose(out, 1, newer_than=kept)
    began = []
    ends_as(whole, LOCAL, digits, out, before=began.append)
    assert min(o.interaction for o in began) == kept + 1


def test_what_was_not_synced_is_never_too_much(digits, tmp_path, whole, monkeypatch):
    """The disk lags behind by four interactions: a power failure is no fault of the client."""
    monkeypatch.setattr(InProcessCohort, "durable", lambda cohort: 0)
    out = tmp_path / "run"
    run_in_process(LOCAL, digits, out)
    for client in range(3):
        lose(out, client, newer_than=0)
    ends_as(whole, LOCAL, digits, out)


def test_losses_do_not_add_up(tmp_path):
    """Each alone is within the bound; the bound counts from the newest that ever was."""
    store = committed(Store(tmp_path / "run", tiny_experiment(), False), *range(10))
    with closing(store):
        store.advance(9)
        assert store.floor == 7
        store.roll_back(8)
        assert store.floor == 7
        committed(store, 9, 10)
        store.roll_back(8)
        assert store.advance(8) == 8
    with closing(Store(tmp_path / "run", tiny_experiment(), True)) as store:
        assert store.floor == 8


HISTORY = History(
    trained={n: dict.fromkeys((0, 1) if n % 2 else (0, 2), n) for n in range(10)},
    highest=9,
    floor=6,
    max_rollback=3,
)


@pytest.mark.parametrize(
    ("client", "versions", "admitted"),
    [
        (0, [9], True),
        (0, [6], True),
        (0, [5], False),  # a state from before the floor
        (0, [], False),
        (1, [5], True),  # what it trained last before the floor
        (1, [3], False),
        (1, [7], True),
        (2, [6], True),
        (2, [4], False),
        (3, [], True),  # it never trained
    ],
)
def test_who_is_refused(client, versions, admitted):
    if admitted:
        HISTORY.check(client, versions)
    else:
        with pytest.raises(LossTooLarge, match=r"max_rollback = 3.*max_rollback=10"):
            HISTORY.check(client, versions)


def test_the_floor_is_the_last_that_a_run_goes_back_to():
    assert HISTORY.target(9, lambda at: at == 6, {}) == 6
    with pytest.raises(RunFailed, match="fit together at no interaction since 6"):
        HISTORY.target(9, lambda at: at == 5, {})


def test_the_last_that_counts_does_not_depend_on_the_order_of_what_is_known():
    """What was undone is listed before what is committed."""
    found = History(trained={2: {0: 2}, 1: {0: 1, 1: 1}})
    assert found.last_trained(2) == {0: 2, 1: 1}
    assert found.last_trained(1) == {0: 1, 1: 1}


@pytest.mark.parametrize(
    ("lost", "target", "told"),
    [
        (None, 3, ("", "states of the server or of clients are gone; interactions after 4 are")),
        (
            StateLost(1, [2]),
            3,
            (1, "client 1 holds private states of interactions 3 only; interactions after 4"),
        ),
        (None, 5, None),  # the last commit
        (None, 6, None),  # it was undone, and is there again
    ],
)
def test_why_a_run_goes_back_is_told(lost, target, told):
    went, events = [], []
    store = SimpleNamespace(
        committed=5, newest=6, has_state=None, go_to=went.append,
        history=lambda: SimpleNamespace(target=lambda *_: target),
    )  # fmt: skip
    cohort = SimpleNamespace(starting_over=list, versions=dict, commit=lambda *_: None)
    log = SimpleNamespace(tell=lambda kind, client, **facts: events.append((kind, client, facts)))
    commits = SimpleNamespace(
        store=store, cohort=cohort, events=log, remember=lambda *_: None,
        _syncer=SimpleNamespace(want=lambda _: None),
    )  # fmt: skip
    plan = SimpleNamespace(is_stateful=True, aside={})
    assert Commits.go_to_common(commits, plan, lost) == target
    assert went == [target]
    if told is None:
        assert not events
    else:
        ((kind, client, facts),) = events
        assert (kind, client, facts["interaction"]) == ("rollback", told[0], target)
        assert facts["reason"].startswith(told[1])


# --- what is kept ---------------------------------------------------------------------------------


def test_states_stay_until_the_replay_has_passed_them(digits, tmp_path, whole):
    """A second crash in the middle of the replay costs nothing: all that was there counts again.

    Client 1 comes back with an old copy of its directory, and the run goes back; then the right
    one is found.
    """
    out, aside = tmp_path / "run", tmp_path / "aside"
    run_in_process(LOCAL, digits, out)
    (out / "clients" / "1").rename(aside)
    (out / "clients" / "1").mkdir()
    for path in aside.iterdir():
        if path.name != "state-00000005.safetensors" and path.name != "state-00000004.safetensors":
            (out / "clients" / "1" / path.name).write_bytes(path.read_bytes())
    break_off(out, digits, at=5, resume=True)
    assert interactions(out) == [0, 1, 2, 3, 4]
    for path in aside.iterdir():
        (out / "clients" / "1" / path.name).write_bytes(path.read_bytes())
    orders = []
    ends_as(whole, LOCAL, digits, out, before=orders.append)
    assert not [o for o in orders if o.kind == 1]  # nothing was computed again
    assert interactions(out) == [*range(6)]


def test_what_was_undone_counts_again_only_where_all_is_there(tmp_path):
    store = committed(Store(tmp_path / "run", tiny_experiment(), False), *range(5))
    store.roll_back(1)
    committed(store, 2)
    assert store.newest == 4
    store.go_to(4)
    assert (store.committed, lines(store)) == (4, [0, 1, 2, 3, 4])
    assert digest(store.state(4)) == digest(state(4))
    store.close()
    with closing(Store(tmp_path / "run", tiny_experiment(), True)) as store:  # the chain holds
        assert store.committed == 4


def test_a_replay_that_goes_another_way_forgets_what_was_undone(tmp_path):
    """For one, a client that failed the first time: what followed does not follow any more."""
    with closing(committed(Store(tmp_path / "run", tiny_experiment(), False), *range(5))) as store:
        store.roll_back(1)
        store.commit(record(2), state(7), None)
        assert store.newest == 2
        assert files(store) == [f"state-0000000{n}.safetensors" for n in range(3)]
        store.roll_back(1)
        store.commit(record(2, cohort=[1]), state(7), None)
        assert store.newest == 2


def test_a_damaged_state_that_was_undone_does_not_count_again(tmp_path):
    store = committed(Store(tmp_path / "run", tiny_experiment(), False), *range(5))
    store.roll_back(1)
    (store.states / "state-00000004.safetensors").write_bytes(b"")
    store.close()
    with closing(Store(tmp_path / "run", tiny_experiment(), True)) as store:
        assert store.newest == 4
        assert not store.has_state(4)
        assert store.has_state(3)


def test_after_a_roll_back_nothing_is_safe_that_is_written_again(digits, tmp_path, monkeypatch):
    """The syncer had come to interaction 3; what is committed as 3 now, has not been synced."""
    wanted, want = [], Syncer.want
    monkeypatch.setattr(Syncer, "want", lambda s, n: (wanted.append(n), want(s, n)))
    with closing(committed(Store(tmp_path / "a", tiny_experiment(), False), *range(5))) as store:
        store.advance(4)
        store.roll_back(3)
        assert store.watermark == 3
    break_off(tmp_path / "run", digits, at=2)
    run_in_process(LOCAL, digits, tmp_path / "run", resume=True)
    assert wanted == [-1, 0, 1, 1, 2, 3, 4, 5]


# --- starting over --------------------------------------------------------------------------------


def test_a_client_that_starts_over_costs_nobody_else_anything(digits, tmp_path, monkeypatch):
    """Its private state begins anew; all the others go on, and a crash changes nothing of that."""

    def started_over(name, **options):
        out = tmp_path / name
        break_off(out, digits, at=4)
        lose(out, 1)
        once = iter([(1,)])
        with monkeypatch.context() as asked:
            asked.setattr(InProcessCohort, "starting_over", lambda cohort: next(once, ()))
            if name == "one":
                return run_in_process(LOCAL, digits, out, resume=True, **options)
            break_off(out, digits, at=5, resume=True)
        return run_in_process(LOCAL, digits, out, resume=True)

    bases: dict[tuple[str, int], int] = {}
    seen = lambda o: bases.setdefault((o.client_id, o.interaction), o.base)  # noqa: E731
    one = started_over("one", before=seen)
    assert bases["1", 4] == -1
    assert bases["0", 4] == 3
    assert bases["1", 5] == 4
    assert one["clients_started_over"] == [1]
    assert started_over("crashed")["state_sha256"] == one["state_sha256"]


def remote(tmp_path):
    cohort = RemoteCohort(2, Spool(tmp_path, 0), EventLog(), admission=Admission({}))
    monkey = HISTORY

    def holds(client, versions):
        if monkey.last_trained(9).get(client, -1) in (-1, *versions):
            return True
        monkey.check(client, versions)
        return False

    return cohort, holds


@pytest.fixture
def joined(tmp_path, digits):
    """A cohort, and a function that joins as a client with the states it says."""
    cohort, holds = remote(tmp_path)
    text = {c: (digits / str(c) / "client.json").read_text() for c in range(2)}

    def join(client, versions, start_over=False, token=b""):
        return cohort.join(client, text[client], token, versions, start_over)

    return cohort, holds, join


def test_a_join_with_too_great_a_loss_is_refused(joined):
    cohort, holds, join = joined
    cohort.require(holds, {0: 9, 1: 9}, -1)
    with pytest.raises(LossTooLarge):
        join(0, [2])
    assert not cohort.versions()
    token = join(0, [9])
    with pytest.raises(LossTooLarge):
        join(0, [], token=token)
    assert cohort.versions() == {0: (9,)}  # the session that was there is as it was


def test_who_joined_before_anything_was_known_has_to_join_again(joined):
    """A client may be quicker than the coordinator that takes its run up."""
    cohort, holds, join = joined
    token = join(0, [2])
    join(1, [9])
    cohort.require(holds, {0: 9, 1: 9}, -1)
    assert cohort.versions() == {1: (9,)}
    with pytest.raises(LossTooLarge):
        join(0, [2], token=token)


@pytest.mark.parametrize("before", [True, False])
def test_a_client_may_ask_to_start_over(joined, before):
    cohort, holds, join = joined
    if before:
        join(0, [2], start_over=True)
    cohort.require(holds, {0: 9, 1: 9}, -1)
    if not before:
        join(0, [2], start_over=True)
    join(1, [9], start_over=True)  # it has what it needs: nothing begins anew
    assert list(cohort.starting_over()) == [0]
    assert list(cohort.starting_over()) == []


def test_the_engine_of_a_plain_run_starts_nothing_over(digits, tmp_path):
    with closing(Store(tmp_path / "run", LOCAL, False)) as store:
        cohort = InProcessCohort(LOCAL, digits, tmp_path / "run" / "clients")
        assert (
            "clients_started_over"
            not in Engine(LOCAL, cohort, store, EventLog(), parts_of(store, EventLog())).run()
        )
