"""vLLM's classes: a guided architecture for each of its own, and the processor that reads requests.

vLLM asks for classes by name, in several processes, so they are made here when their names are asked for:
`NadoGuidedLlamaForCausalLM`, and `Requests32Conditioned` for a length limit of 32 and conditions that
requests must give.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer
from vllm import ModelRegistry, SamplingParams
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from nado.errors import InputError, MismatchError
from nado.vllm_plugin import PREFIX
from nado.vllm_plugin.guiding import Lent, LightGuiding, Rows, add_marks, split_marks
from nado.vllm_plugin.rows import board_of, read_row, require_arguments, require_no_beams, require_room
from nado.vllm_plugin.served import GUIDE, Served

_REQUESTS = re.compile(r"Requests(\d+)(Conditioned)?(Unscaled)?")


def __getattr__(name: str) -> Any:
    """The classes that vLLM asks for by name."""
    if name.startswith(PREFIX):
        return _guided_class(name.removeprefix(PREFIX))
    if found := _REQUESTS.fullmatch(name):
        values = {
            "length_limit": int(found[1]),
            "needs_condition": bool(found[2]),
            "has_scale": not found[3],
            "__module__": __name__,
        }
        return type(name, (Requests,), values)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Requests(LogitsProcessor):  # type: ignore[misc]
    """Is told of every change of the batch and writes it on the board; logits it leaves alone."""

    length_limit: int
    needs_condition: bool
    has_scale: bool

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._board = board_of(vllm_config.instance_id)

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse a request before it is in the batch; vLLM's server answers it with what we say."""
        require_no_beams(sampling_params.max_tokens, sampling_params.detokenize, sampling_params.extra_args)
        require_arguments(
            sampling_params.extra_args, needs_condition=cls.needs_condition, has_scale=cls.has_scale
        )
        require_room(sampling_params.max_tokens, sampling_params.prompt_logprobs, cls.length_limit)

    def is_argmax_invariant(self) -> bool:
        """Yes: it changes nothing."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Before a step: which requests came, went and moved."""
        if batch_update is None:
            return
        added = [
            (place, read_row(len(prompt), params.extra_args))
            for place, params, prompt, _ in batch_update.added
        ]
        moved = [
            (here, there, direction is MoveDirectionality.SWAP)
            for here, there, direction in batch_update.moved
        ]
        self._board.update(batch_update.removed, added, moved)

    def apply(self, logits: Tensor) -> Tensor:
        """The logits as they are."""
        return logits


class GuidedMixin:
    """What is put before vLLM's class of a base: the guide in `compute_logits`."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        model = vllm_config.model_config
        self._board = board_of(vllm_config.instance_id)
        self._folder, self._served = Path(model.model), Served.read(model.hf_config.nado)
        self._vocabulary_size = int(model.hf_config.vocab_size)
        # Not a module of this one: its weights are not the checkpoint's, and vLLM shall not pack them.
        self._guiding: LightGuiding | None = None
        self._rows: tuple[int, Rows] | None = None

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """The base's hidden states, marked with tokens and positions."""
        parent: Any = super()
        states = parent.forward(input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs)
        if not isinstance(states, Tensor) or input_ids is None or positions.ndim != 1:
            raise InputError(
                "a base that reads tokens one after the other and gives one state for each",
                type(self).__name__.removeprefix(PREFIX),
                "Serve this one with nado serve.",
            )
        return add_marks(states, input_ids, positions)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Numbers whose softmax is q; the base's own where vLLM only tries how much memory it needs."""
        states, tokens, positions = split_marks(hidden_states)
        parent: Any = super()
        logits: Tensor = parent.compute_logits(states)
        if self._guiding is None:
            self._guiding = self._load_guide(states.device)
        if not self._board.rows:
            return logits
        rows = self._lay_out(self._guiding)
        if len(rows) != len(states):
            raise MismatchError(
                "one row of states for each request in the batch",
                f"{len(states)} rows and {len(rows)} requests",
                "This vLLM orders its work otherwise than the one nado was written for; see docs/vllm.md.",
            )
        return self._guiding.guide(states, logits, tokens, positions, rows)

    def _lay_out(self, guiding: LightGuiding) -> Rows:
        if self._rows is None or self._rows[0] != self._board.changes:
            self._rows = (self._board.changes, guiding.lay_out(self._board.in_order()))
        return self._rows[1]

    def _load_guide(self, device: torch.device) -> LightGuiding:
        tokenizer: Any = AutoTokenizer.from_pretrained(self._folder, local_files_only=True)

        def encode(conditions: Any) -> list[list[int]]:
            rows = tokenizer(list(conditions), add_special_tokens=False)["input_ids"]
            return [list(row) for row in rows]

        lent = Lent(*self._matrices(), encode, device)
        return LightGuiding.load(self._folder / GUIDE, self._served, lent)

    def _matrices(self) -> tuple[Tensor | None, Tensor | None]:
        """The base's embeddings and output matrix, (V, D) each; None where there is not one of it."""
        module: Any = self
        embeddings = [
            each
            for each in module.modules()
            if isinstance(each, VocabParallelEmbedding) and not isinstance(each, ParallelLMHead)
        ]
        found = [embeddings[0] if len(embeddings) == 1 else None, getattr(module, "lm_head", None)]
        first, last = (None if each is None else each.weight[: self._vocabulary_size] for each in found)
        return first, last


@cache
def _guided_class(architecture: str) -> type:
    """vLLM's class of a base's architecture, guided."""
    base = ModelRegistry.models[architecture].load_model_cls()
    return type(PREFIX + architecture, (GuidedMixin, base), {"__module__": __name__})
