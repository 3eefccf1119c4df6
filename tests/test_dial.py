"""Dials: the hull of what was measured, the mixtures between its stops, and the rates that come of them.

Statistical tests have fixed seeds; `FALSE_ALARM` is the chance that one would fail with a new seed.
"""

import json
import logging
import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import small_models
from frequencies import FALSE_ALARM, mean_p_value
from nado.dial import (
    STRENGTHS,
    Dial,
    Stop,
    draw_dialled,
    log_ratios,
    lower_hull,
    measure_dial,
    measure_stop,
    turn_dial,
)
from nado.errors import CoverageError, InputError, MismatchError
from nado.exact import TabularModel
from nado.following import TabularFollower
from nado.guidance import Guidance
from nado.guided_language_model import GuidedLanguageModel
from nado.huggingface import CausalModel
from nado.huggingface.reading import HuggingFaceReader
from nado.oracles import FunctionOracle, Keywords
from nado.prompts import Prompt
from nado.sample_labels import relabel
from nado.training_data import TrainingData
from random_guides import random_guide

PROMPTS = [Prompt(text, text) for text in ("the dog", "a cat sees the", "ball", "the old man")]
LIMIT = 6


def has_a_or_the(text: str) -> bool:
    return bool({"a", "the"} & set(text.split()))


ORACLE = FunctionOracle(has_a_or_the)


@cache
def guided(completion: str = "limit") -> GuidedLanguageModel:
    """A random guide: it knows nothing of the oracle, but every strength of it has a rate."""
    model = CausalModel(
        small_models.build("llama"), small_models.tokenizer(), length_limit=LIMIT, completion=completion
    )  # type: ignore[arg-type]
    return GuidedLanguageModel(model, random_guide(HuggingFaceReader(model), seed=3))


@cache
def measured() -> Dial:
    return measure_dial(guided(), PROMPTS, ORACLE, count=400, batch_size=400)


def stop(rate: float, kl: float, strength: float = 1.0) -> Stop:
    return Stop(strength, rate, max(0.0, rate - 0.05), min(1.0, rate + 0.05), kl)


def a_dial(*stops: Stop) -> Dial:
    return Dial(stops, 4, 100, "model", "oracle")


# --- where a dial is turned to ------------------------------------------------------------------------


points = st.tuples(st.integers(0, 20), st.integers(0, 40)).map(lambda pair: stop(pair[0] / 20, pair[1] / 8))


@given(st.lists(points, min_size=1, max_size=12))
def test_no_mixture_of_what_was_measured_costs_less_than_the_hulls(stops: list[Stop]) -> None:
    hull = lower_hull(stops)
    rates, costs = [each.rate for each in hull], [each.kl for each in hull]
    assert rates == sorted(set(rates))
    assert (rates[0], rates[-1]) == (min(s.rate for s in stops), max(s.rate for s in stops))
    for each in stops:
        assert np.interp(each.rate, rates, costs) <= each.kl + 1e-12
        for other in stops:  # the middle of any two of them
            middle, cost = (each.rate + other.rate) / 2, (each.kl + other.kl) / 2
            assert np.interp(middle, rates, costs) <= cost + 1e-12


def test_a_rate_between_two_stops_is_a_mixture_of_them() -> None:
    dial = a_dial(stop(0.1, 1.0, -2.0), stop(0.3, 0.0, 0.0), stop(0.5, 3.0, 1.0), stop(0.9, 2.0, 2.0))
    assert [each.strength for each in dial.stops] == [-2.0, 0.0, 2.0]  # 1 costs more than 0 and 2 mixed
    turn = dial.at(0.6)
    assert [(round(share, 6), each.strength) for share, each in turn.stops] == [(0.5, 0.0), (0.5, 2.0)]
    for rate in (0.1, 0.15, 0.3, 0.31, 0.77, 0.9):
        assert dial.at(rate).rate == pytest.approx(rate)
    assert [each.strength for _, each in dial.at(0.3).stops] == [0.0]  # p itself, and nothing else


def test_a_turns_interval_is_that_of_its_stops_mixed() -> None:
    dial = a_dial(stop(0.1, 0.0, 0.0), stop(0.5, 3.0, 1.0), stop(0.9, 9.0, 2.0))
    assert dial.at(0.5).interval == pytest.approx((0.45, 0.55))
    assert dial.at(0.7).interval == pytest.approx((0.65, 0.75))
    wide = a_dial(stop(0.2, 0.0, 0.0), Stop(1.0, 0.6, 0.4, 0.9, 1.0))
    assert wide.at(0.3).interval == pytest.approx((0.75 * 0.15 + 0.25 * 0.4, 0.75 * 0.25 + 0.25 * 0.9))


def test_beyond_the_last_stop_is_that_stop_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    low, *_, high = measured().stops
    dial = replace(measured(), measured=(replace(low, low=0.1, rate=0.2), replace(high, rate=0.7, high=0.75)))
    assert [dial.at(rate).stops for rate in (0.0, 0.72)] == [[(1.0, dial.stops[0])], [(1.0, dial.stops[1])]]
    assert [dial.reaches(rate) for rate in (0.0, 0.15, 0.5, 0.74, 0.8)] == [False, True, True, True, False]
    with caplog.at_level(logging.WARNING):
        turn_dial(guided(), dial, 0.15)
        turn_dial(guided(), dial, 0.74)
        assert not caplog.records
        turn_dial(guided(), dial, 1.0)
        turn_dial(guided(), dial, 0.0)
    assert [each.getMessage() for each in caplog.records] == [
        "a rate of 1 is out of this dial's reach: 0.700 is nearest",
        "a rate of 0 is out of this dial's reach: 0.200 is nearest",
    ]
    for rate in (-0.1, 1.1, math.nan):
        with pytest.raises(InputError, match="a rate between 0 and 1"):
            dial.at(rate)


def test_a_dial_is_kept_as_json_and_needs_two_rates() -> None:
    dial = measured()
    assert Dial.read(json.loads(json.dumps(dial.describe()))) == dial
    for nothing in ({}, [1]):
        with pytest.raises(InputError, match="a dial of format 1; found format None"):
            Dial.read(nothing)
    with pytest.raises(InputError, match="a dial as it was written; found another: 'measured'"):
        Dial.read({"format": 1})
    with pytest.raises(InputError, match=r"a dial as it was written.*unexpected keyword argument 'rates'"):
        Dial.read({**dial.describe(), "rates": []})
    with pytest.raises(InputError, match=r"at least two different rates; found \[0.5\]"):
        a_dial(stop(0.5, 0.0), stop(0.5, 1.0))


# --- measured and drawn -------------------------------------------------------------------------------


def test_p_itself_is_a_stop_and_costs_nothing() -> None:
    dial = measured()
    assert [each.strength for each in dial.measured] == list(STRENGTHS)
    assert [each.kl for each in dial.measured if each.strength == 0] == [0.0]
    assert all(each.kl > 0.01 for each in dial.measured if each.strength)
    assert dial.prompts == len(PROMPTS)
    assert dial.texts == 400 * len(PROMPTS)


def test_stops_that_are_known_are_not_measured_again() -> None:
    said: list[Stop] = []
    known = [
        measure_stop(guided(), strength, PROMPTS, ORACLE, count=400, batch_size=400) for strength in (-2, 2)
    ]
    assert set(known) < set(measured().measured)  # one by one they are what they are together
    known[0] = replace(known[0], rate=0.0)
    dial = measure_dial(
        guided(),
        PROMPTS,
        ORACLE,
        strengths=[-2, 2],
        count=400,
        batch_size=400,
        known=known,
        on_stop=said.append,
    )
    assert [each.strength for each in said] == [0]
    assert dial.measured == (known[0], *said, known[1])
    assert dial.texts == measured().texts


def test_an_earlier_dial_lends_its_stops_where_it_was_measured_alike() -> None:
    said: list[Stop] = []
    how: dict[str, Any] = {"count": 40, "seed": 1, "batch_size": 160, "on_stop": said.append}
    first = measure_dial(guided(), PROMPTS, ORACLE, strengths=[-4, 4], **how)
    kept = Dial.read(json.loads(json.dumps(first.describe())))
    said.clear()
    more = measure_dial(guided(), PROMPTS, ORACLE, strengths=[2], earlier=kept, **how)
    assert [each.strength for each in said] == [2]
    assert more.measured == (*first.measured[:2], *said, first.measured[2])
    assert more == measure_dial(guided(), PROMPTS, ORACLE, strengths=[-4, 2, 4], **how)
    guide = random_guide(HuggingFaceReader(guided().base), seed=3)
    doubtful = GuidedLanguageModel(guided().base, guide, guidance=Guidance(doubt=0.1))
    for model, prompts, oracle, other in (
        (guided(), PROMPTS[:3], ORACLE, {}),
        (guided(), PROMPTS[::-1], ORACLE, {}),
        (guided(), PROMPTS, ~ORACLE, {}),
        (guided(), PROMPTS, ORACLE, {"seed": 2}),
        (guided(), PROMPTS, ORACLE, {"count": 41}),
        (doubtful, PROMPTS, ORACLE, {}),
    ):
        said.clear()
        measure_dial(model, prompts, oracle, strengths=[-4, 4], earlier=kept, **{**how, **other})
        assert [each.strength for each in said] == [-4, 0, 4]
    old = replace(kept, drawn="")  # as dials were written that did not know it
    said.clear()
    measure_dial(guided(), PROMPTS, ORACLE, strengths=[-4, 4], earlier=old, **how)
    assert [each.strength for each in said] == [-4, 0, 4]


def test_texts_at_a_rate_satisfy_at_that_rate() -> None:
    dial = measured()
    low, high = dial.stops[0], dial.stops[-1]
    assert high.rate - low.rate > 0.2  # the dial has something to turn
    asked = [each for each in PROMPTS for _ in range(500)]
    found = []
    for share in (0.25, 0.75):
        rate = low.rate + share * (high.rate - low.rate)
        samples = draw_dialled(guided(), dial, rate, asked, seed=11, batch_size=500)
        satisfied = ORACLE(samples.strings("condition"), samples.strings("text"))
        found.append(satisfied)
        # The stops' own rates are estimates of 1,600 texts each: three times their standard error.
        assert abs(float(satisfied.mean()) - rate) < 3 * 0.5 / 1600**0.5 + 3 * 0.5 / len(asked) ** 0.5
    assert mean_p_value(found[0].astype(float), float(found[1].mean())) < FALSE_ALARM  # rates do differ


def test_a_texts_log_proposal_is_that_of_the_mixture() -> None:
    """Against every component read by itself: log m = log Σ_k π_k q_k, and log p is p's."""
    model, dial = guided(), measured()
    low, high = dial.stops[0], dial.stops[-1]
    ends = replace(dial, measured=(low, high))  # so that both components are guided
    rate = 0.3 * low.rate + 0.7 * high.rate
    proposal = turn_dial(model, ends, rate)
    assert proposal.shares == pytest.approx((0.3, 0.7))
    assert len(proposal.models) == 2
    samples = draw_dialled(model, ends, rate, PROMPTS * 8, seed=5)
    rows = [samples.ragged("tokens").row(row).tolist() for row in range(len(samples))]
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
    for at, row in enumerate(rows):
        tokens[at, : len(row)] = torch.tensor(row)
    names = samples.strings("prompt")
    parts = [each.score(names, tokens, lengths, names).double().sum(dim=1) for each in proposal.models]
    log_m = torch.logaddexp(parts[0] + math.log(0.3), parts[1] + math.log(0.7))
    log_p = model.base.score(names, tokens, lengths, names).double().sum(dim=1)
    assert np.abs(samples.ragged("log_p").sums() - log_p.numpy()).max() < 1e-4
    assert np.abs(log_ratios(samples) - (log_m - log_p).numpy()).max() < 1e-4


def test_a_guide_that_cannot_be_negated_has_no_stops_below_p(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = guided("eos")
    (guide,) = model.follower.guides  # type: ignore[attr-defined]
    monkeypatch.setattr(guide.config, "shape_only", True)
    with caplog.at_level(logging.WARNING):
        dial = measure_dial(model, PROMPTS, ORACLE, count=50)
    assert [each.strength for each in dial.measured] == [0.0, 1.0, 2.0, 4.0]
    assert "rates below p's own are out of reach" in caplog.text
    with pytest.raises(InputError, match="a guide whose R is a probability"):
        measure_dial(model, PROMPTS, ORACLE, strengths=[-1.0], count=2)


def test_a_guide_whose_training_texts_were_cut_has_stops_below_p(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 − R then has cut texts in it too. A formula is refused; a stop's rate is measured all the same."""
    model = guided("eos")
    (guide,) = model.follower.guides  # type: ignore[attr-defined]
    monkeypatch.setattr(guide.config, "cut_share", 0.5)
    with pytest.raises(InputError, match="training texts ended themselves"):
        _ = ~guide
    dial = measure_dial(model, PROMPTS, ORACLE, strengths=[-2.0, 2.0], count=100)
    assert [each.strength for each in dial.measured] == [-2.0, 0.0, 2.0]
    below = replace(dial, measured=(stop(0.1, 1.0, -2.0), stop(0.4, 0.0, 0.0)))
    assert len(turn_dial(model, below, 0.1).models) == 1


def test_weights_of_dialled_texts_are_refused_where_p_is_no_part_of_the_mixture() -> None:
    dial = replace(
        measured(),
        measured=(
            Stop(-2.0, 0.1, 0.0, 0.2, 1.0),
            Stop(0.0, 0.4, 0.3, 0.5, 0.0),
            Stop(2.0, 0.9, 0.8, 1.0, 1.0),
        ),
    )
    covered = draw_dialled(guided(), dial, 0.6, PROMPTS)
    assert np.isfinite(covered.log_weights()).all()
    for rate in (0.1, 0.88):  # the lowest stop alone, and a share of p too small for its weights
        samples = relabel(draw_dialled(guided(), dial, rate, PROMPTS), ORACLE)
        with pytest.raises(CoverageError, match="found samples of stops of a dial"):
            samples.log_weights()
        with pytest.raises(CoverageError, match="found samples of stops of a dial"):
            TrainingData.from_samples(samples, HuggingFaceReader(guided().base))  # type: ignore[arg-type]


def test_two_stops_of_one_base_read_prompts_ahead_once(monkeypatch: pytest.MonkeyPatch) -> None:
    dial = replace(measured(), measured=(measured().stops[0], measured().stops[-1]))
    offered: list[int] = []

    def prepare(model: CausalModel, prompts: list[str]) -> int:
        offered.append(len(prompts))
        return len(prompts)

    monkeypatch.setattr(CausalModel, "prepare", prepare)
    draw_dialled(guided(), dial, sum(each.rate for each in dial.stops) / 2, PROMPTS)
    assert offered == [len(PROMPTS)]


def test_a_dial_knows_whose_progress_its_guide_was_told() -> None:
    reader = HuggingFaceReader(guided().base)  # type: ignore[arg-type]
    guide = random_guide(reader, 3, progress_bits=2)
    all_of_them, one = (
        GuidedLanguageModel(reader.model, guide, oracle=Keywords(inflections=False, at_least=least))
        for least in (None, 1)
    )
    dial = measure_dial(one, PROMPTS, ORACLE, strengths=[-4, 4], count=8)
    turn_dial(one, dial, 0.5)
    with pytest.raises(MismatchError, match="the base and guide this dial was measured with; found others"):
        turn_dial(all_of_them, dial, 0.5)


def test_what_a_dial_cannot_be_made_of_is_refused() -> None:
    model = guided()
    for guidance, found in (
        (Guidance(strength=2.0), "a strength of 2"),
        (Guidance(target_rate=0.5), "a target rate of 0.5"),
        (Guidance(floor=0.1), "a floor of 0.1"),
    ):
        other = GuidedLanguageModel(model.base, model.follower, guidance=guidance)
        with pytest.raises(InputError, match=found):
            measure_dial(other, PROMPTS, ORACLE)
    ends = GuidedLanguageModel(
        guided("eos").base, guided("eos").follower, guidance=Guidance(exact_end=True), oracle=ORACLE
    )
    with pytest.raises(InputError, match="found an exact end"):
        measure_dial(ends, PROMPTS, ORACLE)
    doubting = GuidedLanguageModel(model.base, model.follower, guidance=Guidance(doubt=0.1))
    with pytest.raises(MismatchError, match=r"the doubt this dial was measured with, 0; found 0.1"):
        turn_dial(doubting, measured(), 0.5)
    with pytest.raises(MismatchError, match="the base and guide this dial was measured with; found others"):
        turn_dial(guided("eos"), measured(), 0.5)
    turn_dial(doubting, measure_dial(doubting, PROMPTS, ORACLE, strengths=[-4, 4], count=8), 0.5)
    said: list[Stop] = []
    with pytest.raises(InputError, match="found strength inf"):
        measure_dial(model, PROMPTS, ORACLE, strengths=[1, math.inf], count=2, on_stop=said.append)
    assert not said  # nothing was drawn for nothing
    table = TabularModel.random(["x"], vocabulary_size=4, length_limit=3, seed=1)
    tabular = GuidedLanguageModel(table, TabularFollower({("x", "x"): torch.zeros(1, 4)}))
    with pytest.raises(InputError, match="found one led by a TabularFollower"):
        measure_dial(tabular, [Prompt("x", "x")], ORACLE, strengths=[1.0])
