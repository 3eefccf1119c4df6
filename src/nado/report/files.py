"""A report's files: report.json, report.md and report.html, each whole or not there."""

from collections.abc import Callable
from pathlib import Path

from nado.report.content import Report
from nado.report.markdown import render_markdown
from nado.report.page import render_page
from nado.storage import read_json, write_atomically, write_json


def write_report(report: Report, folder: str | Path) -> Path:
    """Write the three files into `folder` and return the page's path."""
    folder = Path(folder)
    # All are made before the first is written: a report that cannot be shown leaves an older one alone.
    record, text, page = report.to_json(), render_markdown(report), render_page(report)
    write_json(folder / "report.json", record)
    write_atomically(folder / "report.md", _writer(text))
    write_atomically(folder / "report.html", _writer(page))
    return folder / "report.html"


def read_report(path: str | Path) -> Report:
    """A report from its report.json, or from the folder that holds it."""
    path = Path(path)
    return Report.from_json(read_json(path / "report.json" if path.is_dir() else path))


def _writer(text: str) -> Callable[[Path], None]:
    def write(partial: Path) -> None:
        partial.write_text(text, encoding="utf-8", newline="\n")

    return write
