"""q of a batch of rows from the base's hidden states and logits: a light guide outside transformers.

The same steps as `GuidedModel` makes, with what a row needs given beside its state. Nothing here needs vLLM.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nado.decomposition import apply_strength, doubted_log_r, plausible_log_r
from nado.errors import MismatchError
from nado.guide import Conditions, Guide, Known
from nado.heads import Scores
from nado.vllm_plugin.folders import require_light
from nado.vllm_plugin.rows import RequestRow
from nado.vllm_plugin.served import Served
from nado.warpers import Warpers

_REMEMBERED = 4096  # conditions whose vectors are kept
_BASE, _DIGITS = 256, 3  # whole numbers up to 256 are exact in every type a base is run in
MARKS = 2 * _DIGITS


class Lent(NamedTuple):
    """What the guide reads of its base, in place of a `Reader`."""

    input_embeddings: Tensor | None  # (V, D)
    output_embeddings: Tensor | None  # (V, D)
    encode_conditions: Callable[[Sequence[str]], list[list[int]]]
    device: torch.device

    @property
    def model(self) -> "Lent":
        """Itself: of the model only the device is asked for."""
        return self


@dataclass(frozen=True)
class Rows:
    """The requests of a batch as tensors. What can be known of them on the host costs no look at a device."""

    known: Known  # (B, 1, size): conditions, pooled
    prompt_lengths: Tensor  # (B,)
    strengths: Tensor  # (B,)
    doubts: Tensor  # (B,)
    plausibles: Tensor | None  # (B,), None where no row leaves anything out
    guided: Tensor | None  # rows that are not p's as they are; None for all of them
    plain: bool  # all their strengths are 1, and none of them doubts

    def __len__(self) -> int:
        return len(self.strengths)


class LightGuiding:
    """A light guide beside a base that somebody else runs. The guide is lent that base's matrices."""

    def __init__(self, guide: Guide, served: Served, lent: Lent) -> None:
        require_light(guide.config)
        self.model, self.served = guide, served
        guide.eval().requires_grad_(False)  # type: ignore[no-untyped-call]
        _require_sizes(guide, lent)
        reader: Any = lent
        self.model.reader, self._lent = reader, lent
        self._is_softmax = served.warpers == Warpers() and len(served.eos_ids) == 1
        self._pooled: dict[str, Tensor] = {}
        self._matrix: Tensor | None = None

    @classmethod
    def load(cls, folder: str | Path, served: Served, lent: Lent) -> "LightGuiding":
        """The guide of a folder that `save_for_vllm` has written."""
        guide: Guide = Guide.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, dtype=torch.float32
        )
        guide.to(lent.device)  # type: ignore[arg-type]
        return cls(guide, served, lent)

    @torch.no_grad()
    def lay_out(self, rows: Sequence[RequestRow]) -> Rows:
        """The rows as tensors; a condition is read once."""
        device = self._lent.device
        conditions = [self._condition(row) for row in rows]
        if len(self._pooled) > _REMEMBERED:
            self._pooled.clear()
        self._read([each for each in dict.fromkeys(conditions) if each not in self._pooled])
        inputs = torch.stack([self._pooled[each] for each in conditions])[:, None]  # (B, 1, size)
        mask = torch.ones(inputs.shape[:2], dtype=torch.bool, device=device)
        lengths = torch.tensor([row.prompt_length for row in rows], device=device)
        strengths = torch.tensor([row.strength for row in rows], device=device)
        doubts = torch.tensor([row.doubt for row in rows], device=device)
        shares = [row.plausible for row in rows]
        plausibles = torch.tensor(shares, device=device) if any(shares) else None
        on = [at for at, row in enumerate(rows) if row.strength > 0 or row.plausible]
        guided = None if len(on) == len(rows) else torch.tensor(on, dtype=torch.long, device=device)
        plain = all(rows[at].strength == 1 and not rows[at].doubt for at in on)
        return Rows(Known(inputs, mask), lengths, strengths, doubts, plausibles, guided, plain)

    def _condition(self, row: RequestRow) -> str:
        given = row.condition if row.condition is not None else self.served.condition
        return given if given is not None else ""  # only where the strength is 0

    def _read(self, conditions: Sequence[str]) -> None:
        """Pool conditions as `Guide.follow` does: what it would make of them anew at every token."""
        for condition in conditions:
            reader: Any = self._lent
            known = self.model.know(Conditions.encode(reader, [condition]))
            count = known.mask.sum(1, keepdim=True).clamp(min=1)
            self._pooled[condition] = ((known.inputs * known.mask[..., None]).sum(1) / count)[0]

    @torch.no_grad()
    def guide(self, states: Tensor, logits: Tensor, tokens: Tensor, positions: Tensor, rows: Rows) -> Tensor:
        """Numbers (B, V) whose softmax is q, from the base's states (B, H) and logits (B, V).

        `tokens` and `positions` (B,) are the token last read and its place. A row whose prompt is not read to
        its end has a q as well, which nobody draws from. Strength 0 is p, or what is plausible of it.
        """
        generated = (positions + 1 - rows.prompt_lengths).clamp(min=0)
        last = torch.where(generated > 0, tokens, -1)
        p = logits.float() if self._is_softmax else self._warp(logits, generated)
        if rows.guided is None:
            return self._multiply(p, states, last, generated, rows.known, rows)
        if not len(rows.guided):
            return p
        at = rows.guided
        own = self._multiply(p[at], states[at], last[at], generated[at], rows.known.rows(at), rows)
        return p.index_copy(0, at, own)

    def _warp(self, logits: Tensor, generated: Tensor) -> Tensor:
        return self.served.warpers.apply(logits, self.served.eos_ids, generated)

    def _multiply(
        self, p: Tensor, states: Tensor, last: Tensor, generated: Tensor, known: Known, rows: Rows
    ) -> Tensor:
        """p times R as each row asks for it, in log space and not normalised: whoever samples does that."""
        left = (self.served.length_limit - generated).clamp(min=0)
        text = self.model.text_inputs(known, states[:, None], last[:, None], left[:, None])  # (B, 1, size)
        scores = self._scores(self.model.follow(known, text)[:, 0])
        # Only a norm head asks for p itself.
        log_p = p.log_softmax(-1) if self.model.config.head == "norm" and self._is_softmax else p
        factor = self.model.log_r(scores, log_p, generated)
        at = slice(None) if rows.guided is None else rows.guided
        if not rows.plain:
            factor = apply_strength(doubted_log_r(factor, rows.doubts[at]), rows.strengths[at])
        if rows.plausibles is not None:
            factor = plausible_log_r(p, factor, rows.plausibles[at])
        q = p + factor
        if not self.served.warpers.truncates:
            return q  # every token has some chance, the end too
        lost = q.amax(dim=-1, keepdim=True).isneginf()
        return torch.where(lost, p, q)  # q is p where nothing that p can write succeeds

    def _scores(self, features: Tensor) -> Scores:
        """The head's scores; a low-rank head's matrix is mixed once, not at every token."""
        if self._matrix is None:
            scores: Scores = self.model.scores(features)
            self._matrix = scores.matrix
            return scores
        head = self.model.head
        return Scores(head.vector(features), head.bias(features).squeeze(-1).float(), self._matrix)


def add_marks(states: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
    """States (T, H) with each row's token and position behind them: (T, H + MARKS).

    Whoever picks rows of states picks their marks too, also within a captured graph.
    """
    digits = [(number // _BASE**place) % _BASE for number in (tokens, positions) for place in range(_DIGITS)]
    return torch.cat([states, torch.stack(digits, dim=-1).to(states.dtype)], dim=-1)


def split_marks(marked: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """States (B, H), tokens and positions (B,) from what `add_marks` made."""
    states, digits = marked[..., :-MARKS].contiguous(), marked[..., -MARKS:].long().split(1, dim=-1)
    tokens, positions = torch.zeros_like(digits[0]), torch.zeros_like(digits[0])
    for place in range(_DIGITS):
        tokens += digits[place] * _BASE**place
        positions += digits[_DIGITS + place] * _BASE**place
    return states, tokens.squeeze(-1), positions.squeeze(-1)


def _require_sizes(guide: Guide, lent: Lent) -> None:
    """Refuse a base whose matrices are not those the guide was made for."""
    config = guide.config
    wanted = {
        "input embeddings": ((config.vocabulary_size, config.embedding_size), lent.input_embeddings),
        "output embeddings": ((config.vocabulary_size, config.embedding_size), lent.output_embeddings),
    }
    if not config.embedding_size:
        del wanted["input embeddings"]
    if config.matrix == "own":
        del wanted["output embeddings"]
    for name, (shape, matrix) in wanted.items():
        found = None if matrix is None else tuple(matrix.shape)
        if found != shape:
            raise MismatchError(
                f"{name} of shape {shape}, as this guide was trained for",
                f"{found}",
                "Serve the base it was saved with, on one device and unquantised.",
            )
