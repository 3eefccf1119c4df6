"""`nado run`: a whole study from one TOML file."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from nado.cli.console import print_json, print_table, quieten, say


def run_command(
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
    engine: Annotated[
        Literal["local", "ray"] | None,
        typer.Option(help="What draws and labels: this process (local), or actors of a Ray cluster."),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="Ray's head node as host:port (default: RAY_ADDRESS, or this machine alone)."),
    ] = None,
    actors: Annotated[
        int | None, typer.Option(help="Actors at a time (default: one a GPU, or one a core, of all nodes).")
    ] = None,
    actor_cpus: Annotated[float | None, typer.Option(help="Cores an actor is given (default: 1).")] = None,
    actor_gpus: Annotated[
        float | None, typer.Option(help="GPUs an actor is given (default: 1 to draw where there are any).")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(help="Processes that train, on this machine (default: 1).")
    ] = None,
    shares: Annotated[
        int | None,
        typer.Option(
            help="Divide training texts and states into so many parts, read by a process each "
            "(default: every process reads all)."
        ),
    ] = None,
    divide_base: Annotated[
        bool | None,
        typer.Option("--divide-base", help="Divide the base's layers among those processes (FSDP)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the evaluation as JSON.")] = False,
) -> None:
    """Run a study: draw, label, train, generate and evaluate from one TOML file.

    Finished stages are reused, begun ones taken up where they stopped. What is said here about engines and
    processes goes before the file's section [distributed].
    """
    from nado.study.reading import read_study

    read = read_study(study, settings or ())
    asked = {
        "engine": engine,
        "address": address,
        "actors": actors,
        "cpus": actor_cpus,
        "gpus": actor_gpus,
        "processes": processes,
        "shares": shares,
        "divide_base": divide_base,
    }
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    distributed = replace(read.distributed, **given)
    quieten()
    from nado.study.evaluation import table_rows
    from nado.study.running import run_study

    place = folder if folder is not None else study.with_suffix("")
    evaluation = run_study(read, place, force=force, until=until, say=say, distributed=distributed)
    if evaluation is None:
        typer.echo(str(place / until))
    elif as_json:
        print_json(evaluation)
    else:
        heads, rows = table_rows(evaluation)
        print_table(heads, rows, f"{evaluation['oracle']}: {evaluation['prompts']} held-out prompts")
        typer.echo(str(place / "evaluate" / "evaluation.json"))
