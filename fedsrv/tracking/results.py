"""The files of a finished run that a tracker keeps: its page, and everybody's model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedmodels.errors import ArchiveError
from fedsrv.report.run_record import read_run
from fedsrv.report.tables import write_html
from fedsrv.trained_models import global_model


def results_of(run: Path, place: Path) -> Sequence[Path]:
    """Write the files of a finished run to a directory, and return them.

    Clients' models stay with the clients.
    """
    page, model = place / "report.html", place / "global.safetensors"
    write_html([read_run(run)], page)
    try:
        global_model(run).save(model)
    except ArchiveError:  # the method has none
        return [page]
    return [page, model]
