"""Proposals: the log-probability recorded for every token is the exact one, and weights undo the proposal."""

import logging
import math
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
import torch

from frequencies import FALSE_ALARM, fit_p_value, mean_p_value, outcome_log_p, rates_p_value, rows_of
from nado.decomposition import mixture_log_proposal
from nado.drawing import DrawingError, draw, draw_rows
from nado.errors import CoverageError, InputError, MismatchError
from nado.exact import (
    TabularModel,
    exact_log_r,
    exact_log_r_start,
    expectation,
    guided_model,
    tempered_model,
)
from nado.noise import uniforms
from nado.prompts import Prompt
from nado.proposals import (
    Guided,
    Proposal,
    Tempered,
    TruncatedTopP,
    begin_mixing,
    guided_mixture,
    summarise_weights,
    tempered,
)
from nado.samples import Samples
from strategies import RandomOracle, arbitrary_values, perturbed

ROWS = 6000
PAIR = ("one", "two")
ORACLE = RandomOracle(3, 0.4)
P = {
    completion: TabularModel.random(
        ("one",), vocabulary_size=4, length_limit=4, completion=completion, seed=5, zeros=0.15
    )
    for completion in ("eos", "limit")
}


def guide(model, seed):
    """The model guided by an R that was learned badly."""
    return guided_model(model, {PAIR: perturbed(exact_log_r(model, ORACLE, *PAIR), seed)})


def cases(model):
    """Proposals, each with its components as models and whether p completes them."""
    good, bad = guide(model, 1), guide(model, 2)
    flat = Tempered(2.0)
    three = (Guided(good), flat, Tempered())
    two = (Guided(good), Guided(bad), Tempered())
    shares = (0.5, 0.3, 0.2)
    return {
        "p": (Proposal(), [model]),
        "flat": (tempered(1.7), [tempered_model(model, 1.7)]),
        "sharp": (tempered(0.6), [tempered_model(model, 0.6)]),
        "guided": (guided_mixture(good), [good, model]),
        "three": (Proposal(three, shares), [good, tempered_model(model, 2.0), model]),
        "two guided": (Proposal(two, shares), [good, bad, model]),
        "flat then p": (
            Proposal((flat,), complete_from_p=True, mean_prefix=1.5),
            [tempered_model(model, 2.0)],
        ),
        "guided then p": (guided_mixture(good, complete_from_p=True), [good, model]),
        "three then p": (
            Proposal(three, shares, complete_from_p=True, mean_prefix=2),
            [good, tempered_model(model, 2.0), model],
        ),
    }


NAMES = list(cases(P["eos"]))


def draw_many(model, proposal, rows=ROWS, seed=11, batch_size=256):
    prompts = [Prompt(*PAIR)] * rows
    table = draw_rows(model, prompts, range(rows), proposal=proposal, seed=seed, batch_size=batch_size)
    return Samples(table)


def padded(samples, name, limit):
    ragged = samples.ragged(name)
    full = np.zeros((len(samples), limit), ragged.values.dtype)
    lengths = np.diff(ragged.offsets)
    full[np.arange(limit) < lengths[:, None]] = ragged.values
    return torch.from_numpy(full), torch.from_numpy(lengths)


def exact_log_proposal(samples, model, proposal, components):
    """Token by token, from the tables: the mixture's up to the prefix length, p's after it."""
    tokens, lengths = padded(samples, "tokens", model.length_limit)
    scores = [
        part.score_exact([PAIR[0]] * len(samples), tokens.long(), lengths, [PAIR[1]] * len(samples))
        for part in [*components, model]
    ]
    log_shares = torch.tensor(proposal.shares, dtype=torch.float64).log()
    if proposal.complete_from_p:  # after the switch no component writes: their ratio stays
        prefix = torch.from_numpy(samples.array("prefix_length").astype(np.int64))
        written = torch.arange(model.length_limit) < prefix[:, None]
        mixture = mixture_log_proposal(
            torch.stack([torch.where(written, s, 0.0) for s in scores[:-1]]), log_shares
        )
        return torch.where(written, mixture, scores[-1]), lengths
    return mixture_log_proposal(torch.stack(scores[:-1]), log_shares), lengths


# --- what is recorded ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("completion", ["eos", "limit"])
def test_recorded_log_probabilities_are_the_exact_ones(name, completion):
    model = P[completion]
    proposal, components = cases(model)[name]
    samples = draw_many(model, proposal, rows=1500)
    exact, lengths = exact_log_proposal(samples, model, proposal, components)
    recorded, _ = padded(samples, "log_proposal", model.length_limit)
    inside = torch.arange(model.length_limit) < lengths[:, None]
    assert (recorded - exact)[inside].abs().max() < 1e-5
    tokens, _ = padded(samples, "tokens", model.length_limit)
    log_p, _ = padded(samples, "log_p", model.length_limit)
    scored = model.score_exact([PAIR[0]] * len(samples), tokens.long(), lengths, [PAIR[1]] * len(samples))
    assert (log_p - scored)[inside].abs().max() < 1e-5


@pytest.mark.parametrize("name", [name for name in NAMES if "then" not in name])
def test_texts_occur_as_often_as_the_mixture_writes_them(name):
    model = P["eos"]
    proposal, components = cases(model)[name]
    exact = [
        {k: v + math.log(share) for k, v in outcome_log_p(part, *PAIR).items()}
        for share, part in zip(proposal.shares, components, strict=True)
    ]
    log_m = {text: np.logaddexp.reduce([part[text] for part in exact]) for text in exact[0]}
    drawn = rows_of(draw_many(model, proposal).ragged("tokens"))
    assert fit_p_value(drawn, log_m) > FALSE_ALARM
    if name not in ("p",):  # and the check can tell it from p
        assert fit_p_value(drawn, outcome_log_p(model, *PAIR)) < FALSE_ALARM


@pytest.mark.parametrize("name", [name for name in NAMES if name != "p"])
@pytest.mark.parametrize("completion", ["eos", "limit"])
def test_weights_undo_the_proposal(name, completion):
    model = P[completion]
    samples = draw_many(model, cases(model)[name][0])
    weights = np.exp(samples.log_weights())
    assert mean_p_value(weights, 1.0) > FALSE_ALARM
    outcomes = model.outcomes(*PAIR)
    values = arbitrary_values(outcomes)
    by_text = dict(zip(outcome_log_p(model, *PAIR), values.tolist(), strict=True))
    f = np.array([by_text[row] for row in rows_of(samples.ragged("tokens"))])
    exact = float(expectation(outcomes.log_p, values))
    assert mean_p_value(weights * f, exact) > FALSE_ALARM
    # The weighted rate of the oracle is R(x).
    satisfied = np.array(ORACLE([PAIR[1]] * ROWS, samples.strings("text"))) & samples.array("finished")
    r = float(exact_log_r_start(model, ORACLE, *PAIR).exp())
    assert mean_p_value(weights * satisfied, r) > FALSE_ALARM


def test_without_weights_the_same_check_fails():
    model = P["eos"]
    samples = draw_many(model, guided_mixture(guide(model, 1)))
    satisfied = np.array(ORACLE([PAIR[1]] * ROWS, samples.strings("text"))) & samples.array("finished")
    r = float(exact_log_r_start(model, ORACLE, *PAIR).exp())
    assert mean_p_value(satisfied.astype(float), r) < FALSE_ALARM


def test_guided_weights_never_exceed_the_reciprocal_share_of_p():
    samples = draw_many(P["eos"], guided_mixture(guide(P["eos"], 2)))
    assert np.exp(samples.log_weights()).max() <= 10 + 1e-4


# --- prefix from the proposal, completion from p ------------------------------------------------------


def answers_by_prefix(samples, prefix_length):
    satisfied = np.array(ORACLE([PAIR[1]] * len(samples), samples.strings("text"))) & samples.array(
        "finished"
    )
    groups = defaultdict(list)
    for row, text in enumerate(rows_of(samples.ragged("tokens"))):
        if prefix_length[row] < len(text):
            groups[text[: prefix_length[row]]].append(bool(satisfied[row]))
    return groups


def exact_rates(model):
    """R of every prefix, by its tokens."""
    rates, log_r = {}, exact_log_r(model, ORACLE, *PAIR)
    table = model.table(*PAIR)
    letters = model.eos_id
    stack = [((), 0)]
    while stack:
        prefix, number = stack.pop()
        rates[prefix] = float(torch.logsumexp(table[number] + log_r[number], dim=0).exp())
        for letter in range(letters):
            child = letters * number + 1 + letter
            if child < len(table):
                stack.append(((*prefix, letter), child))
    return rates


@pytest.mark.parametrize("completion", ["eos", "limit"])
@pytest.mark.parametrize("name", [name for name in NAMES if "then" in name])
def test_labels_after_the_prefix_are_unbiased(name, completion):
    model = P[completion]
    samples = draw_many(model, cases(model)[name][0])
    groups = answers_by_prefix(samples, samples.array("prefix_length"))
    assert rates_p_value(groups, exact_rates(model)) > FALSE_ALARM


def test_a_prefix_said_to_be_shorter_than_it_is_is_found_out():
    model = P["eos"]
    samples = draw_many(model, Proposal((Tempered(3.0),), complete_from_p=True, mean_prefix=2))
    short = np.maximum(samples.array("prefix_length") - 2, 0)
    assert rates_p_value(answers_by_prefix(samples, short), exact_rates(model)) < FALSE_ALARM


@pytest.mark.parametrize("mean", [0.5, 3.0, None])
def test_prefix_lengths_are_geometric(mean):
    limit, number = 48, 20_000
    proposal = Proposal((Tempered(2.0),), complete_from_p=True, mean_prefix=mean)
    rows = torch.arange(number)
    noise = uniforms(7, rows, torch.full_like(rows, -2))
    switch = begin_mixing(proposal, noise, noise, limit).switch
    stay = (mean or limit / 8) / ((mean or limit / 8) + 1)
    tail = [stay**k for k in range(limit + 1)] + [0.0]
    log_p = {(k,): math.log(here - there) for k, (here, there) in enumerate(pairwise(tail))}
    assert fit_p_value([(int(k),) for k in switch], log_p) > FALSE_ALARM


def test_prefixes_end_inside_texts_far_shorter_than_the_limit():
    # Symptom: with a length uniform up to L, two rows in three had their whole text as prefix.
    def weights(prompt, prefix):
        return [1.0, 4.0]  # a text has 0.25 letters on average

    model = TabularModel.from_function(weights, ("x",), length_limit=6)
    proposal = Proposal((Tempered(1.2),), complete_from_p=True)
    table = draw_rows(
        model, [Prompt("x", "x")] * 2000, range(2000), proposal=proposal, seed=0, batch_size=500
    )
    samples = Samples(table)
    inside = samples.array("prefix_length") < np.diff(samples.ragged("tokens").offsets)
    assert inside.mean() > 0.5


def test_prefix_length_says_what_p_wrote():
    model = P["eos"]
    for name, (proposal, _) in cases(model).items():
        samples = draw_many(model, proposal, rows=300)
        lengths, prefix = np.diff(samples.ragged("tokens").offsets), samples.array("prefix_length")
        if name == "p":
            assert (prefix == 0).all()
        elif proposal.complete_from_p:
            assert ((prefix <= lengths).all(), (prefix < lengths).any(), (prefix > 0).any()) == (True,) * 3
        else:
            assert (prefix == lengths).all()


# --- what is refused ----------------------------------------------------------------------------------


def test_a_truncated_proposal_is_refused_unless_stamped(tmp_path):
    model, prompts = P["eos"], [Prompt(*PAIR)] * 50
    with pytest.raises(CoverageError) as raised:
        draw(model, prompts, tmp_path / "s", proposal=Proposal((TruncatedTopP(0.8),)))
    assert str(raised.value) == (
        "expected a proposal that can write everything p can; found top_p=0.8, which cuts off part of p. "
        "Declare the truncation as Warpers of p, or set uncorrected=True for an ablation."
    )
    assert not (tmp_path / "s").exists()
    samples = draw(model, prompts, tmp_path / "s", proposal=Proposal((TruncatedTopP(0.8),), uncorrected=True))
    assert samples.uncorrected
    assert set(samples.strings("proposal")) == {"p cut to top-p 0.8, uncorrected"}
    with pytest.raises(CoverageError, match="samples stamped uncorrected"):
        samples.log_weights()


@pytest.mark.parametrize(
    ("shares", "rest", "own"), [((0.95, 0.05), 1.0, "0.05"), ((1.0,), None, "0"), ((0.5, 0.5), 1.3, "0")]
)
def test_a_guided_proposal_must_be_mixed_with_p(shares, rest, own):
    components = (Guided(guide(P["eos"], 1)),) + (() if rest is None else (Tempered(rest),))
    with pytest.raises(CoverageError) as raised:
        Proposal(components, shares).require_covers(P["eos"])
    assert str(raised.value) == (
        "expected a guided proposal mixed with p, with a share of p of at least 0.1; found a share of p of "
        f"{own}. Mix it: guided_mixture(model, share=0.9)."
    )


def test_a_guided_proposal_of_another_base_is_refused():
    other = TabularModel.random((PAIR,), vocabulary_size=4, length_limit=3)
    with pytest.raises(MismatchError) as raised:
        guided_mixture(other).require_covers(P["eos"])
    assert str(raised.value) == (
        "expected a guided proposal with the base's length limit, 4; found 3. Guide the same base, with the "
        "same limit and completion, that samples are drawn for."
    )


def test_a_proposal_that_writes_what_p_cannot_is_found_out():
    anything = TabularModel.random((PAIR,), vocabulary_size=4, length_limit=4, seed=9)
    with pytest.raises(DrawingError) as raised:
        draw_many(P["eos"], guided_mixture(anything), rows=500, batch_size=500)
    assert raised.value.expected == "a proposal that writes only what p can write"
    assert raised.value.found.endswith(" tokens to which p gives probability 0")
    assert raised.value.hint == "Guide the same base, with the same warpers, that samples are drawn for."


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: tempered(0),
            "expected a finite temperature above 0; found 0. Use 1 to draw from p itself.",
        ),
        (
            lambda: tempered(math.inf),
            "expected a finite temperature above 0; found inf. Use 1 to draw from p itself.",
        ),
        (
            lambda: TruncatedTopP(0.0),
            "expected top_p in (0, 1]; found 0.0. Use 1 to keep the whole vocabulary.",
        ),
        (
            lambda: Proposal((Tempered(), Tempered(2.0)), (1.0,)),
            "expected one share for every component of a proposal; found 2 components and 1 shares. Give as "
            "many shares as components.",
        ),
        (
            lambda: Proposal((Tempered(), Tempered(2.0)), (0.5, 0.4)),
            "expected positive shares that sum to 1; found [0.5, 0.4]. Divide them by their sum; leave out "
            "components of 0.",
        ),
        (
            lambda: Proposal(mean_prefix=3.0),
            "expected complete_from_p with a mean_prefix; found it off. Set complete_from_p=True.",
        ),
        (
            lambda: Proposal(complete_from_p=True, mean_prefix=0.0),
            "expected a finite mean_prefix above 0; found 0.0. Use about half the length of a typical text, "
            "in tokens.",
        ),
    ],
)
def test_settings_that_make_no_sense(make, message):
    with pytest.raises(InputError) as raised:
        make()
    assert str(raised.value) == message


def test_a_proposal_has_a_name_and_a_description():
    guided = guide(P["eos"], 1)
    assert Proposal().name() == "p"
    assert tempered(1.3).name() == "p at temperature 1.3"
    name = f"0.9·guided {guided.fingerprint[:8]} + 0.1·p then p"
    assert guided_mixture(guided, complete_from_p=True).name() == name
    described = guided_mixture(guided, complete_from_p=True, mean_prefix=4).describe()
    assert described["components"][0] == {"share": 0.9, "kind": "guided", "fingerprint": guided.fingerprint}
    assert (described["complete_from_p"], described["mean_prefix"], described["uncorrected"]) == (
        True,
        4,
        False,
    )


# --- how good the weights are -------------------------------------------------------------------------


def test_weights_that_are_fine_are_not_warned_of(caplog):
    rng = np.random.default_rng(0)
    log_w = rng.normal(-0.125, 0.5, 5000)  # E[w] = 1
    summary = summarise_weights(log_w)
    assert abs(summary.mean - 1) < 4 * summary.standard_error
    assert 3000 < summary.effective_samples < 5000
    assert (summary.samples, summary.warnings(), caplog.records) == (5000, [], [])


def test_a_mean_away_from_1_is_warned_of(caplog):
    log_w = np.log(np.linspace(0.2, 0.8, 1001))
    with caplog.at_level(logging.WARNING):
        summarise_weights(log_w)
    assert [record.message for record in caplog.records] == [
        "the mean weight is 0.5 ± 0.0055, not 1: the samples miss part of what p writes. Use a proposal "
        "nearer to p, or more samples."
    ]


def test_a_weight_collapse_is_warned_of(caplog):
    log_w = np.full(1000, -20.0)
    log_w[:3] = math.log(1000 / 3)
    with caplog.at_level(logging.WARNING):
        summary = summarise_weights(log_w)
    assert [record.message for record in caplog.records] == [
        "1000 weighted samples are worth 3.0 (0.30%): a few carry all the weight. Use a proposal nearer to "
        "p, or a larger share of p."
    ]
    assert summary.largest == pytest.approx(1000 / 3)


def test_a_single_weight_and_enormous_ones_are_summarised():
    assert summarise_weights(np.zeros(1)).describe() == {
        "samples": 1,
        "mean": 1.0,
        "standard_error": None,
        "largest": 1.0,
        "effective_samples": 1.0,
    }
    assert summarise_weights(np.array([900.0, 0.0]), warn=False).effective_samples == 1.0
