"""Real architectures with random weights and a word tokenizer, small enough to build in a test."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
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

CAUSAL = ("gpt2", "llama", "gemma", "mistral")
SEQ2SEQ = ("marian", "t5", "bart")


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


def build(kind: str, seed: int = 0, scale: float = 0.6) -> PreTrainedModel:
    """A model of the given family whose next-token distributions are far from uniform."""
    special: dict[str, Any] = {"vocab_size": V, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": BOS}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = _BUILDERS[kind](special)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(0, scale / parameter.shape[-1] ** 0.5)
        embeddings = model.get_output_embeddings()
        embeddings.weight.data.normal_(0, scale)
    return model.eval()


def save(kind: str, folder: Path, seed: int = 0) -> Path:
    build(kind, seed).save_pretrained(folder)
    tokenizer(appends_eos=kind in SEQ2SEQ).save_pretrained(folder)
    return folder


def _gpt2(special: dict[str, Any]) -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **special))


def _llama(special: dict[str, Any]) -> PreTrainedModel:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(
        LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, **sizes, **special)
    )


def _gemma(special: dict[str, Any]) -> PreTrainedModel:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64}
    return GemmaForCausalLM(
        GemmaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, **sizes, **special)
    )


def _mistral(special: dict[str, Any]) -> PreTrainedModel:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return MistralForCausalLM(
        MistralConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, sliding_window=6, **sizes, **special
        )
    )


def _marian(special: dict[str, Any]) -> PreTrainedModel:
    sizes = {
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_position_embeddings": 64,
    }
    return MarianMTModel(
        MarianConfig(d_model=32, decoder_start_token_id=PAD, forced_eos_token_id=None, **sizes, **special)
    )


def _bart(special: dict[str, Any]) -> PreTrainedModel:
    sizes = {
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_position_embeddings": 64,
    }
    return BartForConditionalGeneration(
        BartConfig(d_model=32, decoder_start_token_id=EOS, forced_eos_token_id=None, **sizes, **special)
    )


def _t5(special: dict[str, Any]) -> PreTrainedModel:
    sizes = {"d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(d_model=32, decoder_start_token_id=PAD, **sizes, **special))


_BUILDERS = {
    "gpt2": _gpt2,
    "llama": _llama,
    "gemma": _gemma,
    "mistral": _mistral,
    "marian": _marian,
    "bart": _bart,
    "t5": _t5,
}
