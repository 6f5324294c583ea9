import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmodels.console.log_lines import JsonFormatter, PlainFormatter
from fedmodels.console.printable import printable, without_places


def test_controls_are_escaped_and_letters_stay():
    assert printable("Größe 3 × 4: „gut“") == "Größe 3 × 4: „gut“"
    assert printable("\x1b[2J\r\nerror: \x00") == "\\x1b[2J\\r\\nerror: \\x00"
    assert printable("\u202e\u2028\ud800\x9b") == "\\u202e\\u2028\\ud800\\x9b"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("at https://ann:s3cret@flow.example/x: no", "at https://***@flow.example/x: no"),
        ("sqlite:////srv/run/mlflow.db", "sqlite:////srv/run/mlflow.db"),
        (
            "'https://token@h/' and http://h/?a=1&api_key=k3y&b",
            "'https://***@h/' and http://h/?a=1&api_key=***&b",
        ),
        ("http://h/?X-Token=k3y;pwd=p w", "http://h/?X-Token=***;pwd=***"),
        ("no: http://ann:pass word@h/x", "no: http://***@h/x"),
        ("http://h/?api_key = k3y more: timed out", "http://h/?api_key =***: timed out"),
        ("http://h/?a=1& api-key=k3y", "http://h/?a=1& api-key=***"),
        (
            "retries with url: /x?api_key=k3y (Caused by 1)",
            "retries with url: /x?api_key=*** (Caused by 1)",
        ),
        ("h/x#access_token=k3y", "h/x#access_token=***"),
        ("h/x?key=k3y, and h:5055/x?sig=k3y", "h/x?key=***, and h:5055/x?sig=***"),
        (
            "http://h:5055 is none; ask ann@example.org",
            "http://h:5055 is none; ask ann@example.org",
        ),
        ("lr = 0.1 and monkey=3, a?b = c", "lr = 0.1 and monkey=3, a?b = c"),
        ("ann@example.org at http://h:1/a@b", "ann@example.org at http://h:1/a@b"),
    ],
)
def test_a_url_has_no_password(text, told):
    assert printable(text) == told
    made = logging.makeLogRecord({"msg": text, "levelname": "INFO"})
    assert PlainFormatter("%(message)s").format(made) == told
    assert json.loads(JsonFormatter().format(made))["detail"]["line"] == told


def test_a_password_is_left_out_before_a_text_is_cut():
    assert "s3cr" not in printable("x" * 980 + " https://ann:s3cret-and-long@flow.example")


def test_long_text_is_cut():
    assert printable("x" * 5000, most=10) == "xxxxxxxxx…"
    assert len(printable("\x1b" * 5000)) <= 1000


@given(st.text())
def test_whatever_comes_is_one_printable_line(text):
    found = printable(text)
    assert found.isprintable()
    assert len(found) <= 1000


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("/srv/ann/ward 7/3/task-0/x.npy is damaged", "3/task-0/x.npy is damaged"),
        ("OSError: [Errno 28] full: '/var/lib/x/s-1.bin'", "OSError: [Errno 28] full: 's-1.bin'"),
        (r"C:\Users\ann\data\x.npy is missing", "x.npy is missing"),
        ("mine/3/client.json, and (/tmp/a/b)", "3/client.json, and (b)"),
        ("tensor 'weights/base/conv1.weight' of task/0", None),
        ("loss is 3e4 / step, see https://example.org/a/b", None),
    ],
)
def test_a_line_that_leaves_names_no_place(text, told):
    found = without_places(text, ["/srv/ann/ward 7", "mine"])
    assert found == (text if told is None else told)
