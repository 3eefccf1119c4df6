"""`python -m nado.vllm_plugin GUIDE FOLDER`: write a folder that `vllm serve` can serve."""

from pathlib import Path
from typing import Annotated

import typer

from nado.cli.console import quieten, say


def main(
    guide: Annotated[Path, typer.Argument(help="The folder of a light guide without progress.")],
    folder: Annotated[Path, typer.Argument(help="Where to write; new or empty.")],
    condition: Annotated[
        str | None, typer.Option(help="The condition of requests that give none (default: they must).")
    ] = None,
    base: Annotated[str | None, typer.Option(help="Where the base is, if not where the guide says.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Numbers to save the base in: float32, bfloat16 or float16.")
    ] = None,
) -> None:
    """Write a folder that vLLM can serve: the base, its light guide, and what p is."""
    quieten()
    from nado.study.guides import use_guide
    from nado.vllm_plugin.folders import save_for_vllm

    used = use_guide(guide, name=base, dtype=dtype, device="cpu")
    save_for_vllm(used.base, used.guide, folder, condition=condition, template=used.template)
    say(f"serve it with: vllm serve {folder}")
    typer.echo(str(folder))


if __name__ == "__main__":
    from nado.errors import NadoError

    try:
        typer.run(main)
    except NadoError as error:
        raise SystemExit(f"error: {error}") from error
