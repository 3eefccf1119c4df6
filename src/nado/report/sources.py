"""From what the stages measured to the parts of a report."""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nado.errors import InputError
from nado.exact_sampling.diagnostics import Diagnostics, diagnose
from nado.exact_sampling.weighted import WeightedTexts
from nado.metrics import Bin, Measure, Reliability, ratio
from nado.metrics.measure import require_as_many
from nado.metrics.resampling import DEFAULT, Resampling
from nado.metrics.shares import as_answers
from nado.proposals import WeightSummary
from nado.report.content import (
    Calibration,
    Chart,
    Curve,
    Fact,
    Histogram,
    Point,
    Report,
    Round,
    System,
    Weights,
)
from nado.rounds import RoundSummary
from nado.training import TrainingSummary

CURVE_POINTS = 120  # of a training curve; more steps than that are averaged in groups
HISTOGRAM_BINS = 24

# --- systems ------------------------------------------------------------------------------------------


def system_from_measures(
    name: str,
    measures: Iterable[Measure | Mapping[str, Any] | None],
    *,
    detail: str = "",
    cost: Iterable[Measure | Mapping[str, Any]] = (),
    weights: Weights | None = None,
) -> System:
    """A system from its measures, as they are or as `describe` gave them; None is left out."""
    known = tuple(_as_measure(each) for each in measures if each is not None)
    return System(name, detail, known, tuple(_as_measure(each) for each in cost), weights)


def _as_measure(value: Measure | Mapping[str, Any]) -> Measure:
    return value if isinstance(value, Measure) else Measure(**value)


def cost_from_texts(
    satisfied: Sequence[bool],
    tokens: Sequence[int],
    seconds: float | None = None,
    prompts: Sequence[Hashable] | None = None,
    resampling: Resampling = DEFAULT,
) -> tuple[Measure, ...]:
    """What texts have cost: `tokens` are those that the base was run for, for each text."""
    answers = as_answers(satisfied, "cost")
    require_as_many(answers, tokens, "answers", "numbers of tokens")
    each = ratio(
        "base tokens a satisfying text", tokens, answers, method="tokens of all texts over satisfying texts"
    )
    found = [
        Measure("base tokens", float(sum(tokens)), len(answers), unit="tokens", method="total"),
        replace(each.measure(prompts, resampling), unit="tokens"),
    ]
    return (*found, *_seconds(seconds, len(answers), int(answers.sum())))


def _seconds(seconds: float | None, texts: int, satisfying: int | None) -> list[Measure]:
    if seconds is None:
        return []
    total = Measure("seconds", seconds, texts, unit="seconds", method="wall clock, total")
    if satisfying is None:
        return [total]
    value = seconds / satisfying if satisfying else None
    note = None if satisfying else "no text satisfies"
    each = "seconds a satisfying text"
    return [total, Measure(each, value, texts, unit="seconds", method="wall clock", note=note)]


def system_from_row(row: Mapping[str, Any]) -> System:
    """A system from its row of evaluation.json."""
    measures = [_as_measure(each) for each in row["measures"].values()]
    satisfied = next((each for each in measures if each.name == "satisfied"), None)
    exact = bool(row.get("exact_end"))
    texts, total = int(row["texts"]), float(row["base_tokens"])
    successes = None if satisfied is None or satisfied.value is None else round(satisfied.value * satisfied.n)
    cost = [Measure("base tokens", total, texts, unit="tokens", method="total")]
    if successes is not None:
        value, note = (total / successes, None) if successes else (None, "no text satisfies")
        name, method = "base tokens a satisfying text", "tokens of all texts over satisfying texts"
        cost.append(Measure(name, value, texts, unit="tokens", method=method, note=note))
    cost += _seconds(float(row["seconds"]), texts, successes)
    name = row["system"] + (", exact end" if exact else "")
    return System(name, _detail(row.get("guidance", {})), tuple(measures), tuple(cost))


def _detail(guidance: Mapping[str, Any]) -> str:
    """What of the guidance is not as the method has it."""
    usual = {"strength": 1.0, "target_rate": 1.0, "doubt": 0.0, "plausible": 0.0}
    parts = {name: guidance.get(name, value) for name, value in usual.items()}
    names = {"target_rate": "rate"}
    return ", ".join(
        f"{names.get(name, name)} {value:g}" for name, value in parts.items() if value != usual[name]
    )


_SEEN = {True: ", seen in training", False: ", held out", None: ""}


def report_from_evaluation(evaluation: Mapping[str, Any], title: str | None = None, **parts: Any) -> Report:
    """A report from evaluation.json; `parts` are further fields of the report."""
    seen = evaluation.get("prompts_seen_in_training")
    known = {
        "base": evaluation["base"],
        "oracle": evaluation["oracle"],
        "prompts": f"{evaluation['prompts']}{_SEEN[seen]}",
        "texts a prompt": str(evaluation["texts_per_prompt"]),
        "decoding": evaluation["search"],
        "length limit": f"{evaluation['length_limit']} tokens, completion {evaluation['completion']!r}",
    }
    return Report(
        title=title or f"{evaluation['oracle']} on {evaluation['base']}",
        facts=tuple(Fact(name, value) for name, value in known.items()),
        systems=tuple(system_from_row(row) for row in evaluation["systems"]),
        versions=tuple(Fact(name, value) for name, value in evaluation["versions"].items()),
        **parts,
    )


# --- training and rounds ------------------------------------------------------------------------------

_CHARTS = (
    ("Loss", "mean loss", {"loss": "training", "held_out_loss": "held out"}),
    ("Calibration error while training", "ECE", {"held_out_calibration_error": "held out"}),
    ("Consistency while training", "mean |S − R|", {"held_out_consistency_residual": "held out"}),
)


def training_charts(summaries: TrainingSummary | Mapping[str, TrainingSummary]) -> tuple[Chart, ...]:
    """Curves of one training run, or of several by name; what was never measured has no chart."""
    runs = {"": summaries} if isinstance(summaries, TrainingSummary) else summaries
    return charts_of_histories({name: run.history for name, run in runs.items()})


def charts_of_histories(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> tuple[Chart, ...]:
    """The same from the runs' steps alone, each a row of what was measured."""
    keys = {key for history in runs.values() for row in history for key in row}
    guided = sorted(key for key in keys if key.startswith("guided_"))
    wanted = (*_CHARTS, *((*_name_guided(key), {key: "guided text"}) for key in guided))
    charts = []
    for title, y, names in wanted:
        curves = [
            _training_curve(" · ".join(part for part in (run_name, name) if part), history, key)
            for run_name, history in runs.items()
            for key, name in names.items()
        ]
        shown = tuple(curve for curve in curves if curve.points)
        if shown:
            note = _note_grouping(runs.values(), names)
            charts.append(Chart(title, "step", y, shown, note, from_zero="loss" not in names))
    return tuple(charts)


def _name_guided(key: str) -> tuple[str, str]:
    name = key.removeprefix("guided_").replace("_", " ")
    return f"Guided text while training: {name}", name


def _training_curve(name: str, history: Sequence[Mapping[str, float]], key: str) -> Curve:
    """One column of the history, averaged in groups of steps where it is long."""
    steps = [(step, row[key]) for step, row in enumerate(history, start=1) if key in row]
    size = math.ceil(len(steps) / CURVE_POINTS) if steps else 1
    groups = [steps[first : first + size] for first in range(0, len(steps), size)]
    means = (np.mean(group, axis=0).tolist() for group in groups)
    return Curve(name, tuple(Point(_round(x), _round(y)) for x, y in means))


def _note_grouping(histories: Iterable[Sequence[Mapping[str, float]]], names: Mapping[str, str]) -> str:
    most = max(sum(key in row for row in history) for history in histories for key in names)
    size = math.ceil(most / CURVE_POINTS)
    return f"Each point is the mean of up to {size} steps." if size > 1 else ""


def _round(value: float, digits: int = 6) -> float:
    return float(f"{value:.{digits}g}")


def rounds_from_summaries(
    summaries: Sequence[RoundSummary], after: Sequence[Measure | None] | None = None
) -> tuple[Round, ...]:
    """Rounds with the satisfaction of what each drew, and of guided texts `after` each where measured."""
    later = [None] * len(summaries) if after is None else list(after)
    require_as_many(summaries, later, "rounds", "measures after them")
    return tuple(
        Round(
            number=each.number,
            oracle=each.oracle,
            proposal=each.proposal,
            drawn=each.drawn,
            before=Measure(
                "satisfied",
                each.satisfied,
                each.drawn,
                unit="share",
                method="share of what the round drew from its proposal",
                note="no interval: a round does not keep which texts share a prompt",
            ),
            effective_share=each.effective_share,
            after=measured,
        )
        for each, measured in zip(summaries, later, strict=True)
    )


# --- calibration --------------------------------------------------------------------------------------


def calibration_from_reliability(
    system: str, found: Reliability, *, positions: Sequence[Bin] = (), prompts: Sequence[Bin] = ()
) -> Calibration:
    """From `metrics.reliability`, with tables of `metrics.calibration_by` where there are some."""
    return Calibration(
        system, found.bins, found.method, found.ece, found.brier, tuple(positions), tuple(prompts)
    )


def calibration_from_table(system: str, table: Mapping[str, Any]) -> Calibration:
    """From `calibration.calibration_table`, whose rates are weighted to be p's and so have no interval."""
    ece = Measure(
        "ECE",
        table["calibration_error"],
        table["texts"],
        method=f"Σ n_b / n · |mean R − rate|, {len(table['bins'])} bins in use",
        note="no interval: prefixes of one text share its label",
    )

    def rows(name: str) -> tuple[Bin, ...]:
        return tuple(
            Bin(_span(row), row["texts"], row["predicted"], row["observed"], None, None)
            for row in table[name]
        )

    prompts = tuple(
        Bin(f"{row['prompt']} · {row['condition']}", row["texts"], row["r_start"], row["rate"], None, None)
        for row in table["prompts"]
    )
    method = "bins of equal width; n counts texts"
    return Calibration(system, rows("bins"), method, ece, None, rows("positions"), prompts)


def _span(row: Mapping[str, Any]) -> str:
    return f"{row['from']:g}" if row["from"] == row["to"] else f"{row['from']:g}–{row['to']:g}"


# --- weights ------------------------------------------------------------------------------------------


def weights_from_texts(weighted: WeightedTexts, diagnostics: Diagnostics | None = None) -> Weights:
    """ESS, R(x) and divergence from weighted texts, and how the weights are spread."""
    found = diagnostics if diagnostics is not None else diagnose(weighted)
    measures = (found.ess, found.mean_weight, found.r_start, found.log_r_start, found.kl_to_target)
    kept = tuple(each for each in (*measures, found.acceptance) if each is not None)
    relative = weighted.grouped_log_weights - weighted.log_mean_weight[:, None]
    return Weights(kept, weight_histogram(relative.flatten().double().numpy()))


def weights_from_summary(summary: WeightSummary) -> Weights:
    """ESS and mean weight of drawn samples."""
    n, error = summary.samples, summary.standard_error
    half = None if error is None else 1.96 * error
    mean = Measure(
        "mean weight",
        summary.mean,
        n,
        low=None if half is None else summary.mean - half,
        high=None if half is None else summary.mean + half,
        method="mean of p / proposal, 1 in expectation; ± 1.96 standard errors",
    )
    note = "; ".join(summary.warnings()) or None
    return Weights(
        (
            Measure("ESS", summary.effective_samples, n, unit="texts", method="(Σ w)² / Σ w²", note=note),
            mean,
            Measure("largest weight", summary.largest, n, method="max of p / proposal"),
        )
    )


def weight_histogram(log_weights: Any) -> Histogram | None:
    """Counts of log weights relative to their prompt's mean; None where no weight is above 0."""
    column = np.asarray(log_weights, dtype=np.float64)
    known = column[np.isfinite(column)]
    if (column == math.inf).any():
        raise InputError(
            "log weights that are numbers or −inf", "inf", "Check that the texts were drawn from q."
        )
    if not len(known):
        return None
    counts, edges = np.histogram(known, bins=HISTOGRAM_BINS)
    return Histogram(
        "Weights",
        "log of the weight over its prompt's mean",
        tuple(_round(edge) for edge in edges.tolist()),
        tuple(counts.tolist()),
        len(column) - len(known),
    )
