"""The guide R_θ: for every next token v, log R(condition, prefix ⊕ v).

A small transformer (or, `light`, a stateless MLP) beside a frozen base. At each position it reads what the
base has made of the prefix (its last hidden state), the last token, how many tokens are left, the condition
as a token sequence of its own, and, where the oracle tells, which of its parts the prefix already settles.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel, PretrainedConfig, PreTrainedModel

from nado import __version__
from nado.errors import InputError, MismatchError
from nado.heads import Head, HeadKind, Matrix, Scores, Step
from nado.reading import Reader

Reads = Literal["states", "tokens", "light"]


class GuideConfig(PretrainedConfig):
    """Everything needed to rebuild a guide and to know which base it belongs to."""

    model_type = "nado_guide"

    def __init__(
        self,
        vocabulary_size: int = 0,
        eos_id: int = 0,
        length_limit: int = 1,
        completion: str = "eos",
        state_size: int = 0,
        embedding_size: int = 0,
        condition_vocabulary_size: int = 0,
        base_name: str = "",
        base_fingerprint: str = "",
        oracle_name: str = "",
        oracle_fingerprint: str = "",
        nado_version: str = __version__,
        reads: Reads = "states",
        size: int = 768,
        layers: int = 4,
        heads: int = 12,
        head: HeadKind = "sigmoid",
        matrix: Matrix = "tied",
        rank: int = 64,
        progress_bits: int = 0,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.vocabulary_size, self.eos_id = vocabulary_size, eos_id
        self.length_limit, self.completion = length_limit, completion
        self.state_size, self.embedding_size = state_size, embedding_size
        self.condition_vocabulary_size = condition_vocabulary_size
        self.base_name, self.base_fingerprint = base_name, base_fingerprint
        self.oracle_name, self.oracle_fingerprint = oracle_name, oracle_fingerprint
        self.nado_version = nado_version
        self.reads, self.size, self.layers, self.heads = reads, size, layers, heads
        self.head, self.matrix, self.rank = head, matrix, rank
        self.progress_bits, self.dropout = progress_bits, dropout

    @classmethod
    def for_reader(cls, reader: Reader, **choices: Any) -> "GuideConfig":
        """The config of a guide for this base, with the given choices."""
        embeddings = reader.input_embeddings
        return cls(
            vocabulary_size=reader.model.vocabulary_size,
            eos_id=reader.model.eos_id,
            length_limit=reader.model.length_limit,
            completion=reader.model.completion,
            state_size=reader.state_size,
            embedding_size=0 if embeddings is None else embeddings.shape[1],
            condition_vocabulary_size=reader.condition_vocabulary_size,
            base_fingerprint=reader.model.fingerprint,
            **choices,
        )


@dataclass(frozen=True)
class Conditions:
    """Conditions as the guide reads them, left-padded."""

    tokens: Tensor  # (B, C)
    mask: Tensor  # bool (B, C)

    @classmethod
    def encode(cls, reader: Reader, conditions: Sequence[str]) -> "Conditions":
        """Encode and pad; an empty condition is one padded place."""
        rows = reader.encode_conditions(conditions)
        width = max(1, *(len(row) for row in rows))
        tokens = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=reader.model.device)
        lengths = torch.tensor([len(row) for row in rows], device=reader.model.device)
        return cls(
            tokens, torch.arange(width, device=reader.model.device)[None, :] >= width - lengths[:, None]
        )

    def rows(self, index: Tensor) -> "Conditions":
        """Some rows."""
        return Conditions(self.tokens[index], self.mask[index])


class Guide(PreTrainedModel):
    """R_θ. Its weights are its own; the base's matrices are lent to it by a `Reader` and never saved."""

    config_class = GuideConfig
    base_model_prefix = "guide"
    main_input_name = "states"

    def __init__(self, config: GuideConfig) -> None:
        super().__init__(config)
        size = config.size
        self.reader: Reader | None = None
        if config.reads != "tokens":
            self.state_norm = nn.RMSNorm(config.state_size)
            self.state_in = nn.Linear(config.state_size, size)
        if config.embedding_size:
            self.token_in = nn.Linear(config.embedding_size, size, bias=False)
            self.condition_in = nn.Linear(config.embedding_size, size, bias=False)
        else:
            self.own_tokens = nn.Embedding(config.vocabulary_size + 1, size)  # the last one: no token yet
            self.own_conditions = nn.Embedding(config.condition_vocabulary_size, size)
        self.left_in = nn.Embedding(config.length_limit + 1, size)
        self.condition_mark = nn.Parameter(torch.zeros(size))
        if config.progress_bits:
            self.progress_in = nn.Linear(2 * config.progress_bits, size, bias=False)
            self.parts_out = nn.Linear(size, config.progress_bits)
        if config.reads == "light":
            self.body: nn.Module = _LightBody(size, config.dropout)
        else:
            self.body = LlamaModel(_body_config(config))
        self.head = Head(
            config.head, config.matrix, size, config.embedding_size, config.vocabulary_size, config.rank
        )
        self.post_init()  # type: ignore[no-untyped-call]
        self.head.reset()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=module.weight.shape[-1] ** -0.5)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def attach(self, reader: Reader) -> "Guide":
        """Lend the guide the base it belongs to; another base is an error."""
        for name in ("vocabulary_size", "eos_id", "length_limit", "completion"):
            mine, other = getattr(self.config, name), getattr(reader.model, name)
            if mine != other:
                raise MismatchError(
                    f"a base with {name.replace('_', ' ')} {mine}, as this guide was trained for",
                    f"{other}",
                    "Load the base, limit and completion named in the guide's config.json.",
                )
        if self.config.base_fingerprint != reader.model.fingerprint:
            raise MismatchError(
                f"the base this guide was trained for ({self.config.base_name or 'unnamed'}, fingerprint "
                f"{self.config.base_fingerprint[:8]})",
                f"one with fingerprint {reader.model.fingerprint[:8]}",
                "Load that base with the same warpers and limit, or allow another one explicitly.",
            )
        self.reader = reader
        return self

    def features(
        self,
        states: Tensor | None,
        last_tokens: Tensor,
        left: Tensor,
        conditions: Conditions,
        progress: Tensor | None = None,
    ) -> Tensor:
        """What the body makes of whole texts: (B, T, size).

        `states` (B, T, state_size); `last_tokens` (B, T) the token before each position, −1 before the
        first; `left` (B, T) tokens that may still be written; `progress` (B, T, bits), −1 where there is no
        such bit.
        """
        text = self._text_inputs(states, last_tokens, left, progress)  # (B, T, size)
        known = self._condition_inputs(conditions)  # (B, C, size)
        if isinstance(self.body, _LightBody):
            count = conditions.mask.sum(1, keepdim=True).clamp(min=1)
            pooled = (known * conditions.mask[..., None]).sum(1) / count
            return self.body.mix(text, pooled[:, None, :])
        width = known.shape[1]
        mask = torch.cat([conditions.mask, conditions.mask.new_ones(text.shape[:2])], dim=1)
        positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
        output = self.body(
            inputs_embeds=torch.cat([known, text], dim=1),
            attention_mask=mask.long(),
            position_ids=positions,
            use_cache=False,
        )
        return torch.as_tensor(output.last_hidden_state)[:, width:]

    def _text_inputs(
        self, states: Tensor | None, last_tokens: Tensor, left: Tensor, progress: Tensor | None
    ) -> Tensor:
        inputs: Tensor = self._token_inputs(last_tokens) + self.left_in(left)
        if self.config.reads != "tokens":
            assert states is not None
            inputs = inputs + self.state_in(self.state_norm(states.to(self.state_in.weight.dtype)))
        if self.config.progress_bits:
            if progress is None:
                raise InputError(
                    f"progress of {self.config.progress_bits} bits, as this guide was trained with",
                    "none",
                    "Ask the oracle about every prefix (label with prefixes).",
                )
            settled, missing = progress == 1, progress == 0
            inputs = inputs + self.progress_in(torch.cat([settled, missing], dim=-1).to(inputs.dtype))
        return inputs

    def _token_inputs(self, last_tokens: Tensor) -> Tensor:
        if not self.config.embedding_size:
            own: Tensor = self.own_tokens(last_tokens.where(last_tokens >= 0, self.config.vocabulary_size))
            return own
        known = self._lent("input_embeddings")[last_tokens.clamp(min=0)]
        known = known.masked_fill((last_tokens < 0)[..., None], 0)
        read: Tensor = self.token_in(known.to(self.token_in.weight.dtype))
        return read

    def _condition_inputs(self, conditions: Conditions) -> Tensor:
        if not self.config.embedding_size:
            own: Tensor = self.own_conditions(conditions.tokens)
            return own + self.condition_mark
        known = self._lent("input_embeddings")[conditions.tokens]
        read: Tensor = self.condition_in(known.to(self.condition_in.weight.dtype))
        return read + self.condition_mark

    def scores(self, features: Tensor) -> Scores:
        """The head's scores of features (N, size)."""
        output = None if self.config.matrix == "own" else self._lent("output_embeddings")
        return self.head.scores(features, output)

    def reduce(
        self, scores: Scores, base_logits: Callable[[slice], Tensor], chosen: Tensor, generated: Tensor
    ) -> Step:
        """What the losses need of positions with `generated` (N,) tokens before them."""
        at_limit = (generated == self.config.length_limit - 1) & (self.config.completion == "eos")
        return self.head.reduce(scores, base_logits, chosen, at_limit, self.config.eos_id)

    def parts_loss(self, features: Tensor, counted: Tensor, parts: Tensor) -> tuple[Tensor, Tensor]:
        """An auxiliary task: which parts will hold at the end? Summed cross-entropy, and over what it is.

        `features` (B, T, size), `counted` (B, T) how often each position counts, `parts` (B, bits), −1 where
        there is no such part.
        """
        known = counted[:, :, None] * (parts >= 0)[:, None, :]
        wanted = (parts == 1)[:, None, :].expand(known.shape).float()
        terms = nn.functional.binary_cross_entropy_with_logits(
            self.parts_out(features).float(), wanted, reduction="none"
        )
        return (terms * known).sum(), known.sum()

    def _lent(self, name: str) -> Tensor:
        matrix = None if self.reader is None else getattr(self.reader, name)
        if matrix is None:
            raise InputError(
                f"a base that lends its {name.replace('_', ' ')}",
                "none attached" if self.reader is None else "a base without any",
                "Call guide.attach(reader) first, or build the guide with matrix='own'.",
            )
        return torch.as_tensor(matrix)


class _LightBody(nn.Module):
    """No attention and no state: a position's feature depends on its own inputs and the pooled condition."""

    def __init__(self, size: int, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(2 * size, 2 * size)
        self.second = nn.Linear(2 * size, size)
        self.norm = nn.RMSNorm(size)
        self.dropout = nn.Dropout(dropout)

    def mix(self, text: Tensor, condition: Tensor) -> Tensor:
        """Features (B, T, size) of text inputs (B, T, size) and a pooled condition (B, 1, size)."""
        joined = torch.cat([text, condition.expand_as(text)], dim=-1)
        mixed: Tensor = self.norm(text + self.second(self.dropout(nn.functional.silu(self.first(joined)))))
        return mixed


def _body_config(config: GuideConfig) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=1,  # inputs come as vectors
        hidden_size=config.size,
        intermediate_size=-(-8 * config.size // 3 // 64) * 64,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        max_position_embeddings=8192,
        attention_dropout=config.dropout,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
