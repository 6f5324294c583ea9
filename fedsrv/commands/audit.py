"""``fedsrv audit`` and ``verify``: what happened in a run, and whether its history was edited."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fedmodels.console.options import AsRows

audit_app = typer.Typer()
Run = Annotated[Path, typer.Argument(help="The run directory, or a relay's --audit directory.")]


@audit_app.command()
def audit(
    run: Run,
    client: Annotated[str | None, typer.Option(help="Only lines about this client.")] = None,
    what: Annotated[
        str | None, typer.Option(help="Only lines of this kind, such as refused.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the lines as stored.")] = False,
) -> None:
    """Show who joined, sent results, was rejected or steered the run; check the log's chain.

    Ends with 1 and a line if something was changed, removed or moved.
    """
    from fedmodels.console.printable import json_text
    from fedmodels.errors import ArchiveError
    from fedsrv.state.audit import AUDIT, Broken, read, text_of
    from fedsrv.state.verification import verified, verified_log

    if not (run / AUDIT).is_file():
        raise ArchiveError(f"{run} holds no {AUDIT}")
    try:
        for entry in read(run / AUDIT):
            facts = entry.facts
            if client not in (None, str(facts.get("client"))) or what not in (None, facts["what"]):
                continue
            typer.echo(json_text(dict(facts)) if as_json else text_of(facts))
    except Broken as error:
        sys.stdout.flush()
        raise ArchiveError(f"{run / AUDIT}: {error}") from None
    found = verified(run) if (run / "run.db").exists() else verified_log(run)
    if wrong := [line for line in found.wrong if line.startswith(AUDIT)]:
        raise ArchiveError(f"{run}: {'; '.join(wrong)}")


@audit_app.command()
def verify(
    run: Run,
    head: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER:LINK", help="A head that a client or fedsrv status showed before."
        ),
    ] = None,
    as_json: AsRows = False,
) -> None:
    """Check run.db, states, files and audit log against the run's history.

    Somebody who edits all of them alike is noticed by a head that others have kept.
    """
    from fedmodels.errors import ArchiveError
    from fedsrv.state.audit import AUDIT
    from fedsrv.state.chain import read_head
    from fedsrv.state.verification import verified, verified_log

    is_relay = not (run / "run.db").exists() and (run / AUDIT).is_file()
    kept = read_head(head) if head else None
    found = verified_log(run, kept) if is_relay else verified(run, kept)
    if as_json:
        from fedmodels.console.rows import Verification

        told = Verification(
            run=str(run), holds=not found.wrong, lines=found.lines, wrong=found.wrong,
            notes=[*found.notes], statements=None if is_relay else found.head.number,
            head=f"{found.head.number}:{found.head.link.hex()}",
        )  # fmt: skip
        typer.echo(told.model_dump_json(indent=1))
        sys.exit(ArchiveError.exit_code if found.wrong else 0)
    for line in found.notes:
        typer.echo(f"{run}: {line}")
    if found.wrong:
        for line in found.wrong[:-1]:
            typer.echo(f"{run}: {line}", err=True)
        raise ArchiveError(f"{run}: {found.wrong[-1]}")
    statements = "" if is_relay else f"{found.head.number} statements and "
    typer.echo(f"{run}: {statements}{found.lines} lines of audit hold")
    typer.echo(f"head: {found.head.number}:{found.head.link.hex()}")
