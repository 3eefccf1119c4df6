"""Recalibration: the fit against scipy's, its edges, and the table that shows whether R is what it says."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from guide_quality import labelled_samples
from nado.calibration import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    Calibration,
    calibrate,
    calibration_table,
    fit_calibration,
    predict,
    recalibrate,
)
from nado.decomposition import expected_log_r, mend_log_odds
from nado.errors import InputError
from nado.exact import TabularModel, exact_log_r
from nado.guide import Conditions, Guide, GuideConfig
from nado.proposals import tempered
from nado.samples import Samples
from nado.study.guides import calibrate_guide
from nado.tabular_reader import TabularReader
from nado.training import Objective, TrainingConfig, evaluate
from nado.training_data import TrainingData


def has_a(conditions: list[str], texts: list[str]) -> np.ndarray:
    return np.array(
        [(condition == "x") == ("a" in text) for condition, text in zip(conditions, texts, strict=True)]
    )


@pytest.fixture(scope="module")
def tabular() -> tuple[TabularReader, Samples]:
    model = TabularModel.random(["x", "y"], vocabulary_size=4, length_limit=3, seed=5)
    return TabularReader(model, ["x", "y"]), labelled_samples(model, has_a, 2000)


def random_objective(reader: TabularReader, **choices: Any) -> Objective:
    """A guide whose R is as wrong as random weights make it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        guide = Guide(
            GuideConfig.for_reader(reader, reads="tokens", size=16, layers=1, heads=2, matrix="own")
        )
        torch.nn.init.normal_(guide.head.vector.weight)
    return Objective(guide.attach(reader).eval(), reader, TrainingConfig(**choices))


def drawn(
    count: int, scale: float, offset: float, seed: int = 0, spread: float = 2.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-odds, and outcomes that happen at σ(scale·log-odds + offset)."""
    generator = torch.Generator().manual_seed(seed)
    log_odds = spread * torch.randn(count, generator=generator, dtype=torch.float64)
    chance = torch.sigmoid(scale * log_odds + offset)
    return log_odds, torch.rand(count, generator=generator, dtype=torch.float64) < chance


# --- the fit ------------------------------------------------------------------------------------------


def test_the_fit_finds_what_was_put_in() -> None:
    """40,000 outcomes: the errors of scale and offset are about 0.02, that of the sure scale 0.04."""
    log_odds, happened = drawn(40_000, 0.5, -0.7, spread=3.0)
    found = fit_calibration(log_odds, happened)
    assert found.scale == pytest.approx(0.5, abs=0.08)
    assert found.sure_scale == pytest.approx(0.5, abs=0.2)
    assert found.offset == pytest.approx(-0.7, abs=0.08)
    assert found.cross_entropy_after < found.cross_entropy_before
    assert found.calibration_error_after < 0.02 < found.calibration_error_before
    assert found.predictions == 40_000


@pytest.mark.parametrize(("scale", "offset"), [(0.3, 0.0), (1.0, 0.0), (4.0, -3.0), (0.05, 2.0)])
def test_the_fit_is_the_minimum(scale: float, offset: float) -> None:
    log_odds, happened = drawn(500, scale, offset, seed=3)
    weights = torch.rand(500, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    z, y, w = log_odds.numpy(), happened.numpy(), weights.numpy() / weights.sum().item()

    def cross_entropy(at: np.ndarray) -> float:
        middle = 3 * np.tanh(z / 3)
        chosen = at[0] * middle + at[1] + at[2] * (z - middle)
        return float((w * (np.logaddexp(0, chosen) - y * chosen)).sum())

    bounds = [(SMALLEST_SCALE, LARGEST_SCALE), (None, None), (SMALLEST_SCALE, 1.0)]
    wanted = minimize(cross_entropy, [1.0, 0.0, 1.0], method="L-BFGS-B", bounds=bounds, tol=1e-14)
    found = fit_calibration(log_odds, happened, weights)
    assert [found.scale, found.offset, found.sure_scale] == pytest.approx(list(wanted.x), abs=2e-3)
    assert found.cross_entropy_after == pytest.approx(wanted.fun, abs=1e-7)
    assert found.cross_entropy_before == pytest.approx(cross_entropy(np.array([1.0, 0.0, 1.0])), abs=1e-9)


@pytest.mark.parametrize("scale", [SMALLEST_SCALE, 0.6, 1.0, 3.0])
@pytest.mark.parametrize("sure_scale", [SMALLEST_SCALE, 1.0])
def test_mended_log_odds_keep_their_order(scale: float, sure_scale: float) -> None:
    log_odds = torch.arange(-200, 201, dtype=torch.float64) / 10
    mended = mend_log_odds(log_odds, scale, 0.0, sure_scale)
    assert (mended.diff() > 0).all()
    assert mended[200] == 0  # of a half
    assert mended[201] / log_odds[201] == pytest.approx(scale, abs=0.01)
    assert mended[-1] - mended[-2] == pytest.approx(0.1 * sure_scale, abs=1e-4)
    assert mend_log_odds(torch.tensor(-torch.inf), scale, 1.0, sure_scale) == -torch.inf


def test_a_guide_too_sure_in_the_middle_stays_sure_at_the_ends() -> None:
    """Half the predictions are overconfident by a factor of two, half are right and sure."""
    middle, happened = drawn(4_000, 0.5, 0.0, seed=5)
    sure = torch.full((4_000,), -8.0, dtype=torch.float64)  # one in 3,000: it did not happen
    found = fit_calibration(
        torch.cat([middle, sure]), torch.cat([happened, torch.zeros(4_000, dtype=torch.bool)])
    )
    assert found.scale < 0.7
    assert found.sure_scale > 0.9
    assert mend_log_odds(torch.tensor(-8.0), found.scale, found.offset, found.sure_scale) < -6


def test_a_weight_is_a_repetition() -> None:
    log_odds, happened = drawn(100, 0.5, 0.5)
    times = torch.arange(100) % 4
    weighted = fit_calibration(log_odds, happened, times)
    repeated = fit_calibration(log_odds.repeat_interleave(times), happened.repeat_interleave(times))
    assert weighted.scale == pytest.approx(repeated.scale, abs=1e-8)
    assert weighted.offset == pytest.approx(repeated.offset, abs=1e-8)


@pytest.mark.parametrize(("turned", "edge"), [(1, LARGEST_SCALE), (-1, SMALLEST_SCALE)])
def test_a_runaway_scale_stops_at_the_edge(turned: int, edge: float) -> None:
    """Labels that R separates perfectly want a = ∞; an R that says the opposite wants a < 0."""
    log_odds = torch.tensor([-2.0, -1.0, 1.0, 2.0]) * turned
    found = fit_calibration(log_odds, torch.tensor([False, False, True, True]))
    assert found.scale == edge
    assert found.offset == pytest.approx(0, abs=1e-6)
    assert found.cross_entropy_after < found.cross_entropy_before


def test_a_constant_r_is_only_shifted() -> None:
    found = fit_calibration(torch.full((4,), 3.0), torch.tensor([True, False, False, False]))
    assert found.scale == 1
    assert torch.sigmoid(torch.tensor(3.0 + found.offset)).item() == pytest.approx(0.25)


def test_certainties_take_no_part() -> None:
    log_odds, happened = drawn(200, 0.5, 0.5)
    sure = torch.cat([log_odds, torch.tensor([-torch.inf, torch.inf], dtype=torch.float64)])
    assert fit_calibration(sure, torch.cat([happened, torch.tensor([False, True])])) == fit_calibration(
        log_odds, happened
    )


@pytest.mark.parametrize(("label", "kind"), [(False, "satisfied"), (True, "unsatisfied")])
def test_one_kind_of_label_cannot_be_fitted(label: bool, kind: str) -> None:
    with pytest.raises(InputError) as caught:
        fit_calibration(torch.zeros(5), torch.full((5,), label))
    assert str(caught.value) == (
        f"expected held-out texts of both kinds to calibrate on; found no {kind} one among the 5 "
        "predictions. Hold out more prompts."
    )


# --- on a guide ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("merged", [False, True])
def test_a_guide_is_recalibrated(tabular: tuple[TabularReader, Samples], merged: bool) -> None:
    reader, samples = tabular
    objective = random_objective(reader)
    data = TrainingData.from_samples(samples, reader)
    if merged:
        data.merge_equal()
    found = calibrate(objective, data)
    assert found.cross_entropy_after < 0.9 * found.cross_entropy_before
    assert found.calibration_error_after < 0.7 * found.calibration_error_before
    recalibrate(objective.guide, found)
    mended = predict(objective, data)
    written = mended.positions > 0
    raw = predict(objective, data, calibrated=False).log_odds[written]
    torch.testing.assert_close(
        mended.log_odds[written], mend_log_odds(raw, *objective.guide.config.calibration)
    )
    assert found.predictions == raw.isfinite().sum()  # R(x), a sum of entries, is not fitted
    assert calibrate(objective, data) == found  # always of the R that was trained, never of a mended one
    saved = GuideConfig.from_dict(json.loads(objective.guide.config.to_json_string(use_diff=False)))
    assert tuple(saved.calibration) == (found.scale, found.offset, found.sure_scale)


def test_a_guide_that_tells_nothing_apart_is_said_to(
    tabular: tuple[TabularReader, Samples], caplog: pytest.LogCaptureFixture
) -> None:
    reader, samples = tabular
    data = TrainingData.from_samples(samples, reader)
    warned = []
    for _ in range(2):  # if the labels agree with its R, the opposite ones do not
        objective = random_objective(reader)
        caplog.clear()
        calibrate_guide(objective.guide, reader, TrainingConfig(), data)
        warned.append("R is nearly the same for all texts" in caplog.text)
        data.satisfied = 1 - data.satisfied if data.satisfied.dtype != torch.bool else ~data.satisfied
    assert sorted(warned) == [False, True]


def test_r_of_the_prompt_is_the_sum_of_mended_entries(tabular: tuple[TabularReader, Samples]) -> None:
    reader, samples = tabular
    objective = random_objective(reader)
    recalibrate(objective.guide, Calibration(0.5, -1.0, 0.8, 0, 0, 0, 0, 0))
    found = predict(objective, TrainingData.from_samples(samples, reader))
    prompts = samples.strings("prompt")
    for prompt in ("x", "y"):
        nothing = torch.zeros(1, dtype=torch.long)
        features = objective.guide.features(
            torch.zeros(1, 1, 1),
            torch.full((1, 1), -1),
            torch.full((1, 1), reader.model.length_limit),
            Conditions.encode(reader, [prompt]),
        )[:, 0]
        log_p = reader.model.table(prompt)[:1].float()
        log_r = objective.guide.log_r(objective.guide.scores(features), log_p, nothing)
        here = (found.positions == 0) & torch.tensor([prompts[row] == prompt for row in found.texts])
        wanted = expected_log_r(log_p, log_r).exp().double()
        torch.testing.assert_close(
            found.log_odds[here].sigmoid(), wanted.expand(int(here.sum())), rtol=1e-5, atol=0
        )


def test_micro_batches_do_not_change_predictions(tabular: tuple[TabularReader, Samples]) -> None:
    reader, samples = tabular
    data = TrainingData.from_samples(samples, reader)
    whole, small = (predict(random_objective(reader, micro_batch=size), data) for size in (None, 300))
    torch.testing.assert_close(small.log_odds, whole.log_odds)
    assert torch.equal(small.texts, whole.texts)


# --- the table ----------------------------------------------------------------------------------------


def test_the_table_adds_up(tabular: tuple[TabularReader, Samples]) -> None:
    reader, samples = tabular
    objective = random_objective(reader)
    data = TrainingData.from_samples(samples, reader)
    table = json.loads(json.dumps(calibration_table(objective, data)))
    prefixes = int((data.lengths + 1).sum())
    assert table["texts"] == 4000
    assert sum(row["prefixes"] for row in table["bins"]) == prefixes
    assert [(row["from"], row["to"]) for row in table["positions"]] == [(0, 0), (1, 1), (2, 3)]
    assert sum(row["prefixes"] for row in table["positions"]) == prefixes
    assert table["positions"][0]["texts"] == 4000
    assert table["calibration_error"] == pytest.approx(
        evaluate(objective, data)["calibration_error"], abs=1e-6
    )
    gap = sum(row["prefixes"] * abs(row["predicted"] - row["observed"]) for row in table["bins"])
    assert gap / prefixes == pytest.approx(table["calibration_error"], abs=1e-6)
    satisfied, prompts = samples.array("satisfied"), np.array(samples.strings("prompt"))
    for row in table["prompts"]:
        assert row["texts"] == 2000
        assert row["rate"] == pytest.approx(satisfied[prompts == row["prompt"]].mean())
        assert row["condition"] == row["prompt"]
    errors = [abs(row["r_start"] - row["rate"]) for row in table["prompts"]]
    assert table["start_error"] == pytest.approx(np.mean(errors))
    assert table["prompts_left_out"] == 0
    short = calibration_table(objective, data, prompts=1)
    assert (len(short["prompts"]), short["prompts_left_out"]) == (1, 1)


def test_the_table_is_about_p_however_texts_were_drawn(tabular: tuple[TabularReader, Samples]) -> None:
    """Tempered, balanced and merged samples show p's own rates: 0.04 is over four standard errors."""
    reader, _ = tabular
    samples = labelled_samples(reader.model, has_a, 4000, proposal=tempered(1.5))
    data = TrainingData.from_samples(samples, reader, balanced=True, weight_form="whole")
    data.merge_equal()
    table = calibration_table(random_objective(reader), data)
    for row in table["prompts"]:
        log_r = exact_log_r(reader.model, has_a, row["prompt"], row["prompt"])[0]
        exact = expected_log_r(reader.model.table(row["prompt"])[0], log_r).exp()
        assert row["texts"] == 4000
        assert row["rate"] == pytest.approx(float(exact), abs=0.04)
    unweighted = dataclasses.replace(data, weights=data.multiplicity[:, None].expand_as(data.weights))
    wrong = calibration_table(random_objective(reader), unweighted)
    assert any(
        abs(mine["rate"] - theirs["rate"]) > 0.04
        for mine, theirs in zip(wrong["prompts"], table["prompts"], strict=True)
    )


def test_a_guide_saved_with_one_scale_means_the_same_as_ever() -> None:
    config = GuideConfig(vocabulary_size=5, calibration=(0.7, -0.2))
    assert config.calibration == (0.7, -0.2, 0.7)
    log_odds = torch.tensor([-9.0, -1.0, 0.0, 4.0])
    torch.testing.assert_close(mend_log_odds(log_odds, *config.calibration), 0.7 * log_odds - 0.2)
