"""`nado dial`: how often texts of several strengths satisfy, so that any rate can be asked for."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nado.cli.console import print_json, print_table, quieten, say
from nado.cli.guide_options import BaseName, DeviceName, DtypeName, OtherBase
from nado.cli.settings import Settings, read_stdin, takes
from nado.errors import InputError, NadoError

if TYPE_CHECKING:
    from nado.dial import Dial, Stop
    from nado.oracles import Oracle
    from nado.prompts import Prompt
    from nado.study.guides import GuideInUse
    from nado.study.sections import GenerateConfig

FILE = "dial.json"


@takes("oracle", "generate", only=("doubt", "plausible", "seed", "batch_size"))
def dial_command(
    settings: Settings,
    guide: Annotated[Path, typer.Option(help="The guide's folder, or an embedded one by its name.")],
    prompts: Annotated[
        str,
        typer.Option(
            help="A .jsonl, .parquet or .txt file of prompts it was not trained on, or - for stdin."
        ),
    ],
    strengths: Annotated[
        str | None,
        typer.Option(help="What is measured, separated by commas; below 0 leads away (default: -4 to 4)."),
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Texts a prompt, at every strength.")] = 8,
    out: Annotated[
        Path | None, typer.Option(help=f"The file that is written (default: {FILE} in the guide's folder).")
    ] = None,
    base: BaseName = None,
    device: DeviceName = None,
    dtype: DtypeName = None,
    allow_other_base: OtherBase = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the dial as JSON.")] = False,
) -> None:
    """Measure how often texts of several strengths satisfy, so that any rate can be asked for.

    `nado generate --dial FILE --target-rate 0.3` then writes texts of which 30 % satisfy. Where FILE is a
    dial that was measured in the same way, its stops stay and only further strengths are measured.
    """
    config = settings.section("generate")
    wanted = None if strengths is None else _read_strengths(strengths)
    quieten()
    from nado.prompts import read_prompts
    from nado.storage import require_writable, write_json
    from nado.study.guides import use_guide
    from nado.tiny import locate_guide

    folder = locate_guide(guide)
    if out is None and folder != guide:  # a name, and the package's own folder
        raise InputError("--out with an embedded guide", "none", "Say where the dial is to be written.")
    path = folder / FILE if out is None else out
    require_writable(path)
    used = use_guide(
        folder,
        oracle=settings.oracle(),
        allow_other_base=allow_other_base,
        name=base,
        device=device,
        dtype=dtype,
    )
    if used.oracle is None:
        raise InputError("an oracle to measure rates with", "none", "Name it: --oracle file.py:name.")
    asked = read_prompts(read_stdin() if prompts == "-" else prompts)
    earlier = _earlier_dial(path)
    found = _measure(used, used.oracle, asked, config, strengths=wanted, count=count, earlier=earlier)
    if earlier is not None:
        _say_kept(earlier, found)
    write_json(path, found.describe())
    if as_json:
        print_json(found.describe())
    else:
        _print(found, used.oracle.name)
    say(f"written to {path}")


def _measure(
    used: "GuideInUse",
    oracle: "Oracle",
    asked: "list[Prompt]",
    config: "GenerateConfig",
    **how: Any,
) -> "Dial":
    """A dial of a guide with everything it is used with."""
    from nado.dial import measure_dial
    from nado.guidance import Guidance
    from nado.guided_language_model import GuidedLanguageModel
    from nado.study.materials import fill_missing

    guidance = Guidance(doubt=config.doubt, plausible=config.plausible)  # no rate or strength of a study file
    model = GuidedLanguageModel(used.base, used.guide, guidance=guidance, oracle=oracle)
    tasks = fill_missing(asked, used.template)
    how |= {"seed": config.seed, "batch_size": config.batch_size, "on_stop": _say_stop}
    return measure_dial(model, tasks, oracle, **how)


def _read_strengths(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError as error:
        raise InputError(
            "strengths as numbers separated by commas", repr(text), 'Write --strengths "-4,-2,2,4".'
        ) from error


def _earlier_dial(path: Path) -> "Dial | None":
    """The dial that is in the file; whatever else is there is no dial to keep stops of."""
    from nado.dial import Dial
    from nado.storage import read_json

    try:
        return Dial.read(read_json(path)) if path.is_file() else None
    except NadoError:
        return None


def _say_kept(earlier: "Dial", found: "Dial") -> None:
    if set(earlier.measured) <= set(found.measured):
        say(f"{len(earlier.measured)} strengths were measured before")
    else:
        say("the dial that was there was measured in another way: it is replaced")


def _say_stop(stop: "Stop") -> None:
    say(f"strength {stop.strength:g}: {stop.rate:.1%}")


def _print(dial: "Dial", oracle: str) -> None:
    used = dial.stops
    rows = [
        [
            f"{stop.strength:g}" if stop.strength else "0 (p itself)",
            f"{stop.rate:.1%} [{stop.low:.1%}, {stop.high:.1%}]",
            f"{stop.kl:.2f}",
            "yes" if stop in used else "no: its neighbours mixed cost less",
        ]
        for stop in sorted(dial.measured, key=lambda each: each.strength)
    ]
    title = f"{oracle}: {dial.texts} texts a strength, {dial.prompts} prompts"
    print_table(["strength", "satisfied", "KL(q‖p)", "on the dial"], rows, title)
    say(f"rates from {used[0].rate:.1%} to {used[-1].rate:.1%} can be asked for")
