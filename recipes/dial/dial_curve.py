"""Points of a dial's curve: what was asked for, what came, and what it cost in likelihood."""

import gzip
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from dial_settings import CurveSettings
from numpy.typing import NDArray

from nado.composition import Composable
from nado.dial import Dial, draw_dialled
from nado.exact_sampling import WeightedTexts, draw_weighted
from nado.guidance import Guidance
from nado.guided_language_model import GuidedLanguageModel
from nado.huggingface import CausalModel
from nado.metrics import Measure, kl_from_base, mean, perplexity_of_log_p, score_tokens, share
from nado.oracles.protocol import Oracle
from nado.prompts import Prompt
from nado.storage import read_json, write_bytes, write_json

SHARES = "shares.json"  # of each prompt of a point
_SCORE_BATCH = 256


class Dialled(NamedTuple):
    """A base with what steers it: a guide or a formula over guides, and the oracle it is about."""

    model: CausalModel
    guide: Composable
    oracle: Oracle

    @property
    def plain(self) -> GuidedLanguageModel:
        """The guided model itself."""
        return self.at(1.0)

    def at(self, rate: float) -> GuidedLanguageModel:
        """The guided model at a requested rate."""
        guidance = Guidance(target_rate=rate)
        return GuidedLanguageModel(self.model, self.guide, guidance=guidance, oracle=self.oracle)


def measure_point(
    dialled: Dialled, prompts: Sequence[str], rate: float, settings: CurveSettings, folder: Path
) -> dict[str, Any]:
    """One point: texts drawn at the rate, judged and scored under p."""
    began = time.perf_counter()
    weighted = draw_weighted(
        dialled.at(rate),
        prompts,
        None,
        dialled.oracle,
        count=settings.texts,
        seed=settings.seed * 1009 + round(1000 * rate),
        batch_size=settings.batch,
    )
    write_texts(folder / "texts.jsonl.gz", weighted)
    shares = shares_by_prompt(weighted)
    write_json(folder / SHARES, {name: each.tolist() for name, each in shares.items()})
    return {
        "asked": rate,
        **point_measures(dialled.model, weighted),
        "corrected": _interval(mean("corrected rate", shares["corrected"]).measure()),
        "prompts": len(prompts),
        "texts": len(weighted),
        "seconds": round(time.perf_counter() - began, 1),
    }


def point_measures(model: CausalModel, weighted: WeightedTexts) -> dict[str, Any]:
    """The share of satisfied texts, their perplexity under p, and KL(q‖p), with intervals over prompts."""
    prompts = [each.prompt for each in weighted.groups for _ in range(weighted.size)]
    lengths = weighted.lengths.tolist()
    tokens = [row[:length] for row, length in zip(weighted.tokens.tolist(), lengths, strict=True)]
    log_p = score_tokens(model, prompts, tokens, batch_size=_SCORE_BATCH)
    totals = np.array([float(np.sum(row, dtype=np.float64)) for row in log_p])
    # log p is taken from the weights' own ratio, so that both sides of KL come from one forward pass.
    log_q = totals - weighted.log_ratio.numpy()
    return {
        "got": _interval(share("rate", weighted.satisfied.numpy(), prompts)),
        "perplexity": _interval(perplexity_of_log_p(log_p).measure(prompts)),
        "kl": _interval(kl_from_base(log_q, totals, prompts)),
        "tokens": float(np.mean(lengths)),
        "effective_share": float((weighted.ess / weighted.size).mean()),
    }


def shares_by_prompt(weighted: WeightedTexts) -> dict[str, NDArray[np.float64]]:
    """Of each prompt the share of satisfied texts, and the chance that the one chosen by weight is satisfied.

    Where no text of a prompt has any weight (at rate 1 none is satisfied, at rate 0 all are) any is chosen.
    """
    satisfied = weighted.satisfied.view(len(weighted.groups), -1).double()
    got = satisfied.mean(dim=1)
    log_weights = weighted.grouped_log_weights
    none = log_weights.isneginf().all(dim=1)
    chances = log_weights.masked_fill(none[:, None], 0.0).softmax(dim=1)
    corrected = torch.where(none, got, (chances * satisfied).sum(dim=1))
    return {"got": got.numpy(), "corrected": corrected.numpy()}


def measure_turned(
    dialled: Dialled, dial: Dial, prompts: Sequence[str], rate: float, settings: CurveSettings, folder: Path
) -> dict[str, Any]:
    """One point of the dial of measured stops: its texts are drawn without a question, and then judged."""
    began = time.perf_counter()
    asked = [Prompt(each, each) for each in prompts for _ in range(settings.texts)]
    seed = settings.seed * 1013 + round(1000 * rate)
    samples = draw_dialled(dialled.plain, dial, rate, asked, seed=seed, batch_size=settings.batch)
    names, conditions = samples.strings("prompt"), samples.strings("condition")
    satisfied = dialled.oracle(conditions, samples.strings("text"))
    column = samples.ragged("log_p")
    log_p = [column.row(row) for row in range(len(samples))]
    turn = dial.at(rate)
    lines = [
        {"prompt": name, "text": text, "satisfied": bool(answer)}
        for name, text, answer in zip(names, samples.strings("text"), satisfied, strict=True)
    ]
    write_lines(folder / "texts.jsonl.gz", lines)
    return {
        "asked": rate,
        "expected": turn.rate,
        "stops": {f"{stop.strength:g}": part for part, stop in turn.stops},
        "got": _interval(share("rate", satisfied, names)),
        "perplexity": _interval(perplexity_of_log_p(log_p).measure(names)),
        "kl": _interval(kl_from_base(samples.ragged("log_proposal").sums(), column.sums(), names)),
        "spread": float(satisfied.reshape(len(prompts), -1).mean(axis=1).std()),
        "prompts": len(prompts),
        "texts": len(samples),
        "seconds": round(time.perf_counter() - began, 1),
    }


def mix_ends(none: Path, all_: Path, rates: Sequence[float]) -> list[dict[str, Any]]:
    """Every rate from the two ends alone: r of the texts are written at rate 1 and the others at rate 0.

    The target at rate r is r·p(·|C) + (1 − r)·p(·|¬C), so that this aims at the very same distribution, and
    needs no R(x).
    """
    ends = [read_json(folder / SHARES) for folder in (none, all_)]
    found = []
    for rate in rates:
        line: dict[str, Any] = {"asked": rate}
        for name in ("got", "corrected"):
            low, high = (np.array(each[name]) for each in ends)
            line[name] = _interval(mean("mixed rate", (1 - rate) * low + rate * high).measure())
        found.append(line)
    return found


def chance_of_one(hits: int, of: int, drawn: int) -> float:
    """How likely `drawn` different ones of `of` texts, of which `hits` are right, have a right one."""
    return 1 - math.comb(of - hits, min(drawn, of)) / math.comb(of, min(drawn, of))


def start_rates(dialled: Dialled, prompts: Sequence[str], batch: int) -> NDArray[np.float64]:
    """R(x) of each prompt, as the guide has it: S of the first step."""
    plain, found = dialled.plain, []
    for first in range(0, len(prompts), batch):
        state = plain.start(prompts[first : first + batch])
        found.append(state.step.log_s.double().exp().cpu())
    rates: NDArray[np.float64] = torch.cat(found).numpy()
    return rates


def least_kl(rates: NDArray[np.float64], asked: float) -> float:
    """The smallest KL(q‖p) with which texts satisfy at the rate asked for: mean over prompts.

    A text only has to be told from another by C: KL of two Bernoullis, r and R(x).
    """
    inside = np.clip(rates, 1e-12, 1 - 1e-12)

    def part(wanted: float, natural: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.zeros_like(natural) if wanted == 0 else wanted * (math.log(wanted) - np.log(natural))

    return float(np.mean(part(asked, inside) + part(1 - asked, 1 - inside)))


def compare_start(
    rates: NDArray[np.float64], satisfied: NDArray[np.bool_], per_prompt: int
) -> dict[str, Any]:
    """R(x) against how often p's own texts satisfy: on average, and prompt by prompt."""
    observed = satisfied.reshape(-1, per_prompt).mean(axis=1)
    return {
        "predicted": float(rates.mean()),
        "observed": float(observed.mean()),
        "error": _interval(mean("error", rates - observed).measure()),
        "correlation": _correlation(rates, observed),
        "texts_of_each": per_prompt,
    }


def _correlation(first: NDArray[np.float64], second: NDArray[np.float64]) -> float | None:
    if len(first) < 3 or first.std() == 0 or second.std() == 0:
        return None
    return float(np.corrcoef(first, second)[0, 1])


def write_texts(path: Path, weighted: WeightedTexts) -> None:
    """Every text with its weight and answer."""
    lines = [
        {
            "prompt": weighted.groups[row // weighted.size].prompt,
            "text": text,
            "satisfied": bool(satisfied),
            "log_weight": None if math.isinf(weight) else round(weight, 4),
        }
        for row, (text, satisfied, weight) in enumerate(
            zip(weighted.texts, weighted.satisfied.tolist(), weighted.log_weights.tolist(), strict=True)
        )
    ]
    write_lines(path, lines)


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """One JSON object a line, packed."""
    content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
    write_bytes(path, gzip.compress(content, mtime=0))


def _interval(found: Measure) -> dict[str, Any]:
    return {"value": found.value, "low": found.low, "high": found.high}
