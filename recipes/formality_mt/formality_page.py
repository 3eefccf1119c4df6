"""The README's results, from a run's JSON alone: no number is typed by hand."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import neighbours  # noqa: F401  (finds the pages of the CommonGen recipe)
from results_page import number_cell, span_cell
from table_settings import BASE, BEST_OF

from nado.errors import InputError

BEGIN, FINISH = "<!-- results: written by score_formality.py -->", "<!-- end of results -->"


def results(found: dict[str, Any], base: dict[str, Any] | None) -> str:
    """What stands between the marks."""
    metrics = found["metrics"]
    parts = [
        f"{found['date']}, {found['machine']}, commit {found['commit']}, {metrics['seconds']:.0f} s in all: "
        f"`{found['command']}`.",
        "" if base is None else base_section(base),
        "Fisher test; BLEU and chrF (sacreBLEU, defaults) against the fluent references without “None”, BLEU "
        "against the four original ones beside it; formality is the mean probability over all utterances. "
        "95 % bootstrap intervals, equal sources resampled together. Differences are to the base under the "
        "same search (sampled lines: to greedy), paired.",
        table(metrics["rows"]),
        _references(metrics["references"]),
        against_fudge(metrics["rows"]),
        tuned_section(metrics["tuned"]),
        guides_table(metrics),
        samples_table(metrics),
        "\n".join(f"Left out: {name}: {why}" for name, why in metrics["left_out"].items()),
        classifiers_section(metrics["classifiers"]),
        audit_section(metrics["stages"]["audit"]["audit"]),
        examples_section(metrics["examples"]),
    ]
    return "\n\n".join(part for part in parts if part)


def base_section(base: dict[str, Any]) -> str:
    """How the base was trained, and what it is worth."""
    facts, scores = base["metrics"]["base"], base["metrics"]["base_scores"]
    bleu = "; ".join(
        f"{words} {_span(scores[f'{name}_greedy'])} greedy, {_span(scores[f'{name}_beam'])} beam"
        for name, words in (("tatoeba_test", "Tatoeba test"), ("fisher_test", "Fisher test, four references"))
    )
    return (
        f"Base: {facts['parameters'] / 1e6:.1f}M parameters, {facts['steps']:,} steps in "
        f"{facts['seconds']:.0f} s ({facts['passes']:.0f} passes over {facts['pairs']:,} pairs), "
        f"`{base['command']}`. BLEU: {bleu}."
    )


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The main table."""
    heads = [
        "system",
        "search",
        "strength",
        "doubt",
        "plausible",
        "BLEU",
        "to base",
        "chrF",
        "BLEU, original",
    ]
    heads += ["formality, oracle", "to base", "formality, judge", "to base", "satisfied", "words"]
    return _table(heads, [_line(row) for row in rows])


def _line(row: dict[str, Any]) -> list[str]:
    against = row.get("against_base", {})

    def number(name: str, digits: int, scale: float = 1.0) -> str:
        low, high = row["interval"][name]
        span = "" if low is None else f" ±{scale * (high - low) / 2:.{digits}f}"
        return "–" if row[name] is None else f"{scale * row[name]:.{digits}f}{span}"

    return [
        row["title"],
        row["decoding"],
        *_setting(row),
        number("bleu_fluent", 2),
        _gain(against.get("bleu_fluent"), 2),
        number("chrf_fluent", 2),
        number("bleu_original", 2),
        number("formality_oracle", 3),
        _gain(against.get("formality_oracle"), 3),
        number("formality_judge", 3),
        _gain(against.get("formality_judge"), 3),
        number("satisfied", 1, 100.0) + " %",
        number("words", 2),
    ]


def against_fudge(rows: Sequence[dict[str, Any]]) -> str:
    """Differences to FUDGE at the same strength and under the same search."""
    lines = [
        [
            row["title"],
            row["decoding"],
            *_setting(row),
            *_gains(row["against_fudge"]),
        ]
        for row in rows
        if "against_fudge" in row
    ]
    heads = [
        "minus FUDGE",
        "search",
        "strength",
        "doubt",
        "plausible",
        "BLEU",
        "formality, oracle",
        "formality, judge",
    ]
    return _table(heads, lines) if lines else ""


def tuned_section(found: dict[str, Any]) -> str:
    """What each method comes to with settings that were chosen elsewhere."""
    lines = [
        [
            each["title"],
            each["decoding"],
            *_setting(each),
            f"{each['tried']}",
            *_gains(each["against_base"]),
            *_gains(each.get("against_fudge", {})),
        ]
        for each in found["lines"]
    ]
    if not lines:
        return ""
    share, rest = f"{100 * found['choosing_share']:.0f} %", f"{found['lines'][0]['utterances']:,}"
    title = (
        f"Each method with the setting that is the most formal to the oracle on {share} of the different "
        f"sources, among those whose BLEU there is at most {found['tolerance']:g} below the base's (where "
        f"there is none, the one of the best BLEU); measured on the other {rest} utterances, against the "
        "base and against FUDGE's own choice."
    )
    heads = ["system", "search", "strength", "doubt", "plausible", "of settings", "BLEU", "formality, oracle"]
    heads += ["formality, judge", "BLEU, to FUDGE", "oracle, to FUDGE", "judge, to FUDGE"]
    return f"{title}\n\n" + _table(heads, lines)


def guides_table(metrics: dict[str, Any]) -> str:
    """How the guides were trained."""
    lines = []
    for name, variant in metrics["table"]["guides"].items():
        facts = metrics["stages"].get(f"guide-{name}")
        if facts is not None:
            best = facts["best"]
            lines.append(
                [
                    variant["title"],
                    f"{facts['parameters'] / 1e6:.1f}M",
                    f"{facts['steps']:,}",
                    f"{facts['train_seconds']:.0f} s",
                    f"{facts['tokens_per_s'] / 1e3:.0f}k",
                    f"{100 * facts['ess']:.3g} %",
                    number_cell(best.get("held_out_success"), 4),
                    number_cell(best.get("held_out_calibration_error"), 4),
                ]
            )
    heads = [
        "guide",
        "parameters",
        "steps",
        "time",
        "tokens/s",
        "effective in training",
        "held-out CE",
        "held-out ECE",
    ]
    return _table(heads, lines) if lines else ""


def samples_table(metrics: dict[str, Any]) -> str:
    """What was drawn."""
    lines = [
        [
            name.removeprefix("samples-"),
            f"{facts['texts']:,}",
            f"{facts['tokens']:,}",
            f"{100 * facts['finished']:.2f} %",
            f"{100 * facts['satisfied_as_drawn']:.1f} %",
            f"{100 * facts['satisfied_under_p']:.1f} %",
            f"{100 * facts['effective_share']:.3g} %",
        ]
        for name, facts in metrics["stages"].items()
        if name.startswith("samples-")
    ]
    heads = ["drawn at T", "texts", "tokens", "ended", "satisfied", "weighted back to p"]
    heads += ["effective, whole texts"]
    return _table(heads, lines)


def classifiers_section(found: dict[str, Any]) -> str:
    """What the classifiers are worth on sentences they have not seen."""
    lines = [
        [
            name,
            f"{facts['sentences']:,}",
            f"{facts['auc']:.3f}",
            f"{facts['accuracy']:.3f}",
            f"{facts['spearman']:.3f}",
        ]
        for name, facts in found.items()
    ]
    return _table(
        ["classifier", "unseen sentences", "AUC", "accuracy", "Spearman with people's scores"], lines
    )


def audit_section(found: dict[str, Any]) -> str:
    """`nado audit` of the oracle, on samples of p."""
    lines = [
        [each["check"], each["status"], each["value"], each["message"].replace("|", "/")]
        for each in found["findings"]
    ]
    title = f"Audit of the oracle on {found['texts']:,} samples of p:"
    return f"{title}\n\n" + _table(["check", "", "found", ""], lines)


def examples_section(found: Sequence[dict[str, Any]]) -> str:
    """Utterances at even distances, none selected."""
    if not found:
        return ""
    names = [name for name in found[0] if name not in ("id", "source")]
    lines = [[each["source"], *(each[name] for name in names)] for each in found]
    title = (
        f"{len(found)} utterances at even distances, none selected (sources: Fisher, Post et al. 2013, "
        "CC BY-SA 3.0):"
    )
    return f"{title}\n\n" + _table(["source", *names], lines)


def _references(found: dict[str, Any]) -> str:
    words = "; ".join(
        f"{kind} references {facts['formality_oracle']:.3f} (oracle), {facts['formality_judge']:.3f} (judge)"
        for kind, facts in found.items()
    )
    return f"People's own translations: {words}."


def _setting(row: dict[str, Any]) -> list[str]:
    """Strength, doubt and plausibility, where the system has them."""
    return [
        "–" if row["system"] in (BASE, BEST_OF) else f"{row['strength']:g}",
        f"{row['doubt']:g}" if row["doubt"] else "–",
        f"{row['plausible']:g}" if row.get("plausible") else "–",
    ]


def _gains(found: dict[str, Any]) -> list[str]:
    """BLEU and both formality scores, against another line."""
    names = (("bleu_fluent", 2), ("formality_oracle", 3), ("formality_judge", 3))
    return [_gain(found.get(name), digits) for name, digits in names]


def _gain(found: dict[str, Any] | None, digits: int) -> str:
    return "–" if found is None else span_cell(found["difference"], found, digits, "+")


def _span(found: dict[str, Any]) -> str:
    return span_cell(found["value"], found, 2)


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows)


def fill(readme: Path, text: str) -> None:
    """Put the results between the two marks."""
    whole = readme.read_text(encoding="utf-8")
    if whole.count(BEGIN) != 1 or whole.count(FINISH) != 1:
        raise InputError(f"the marks {BEGIN} and {FINISH}", f"not one of each in {readme}", "Put them back.")
    before, rest = whole.split(BEGIN)
    readme.write_text(f"{before}{BEGIN}\n\n{text}\n\n{FINISH}{rest.split(FINISH)[1]}", encoding="utf-8")
