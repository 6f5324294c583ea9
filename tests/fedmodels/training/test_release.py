"""What a release is named by: every part of it, and every setting of a run."""

from dataclasses import fields, replace

import pytest
from pydantic import BaseModel

from fedmodels.config.bounds import HERE
from fedmodels.config.combinations import BESIDE
from fedmodels.config.sent import settings_digest, whole_digest
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
