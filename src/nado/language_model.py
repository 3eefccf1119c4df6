"""The one protocol every language model in nado follows: `start`, `step`, `score`, `decode`.

A tabular toy, a Hugging Face model and a guided model are all language models, so drawing, exact
sampling, evaluation and serving are written once and need no branch on "guided or not".

What p means is fixed here. p is the model *with* its declared warpers and its length limit L, which
counts generated tokens, EOS included. Whoever steps a model stops each row at EOS or after L tokens.
`completion` says what a text cut at L is:

- ``"eos"``: a text is finished only when it ends itself; one cut at L is unsatisfied whatever it says.
- ``"limit"``: a text is finished at EOS or at L tokens, whichever comes first.

The two are never mixed. State is passed, not held: `start` makes one, `step` consumes it and returns
the next. A consumed state must not be used again, so implementations may write caches in place.
"""

from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

Completion = Literal["eos", "limit"]


class State(Protocol):
    """Where a batch of rows stands: what the next `step` needs, and the next-token distribution."""

    @property
    def log_p(self) -> Tensor:
        """Next-token log-probabilities, normalised, float32, −inf outside the support: (B, V)."""
        ...


StateT = TypeVar("StateT", bound=State)


@runtime_checkable
class LanguageModel(Protocol[StateT]):
    """p(y | prompt), one token at a time.

    `prompts` is what the base reads, `conditions` what a guide and an oracle read. A plain base
    ignores conditions; None means that they equal the prompts.
    """

    @property
    def vocabulary_size(self) -> int:
        """V: the width of `log_p`."""
        ...

    @property
    def eos_id(self) -> int:
        """The one token that ends a text. Models with several fold their mass into this one."""
        ...

    @property
    def length_limit(self) -> int:
        """L: the most tokens a text may have, EOS included."""
        ...

    @property
    def completion(self) -> Completion:
        """What a text cut at L counts as."""
        ...

    @property
    def device(self) -> torch.device:
        """Where `log_p` lives and where tokens are expected."""
        ...

    @property
    def fingerprint(self) -> str:
        """A digest of everything that defines p: weights, warpers, limit, completion, tokenizer."""
        ...

    def start(self, prompts: Sequence[str], conditions: Sequence[str] | None = None) -> StateT:
        """The state before the first token of each row."""
        ...

    def step(self, state: StateT, tokens: Tensor) -> StateT:
        """Append `tokens` (B,) to the rows; the given state is consumed.

        A row that has ended may be fed any token (EOS is usual); its `log_p` is then meaningless.
        """
        ...

    def select(self, state: StateT, rows: Tensor) -> StateT:
        """The state of the given rows, in that order: drop, repeat, reorder. Consumes `state`."""
        ...

    def score(
        self, prompts: Sequence[str], tokens: Tensor, lengths: Tensor, conditions: Sequence[str] | None = None
    ) -> Tensor:
        """Teacher-forced log p of each token, float32 (B, T), 0 from `lengths` (B,) on."""
        ...

    def decode(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        """The text of each row, without EOS and other special tokens."""
        ...


@runtime_checkable
class Refillable(LanguageModel[StateT], Protocol[StateT]):
    """A language model whose finished rows can be replaced by new prompts while others go on."""

    def refill(
        self, state: StateT, rows: Tensor, prompts: Sequence[str], conditions: Sequence[str] | None = None
    ) -> StateT:
        """Put a fresh start of `prompts` into `rows`; the other rows are untouched. Consumes `state`."""
        ...


@runtime_checkable
class Sampling(LanguageModel[StateT], Protocol[StateT]):
    """A language model that samples faster than by way of `log_p`."""

    def sample(self, state: StateT, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Where each row's cumulative distribution passes `noise` (B,): tokens and their log p, (B,) each."""
        ...


@runtime_checkable
class Preparing(LanguageModel[StateT], Protocol[StateT]):
    """A language model that can read prompts ahead of their `start` or `refill`, many at once."""

    def prepare(self, prompts: Sequence[str]) -> int:
        """Read as many of these different prompts as fit, first ones first; returns how many."""
        ...


class OverBase:
    """What a model that reweights a base's tokens has from that base."""

    base: "LanguageModel[Any]"

    @property
    def vocabulary_size(self) -> int:
        """The base's."""
        return self.base.vocabulary_size

    @property
    def eos_id(self) -> int:
        """The base's."""
        return self.base.eos_id

    @property
    def length_limit(self) -> int:
        """The base's."""
        return self.base.length_limit

    @property
    def completion(self) -> Completion:
        """The base's."""
        return self.base.completion

    @property
    def device(self) -> torch.device:
        """The base's."""
        return self.base.device


def is_finished(ended: Tensor, completion: Completion) -> Tensor:
    """Whether each drawn text counts as finished, given whether it emitted EOS within L tokens."""
    return ended if completion == "eos" else torch.ones_like(ended)


def is_refillable(model: LanguageModel[Any]) -> bool:
    """Whether rows can be refilled: the method is there, and the model does not say that it cannot."""
    # Not isinstance: before Python 3.12 that evaluates every property of the protocol.
    return callable(getattr(model, "refill", None)) and bool(getattr(model, "refillable", True))


def has_fixed_rows(model: LanguageModel[Any]) -> bool:
    """Whether a step is recorded for as many rows as there are: with fewer it would be recorded again."""
    return is_refillable(model) and model.device.type == "cuda"
