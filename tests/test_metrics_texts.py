"""Metrics of texts: golden values of CommonGen, cases worked out by hand, broken inputs."""

import gzip
import json
import math
from functools import cache
from typing import Any

import numpy as np
import pytest

from commongen import FOLDER, FORMS
from nado.errors import InputError
from nado.metrics import (
    Metric,
    chrf,
    cider_d,
    corpus_bleu,
    corpus_bleus,
    distinct,
    keyword_coverage,
    length,
    mean,
    ratio,
    rouge_l,
    sacre_bleu,
    self_bleu,
    tokenise_english,
)
from nado.metrics.bleu import closest_length
from nado.metrics.rouge import count_common
from nado.metrics.tokens import count_ngrams, tokeniser
from nado.oracles import Keywords


@cache
def dev() -> dict[str, Any]:
    with gzip.open(FOLDER / "dev_systems.jsonl.gz", "rt", encoding="utf-8") as lines:
        sets = [json.loads(line) for line in lines]
    return {
        "conditions": [", ".join(each["concepts"]) for each in sets],
        "references": [each["targets"] for each in sets],
        "bart": [each["bart"] for each in sets],
        "unilm": [each["unilm"] for each in sets],
    }


@cache
def dev_bleus(system: str) -> list[Metric]:
    return corpus_bleus(dev()[system], dev()["references"])


# --- golden values ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("system", "expected"),
    # Made with spaCy's blank English tokens and COCO's own scorer; ours agree far within the ±0.1 asked for.
    [("bart", (68.652, 50.496, 37.036, 27.479)), ("unilm", (72.434, 54.687, 40.435, 30.391))],
)
def test_commongen_bleu(system: str, expected: tuple[float, ...]) -> None:
    assert [metric.value for metric in dev_bleus(system)] == pytest.approx(expected, abs=0.001)
    assert [metric.name for metric in dev_bleus(system)] == ["BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4"]


@pytest.mark.parametrize(("system", "expected"), [("bart", (98.06, 93.05)), ("unilm", (93.12, 73.92))])
def test_commongen_coverage(system: str, expected: tuple[float, float]) -> None:
    found = keyword_coverage(dev()["conditions"], dev()[system], Keywords(forms=FORMS))
    assert [100 * each.value for each in found] == pytest.approx(expected, abs=0.005)
    assert found.mean.low < found.mean.value < found.mean.high
    assert found.all_covered.low < found.all_covered.value < found.all_covered.high
    assert "whole words, inflections by prepared forms" in found.mean.method


def test_commongen_coverage_of_people() -> None:
    pairs = zip(dev()["conditions"], dev()["references"], strict=True)
    rows = [(condition, text) for condition, several in pairs for text in several]
    found = keyword_coverage(*zip(*rows, strict=True), Keywords(forms=FORMS))
    assert [100 * each.value for each in found] == pytest.approx((99.77, 99.18), abs=0.005)
    assert (found.mean.n, found.mean.prompts) == (4018, 993)


@pytest.mark.parametrize(
    ("system", "rouge", "cider"), [("bart", 50.849, 1.41175), ("unilm", 55.655, 1.57194)]
)
def test_commongen_rouge_and_cider_as_coco_has_them(system: str, rouge: float, cider: float) -> None:
    assert rouge_l(dev()[system], dev()["references"]).value == pytest.approx(rouge, abs=0.001)
    assert cider_d(dev()[system], dev()["references"]).value == pytest.approx(cider, abs=1e-5)


def test_a_measure_says_how_it_was_made() -> None:
    measure = dev_bleus("bart")[3].measure(dev()["conditions"])
    assert measure.method == (
        "corpus BLEU, english tokens, case kept, closest reference length, no smoothing; "
        "95% percentile bootstrap, 1000 resamples, seed 0, over prompts"
    )
    assert (measure.n, measure.prompts, measure.unit, measure.note) == (993, 993, "0–100", None)
    assert 1.0 < measure.high - measure.low < 4.0
    assert str(measure).startswith("BLEU-4 27.48 [")
    assert json.loads(json.dumps(measure.describe()))["value"] == measure.value


# --- tokens -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", ""),
        ("A dog runs.", "A dog runs ."),
        ("the dog's  ball\n", "the dog 's ball"),
        ("I don't, he'll; They've (all) gone!", "I do n't , he 'll ; They 've ( all ) gone !"),
        ("dont cannot Can’t Gonna its", "do nt can not Ca n’t Gon na its"),
        ("well-known and/or either/or 3-4", "well - known and/or either / or 3 - 4"),
        ("Mr. Smith, U.S. at 5p.m. or 10am.", "Mr. Smith , U.S. at 5 p.m. or 10 am ."),
        ('"Stop..." she said', '" Stop ... " she said'),
        ("$5.50 for 5km, 100%", "$ 5.50 for 5 km , 100 %"),
        ("end.Next one,two 1,000", "end . Next one , two 1,000"),
        ("see www.a-b.com. ok :) :).", "see www.a-b.com . ok :) :) ."),
        ("a b. c", "a b. c"),
        ("yes?. 'quoted' it's", "yes ? . ' quoted ' it 's"),
        ("café naïve 北京 🐶!", "café naïve 北京 🐶 !"),
    ],
)
def test_english_tokens(text: str, tokens: str) -> None:
    assert tokenise_english(text) == tokens.split()


def test_tokens_keep_every_letter() -> None:
    texts = [text for several in dev()["references"] for text in several]
    assert all("".join(tokenise_english(text)) == "".join(text.split()) for text in texts)


def test_an_unknown_tokeniser_is_refused() -> None:
    with pytest.raises(InputError) as raised:
        tokeniser("13a")  # type: ignore[arg-type]
    assert str(raised.value) == (
        "expected a tokeniser out of english, words, blanks; found '13a'. "
        'Use "english" for CommonGen, "blanks" for texts that are tokenised already.'
    )


# --- worked out by hand -------------------------------------------------------------------------------


def test_bleu_by_hand() -> None:
    # Seven times "the" against "the cat is on the mat" and "there is a cat on the mat": clipped to 2.
    references = [["the cat is on the mat", "there is a cat on the mat"]]
    assert corpus_bleu(["the " * 7], references, 1).value == pytest.approx(100 * 2 / 7)
    assert corpus_bleu(["the " * 7], references, 2).value == 0  # no smoothing
    # 3 of 3 words, 1 of 2 pairs; as long as the closest reference, which has 3 words.
    several = [["a b d c", "c x y"]]
    assert corpus_bleu(["a b c"], several, 2).value == pytest.approx(100 * math.sqrt(1 * 1 / 2))
    # Two texts are one corpus: counts are added, not scores. 4 words against 6: e^(1 − 6/4).
    two = corpus_bleu(["a b", "c d"], [["a b x"], ["c e f"]], 1)
    assert two.value == pytest.approx(100 * 3 / 4 * math.exp(1 - 6 / 4))


def test_the_closest_reference_length_and_the_shorter_of_two() -> None:
    assert closest_length(5, [9, 4, 6]) == 4
    assert closest_length(5, [9, 7]) == 7


def test_case_and_marks_count() -> None:
    assert corpus_bleu(["The dog."], [["The dog."]], 3).value == pytest.approx(100)
    assert corpus_bleu(["the dog"], [["The dog."]], 1).value == pytest.approx(
        100 * 1 / 2 * math.exp(1 - 3 / 2)
    )


def test_rouge_l_by_hand() -> None:
    assert count_common(["police", "killed", "the", "gunman"], ["police", "kill", "the", "gunman"]) == 3
    assert count_common("abcbdab", "bdcaba") == 4
    # P = 2/3 with either reference, R = 2/2 with the second: F = 2.44 PR / (R + 1.44 P).
    score = rouge_l(["a b c"], [["a x b y", "b c"]]).value
    assert score == pytest.approx(100 * 2.44 * (2 / 3) * 1 / (1 + 1.44 * 2 / 3))
    assert rouge_l(["", "a"], [["a"], [""]]).value == 0


def test_cider_by_hand() -> None:
    # Two documents. "a" is in both and weighs 0; every other n-gram is in one and weighs log 2.
    same = cider_d(["a b", "a c"], [["a b"], ["a c"]], tokens="blanks")
    # Orders 1 and 2 agree wholly, orders 3 and 4 have no n-gram: 10 · (1 + 1 + 0 + 0) / 4.
    assert same.value == pytest.approx(5.0)
    other = cider_d(["b b b", "a c"], [["a b"], ["a c"]], tokens="blanks")
    # "b b b": weight 3 log 2, clipped to 1 log 2 → cosine 1/3, one token too long; no common pair.
    first = 10 / 4 * (1 / 3) * math.exp(-1 / 72)
    assert other.value == pytest.approx((first + 5.0) / 2)
    # The mean over references: the second has nothing in common.
    two = cider_d(["a b", "a c"], [["a b", "x y"], ["a c"]], tokens="blanks")
    assert two.value == pytest.approx((2.5 + 5.0) / 2)


def test_cider_of_one_text_says_that_it_means_nothing() -> None:
    measure = cider_d(["a b"], [["a b"]]).measure()
    assert measure.value == 0
    assert "one text: every n-gram is in every document, so all weigh 0" in measure.note


def test_distinct_by_hand() -> None:
    texts = ["a b a b", "a b c"]
    assert [distinct(texts, order).value for order in (1, 2, 3)] == [3 / 7, 3 / 5, 1.0]
    assert distinct(["a"], 2).value is None
    assert distinct(["a"], 2).note == "no text has 2 tokens"
    with pytest.raises(InputError, match="expected n-grams of at least 1 token; found 0"):
        distinct(texts, 0)


def test_self_bleu_is_bleu_against_the_others() -> None:
    texts = [*dev()["bart"][:40], "A man man man sits.", "A man man sits."]
    others = [texts[:row] + texts[row + 1 :] for row in range(len(texts))]
    assert self_bleu(texts, order=3).value == pytest.approx(corpus_bleu(texts, others, 3).value, abs=1e-9)
    pairs = [f"prompt {row // 2}" for row in range(len(texts))]
    partners = [[texts[row ^ 1]] for row in range(len(texts))]
    found = self_bleu(texts, pairs, 1)
    assert found.value == pytest.approx(corpus_bleu(texts, partners, 1).value, abs=1e-9)
    assert found.low < found.value < found.high
    assert found.prompts == 21


def test_self_bleu_takes_the_length_of_another_text() -> None:
    texts = ["a b c", "a b c d e", "a b c x y"]  # 13 words against closest others of 5, 5 and 5
    assert self_bleu(texts, order=1).value == pytest.approx(100 * 9 / 13 * math.exp(1 - 15 / 13))


def test_self_bleu_of_single_texts_is_honest() -> None:
    found = self_bleu(["a b", "c d"], ["one", "two"])
    assert (found.value, found.note) == (None, "n too small: no prompt has two texts to compare")
    assert self_bleu(["a b", "a b"], ["one", "one"], 2).value == pytest.approx(100)


def test_length_and_ratio() -> None:
    assert length(["A dog.", "It's"]).value == 2.5
    assert length(["A dog.", "It's"], tokens="words").value == 1.5
    assert ratio("tokens a hit", [10, 30, 20], [1, 0, 1]).value == 30
    measure = ratio("tokens a hit", [10.0] * 30, [0] * 30).measure()
    assert (measure.value, measure.low) == (None, None)
    assert measure.note == "not defined for these texts: nothing to divide by"


# --- sacrebleu ----------------------------------------------------------------------------------------


def test_sacrebleu_is_sacrebleus_own() -> None:
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    texts, references = dev()["bart"][:60], [several[:2] for several in dev()["references"][:60]]
    streams = [list(stream) for stream in zip(*references, strict=True)]
    for ours, theirs in ((sacre_bleu, BLEU()), (chrf, CHRF())):
        metric = ours(texts, references)
        assert metric.value == pytest.approx(theirs.corpus_score(texts, streams).score, abs=1e-9)
        measure = metric.measure()
        assert measure.method.startswith(str(theirs.get_signature()))
        assert measure.low < measure.value < measure.high
    assert "tok:13a" in sacre_bleu(texts, references).method
    assert chrf(texts, references, word_order=2).value != chrf(texts, references).value


def test_sacrebleu_with_different_numbers_of_references() -> None:
    metric = sacre_bleu(["a b c d", "e f g h"], [["a b c d"], ["x", "e f g h"]])
    assert metric.value == pytest.approx(100)


# --- broken input -------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", [corpus_bleu, rouge_l, cider_d, sacre_bleu, chrf])
def test_missing_references_are_refused(metric: Any) -> None:
    with pytest.raises(
        InputError, match=r"expected a list of at least one reference .* found none for text 1\."
    ):
        metric(["a", "b"], [["a"], []])
    with pytest.raises(InputError, match=r"found a bare string for text 0\."):
        metric(["a"], ["a"])
    with pytest.raises(InputError, match="found 1 texts and 2 lists of references"):
        metric(["a"], [["a"], ["b"]])
    with pytest.raises(InputError, match=r"expected at least one text for \S+; found none"):
        metric([], [])
    with pytest.raises(InputError, match="found a bare string"):
        metric("ab", [["a"], ["b"]])
    with pytest.raises(InputError, match=r"expected texts that are strings for .*; found None"):
        metric([None], [["a"]])


def test_nan_scores_are_refused() -> None:
    with pytest.raises(InputError) as raised:
        mean("score", [1.0, float("nan"), float("inf")])
    assert str(raised.value) == (
        "expected finite numbers for score; found nan in row 1; 2 such rows of 3. "
        "Find what made them: a model that overflowed, or a text it cannot write."
    )
    with pytest.raises(InputError, match="expected at least one text for score; found none"):
        mean("score", [])
    with pytest.raises(InputError, match=r"found an array of shape \(1, 2\)"):
        mean("score", [[1.0, 2.0]])


def test_one_prompt_has_a_value_and_no_interval() -> None:
    measure = corpus_bleu(["a b", "a c"], [["a b"], ["a b"]], 1).measure(["same", "same"])
    assert measure.value == pytest.approx(75)
    assert (measure.low, measure.high, measure.prompts) == (None, None, 1)
    assert measure.note == "n too small for a bootstrap interval: 1 of the 20 prompts it needs"
    assert str(measure) == f"BLEU-1 75 (n = 2); {measure.note}"


def test_empty_texts_score_nothing_but_do_not_break() -> None:
    references = [["a b c d"]] * 25
    assert corpus_bleu([""] * 25, references).value == 0
    assert rouge_l([""] * 25, references).value == 0
    assert cider_d([""] * 25, references).value == 0
    measure = corpus_bleu([""] * 25, references).measure()
    assert measure.note == "no interval: all texts agree, so resampling them shows no spread"


def test_coverage_refuses_what_it_cannot_count() -> None:
    with pytest.raises(InputError, match="found at_least=2"):
        keyword_coverage(["a, b"], ["a"], Keywords(at_least=2))
    with pytest.raises(InputError, match="found 2 conditions and 1 texts"):
        keyword_coverage(["a", "b"], ["a"])
    assert keyword_coverage(["dog, cat"], ["dogs"], Keywords(forms={})).mean.value == 0.5


def test_ngrams_of_short_texts() -> None:
    assert count_ngrams(["a"], 2) == {}
    assert count_ngrams(["a", "b", "a", "b"], 2) == {("a", "b"): 2, ("b", "a"): 1}


def test_the_order_of_texts_does_not_matter() -> None:
    rows = np.random.default_rng(0).permutation(993)
    texts, references = dev()["bart"], dev()["references"]
    shuffled = corpus_bleu([texts[k] for k in rows], [references[k] for k in rows])
    assert shuffled.value == pytest.approx(dev_bleus("bart")[3].value, abs=1e-9)
