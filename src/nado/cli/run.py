"""`nado run`: a whole study from one TOML file."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from nado.cli.console import print_json, print_table, quieten, say
from nado.cli.settings import Settings, takes


@takes("distributed", left_out=("attempts",), config=False)
def run_command(
    asked: Settings,
    study: Annotated[Path, typer.Argument(help="The study file (TOML).")],
    folder: Annotated[
        Path | None, typer.Option(help="Where the stages are kept (default: beside the file, with its name).")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Replace a value: --set train.steps=100. Repeatable.")
    ] = None,
    until: Annotated[
        Literal["draw", "label", "train", "generate", "evaluate"], typer.Option(help="The last stage to run.")
    ] = "evaluate",
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Make stages again that were made from something else, and what follows."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the evaluation as JSON.")] = False,
) -> None:
    """Run a study: draw, label, train, generate and evaluate from one TOML file.

    Finished stages are reused, begun ones taken up where they stopped. What is said here about engines and
    processes goes before what the file says.
    """
    from nado.study.reading import read_study

    read = read_study(study, [*(settings or ()), *as_settings(asked)])
    quieten()
    from nado.study.evaluation import table_rows
    from nado.study.running import run_study

    place = folder if folder is not None else study.with_suffix("")
    evaluation = run_study(read, place, force=force, until=until, say=say)
    if evaluation is None:
        typer.echo(str(place / until))
    elif as_json:
        print_json(evaluation)
    else:
        heads, rows = table_rows(evaluation)
        print_table(heads, rows, f"{evaluation['oracle']}: {evaluation['prompts']} held-out prompts")
        typer.echo(str(place / "evaluate" / "evaluation.json"))


def as_settings(asked: Settings) -> list[str]:
    """What was asked for by options of their own, as --set has it."""
    return [
        f"{section}.{name}={str(value).lower() if isinstance(value, bool) else value}"
        for section, values in asked.given.items()
        for name, value in values.items()
    ]
