"""From a command line to a host that is ready to join: files, certificates, a site's demands."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import torch
from rich.console import Console

from fedcli.data.store.client_data import ABOUT
from fedcli.data.store.opened_data import open_data, store_in
from fedcli.data.store.own_files import cut_before, is_cut
from fedcli.gate.gate import Gate
from fedcli.gate.rules import ANY, Rules
from fedcli.runtime.client_part import Brought
from fedcli.runtime.host import Host
from fedcli.runtime.link import Link
from fedmodels.config.bounds import DETAILS, CountDetail
from fedmodels.config.experiment import Experiment
from fedmodels.config.places import check_address
from fedmodels.console.printable import printable
from fedmodels.errors import ConfigError, DataError, LinkError
from fedmodels.facts.data_description import ClientFile, read_file
from fedmodels.facts.resolution import received_data, received_experiment
from fedmodels.host.machine import tells_traces
from fedmodels.tensors.bundle import EVALUATOR, ClientId
from fedpb.tables import usual_of, values_of

IS_CUT = (
    "--recipe is for files as a site has them, and {} holds none: they are cut already, or are not "
    "there"
)


def host_of(
    clients: Sequence[ClientId],
    server: str,
    data: Path,
    states: Path,
    device: torch.device,
    *,
    tls: tuple[Path | None, Path | None, Path | None] = (None, None, None),
    give_up_after: float | None = None,
    start_over: bool = False,
    deploys: bool = False,
    code: Sequence[Path] = (),
    weights: Sequence[Path] = (),
    incoming: Path | None = None,
    strict: bool = False,
    show: Callable[..., None] | None = None,
    crl: Path | None = None,
    announce: CountDetail = "exact",
    rules: Rules = ANY,
    ledger: Path | None = None,
    recipe: Path | None = None,
    run_id: str = "",
) -> Host:
    """Return a host that is ready to join; files as a site has them are cut first.

    Args:
        clients: their ids.
        server: the address of the coordinator.
        data: a directory with one for each client, or with a store, or one client's own files.
        states: a directory for the clients' states.
        device: where nets are trained.
        tls: authority of the server, the client's certificate and its key.
        give_up_after: seconds without the server; None is never.
        start_over: go on from the initial private state where a lost one is too far back.
        deploys: keep a model live while it trains.
        code: custom files whose code may run, if the server's experiment asks for it.
        weights: files that may hold the initial weights, if the experiment has such a file.
        incoming: a folder in which what is complete becomes a task.
        strict: refuse of it what ``fedcli check`` would have a word on.
        show: gets each message before it is sent.
        crl: a list of revoked certificates; no server that shows one of them is joined.
        announce: how exactly clients tell how many examples of each class they have, at most.
        rules: on which conditions the site takes part.
        ledger: the file of what the site has spent in all its runs; by default beside the states.
        recipe: the recipe of the site; by default the one that lies with its files.
        run_id: the run to join; empty for the one that is served.

    Raises:
        ConfigError: an argument is no good; the site does not allow the run; or own files are of
            several clients, or cannot be cut.
    """
    check_address(server, "--server")
    credentials = certificate = None
    if any(tls):
        from fedcli.runtime.own_certificate import OwnCertificate, channel_credentials

        credentials = channel_credentials(*tls)
        certificate = OwnCertificate(tls[1]) if tls[1] else None
    if give_up_after is not None and math.isnan(give_up_after):
        raise ConfigError("--give-up-after nan is no number of seconds")
    if states.exists() and not states.is_dir():
        raise ConfigError(f"--state-dir {states} is a file, not a directory; give another one")
    if ledger is not None and not rules.counts:
        raise ConfigError("--ledger goes with --require-privacy or --scores")
    brought, (ca, cert, key) = dict[str, Brought](), tls
    if rules != ANY:
        brought["rules"] = rules
    if rules.floor is not None:
        from fedcli.parts.privacy.floor import floor_ledger

        brought["floor"] = floor_ledger(rules.floor, ledger, states)
    if rules.scores is not None:
        from fedcli.parts.privacy.scores import score_ledger

        brought["scores"] = score_ledger(rules.scores, ledger, states)
    # a site that stays has a directory of states for each run, and one note for all of them
    place = states.absolute().parents[1 if run_id else 0]
    if rules.min_cohort or cert is not None:
        from fedcli.parts.sum_terms import SumTerms, signing

        signs = signing(*tls, crl, rules.min_cohort)
        brought["sums"] = SumTerms(signs, rules.min_cohort, place, rules.takes_changing_sums)
    if incoming is not None:
        from fedcli.runtime.announcer import Watched

        brought["watched"] = Watched(incoming, strict, stays=bool(run_id))
    link = Link(server, credentials, give_up_after, show, Gate(rules))
    link.run_id = run_id
    if crl is not None:
        from fedpb.kept_lists import KeptLists
        from fedpb.server_check import ServerCheck

        kept = KeptLists(place)
        link.check = ServerCheck(server, ca, crl, cert, key, kept=(kept.read, kept.keep))
    has_cut = _has_cut(clients, data, states / "own-data")
    if rules.columns and has_cut:
        raise ConfigError(f"--allow-column is for files as a site has them, and {data} is cut")
    shown = None
    if rules != ANY:
        shown = _look(link, clients, brought, code, weights, has_cut=has_cut)
    elif run_id:  # another one by now is told as that, and not as a state directory's
        link.prepare(clients[0], has_cut=has_cut)
    cache, stays = states / "own-data", bool(run_id)
    data, wanted = _brought(link, clients, data, cache, recipe, shown, stays=stays)
    if rules.floor is not None and shown is not None and clients[0] != EVALUATOR:
        from fedcli.parts.privacy.told_beside import check_told

        check_told(rules, shown, open_data(data, clients[0], store_in(data)).problem)
    if DETAILS.index(wanted) > DETAILS.index(announce):
        announce = wanted
    kind = Host
    if tells_traces():
        from fedcli.tracing import traced_host

        kind = traced_host()
    return kind(
        clients, link, data, states, device, start_over=start_over, deploys=deploys, code=code,
        weights=weights, certificate=certificate, announce=announce, brought=brought, shown=shown,
    )  # fmt: skip


def _look(
    link: Link,
    clients: Sequence[ClientId],
    brought: Mapping[str, Brought],
    code: Sequence[Path],
    weights: Sequence[Path],
    *,
    has_cut: bool,
) -> Experiment:
    """Look at a run before the server is told anything of the site's data.

    Raises:
        ConfigError: the site stays out of it.
        LinkError: the server does not say what its run is.
    """
    asked = link.prepare(clients[0], has_cut=has_cut)
    if not asked.run_id:
        raise LinkError(
            "the server does not show its config before a client joins, and this site has "
            "conditions: update the server"
        )
    sent, usual = values_of(asked.experiment), usual_of(asked.experiment)
    experiment = received_experiment(sent, "the server's experiment", code, weights, usual)
    for each in brought.values():
        each.joined(experiment, asked.run_id, clients)
    return experiment


def try_on(
    clients: Sequence[ClientId],
    server: str,
    data: Path,
    tls: tuple[Path | None, Path | None, Path | None] = (None, None, None),
    crl: Path | None = None,
    recipe: Path | None = None,
    give_up_after: float | None = None,
    place: Path | None = None,
) -> bool:
    """Print what a run would learn of files, and join nothing; tell whether all is well.

    The server is asked how files are cut, which tells it the client's number and nothing else.
    Nothing is written, and what joining kept in a ``place`` beside its states is read.

    Raises:
        ConfigError: an argument is no good.
        DataError: the files cannot be read as the run wants them.
    """
    check_address(server, "--server")
    if is_cut(data):
        if recipe is not None:
            raise ConfigError(IS_CUT.format(data))
        from fedcli.data.store.findings import inspect

        return inspect(data, Console())
    from fedcli.data.store.trying import check_files

    client = _only(clients, data)
    credentials = None
    if any(tls):
        from fedcli.runtime.own_certificate import channel_credentials

        credentials = channel_credentials(*tls)
    if crl is not None:
        from fedpb.kept_lists import KeptLists
        from fedpb.server_check import ServerCheck

        (ca, cert, key), read = tls, KeptLists(place).read
        ServerCheck(server, ca, crl, cert, key, kept=(read, lambda marks: None))()
    with closing(Link(server, credentials, give_up_after)) as link:
        wanted = link.prepare(client)
    return check_files(data, values_of(wanted.data), wanted.seed, recipe)


def _only(clients: Sequence[ClientId], data: Path) -> int:
    """Return the one client whose files are brought; raise ConfigError if there are others."""
    (client, *others) = clients
    if others or not isinstance(client, int):
        raise ConfigError(
            f"--data {data} holds files of one client: name it with --client-id, or give clients' "
            "directories as fedcli partition makes them"
        )
    return client


def count_detail_in(text: str) -> CountDetail:
    """Return how the server wants examples announced; an unknown word is one of a later server.

    Raises:
        LinkError: the word is unknown.
    """
    for how in DETAILS:
        if text == how or (not text and how == "exact"):
            return how
    raise LinkError(
        f"the server wants examples announced as {printable(text, 60)!r}: update fedcli"
    )


def _brought(
    link: Link,
    clients: Sequence[ClientId],
    data: Path,
    cache: Path,
    recipe: Path | None = None,
    shown: Experiment | None = None,
    *,
    stays: bool = False,
) -> tuple[Path, CountDetail]:
    """Return where clients' directories are, and how the run wants examples announced.

    The run is asked for that where files have to be cut; else it is "exact".
    Files as a site has them are cut first. A site with conditions was ``shown`` the run's config,
    and cuts by no other ``[data]`` than that.

    Raises:
        ConfigError: custom files are of several clients; or they cannot be cut, or by another table
            than the site was shown, or have classes whose names it does not tell.
    """
    if _has_cut(clients, data, cache):
        if recipe is not None:
            raise ConfigError(IS_CUT.format(data))
        return data, "exact"
    client = _only(clients, data)
    from fedcli.data.store.site import cut  # reads tables and images

    wanted = link.prepare(client)
    tables = values_of(wanted.data)
    if shown is not None and received_data(tables, "the server's [data]") != shown.data:
        raise ConfigError(
            "the server says another [data] to cut files by than that of the run's config, which "
            "this site looked at: it stays out"
        )
    try:
        place = cut(data, tables, wanted.seed, client, cache, recipe)
        names = read_file(place / str(client) / ABOUT, ClientFile).class_names
        if link.gate.holds_back(names):
            raise ConfigError(
                f"{data}: the labels are not those of the run, and their names would be told: "
                "fedcli check --server shows them, a recipe can call them by the run's, and --tell "
                "labels allows it"
            )
        return place, count_detail_in(wanted.announce)
    except DataError as error:
        if stays:  # its data may only be away
            raise
        raise ConfigError.like(error) from None  # the same command again is in vain


def _has_cut(clients: Sequence[ClientId], data: Path, cache: Path) -> bool:
    """Tell whether clients' directories are brought, and no files that have to be, or were, cut."""
    client = clients[0]
    is_gone = not data.exists() and isinstance(client, int) and cut_before(cache, client)
    return (is_cut(data) and not is_gone) or clients == ["evaluator"]
