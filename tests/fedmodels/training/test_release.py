"""What a release is named by: every part of it, and every setting of a run."""

from dataclasses import fields, replace

import pytest
from pydantic import BaseModel

from fedmodels.config.bounds import HERE
from fedmodels.config.combinations import BESIDE
from fedmodels.config.experiment import Experiment
from fedmodels.config.sent import settings_digest, tables_in, whole_digest
from fedmodels.config.training import Training
from fedmodels.numerics.secrecy import Secret
from fedmodels.training.release import Release
from tests.conftest import tiny_experiment

ONE = Release("train", "here", b"settings", "payload", "state", b"contents", b"labels")
KEY = Secret(b"k" * 32)


@pytest.mark.parametrize("part", [field.name for field in fields(Release)])
def test_each_part_of_a_release_is_in_its_name(part):
    value = getattr(ONE, part)
    changed = replace(ONE, **{part: value + (b"." if isinstance(value, bytes) else ".")})
    assert changed.name(KEY) != ONE.name(KEY)
    assert replace(ONE).name(KEY) == ONE.name(KEY)


def test_nobody_without_the_secret_names_a_release():
    assert ONE.name(Secret(b"o" * 32)) != ONE.name(KEY)


def test_no_part_runs_into_the_next():
    moved = replace(ONE, payload="payloads", state="tate")
    assert moved.name(KEY) != ONE.name(KEY)


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_every_key_of_an_experiment_tells_a_release_from_another():
    """Of all that crosses the wire, set or not; what a client itself settles is beside it."""
    whole = tiny_experiment(privacy={"announce": "exact"}, compression={"zstd": False})
    known, looked = whole_digest(whole), 0
    for name, field in type(whole).model_fields.items():
        held = getattr(whole, name)
        if name in BESIDE or HERE in field.metadata:
            continue
        inner = type(held).model_fields if isinstance(held, BaseModel) else {}
        for key, of in inner.items():
            if HERE not in of.metadata:
                changed = held.model_copy(update={key: "another"})
                assert whole_digest(whole.model_copy(update={name: changed})) != known, key
                looked += 1
        if not inner:
            assert whole_digest(whole.model_copy(update={name: "another"})) != known, name
    assert looked > 100


def test_settings_that_a_resumed_run_may_change_tell_a_release_from_another():
    """Those of secure sums hold all through a run; custom code may read these as well."""
    whole = tiny_experiment()
    longer = whole.model_copy(update={"schedule": whole.schedule.model_copy(update={"rounds": 9})})
    assert settings_digest(longer) == settings_digest(whole)
    assert whole_digest(longer) != whole_digest(whole)


class FurtherTraining(Training):
    """As a later release may have it."""

    warm_up: int | None = 3
    further: bool = False


class FurtherExperiment(Experiment):
    """As a later release may have it."""

    training: FurtherTraining = FurtherTraining()
    further: bool = False


def test_a_key_that_a_release_adds_gives_no_release_another_name():
    """Else a run that goes on under it would have other noise, and pay twice for what it repeats.

    Every other value of the key does, also that there is none.
    """
    tables = tiny_experiment().to_dict()
    for digest in (settings_digest, whole_digest):
        known = digest(Experiment.model_validate(tables))
        assert digest(FurtherExperiment.model_validate(tables)) == known
        assert digest(FurtherExperiment.model_validate({**tables, "further": True})) != known
        for key, value in (("further", True), ("warm_up", 4), ("warm_up", None)):
            more = {**tables, "training": {**tables["training"], key: value}}
            assert digest(FurtherExperiment.model_validate(more)) != known


def test_names_of_releases_stay_from_one_release_to_the_next():
    """A run that began before an upgrade goes on with the same noise.

    Who changes this raises NOISE in fedsrv/parts/private_rounds.py, so that such a run says so.
    """
    privacy = {"level": "client", "where": "clients", "noise_multiplier": 1.0, "delta": 1e-3}
    known = whole_digest(tiny_experiment(privacy={**privacy, "clip": 0.5}))
    assert replace(ONE, settings=known).name(KEY) == "8674d6ff4c85ad071f3c334eccd5beeb"


def test_a_kind_of_table_is_told_also_where_all_its_keys_are_at_their_defaults():
    tables, looked = [Experiment], 0
    while tables:
        for name, field in tables.pop().model_fields.items():
            inner = tables_in(field.annotation)
            tables += inner
            if len(inner) > 1:
                for table in inner:
                    assert table.model_fields["kind"].is_required(), name
                    looked += 1
    assert looked > 5
