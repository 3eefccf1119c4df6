"""From what a comparison measured to a report: the page of one run, with more rows."""

from collections.abc import Mapping
from typing import Any

from nado.metrics import Comparison, Measure
from nado.report.content import Examples, Fact, Pair, Report, System
from nado.report.sources import report_from_evaluation

HEADLINE = ("satisfied", "parts", "perplexity", "distinct-2", "self-BLEU-4", "length", "KL(q‖p)")


def report_from_comparison(
    comparison: Mapping[str, Any], title: str | None = None, examples: Examples | None = None
) -> Report:
    """A report from comparison.json."""
    common = report_from_evaluation({**comparison, "systems": []}, title)
    budget, tuning, draws = (comparison[name] for name in ("budget", "tuning", "training_draws"))
    multiples = ", ".join(f"{each:g}×" for each in budget["multiples"])
    facts = {
        "budget": f"{budget['base_tokens_a_text']:.1f} base tokens a returned text, as q took; {multiples}",
        "tuning": f"{tuning['prompts']} {tuning['source']}",
        "training draws": f"{draws['texts']:,} texts of {draws['tokens']:,} tokens, "
        f"{draws['satisfied']:.1%} satisfied",
    }
    return Report(
        title=title or f"{comparison['oracle']} on {comparison['base']}: q and other methods",
        facts=(*common.facts, *(Fact(name, value) for name, value in facts.items())),
        systems=tuple(_system(row, draws["tokens"]) for row in comparison["systems"]),
        headline=HEADLINE,
        pairs=tuple(
            Pair(each["first"], each["second"], Comparison(**each["result"])) for each in comparison["pairs"]
        ),
        examples=examples,
        notes=tuple(list_notes(comparison)),
        versions=common.versions,
    )


def list_notes(comparison: Mapping[str, Any]) -> list[str]:
    """What a reader has to know to judge the comparison."""
    notes = [
        f"Settings were chosen on {comparison['tuning']['prompts']} {comparison['tuning']['source']}: "
        f"{comparison['tuning']['criterion']}. q has the settings of its study.",
        "Methods that train read the guide's own training draws and labels. Base tokens are those that the "
        "base, or a model as large, was run for; prompts are not counted, nor is the oracle.",
        "Greedy and beam searches write one text a prompt; they have no self-BLEU. KL is given only where "
        "texts are sampled from a distribution whose probabilities are known.",
    ]
    notes += [f"Not run: {each['name']}: {each['reason']}." for each in comparison["left_out"]]
    return notes


def describe_settings(settings: Mapping[str, Any]) -> str:
    """Settings in a few words."""
    parts = []
    for name, value in settings.items():
        shown = f"{value:g}" if isinstance(value, float) else str(value).lower()
        parts.append(f"{name.replace('_', ' ')} {shown}")
    return ", ".join(parts)


def measure_cost(row: Mapping[str, Any], draw_tokens: int) -> list[Measure]:
    """What a method's texts took: each, and all of them with what went before."""
    texts, tokens, satisfied = row["texts"], row["base_tokens"], row["measures"]["satisfied"]
    hits = round(satisfied["value"] * satisfied["n"])
    drawn = draw_tokens if row["sees_training_draws"] else 0
    tuning, training = row["tuning"], row["training"]

    def measure(name: str, value: float | None, unit: str, method: str) -> Measure:
        note = "no text satisfies" if value is None else None
        return Measure(name, value, texts, unit=unit, method=method, note=note)

    each = tokens / hits if hits else None
    found = [
        measure("base tokens a text", tokens / texts, "tokens", f"{tokens:,} of the run over texts"),
        measure("base tokens a satisfying text", each, "tokens", f"{tokens:,} over texts that satisfy"),
        measure("tuning + run", tokens + tuning["base_tokens"], "tokens", "base tokens"),
        measure("training draws + run", tokens + drawn, "tokens", "base tokens"),
        measure("seconds", row["seconds"], "seconds", "wall clock of the run"),
        measure("tuning", tuning["seconds"], "seconds", "wall clock, training for each setting included"),
    ]
    if training is not None:
        how = f"wall clock for the chosen settings; {training['texts']:,} texts read, repeats counted"
        found.append(measure("training", training["seconds"], "seconds", how))
    return found


def _system(row: Mapping[str, Any], draw_tokens: int) -> System:
    measures = tuple(Measure(**each) for each in row["measures"].values())
    detail = describe_settings(row["settings"])
    return System(row["system"], detail, measures, tuple(measure_cost(row, draw_tokens)))
