"""Causal models, stepped on a slot cache wherever the architecture allows it."""

import inspect
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from nado.compiling import compile_layers
from nado.errors import InputError
from nado.huggingface.attention import NAME as GROUPED
from nado.huggingface.output_layer import OutputLayer
from nado.huggingface.shared import HuggingFaceModel, reorder, require_context, require_list
from nado.huggingface.slot_cache import SlotCache, stack_states
from nado.language_model import Completion
from nado.noise import sample, sample_logits
from nado.warpers import Warpers, fold_eos

_WIDTH_STEP = 16  # cache widths are multiples of this, so that near-equal prompts share captured graphs
_CAPTURE_RUNS = 2  # how often a step runs before it is recorded as a CUDA graph
# What reading ahead may take: prompt tokens in one pass, bytes of keys and values, and logits kept.
_BANK_TOKENS = 2**16
_BANK_BYTES = 2**31
_BANK_LOGITS = 2**29


@dataclass(eq=False)
class CausalState:
    """Rows of a causal model. Their cache is written in place: a state is used once."""

    logits: Tensor  # (B, V) as the model gives them
    generated: Tensor  # (B,) tokens each row has written
    cache: "SlotCache | _Growing"
    warp: Callable[[Tensor, Tensor], Tensor]  # (logits, generated) → log p
    replay: Callable[[Tensor], None] | None = None  # the captured step, on a GPU
    lease: "weakref.finalize[..., CausalState] | None" = None  # gives the captured tensors back when dropped
    hidden: Tensor | None = None  # (B, H) what the output layer was given, where that can be had

    @property
    def log_p(self) -> Tensor:
        """Normalised float32 log p of the next token, made when asked for: (B, V)."""
        return self.warp(self.logits, self.generated)


@dataclass
class _Growing:
    """The general cache: transformers' own, with a padding mask that grows by a column a step."""

    cache: DynamicCache
    mask: Tensor  # bool (B, T)


@dataclass
class _Prefilled:
    """Different prompts, read once each; rows of a batch are copies of them."""

    places: dict[str, int]
    logits: Tensor  # (U, V)
    mask: Tensor  # bool (U, P), left-padded
    cache: DynamicCache | Tensor  # as one tensor, where slots will take it
    hidden: Tensor | None  # (U, H)

    def sources(self, prompts: Sequence[str]) -> Tensor:
        """Which of the read prompts each row is: (B,)."""
        return torch.tensor([self.places[prompt] for prompt in prompts], device=self.logits.device)


_Captured: TypeAlias = tuple[Tensor, Tensor | None, Tensor, SlotCache, Callable[[Tensor], None]]


class CausalModel(HuggingFaceModel):
    """Any `AutoModelForCausalLM`.

    Models with full attention and explicit positions (most) decode on a slot cache: fixed shapes, rows
    that can be refilled, CUDA graphs on a GPU. The others use transformers' own growing cache.
    `compiled` also fuses the step with torch.compile: worth its half minute from some 100,000 samples on.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        length_limit: int,
        completion: Completion = "eos",
        warpers: Warpers | None = None,
        chat: bool = False,
        cuda_graphs: bool = True,
        compiled: bool = False,
    ) -> None:
        super().__init__(
            model, tokenizer, length_limit=length_limit, completion=completion, warpers=warpers, chat=chat
        )
        parameters = inspect.signature(model.forward).parameters
        _require_cache(model, set(parameters))
        self._takes_positions = "position_ids" in parameters
        self._takes_last_only = "logits_to_keep" in parameters
        self._has_slots = _can_use_slots(model)
        context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        self._context = None if context is None else int(context)
        require_context(self._context, 1, length_limit)
        self._cuda_graphs = cuda_graphs and self.device.type == "cuda" and not _reads_on_host(model)
        self._forward = torch.compile(self._slot_step, dynamic=False) if compiled else self._slot_step
        self._sample = torch.compile(self._sample_logits, dynamic=False) if compiled else self._sample_logits
        self._output = _split_output(model, self.device)
        body: Any = model.base_model
        self._body: Callable[..., Any] = compile_layers(body) if compiled else body
        # The last captured step whose state was dropped, to be used again by the next start of its shape.
        self._idle: deque[_Captured] = deque(maxlen=1)
        self._bank: _Prefilled | None = None
        self._token_bytes = 0  # what one prompt token takes in slots
        self._require_faithful()

    @property
    def refillable(self) -> bool:
        """Whether finished rows can be replaced while the others go on."""
        return self._has_slots

    @torch.no_grad()
    def prepare(self, prompts: Sequence[str]) -> int:
        """Read prompts that will be asked for soon, as many as fit, in one pass; returns how many fitted.

        It changes nothing but the time the next `start` and `refill` take.
        """
        if not self._has_slots or not prompts:
            return 0
        require_list(prompts)
        most = max(1, _BANK_LOGITS // self.vocabulary_size)
        distinct = list(dict.fromkeys(prompts))[:most]
        room = min(_BANK_TOKENS, _BANK_BYTES // self._token_bytes)
        count, widest = 0, 0
        for row in self.encode(distinct):
            widest = max(widest, len(row))
            if count and widest * (count + 1) > room:
                break
            count += 1
        self._bank = None  # freed before the next one is made
        self._bank = self._read(distinct[:count])
        return count

    @torch.no_grad()
    def start(self, prompts: Sequence[str], conditions: Sequence[str] | None = None) -> CausalState:
        """Read the prompts. Equal prompts are read once."""
        read = self._prefill(prompts)
        sources = read.sources(prompts)
        if not self._has_slots:
            return self._growing(read, sources)
        state = self._reused(len(prompts), self._slot_width(read))
        if state is None:
            state = self._captured(self._empty(read, len(prompts)))
        return self._put(state, torch.arange(len(prompts), device=self.device), sources, read)

    @torch.no_grad()
    def step(self, state: CausalState, tokens: Tensor) -> CausalState:
        """Append one token to every row."""
        if isinstance(state.cache, _Growing):
            return self._grow(state, state.cache, tokens)
        if state.replay is not None:
            state.replay(tokens)
            return state
        state.logits, state.hidden = self._forward(state.cache, state.generated, tokens)
        return state

    @torch.no_grad()
    def select(self, state: CausalState, rows: Tensor) -> CausalState:
        """The given rows, in that order."""
        if isinstance(state.cache, _Growing):
            reorder(state.cache.cache, rows)
            cache: SlotCache | _Growing = _Growing(state.cache.cache, state.cache.mask[rows])
        elif state.replay is not None and len(rows) == len(state.generated):
            # A captured step is bound to its tensors: as many rows as before are moved inside them.
            state.cache.reorder(rows)
            state.logits.copy_(state.logits[rows])
            state.generated.copy_(state.generated[rows])
            if state.hidden is not None:
                state.hidden.copy_(state.hidden[rows])
            return state
        else:
            cache = state.cache.select(rows)
        _retire(state)
        hidden = None if state.hidden is None else state.hidden[rows]
        return self._captured(
            CausalState(state.logits[rows], state.generated[rows], cache, self._warp, hidden=hidden)
        )

    @torch.no_grad()
    def refill(
        self,
        state: CausalState,
        rows: Tensor,
        prompts: Sequence[str],
        conditions: Sequence[str] | None = None,
    ) -> CausalState:
        """Start `prompts` in `rows`; the other rows go on where they are."""
        if not isinstance(state.cache, SlotCache):
            raise InputError(
                "a model with full attention and explicit positions, to refill rows",
                f"{type(self.model).__name__}",
                "Draw in whole batches instead: select the rows that are left, then start the next batch.",
            )
        read = self._prefill(prompts)
        if self._slot_width(read) > state.cache.width:
            wider = state.cache.widen(self._slot_width(read))
            _retire(state)
            hidden = None if state.hidden is None else state.hidden.clone()
            state = CausalState(
                state.logits.clone(), state.generated.clone(), wider, self._warp, hidden=hidden
            )
            state = self._captured(state)
        return self._put(state, rows, read.sources(prompts), read)

    @torch.no_grad()
    def sample(self, state: CausalState, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The next token of every row by inverse-CDF sampling, and its log p: (B,) each.

        The same as sampling from `state.log_p`, without forming it where no token is cut off.
        """
        if self.warpers.truncates:
            log_p = state.log_p
            tokens = sample(log_p, noise)
            return tokens, log_p.gather(-1, tokens[:, None]).squeeze(-1)
        return self._sample(state.logits, noise)

    def _sample_logits(self, logits: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        temperature = self.warpers.temperature
        if len(self.eos_ids) > 1:  # folded at this temperature, which is then done with
            logits, temperature = fold_eos(logits.float() / temperature, self.eos_ids), 1.0
        tokens, normaliser = sample_logits(logits, noise, temperature)
        scores = logits.gather(-1, tokens[:, None]).squeeze(-1).float() / temperature
        return tokens, scores - normaliser

    def _prefill(self, prompts: Sequence[str]) -> _Prefilled:
        """Prompts as read in advance, or read now."""
        require_list(prompts)
        if self._bank is not None and all(prompt in self._bank.places for prompt in prompts):
            return self._bank
        return self._read(list(dict.fromkeys(prompts)))

    def _read(self, prompts: list[str]) -> _Prefilled:
        return self._read_rows(self.encode(prompts), {prompt: at for at, prompt in enumerate(prompts)})

    def _read_rows(self, rows: list[list[int]], places: dict[str, int], width: int = 0) -> _Prefilled:
        ids, mask = self._pad_left(rows, width)
        cache = DynamicCache(config=self.model.config)
        logits, hidden = self._run(ids, mask.long(), _positions(mask), cache, keep=1)
        stacked = stack_states(cache) if self._has_slots else None
        self._has_slots = stacked is not None  # settled by the first reading, when the model is made
        return _Prefilled(places, logits[:, -1], mask, cache if stacked is None else stacked, _last(hidden))

    def _empty(self, read: _Prefilled, batch: int) -> CausalState:
        """Slots with room for what was read, nothing in them yet."""
        assert isinstance(read.cache, Tensor)
        generated = torch.zeros(batch, dtype=torch.long, device=self.device)
        slots = SlotCache.empty(read.cache, batch, self._slot_width(read))
        logits = read.logits.new_zeros(batch, read.logits.shape[1])
        hidden = None if read.hidden is None else read.hidden.new_zeros(batch, read.hidden.shape[1])
        return CausalState(logits, generated, slots, self._warp, hidden=hidden)

    def _growing(self, read: _Prefilled, sources: Tensor) -> CausalState:
        """Rows on transformers' own cache, which is taken over."""
        assert isinstance(read.cache, DynamicCache)
        reorder(read.cache, sources)
        generated = torch.zeros(len(sources), dtype=torch.long, device=self.device)
        growing = _Growing(read.cache, read.mask[sources])
        hidden = None if read.hidden is None else read.hidden[sources]
        return CausalState(read.logits[sources], generated, growing, self._warp, hidden=hidden)

    def _put(self, state: CausalState, rows: Tensor, sources: Tensor, read: _Prefilled) -> CausalState:
        """Copy freshly read prompts into rows of a state on slots."""
        assert isinstance(state.cache, SlotCache)
        assert isinstance(read.cache, Tensor)
        state.cache.insert(rows, read.cache, sources, read.mask.sum(dim=-1)[sources])
        state.logits[rows] = read.logits[sources]
        if state.hidden is not None and read.hidden is not None:
            state.hidden[rows] = read.hidden[sources]
        state.generated[rows] = 0
        return state

    def _slot_width(self, read: _Prefilled) -> int:
        """Columns for the prompts and for L tokens more."""
        needed = read.mask.shape[1] + self.length_limit
        return -(-needed // _WIDTH_STEP) * _WIDTH_STEP

    def _slot_step(self, slots: SlotCache, generated: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        mask = slots.mask()
        if self.model.config._attn_implementation == "eager":  # which adds its mask to the scores
            lowest = torch.finfo(slots.states.dtype).min
            mask = torch.zeros_like(mask, dtype=slots.states.dtype).masked_fill(~mask, lowest)
        logits, hidden = self._run(tokens[:, None], mask, slots.lengths[:, None], slots.cache)
        slots.advance()
        generated.add_(1)
        return logits[:, -1], _last(hidden)

    def _grow(self, state: CausalState, growing: _Growing, tokens: Tensor) -> CausalState:
        mask = torch.cat([growing.mask, growing.mask.new_ones(len(tokens), 1)], dim=1)
        logits, hidden = self._run(tokens[:, None], mask.long(), _positions(mask)[:, -1:], growing.cache)
        grown = _Growing(growing.cache, mask)
        return CausalState(logits[:, -1], state.generated + 1, grown, self._warp, hidden=_last(hidden))

    def _warp(self, logits: Tensor, generated: Tensor) -> Tensor:
        return self.warpers.apply(logits, self.eos_ids, generated)

    def _run(
        self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any, *, keep: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits (B, T, V) of one forward pass and the hidden states (B, T, H) they come from.

        With `keep` those of at least the last `keep` positions.
        """
        arguments: dict[str, Any] = {}
        if self._takes_positions:
            if self._context is not None:  # rows that have ended but are still stepped must stay inside it
                positions = positions.clamp(max=self._context - 1)
            arguments["position_ids"] = positions
        arguments |= {"attention_mask": mask, "past_key_values": cache, "use_cache": cache is not None}
        if self._output is not None:
            hidden = self.model.base_model(input_ids=ids, **arguments).last_hidden_state
            hidden = hidden if keep is None else hidden[:, -keep:]
            return self._output(hidden), hidden
        if keep is not None and self._takes_last_only:
            arguments["logits_to_keep"] = keep
        return torch.as_tensor(self.model(input_ids=ids, **arguments).logits), None

    def _captured(self, state: CausalState) -> CausalState:
        """On a GPU: record one step as a CUDA graph that writes into this state's own tensors."""
        slots = state.cache
        if not (self._cuda_graphs and isinstance(slots, SlotCache)):
            return state
        tokens = torch.full_like(state.generated, self.eos_id)
        # Trying the step out before it is recorded moves the rows on: remember where they stood. What is
        # written into the cache meanwhile lies past every row's length.
        lengths, generated = slots.lengths.clone(), state.generated.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(_CAPTURE_RUNS):
                    self._forward(slots, state.generated, tokens)
            torch.cuda.current_stream().wait_stream(side)
            slots.lengths.copy_(lengths)
            state.generated.copy_(generated)
            with torch.cuda.graph(graph):
                logits, hidden = self._forward(slots, state.generated, tokens)
        logits.copy_(state.logits)
        if hidden is not None and state.hidden is not None:
            hidden.copy_(state.hidden)

        def replay(chosen: Tensor) -> None:
            tokens.copy_(chosen)
            graph.replay()

        return self._own(logits, hidden, state.generated, slots, replay)

    def _reused(self, batch: int, width: int) -> CausalState | None:
        """A state on tensors that were captured before and are free again. Those of another shape go."""
        if self._idle and (len(self._idle[0][0]), self._idle[0][3].width) != (batch, width):
            self._idle.clear()
        return self._own(*self._idle.pop()) if self._idle else None

    def _own(
        self,
        logits: Tensor,
        hidden: Tensor | None,
        generated: Tensor,
        slots: SlotCache,
        replay: Callable[[Tensor], None],
    ) -> CausalState:
        state = CausalState(logits, generated, slots, self._warp, replay, hidden=hidden)
        state.lease = weakref.finalize(state, self._idle.append, (logits, hidden, generated, slots, replay))
        state.lease.atexit = False
        return state

    @torch.no_grad()
    def score_states(self, prompts: list[list[int]], tokens: Tensor) -> Tensor:
        """The body's last hidden state at every position of `tokens` (B, T): (B, T, H)."""
        ids, mask = self._continued(prompts, tokens)
        width = ids.shape[1]
        padding = width - mask.sum(dim=-1, keepdim=True)  # (B, 1)
        # Padding moved to the right: a causal model never looks there, so it needs no mask, and attention
        # without a mask is several times faster.
        columns = torch.arange(width, device=ids.device)
        ids = ids.gather(1, (columns[None, :] + padding) % width)
        read = torch.as_tensor(self._body(input_ids=ids, use_cache=False).last_hidden_state)
        places = columns[None, width - tokens.shape[1] - 1 : -1] - padding  # (B, T)
        return read.gather(1, places[..., None].expand(-1, -1, read.shape[-1]))

    def _score_logits(self, prompts: list[list[int]], tokens: Tensor) -> Tensor:
        ids, mask = self._continued(prompts, tokens)
        steps = tokens.shape[1]
        logits, _ = self._run(ids, mask.long(), _positions(mask), None, keep=steps + 1)
        return logits[:, -steps - 1 : -1]

    def _continued(self, prompts: list[list[int]], tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Left-padded prompts with `tokens` (B, T) behind them, and the mask of what is real."""
        ids, mask = self._pad_left(prompts)
        return torch.cat([ids, tokens], dim=1), torch.cat([mask, mask.new_ones(tokens.shape)], dim=1)

    def _logits_after(self, rows: list[list[int]], tokens: Tensor) -> Tensor:
        read = self._read_rows(rows, {})
        everyone = torch.arange(len(rows), device=self.device)
        if isinstance(read.cache, DynamicCache):
            return self.step(self._growing(read, everyone), tokens).logits
        self._token_bytes = read.cache[:, :, 0, :, 0].numel() * read.cache.element_size()
        state = self._put(self._empty(read, len(rows)), everyone, everyone, read)
        assert isinstance(state.cache, SlotCache)
        return self._slot_step(state.cache, state.generated, tokens)[0]  # neither compiled nor captured

    def _logits_alone(self, row: list[int], token: int) -> Tensor:
        ids = torch.tensor([[*row, token]], device=self.device)
        return torch.as_tensor(self.model(input_ids=ids, use_cache=False).logits[:, -1])

    def _prompt_room(self) -> tuple[int, str] | None:
        if self._context is None:
            return None
        reason = f"the model's context less the length limit of {self.length_limit}"
        return self._context - self.length_limit, reason


@torch.no_grad()
def _split_output(model: PreTrainedModel, device: torch.device) -> OutputLayer | None:
    """The output layer, if the model is its body followed by that layer: then hidden states cost nothing."""
    ids = torch.arange(4, device=device)[None, :] % _vocabulary(model)
    try:
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        mine = OutputLayer(model)(hidden)
    except (AttributeError, TypeError, NotImplementedError):
        return None
    whole = model(input_ids=ids, use_cache=False).logits
    error = 1e-3 if whole.dtype == torch.float32 else 0.05
    same = mine.shape == whole.shape and torch.allclose(mine.float(), whole.float(), rtol=error, atol=error)
    return OutputLayer(model) if same else None


def _vocabulary(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config(decoder=True).vocab_size)


def _last(hidden: Tensor | None) -> Tensor | None:
    return None if hidden is None else hidden[:, -1]


def _retire(state: CausalState) -> None:
    """The tensors of a consumed state, now copied elsewhere, are not kept for another start."""
    if state.lease is not None:
        state.lease.detach()


def _require_cache(model: PreTrainedModel, parameters: set[str]) -> None:
    if "past_key_values" not in parameters:
        raise InputError(
            "a causal model with a key–value cache",
            f"{type(model).__name__}, whose forward takes no past_key_values",
            "Use another architecture: recurrent models and models without a cache are not supported.",
        )


def _can_use_slots(model: PreTrainedModel) -> bool:
    """Whether this model can read an explicit mask, explicit positions and a cache of fixed width."""
    config = model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    windowed = window is not None and getattr(config, "use_sliding_window", True)
    return (
        kinds == {"full_attention"}
        and not windowed
        and "position_ids" in inspect.signature(model.forward).parameters
        and bool(getattr(model, "_can_compile_fullgraph", False))
        and model.config._attn_implementation in ("sdpa", "eager", GROUPED)
        # Slots are one tensor, on one device.
        and len({parameter.device for parameter in model.parameters()}) == 1
    )


def _reads_on_host(model: PreTrainedModel) -> bool:
    """Whether a mixture of experts looks on the host at which rows go where: no CUDA graph can record that.

    transformers' loop over experts does, and torch's grouped product wherever its fused kernel is not used.
    """
    if not any(name.endswith("experts") for name, _ in model.named_modules()):
        return False
    how = getattr(model.config.get_text_config(decoder=True), "_experts_implementation", "eager")
    if how != "grouped_mm":
        return bool(how == "eager")
    return model.dtype != torch.bfloat16 or torch.cuda.get_device_capability(model.device) < (9, 0)


def _positions(mask: Tensor) -> Tensor:
    """Each token's position in its own row, not counting padding: (B, T)."""
    return (mask.long().cumsum(dim=-1) - 1).clamp(min=0)
