"""What a plugin's part adds to a config, and what becomes of it where the plugin is gone."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from fedmodels import plugins
from fedmodels.config import part as module
from fedmodels.config.bounds import Place, StrictTable
from fedmodels.config.combinations import OF_THE_CORE
from fedmodels.config.evaluate import Evaluate
from fedmodels.config.experiment import Experiment
from fedmodels.config.part import (
    Part,
    in_their_places,
    parts_of_plugins,
    with_keys,
    with_plugins,
    without_gone,
)
from fedmodels.config.sent import table_in, without_places
from fedmodels.errors import ConfigError
from fedmodels.facts.resolution import received_experiment
from fedmodels.numerics.metric_tables import OF_PLUGINS
from tests.conftest import TABLES


def test_places_are_below_a_room_of_the_core_or_below_the_plugin():
    ours = Part("a", "[a]", server="a:Half", client="a:Half", shared="t.a:Half", fits="t.a:fits")
    assert ours.at("server") == "fedsrv.parts.a:Half"
    assert ours.at("client") == "fedcli.parts.a:Half"
    assert ours.at("shared") == "fedmodels.t.a:Half"
    assert ours.at("fits") == "fedmodels.t.a:fits"
    assert ours.at("settles") == ""
    brought = Part("b", "[b]", server="half:Half", fits="half:fits", home="fedplugins.b")
    assert brought.at("server") == "fedplugins.b.half:Half"
    assert brought.at("fits") == "fedplugins.b.half:fits"


def test_a_part_of_a_plugin_stands_behind_the_one_that_it_names():
    a, b = Part("a", ""), Part("b", "")
    after_a, last = Part("c", "", after="a"), Part("d", "", after="nobody")
    assert [p.name for p in in_their_places([a, b], [after_a, last])] == ["a", "c", "b", "d"]


class Sounds(StrictTable):
    """``[sounds]``."""

    on: bool = False
    """Whether."""
    file: Place = None
    """Which."""


@pytest.fixture
def sounding(monkeypatch) -> type[Experiment]:
    """Return the class of a config with the table of a plugin."""
    of_plugin = ModuleType("of_a_plugin.table")
    of_plugin.Sounds = Sounds
    monkeypatch.setitem(sys.modules, "of_a_plugin.table", of_plugin)
    part = Part("sounds", "[sounds]", home="of_a_plugin", tables={"sounds": "table:Sounds"})
    monkeypatch.setattr(module, "parts_of_plugins", lambda: (part,))
    return with_plugins(Experiment)


def test_a_table_of_a_plugin_has_its_defaults_and_sends_no_path(sounding):
    assert sounding.model_validate(TABLES).sounds == Sounds()
    given = {**TABLES, "sounds": {"on": True, "file": "/a/place"}}
    assert sounding.model_validate(given).sounds == Sounds(on=True, file="/a/place")
    assert without_places(given, sounding)["sounds"] == {"on": True}
    assert (sounding.__name__, sounding.__doc__) == ("Experiment", Experiment.__doc__)


def test_keys_for_a_table_that_takes_none_are_refused_and_not_ignored(monkeypatch):
    of_plugin = ModuleType("of_a_plugin.table")
    of_plugin.Sounds = Sounds
    monkeypatch.setitem(sys.modules, "of_a_plugin.table", of_plugin)
    part = Part("sounds", "[server] on", home="of_a_plugin", tables={"server": "table:Sounds"})
    monkeypatch.setattr(module, "parts_of_plugins", lambda: (part,))
    with pytest.raises(
        ConfigError, match=r"adds keys to \[server\], and may to \[evaluate\] alone"
    ):
        with_plugins(Experiment)


@pytest.fixture
def gone(monkeypatch) -> None:
    """Have the plugin of ``[sounds]`` be one of fedtide's whose folder was deleted."""
    tables = {"sounds": {"on": False, "level": 2}, "evaluate": {"loud": False, "hall": None}}
    brings = {"tables": tables, "owns": ["sounds"], "beside": ["sounds"]}
    really = {name: plugins.known()[name] for name, _ in plugins.gone_plugins()}
    monkeypatch.setattr(plugins, "known", lambda: {**really, "sounds": brings})


@pytest.mark.usefixtures("gone")
@pytest.mark.parametrize(
    ("given", "stays"), [({}, False), ({"on": False}, False), ({"on": False, "level": 2}, False)]
)
def test_a_table_of_a_plugin_that_is_gone_is_left_out_at_its_defaults(given, stays):
    assert without_gone({"seed": 3, "sounds": given}) == {"seed": 3}


@pytest.mark.usefixtures("gone")
@pytest.mark.parametrize("given", [{"on": True}, {"on": 0}, {"loud": False}, True, [1]])
def test_a_table_that_asks_for_a_plugin_that_is_gone_is_refused_by_its_name(given):
    line = r"\[sounds\] is of the plugin sounds, which this installation lacks"
    with pytest.raises(ConfigError, match=line):
        without_gone({"sounds": given})


@pytest.mark.usefixtures("gone")
def test_a_key_of_a_plugin_that_is_gone_is_left_out_of_a_table_of_the_core():
    assert without_gone({"evaluate": {"loud": False, "every": 2}}) == {"evaluate": {"every": 2}}
    line = r"\[evaluate\] loud is of the plugin sounds, which this installation lacks"
    with pytest.raises(ConfigError, match=line):
        without_gone({"evaluate": {"loud": True}})
    assert without_gone({"evaluate": {"of_nobody": 1}}) == {"evaluate": {"of_nobody": 1}}


class Louder(StrictTable):
    """Keys of a plugin in a table of the core."""

    loud: bool = False
    """Whether."""
    hall: int | None = None
    """Where."""


def test_keys_of_a_plugin_join_a_table_of_the_core(monkeypatch):
    of_plugin = ModuleType("of_a_plugin.table")
    of_plugin.Louder = Louder
    monkeypatch.setitem(sys.modules, "of_a_plugin.table", of_plugin)
    part = Part("loud", "[evaluate] loud", home="of_a_plugin", tables={"evaluate": "table:Louder"})
    monkeypatch.setattr(module, "parts_of_plugins", lambda: (part,))
    made = with_keys(Evaluate, "evaluate")
    assert made.model_validate({"every": 2, "loud": True}).loud
    assert (made().loud, made.__name__, made.__doc__) == (False, "Evaluate", Evaluate.__doc__)
    assert [*made.model_fields][-2:] == ["loud", "hall"]


@pytest.mark.usefixtures("gone")
def test_a_client_does_without_a_table_that_decides_nothing_of_its_uploads():
    sent = {**TABLES, "sounds": {"on": True}}
    assert received_experiment(sent, "the server's", ()).method.name == TABLES["method"]["name"]
    with pytest.raises(ConfigError, match="which this installation lacks"):
        without_gone(sent)


def test_the_core_has_no_part_of_a_plugin():
    assert [part.name for part in OF_THE_CORE if part.home or part.tables or part.after] == []


@pytest.mark.needs("reference")
@pytest.mark.parametrize("part", parts_of_plugins(), ids=lambda part: part.name)
def test_each_table_of_a_plugin_is_one_of_a_config_and_explained(part):
    from fedplugins.reference.catalogue import meanings_of

    for name in part.tables:
        field = Experiment.model_fields[name]
        table = table_in(field.annotation, {})
        assert table is not None, f"{name} would send its paths"
        about = meanings_of(table)
        assert {key for key in table.model_fields if not about.get(key)} == set()
    for place in ("panels", "lines", "refuses", "settles", "fits", "resumes"):
        assert not part.at(place) or plugins.part_of(part.at(place)) is not None
    assert {*part.tells, *part.computes} <= {figure.name for figure in OF_PLUGINS}
    assert part.home, "a plugin's places are below its package"
