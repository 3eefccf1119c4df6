"""Options of the commands that load a guide beside its base."""

from typing import Annotated

import typer

BaseName = Annotated[str | None, typer.Option(help="Where the base is, if not where the guide says.")]
DeviceName = Annotated[str | None, typer.Option(help="Where to run (default: a GPU if there is one).")]
DtypeName = Annotated[str | None, typer.Option(help="Numbers: float32, bfloat16, float16 or auto.")]
OtherBase = Annotated[
    bool, typer.Option("--allow-other-base", help="Use a base of other weights, and say what is lost.")
]
ExactEnd = Annotated[
    bool | None, typer.Option(help="Let a text end only where the oracle says yes (default: if it is cheap).")
]
Budget = Annotated[int, typer.Option(min=1, help="Draws for a verified text.")]
