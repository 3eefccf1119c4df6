"""Encoder–decoder models: Marian, T5, BART and their kin."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

from nado.errors import InputError
from nado.huggingface.shared import HuggingFaceModel, reorder


@dataclass(eq=False)
class EncoderDecoderState:
    """Rows of an encoder–decoder model, all at the same step."""

    log_p: Tensor  # (B, V)
    generated: Tensor  # (B,) tokens each row has written
    cache: EncoderDecoderCache
    encoded: Tensor  # (B, S, H) what the encoder made of the prompts
    mask: Tensor  # bool (B, S)


class EncoderDecoderModel(HuggingFaceModel):
    """Any `AutoModelForSeq2SeqLM`: Marian, T5, BART and their kin. The encoder reads the prompt."""

    @torch.no_grad()
    def start(self, prompts: Sequence[str], conditions: Sequence[str] | None = None) -> EncoderDecoderState:
        """Encode the prompts and read the decoder's start token. Equal prompts are encoded once."""
        places = {prompt: place for place, prompt in enumerate(dict.fromkeys(prompts))}
        encoded, mask = self._encode_states(self.encode(list(places)))
        sources = torch.tensor([places[prompt] for prompt in prompts], device=self.device)
        cache = EncoderDecoderCache(
            DynamicCache(config=self._decoder_config()), DynamicCache(config=self._decoder_config())
        )
        first = torch.full((len(places),), self._start_id(), device=self.device)
        generated = torch.zeros(len(places), dtype=torch.long, device=self.device)
        state = EncoderDecoderState(torch.empty(0), generated - 1, cache, encoded, mask)
        return self.select(self.step(state, first), sources)

    @torch.no_grad()
    def step(self, state: EncoderDecoderState, tokens: Tensor) -> EncoderDecoderState:
        """Append one token to every row."""
        output = self.model(
            encoder_outputs=(state.encoded,),
            attention_mask=state.mask.long(),
            decoder_input_ids=tokens[:, None],
            past_key_values=state.cache,
            use_cache=True,
        )
        generated = state.generated + 1
        log_p = self.warpers.apply(output.logits[:, -1], self.eos_ids, generated)
        return EncoderDecoderState(log_p, generated, output.past_key_values, state.encoded, state.mask)

    @torch.no_grad()
    def select(self, state: EncoderDecoderState, rows: Tensor) -> EncoderDecoderState:
        """The given rows, in that order."""
        reorder(state.cache, rows)
        return EncoderDecoderState(
            state.log_p[rows], state.generated[rows], state.cache, state.encoded[rows], state.mask[rows]
        )

    def _encode_states(self, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        ids, mask = self._pad_left(rows)
        # Encoders count positions from the left edge: padding goes to the right.
        ids, mask = _shift_to_left(ids, mask)
        output = self.model.get_encoder()(input_ids=ids, attention_mask=mask.long())
        return output.last_hidden_state, mask

    def _score_logits(self, prompts: list[list[int]], tokens: Tensor) -> Tensor:
        encoded, mask = self._encode_states(prompts)
        first = torch.full((len(prompts), 1), self._start_id(), device=self.device)
        output = self.model(
            encoder_outputs=(encoded,),
            attention_mask=mask.long(),
            decoder_input_ids=torch.cat([first, tokens[:, :-1]], dim=1),
            use_cache=False,
        )
        return torch.as_tensor(output.logits)

    def _decoder_config(self) -> Any:
        return self.model.config.get_text_config(decoder=True)

    def _start_id(self) -> int:
        start = self.model.config.decoder_start_token_id
        if start is None:
            raise InputError(
                "a config with decoder_start_token_id",
                "none",
                "Set it on the model's config before loading it here.",
            )
        return int(start)

    def _context_left(self) -> int | None:
        # Encoder and decoder have a context each; T5's relative positions have no bound.
        context = getattr(self.model.config, "max_position_embeddings", None)
        return None if context is None else int(context)


def _shift_to_left(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Left-padded rows made right-padded."""
    order = mask.long().argsort(dim=-1, descending=True, stable=True)
    return ids.gather(1, order), mask.gather(1, order)
