"""Examples from traces: texts cut into their tokens, each with what base and guide made of it."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from nado.errors import InputError
from nado.guidance import Guidance
from nado.guided_language_model import GuidedLanguageModel, Trace
from nado.metrics import mean_by_position
from nado.metrics.measure import require_as_many
from nado.metrics.resampling import DEFAULT, Resampling
from nado.report.content import Chart, Curve, Example, ExampleText, Point, TokenTrace

END = "⟨end⟩"  # how a choice of EOS is written

Decode = Callable[[Sequence[Sequence[int]]], list[str]]


def cut_text(decode: Decode, tokens: Sequence[int]) -> list[str]:
    """The piece of text that each token adds; together they are the text.

    A token may hold part of a character: the character then belongs to the token that completes it. So
    prefixes are decoded, and a piece ends where the prefix stops agreeing with the whole.
    """
    *prefixes, whole = decode([tokens[: end + 1] for end in range(len(tokens))]) or [""]
    pieces, start = [], 0
    for prefix in prefixes:
        end = max(start, _agreement(prefix, whole))
        pieces.append(whole[start:end])
        start = end
    return [*pieces, whole[start:]] if len(tokens) else []


def _agreement(first: str, second: str) -> int:
    """How many characters two texts have in common at their start."""
    for place, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return place
    return min(len(first), len(second))


def trace_texts(
    model: GuidedLanguageModel,
    system: str,
    prompts: Sequence[str],
    tokens: Sequence[Sequence[int]],
    conditions: Sequence[str] | None = None,
    *,
    satisfied: Sequence[bool | None] | None = None,
    finished: Sequence[bool] | None = None,
) -> list[ExampleText]:
    """Texts of any system, base included, as the guided `model` sees them token by token."""
    require_as_many(prompts, tokens, "prompts", "rows of tokens")
    trace, _ = trace_tokens(model, prompts, tokens, conditions)
    return [
        text_from_trace(
            trace,
            row,
            cut_text(model.decode, ids),
            _decode_choices(model, trace.base_choice[row, : len(ids)]),
            system=system,
            satisfied=None if satisfied is None else satisfied[row],
            finished=True if finished is None else bool(finished[row]),
            ends=len(ids) > 0 and int(ids[-1]) == model.eos_id,
            guidance=model.guidance,
        )
        for row, ids in enumerate(tokens)
    ]


def trace_tokens(
    model: GuidedLanguageModel,
    prompts: Sequence[str],
    tokens: Sequence[Sequence[int]],
    conditions: Sequence[str] | None = None,
) -> tuple[Trace, Tensor]:
    """The trace of rows of different length, and their lengths (B,)."""
    lengths = torch.tensor([len(row) for row in tokens])
    return model.trace_rows(prompts, tokens, conditions), lengths


def _decode_choices(model: GuidedLanguageModel, choices: Tensor) -> list[str]:
    ids = choices.tolist()
    alone = model.decode([[one] for one in ids]) if ids else []
    return [END if one == model.eos_id else text for one, text in zip(ids, alone, strict=True)]


def text_from_trace(
    trace: Trace,
    row: int,
    tokens_as_text: Sequence[str],
    choices_as_text: Sequence[str],
    *,
    system: str,
    satisfied: bool | None = None,
    finished: bool = True,
    ends: bool = False,
    guidance: Guidance | None = None,
) -> ExampleText:
    """One row of a trace. `ends`: whether its last token is EOS.

    R is the factor that was multiplied in, where that was R or a power of it; at a soft rate, under doubt, of
    plausible tokens alone or at strength 0 it is not recorded.
    """
    require_as_many(tokens_as_text, choices_as_text, "tokens", "choices of the base")
    guidance = guidance if guidance is not None else Guidance()
    has_r = guidance.strength > 0 and not (guidance.soft or guidance.doubt or guidance.plausible)
    count = len(tokens_as_text)

    def column(values: Tensor, power: float = 1.0) -> list[float | None]:
        return [_finite(value / power) for value in values[row, :count].tolist()]

    nothing: list[float | None] = [None] * count
    log_r = column(trace.log_factor, guidance.strength) if has_r else nothing
    columns = zip(
        tokens_as_text,
        column(trace.log_p),
        column(trace.log_q),
        log_r,
        choices_as_text,
        column(trace.log_p_base_choice),
        strict=True,
    )
    tokens = tuple(
        TokenTrace(text, log_p, log_q, r, choice, log_p_choice, ends and place == count - 1)
        for place, (text, log_p, log_q, r, choice, log_p_choice) in enumerate(columns)
    )
    start = _finite(float(trace.log_s[row, 0])) if guidance.plain and count else None
    return ExampleText(system, "".join(tokens_as_text), satisfied, finished, tokens, has_r, start)


def _finite(log_value: float) -> float | None:
    """A log with the digits that mean something, None for that of 0."""
    if math.isnan(log_value) or log_value == math.inf:
        raise InputError(
            "logs of probabilities in a trace", f"{log_value}", "The model overflowed: load it in float32."
        )
    return None if math.isinf(log_value) else round(log_value, 5) + 0.0


def choose_rows(total: int, count: int = 20, seed: int = 0) -> tuple[list[int], str]:
    """Rows to show, chosen by a seed before anything is known of them, and the sentence that says so."""
    if total < 1 or count < 1:
        raise InputError(
            "at least one row to choose from and to choose", f"{count} of {total}", "Write texts first."
        )
    if count >= total:
        return list(range(total)), f"all {total} that were written"
    rows = np.random.default_rng(seed).choice(total, size=count, replace=False)
    return sorted(rows.tolist()), f"{count} of {total}, chosen by seed {seed}; none replaced"


def pair_examples(
    prompts: Sequence[str], conditions: Sequence[str], *columns: Sequence[ExampleText]
) -> tuple[Example, ...]:
    """Side by side what each system, a column each, wrote about each prompt."""
    for column in (conditions, *columns):
        require_as_many(prompts, column, "prompts", "conditions or texts of a system")
    return tuple(
        Example(prompt, condition, tuple(column[row] for column in columns))
        for row, (prompt, condition) in enumerate(zip(prompts, conditions, strict=True))
    )


# --- consistency --------------------------------------------------------------------------------------


def consistency_curve(
    name: str,
    trace: Trace,
    lengths: Sequence[int] | Tensor,
    guidance: Guidance | None = None,
    resampling: Resampling = DEFAULT,
) -> Curve:
    """|Σ_v p(v) R(y≤i ⊕ v) − R(y≤i)| after i tokens, mean over texts: 0 where a guide agrees with itself."""
    if guidance is not None and not guidance.plain:
        raise InputError(
            "a trace in which R itself was multiplied in",
            f"strength {guidance.strength:g}, target rate {guidance.target_rate:g}, "
            f"doubt {guidance.doubt:g}, plausible {guidance.plausible:g}",
            "Trace the texts once more with Guidance().",
        )
    ends = np.asarray(lengths, dtype=np.int64) - 1
    gap = (trace.log_s[:, 1:].exp() - trace.log_factor[:, :-1].exp()).abs().double().cpu().numpy()
    if not len(ends) or ends.max() < 1:
        return Curve(name, ())
    measures = mean_by_position("consistency", gap, ends.clip(min=0), resampling)
    points = (
        Point(float(place), each.value, each.low, each.high, each.n)
        for place, each in enumerate(measures, start=1)
        if each.value is not None
    )
    return Curve(name, tuple(points))


def consistency_chart(*curves: Curve) -> Chart:
    """Consistency by position of one or several systems."""
    return Chart(
        "Consistency by position",
        "tokens written",
        "mean |S − R|",
        curves,
        "How far R of a prefix is from what R promises of its continuations: 0 is consistent.",
    )
