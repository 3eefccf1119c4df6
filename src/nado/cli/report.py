"""`nado report`: what a study measured, as one page."""

from pathlib import Path
from typing import Annotated

import typer

from nado.errors import InputError


def report_command(
    folder: Annotated[Path, typer.Argument(help="The folder of a study, or of an evaluation.")],
    out: Annotated[
        Path | None, typer.Option(help="Where to write it (default: report, in that folder).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a report that is there.")] = False,
) -> None:
    """Write what a study measured as one page.

    report.html, and the same as report.md and report.json; the page's path on stdout.
    """
    from nado.report import calibration_from_table, report_from_evaluation, write_report
    from nado.storage import read_json

    found = [path for path in (folder / "evaluate", folder) if (path / "evaluation.json").is_file()]
    if not found:
        raise InputError(
            "an evaluation", f"no evaluation.json in {folder}", "Run nado run, or nado evaluate --out FOLDER."
        )
    target = folder / "report" if out is None else out
    if (target / "report.html").exists() and not force:
        raise InputError(
            "a new report", f"one in {target}", "Choose another --out, or replace it with --force."
        )
    table = folder / "train" / "calibration.json"
    calibrations = (calibration_from_table("trained guide", read_json(table)),) if table.is_file() else ()
    report = report_from_evaluation(read_json(found[0] / "evaluation.json"), calibration=calibrations)
    typer.echo(str(write_report(report, target)))
