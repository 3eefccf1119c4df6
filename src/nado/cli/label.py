"""`nado label`: what an oracle says of samples, or of texts that come in on stdin."""

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from nado.cli.console import print_json, print_line, quieten, say
from nado.cli.settings import Settings, read_stdin, takes
from nado.errors import InputError


@takes("oracle", "label", "base")
def label_command(
    settings: Settings,
    samples: Annotated[
        str,
        typer.Argument(help="A folder of samples; or texts as JSON lines: a .jsonl file, or - for stdin."),
    ],
    force: Annotated[
        bool, typer.Option("--force", help="Delete labels of another oracle in that folder.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Ask an oracle about samples, or about texts on stdin.

    Labels of a folder are kept in it, shard by shard. Texts are printed again with `satisfied` and `parts`.
    """
    table = settings.oracle()
    if table is None:
        raise InputError("an oracle", "none", "Name it: --oracle keywords.")
    from nado.oracles import load_oracle

    config, oracle = settings.section("label"), load_oracle(table)
    folder = Path(samples)
    if samples == "-" or folder.is_file():
        _label_texts(read_stdin() if samples == "-" else folder, oracle)
        return
    require_samples(folder)
    settings.kept = kept_base(folder)
    prefixes = oracle.cheap if config.prefixes == "auto" else config.prefixes
    model = _load_base(settings) if prefixes else None
    from nado.metrics import share
    from nado.progress import progress_bar
    from nado.sample_labels import label_samples
    from nado.storage import write_json

    if force:
        shutil.rmtree(folder / "labels", ignore_errors=True)
    say(f"asking {oracle.name} about the texts in {folder}")
    with progress_bar("labelling") as listener:
        labelled = label_samples(
            folder,
            oracle,
            model=model,
            prefixes=prefixes,
            parts=config.parts,
            workers=config.workers,
            timeout=config.timeout,
            batch_size=config.batch_size,
            on_progress=listener,
        )
    write_json(folder / "labels" / "oracle.json", {"table": table})
    rate = share("satisfied", labelled.array("satisfied"), labelled.strings("prompt"))
    if as_json:
        print_json({"folder": samples, "texts": len(labelled), "oracle": oracle.name, **rate.describe()})
    else:
        typer.echo(f"{len(labelled):,} texts, {rate.value:.1%} satisfy {oracle.name}")


def require_samples(folder: Path) -> None:
    """Refuse what is no folder of samples, before anything is loaded."""
    if not (folder / "manifest.json").is_file():
        raise InputError(f"a folder of samples at {folder}", "none", "Draw them first: nado draw.")


def kept_base(folder: Path) -> dict[str, dict[str, Any]]:
    """The base's section that `nado draw` has left beside the samples."""
    from nado.storage import read_json

    path = folder / "base.json"
    if not path.exists():
        return {}
    return {"base": {key: value for key, value in read_json(path)["base"].items() if value is not None}}


def _load_base(settings: Settings) -> Any:
    """The base, whose tokenizer makes text of prefixes."""
    base = settings.section("base")
    from nado.study.materials import load_base

    quieten()
    return load_base(base)


def _label_texts(path: Path, oracle: Any) -> None:
    from nado.labeling import label
    from nado.prompts import read_records

    records = [record for _, record in read_records(path)]
    for number, record in enumerate(records, start=1):
        if not isinstance(record.get("text"), str):
            raise InputError(
                f"a field text in line {number}", f"the fields {sorted(record)}", 'Write {"text": "…"}.'
            )
    conditions = [str(record.get("condition", "")) for record in records]
    texts = [record["text"] for record in records]
    labels = label(oracle, conditions, texts, finished=[bool(each.get("finished", True)) for each in records])
    assert labels.parts is not None
    for row, record in enumerate(records):
        answers = {"satisfied": bool(labels.satisfied[row]), "parts": labels.parts.row(row).tolist()}
        print_line(record | answers)
