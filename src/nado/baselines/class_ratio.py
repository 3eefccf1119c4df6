"""Class-conditional ratio: two language models, one of texts that satisfy and one of texts that fail.

GeDi (Krause et al. 2021) turns them round by Bayes' rule: with p⁺ and p⁻ the base's texts given C = 1 and C
= 0,

    R(y≤i) = π p⁺(y≤i) / (π p⁺(y≤i) + (1 − π) p⁻(y≤i)),      π = R(x),

which is exact for exact class models. DExperts (Liu et al. 2021) multiplies p by (p⁺ / p⁻)^α token by
token. Both are here, as forms of one product; the expert and the anti-expert are the base fine-tuned on q's
positive and negative training draws. Every token costs three passes of a model as large as the base.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from nado.baselines.fine_tuning import tune, untrainable, usual_rate
from nado.baselines.method import (
    Method,
    Provisions,
    Sampled,
    Settings,
    System,
    missing_labels,
    require_samples,
)
from nado.decomposition import apply_strength, guided_distribution
from nado.language_model import LanguageModel, OverBase, Refillable, is_refillable
from nado.prompts import Prompt

Form = Literal["bayes", "ratio"]


class ClassRatio(Method):
    """The base, led by the ratio of a model of satisfying texts to one of failing texts."""

    name = "class-conditional ratio"
    source = "GeDi, Krause et al. 2021; DExperts, Liu et al. 2021"
    trained = True

    def obstacle(self, given: Provisions) -> str | None:
        """It needs weights that can be trained, and texts of both kinds."""
        return untrainable(given) or missing_labels(given, both=True)

    def grid(self, given: Provisions) -> list[dict[str, Any]]:
        """Both forms, as they are and stronger."""
        bayes = [{"form": "bayes", "strength": strength} for strength in (1.0, 3.0)]
        return bayes + [{"form": "ratio", "strength": strength} for strength in (0.5, 1.0, 2.0)]

    def prepare(self, given: Provisions, settings: Settings) -> System:
        """The product of three models."""
        rate = usual_rate(given)
        expert = tune(given, satisfied=True, learning_rate=rate)
        other = tune(given, satisfied=False, learning_rate=rate)
        share = float(require_samples(given).array("satisfied").mean())
        model = RatioModel(
            given.base,
            expert.model,
            other.model,
            form=settings["form"],
            strength=settings["strength"],
            log_prior_odds=math.log(share) - math.log1p(-share),
            read_as=given.read_as,
        )
        return Sampled(model, given.rows, passes=3, training=expert.training.plus(other.training))


@dataclass(eq=False)
class RatioState:
    """Rows of three models, and how much likelier the expert finds what is written than the anti-expert."""

    owner: "RatioModel"
    states: list[Any]  # of the base, the expert and the anti-expert
    log_odds: Tensor  # (B,)
    now: Tensor | None = field(default=None)

    @property
    def log_p(self) -> Tensor:
        """log q of the next token: (B, V)."""
        if self.now is None:
            self.now = self.owner.mix(self)
        return self.now


class RatioModel(OverBase):
    """p times the class-conditional ratio, as a language model."""

    def __init__(
        self,
        base: LanguageModel[Any],
        expert: LanguageModel[Any],
        other: LanguageModel[Any],
        *,
        form: Form = "bayes",
        strength: float = 1.0,
        log_prior_odds: float = 0.0,
        read_as: Callable[[Prompt], Prompt] | None = None,
    ) -> None:
        self.models, self._read_as = [base, expert, other], read_as
        self.base, self.form, self.strength, self.log_prior_odds = base, form, strength, log_prior_odds

    @property
    def refillable(self) -> bool:
        """Whether the rows of all three can be replaced while others go on."""
        return all(is_refillable(model) for model in self.models)

    @property
    def fingerprint(self) -> str:
        """A digest of the three models and of how they are mixed."""
        parts = [model.fingerprint for model in self.models]
        parts.append(f"{self.form} {self.strength} {self.log_prior_odds}")
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:32]

    def start(self, prompts: Sequence[str], conditions: Sequence[str] | None = None) -> RatioState:
        """The state before the first token of each row."""
        asked = self._asked(prompts, conditions)
        states = [model.start(own, conditions) for model, own in zip(self.models, asked, strict=True)]
        return RatioState(self, states, torch.zeros(len(prompts), device=self.device))

    def step(self, state: RatioState, tokens: Tensor) -> RatioState:
        """Append one token to every row."""
        gained = _gather(state.states[1].log_p, tokens) - _gather(state.states[2].log_p, tokens)
        # A row that has ended is fed what neither model may know: its odds no longer matter.
        log_odds = state.log_odds + torch.nan_to_num(gained, nan=0.0)
        states = [model.step(each, tokens) for model, each in zip(self.models, state.states, strict=True)]
        return RatioState(self, states, log_odds)

    def select(self, state: RatioState, rows: Tensor) -> RatioState:
        """The given rows, in that order."""
        states = [model.select(each, rows) for model, each in zip(self.models, state.states, strict=True)]
        return RatioState(self, states, state.log_odds[rows])

    def refill(
        self,
        state: RatioState,
        rows: Tensor,
        prompts: Sequence[str],
        conditions: Sequence[str] | None = None,
    ) -> RatioState:
        """Start `prompts` in `rows`; the other rows go on where they are."""
        states = [
            cast(Refillable[Any], model).refill(each, rows, own, conditions)
            for model, each, own in zip(
                self.models, state.states, self._asked(prompts, conditions), strict=True
            )
        ]
        return RatioState(self, states, state.log_odds.index_fill(0, rows, 0.0))

    def score(
        self, prompts: Sequence[str], tokens: Tensor, lengths: Tensor, conditions: Sequence[str] | None = None
    ) -> Tensor:
        """Teacher-forced log q of each token, float32 (B, T), 0 from `lengths` on."""
        state, columns = self.start(prompts, conditions), []
        for position in range(tokens.shape[1]):
            inside = position < lengths
            token = torch.where(inside, tokens[:, position], self.eos_id)
            columns.append(torch.where(inside, _gather(state.log_p, token), 0.0))
            state = self.step(state, token)
        return torch.stack(columns, dim=1)

    def decode(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        """The base's."""
        return self.base.decode(tokens)

    def _asked(self, prompts: Sequence[str], conditions: Sequence[str] | None) -> list[list[str]]:
        """The prompts as each of the three models reads them."""
        told = list(prompts)
        if self._read_as is not None and conditions is not None:
            told = [self._read_as(Prompt(*pair)).prompt for pair in zip(prompts, conditions, strict=True)]
        return [list(prompts), told, told]

    def mix(self, state: RatioState) -> Tensor:
        """log q where the rows stand: (B, V)."""
        log_p, log_expert, log_other = (each.log_p for each in state.states)
        # What neither class model can write says nothing; p decides.
        gained = torch.nan_to_num(log_expert - log_other, nan=0.0, posinf=math.inf, neginf=-math.inf)
        if self.form == "ratio":
            factor = gained.clamp(-50.0, 50.0) * self.strength
        else:
            log_odds = state.log_odds[:, None] + gained + self.log_prior_odds
            factor = apply_strength(logsigmoid(log_odds), self.strength)
        return guided_distribution(log_p, factor).log_q


def _gather(log_p: Tensor, tokens: Tensor) -> Tensor:
    return log_p.gather(-1, tokens[:, None]).squeeze(-1)
