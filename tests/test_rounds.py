"""Training in rounds: a rare oracle is learned with samples of which plain training makes nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from guide_quality import Quality, measure
from nado.errors import InputError, MismatchError
from nado.exact import TabularModel, exact_log_r_start, prefix_count
from nado.guide import Guide, GuideConfig
from nado.oracles.partly import Partly
from nado.oracles.protocol import BoolArray, Oracle
from nado.prompts import Prompt
from nado.rounds import RoundsConfig, RoundSummary, curriculum, train_in_rounds
from nado.tabular_reader import TabularReader
from nado.training import TrainingConfig

V, L = 8, 5
GATE, INNER = 1 / 250, 0.25  # p writes "a" first, and then a text that is satisfied: R(x) = 1e-3
ROUNDS = (4000, 1000, 4000)  # samples; plain training gets as many
PROMPTS = [Prompt("x", "x")]


@dataclass(frozen=True)
class OneOf(Oracle):
    """Satisfied by the texts of a list."""

    texts: frozenset[str]

    def judge(self, conditions: Sequence[str], texts: Sequence[str]) -> BoolArray:
        return np.array([text in self.texts for text in texts], dtype=bool)


def gated_model() -> TabularModel:
    """Behind a first "a", which is rare, 147 texts are equally likely; other texts end at once."""
    weights = torch.zeros(prefix_count(V, L), V, dtype=torch.float64)
    weights[:, -1] = 1  # what is not said below ends
    weights[0] = torch.tensor([GATE, *[(1 - GATE) / (V - 2)] * (V - 2), 0])

    def child(prefix: int, letter: int) -> int:
        return (V - 1) * prefix + 1 + letter

    letters = range(V - 1)
    behind = child(0, 0)
    weights[behind] = torch.tensor([1.0] * (V - 1) + [0])
    for second in (child(behind, letter) for letter in letters):
        weights[second] = torch.tensor([1.0] * (V - 1) + [0])
        for third in (child(second, letter) for letter in letters):
            weights[third] = torch.tensor([1.0, 1.0] + [0] * (V - 3) + [1])  # a letter more, of two, or none
    return TabularModel({"x": (weights / weights.sum(-1, keepdim=True)).log()}, length_limit=L)


def rare_oracle(model: TabularModel, seed: int) -> OneOf:
    """Texts behind the gate, chosen at random until they have 0.3 of its mass: nothing to generalise from."""
    outcomes = model.outcomes("x")
    p = outcomes.log_p.exp()
    behind = [at for at, text in enumerate(outcomes.texts) if text[:1] == "a" and p[at] > 0]
    chosen: list[str] = []
    mass = 0.0
    for at in np.random.default_rng(seed).permutation(behind).tolist():
        if mass < GATE * INNER:
            chosen.append(outcomes.texts[at])
            mass += float(p[at])
    return OneOf(frozenset(chosen))


def learn(seed: int, samples: tuple[int, ...], steps: int, folder: Path) -> Quality:
    model = gated_model()
    oracle = rare_oracle(model, seed)
    reader = TabularReader(model, ["x"], one_hot=True)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        guide = Guide(GuideConfig.for_reader(reader, reads="light", size=64, matrix="own")).attach(reader)
    train_in_rounds(
        guide,
        reader,
        oracle,
        PROMPTS,
        folder,
        RoundsConfig(samples=samples, complete_from_p=True, mean_prefix=2.0, merge=True, seed=seed),
        TrainingConfig(
            steps=steps,
            batch_size=4096,
            learning_rate=2e-2,
            weight_decay=0.0,
            consistency_weight=3.0,  # what is known exactly at the end of a text reaches its beginning
            clip=20.0,
            save_every=0,
        ),
    )
    return measure(guide, reader, oracle)


def learn_in_rounds(seed: int, folder: Path) -> float:
    return learn(seed, ROUNDS, 1000, folder / "rounds").total_variation


def learn_plainly(seed: int, folder: Path) -> float:
    return learn(seed, (sum(ROUNDS),), 400, folder / "plain").total_variation


def test_a_rare_oracle_is_one_in_a_thousand() -> None:
    model = gated_model()
    for seed in range(10):
        log_r = exact_log_r_start(model, rare_oracle(model, seed), "x")
        assert float(log_r.exp()) == pytest.approx(1e-3, rel=0.05)


def test_rounds_learn_what_as_many_samples_of_p_do_not_teach(tmp_path: Path) -> None:
    assert learn_in_rounds(5, tmp_path) < 0.05
    assert learn_plainly(5, tmp_path) > 0.5


@pytest.mark.slow
def test_rounds_learn_it_with_nine_seeds_of_ten(tmp_path: Path) -> None:
    found = [
        (learn_in_rounds(seed, tmp_path / f"{seed}"), learn_plainly(seed, tmp_path / f"{seed}"))
        for seed in range(10)
    ]
    assert sum(rounds < 0.05 for rounds, _ in found) >= 9, found
    assert all(plain > 0.5 for _, plain in found), found


# --- the run ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Letters(Oracle):
    """Both letters of the condition, as two parts."""

    cheap = True

    def judge(self, conditions: Sequence[str], texts: Sequence[str]) -> BoolArray:
        return np.array([all(part) for part in self.judge_parts(conditions, texts)], dtype=bool)

    def judge_parts(self, conditions: Sequence[str], texts: Sequence[str]) -> list[BoolArray]:
        pairs = zip(conditions, texts, strict=True)
        return [np.array([letter in text for letter in "ab"]) for _, text in pairs]

    def part_names(self, condition: str) -> list[str]:
        return ["a", "b"]


SHORT = TrainingConfig(steps=12, batch_size=64, learning_rate=1e-2, save_every=5)
CONFIG = RoundsConfig(samples=(60, 30), seed=1)


def small_run(
    folder: Path, config: RoundsConfig = CONFIG, **choices: Any
) -> tuple[Guide, list[RoundSummary]]:
    model = TabularModel.random(["x", "y"], vocabulary_size=4, length_limit=4, seed=5)
    reader = TabularReader(model, ["x", "y", "a", "b"])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        guide = Guide(
            GuideConfig.for_reader(
                reader,
                reads="tokens",
                size=16,
                layers=1,
                heads=2,
                matrix="own",
                progress_bits=2,
                named_parts=True,
            )
        ).attach(reader)
    prompts = [Prompt("x", "x"), Prompt("y", "y")]
    found = train_in_rounds(guide, reader, Letters(), prompts, folder, config, SHORT, **choices)
    return guide, found


def test_a_run_says_what_each_round_drew_and_learned(tmp_path: Path) -> None:
    _, (first, second) = small_run(tmp_path)
    assert (first.number, first.proposal, first.drawn, first.effective_share) == (1, "p", 120, 1.0)
    assert second.drawn == 60
    assert second.proposal.startswith("0.9·guided")
    assert 0 < second.effective_share <= 1
    assert second.training.texts == 180  # what the first round drew is kept
    assert second.describe()["training"]["steps"] == SHORT.steps


def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    class StopError(Exception):
        pass

    def interrupt(summary: RoundSummary) -> None:
        raise StopError

    whole, _ = small_run(tmp_path / "whole")
    with pytest.raises(StopError):
        small_run(tmp_path / "parts", on_round=interrupt)
    resumed, _ = small_run(tmp_path / "parts")
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_a_folder_trained_without_a_warm_up_is_not_taken_for_one_with(tmp_path: Path) -> None:
    small_run(tmp_path)
    with pytest.raises(MismatchError, match="another guide or config"):
        small_run(tmp_path, replace(CONFIG, warm_up_steps=4))


def test_a_curriculum_asks_for_more_parts_round_by_round(tmp_path: Path) -> None:
    stages = curriculum(Letters(), 2)
    assert [stage.name for stage in stages] == ["50% of Letters", "Letters"]
    assert stages[0](["", "", ""], ["ca", "cc", "ab"]).tolist() == [True, False, True]
    assert stages[0].progress([""], ["a"])[0].tolist() == [True, False]
    _, (first, second) = small_run(tmp_path, stages=stages)
    assert first.satisfied > second.training.satisfied  # what was drawn first is asked about again


def test_stages_that_end_elsewhere_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="an oracle for each of 2 rounds, the last one Letters"):
        small_run(tmp_path, stages=curriculum(Letters(), 3))
    with pytest.raises(InputError, match="the last one Letters"):
        small_run(tmp_path, stages=[Letters(), Partly(Letters(), 0.5)])
    with pytest.raises(InputError, match="a share above 0 and at most 1"):
        Partly(Letters(), 0.0)
    with pytest.raises(InputError, match="at least one round"):
        RoundsConfig(samples=())
