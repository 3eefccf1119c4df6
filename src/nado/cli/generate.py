"""`nado generate`: texts that a guide leads."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nado.cli.console import print_line, print_table, quieten, say
from nado.cli.guide_options import BaseName, Budget, DeviceName, DtypeName, ExactEnd, OtherBase
from nado.cli.settings import Settings, read_stdin, takes
from nado.errors import InputError, MismatchError

if TYPE_CHECKING:
    from nado.prompts import Prompt
    from nado.study.guides import GuideInUse
    from nado.study.sections import GenerateConfig
    from nado.study.systems import System, Written

_FIELDS = ("count", "strength", "target_rate", "doubt", "plausible", "seed", "batch_size")


@takes("oracle", "generate", only=_FIELDS)
def generate_command(
    settings: Settings,
    guide: Annotated[
        Path | None,
        typer.Option(help="The guide's folder, or an embedded one: keywords (the default) or positive."),
    ] = None,
    keywords: Annotated[
        str | None, typer.Option(help='What the text shall have, separated by commas: "dog, ball, beach".')
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(help="A .jsonl, .parquet or .txt file of prompts, or - for stdin.")
    ] = None,
    base: BaseName = None,
    device: DeviceName = None,
    dtype: DtypeName = None,
    sample: Annotated[bool, typer.Option("--sample", help="Sample from q; this is the default.")] = False,
    greedy: Annotated[bool, typer.Option("--greedy", help="The likeliest token at every step.")] = False,
    beams: Annotated[int | None, typer.Option(min=2, help="Beam search with so many beams.")] = None,
    verified: Annotated[
        bool, typer.Option("--verified", help="Only texts the oracle has said yes to; exit code 1 if none.")
    ] = False,
    budget: Budget = 16,
    exact_end: ExactEnd = None,
    dial: Annotated[
        Path | None,
        typer.Option(help="With --target-rate: what `nado dial` has measured, in place of the guide's R(x)."),
    ] = None,
    inspect: Annotated[bool, typer.Option("--inspect", help="Show every token: p, q, R, S.")] = False,
    allow_other_base: OtherBase = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object a line.")] = False,
) -> None:
    """Write texts that a guide leads towards what its oracle asks for.

    A text a line on stdout; how many satisfy the oracle on stderr.
    """
    search = _choose_search(sample, greedy, beams, verified)
    if dial is not None:
        others = {"--verified": verified, "--exact-end": bool(exact_end), "--inspect": inspect}
        _require_plain(search, others)
    if search != "sample" or verified:
        settings.given.setdefault("generate", {}).setdefault("count", 1)
    config = replace(settings.section("generate"), search=search, beams=beams or 4)
    if dial is not None and not settings.tells("generate", "target_rate"):
        raise InputError("--target-rate with --dial", "none", "Say what share of texts shall satisfy.")
    asked = _read_prompts(keywords, prompts)
    quieten()
    from nado.study.guides import use_guide
    from nado.study.materials import fill_missing
    from nado.tiny import locate_guide

    used = use_guide(
        locate_guide(guide),
        oracle=settings.oracle(),
        allow_other_base=allow_other_base,
        name=base,
        device=device,
        dtype=dtype,
    )
    tasks = fill_missing(asked, used.template)
    if keywords is not None:
        _require_writable(used, tasks)
    if dial is None:
        system = _make_system(used, config, exact_end, verified)
    else:
        system = _turn(used, settings, config, dial)
    if verified:
        _print_verified(system, tasks, config, budget, as_json)
    else:
        _print_texts(system, tasks, config, inspect, as_json)


def _choose_search(sample: bool, greedy: bool, beams: int | None, verified: bool) -> str:
    chosen = [name for name, on in (("--sample", sample), ("--greedy", greedy), ("--beams", beams)) if on]
    if len(chosen) > 1:
        raise InputError("one of --sample, --greedy and --beams", " and ".join(chosen), "Leave one out.")
    if verified and chosen and chosen != ["--sample"]:
        raise InputError("sampling with --verified", chosen[0], "Verified texts are drawn: leave it out.")
    return {"--greedy": "greedy", "--beams": "beam"}.get(chosen[0], "sample") if chosen else "sample"


def _read_prompts(keywords: str | None, prompts: str | None) -> "list[Prompt]":
    from nado.prompts import Prompt, read_prompts

    if (keywords is None) == (prompts is None):
        found = "neither" if keywords is None else "both"
        raise InputError("either --keywords or --prompts", found, 'Write --keywords "dog, ball, beach".')
    if prompts is not None:
        return read_prompts(read_stdin() if prompts == "-" else prompts)
    words = [word.strip() for word in (keywords or "").split(",") if word.strip()]
    if not words:
        raise InputError("at least one keyword", repr(keywords), 'Write --keywords "dog, ball, beach".')
    condition = ", ".join(words)
    return [Prompt(condition, condition)]


def _require_writable(used: "GuideInUse", tasks: "Sequence[Prompt]") -> None:
    """Refuse keywords that the base cannot spell: no text of it could have them."""
    tokenizer = used.base.tokenizer
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown in used.base.eos_ids:
        return
    words = [word.strip() for each in tasks for word in each.condition.split(",")]
    lost = [word for word in words if unknown in tokenizer(word, add_special_tokens=False)["input_ids"]]
    if lost:
        raise InputError(
            "keywords that the base can write",
            repr(lost[0]),
            "Its vocabulary has no tokens for it: use words.",
        )


def _make_system(
    used: "GuideInUse", config: "GenerateConfig", exact_end: bool | None, verified: bool
) -> "System":
    from nado.study.systems import System

    cheap = used.oracle is not None and used.oracle.cheap and used.base.completion == "eos"
    # Verified texts are checked anyway, and without an exact end they are nearer to q*.
    default = cheap and config.target_rate == 1 and not verified
    guidance = config.guidance(exact_end=default if exact_end is None else exact_end)
    return System("guided", used.base, used.guide, guidance, used.oracle)


def _require_plain(search: str, others: "dict[str, bool]") -> None:
    """Refuse what a dial cannot be turned with: a rate is one of texts that are sampled."""
    found = [f"{search} search"] if search != "sample" else [name for name, on in others.items() if on]
    if found:
        raise InputError("--dial with sampled texts alone", found[0], "Leave one of the two out.")


def _turn(used: "GuideInUse", settings: Settings, config: "GenerateConfig", path: Path) -> "System":
    """The base, and the two stops of a dial that write its texts."""
    from nado.dial import Dial, turn_dial
    from nado.guidance import Guidance
    from nado.guided_language_model import GuidedLanguageModel
    from nado.storage import read_json
    from nado.study.systems import System

    dial = Dial.read(read_json(path))
    if used.oracle is not None and used.oracle.fingerprint != dial.oracle:
        hint = "Measure one for this oracle: nado dial."
        raise MismatchError("the oracle this dial was measured with", used.oracle.name, hint)
    # What nobody gives is as it was when the dial was measured.
    same = {
        name: getattr(config if settings.tells("generate", name) else dial, name)
        for name in ("doubt", "plausible")
    }
    guidance = Guidance(config.strength, **same)
    model = GuidedLanguageModel(used.base, used.guide, guidance=guidance, oracle=used.oracle)
    proposal, turn = turn_dial(model, dial, config.target_rate), dial.at(config.target_rate)
    say("expected to satisfy: {:.1%} [{:.1%}, {:.1%}]".format(turn.rate, *turn.interval))
    return System("dialled", used.base, None, Guidance(), used.oracle, proposal)


def _print_texts(
    system: "System", tasks: "Sequence[Prompt]", config: "GenerateConfig", inspect: bool, as_json: bool
) -> None:
    from nado.study.systems import trace_texts, write_texts

    written = write_texts(system, tasks, config, system.guide)
    traces = trace_texts(system, written) if inspect else [None] * len(written)
    for each, trace in zip(written, traces, strict=True):
        if as_json:
            more = {} if trace is None else {"inspect": trace}
            print_line({**vars(each), "exact_end": system.guidance.exact_end, **more})
            continue
        typer.echo(_line(each.text))
        if trace is not None:
            heads = ["token", "p", "q", "R", "S", "the base's choice"]
            rows = [[_cell(value) for value in step.values()] for step in trace]
            print_table(heads, rows)
    _say_satisfied(written, system)


def _line(text: str) -> str:
    """A text as one line; the blank between it and its prompt is left out."""
    return text.strip().replace("\n", "\\n")


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:.4f}"


def _say_satisfied(written: "Sequence[Written]", system: "System") -> None:
    if system.oracle is None:
        say(f"{len(written)} texts; no oracle to ask about them")
        return
    satisfied = sum(bool(each.satisfied) for each in written)
    end = "exact end on" if system.guidance.exact_end else "exact end off"
    say(f"{satisfied} of {len(written)} satisfy {system.oracle.name} ({end})")


def _print_verified(
    system: "System", tasks: "Sequence[Prompt]", config: "GenerateConfig", budget: int, as_json: bool
) -> None:
    from dataclasses import asdict

    from nado.exact_sampling import verified

    if system.oracle is None:
        raise InputError("an oracle to verify texts with", "none", "Name it: --oracle file.py:name.")
    repeated = [each for each in tasks for _ in range(config.count)]
    found = verified(
        system.sampler(),
        [each.prompt for each in repeated],
        [each.condition for each in repeated],
        system.oracle,
        budget=budget,
        seed=config.seed,
        batch_size=config.batch_size,
    )
    for each in found:
        if as_json:
            print_line(asdict(each))
        elif each.text is not None:
            typer.echo(_line(each.text))
    lost = [each for each in found if each.text is None]
    say(f"{len(found) - len(lost)} of {len(found)} verified, {sum(each.draws for each in found)} draws")
    if lost:
        partial = lost[0].partial
        missing = (
            ""
            if partial is None
            else f"; the nearest miss lacks {', '.join(partial.missing_parts) or 'an end'}"
        )
        raise InputError(
            f"a text within {budget} draws for {lost[0].condition[:60]!r}",
            f"none{missing}",
            "Raise --budget.",
        )
