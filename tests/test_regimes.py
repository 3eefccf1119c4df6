"""Every way of drawing and weighting training samples leads to the same R: the exact one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from guide_quality import Quality, labelled_samples, measure
from nado.exact import TabularModel, exact_log_r, guided_model
from nado.guide import Guide, GuideConfig
from nado.prompts import Prompt
from nado.proposals import Proposal, guided_mixture, tempered
from nado.tabular_reader import TabularReader
from nado.training import TrainingConfig, train
from nado.training_data import TrainingData

CONFIG = TrainingConfig(
    steps=900, batch_size=4096, learning_rate=3e-3, ramp_steps=50, weight_decay=0.0, final_share=0.01
)
SAMPLES = 250_000


def oracle(conditions: list[str], texts: list[str]) -> np.ndarray:
    answers = [
        "a" in text if condition == "x" else len(text) == 2
        for condition, text in zip(conditions, texts, strict=True)
    ]
    return np.array(answers)


def base(prompts: list[str]) -> TabularModel:
    return TabularModel.random(prompts, vocabulary_size=4, length_limit=3, seed=5)


def half_trained(model: TabularModel) -> TabularModel:
    """q̂: p guided by an R that is right only roughly."""
    generator = torch.Generator().manual_seed(1)
    guides = {}
    for key in model.keys:
        log_r = exact_log_r(model, oracle, str(key), str(key)).exp().add(0.1).log()
        guides[(str(key), str(key))] = log_r + 0.5 * torch.randn(log_r.shape, generator=generator)
    return guided_model(model, guides)


def train_on(
    data: TrainingData, reader: TabularReader, *, warm_up: bool = False, config: TrainingConfig = CONFIG
) -> Guide:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        shape = GuideConfig.for_reader(reader, reads="tokens", size=64, layers=2, heads=4, matrix="own")
        guide = Guide(shape).attach(reader)
    data.merge_equal()
    if warm_up:
        train(
            guide, reader, data, TrainingConfig(steps=100, batch_size=4096, learning_rate=3e-3, warm_up=True)
        )
    train(guide, reader, data, config)
    return guide


def require_exact(found: Quality) -> None:
    assert found.log_r_error < 0.05
    assert found.leaked < 0.01
    assert found.total_variation < 0.02


def learn(proposal: Callable[[TabularModel], Proposal] | None = None, **choices: Any) -> Quality:
    model = base(["x", "y"])
    reader = TabularReader(model, ["x", "y"])
    samples = labelled_samples(model, oracle, SAMPLES, proposal=None if proposal is None else proposal(model))
    return measure(train_on(TrainingData.from_samples(samples, reader, **choices), reader), reader, oracle)


def test_plain() -> None:
    require_exact(learn())


@pytest.mark.slow
def test_consistency_in_logs() -> None:
    model = base(["x", "y"])
    reader = TabularReader(model, ["x", "y"])
    data = TrainingData.from_samples(labelled_samples(model, oracle, SAMPLES), reader)
    guide = train_on(data, reader, config=replace(CONFIG, log_consistency_weight=0.3))
    require_exact(measure(guide, reader, oracle))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["whole", "suffix"])
def test_tempered_with_weights(form: str) -> None:
    require_exact(learn(lambda model: tempered(1.5), weight_form=form))


@pytest.mark.slow
def test_tempered_without_weights_is_wrong() -> None:
    """The same check rejects samples whose weights are left out."""
    model = base(["x", "y"])
    reader = TabularReader(model, ["x", "y"])
    samples = labelled_samples(model, oracle, SAMPLES, proposal=tempered(1.5))
    at = samples.table.column_names.index("log_proposal")
    unweighted = samples.table.set_column(at, "log_proposal", samples.table["log_p"])
    data = TrainingData.from_samples(type(samples)(unweighted), reader)
    with pytest.raises(AssertionError):
        require_exact(measure(train_on(data, reader), reader, oracle))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["whole", "suffix"])
def test_importance_sampling_from_a_half_trained_guide(form: str) -> None:
    require_exact(learn(lambda model: guided_mixture(half_trained(model)), weight_form=form))


@pytest.mark.slow
def test_prefixes_from_a_guide_completed_by_p() -> None:
    require_exact(learn(lambda model: guided_mixture(half_trained(model), complete_from_p=True)))


@pytest.mark.slow
def test_balanced_labels() -> None:
    require_exact(learn(balanced=True))


@pytest.mark.slow
@pytest.mark.parametrize("warm_up", [False, True])
def test_a_base_that_never_sees_the_condition(warm_up: bool) -> None:
    model = base([""])
    reader = TabularReader(model, ["x", "y"])
    pairs = [Prompt("", "x"), Prompt("", "y")]
    data = TrainingData.from_samples(labelled_samples(model, oracle, SAMPLES, pairs=pairs), reader)
    require_exact(measure(train_on(data, reader, warm_up=warm_up), reader, oracle, pairs))
