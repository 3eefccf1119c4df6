"""Encoder–decoder models: Marian, T5, BART and their kin."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import BaseModelOutput

from nado.errors import InputError
from nado.huggingface.output_layer import watch_inputs
from nado.huggingface.shared import HuggingFaceModel, reorder, require_context, require_list
from nado.language_model import Completion
from nado.warpers import Warpers

RowT = TypeVar("RowT", bound=Hashable)


@dataclass(eq=False)
class EncoderDecoderState:
    """Rows of an encoder–decoder model, all at the same step."""

    log_p: Tensor  # (B, V)
    generated: Tensor  # (B,) tokens each row has written
    cache: EncoderDecoderCache
    encoded: Tensor  # (B, S, H) what the encoder made of the prompts
    mask: Tensor  # bool (B, S)
    hidden: Tensor | None = None  # (B, H) what the output layer was given


class EncoderDecoderModel(HuggingFaceModel):
    """Any `AutoModelForSeq2SeqLM`: Marian, T5, BART and their kin. The encoder reads the prompt."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        length_limit: int,
        completion: Completion = "eos",
        warpers: Warpers | None = None,
        chat: bool = False,
    ) -> None:
        super().__init__(
            model, tokenizer, length_limit=length_limit, completion=completion, warpers=warpers, chat=chat
        )
        self._start_id = _start_id(model)
        # T5's relative positions have no bound.
        context = getattr(model.config, "max_position_embeddings", None)
        self._context = None if context is None else int(context)
        require_context(self._context, 0, length_limit)
        self._require_faithful()

    @torch.no_grad()
    def start(self, prompts: Sequence[str], conditions: Sequence[str] | None = None) -> EncoderDecoderState:
        """Encode the prompts and read the decoder's start token. Equal prompts are encoded once."""
        require_list(prompts)
        distinct, sources = _find_distinct(prompts, self.device)
        return self.select(self._begin(self.encode(distinct)), sources)

    @torch.no_grad()
    def step(self, state: EncoderDecoderState, tokens: Tensor) -> EncoderDecoderState:
        """Append one token to every row."""
        with watch_inputs(self.model.get_output_embeddings()) as seen:
            logits, cache = self._forward(state, tokens)
        generated = state.generated + 1
        log_p = self.warpers.apply(logits, self.eos_ids, generated)
        return EncoderDecoderState(log_p, generated, cache, state.encoded, state.mask, seen[0][:, -1])

    @torch.no_grad()
    def select(self, state: EncoderDecoderState, rows: Tensor) -> EncoderDecoderState:
        """The given rows, in that order."""
        reorder(state.cache, rows)
        return EncoderDecoderState(
            log_p=state.log_p[rows],
            generated=state.generated[rows],
            cache=state.cache,
            encoded=state.encoded[rows],
            mask=state.mask[rows],
            hidden=None if state.hidden is None else state.hidden[rows],
        )

    def _forward(self, state: EncoderDecoderState, tokens: Tensor) -> tuple[Tensor, EncoderDecoderCache]:
        """Next-token logits (B, V) after `tokens` (B,), and the cache that holds them."""
        output = self.model(
            encoder_outputs=_as_output(state.encoded),
            attention_mask=state.mask.long(),
            decoder_input_ids=tokens[:, None],
            past_key_values=state.cache,
            use_cache=True,
        )
        return output.logits[:, -1], output.past_key_values

    def _begin(self, rows: list[list[int]]) -> EncoderDecoderState:
        """The state before the first token of each row of prompt tokens."""
        encoded, mask = self._encode_states(rows)
        config = self.model.config.get_text_config(decoder=True)
        cache = EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
        first = torch.full((len(rows),), self._start_id, device=self.device)
        none = torch.full_like(first, -1)  # the start token is not one of the text's own
        return self.step(EncoderDecoderState(torch.empty(0), none, cache, encoded, mask), first)

    def _encode_states(self, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        """The encoder's states and their mask: (B, S, D) and (B, S)."""
        ids, mask = self._pad_left(rows)
        # Encoders count positions from the left edge: padding goes to the right.
        ids, mask = shift_to_left(ids, mask)
        output = self.model.get_encoder()(input_ids=ids, attention_mask=mask.long(), return_dict=True)
        return output.last_hidden_state, mask

    def _score_logits(self, prompts: list[list[int]], tokens: Tensor) -> Tensor:
        distinct, sources = _find_distinct([tuple(prompt) for prompt in prompts], self.device)
        encoded, mask = (each[sources] for each in self._encode_states([list(row) for row in distinct]))
        first = torch.full((len(prompts), 1), self._start_id, device=self.device)
        output = self.model(
            encoder_outputs=_as_output(encoded),
            attention_mask=mask.long(),
            decoder_input_ids=torch.cat([first, tokens[:, :-1]], dim=1),
            use_cache=False,
        )
        return torch.as_tensor(output.logits)

    def _logits_after(self, rows: list[list[int]], tokens: Tensor) -> Tensor:
        return self._forward(self._begin(rows), tokens)[0]

    def _logits_alone(self, row: list[int], token: int) -> Tensor:
        output = self.model(
            input_ids=torch.tensor([row], device=self.device),
            decoder_input_ids=torch.tensor([[self._start_id, token]], device=self.device),
            use_cache=False,
        )
        return torch.as_tensor(output.logits[:, -1])

    def _prompt_room(self) -> tuple[int, str] | None:
        # Encoder and decoder have a context each: what is generated takes nothing from the prompt.
        return None if self._context is None else (self._context, "the model's context")


def _start_id(model: PreTrainedModel) -> int:
    for holder in (model.generation_config, model.config):
        start = getattr(holder, "decoder_start_token_id", None)
        if start is not None:
            return int(start)
    raise InputError(
        "a config with decoder_start_token_id",
        "none",
        "Set it on the model's config before loading it here.",
    )


def _find_distinct(rows: Sequence[RowT], device: torch.device) -> tuple[list[RowT], Tensor]:
    """The different ones among rows, and which of them each is: (B,)."""
    places = {row: place for place, row in enumerate(dict.fromkeys(rows))}
    return list(places), torch.tensor([places[row] for row in rows], device=device)


def _as_output(encoded: Tensor) -> BaseModelOutput:
    return BaseModelOutput(last_hidden_state=cast(torch.FloatTensor, encoded))


def shift_to_left(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Left-padded rows made right-padded."""
    order = mask.long().argsort(dim=-1, descending=True, stable=True)
    return ids.gather(1, order), mask.gather(1, order)
