"""A Hugging Face model as a guide reads it: its last hidden states and its embedding matrices."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nado.errors import InputError
from nado.huggingface.causal import CausalModel, CausalState
from nado.huggingface.encoder_decoder import EncoderDecoderModel, EncoderDecoderState
from nado.huggingface.output_layer import OutputLayer, watch_inputs
from nado.huggingface.shared import FAITHFUL
from nado.warpers import Warpers

_REMEMBERED = 2**20  # prompts whose tokens are kept


class HuggingFaceReader:
    """`Reader` of a causal or encoder–decoder model. A state is what the output layer is applied to."""

    def __init__(self, model: CausalModel | EncoderDecoderModel) -> None:
        self.model = model
        self._output = OutputLayer(model.model)
        self._encoded: dict[str, list[int]] = {}
        self._check()

    @property
    def state_size(self) -> int:
        """Width of the last hidden state."""
        return int(self._output.matrix.shape[1])

    @property
    def condition_vocabulary_size(self) -> int:
        """Conditions are written in the base's own tokens."""
        return self.model.vocabulary_size

    @property
    def input_embeddings(self) -> Tensor:
        """The base's token embeddings, frozen."""
        embeddings: Any = self.model.model.get_input_embeddings()
        return torch.as_tensor(embeddings.weight).detach()

    @property
    def output_embeddings(self) -> Tensor:
        """The base's output matrix, frozen."""
        return self._output.matrix

    def encode_conditions(self, conditions: Sequence[str]) -> list[list[int]]:
        """Conditions in the base's tokens, without special ones."""
        rows = self.model.tokenizer(list(conditions), add_special_tokens=False)["input_ids"]
        return [list(row) for row in rows]

    @torch.no_grad()
    def read(self, prompts: Sequence[str], tokens: Tensor, lengths: Tensor) -> Tensor:
        """States at every position: (B, T, state_size)."""
        past_end = torch.arange(tokens.shape[1], device=tokens.device)[None, :] >= lengths[:, None]
        tokens = tokens.masked_fill(past_end, self.model.eos_id)
        if isinstance(self.model, CausalModel):
            return self.model.score_states(self._encode(prompts), tokens)
        return self._read_by_hook(prompts, tokens, lengths)

    def _encode(self, prompts: Sequence[str]) -> list[list[int]]:
        """The prompts' tokens; training asks for the same prompts again and again."""
        fresh = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._encoded]
        if len(self._encoded) + len(fresh) > _REMEMBERED:
            self._encoded.clear()
            fresh = list(dict.fromkeys(prompts))
        if fresh:
            self._encoded.update(zip(fresh, self.model.encode(fresh), strict=True))
        return [self._encoded[prompt] for prompt in prompts]

    def _read_by_hook(self, prompts: Sequence[str], tokens: Tensor, lengths: Tensor) -> Tensor:
        """What the output layer is given when texts are scored: for models whose body is not all of it."""
        with watch_inputs(self._output.layer) as seen:
            self.model.score(prompts, tokens, lengths)
        return torch.cat(seen)

    def current(self, state: CausalState | EncoderDecoderState) -> Tensor:
        """The last hidden state of the pass that made the rows' distribution: (B, state_size)."""
        assert state.hidden is not None  # `_check` has refused models that keep none
        return state.hidden

    @torch.no_grad()
    def logits(self, states: Tensor, generated: Tensor) -> Tensor:
        """Numbers whose softmax is p, warpers included: (N, V). Where p is the plain softmax, raw logits."""
        logits = self._output(states)
        if self.model.warpers == Warpers() and len(self.model.eos_ids) == 1:
            return logits
        return self.model.warpers.apply(logits, self.model.eos_ids, generated)

    @torch.no_grad()
    def _check(self) -> None:
        """A base may do more between its states and its logits than we know of: compare once."""
        tokens = torch.full((1, 2), self.model.eos_id, device=self.model.device)
        states = self.read([""], tokens, torch.tensor([2], device=self.model.device))[0]
        whole = self.model._score_logits(self.model.encode([""]), tokens)[0]
        gaps = self._output(states).float().softmax(-1) - whole.float().softmax(-1)
        distance = float(gaps.abs().sum(-1).max() / 2)
        if distance > FAITHFUL[whole.dtype != torch.float32]:
            raise InputError(
                "a base whose logits are its output layer applied to its last hidden state",
                f"{type(self.model.model).__name__}, {distance:.2g} off in total variation",
                "Use a guide that reads tokens only, or report this architecture.",
            )
