"""Perplexity: the same whatever the batch size, and what the definition says."""

import math
from typing import Any

import numpy as np
import pytest

import small_models
from nado.errors import InputError
from nado.exact import TabularModel
from nado.huggingface import CausalModel, EncoderDecoderModel
from nado.metrics import perplexity, perplexity_of_log_p, score_tokens
from nado.warpers import Warpers

WORDS = small_models.WORDS


def model_of(kind: str, limit: int = 12, **more: Any) -> Any:
    seq2seq = kind in small_models.SEQ2SEQ
    adapter = EncoderDecoderModel if seq2seq else CausalModel
    return adapter(
        small_models.build(kind), small_models.tokenizer(appends_eos=seq2seq), length_limit=limit, **more
    )


def random_texts(number: int) -> tuple[list[str], list[str]]:
    generator = np.random.default_rng(0)
    texts = [" ".join(generator.choice(WORDS, size=size)) for size in generator.integers(0, 11, size=number)]
    prompts = [" ".join(generator.choice(WORDS, size=size)) for size in generator.integers(1, 6, size=number)]
    return prompts, texts


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bart"])
def test_perplexity_does_not_depend_on_the_batch(kind: str) -> None:
    model = model_of(kind)
    prompts, texts = random_texts(37)
    values = [perplexity(model, prompts, texts, batch_size=size).value for size in (1, 2, 7, 37, 100)]
    assert values == pytest.approx([values[0]] * 5, rel=1e-6, abs=1e-6)
    intervals = [perplexity(model, prompts, texts, batch_size=size).measure(prompts) for size in (1, 7)]
    assert intervals[0].low == pytest.approx(intervals[1].low, rel=1e-6)
    assert intervals[0].low < values[0] < intervals[0].high


def test_perplexity_is_what_the_definition_says() -> None:
    model = model_of("gpt2")
    texts = ["the dog runs", "a"]
    tokens = [[*row, model.eos_id] for row in model.encode_texts(texts)]
    log_p = score_tokens(model, ["a", "the"], tokens)
    assert [len(row) for row in log_p] == [4, 2]
    expected = math.exp(-sum(float(row.sum()) for row in log_p) / 6)  # a token, not a text
    assert perplexity(model, ["a", "the"], texts).value == pytest.approx(expected)
    alone = score_tokens(model, ["the"], tokens[1:])
    assert log_p[1] == pytest.approx(alone[0], abs=1e-5)


def test_perplexity_of_a_tabular_model_by_hand() -> None:
    model = TabularModel.from_function(lambda prompt, prefix: [0.5, 0.25, 0.25], length_limit=4)
    log_p = score_tokens(model, ["", ""], [[0, 1, 2], [2]])
    assert perplexity_of_log_p(log_p).value == pytest.approx(
        (1 / (0.5 * 0.25 * 0.25 * 0.25)) ** (1 / 4), rel=1e-6
    )
    with pytest.raises(InputError, match="found TabularModel, which has no encode_texts"):
        perplexity(model, [""], ["ab"])


def test_a_text_the_model_cannot_write_is_said() -> None:
    model = model_of("gpt2", warpers=Warpers(forbidden=(small_models.VOCABULARY.index("dog"),)))
    measure = perplexity(model, ["a"] * 30, ["the dog"] + ["the cat"] * 29).measure()
    assert (measure.value, measure.low) == (None, None)
    assert "infinite: the model cannot write 1 of 30 texts (log p = −inf)" in measure.note


def test_broken_input() -> None:
    model = model_of("gpt2", limit=4)
    with pytest.raises(InputError) as raised:
        perplexity(model, ["a"], ["the dog runs on"])
    assert str(raised.value) == (
        "expected texts of at most 4 tokens, EOS included: the scoring model's length limit; "
        "found 5 tokens in text 0. Load the scoring model with a larger length limit."
    )
    with pytest.raises(InputError, match="expected at least one text for perplexity; found none"):
        perplexity(model, [], [])
    with pytest.raises(InputError, match="found 1 prompts and 2 texts"):
        perplexity(model, ["a"], ["a", "the"])
    with pytest.raises(InputError, match="expected a batch_size of at least 1; found 0"):
        perplexity(model, ["a"], ["a"], batch_size=0)
    with pytest.raises(InputError, match="found nan in text 1"):
        perplexity_of_log_p([np.zeros(2), np.array([math.nan])])
    with pytest.raises(InputError, match="expected at least one text for perplexity; found none"):
        perplexity_of_log_p([])
