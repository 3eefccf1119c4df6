"""Keyword boosting: a bias on the tokens of keywords, like transformers' `sequence_bias`.

What a careful user of such a bias would do: every form of every keyword gets it, behind a space as at the
start of a text; a keyword of several tokens is led from its first token to its last; and a keyword that is
written already is left alone (`missing_only`), which a plain `sequence_bias` cannot do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nado.baselines.keyword_forms import KeywordForms, keyword_forms, no_keywords
from nado.baselines.method import Method, Provisions, Sampled, Settings, System
from nado.following import Standing
from nado.guided_language_model import GuidedLanguageModel

_MOST_KEYWORDS = 32  # of a condition; more are refused


class KeywordBoosting(Method):
    """A bias on the tokens of keywords."""

    name = "keyword boosting"
    source = "sequence_bias of transformers; logit_bias of serving APIs"

    def obstacle(self, given: Provisions) -> str | None:
        """It needs keywords."""
        return no_keywords(given)

    def grid(self, given: Provisions) -> list[dict[str, Any]]:
        """How much is added to the logits of keywords, of all of them or of those that are missing."""
        missing = [{"bias": bias, "missing_only": True} for bias in (2.0, 4.0, 6.0, 9.0)]
        return [*missing, {"bias": 2.0, "missing_only": False}]

    def prepare(self, given: Provisions, settings: Settings) -> System:
        """The base with biased logits."""
        forms = keyword_forms(given)
        follower = BoostFollower(forms, settings["bias"], settings["missing_only"])
        return Sampled(GuidedLanguageModel(given.base, follower, oracle=forms.oracle), given.rows)


@dataclass
class _Rows:
    conditions: list[str]
    written: list[list[int]]


class BoostFollower:
    """A factor of 1 for tokens that begin or go on with a keyword and e^−bias for all others.

    After normalising that is the same as adding the bias to the former.
    """

    def __init__(self, forms: KeywordForms, bias: float, missing_only: bool) -> None:
        self.forms, self.bias = forms, bias
        self.progress_bits = _MOST_KEYWORDS if missing_only else 0

    @property
    def fingerprint(self) -> str:
        """The settings; the forms follow from base and oracle."""
        return f"boost-{self.bias}-{self.progress_bits > 0}"

    def start(self, prompts: Sequence[str], conditions: Sequence[str]) -> _Rows:
        """Fresh rows."""
        return _Rows(list(conditions), [[] for _ in conditions])

    def select(self, state: _Rows, rows: Tensor) -> _Rows:
        """The given rows, in that order."""
        places = rows.tolist()
        return _Rows([state.conditions[row] for row in places], [list(state.written[row]) for row in places])

    def refill(self, state: _Rows, rows: Tensor, prompts: Sequence[str], conditions: Sequence[str]) -> _Rows:
        """Fresh rows in the given places."""
        for row, condition in zip(rows.tolist(), conditions, strict=True):
            state.conditions[row], state.written[row] = condition, []
        return state

    def log_r(self, state: _Rows, standing: Standing) -> Tensor:
        """0 for what is boosted, −bias for the rest: (B, V)."""
        last, lengths = standing.last_tokens.tolist(), standing.generated.tolist()
        progress = None if standing.progress is None else standing.progress.tolist()
        places: list[tuple[int, int]] = []
        for row, (condition, written) in enumerate(zip(state.conditions, state.written, strict=True)):
            if lengths[row] > len(written):
                written.append(last[row])
            for number, forms in enumerate(self.forms.of(condition)):
                if progress is None or progress[row][number] != 1:
                    places += [(row, token) for token in forms.nexts(written)]
        factor = torch.full_like(standing.log_p, -self.bias)
        if places:
            where = torch.tensor(places, device=factor.device)
            factor[where[:, 0], where[:, 1]] = 0.0
        return factor

    def rewind(self, state: _Rows) -> None:
        """Nothing to forget: a token is appended only once."""
