from hypothesis import given
from hypothesis import strategies as st

from fedmodels.printable import printable


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
