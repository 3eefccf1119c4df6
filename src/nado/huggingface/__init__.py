"""Hugging Face models as language models: the one place that knows transformers' models.

`load_model` reads a hub name, a folder or a GGUF file; `CausalModel` and `EncoderDecoderModel` also take
a model that is already in memory. Both always run in eval mode and without gradients, and take nothing
from a checkpoint's own generation config unless asked to: p is what `Warpers` and the limit declare.
"""

from nado.huggingface.causal import CausalModel
from nado.huggingface.encoder_decoder import EncoderDecoderModel
from nado.huggingface.loading import checkpoint_warpers, load_model
from nado.huggingface.shared import HuggingFaceModel, weights_digest

__all__ = [
    "CausalModel",
    "EncoderDecoderModel",
    "HuggingFaceModel",
    "checkpoint_warpers",
    "load_model",
    "weights_digest",
]
