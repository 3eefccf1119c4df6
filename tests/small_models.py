"""Real architectures with random weights and a word tokenizer, small enough to build in a test.

Random weights give either flat or near-certain next tokens. Here the gain of the last norm is set so that
every family is moderately sure of what comes next, and has random signs so that tied embeddings do not make
a model repeat its last token: texts vary, and they end.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MarianConfig,
    MarianMTModel,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

WORDS = [
    *("the", "a", "dog", "cat", "ball", "beach", "runs", "sees", "throws", "on"),
    *("with", "and", "man", "woman", "old", "red", "park", ".", ",", "!"),
]
PAD, EOS, BOS, UNK = 0, 1, 2, 3
VOCABULARY = ["<pad>", "</s>", "<s>", "<unk>", *WORDS]
V = len(VOCABULARY)
CONTEXT = 64  # the most tokens any of them can read, T5 apart

CAUSAL = ("gpt2", "llama", "gemma", "mistral", "qwen3_moe")
SEQ2SEQ = ("marian", "t5", "bart")

_SPREAD = 2.0  # standard deviation of the logits: entropies of 1 to 2.5 nats, of at most log 24 = 3.2


def tokenizer(*, appends_eos: bool = False, pad_is_eos: bool = False) -> PreTrainedTokenizerFast:
    inner = Tokenizer(WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    inner.pre_tokenizer = Whitespace()
    if appends_eos:
        inner.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", EOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="</s>",
        bos_token="<s>",
        unk_token="<unk>",
        pad_token="</s>" if pad_is_eos else "<pad>",
    )


def build(kind: str, seed: int = 0, **config: Any) -> PreTrainedModel:
    """A model of the given family; `config` overrides its config, `tie_word_embeddings` for instance."""
    special: dict[str, Any] = {"vocab_size": V, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": BOS}
    with torch.random.fork_rng(devices=[]):
        for attempt in range(100):
            torch.manual_seed(100 * seed + attempt)
            model = _BUILDERS[kind](special | config).eval()
            if _randomise(model) or model.config.vocab_size != V:
                return model
    raise AssertionError(f"no random {kind} ends its texts")


def save(kind: str, folder: Path, seed: int = 0, **config: Any) -> Path:
    build(kind, seed, **config).save_pretrained(folder)
    tokenizer(appends_eos=kind in SEQ2SEQ).save_pretrained(folder)
    return folder


@torch.no_grad()
def _randomise(model: PreTrainedModel) -> bool:
    """Random weights with a calibrated last norm; says whether EOS is about as likely as it should be."""
    for parameter in model.parameters():
        if parameter.ndim > 1 and parameter.requires_grad:
            parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)
    model.get_input_embeddings().weight.normal_()  # as large as positions, which would drown it otherwise
    decoder = model.get_decoder() if model.config.is_encoder_decoder else model.base_model
    last = [module for module in decoder.modules() if type(module).__name__.endswith("Norm")][-1]
    ids = torch.randint(4, model.config.vocab_size, (32, 12))
    gain = torch.randn_like(last.weight)
    offset = 1 if type(last).__name__ == "GemmaRMSNorm" else 0  # Gemma's norms count their gain from 1
    last.weight.copy_(gain - offset)
    last.weight.copy_(gain * _SPREAD / _logits(model, ids).std(dim=-1).mean() - offset)
    return 0.05 < float(_logits(model, ids).softmax(dim=-1)[..., EOS].mean()) < 0.12


def _logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    if not model.config.is_encoder_decoder:
        return torch.as_tensor(model(input_ids=ids).logits)
    prompts = torch.cat([ids.flip(0)[:, :5], torch.full((len(ids), 1), EOS)], dim=1)
    return torch.as_tensor(model(input_ids=prompts, decoder_input_ids=ids).logits)


def _gpt2(config: dict[str, Any]) -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT, **config))


def _decoder_sizes(**sizes: int) -> dict[str, Any]:
    common = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return common | {"num_key_value_heads": 2, "max_position_embeddings": CONTEXT} | sizes


def _llama(config: dict[str, Any]) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**_decoder_sizes(), **config))


def _gemma(config: dict[str, Any]) -> PreTrainedModel:
    return GemmaForCausalLM(GemmaConfig(**_decoder_sizes(num_key_value_heads=1, head_dim=8), **config))


def _mistral(config: dict[str, Any]) -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**_decoder_sizes(sliding_window=6), **config))


def _qwen3_moe(config: dict[str, Any]) -> PreTrainedModel:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 12}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_decoder_sizes(**experts), **config))


def _marian(config: dict[str, Any]) -> PreTrainedModel:
    return MarianMTModel(MarianConfig(decoder_start_token_id=PAD, **_SEQ2SEQ_SIZES, **config))


def _bart(config: dict[str, Any]) -> PreTrainedModel:
    return BartForConditionalGeneration(
        BartConfig(decoder_start_token_id=EOS, **_SEQ2SEQ_SIZES, **({"tie_word_embeddings": False} | config))
    )


def _t5(config: dict[str, Any]) -> PreTrainedModel:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(decoder_start_token_id=PAD, **sizes, **config))


_SEQ2SEQ_SIZES: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": CONTEXT,
    "forced_eos_token_id": None,
}

_BUILDERS = {
    "gpt2": _gpt2,
    "llama": _llama,
    "gemma": _gemma,
    "mistral": _mistral,
    "qwen3_moe": _qwen3_moe,
    "marian": _marian,
    "bart": _bart,
    "t5": _t5,
}
