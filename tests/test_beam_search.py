"""Beam search over p and over p·R, beside all outcomes of tabular models."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nado.beam_search import search_beams
from nado.drawing import DrawingError
from nado.errors import InputError
from nado.exact import TabularModel, exact_log_r, satisfied_outcomes
from nado.following import TabularFollower
from nado.guidance import Guidance
from nado.guided_language_model import GuidedLanguageModel
from nado.oracles import BoolArray, Oracle
from nado.prompts import Prompt

PAIR = Prompt("x", "ab")
EVERY = 80  # beams for all prefixes there are


class HasLetters(Oracle):
    cheap = True

    def judge(self, conditions: Any, texts: Any) -> BoolArray:
        return np.array([set(c) <= set(t) for c, t in zip(conditions, texts, strict=True)], dtype=bool)


LETTERS = HasLetters()


def table(seed: int = 1, completion: Any = "eos") -> TabularModel:
    return TabularModel.random(["x"], vocabulary_size=4, length_limit=4, completion=completion, seed=seed)


def guided(model: TabularModel, log_r: Tensor, **guidance: Any) -> GuidedLanguageModel:
    follower = TabularFollower({(PAIR.prompt, PAIR.condition): log_r})
    return GuidedLanguageModel(model, follower, guidance=Guidance(**guidance), oracle=LETTERS)


def wrong_log_r(model: TabularModel, seed: int = 5) -> Tensor:
    """R as far from consistent as can be, where it is not 0 for good."""
    exact = exact_log_r(model, LETTERS, *PAIR)
    noise = torch.rand(exact.shape, generator=torch.Generator().manual_seed(seed), dtype=exact.dtype)
    return torch.where(exact.isneginf(), exact, (0.02 + 0.98 * noise).log())


def likeliest(model: TabularModel, allowed: Tensor, penalty: float) -> list[int]:
    outcomes = model.outcomes("x")
    scores = outcomes.log_p / outcomes.lengths**penalty
    best = int(torch.where(allowed, scores, -math.inf).argmax())
    tokens: list[int] = outcomes.tokens[best, : outcomes.lengths[best]].tolist()
    return tokens


@pytest.mark.parametrize("completion", ["eos", "limit"])
@pytest.mark.parametrize("penalty", [0.0, 0.5, 1.0])
def test_with_enough_beams_the_best_text_of_all_is_found(completion: Any, penalty: float) -> None:
    model = TabularModel.random(["x"], vocabulary_size=3, length_limit=4, completion=completion, seed=4)
    ended = model.outcomes("x").ended
    allowed = ended if completion == "eos" else torch.ones_like(ended)
    found = search_beams(model, [PAIR, PAIR], beams=40, length_penalty=penalty, patient=True)
    expected = likeliest(model, allowed, penalty)
    assert [row.tokens for row in found.best] == [expected, expected]
    assert all(row.finished for row in found.best)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_the_errors_of_a_guide_do_not_add_up(seed: int, penalty: float) -> None:
    """With an exact end the likeliest satisfied text is found, however wrong R is on the way to it."""
    model = table(seed)
    q = guided(model, wrong_log_r(model), exact_end=True)
    (row,) = search_beams(q, [PAIR], EVERY, penalty, patient=True).best
    satisfied = satisfied_outcomes(model, LETTERS, *PAIR)
    assert row.tokens == likeliest(model, satisfied, penalty)
    assert row.finished


def test_products_of_q_would_find_another_text() -> None:
    """What the ranking by p·R is for: the likeliest text of a wrong q is not the likeliest that satisfies."""
    others = 0
    for seed in range(4):
        model = table(seed)
        q = guided(model, wrong_log_r(model), exact_end=True)
        outcomes = model.outcomes("x")
        rows = len(outcomes.lengths)
        log_q = q.score(["x"] * rows, outcomes.tokens, outcomes.lengths, ["ab"] * rows).sum(dim=1)
        satisfied = satisfied_outcomes(model, LETTERS, *PAIR)
        best = int(torch.where(satisfied, log_q, -math.inf).argmax())
        tokens = outcomes.tokens[best, : outcomes.lengths[best]].tolist()
        others += tokens != likeliest(model, satisfied, 0.0)
    assert others


def test_few_beams_find_with_a_guide_what_they_miss_without() -> None:
    """Prefixes are ranked by the satisfied texts behind them; ranked by p alone none of them satisfies."""
    model = table(0)
    (alone,) = search_beams(model, [PAIR], beams=2).best
    (found,) = search_beams(guided(model, exact_log_r(model, LETTERS, *PAIR)), [PAIR], beams=2).best
    texts = model.decode([alone.tokens, found.tokens])
    assert LETTERS([PAIR.condition] * 2, texts).tolist() == [False, True]


@pytest.mark.parametrize("seed", range(6))
def test_one_beam_is_greedy_search_over_q(seed: int) -> None:
    """Up to its first end, also where another text would have had the higher p."""
    model = table(seed)
    q = guided(model, wrong_log_r(model, seed))
    state, expected = q.start([PAIR.prompt], [PAIR.condition]), []
    while len(expected) < model.length_limit and model.eos_id not in expected:
        expected.append(int(state.log_p.argmax()))
        state = q.step(state, torch.tensor(expected[-1:]))
    assert search_beams(q, [PAIR], beams=1).best[0].tokens == expected


def test_patience_finds_no_worse_texts_and_reads_no_less() -> None:
    """Without a length penalty there is nothing to wait for."""
    model = TabularModel.random(["x"], vocabulary_size=6, length_limit=6, seed=3)
    for penalty in (0.0, 1.0):
        soon, late = (
            search_beams(model, [PAIR], beams=4, length_penalty=penalty, patient=patient)
            for patient in (False, True)
        )
        scores = [mean_log_p(model, each.best[0].tokens, penalty) for each in (soon, late)]
        assert scores[1] >= scores[0]
        assert late.base_tokens >= soon.base_tokens
        assert (late.base_tokens > soon.base_tokens) == (penalty > 0)


def mean_log_p(model: TabularModel, tokens: list[int], penalty: float) -> float:
    log_p = model.score(["x"], torch.tensor([tokens]), torch.tensor([len(tokens)])).sum()
    return float(log_p) / len(tokens) ** penalty


@pytest.mark.parametrize("exact_end", [False, True])
def test_prompts_that_leave_by_halves_find_the_same_and_count_the_same(
    exact_end: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, whose step is recorded for a number of rows: those that are done stay for a while."""
    names = [f"x{number}" for number in range(16)]
    model = TabularModel.random(names, vocabulary_size=5, length_limit=6, seed=6)
    tables = {(name, "ab"): exact_log_r(model, LETTERS, name, "ab") for name in names}
    guidance = Guidance(exact_end=exact_end)
    q = GuidedLanguageModel(model, TabularFollower(tables), guidance=guidance, oracle=LETTERS)
    prompts = [Prompt(name, "ab") for name in names]
    sizes: list[int] = []
    step = q.step
    monkeypatch.setattr(q, "step", lambda state, tokens: (sizes.append(len(tokens)), step(state, tokens))[1])
    at_once = search_beams(q, prompts, beams=3)
    seen_at_once, sizes[:] = list(sizes), []
    monkeypatch.setattr("nado.beam_search.has_fixed_rows", lambda model: True)
    by_halves = search_beams(q, prompts, beams=3)
    assert by_halves == at_once
    assert len(set(seen_at_once)) > len(set(sizes)) > 1
    assert all(now == before or 2 * now <= before for before, now in pairwise(sizes))


def test_a_strength_of_zero_is_the_base() -> None:
    model = table(2)
    plain = search_beams(model, [PAIR], beams=3, length_penalty=1.0)
    assert search_beams(guided(model, wrong_log_r(model), strength=0.0), [PAIR], 3, 1.0) == plain


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(InputError, match="beams of at least 1; found 0"):
        search_beams(table(), [PAIR], beams=0)


def test_where_no_text_may_end_the_likeliest_refused_one_is_given_and_not_called_finished() -> None:
    """A condition that nothing satisfies, exact end on: not a text that ran on to the limit."""
    model = table(1)
    follower = TabularFollower({("x", "z"): wrong_log_r(model)})
    q = GuidedLanguageModel(model, follower, guidance=Guidance(exact_end=True), oracle=LETTERS)
    (row,) = search_beams(q, [Prompt("x", "z")], beams=EVERY, length_penalty=1.0).best
    expected = likeliest(model, model.outcomes("x").ended, 1.0)
    assert not row.finished
    assert [*row.tokens, model.eos_id] == expected


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_several_texts_of_a_prompt_come_best_first(penalty: float) -> None:
    model = table(2)
    satisfied = satisfied_outcomes(model, LETTERS, *PAIR)
    outcomes = model.outcomes("x")
    scores = torch.where(satisfied, outcomes.log_p / outcomes.lengths**penalty, -math.inf)
    best = scores.argsort(descending=True)[:4].tolist()
    q = guided(model, wrong_log_r(model), exact_end=True)
    (found,) = search_beams(q, [PAIR], EVERY, penalty, count=4, patient=True).found
    assert [each.tokens for each in found] == [
        outcomes.tokens[row, : outcomes.lengths[row]].tolist() for row in best
    ]


@pytest.mark.parametrize("strength", [1.0, 2.0])
@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_with_doubt_a_text_that_does_not_satisfy_has_its_price(penalty: float, strength: float) -> None:
    """The oracle's no counts as d^strength: with a small d nothing changes, with 1 the guide has no say."""
    picked = []
    for seed in range(6):
        model = table(seed)
        sure = exact_log_r(model, LETTERS, *PAIR).clamp(min=math.log(1e-12))  # nothing is known to be lost
        outcomes, satisfied = model.outcomes("x"), satisfied_outcomes(model, LETTERS, *PAIR)
        for doubt in (1e-6, 0.2, 1.0):
            q = guided(model, sure, doubt=doubt ** (1 / strength), strength=strength)
            (row,) = search_beams(q, [PAIR], EVERY, penalty, patient=True).best
            price = torch.where(satisfied, 0.0, math.log(doubt))
            scores = (outcomes.log_p + price) / outcomes.lengths**penalty
            best = int(torch.where(outcomes.ended, scores, -math.inf).argmax())
            assert row.tokens == outcomes.tokens[best, : outcomes.lengths[best]].tolist()
            picked.append((doubt, bool(satisfied[best])))
    assert all(kept for doubt, kept in picked if doubt == 1e-6)
    assert len({kept for doubt, kept in picked if doubt == 0.2}) == 2  # sometimes it pays, sometimes not


def is_plausible(q: GuidedLanguageModel, tokens: list[int], share: float) -> bool:
    """Whether every token has that share of the p of the likeliest one that R leaves."""
    state = q.start([PAIR.prompt], [PAIR.condition])
    for token in tokens:
        left = state.log_p_base[0].masked_fill(state.step.log_factor[0].isneginf(), -math.inf).exp()
        if left[token] < share * left.max():
            return False
        state = q.step(state, torch.tensor([token]))
    return True


def test_with_plausible_tokens_alone_the_best_text_of_these_is_found() -> None:
    differs = 0
    for seed in range(6):
        model = table(seed)
        log_r = exact_log_r(model, LETTERS, *PAIR)
        q, held = guided(model, log_r), guided(model, log_r, plausible=0.4)
        outcomes, satisfied = model.outcomes("x"), satisfied_outcomes(model, LETTERS, *PAIR)
        texts = [row[:length].tolist() for row, length in zip(outcomes.tokens, outcomes.lengths, strict=True)]
        allowed = satisfied & torch.tensor([is_plausible(q, text, 0.4) for text in texts])
        (row,) = search_beams(held, [PAIR], EVERY, patient=True).best
        assert row.tokens == likeliest(model, allowed, 0.0)
        differs += row.tokens != likeliest(model, satisfied, 0.0)
    assert differs > 0


def test_a_target_rate_and_a_floor_are_for_sampling() -> None:
    model = table()
    with pytest.raises(InputError, match=r"a target rate of 0\.5; found beam search"):
        search_beams(guided(model, wrong_log_r(model), target_rate=0.5), [PAIR], beams=2)
    with pytest.raises(InputError, match=r"no floor under beam search; found a floor of 0\.1"):
        search_beams(guided(model, wrong_log_r(model), floor=0.1), [PAIR], beams=2)


def test_a_model_that_gives_nan_is_refused_and_not_searched() -> None:
    class Broken:
        eos_id, length_limit, completion, device = 3, 4, "eos", torch.device("cpu")

        def start(self, prompts: list[str], conditions: list[str]) -> Any:
            return type("State", (), {"log_p": torch.full((len(prompts), 4), math.nan)})()

    broken: Any = Broken()
    with pytest.raises(DrawingError, match="nan among them"):
        search_beams(broken, [PAIR], beams=2)
