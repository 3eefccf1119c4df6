"""Fine-tuning the base on its own positives: maximum likelihood of the draws that satisfy the oracle.

Rejection-sampling fine-tuning, also called expert iteration or STaR's outer step (Anthony et al. 2017;
Zelikman et al. 2022). The texts that q's guide learned from as positives are samples of q*, so their
maximum likelihood is the model closest to q* that the base's own architecture can be. All weights are
trained; `lora.py` trains an adapter.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nado.baselines.method import (
    SHARED,
    Method,
    Provisions,
    Sampled,
    Settings,
    Stopwatch,
    System,
    Training,
    missing_labels,
    require_samples,
)
from nado.errors import InputError
from nado.huggingface import CausalModel, EncoderDecoderModel
from nado.language_model import LanguageModel
from nado.prompts import Prompt
from nado.samples import Ragged, Samples
from nado.training import DivergenceError

_BATCH = 64  # texts a step
_RAMP = 0.1  # share of the steps over which the learning rate rises; then it falls to 0
_WEIGHT_CLIP = 10.0  # largest weight of a text that was not drawn from p


class FineTuning(Method):
    """All of the base's weights, trained on its texts that satisfy the oracle."""

    name = "fine-tuning on positives"
    source = "Anthony et al. 2017; Zelikman et al. 2022"
    trained = True

    def obstacle(self, given: Provisions) -> str | None:
        """It needs weights that can be trained, and positives."""
        return untrainable(given) or missing_labels(given, both=False)

    def grid(self, given: Provisions) -> list[dict[str, Any]]:
        """Learning rates: the usual one for the base's size, and a quarter of it."""
        return [{"learning_rate": share * usual_rate(given)} for share in (1.0, 0.25)]

    def prepare(self, given: Provisions, settings: Settings) -> System:
        """The trained copy of the base."""
        tuned = tune(given, satisfied=True, learning_rate=settings["learning_rate"])
        return Sampled(tuned.model, given.rows, training=tuned.training, read_as=given.read_as)


@dataclass(frozen=True)
class Tuned:
    """A copy of the base with other weights."""

    model: LanguageModel[Any]
    training: Training


def tune(given: Provisions, *, satisfied: bool, learning_rate: float) -> Tuned:
    """A copy of the base, trained on the draws that satisfy the oracle or on those that do not."""

    def make() -> Tuned:
        model = copy.deepcopy(_trainable(given).model).float().requires_grad_(True)
        training = fit(given, model, satisfied=satisfied, learning_rate=learning_rate)
        return Tuned(with_weights(_trainable(given), model), training)

    shared = SHARED if satisfied else ""  # the class-conditional ratio needs the tuned base, too
    return given.remember(f"{shared}tuned satisfied={satisfied} rate={learning_rate}", make)


def fit(given: Provisions, model: Any, *, satisfied: bool, learning_rate: float) -> Training:
    """Train the parameters of a copy of the base's network that ask for it, in place."""
    watch, base = Stopwatch(), _trainable(given)
    kept = require_samples(given)
    kept = kept.filter(kept.array("satisfied").astype(bool) == satisfied)
    pairs = zip(kept.strings("prompt"), kept.strings("condition"), strict=True)
    prompts = [given.read_as(Prompt(*pair)).prompt for pair in pairs]
    scorer = with_weights(base, model, cast=False)
    parameters = [each for each in model.parameters() if each.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    steps = max(1, round(given.training_texts / _BATCH))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _rate(step / steps))
    weights, ragged = text_weights(kept), kept.ragged("tokens")
    texts = tokens = 0
    for rows in pick_rows(kept, steps, _BATCH, given.seed):
        loss, read = _loss(scorer, prompts, ragged, rows, weights)
        if not bool(loss.isfinite()):
            raise DivergenceError(
                "a finite loss while the base is fine-tuned",
                f"{float(loss.detach())} after {texts} texts",
                "Leave this method out with --only, or check the base's weights.",
            )
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        schedule.step()
        texts, tokens = texts + len(rows), tokens + read
    model.requires_grad_(False)
    return Training(texts, tokens, watch.seconds)


def with_weights(base: Any, model: Any, *, cast: bool = True) -> LanguageModel[Any]:
    """A language model with the base's tokenizer, limit and warpers, and other weights."""
    made = model.to(base.model.dtype) if cast else model
    common: dict[str, Any] = {
        "length_limit": base.length_limit,
        "completion": base.completion,
        "warpers": base.warpers,
        "chat": base.chat,
    }
    kind = CausalModel if isinstance(base, CausalModel) else EncoderDecoderModel
    return kind(made.eval(), base.tokenizer, **common)


def usual_rate(given: Provisions) -> float:
    """A learning rate that falls with the root of the base's size: 3e-4 up to 10M weights, 3e-5 at 1B."""
    size = sum(each.numel() for each in _trainable(given).model.parameters())
    return float(f"{3e-4 * min(1.0, (1e7 / size) ** 0.5):.2g}")


def untrainable(given: Provisions) -> str | None:
    """Why the base's weights cannot be trained."""
    if not isinstance(given.base, CausalModel | EncoderDecoderModel):
        return f"{type(given.base).__name__} has no weights to train"
    if not all(each.is_floating_point() for each in given.base.model.parameters()):
        return "the base's weights are quantised"
    return None


def text_weights(samples: Samples) -> Tensor:
    """p / proposal of every text, clipped: 1 where p itself has drawn it."""
    if samples.uncorrected:
        return torch.ones(len(samples))
    return torch.from_numpy(np.exp(np.minimum(samples.log_weights(), np.log(_WEIGHT_CLIP)))).float()


def pick_rows(samples: Samples, steps: int, size: int, seed: int) -> Iterator[list[int]]:
    """Rows of each step: passes over all texts in random order, texts of like length together."""
    generator = np.random.default_rng(seed)
    lengths = np.diff(samples.ragged("tokens").offsets)
    taken = 0
    while taken < steps:
        shuffled = generator.permutation(len(samples))
        groups = [shuffled[first : first + 8 * size] for first in range(0, len(shuffled), 8 * size)]
        ordered = [group[np.argsort(lengths[group], kind="stable")] for group in groups]
        batches = [group[at : at + size] for group in ordered for at in range(0, len(group), size)]
        for place in generator.permutation(len(batches))[: steps - taken].tolist():
            taken += 1
            yield batches[place].tolist()


def _loss(
    scorer: Any, prompts: list[str], ragged: Ragged, rows: list[int], weights: Tensor
) -> tuple[Tensor, int]:
    """−log p a token of some texts, and how many tokens were read, prompts apart."""
    own = [ragged.row(row).tolist() for row in rows]
    lengths = torch.tensor([len(row) for row in own], device=scorer.device)
    padded = torch.full((len(rows), int(lengths.max())), scorer.eos_id)
    for place, row in enumerate(own):
        padded[place, : len(row)] = torch.tensor(row)
    padded = padded.to(scorer.device)
    logits = scorer._score_logits(scorer.encode([prompts[row] for row in rows]), padded)
    log_p = scorer._score_rows(padded, logits, lengths)  # (B, T)
    weight = weights[rows].to(log_p.device)
    total = (weight * lengths).sum()
    return -(log_p.sum(dim=1) * weight).sum() / total, int(lengths.sum())


def _rate(done: float) -> float:
    """The share of the learning rate once a share of the steps is done."""
    return min((done + 1e-3) / _RAMP, (1 - done) / (1 - _RAMP))


def _trainable(given: Provisions) -> Any:
    reason = untrainable(given)
    if reason is not None:
        raise InputError("a base that can be fine-tuned", reason, "Use a base with float weights.")
    return given.base
