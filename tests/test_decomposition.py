"""Soft rate, strength, composition, weights and proposals, by enumeration; and what happens at the edges."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nado.decomposition import (
    SoftCoefficients,
    apply_strength,
    close_at_limit,
    conjoin,
    disjoin,
    doubted_log_r,
    expected_log_r,
    guided_distribution,
    hard_log_terminal,
    log_difference,
    log_one_minus,
    log_weight,
    mixture_log_proposal,
    negate,
    plausible_log_r,
    require_coverage,
    require_strength,
    smc_log_increment,
    smc_log_increments,
    soft_coefficients,
    soft_log_r,
    soft_log_terminal,
)
from nado.errors import CoverageError, InfeasibleError, InputError
from nado.exact import (
    TabularModel,
    exact_log_q,
    exact_log_r,
    exact_log_r_start,
    expectation,
    finish_log_r,
    kl_divergence,
    outcome_log_p,
)
from strategies import (
    PROMPTS,
    ConstantOracle,
    LetterOracle,
    Problem,
    RandomOracle,
    arbitrary_values,
    chosen,
    exactly,
    models,
    perturbed,
    problems,
    unroll,
)

NOTHING = -math.inf


def example(completion: str = "eos", seed: int = 5) -> Problem:
    model = TabularModel.random(PROMPTS, vocabulary_size=3, length_limit=3, completion=completion, seed=seed)
    return Problem(model, "example", "one", "one", RandomOracle(seed, 0.5))


def start_of(problem: Problem) -> tuple[Tensor, Tensor]:
    """log R(x) and log(1 − R(x)), as the guided model gets them from its first step."""
    log_p, log_r = problem.table[0], problem.log_r[0]
    return expected_log_r(log_p, log_r), expected_log_r(log_p, log_one_minus(log_r))


# --- (d) soft rate ------------------------------------------------------------------------------------

SoftFactor = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def soft_factor(log_r: Tensor, log_r_start: Tensor, log_not_r_start: Tensor, target_rate: float) -> Tensor:
    return soft_log_r(log_r, soft_coefficients(log_r_start, log_not_r_start, target_rate))


def check_soft_rate(problem: Problem, factor: SoftFactor, target_rate: float) -> None:
    """Satisfied at rate r; and within the satisfied and the unsatisfied, texts keep the proportions of p."""
    table = guided_distribution(problem.table, factor(problem.log_r, *start_of(problem), target_rate)).log_q
    q, p = outcome_log_p(table).exp(), problem.outcomes.log_p.exp()
    satisfied, rate = problem.satisfied, float(problem.log_r_start.exp())
    assert abs(float(q[satisfied].sum()) - target_rate) < 1e-9
    ratio = torch.full_like(p, (1 - target_rate) / (1 - rate)).masked_fill(satisfied, target_rate / rate)
    assert float((q - p * ratio).abs().max()) < 1e-9


@exactly
@given(problems(), st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0]))
def test_soft_rate_hits_the_target(problem: Problem, target_rate: float) -> None:
    check_soft_rate(problem, soft_factor, target_rate)


@exactly
@given(problems())
def test_soft_rate_at_its_ends(problem: Problem) -> None:
    """r = R(x) returns p, r = 1 the hard solution."""
    as_p = soft_factor(problem.log_r, *start_of(problem), float(problem.log_r_start.exp()))
    assert float(as_p.abs().max()) < 1e-6
    hard = outcome_log_p(
        guided_distribution(problem.table, soft_factor(problem.log_r, *start_of(problem), 1.0)).log_q
    )
    log_q = exact_log_q(problem.model, problem.oracle, problem.prompt, problem.condition)
    assert float((hard.exp() - log_q.exp()).abs().max()) < 1e-9


@exactly
@given(problems(), st.sampled_from([0.1, 0.5, 0.9]))
def test_soft_rate_is_the_optimum_of_kl_regularised_reward(problem: Problem, target_rate: float) -> None:
    """q_r ∝ p · exp(C / τ) with 1/τ = logit r − logit R(x): the page on reinforcement learning says so."""
    log_p, satisfied = problem.outcomes.log_p, problem.satisfied.double()
    reward_weight = torch.logit(torch.tensor(target_rate, dtype=torch.float64)) - torch.logit(
        problem.log_r_start.exp()
    )
    policy = torch.log_softmax(log_p + reward_weight * satisfied, dim=0)
    table = guided_distribution(
        problem.table, soft_factor(problem.log_r, *start_of(problem), target_rate)
    ).log_q
    assert float((outcome_log_p(table).exp() - policy.exp()).abs().max()) < 1e-9


def swapped_rates(log_r: Tensor, log_r_start: Tensor, log_not_r_start: Tensor, target_rate: float) -> Tensor:
    """The appendix's slip: r put on C = 0."""
    alpha, beta = soft_coefficients(log_not_r_start, log_r_start, target_rate)
    return soft_log_r(log_r, SoftCoefficients(beta, alpha))


def without_the_complement(log_r: Tensor, log_r_start: Tensor, _: Tensor, target_rate: float) -> Tensor:
    alpha, beta = math.log(target_rate) - log_r_start, math.log1p(-target_rate) - log_r_start
    return soft_log_r(log_r, SoftCoefficients(alpha, beta))


def only_at_the_end(log_r: Tensor, log_r_start: Tensor, not_start: Tensor, target_rate: float) -> Tensor:
    soft = soft_factor(log_r, log_r_start, not_start, target_rate)
    return torch.cat([log_r[:, :-1], soft[:, -1:]], dim=1)


@pytest.mark.parametrize("wrong", [swapped_rates, without_the_complement, only_at_the_end])
@pytest.mark.parametrize("completion", ["eos", "limit"])
def test_wrong_soft_rate_is_rejected(wrong: SoftFactor, completion: str) -> None:
    check_soft_rate(example(completion), soft_factor, 0.7)
    with pytest.raises(AssertionError):
        check_soft_rate(example(completion), wrong, 0.7)


def test_soft_rate_takes_one_rate_a_row() -> None:
    log_r_start = torch.log(torch.tensor([0.5, 0.1]))
    alpha, beta = soft_coefficients(log_r_start, log_one_minus(log_r_start), torch.tensor([0.5, 0.2]))
    torch.testing.assert_close(alpha.exp(), torch.tensor([1.0, 2.0]))
    torch.testing.assert_close(beta.exp(), torch.tensor([1.0, 0.8 / 0.9]))


@pytest.mark.parametrize("completion", ["eos", "limit"])
@pytest.mark.parametrize("target_rate", [0.0, 0.4, 1.0])
def test_constant_oracles_are_infeasible_except_at_their_own_rate(
    completion: str, target_rate: float
) -> None:
    model = TabularModel.from_function(
        lambda _, text: [0, 0, 1] if len(text) == 1 else [1, 1, 1], length_limit=2, completion=completion
    )
    for answer in (False, True):
        problem = Problem(model, "constant", "", "", ConstantOracle(answer))
        if target_rate == float(answer):
            factor = soft_factor(problem.log_r, *start_of(problem), target_rate)
            torch.testing.assert_close(guided_distribution(problem.table, factor).log_q, problem.table)
        else:
            with pytest.raises(InfeasibleError):
                soft_factor(problem.log_r, *start_of(problem), target_rate)


def test_soft_rate_keeps_its_digits_where_r_is_almost_one() -> None:
    """float32: 1 − R(x) is 1e-9, which log R(x) alone cannot hold."""
    log_p = torch.log(torch.tensor([0.5, 0.5]))
    log_r = torch.tensor([-1e-9, -1e-9])
    start, not_start = expected_log_r(log_p, log_r), expected_log_r(log_p, log_one_minus(log_r))
    alpha, beta = soft_coefficients(start, not_start, 0.5)
    assert float(beta) == pytest.approx(math.log(0.5e9), rel=1e-5)
    torch.testing.assert_close(
        soft_log_r(log_r, SoftCoefficients(alpha, beta)).exp(), torch.ones(2), atol=1e-4, rtol=0
    )


# --- doubt --------------------------------------------------------------------------------------------


def learned(log_r: Tensor) -> Tensor:
    """R as a guide may have learned it: never quite 0."""
    return log_r.clamp(min=-600.0)


@pytest.mark.parametrize("seed", range(5))
def test_doubt_is_the_method_for_an_oracle_that_says_yes_anyway_now_and_then(seed: int) -> None:
    """Whole texts come as often as p·(C + d(1 − C)) says, where every text counts."""
    problem, doubt = example("limit", seed), 0.2
    table = guided_distribution(problem.table, doubted_log_r(learned(problem.log_r), doubt)).log_q
    wanted = problem.outcomes.log_p.exp() * (doubt + (1 - doubt) * problem.satisfied.double())
    assert float((outcome_log_p(table).exp() - wanted / wanted.sum()).abs().max()) < 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_doubt_is_a_soft_rate_by_another_name(seed: int) -> None:
    problem, doubt = example("limit", seed), 0.1
    rate = float(problem.log_r_start.exp())
    soft = soft_factor(problem.log_r, *start_of(problem), rate / (rate + doubt * (1 - rate)))
    factors = (doubted_log_r(learned(problem.log_r), doubt), soft)
    one, other = (guided_distribution(problem.table, each).log_q for each in factors)
    assert float((one.exp() - other.exp()).abs().max()) < 1e-9


def test_doubt_at_its_ends() -> None:
    log_r = torch.tensor([0.0, math.log(0.5), math.log(1e-6), NOTHING], dtype=torch.float64)
    assert torch.equal(doubted_log_r(log_r, 0.0), log_r)
    found = doubted_log_r(log_r, 0.01).exp()
    assert found.tolist() == pytest.approx([1.0, 0.505, 0.01 + 0.99e-6, 0.0], abs=1e-12)
    assert doubted_log_r(log_r, 1.0)[:3].tolist() == [0.0, 0.0, 0.0]
    assert doubted_log_r(log_r.bfloat16(), 0.01).dtype == torch.float32
    rows = doubted_log_r(torch.stack([log_r, log_r]), torch.tensor([0.0, 0.01], dtype=torch.float64))
    assert torch.equal(rows[0], log_r)
    assert torch.equal(rows[1], doubted_log_r(log_r, 0.01))


# --- (g) weights --------------------------------------------------------------------------------------

Weight = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def steps_of(problem: Problem, factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log q of every text, and log S and the chosen factor of each of its steps."""
    outcomes = problem.outcomes
    log_s = expected_log_r(unroll(problem.table, outcomes), unroll(factor, outcomes))
    joint = outcome_log_p(guided_distribution(problem.table, factor).log_q)
    return joint, log_s, chosen(unroll(factor, outcomes), outcomes)


def check_weights(problem: Problem, factor: Tensor, log_terminal: Tensor, weight: Weight) -> None:
    """w = p·terminal / q text by text; E_q[w f] = E_p[terminal f]."""
    outcomes = problem.outcomes
    log_q, log_s, log_r = steps_of(problem, factor)
    log_w = weight(log_s, log_r, log_terminal, outcomes.lengths)
    drawable = ~torch.isneginf(log_q)
    expected = log_difference(outcomes.log_p + log_terminal, log_q)
    assert bool((log_w[drawable].exp() - expected[drawable].exp()).abs().max() < 1e-8)
    for values in (torch.ones_like(log_q), arbitrary_values(outcomes)):
        left = expectation(log_q, log_w.exp() * values)
        assert abs(float(left - expectation(outcomes.log_p, log_terminal.exp() * values))) < 1e-8


@exactly
@given(problems(settled=True), st.integers(0, 10**6), st.sampled_from([0.5, 1.0, 2.0]))
def test_weights_estimate_r_and_turn_q_into_q_star(problem: Problem, seed: int, strength: float) -> None:
    log_terminal = hard_log_terminal(problem.satisfied).double()
    factor = apply_strength(perturbed(problem.log_r, seed), strength)
    check_weights(problem, factor, log_terminal, log_weight)
    log_q, log_s, log_r = steps_of(problem, factor)
    w = log_weight(log_s, log_r, log_terminal, problem.outcomes.lengths).exp()
    assert float(expectation(log_q, w)) == pytest.approx(float(problem.log_r_start.exp()), abs=1e-9)
    log_star = exact_log_q(problem.model, problem.oracle, problem.prompt, problem.condition)
    values = arbitrary_values(problem.outcomes, seed)
    corrected = expectation(log_q, w * values) / expectation(log_q, w)
    assert float(corrected) == pytest.approx(float(expectation(log_star, values)), abs=1e-8)


@exactly
@given(problems(), st.integers(0, 10**6), st.sampled_from([0.0, 0.3, 0.9, 1.0]))
def test_weights_at_a_soft_rate_have_mean_one(problem: Problem, seed: int, target_rate: float) -> None:
    coefficients = soft_coefficients(*start_of(problem), target_rate)
    factor = soft_log_r(perturbed(problem.log_r, seed), coefficients)
    log_terminal = soft_log_terminal(problem.satisfied, coefficients)
    check_weights(problem, factor, log_terminal, log_weight)
    log_q, log_s, log_r = steps_of(problem, factor)
    w = log_weight(log_s, log_r, log_terminal, problem.outcomes.lengths).exp()
    assert float(expectation(log_q, w)) == pytest.approx(1.0, abs=1e-8)


@exactly
@given(problems(settled=True))
def test_weights_of_the_exact_guide_are_constant(problem: Problem) -> None:
    """q = q*: every text that can be drawn has w = R(x), which is S_1."""
    log_terminal = hard_log_terminal(problem.satisfied).double()
    log_q, log_s, log_r = steps_of(problem, problem.log_r)
    log_w = log_weight(log_s, log_r, log_terminal, problem.outcomes.lengths)[~torch.isneginf(log_q)]
    torch.testing.assert_close(log_w, problem.log_r_start.expand_as(log_w))
    torch.testing.assert_close(log_s[0, 0], problem.log_r_start)


def sum_of_increments(log_s: Tensor, log_r: Tensor, log_terminal: Tensor, lengths: Tensor) -> Tensor:
    return smc_log_increments(log_s, log_r, log_terminal, lengths).sum(dim=1)


@exactly
@given(problems(settled=True), st.integers(0, 10**6))
def test_smc_increments_multiply_to_the_weight(problem: Problem, seed: int) -> None:
    log_terminal = hard_log_terminal(problem.satisfied).double()
    factor = perturbed(problem.log_r, seed)
    check_weights(problem, factor, log_terminal, sum_of_increments)
    _, log_s, log_r = steps_of(problem, factor)
    increments = smc_log_increments(log_s, log_r, log_terminal, problem.outcomes.lengths)
    torch.testing.assert_close(increments[:, 0], log_s[:, 0])
    if increments.shape[1] > 2:
        going = problem.outcomes.lengths > 1
        one = smc_log_increment(log_s[:, 1], log_r[:, 0])
        torch.testing.assert_close(increments[going, 1], one[going])
    short = problem.outcomes.lengths < problem.model.length_limit
    assert not bool(increments[short, -1].any())  # finished particles keep their weight


def test_smc_partial_weights_target_p_times_r() -> None:
    """After i steps the weights turn q into p(y≤i) R̂(y≤i), the twisted target."""
    problem = example("limit")
    factor = perturbed(problem.log_r, 1)
    log_q, log_s, log_r = steps_of(problem, factor)
    terminal = hard_log_terminal(problem.satisfied).double()
    increments = smc_log_increments(log_s, log_r, terminal, problem.outcomes.lengths)
    values = torch.tensor([0.3, -1.2, 2.0], dtype=torch.float64)[problem.outcomes.tokens[:, 0]]
    after_one = expectation(log_q, increments[:, 0].exp() * values)
    target = expectation(problem.outcomes.log_p, log_r[:, 0].exp() * values)
    assert float(after_one) == pytest.approx(float(target), abs=1e-9)


def weight_with_a_sign_slip(log_s: Tensor, log_r: Tensor, log_terminal: Tensor, lengths: Tensor) -> Tensor:
    return log_weight(log_r, log_s, log_terminal, lengths)


def weight_shifted_by_one(log_s: Tensor, log_r: Tensor, log_terminal: Tensor, lengths: Tensor) -> Tensor:
    return log_weight(log_s.roll(-1, dims=1), log_r, log_terminal, lengths)


def weight_without_eos(log_s: Tensor, log_r: Tensor, log_terminal: Tensor, lengths: Tensor) -> Tensor:
    return log_weight(log_s, log_r, log_terminal, lengths - 1)


def weight_without_the_oracle(log_s: Tensor, log_r: Tensor, log_terminal: Tensor, lengths: Tensor) -> Tensor:
    return log_weight(log_s, log_r, torch.zeros_like(log_terminal), lengths)


def weight_with_padding(log_s: Tensor, log_r: Tensor, log_terminal: Tensor, lengths: Tensor) -> Tensor:
    return log_weight(log_s, log_r, log_terminal, torch.full_like(lengths, log_s.shape[1]))


@pytest.mark.parametrize(
    "wrong",
    [
        weight_with_a_sign_slip,
        weight_shifted_by_one,
        weight_without_eos,
        weight_without_the_oracle,
        weight_with_padding,
    ],
)
def test_wrong_weights_are_rejected(wrong: Weight) -> None:
    problem = example()
    terminal = hard_log_terminal(problem.satisfied).double()
    check_weights(problem, perturbed(problem.log_r, 0), terminal, log_weight)
    with pytest.raises(AssertionError):
        check_weights(problem, perturbed(problem.log_r, 0), terminal, wrong)


def test_a_lost_text_weighs_nothing_and_q_falls_back_to_p() -> None:
    log_p = torch.log(torch.tensor([[0.25, 0.75]]))
    log_q, log_s = guided_distribution(log_p, torch.full((1, 2), NOTHING))
    assert torch.equal(log_q, log_p)
    assert float(log_s) == NOTHING
    log_w = log_weight(log_s.view(1, 1), torch.tensor([[NOTHING]]), torch.zeros(1), torch.tensor([1]))
    assert float(log_w) == NOTHING


# --- (h) composition ----------------------------------------------------------------------------------


def independent_model(completion: str, seed: int) -> TabularModel:
    """Letters depend on their place only and no text ends before its third token: places are independent."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand((4, 3), generator=generator, dtype=torch.float64) + 0.05
    weights[:2, -1] = 0.0
    return TabularModel.from_function(
        lambda _, text: weights[len(text)].tolist(), length_limit=4, completion=completion
    )


FIRST, SECOND = LetterOracle("a", 0), LetterOracle("b", 1)


def both(conditions: Sequence[str], texts: Sequence[str]) -> list[bool]:
    return [a and b for a, b in zip(FIRST(conditions, texts), SECOND(conditions, texts), strict=True)]


def either(conditions: Sequence[str], texts: Sequence[str]) -> list[bool]:
    return [a or b for a, b in zip(FIRST(conditions, texts), SECOND(conditions, texts), strict=True)]


def neither(conditions: Sequence[str], texts: Sequence[str]) -> list[bool]:
    return [not answer for answer in either(conditions, texts)]


Compose = Callable[[Tensor, Tensor, Tensor], Tensor]
COMPOSITIONS: dict[str, tuple[Callable[..., list[bool]], Compose]] = {
    "and": (both, lambda a, b, finish: conjoin([a, b], finish)),
    "or": (either, lambda a, b, finish: disjoin([a, b], finish)),
    "not or": (neither, lambda a, b, finish: negate(disjoin([a, b], finish), finish)),
    "de morgan": (neither, lambda a, b, finish: conjoin([negate(a, finish), negate(b, finish)], finish)),
}


def check_composition(model: TabularModel, oracle: Callable[..., list[bool]], compose: Compose) -> None:
    """The composed R is the exact R of the composed oracle, at every prefix and token."""
    first, second = exact_log_r(model, FIRST, ""), exact_log_r(model, SECOND, "")
    composed = compose(first, second, finish_log_r(model, ""))
    assert float((composed.exp() - exact_log_r(model, oracle, "").exp()).abs().max()) < 1e-9


@pytest.mark.parametrize("name", COMPOSITIONS)
@pytest.mark.parametrize("completion", ["eos", "limit"])
@exactly
@given(seed=st.integers(0, 10**6))
def test_composition_is_exact_where_parts_are_independent(name: str, completion: str, seed: int) -> None:
    check_composition(independent_model(completion, seed), *COMPOSITIONS[name])


def product_without_finish(a: Tensor, b: Tensor, finish: Tensor) -> Tensor:
    return conjoin([a, b])


def negation_without_finish(a: Tensor, b: Tensor, finish: Tensor) -> Tensor:
    return negate(disjoin([a, b], finish))


def sum_of_parts(a: Tensor, b: Tensor, finish: Tensor) -> Tensor:
    return torch.logaddexp(a, b)


@pytest.mark.parametrize(
    ("oracle", "wrong"),
    [(both, product_without_finish), (neither, negation_without_finish), (either, sum_of_parts)],
)
def test_wrong_composition_is_rejected(oracle: Callable[..., list[bool]], wrong: Compose) -> None:
    """Texts cut at the limit are what the finish estimate is for."""
    with pytest.raises(AssertionError):
        check_composition(independent_model("eos", 0), oracle, wrong)


@exactly
@given(problems(settled=True))
def test_negation_is_always_exact_cut_texts_included(problem: Problem) -> None:
    def opposite(conditions: Sequence[str], texts: Sequence[str]) -> list[bool]:
        return [not answer for answer in problem.oracle(conditions, texts)]

    pair = problem.prompt, problem.condition
    composed = negate(problem.log_r, finish_log_r(problem.model, *pair))
    exact = exact_log_r(problem.model, opposite, *pair)
    assert float((composed.exp() - exact.exp()).abs().max()) < 1e-9


@exactly
@given(models(min_length=2), st.integers(0, 10**6), st.sampled_from(["and", "or"]))
def test_the_weight_corrects_parts_that_are_not_independent(
    drawn: tuple[TabularModel, str], seed: int, name: str
) -> None:
    model, _ = drawn
    parts = [RandomOracle(seed, 0.6), RandomOracle(seed + 1, 0.6)]

    def composed_oracle(conditions: Sequence[str], texts: Sequence[str]) -> list[bool]:
        answers = zip(*(part(conditions, texts) for part in parts), strict=True)
        return [all(row) if name == "and" else any(row) for row in answers]

    problem = Problem(model, "dependent", "one", "one", composed_oracle)  # type: ignore[arg-type]
    tables = [exact_log_r(model, part, "one") for part in parts]
    compose = conjoin if name == "and" else disjoin
    factor = compose(tables, finish_log_r(model, "one"))
    log_terminal = hard_log_terminal(problem.satisfied).double()
    check_weights(problem, factor, log_terminal, log_weight)
    log_q, log_s, log_r = steps_of(problem, factor)
    w = log_weight(log_s, log_r, log_terminal, problem.outcomes.lengths).exp()
    rate = float(exact_log_r_start(model, composed_oracle, "one").exp())
    assert float(expectation(log_q, w)) == pytest.approx(rate, abs=1e-9)


def test_composition_stays_a_probability() -> None:
    over = torch.tensor([1e-7, -0.2])  # log R a little above 0, from rounding
    for composed in (conjoin([over, over]), disjoin([over, over]), negate(over), conjoin([over], over)):
        assert bool((composed <= 0).all())
    impossible = conjoin([torch.tensor([-1.0])], torch.tensor([NOTHING]))
    assert float(impossible) == NOTHING


def test_close_at_limit_leaves_only_eos_in_rows_at_the_limit() -> None:
    closed = close_at_limit(torch.full((2, 3), -0.5), eos_id=1, at_limit=torch.tensor([False, True]))
    assert closed.tolist() == [[-0.5, -0.5, -0.5], [NOTHING, -0.5, NOTHING]]


# --- proposals ----------------------------------------------------------------------------------------


def test_coverage_is_a_question_of_support() -> None:
    model = TabularModel.random(zeros=0.3)
    table = model.table("")
    require_coverage(table, table)
    require_coverage(table, torch.log_softmax(table / 3.0, dim=-1))
    best = table == table.amax(dim=-1, keepdim=True)
    truncated = torch.where(best, 0.0, NOTHING)
    with pytest.raises(CoverageError):
        require_coverage(table, truncated)
    require_coverage(table, torch.logaddexp(truncated + math.log(0.9), table + math.log(0.1)))


def test_coverage_error_says_what_to_do() -> None:
    log_p = torch.log(torch.tensor([[0.5, 0.25, 0.25]]))
    with pytest.raises(CoverageError) as error:
        require_coverage(log_p, torch.log(torch.tensor([[1.0, 0.0, 0.0]])))
    assert str(error.value) == (
        "expected a proposal that can write every token p can write; found 2 entries that p can write and "
        "the proposal cannot, up to 0.5 of p's mass at one step. Turn top-k, top-p, exact end and masks off "
        "in the proposal, declare them part of p, or mix the proposal with p."
    )


MixtureRecord = Callable[[Tensor, Tensor], Tensor]


def check_mixture(record: MixtureRecord) -> None:
    """The recorded token-wise log proposals sum to the log of the mixture of whole texts."""
    models_ = [TabularModel.random(seed=seed, zeros=zeros) for seed, zeros in ((0, 0.0), (1, 0.3))]
    outcomes = models_[0].outcomes("")
    scores = [m.score_exact([""] * len(outcomes.texts), outcomes.tokens, outcomes.lengths) for m in models_]
    log_shares = torch.log(torch.tensor([0.3, 0.7], dtype=torch.float64))
    recorded = record(torch.stack(scores), log_shares)
    joint = torch.logsumexp(torch.stack([s.sum(dim=1) for s in scores]) + log_shares.unsqueeze(1), dim=0)
    assert float((recorded.sum(dim=1).exp() - joint.exp()).abs().max()) < 1e-9
    padding = torch.arange(recorded.shape[1]) >= outcomes.lengths.unsqueeze(1)
    assert not bool(recorded[padding].any())


def token_by_token(log_components: Tensor, log_shares: Tensor) -> Tensor:
    return torch.logsumexp(log_components + log_shares.view(-1, 1, 1), dim=0)


def test_mixture_records_the_mixture_of_texts_not_of_tokens() -> None:
    check_mixture(mixture_log_proposal)
    with pytest.raises(AssertionError):
        check_mixture(token_by_token)


def test_mixture_of_undrawable_texts_is_impossible_not_nan() -> None:
    log_components = torch.tensor([[[NOTHING, -1.0]], [[NOTHING, -2.0]]])
    recorded = mixture_log_proposal(log_components, torch.log(torch.tensor([0.5, 0.5])))
    assert recorded.tolist() == [[NOTHING, NOTHING]]


# --- edges and errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_low_precision_inputs_are_computed_in_float32(dtype: torch.dtype) -> None:
    table = TabularModel.random(vocabulary_size=8, length_limit=2, zeros=0.3).table("").to(dtype)
    log_r = perturbed(torch.zeros(table.shape, dtype=torch.float64), 0).to(dtype)
    log_q, log_s = guided_distribution(table, log_r)
    wide = guided_distribution(table.double(), log_r.double())
    assert log_q.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(log_q.double(), wide.log_q, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(log_s.double(), wide.log_s, atol=1e-5, rtol=1e-5)
    for result in (negate(log_r), conjoin([log_r, log_r]), apply_strength(log_r, 2.0)):
        assert result.dtype == log_q.dtype


EXTREMES = torch.tensor([0.0, -1e-30, -1e-8, -0.69, -0.7, -40.0, -1e4, NOTHING])


def test_extreme_values_give_no_nan() -> None:
    log_p = torch.log_softmax(torch.tensor([0.0, NOTHING, 1.0, 2.0, -200.0, 0.0, 0.5, 0.0]), dim=0)
    coefficients = soft_coefficients(torch.tensor(-80.0), torch.tensor(-1e-35), 0.9)
    factors = [
        EXTREMES,
        apply_strength(EXTREMES, 3.0),
        apply_strength(EXTREMES, 0.0),
        negate(EXTREMES),
        conjoin([EXTREMES, EXTREMES.flip(0)], EXTREMES.roll(3)),
        disjoin([EXTREMES, EXTREMES.flip(0)]),
        soft_log_r(EXTREMES, coefficients),
    ]
    for factor in factors:
        log_q, log_s = guided_distribution(log_p, factor)
        assert not bool(torch.isnan(log_q).any())
        assert float(torch.logsumexp(log_q, dim=0)) == pytest.approx(0.0, abs=1e-5)
        assert not bool(torch.isnan(log_s))


def test_log_one_minus_is_accurate_and_has_finite_gradients() -> None:
    log_r = EXTREMES.double().requires_grad_()
    result = log_one_minus(log_r)
    expected = [NOTHING, math.log(1e-30), math.log(1e-8), math.log(1 - math.exp(-0.69))]
    assert result[:4].tolist() == pytest.approx(expected, rel=1e-8)
    assert result[5:].tolist() == pytest.approx([-math.exp(-40.0), 0.0, 0.0])
    result[1:].sum().backward()
    assert log_r.grad is not None
    assert bool(torch.isfinite(log_r.grad).all())


def test_gradients_of_s_are_finite_in_a_row_of_zeros() -> None:
    log_r = torch.tensor([[NOTHING, NOTHING], [-1.0, NOTHING]], requires_grad=True)
    log_s = expected_log_r(torch.log(torch.tensor([[0.5, 0.5], [0.5, 0.5]])), log_r)
    torch.where(torch.isneginf(log_s), 0.0, log_s).sum().backward()
    assert log_r.grad is not None
    assert log_r.grad.tolist() == [[0.0, 0.0], [1.0, 0.0]]


def test_strength_by_row_and_kl_to_p_grows_with_it() -> None:
    problem = example()
    log_r = perturbed(problem.log_r, 0)
    rows = apply_strength(log_r[:2], torch.tensor([0.0, 2.0]))
    assert not bool(rows[0].any())
    torch.testing.assert_close(rows[1], 2 * log_r[1])
    kls = []
    for strength in (0.0, 1.0, 2.0):
        table = guided_distribution(problem.table, apply_strength(log_r, strength)).log_q
        kls.append(float(kl_divergence(outcome_log_p(table), problem.outcomes.log_p)))
    assert kls[0] == 0.0 < kls[1] < kls[2]


def text_of(error: pytest.ExceptionInfo[Exception]) -> str:
    return str(error.value)


def test_errors_say_what_to_do() -> None:
    half = torch.log(torch.tensor([0.5, 0.5]))
    with pytest.raises(InfeasibleError) as error:
        soft_coefficients(torch.tensor([-0.7, NOTHING]), torch.tensor([-0.7, 0.0]), 0.8)
    assert text_of(error) == (
        "expected an R(x) other than 0 for a target rate above 0; found R(x) = 0 and target rate 0.8 in row "
        "1 of 2. The base never writes a text that satisfies the oracle here, so no guide can: change the "
        "prompt, the base or the oracle, or ask for the rate 0."
    )
    with pytest.raises(InfeasibleError) as error:
        soft_coefficients(torch.tensor([0.0]), torch.tensor([NOTHING]), 0.8)
    assert text_of(error) == (
        "expected an R(x) other than 1 for a target rate below 1; found R(x) = 1 and target rate 0.8 in row "
        "0 of 1. The base never writes a text that breaks the oracle here, so no guide can: change the "
        "prompt, the base or the oracle, or ask for the rate 1."
    )
    with pytest.raises(InputError) as error:
        soft_coefficients(half, half, torch.tensor([0.5, 80.0]))
    assert text_of(error) == (
        "expected a target rate between 0 and 1; found target rate 80. Give a share of texts: 0.8 is 80 %."
    )
    with pytest.raises(InputError) as error:
        apply_strength(half, -1.0)
    assert text_of(error) == (
        "expected a strength of 0 or more; found strength -1. Use 0 for the base alone, 1 for the method "
        "itself, 2 for a stronger pull."
    )
    with pytest.raises(InputError, match="found strength nan"):
        require_strength(torch.tensor([1.0, math.nan]))
    with pytest.raises(InputError) as error:
        conjoin([])
    assert text_of(error) == (
        "expected at least one log R to compose; found none. Give the log R of each guide in a list."
    )
    with pytest.raises(InputError) as error:
        mixture_log_proposal(torch.zeros(2, 1, 1), torch.zeros(2))
    assert (
        text_of(error) == "expected shares that sum to 1; found a sum of 2. Divide the shares by their sum."
    )


def test_only_plausible_tokens_stay_and_one_always_does() -> None:
    log_p = torch.tensor([[0.6, 0.3, 0.06, 0.04], [0.97, 0.01, 0.01, 0.01]]).log()
    log_r = torch.tensor([[0.1, 0.1, 0.9, 0.9], [0.0, 0.2, 0.2, 0.9]]).log()
    kept = torch.isfinite(plausible_log_r(log_p, log_r, 0.1))
    # What cannot be written at all makes nothing implausible.
    assert kept.tolist() == [[True, True, True, False], [False, True, True, True]]
    assert torch.equal(plausible_log_r(log_p, log_r, 0.1)[kept], log_r[kept])
    assert torch.isfinite(plausible_log_r(log_p, log_r, 1.0)).sum(dim=1).tolist() == [1, 3]
    assert torch.equal(plausible_log_r(log_p, log_r, 0.0), log_r)
    rows = plausible_log_r(log_p, log_r, torch.tensor([0.0, 1.0]))
    assert torch.isfinite(rows).tolist() == [[True] * 4, [False, True, True, True]]
