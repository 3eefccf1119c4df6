"""Is R what it says it is? Recalibration after training, and the table that shows it.

A guide that was trained for long is often too sure of itself. Three numbers on the log-odds of R, two scales
above 0 and an offset (`mend_log_odds`), mend most of that and leave the order of its predictions alone. They
are fitted on texts of prompts that were held out.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from nado.decomposition import expected_log_r, log_one_minus, mend_log_odds, split_log_odds
from nado.errors import InputError
from nado.guide import UNCALIBRATED, Guide
from nado.heads import chunk_rows
from nado.objective import Reduced, prefix_mask
from nado.training import CALIBRATION_BINS, Objective, calibration_error, evaluating
from nado.training_data import Batch, TrainingData

# Beyond these the labels are separated by R, or R says nothing, and the fit would run away.
SMALLEST_SCALE, LARGEST_SCALE = 0.01, 10.0
# Of scale, offset and sure scale. Far from a half labels are all of one kind and would have R ever surer.
_BOUNDS = ((SMALLEST_SCALE, LARGEST_SCALE), (-math.inf, math.inf), (SMALLEST_SCALE, 1.0))

_ITERATIONS = 100
_CLOSE = 1e-10  # a Newton step this small is the end


@dataclass(frozen=True)
class Calibration:
    """What `mend_log_odds` takes, and what that does to held-out predictions."""

    scale: float  # of log-odds in the middle
    offset: float
    sure_scale: float  # of the rest of log-odds far from the middle; never above 1
    cross_entropy_before: float
    cross_entropy_after: float
    calibration_error_before: float
    calibration_error_after: float
    predictions: int  # it was fitted on

    def describe(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


class Predictions(NamedTuple):
    """R at the prefixes of held-out texts, one after the other: all (N,), on the CPU."""

    log_odds: Tensor  # of R(x, y≤i), float64
    happened: Tensor  # bool: C(x, y)
    weights: Tensor  # float64: what the prefix stands for under p
    positions: Tensor  # i
    texts: Tensor  # row of the data


def predict(
    objective: Objective, data: TrainingData, batch_size: int = 512, *, calibrated: bool = True
) -> Predictions:
    """R at every prefix of every text, the empty one (R(x)) included.

    As decoding sees it, or, not `calibrated`, as it was trained.
    """
    rows = data.lengths.argsort(stable=True)
    columns: list[Predictions] = []
    with evaluating(objective):
        for part in rows.split(objective.config.micro_batch or batch_size):
            batch = data.batch(part, objective.reader)
            log_odds = _log_odds(objective, batch, calibrated)
            inside = prefix_mask(batch.lengths, log_odds.shape[1])
            shape = inside.shape
            columns.append(
                Predictions(
                    log_odds[inside].cpu(),
                    batch.satisfied[:, None].expand(shape)[inside].cpu(),
                    batch.natural_weights[inside].double().cpu(),
                    torch.arange(shape[1]).expand(shape)[inside.cpu()],
                    part[:, None].expand(shape)[inside.cpu()],
                )
            )
    return Predictions(*(torch.cat(column) for column in zip(*columns, strict=True)))


def _log_odds(objective: Objective, batch: Batch, calibrated: bool) -> Tensor:
    """log R − log(1 − R) of every prefix, float64 (B, T + 1)."""
    reduced: Reduced = objective(batch)[2]
    log_odds = reduced.log_r.double() - reduced.log_not_r.double()
    calibration = objective.guide.config.calibration
    if not calibrated or calibration == UNCALIBRATED:
        return log_odds
    # The head mends its entries; R(x) is their sum under p, and has to be added up again.
    start = _start_log_odds(objective, batch)
    return torch.cat([start[:, None], mend_log_odds(log_odds[:, 1:], *calibration)], dim=1)


def _start_log_odds(objective: Objective, batch: Batch) -> Tensor:
    """The log-odds of R(x) = Σ_v p(v) R(v), from the R that decoding sees: (B,)."""
    guide, reader = objective.guide, objective.reader
    left = torch.full_like(batch.tokens[:, :1], reader.model.length_limit)
    progress = None if batch.progress is None else batch.progress[:, :1]
    features = guide.features(
        batch.states[:, :1], batch.last_tokens[:, :1], left, batch.conditions, progress
    )[:, 0]
    found = []
    for rows in torch.arange(len(left)).split(chunk_rows(reader.model.vocabulary_size, left.device)):
        none = torch.zeros_like(rows, device=left.device)
        log_p = reader.logits(batch.states[rows, 0], none).float().log_softmax(dim=-1)
        log_r = guide.log_r(guide.scores(features[rows]), log_p, none).double()  # (n, V)
        found.append(expected_log_r(log_p, log_r) - expected_log_r(log_p, log_one_minus(log_r)))
    return torch.cat(found)


# --- recalibration ------------------------------------------------------------------------------------


def calibrate(objective: Objective, held_out: TrainingData) -> Calibration:
    """Fit a guide's predictions to held-out labels.

    R(x) is left out: it is the sum of the entries that the head gives, and follows when they are mended.
    """
    found = predict(objective, held_out, calibrated=False)
    written = found.positions > 0
    return fit_calibration(found.log_odds[written], found.happened[written], found.weights[written])


def fit_calibration(log_odds: Tensor, happened: Tensor, weights: Tensor | None = None) -> Calibration:
    """The scales and the offset that minimise the cross-entropy of mended log-odds and `happened`, all (N,).

    Entries with infinite log-odds (R is exactly 0 or 1 there, and stays it) take no part.
    """
    known = log_odds.isfinite()
    z, y = log_odds[known].double(), happened[known].double()
    w = torch.ones_like(z) if weights is None else weights[known].double()
    _require_both(y * w, (1 - y) * w)
    w = w / w.sum()
    scale, offset, sure_scale = _fit(z, y, w)
    mended = mend_log_odds(z, scale, offset, sure_scale)
    return Calibration(
        scale=scale,
        offset=offset,
        sure_scale=sure_scale,
        cross_entropy_before=_cross_entropy(z, y, w),
        cross_entropy_after=_cross_entropy(mended, y, w),
        calibration_error_before=calibration_error(z.sigmoid(), y, weights=w),
        calibration_error_after=calibration_error(mended.sigmoid(), y, weights=w),
        predictions=len(z),
    )


def recalibrate(guide: Guide, calibration: Calibration) -> None:
    """Store the numbers in the guide's config, where decoding finds them; they replace earlier ones."""
    guide.config.calibration = (calibration.scale, calibration.offset, calibration.sure_scale)


def _fit(z: Tensor, y: Tensor, w: Tensor) -> tuple[float, float, float]:
    """Scale, offset and sure scale within their bounds; where one would leave them it is held at its edge."""
    # Where R is the same everywhere, scales and offset say the same thing: the offset alone is moved.
    constant = float(z.max() - z.min()) < 1e-6
    held: list[float | None] = [1.0, None, 1.0] if constant else [None, None, None]
    found = _minimise(z, y, w, held)
    while outside := [
        number
        for number, (least, most) in enumerate(_BOUNDS)
        if held[number] is None and not least <= found[number] <= most
    ]:
        # The cross-entropy is convex: its minimum within the bounds then lies on their edge.
        for number in outside:
            least, most = _BOUNDS[number]
            held[number] = min(max(found[number], least), most)
        found = _minimise(z, y, w, held)
    return found[0], found[1], found[2]


def _minimise(z: Tensor, y: Tensor, w: Tensor, held: list[float | None]) -> list[float]:
    """Newton's method with halved steps over scale, offset and sure scale, but for those that are `held`."""
    values = [first if fixed is None else fixed for first, fixed in zip(UNCALIBRATED, held, strict=True)]
    at = torch.tensor(values, dtype=torch.float64)
    free = torch.tensor([fixed is None for fixed in held])
    middle, rest = split_log_odds(z)
    inputs = torch.stack([middle, torch.ones_like(z), rest])  # (3, N)
    value = _cross_entropy(at @ inputs, y, w)
    for _ in range(_ITERATIONS):
        mean = (at @ inputs).sigmoid()
        gradient = (inputs @ (w * (mean - y)))[free]
        hessian = ((inputs * (w * mean * (1 - mean))) @ inputs.T)[free][:, free]
        ridge = 1e-12 + 1e-9 * hessian.diagonal().sum()  # far from the labels the curve is flat
        step = torch.zeros(3, dtype=torch.float64)
        step[free] = torch.linalg.solve(hessian + ridge * torch.eye(len(gradient)), gradient)
        while (better := _cross_entropy((at - step) @ inputs, y, w)) > value and step.abs().max() > _CLOSE:
            step = step / 2
        if step.abs().max() <= _CLOSE:
            break
        at, value = at - step, better
    return at.tolist()


def _cross_entropy(log_odds: Tensor, happened: Tensor, weights: Tensor) -> float:
    return float(binary_cross_entropy_with_logits(log_odds, happened, weights, reduction="sum"))


def _require_both(satisfied: Tensor, unsatisfied: Tensor) -> None:
    for kind, weight in (("satisfied", satisfied), ("unsatisfied", unsatisfied)):
        if not float(weight.sum()) > 0:
            raise InputError(
                "held-out texts of both kinds to calibrate on",
                f"no {kind} one among the {len(weight)} predictions",
                "Hold out more prompts.",
            )


# --- the table ----------------------------------------------------------------------------------------


def calibration_table(
    objective: Objective, held_out: TrainingData, *, bins: int = CALIBRATION_BINS, prompts: int = 1000
) -> dict[str, Any]:
    """Predicted against observed rates, JSON-ready: by bins of R, by position, and R(x) by prompt.

    Rates are those under p: texts of another proposal count by their importance weights. `prefixes` of one
    text share its label, so that a bin is about as sure as its number of `texts`, not of prefixes. At most
    `prompts` prompts are listed, those with the most texts first.
    """
    found = predict(objective, held_out)
    r = found.log_odds.sigmoid()
    place = (r * bins).long().clamp(max=bins - 1)
    by_bin = [
        {"from": number / bins, "to": (number + 1) / bins, **_rates(found, held_out, place == number)}
        for number in range(bins)
    ]
    start = _start_rates(found, held_out)
    texts = sum(row["texts"] for row in start)
    return {
        "texts": texts,
        "calibration_error": calibration_error(r, found.happened, bins, found.weights),
        "start_error": sum(row["texts"] * abs(row["r_start"] - row["rate"]) for row in start) / texts,
        "bins": [row for row in by_bin if row["prefixes"]],
        "positions": _by_position(found, held_out),
        "prompts": start[:prompts],
        "prompts_left_out": max(0, len(start) - prompts),
    }


def _by_position(found: Predictions, data: TrainingData) -> list[dict[str, Any]]:
    """Positions 0, 1, 2–3, 4–7 and so on: as fine as there are texts that get there."""
    table, first = [], 0
    while first <= int(found.positions.max()):
        last = max(0, 2 * first - 1)
        inside = (found.positions >= first) & (found.positions <= last)
        table.append({"from": first, "to": last, **_rates(found, data, inside)})
        first = last + 1
    return table


def _rates(found: Predictions, data: TrainingData, inside: Tensor) -> dict[str, Any]:
    weights = found.weights[inside]
    total = weights.sum().clamp(min=1e-30)
    return {
        "predicted": float((weights * found.log_odds[inside].sigmoid()).sum() / total),
        "observed": float((weights * found.happened[inside]).sum() / total),
        "prefixes": round(float(data.multiplicity[found.texts[inside]].sum())),
        "texts": round(float(data.multiplicity[found.texts[inside].unique()].sum())),
    }


def _start_rates(found: Predictions, data: TrainingData) -> list[dict[str, Any]]:
    """R(x) and the rate of satisfied texts, a prompt and condition at a time."""
    groups: dict[tuple[str, str], list[int]] = {}
    at_start = (found.positions == 0).nonzero()[:, 0]
    for index, row in zip(at_start.tolist(), found.texts[at_start].tolist(), strict=True):
        name = data.condition_names[int(data.condition[row])]
        groups.setdefault((data.prompts[row], name), []).append(index)
    table = []
    for (prompt, condition), members in groups.items():
        weights, r = found.weights[members], found.log_odds[members].sigmoid()
        table.append(
            {
                "prompt": prompt,
                "condition": condition,
                "texts": round(float(data.multiplicity[found.texts[members]].sum())),
                "r_start": float(r.mean()),
                "rate": float((weights * found.happened[members]).sum() / weights.sum().clamp(min=1e-30)),
            }
        )
    return sorted(table, key=lambda row: -row["texts"])
