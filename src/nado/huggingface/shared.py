"""What causal and encoder–decoder models share: tokens in and out, warpers, limit, fingerprint."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from nado.errors import InputError
from nado.language_model import Completion
from nado.warpers import Warpers

# Rows × tokens × vocabulary scored at once: 2^28 float32 log-probabilities are 1 GiB.
_SCORE_BUDGET = 2**28
# How far, in total variation, a batched and cached step may be from one row read whole: in float32, and
# in anything less precise. An architecture that reads padding, or ignores its cache, is farther.
FAITHFUL = (0.01, 0.1)
_PROBE_TOKENS = 8
# Tokenizers over one vocabulary can still read texts differently: the digest has how this one is read.
_TEXT = "The café's\tcats  ran 12 miles. <s>"


class HuggingFaceModel:
    """What causal and encoder–decoder models share: tokens in and out, warpers, limit, fingerprint."""

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
        for module in model.modules():
            _require_eval(module)
        _require_limit(length_limit, completion)
        self.model = model
        self.tokenizer = tokenizer
        self.warpers = warpers if warpers is not None else Warpers()
        self.chat = chat
        self._length_limit = length_limit
        self._completion = completion
        self._vocabulary_size = _vocabulary_size(model)
        self.eos_ids = _eos_ids(model, tokenizer, self._vocabulary_size)
        self._fingerprint: str | None = None
        self._decodes_plainly = _decodes_plainly(tokenizer)
        _require_tokens(self.warpers, self.eos_ids, self._vocabulary_size, completion)
        if chat and not getattr(tokenizer, "chat_template", None):
            raise InputError(
                "a tokenizer with a chat template, because chat is on",
                f"none in {tokenizer.name_or_path or type(tokenizer).__name__}",
                "Turn chat off, or load an instruction-tuned checkpoint.",
            )

    @property
    def vocabulary_size(self) -> int:
        """V: the width of the model's output, padding rows of the embedding included."""
        return self._vocabulary_size

    @property
    def eos_id(self) -> int:
        """The EOS id into which the others are folded."""
        return self.eos_ids[0]

    @property
    def length_limit(self) -> int:
        """L: the most tokens a text may have, EOS included."""
        return self._length_limit

    @property
    def completion(self) -> Completion:
        """What a text cut at L counts as."""
        return self._completion

    @property
    def device(self) -> torch.device:
        """Where tokens go in and log p comes out."""
        if self.model.device.type == "meta":  # weights that a device map has put aside are fetched for a step
            hook: Any = self.model._hf_hook
            return torch.device(hook.execution_device)
        return torch.device(self.model.device)

    @property
    def fingerprint(self) -> str:
        """A digest of weights, vocabulary, warpers, limit, completion and chat template."""
        if self._fingerprint is None:
            digest = hashlib.sha256(weights_digest(self.model).encode())
            digest.update(json.dumps(self.describe(), sort_keys=True).encode())
            digest.update(json.dumps(self.tokenizer.get_vocab(), sort_keys=True).encode())
            digest.update(json.dumps(list(self.tokenizer(_TEXT)["input_ids"])).encode())
            self._fingerprint = digest.hexdigest()[:32]
        return self._fingerprint

    def describe(self) -> dict[str, Any]:
        """What defines p beside its weights, as JSON-ready values."""
        return {
            "warpers": self.warpers.to_dict(),
            "length_limit": self.length_limit,
            "completion": self.completion,
            "eos_ids": list(self.eos_ids),
            "chat": str(self.tokenizer.chat_template) if self.chat else None,
        }

    def encode(self, prompts: Sequence[str]) -> list[list[int]]:
        """The tokens the base reads for each prompt, checked against the context length."""
        _require_eval(self.model)
        require_list(prompts)
        if self.chat:
            messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
            texts = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            rows = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        else:
            rows = self.tokenizer(list(prompts))["input_ids"]
        rows = [list(row) or [self._first_token()] for row in rows]
        self._require_room(prompts, rows)
        return rows

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of texts the base might have written, without special ones."""
        rows = self.tokenizer(text_target=list(texts), add_special_tokens=False)["input_ids"]
        return [[int(token) for token in row] for row in rows]

    def decode(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        """The text of each row, without special tokens; what follows EOS is dropped."""
        rows = [row.tolist() if hasattr(row, "tolist") else list(row) for row in tokens]
        rows = [row[: row.index(self.eos_id)] if self.eos_id in row else row for row in rows]
        if not rows:
            return []
        if self._decodes_plainly:
            # The same texts as batch_decode, on all cores and without a Python loop.
            return list(self.tokenizer.backend_tokenizer.decode_batch(rows, skip_special_tokens=True))
        return [str(text) for text in self.tokenizer.batch_decode(rows, skip_special_tokens=True)]

    def _first_token(self) -> int:
        """What the base reads for an empty prompt: it must read something."""
        first = self.tokenizer.bos_token_id
        return int(first) if first is not None else self.eos_id

    def _prompt_room(self) -> tuple[int, str] | None:
        """How many tokens a prompt may have, and why; None when there is no bound."""
        raise NotImplementedError

    def _require_room(self, prompts: Sequence[str], rows: list[list[int]]) -> None:
        bound = self._prompt_room()
        if bound is None:
            return
        room, reason = bound
        for prompt, row in zip(prompts, rows, strict=True):
            if len(row) > room:
                raise InputError(
                    f"prompts of at most {room} tokens ({reason})",
                    f"one of {len(row)} tokens, beginning {prompt[:40]!r}",
                    "Shorten it, or lower the length limit.",
                )

    def _require_faithful(self) -> None:
        """Refuse an architecture that does not say of padded, cached rows what it says of each row alone.

        Recurrent models that read their padding, encoders that look ahead, models that ignore a cache: none
        of them complains, and every log-probability would be wrong.
        """
        bound = self._prompt_room()
        special = set(self.tokenizer.all_special_ids)
        words = [token for token in range(self.vocabulary_size) if token not in special] or [self.eos_id]
        spread = [words[len(words) * part // _PROBE_TOKENS] for part in range(_PROBE_TOKENS)]
        last, rows = spread[1], [spread[:1], spread[: bound[0] if bound is not None else None]]
        with torch.no_grad():
            text = torch.tensor([[last, spread[2]]] * 2, device=self.device)
            stepped = self._logits_after(rows, text[:, 0])
            scored = self._score_logits(rows, text)[:, 1]
            alone = torch.cat([self._logits_alone(row, last) for row in rows])
        gaps = torch.stack([stepped, scored]).float().softmax(-1) - alone.float().softmax(-1)
        distance = gaps.abs().sum(-1).max() / 2
        if distance > FAITHFUL[alone.dtype != torch.float32]:
            raise InputError(
                "a model that gives padded rows the probabilities they have alone",
                f"{type(self.model).__name__}, where they differ by {float(distance):.2f} in total variation",
                "Use another architecture: this one reads padding, looks ahead, or keeps no cache.",
            )

    def _logits_after(self, rows: list[list[int]], tokens: Tensor) -> Tensor:
        """Next-token logits (B, V) after `tokens` (B,), as `start` and `step` compute them."""
        raise NotImplementedError

    def _logits_alone(self, row: list[int], token: int) -> Tensor:
        """The same for one row, in one plain forward pass: (1, V)."""
        raise NotImplementedError

    def _pad_left(self, rows: list[list[int]], width: int = 0) -> tuple[Tensor, Tensor]:
        """Token ids and a bool mask (B, P), P at least `width`. Padded places are masked everywhere."""
        width = max(width, *(len(row) for row in rows))
        ids = torch.tensor([[self.eos_id] * (width - len(row)) + row for row in rows])
        lengths = torch.tensor([len(row) for row in rows])
        mask = torch.arange(width)[None, :] >= width - lengths[:, None]
        return ids.to(self.device), mask.to(self.device)

    def _score_rows(self, tokens: Tensor, logits: Tensor, lengths: Tensor) -> Tensor:
        """Log p of `tokens` (B, T) from teacher-forced logits (B, T, V), 0 from `lengths` on."""
        batch, steps, width = logits.shape
        generated = torch.arange(steps, device=logits.device).expand(batch, -1).reshape(-1)
        log_p = self.warpers.apply(logits.reshape(-1, width), self.eos_ids, generated).view(
            batch, steps, width
        )
        chosen = log_p.gather(-1, tokens[..., None]).squeeze(-1)
        valid = torch.arange(steps, device=logits.device)[None, :] < lengths[:, None]
        return chosen.masked_fill(~valid, 0.0)

    def _score_logits(self, prompts: list[list[int]], tokens: Tensor) -> Tensor:
        """Teacher-forced logits (B, T, V) of every next token."""
        raise NotImplementedError

    @torch.no_grad()
    def score(
        self, prompts: Sequence[str], tokens: Tensor, lengths: Tensor, conditions: Sequence[str] | None = None
    ) -> Tensor:
        """Teacher-forced log p of each token, float32 (B, T), 0 from `lengths` on."""
        encoded = self.encode(prompts)
        steps = tokens.shape[1]
        tokens, lengths = tokens.to(self.device), lengths.to(self.device)
        # Whatever fills the places past the end must be a valid index; it is masked afterwards.
        tokens = tokens.masked_fill(
            torch.arange(steps, device=self.device)[None, :] >= lengths[:, None], self.eos_id
        )
        rows = max(1, _SCORE_BUDGET // (max(1, steps) * self.vocabulary_size))
        parts = []
        for first in range(0, len(encoded), rows):
            chunk = slice(first, first + rows)
            logits = self._score_logits(encoded[chunk], tokens[chunk])
            parts.append(self._score_rows(tokens[chunk], logits, lengths[chunk]))
        return torch.cat(parts)


def reorder(cache: Any, rows: Tensor) -> None:
    """Make a transformers cache hold the given rows, in that order."""
    cache.reorder_cache(rows)


def weights_digest(model: PreTrainedModel) -> str:
    """A digest of the weights: of every parameter its name, its shape, 1,024 evenly spaced values, and a
    sum over all of them, which any single change moves.

    Values are rounded to bfloat16 first, so that one checkpoint has one digest whether it was loaded in
    float32 or bfloat16; quantised weights keep their own.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(_whole_state(model).items()):
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        values = parameter.detach().reshape(-1)
        if values.is_floating_point():
            values = values.to(torch.bfloat16).view(torch.int16)
        digest.update(values[:: max(1, values.numel() // 1024)][:1024].cpu().numpy().tobytes())
        digest.update(str(int(values.sum(dtype=torch.int64))).encode())
    return digest.hexdigest()


def _whole_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights, also those that a device map has put aside."""
    state: dict[str, Tensor] = model.state_dict()
    if any(value.device.type == "meta" for value in state.values()):
        from accelerate.utils.modeling import get_state_dict_offloaded_model

        state = get_state_dict_offloaded_model(model)
    return state


def _vocabulary_size(model: PreTrainedModel) -> int:
    """V: the rows of the output layer; quantised ones pack their weight, and a few models have none."""
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if isinstance(weight, Tensor) and weight.ndim == 2 and weight.is_floating_point():
        return int(weight.shape[0])
    size = getattr(head, "out_features", None) or model.config.get_text_config(decoder=True).vocab_size
    return int(size)


def _eos_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, vocabulary_size: int
) -> tuple[int, ...]:
    """Every id that ends a text: as generate has it, the generation config's, else the config's."""
    config = model.config.get_text_config(decoder=True)
    for holder in (model.generation_config, model.config, config, tokenizer):
        source = getattr(holder, "eos_token_id", None)
        ids = [eos for eos in (source if isinstance(source, list | tuple) else [source]) if eos is not None]
        outside = [eos for eos in ids if not 0 <= eos < vocabulary_size]
        if outside:
            raise InputError(
                f"an EOS id inside the vocabulary of {vocabulary_size} tokens",
                f"{outside[0]} in {type(holder).__name__}",
                "Set eos_token_id there to the token that ends a text.",
            )
        if ids:
            return tuple(dict.fromkeys(int(eos) for eos in ids))
    raise InputError(
        "a model that can end a text", "no EOS id in config or tokenizer", "Set tokenizer.eos_token first."
    )


def _decodes_plainly(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer's backend decodes alone: no class of its own, no tidying of spaces after it."""
    kind = type(tokenizer)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return False
    own = kind.decode is not PreTrainedTokenizerBase.decode
    if own or kind._decode is not PreTrainedTokenizerFast._decode:
        return False
    # transformers leaves the spaces of BPE texts alone unless this setting insists.
    insists = getattr(
        tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False
    )
    untouched = type(tokenizer.backend_tokenizer.model).__name__ == "BPE" and not insists
    return untouched or not tokenizer.clean_up_tokenization_spaces


def _require_tokens(
    warpers: Warpers, eos_ids: tuple[int, ...], vocabulary_size: int, completion: Completion
) -> None:
    for name in ("forced", "forbidden"):
        outside = [token for token in getattr(warpers, name) if not 0 <= token < vocabulary_size]
        if outside:
            raise InputError(
                f"{name} tokens inside the vocabulary of {vocabulary_size}",
                f"{outside[0]}",
                "Use the ids of this model's own tokenizer.",
            )
    if completion == "eos" and set(eos_ids) <= set(warpers.forbidden):
        raise InputError(
            'a text that can end, because completion is "eos"',
            "every EOS id among the forbidden tokens",
            'Allow one of them, or use completion="limit".',
        )


def _require_eval(model: torch.nn.Module) -> None:
    if model.training:
        raise InputError(
            "a model in eval mode, because dropout would change p",
            "one in training mode",
            "Call model.eval() first.",
        )


def require_list(prompts: Sequence[str]) -> None:
    """Refuse a bare string, whose letters would pass for prompts, and an empty list."""
    if isinstance(prompts, str):
        raise InputError("a list of prompts", f"the bare string {prompts!r}", "Put it in a list: [prompt].")
    if not prompts:
        raise InputError("at least one prompt", "none", "Give a list of prompts, [''] for an empty one.")


def require_context(context: int | None, prompt_tokens: int, length_limit: int) -> None:
    """Refuse a limit that leaves no room in the context for a prompt of this many tokens."""
    if context is not None and length_limit + prompt_tokens > context:
        raise InputError(
            f"a length limit of at most {context - prompt_tokens} tokens for a context of {context}",
            f"{length_limit}",
            "Lower the length limit.",
        )


def _require_limit(length_limit: int, completion: str) -> None:
    if length_limit < 1:
        raise InputError("a length limit of at least 1 token", f"{length_limit}", "It counts EOS too.")
    if completion not in ("eos", "limit"):
        raise InputError('completion "eos" or "limit"', f"{completion!r}", "See nado.language_model.")
