"""`nado serve`: an OpenAI-compatible endpoint and a playground page."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nado.cli.console import quieten, say
from nado.cli.guide_options import BaseName, Budget, DeviceName, DtypeName, ExactEnd, OtherBase
from nado.errors import InputError

if TYPE_CHECKING:
    from nado.serving.models import GuideSource

_TOKEN_VARIABLE = "NADO_TOKEN"


def serve_command(
    guide: Annotated[
        list[str] | None,
        typer.Option(
            help="A guide's folder, or NAME=FOLDER; may be given several times (default: embedded)."
        ),
    ] = None,
    oracle: Annotated[
        list[str] | None,
        typer.Option(help="The first guide's oracle, or NAME=ORACLE: file.py:name, a shipped name, a table."),
    ] = None,
    base: BaseName = None,
    host: Annotated[str, typer.Option(help="Where to listen; this machine only by default.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port.")] = 8000,
    name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(help=f"A file with the token clients must send (default: ${_TOKEN_VARIABLE})."),
    ] = None,
    device: DeviceName = None,
    dtype: DtypeName = None,
    exact_end: ExactEnd = None,
    allow_other_base: OtherBase = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts written side by side.")] = 32,
    queue_size: Annotated[int, typer.Option(min=1, help="Texts that may wait for a place.")] = 256,
    deadline: Annotated[float, typer.Option(min=0.1, help="Seconds a request may take.")] = 120.0,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens a prompt may have.")] = 128,
    max_texts: Annotated[int, typer.Option(min=1, help="Texts one request may ask for.")] = 16,
    budget: Budget = 16,
) -> None:
    """Serve guided texts over HTTP to OpenAI's clients, with a page at / to try them out."""
    # Before torch is loaded: products then round alike in every thread, and no text depends on another.
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    from nado.serving.server import require_packages, serve

    require_packages()
    token = _read_token(token_file)
    quieten()
    from nado.serving.jobs import ServingConfig
    from nado.serving.models import default_sources, load_served

    sources = _read_sources(guide, oracle or []) if guide else default_sources()
    model = load_served(
        sources,
        name=name if name or guide else "tiny",
        exact_end=exact_end,
        allow_other_base=allow_other_base,
        base={"name": base, "device": device, "dtype": dtype},
    )
    config = ServingConfig(
        batch_size=batch_size,
        queue_size=queue_size,
        deadline=deadline,
        max_prompt_tokens=max_prompt_tokens,
        max_texts=max_texts,
        budget=budget,
    )
    say(f"{model.name} at http://{host}:{port}/ (API: http://{host}:{port}/v1)")
    serve(model, config, host=host, port=port, token=token)


def _read_sources(guides: list[str], oracles: list[str]) -> "list[GuideSource]":
    from nado.cli.settings import read_oracle
    from nado.serving.models import GuideSource
    from nado.tiny import locate_guide

    named = [_split(each) for each in guides]
    names = [name or Path(folder).resolve().name for name, folder in named]
    tables: dict[str, dict[str, Any]] = {}
    for each in oracles:
        owner, text = _split(each) if each.split("=", 1)[0] in names else (None, each)
        tables[owner or names[0]] = read_oracle(text)
    return [
        GuideSource(name, locate_guide(folder), tables.get(name))
        for name, (_, folder) in zip(names, named, strict=True)
    ]


def _split(text: str) -> tuple[str | None, str]:
    """NAME=VALUE, or a value alone."""
    name, mark, value = text.partition("=")
    return (name, value) if mark and name.replace("-", "").replace("_", "").isalnum() else (None, text)


def _read_token(file: Path | None) -> str | None:
    if file is None:
        return os.environ.get(_TOKEN_VARIABLE) or None
    try:
        token = file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise InputError(f"a token in {file}", f"the error: {error.strerror}", "Check the file.") from error
    if not token:
        raise InputError(f"a token in {file}", "an empty file", "Write one line into it.")
    return token
