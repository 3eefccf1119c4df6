"""Loading checkpoints: hub names, folders, GGUF files, adapters, quantised weights."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)

from nado.errors import InputError, MissingPackageError, NadoError, unloadable
from nado.huggingface.attention import use_grouped_attention
from nado.huggingface.causal import CausalModel
from nado.huggingface.encoder_decoder import EncoderDecoderModel
from nado.huggingface.gguf_files import converted_gguf
from nado.language_model import Completion
from nado.tiny import locate_base
from nado.warpers import Warpers

log = logging.getLogger(__name__)

Dtype: TypeAlias = torch.dtype | Literal["auto"]

# Generation settings that would change p if they were inherited, with the values that change nothing. A
# checkpoint that does not set one leaves it None: transformers' own top_k = 50 is no checkpoint's wish.
_NEUTRAL_SETTINGS: dict[str, tuple[Any, ...]] = {
    "temperature": (None, 1.0),
    "top_k": (None, 0),
    "top_p": (None, 1.0),
    "min_p": (None, 0.0),
    "top_h": (None,),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "repetition_penalty": (None, 1.0),
    "encoder_repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None,),
    "suppress_tokens": (None,),
    "begin_suppress_tokens": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "sequence_bias": (None,),
    "exponential_decay_length_penalty": (None,),
    "guidance_scale": (None, 1.0),
    "watermarking_config": (None,),
}


def load_model(
    name: str | Path,
    *,
    length_limit: int,
    completion: Completion = "eos",
    warpers: Warpers | Literal["checkpoint"] | None = None,
    chat: bool = False,
    adapter: str | Path | None = None,
    dtype: Dtype | None = None,
    device: str | torch.device | None = None,
    device_map: Any = None,
    quantization_config: Any = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    cuda_graphs: bool = True,
    compiled: bool = False,
) -> CausalModel | EncoderDecoderModel:
    """A language model from a hub name, a local folder or a `.gguf` file; `tiny` is the embedded one.

    `warpers="checkpoint"` takes the warpers of the checkpoint's own generation config; otherwise that
    config is ignored, and what it would have changed is logged. `adapter` is a PEFT adapter for the base.
    The dtype is float32 on a CPU and bfloat16 on a GPU unless given; the device a GPU where there is one.
    `cuda_graphs` and `compiled` are for causal models; see `CausalModel`.
    """
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": revision}
    where = torch.device(device) if device is not None else _default_device()
    with _explaining(name):
        model, tokenizer = _load_network(
            locate_base(name), where, adapter, dtype, device_map, quantization_config, **options
        )
    if warpers == "checkpoint":
        warpers = checkpoint_warpers(model.generation_config)
    else:
        _report_ignored(str(name), model.generation_config)
    common: dict[str, Any] = {
        "length_limit": length_limit,
        "completion": completion,
        "warpers": warpers,
        "chat": chat,
    }
    if model.config.is_encoder_decoder:
        return EncoderDecoderModel(model, tokenizer, **common)
    use_grouped_attention(model)
    return CausalModel(model, tokenizer, **common, cuda_graphs=cuda_graphs, compiled=compiled)


@contextmanager
def _explaining(name: str | Path) -> Iterator[None]:
    """Say shortly that a base cannot be loaded, where transformers speaks of its hub at length."""
    try:
        yield
    except NadoError:
        raise
    except (OSError, ValueError) as error:
        if "trust_remote_code=True" not in str(error):
            raise unloadable(str(name), error) from error
        raise InputError(
            "a base that transformers has the code of",
            f"code of its own in {name}",
            "Read it; load_model(…, trust_remote_code=True) runs it.",
        ) from error


def _load_network(
    name: str | Path,
    where: torch.device,
    adapter: str | Path | None,
    dtype: Dtype | None,
    device_map: Any,
    quantization_config: Any,
    **options: Any,
) -> tuple[Any, Any]:
    """transformers' model, frozen and in its place, and its tokenizer."""
    path = converted_gguf(Path(name)) if str(name).endswith(".gguf") else _existing(name)
    config = AutoConfig.from_pretrained(path, **options)
    tokenizer = AutoTokenizer.from_pretrained(path, **options)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    if getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None) is not None:
        options["attn_implementation"] = "eager"  # in some releases the quicker ones leave the cap out
    # Quantised weights may have been so on disk, and cannot be moved once they are loaded.
    quantised = quantization_config is not None or getattr(config, "quantization_config", None) is not None
    if quantization_config is not None:
        options["quantization_config"] = quantization_config
    if device_map is not None or quantised:
        options["device_map"] = device_map if device_map is not None else {"": where}
    if dtype is None:
        dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    merges = adapter is not None and not quantised
    # An adapter is merged in float32 and rounded once: the same base whichever type it ends up in.
    model: Any = auto.from_pretrained(path, dtype=torch.float32 if merges else dtype, **options)
    if adapter is not None:
        model = _with_adapter(model, adapter, merge=merges)
    if merges:
        model.to(dtype if isinstance(dtype, torch.dtype) else config.dtype or torch.float32)
    if device_map is None and not quantised:
        model.to(where)
    return model.eval().requires_grad_(False), tokenizer


def checkpoint_warpers(settings: GenerationConfig) -> Warpers:
    """The warpers a checkpoint's generation config asks for; one that cannot be part of p is an error."""
    known = {"temperature", "top_k", "top_p", "bad_words_ids", "suppress_tokens", "forced_bos_token_id"}
    others = {name: value for name, value in _changed_settings(settings).items() if name not in known}
    if others:
        raise InputError(
            "a generation config of temperature, top-k, top-p, forced and forbidden tokens",
            ", ".join(f"{name}={value}" for name, value in others.items()),
            "Declare Warpers(...) yourself: these settings depend on more than the next token.",
        )
    longer = [words for words in settings.bad_words_ids or [] if len(words) > 1]
    if longer:
        raise InputError(
            "bad_words_ids of one token each", f"{longer[0]}", "Forbid longer phrases with an oracle instead."
        )
    ends = settings.eos_token_id if isinstance(settings.eos_token_id, list) else [settings.eos_token_id]
    # generate, too, lets a text end whatever its bad words say.
    forbidden = [words[0] for words in settings.bad_words_ids or [] if words[0] not in ends]
    forbidden += list(settings.suppress_tokens or [])
    forced = () if settings.forced_bos_token_id is None else (int(settings.forced_bos_token_id),)
    sampled = bool(settings.do_sample)
    return Warpers(
        temperature=(settings.temperature or 1.0) if sampled else 1.0,
        top_k=(settings.top_k or 0) if sampled else 0,
        top_p=(settings.top_p or 1.0) if sampled else 1.0,
        forced=forced,
        forbidden=tuple(sorted(set(forbidden))),
    )


def _changed_settings(settings: GenerationConfig | None) -> dict[str, Any]:
    if settings is None:
        return {}
    values = {name: getattr(settings, name, None) for name in _NEUTRAL_SETTINGS}
    return {name: value for name, value in values.items() if value not in _NEUTRAL_SETTINGS[name]}


def _report_ignored(name: str, settings: GenerationConfig | None) -> None:
    ignored = _changed_settings(settings)
    if ignored:
        log.warning(
            "%s: its generation config sets %s; p does not use it. Declare Warpers(...), or pass "
            'warpers="checkpoint", to make it part of p.',
            name,
            ", ".join(f"{key}={value}" for key, value in ignored.items()),
        )


def _default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _existing(name: str | Path) -> str | Path:
    """The name as it is, if it cannot be a path or there is something there."""
    looks_local = isinstance(name, Path) or name.startswith(("/", "./", "../", "~"))
    if looks_local and not Path(name).expanduser().exists():
        raise InputError("a model folder", f"nothing at {name}", "Check the path, or give a hub name.")
    return Path(name).expanduser() if looks_local else name


def _with_adapter(model: PreTrainedModel, adapter: str | Path, *, merge: bool) -> Any:
    """The model with a PEFT adapter: merged, or where weights are quantised, beside them in its layers."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise MissingPackageError("peft", "peft", "an adapter") from error
    adapted = PeftModel.from_pretrained(model, str(_existing_adapter(adapter)))
    if adapted.active_peft_config.is_prompt_learning:
        raise InputError(
            "an adapter that changes weights, such as LoRA",
            f"{adapted.active_peft_config.peft_type.value} in {adapter}",
            "Prompt tuning adds tokens that no prompt here has; train a LoRA adapter instead.",
        )
    # Merged, an adapter costs nothing at run time; weights that are quantised cannot take it in exactly.
    # Otherwise the base itself, adapter inside, and not PEFT's wrapper, which hides what forward takes.
    return adapted.merge_and_unload() if merge else adapted.get_base_model()


def _existing_adapter(adapter: str | Path) -> str | Path:
    path = _existing(adapter)
    if Path(path).is_dir():
        for wanted in (("adapter_config.json",), ("adapter_model.safetensors", "adapter_model.bin")):
            if not any((Path(path) / file).is_file() for file in wanted):
                raise InputError(
                    f"a PEFT adapter with {wanted[0]}",
                    f"none in {adapter}",
                    "Save one with save_pretrained of the PEFT model.",
                )
    return path
