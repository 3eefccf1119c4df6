"""`nado check`: every mistake in a study, before it costs anything."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nado.cli.console import print_json, quieten

if TYPE_CHECKING:
    from nado.study.estimate import Estimate


def check_command(
    study: Annotated[Path, typer.Argument(help="The study file (TOML).")],
    folder: Annotated[
        Path | None, typer.Option(help="Where the stages are kept (default: beside the file, with its name).")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Replace a value: --set train.steps=100. Repeatable.")
    ] = None,
    guide: Annotated[
        Path | None, typer.Option(help="A guide that shall be used beside the study's base.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="As for run: stages made from something else are no mistake.")
    ] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Load the base and draw a few texts, to time it.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Find every mistake in a study file, and estimate what it will take.

    One mistake a line, and exit code 1 if there are any. No weights are loaded without --measure.
    """
    quieten()
    from nado.study.checking import check_study

    place = folder if folder is not None else study.with_suffix("")
    found = check_study(study, place, settings, guide=guide, force=force, measure=measure)
    if as_json:
        print_json(found.describe())
    else:
        for problem in found.problems:
            typer.echo(str(problem))
        for note in found.notes:
            typer.echo(f"note: {note}")
        if found.estimate is not None:
            _print_estimate(found.estimate)
    if found.problems:
        raise typer.Exit(1)


def _print_estimate(found: "Estimate") -> None:
    from nado.study.estimate import describe_bytes

    typer.echo(
        f"{found.basis} on {found.device}: base {found.base_parameters:,} and guide "
        f"{found.guide_parameters:,} parameters, {found.texts:,} texts of {found.tokens:,} tokens"
    )
    typer.echo(f"memory {describe_bytes(found.memory_bytes)}, disk {describe_bytes(found.disk_bytes)}")
    parts = [f"{name} {_duration(seconds)}" for name, seconds in found.seconds.items()]
    typer.echo(f"time {_duration(sum(found.seconds.values()))}: {', '.join(parts)}")


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
