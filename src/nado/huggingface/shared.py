"""What causal and encoder–decoder models share: tokens in and out, warpers, limit, fingerprint."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nado.errors import InputError
from nado.language_model import Completion
from nado.warpers import Warpers

# Rows × tokens × vocabulary scored at once: 2^28 float32 log-probabilities are 1 GiB.
_SCORE_BUDGET = 2**28


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
        _require_eval(model)
        _require_limit(length_limit, completion)
        self.model = model
        self.tokenizer = tokenizer
        self.warpers = warpers if warpers is not None else Warpers()
        self.chat = chat
        self.eos_ids = _eos_ids(model, tokenizer)
        self._length_limit = length_limit
        self._completion = completion
        self._vocabulary_size = int(model.get_output_embeddings().weight.shape[0])
        self._fingerprint: str | None = None
        # transformers tidies the spaces of WordPiece texts only, where a tokenizer asks for it.
        pieces = type(tokenizer.backend_tokenizer.model).__name__ if tokenizer.is_fast else ""
        self._decodes_plainly = tokenizer.is_fast and (
            pieces != "WordPiece" or not tokenizer.clean_up_tokenization_spaces
        )
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
        return torch.device(self.model.device)

    @property
    def fingerprint(self) -> str:
        """A digest of weights, vocabulary, warpers, limit, completion and chat template."""
        if self._fingerprint is None:
            digest = hashlib.sha256(weights_digest(self.model).encode())
            digest.update(json.dumps(self.describe(), sort_keys=True).encode())
            digest.update(json.dumps(self.tokenizer.get_vocab(), sort_keys=True).encode())
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
        if isinstance(prompts, str):
            raise InputError(
                "a list of prompts", f"the bare string {prompts!r}", "Put it in a list: [prompt]."
            )
        if self.chat:
            messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
            texts = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            rows = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        else:
            rows = self.tokenizer(list(prompts))["input_ids"]
        rows = [list(row) or [self._first_token()] for row in rows]
        self._require_room(prompts, rows)
        return rows

    def decode(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        """The text of each row, without special tokens; what follows EOS is dropped."""
        rows = [row.tolist() if hasattr(row, "tolist") else list(row) for row in tokens]
        rows = [row[: row.index(self.eos_id)] if self.eos_id in row else row for row in rows]
        if self._decodes_plainly:
            # The same texts as batch_decode, on all cores and without a Python loop.
            return list(self.tokenizer.backend_tokenizer.decode_batch(rows, skip_special_tokens=True))
        return [str(text) for text in self.tokenizer.batch_decode(rows, skip_special_tokens=True)]

    def _first_token(self) -> int:
        """What the base reads for an empty prompt: it must read something."""
        first = self.tokenizer.bos_token_id
        return int(first) if first is not None else self.eos_id

    def _context_left(self) -> int | None:
        """How many tokens a prompt may have beside what is generated; None when there is no bound."""
        raise NotImplementedError

    def _require_room(self, prompts: Sequence[str], rows: list[list[int]]) -> None:
        room = self._context_left()
        if room is None:
            return
        for prompt, row in zip(prompts, rows, strict=True):
            if len(row) > room:
                raise InputError(
                    f"prompts of at most {room} tokens (the model's context less the length limit of "
                    f"{self.length_limit})",
                    f"one of {len(row)} tokens, beginning {prompt[:40]!r}",
                    "Shorten it, or lower the length limit.",
                )

    def _pad_left(self, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Token ids (B, P) and a bool mask (B, P). What stands in padded places is masked everywhere."""
        width = max(len(row) for row in rows)
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
    """A digest of the weights: name, shape and up to 1,024 evenly spaced values of every parameter.

    Values are rounded to bfloat16 first, so that one checkpoint has one digest in whatever precision
    it was loaded; quantised weights keep their own.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.state_dict().items()):
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        values = parameter.detach().reshape(-1)
        values = values[:: max(1, values.numel() // 1024)][:1024]
        if values.is_floating_point():
            values = values.to(torch.bfloat16).view(torch.int16)
        digest.update(values.cpu().numpy().tobytes())
    return digest.hexdigest()


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that ends a text: as generate has it, the generation config's, else the config's."""
    for source in (model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id):
        ids = source if isinstance(source, list | tuple) else [source]
        if ids and ids[0] is not None:
            return tuple(dict.fromkeys(int(eos) for eos in ids))
    raise InputError(
        "a model that can end a text", "no EOS id in config or tokenizer", "Set tokenizer.eos_token first."
    )


def _require_eval(model: PreTrainedModel) -> None:
    if model.training:
        raise InputError(
            "a model in eval mode, because dropout would change p",
            "one in training mode",
            "Call model.eval() first.",
        )


def _require_limit(length_limit: int, completion: str) -> None:
    if length_limit < 1:
        raise InputError("a length limit of at least 1 token", f"{length_limit}", "It counts EOS too.")
    if completion not in ("eos", "limit"):
        raise InputError('completion "eos" or "limit"', f"{completion!r}", "See nado.language_model.")
