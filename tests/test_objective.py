"""Losses and importance weights against enumeration. Padding holds nonsense in every batch here."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nado.decomposition import log_one_minus, mixture_log_proposal
from nado.errors import InputError
from nado.exact import (
    TabularModel,
    expectation,
    guided_model,
    kl_divergence,
    prefix_log_p,
    prefix_texts,
    tempered_model,
)
from nado.objective import (
    Reduced,
    average,
    balance_labels,
    balance_offset,
    bernoulli_kl,
    consistency_loss,
    effective_sample_size,
    importance_log_weights,
    importance_weights,
    interior_mask,
    label_finished,
    log_consistency_loss,
    prefix_mask,
    reduce_vocabulary,
    shift_log_odds,
    stop_loss,
    success_loss,
    warm_up_loss,
)
from strategies import (
    PROMPTS,
    Problem,
    RandomOracle,
    arbitrary_values,
    chosen,
    exactly,
    perturbed,
    problems,
    unroll,
)


def example(completion: str = "eos", seed: int = 5) -> Problem:
    model = TabularModel.random(PROMPTS, vocabulary_size=3, length_limit=3, completion=completion, seed=seed)
    return Problem(model, "example", "one", "one", RandomOracle(seed, 0.5))


def reduced(problem: Problem, log_r: Tensor) -> Reduced:
    """A batch of every text the model can write."""
    outcomes = problem.outcomes
    return reduce_vocabulary(unroll(problem.table, outcomes), unroll(log_r, outcomes), outcomes.tokens)


def reachable(table: Tensor) -> Tensor:
    """Entries (N, V) that p can reach."""
    return ~torch.isneginf(prefix_log_p(table).unsqueeze(1) + table)


# --- (b) consistency ----------------------------------------------------------------------------------

Consistency = Callable[[Reduced, Tensor], Tensor]


def check_consistency(problem: Problem, loss: Consistency) -> None:
    """0 at the exact R; positive for a text through any one entry that is moved away from it."""
    outcomes = problem.outcomes
    possible = ~torch.isneginf(outcomes.log_p)
    assert float(loss(reduced(problem, problem.log_r), outcomes.lengths)[possible].abs().max()) < 1e-9
    letters = problem.model.vocabulary_size - 1
    texts = prefix_texts(problem.model.vocabulary_size, problem.model.length_limit)
    inner = (len(problem.table) - 1) // letters  # prefixes with children that are prefixes too
    for prefix, token in reachable(problem.table)[:inner, :letters].nonzero().tolist():
        moved = problem.log_r.exp()
        moved[prefix, token] += 0.1 if moved[prefix, token] < 0.5 else -0.1
        terms = loss(reduced(problem, moved.log()), outcomes.lengths)
        longer = texts[letters * prefix + 1 + token]
        through = torch.tensor([text.startswith(longer) for text in outcomes.texts]) & possible
        assert float(terms[through, len(longer)].min()) > 1e-4


@pytest.mark.parametrize("loss", [consistency_loss, log_consistency_loss])
@settings(exactly, max_examples=15)
@given(problem=problems(min_length=2, settled=True))
def test_consistency_is_zero_at_the_exact_r_and_only_there(loss: Consistency, problem: Problem) -> None:
    check_consistency(problem, loss)


def test_consistency_in_logs_sees_small_chances() -> None:
    log_s, log_r = torch.tensor([[0.0, math.log(0.005)]]), torch.tensor([[0.0, math.log(0.0002), 0.0]])
    values = Reduced(log_r, torch.log1p(-log_r.exp()), log_s, torch.log1p(-log_s.exp()))
    lengths = torch.tensor([2])
    assert float(consistency_loss(values, lengths).sum()) < 0.02
    assert float(log_consistency_loss(values, lengths).sum()) == pytest.approx(math.log(25) - 0.5)


def consistency_shifted_by_one(values: Reduced, lengths: Tensor) -> Tensor:
    rolled = values._replace(log_s=values.log_s.roll(1, 1), log_not_s=values.log_not_s.roll(1, 1))
    return consistency_loss(rolled, lengths)


def consistency_with_a_sign_slip(values: Reduced, lengths: Tensor) -> Tensor:
    """The second half of the Bernoulli KL with the wrong sign: not 0 at equality of nothing."""
    flipped = bernoulli_kl(
        values.log_s[:, 1:], values.log_not_s[:, 1:], values.log_r[:, 1:-1], -values.log_not_r[:, 1:-1]
    )
    terms = torch.nn.functional.pad(flipped, (1, 1))
    return torch.where(interior_mask(lengths, terms.shape[1]), terms, 0.0)


def consistency_blind_to_the_end(values: Reduced, lengths: Tensor) -> Tensor:
    return consistency_loss(values, lengths - 1)


def consistency_on_padding(values: Reduced, lengths: Tensor) -> Tensor:
    return consistency_loss(values, torch.full_like(lengths, values.log_s.shape[1]))


@pytest.mark.parametrize(
    "wrong",
    [
        consistency_shifted_by_one,
        consistency_with_a_sign_slip,
        consistency_blind_to_the_end,
        consistency_on_padding,
    ],
)
def test_wrong_consistency_is_rejected(wrong: Consistency) -> None:
    with pytest.raises(AssertionError):
        check_consistency(example(), wrong)


def consistency_of_logits(problem: Problem, logits: Tensor, stop: str) -> Tensor:
    values = reduced(problem, torch.nn.functional.logsigmoid(logits))
    return consistency_loss(values, problem.outcomes.lengths, stop).sum()  # type: ignore[arg-type]


def some_logits(problem: Problem) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(problem.table.shape, generator=generator, dtype=torch.float64).requires_grad_()


def test_consistency_gradient_is_the_numerical_one() -> None:
    problem = example()
    assert torch.autograd.gradcheck(
        lambda logits: consistency_of_logits(problem, logits, "neither"), some_logits(problem)
    )


def check_stopped_gradient(held: str, stop: str) -> None:
    """With one side held, the gradient is the numerical one of a loss whose held side is a constant."""
    problem = example()
    logits = some_logits(problem)
    consistency_of_logits(problem, logits, stop).backward()
    fixed = reduced(problem, torch.nn.functional.logsigmoid(logits.detach()))

    def value(moved: Tensor) -> Tensor:
        free = reduced(problem, torch.nn.functional.logsigmoid(moved))
        if held == "sum":
            free = free._replace(log_s=fixed.log_s, log_not_s=fixed.log_not_s)
        else:
            free = free._replace(log_r=fixed.log_r, log_not_r=fixed.log_not_r)
        return consistency_loss(free, problem.outcomes.lengths).sum()

    assert logits.grad is not None
    for index in range(0, logits.numel(), 4):
        step = torch.zeros_like(logits).view(-1)
        step[index] = 1e-5
        step = step.view_as(logits)
        slope = (value(logits.detach() + step) - value(logits.detach() - step)) / 2e-5
        assert abs(float(slope - logits.grad.view(-1)[index])) < 1e-6


@pytest.mark.parametrize(("held", "other"), [("sum", "prefix"), ("prefix", "sum")])
def test_consistency_stops_the_gradient_on_the_side_named(held: str, other: str) -> None:
    check_stopped_gradient(held, held)
    for wrong in (other, "neither"):
        with pytest.raises(AssertionError):
            check_stopped_gradient(held, wrong)


# --- (e) importance weights ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Proposal:
    """What was drawn from: token-wise log-probabilities and those of whole texts, computed apart."""

    log_proposal: Tensor  # (M, L)
    log_joint: Tensor  # (M,)
    temperature: float = 1.0


def score(problem: Problem, model: TabularModel) -> Tensor:
    outcomes, number = problem.outcomes, len(problem.outcomes.texts)
    prompts, conditions = [problem.prompt] * number, [problem.condition] * number
    return model.score_exact(prompts, outcomes.tokens, outcomes.lengths, conditions)


def make_proposal(problem: Problem, kind: str, seed: int = 0) -> Proposal:
    pair = (problem.prompt, problem.condition)
    guided = guided_model(problem.model, {pair: perturbed(problem.log_r, seed)})
    models = {"plain": problem.model, "tempered": tempered_model(problem.model, 1.7), "guided": guided}
    if kind == "mixture":
        parts = [problem.model, guided]
        log_shares = torch.log(torch.tensor([0.2, 0.8], dtype=torch.float64))
        tokens = mixture_log_proposal(torch.stack([score(problem, part) for part in parts]), log_shares)
        joints = torch.stack([part.outcomes(*pair).log_p for part in parts])
        return Proposal(tokens, torch.logsumexp(joints + log_shares.unsqueeze(1), dim=0))
    model = models[kind]
    return Proposal(score(problem, model), model.outcomes(*pair).log_p, 1.7 if kind == "tempered" else 1.0)


LogWeights = Callable[[Tensor, Proposal, Tensor], Tensor]


def whole(log_p: Tensor, proposal: Proposal, lengths: Tensor) -> Tensor:
    return importance_log_weights(log_p, proposal.log_proposal, lengths, "whole")


def suffix(log_p: Tensor, proposal: Proposal, lengths: Tensor) -> Tensor:
    return importance_log_weights(log_p, proposal.log_proposal, lengths, "suffix")


def with_nonsense(problem: Problem, values: Tensor) -> Tensor:
    padding = torch.arange(values.shape[1]) >= problem.outcomes.lengths.unsqueeze(1)
    return torch.where(padding, -3.3, values)


def weights_of(problem: Problem, proposal: Proposal, log_weights: LogWeights) -> Tensor:
    possible = ~torch.isneginf(proposal.log_joint).unsqueeze(1)  # texts that may be drawn at all
    log_p = with_nonsense(problem, score(problem, problem.model))
    log_w = log_weights(log_p, proposal, problem.outcomes.lengths)
    return torch.where(possible, log_w, 0.0).exp()


def check_whole_weights(problem: Problem, proposal: Proposal, log_weights: LogWeights) -> None:
    """Σ_y proposal(y) w(y) f(y) = E_p[f] over all paths, at every column."""
    weights = weights_of(problem, proposal, log_weights)
    for seed in (0, 1):
        values = arbitrary_values(problem.outcomes, seed)
        expected = expectation(problem.outcomes.log_p, values)
        for column in range(weights.shape[1]):
            drawn = expectation(proposal.log_joint, weights[:, column] * values)
            assert abs(float(drawn - expected)) < 1e-8


def check_suffix_weights(problem: Problem, proposal: Proposal, log_weights: LogWeights) -> None:
    """E_proposal[w_i f | y≤i] = E_p[f | y≤i] for every prefix that both can write."""
    weights = weights_of(problem, proposal, log_weights)
    outcomes, values = problem.outcomes, arbitrary_values(problem.outcomes)
    p, drawn = outcomes.log_p.exp(), proposal.log_joint.exp()
    for prefix in outcomes.texts:
        inside = torch.tensor([text.startswith(prefix) for text in outcomes.texts])
        p_mass, drawn_mass = p[inside].sum(), drawn[inside].sum()
        if p_mass > 0 and drawn_mass > 0:
            expected = (p * values)[inside].sum() / p_mass
            found = (drawn * values * weights[:, len(prefix)])[inside].sum() / drawn_mass
            assert abs(float(found - expected)) < 1e-7


KINDS = ["plain", "tempered", "guided", "mixture"]


@pytest.mark.parametrize("kind", KINDS)
@settings(exactly, max_examples=15)
@given(problem=problems(settled=True), seed=st.integers(0, 10**6))
def test_importance_weights_give_expectations_under_p(kind: str, problem: Problem, seed: int) -> None:
    proposal = make_proposal(problem, kind, seed)
    check_whole_weights(problem, proposal, whole)
    check_suffix_weights(problem, proposal, suffix)


def upside_down(log_p: Tensor, proposal: Proposal, lengths: Tensor) -> Tensor:
    return -importance_log_weights(log_p, proposal.log_proposal, lengths, "suffix")


def one_position_late(log_p: Tensor, proposal: Proposal, lengths: Tensor) -> Tensor:
    return importance_log_weights(log_p, proposal.log_proposal, lengths, "suffix").roll(-1, dims=1)


def one_position_early(log_p: Tensor, proposal: Proposal, lengths: Tensor) -> Tensor:
    return importance_log_weights(log_p, proposal.log_proposal, lengths, "suffix").roll(1, dims=1)


def without_eos(log_p: Tensor, proposal: Proposal, lengths: Tensor) -> Tensor:
    return importance_log_weights(log_p, proposal.log_proposal, lengths - 1, "suffix")


def with_padding(log_p: Tensor, proposal: Proposal, lengths: Tensor) -> Tensor:
    full = torch.full_like(lengths, log_p.shape[1])
    return importance_log_weights(log_p, proposal.log_proposal, full, "suffix")


def as_printed_in_the_paper(log_p: Tensor, proposal: Proposal, lengths: Tensor) -> Tensor:
    """p^(1 − 1/T): the per-token normalisers of the tempered proposal are missing."""
    return importance_log_weights(log_p, log_p / proposal.temperature, lengths, "suffix")


@pytest.mark.parametrize("kind", ["tempered", "guided", "mixture"])
@pytest.mark.parametrize(
    "wrong", [upside_down, one_position_late, one_position_early, without_eos, with_padding]
)
def test_wrong_importance_weights_are_rejected(kind: str, wrong: LogWeights) -> None:
    problem = example()
    proposal = make_proposal(problem, kind)
    check_suffix_weights(problem, proposal, suffix)
    with pytest.raises(AssertionError):
        check_suffix_weights(problem, proposal, wrong)
    with pytest.raises(AssertionError):
        check_whole_weights(problem, proposal, wrong)


def test_the_papers_weight_for_a_tempered_proposal_is_rejected() -> None:
    problem = example()
    with pytest.raises(AssertionError):
        check_suffix_weights(problem, make_proposal(problem, "tempered"), as_printed_in_the_paper)


def test_suffix_weights_vary_less_than_whole_ones() -> None:
    problem = example()
    proposal = make_proposal(problem, "guided")
    variance = []
    for form in (whole, suffix):
        weights = weights_of(problem, proposal, form)[:, 2]
        mean = expectation(proposal.log_joint, weights)
        variance.append(float(expectation(proposal.log_joint, (weights - mean) ** 2)))
    assert variance[1] < 0.8 * variance[0]


def draw_rows(proposal: Proposal, number: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(proposal.log_joint.exp(), number, replacement=True, generator=generator)


@pytest.mark.parametrize("form", ["whole", "suffix"])
def test_self_normalisation_needs_32_texts_of_a_prompt(form: str) -> None:
    problem = example()
    proposal = make_proposal(problem, "guided")
    rows = draw_rows(proposal, 71, 0)
    prompt_ids = torch.cat([torch.zeros(31), torch.ones(40)]).long()
    lengths = problem.outcomes.lengths[rows]
    log_p, log_proposal = score(problem, problem.model)[rows], proposal.log_proposal[rows]
    result = importance_weights(log_p, log_proposal, lengths, prompt_ids, form, clip=None)  # type: ignore[arg-type]
    raw = importance_log_weights(log_p, log_proposal, lengths, form).exp()  # type: ignore[arg-type]
    few, many = prompt_ids == 0, prompt_ids == 1
    torch.testing.assert_close(result.weights[few, 0], raw[few, 0])
    assert float(result.weights[many, 0].mean()) == pytest.approx(1.0)
    torch.testing.assert_close(result.weights[many, 0] / raw[many, 0], (1 / raw[many, 0].mean()).expand(40))
    reach = many & (lengths >= 2)
    assert 32 <= int(reach.sum()) < 40
    scale = raw[many, 0].mean() if form == "whole" else raw[reach, 2].mean()
    torch.testing.assert_close(result.weights[reach, 2], raw[reach, 2] / scale)
    assert not bool(result.weights[~prefix_mask(lengths, 4)].any())
    assert result.mean == pytest.approx(float(raw[:, 0].mean()))
    assert 0 < result.self_normalised < 1
    assert result.clipped == 0.0


@pytest.mark.parametrize(("number", "mean"), [(31, 2.0), (32, 1.0)])
def test_thirty_two_texts_are_enough_and_thirty_one_are_not(number: int, mean: float) -> None:
    log_p, log_proposal = torch.zeros(number, 1), torch.full((number, 1), -math.log(2))
    one_prompt, lengths = torch.zeros(number, dtype=torch.long), torch.ones(number, dtype=torch.long)
    result = importance_weights(log_p, log_proposal, lengths, one_prompt)
    assert float(result.weights[:, 0].mean()) == pytest.approx(mean)
    assert result.self_normalised == (1.0 if number == 32 else 0.0)


def test_raw_weights_are_cut_where_said() -> None:
    log_p, log_proposal = torch.log(torch.tensor([[0.9], [0.5]])), torch.log(torch.tensor([[0.01], [0.5]]))
    lengths, prompt_ids = torch.tensor([1, 1]), torch.tensor([7, 9])
    result = importance_weights(log_p, log_proposal, lengths, prompt_ids, "whole", clip=10.0)
    assert result.weights.tolist() == [[10.0, 10.0], [1.0, 1.0]]
    assert (result.clipped, result.self_normalised) == (0.5, 0.0)
    assert result.mean == pytest.approx((90 + 1) / 2)
    assert result.ess == pytest.approx(91**2 / (90**2 + 1))
    free = importance_weights(log_p, log_proposal, lengths, prompt_ids, "whole", clip=None)
    assert free.weights[0, 0].item() == pytest.approx(90.0, rel=1e-5)


def test_effective_sample_size() -> None:
    assert float(effective_sample_size(torch.zeros(5))) == pytest.approx(5.0)
    assert float(effective_sample_size(torch.tensor([0.0, -math.inf, -math.inf]))) == pytest.approx(1.0)
    assert float(effective_sample_size(torch.full((3,), -math.inf))) == 0.0
    assert effective_sample_size(torch.tensor([[800.0, 800.0], [-900.0, -900.0]])).tolist() == [2.0, 2.0]


# --- (f) the success loss and its minimiser -----------------------------------------------------------

Success = Callable[[Problem, Reduced, Tensor], Tensor]


def success(problem: Problem, values: Reduced, log_p: Tensor) -> Tensor:
    """The expected success loss under p, on every text at once."""
    outcomes = problem.outcomes
    answers = torch.tensor(problem.oracle([problem.condition] * len(outcomes.texts), outcomes.texts))
    labels = label_finished(answers, outcomes.ended, problem.model.completion)
    terms = success_loss(values.log_r, labels, outcomes.lengths, values.log_not_r)
    return expectation(log_p, terms.sum(dim=1))


def balanced_success(problem: Problem, values: Reduced, log_p: Tensor, sign: float = 1.0) -> Tensor:
    """The same on texts whose labels are balanced, at R shifted by the offset."""
    one_prompt = torch.zeros(len(log_p), dtype=torch.long)
    balance = balance_labels(problem.satisfied, one_prompt, 0.5, weights=log_p.exp())
    log_r, log_not_r = shift_log_odds(values.log_r, values.log_not_r, sign * balance.offset)
    terms = success_loss(log_r, problem.satisfied, problem.outcomes.lengths, log_not_r)
    return (balance.weights * terms.sum(dim=1)).sum()


def fit(problem: Problem, loss: Success, start: float = 0.0) -> Tensor:
    """The table of log R that minimises a loss, starting from R = sigmoid(start)."""
    logits = torch.full_like(problem.table, start).requires_grad_()
    optimiser = torch.optim.LBFGS(
        [logits], max_iter=400, history_size=30, line_search_fn="strong_wolfe", tolerance_grad=1e-10
    )

    def closure() -> float:
        optimiser.zero_grad()
        value = loss(
            problem, reduced(problem, torch.nn.functional.logsigmoid(logits)), problem.outcomes.log_p
        )
        value.backward()
        return float(value.detach())

    optimiser.step(closure)
    return torch.nn.functional.logsigmoid(logits.detach())


def check_minimiser(problem: Problem, loss: Success) -> None:
    """The minimiser is the exact R, within 1e-3, wherever p goes, the empty prefix included."""
    found, exact = fit(problem, loss).exp(), problem.log_r.exp()
    assert float((found - exact)[reachable(problem.table)].abs().max()) < 1e-3
    start = (problem.table[0].exp() * found[0]).sum()
    assert abs(float(start - problem.log_r_start.exp())) < 1e-3


@pytest.mark.parametrize("loss", [success, balanced_success])
@settings(exactly, max_examples=8)
@given(problem=problems(min_length=2, zeros=False))
def test_the_success_loss_is_least_at_the_exact_r(loss: Success, problem: Problem) -> None:
    # Rarer prefixes converge too, but an optimiser needs long to see them.
    assume(float(problem.outcomes.log_p.min()) > math.log(1e-4))
    assume(0.02 < float(problem.log_r_start.exp()) < 0.98)
    check_minimiser(problem, loss)


def success_blind_to_eos(problem: Problem, values: Reduced, log_p: Tensor) -> Tensor:
    terms = success_loss(values.log_r, problem.satisfied, problem.outcomes.lengths - 1, values.log_not_r)
    return expectation(log_p, terms.sum(dim=1))


def success_shifted_by_one(problem: Problem, values: Reduced, log_p: Tensor) -> Tensor:
    log_r, log_not_r = values.log_r.roll(1, dims=1), values.log_not_r.roll(1, dims=1)
    return expectation(
        log_p, success_loss(log_r, problem.satisfied, problem.outcomes.lengths, log_not_r).sum(dim=1)
    )


def success_that_judges_cut_texts(problem: Problem, values: Reduced, log_p: Tensor) -> Tensor:
    outcomes = problem.outcomes
    answers = torch.tensor(problem.oracle([problem.condition] * len(outcomes.texts), outcomes.texts))
    return expectation(
        log_p, success_loss(values.log_r, answers, outcomes.lengths, values.log_not_r).sum(dim=1)
    )


def success_that_drops_cut_texts(problem: Problem, values: Reduced, log_p: Tensor) -> Tensor:
    kept = torch.where(problem.outcomes.ended, log_p, -math.inf)
    return success(problem, values, kept)


def success_with_labels_swapped(problem: Problem, values: Reduced, log_p: Tensor) -> Tensor:
    terms = success_loss(values.log_r, ~problem.satisfied, problem.outcomes.lengths, values.log_not_r)
    return expectation(log_p, terms.sum(dim=1))


def balanced_with_the_offset_reversed(problem: Problem, values: Reduced, log_p: Tensor) -> Tensor:
    return balanced_success(problem, values, log_p, sign=-1.0)


def balanced_without_the_offset(problem: Problem, values: Reduced, log_p: Tensor) -> Tensor:
    return balanced_success(problem, values, log_p, sign=0.0)


@pytest.mark.parametrize(
    "wrong",
    [
        success_blind_to_eos,
        success_shifted_by_one,
        success_that_judges_cut_texts,
        success_that_drops_cut_texts,
        success_with_labels_swapped,
        balanced_with_the_offset_reversed,
        balanced_without_the_offset,
    ],
)
def test_wrong_success_losses_are_rejected(wrong: Success) -> None:
    with pytest.raises(AssertionError):
        check_minimiser(example(), wrong)


def test_the_empty_prefix_is_a_term_of_its_own() -> None:
    """R(x) = S_1 takes a gradient: column 0 alone moves R at the first step."""
    problem = example()
    logits = torch.zeros_like(problem.table).requires_grad_()
    values = reduced(problem, torch.nn.functional.logsigmoid(logits))
    terms = success_loss(values.log_r, problem.satisfied, problem.outcomes.lengths)
    terms[:, 0].sum().backward()
    assert logits.grad is not None
    assert bool((logits.grad[0] != 0).all())
    assert not bool(logits.grad[1:].any())


def test_a_contradicted_certainty_costs_a_finite_amount() -> None:
    log_r = torch.tensor([[0.0, -math.inf]], requires_grad=True)
    terms = success_loss(log_r, torch.tensor([False]), torch.tensor([1]))
    assert terms.tolist() == [[100.0, 0.0]]
    terms.sum().backward()
    assert log_r.grad is not None
    assert bool(torch.isfinite(log_r.grad).all())


# --- stop labels, warm-up, averages -------------------------------------------------------------------


def stop_terms(problem: Problem, log_r: Tensor) -> Tensor:
    """Stop labels of every prefix of every text, asked of the oracle as whole texts."""
    outcomes = problem.outcomes
    answers = [
        problem.oracle([problem.condition] * len(outcomes.texts), [text[:cut] for text in outcomes.texts])
        for cut in range(outcomes.tokens.shape[1])
    ]
    labels = torch.tensor(answers).T  # (M, L)
    return stop_loss(unroll(log_r, outcomes)[..., -1], labels, outcomes.lengths)


@exactly
@given(problems(settled=True))
def test_stop_labels_agree_with_the_exact_r_at_every_prefix(problem: Problem) -> None:
    assert float(stop_terms(problem, problem.log_r).abs().max()) == 0.0
    swapped = torch.where(torch.isneginf(problem.log_r), 0.0, -math.inf)
    inside = torch.arange(problem.model.length_limit) < problem.outcomes.lengths.unsqueeze(1)
    assert bool((stop_terms(problem, swapped)[inside] == 100.0).all())
    assert not bool(stop_terms(problem, swapped)[~inside].any())


def test_stop_labels_shifted_by_one_are_rejected() -> None:
    problem = example()
    with pytest.raises(AssertionError):
        assert float(stop_terms(problem, problem.log_r.roll(1, dims=0)).abs().max()) == 0.0


def test_stop_loss_counts_only_where_the_oracle_was_asked() -> None:
    asked = torch.tensor([[True, False, True]])
    terms = stop_loss(torch.full((1, 3), -1.0), torch.ones(1, 3, dtype=torch.bool), torch.tensor([2]), asked)
    assert terms.tolist() == [[1.0, 0.0, 0.0]]


@exactly
@given(problems(settled=True), st.integers(0, 10**6))
def test_warm_up_is_the_likelihood_of_satisfied_texts_under_q(problem: Problem, seed: int) -> None:
    """Its mean over q* is the cross-entropy of q* and q: least at q*, and blind to a factor per prefix."""
    outcomes, log_r_hat = problem.outcomes, perturbed(problem.log_r, seed)
    log_p = with_nonsense(problem, score(problem, problem.model)).clamp(min=-50)

    def loss(log_r: Tensor) -> Tensor:
        return warm_up_loss(reduced(problem, log_r), log_p, problem.satisfied, outcomes.lengths).sum(dim=1)

    pair = problem.prompt, problem.condition
    log_q_hat = guided_model(problem.model, {pair: log_r_hat}).outcomes(*pair).log_p
    drawn = problem.satisfied & ~torch.isneginf(outcomes.log_p)
    torch.testing.assert_close(-loss(log_r_hat)[drawn], log_q_hat[drawn])
    assert not bool(loss(log_r_hat)[~problem.satisfied].any())
    scaled = log_r_hat - torch.arange(len(log_r_hat)).unsqueeze(1)
    torch.testing.assert_close(loss(scaled)[drawn], loss(log_r_hat)[drawn])
    star = torch.where(problem.satisfied, outcomes.log_p, -math.inf) - problem.log_r_start
    gap = expectation(star, loss(log_r_hat)) - expectation(star, loss(problem.log_r))
    assert float(gap) == pytest.approx(float(kl_divergence(star, log_q_hat)), abs=1e-8)


def test_warm_up_gradient_reaches_the_guide_and_not_the_base() -> None:
    problem = example()
    table, log_r = problem.table.clone().requires_grad_(), perturbed(problem.log_r, 0).requires_grad_()
    outcomes = problem.outcomes
    log_p = chosen(unroll(table, outcomes), outcomes)
    values = reduced(problem, log_r)
    warm_up_loss(values, log_p, problem.satisfied, outcomes.lengths).sum().backward()
    assert table.grad is None
    assert log_r.grad is not None
    assert bool(log_r.grad.any())


def test_average_counts_positions_and_not_weights() -> None:
    terms = torch.tensor([[1.0, 2.0, 99.0], [3.0, 99.0, 99.0]])
    counted = prefix_mask(torch.tensor([1, 0]), 3)
    assert float(average(terms, counted)) == 2.0
    assert float(average(terms, counted, torch.tensor([2.0, 0.0]))) == 2.0
    assert float(average(terms, counted, torch.full((2, 3), 0.5))) == 1.0


def test_masks() -> None:
    lengths = torch.tensor([0, 1, 3])
    assert prefix_mask(lengths, 4).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]
    assert interior_mask(lengths, 4).int().tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [0, 1, 1, 0]]


@exactly
@given(problems(settled=True), st.integers(0, 10**6))
def test_reduced_quantities_are_those_of_the_tables(problem: Problem, seed: int) -> None:
    log_r = perturbed(problem.log_r, seed)
    values = reduced(problem, log_r)
    torch.testing.assert_close(values.log_r[:, 0], values.log_s[:, 0])
    torch.testing.assert_close(values.log_r[:, 1:], chosen(unroll(log_r, problem.outcomes), problem.outcomes))
    torch.testing.assert_close(values.log_not_r[:, 1:].exp(), 1 - values.log_r[:, 1:].exp())
    inside = torch.arange(problem.model.length_limit) < problem.outcomes.lengths.unsqueeze(1)
    total = values.log_s.exp() + values.log_not_s.exp()
    torch.testing.assert_close(total[inside], torch.ones_like(total[inside]))


# --- balance ------------------------------------------------------------------------------------------


@exactly
@given(problems(), st.sampled_from([0.3, 0.5, 0.9]))
def test_balancing_shifts_the_log_odds_of_r_by_one_constant(problem: Problem, balanced_rate: float) -> None:
    """Semantics of the offset, text by text: E under balanced weights of C given any prefix."""
    p, satisfied = problem.outcomes.log_p.exp(), problem.satisfied
    balance = balance_labels(satisfied, torch.zeros(len(p), dtype=torch.long), balanced_rate, weights=p)
    assert float(balance.weights[satisfied].sum() / balance.weights.sum()) == pytest.approx(balanced_rate)
    log_r = reduced(problem, problem.log_r)
    shifted, _ = shift_log_odds(log_r.log_r, log_r.log_not_r, balance.offset)
    for number, prefix in enumerate(problem.outcomes.texts):
        inside = torch.tensor([text.startswith(prefix) for text in problem.outcomes.texts])
        mass = balance.weights[inside].sum()
        if mass > 1e-12 and len(prefix) < problem.model.length_limit:
            share = balance.weights[inside & satisfied].sum() / mass
            assert float(shifted[number, len(prefix)].exp()) == pytest.approx(float(share), abs=1e-6)


def test_balance_is_by_prompt_and_leaves_one_sided_prompts_alone() -> None:
    satisfied = torch.tensor([True, False, False, False, True, True])
    balance = balance_labels(satisfied, torch.tensor([3, 3, 3, 3, 8, 8]))
    torch.testing.assert_close(balance.weights, torch.tensor([2.0, 2 / 3, 2 / 3, 2 / 3, 1.0, 1.0]))
    torch.testing.assert_close(balance.offset, torch.tensor([math.log(3)] * 4 + [0.0, 0.0]))
    torch.testing.assert_close(balance_offset(torch.tensor(0.25), 0.5), torch.tensor(math.log(3)))


def test_shift_log_odds_keeps_certainties() -> None:
    log_r = torch.tensor([[0.0, -math.inf, -1e-20]])
    log_r_after, log_not_r_after = shift_log_odds(log_r, log_one_minus(log_r), torch.tensor([2.0]))
    assert log_r_after[0, :2].tolist() == [0.0, -math.inf]
    assert log_not_r_after[0, :2].tolist() == [-math.inf, 0.0]
    assert float(log_not_r_after[0, 2]) == pytest.approx(math.log(1e-20) - 2.0, rel=1e-5)


def test_cut_texts_follow_the_completion_mode() -> None:
    satisfied, ended = torch.tensor([True, True, False]), torch.tensor([True, False, False])
    assert label_finished(satisfied, ended, "eos").tolist() == [True, False, False]
    assert label_finished(satisfied, ended, "limit").tolist() == [True, True, False]


def test_a_text_that_its_proposal_cannot_draw_is_an_error() -> None:
    log_p = torch.log(torch.tensor([[0.5, 0.5], [0.5, 0.5]]))
    log_proposal = torch.tensor([[-0.7, -0.7], [-0.7, -math.inf]])
    with pytest.raises(InputError) as error:
        importance_weights(log_p, log_proposal, torch.tensor([2, 2]), torch.tensor([0, 0]))
    assert str(error.value) == (
        "expected texts that their proposal can draw; found row 1 of 2, to which its recorded log_proposal "
        "gives probability 0. Record log_proposal in the loop that draws the text, token by token, from the "
        "very distribution it samples."
    )
