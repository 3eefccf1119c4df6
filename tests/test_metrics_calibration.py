"""Calibration tables, divergences and weights: against cases by hand and against exact enumeration."""

import math

import numpy as np
import pytest
import torch

from frequencies import mean_p_value
from nado.errors import InputError
from nado.exact import (
    TabularModel,
    exact_log_q,
    exact_log_r,
    exact_log_r_start,
    guided_model,
    kl_divergence,
    satisfied_outcomes,
)
from nado.metrics import (
    Resampling,
    calibration_by,
    effective_samples,
    kl_from_base,
    kl_to_target,
    largest_ratio,
    mean_by_position,
    rate_from_weights,
    reliability,
)
from strategies import RandomOracle

# --- reliability --------------------------------------------------------------------------------------


def test_reliability_by_hand() -> None:
    predicted = [0.1, 0.1, 0.3, 0.9, 1.0, 0.5]
    outcomes = [False, True, False, True, True, True]
    found = reliability(predicted, outcomes, bins=2)
    assert [(each.lower, each.upper, each.n) for each in found.bins] == [(0.0, 0.5, 3), (0.5, 1.0, 3)]
    assert [each.predicted for each in found.bins] == pytest.approx([0.5 / 3, 2.4 / 3])
    assert [each.rate for each in found.bins] == pytest.approx([1 / 3, 1.0])
    # |0.5 − 1| and |2.4 − 3| over six rows.
    assert found.ece.value == pytest.approx((0.5 + 0.6) / 6)
    assert found.brier.value == pytest.approx((0.01 + 0.81 + 0.09 + 0.01 + 0.0 + 0.25) / 6)
    assert (found.ece.low, found.ece.note) == (
        None,
        "n too small for a bootstrap interval: 6 of the 20 texts it needs",
    )
    assert found.describe()["bins"][0]["name"] == "0–0.5"


def test_bins_of_equal_mass_follow_tiny_predictions() -> None:
    predicted = np.geomspace(1e-6, 0.5, 100)
    outcomes = np.arange(100) % 3 == 0
    assert [each.n for each in reliability(predicted, outcomes, bins=4, spacing="mass").bins] == [25] * 4
    assert len(reliability(predicted, outcomes, bins=10).bins) == 6  # equal widths: empty bins are left out
    alike = reliability([0.2] * 30, [True] * 6 + [False] * 24, bins=5, spacing="mass")
    assert [(each.n, each.rate) for each in alike.bins] == [(30, 0.2)]
    assert alike.ece.value == pytest.approx(0.0, abs=1e-12)


def test_a_calibrated_guide_has_a_small_error_and_a_wrong_one_has_not() -> None:
    """By exact R of a tabular model against texts of p. Chance of a false alarm: under 1e-4 a bin."""
    model = TabularModel.random(vocabulary_size=4, length_limit=4, seed=3)
    oracle = RandomOracle(1, 0.4)
    outcomes = model.outcomes("")
    satisfied = satisfied_outcomes(model, oracle, "").numpy()
    generator = np.random.default_rng(0)
    drawn = generator.choice(len(satisfied), size=4000, p=outcomes.log_p.exp().numpy())
    # R after one token: row 0 of the exact table.
    after_one = exact_log_r(model, oracle, "")[0].exp().numpy()
    predicted = after_one[outcomes.tokens[drawn, 0].numpy()]
    found = reliability(predicted, satisfied[drawn])
    assert found.ece.value < 0.03
    for each in found.bins:
        error = math.sqrt(each.predicted * (1 - each.predicted) / each.n)
        assert abs(each.predicted - each.rate) <= 4 * error + 1e-12
    wrong = reliability(np.sqrt(predicted), satisfied[drawn])
    assert wrong.ece.value > 0.1
    assert wrong.brier.value > found.brier.value
    assert wrong.ece.low > 0.1
    assert largest_ratio(wrong.bins).value > 1.3 > largest_ratio(found.bins).value


def test_positions_of_one_text_count_as_one_text() -> None:
    texts = [row // 10 for row in range(400)]
    outcomes = [row // 10 % 2 == 0 for row in range(400)]
    apart = reliability([0.5] * 400, outcomes)
    together = reliability([0.5] * 400, outcomes, texts)
    assert together.brier.value == apart.brier.value
    width = [found.bins[0].high - found.bins[0].low for found in (apart, together)]
    assert width[1] > 2.5 * width[0]  # √10 in the limit


def test_calibration_by_position_and_by_prompt() -> None:
    table = calibration_by([2, 1, 2, 10], [0.2, 0.4, 0.6, 1.0], [False, True, True, True])
    assert [(each.name, each.n, each.rate) for each in table] == [
        ("1", 1, 1.0),
        ("2", 2, 0.5),
        ("10", 1, 1.0),
    ]
    assert table[1].predicted == pytest.approx(0.4)
    prompts = calibration_by(["z", "a", "z"], [0.5, 0.1, 0.5], [True, False, False])
    assert [(each.name, each.predicted, each.rate) for each in prompts] == [("z", 0.5, 0.5), ("a", 0.1, 0.0)]
    assert 0 < prompts[0].low < 0.5 < prompts[0].high < 1
    with pytest.raises(InputError, match="found 1 keys and 2 predictions"):
        calibration_by([1], [0.5, 0.5], [True, False])


def test_the_largest_ratio_is_labelled_an_estimate() -> None:
    table = reliability(
        [0.05] * 40 + [0.3] * 40 + [0.7] * 40 + [0.95] * 5,
        [False] * 40 + [True] * 6 + [False] * 34 + [True] * 35 + [False] * 5 + [True] * 5,
    ).bins
    found = largest_ratio(table)
    assert found.value == pytest.approx(0.3 / 0.15)
    assert found.n == 80
    assert found.note == (
        "an estimate over bins, not a bound; 1 bins without a success or prediction left out; "
        "1 bins with fewer than 30 rows left out"
    )
    assert largest_ratio(table[:1]).value is None
    under = reliability([0.1] * 40, [True] * 20 + [False] * 20).bins
    assert largest_ratio(under).value == pytest.approx(5.0)


def test_means_by_position() -> None:
    found = mean_by_position("residual", [[1.0, 2.0, math.nan], [3.0, math.nan, math.nan]], [2, 1])
    assert [(each.name, each.value, each.n) for each in found] == [
        ("residual at 1", 2.0, 2),
        ("residual at 2", 2.0, 1),
    ]
    with pytest.raises(InputError, match=r"found shapes \(2,\) and \(1,\)"):
        mean_by_position("residual", [1.0, 2.0], [1])
    with pytest.raises(InputError, match="expected finite numbers for residual at 1; found nan"):
        mean_by_position("residual", [[math.nan]], [1])


def test_broken_calibration_input() -> None:
    with pytest.raises(InputError) as raised:
        reliability([0.5, -0.7], [True, False])
    assert str(raised.value) == (
        "expected predicted probabilities between 0 and 1; found -0.7. "
        "Give R itself: the exponential of log R."
    )
    with pytest.raises(InputError, match="found nan in row 0"):
        reliability([math.nan], [True])
    with pytest.raises(InputError, match="found 2 predictions and 1 outcomes"):
        reliability([0.5, 0.5], [True])
    with pytest.raises(InputError, match="expected at least one text for calibration; found none"):
        reliability([], [])
    with pytest.raises(InputError, match='at least 1 bin, of equal "width" or "mass"; found 0 of \'width\''):
        reliability([0.5], [True], bins=0)


# --- divergences --------------------------------------------------------------------------------------


def guided_texts(draws: int, seed: int):
    """Texts of an imperfect q with log q, log p and log w, and the exact values they estimate."""
    model = TabularModel.random(vocabulary_size=4, length_limit=4, seed=1)
    oracle = RandomOracle(2, 0.5)
    log_r = exact_log_r(model, oracle, "").clamp(min=-3.0)
    noise = torch.Generator().manual_seed(0)
    q = guided_model(
        model, {("", ""): (log_r + 0.4 * torch.randn(log_r.shape, generator=noise)).clamp(max=0)}
    )
    log_q, log_p = q.outcomes("", "").log_p, model.outcomes("").log_p
    satisfied = satisfied_outcomes(model, oracle, "")
    log_w = torch.where(satisfied, log_p - log_q, -math.inf)
    exact = {
        "base": float(kl_divergence(log_q, log_p)),
        "target": float(kl_divergence(exact_log_q(model, oracle, ""), log_q)),
        "rate": float(exact_log_r_start(model, oracle, "").exp()),
    }
    rows = np.random.default_rng(seed).choice(len(log_q), size=draws, p=log_q.exp().numpy())
    return log_q.numpy()[rows], log_p.numpy()[rows], log_w.numpy()[rows], exact


def test_divergences_are_those_of_enumeration() -> None:
    """Chance of a false alarm: 1e-6 for the means, which are tested; the others are held to loose bounds."""
    log_q, log_p, log_w, exact = guided_texts(20_000, seed=0)
    assert mean_p_value(log_q - log_p, exact["base"]) > 1e-6
    assert mean_p_value(np.exp(log_w), exact["rate"]) > 1e-6
    base, target, rate = kl_from_base(log_q, log_p), kl_to_target(log_w), rate_from_weights(log_w)
    assert base.value == pytest.approx(exact["base"], abs=0.03)
    assert target.value == pytest.approx(exact["target"], abs=0.02)
    assert rate.value == pytest.approx(exact["rate"], abs=0.02)
    for found, name in ((base, "base"), (target, "target"), (rate, "rate")):
        assert found.low < found.value < found.high
        assert found.high - found.low < 0.1, name
        assert found.note is None
    # The check can fail: leaving out the failed texts is KL of another distribution.
    assert abs(kl_to_target(log_w[np.isfinite(log_w)]).value - exact["target"]) > 0.05


def test_the_interval_of_kl_to_the_target_covers() -> None:
    """True coverage is about 0.94: below 0.88 in 300 trials has a chance under 1e-4."""
    exact = guided_texts(1, seed=0)[3]["target"]
    hits = 0
    for seed in range(300):
        found = kl_to_target(guided_texts(400, seed=seed)[2], None, Resampling(resamples=200))
        hits += found.low <= exact <= found.high
    assert hits / 300 > 0.88


def test_kl_is_taken_prompt_by_prompt() -> None:
    one, two = np.log([1.0, 3.0] * 16), np.log([5.0] * 32)
    known = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    both = kl_to_target(np.concatenate([one + 50, two - 7]), ["one"] * 32 + ["two"] * 32)
    assert both.value == pytest.approx(known / 2)
    assert (both.n, both.prompts) == (64, 2)
    assert kl_to_target(one).value == pytest.approx(known)
    # A text that fails has weight 0, and still counts as one that q wrote.
    half = np.tile([-np.inf, 2.0], 16)
    failed = kl_to_target(np.concatenate([half, two]), ["one"] * 32 + ["two"] * 32)
    assert failed.value == pytest.approx(math.log(2) / 2)
    assert kl_to_target(two).value == pytest.approx(0.0, abs=1e-12)


def test_small_ess_is_said_beside_the_number() -> None:
    log_w = np.full(200, -30.0)
    log_w[0] = 0.0
    found = kl_to_target(log_w)
    assert found.value == pytest.approx(math.log(200), abs=1e-6)
    assert found.note == "ESS is 1.0 of 200: this reads low, and cannot exceed log n = 5.30"
    sizes = effective_samples(log_w)
    assert sizes.value == pytest.approx(1.0)
    assert sizes.note == "ESS is small: 1.0 of 200 (0.50%)"
    assert "ESS is 1.0 of 200: the interval is too narrow" in rate_from_weights(log_w).note
    several = kl_to_target(np.concatenate([log_w] * 2), [row // 200 for row in range(400)])
    assert "ESS is small at 2 of 2 prompts, down to 1.0: this reads low" in several.note


def test_prompts_that_never_satisfied_are_counted() -> None:
    log_w = np.concatenate([np.zeros(40), np.full(40, -np.inf), np.zeros(5)])
    prompts = ["good"] * 40 + ["bad"] * 40 + ["few"] * 5
    found = kl_to_target(log_w, prompts)
    assert (found.value, found.n) == (pytest.approx(0.0, abs=1e-12), 40)
    assert "2 of 3 prompts left out: fewer than 32 texts, or none of positive weight" in found.note
    sizes = effective_samples(log_w, prompts)
    assert sizes.value == pytest.approx(45)
    assert sizes.note == "1 of 3 prompts have no text of positive weight"
    nothing = kl_to_target(log_w[40:], prompts[40:])
    assert (nothing.value, nothing.note[:12]) == (None, "n too small:")


def test_broken_weights_are_refused() -> None:
    with pytest.raises(InputError, match=r"found 1 of 2 that are nan or \+inf"):
        kl_to_target([0.0, math.nan])
    with pytest.raises(InputError, match="expected one log weight for each of at least one text"):
        effective_samples([])
    with pytest.raises(InputError, match="found log w = 800"):
        rate_from_weights([800.0])
    with pytest.raises(
        InputError, match=r"expected finite numbers for KL\(q‖p\): log p; found -inf in row 1"
    ):
        kl_from_base([-1.0, -1.0], [-1.0, -math.inf])
    with pytest.raises(InputError, match="found 1 values of log q and 2 values of log p"):
        kl_from_base([-1.0], [-1.0, -2.0])
