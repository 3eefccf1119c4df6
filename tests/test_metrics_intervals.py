"""Intervals that cover as often as they say, and tests that agree with scipy's.

Where a test is statistical its seed is fixed; the chance that another seed would fail it is stated.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from nado.errors import InputError, MismatchError
from nado.metrics import (
    Measure,
    Resampling,
    adjust_holm,
    compare,
    compare_ratings,
    compare_shares,
    mean,
    share,
)
from nado.metrics.pairs import mcnemar_p_value, wilcoxon_p_value
from nado.metrics.resampling import draw_counts, resample_sums, sum_by_prompt
from nado.metrics.shares import normal_quantile
from nado.oracles import wilson_interval
from test_metrics_texts import dev, dev_bleus

QUICK = Resampling(resamples=200)


def coverage(truth: float, trials: int, measure: Callable[[np.random.Generator], Measure]) -> float:
    """How often the interval of fresh data holds the truth."""
    generator = np.random.default_rng(7)
    hits = 0
    for _ in range(trials):
        found = measure(generator)
        hits += found.low <= truth <= found.high
    return hits / trials


# --- shares -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trials", [20, 100, 500])
@pytest.mark.parametrize("rate", [0.02, 0.1, 0.35, 0.5, 0.93])
def test_wilson_covers(trials: int, rate: float) -> None:
    """Exactly, by summing over all outcomes: no chance of a false alarm."""
    covered = 0.0
    for hits in range(trials + 1):
        found = share("hits", [True] * hits + [False] * (trials - hits))
        if found.low <= rate <= found.high:
            covered += stats.binom.pmf(hits, trials, rate)
    assert 0.93 < covered < 0.98  # discrete outcomes cannot give 0.95 everywhere


def test_wilson_is_that_of_the_audit_and_scipys() -> None:
    found = share("hits", [True] * 7 + [False] * 3)
    assert (found.low, found.high) == pytest.approx(wilson_interval(7, 10), abs=1e-4)  # which has z = 1.96
    theirs = stats.binomtest(7, 10).proportion_ci(0.9, method="wilson")
    narrow = share("hits", [True] * 7 + [False] * 3, confidence=0.9)
    assert (narrow.low, narrow.high) == pytest.approx((theirs.low, theirs.high))
    assert normal_quantile(0.95) == pytest.approx(1.959964, abs=1e-6)


@pytest.mark.parametrize(
    ("prompts", "texts", "alpha", "beta"), [(30, 8, 2, 2), (30, 8, 0.5, 0.5), (60, 8, 1, 5)]
)
def test_shares_of_texts_that_share_prompts_cover(
    prompts: int, texts: int, alpha: float, beta: float
) -> None:
    """True coverage is 0.93 to 0.95: below 0.90 in 1,500 trials has a chance under 1e-5."""
    names = np.repeat(np.arange(prompts), texts).tolist()

    def draw(generator: np.random.Generator) -> np.ndarray:
        rates = generator.beta(alpha, beta, size=(prompts, 1))
        return (generator.random((prompts, texts)) < rates).ravel()

    truth = alpha / (alpha + beta)
    assert 0.90 < coverage(truth, 1500, lambda g: share("hits", draw(g), names)) < 0.98
    # The check can fail: to take the texts for independent covers far too seldom.
    assert coverage(truth, 1500, lambda g: share("hits", draw(g))) < 0.89


def test_when_all_texts_agree_prompts_are_counted() -> None:
    together = share("hits", [True] * 100, [row // 10 for row in range(100)])
    assert (together.value, together.high) == (1.0, 1.0)
    assert together.low == pytest.approx(share("hits", [True] * 10).low)
    assert together.method.endswith("95% Wilson interval at 10.0 effective texts")
    single = share("hits", [True, False, True], ["one"] * 3)
    assert single.note == "one prompt: the interval is for other texts of it, not for other prompts"


def test_repeated_prompts_never_add_texts() -> None:
    alternating = [True, False] * 50  # each prompt has exactly the mean
    found = share("hits", alternating, [row // 2 for row in range(100)])
    assert (found.low, found.high) == pytest.approx(
        (share("hits", alternating).low, share("hits", alternating).high)
    )


def test_answers_must_be_answers() -> None:
    for wrong in ([0.5, 1.0], [math.nan, 1.0], ["yes"]):
        with pytest.raises(InputError, match="expected true or false for each text of hits"):
            share("hits", wrong)
    with pytest.raises(InputError, match="expected one answer for each of at least one text for hits"):
        share("hits", [])
    with pytest.raises(InputError, match="found 2 answers and 1 prompts"):
        share("hits", [True, False], ["one"])
    assert share("hits", [1, 0.0]).value == 0.5


# --- the bootstrap ------------------------------------------------------------------------------------


@pytest.mark.parametrize("texts", [30, 100])
def test_the_bootstrap_of_a_mean_covers(texts: int) -> None:
    """True coverage is 0.92 to 0.945: outside 0.88 to 0.98 in 1,000 trials has a chance under 1e-5."""
    found = coverage(1.0, 1000, lambda g: mean("x", g.gamma(4, 0.25, texts)).measure(None, QUICK))
    assert 0.88 < found < 0.98


def test_the_bootstrap_of_bleu_covers() -> None:
    """The 993 sets stand for all sets, and samples of 100 for dev. Chance of a false alarm as above."""
    metric = dev_bleus("bart")[3]

    def measure(generator: np.random.Generator) -> Measure:
        rows = metric.rows[generator.integers(len(metric.rows), size=100)]
        return type(metric)("BLEU-4", rows, metric.combine, "").measure(None, QUICK)

    assert 0.88 < coverage(metric.value, 600, measure) < 0.985


def test_the_bootstrap_keeps_prompts_together() -> None:
    """Chance of a false alarm as above; without the prompts it covers less than half as often as it says."""
    names = np.repeat(np.arange(40), 10).tolist()

    def values(generator: np.random.Generator) -> np.ndarray:
        return (generator.normal(size=(40, 1)) + 0.3 * generator.normal(size=(40, 10))).ravel()

    assert 0.88 < coverage(0.0, 600, lambda g: mean("x", values(g)).measure(names, QUICK)) < 0.98
    assert coverage(0.0, 300, lambda g: mean("x", values(g)).measure(None, QUICK)) < 0.6


def test_resampling_sums_is_resampling_texts() -> None:
    metric = dev_bleus("unilm")[3]
    rows = metric.rows[:50]
    counts = draw_counts(np.random.default_rng(3), 50, 300)
    assert (counts.sum(axis=1) == 50).all()
    slow = [float(metric.combine(np.repeat(rows, count, axis=0).sum(axis=0))) for count in counts]
    fast = metric.combine(resample_sums(rows, Resampling(resamples=300, seed=3)))
    assert fast == pytest.approx(slow)


def test_the_same_seed_gives_the_same_interval_and_nothing_global_moves() -> None:
    before = repr(np.random.get_state())  # noqa: NPY002
    metric = mean("x", np.arange(50.0))
    assert metric.measure() == metric.measure()
    assert metric.measure(None, Resampling(seed=1)) != metric.measure()
    assert repr(np.random.get_state()) == before  # noqa: NPY002


def test_sums_by_prompt() -> None:
    rows = np.array([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]])
    assert sum_by_prompt(rows, ["b", "a", "b"]).tolist() == [[5, 50], [2, 20]]
    assert sum_by_prompt(rows, None) is rows
    with pytest.raises(InputError, match="expected a prompt for each of 3 texts; found 2 prompts"):
        sum_by_prompt(rows, ["a", "b"])


def test_nonsense_settings_are_refused() -> None:
    for wrong in ({"resamples": 10}, {"confidence": 1.0}, {"confidence": 95}):
        with pytest.raises(
            InputError, match="expected at least 100 resamples and a confidence between 0 and 1"
        ):
            Resampling(**wrong)


# --- pairs --------------------------------------------------------------------------------------------


def test_paired_bootstrap_finds_what_separate_intervals_hide() -> None:
    generator = np.random.default_rng(0)
    hard = generator.normal(0, 10, size=200)
    ours, theirs = mean("x", hard + generator.normal(1, 1, size=200)), mean("x", hard)
    found = compare(ours, theirs)
    assert found.p_value == pytest.approx(2 / 1001)  # the least that 1000 resamples can show
    assert found.low < found.difference < found.high
    assert found.low > 0
    assert ours.measure().low < theirs.measure().high
    swapped = compare(theirs, ours)
    assert (swapped.difference, swapped.low) == pytest.approx((-found.difference, -found.high))


def test_paired_bootstrap_of_bleu() -> None:
    found = compare(dev_bleus("unilm")[3], dev_bleus("bart")[3], dev()["conditions"])
    assert found.difference == pytest.approx(30.391 - 27.479, abs=0.01)
    assert 0 < found.low < 2.9 < found.high
    assert found.p_value < 0.01
    assert "paired, 95% percentile bootstrap" in found.method
    same = compare(dev_bleus("bart")[3], dev_bleus("bart")[3])
    assert (same.difference, same.p_value) == (0.0, 1.0)


def test_paired_bootstrap_keeps_its_level() -> None:
    """5 % of equal systems look different; above 9 % in 1,000 trials has a chance under 1e-6."""
    generator = np.random.default_rng(5)
    alarms = 0
    for _ in range(1000):
        shared = generator.normal(size=60)
        first, second = (mean("x", shared + generator.normal(size=60)) for _ in range(2))
        alarms += compare(first, second, None, QUICK).p_value < 0.05
    assert 0.02 < alarms / 1000 < 0.09


def test_only_like_is_compared_with_like() -> None:
    with pytest.raises(MismatchError) as raised:
        compare(mean("x", [1.0], method="a"), mean("x", [1.0], method="b"))
    assert str(raised.value) == (
        "expected the same metric of both systems, x (a); found x (b). Measure both with the same options."
    )
    with pytest.raises(InputError, match="found 1 texts of the first system and 2 texts of the second"):
        compare(mean("x", [1.0]), mean("x", [1.0, 2.0]))
    few = compare(mean("x", [1.0]), mean("x", [2.0]))
    assert (few.difference, few.p_value, few.low) == (-1.0, None, None)
    assert few.note == "n too small for a bootstrap interval: 1 of the 20 texts it needs"


@settings(deadline=None, derandomize=True, database=None)
@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_is_scipys_binomial_test(first: int, second: int) -> None:
    expected = stats.binomtest(first, first + second).pvalue if first + second else 1.0
    assert mcnemar_p_value(first, second) == pytest.approx(expected)


def test_mcnemar_of_many_disagreements() -> None:
    assert mcnemar_p_value(5200, 5000) == pytest.approx(stats.binomtest(5200, 10200).pvalue)
    assert mcnemar_p_value(3000, 0) == 0.0  # 2^−2999 is below every float


def test_shares_of_two_systems() -> None:
    ours = [True] * 30 + [False] * 10
    theirs = [False] * 12 + [True] * 20 + [False] * 8
    found = compare_shares("satisfied", ours, theirs)
    assert found.difference == pytest.approx(10 / 40)
    assert found.p_value == pytest.approx(stats.binomtest(12, 14).pvalue)
    assert found.method.startswith(
        "exact McNemar test, 12 prompts only the first satisfies, 2 only the second; interval: paired"
    )
    assert found.low < 0.25 < found.high
    repeated = compare_shares("satisfied", ours, theirs, [row // 2 for row in range(40)])
    assert (repeated.n, repeated.method) == (
        20,
        "paired, 95% percentile bootstrap, 1000 resamples, seed 0, over prompts",
    )
    assert str(found).startswith("satisfied +0.25 [+0.")


@settings(deadline=None, derandomize=True, database=None)
@given(st.lists(st.floats(-100, 100).filter(lambda x: abs(x) > 0.01), min_size=1, max_size=40, unique_by=abs))
def test_wilcoxon_without_ties_is_scipys_exact_test(differences: list[float]) -> None:
    rounded = np.unique(np.round(np.abs(differences), 9))
    if len(rounded) < len(differences):
        return
    p_value, how = wilcoxon_p_value(differences)
    assert how == "exact"
    assert p_value == pytest.approx(stats.wilcoxon(differences, method="exact").pvalue, abs=1e-12)


@settings(deadline=None, derandomize=True, database=None, max_examples=30)
@given(st.lists(st.sampled_from([-2, -1, 1, 2]), min_size=2, max_size=9))
def test_wilcoxon_with_ties_is_the_permutation_test(differences: list[int]) -> None:
    exact = stats.PermutationMethod(n_resamples=np.inf)
    expected = stats.wilcoxon(differences, method=exact).pvalue
    assert wilcoxon_p_value(differences)[0] == pytest.approx(expected, abs=1e-9)


def test_wilcoxon_of_many_is_scipys_normal_approximation() -> None:
    generator = np.random.default_rng(2)
    differences = generator.choice([-2, -1, 1, 2], size=300, p=[0.2, 0.25, 0.3, 0.25])
    p_value, how = wilcoxon_p_value(differences)
    assert how == "normal approximation"
    assert p_value == pytest.approx(stats.wilcoxon(differences, correction=False, method="asymptotic").pvalue)
    # Where the two ways meet they agree.
    assert wilcoxon_p_value(differences[:200])[0] == pytest.approx(
        stats.wilcoxon(differences[:200], correction=False, method="asymptotic").pvalue, abs=0.01
    )


def test_ratings_with_equal_pairs() -> None:
    ours, theirs = [3, 3, 2, 3, 2, 3, 1, 3, 3, 2], [2, 2, 2, 1, 1, 2, 2, 2, 2, 2]
    found = compare_ratings("overall", ours, theirs)
    moved = np.array(ours) - np.array(theirs)
    exact = stats.PermutationMethod(n_resamples=np.inf)
    assert found.p_value == pytest.approx(stats.wilcoxon(moved[moved != 0], method=exact).pvalue)
    assert found.method == "Wilcoxon signed-rank test, exact, 2 equal pairs left out"
    assert (found.difference, found.n, found.note) == (pytest.approx(0.7), 10, None)


def test_ratings_that_cannot_say_anything() -> None:
    assert compare_ratings("overall", [1, 2], [1, 2]).note == "no item was rated differently"
    assert compare_ratings("overall", [1, 2], [1, 2]).p_value is None
    few = compare_ratings("overall", [3] * 5, [1] * 5)
    assert few.p_value == pytest.approx(2 / 2**5)
    assert few.note == "n too small: 5 differing pairs can never reach p < 0.05"
    with pytest.raises(InputError, match="expected differences other than 0; found a 0"):
        wilcoxon_p_value([0.0, 1.0])


def test_holm() -> None:
    assert adjust_holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert adjust_holm([0.9, 0.8]) == [1.0, 1.0]
    assert adjust_holm([]) == []
