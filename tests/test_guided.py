"""q as a Hugging Face model: whatever transformers' `generate` does with the rows, they see the same q.

What is right is told by `GuidedLanguageModel`, which steps the base itself and shares neither cache nor
forward pass with the code here.
"""

import copy
import functools
import itertools
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CompileConfig, DynamicCache, GenerationMixin, PreTrainedModel, TextStreamer

import small_models
from nado.composition import Composable
from nado.errors import InputError, MismatchError
from nado.guidance import Guidance, guide_step
from nado.guide import Guide, GuideConfig
from nado.guide_cache import GuideLayer
from nado.guide_files import save_guide
from nado.guided import GuidedModel, GuidedText
from nado.guided_language_model import GuidedLanguageModel
from nado.heads import Scores
from nado.huggingface import CausalModel, EncoderDecoderModel, load_model
from nado.huggingface.reading import HuggingFaceReader
from nado.oracles import Keywords, Length
from nado.study.guides import load
from nado.warpers import Warpers
from random_guides import random_guide

PROMPTS = ["the dog", "a cat sees the", "ball"]
CONDITIONS = ["dog", "man, the", "runs"]
LIMIT = 7
KINDS = ["gpt2", "llama", "marian", "t5"]
CHOICES: dict[str, dict[str, Any]] = {
    "states": {},
    "tokens": {"reads": "tokens"},
    "light": {"reads": "light", "progress_bits": 2},
    "norm": {"head": "norm", "layers": 1},
    "low rank": {"matrix": "low_rank", "rank": 8},
    "own": {"matrix": "own"},
    "progress": {"progress_bits": 2, "named_parts": True},
}
CASES = [(kind, "progress") for kind in KINDS] + [("llama", name) for name in CHOICES if name != "progress"]
# With progress bits in either case; the exact end asks the oracle about every prefix as well.
GUIDANCES = {"plain": Guidance(), "exact end": Guidance(exact_end=True)}


def build(kind: str, limit: int = LIMIT, seed: int = 0, **choices: Any) -> CausalModel | EncoderDecoderModel:
    is_causal = kind in small_models.CAUSAL
    tokenizer = small_models.tokenizer(appends_eos=not is_causal)
    adapter = CausalModel if is_causal else EncoderDecoderModel
    return adapter(small_models.build(kind, seed), tokenizer, length_limit=limit, **choices)


@functools.cache
def _reader(kind: str, limit: int) -> HuggingFaceReader:
    return HuggingFaceReader(build(kind, limit))


def reader_of(kind: str, limit: int = LIMIT) -> HuggingFaceReader:
    return _reader(kind, limit)


@functools.cache
def guided_model(kind: str, name: str = "progress", limit: int = LIMIT) -> GuidedModel:
    reader = reader_of(kind, limit)
    return GuidedModel(reader.model, random_guide(reader, **CHOICES[name]), oracle=Keywords())


def run(model: GuidedModel, guidance: Guidance | None = None, **settings: Any) -> Any:
    """Sequences and every step's log q."""
    settings = {"prompts": PROMPTS, "conditions": CONDITIONS, "guidance": guidance, **settings}
    return model.generate(return_dict_in_generate=True, output_logits=True, **settings)


def written(model: GuidedModel, output: Any) -> Tensor:
    """The generated tokens alone: (B, T)."""
    sequences = output if isinstance(output, Tensor) else output.sequences
    if model.config.is_encoder_decoder:
        return sequences[:, 1:]
    return sequences[:, len(max(model.base.encode(PROMPTS), key=len)) :]


def stepped(
    model: GuidedModel, guidance: Guidance, tokens: Tensor, repeats: int = 1
) -> tuple[Tensor, Tensor]:
    """log q (B, T, V) along texts by the stepping protocol, and where the texts were still live."""
    reference = GuidedLanguageModel(model.base, model.formula, guidance=guidance, oracle=model.oracle)
    rows = [row for row in range(len(PROMPTS)) for _ in range(repeats)]
    state = reference.start([PROMPTS[row] for row in rows], [CONDITIONS[row] for row in rows])
    columns, live, alive = [], [], torch.ones(len(tokens), dtype=torch.bool)
    for position in range(tokens.shape[1]):
        columns.append(state.log_p)
        live.append(alive)
        alive = alive & (tokens[:, position] != model.base.eos_id)
        state = reference.step(state, tokens[:, position])
    return torch.stack(columns, dim=1), torch.stack(live, dim=1)


def gap(found: Tensor, expected: Tensor, live: Tensor) -> float:
    """The largest difference of probabilities."""
    return float((found.exp() - expected.exp())[live].abs().max())


# --- the distribution ---------------------------------------------------------------------------------


@pytest.mark.parametrize("guidance", GUIDANCES.values(), ids=GUIDANCES)
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_forward_returns_the_log_q_of_the_stepping_protocol(kind: str, name: str, guidance: Guidance) -> None:
    model = guided_model(kind, name)
    assert isinstance(model, PreTrainedModel)
    assert isinstance(model, GenerationMixin)
    assert isinstance(model, type(model.base.model))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        output = run(model, guidance, do_sample=True, num_return_sequences=8)
    tokens = written(model, output)
    found = torch.stack(output.logits, dim=1)
    assert found.dtype == torch.float32
    expected, live = stepped(model, guidance, tokens, repeats=8)
    assert live[:, 2].sum() > 3
    assert gap(found, expected, live) < 1e-5
    assert (found.exp().sum(-1) - 1).abs().max() < 1e-5
    unguided, _ = stepped(model, Guidance(strength=0.0), tokens, repeats=8)
    assert gap(found, unguided, live) > 0.05  # the guide does something


@pytest.mark.parametrize(
    "guidance",
    [
        Guidance(strength=2.0),
        Guidance(strength=0.0, exact_end=True),
        Guidance(1.5, doubt=0.2),
        Guidance(2.0, plausible=0.3),
    ],
)
def test_strength_doubt_and_plausibility(guidance: Guidance) -> None:
    model = guided_model("llama")
    output = run(model, guidance)
    expected, live = stepped(model, guidance, written(model, output))
    assert gap(torch.stack(output.logits, dim=1), expected, live) < 1e-5


@pytest.mark.parametrize(
    "choices",
    [
        {"warpers": Warpers(temperature=1.5, forbidden=(4, 5))},
        {"warpers": Warpers(top_k=5, top_p=0.9, forced=(7, 8))},
        {"completion": "limit"},
    ],
)
def test_warpers_and_completion_belong_to_p(choices: dict[str, Any]) -> None:
    reader = HuggingFaceReader(build("llama", **choices))
    model = GuidedModel(reader.model, random_guide(reader))
    output = run(model)
    tokens = written(model, output)
    expected, live = stepped(model, Guidance(), tokens)
    assert gap(torch.stack(output.logits, dim=1), expected, live) < 1e-5
    if choices.get("warpers") and choices["warpers"].forced:
        assert tokens[:, :2].tolist() == [[7, 8]] * 3


def test_several_eos_ids_count_as_one() -> None:
    network = small_models.build("llama")
    network.generation_config.eos_token_id = [small_models.EOS, 21, 22]
    reader = HuggingFaceReader(CausalModel(network, small_models.tokenizer(), length_limit=LIMIT))
    model = GuidedModel(reader.model, random_guide(reader))
    output = run(model)
    found = torch.stack(output.logits, dim=1)
    expected, live = stepped(model, Guidance(), written(model, output))
    assert gap(found, expected, live) < 1e-5
    assert found[..., 21:23].isneginf().all()


@pytest.mark.parametrize("kind", ["llama", "marian"])
def test_a_formula_over_guides(kind: str) -> None:
    reader = reader_of(kind)
    first = random_guide(reader, 1, progress_bits=2)
    second, third = random_guide(reader, 2, reads="light"), random_guide(reader, 3, layers=1)
    formula: Composable = (first & second) | ~third
    model = GuidedModel(reader.model, formula, oracle=Keywords())
    settings: dict[str, Any]
    for settings in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            output = run(model, do_sample=True, num_return_sequences=8, **settings)
        found, (expected, live) = (
            torch.stack(output.logits, dim=1),
            stepped(model, Guidance(), written(model, output), repeats=8),
        )
        assert live[:, LIMIT - 1].any()  # where a negation must not let a text go on
        assert gap(found, expected, live) < 1e-5
    beams = run(model, num_beams=3, length_penalty=0.0, output_scores=True)
    trace = model.inspect(PROMPTS, CONDITIONS, written(model, beams).tolist())
    assert beams.sequences_scores.tolist() == pytest.approx(trace.log_q.sum(1).tolist(), abs=1e-4)


def test_a_soft_rate_keeps_the_coefficients_of_the_first_step() -> None:
    guidance = Guidance(target_rate=0.3)
    for kind, settings in itertools.product(("llama", "marian"), ({}, {"use_cache": False})):
        model = guided_model(kind)
        with torch.random.fork_rng():
            torch.manual_seed(2)
            output = run(model, guidance, do_sample=True, **settings)
        expected, live = stepped(model, guidance, written(model, output))
        assert gap(torch.stack(output.logits, dim=1), expected, live) < 1e-5


# --- invariance ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("guidance", GUIDANCES.values(), ids=GUIDANCES)
@pytest.mark.parametrize(("kind", "name"), [*CASES, ("mistral", "progress"), ("gemma", "light")])
def test_caches_change_nothing(kind: str, name: str, guidance: Guidance) -> None:
    model = guided_model(kind, name)
    reference = run(model, guidance)
    for settings in ({"use_cache": False}, {"cache_implementation": "static"}):
        other = run(model, guidance, **settings)
        assert torch.equal(other.sequences, reference.sequences)
        for mine, found in zip(reference.logits, other.logits, strict=True):
            assert (mine.exp() - found.exp()).abs().max() < 1e-5


@pytest.mark.parametrize("guidance", GUIDANCES.values(), ids=GUIDANCES)
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_row_does_not_depend_on_its_batch(kind: str, name: str, guidance: Guidance) -> None:
    """Batch = single, padded = unpadded, a condition for each row = separate calls; greedy and beam."""
    model = guided_model(kind, name)
    for settings in ({}, {"num_beams": 3}):
        together = run(model, guidance, **settings)
        for row in range(len(PROMPTS)):
            one = {"prompts": PROMPTS[row : row + 1], "conditions": CONDITIONS[row : row + 1]}
            alone = run(model, guidance, **one, **settings)
            start = 1 if model.config.is_encoder_decoder else len(model.base.encode(one["prompts"])[0])
            mine = model._text_of(written(model, together)[row].tolist())
            assert mine == model._text_of(alone.sequences[0, start:].tolist())
            if not settings:
                for each, other in zip(together.logits[: len(mine)], alone.logits, strict=True):
                    assert (each[row].exp() - other[0].exp()).abs().max() < 1e-5


@pytest.mark.parametrize("matrix", ["tied", "own"])
def test_a_tied_head_shares_the_bases_product(matrix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = reader_of("llama")
    model = GuidedModel(reader.model, random_guide(reader, matrix=matrix))
    asked = []
    monkeypatch.setattr(Scores, "logits", lambda self: asked.append(1) or self.vectors @ self.matrix.T)
    run(model)
    assert bool(asked) == (matrix == "own")


def test_an_empty_condition_beside_others() -> None:
    model = guided_model("llama", "states")
    both = model.generate(prompts=["the dog", "the dog"], conditions=["", "man, woman and dog"])
    for row, condition in enumerate(["", "man, woman and dog"]):
        alone = model.generate(prompts=["the dog"], conditions=[condition])
        found = both[row, : alone.shape[1]]
        assert torch.equal(found, alone[0])


@pytest.mark.parametrize("guidance", GUIDANCES.values(), ids=GUIDANCES)
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_beam_scores_are_sums_of_log_q(kind: str, name: str, guidance: Guidance) -> None:
    model = guided_model(kind, name)
    for settings in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
        output = run(
            model,
            guidance,
            num_beams=4,
            num_return_sequences=4,
            length_penalty=0.0,
            output_scores=True,
            **settings,
        )
        prompts, conditions = ([each for each in rows for _ in range(4)] for rows in (PROMPTS, CONDITIONS))
        tokens = written(model, output).tolist()
        trace = model.inspect(prompts, conditions, tokens, guidance=guidance)
        assert output.sequences_scores.tolist() == pytest.approx(trace.log_q.sum(1).tolist(), abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_beams_that_keep_everything_find_the_best_texts(kind: str) -> None:
    """With a beam for every prefix, beam search is enumeration: its texts are the likeliest under q."""
    model = guided_model(kind, limit=3)
    words = [token for token in range(small_models.V) if token != small_models.EOS]
    texts = [
        [*text, small_models.EOS] for length in range(3) for text in itertools.product(words, repeat=length)
    ]
    count = len(texts)
    log_q = model.inspect(["the dog"] * count, ["dog"] * count, texts).log_q.sum(dim=1)
    best = log_q.topk(5)
    output = model.generate(
        prompts=["the dog"],
        conditions=["dog"],
        num_beams=len(words) ** 2,
        num_return_sequences=5,
        length_penalty=0.0,
        early_stopping="never",
        output_scores=True,
        return_dict_in_generate=True,
    )
    assert output.sequences_scores.tolist() == pytest.approx(best.values.tolist(), abs=1e-4)
    found = output.sequences[:, 1:] if model.config.is_encoder_decoder else output.sequences[:, 2:]
    assert [model._text_of(row) for row in found.tolist()] == [texts[row] for row in best.indices.tolist()]


@pytest.mark.parametrize("kind", KINDS)
def test_beam_sampling(kind: str) -> None:
    model = guided_model(kind)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        output = run(model, Guidance(exact_end=True), num_beams=3, do_sample=True)
    trace = model.inspect(
        PROMPTS, CONDITIONS, written(model, output).tolist(), guidance=Guidance(exact_end=True)
    )
    assert trace.log_q.isfinite().all()


@pytest.mark.parametrize("guidance", GUIDANCES.values(), ids=GUIDANCES)
@pytest.mark.parametrize(("kind", "name"), [*CASES, ("mistral", "progress")])
def test_drafted_tokens_that_are_taken_back_leave_no_trace(kind: str, name: str, guidance: Guidance) -> None:
    """Prompt lookup and assisted decoding read several tokens at once and crop the cache."""
    model = guided_model(kind, name)
    assistant = small_models.build(kind, seed=1)
    assistant.generation_config.num_assistant_tokens = 3
    for prompt, condition in [("a dog and a dog and a", "man, the"), *zip(PROMPTS, CONDITIONS, strict=True)]:
        call = {"prompts": [prompt], "conditions": [condition], "guidance": guidance}
        expected = model.generate(**call)
        # transformers 5.17 itself fails on an assistant with a sliding window.
        modes: list[dict[str, Any]] = [{"assistant_model": assistant}] if kind != "mistral" else []
        if kind in small_models.CAUSAL:
            modes.append({"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1})
        for mode in modes:
            assert torch.equal(model.generate(**call, **mode), expected)


def test_a_prompt_read_in_pieces() -> None:
    model = guided_model("llama")
    expected = run(model)
    for size in (1, 3):
        found = run(model, prefill_chunk_size=size)
        assert torch.equal(found.sequences, expected.sequences)


def test_a_cache_of_the_callers_own() -> None:
    """One that makes its layers as it goes, and one that comes back from an earlier text."""
    model = guided_model("llama")
    expected = run(model)
    cache = DynamicCache()
    assert torch.equal(run(model, past_key_values=cache).sequences, expected.sequences)
    longer = torch.cat([expected.sequences, torch.tensor([[4, 6]] * 3)], dim=1)
    mask = (torch.arange(longer.shape[1]) >= torch.tensor([[2], [0], [3]])).long()
    again = {"input_ids": longer, "attention_mask": mask, "conditions": CONDITIONS}
    fresh = model.generate(**again)
    assert torch.equal(model.generate(**again, past_key_values=cache), fresh)


def test_a_compiled_forward_is_one_graph_for_all_steps_and_calls() -> None:
    model = GuidedModel(
        reader_of("llama").model,
        random_guide(reader_of("llama"), layers=1, progress_bits=2, named_parts=True),
        oracle=Keywords(),
    )
    guidance = Guidance(exact_end=True)
    expected = run(model, guidance)
    how = CompileConfig(fullgraph=True, backend="eager", mode=None)
    how._compile_all_devices = True
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for _ in range(2):
        found = run(model, guidance, cache_implementation="static", compile_config=how)
        assert torch.equal(found.sequences, expected.sequences)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


# --- the base -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 0}], ids=str)
def test_an_untrained_guide_writes_what_the_base_writes(
    kind: str, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    reader = reader_of(kind)
    guide = Guide(GuideConfig.for_reader(reader, size=24, layers=1, heads=2)).attach(reader).eval()
    model = GuidedModel(reader.model, guide)
    ids, mask = reader.model._pad_left(reader.model.encode(PROMPTS))
    if model.config.is_encoder_decoder:
        order = mask.long().argsort(dim=-1, descending=True, stable=True)
        ids, mask = ids.gather(1, order), mask.gather(1, order)
    common = {"max_new_tokens": LIMIT - 1, **settings}  # at step L only EOS can succeed
    with torch.random.fork_rng():
        torch.manual_seed(3)
        expected = reader.model.model.generate(ids, attention_mask=mask.long(), **common)
        torch.manual_seed(3)
        with caplog.at_level(logging.WARNING, "nado"):
            found = model.generate(prompts=PROMPTS, **common)
    assert torch.equal(found, expected)
    assert "6 new tokens are fewer than the length limit of 7 that R counts with" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_the_base_stays_as_it_is(kind: str) -> None:
    base = build(kind)
    network = base.model
    before = {name: value.clone() for name, value in network.state_dict().items()}
    kind_of, names, config = type(network), set(vars(network)), copy.deepcopy(network.config.to_dict())
    generation = network.generation_config.to_dict()
    ids = torch.tensor([[4, 5, 6]])
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if network.config.is_encoder_decoder else {})
    logits = network(**inputs).logits
    model = GuidedModel(base, random_guide(HuggingFaceReader(base), progress_bits=2), oracle=Keywords())
    run(model, Guidance(exact_end=True), num_beams=2)
    run(model, do_sample=True, cache_implementation="static")
    assert type(network) is kind_of
    assert set(vars(network)) == names
    assert network.config.to_dict() == config
    assert network.generation_config.to_dict() == generation
    assert torch.equal(network(**inputs).logits, logits)
    after = network.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(module._forward_pre_hooks for module in network.modules())
    # The guide's weights are not among the guided model's own, and its own are the base's very tensors.
    mine = model.state_dict()
    assert mine.keys() == after.keys()
    assert all(mine[name].data_ptr() == after[name].data_ptr() for name in mine)


def test_the_guide_moves_with_the_base() -> None:
    reader = HuggingFaceReader(build("llama"))
    guide = random_guide(reader)
    model = GuidedModel(reader.model, guide)
    expected = run(model)
    model.to(torch.float64)
    assert next(guide.parameters()).dtype == torch.float64
    found = run(model)
    assert torch.equal(found.sequences, expected.sequences)
    assert found.logits[0].dtype == torch.float32


# --- what users call ----------------------------------------------------------------------------------


def common_words(model: GuidedModel) -> list[str]:
    """A word for each prompt that the base likes to write after it."""
    texts = model.generate_texts(
        PROMPTS, CONDITIONS, guidance=Guidance(strength=0.0), do_sample=True, num_return_sequences=8
    )
    words = [Counter(" ".join(text.text for text in texts[row : row + 8]).split()) for row in (0, 8, 16)]
    return [
        max((word for word in counts if word.isalpha()), key=lambda word: counts[word]) for counts in words
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "settings", [{}, {"do_sample": True, "num_return_sequences": 16}, {"num_beams": 4}], ids=str
)
def test_with_an_exact_end_every_finished_text_is_satisfied(kind: str, settings: dict[str, Any]) -> None:
    model = guided_model(kind)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        conditions = common_words(model)
        exact = model.generate_texts(PROMPTS, conditions, **settings)  # the oracle is cheap: on by default
        plain = model.generate_texts(PROMPTS, conditions, guidance=Guidance(), **settings)
    assert exact.guidance.exact_end
    assert exact.oracle_calls >= len(PROMPTS)
    assert exact.oracle_seconds > 0
    assert all(text.satisfied for text in exact if text.finished)
    assert all(text.finished == (text.tokens[-1] == small_models.EOS) for text in exact)
    if "num_return_sequences" in settings:
        assert sum(text.finished for text in exact) > 4
        assert not all(text.satisfied for text in plain if text.finished)  # or this would prove nothing


@pytest.mark.parametrize("kind", KINDS)
def test_a_search_ends_exactly_too_and_says_what_asking_has_cost(kind: str) -> None:
    model = guided_model(kind)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        conditions = common_words(model)
    found = model.search_texts(PROMPTS, conditions, beams=8)
    greedy = model.generate_texts(PROMPTS, conditions)
    assert found.guidance.exact_end
    assert found.oracle_calls > greedy.oracle_calls > 0
    assert found.oracle_seconds > 0
    assert all(text.satisfied == text.finished for text in found)
    assert sum(text.finished for text in found) >= max(1, sum(text.finished for text in greedy))
    plain = model.search_texts(PROMPTS, conditions, beams=2, guidance=Guidance())
    assert not plain.guidance.exact_end
    assert [text.tokens for text in plain] != [text.tokens for text in found]


def test_texts_carry_what_became_of_them() -> None:
    model = guided_model("llama")
    texts = model.generate_texts(
        PROMPTS, CONDITIONS, num_beams=2, num_return_sequences=2, guidance=Guidance()
    )
    assert len(texts) == 6
    tokens = written(model, run(model, num_beams=2, num_return_sequences=2)).tolist()
    for row, text in enumerate(texts):
        assert isinstance(text, GuidedText)
        assert text.tokens == model._text_of(tokens[row])
        assert [text.text] == model.base.decode([text.tokens])
        hit = bool(Keywords()([CONDITIONS[row // 2]], [text.text])[0])
        assert text.satisfied == (hit and text.finished)
    assert texts[:2] == texts.texts[:2]
    unjudged = GuidedModel(model.base, random_guide(reader_of("llama"))).generate_texts(PROMPTS)
    assert unjudged[0].satisfied is None
    assert not unjudged.guidance.exact_end


def test_a_text_cut_at_the_limit_is_finished_only_where_that_is_agreed() -> None:
    for completion in ("limit", "eos"):
        reader = HuggingFaceReader(build("llama", completion=completion))
        model = GuidedModel(reader.model, random_guide(reader), oracle=Keywords("the"))
        with torch.random.fork_rng():
            torch.manual_seed(0)
            texts = model.generate_texts(
                PROMPTS, do_sample=True, num_return_sequences=20, guidance=Guidance(strength=0.0)
            )
        cut = [text for text in texts if small_models.EOS not in text.tokens]
        assert cut
        assert all(len(text.tokens) == LIMIT for text in cut)
        assert all(text.finished == (completion == "limit") for text in cut)


def test_a_floor_ends_texts_without_hope() -> None:
    model = guided_model("llama")
    reference = run(model, do_sample=False)
    trace = model.inspect(PROMPTS, CONDITIONS, written(model, reference).tolist())
    lowest = [float(row[row != 0].min()) for row in trace.log_s]  # of the greedy text
    floor = float(torch.tensor(sorted(lowest)[:2]).mean().exp())
    texts = model.generate_texts(PROMPTS, CONDITIONS, guidance=Guidance(floor=floor))
    assert [text.dead_end for text in texts] == [low < torch.tensor(floor).log() for low in lowest]
    for row, text in enumerate(texts):
        if text.dead_end:
            first = int((trace.log_s[row] < torch.tensor(floor).log()).nonzero()[0])
            assert text.tokens == [*written(model, reference)[row, :first].tolist(), small_models.EOS]
            assert not text.finished
            assert not text.satisfied
        else:
            assert text.tokens == model._text_of(written(model, reference)[row].tolist())


@pytest.mark.parametrize("strength", [1.0, 2.0])
def test_a_floor_counts_what_the_oracle_says_of_the_end(strength: float) -> None:
    """R would let the text end at once; the oracle does not, and the rest of R falls short of the floor."""
    reader = reader_of("llama")
    model = GuidedModel(reader.model, random_guide(reader), oracle=Keywords())
    conditions = ["nowhere"] * len(PROMPTS)
    state = model.language_model.start(PROMPTS, conditions)
    joint = (state.log_p_base + state.step.log_factor).exp()  # p(v) R(v)
    whole, ends = joint.sum(-1), joint[:, model.base.eos_id]
    row = int((ends / whole).argmax())
    assert ends[row] > 0.02 * whole[row]
    floor = float(whole[row] - ends[row] / 2)
    guidance = Guidance(strength, floor=floor, exact_end=True)
    texts = model.generate_texts([PROMPTS[row]], ["nowhere"], guidance=guidance)
    assert (texts[0].dead_end, texts[0].tokens) == (True, [model.base.eos_id])


def test_a_floor_goes_without_an_assistant() -> None:
    model = guided_model("llama")
    with pytest.raises(InputError, match=r"no floor with an assistant; found a floor of 0\.1"):
        run(model, guidance=Guidance(floor=0.1), prompt_lookup_num_tokens=3, do_sample=False)


def test_calls_are_counted_by_prefix_and_not_by_what_is_asked() -> None:
    reader, keywords = reader_of("llama"), Keywords()
    guide = random_guide(reader, progress_bits=2, oracle_fingerprint=keywords.fingerprint)
    found = [
        GuidedModel(reader.model, guide, oracle=oracle).generate_texts(PROMPTS, CONDITIONS)
        for oracle in (keywords, keywords & Length(maximum=12), ~~keywords)
    ]
    assert [text.tokens for text in found[1]] == [text.tokens for text in found[0]]
    assert found[1].oracle_calls == found[0].oracle_calls == found[2].oracle_calls > 0


def test_streaming() -> None:
    class Collecting(TextStreamer):
        def __init__(self, tokenizer: Any) -> None:
            super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
            self.text = ""

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            self.text += text

    for kind in ("llama", "marian"):
        model = guided_model(kind)
        streamer = Collecting(model.base.tokenizer)
        texts = model.generate_texts(PROMPTS[1:2], CONDITIONS[1:2], streamer=streamer)
        assert streamer.text.split() == texts[0].text.split()
        assert texts[0].text


def test_masks_on_top() -> None:
    model = guided_model("llama")
    allowed = [small_models.EOS, 4, 5, 6]
    output = run(model, prefix_allowed_tokens_fn=lambda row, tokens: allowed)
    tokens = written(model, output)
    assert set(tokens.flatten().tolist()) <= {*allowed, small_models.PAD}
    # The mask acts on q: what is chosen is the likeliest allowed token of it.
    expected, live = stepped(model, Guidance(), tokens)
    best = torch.tensor(allowed)[expected[..., allowed].argmax(dim=-1)]
    assert torch.equal(best[live], tokens[live])


def test_sampling_is_from_the_whole_of_q_unless_told_otherwise() -> None:
    model = guided_model("llama")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        output = run(model, do_sample=True, output_scores=True)
        warped = run(model, do_sample=True, output_scores=True, top_k=3)
    assert all(torch.equal(*pair) for pair in zip(output.scores, output.logits, strict=True))
    assert all(int((~scores.isneginf()).sum(dim=-1).max()) <= 3 for scores in warped.scores)


def test_inspection_names_the_bases_own_choice() -> None:
    model = guided_model("gpt2")
    tokens = written(model, run(model))
    trace = model.inspect(PROMPTS, CONDITIONS, tokens.tolist())
    expected, live = stepped(model, Guidance(strength=0.0), tokens)
    width = trace.log_p.shape[1]
    expected, live = expected[:, :width], live[:, :width]
    assert torch.equal(trace.base_choice[live], expected.argmax(-1)[live])
    assert (trace.log_p_base_choice - expected.amax(-1))[live].abs().max() < 1e-5
    lifted = trace.log_q - trace.log_p
    assert (lifted - (trace.log_factor - trace.log_s))[live].abs().max() < 1e-4


def test_a_folder_is_all_it_takes(tmp_path: Path) -> None:
    folder = small_models.save("llama", tmp_path / "base")
    base = load_model(folder, length_limit=LIMIT, device="cpu")
    reader = HuggingFaceReader(base)
    guide = random_guide(reader, progress_bits=2, named_parts=True, base_name=str(folder))
    save_guide(guide, tmp_path / "guide")
    expected = GuidedModel(base, guide, oracle=Keywords()).generate(prompts=PROMPTS, conditions=CONDITIONS)
    for model in (
        load(tmp_path / "guide", oracle=Keywords(), device="cpu"),
        GuidedModel.from_pretrained(base, tmp_path / "guide", oracle=Keywords()),
    ):
        assert torch.equal(model.generate(prompts=PROMPTS, conditions=CONDITIONS), expected)
    save_guide(random_guide(reader), tmp_path / "nameless")
    with pytest.raises(InputError) as error:
        load(tmp_path / "nameless")
    assert str(error.value) == (
        f"expected a guide that names its base; found none in {tmp_path / 'nameless'}. "
        "Name it: --base FOLDER, or load(…, base=…)."
    )
    assert isinstance(load(tmp_path / "nameless", base=folder, device="cpu"), GuidedModel)


# --- the last step, and what is refused ---------------------------------------------------------------


def test_a_lost_text_is_cut_rather_than_ended_when_the_end_is_exact() -> None:
    """S = 0 where the oracle says no and nothing else can succeed: q is p, but never ends."""
    log_p = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [1.0, 0.0, 0.0]]).log()
    log_r = torch.tensor([[0.9, 0.0, 0.0]] * 3).log()
    stops = torch.tensor([False, True, False])
    step = guide_step(log_p, log_r, Guidance(exact_end=True), stops=stops, eos_id=0)
    assert step.log_s[0].isneginf()
    assert step.log_q[0].exp().tolist() == pytest.approx([0, 0.6, 0.4])
    assert step.log_q[1].exp().tolist() == pytest.approx([1, 0, 0])
    assert step.log_q[2].exp().tolist() == pytest.approx([1, 0, 0])  # p can do nothing else


def refused(kind: type[Exception], message: str, call: Any) -> None:
    with pytest.raises(kind) as error:
        call()
    assert str(error.value) == message


def test_what_is_refused() -> None:
    model = guided_model("llama")
    soft = Guidance(target_rate=0.5)
    refused(
        InputError,
        "expected sampling for a target rate of 0.5; found greedy decoding. "
        "A rate is a property of sampling: pass do_sample=True, num_beams=1.",
        lambda: run(model, soft),
    )
    refused(
        InputError,
        "expected sampling for a target rate of 0.5; found beam search. "
        "A rate is a property of sampling: pass do_sample=True, num_beams=1.",
        lambda: run(model, soft, num_beams=2, do_sample=True),
    )
    refused(
        InputError,
        "expected no floor under beam search; found a floor of 0.1. "
        "A dead end is ended at no cost and would win: beams leave dead ends by themselves.",
        lambda: run(model, Guidance(floor=0.1), num_beams=2),
    )
    for settings in ({"max_new_tokens": 8}, {"max_length": 12}):
        refused(
            InputError,
            "expected at most 7 new tokens, the length limit that guide and base were made for; found 8. "
            "Leave max_new_tokens out, or train a guide for a higher limit.",
            functools.partial(run, model, **settings),
        )
    refused(
        InputError,
        "expected either prompts or input_ids; found neither. "
        "Call generate(prompts=[...]), or generate(input_ids, conditions=[...]).",
        model.generate,
    )
    refused(
        InputError,
        "expected one condition for each of 1 rows; found 0. "
        "Give conditions= with the tokens: a guide does not read them from the base's prompt.",
        lambda: model.generate(torch.tensor([[4, 5]])),
    )
    refused(
        InputError,
        "expected a forward pass made by generate; found one that does not know its conditions. "
        "Call generate, generate_texts or inspect.",
        lambda: model(torch.tensor([[4, 5]])),
    )
    refused(
        InputError,
        "expected a guide to save; found a guided model, most of which is its base. "
        "Save the guide alone with save_guide(guide, folder).",
        lambda: model.save_pretrained("nowhere"),
    )
    refused(
        InputError,
        "expected a list of prompts; found the bare string 'the dog'. Put it in a list: [prompt].",
        lambda: model.generate(prompts="the dog"),
    )
    with pytest.raises(InputError, match="prompts or input_ids; found decoder_input_ids"):
        guided_model("marian").generate(prompts=PROMPTS, decoder_input_ids=torch.tensor([[0]]))


def test_oracles_bases_and_caches_that_do_not_fit() -> None:
    reader, other = reader_of("llama"), reader_of("gpt2")
    with pytest.raises(InputError, match="the oracle, because this guide was trained with its progress"):
        GuidedModel(reader.model, random_guide(reader, progress_bits=2))
    plain = GuidedModel(reader.model, random_guide(reader))
    with pytest.raises(InputError, match="the oracle, because exact_end is on"):
        run(plain, Guidance(exact_end=True))
    with pytest.raises(MismatchError, match="guides attached to this very base"):
        GuidedModel(other.model, random_guide(reader))
    offloaded = DynamicCache(config=plain.config)
    offloaded.offloading = True
    with pytest.raises(InputError, match="a cache that stays on the model's device; found an offloaded one"):
        run(plain, past_key_values=offloaded)
    with pytest.raises(InputError, match="a negative number of tokens to take off a guided cache"):
        GuideLayer(0).crop(3)


def test_a_guide_that_was_only_warmed_up_is_not_doubted() -> None:
    reader = reader_of("llama")
    model = GuidedModel(reader.model, random_guide(reader, shape_only=True))
    model.generate_texts(PROMPTS, CONDITIONS, guidance=Guidance(strength=2), do_sample=False)
    with pytest.raises(InputError, match="a guide whose R is a probability, which doubt is compared with"):
        model.generate_texts(PROMPTS, CONDITIONS, guidance=Guidance(doubt=0.1), do_sample=False)
    with pytest.raises(InputError, match="a guide whose R is a probability, by which beams rank prefixes"):
        model.search_texts(PROMPTS, CONDITIONS)
