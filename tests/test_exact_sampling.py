"""Exact sampling: weights, SMC, rejection and verified texts, against enumeration, with bad guides too.

Statistical tests have fixed seeds; `FALSE_ALARM` is the chance that one would fail with a new seed. Each is
shown to reject something wrong.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from frequencies import FALSE_ALARM, enumerate_log_p, fit_p_value, mean_p_value
from nado.errors import InputError, MismatchError
from nado.exact import TabularModel, exact_log_q, exact_log_r, exact_log_r_start, kl_divergence
from nado.exact_sampling import (
    WeightedTexts,
    diagnose,
    draw_weighted,
    particles,
    reject,
    resample,
    smc,
    verified,
    writing,
)
from nado.exact_sampling.particles import resample_systematically
from nado.following import TabularFollower
from nado.guidance import Guidance
from nado.guided_language_model import GuidedLanguageModel
from nado.huggingface.reading import HuggingFaceReader
from nado.oracles import BoolArray, Keywords, Oracle
from test_guided_language_model import load, random_guide


class HasLetters(Oracle):
    """Whether a text has every letter of its condition, each a part."""

    cheap = True

    def judge(self, conditions: Sequence[str], texts: Sequence[str]) -> BoolArray:
        return np.array([set(c) <= set(t) for c, t in zip(conditions, texts, strict=True)], dtype=bool)

    def judge_parts(self, conditions: Sequence[str], texts: Sequence[str]) -> list[BoolArray]:
        return [np.array([x in t for x in c], dtype=bool) for c, t in zip(conditions, texts, strict=True)]

    def part_names(self, condition: str) -> list[str]:
        return list(condition)


ORACLE = HasLetters()
PAIR = ("x", "ab")
BATCH = 1 << 16


@cache
def base(completion: Any = "eos") -> TabularModel:
    return TabularModel.random(["x"], vocabulary_size=4, length_limit=4, completion=completion, seed=1)


def log_r_table(kind: str, completion: Any = "eos") -> Tensor:
    exact = exact_log_r(base(completion), ORACLE, *PAIR)
    noise = torch.randn(exact.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    tables = {
        "exact": exact,
        "noisy": (exact.exp() * noise.exp() + 0.02).log().clamp(max=0.0),  # leaks to texts that fail
        "random": torch.nn.functional.logsigmoid(noise),  # knows nothing
        "constant": torch.full_like(exact, math.log(0.5)),  # q is p
    }
    return tables[kind]


def guided(kind: str, completion: Any = "eos", **guidance: Any) -> GuidedLanguageModel:
    follower = TabularFollower({PAIR: log_r_table(kind, completion)})
    return GuidedLanguageModel(base(completion), follower, guidance=Guidance(**guidance), oracle=ORACLE)


def r_start(completion: Any = "eos") -> float:
    return float(exact_log_r_start(base(completion), ORACLE, *PAIR).exp())


def target(completion: Any = "eos") -> dict[tuple[int, ...], float]:
    """log q* of every text, as tokens."""
    outcomes = base(completion).outcomes("x")
    return dict(zip(as_tuples(outcomes), exact_log_q(base(completion), ORACLE, *PAIR).tolist(), strict=True))


def as_tuples(texts: Any, rows: Tensor | None = None) -> list[tuple[int, ...]]:
    rows = torch.arange(len(texts.lengths)) if rows is None else rows
    tokens, lengths = texts.tokens[rows].tolist(), texts.lengths[rows].tolist()
    return [tuple(row[:length]) for row, length in zip(tokens, lengths, strict=True)]


def by_enumeration(model: GuidedLanguageModel) -> tuple[Tensor, Tensor, Tensor]:
    """log q, log p and C of every text of a tabular model, each from a pass of its own: (M,)."""
    table: Any = model.base
    outcomes = table.outcomes("x")
    rows = len(outcomes.texts)
    arguments = (["x"] * rows, outcomes.tokens, outcomes.lengths, ["ab"] * rows)
    satisfied = torch.from_numpy(ORACLE(["ab"] * rows, outcomes.texts))
    satisfied &= outcomes.ended if table.completion == "eos" else True
    return model.score(*arguments).double().sum(dim=1), outcomes.log_p, satisfied


def largest_weight(model: GuidedLanguageModel) -> float:
    log_q, log_p, satisfied = by_enumeration(model)
    return float((log_p - log_q)[satisfied & log_p.isfinite()].max().exp())


SETTINGS: dict[str, dict[str, Any]] = {"plain": {}, "strong": {"strength": 2.0}, "end": {"exact_end": True}}


# --- weights ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("completion", ["eos", "limit"])
def test_with_the_exact_r_every_text_weighs_r_start(completion: Any) -> None:
    model = guided("exact", completion)
    drawn = draw_weighted(model, ["x"], ["ab"], ORACLE, count=300, batch_size=BATCH)
    assert drawn.satisfied.all()
    assert (drawn.log_weights - math.log(r_start(completion))).abs().max() < 1e-6
    runs = smc(model, ["x"], ["ab"], ORACLE, particles=50, runs=4, ess_threshold=0.99)
    assert (runs.log_r_start - math.log(r_start(completion))).abs().max() < 1e-6
    assert (runs.ess > 50 - 1e-6).all()
    assert not runs.resamplings.any()


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", ["noisy", "random"])
def test_a_weight_is_p_c_over_q(kind: str, setting: str) -> None:
    model = guided(kind, **SETTINGS[setting])
    drawn = draw_weighted(model, ["x"], ["ab"], ORACLE, count=500, seed=1, batch_size=64)
    log_q, log_p, satisfied = by_enumeration(model)
    place = {text: number for number, text in enumerate(as_tuples(base().outcomes("x")))}
    rows = torch.tensor(
        [place[text] for text, dead in zip(as_tuples(drawn), drawn.dead, strict=True) if not dead]
    )
    alive = ~drawn.dead
    assert len(rows) > 300
    assert (drawn.log_ratio[alive] - (log_p - log_q)[rows]).abs().max() < 1e-5
    assert (drawn.satisfied[alive] == satisfied[rows]).all()
    weights = torch.where(drawn.satisfied, drawn.log_ratio, -math.inf)
    assert torch.equal(drawn.log_weights, weights)
    assert drawn.texts == base().decode(as_tuples(drawn))
    assert drawn.base_tokens == int(drawn.lengths.sum())
    trace = model.trace(["x"] * 500, drawn.tokens, drawn.lengths, ["ab"] * 500)
    assert (trace.log_s - drawn.log_s).abs().max() < 1e-5


def test_a_text_cut_at_the_limit_fails_or_is_judged_as_it_stands() -> None:
    cut = draw_weighted(guided("constant"), ["x"], ["ab"], ORACLE, count=2000, batch_size=BATCH)
    at_limit = (cut.tokens[:, -1] != 3) & (cut.lengths == 4)
    has_letters = torch.from_numpy(ORACLE(["ab"] * 2000, cut.texts))
    assert (at_limit & has_letters).any()
    assert not (cut.satisfied | cut.finished)[at_limit].any()
    limit = guided("constant", "limit")
    judged = draw_weighted(limit, ["x"], ["ab"], ORACLE, count=2000, batch_size=BATCH)
    assert judged.finished.all()
    assert torch.equal(judged.satisfied, torch.from_numpy(ORACLE(["ab"] * 2000, judged.texts)))


def test_an_exact_end_never_ends_a_text_that_fails() -> None:
    model = guided("random", exact_end=True)
    drawn = draw_weighted(model, ["x"], ["ab"], ORACLE, count=1000, batch_size=BATCH)
    ended = drawn.tokens.gather(1, (drawn.lengths - 1)[:, None])[:, 0] == 3
    assert ended.any()
    assert torch.equal(drawn.satisfied, ended)


# --- estimates of R(x) --------------------------------------------------------------------------------


def estimate(model: GuidedLanguageModel, method: str, runs: int) -> tuple[np.ndarray, WeightedTexts]:
    """Independent estimates of R(x) from 16 texts each, and the texts they come from."""
    if method == "importance":
        prompts, conditions = ["x"] * runs, ["ab"] * runs
        texts = draw_weighted(model, prompts, conditions, ORACLE, count=16, seed=2, batch_size=BATCH)
    else:
        threshold = 1.0 if method == "always" else 0.5
        shape: dict[str, Any] = {"particles": 16, "runs": runs, "ess_threshold": threshold}
        found = smc(model, ["x"], ["ab"], ORACLE, **shape, seed=2, batch_size=BATCH)
        assert found.resamplings.float().mean() > (0.9 if method == "always" else 0.1)
        texts = found.particles
    return texts.log_mean_weight.exp().numpy(), texts


@pytest.mark.parametrize("method", ["importance", "smc", "always"])
@pytest.mark.parametrize(
    ("kind", "setting", "completion"),
    [
        ("noisy", "plain", "eos"),
        ("noisy", "strong", "eos"),
        ("noisy", "end", "eos"),
        ("random", "plain", "limit"),
        ("constant", "plain", "eos"),
    ],
)
def test_estimates_of_r_start_are_unbiased(kind: str, setting: str, completion: Any, method: str) -> None:
    """z-test over 1,500 independent runs; false-alarm rate 1e-6. It rejects the same without S_1."""
    model = guided(kind, completion, **SETTINGS[setting])
    found, texts = estimate(model, method, runs=1500)
    assert mean_p_value(found, r_start(completion)) > FALSE_ALARM
    assert texts.log_r_start.exp().numpy() == pytest.approx(found)
    without_s1 = found / texts.log_s[:: texts.size, 0].double().exp().numpy()
    assert mean_p_value(without_s1, r_start(completion)) < FALSE_ALARM


@pytest.mark.parametrize(
    ("mutant", "method"),
    [(m, method) for m in ("no terminal", "no S", "no R") for method in ("importance", "smc")]
    + [("best ancestors", "smc")],
)
def test_wrong_increments_are_rejected(mutant: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong is put into the code itself; the z-test above must see it."""
    if mutant == "no terminal":
        monkeypatch.setattr(writing, "hard_log_terminal", lambda satisfied: torch.zeros(len(satisfied)))
    elif mutant == "no S":
        monkeypatch.setattr(writing, "smc_log_increment", lambda gained, spent: -spent)
    elif mutant == "no R":
        monkeypatch.setattr(writing, "smc_log_increment", lambda gained, spent: gained)
    else:
        monkeypatch.setattr(
            particles, "resample_systematically", lambda w, noise: w.argmax(-1, True).expand_as(w)
        )
    found, _ = estimate(guided("noisy"), method, runs=1500)
    assert mean_p_value(found, r_start()) < FALSE_ALARM


@pytest.mark.parametrize("method", ["importance", "always"])
@pytest.mark.parametrize("kind", ["exact", "noisy"])
def test_at_a_soft_rate_weights_have_the_soft_last_factor(kind: str, method: str) -> None:
    """z-tests over 1,500 runs; false-alarm rate 1e-6 each. The mean weight is 1 for the exact R only."""
    model = guided(kind, "limit", target_rate=0.5)
    state = model.start(["x"], ["ab"])
    assert state.step is not None  # which makes the coefficients
    assert state.soft is not None
    alpha, beta = state.soft[0].double().exp().tolist()
    rate = r_start("limit")
    normaliser = alpha * rate + beta * (1 - rate)
    if kind == "exact":
        drawn = draw_weighted(model, ["x"], ["ab"], ORACLE, count=400, batch_size=BATCH)
        assert drawn.log_weights.abs().max() < 1e-5
        assert normaliser == pytest.approx(1, abs=1e-5)
        return
    assert abs(normaliser - 1) > 0.05
    found, texts = estimate(model, method, runs=1500)
    assert mean_p_value(found, normaliser) > FALSE_ALARM
    assert mean_p_value(found, 1.0) < FALSE_ALARM
    assert mean_p_value(texts.log_r_start.exp().numpy(), rate) > FALSE_ALARM


def test_smc_that_never_resamples_is_importance_sampling() -> None:
    model = guided("noisy")
    drawn = draw_weighted(model, ["x"] * 3, ["ab"] * 3, ORACLE, count=40, seed=5, batch_size=BATCH)
    runs = smc(model, ["x"], ["ab"], ORACLE, particles=40, runs=3, seed=5, ess_threshold=0.0)
    assert not runs.resamplings.any()
    assert torch.equal(runs.particles.tokens, drawn.tokens)
    assert torch.allclose(runs.particles.log_weights.exp(), drawn.log_weights.exp(), rtol=1e-12)
    assert torch.equal(runs.base_tokens, drawn.lengths.view(3, 40).sum(dim=1))
    assert torch.equal(runs.ess[:, -1], drawn.ess)


def test_runs_are_resampled_independently(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run and each step has a uniform of its own, whichever runs go along together."""
    seen: list[float] = []

    def remember(log_weights: Tensor, noise: Tensor) -> Tensor:
        seen.extend(noise.tolist())
        return resample_systematically(log_weights, noise)

    monkeypatch.setattr(particles, "resample_systematically", remember)
    rest: dict[str, Any] = {"particles": 16, "runs": 40, "ess_threshold": 1.0}
    smc(guided("noisy"), ["x"], ["ab"], ORACLE, **rest, batch_size=160)
    assert len(seen) > 80
    assert len(set(seen)) == len(seen)


def test_systematic_resampling() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(5, 20, generator=generator, dtype=torch.float64)
    weights[:, ::3] = 0
    shares = 20 * weights / weights.sum(dim=-1, keepdim=True)
    totals = torch.zeros_like(shares)
    noises = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    for noise in noises:
        chosen = resample_systematically(weights.log(), noise.expand(5))
        copies = torch.stack([row.bincount(minlength=20) for row in chosen])
        assert ((copies >= shares.floor()) & (copies <= shares.ceil())).all()
        totals += copies
    assert (totals / 1000 - shares).abs().max() < 2e-3
    edge = torch.tensor([[0.3, 0.7, 0.0]], dtype=torch.float64).log()
    assert int(resample_systematically(edge, torch.tensor([1 - 2.0**-53])).max()) == 1


# --- draws from q* ------------------------------------------------------------------------------------


def drawn_from(
    method: str, model: GuidedLanguageModel, runs: int, size: int, seed: int = 3
) -> list[tuple[int, ...]]:
    """One text from each of many independent sets of weighted texts."""
    if method == "smc":
        found = smc(model, ["x"], ["ab"], ORACLE, particles=size, runs=runs, seed=seed, batch_size=1 << 18)
        texts = found.particles
    else:
        texts = draw_weighted(
            model, ["x"] * runs, ["ab"] * runs, ORACLE, count=size, seed=seed, batch_size=1 << 18
        )
    rows = resample(texts, seed=seed).rows.flatten()
    return as_tuples(texts, rows[rows >= 0])


@pytest.mark.parametrize("method", ["importance", "smc"])
@pytest.mark.parametrize("setting", ["plain", "end"])
def test_resampled_texts_are_distributed_as_the_target(method: str, setting: str) -> None:
    """Chi-square of 500 draws from 150 texts each; false-alarm rate 1e-6.

    A guide that knows nothing needs more texts: of 200 some 5 satisfy, and one of them is not yet a draw from
    q*. The slow test has enough.
    """
    drawn = drawn_from(method, guided("noisy", **SETTINGS[setting]), runs=500, size=150)
    assert len(drawn) == 500
    assert fit_p_value(drawn, target()) > FALSE_ALARM


@pytest.mark.parametrize("kind", ["noisy", "random"])
def test_satisfying_texts_without_weights_are_not(kind: str) -> None:
    """The chi-square test rejects q given C, which is what a guide gives without weights."""
    drawn = draw_weighted(guided(kind), ["x"], ["ab"], ORACLE, count=30_000, batch_size=BATCH)
    rows = drawn.satisfied.nonzero().flatten()[:500]
    assert len(rows) == 500
    assert fit_p_value(as_tuples(drawn, rows), target()) < FALSE_ALARM


@pytest.mark.slow
@pytest.mark.parametrize("method", ["importance", "smc"])
@pytest.mark.parametrize("kind", ["noisy", "random"])
def test_resampled_texts_of_many_particles(kind: str, method: str) -> None:
    """4,096 particles, 2,000 independent runs, one draw each; chi-square, false-alarm rate 1e-6."""
    drawn = [text for seed in range(20) for text in drawn_from(method, guided(kind), 100, 4096, seed)]
    assert len(drawn) == 2000
    assert fit_p_value(drawn, target()) > FALSE_ALARM


@pytest.mark.parametrize("count", [1, 50])
def test_rejection_with_a_bound_that_holds_is_exact_at_any_count(count: int) -> None:
    """Chi-square of all accepted texts; false-alarm rate 1e-6."""
    model = guided("noisy")
    bound, groups = largest_weight(model) * (1 + 1e-6), 40_000 // count
    texts = draw_weighted(
        model, ["x"] * groups, ["ab"] * groups, ORACLE, count=count, seed=4, batch_size=BATCH
    )
    accepted = reject(texts, bound, seed=4)
    assert accepted.exact
    assert accepted.missed.value == accepted.total_variation.value == 0
    assert len(accepted.rows) > 500
    assert accepted.acceptance.value == pytest.approx(r_start() / bound, rel=0.1)
    assert fit_p_value(as_tuples(texts, accepted.rows), target()) > FALSE_ALARM
    assert [text for group in accepted.texts for text in group] == [
        texts.texts[row] for row in accepted.rows.tolist()
    ]


def test_a_bound_that_is_too_small_is_found_out() -> None:
    model = guided("noisy")
    bound = largest_weight(model) / 8
    texts = draw_weighted(model, ["x"], ["ab"], ORACLE, count=40_000, batch_size=BATCH)
    accepted = reject(texts, bound)
    log_q, log_p, satisfied = by_enumeration(model)
    weight = torch.where(satisfied & log_q.isfinite(), (log_p - log_q).exp(), 0.0)
    q, rate = log_q.exp(), r_start()
    missed = float((q * (weight - bound).clamp(min=0)).sum()) / rate
    cut = q * weight.clamp(max=bound)
    distance = float((q * weight / rate - cut / cut.sum()).abs().sum()) / 2
    assert missed > 0.1
    assert not accepted.exact
    assert int(accepted.exceeded) > 100
    assert accepted.missed.value == pytest.approx(missed, rel=0.1)
    assert accepted.missed.low < missed < accepted.missed.high  # type: ignore[operator]
    assert accepted.total_variation.value == pytest.approx(distance, rel=0.1)
    assert distance <= missed
    drawn = as_tuples(texts, accepted.rows)
    assert fit_p_value(drawn, target()) < FALSE_ALARM
    truncated = dict(zip(target(), (cut / cut.sum()).log().tolist(), strict=True))
    assert fit_p_value(drawn, truncated) > FALSE_ALARM


def test_bounds_of_several_prompts() -> None:
    texts = draw_weighted(guided("noisy"), ["x"] * 3, ["ab"] * 3, ORACLE, count=200, batch_size=BATCH)
    accepted = reject(texts, [1e-9, 1e9, 0.05])
    assert accepted.exceeded.tolist() == [int(texts.satisfied[:200].sum()), 0, int(accepted.exceeded[2])]
    assert len(accepted.texts[0]) == int(texts.satisfied[:200].sum())
    assert accepted.texts[1] == []
    assert 0 < accepted.missed.value < 1  # type: ignore[operator]


# --- diagnostics --------------------------------------------------------------------------------------


def test_diagnostics_are_near_what_enumeration_gives() -> None:
    model = guided("noisy")
    texts = draw_weighted(model, ["x"], ["ab"], ORACLE, count=8000, seed=6, batch_size=BATCH)
    found = diagnose(texts, bound=1.0)
    log_q, log_p, satisfied = by_enumeration(model)
    log_target = exact_log_q(base(), ORACLE, *PAIR)
    expected = {
        "satisfied": float(log_q.exp()[satisfied].sum()),
        "r_start": r_start(),
        "log_r_start": math.log(r_start()),
        "mean_weight": r_start(),
        "kl_to_target": float(kl_divergence(log_target, log_q)),
        "kl_from_base": float(kl_divergence(log_q, log_p)),
        "acceptance": float((log_q.exp() * (log_p - log_q).exp().clamp(max=1))[satisfied].sum()),
    }
    for name, value in expected.items():
        measure = getattr(found, name)
        assert measure.value == pytest.approx(value, rel=0.05, abs=0.01), name
        assert measure.low - 0.01 < value < measure.high + 0.01, name
    worth = 8000 * r_start() ** 2 / float((log_q.exp() * (2 * (log_p - log_q)).exp())[satisfied].sum())
    assert found.ess.value == pytest.approx(worth, rel=0.1)
    assert set(found.describe()) == {*expected, "ess"}
    assert str(found).count("\n") == 7


def test_diagnostics_at_a_soft_rate() -> None:
    """The mean weight tells that R(x) was right; R(x) itself is still estimated with C as last factor."""
    model = guided("exact", "limit", target_rate=0.5)
    texts = draw_weighted(model, ["x"], ["ab"], ORACLE, count=4000, seed=6, batch_size=BATCH)
    found = diagnose(texts)
    assert found.mean_weight.value == pytest.approx(1, abs=1e-5)
    assert found.ess.value == pytest.approx(4000, rel=1e-5)
    assert found.satisfied.value == pytest.approx(0.5, abs=0.04)
    assert found.r_start.value == pytest.approx(r_start("limit"), rel=0.08)


@pytest.mark.parametrize("kind", ["exact", "noisy"])
def test_texts_of_target_rate_0_say_nothing_of_r(kind: str) -> None:
    """None is to satisfy; where a guide is wrong some do, with weights of 0."""
    model = guided(kind, "limit", target_rate=0.0)
    for texts in (
        draw_weighted(model, ["x"], ["ab"], ORACLE, count=400, batch_size=BATCH),
        smc(model, ["x"], ["ab"], ORACLE, particles=40, runs=5).particles,
    ):
        assert texts.log_weights[texts.satisfied].isneginf().all()
        with pytest.raises(InputError, match="texts drawn at a target rate above 0 to estimate R"):
            texts.log_r_start  # noqa: B018
    texts = draw_weighted(model, ["x"], ["ab"], ORACLE, count=400, batch_size=BATCH)
    assert bool(texts.satisfied.any()) == (kind == "noisy")
    found = diagnose(texts)
    assert found.r_start.value is None
    assert found.log_r_start.value is None
    assert "target rate 0" in (found.r_start.note or "")
    assert found.mean_weight.value is not None


def test_diagnostics_say_when_a_number_reads_low() -> None:
    model = guided("random", strength=12.0)
    texts = draw_weighted(model, ["x"], ["ab"], ORACLE, count=2000, batch_size=BATCH)
    found = diagnose(texts)
    assert float(texts.ess) < 100
    assert "this reads low" in (found.kl_to_target.note or "")
    assert "the interval is too narrow" in (found.r_start.note or "")


def test_diagnostics_of_several_prompts_and_of_none_that_satisfies() -> None:
    texts = draw_weighted(guided("noisy"), ["x"] * 30, ["ab"] * 30, ORACLE, count=64, batch_size=BATCH)
    found = diagnose(texts)
    assert found.r_start.prompts == found.log_r_start.prompts == 30
    assert found.log_r_start.value == pytest.approx(math.log(r_start()), abs=0.15)
    failed = replace(
        texts,
        satisfied=torch.zeros_like(texts.satisfied),
        log_weights=torch.full_like(texts.log_weights, -math.inf),
    )
    assert diagnose(failed).log_r_start.note == (
        "no text satisfies for 30 of 30 prompts: log R(x) is −∞ or below what n shows"
    )


def test_an_interval_over_runs() -> None:
    runs = smc(guided("noisy"), ["x"], ["ab"], ORACLE, particles=32, runs=200, batch_size=BATCH)
    measured = runs.measure_r_start()
    assert measured.value == pytest.approx(float(runs.log_r_start.exp().mean()))
    assert measured.low < r_start() < measured.high  # type: ignore[operator]


# --- dead ends ----------------------------------------------------------------------------------------


def test_dead_ends_weigh_nothing_and_are_given_up() -> None:
    table = log_r_table("noisy").clone()
    table[3] = -math.inf  # nothing may follow "c"
    model = GuidedLanguageModel(base(), TabularFollower({PAIR: table}))
    drawn = draw_weighted(model, ["x"], ["ab"], ORACLE, count=500, batch_size=7)
    begins = drawn.tokens[:, 0] == 2
    assert begins.any()
    assert torch.equal(drawn.dead, begins)
    assert {text for text, dead in zip(drawn.texts, drawn.dead, strict=True) if dead} == {"c"}
    assert (drawn.lengths[begins] == 1).all()
    assert drawn.log_weights[begins].isneginf().all()
    assert not (drawn.finished | drawn.satisfied)[begins].any()
    runs = smc(model, ["x"], ["ab"], ORACLE, particles=64, runs=20, batch_size=BATCH)
    assert not runs.particles.dead.any() or runs.particles.log_weights[runs.particles.dead].isneginf().all()


def test_where_nothing_satisfies_everything_says_so() -> None:
    tables = {("x", "abcd"): log_r_table("constant")}
    model = GuidedLanguageModel(base(), TabularFollower(tables))
    texts = draw_weighted(model, ["x"], ["abcd"], ORACLE, count=50)
    assert texts.log_r_start.tolist() == [-math.inf]
    chosen = resample(texts, 3)
    assert chosen.texts == [[]]
    assert chosen.rows.tolist() == [[-1, -1, -1]]
    assert chosen.ess.tolist() == [0]
    runs = smc(model, ["x"], ["abcd"], ORACLE, particles=50, runs=2)
    assert runs.log_r_start.tolist() == [-math.inf, -math.inf]
    assert (runs.ess[:, -1] == 0).all()
    assert reject(texts, 1.0).missed.note == "no text satisfies"


# --- the same whatever the batch ----------------------------------------------------------------------


class WholeBatches(TabularModel):
    """A model whose rows cannot be refilled."""

    refillable = False


PAIRS = [("x", "ab"), ("x", "c"), ("x", ""), ("x", "abc")]


def several(kind: type[TabularModel], exact_end: bool = False) -> GuidedLanguageModel:
    model = kind({"x": base().table("x")}, length_limit=4)
    noise = torch.Generator().manual_seed(1)
    tables = {
        pair: torch.nn.functional.logsigmoid(
            torch.randn(base().table("x").shape, generator=noise, dtype=torch.float64)
        )
        for pair in PAIRS
    }
    guidance = Guidance(exact_end=exact_end)
    return GuidedLanguageModel(model, TabularFollower(tables), guidance=guidance, oracle=ORACLE)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", [TabularModel, WholeBatches])
def test_results_do_not_depend_on_the_batch(
    kind: type[TabularModel], padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`padded` is how captured GPU steps go on: rows that no text holds any more stay in the batch."""
    expected = draw_everything(several(TabularModel), 1000)
    monkeypatch.setattr(writing, "has_fixed_rows", lambda model: padded)
    for batch_size in (1, 7, 64):
        assert draw_everything(several(kind), batch_size) == expected


def draw_everything(model: GuidedLanguageModel, batch_size: int) -> list[Any]:
    prompts, conditions = [list(each) for each in zip(*PAIRS, strict=True)]
    rest: dict[str, Any] = {"seed": 11, "batch_size": batch_size}
    texts = draw_weighted(model, prompts, conditions, ORACLE, count=30, **rest)
    runs = smc(model, prompts, conditions, ORACLE, particles=12, runs=2, ess_threshold=0.9, **rest)
    assert runs.resamplings.sum() > 4
    found = verified(model, prompts, conditions, ORACLE, budget=5, **rest)
    return [
        texts.texts,
        texts.log_weights.tolist(),
        runs.particles.texts,
        runs.particles.log_weights.tolist(),
        runs.ess.tolist(),
        runs.resamplings.tolist(),
        runs.base_tokens.tolist(),
        found,
    ]


def test_seeds_count_and_more_draws_leave_the_first_as_they_are() -> None:
    model = several(TabularModel)
    short = draw_weighted(model, ["x"], ["ab"], ORACLE, count=10, seed=3)
    again = draw_weighted(model, ["x"], ["ab"], ORACLE, count=10, seed=3)
    longer = draw_weighted(model, ["x", "x"], ["ab", "c"], ORACLE, count=40, seed=3)
    other = draw_weighted(model, ["x"], ["ab"], ORACLE, count=10, seed=4)
    assert short.texts == again.texts == longer.texts[:10]
    assert short.texts != other.texts
    assert resample(longer, 20, seed=1).texts == resample(longer, 20, seed=1).texts
    assert resample(longer, 20, seed=1).texts != resample(longer, 20, seed=2).texts


# --- verified -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rounds", "ends"),
    [({}, range(1, 9)), ({"at_once": 3}, (3, 6, 8)), ({"doubling": True}, (1, 2, 4, 8))],
    ids=["one by one", "three at once", "doubling"],
)
def test_a_verified_text_is_the_first_that_satisfies(rounds: dict[str, Any], ends: Sequence[int]) -> None:
    model, prompts = several(TabularModel), ["x"] * 40
    conditions = ["ab", "c", "", "abc"] * 10
    found = verified(model, prompts, conditions, ORACLE, budget=8, seed=9, **rounds)
    texts = draw_weighted(model, prompts, conditions, ORACLE, count=8, seed=9)
    satisfied, lengths = texts.satisfied.view(40, 8), texts.lengths.view(40, 8)
    statuses = set()
    for row, each in enumerate(found):
        statuses.add(each.status)
        hits = satisfied[row].nonzero().flatten().tolist()
        spent = next(end for end in ends if end > hits[0]) if hits else 8
        assert (each.draws, each.base_tokens) == (spent, int(lengths[row, :spent].sum()))
        if not hits:
            assert (each.status, each.text, each.tokens) == ("not found", None, None)
            continue
        assert each.status == "verified"
        assert each.text == texts.texts[8 * row + hits[0]]
        assert each.partial is None
        assert each.tokens is not None
        assert model.decode([each.tokens]) == [each.text]
        assert ORACLE([each.condition], [each.text]).all()
        assert each.tokens[-1] == model.eos_id
    assert statuses == {"verified", "not found"}


def test_the_best_miss_is_marked_as_one() -> None:
    tables = {("x", "abcd"): log_r_table("constant"), ("x", "ab"): log_r_table("constant")}
    model = GuidedLanguageModel(base(), TabularFollower(tables))
    found = verified(model, ["x", "x"], ["abcd", "ab"], ORACLE, budget=200, seed=1)
    assert [each.status for each in found] == ["not found", "verified"]
    assert (found[0].draws, found[0].text) == (200, None)
    partial = found[0].partial
    assert partial is not None
    texts = draw_weighted(model, ["x"], ["abcd"], ORACLE, count=200, seed=1)
    most = max(len(set(text) & set("abcd")) for text in texts.texts)
    assert partial.satisfied_parts == [name for name in "abcd" if name in partial.unverified_text]
    assert partial.missing_parts == [name for name in "abcd" if name not in partial.unverified_text]
    assert len(partial.satisfied_parts) == most
    finished = [
        t for t, done in zip(texts.texts, texts.finished, strict=True) if done and len(set(t)) == most
    ]
    assert partial.finished == bool(finished)


def test_an_unfinished_text_is_not_verified_whatever_it_says() -> None:
    """Under completion "eos" a text cut at L has all its letters and is still a miss."""
    table = torch.full((40, 4), -30.0, dtype=torch.float64)
    table[:, 0] = 0.0  # "aaaa", for ever
    table = table.log_softmax(dim=-1)
    model = TabularModel({"x": table}, length_limit=4)
    guide = TabularFollower({("x", "a"): torch.zeros_like(table)})
    (found,) = verified(GuidedLanguageModel(model, guide), ["x"], ["a"], ORACLE, budget=3)
    assert found.status == "not found"
    assert found.text is None
    assert found.partial is not None
    assert (found.partial.unverified_text, found.partial.finished) == ("aaaa", False)
    assert (found.partial.satisfied_parts, found.partial.missing_parts) == (["a"], [])


def test_a_floor_gives_up_early() -> None:
    model = guided("exact")
    found = verified(model, ["x"], ["ab"], ORACLE, budget=5)
    given_up = verified(guided("exact", floor=0.999), ["x"], ["ab"], ORACLE, budget=5)
    assert found[0].status == "verified"
    assert (given_up[0].status, given_up[0].base_tokens, given_up[0].draws) == ("not found", 0, 5)


@pytest.mark.parametrize("choices", [{"strength": 3.0}, {"strength": 0.3}, {"doubt": 0.2}])
def test_a_floor_is_one_of_chances_whatever_is_made_of_r(choices: dict[str, Any]) -> None:
    """What q is normalised by is R to a power, or doubted; what is compared is R."""
    chance = r_start()
    for floor, given_up in ((0.9 * chance, False), (1.1 * chance, True)):
        found = verified(guided("exact", floor=floor, **choices), ["x"] * 20, ["ab"] * 20, ORACLE, budget=1)
        assert all(each.base_tokens == 0 for each in found) == given_up


@pytest.mark.parametrize("choices", [{}, {"strength": 2.0}, {"strength": 0.0}, {"doubt": 0.2}])
def test_a_floor_counts_what_the_oracle_says_of_the_end(choices: dict[str, Any]) -> None:
    """The text all but ends here, R would let it, the oracle does not: nothing else is likely enough."""
    table = torch.full_like(log_r_table("constant"), 0.02 / 3)
    table[:, base().eos_id] = 0.98
    model = TabularModel({"x": table.log()}, length_limit=base().length_limit)
    follower = TabularFollower({PAIR: torch.full_like(table, math.log(0.95))})
    for floor, given_up in ((0.01, False), (0.5, True)):
        guidance = Guidance(floor=floor, exact_end=True, **choices)
        asked = GuidedLanguageModel(model, follower, guidance=guidance, oracle=ORACLE)
        (found,) = verified(asked, ["x"], ["ab"], ORACLE, budget=1)
        assert (found.base_tokens == 0) == given_up


# --- real architectures -------------------------------------------------------------------------------

PROMPTS = ["the dog", "a cat sees the"]
CONDITIONS = {"llama": ["park", "man, woman"], "marian": ["throws", "ball"]}  # words they write at times


@pytest.mark.parametrize("exact_end", [False, True])
@pytest.mark.parametrize("kind", ["llama", "marian"])
def test_real_models_with_progress(kind: str, exact_end: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches, progress and conditions go with their particles: p / q is that of the texts read afresh."""
    reader = HuggingFaceReader(load(kind))
    guide = random_guide(reader, progress_bits=3, named_parts=True)
    oracle, wanted = Keywords(forms={}), CONDITIONS[kind]
    model = GuidedLanguageModel(reader.model, guide, guidance=Guidance(exact_end=exact_end), oracle=oracle)
    rest: dict[str, Any] = {"particles": 12, "runs": 2, "ess_threshold": 1.0, "seed": 1}
    runs = smc(model, PROMPTS, wanted, oracle, batch_size=48, **rest)
    assert runs.resamplings.sum() > 4
    texts = runs.particles
    prompts, conditions = [[each for each in column for _ in range(24)] for column in (PROMPTS, wanted)]
    arguments = (prompts, texts.tokens, texts.lengths, conditions)
    log_ratio = (reader.model.score(*arguments) - model.score(*arguments)).double().sum(dim=1)
    alive = ~texts.dead
    assert (log_ratio - texts.log_ratio)[alive].abs().max() < 1e-3
    answers = torch.from_numpy(oracle(conditions, texts.texts))
    assert torch.equal(texts.satisfied, answers & texts.finished)
    assert texts.satisfied.any()
    assert not exact_end or torch.equal(texts.satisfied, texts.finished)
    for padded in (False, True):
        monkeypatch.setattr(writing, "has_fixed_rows", lambda model, padded=padded: padded)
        single = smc(model, PROMPTS, wanted, oracle, batch_size=1, **rest)
        assert single.particles.texts == texts.texts
        positive = ~texts.log_weights.isneginf()
        assert (single.particles.log_weights - texts.log_weights)[positive].abs().max() < 1e-3


@pytest.mark.parametrize("kind", ["llama", "marian"])
def test_verified_texts_of_real_models(kind: str) -> None:
    reader = HuggingFaceReader(load(kind))
    oracle = Keywords(forms={})
    guide = random_guide(reader, progress_bits=2, named_parts=True)
    model = GuidedLanguageModel(reader.model, guide, guidance=Guidance(exact_end=True), oracle=oracle)
    prompts, conditions = PROMPTS * 3, ["dog", "cat", "ball", "man", "red, park", "nowhere"]
    found = verified(model, prompts, conditions, oracle, budget=6, batch_size=4)
    assert found == verified(model, prompts, conditions, oracle, budget=6, batch_size=64)
    assert found[-1].status == "not found"
    assert found[-1].partial is not None
    assert found[-1].partial.missing_parts == ["nowhere"]
    hits = [each for each in found if each.status == "verified"]
    assert hits
    assert oracle([each.condition for each in hits], [each.text or "" for each in hits]).all()


@pytest.mark.parametrize("kind", ["llama", "marian"])
def test_estimates_of_real_models_are_unbiased(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """z-test over 300 runs against all texts of at most two tokens; false-alarm rate 1e-6."""
    monkeypatch.setattr("test_guided_language_model.LIMIT", 2)
    reader = HuggingFaceReader(load(kind))
    oracle = Keywords(forms={})
    model = GuidedLanguageModel(
        reader.model,
        random_guide(reader, progress_bits=1),
        guidance=Guidance(exact_end=True, strength=0.3),
        oracle=oracle,
    )
    (word, _), log_p = CONDITIONS[kind], enumerate_log_p(reader.model, "the dog")
    texts = [text for text in log_p if text[-1] == model.eos_id]
    satisfied = oracle([word] * len(texts), model.decode(texts))
    rate = sum(math.exp(log_p[text]) for text, yes in zip(texts, satisfied, strict=True) if yes)
    shape: dict[str, Any] = {"particles": 16, "runs": 300, "ess_threshold": 1.0}
    runs = smc(model, ["the dog"], [word], oracle, **shape, batch_size=4800)
    estimates = runs.log_r_start.exp().numpy()
    assert mean_p_value(estimates, rate) > FALSE_ALARM
    assert mean_p_value(estimates / 2, rate) < FALSE_ALARM


# --- what is refused ----------------------------------------------------------------------------------


def test_what_is_refused() -> None:
    model = guided("noisy")
    with pytest.raises(InputError) as refused:
        draw_weighted(guided("noisy", floor=0.1), ["x"], ["ab"], ORACLE, count=1)
    assert str(refused.value) == (
        "expected no floor where texts are weighted; found a floor of 0.1. Texts given up below a floor are "
        "missing from every estimate: use Guidance(floor=0)."
    )
    with pytest.raises(
        InputError, match=r"every token within reach where texts are weighted; found plausible"
    ):
        draw_weighted(guided("noisy", plausible=0.1), ["x"], ["ab"], ORACLE, count=1)
    with pytest.raises(MismatchError) as other:
        smc(guided("noisy", exact_end=True), ["x"], ["ab"], Keywords(), particles=2)
    assert str(other.value) == (
        "expected the oracle that decides the model's exact end; found another one, keywords. Give both the "
        "same oracle, or turn exact_end off: q never ends a text that its own refuses."
    )
    with pytest.raises(InputError, match="a list of prompts; found the bare string 'x'"):
        draw_weighted(model, "x", ["ab"], ORACLE, count=1)
    with pytest.raises(InputError, match="a condition for each; found 1 prompts and 2 conditions"):
        verified(model, ["x"], ["ab", "ab"], ORACLE)
    with pytest.raises(InputError, match="count of at least 1; found 0"):
        draw_weighted(model, ["x"], ["ab"], ORACLE, count=0)
    with pytest.raises(InputError, match=r"an ess_threshold between 0 and 1; found 1\.5"):
        smc(model, ["x"], ["ab"], ORACLE, particles=2, ess_threshold=1.5)
    runs = smc(model, ["x"], ["ab"], ORACLE, particles=4)
    with pytest.raises(InputError, match="drawn one by one from q; found the particles of SMC"):
        diagnose(runs.particles)
    texts = draw_weighted(model, ["x"] * 2, ["ab"] * 2, ORACLE, count=4)
    with pytest.raises(
        InputError, match=r"one bound above 0, or one for each of 2 groups; found \[1, 2, 3\]"
    ):
        reject(texts, [1, 2, 3])
    with pytest.raises(InputError, match="one bound above 0"):
        reject(texts, 0.0)
