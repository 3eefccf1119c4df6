"""A guide trained on a small real architecture does what was promised, measured on texts it writes.

Random weights make a base that has no idea of English but a distribution like any other: 24 words, texts that
vary and end. The guide is trained on what is drawn, never told what is to be found.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import small_models
from nado.drawing import draw_rows
from nado.guidance import Guidance
from nado.guide import Guide, GuideConfig
from nado.guided_language_model import GuidedLanguageModel
from nado.huggingface import CausalModel
from nado.huggingface.reading import HuggingFaceReader
from nado.language_model import LanguageModel
from nado.oracles import Keywords
from nado.prompts import Prompt
from nado.proposals import Proposal
from nado.samples import Samples
from nado.training import TrainingConfig, train
from nado.training_data import TrainingData

LIMIT = 8
COMMON = [  # p satisfies the oracle in a fifth to a half of its texts
    Prompt("the dog", "ball"),
    Prompt("a man sees", "beach"),
    Prompt("the old woman", "park"),
    Prompt("a cat", "man"),
]
RARE = [Prompt("the dog", "red"), Prompt("a cat", "sees"), Prompt("the old woman", "dog")]  # in about 5 %
PAIRS = COMMON + RARE
ORACLE = Keywords(inflections=False)


@dataclass(frozen=True)
class Drawn:
    """Texts of one model: whether each satisfies the oracle, and how many tokens they took."""

    satisfied: np.ndarray
    tokens: int

    @property
    def tokens_per_satisfying_text(self) -> float:
        return self.tokens / max(1, int(self.satisfied.sum()))


def draw_texts(
    model: LanguageModel[Any], pairs: list[Prompt], count: int, seed: int
) -> tuple[pa.Table, Drawn]:
    prompts = [pair for pair in pairs for _ in range(count)]
    table = draw_rows(model, prompts, range(len(prompts)), proposal=Proposal(), seed=seed, batch_size=1024)
    hit = ORACLE(table["condition"].to_pylist(), table["text"].to_pylist())
    satisfied = hit & table["finished"].to_numpy(zero_copy_only=False)
    return table.append_column("satisfied", pa.array(satisfied)), Drawn(
        satisfied, len(table["tokens"].combine_chunks().flatten())
    )


@pytest.fixture(scope="module")
def reader() -> HuggingFaceReader:
    base = CausalModel(
        small_models.build("llama", 3), small_models.tokenizer(), length_limit=LIMIT, completion="limit"
    )
    return HuggingFaceReader(base)


@pytest.fixture(scope="module")
def guide(reader: HuggingFaceReader) -> Guide:
    table, _ = draw_texts(reader.model, PAIRS, 5000, seed=1)
    data = TrainingData.from_samples(Samples(table), reader)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        choices = {"size": 64, "layers": 2, "heads": 4}
        made = Guide(GuideConfig.for_reader(reader, **choices)).attach(reader)
    config = TrainingConfig(steps=600, batch_size=512, learning_rate=3e-3, evaluate_every=0)
    data.keep_states(reader)
    train(made, reader, data, config)
    return made


def test_a_trained_guide_lifts_satisfaction_and_an_untrained_one_does_not(
    reader: HuggingFaceReader, guide: Guide
) -> None:
    untrained = Guide(guide.config).attach(reader)
    _, base = draw_texts(reader.model, COMMON, 1000, seed=2)
    _, nothing = draw_texts(GuidedLanguageModel(reader.model, untrained), COMMON, 1000, seed=3)
    _, guided = draw_texts(GuidedLanguageModel(reader.model, guide), COMMON, 1000, seed=4)
    assert base.satisfied.mean() < 0.4
    assert abs(nothing.satisfied.mean() - base.satisfied.mean()) < 0.04  # 5 standard errors
    assert guided.satisfied.mean() > 0.9


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.8])
def test_a_requested_rate_is_achieved(reader: HuggingFaceReader, guide: Guide, rate: float) -> None:
    model = GuidedLanguageModel(reader.model, guide, guidance=Guidance(target_rate=rate))
    _, drawn = draw_texts(model, COMMON, 1000, seed=5)
    assert abs(drawn.satisfied.mean() - rate) < 0.05


def test_a_rare_oracle_costs_a_fifth_of_what_rejection_costs(reader: HuggingFaceReader, guide: Guide) -> None:
    """Tokens of the base for one satisfying text; no exact end, so every miss is paid for."""
    _, rejection = draw_texts(reader.model, RARE, 2000, seed=6)
    _, guided = draw_texts(GuidedLanguageModel(reader.model, guide), RARE, 1000, seed=7)
    assert rejection.satisfied.mean() < 0.1
    assert rejection.tokens_per_satisfying_text > 5 * guided.tokens_per_satisfying_text
