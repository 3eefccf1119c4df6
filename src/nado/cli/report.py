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
    from nado.report import write_report
    from nado.study.reporting import report_study

    target = folder / "report" if out is None else out
    if (target / "report.html").exists() and not force:
        raise InputError(
            "a new report", f"one in {target}", "Choose another --out, or replace it with --force."
        )
    typer.echo(str(write_report(report_study(folder), target)))
