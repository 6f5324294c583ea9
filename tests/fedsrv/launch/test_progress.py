import io

from rich.console import Console

from fedsrv.launch.progress import Display


def shown(terminal, reason):
    out = io.StringIO()
    with Display("a run", Console(file=out, force_terminal=terminal, width=120)) as display:
        display.take({"kind": "failed", "client": "2", "detail": {"reason": reason}})
    return out.getvalue()


def test_what_a_client_says_is_neither_markup_nor_control():
    """Markup that does not close would end the launcher."""
    for terminal in (False, True):
        text = shown(terminal, "[/nothing] \x1b]0;forged\x07 [red]x")
        assert "client 2 failed: [/nothing] \\x1b]0;forged\\x07 [red]x" in text
        assert "\x1b]0;" not in text
