"""`nado compare`: a study's guide against what one would have done without it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from nado.cli.console import print_json, print_table, quieten, say


def compare_command(
    study: Annotated[Path, typer.Argument(help="The study file (TOML).")],
    folder: Annotated[
        Path | None, typer.Option(help="Where the stages are kept (default: beside the file, with its name).")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Replace a value: --set compare.training_texts=2000. Repeatable."),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(help="Methods, separated by commas: fudge,rejection. q and base are always among them."),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Evaluate only the first so many prompts.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Make again what was made from something else.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Compare a study's guide with other methods on the same prompts, seeds and budget.

    The study is run as far as its guide, where that is not there yet. Texts of every method are kept in
    compare/<method>, and comparison.json, report.html, report.md and report.json in compare.
    """
    from nado.study.reading import read_study

    read = read_study(study, settings or ())
    quieten()
    from nado.study.comparison import compare_study

    place = folder if folder is not None else study.with_suffix("")
    names = None if only is None else [name.strip() for name in only.split(",") if name.strip()]
    comparison = compare_study(read, place, only=names, limit=limit, force=force, say=say)
    if as_json:
        print_json(comparison)
    else:
        _print_tables(comparison)
        typer.echo(str(place / "compare" / "report.html"))


def _print_tables(comparison: Mapping[str, Any]) -> None:
    """The page's first table, what it took, and what was left out."""
    from nado.report.comparisons import list_notes, report_from_comparison
    from nado.report.tables import Cell, cost_table, headline_table

    report = report_from_comparison(comparison)
    tests = {each.first: each.result for each in reversed(report.pairs) if each.result.name == "satisfied"}
    first, second = headline_table(report), cost_table(report)

    def write(cell: Cell) -> str:
        return f"{cell.text} {cell.detail}".strip() if "[" in cell.detail else cell.text

    heads = [cell.text for cell in first.heads]
    rows = [[row[0].text, *(write(cell) for cell in row[1:])] for row in first.rows]
    for row, system in zip(rows, report.systems, strict=True):
        row.insert(2, _difference(tests.get(system.name)))
    heads.insert(2, f"− {comparison['reference']}")
    print_table(heads, rows, f"{comparison['oracle']}: {comparison['prompts']} prompts")
    print_table(
        ["system", "settings", *(cell.text for cell in second.heads[1:])],
        [[row[0].text, row[0].detail or "–", *(cell.text for cell in row[1:])] for row in second.rows],
        "Cost: base tokens, seconds",
    )
    for note in list_notes(comparison):
        typer.echo(note)


def _difference(found: Any) -> str:
    """A paired difference in percentage points and how likely luck would make it."""
    if found is None or found.difference is None:
        return "–"
    p_value = "n too small" if found.p_value is None else f"p = {found.p_value:.3g}"
    return f"{100 * found.difference:+.1f} ({p_value})"
