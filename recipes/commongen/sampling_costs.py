"""What a satisfying text costs in base tokens, by rejection and guided; and soft rates, asked for and got."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from concept_sets import ConceptSet
from drawn_texts import draw_labelled
from numpy.typing import NDArray
from study_settings import CostSettings

from nado.guidance import Guidance
from nado.guide import Guide
from nado.guided_language_model import GuidedLanguageModel
from nado.huggingface import CausalModel
from nado.metrics import Metric, ratio, share
from nado.oracles import Keywords
from nado.prompts import Prompt
from nado.samples import Samples


def choose(
    sets: Sequence[ConceptSet], rates: NDArray[np.float64], between: tuple[float, float], *, inclusive: bool
) -> list[Prompt]:
    """The prompts that p satisfies this often."""
    low, high = between
    inside = (rates >= low) & (rates <= high) if inclusive else (rates > low) & (rates < high)
    return [each.prompt for each, wanted in zip(sets, inside, strict=True) if wanted]


def compare_with_rejection(
    model: CausalModel,
    guide: Guide,
    oracle: Keywords,
    prompts: Sequence[Prompt],
    folder: Path,
    settings: CostSettings,
) -> dict[str, Any]:
    """Base tokens for a satisfying text of rare prompts, of fresh draws from p and from q, exact end off.

    The prompts were chosen by other draws: on those that chose them their rates would read too low or high.
    """
    guided = GuidedLanguageModel(model, guide, guidance=Guidance(), oracle=oracle)
    drawn = {
        name: draw_labelled(
            each,
            prompts,
            folder / name,
            oracle,
            samples=settings.rare_samples,
            seed=settings.seed,
            batch=settings.batch,
        )
        for name, each in (("p", model), ("q", guided))
    }
    sums = {name: _tokens_and_hits(samples, settings.rare_samples) for name, samples in drawn.items()}
    found: dict[str, Any] = {"prompts": len(prompts), "samples_of_each": settings.rare_samples}
    for name, rows in sums.items():
        metric = ratio("base tokens a satisfying text", rows[:, 0], rows[:, 1])
        found[name] = {
            "rate": float(rows[:, 1].sum() / (len(prompts) * settings.rare_samples)),
            "tokens_per_satisfying_text": asdict(metric.measure(over="prompts")),
        }
    both = Metric(
        "base tokens of rejection over guided", np.concatenate([sums["p"], sums["q"]], axis=1), _over, "ratio"
    )
    return {**found, "ratio": asdict(both.measure(over="prompts"))}


def _tokens_and_hits(samples: Samples, per_prompt: int) -> NDArray[np.float64]:
    """Tokens and satisfying texts of each prompt: (prompts, 2)."""
    lengths = np.diff(samples.ragged("tokens").offsets).reshape(-1, per_prompt).sum(axis=1)
    hits = samples.array("satisfied").reshape(-1, per_prompt).sum(axis=1)
    return np.stack([lengths, hits], axis=1).astype(np.float64)


def _over(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """(tokens_p / hits_p) / (tokens_q / hits_q)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(
            (sums[..., 1] == 0) | (sums[..., 2] == 0),
            np.nan,
            sums[..., 0] / sums[..., 1] * sums[..., 3] / sums[..., 2],
        )


def measure_soft_rates(
    model: CausalModel,
    guide: Guide,
    oracle: Keywords,
    prompts: Sequence[Prompt],
    folder: Path,
    settings: CostSettings,
) -> list[dict[str, Any]]:
    """Rates asked for and rates got, over the same prompts."""
    lines = []
    for number, rate in enumerate(settings.rates):
        guided = GuidedLanguageModel(model, guide, guidance=Guidance(target_rate=rate), oracle=oracle)
        samples = draw_labelled(
            guided,
            prompts,
            folder / f"rate-{rate:g}",
            oracle,
            samples=settings.rate_samples,
            seed=settings.seed + number,
            batch=settings.batch,
        )
        got = share("rate", samples.array("satisfied"), samples.strings("prompt"))
        lines.append({"asked": rate, "got": got.value, "low": got.low, "high": got.high, "texts": got.n})
    return lines
