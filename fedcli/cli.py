"""``fedcli``: join a run, partition a data set. Heavy imports happen inside the commands."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedcli.predicting.whose import (
    ModelFile,
    RecipeOfNew,
    RunOfModel,
    live_model,
    rollback,
    whose_model,
)
from fedmodels.console.commands import run_command
from fedmodels.console.log_lines import LogLevel, set_up_logging
from fedmodels.console.options import (
    AsJson,
    AsRows,
    Config,
    Device,
    Level,
    Quiet,
    Sets,
    Strict,
    program,
    show,
)
from fedmodels.errors import ArchiveError, ConfigError, DataError
from fedmodels.host.files import why_file_is_no_good
from fedmodels.host.machine import end_on_sigterm
from fedmodels.plugins import usable

if TYPE_CHECKING:
    import torch

    from fedcli.gate.rules import Rules
    from fedcli.predicting.prediction import Predictions
    from fedcli.runtime.link import Link
    from fedmodels.tensors.bundle import ClientId


app = program("Join a federated run as a client, and prepare the data for it.")
for further in usable("fedcli.commands"):
    app.add_typer(further)

ClientIds = Annotated[
    str,
    typer.Option(help="A client id, a range such as 0-24 or 0-24:2 (every second), or evaluator."),
]
Server = Annotated[str, typer.Option(help="HOST:PORT of the coordinator.")]
DataRoot = Annotated[
    Path,
    typer.Option(
        help="The client's own recordings or photos, preprocessed as the run asks; or a "
        "partition, of which only DIR/<id> is opened."
    ),
]
StateDir = Annotated[
    Path, typer.Option(help="Directory of private states and the session, by client id.")
]
GiveUpAfter = Annotated[
    float | None,
    typer.Option(
        min=0, help="Give up after this many seconds without the server; by default never."
    ),
]
StartOver = Annotated[
    bool,
    typer.Option(
        "--start-over",
        help="Continue from the initial private state if the run cannot go back to a lost one.",
    ),
]
OwnCode = Annotated[
    list[Path] | None,
    typer.Option(help="A file of the run's own method or net, such as method.py."),
]
OwnWeights = Annotated[
    list[Path] | None,
    typer.Option(help="A copy of the weights file that the run's config may start from."),
]
Authority = Annotated[Path | None, typer.Option(help="Authority of the server.")]
Certificate = Annotated[Path | None, typer.Option(help="This client's certificate.")]
Key = Annotated[Path | None, typer.Option(help="Its key.")]
Deploys = Annotated[
    bool,
    typer.Option(
        "--deploy",
        help="Deploy a model during training, even if the config has no table deploy: "
        "STATE_DIR/<id>/model/current.safetensors.",
    ),
]
WatchedForTasks = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Add each complete file or folder in this folder as a task of an open run; with "
        "several clients, in DIR/<id>.",
    ),
]
DataOfTasks = Annotated[
    Path | None,
    typer.Option(
        help="The parent of the client's directory; by default the state directory, with what "
        "join made of the client's own files."
    ),
]
ShowUploads = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="Write each message to DIR before it is sent, one line per field; - prints it.",
    ),
]
ShowTensors = Annotated[
    bool,
    typer.Option("--show-tensors", help="Also write the tensors of the last 20 uploads to DIR."),
]
Announce = Annotated[
    str,
    typer.Option(
        metavar="exact|rounded|none",
        help="How precisely to announce the number of examples per class, if the run accepts "
        "less: rounded up to a power of two, or only the sum per task.",
    ),
]
RequirePrivacy = Annotated[
    str | None,
    typer.Option(
        metavar="level=…,epsilon=…,delta=…",
        help="Join only runs with differential privacy, and train only while all runs together "
        "stay within epsilon; also clip=, min-cohort=, where=server, colluders=.",
    ),
]
SiteLedger = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="The site's privacy ledger over all runs, for --require-privacy and --scores; by "
        "default fedtide-privacy.db next to the state directory.",
    ),
]
Ask = Annotated[
    bool,
    typer.Option(
        "--ask", help="Ask before sending descriptions of the data or anything learned from them."
    ),
]
Revoked = Annotated[
    Path | None, typer.Option(help="Certificate revocation list; revoked servers are rejected.")
]
MinCohort = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="N",
        help="Participate only in secure sums over at least N certificates, including this "
        "client's.",
    ),
]
ChangingCohorts = Annotated[
    bool,
    typer.Option(
        "--changing-cohorts",
        help="Also accept secure sums whose clients change from round to round, which only hide "
        "the uploads of a single round.",
    ),
]
SiteRecipe = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="The site mapping: columns, units and spellings of the site's files; by default "
        "site.toml next to them.",
    ),
]
AllowedMethods = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-method", metavar="NAME", help="Join only runs of this method; may be repeated."
    ),
]
AllowedColumns = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-column",
        metavar="NAME",
        help="Join only runs that read no other column; a column whose values leave as label, "
        "target, labels, task or client needs that role, as in diagnosis:label. May be "
        "repeated.",
    ),
]
Told = Annotated[
    list[str] | None,
    typer.Option(
        "--tell",
        metavar="WHAT",
        help="With --require-privacy: what may leave without noise: loss, timing, metrics, "
        "moments, labels, text, failure, bare, or a key of an upload; may be repeated.",
    ),
]
Scores = Annotated[
    str | None,
    typer.Option(
        metavar="none|N",
        help="How many models may be scored on the site's test examples, over all runs; with "
        "--require-privacy, none by default.",
    ),
]
RulesOf = Annotated[
    Path | None,
    typer.Option(
        "--rules",
        metavar="FILE",
        help="A TOML file with the site's conditions; its keys are the options --allow-method, "
        "--allow-column, --require-privacy, --min-cohort, --tell and --scores.",
    ),
]
Stays = Annotated[
    bool,
    typer.Option(
        "--stay",
        help="Stay, and join each run that the server's address serves, with states in "
        "STATE_DIR/<run>.",
    ),
]
AtOnce = Annotated[
    int, typer.Option(min=1, max=16, help="With --stay: how many runs to join at once.")
]
SeenRun = Annotated[str, typer.Option("--run-id", hidden=True)]
"""The run that a site which stays has seen, and no other."""
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Preprocess the files as the run asks, show the result, and do not join."
    ),
]
Check = Annotated[bool, typer.Option(help="Warn about data that look wrong.")]


def main(arguments: list[str] | None = None) -> None:
    """Run the command; a user's mistake is one line, never a traceback."""
    run_command(app, arguments, "FEDCLI")


@app.command()
def join(
    context: typer.Context,
    client_id: ClientIds,
    server: Server,
    data: DataRoot,
    recipe: SiteRecipe = None,
    dry_run: DryRun = False,
    state_dir: StateDir = Path("fedtide-state"),
    device: Device = "auto",
    give_up_after: GiveUpAfter = None,
    start_over: StartOver = False,
    code: OwnCode = None,
    weights: OwnWeights = None,
    deploy: Deploys = False,
    watch: WatchedForTasks = None,
    show_uploads: ShowUploads = None,
    show_tensors: ShowTensors = False,
    announce: Announce = "exact",
    require_privacy: RequirePrivacy = None,
    ledger: SiteLedger = None,
    ask: Ask = False,
    min_cohort: MinCohort = 0,
    changing_cohorts: ChangingCohorts = False,
    allow_method: AllowedMethods = None,
    allow_column: AllowedColumns = None,
    tell: Told = None,
    scores: Scores = None,
    rules: RulesOf = None,
    stay: Stays = False,
    at_once: AtOnce = 4,
    run_id: SeenRun = "",
    tls_ca: Authority = None,
    tls_cert: Certificate = None,
    tls_key: Key = None,
    tls_crl: Revoked = None,
    check: Check = True,
    strict: Strict = False,
    quiet: Quiet = False,
    log_level: Level = LogLevel.INFO,
    as_json: AsJson = False,
) -> None:
    """Take part in a run as one client, or as several hosted in this process."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    set_up_logging(LogLevel.WARNING if quiet else log_level, as_json=as_json)
    clients = clients_of(client_id)
    allowed = _rules(context)  # what is wrong with them is said at once
    if stay:
        return _stay(context, clients, allowed)
    from fedmodels.host.machine import keep_large_blocks

    keep_large_blocks()
    if dry_run:
        from fedcli.joining import try_on

        tls = tls_ca, tls_cert, tls_key
        if not try_on(
            clients, server, data, tls, tls_crl, recipe, give_up_after, state_dir.absolute().parent
        ):
            sys.exit(1)
        return
    from fedcli.joining import host_of
    from fedcli.runtime.shown import Shown
    from fedmodels.config.bounds import DETAILS

    show, how = None, next((how for how in DETAILS if how == announce), None)
    if how is None:
        raise ConfigError(f"--announce {announce!r} is none of {', '.join(DETAILS)}")
    if show_uploads is not None:
        where = None if show_uploads == "-" else Path(show_uploads)
        show = Shown(where, clients, tensors=show_tensors, asks=ask)
    elif show_tensors or ask:
        raise ConfigError("--show-tensors and --ask go with --show-uploads DIR")
    end_on_sigterm()
    host = host_of(
        clients, server, data, state_dir, _device(device), tls=(tls_ca, tls_cert, tls_key),
        give_up_after=give_up_after, start_over=start_over, deploys=deploy, code=code or (),
        weights=weights or (), incoming=watch, strict=strict, show=show, announce=how, crl=tls_crl,
        rules=allowed, ledger=ledger, recipe=recipe, run_id=run_id,
    )  # fmt: skip
    data = host.data
    try:
        if check or strict:
            from fedcli.data.sets.registry import is_published
            from fedcli.data.store.findings import tell_own

            if not is_published(data):
                tell_own(data, [c for c in clients if isinstance(c, int)], strict=strict)
        host.run()
    except DataError as error:
        if run_id:  # a site that stays tries again: its data may only be away
            raise
        raise ConfigError.like(error) from None  # the same command again is in vain
    except OSError as error:  # a disk that is full now may have room later
        raise ArchiveError(why_file_is_no_good(error) or str(error)) from None


def _stay(context: typer.Context, clients: list[ClientId], rules: Rules) -> None:
    """Take part in one run after the other, by the options of ``join``."""
    from fedcli.runtime.own_certificate import channel_credentials
    from fedcli.runtime.staying import Address, stay
    from fedmodels.config.places import check_address

    given = context.params
    check_address(server := given["server"], "--server")
    files = (given[f"tls_{of}"] for of in ("ca", "cert", "key"))
    credentials = partial(channel_credentials, *files)
    credentials()  # what is wrong with the files is said at once
    stay(context, Address(server, str(clients[0]), credentials), rules)


OF_RULES = ("allow_method", "allow_column", "require_privacy", "min_cohort", "changing_cohorts",
            "tell", "scores")  # fmt: skip
"""The options that say a site's conditions."""


def _rules(context: typer.Context) -> Rules:
    """Return the conditions of a site, as the options of a command say them."""
    from fedcli.gate.rules import Rules

    given = context.params
    return Rules.read(given["rules"], **{name: given[name] or () if name in _LISTS else given[name]
                                         for name in OF_RULES})  # fmt: skip


_LISTS = ("allow_method", "allow_column", "tell")


@app.command("rules")
def print_rules(
    context: typer.Context,
    rules: RulesOf = None,
    allow_method: AllowedMethods = None,
    allow_column: AllowedColumns = None,
    require_privacy: RequirePrivacy = None,
    min_cohort: MinCohort = 0,
    changing_cohorts: ChangingCohorts = False,
    tell: Told = None,
    scores: Scores = None,
) -> None:
    """Show the conditions under which a site joins runs."""
    for line in _rules(context).lines():
        typer.echo(line)


@app.command()
def enrol(
    server: Annotated[str, typer.Option(help="HOST:PORT of fedsrv certs serve.")],
    token_file: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="File with the token that fedsrv certs invite printed; by default "
            "FEDCLI_ENROL_TOKEN or standard input, because other users of the machine can "
            "see options.",
        ),
    ] = "-",
    directory: Annotated[Path, typer.Option("--dir", help="Where the files go.")] = Path("certs"),
) -> None:
    """Get a certificate with an invitation; the key is created here and never leaves."""
    from fedcli.runtime.certificate_request import enrol as get
    from fedcli.runtime.certificate_request import given_token
    from fedmodels.config.places import check_address

    check_address(server, "--server")
    for path in get(server, given_token(token_file), directory):
        typer.echo(path)


@app.command("add-task")
def add_new_task(
    source: Annotated[
        Path,
        typer.Argument(
            help="A folder with train/ and test/ (class folders or arrays), or recordings or "
            "photos like the client's first ones."
        ),
    ],
    client_id: Annotated[int, typer.Option(min=0, help="Whose task it is.")],
    data: DataOfTasks = None,
    state_dir: StateDir = Path("fedtide-state"),
    server: Annotated[
        str | None,
        typer.Option(help="HOST:PORT of the coordinator, which knows how to preprocess files."),
    ] = None,
    repeats: Annotated[
        str | None,
        typer.Option(
            metavar="skip|refuse|keep",
            help="What to do with examples of earlier tasks; by default as in the config.",
        ),
    ] = None,
    unusual: Annotated[
        str | None,
        typer.Option(
            metavar="tell|set-aside",
            help="What to do with a task unlike the earlier ones; by default as in the config, "
            "else report it.",
        ),
    ] = None,
    recipe: SiteRecipe = None,
    allow_column: AllowedColumns = None,
    rules: RulesOf = None,
    strict: Strict = False,
    tls_ca: Authority = None,
    tls_cert: Certificate = None,
    tls_key: Key = None,
    tls_crl: Revoked = None,
) -> None:
    """Add a task to a client's data, also during an open run, which then trains on it.

    With --allow-column, or --rules with allow_column, no other column is read, whatever the run's
    config says; with require_privacy in --rules, no config sets a task aside by its inputs. The
    other conditions of a site are for joining.
    """
    set_up_logging(LogLevel.INFO)
    from typing import get_args

    from fedcli.data.own.tables import NothingNew
    from fedcli.data.store.growing import add_task
    from fedcli.gate.rules import Rules
    from fedcli.runtime.announcer import how_cut
    from fedmodels.config.data import Repeats, Unusual

    rule = next((rule for rule in get_args(Repeats) if rule == repeats), None)
    if repeats is not None and rule is None:
        raise ConfigError(f"--repeats {repeats!r} is none of {', '.join(get_args(Repeats))}")
    odd = next((way for way in get_args(Unusual) if way == unusual), None)
    if unusual is not None and odd is None:
        raise ConfigError(f"--unusual {unusual!r} is none of {', '.join(get_args(Unusual))}")
    allowed = Rules.read(rules, allow_column=allow_column or ())
    root = _root_of(client_id, data, state_dir)
    if server is not None:
        tls = tls_ca, tls_cert, tls_key
        with closing(_link_to(server, tls, tls_crl, state_dir)) as link:
            how = how_cut(root, client_id, link, rules=allowed)
    else:
        how = how_cut(root, client_id, None, rules=allowed)
    try:
        added = add_task(
            root,
            client_id,
            source,
            *(how or ()),
            repeats=rule,
            unusual=odd,
            strict=strict,
            given=recipe,
        )
    except NothingNew as error:
        typer.echo(f"client {client_id}: {error}")
        return
    for line in added.notes:
        typer.echo(f"note: {line}", err=True)
    typer.echo(f"client {client_id}: {source} is taken: {added}")


@app.command("drop-task")
def drop_one_task(
    task: Annotated[int, typer.Argument(min=0, help="The number of the task, from 0.")],
    client_id: Annotated[int, typer.Option(min=0, help="Whose task it is.")],
    data: DataOfTasks = None,
    state_dir: StateDir = Path("fedtide-state"),
    why: Annotated[str, typer.Option(help="Reason, for the coordinator's log.")] = "",
) -> None:
    """Set a task of a client's data aside permanently; an open run continues without it.

    Works before and after the task was announced, and while the client is away. What the run has
    learned from it stays in the model.
    """
    set_up_logging(LogLevel.INFO)
    from fedcli.data.store.dropping import drop_task

    is_new = drop_task(_root_of(client_id, data, state_dir), client_id, task, why)
    typer.echo(f"client {client_id}: task {task} is set aside{'' if is_new else ' already'}")


@app.command("recover")
def recover_data(
    client_id: Annotated[int, typer.Option(min=0, help="Whose data they are.")],
    server: Server,
    data: DataOfTasks = None,
    state_dir: StateDir = Path("fedtide-state"),
    tls_ca: Authority = None,
    tls_cert: Certificate = None,
    tls_key: Key = None,
    tls_crl: Revoked = None,
) -> None:
    """Reconcile a client's data with its open run after they were restored from a backup.

    Stop the client first. Tasks that the run knows and the site lost are set aside, tasks that are
    new get numbers behind them, and the directory as it was stays beside.
    """
    set_up_logging(LogLevel.INFO)
    from fedcli.data.store.recovering import recover_tasks
    from fedmodels.facts.data_description import ClientFile, parsed
    from fedpb.tables import client_json_of

    root = _root_of(client_id, data, state_dir)
    with closing(_link_to(server, (tls_ca, tls_cert, tls_key), tls_crl, state_dir)) as link:
        reply = link.prepare(client_id, has_cut=True, wants_known=True)
    if not reply.HasField("known"):
        raise ConfigError(
            f"{server} cannot report what it knows about the data: update fedsrv there"
        )
    known = parsed(client_json_of(reply.known), f"{server}: its client {client_id}", ClientFile)
    typer.echo(f"client {client_id}: {recover_tasks(root, client_id, known)}")


def _link_to(
    server: str, tls: tuple[Path | None, Path | None, Path | None], crl: Path | None, states: Path
) -> Link:
    """Return a link to a coordinator, by the options of a command."""
    from fedcli.runtime.link import Link
    from fedcli.runtime.own_certificate import channel_credentials
    from fedmodels.config.places import check_address

    check_address(server, "--server")
    credentials = channel_credentials(*tls)
    if crl is not None:
        from fedpb.kept_lists import KeptLists
        from fedpb.server_check import ServerCheck

        lists = KeptLists(states.absolute().parent if states.exists() else None)
        ca, cert, key = tls
        ServerCheck(server, ca, crl, cert, key, kept=(lists.read, lists.keep))()
    return Link(server, credentials)


def _root_of(client: int, data: Path | None, state_dir: Path) -> Path:
    """Return the directory above a client's data: the named one, or what was cut of its files."""
    from fedcli.data.store.own_files import cut_before

    root = data or cut_before(state_dir / "own-data", client)
    if root is None:
        raise ConfigError(
            f"{state_dir / 'own-data'} has no data of client {client}: pass the parent of its "
            "directory with --data"
        )
    return root


def clients_of(text: str) -> list[ClientId]:
    """Read ``--client-id``: one id, a range with both ends, every n-th of it, or the evaluator.

    Raises:
        ConfigError: it is none of these.
    """
    if text == "evaluator":
        return ["evaluator"]
    found = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6})(?::([1-9][0-9]{0,5}))?)?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if found is None or first > last:
        raise ConfigError(
            f"--client-id {text!r} is no id, no range such as 0-24 or 0-24:2 (every second of it), "
            "not evaluator"
        )
    return list(range(first, last + 1, int(found[3] or 1)))


def _device(text: str) -> torch.device:
    import torch

    from fedmodels.config.places import check_gpu
    from fedmodels.host.devices import device_of

    check_gpu(text, 0 if text == "cpu" else torch.cuda.device_count())
    return device_of(text)


@app.command()
def partition(
    config: Config,
    out: Annotated[Path, typer.Option(help="Directory for the clients' data.")],
    sets: Sets = None,
    layout: Annotated[
        str | None,
        typer.Option(
            help="directories: one per client; store: a few files for all clients, the default "
            "above 200 clients."
        ),
    ] = None,
    picture: Annotated[
        bool, typer.Option(help="Also draw the partition, as OUT/partition.svg.")
    ] = True,
    strict: Strict = False,
) -> None:
    """Partition a data set among clients, and show the result."""
    from fedcli.data.store.commands import run_partition
    from fedcli.data.store.partition_writer import Layout
    from fedmodels.config.origin import data_and_scenario
    from fedmodels.facts.config_file import read_experiment

    if layout not in (None, *Layout):
        raise ConfigError(f"--layout {layout!r} is neither directories nor store")
    experiment = read_experiment(config, sets or ())
    method = experiment.method
    run_partition(
        *data_and_scenario(experiment),
        experiment.schedule.clients,
        experiment.seed,
        out,
        gather=method.pools_data,
        layout=Layout(layout) if layout else None,
        strict=strict,
    )
    if picture:
        from fedcli.data.store.commands import draw_partition

        typer.echo(f"picture: {draw_partition(out)}")


@app.command("export-partition")
def export(
    root: Annotated[Path, typer.Argument(metavar="DIR", help="A partition that is a store.")],
    out: Annotated[Path, typer.Option(help="Where to write one directory per client.")],
    client_id: Annotated[
        str | None, typer.Option(help="An id or a range such as 0-24; by default all clients.")
    ] = None,
) -> None:
    """Export clients of a store as directories, for example to move each to its machine."""
    from fedcli.data.store.commands import export_partition

    clients = clients_of(client_id) if client_id else None
    count = export_partition(root, out, clients)
    typer.echo(f"wrote {count} client directories to {out}")


@app.command()
def pretrain(
    config: Annotated[Path, typer.Argument(help="The experiment whose net is trained.")],
    out: Annotated[Path, typer.Option(help="The weights file to write, for net.weights.")],
    data: Annotated[
        list[str] | None, typer.Option(help="Data sets to pool; by default that of the config.")
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the pooled windows.")] = 200,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows of one step.")] = 128,
    lr: Annotated[float, typer.Option(min=1e-9, max=1.0, help="Learning rate of Adam.")] = 3e-4,
    mask: Annotated[float, typer.Option(help="Share of tokens that are masked.")] = 0.6,
    device: Device = "auto",
    sets: Sets = None,
) -> None:
    """Pre-train HART on unlabelled windows by masked autoencoding (FedAli)."""
    from fedcli.pretrain import Pretraining
    from fedcli.pretrain import pretrain as run
    from fedmodels.facts.config_file import read_experiment

    experiment = read_experiment(config, sets or ())
    how = Pretraining(epochs, batch_size, lr, mask)
    run(experiment, data or (), out, how, _device(device), typer.echo)
    typer.echo(f'written to {out}: start a run from it with [net] weights = "{out}"')


@app.command()
def predict(
    inputs: Annotated[
        list[Path] | None,
        typer.Argument(help="Photos, recordings (*.csv, *.parquet), directories of them, or .npy."),
    ] = None,
    run: RunOfModel = None,
    client: Annotated[
        int | None, typer.Option(min=0, help="The client whose model predicts.")
    ] = None,
    model: ModelFile = None,
    recipe: RecipeOfNew = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="A CSV file for all probabilities; by default predictions.csv for "
            "tables and folders."
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of classes to print.")] = 3,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per input.")
    ] = False,
    keep: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN", help="A column to copy to the output, such as an id."),
    ] = None,
    unknown: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            metavar="SHARE",
            help="Answer unknown if the most probable class has a lower probability, or the "
            "input is far from the training data.",
        ),
    ] = 0.0,
    watch: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Predict on each new file of a folder with the currently deployed model, into "
            "a CSV next to it, until Ctrl-C.",
        ),
    ] = None,
) -> None:
    """Predict classes with probabilities, or targets, for new files."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if watch is not None:
        if inputs or out or as_json or keep or unknown:
            others = "--out, --json, --keep, --unknown"
            raise ConfigError(f"--watch DIR answers beside files: leave out files, {others}")
        from fedcli.predicting.watching import WatchedFolder

        end_on_sigterm()
        for line in WatchedFolder(watch, live_model(run, client, model, recipe)).watch():
            typer.echo(line)
    if not inputs:
        raise ConfigError("pass photos, recordings, directories or .npy files, or --watch DIR")
    from fedcli.data.own.new_inputs import read_by
    from fedcli.predicting.prediction import are_many, personal_file, predictions, write_csv
    from fedmodels.nets.trained import TrainedModel

    whose = whose_model(run, client, model)
    file = whose if isinstance(whose, Path) else personal_file(*whose)
    trained = TrainedModel.load(file)
    if recipe is not None:
        trained.facts = read_by(recipe, trained.facts, file)
    for caveat in trained.caveats():
        typer.echo(f"note: {caveat}", err=True)
    found = predictions(trained, file, inputs, keep or (), unknown)
    out = out or (Path("predictions.csv") if are_many(inputs) and not as_json else None)
    lost = list[Path]()

    def noted() -> Iterator[Predictions]:
        for one in found:
            lost.extend([one.inputs.file] if one.inputs.why else [])
            yield one

    if out is None:
        for one in noted():
            for line in one.lines(top, as_json=as_json):
                typer.echo(line)
    else:
        for summary in write_csv(noted(), trained, out, keep or ()):
            typer.echo(summary)
        typer.echo(f"written to {out}")
    if lost:
        files = "1 file has" if len(lost) == 1 else f"{len(lost)} files have"
        typer.echo(f"{files} no prediction, unlike the others: {lost[0]}", err=True)
        sys.exit(1)


app.command()(rollback)


@app.command("data")
def list_data(as_json: AsRows = False) -> None:
    """List the built-in data sets: which are present, and how to get the others."""
    from fedcli.data.sets.registry import datasets_table, datasets_told

    show(datasets_told(), datasets_table, as_json)


@app.command("check")
def check_data(
    root: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="A partition or a client's directory; with --config, a site's own files.",
        ),
    ],
    config: Annotated[
        Path | None,
        typer.Option(help="The run's config, by which a site's own files are preprocessed."),
    ] = None,
    recipe: SiteRecipe = None,
    brief: Annotated[
        bool, typer.Option("--brief", help="Print only the warnings, one line per kind.")
    ] = False,
    strict: Strict = False,
    as_json: AsRows = False,
) -> None:
    """Check client directories: show their contents, errors, and how to fix them."""
    if as_json and (config is not None or brief or strict):
        raise ConfigError("--json is for clients' directories: leave out the other options")
    if config is not None:
        from fedcli.data.store.trying import check_files, tables_of
        from fedmodels.facts.config_file import read_experiment

        if brief or strict:
            raise ConfigError("--config reads files and tells all: leave out --brief and --strict")
        set_up_logging(LogLevel.INFO)
        experiment = read_experiment(config)
        if not check_files(root, tables_of(experiment), experiment.seed, recipe):
            sys.exit(1)
        return
    if recipe is not None:
        raise ConfigError("--recipe goes with --config: clients' directories are read already")
    if brief or strict:
        from fedcli.data.sets.registry import is_published
        from fedcli.data.store.findings import tell

        if not is_published(root):
            tell(root, strict=strict)
        return
    from rich.console import Console

    from fedcli.data.store.findings import inspect

    if not inspect(root, Console(), as_json=as_json):
        sys.exit(1)


if __name__ == "__main__":
    main()
