"""`nado evaluate`: what a guide does to its base."""

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from nado.cli.console import print_json, print_table, quieten, say
from nado.cli.guide_options import BaseName, DeviceName
from nado.cli.settings import Settings, takes
from nado.errors import InputError
from nado.study.sections import describe_section


@takes("oracle", "prompts", "generate", "evaluate", left_out=("held_out", "held_out_split"))
def evaluate_command(
    settings: Settings,
    guide: Annotated[Path, typer.Option(help="The guide's folder, or an embedded one by its name.")],
    out: Annotated[Path | None, typer.Option(help="Keep texts and evaluation.json in this folder.")] = None,
    base: BaseName = None,
    device: DeviceName = None,
    force: Annotated[bool, typer.Option("--force", help="Replace another evaluation there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the evaluation as JSON.")] = False,
) -> None:
    """Measure what a guide does to its base: satisfaction, fluency, cost.

    Base, untrained guide and trained guide write about the same prompts, with the exact end off and on.
    """
    prompts, generate, evaluate = (settings.section(name) for name in ("prompts", "generate", "evaluate"))
    quieten()
    from nado.prompts import read_prompts
    from nado.storage import digest_file, hold, read_json
    from nado.study.evaluation import table_rows
    from nado.study.guides import use_guide
    from nado.study.materials import digest_prompts, fill
    from nado.study.stages import Stage, require_same
    from nado.tiny import locate_guide

    guide = locate_guide(guide)
    used = use_guide(guide, oracle=settings.oracle(), name=base, device=device)
    if used.oracle is None:
        raise InputError("an oracle to judge with", "none", "Name it: --oracle file.py:name.")
    template = prompts.template if prompts.template is not None else used.template
    tasks = fill(read_prompts(prompts.file, prompts.split), template)[: prompts.limit][: generate.prompts]
    config = {**describe_section(generate), **describe_section(evaluate, "batch_size")}
    inputs = {
        "base": used.base.fingerprint,
        "guide": [digest_file(each) for each in sorted(guide.glob("model*.safetensors"))],
        "oracle": used.oracle.fingerprint,
        "prompts": digest_prompts(tasks),
    }
    with tempfile.TemporaryDirectory(prefix="nado-evaluate-") as scratch:
        folder = Path(scratch) if out is None else out
        stage = Stage("evaluate", folder, config, inputs, files=("evaluation.json",))
        with hold(folder):
            require_same([stage], force=force)
            if stage.standing() == "finished":
                say(f"reused: {folder} holds this very evaluation")
            else:
                stage.run(lambda: _evaluate(used, tasks, generate, evaluate, folder))
        evaluation = read_json(folder / "evaluation.json")
    if as_json:
        print_json(evaluation)
    else:
        heads, rows = table_rows(evaluation)
        print_table(heads, rows, f"{evaluation['oracle']}: {evaluation['prompts']} prompts")


def _evaluate(used: Any, tasks: Any, generate: Any, evaluate: Any, folder: Path) -> dict[str, Any]:
    from nado.storage import write_json
    from nado.study.evaluation import describe_evaluation, measure_texts
    from nado.study.guides import untrained_like
    from nado.study.systems import list_systems, read_texts, write_systems

    untrained = untrained_like(used.guide)
    systems = list_systems(used.base, used.oracle, untrained, used.guide, generate)
    rows = []
    for system, cost in write_systems(systems, tasks, generate, folder, untrained):
        say(f"{system.key}: {cost['texts']} texts in {cost['seconds']:.1f} s")
        texts = read_texts(folder / f"{system.key}.jsonl")
        rows.append({**cost, "measures": measure_texts(texts, used.base, evaluate)})
    found = describe_evaluation(
        used.guide.config.base_name, used.base, used.oracle, len(tasks), generate, rows, seen=None
    )
    write_json(folder / "evaluation.json", found)
    return {"systems": [row["system"] for row in rows]}
