"""A launch builds the net once before anybody starts."""

import json

import pytest

from fedmodels.errors import ConfigError
from fedmodels.facts.config_file import parse_experiment
from fedsrv.launch.given_data import check_net

CONFIG = "[net]\nname = 'mlp'\nhidden = {}\n[method]\nname = 'fedavg'"


def test_a_wrong_option_of_the_net_is_told_before_clients_start(tmp_path):
    (tmp_path / "0").mkdir()
    problem = {"input_shape": [1, 8, 8], "num_classes": 10}
    (tmp_path / "0" / "client.json").write_text(json.dumps(problem))
    check_net(parse_experiment(CONFIG.format("[4]")), tmp_path)
    with pytest.raises(ConfigError, match=r"hidden = 'abc' for inputs \(1, 8, 8\)"):
        check_net(parse_experiment(CONFIG.format("'abc'")), tmp_path)


def test_a_damaged_description_is_left_to_its_client(tmp_path):
    check_net(parse_experiment(CONFIG.format("[4]")), tmp_path)
