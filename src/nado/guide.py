"""The guide R_θ: for every next token v, log R(condition, prefix ⊕ v).

A small transformer (or, `light`, a stateless MLP) beside a frozen base. At each position it reads what the
base has made of the prefix (its last hidden state), the last token, how many tokens are left, the condition
as a token sequence of its own, and, where the oracle tells, which of its parts the prefix already settles:
as bits, and as the embeddings of what the parts are called, so that a guide that still misses "beach" is
told so in the base's own terms.

Whole texts go through `features`. A text that is still being written goes through `know` once, then
`read_conditions` and, token by token, `text_inputs` and `follow`, with a key–value cache of the guide's own.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache, LlamaConfig, LlamaModel, PretrainedConfig, PreTrainedModel

from nado import __version__
from nado.composition import Composable
from nado.decomposition import close_at_limit, mend_log_odds
from nado.errors import InputError, MismatchError
from nado.heads import Head, HeadKind, Matrix, Scores, Step
from nado.reading import Reader

Reads = Literal["states", "tokens", "light"]

# What `mend_log_odds` is given where nothing is to be mended.
UNCALIBRATED = (1.0, 0.0, 1.0)

# Fields of a config that no R depends on: where a guide comes from.
_ORIGIN = frozenset({"base_name", "oracle_name", "nado_version", "cut_share"})


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
        cut_share: float = 0.0,
        nado_version: str = __version__,
        reads: Reads = "states",
        size: int = 768,
        layers: int = 4,
        heads: int = 12,
        head: HeadKind = "sigmoid",
        matrix: Matrix = "tied",
        rank: int = 64,
        progress_bits: int = 0,
        named_parts: bool = False,
        calibration: Sequence[float] = UNCALIBRATED,
        dropout: float = 0.0,
        shape_only: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.vocabulary_size, self.eos_id = vocabulary_size, eos_id
        self.length_limit, self.completion = length_limit, completion
        self.state_size, self.embedding_size = state_size, embedding_size
        self.condition_vocabulary_size = condition_vocabulary_size
        self.base_name, self.base_fingerprint = base_name, base_fingerprint
        self.oracle_name, self.oracle_fingerprint = oracle_name, oracle_fingerprint
        self.cut_share = cut_share  # of the training texts were cut at the length limit
        self.nado_version = nado_version
        self.reads, self.size, self.layers, self.heads = reads, size, layers, heads
        self.head, self.matrix, self.rank = head, matrix, rank
        self.progress_bits, self.named_parts = progress_bits, named_parts
        # For `mend_log_odds`; guides saved with two numbers have one scale for all.
        scale, offset, *sure_scale = calibration
        self.calibration = (scale, offset, *(sure_scale or [scale]))
        self.dropout = dropout
        # A warm-up was its last training: what R is up to a factor a prefix, and no probability.
        self.shape_only = shape_only

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

    def identity(self) -> dict[str, Any]:
        """What R or its training depends on: the same after a save, and with another path or library."""
        own = list(inspect.signature(type(self).__init__).parameters)[1:-1]  # neither self nor kwargs
        return {name: getattr(self, name) for name in own if name not in _ORIGIN}


@dataclass(frozen=True)
class Conditions:
    """Conditions as the guide reads them, left-padded."""

    tokens: Tensor  # (B, C)
    mask: Tensor  # bool (B, C)
    parts: Tensor | None = None  # (B, K, P) tokens of what the oracle's parts are called
    parts_mask: Tensor | None = None  # bool (B, K, P)

    @classmethod
    def encode(
        cls,
        reader: Reader,
        conditions: Sequence[str],
        part_names: Callable[[str], Sequence[str]] | None = None,
    ) -> "Conditions":
        """Encode and pad; an empty condition is one padded place. `part_names` names a condition's parts."""
        device = reader.model.device
        tokens, mask = _pad_left(reader.encode_conditions(conditions), device)
        if part_names is None:
            return cls(tokens, mask)
        names = [list(part_names(condition)) for condition in conditions]
        most = max(1, *(len(row) for row in names))
        distinct = list(dict.fromkeys(name for row in names for name in row))  # few, in many conditions
        known = dict(zip(distinct, reader.encode_conditions(distinct) if distinct else [], strict=True))
        encoded = [[known[name] for name in row] + [[]] * (most - len(row)) for row in names]
        parts, parts_mask = _pad_left([part for row in encoded for part in row], device)
        shape = (len(names), most, -1)
        return cls(tokens, mask, parts.view(shape), parts_mask.view(shape))

    def rounded(self, step: int, parts: int) -> "Conditions":
        """The same, padded to multiples of `step` tokens and to as many parts."""
        width = round_up(self.tokens.shape[1], step)
        tokens, mask = (_widen_left(each, width) for each in (self.tokens, self.mask))
        if self.parts is None or self.parts_mask is None:
            return Conditions(tokens, mask)
        names = []
        for each in (self.parts, self.parts_mask):
            wide = _widen_left(each, round_up(each.shape[2], step))
            names.append(nn.functional.pad(wide, (0, 0, 0, max(0, parts - wide.shape[1]))))
        return Conditions(tokens, mask, *names)

    def rows(self, index: Tensor) -> "Conditions":
        """Some rows."""
        if self.parts is None or self.parts_mask is None:
            return Conditions(self.tokens[index], self.mask[index])
        return Conditions(self.tokens[index], self.mask[index], self.parts[index], self.parts_mask[index])


def round_up(count: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-count // step) * step


def _widen_left(values: Tensor, width: int) -> Tensor:
    """(…, width), zeros on the left."""
    return nn.functional.pad(values, (width - values.shape[-1], 0))


def _pad_left(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens (B, C), at least one place wide, and the mask of what is real; there may be a million rows."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    width = max(1, int(lengths.max(initial=0)))
    mask = np.arange(width)[None, :] >= width - lengths[:, None]
    tokens = np.zeros(mask.shape, np.int64)
    tokens[mask] = np.fromiter(chain.from_iterable(rows), np.int64, int(lengths.sum()))
    return torch.from_numpy(tokens).to(device), torch.from_numpy(mask).to(device)


@dataclass(frozen=True)
class Known:
    """What a guide makes of conditions, once for a whole text."""

    inputs: Tensor  # (B, C, size)
    mask: Tensor  # bool (B, C)
    missing: Tensor | None = None  # (B, K, size): what it is told while a part is missing
    settled: Tensor | None = None  # (B, K, size): and once it is settled

    def rows(self, index: Tensor) -> "Known":
        """Some rows."""
        if self.missing is None or self.settled is None:
            return Known(self.inputs[index], self.mask[index])
        return Known(self.inputs[index], self.mask[index], self.missing[index], self.settled[index])

    def put(self, rows: Tensor, fresh: "Known") -> "Known":
        """The same with other conditions in some rows."""
        inputs, new_inputs = _same_width(self.inputs, fresh.inputs, left=True)
        mask, new_mask = _same_width(self.mask, fresh.mask, left=True)
        placed = [inputs.index_copy(0, rows, new_inputs), mask.index_copy(0, rows, new_mask)]
        if self.missing is None or self.settled is None:
            return Known(*placed)
        assert fresh.missing is not None
        assert fresh.settled is not None
        for mine, other in ((self.missing, fresh.missing), (self.settled, fresh.settled)):
            wide, new = _same_width(mine, other, left=False)
            placed.append(wide.index_copy(0, rows, new))
        return Known(*placed)


def _same_width(first: Tensor, second: Tensor, *, left: bool) -> tuple[Tensor, Tensor]:
    """Both tensors with as many columns, zeros added on one side."""
    width = max(first.shape[1], second.shape[1])

    def widen(values: Tensor) -> Tensor:
        shape = (values.shape[0], width - values.shape[1], *values.shape[2:])
        zeros = values.new_zeros(shape)
        return torch.cat([zeros, values] if left else [values, zeros], dim=1)

    return widen(first), widen(second)


class Guide(Composable, PreTrainedModel):
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
        if config.named_parts:
            width = config.embedding_size or size
            self.missing_in = nn.Linear(width, size, bias=False)
            self.settled_in = nn.Linear(width, size, bias=False)
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
        *,
        body: nn.Module | None = None,
    ) -> Tensor:
        """What the body makes of whole texts: (B, T, size).

        `states` (B, T, state_size); `last_tokens` (B, T) the token before each position, −1 before the
        first; `left` (B, T) tokens that may still be written; `progress` (B, T, bits), −1 where there is no
        such bit. `body` is the guide's own in another form, compiled for instance.
        """
        known = self.know(conditions)
        text = self.text_inputs(known, states, last_tokens, left, progress)  # (B, T, size)
        if isinstance(self.body, _LightBody):
            return self.follow(known, text)
        width = known.inputs.shape[1]
        mask = torch.cat([known.mask, known.mask.new_ones(text.shape[:2])], dim=1)
        joined = torch.cat([known.inputs, text], dim=1)
        return self._run_body(joined, mask.long(), _positions(mask), None, body)[:, width:]

    def know(self, conditions: Conditions) -> Known:
        """Read conditions: what of them is the same at every position of a text."""
        inputs = self._condition_inputs(conditions.tokens) + self.condition_mark
        if not self.config.named_parts:
            return Known(inputs, conditions.mask)
        if conditions.parts is None or conditions.parts_mask is None:
            raise InputError(
                "the names of the oracle's parts, as this guide was trained with",
                "none",
                "Give the oracle it was trained for: conditions are encoded with its progress names.",
            )
        mask = conditions.parts_mask[..., None]
        embedded = self._embed_conditions(conditions.parts)  # (B, K, P, width)
        pooled = (embedded * mask).sum(dim=2) / mask.sum(dim=2).clamp(min=1)
        return Known(inputs, conditions.mask, self.missing_in(pooled), self.settled_in(pooled))

    @property
    def attentive(self) -> bool:
        """Whether it has attention and so a cache; a light guide has neither."""
        return not isinstance(self.body, _LightBody)

    def read_conditions(self, known: Known, cache: Cache) -> None:
        """Put the conditions into an empty cache. A light guide has nothing to put there."""
        if self.attentive:
            self._run_body(known.inputs, known.mask.long(), _positions(known.mask), cache)

    def follow(
        self,
        known: Known,
        text: Tensor,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Features (B, n, size) of the next n positions, given as `text_inputs`.

        `mask` says what of the cache, these positions included, may be looked at, None all of it;
        `positions` (B, n) count the condition's tokens too.
        """
        if isinstance(self.body, _LightBody):
            count = known.mask.sum(1, keepdim=True).clamp(min=1)
            pooled = (known.inputs * known.mask[..., None]).sum(1) / count
            return self.body.mix(text, pooled[:, None, :])
        assert positions is not None
        return self._run_body(text, mask, positions, cache)

    def _run_body(
        self,
        inputs: Tensor,
        mask: Tensor | None,
        positions: Tensor,
        cache: Cache | None,
        body: nn.Module | None = None,
    ) -> Tensor:
        output = (self.body if body is None else body)(
            inputs_embeds=inputs,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=cache is not None,
        )
        return torch.as_tensor(output.last_hidden_state)

    def text_inputs(
        self,
        known: Known,
        states: Tensor | None,
        last_tokens: Tensor,
        left: Tensor,
        progress: Tensor | None = None,
    ) -> Tensor:
        """What the body reads at positions of a text, (B, T, size); arguments as for `features`."""
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
            settled, missing = (progress == 1).to(inputs.dtype), (progress == 0).to(inputs.dtype)
            inputs = inputs + self.progress_in(torch.cat([settled, missing], dim=-1))
            if known.missing is not None and known.settled is not None:
                count = known.missing.shape[1]  # parts that these conditions have at most
                inputs = inputs + missing[..., :count] @ known.missing.to(inputs.dtype)
                inputs = inputs + settled[..., :count] @ known.settled.to(inputs.dtype)
        return inputs

    def _token_inputs(self, last_tokens: Tensor) -> Tensor:
        if not self.config.embedding_size:
            own: Tensor = self.own_tokens(last_tokens.where(last_tokens >= 0, self.config.vocabulary_size))
            return own
        known = self._embed(last_tokens.clamp(min=0)).masked_fill((last_tokens < 0)[..., None], 0)
        read: Tensor = self.token_in(known)
        return read

    def _condition_inputs(self, tokens: Tensor) -> Tensor:
        embedded = self._embed_conditions(tokens)
        if not self.config.embedding_size:
            return embedded
        read: Tensor = self.condition_in(embedded)
        return read

    def _embed_conditions(self, tokens: Tensor) -> Tensor:
        if self.config.embedding_size:
            return self._embed(tokens)
        own: Tensor = self.own_conditions(tokens)
        return own

    def _embed(self, tokens: Tensor) -> Tensor:
        """The base's embeddings, all of one size: bases differ a hundredfold in how large theirs are."""
        known = self._lent("input_embeddings")[tokens].to(self.token_in.weight.dtype)
        return nn.functional.rms_norm(known, known.shape[-1:])

    def scores(self, features: Tensor) -> Scores:
        """The head's scores of features (N, size)."""
        output = None if self.config.matrix == "own" else self._lent("output_embeddings")
        return self.head.scores(features, output)

    def log_r(self, scores: Scores, log_p: Tensor, generated: Tensor, logits: Tensor | None = None) -> Tensor:
        """log R of every next token (N, V), for rows with `generated` (N,) tokens, calibrated.

        `logits` (N, V) are `scores.logits()` where they were made together with the base's own.
        """
        mend = None if self.config.calibration == UNCALIBRATED else self._mend
        log_r = self.head.log_r(scores, log_p, logits, mend)
        if self.config.completion == "limit":
            return log_r
        return close_at_limit(log_r, self.config.eos_id, generated == self.config.length_limit - 1)

    def _mend(self, log_odds: Tensor) -> Tensor:
        return mend_log_odds(log_odds, *self.config.calibration)

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


def _positions(mask: Tensor) -> Tensor:
    """Each real place's number in its row: (B, T)."""
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)


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
