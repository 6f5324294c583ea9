import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmodels.printable import printable, without_places


def test_controls_are_escaped_and_letters_stay():
    assert printable("Größe 3 × 4: „gut“") == "Größe 3 × 4: „gut“"
    assert printable("\x1b[2J\r\nerror: \x00") == "\\x1b[2J\\r\\nerror: \\x00"
    assert printable("\u202e\u2028\ud800\x9b") == "\\u202e\\u2028\\ud800\\x9b"


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
