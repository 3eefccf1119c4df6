"""The tabular model, Eq. 4 and the lemmas, by enumeration. Each checker also rejects wrong versions."""

import io
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor

from nado.decomposition import guided_distribution, log_difference
from nado.errors import InputError, OracleError
from nado.exact import (
    TabularModel,
    conditionals,
    exact_log_q,
    exact_log_r,
    exact_log_r_start,
    exact_model,
    expectation,
    finish_log_r,
    guided_model,
    kl_bound,
    kl_divergence,
    log_delta,
    log_kept_mass,
    outcome_log_p,
    prefix_count,
    prefix_log_p,
    prefix_texts,
    propagate,
    satisfied_outcomes,
    tempered_model,
)
from nado.exact_example import print_example
from nado.language_model import LanguageModel, Refillable
from nado.oracles import oracle
from strategies import (
    PROMPTS,
    ConstantOracle,
    LetterOracle,
    Problem,
    RandomOracle,
    exactly,
    models,
    perturbed,
    problems,
)

MAXIMUM = 1e-6


def example(completion: str = "eos", seed: int = 5) -> Problem:
    model = TabularModel.random(PROMPTS, vocabulary_size=3, length_limit=3, completion=completion, seed=seed)
    return Problem(model, "example", "one", "one", RandomOracle(seed, 0.5))


# --- the model ----------------------------------------------------------------------------------------


def test_a_tabular_model_is_a_language_model() -> None:
    model = TabularModel.random()
    assert isinstance(model, LanguageModel)
    assert isinstance(model, Refillable)


@exactly
@given(models())
def test_outcomes_sum_to_one_and_agree_with_score(drawn: tuple[TabularModel, str]) -> None:
    model, _ = drawn
    outcomes = model.outcomes("one")
    assert float(outcomes.log_p.exp().sum()) == pytest.approx(1.0, abs=1e-12)
    scores = model.score_exact(["one"] * len(outcomes.texts), outcomes.tokens, outcomes.lengths)
    torch.testing.assert_close(scores.sum(dim=1), outcomes.log_p)
    assert model.decode(outcomes.tokens.tolist()) == outcomes.texts
    assert len(set(outcomes.texts)) == len(outcomes.texts)


@exactly
@given(models())
def test_prefix_probabilities_are_sums_over_their_texts(drawn: tuple[TabularModel, str]) -> None:
    model, _ = drawn
    outcomes = model.outcomes("two")
    mass = prefix_log_p(model.table("two")).exp()
    for number in range(len(mass)):
        inside = torch.tensor([text.startswith(outcomes.texts[number]) for text in outcomes.texts])
        assert float(mass[number]) == pytest.approx(float(outcomes.log_p.exp()[inside].sum()), abs=1e-12)


def test_a_row_that_has_ended_writes_eos_for_ever() -> None:
    model = TabularModel.random(vocabulary_size=3, length_limit=3)
    state = model.step(model.start(["", ""]), torch.tensor([model.eos_id, 0]))
    for token in (0, 1):
        assert state.log_p[0].exp().tolist() == [0.0, 0.0, 1.0]
        assert state.log_p[1].exp().max() < 1
        state = model.step(state, torch.tensor([token, token]))
    assert state.log_p.exp().tolist() == [[0.0, 0.0, 1.0]] * 2  # the second was cut at L


def brute_force_r(problem: Problem, prefix: str, token: int) -> float | None:
    """R by comparing strings: nothing shared with `propagate`. None where p never goes."""
    outcomes, satisfied = problem.outcomes, problem.satisfied
    letters = problem.model.vocabulary_size - 1
    total = kept = 0.0
    for row, text in enumerate(outcomes.texts):
        if token == letters:
            inside = text == prefix and bool(outcomes.ended[row])
        else:
            inside = text.startswith(prefix + "abcdefg"[token])
        share = float(outcomes.log_p[row].exp()) if inside else 0.0
        total, kept = total + share, kept + share * bool(satisfied[row])
    return kept / total if total else None


def check_exact_r(problem: Problem, exact_r: Callable[[Problem], Tensor]) -> None:
    log_r = exact_r(problem)
    texts = prefix_texts(problem.model.vocabulary_size, problem.model.length_limit)
    for number in range(len(log_r)):
        for token in range(problem.model.vocabulary_size):
            expected = brute_force_r(problem, texts[number], token)
            if expected is not None:
                assert abs(float(log_r[number, token].exp()) - expected) < 1e-9


@exactly
@given(problems(settled=True))
def test_exact_r_is_the_conditional_probability_of_satisfaction(problem: Problem) -> None:
    check_exact_r(problem, lambda given_problem: given_problem.log_r)
    start = torch.logsumexp(problem.table[0] + problem.log_r[0], dim=0)
    torch.testing.assert_close(start, problem.log_r_start)


def r_that_judges_cut_texts(problem: Problem) -> Tensor:
    texts = problem.outcomes.texts
    answers = torch.tensor(problem.oracle([problem.condition] * len(texts), texts))
    return propagate(problem.table, torch.where(answers, 0.0, -math.inf).double())


def r_of_the_prefix_before(problem: Problem) -> Tensor:
    return torch.logsumexp(problem.table + problem.log_r, dim=-1, keepdim=True).expand_as(problem.table)


def r_without_eos(problem: Problem) -> Tensor:
    return problem.log_r.index_fill(1, torch.tensor([problem.model.eos_id]), -math.inf)


@pytest.mark.parametrize("wrong", [r_that_judges_cut_texts, r_of_the_prefix_before, r_without_eos])
def test_wrong_r_is_rejected(wrong: Callable[[Problem], Tensor]) -> None:
    with pytest.raises(AssertionError):
        check_exact_r(example(), wrong)


def test_cut_texts_are_unsatisfied_under_eos_and_judged_under_limit() -> None:
    for completion, rate in (("eos", 0.0), ("limit", 1.0)):
        model = TabularModel.from_function(lambda _, __: [1, 0], length_limit=2, completion=completion)
        assert float(exact_log_r_start(model, ConstantOracle(True), "").exp()) == rate
        assert float(finish_log_r(model, "")[0, 0].exp()) == rate
    assert bool(torch.isneginf(finish_log_r(TabularModel.random(length_limit=2), "")[-1, :-1]).all())


def test_a_condition_reaches_the_oracle_and_the_guided_model_only() -> None:
    problem = example()
    rates = {c: float(exact_log_r_start(problem.model, problem.oracle, "one", c)) for c in PROMPTS}
    assert len(set(rates.values())) == len(PROMPTS)
    guided = exact_model(problem.model, problem.oracle, [("one", c) for c in PROMPTS])
    rows = guided.start(["one"] * 3, list(PROMPTS)).log_p
    assert not torch.equal(rows[0], rows[1])
    base = problem.model.start(["one"] * 3, list(PROMPTS)).log_p
    assert torch.equal(base[0], base[1])


def test_fingerprints_tell_models_apart() -> None:
    model = TabularModel.random(seed=1)
    others = [
        TabularModel.random(seed=2),
        TabularModel.random(seed=1, completion="limit"),
        tempered_model(model, 2.0),
        TabularModel.random(["x"], seed=1),
    ]
    assert model.fingerprint == TabularModel.random(seed=1).fingerprint
    assert len({m.fingerprint for m in [model, *others]}) == 5


def test_random_tables_have_zeros_on_demand_and_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    model = TabularModel.random(vocabulary_size=8, length_limit=4, zeros=0.5)
    assert torch.equal(before, torch.get_rng_state())
    assert 0.3 < float(torch.isneginf(model.table("")).double().mean()) < 0.5
    assert len(TabularModel.random(vocabulary_size=8, length_limit=6).table("")) == prefix_count(8, 6)


# --- (a) Eq. 4 and Lemma 3 ----------------------------------------------------------------------------


def check_eq4(problem: Problem, next_token: Callable[[Tensor, Tensor], Tensor]) -> None:
    """q built token by token is p·C / R(x), and equals the conditionals of that joint (Lemma 3)."""
    log_r = problem.log_r
    table = next_token(problem.table, log_r)
    log_q = exact_log_q(problem.model, problem.oracle, problem.prompt, problem.condition)
    assert float((outcome_log_p(table).exp() - log_q.exp()).abs().max()) < MAXIMUM
    joint = conditionals(log_q, problem.model.vocabulary_size, problem.model.length_limit)
    hope = torch.logsumexp(problem.table + log_r, dim=-1)  # log R of each prefix
    reached = ~torch.isneginf(hope) & ~torch.isneginf(prefix_log_p(problem.table))
    assert float((table.exp() - joint.exp())[reached].abs().max()) < MAXIMUM


def eq4(log_p: Tensor, log_r: Tensor) -> Tensor:
    return guided_distribution(log_p, log_r).log_q


@exactly
@given(problems(settled=True))
def test_eq4_gives_q_star(problem: Problem) -> None:
    check_eq4(problem, eq4)
    check_eq4(problem, eq4_as_printed)


def eq4_as_printed(log_p: Tensor, log_r: Tensor) -> Tensor:
    """With the prefix's R, looked up in the row before, as the denominator."""
    letters = log_p.shape[1] - 1
    start = torch.logsumexp(log_p[0] + log_r[0], dim=0, keepdim=True)
    before = torch.cat([start, log_r[:, :letters].flatten()])[: len(log_p)].unsqueeze(1)
    return torch.where(torch.isneginf(before), log_p, log_difference(log_p + log_r, before.expand_as(log_p)))


def shifted_by_one(log_p: Tensor, log_r: Tensor) -> Tensor:
    return eq4(log_p, log_r.roll(1, dims=0))


def with_eos_masked(log_p: Tensor, log_r: Tensor) -> Tensor:
    return eq4(log_p, log_r.index_fill(1, torch.tensor([log_r.shape[1] - 1]), 0.0))


def with_a_sign_slip(log_p: Tensor, log_r: Tensor) -> Tensor:
    return eq4(log_p, -log_r.clamp(min=-30))


def not_normalised(log_p: Tensor, log_r: Tensor) -> Tensor:
    return log_p + log_r


@pytest.mark.parametrize("wrong", [shifted_by_one, with_eos_masked, with_a_sign_slip, not_normalised])
@pytest.mark.parametrize("completion", ["eos", "limit"])
def test_wrong_eq4_is_rejected(wrong: Callable[[Tensor, Tensor], Tensor], completion: str) -> None:
    with pytest.raises(AssertionError):
        check_eq4(example(completion), wrong)


@exactly
@given(problems(), st.integers(0, 10**6))
def test_q_star_is_the_closest_satisfying_distribution(problem: Problem, seed: int) -> None:
    """Eq. 3 with KL(q ‖ p): the least is −log R(x), at q*; the printed KL(p ‖ q) is infinite."""
    log_p = problem.outcomes.log_p
    log_q = exact_log_q(problem.model, problem.oracle, problem.prompt, problem.condition)
    assert float(kl_divergence(log_q, log_p)) == pytest.approx(-float(problem.log_r_start), abs=1e-9)
    noise = torch.randn(len(log_q), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    other = torch.log_softmax(log_q + noise, dim=0)  # satisfies too, another distribution
    assert float(kl_divergence(other, log_p)) >= float(kl_divergence(log_q, log_p)) - 1e-12
    assert float(kl_divergence(log_p, log_q)) == math.inf


# --- (c) Lemmas 1 and 2 -------------------------------------------------------------------------------


NextToken = Callable[[Tensor, Tensor], Tensor]


def kl_of(problem: Problem, log_r_hat: Tensor, next_token: NextToken) -> Tensor:
    log_q_hat = outcome_log_p(next_token(problem.table, log_r_hat))
    log_q = exact_log_q(problem.model, problem.oracle, problem.prompt, problem.condition)
    return kl_divergence(log_q, log_q_hat)


def check_lemma1(problem: Problem, log_r_hat: Tensor, next_token: NextToken = eq4) -> None:
    """KL(q* ‖ q̂) ≤ (2L + 2) ln δ, δ taken on {R > 0}, for an R̂ that is 0 where R is."""
    bound = kl_bound(log_delta(problem.table, log_r_hat, problem.log_r), problem.model.length_limit)
    assert float(kl_of(problem, log_r_hat, next_token)) <= float(bound) + 1e-9


def check_lemma2(problem: Problem, log_r_hat: Tensor, next_token: NextToken = eq4) -> None:
    """KL(q* ‖ q̂) ≤ 2 ln δ whatever the length, for an R̂ that satisfies Eq. 6 as well."""
    bound = kl_bound(log_delta(problem.table, log_r_hat, problem.log_r))
    assert float(kl_of(problem, log_r_hat, next_token)) <= float(bound) + 1e-9


def check_leaked_mass(problem: Problem, log_r_hat: Tensor, next_token: NextToken = eq4) -> None:
    """KL(q* ‖ q̂) ≤ (2L + 2) ln δ − E_q*[Σ_i log(1 − leak_i)], for an R̂ that is never 0."""
    bound = kl_bound(log_delta(problem.table, log_r_hat, problem.log_r), problem.model.length_limit)
    bound = bound - expected_log_kept(problem, log_r_hat)
    assert float(kl_of(problem, log_r_hat, next_token)) <= float(bound) + 1e-9


def expected_log_kept(problem: Problem, log_r_hat: Tensor) -> Tensor:
    """E_q* of the sum over the steps of a text of log(1 − leak)."""
    kept = log_kept_mass(problem.table, log_r_hat, problem.log_r)
    arrive = prefix_log_p(eq4(problem.table, problem.log_r))
    return expectation(arrive, kept)


def noise_like(values: Tensor, seed: int, size: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return size * (2 * torch.rand(values.shape, generator=generator, dtype=torch.float64) - 1)


def propagated(problem: Problem, log_satisfied: Tensor, log_unsatisfied: float) -> Tensor:
    """An R̂ that satisfies Eq. 6 by construction, from terminal values other than 1 and 0."""
    return propagate(problem.table, torch.where(problem.satisfied, log_satisfied, log_unsatisfied))


@exactly
@given(problems(settled=True), st.integers(0, 10**6), st.sampled_from([0.05, 0.7, 3.0]))
def test_lemma1(problem: Problem, seed: int, size: float) -> None:
    check_lemma1(problem, problem.log_r + noise_like(problem.log_r, seed, size))


@exactly
@given(problems(settled=True), st.integers(0, 10**6), st.sampled_from([0.05, 0.7, 3.0]))
def test_lemma2(problem: Problem, seed: int, size: float) -> None:
    noise = noise_like(problem.outcomes.log_p, seed, size)
    check_lemma2(problem, propagated(problem, noise, -math.inf))
    # A terminal value that is never 0 still satisfies Eq. 6: δ on {R > 0} pays for what leaks.
    check_lemma2(problem, propagated(problem, noise, -3.0))


@exactly
@given(problems(settled=True), st.integers(0, 10**6), st.sampled_from([0.1, 1.0, 3.0]))
def test_lemma1_with_a_sigmoid_that_is_never_zero(problem: Problem, seed: int, size: float) -> None:
    log_r_hat = perturbed(problem.log_r, seed, size)
    assume(bool(torch.isneginf(problem.log_r).any()))
    check_leaked_mass(problem, log_r_hat)
    satisfied = expectation(outcome_log_p(eq4(problem.table, log_r_hat)), problem.satisfied.double())
    assert float(satisfied) < 1  # it does leak, and the lemma without the term may fail (below)


def long_problem() -> Problem:
    """Fair coins, 6 letters, an arbitrary oracle: room for errors to pile up."""
    model = TabularModel.from_function(lambda _, __: [1, 1, 0], length_limit=6, completion="limit")
    return Problem(model, "coins", "", "", RandomOracle(5, 0.6))


def tilted(log_r: Tensor, size: float) -> Tensor:
    """Every step favours b over a: errors that a consistent R̂ cannot make at every length."""
    tilt = torch.tensor([-size, size, 0.0], dtype=torch.float64)
    return log_r + tilt


def test_lemma2_needs_consistency() -> None:
    """The same δ without Eq. 6 breaks 2 ln δ, and keeps (2L + 2) ln δ."""
    problem = long_problem()
    log_r_hat = tilted(problem.log_r, 1.5)
    check_lemma1(problem, log_r_hat)
    with pytest.raises(AssertionError):
        check_lemma2(problem, log_r_hat)


@pytest.mark.parametrize("wrong", [shifted_by_one, with_a_sign_slip])
def test_lemma_checkers_reject_a_wrong_q(wrong: Callable[[Tensor, Tensor], Tensor]) -> None:
    """δ is small here, so a q̂ that is not the one of R̂ stands out."""
    problem = long_problem()
    terminal = noise_like(problem.outcomes.log_p, 0, 0.01)
    for check in (check_lemma1, check_lemma2, check_leaked_mass):
        check(problem, propagated(problem, terminal, -math.inf))
        with pytest.raises(AssertionError):
            check(problem, propagated(problem, terminal, -math.inf), wrong)


def test_leaked_mass_checker_rejects_a_bound_without_the_leak() -> None:
    """δ on {R > 0} alone does not bound a q̂ that leaks: R̂ = R there, ln δ = 0, KL > 0."""
    model = TabularModel.from_function(lambda _, __: [1, 1, 1], length_limit=3)
    problem = Problem(model, "leaky", "", "", LetterOracle("a", 1))
    log_r_hat = problem.log_r.clamp(min=math.log(0.01))
    log_r_hat[0] = problem.log_r[0]  # R̂(x) is right too
    check_leaked_mass(problem, log_r_hat)
    with pytest.raises(AssertionError):
        check_lemma1(problem, log_r_hat)


# --- building models from others, and errors ----------------------------------------------------------


def test_guided_with_r_of_one_is_the_base_and_flat_temperature_is_uniform() -> None:
    problem = example()
    same = guided_model(problem.model, {("one", "one"): torch.zeros_like(problem.table)})
    torch.testing.assert_close(same.table("one", "one"), problem.table)
    flat = tempered_model(problem.model, 1e9).table("one")
    torch.testing.assert_close(flat, torch.full_like(flat, -math.log(3)))


def test_any_oracle_of_nado_can_be_asked() -> None:
    model = TabularModel.from_function(lambda _, __: [2, 1, 1], length_limit=2)
    has_b = oracle(lambda text: "b" in text)
    log_r = exact_log_r(model, ~has_b, "")
    assert log_r.exp().tolist() == [[0.25, 0.0, 1.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]


def test_expectation_ignores_values_at_probability_zero() -> None:
    log_p = torch.tensor([0.0, -math.inf], dtype=torch.float64)
    assert float(expectation(log_p, torch.tensor([2.0, math.inf], dtype=torch.float64))) == 2.0


def test_the_example_prints() -> None:
    written = io.StringIO()
    print_example(Console(file=written, width=100))
    assert "satisfied at target rate 0.8       0.800000" in written.getvalue()
    assert "satisfied under q*                 1.000000" in written.getvalue()


def message(error: pytest.ExceptionInfo[Exception]) -> str:
    return str(error.value)


def test_errors_say_what_to_do() -> None:
    with pytest.raises(InputError) as error:
        TabularModel.random(vocabulary_size=9)
    assert message(error) == (
        "expected 2 to 8 tokens, EOS included, and a length limit of 1 to 6; found 9 tokens and a limit "
        "of 3. Tables grow as V^L: use a smaller model, or a real one."
    )
    with pytest.raises(InputError) as error:
        TabularModel({"x": torch.zeros(2, 3)}, length_limit=2)
    assert message(error) == (
        "expected a table of shape (3, 3) for prompt 'x': one row for each prefix; found shape (2, 3). "
        "Rows are prefixes in heap order, columns are letters and then EOS."
    )
    with pytest.raises(InputError) as error:
        TabularModel({"x": torch.zeros(3, 3)}, length_limit=2)
    assert message(error) == (
        "expected log-probabilities that sum to 1 in each row of the table for prompt 'x'; "
        "found a row whose log-sum is off by 1.09861. Apply torch.log_softmax to the last dimension."
    )
    with pytest.raises(InputError) as error:
        TabularModel({}, length_limit=2)
    assert message(error) == (
        'expected a table for at least one prompt; found none. Use the prompt "" for a model without one.'
    )
    with pytest.raises(InputError) as error:
        TabularModel.random(completion="length")  # type: ignore[arg-type]
    assert (
        message(error) == 'expected completion "eos" or "limit"; found \'length\'. See nado.language_model.'
    )


def test_errors_about_prompts_oracles_and_temperature() -> None:
    model = TabularModel.random(["one", "two"])
    with pytest.raises(InputError) as error:
        model.start(["three"])
    assert message(error) == (
        "expected one of the prompts this model has a table for: ['one', 'two']; found 'three'. "
        "Make the model with a table for every prompt you ask it about."
    )
    with pytest.raises(OracleError) as error:
        satisfied_outcomes(model, lambda conditions, texts: True, "one")
    assert message(error) == (
        "expected one boolean for each of 40 texts; found an array of shape () and type bool. "
        "Return a list or array of bool, one for each text."
    )
    with pytest.raises(OracleError, match=r"type float64"):
        exact_log_r(model, lambda conditions, texts: [0.5] * len(texts), "one")
    with pytest.raises(InputError) as error:
        tempered_model(model, 0.0)
    assert message(error) == "expected a temperature above 0; found 0. Use 1 for the model as it is."
