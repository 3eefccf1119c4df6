"""A base's tokenizer without its weights, for actors that only make text of prefixes."""

from typing import TYPE_CHECKING, Any

from nado.study.sections import BaseConfig

if TYPE_CHECKING:
    from nado.huggingface.shared import HuggingFaceModel


def load_decoder(base: BaseConfig) -> "HuggingFaceModel":
    """What decodes as the base does: its config and tokenizer around a model that has no weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    from nado.huggingface.shared import HuggingFaceModel
    from nado.study.estimate import Outline

    outline = Outline.read(base)
    auto: Any = AutoModelForSeq2SeqLM if outline.config.is_encoder_decoder else AutoModelForCausalLM
    with torch.device("meta"):
        empty = auto.from_config(outline.config).eval()
    return HuggingFaceModel(
        empty, outline.tokenizer, length_limit=base.length_limit, completion=base.completion
    )
