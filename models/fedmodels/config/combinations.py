"""The one table of parts: what switches each on, where its code stands, and who goes with whom.

A part is one capability that a config can leave out. No other file lists parts of the core, and
those of plugins join the list (:mod:`fedmodels.plugins`): coordinators and clients ask for their
halves (:func:`halves_of`), and a module is imported where a config asks for it.

Two parts whose pair stands in no table here go together, and a test runs each such pair. What a
part needs of its own keys (numbers, files) its own section checks. docs/combinations.md is written
from these tables.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

from fedmodels.config.bounds import Refusal
from fedmodels.config.experiment import Experiment
from fedmodels.config.part import Part, Side, in_their_places, parts_of_plugins
from fedmodels.config.schedule import FEW_HAVE_NEW
from fedmodels.errors import ConfigError


def _covers_inputs(e: Experiment) -> None:
    if e.privacy is not None:
        e.privacy.check_inputs(e.data, e.scenario)


def _sums_enough(e: Experiment) -> None:
    if e.privacy is not None and (masks := e.privacy.secure_sum):
        cohort = 1 if e.method.pools_data else e.cohort_size
        noisy = e.privacy.noise_at_clients
        masks.check_clients(e.server, cohort, e.min_clients, noisy=noisy)
        masks.check_fixed(e.schedule)


def _scores_rounds(e: Experiment) -> None:
    if not e.evaluate.every:
        raise ConfigError(f"[schedule] {e.schedule.stops} looks at scored rounds: let every be 1")


OF_THE_CORE: tuple[Part, ...] = (
    Part("poisson sampling", '[schedule] sampling = "poisson"',
         lambda e: e.schedule.sampling == "poisson", "differential-privacy.md"),
    Part("weighted sampling", '[schedule] sampling = "weighted"',
         lambda e: e.schedule.sampling == "weighted", "populations.md"),
    Part("over-selection", "[schedule] over_select",
         lambda e: e.schedule.over_select > 0, "populations.md"),
    Part("availability", "[schedule] availability",
         lambda e: e.schedule.availability is not None, "populations.md"),
    Part("open runs", "[schedule] open", lambda e: e.schedule.open, "streams.md",
         server="stages:OpenRuns", client="open_runs:OpenRuns",
         settles="config.open_changes:waits_for_most",
         resumes="config.open_changes:CHANGEABLE"),
    Part("participants", "[schedule] participants",
         lambda e: e.schedule.participants != "all", "streams.md"),
    Part("triggers", "[trigger]", lambda e: e.trigger is not None, "streams.md",
         changes={"trigger": "the next wait"}),
    Part("server data", "",
         lambda e: bool(part_at("fedmodels.methods:trains_at_server")(e)),
         server="server_data:ServerExamples"),
    Part("beginning", "", lambda e: e.net.begin_from is not None, server="beginning:Beginning"),
    Part("stopping", "[schedule] patience, target", lambda e: bool(e.schedule.stops),
         "metrics.md", _scores_rounds, server="stopping:Patience"),
    Part("unused data", "", server="unused_data:UnusedData"),
    Part("fewer clients", "[server] min_clients, deadline_s",
         lambda e: e.server.min_clients is not None, "reliability.md",
         lambda e: e.server.check_clients(e.schedule.clients),
         changes={
             "server.min_clients": "the next round",
             "server.deadline_s": "waits after the resume",
         }),
    Part("validation", "[data] validation_share",
         lambda e: e.data is not None and e.data.validation_share is not None, "metrics.md"),
    Part("repeats", "[data] repeats",
         lambda e: e.data is not None and e.data.repeats is not None, "data.md"),
    Part("unusual tasks", "[data] unusual",
         lambda e: e.data is not None and e.data.unusual is not None, "data.md"),
    Part("accumulated data", '[scenario] training_data = "accumulated"',
         lambda e: e.accumulates, "scenarios.md"),
    Part("reference run", "[evaluate] reference",
         lambda e: e.evaluate.reference is not None, "metrics.md", server="reference:Reference"),
    Part("changes", "", lambda e: bool(e.scenario and e.scenario.timelines),
         server="changes:Changes"),
    Part("rate of all rounds", "[training.lr_schedule] over rounds, without length",
         lambda e: e.training.follows_rounds, "configuration.md"),
    Part("trained by all", '[evaluate] trained = "all"',
         lambda e: e.evaluate.trained == "all", "metrics.md"),
    Part("class masks", "[evaluate] class_masks",
         lambda e: e.evaluate.class_masks, "metrics.md"),
    Part("robust rules", "[server] reduce", lambda e: e.server.is_robust, "robustness.md",
         lambda e: e.server.check_uploads(e.at_once, e.server.min_clients),
         server="robust:RobustRules", settles="training.hooks:ruled"),
    Part("noise at the server", '[privacy] level = "client"',
         lambda e: e.privacy is not None and e.privacy.noise_at_server,
         "differential-privacy.md", _covers_inputs,
         server="private_rounds:ClientPrivacy", client="privacy.clients:ClientPrivacy",
         settles="privacy.accounting:with_noise", refuses="config.privacy:REFUSED"),
    Part("noise at clients", '[privacy] level = "client", where = "clients"',
         lambda e: e.privacy is not None and e.privacy.noise_at_clients,
         "differential-privacy.md", _covers_inputs,
         server="private_rounds:ClientPrivacy", client="privacy.clients:ClientPrivacy",
         shared="training.private_uploads:NoiseOfClients",
         settles="privacy.accounting:with_noise", refuses="config.privacy:REFUSED"),
    Part("example privacy", '[privacy] level = "example"',
         lambda e: e.privacy is not None and e.privacy.hides_examples,
         "differential-privacy.md", _covers_inputs,
         server="example_privacy:ExamplePrivacy", client="privacy.examples:ExamplePrivacy",
         shared="training.private_steps:SpentPrivacy", tells=("epsilon", "epsilon_next"),
         refuses="config.privacy:REFUSED"),
    Part("hidden counts", "[privacy] announce", lambda e: e.announced != "exact",
         "privacy.md", fits="training.asked:check_announcement", refuses="config.privacy:REFUSED"),
    Part("compressed uploads", "[compression] up",
         lambda e: e.compression is not None and e.compression.up != "float32",
         "compression.md",
         client="compression:Compressed", shared="training.compression:Compression"),
    Part("compressed payloads", "[compression] down",
         lambda e: e.compression is not None and e.compression.down != "float32",
         "compression.md",
         client="compression:Compressed", shared="training.compression:Compression"),
    Part("zstd", "[compression] zstd", lambda e: e.zstd, "compression.md"),
    Part("secure sums", "[privacy] secure_sum", lambda e: bool(e.privacy and e.privacy.secure_sum),
         "secure-aggregation.md", _sums_enough, server="secure_rounds:SecureSums",
         client="secure_client:SecureSums", shared="training.secure_upload:SecureUpload",
         settles="training.secure_upload:summed", refuses="config.privacy:REFUSED"),
    Part("asynchronous rounds", '[schedule] order = "asynchronous"',
         lambda e: e.schedule.is_asynchronous, "asynchronous.md",
         server="buffered_rounds:AsynchronousRounds"),
    Part("odd uploads", "", server="odd_uploads:OddUploads"),
    Part("exclusion by hand", "", server="exclusions:Exclusions"),
    Part("exclusion by rule", "[server] exclude_after",
         lambda e: e.server.exclude_after is not None, "robustness.md",
         lambda e: e.server.check_exclusion(e.at_once), server="exclusions:Exclusions"),
    Part("final models", "", client="kept_models:FinalModel"),
    Part("deployment", "[deploy]", lambda e: e.deploy is not None, "serving.md",
         client="deployment:Deployment", is_beside=True,
         changes={"deploy": "the next model"}),
    Part("refused models", "", server="refused_models:RefusedModels"),
    Part("prequential scores", "[evaluate] prequential", lambda e: e.evaluate.prequential,
         "metrics.md", server="prequential:PrequentialScores",
         client="prequential:TestThenTrain", shared="parts.prequential:Prequential",
         tells=("prequential", "prequential_mae", "prequential_auroc")),
    Part("probabilities", "[evaluate] probabilities",
         lambda e: e.evaluate.probabilities, "metrics.md",
         client="probabilities:ProbabilityScores"),
    Part("numbers", "[data.columns] target",
         lambda e: bool(e.data and e.data.columns and e.data.columns.target), "regression.md",
         client="targets:TargetScores", settles="parts.targets:check_method",
         refuses="config.columns:REFUSED"),
    Part("several labels", "[data.columns] labels",
         lambda e: bool(e.data and e.data.columns and e.data.columns.labels), "regression.md",
         client="targets:TargetScores", settles="parts.targets:check_method",
         refuses="config.columns:REFUSED"),
    Part("pictures", "", lambda e: e.evaluate.pictures > 0, client="pictures:Pictures"),
    Part("server optimiser", "[server_optimizer]",
         lambda e: e.server_optimizer is not None, "configuration.md",
         fits="training.server_optimizer:check_server_optimizer"),
    Part("own loss", "[training] loss, label_smoothing, class_weights",
         lambda e: e.training.own_loss, "configuration.md", shared="training.criterion:OwnLoss",
         fits="training.criterion:check_own_loss"),
    Part("balanced weights", '[training] class_weights = "balanced"',
         lambda e: e.training.class_weights == "balanced", "configuration.md"),
    Part("clipped gradients", "[training] clip_norm",
         lambda e: e.training.clip_norm is not None, "configuration.md"),
    Part("rate of epochs", '[training.lr_schedule] over = "epochs"',
         lambda e: e.training.follows_epochs, "configuration.md"),
    Part("bfloat16", '[training] precision = "bfloat16"',
         lambda e: e.training.mixed_precision, "results/speed.md"),
    Part("frozen parts", "[net] frozen, adapters",
         lambda e: any({"frozen", "adapters"} & net.options().keys() for net in e.net.each),
         "nets.md"),
    Part("own nets", "[net] by_client", lambda e: e.net.by_client is not None, "nets.md",
         settles="training.own_nets:with_own_nets", fits="training.own_nets:check_own_nets"),
    Part("forgetting", "fedsrv serve --resume --forget", lambda e: False, "operations.md"),
)  # fmt: skip
"""The parts of the core. With those of plugins they stand in the order of every seam
(``ServerPart``, ``ClientPart``, ``SharedPart``).

The order counts where parts change one thing: a robust rule gives its result before noise is added
to it, noise forgets how far single uploads lie from others before odd ones are looked for, clients
add noise before they compress a difference, masks come last, and what is live is offered before
drift moves the net. What arrives meets the parts in the opposite order. Relays and forgetting are
no keys: clients join through the one, and an operator asks for the other.
"""
LISTED: tuple[Part, ...] = in_their_places(OF_THE_CORE, parts_of_plugins())
"""All parts, those of plugins among them, in that order."""
PARTS: Mapping[str, Part] = {part.name: part for part in LISTED if part.keys}
"""The parts that a config switches on, in the order of the page; the others are always there."""
BESIDE = frozenset(part.keys.strip("[]") for part in LISTED if part.is_beside)
"""Tables in which two runs of one experiment may differ."""
TOLD = frozenset(name for part in LISTED for name in part.tells)
"""The figures of all parts."""


def parts_on(experiment: Experiment) -> Iterator[Part]:
    """Yield the parts of a run, in their order."""
    return (part for part in LISTED if part.is_on(experiment))


def halves_of(experiment: Experiment, side: Side) -> Iterator[Any]:
    """Yield the classes of a side's half of each part of a run, in their order, each once.

    A module is imported here, where the config asks for it, and not before.

    Raises:
        ConfigError: this installation lacks one of them.
    """
    places = (part.at(side) for part in parts_on(experiment))
    yield from map(part_at, dict.fromkeys(filter(None, places)))


def part_at(place: str) -> Any:
    """Return what stands at a place, ``module:name``; it is imported when it is first asked for.

    Raises:
        ConfigError: this installation has no such module.
    """
    module, _, name = place.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module lacks another one
        raise ConfigError(
            f"the config asks for a part that this installation lacks: {module}"
        ) from None


HAS_NO_MEANING = '[schedule] {} has no meaning with order = "asynchronous"'
POISSON = '[schedule] sampling = "poisson" knows no over_select, no availability and no open run'
NO_LEVELS = (
    "[compression] up and down do not go with [privacy] secure_sum: masked numbers look random, "
    "and nothing of them can be left out"
)
SINGLE = (
    "[server] exclude_after looks at single uploads, and [privacy] {} hides them: leave it out; "
    "fedsrv exclude sets a client aside by hand"
)
REFUSED: tuple[Refusal, ...] = (
    Refusal(("poisson sampling", "over-selection"), POISSON),
    Refusal(("poisson sampling", "availability"), POISSON),
    Refusal(("poisson sampling", "open runs"), POISSON),
    Refusal(
        ("availability", "open runs"),
        "[schedule] availability has no effect with open = true: joined clients are available",
    ),
    Refusal(
        ("asynchronous rounds", "open runs"),
        "[training.lr_schedule] over rounds begins anew with each client's task of an open run, "
        "and asynchronous rounds are not those of each client: give over = \"epochs\"",
        when=lambda e: e.training.lr_schedule is not None and not e.training.follows_epochs,
        where="[training.lr_schedule] over rounds",
    ),
    Refusal(("asynchronous rounds", "poisson sampling"), HAS_NO_MEANING.format("sampling")),
    Refusal(("asynchronous rounds", "weighted sampling"), HAS_NO_MEANING.format("sampling")),
    Refusal(("asynchronous rounds", "over-selection"), HAS_NO_MEANING.format("over_select")),
    Refusal(("asynchronous rounds", "availability"), HAS_NO_MEANING.format("availability")),
    Refusal(("asynchronous rounds", "stopping"), HAS_NO_MEANING.format("{0.schedule.stops}")),
    Refusal(
        ("asynchronous rounds", "trained by all"),
        '[evaluate] trained = "all" needs rounds with a cohort: leave it out with order = '
        '"asynchronous"',
    ),
    Refusal(
        ("participants", "robust rules"),
        FEW_HAVE_NEW.format("[server] reduce = {0.server.reduce!r}"),
    ),
    Refusal(("participants", "exclusion by rule"), FEW_HAVE_NEW.format("[server] exclude_after")),
    Refusal(
        ("open runs", "accumulated data"),
        '[scenario] training_data = "accumulated" needs the data of all earlier tasks, and in an '
        "open run they may be gone: leave it out",
    ),
    Refusal(
        ("prequential scores", "accumulated data"),
        "[evaluate] prequential scores a task that nobody has trained on, and [scenario] "
        'training_data = "accumulated" puts earlier tasks among its data: leave one out',
    ),
    Refusal(
        ("open runs", "reference run"),
        "[evaluate] reference needs the rounds of a run that is not open",
    ),
    Refusal(
        ("open runs", "stopping"),
        "[schedule] {0.schedule.stops} would leave out what comes to an open run later: take "
        "fedsrv close or [trigger] close_after_s",
    ),
    Refusal(
        ("open runs", "rate of all rounds"),
        "[training.lr_schedule] ends with the run, and an open run has no last round: give length",
    ),
    Refusal(
        ("open runs", "forgetting"),
        "--forget computes a run again from its beginning, and data of earlier tasks of an open "
        "run may be gone: where all are there, begin a new run without the client, or after fedcli "
        "drop-task has marked the task at its site",
    ),
    Refusal(("secure sums", "compressed uploads"), NO_LEVELS),
    Refusal(("secure sums", "compressed payloads"), NO_LEVELS),
    *(Refusal(("exclusion by rule", f"noise at {where}"), SINGLE.format("level"))
      for where in ("the server", "clients")),
    Refusal(("exclusion by rule", "secure sums"), SINGLE.format("secure_sum")),
    Refusal(
        ("noise at clients", "compressed uploads"),
        '[privacy] where = "clients" sends float32: leave out [compression] up',
    ),
)  # fmt: skip

RESTS: Mapping[tuple[str, str], str] = {
    ("odd uploads", "noise at the server"): "which clients count would reveal single uploads",
    ("odd uploads", "noise at clients"): "which clients count would reveal single uploads",
    ("odd uploads", "secure sums"): "masks hide how far an upload is from the others",
}
"""A part that is on unless another one is, which it would contradict, and why it rests then."""

NEEDED: tuple[Refusal, ...] = (
    Refusal(("triggers", "open runs"), "[trigger] belongs to [schedule] open = true"),
    Refusal(("repeats", "open runs"), "[data] repeats belongs to [schedule] open = true"),
    Refusal(("unusual tasks", "open runs"), "[data] unusual belongs to [schedule] open = true"),
    Refusal(
        ("participants", "open runs"), "[schedule] participants belongs to [schedule] open = true"
    ),
    Refusal(
        ("stopping", "validation"),
        "[schedule] {0.schedule.stops} looks at a validation part: give [data] validation_share",
    ),
)
"""A part, and the other part that it does not go without."""


def refused_by(names: Collection[str]) -> list[Refusal]:
    """Return the refusals of pairs of some parts, and some others; sections are imported for it."""
    places = dict.fromkeys(PARTS[name].at("refuses") for name in names if name in PARTS)
    of_sections = (part_at(place) for place in places if place)
    return [*REFUSED, *itertools.chain.from_iterable(of_sections)]


def check_combinations(experiment: Experiment) -> None:
    """Check that all parts that a config switches on go together.

    Raises:
        ConfigError: names the first thing that is in the way.
    """
    for line in refusals(experiment):
        raise ConfigError(line)
    for part in PARTS.values():
        if part.is_on(experiment):
            part.check(experiment)


def refusals(
    experiment: Experiment, also: str = "", reads: Literal["", "each", "mean"] = ""
) -> Iterator[str]:
    """Yield the line of each pair of parts that an experiment asks for and that is refused.

    Args:
        experiment: the config.
        also: a part beside its own: ``forgetting``.
        reads: what the method's server half reads, where it is known.
    """
    on = {name for name, part in PARTS.items() if part.is_on(experiment) or name == also}
    for each in NEEDED:
        if each.pair[0] in on and each.pair[1] not in on:
            yield each.why.format(experiment)
    for each in refused_by(on):
        if {*each.pair} <= on and each.only in ("", reads) and each.when(experiment):
            yield each.why.format(experiment)
