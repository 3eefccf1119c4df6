"""`nado train`: a guide from labelled samples."""

from pathlib import Path
from typing import Annotated, Any

import typer

from nado.cli.console import print_json, quieten, say
from nado.cli.label import kept_base, require_samples
from nado.cli.settings import Settings, takes
from nado.errors import InputError
from nado.oracles.loading import names_python
from nado.study.sections import describe_section


@takes("oracle", "base", "guide", "data", "train")
def train_command(
    settings: Settings,
    samples: Annotated[Path, typer.Argument(help="A folder of labelled samples.")],
    out: Annotated[Path, typer.Option(help="The guide's folder.")],
    force: Annotated[bool, typer.Option("--force", help="Replace a guide of another run there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Train a guide on labelled samples.

    Checkpoints are kept in the guide's folder; the same command goes on from the last one.
    """
    from nado.oracles import load_oracle
    from nado.storage import hold, read_json
    from nado.study.materials import digest_base
    from nado.study.stages import Stage, require_same

    require_samples(samples)
    table, template = _find_oracle(settings, samples), _find_template(samples)
    settings.kept = kept_base(samples)
    sections = {name: settings.section(name) for name in ("base", "guide", "data", "train")}
    oracle = load_oracle(table)
    stage = Stage(
        "train",
        out,
        _describe(sections),
        {"base": digest_base(sections["base"]), "oracle": oracle.fingerprint, **_digest_samples(samples)},
        files=("config.json", "oracle.json", "base.json"),
    )
    with hold(out):
        require_same([stage], force=force)
        if stage.standing() == "finished":
            say(f"reused: {out} holds this very guide")
        else:
            stage.run(lambda: _train(sections, samples, out, oracle, table, template))
    summary = read_json(stage.record)["summary"]
    if as_json:
        print_json({"guide": str(out), **summary})
    else:
        best = summary["best"]
        held = f", held out {best['held_out_loss']:.4f}" if "held_out_loss" in best else ""
        typer.echo(f"{out}: {summary['steps']} steps, loss {best['loss']:.4f}{held}")


def _train(
    sections: dict[str, Any],
    samples: Path,
    out: Path,
    oracle: Any,
    table: dict[str, Any],
    template: str | None,
) -> dict[str, Any]:
    from nado.huggingface.reading import HuggingFaceReader
    from nado.samples import read_samples
    from nado.study.guides import build_guide, save_usage, train_guide
    from nado.study.materials import load_base
    from nado.trackers import training_bar

    quieten()
    base, config = sections["base"], sections["train"]
    labelled = read_samples(samples)
    prefixes = labelled.table["progress"].null_count == 0 if labelled.labelled else False
    reader = HuggingFaceReader(load_base(base))
    guide = build_guide(
        reader,
        oracle,
        list(dict.fromkeys(labelled.strings("condition"))),
        sections["guide"],
        base_name=base.name,
        prefixes=prefixes,
        cut_share=float(1 - labelled.array("finished").mean()),
    )
    say(f"training a guide of {sum(each.numel() for each in guide.parameters()):,} numbers")
    with training_bar(config.steps) as on_step:
        summary = train_guide(guide, reader, oracle, labelled, out, sections["data"], config, on_step=on_step)
    save_usage(out, base, table, template)
    return summary.describe()


def _describe(sections: dict[str, Any]) -> dict[str, Any]:
    """What tells one run from another; what is logged and how often is saved may change."""
    config = {f"guide.{name}": value for name, value in describe_section(sections["guide"]).items()}
    config |= {f"data.{name}": value for name, value in describe_section(sections["data"]).items()}
    return config | describe_section(sections["train"], "trackers", "save_every")


def _digest_samples(samples: Path) -> dict[str, str]:
    from nado.samples import labels_folder, samples_digest, samples_folder
    from nado.storage import digest_json

    labels = labels_folder(samples)
    if not labels.manifest_path.exists():
        raise InputError(f"labelled samples in {samples}", "no labels", "Label them first: nado label.")
    return {
        "samples": samples_digest(samples_folder(samples).manifest()),
        "labels": digest_json(labels.manifest()["shards"]),
    }


def _find_oracle(settings: Settings, samples: Path) -> dict[str, Any]:
    """The oracle that was named, or the shipped one that the samples were labelled with."""
    from nado.storage import read_json

    table = settings.oracle()
    kept = samples / "labels" / "oracle.json"
    if table is None and kept.exists():
        table = read_json(kept)["table"]
        if names_python(table):
            raise InputError(
                "the oracle the samples were labelled with",
                "only the name of its Python file",
                "Name it: --oracle file.py:name. No file is executed that you have not named.",
            )
    if table is None:
        raise InputError("the oracle the samples were labelled with", "none", "Name it: --oracle keywords.")
    return table


def _find_template(samples: Path) -> str | None:
    from nado.storage import read_json

    path = samples / "base.json"
    return read_json(path)["template"] if path.exists() else None
