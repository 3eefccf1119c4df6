"""Baselines: what defines each of them, by enumeration where a table allows it and on small real models.

Statistical tests have fixed seeds; `FALSE_ALARM` is the chance that one would fail with a new seed.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor

import small_models
from frequencies import FALSE_ALARM, fit_p_value, outcome_log_p
from nado.baselines import METHODS, FudgeFollower, Provisions, RatioModel, Row
from nado.baselines.fine_tuning import tune
from nado.baselines.fudge import train_classifier
from nado.baselines.keyword_boosting import BoostFollower
from nado.baselines.keyword_forms import Forms, KeywordForms
from nado.baselines.method import judge
from nado.baselines.tuning import choose_settings
from nado.beam_search import search_beams
from nado.drawing import draw_rows
from nado.errors import InputError
from nado.exact import (
    TabularModel,
    conditionals,
    exact_log_q,
    exact_log_r,
    exact_log_r_start,
    satisfied_outcomes,
)
from nado.following import Standing
from nado.guided_language_model import GuidedLanguageModel
from nado.huggingface import CausalModel
from nado.labeling import label
from nado.oracles import BoolArray, Keywords, Oracle
from nado.prompts import Prompt
from nado.proposals import Proposal
from nado.samples import Samples
from nado.training import DivergenceError

LIMIT = 8
PAIR = Prompt("x", "ab")
WORDS = [
    Prompt("the dog", "ball"),
    Prompt("a man sees", "beach"),
    Prompt("a cat", "man"),
    Prompt("the", "red"),
]
KEYWORDS = Keywords(inflections=False)


class HasLetters(Oracle):
    """Whether a text has every letter of its condition, each a part."""

    cheap = True

    def judge(self, conditions: Sequence[str], texts: Sequence[str]) -> BoolArray:
        return np.array([set(c) <= set(t) for c, t in zip(conditions, texts, strict=True)], dtype=bool)

    def judge_parts(self, conditions: Sequence[str], texts: Sequence[str]) -> list[BoolArray]:
        return [np.array([x in t for x in c], dtype=bool) for c, t in zip(conditions, texts, strict=True)]

    def part_names(self, condition: str) -> list[str]:
        return list(condition)


LETTERS = HasLetters()


@cache
def table() -> TabularModel:
    return TabularModel.random(["x"], vocabulary_size=4, length_limit=4, seed=1)


@cache
def base(completion: Any = "eos") -> CausalModel:
    network, tokenizer = small_models.build("llama", 3), small_models.tokenizer()
    return CausalModel(network, tokenizer, length_limit=LIMIT, completion=completion)


@cache
def labelled(completion: Any = "limit", count: int = 600) -> Samples:
    """Draws of the small base with the oracle's labels, as a guide would have them."""
    prompts = [each for each in WORDS for _ in range(count)]
    drawn = draw_rows(
        base(completion), prompts, range(len(prompts)), proposal=Proposal(), seed=5, batch_size=1024
    )
    finished = drawn["finished"].to_numpy(zero_copy_only=False)
    labels = label(KEYWORDS, drawn["condition"].to_pylist(), drawn["text"].to_pylist(), finished=finished)
    return Samples(drawn.append_column("satisfied", pa.array(labels.satisfied)))


def tabular_given(**changes: Any) -> Provisions:
    values: dict[str, Any] = {"budget": 8 * 3.0, "text_length": 3.0, "batch_size": 4096}
    return Provisions(table(), LETTERS, **values | changes)


def word_given(completion: Any = "limit", **changes: Any) -> Provisions:
    values: dict[str, Any] = {"budget": 8 * 6.0, "text_length": 6.0, "batch_size": 512}
    return Provisions(base(completion), KEYWORDS, **values | {"samples": labelled(completion)} | changes)


def satisfied_share(given: Provisions, system: Any, prompts: Sequence[Prompt], seed: int = 9) -> float:
    return float(judge(given, prompts, system.write(prompts, seed).rows).satisfied.mean())


def texts_of(given: Provisions, rows: Sequence[Row]) -> list[str]:
    return given.base.decode([row.tokens for row in rows])


# --- sampling, greedy, beam -----------------------------------------------------------------------------


def test_base_sampling_draws_from_p_and_knows_its_probabilities() -> None:
    given = tabular_given()
    found = METHODS["base"].prepare(given, {}).write([PAIR] * 4000, seed=3)
    exact = outcome_log_p(table(), "x")
    assert fit_p_value([tuple(row.tokens) for row in found.rows], exact) > FALSE_ALARM
    for row in found.rows[:50]:
        assert row.log_q == pytest.approx(exact[tuple(row.tokens)], abs=1e-4)
    assert found.base_tokens == sum(len(row.tokens) for row in found.rows)


def test_an_exact_end_never_finishes_a_text_that_fails() -> None:
    given = tabular_given()
    found = METHODS["base-exact-end"].prepare(given, {}).write([PAIR] * 500, seed=3)
    satisfied = judge(given, [PAIR] * 500, found.rows).satisfied
    finished = np.array([row.finished for row in found.rows])
    assert (satisfied == finished).all()
    assert finished.mean() > 1.2 * float(exact_log_r_start(table(), LETTERS, *PAIR).exp())


def test_beams_with_an_exact_end_find_the_likeliest_text_that_satisfies() -> None:
    given, exact = tabular_given(), outcome_log_p(table(), "x")
    rows = [Row(list(tokens), tokens[-1] == given.base.eos_id) for tokens in exact]
    holds = judge(given, [PAIR] * len(rows), rows).satisfied
    right = [tuple(row.tokens) for row, holding in zip(rows, holds, strict=True) if holding]
    best = max(right, key=lambda tokens: exact[tokens])
    asked, alone = (
        METHODS[name].prepare(given, {"beams": 200, "length_penalty": 0.0}).write([PAIR], seed=0).rows[0]
        for name in ("beam-exact-end", "beam")
    )
    assert tuple(asked.tokens) == best
    assert asked.finished
    assert exact[tuple(alone.tokens)] > exact[best]  # p's own likeliest text does not satisfy


def test_greedy_takes_the_likeliest_token_every_time() -> None:
    given = word_given("eos")
    (row,) = METHODS["greedy"].prepare(given, {}).write(WORDS[:1], seed=0).rows
    state, expected = base().start(["the dog"]), []
    while len(expected) < LIMIT and base().eos_id not in expected:
        expected.append(int(state.log_p.argmax()))
        state = base().step(state, torch.tensor(expected[-1:]))
    assert row.tokens == expected
    assert row.finished == (expected[-1] == base().eos_id)


def test_beams_find_likelier_texts_than_greedy_search_and_batches_do_not_matter() -> None:
    given = word_given("limit")
    greedy = METHODS["greedy"].prepare(given, {}).write(WORDS, 0)
    wide = search_beams(base("limit"), WORDS, beams=6)
    alone = [search_beams(base("limit"), [each], beams=6).best[0] for each in WORDS]
    assert [row.tokens for row in wide.best] == [row.tokens for row in alone]

    def log_p(rows: Sequence[Row]) -> Tensor:
        lengths = torch.tensor([len(row.tokens) for row in rows])
        padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(row.tokens) for row in rows], batch_first=True)
        return base("limit").score([each.prompt for each in WORDS], padded, lengths).sum(dim=1)

    gained = log_p(wide.best) - log_p(greedy.rows)
    assert (gained > -1e-4).all()
    assert gained.max() > 0.1
    assert wide.base_tokens > 3 * greedy.base_tokens


# --- best of n, rejection, SMC ----------------------------------------------------------------------------


def test_the_best_of_n_is_chosen_by_the_oracle_and_its_rate_is_as_it_must_be() -> None:
    given = tabular_given()
    system = METHODS["best-of-n"].prepare(given, {"n": 4, "among_equals": "first"})
    found = system.write([PAIR] * 4000, seed=2)
    share = float(judge(given, [PAIR] * 4000, found.rows).satisfied.mean())
    rate = float(exact_log_r_start(table(), LETTERS, *PAIR).exp())
    expected = 1 - (1 - rate) ** 4
    assert abs(share - expected) < 5 * (expected * (1 - expected) / 4000) ** 0.5  # 5 standard errors
    single = METHODS["base"].prepare(given, {}).write([PAIR] * 4000, seed=2)
    assert found.base_tokens > 3 * single.base_tokens
    assert all(row.log_q is None for row in found.rows)


def test_the_best_of_n_prefers_more_parts_and_then_what_it_was_told_to() -> None:
    given = tabular_given()
    asked = [PAIR] * 300
    first = METHODS["best-of-n"].prepare(given, {"n": 3, "among_equals": "first"}).write(asked, seed=2)
    likely = METHODS["best-of-n"].prepare(given, {"n": 3, "among_equals": "likeliest"}).write(asked, seed=2)
    one, other = judge(given, asked, first.rows), judge(given, asked, likely.rows)
    assert (one.satisfied == other.satisfied).all()
    assert (one.parts == other.parts).all()
    single = METHODS["base"].prepare(given, {}).write(asked, seed=2)
    assert (judge(given, asked, single.rows).parts <= one.parts).all()  # the first draw is among the three
    exact = outcome_log_p(table(), "x")

    def likelihood(rows: Sequence[Row]) -> np.ndarray:
        return np.array([exact[tuple(row.tokens)] / len(row.tokens) for row in rows])

    assert (likelihood(likely.rows) >= likelihood(first.rows) - 1e-9).all()
    assert (likelihood(likely.rows) > likelihood(first.rows)).any()


def test_rejection_returns_exact_draws_of_q_star() -> None:
    found = METHODS["rejection"].prepare(tabular_given(budget=1e9), {}).write([PAIR] * 3000, seed=4)
    outcomes = outcome_log_p(table(), "x")
    target = dict(zip(outcomes, exact_log_q(table(), LETTERS, *PAIR).tolist(), strict=True))
    drawn = [tuple(row.tokens) for row in found.rows]
    assert fit_p_value(drawn, target) > FALSE_ALARM
    assert fit_p_value(drawn, outcomes) < FALSE_ALARM  # p itself is told apart


def test_rejection_keeps_to_its_budget_and_returns_what_fails_where_it_is_spent() -> None:
    given = tabular_given(budget=6.0)
    found = METHODS["rejection"].prepare(given, {}).write([PAIR] * 200, seed=4)
    longest = table().length_limit
    assert found.base_tokens <= 6.0 * 200 + 200 * longest  # at most one round more
    satisfied = judge(given, [PAIR] * 200, found.rows).satisfied
    assert 0 < satisfied.mean() < 1
    assert len(found.rows) == 200


def test_particles_that_are_chosen_by_progress_come_close_to_q_star() -> None:
    given = tabular_given()
    system = METHODS["smc"].prepare(given, {"particles": 64, "promise": 1.0})
    found = system.write([PAIR] * 1500, seed=4)
    outcomes = outcome_log_p(table(), "x")
    target = dict(zip(outcomes, exact_log_q(table(), LETTERS, *PAIR).exp().tolist(), strict=True))
    counts = dict.fromkeys(outcomes, 0.0)
    for row in found.rows:
        counts[tuple(row.tokens)] += 1 / len(found.rows)
    distance = 0.5 * sum(abs(counts[text] - target[text]) for text in outcomes)
    assert distance < 0.08
    from_p = 0.5 * sum(abs(math.exp(outcomes[text]) - target[text]) for text in outcomes)
    assert from_p > 0.3


def test_particles_help_more_with_progress_than_with_the_end_alone() -> None:
    given, asked = word_given("limit"), [Prompt("the dog", "ball, red, cat")] * 60
    shares = {}
    for promise in (0.0, 3.0):
        system = METHODS["smc"].prepare(given, {"particles": 24, "promise": promise})
        shares[promise] = satisfied_share(given, system, asked)
    assert shares[3.0] > shares[0.0] + 0.2


@pytest.mark.parametrize("name", ["best-of-n", "beam", "beam-exact-end", "smc", "neurologic"])
def test_a_budget_of_one_text_leaves_nothing_to_choose_from(name: str) -> None:
    reason = METHODS[name].obstacle(word_given(budget=7.0))
    assert reason is not None
    assert "the budget pays for one" in reason
    assert METHODS[name].obstacle(word_given("eos")) is None


# --- methods that train -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fine-tuning", "lora"])
def test_a_base_tuned_on_its_positives_satisfies_more_often(name: str) -> None:
    given = word_given(training_texts=9600)
    asked = [each for each in WORDS for _ in range(150)]
    before = satisfied_share(given, METHODS["base"].prepare(given, {}), asked)
    settings = METHODS[name].grid(given)[0] | {"learning_rate": 5e-3}  # a base of 20,000 weights
    weights = {key: value.clone() for key, value in base("limit").model.state_dict().items()}
    system = METHODS[name].prepare(given, settings)
    after = satisfied_share(given, system, asked)
    assert before < 0.35
    assert after > before + 0.2
    assert system.training is not None
    assert system.training.texts == pytest.approx(9600, rel=0.15)
    for key, value in base("limit").model.state_dict().items():  # the base itself is as it was
        assert torch.equal(value, weights[key])


def test_training_is_a_function_of_its_seed_alone() -> None:
    torch.manual_seed(7)
    state = torch.get_rng_state()
    one = METHODS["lora"].prepare(word_given(training_texts=256), {"rank": 4, "learning_rate": 1e-3})
    other = METHODS["lora"].prepare(word_given(training_texts=256), {"rank": 4, "learning_rate": 1e-3})
    assert torch.equal(torch.get_rng_state(), state)
    assert one.write(WORDS, 0) == other.write(WORDS, 0)


def test_trained_models_are_told_conditions_that_prompts_do_not_say() -> None:
    given = word_given()
    assert given.tells_conditions
    assert given.read_as(WORDS[0]) == Prompt("ball: the dog", "ball")
    spoken = labelled().table.set_column(
        labelled().table.column_names.index("prompt"),
        "prompt",
        pa.array([f"{each} =" for each in labelled().strings("condition")]),
    )
    assert not word_given(samples=Samples(spoken)).tells_conditions
    one_condition = labelled().filter(np.array([each == "ball" for each in labelled().strings("condition")]))
    assert not word_given(samples=one_condition).tells_conditions


class ExactClassifier:
    """The exact R of a table as a prefix classifier."""

    fingerprint = "exact"

    def __init__(self, log_r: Tensor) -> None:
        self.log_r = log_r

    def start(self, prompts: Sequence[str], conditions: Sequence[str]) -> int:
        return len(prompts)

    def select(self, state: int, rows: Tensor) -> int:
        return len(rows)

    def put(self, state: int, rows: Tensor, fresh: int) -> int:
        return state

    def append(self, state: int, tokens: Tensor, written: Tensor) -> int:
        return state

    def log_chance(self, state: int, standing: Standing, candidates: Tensor) -> Tensor:
        prefix = standing.base.prefix.clamp(max=len(self.log_r) - 1)
        return self.log_r[prefix].gather(1, candidates)


def test_fudge_with_the_exact_r_and_all_tokens_is_q_star() -> None:
    follower = FudgeFollower(ExactClassifier(exact_log_r(table(), LETTERS, *PAIR)), top_k=4)
    model = GuidedLanguageModel(table(), follower)
    outcomes, target = table().outcomes("x"), exact_log_q(table(), LETTERS, *PAIR)
    rows = len(outcomes.texts)
    scored = model.score(["x"] * rows, outcomes.tokens, outcomes.lengths, ["ab"] * rows).double().sum(dim=1)
    possible = ~target.isneginf()
    assert torch.allclose(scored[possible], target[possible], atol=1e-4)
    narrow = GuidedLanguageModel(table(), FudgeFollower(follower.classifier, top_k=2))
    state = narrow.start(["x"], ["ab"])
    assert int(state.log_p.isfinite().sum()) <= 2  # what is not among the k likeliest is given up


def test_fudge_learns_what_satisfies_and_its_step_is_its_training_pass() -> None:
    given = word_given(training_texts=4000)
    network, training = train_classifier(given, size=64)
    assert training.texts == pytest.approx(8 * 4000, rel=0.15)
    ids = [small_models.VOCABULARY.index(word) for word in ("the", "ball", "runs")]
    with torch.no_grad():
        whole = network(["ball"], torch.tensor([ids]))
        state = network.start(["the dog"], ["ball"])
        for place, token in enumerate(ids):
            log_chance = network.log_chance(state, None, torch.tensor([[token, 1]]))  # type: ignore[arg-type]
            assert float(log_chance[0, 0]) == pytest.approx(float(whole[0, place].sigmoid().log()), abs=1e-5)
            state = network.append(state, torch.tensor([token]), torch.tensor([True]))
        kept = network.append(state, torch.tensor([5]), torch.tensor([False]))
        assert torch.equal(kept, state)
        assert float(whole[0, 1].sigmoid()) > 0.9  # the ball is there, and texts are judged as they are cut
        assert float(whole[0, 0].sigmoid()) < 0.6
    given.memory["prefix classifier"] = (network, training)
    asked = [each for each in WORDS for _ in range(150)]
    before = satisfied_share(given, METHODS["base"].prepare(given, {}), asked)
    for strength, least in ((1.0, 0.25), (4.0, 0.4)):
        system = METHODS["fudge"].prepare(given, {"top_k": 24, "strength": strength})
        assert satisfied_share(given, system, asked) > before + least


def test_fudge_draws_the_same_whatever_the_batch() -> None:
    given = word_given(training_texts=100)
    asked = [each for each in WORDS for _ in range(10)]
    system = METHODS["fudge"].prepare(given, {"top_k": 24, "strength": 2.0})
    narrow = METHODS["fudge"].prepare(
        word_given(batch_size=7, memory=given.memory), {"top_k": 24, "strength": 2.0}
    )
    for one, other in zip(system.write(asked, 1).rows, narrow.write(asked, 1).rows, strict=True):
        assert one.tokens == other.tokens  # rows are refilled in the second: their state goes with them
        assert one.log_q == pytest.approx(other.log_q, abs=1e-4)


def class_model(satisfied: bool) -> TabularModel:
    """p given C, or given not C, as a model of its own."""
    outcomes = table().outcomes("x")
    wanted = satisfied_outcomes(table(), LETTERS, *PAIR) == satisfied
    log_joint = torch.where(wanted, outcomes.log_p, -math.inf)
    found = conditionals(log_joint - log_joint.logsumexp(dim=0), 4, 4)
    flat = torch.full((4,), -math.log(4.0), dtype=torch.float64)
    return TabularModel(
        {"x": torch.where(found.isneginf().all(dim=-1, keepdim=True), flat, found)}, length_limit=4
    )


def test_the_class_conditional_ratio_of_exact_models_is_q_star_by_bayes_rule() -> None:
    rate = float(exact_log_r_start(table(), LETTERS, *PAIR).exp())
    odds = math.log(rate) - math.log1p(-rate)
    model = RatioModel(table(), class_model(True), class_model(False), log_prior_odds=odds)
    outcomes, target = table().outcomes("x"), exact_log_q(table(), LETTERS, *PAIR)
    rows = len(outcomes.texts)
    scored = model.score(["x"] * rows, outcomes.tokens, outcomes.lengths).double().sum(dim=1)
    possible = ~target.isneginf()
    assert torch.allclose(scored[possible], target[possible], atol=1e-4)
    # Another prior is another R: the identity is no accident.
    wrong = RatioModel(table(), class_model(True), class_model(False), log_prior_odds=odds + 2)
    other = wrong.score(["x"] * rows, outcomes.tokens, outcomes.lengths).double().sum(dim=1)
    assert (other[possible] - target[possible]).abs().max() > 0.05


def test_the_ratio_of_equal_models_changes_nothing_and_its_texts_are_drawn_as_scored() -> None:
    same = RatioModel(table(), table(), table(), form="ratio", strength=2.0)
    assert torch.allclose(same.start(["x"]).log_p, table().start(["x"]).log_p, atol=1e-6)
    model = RatioModel(table(), class_model(True), table(), form="ratio", strength=0.5)
    prompts = [PAIR] * 40
    drawn = draw_rows(model, prompts, range(40), proposal=Proposal(), seed=0, batch_size=16)
    tokens = [row + [3] * (4 - len(row)) for row in drawn["tokens"].to_pylist()]
    lengths = torch.tensor([len(row) for row in drawn["tokens"].to_pylist()])
    scored = model.score(["x"] * 40, torch.tensor(tokens), lengths).sum(dim=1)
    assert scored.tolist() == pytest.approx([sum(row) for row in drawn["log_p"].to_pylist()], abs=1e-4)


def test_experts_lift_satisfaction_and_cost_three_passes_a_token() -> None:
    given = word_given(training_texts=9600)
    for satisfied in (True, False):  # a base of 20,000 weights needs a higher rate than a real one
        key = f"{'shared ' if satisfied else ''}tuned satisfied={satisfied} rate=0.0003"
        given.memory[key] = tune(given, satisfied=satisfied, learning_rate=5e-3)
    asked = [each for each in WORDS for _ in range(100)]
    before = satisfied_share(given, METHODS["base"].prepare(given, {}), asked)
    system = METHODS["class-ratio"].prepare(given, {"form": "ratio", "strength": 1.0})
    found = system.write(asked, 9)
    assert judge(given, asked, found.rows).satisfied.mean() > before + 0.25
    assert found.base_tokens == 3 * sum(len(row.tokens) for row in found.rows)


@pytest.mark.parametrize("name", ["fine-tuning", "lora", "fudge", "class-ratio"])
def test_nothing_to_learn_from_is_said(name: str) -> None:
    method = METHODS[name]
    assert method.obstacle(word_given(samples=None)) == "there are no labelled training draws to learn from"
    kept = labelled().array("satisfied").astype(bool)
    none = word_given(samples=labelled().filter(~kept))
    assert "training draws satisfies the oracle" in str(method.obstacle(none))
    every = method.obstacle(word_given(samples=labelled().filter(kept)))
    assert (every is None) == (name in ("fine-tuning", "lora"))
    assert "TabularModel has no" in str(method.obstacle(tabular_given()))


def test_what_no_other_method_needs_is_forgotten() -> None:
    given = word_given(training_texts=128)
    METHODS["class-ratio"].prepare(given, {"form": "ratio", "strength": 1.0})
    METHODS["lora"].prepare(given, {"rank": 2, "learning_rate": 1e-3})
    assert len(given.memory) == 3
    given.forget()
    assert list(given.memory) == ["shared tuned satisfied=True rate=0.0003"]
    METHODS["fine-tuning"].prepare(given, {"learning_rate": 3e-4})
    assert len(given.memory) == 1  # the very model that the ratio had


def test_training_without_samples_is_an_error() -> None:
    with pytest.raises(InputError, match="expected labelled training draws; found none"):
        train_classifier(word_given(samples=None))


def test_lora_without_peft_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nado.baselines.lora.find_spec", lambda name: None)
    assert METHODS["lora"].obstacle(word_given()) == "peft is not installed: pip install 'nado-lm[peft]'"


# --- keywords ---------------------------------------------------------------------------------------------


def test_a_plain_boost_is_transformers_own_sequence_bias() -> None:
    from transformers import SequenceBiasLogitsProcessor

    follower = BoostFollower(KeywordForms(base(), KEYWORDS), bias=3.0, missing_only=False)
    model = GuidedLanguageModel(base(), follower)
    state = model.start(["the dog"], ["ball"])
    token = small_models.VOCABULARY.index("ball")
    theirs = SequenceBiasLogitsProcessor({(token,): 3.0})
    for written in (5, token, 9):
        ids = torch.tensor([[4, 6]])
        scores = theirs(ids, state.log_p_base.clone())
        assert torch.allclose(state.log_p, scores.log_softmax(dim=-1), atol=1e-5)
        state = model.step(state, torch.tensor([written]))


def test_a_keyword_that_is_written_is_no_longer_boosted() -> None:
    given = word_given("limit")
    system = METHODS["keyword-boosting"].prepare(given, {"bias": 20.0, "missing_only": True})
    asked = [Prompt("the dog", "ball, red")] * 40
    texts = texts_of(given, system.write(asked, 1).rows)
    assert all({"ball", "red"} <= set(text.split()[:2]) for text in texts)
    always = METHODS["keyword-boosting"].prepare(given, {"bias": 20.0, "missing_only": False})
    assert all(set(text.split()) <= {"ball", "red"} for text in texts_of(given, always.write(asked, 1).rows))


def test_forms_of_several_tokens_are_led_from_the_first_to_the_last() -> None:
    forms = Forms(inside=frozenset({(1, 2, 3), (1, 5)}), first=frozenset({(7, 2, 3)}))
    assert forms.nexts([9]) == {1: 1 / 2}
    assert forms.nexts([]) == {7: 1 / 3}
    assert forms.nexts([9, 1]) == {1: 1 / 2, 2: 2 / 3, 5: 1.0}
    assert forms.nexts([9, 1, 2]) == {1: 1 / 2, 3: 1.0}
    assert forms.nexts([7]) == {1: 1 / 2, 2: 2 / 3}
    assert forms.nexts([9, 7]) == {1: 1 / 2}  # the first word's form does not begin inside a text


def test_inflected_forms_are_all_looked_for_and_unknown_words_are_not() -> None:
    forms = KeywordForms(base(), Keywords(forms={"run": ["run", "runs", "ran"]}))
    (found,) = forms.of("run")
    assert found.inside == {(small_models.VOCABULARY.index("runs"),)}


def test_neurologic_gathers_all_keywords_where_plain_beams_do_not() -> None:
    given = word_given("limit")
    asked = [
        Prompt("the dog", "ball, red, cat"),
        Prompt("a man sees", "beach, woman"),
        Prompt("the", "park, old"),
    ]
    plain = search_beams(base("limit"), asked, beams=8)
    assert not judge(given, asked, [Row(each.tokens, each.finished) for each in plain.best]).satisfied.any()
    for settings in METHODS["neurologic"].grid(given):
        found = METHODS["neurologic"].prepare(given, settings).write(asked, 0)
        assert judge(given, asked, found.rows).satisfied.all()
        assert len({row.log_q for row in found.rows} - {None}) == 0
        assert 0 < found.base_tokens <= len(asked) * LIMIT * given.draws


def test_neurologic_is_the_same_whatever_the_batch_and_ends_its_texts() -> None:
    asked = [Prompt("the dog", "ball, red"), Prompt("a man sees", "beach, woman"), Prompt("the", "park, old")]
    settings = {"beams": 6, "bonus": 0.5, "length_penalty": 0.0}
    whole = METHODS["neurologic"].prepare(word_given("eos"), settings).write(asked, 0)
    alone = METHODS["neurologic"].prepare(word_given("eos", batch_size=6), settings).write(asked, 0)
    assert [row.tokens for row in whole.rows] == [row.tokens for row in alone.rows]
    for row in whole.rows:
        assert row.finished == (row.tokens[-1] == base().eos_id)
        assert len(row.tokens) <= LIMIT


def test_keyword_methods_say_when_there_are_no_keywords() -> None:
    for name in ("keyword-boosting", "neurologic"):
        given = Provisions(base(), LETTERS, budget=48.0, text_length=6.0)
        assert METHODS[name].obstacle(given) == "the oracle HasLetters asks for no keywords"
        table_given = Provisions(table(), KEYWORDS, budget=48.0, text_length=6.0)
        assert METHODS[name].obstacle(table_given) == "TabularModel has no tokenizer for keywords"
        both = Provisions(base(), LETTERS & KEYWORDS, budget=48.0, text_length=6.0)
        assert METHODS[name].obstacle(both) is None


# --- the interface ----------------------------------------------------------------------------------------


def test_every_method_names_its_source_and_its_grid_can_be_written_down() -> None:
    import json

    for name, method in METHODS.items():
        assert method.name, name
        assert method.source, name
        grid = method.grid(word_given())
        assert 1 <= len(grid) <= 6
        assert json.loads(json.dumps(grid)) == grid
        assert len({json.dumps(each) for each in grid}) == len(grid)


def test_every_method_works_on_an_encoder_decoder_too() -> None:
    from nado.huggingface import EncoderDecoderModel

    network, tokenizer = small_models.build("marian", 1), small_models.tokenizer(appends_eos=True)
    model = EncoderDecoderModel(network, tokenizer, length_limit=LIMIT)
    asked = [each for each in WORDS for _ in range(40)]
    drawn = draw_rows(model, asked, range(len(asked)), proposal=Proposal(), seed=5, batch_size=256)
    labels = label(KEYWORDS, drawn["condition"].to_pylist(), drawn["text"].to_pylist())
    samples = Samples(drawn.append_column("satisfied", pa.array(labels.satisfied)))
    given = Provisions(model, KEYWORDS, 18.0, 6.0, samples=samples, training_texts=128)
    for name, method in METHODS.items():
        assert method.obstacle(given) is None, name
        found = method.prepare(given, method.grid(given)[0]).write(WORDS, 0)
        assert len(found.rows) == len(WORDS), name
        assert found.base_tokens > 0, name
        assert all(0 < len(row.tokens) <= LIMIT for row in found.rows), name


def test_settings_are_chosen_by_satisfaction_among_what_is_fluent() -> None:
    def tried(name: str, satisfied: float, perplexity: float | None) -> dict[str, Any]:
        return {"settings": {"name": name}, "satisfied": satisfied, "perplexity": perplexity}

    rows = [tried("weak", 0.2, 10.0), tried("strong", 0.9, 50.0), tried("middle", 0.5, 19.0)]
    assert choose_settings(rows, 20.0) == {"name": "middle"}
    assert choose_settings([*rows, tried("same", 0.5, 12.0)], 20.0) == {"name": "same"}
    assert choose_settings(rows, 5.0) == {"name": "weak"}  # none is fluent: the least perplexing
    assert choose_settings([tried("impossible", 1.0, None), rows[0]], 20.0) == {"name": "weak"}


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_a_budget_that_is_no_number_of_tokens_is_refused(value: float) -> None:
    with pytest.raises(InputError) as caught:
        tabular_given(budget=value)
    assert str(caught.value) == (
        f"expected a budget above 0, in tokens; found {value:g}. "
        "Let the guided model and the base write some texts first: it is their mean length."
    )


def test_a_loss_that_is_no_number_stops_fine_tuning() -> None:
    with pytest.raises(
        DivergenceError, match="expected a finite loss while the base is fine-tuned; found nan"
    ):
        tune(word_given(training_texts=640), satisfied=True, learning_rate=1e30)
