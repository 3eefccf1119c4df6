"""`nado draw`: texts from a base model."""

import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from nado.cli.console import print_json, print_line, quieten, say
from nado.cli.settings import Settings, takes
from nado.errors import InputError, StorageError
from nado.study.sections import DistributedConfig, describe_section

_NOT_HERE = ("held_out", "held_out_split", *(set(DistributedConfig.__dataclass_fields__) - {"engine"}))


@takes("base", "prompts", "draw", "distributed", left_out=_NOT_HERE)
def draw_command(
    settings: Settings,
    out: Annotated[str, typer.Option(help="The folder of samples; - prints them as JSON lines instead.")],
    force: Annotated[
        bool, typer.Option("--force", help="Delete samples of another run in that folder.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Draw texts from a base model into a folder of samples.

    Begun again with the same options, after any interruption, it draws only what is missing.
    """
    base, prompts, config = (settings.section(name) for name in ("base", "prompts", "draw"))
    engine = _require_engine(settings.section("distributed").engine)
    from nado.progress import progress_bar
    from nado.prompts import read_prompts
    from nado.proposals import tempered
    from nado.storage import write_json
    from nado.study.materials import draw_with, fill, load_base

    asked = fill(read_prompts(prompts.file, prompts.split), prompts.template)[: prompts.limit]
    quieten()
    model = load_base(base)
    folder = Path(tempfile.mkdtemp(prefix="nado-draw-")) if out == "-" else Path(out)
    if force:
        _clear(folder)
    try:
        say(f"drawing {config.samples_per_prompt} texts for each of {len(asked)} prompts")
        with progress_bar("drawing") as listener:
            samples = draw_with(engine, base)(
                model,
                prompts=asked,
                folder=folder,
                samples_per_prompt=config.samples_per_prompt,
                proposal=tempered(config.proposal_temperature),
                seed=config.seed,
                batch_size=config.batch_size,
                on_progress=listener,
            )
        if out == "-":
            for row in samples.table.to_pylist():
                print_line(row)
            return
        kept = {"base": describe_section(base, "device"), "template": prompts.template}
        write_json(folder / "base.json", kept)
    finally:
        if out == "-":
            shutil.rmtree(folder, ignore_errors=True)
    tokens = int(samples.ragged("tokens").offsets[-1])
    finished = float(samples.array("finished").mean())
    if as_json:
        print_json({"folder": str(folder), "texts": len(samples), "tokens": tokens, "finished": finished})
    else:
        typer.echo(f"{len(samples):,} texts, {tokens:,} tokens, {finished:.1%} finished, in {folder}")


def _require_engine(engine: str) -> str:
    if engine == "ray":
        raise InputError(
            "the engine local or vllm for this command",
            "ray",
            "Ray draws for a study: nado run study.toml --engine ray --until draw.",
        )
    return engine


def _clear(folder: Path) -> None:
    """Delete a folder of samples; any other folder is left alone."""
    if folder.exists() and any(folder.iterdir()):
        if not (folder / "manifest.json").exists():
            raise StorageError(
                f"a folder of samples at {folder}",
                "something else",
                "Choose another folder; nothing was deleted.",
            )
        shutil.rmtree(folder)
