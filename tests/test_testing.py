"""`check_language_model` accepts models that keep the contract and tells the others what is wrong."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from nado.errors import InputError, MismatchError, NadoError
from nado.exact import TabularModel, TabularState, exact_model
from nado.testing import check_language_model
from strategies import PROMPTS, RandomOracle, exactly, models


@exactly
@given(models())
def test_tabular_models_keep_the_contract(drawn: tuple[TabularModel, str]) -> None:
    check_language_model(drawn[0], list(PROMPTS))


def test_a_guided_model_is_a_language_model() -> None:
    base = TabularModel.random(PROMPTS, vocabulary_size=4, length_limit=4, completion="limit")
    guided = exact_model(base, RandomOracle(1, 0.5), [("one", "two"), ("two", ""), ("one", "one")])
    check_language_model(guided, ["one", "two", "one"], ["two", "", "one"])


def test_one_prompt_and_one_step_are_enough() -> None:
    check_language_model(TabularModel.random(length_limit=1, vocabulary_size=2), [""])


class Whole(TabularModel):
    """The model that the wrong ones below differ from in one thing each."""


class Unnormalised(Whole):
    def start(self, prompts: Sequence[str], conditions: Sequence[str] | None = None) -> TabularState:
        state = super().start(prompts, conditions)
        return replace(state, tables=state.tables - 0.5)


class DoublePrecision(Whole):
    def start(self, prompts: Sequence[str], conditions: Sequence[str] | None = None) -> Any:
        class Wide(TabularState):
            @property
            def log_p(self) -> Tensor:
                return self.log_p_exact

        state = super().start(prompts, conditions)
        return Wide(state.tables, state.table, state.prefix)


class NotANumber(Whole):
    def start(self, prompts: Sequence[str], conditions: Sequence[str] | None = None) -> TabularState:
        state = super().start(prompts, conditions)
        return replace(state, tables=state.tables.index_fill(2, torch.tensor([0]), torch.nan))


class ScoreOneLate(Whole):
    def score(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().score(*args, **kwargs).roll(1, dims=1) * (torch.arange(4) < args[2].unsqueeze(1))


class ScoreWithoutEos(Whole):
    def score(
        self, prompts: Sequence[str], tokens: Tensor, lengths: Tensor, conditions: Sequence[str] | None = None
    ) -> Tensor:
        return super().score(prompts, tokens, lengths, conditions) * (tokens != self.eos_id)


class ScoreOfPadding(Whole):
    def score(
        self, prompts: Sequence[str], tokens: Tensor, lengths: Tensor, conditions: Sequence[str] | None = None
    ) -> Tensor:
        scores = super().score(prompts, tokens, lengths, conditions)
        return torch.where(torch.arange(tokens.shape[1]) < lengths.unsqueeze(1), scores, -1.0)


class SelectForgetsTheOrder(Whole):
    def select(self, state: TabularState, rows: Tensor) -> TabularState:
        return super().select(state, rows.sort().values)


class SelectForgetsTheCache(Whole):
    def select(self, state: TabularState, rows: Tensor) -> TabularState:
        return replace(
            super().select(state, rows), prefix=state.prefix[torch.arange(len(rows)) % len(state.prefix)]
        )


class RefillKeepsTheOldText(Whole):
    def refill(self, state: TabularState, rows: Tensor, *args: Any, **kwargs: Any) -> TabularState:
        return replace(super().refill(state, rows, *args, **kwargs), prefix=state.prefix)


class RefillResetsEveryone(Whole):
    def refill(self, state: TabularState, rows: Tensor, *args: Any, **kwargs: Any) -> TabularState:
        fresh = super().refill(state, rows, *args, **kwargs)
        return replace(fresh, prefix=torch.zeros_like(fresh.prefix))


class RowsLeak(Whole):
    """Every row stands where the first one stands."""

    def step(self, state: TabularState, tokens: Tensor) -> TabularState:
        following = super().step(state, tokens)
        return replace(following, prefix=following.prefix[:1].expand_as(following.prefix))


class WritesIntoTokens(Whole):
    def step(self, state: TabularState, tokens: Tensor) -> TabularState:
        following = super().step(state, tokens)
        tokens.fill_(0)
        return following


class WritesIntoPrompts(Whole):
    def score(self, prompts: Any, *args: Any, **kwargs: Any) -> Tensor:
        scores = super().score(prompts, *args, **kwargs)
        prompts.reverse()
        return scores


class TouchesTheGlobalGenerator(Whole):
    def start(self, prompts: Sequence[str], conditions: Sequence[str] | None = None) -> TabularState:
        torch.rand(1)
        return super().start(prompts, conditions)


class Dropout(Whole):
    calls = 0

    def start(self, prompts: Sequence[str], conditions: Sequence[str] | None = None) -> TabularState:
        self.calls += 1
        state = super().start(prompts, conditions)
        return replace(state, tables=torch.log_softmax(state.tables * (1 + 0.1 * self.calls), dim=-1))


class DecodesEos(Whole):
    def decode(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        return ["".join("." if t == self.eos_id else "x" for t in row) for row in tokens]


class DecodesOneString(Whole):
    def decode(self, tokens: Sequence[Sequence[int]]) -> Any:
        return "".join(super().decode(tokens))


class DecodesEmptyToSpace(Whole):
    def decode(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        return [text or " " for text in super().decode(tokens)]


class SamplesQuickly(Whole):
    """Not wrong: a model with `sample`."""

    def sample(self, state: TabularState, noise: Tensor) -> tuple[Tensor, Tensor]:
        passed = state.log_p.exp().cumsum(dim=1) <= noise.unsqueeze(1)
        tokens = passed.sum(dim=1)
        return tokens, state.log_p.gather(1, tokens.unsqueeze(1)).squeeze(1)


class SamplesAndMisreports(SamplesQuickly):
    def sample(self, state: TabularState, noise: Tensor) -> tuple[Tensor, Tensor]:
        tokens, log_p = super().sample(state, noise)
        return tokens, 1.2 * log_p


class CannotRefill(RefillResetsEveryone):
    """Not wrong: it says that its rows cannot be refilled."""

    refillable = False


class IgnoresTheDefault(Whole):
    def start(self, prompts: Sequence[str], conditions: Sequence[str] | None = None) -> TabularState:
        state = super().start(prompts, conditions)
        flat = torch.log_softmax(state.tables * 0.5, dim=-1)
        return state if conditions is None else replace(state, tables=flat)


class EosOutside(Whole):
    @property
    def eos_id(self) -> int:
        return 4


class UnstableFingerprint(Whole):
    calls = 0

    @property
    def fingerprint(self) -> str:
        self.calls += 1
        return str(self.calls)


SAME = "arguments to come back unchanged"
WRONG: list[tuple[type[Whole], type[NadoError], str, str]] = [
    (Unnormalised, InputError, "log_p of step 1 to sum to 1", "a row that sums to 0.6065"),
    (
        DoublePrecision,
        InputError,
        "log_p of step 1 to be a tensor of shape (3, 4) in torch.float32",
        "(3, 4) in torch.float64",
    ),
    (NotANumber, InputError, "log_p of step 1 to hold log-probabilities, ≤ 0 and never nan", "nan"),
    (ScoreOneLate, MismatchError, "score to agree with start and step", "a difference of"),
    (ScoreWithoutEos, MismatchError, "score to agree with start and step", "a difference of"),
    (ScoreOfPadding, InputError, "score to be 0 from each row's length on", "1"),
    (
        SelectForgetsTheOrder,
        MismatchError,
        "rows [2, 0, 0, 1] to have the log_p of their own texts",
        "a diff",
    ),
    (
        SelectForgetsTheCache,
        MismatchError,
        "rows [2, 0, 0, 1] to have the log_p of their own texts",
        "a diff",
    ),
    (
        RefillKeepsTheOldText,
        MismatchError,
        "row 2 to have the log_p of its own text 0 steps after a refill",
        "a",
    ),
    (
        RefillResetsEveryone,
        MismatchError,
        "row 0 to have the log_p of its own text 0 steps after a refill",
        "a",
    ),
    (
        RowsLeak,
        MismatchError,
        "row 1 alone to have the log_p it has in the batch, at step",
        "a difference of",
    ),
    (WritesIntoTokens, MismatchError, SAME, "other tokens after step"),
    (WritesIntoPrompts, MismatchError, SAME, "other prompts after start, step or score"),
    (
        TouchesTheGlobalGenerator,
        MismatchError,
        "the global random state of torch to be left alone",
        "that start changed it",
    ),
    (Dropout, MismatchError, "the same log_p from two starts on the same prompts", "a difference of"),
    (DecodesEos, MismatchError, "EOS to decode to nothing", "["),
    (DecodesOneString, InputError, "decode to return a list of 3 strings, one for each row", "'"),
    (DecodesEmptyToSpace, MismatchError, "a row of no tokens to decode to the empty string", "[' ']"),
    (IgnoresTheDefault, MismatchError, "start(prompts) to mean start(prompts, conditions=prompts)", "a diff"),
    (SamplesAndMisreports, MismatchError, "sample to report the log p of the token it took", "a difference"),
    (EosOutside, InputError, "eos_id to be a token of the vocabulary", "4"),
    (UnstableFingerprint, MismatchError, "the same fingerprint each time it is read", "two that differ"),
]


def make(kind: type[Whole]) -> Whole:
    """Four tokens, never ending before the third: long enough for every mistake to show."""
    tables = {}
    for number, prompt in enumerate(PROMPTS):
        table = TabularModel.random([prompt], length_limit=4, seed=number).table(prompt).clone()
        table[:4, -1] = -torch.inf
        tables[prompt] = torch.log_softmax(table, dim=-1)
    return kind(tables, length_limit=4)


def test_the_model_that_the_wrong_ones_are_made_from_is_right() -> None:
    for kind in (Whole, SamplesQuickly, CannotRefill):
        check_language_model(make(kind), list(PROMPTS))


@pytest.mark.parametrize(
    ("kind", "error", "expected", "found"), WRONG, ids=[row[0].__name__ for row in WRONG]
)
def test_wrong_models_are_told_what_is_wrong(
    kind: type[Whole], error: type[NadoError], expected: str, found: str
) -> None:
    with pytest.raises(error) as caught:
        check_language_model(make(kind), list(PROMPTS))
    assert type(caught.value) is error
    assert caught.value.expected.startswith(expected)
    assert caught.value.found.startswith(found)
    assert caught.value.hint.endswith(".")


def text_of(call: Callable[[], None]) -> str:
    with pytest.raises(NadoError) as caught:
        call()
    return str(caught.value)


def test_errors_word_for_word() -> None:
    assert text_of(lambda: check_language_model(make(Unnormalised), list(PROMPTS))) == (
        "expected log_p of step 1 to sum to 1; found a row that sums to 0.6065. Apply log_softmax after all "
        "warpers, and fold other EOS ids into eos_id, do not drop them."
    )
    assert text_of(lambda: check_language_model(make(ScoreOfPadding), list(PROMPTS))) == (
        "expected score to be 0 from each row's length on; found 1. Multiply by a mask made from lengths, "
        "not from a padding token: EOS may pad and may end."
    )
    assert text_of(lambda: check_language_model(make(EosOutside), list(PROMPTS))) == (
        "expected eos_id to be a token of the vocabulary; found 4. Correct EosOutside.eos_id."
    )
    assert text_of(lambda: check_language_model(make(Whole), "one")) == (
        'expected a list of prompts; found \'one\'. Give a list of strings, such as ["a prompt", "another"].'
    )
    assert text_of(lambda: check_language_model(object(), ["one"])) == (  # type: ignore[arg-type]
        "expected a model with all members of nado.language_model.LanguageModel; found object without "
        "vocabulary_size, eos_id, length_limit, completion, device, fingerprint, start, step, select, score, "
        "decode. Add them; the docstrings of the protocol say what each one means."
    )
