"""The last step of a language model: from its last hidden state to its logits."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


class OutputLayer:
    """What a model does with its last hidden states: a product, and sometimes a scale, a bias or a soft cap.

    Making logits here and not in the model lets a guide read the hidden states of the pass that is made
    anyway, and add its own rows to the product.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config(decoder=True)
        self.layer: Any = model.get_output_embeddings()
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )
        self._bias: Tensor | None = getattr(model, "final_logits_bias", None)

    @property
    def matrix(self) -> Tensor:
        """The output matrix (V, H), frozen."""
        return torch.as_tensor(self.layer.weight).detach()

    def __call__(self, states: Tensor) -> Tensor:
        """Logits (…, V) of states (…, H)."""
        # Of rows that are slices of longer ones torch would copy a bfloat16 matrix once a row, on a CPU.
        return self.finish(self.layer(states.contiguous()))

    def finish(self, products: Tensor) -> Tensor:
        """Logits from what the layer gives, everything after it."""
        if self._scale != 1:  # a pass over the vocabulary saved
            products = products * self._scale
        if self._bias is not None:
            products = products + self._bias
        return products if self._softcap is None else self._softcap * torch.tanh(products / self._softcap)


@contextmanager
def watch_inputs(layer: torch.nn.Module) -> Iterator[list[Tensor]]:
    """What the layer is given meanwhile; for models whose hidden states are not had in another way."""
    seen: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        yield seen
    finally:
        hook.remove()
