"""Hugging Face models as language models, against plain forward passes of the raw transformers models.

Every reference here is transformers' own model, loaded by transformers, run on one unpadded text at a time.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BertConfig,
    BertLMHeadModel,
    GenerationConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from nado.errors import InputError
from nado.huggingface import CausalModel, EncoderDecoderModel, checkpoint_warpers, load_model, weights_digest
from nado.huggingface.causal import _reads_on_host
from nado.huggingface.slot_cache import SlotCache
from nado.noise import sample, uniforms
from nado.testing import check_language_model
from nado.warpers import Warpers
from small_models import BOS, CAUSAL, CONTEXT, EOS, PAD, SEQ2SEQ, VOCABULARY, WORDS, V, build, save, tokenizer

KINDS = (*CAUSAL, *SEQ2SEQ)
SLOTTED = ("gpt2", "llama", "gemma", "qwen3_moe")
PROMPTS = ["the dog", "a cat sees the old man on the beach", "", "the old woman throws a red ball", "park"]
STEPS = 6
FALSE_ALARM = 1e-6  # of each statistical test, were its seed a new one

Model = CausalModel | EncoderDecoderModel


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A saved checkpoint of a family, made once."""

    @cache
    def make(kind: str, **config: Any) -> Path:
        return save(kind, tmp_path_factory.mktemp(kind), **config)

    return make


@cache
def raw(folder: Path) -> PreTrainedModel:
    """The checkpoint as transformers loads it, with the attention closest to the textbook."""
    config = json.loads((folder / "config.json").read_text())
    auto = AutoModelForSeq2SeqLM if config.get("is_encoder_decoder") else AutoModelForCausalLM
    model = auto.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    assert isinstance(model, PreTrainedModel)
    return model


@torch.no_grad()
def plain_log_p(folder: Path, prompt: str, tokens: Sequence[int]) -> Tensor:
    """log p of every next token before each of `tokens` and after them: (T + 1, V), by hand."""
    model, written = raw(folder), list(tokens)
    ids = AutoTokenizer.from_pretrained(folder)(prompt)["input_ids"]
    if model.config.is_encoder_decoder:
        start = model.config.decoder_start_token_id
        given = {"input_ids": torch.tensor([ids]), "decoder_input_ids": torch.tensor([[start, *written]])}
        return model(**given).logits[0].log_softmax(-1)
    ids = ids or [BOS]
    return model(input_ids=torch.tensor([ids + written])).logits[0, len(ids) - 1 :].log_softmax(-1)


def random_tokens(rows: int, steps: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, V, (rows, steps), generator=generator)


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def says(text: str) -> Any:
    """Expect an InputError with exactly this text."""

    class Says:
        def __enter__(self) -> None:
            self.raises = pytest.raises(InputError)
            self.caught = self.raises.__enter__()

        def __exit__(self, *details: Any) -> bool:
            done = self.raises.__exit__(*details)
            assert str(self.caught.value) == text
            return bool(done)

    return Says()


# --- the same log p as a plain forward pass -----------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_small_models_are_worth_testing_with(kind: str, folder: Callable[..., Path]) -> None:
    """Neither certain nor uniform, different for different prompts and prefixes, and they end."""
    prompts = [*PROMPTS, *(" ".join(WORDS[i : i + i % 7]) for i in range(1, 16))]
    texts = random_tokens(len(prompts), 12)
    log_p = torch.stack([plain_log_p(folder(kind), *row) for row in zip(prompts, texts, strict=True)])
    entropy = -(log_p.exp() * log_p).sum(-1)
    assert 1 < float(entropy.mean()) < 2.5
    assert 0.01 < float(log_p[..., EOS].exp().mean()) < 0.2
    assert (log_p[1:, 0] - log_p[:-1, 0]).abs().amax(dim=-1).median() > 0.1
    assert (log_p[:, 1:] - log_p[:, :-1]).abs().amax(dim=-1).median() > 0.1


@pytest.mark.parametrize("pad_is_eos", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_step_is_that_of_a_plain_forward_pass(kind: str, pad_is_eos: bool, tmp_path: Path) -> None:
    """Prompts of unequal length, one of them empty, side by side; pad may be EOS."""
    save(kind, tmp_path, **({"pad_token_id": EOS} if pad_is_eos else {}))
    tokenizer(appends_eos=kind in SEQ2SEQ, pad_is_eos=pad_is_eos).save_pretrained(tmp_path)
    model = load_model(tmp_path, length_limit=STEPS)
    assert model.refillable is (kind in SLOTTED) if kind in CAUSAL else not hasattr(model, "refill")
    tokens = random_tokens(len(PROMPTS), STEPS)
    expected = torch.stack([plain_log_p(tmp_path, *row) for row in zip(PROMPTS, tokens, strict=True)])
    state: Any = model.start(PROMPTS)
    for step in range(STEPS):
        assert_close(state.log_p, expected[:, step])
        state = model.step(state, tokens[:, step])
    assert_close(state.log_p, expected[:, STEPS])
    scores = model.score(PROMPTS, tokens, torch.full((len(PROMPTS),), STEPS))
    assert_close(scores, expected[:, :-1].gather(-1, tokens[..., None]).squeeze(-1))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma", "marian", "t5", "bart"])
def test_embeddings_tied_and_not(kind: str, folder: Callable[..., Path]) -> None:
    own = build(kind).config.tie_word_embeddings
    where = folder(kind, tie_word_embeddings=not own)
    model = load_model(where, length_limit=STEPS)
    tokens = random_tokens(1, STEPS)
    expected = plain_log_p(where, PROMPTS[1], tokens[0])[:-1].gather(-1, tokens[0][:, None])[:, 0]
    assert_close(model.score(PROMPTS[1:2], tokens, torch.tensor([STEPS]))[0], expected)


@pytest.mark.parametrize("kind", ["marian", "t5"])
def test_an_encoder_reads_equal_prompts_once(kind: str, folder: Callable[..., Path]) -> None:
    model: Any = load_model(folder(kind), length_limit=STEPS)
    prompts = [PROMPTS[at] for at in (1, 0, 1, 1, 0)]
    tokens, lengths = random_tokens(len(prompts), STEPS), torch.full((len(prompts),), STEPS)
    one_by_one = [model.score([prompts[at]], tokens[at : at + 1], lengths[:1]) for at in range(len(prompts))]
    encoder, seen = model.model.get_encoder(), []
    handle = encoder.register_forward_pre_hook(
        lambda module, arguments, named: seen.append(len(named["input_ids"])), with_kwargs=True
    )
    together = model.score(prompts, tokens, lengths)
    handle.remove()
    assert seen == [2]
    assert_close(together, torch.cat(one_by_one))


@pytest.mark.parametrize("completion", ["eos", "limit"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_family_keeps_the_contract(kind: str, completion: Any, folder: Callable[..., Path]) -> None:
    model = load_model(folder(kind), length_limit=8, completion=completion)
    check_language_model(model, PROMPTS, tolerance=1e-4)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral"])
def test_models_in_memory_keep_the_contract_whatever_their_attention(kind: str, attention: str) -> None:
    base = build(kind)
    base.set_attn_implementation(attention)
    check_language_model(CausalModel(base, tokenizer(), length_limit=8), PROMPTS, tolerance=1e-4)


@pytest.mark.parametrize("kind", ["llama", "mistral", "t5"])
def test_warped_models_keep_the_contract(kind: str, folder: Callable[..., Path]) -> None:
    warpers = Warpers(temperature=0.8, top_k=9, top_p=0.95, forced=(7, 8), forbidden=(PAD, 12))
    check_language_model(load_model(folder(kind), length_limit=6, warpers=warpers), PROMPTS, tolerance=1e-4)


@pytest.mark.parametrize("kind", ["gpt2", "mistral", "bart"])
def test_score_of_many_texts_of_unequal_length(kind: str, folder: Callable[..., Path]) -> None:
    model = load_model(folder(kind), length_limit=8)
    tokens, lengths = random_tokens(5, 8), torch.tensor([8, 1, 3, 0, 5])
    scores = model.score(PROMPTS, tokens.masked_fill(torch.arange(8) >= lengths[:, None], -100), lengths)
    for row, length in enumerate(lengths.tolist()):
        expected = plain_log_p(folder(kind), PROMPTS[row], tokens[row])
        chosen = expected[:-1].gather(-1, tokens[row][:, None])[:, 0]
        assert_close(scores[row, :length], chosen[:length])
        assert not scores[row, length:].any()


class BatchedProducts(TorchDispatchMode):
    """Widths of what products with a matrix for every row have made meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.widths: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.baddbmm):
            self.widths.append(made.shape[-1])
        return made


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_output_matrix_is_not_copied_for_every_row(kind: str, folder: Callable[..., Path]) -> None:
    model = load_model(folder(kind), length_limit=8)
    with BatchedProducts() as products:
        model.step(model.start(PROMPTS), random_tokens(5, 1)[:, 0])
        model.score(PROMPTS, random_tokens(5, 2), torch.full((5,), 2))
    assert V not in products.widths


# --- moving rows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_selected_rows_go_on_as_before(kind: str, folder: Callable[..., Path]) -> None:
    """Reordered, repeated and dropped, twice, with different tokens for the copies."""
    model: Any = load_model(folder(kind), length_limit=10)
    prompts, tokens = PROMPTS, [[] for _ in PROMPTS]
    state = model.start(prompts)
    for round_, rows in enumerate(([4, 1, 1, 0, 2, 3], [5, 0, 1, 2], [3])):
        for step in range(2):
            chosen = random_tokens(len(prompts), 1, seed=10 * round_ + step)[:, 0]
            state = model.step(state, chosen)
            tokens = [[*row, int(token)] for row, token in zip(tokens, chosen, strict=True)]
        state = model.select(state, torch.tensor(rows))
        prompts, tokens = [prompts[row] for row in rows], [tokens[row] for row in rows]
        for row, log_p in enumerate(state.log_p):
            assert_close(log_p, plain_log_p(folder(kind), prompts[row], tokens[row])[-1])


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("kind", SLOTTED)
def test_refilled_rows_are_as_if_started_alone(
    kind: str, prepared: bool, folder: Callable[..., Path]
) -> None:
    """Three slots, 24 prompts that get longer, rows ending at different times, until slots are outgrown."""
    model = load_model(folder(kind), length_limit=8)
    assert isinstance(model, CausalModel)
    words = [WORDS[i * 7 % len(WORDS)] for i in range(60)]
    prompts = [" ".join(words[i : 2 * i + i % 3]) for i in range(24)]
    if prepared:
        assert model.prepare(prompts[:12]) == 12
    waiting = iter(range(3, len(prompts)))
    owner, written = [0, 1, 2], [[], [], []]
    state = model.start(prompts[:3])
    widths = {cache_of(state).width}
    finished = 0
    for step in range(200):
        for row in range(3):
            assert_close(state.log_p[row], plain_log_p(folder(kind), prompts[owner[row]], written[row])[-1])
        done = [row for row in range(3) if len(written[row]) >= 2 + owner[row] % 6]
        fresh = [(row, prompt) for row, prompt in zip(done, waiting, strict=False)]
        if fresh:
            state = model.refill(state, torch.tensor([r for r, _ in fresh]), [prompts[p] for _, p in fresh])
            for row, prompt in fresh:
                owner[row], written[row] = prompt, []
            finished += len(fresh)
            widths.add(cache_of(state).width)
            continue
        if done:
            break
        chosen = random_tokens(3, 1, seed=step)[:, 0]
        state = model.step(state, chosen)
        written = [[*row, int(token)] for row, token in zip(written, chosen, strict=True)]
    assert finished > 18
    assert len(widths) > 1


def cache_of(state: Any) -> SlotCache:
    assert isinstance(state.cache, SlotCache)
    return state.cache


def test_refilling_is_refused_where_rows_have_no_slots(folder: Callable[..., Path]) -> None:
    model = load_model(folder("mistral"), length_limit=4)
    assert isinstance(model, CausalModel)
    assert not model.refillable
    assert model.prepare(PROMPTS) == 0
    with says(
        "expected a model with full attention and explicit positions, to refill rows; found "
        "MistralForCausalLM. Draw in whole batches instead: select the rows that are left, then start the "
        "next batch."
    ):
        model.refill(model.start(PROMPTS), torch.tensor([0]), ["a"])


@pytest.mark.parametrize("kind", SLOTTED)
def test_reading_ahead_changes_nothing(kind: str, folder: Callable[..., Path]) -> None:
    plain, ahead = (load_model(folder(kind), length_limit=6) for _ in range(2))
    assert isinstance(plain, CausalModel)
    assert isinstance(ahead, CausalModel)
    assert ahead.prepare(["beach", *PROMPTS, "the dog", "the man and the woman"]) == 7
    states = [model.start(PROMPTS) for model in (plain, ahead)]
    tokens = random_tokens(5, 3)
    for step in range(3):
        assert_close(states[0].log_p, states[1].log_p)
        states = [m.step(s, tokens[:, step]) for m, s in zip((plain, ahead), states, strict=True)]
    rows = torch.tensor([3, 0])
    for prompts in (["beach", "a"], ["the man and the woman", "beach"]):  # not read ahead; read ahead
        states = [m.refill(s, rows, prompts) for m, s in zip((plain, ahead), states, strict=True)]
        assert_close(states[0].log_p, states[1].log_p)
    # What was read ahead is copied, not handed over: a second start finds it as it was.
    assert_close(ahead.start(PROMPTS).log_p, plain.start(PROMPTS).log_p)


def test_reading_ahead_stops_where_memory_would_not_do(folder: Callable[..., Path]) -> None:
    model = load_model(folder("gpt2"), length_limit=4)
    assert isinstance(model, CausalModel)
    assert model.prepare([]) == 0
    wide = [
        " ".join([WORDS[i % 20], WORDS[i // 20 % 20], WORDS[i // 400], *["dog"] * 57]) for i in range(1200)
    ]
    fitted = model.prepare(wide)
    assert fitted == 2**16 // 60
    assert_close(
        model.start(wide[fitted - 1 : fitted + 1]).log_p[0], model.start(wide[fitted - 1 :][:1]).log_p[0]
    )


@pytest.mark.parametrize("kind", ["gpt2", "gemma", "mistral"])
def test_rows_stepped_far_past_the_context_do_no_harm(kind: str, folder: Callable[..., Path]) -> None:
    """Rows that ended wait for the others; they may wait longer than the model can read."""
    model: Any = load_model(folder(kind), length_limit=4)
    if kind == "mistral":  # no slots: a batch ends when its rows do
        state = model.start(["dog"])
        for _ in range(CONTEXT + 20):
            state = model.step(state, torch.tensor([EOS]))
        assert state.log_p.isfinite().all()
        return
    state = model.start(["the dog", "a cat"])
    for turn in range(30):
        prompt, tokens = PROMPTS[turn % 5], random_tokens(1, 4, seed=turn)[0]
        state = model.refill(state, torch.tensor([1]), [prompt])
        expected = plain_log_p(folder(kind), prompt, tokens)
        for step in range(4):
            assert_close(state.log_p[1], expected[step])
            state = model.step(state, torch.stack([torch.tensor(EOS), tokens[step]]))
        assert_close(state.log_p[1], expected[4])
    state = model.refill(state, torch.tensor([0]), ["the dog"])
    assert_close(state.log_p[0], plain_log_p(folder(kind), "the dog", [])[0])


def test_models_whose_layers_differ_do_without_slots() -> None:
    """Their caches cannot be one tensor. It was found out only after they had been called refillable."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        vocab_size=V, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4,
        v_head_dim=6, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        moe_intermediate_size=16, first_k_dense_replace=1, max_position_embeddings=64, eos_token_id=EOS,
        bos_token_id=BOS,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        base = DeepseekV3ForCausalLM(config).eval()
    model = CausalModel(base, tokenizer(), length_limit=6)
    assert not model.refillable
    assert model.prepare(PROMPTS) == 0
    check_language_model(model, PROMPTS, tolerance=1e-4)


def test_capped_attention_scores_stay_capped(tmp_path: Path) -> None:
    """Gemma 2 caps them; in some releases of transformers its default attention does not."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=V, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, sliding_window=6,
        attn_logit_softcapping=0.1, initializer_range=0.5, eos_token_id=EOS, bos_token_id=BOS,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    model = load_model(tmp_path, length_limit=6)
    for row, prompt in enumerate(PROMPTS):
        assert_close(model.start(PROMPTS).log_p[row], plain_log_p(tmp_path, prompt, [])[0])
    config.attn_logit_softcapping = None
    with torch.no_grad():
        without = Gemma2ForCausalLM.from_pretrained(tmp_path, config=config)(
            input_ids=torch.tensor(model.encode(PROMPTS[1:2]))
        )
    assert (without.logits[0, -1].log_softmax(-1) - model.start(PROMPTS).log_p[1]).abs().max() > 1e-3


# --- sampling -----------------------------------------------------------------------------------------


def with_two_ends(base: PreTrainedModel) -> PreTrainedModel:
    base.generation_config.eos_token_id = [EOS, 10, 22]
    return base


@pytest.mark.parametrize("ends", [1, 3])
@pytest.mark.parametrize(
    "warpers", [Warpers(), Warpers(temperature=0.6), Warpers(temperature=1.7), Warpers(top_k=5, top_p=0.9)]
)
def test_the_quick_sampler_takes_the_tokens_of_the_slow_one(ends: int, warpers: Warpers) -> None:
    """Token by token, for the same noise; several EOS ids included."""
    base = with_two_ends(build("llama")) if ends == 3 else build("llama")
    model = CausalModel(base, tokenizer(), length_limit=6, warpers=warpers)
    assert model.eos_ids == ((EOS, 10, 22) if ends == 3 else (EOS,))
    rows = torch.arange(300)
    state = model.start([PROMPTS[row % 5] for row in range(300)])
    for step in range(5):
        noise = uniforms(0, rows, torch.full_like(rows, step))
        tokens, log_p = model.sample(state, noise)
        assert torch.equal(tokens, sample(state.log_p, noise))
        assert_close(log_p, state.log_p.gather(-1, tokens[:, None])[:, 0])
        if ends == 3:
            assert not torch.isin(tokens, torch.tensor([10, 22])).any()
        state = model.step(state, tokens)


@pytest.mark.parametrize("ends", [1, 3])
def test_sampled_frequencies_are_p(ends: int) -> None:
    base = with_two_ends(build("llama")) if ends == 3 else build("llama")
    model = CausalModel(base, tokenizer(), length_limit=6, warpers=Warpers(temperature=1.3))
    draws = 20_000
    rows = torch.arange(draws)
    state = model.start(["the dog"] * draws)
    tokens, _ = model.sample(state, uniforms(5, rows, torch.zeros_like(rows)))
    with torch.no_grad():
        ids = torch.tensor([tokenizer()("the dog")["input_ids"]])
        p = (base(input_ids=ids).logits[0, -1].double() / 1.3).softmax(-1)
    if ends == 3:
        p[EOS], p[10], p[22] = p[[EOS, 10, 22]].sum(), 0, 0

    def p_value(counts: Tensor) -> float:
        kept = p > 0
        statistic = ((counts - p * draws) ** 2 / (p * draws))[kept].sum()
        return float(chi2.sf(float(statistic), int(kept.sum()) - 1))

    counts = tokens.bincount(minlength=V).double()
    assert p_value(counts) > FALSE_ALARM
    assert p_value(counts.roll(1)) < FALSE_ALARM  # a sampler one token off


def test_several_eos_ids_count_as_one(tmp_path: Path) -> None:
    where = save("gpt2", tmp_path)
    GenerationConfig(eos_token_id=[EOS, 10, 22]).save_pretrained(where)
    model = load_model(where, length_limit=6)
    log_p = model.start(["the dog"]).log_p[0]
    expected = plain_log_p(where, "the dog", [])[0]
    assert model.eos_id == EOS
    assert_close(log_p[EOS], expected[[EOS, 10, 22]].logsumexp(0))
    assert log_p[[10, 22]].isneginf().all()
    check_language_model(model, PROMPTS, tolerance=1e-4)


# --- eval mode, and nothing of the caller's changed ---------------------------------------------------


@pytest.mark.parametrize(("kind", "adapter"), [("llama", CausalModel), ("t5", EncoderDecoderModel)])
def test_a_model_in_training_mode_is_refused(kind: str, adapter: type[Model]) -> None:
    text = (
        "expected a model in eval mode, because dropout would change p; found one in training mode. "
        "Call model.eval() first."
    )
    with says(text):
        adapter(build(kind).train(), tokenizer(), length_limit=4)
    base = build(kind)
    model = adapter(base, tokenizer(appends_eos=kind == "t5"), length_limit=4)
    base.train()
    with says(text):
        model.start(["the dog"])
    base.eval()
    next(
        module for module in base.modules() if isinstance(module, torch.nn.Dropout | torch.nn.Linear)
    ).train()
    with says(text):
        adapter(base, tokenizer(), length_limit=4)


@pytest.mark.parametrize("kind", ["gpt2", "bart", "t5"])
def test_loaded_models_have_no_dropout(kind: str, tmp_path: Path) -> None:
    rates = {
        "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        "bart": ("dropout", "attention_dropout", "activation_dropout"),
        "t5": ("dropout_rate",),
    }
    save(kind, tmp_path, **dict.fromkeys(rates[kind], 0.5))
    model: Any = load_model(tmp_path, length_limit=4)
    assert torch.equal(model.start(PROMPTS).log_p, model.start(PROMPTS).log_p)
    assert not any(module.training for module in model.model.modules())


@pytest.mark.parametrize("kind", ["llama", "marian"])
def test_nothing_carries_gradients(kind: str, folder: Callable[..., Path]) -> None:
    model: Any = load_model(folder(kind), length_limit=4)
    assert not any(parameter.requires_grad for parameter in model.model.parameters())
    own = build(kind)
    in_memory: Any = (CausalModel if kind in CAUSAL else EncoderDecoderModel)(
        own, tokenizer(appends_eos=kind in SEQ2SEQ), length_limit=4
    )
    assert all(p.requires_grad for n, p in own.named_parameters() if "embed_positions" not in n)
    for one in (model, in_memory):
        state = one.step(one.start(PROMPTS), random_tokens(5, 1)[:, 0])
        scores = one.score(PROMPTS, random_tokens(5, 2), torch.full((5,), 2))
        assert not state.log_p.requires_grad
        assert not scores.requires_grad


@pytest.mark.parametrize(("kind", "adapter"), [("llama", CausalModel), ("bart", EncoderDecoderModel)])
def test_the_callers_model_and_tokenizer_come_back_unchanged(kind: str, adapter: type[Model]) -> None:
    base, words = build(kind), tokenizer(appends_eos=kind in SEQ2SEQ)
    words.padding_side = "right"

    def look() -> list[Any]:
        return [
            base.config.to_dict(), base.generation_config.to_dict(), base.config._attn_implementation,
            weights_digest(base), words.padding_side, words.pad_token, words.get_vocab(),
            words.backend_tokenizer.to_str(), [p.requires_grad for p in base.parameters()], base.training,
        ]  # fmt: skip

    before = look()
    model: Any = adapter(base, words, length_limit=4, warpers=Warpers(top_k=3, forced=(5,)))
    state = model.select(model.step(model.start(PROMPTS), random_tokens(5, 1)[:, 0]), torch.tensor([0, 0]))
    model.score(PROMPTS, random_tokens(5, 2), torch.full((5,), 2))
    model.decode([[5, 6]])
    assert state.log_p.shape == (2, V)
    assert look() == before


# --- refusals -----------------------------------------------------------------------------------------


def test_a_bare_string_is_not_a_list_of_prompts(folder: Callable[..., Path]) -> None:
    model: Any = load_model(folder("gpt2"), length_limit=4)
    text = "expected a list of prompts; found the bare string 'the dog'. Put it in a list: [prompt]."
    for ask in (model.start, model.encode, lambda p: model.score(p, random_tokens(1, 1), torch.tensor([1]))):
        with says(text):
            ask("the dog")
    with says("expected at least one prompt; found none. Give a list of prompts, [''] for an empty one."):
        model.start([])


def test_a_prompt_too_long_for_the_context(folder: Callable[..., Path]) -> None:
    causal: Any = load_model(folder("gpt2"), length_limit=60)
    causal.start(["dog dog dog dog"])
    with says(
        "expected prompts of at most 4 tokens (the model's context less the length limit of 60); found one "
        "of 5 tokens, beginning 'dog dog dog dog dog'. Shorten it, or lower the length limit."
    ):
        causal.start(["a", "dog dog dog dog dog"])
    seq2seq: Any = load_model(folder("marian"), length_limit=64)
    seq2seq.start([" ".join(["dog"] * 63)])
    with says(
        "expected prompts of at most 64 tokens (the model's context); found one of 65 tokens, beginning "
        "'dog dog dog dog dog dog dog dog dog dog '. Shorten it, or lower the length limit."
    ):
        seq2seq.start([" ".join(["dog"] * 64)])


@pytest.mark.parametrize(
    ("kind", "limit", "text"),
    [
        (
            "gpt2",
            64,
            "expected a length limit of at most 63 tokens for a context of 64; found 64. Lower the length "
            "limit.",
        ),
        (
            "bart",
            65,
            "expected a length limit of at most 64 tokens for a context of 64; found 65. Lower the length "
            "limit.",
        ),
        ("gpt2", 0, "expected a length limit of at least 1 token; found 0. It counts EOS too."),
    ],
)
def test_a_limit_that_cannot_be(kind: str, limit: int, text: str, folder: Callable[..., Path]) -> None:
    with says(text):
        load_model(folder(kind), length_limit=limit)


def test_a_limit_that_takes_the_whole_context_but_one_token(folder: Callable[..., Path]) -> None:
    check_language_model(load_model(folder("gpt2"), length_limit=63), ["dog", ""], tolerance=1e-4)
    check_language_model(load_model(folder("bart"), length_limit=64), ["dog", "a dog"], tolerance=1e-4)


def test_an_unknown_completion(folder: Callable[..., Path]) -> None:
    with says('expected completion "eos" or "limit"; found \'both\'. See nado.language_model.'):
        load_model(folder("gpt2"), length_limit=4, completion="both")  # type: ignore[arg-type]


def without_eos(base: PreTrainedModel) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    base.config.eos_token_id = base.generation_config.eos_token_id = None
    words = tokenizer()
    words.eos_token = None
    return base, words


def test_a_model_that_cannot_end_a_text() -> None:
    with says(
        "expected a model that can end a text; found no EOS id in config or tokenizer. Set "
        "tokenizer.eos_token first."
    ):
        CausalModel(*without_eos(build("gpt2")), length_limit=4)


def test_eos_comes_from_the_tokenizer_at_last() -> None:
    base, _ = without_eos(build("gpt2"))
    assert CausalModel(base, tokenizer(), length_limit=4).eos_ids == (EOS,)


def test_an_eos_id_outside_the_vocabulary() -> None:
    base = build("gpt2")
    base.generation_config.eos_token_id = 50256
    with says(
        "expected an EOS id inside the vocabulary of 24 tokens; found 50256 in GenerationConfig. Set "
        "eos_token_id there to the token that ends a text."
    ):
        CausalModel(base, tokenizer(), length_limit=4)


def test_warpers_of_another_vocabulary() -> None:
    for name in ("forced", "forbidden"):
        with says(
            f"expected {name} tokens inside the vocabulary of 24; found 24. Use the ids of this model's own "
            "tokenizer."
        ):
            CausalModel(build("gpt2"), tokenizer(), length_limit=4, warpers=Warpers(**{name: (3, 24)}))


def test_forbidding_every_end() -> None:
    warpers = Warpers(forbidden=(EOS,))
    with says(
        'expected a text that can end, because completion is "eos"; found every EOS id among the forbidden '
        'tokens. Allow one of them, or use completion="limit".'
    ):
        CausalModel(build("gpt2"), tokenizer(), length_limit=4, warpers=warpers)
    CausalModel(build("gpt2"), tokenizer(), length_limit=4, warpers=warpers, completion="limit")


def test_a_decoder_that_does_not_know_where_to_start() -> None:
    base = build("t5")
    base.config.decoder_start_token_id = base.generation_config.decoder_start_token_id = None
    with says(
        "expected a config with decoder_start_token_id; found none. Set it on the model's config before "
        "loading it here."
    ):
        EncoderDecoderModel(base, tokenizer(appends_eos=True), length_limit=4)


def test_recurrent_models_are_refused() -> None:
    base = MambaForCausalLM(
        MambaConfig(vocab_size=V, hidden_size=16, num_hidden_layers=1, eos_token_id=EOS)
    ).eval()
    with says(
        "expected a causal model with a key–value cache; found MambaForCausalLM, whose forward takes no "
        "past_key_values. Use another architecture: recurrent models and models without a cache are not "
        "supported."
    ):
        CausalModel(base, tokenizer(), length_limit=4)


def test_models_that_look_ahead_are_refused() -> None:
    """BERT without is_decoder: AutoModelForCausalLM loads it, and every log-probability would be wrong."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        base = BertLMHeadModel(
            BertConfig(vocab_size=V, eos_token_id=EOS, initializer_range=0.5, **sizes)
        ).eval()
    with pytest.raises(InputError) as caught:
        CausalModel(base, tokenizer(), length_limit=4)
    assert caught.value.expected == "a model that gives padded rows the probabilities they have alone"
    assert caught.value.found.startswith("BertLMHeadModel, where they differ by 0.")
    assert caught.value.found.endswith(" in total variation")
    assert caught.value.hint == (
        "Use another architecture: this one reads padding, looks ahead, or keeps no cache."
    )


@pytest.mark.parametrize("name", ["/nowhere/model", "./nowhere", Path("nowhere")])
def test_a_folder_that_is_not_there(name: str | Path) -> None:
    with says(f"expected a model folder; found nothing at {name}. Check the path, or give a hub name."):
        load_model(name, length_limit=4)


# --- chat and decoding --------------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}<s> man {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}woman{% endif %}"
)


def test_prompts_are_put_into_the_chat_template(tmp_path: Path) -> None:
    where = save("llama", tmp_path)
    words = tokenizer()
    words.chat_template = TEMPLATE
    words.save_pretrained(where)
    model: Any = load_model(where, length_limit=4, chat=True)
    ids = [VOCABULARY.index(word) for word in ("<s>", "man", "the", "dog", "woman")]
    assert model.encode(["the dog"]) == [ids]
    plain: Any = load_model(where, length_limit=4)
    assert plain.encode(["the dog"]) == [ids[2:4]]
    with torch.no_grad():
        expected = raw(where)(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    assert_close(model.start(["the dog"]).log_p[0], expected)
    assert model.fingerprint != plain.fingerprint
    check_language_model(model, PROMPTS, tolerance=1e-4)


def test_chat_without_a_template(folder: Callable[..., Path]) -> None:
    where = folder("llama")
    with says(
        f"expected a tokenizer with a chat template, because chat is on; found none in {where}. Turn chat "
        "off, or load an instruction-tuned checkpoint."
    ):
        load_model(where, length_limit=4, chat=True)


def test_an_empty_prompt_is_bos_or_else_eos() -> None:
    base, words = build("gpt2"), tokenizer()
    assert CausalModel(base, words, length_limit=4).encode(["", "dog"]) == [[BOS], [VOCABULARY.index("dog")]]
    words.bos_token = None
    assert CausalModel(base, words, length_limit=4).encode([""]) == [[EOS]]


def byte_pairs() -> PreTrainedTokenizerFast:
    letters = {letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet())[:V])}
    inner = Tokenizer(BPE(vocab=letters, merges=[]))
    inner.pre_tokenizer, inner.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token='"', bos_token="#")


class Shouting(PreTrainedTokenizerFast):
    """A class of its own way to decode."""

    def _decode(self, *args: Any, **kwargs: Any) -> str:
        return super()._decode(*args, **kwargs).upper()


@pytest.mark.parametrize("tidies", [False, True])
@pytest.mark.parametrize(
    "make", [tokenizer, byte_pairs, lambda: Shouting(tokenizer_object=tokenizer()._tokenizer)]
)
def test_texts_are_those_of_batch_decode(make: Callable[[], PreTrainedTokenizerFast], tidies: bool) -> None:
    """Spaces before full stops are tidied for some tokenizers; they were for WordPiece alone."""
    words = make()
    words.clean_up_tokenization_spaces = tidies
    base = build("gpt2")
    model = CausalModel(base, words, length_limit=8)
    rows = [row.tolist() for row in random_tokens(20, 8, seed=3)] + [[], [5]]
    assert model.decode(rows) == words.batch_decode(rows, skip_special_tokens=True)
    assert model.decode([]) == []
    assert model.decode(torch.tensor(rows[:20])) == model.decode(rows[:20])


def test_what_follows_eos_is_not_text(folder: Callable[..., Path]) -> None:
    model = load_model(folder("gpt2"), length_limit=8)
    dog, cat = VOCABULARY.index("dog"), VOCABULARY.index("cat")
    assert model.decode([[dog, EOS, cat], [EOS, dog], [PAD, dog, BOS, cat]]) == ["dog", "", "dog cat"]


def test_a_vocabulary_larger_than_the_tokenizer() -> None:
    model = CausalModel(build("gpt2", vocab_size=32), tokenizer(), length_limit=8)
    assert model.vocabulary_size == 32
    assert model.decode([[VOCABULARY.index("dog"), 31]]) == ["dog"]
    check_language_model(model, PROMPTS, tolerance=1e-4)


class Headless(LlamaForCausalLM):
    """A model that does not say where its output layer is."""

    def get_output_embeddings(self) -> None:
        return None


def test_a_model_without_output_embeddings() -> None:
    base = Headless(build("llama").config).eval()
    assert CausalModel(base, tokenizer(), length_limit=4).vocabulary_size == V


# --- a checkpoint's own generation config -------------------------------------------------------------


def with_settings(folder: Path, **settings: Any) -> Path:
    GenerationConfig(eos_token_id=EOS, **settings).save_pretrained(folder)
    return folder


@pytest.fixture
def warnings_of_loading(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.WARNING, logger="nado"):
        yield caplog


def test_a_generation_config_is_not_inherited_silently(
    tmp_path: Path, warnings_of_loading: pytest.LogCaptureFixture
) -> None:
    where = save("llama", tmp_path)
    plain = load_model(where, length_limit=4).start(PROMPTS).log_p
    assert warnings_of_loading.messages == []
    with_settings(where, do_sample=True, temperature=0.6, top_k=50, top_p=0.9, repetition_penalty=1.2)
    model = load_model(where, length_limit=4)
    assert warnings_of_loading.messages == [
        f"{where}: its generation config sets temperature=0.6, top_k=50, top_p=0.9, repetition_penalty=1.2; "
        'p does not use it. Declare Warpers(...), or pass warpers="checkpoint", to make it part of p.'
    ]
    assert model.warpers == Warpers()
    assert_close(model.start(PROMPTS).log_p, plain)


def test_forced_and_forbidden_tokens_are_reported_too(
    tmp_path: Path, warnings_of_loading: pytest.LogCaptureFixture
) -> None:
    where = save("marian", tmp_path)
    with_settings(where, bad_words_ids=[[PAD]], forced_bos_token_id=5, forced_eos_token_id=EOS)
    load_model(where, length_limit=4)
    assert warnings_of_loading.messages == [
        f"{where}: its generation config sets bad_words_ids=[[0]], forced_bos_token_id=5, "
        'forced_eos_token_id=1; p does not use it. Declare Warpers(...), or pass warpers="checkpoint", '
        "to make it part of p."
    ]


def test_a_generation_config_is_taken_when_asked_for(
    tmp_path: Path, warnings_of_loading: pytest.LogCaptureFixture
) -> None:
    where = with_settings(
        save("t5", tmp_path), do_sample=True, temperature=0.6, top_k=7, top_p=0.9,
        bad_words_ids=[[4], [EOS]], suppress_tokens=[9, 4], forced_bos_token_id=12,
    )  # fmt: skip
    model = load_model(where, length_limit=4, warpers="checkpoint")
    assert model.warpers == Warpers(0.6, 7, 0.9, forced=(12,), forbidden=(4, 9))
    assert warnings_of_loading.messages == []
    assert model.start(["the dog"]).log_p[0, 12] == 0


def test_sampling_settings_of_a_greedy_checkpoint_are_not_its_warpers() -> None:
    settings = GenerationConfig(do_sample=False, temperature=0.6, top_k=7, suppress_tokens=[3])
    assert checkpoint_warpers(settings) == Warpers(forbidden=(3,))
    assert checkpoint_warpers(GenerationConfig()) == Warpers()


def test_settings_that_cannot_be_part_of_p_are_refused() -> None:
    with says(
        "expected a generation config of temperature, top-k, top-p, forced and forbidden tokens; found "
        "repetition_penalty=1.3, no_repeat_ngram_size=3. Declare Warpers(...) yourself: these settings "
        "depend on more than the next token."
    ):
        checkpoint_warpers(GenerationConfig(repetition_penalty=1.3, no_repeat_ngram_size=3, top_k=4))
    with says(
        "expected bad_words_ids of one token each; found [4, 5]. Forbid longer phrases with an oracle "
        "instead."
    ):
        checkpoint_warpers(GenerationConfig(bad_words_ids=[[3], [4, 5]]))


# --- fingerprints -------------------------------------------------------------------------------------


def test_a_fingerprint_tells_models_apart_and_precisions_not(folder: Callable[..., Path]) -> None:
    where = folder("llama")
    base = load_model(where, length_limit=4)
    same = [
        load_model(where, length_limit=4, dtype=torch.bfloat16),
        load_model(where, length_limit=4, dtype="auto"),
        load_model(where, length_limit=4, device_map="cpu"),
        CausalModel(build("llama"), AutoTokenizer.from_pretrained(where), length_limit=4),
    ]
    assert {model.fingerprint for model in same} == {base.fingerprint}
    words = tokenizer()
    words.add_tokens(["penguin"])
    others = [
        load_model(where, length_limit=5),
        load_model(where, length_limit=4, completion="limit"),
        load_model(where, length_limit=4, warpers=Warpers(temperature=0.9)),
        load_model(where, length_limit=4, warpers=Warpers(forbidden=(9,))),
        CausalModel(build("llama", seed=1), tokenizer(), length_limit=4),
        CausalModel(build("llama"), words, length_limit=4),
        CausalModel(build("llama"), tokenizer(appends_eos=True), length_limit=4),
        CausalModel(with_two_ends(build("llama")), tokenizer(), length_limit=4),
        load_model(folder("gpt2"), length_limit=4),
    ]
    assert len({model.fingerprint for model in [base, *others]}) == 1 + len(others)


def test_one_changed_weight_changes_the_digest() -> None:
    """Also one that is not among the values looked at one by one."""
    base = build("llama", vocab_size=2000)
    before = weights_digest(base)
    with torch.no_grad():
        base.model.embed_tokens.weight[1234, 5] += 0.01
    assert weights_digest(base) != before


def test_a_fingerprint_is_the_same_in_another_process(folder: Callable[..., Path]) -> None:
    where = folder("t5")
    script = (
        "import sys; from nado.huggingface import load_model; "
        "print(load_model(sys.argv[1], length_limit=4).fingerprint)"
    )
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    run = subprocess.run(
        [sys.executable, "-c", script, str(where)],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    assert run.stdout.strip() == load_model(where, length_limit=4).fingerprint


# --- adapters, remote code, devices -------------------------------------------------------------------


def lora_on(where: Path, target: Path) -> Any:
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(where)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        adapted = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(0, 0.5)
    adapted.save_pretrained(target)
    return adapted.eval()


def test_an_adapter_is_loaded_and_merged(folder: Callable[..., Path], tmp_path: Path) -> None:
    adapted = lora_on(folder("llama"), tmp_path)
    model: Any = load_model(folder("llama"), length_limit=6, adapter=tmp_path)
    plain: Any = load_model(folder("llama"), length_limit=6)
    assert type(model.model) is LlamaForCausalLM
    with torch.no_grad():
        expected = adapted(input_ids=torch.tensor(model.encode(["the dog"]))).logits[0, -1].log_softmax(-1)
    assert_close(model.start(["the dog"]).log_p[0], expected)
    assert (plain.start(["the dog"]).log_p[0] - expected).abs().max() > 0.1
    assert model.fingerprint != plain.fingerprint
    assert model.refillable
    check_language_model(model, PROMPTS, tolerance=1e-4)
    # Not merged, as on quantised weights: the base with the adapter in its layers.
    inside = CausalModel(adapted.get_base_model(), tokenizer(), length_limit=6)
    assert_close(inside.start(PROMPTS).log_p, model.start(PROMPTS).log_p)


def test_a_base_with_an_adapter_is_one_base_in_any_precision(
    folder: Callable[..., Path], tmp_path: Path
) -> None:
    """A guide trained beside it on a GPU, in bfloat16, belongs to it on a CPU too."""
    lora_on(folder("llama"), tmp_path)
    wide, narrow = (
        load_model(folder("llama"), length_limit=6, adapter=tmp_path, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert narrow.model.dtype == torch.bfloat16
    assert narrow.fingerprint == wide.fingerprint


def test_an_adapter_that_is_not_there(folder: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    where = folder("llama")
    with says(
        f"expected a model folder; found nothing at {tmp_path / 'no'}. Check the path, or give a hub name."
    ):
        load_model(where, length_limit=4, adapter=tmp_path / "no")
    hint = "Save one with save_pretrained of the PEFT model."
    with says(f"expected a PEFT adapter with adapter_config.json; found none in {tmp_path}. {hint}"):
        load_model(where, length_limit=4, adapter=tmp_path)
    lora_on(where, tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    with says(f"expected a PEFT adapter with adapter_model.safetensors; found none in {tmp_path}. {hint}"):
        load_model(where, length_limit=4, adapter=tmp_path)


def test_prompt_tuning_is_refused(folder: Callable[..., Path], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(folder("llama"))
    peft.get_peft_model(
        base, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    ).save_pretrained(tmp_path)
    with says(
        f"expected an adapter that changes weights, such as LoRA; found PROMPT_TUNING in {tmp_path}. Prompt "
        "tuning adds tokens that no prompt here has; train a LoRA adapter instead."
    ):
        load_model(folder("llama"), length_limit=4, adapter=tmp_path)


def test_code_in_a_checkpoint_is_not_run_unless_asked_for(tmp_path: Path) -> None:
    where, marker = tmp_path / "model", tmp_path / "it_ran"
    save("llama", where)
    config = json.loads((where / "config.json").read_text())
    config |= {"model_type": "homemade", "auto_map": {"AutoConfig": "homemade.HomemadeConfig"}}
    (where / "config.json").write_text(json.dumps(config))
    (where / "homemade.py").write_text(
        "from pathlib import Path\n"
        "from transformers import LlamaConfig\n"
        f"Path({str(marker)!r}).touch()\n"
        "class HomemadeConfig(LlamaConfig):\n"
        "    model_type = 'homemade'\n"
    )
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        load_model(where, length_limit=4)
    assert not marker.exists()


def test_weights_put_aside_by_a_device_map(folder: Callable[..., Path]) -> None:
    """On disk until they are needed: slower, the same p, the same fingerprint."""
    where = folder("llama")
    parts = [
        "model.embed_tokens",
        "model.layers.0",
        "model.layers.1",
        "model.norm",
        "model.rotary_emb",
        "lm_head",
    ]
    places = dict.fromkeys(parts, "cpu") | {"model.embed_tokens": "disk", "model.layers.1": "disk"}
    model: Any = load_model(where, length_limit=4, device_map=places)
    plain: Any = load_model(where, length_limit=4)
    assert model.device == torch.device("cpu")
    assert not model.refillable
    assert model.fingerprint == plain.fingerprint
    assert_close(model.start(PROMPTS).log_p, plain.start(PROMPTS).log_p)
    check_language_model(model, PROMPTS[:3], tolerance=1e-4, max_steps=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["llama", "mistral", "t5"])
def test_low_precision_gives_float32_log_p(
    kind: str, dtype: torch.dtype, folder: Callable[..., Path]
) -> None:
    model: Any = load_model(folder(kind), length_limit=6, dtype=dtype)
    assert {p.dtype for p in model.model.parameters()} <= {dtype, torch.float32}
    log_p = model.start(PROMPTS).log_p
    assert log_p.dtype == torch.float32
    assert (
        log_p.exp() - load_model(folder(kind), length_limit=6).start(PROMPTS).log_p.exp()
    ).abs().max() < 0.05


@pytest.mark.parametrize(
    ("kind", "experts", "expected"),
    [
        ("llama", "grouped_mm", False),
        ("qwen3_moe", "eager", True),
        ("qwen3_moe", "batched_mm", False),
        ("qwen3_moe", "grouped_mm", True),  # torch's fused product takes bfloat16 alone
    ],
)
def test_experts_that_are_looked_up_on_the_host_are_not_captured(
    kind: str, experts: str, expected: bool
) -> None:
    model = build(kind)
    model.config._experts_implementation = experts
    assert _reads_on_host(model) == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("kind", SLOTTED)
def test_captured_steps_on_a_gpu_are_plain_ones(kind: str, folder: Callable[..., Path]) -> None:
    """Through every way a captured state is made, moved, outgrown, dropped and used again."""
    model = load_model(folder(kind), length_limit=8, dtype=torch.float32, device="cuda")
    assert isinstance(model, CausalModel)

    def follow(state: Any, texts: list[tuple[str, list[int]]], steps: int, seed: int) -> Any:
        tokens = random_tokens(len(texts), steps, seed)
        for step in range(steps + 1):
            for row, (prompt, written) in enumerate(texts):
                expected = plain_log_p(folder(kind), prompt, [*written, *tokens[row, :step].tolist()])[-1]
                torch.testing.assert_close(state.log_p[row].cpu(), expected, atol=1e-3, rtol=0)
            if step < steps:
                assert (state.replay is None) == (kind == "qwen3_moe")  # in float32 experts are not recorded
                state = model.step(state, tokens[:, step].cuda())
        for (_, written), row in zip(texts, tokens, strict=True):
            written += row.tolist()
        return state

    for turn in range(2):
        texts: list[tuple[str, list[int]]] = [(prompt, []) for prompt in PROMPTS]
        state = follow(model.start(PROMPTS), texts, 2, seed=turn)
        captured = state.replay
        order = [3, 0, 0, 4, 1]
        state = model.select(state, torch.tensor(order, device="cuda"))
        assert state.replay is captured  # as many rows as before: nothing to record again
        texts = [(texts[row][0], list(texts[row][1])) for row in order]
        state = follow(state, texts, 1, seed=10 + turn)
        longer = " ".join(WORDS[:19] * 2)
        state = model.refill(state, torch.tensor([2], device="cuda"), [longer])
        texts[2] = (longer, [])
        state = follow(state, texts, 2, seed=20 + turn)
        state = model.select(state, torch.tensor([2, 1], device="cuda"))
        texts = [(texts[row][0], list(texts[row][1])) for row in (2, 1)]
        follow(state, texts, 2, seed=30 + turn)
        del state
    state, other = model.start(PROMPTS), model.start(PROMPTS)  # two at once share nothing
    follow(state, [(prompt, []) for prompt in PROMPTS], 3, seed=40)
    follow(other, [(prompt, []) for prompt in PROMPTS], 3, seed=41)
    captured = other.replay
    del state, other
    state = model.start(PROMPTS[::-1])  # what was dropped last is used again
    assert state.replay is captured
    follow(state, [(prompt, []) for prompt in PROMPTS[::-1]], 3, seed=42)


# --- GGUF ---------------------------------------------------------------------------------------------


def test_a_gguf_file_that_is_not_there(tmp_path: Path) -> None:
    with says(f"expected a GGUF file; found nothing at {tmp_path / 'no.gguf'}. Check the path."):
        load_model(tmp_path / "no.gguf", length_limit=4)


def test_a_gguf_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "page.gguf").write_text("<html>not found</html>")
    with says(f"expected a GGUF file; found something else in {tmp_path / 'page.gguf'}. Download it again."):
        load_model(tmp_path / "page.gguf", length_limit=4)


SMOLLM2 = os.environ.get("NADO_SMOLLM2_GGUF")


@pytest.mark.slow
@pytest.mark.skipif(SMOLLM2 is None, reason="NADO_SMOLLM2_GGUF does not name a GGUF file of SmolLM2-135M")
def test_smollm2_from_its_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Converted once, even if the first attempt is killed; what is drawn records teacher-forced log p."""
    from nado.drawing import draw_rows
    from nado.prompts import Prompt
    from nado.proposals import Proposal

    assert SMOLLM2 is not None
    monkeypatch.setenv("NADO_CACHE", str(tmp_path))
    root = tmp_path / "gguf"
    kill_while_converting(SMOLLM2, root)
    assert [path for path in root.iterdir() if not path.name.startswith(".building-")] == []

    began = time.monotonic()
    model = load_model(SMOLLM2, length_limit=16)
    first = time.monotonic() - began
    (converted,) = (path for path in root.iterdir() if not path.name.startswith(".building-"))
    written = (converted / "model.safetensors").stat().st_mtime_ns
    assert model.vocabulary_size == 49152
    assert isinstance(model, CausalModel)
    assert model.refillable

    prompts = [
        Prompt(text, text) for text in ("The dog", "Once upon a time there was a", "", "In 1969,")
    ] * 16
    table = draw_rows(model, prompts, range(64), proposal=Proposal(), seed=0, batch_size=16)
    lengths = torch.tensor([len(row) for row in table["tokens"].to_pylist()])
    tokens = torch.full((64, 16), model.eos_id)
    for row, drawn in enumerate(table["tokens"].to_pylist()):
        tokens[row, : len(drawn)] = torch.tensor(drawn)
    scores = model.score([prompt.prompt for prompt in prompts], tokens, lengths)
    for row, recorded in enumerate(table["log_p"].to_pylist()):
        torch.testing.assert_close(scores[row, : len(recorded)], torch.tensor(recorded), atol=1e-3, rtol=0)
    assert all(text.strip() for text in table["text"].to_pylist()[:4])

    began = time.monotonic()
    again = load_model(SMOLLM2, length_limit=16)
    assert time.monotonic() - began < first
    assert (converted / "model.safetensors").stat().st_mtime_ns == written
    assert again.fingerprint == model.fingerprint


def kill_while_converting(file: str, root: Path) -> None:
    script = "import sys; from nado.huggingface import load_model; load_model(sys.argv[1], length_limit=4)"
    process = subprocess.Popen([sys.executable, "-c", script, file], stderr=subprocess.DEVNULL)
    try:
        while not (root.is_dir() and any(root.iterdir())):
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
