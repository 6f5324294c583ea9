"""Who may have a served model do what: web pages of others may not, and labels may need a token."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedcli.predicting.live_model import LiveModel
from fedmodels.errors import ConfigError
from fedplugins.serving.model_server import ModelServer
from fedplugins.serving.site import Site
from fedplugins.serving.tests.test_open_inference import tensor
from fedplugins.serving.tests.test_served_site import live, root
from fedplugins.serving.tests.test_serving import typed
from fedplugins.serving.tokens import tokens_in

__all__ = ["live", "root"]  # fixtures
JSON = {"Content-Type": "application/json"}
TOKEN, OTHER = "t" * 32, "o" * 32
INFER = {"inputs": [tensor([[1.0, 0.0]], (1, 2))]}
LABEL = {"id": "f" * 32, "inputs": [[1.0, 0.0]], "labels": ["no"]}
Ask = Callable[..., tuple[int, Any]]


@contextmanager
def asking(root: Path, live: LiveModel, **more: Any) -> Iterator[tuple[Ask, Site]]:
    """Return what posts JSON to a server that takes labels back, with no header of its own."""
    here = Site(root, 7, 100)
    server = ModelServer("127.0.0.1", 0, {"client-7": live}, sites={"client-7": here}, **more)
    end = server.begin("serve-model")

    def ask(path: str, told: Any, **headers: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        connection.request("POST", path, json.dumps(told).encode(), headers)
        answer = connection.getresponse()
        status, text = answer.status, answer.read()
        connection.close()
        return status, json.loads(text)

    ask.own = f"127.0.0.1:{server.port}"  # type: ignore[attr-defined]
    try:
        yield ask, here
    finally:
        end()
        here.end()


CALLS = [
    ("/predict", [[1.0, 0.0]]), ("/models/client-7/predict", [[1.0, 0.0]]),
    ("/feedback", LABEL), ("/models/client-7/feedback", LABEL),
    ("/v2/models/client-7/infer", INFER), ("/v2/models/client-7/versions/1/infer", INFER),
]  # fmt: skip


@pytest.mark.parametrize(("path", "told"), CALLS)
def test_a_page_of_another_origin_and_a_form_change_nothing(root, live, path, told):
    with asking(root, live) as (ask, here):
        for origin in ("http://evil.example", "null", "http://127.0.0.1:1", "file://", "", "x"):
            status, answer = ask(path, told, **JSON, Origin=origin)
            assert (status, [*answer]) == (403, ["error"]), origin
            assert "page of another origin" in answer["error"]
        simple = "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; x=y"
        for kind in simple:
            status, answer = ask(path, told, **{"Content-Type": kind})
            assert (status, [*answer]) == (415, ["error"]), kind
            assert "application/json" in answer["error"]
        if "infer" not in path:  # clients of the protocol may send none, which no form does
            assert ask(path, told)[0] == 415
        assert here.store is not None
        assert here.store.waiting == 0
        own = f"http://{ask.own}"  # type: ignore[attr-defined]
        assert ask(path, told, **JSON, Origin=own)[0] == 200
        assert ask(path, told, **{"Content-Type": "application/json; charset=utf-8"})[0] == 200


def test_labels_need_a_token_where_there_are_some(root, live):
    with asking(root, live, tokens=(TOKEN, OTHER)) as (ask, here):
        for wrong in ("", "Bearer", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer é", TOKEN):
            status, answer = ask("/feedback", LABEL, **JSON, Authorization=wrong)
            assert (status, [*answer]) == (401, ["error"])
            assert "--feedback-tokens" in answer["error"]
        assert ask("/feedback", LABEL, **JSON)[0] == 401
        assert here.store is not None
        assert here.store.waiting == 0
        for token in (TOKEN, OTHER):
            assert ask("/feedback", LABEL, **JSON, Authorization=f"Bearer {token}")[0] == 200
        assert ask("/predict", [[1.0, 0.0]], **JSON)[0] == 200


def test_labels_of_other_machines_need_a_token(root, live, tmp_path, capsys):
    words = "serve-model", "--run", tmp_path / "states", "--client", 7, "--data", root
    far = "--listen", "0.0.0.0:0", "--insecure"
    assert typed(*words, *far, "--feedback", 10) == 2
    assert "--feedback-tokens FILE" in capsys.readouterr().err
    assert not (root / "7/served.db").exists()
    assert typed(*words, "--listen", 0, "--feedback-tokens", tmp_path / "none") == 2
    assert "--feedback-tokens is for --feedback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "holds no token"), ("# none\n\n", "holds no token"),
        ("short\n", "line 1: a token has"),
        (f"{TOKEN}\n{TOKEN} x\n", "line 2: a token has"), (f"{TOKEN}é", "line 1: a token has"),
    ],
)  # fmt: skip
def test_a_file_of_tokens_says_what_is_wrong_with_it(tmp_path, text, line):
    (tmp_path / "tokens").write_text(text)
    with pytest.raises(ConfigError, match=line):
        tokens_in(tmp_path / "tokens")
    with pytest.raises(ConfigError, match="cannot be read"):
        tokens_in(tmp_path / "none")
    (tmp_path / "tokens").write_text(f"# of the ward\n{TOKEN}\n\n{OTHER}\n")
    assert tokens_in(tmp_path / "tokens") == (TOKEN, OTHER)
