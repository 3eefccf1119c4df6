"""The warpers that belong to p: temperature, top-k, top-p, forced and forbidden tokens.

They are declared once, applied inside the forward pass before any guide, and are part of what p means
(and of its fingerprint). Warpers given to `generate` act on q afterwards and are another matter.
"""

import math
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from nado.errors import InputError


@dataclass(frozen=True)
class Warpers:
    """How raw logits become p. The default leaves them alone: p is the softmax."""

    temperature: float = 1.0  # above 1 flattens
    top_k: int = 0  # keep the k likeliest tokens; 0 keeps all
    top_p: float = 1.0  # keep the smallest set of tokens with at least this mass; 1 keeps all
    forced: tuple[int, ...] = ()  # tokens every text begins with, in order
    forbidden: tuple[int, ...] = ()  # tokens no text contains

    def __post_init__(self) -> None:
        object.__setattr__(self, "forced", tuple(self.forced))
        object.__setattr__(self, "forbidden", tuple(self.forbidden))
        if not 0 < self.temperature < math.inf:
            raise InputError("a temperature above 0", f"{self.temperature}", "Use 1 to leave p as it is.")
        if self.top_k < 0:
            raise InputError("top_k of 0 or more", f"{self.top_k}", "Use 0 to keep the whole vocabulary.")
        if not 0 < self.top_p <= 1:
            raise InputError("top_p in (0, 1]", f"{self.top_p}", "Use 1 to keep the whole vocabulary.")

    @property
    def truncates(self) -> bool:
        """Whether part of the vocabulary is cut off, so that no guide can reach it."""
        return self.top_k > 0 or self.top_p < 1 or bool(self.forced) or bool(self.forbidden)

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready values, for manifests and fingerprints."""
        return asdict(self)

    def apply(self, logits: Tensor, eos_ids: tuple[int, ...], generated: Tensor) -> Tensor:
        """Normalised float32 log p (B, V) from raw logits (B, V).

        In this order, which is transformers' own: forbidden tokens, temperature, top-k, top-p, softmax;
        then EOS ids are folded, and forced tokens overrule everything. Several EOS ids count as one: their
        mass is folded into the first *after* warping, so that the chance of ending is the one the warped
        model itself has. `generated` (B,) counts the tokens each row has already written; only forced
        tokens need it.
        """
        scores = logits.float()
        if self.forbidden:
            scores = scores.index_fill(-1, _ids(self.forbidden, scores), -torch.inf)
        if self.temperature != 1:
            scores = scores / self.temperature
        if 0 < self.top_k < scores.shape[-1]:
            smallest_kept = scores.topk(self.top_k, dim=-1).values[..., -1:]
            scores = scores.masked_fill(scores < smallest_kept, -torch.inf)
        if self.top_p < 1:
            scores = _keep_top_p(scores, self.top_p)
        log_p = scores.log_softmax(dim=-1)
        if len(eos_ids) > 1:
            log_p = fold_eos(log_p, eos_ids)
        return self._force(log_p, generated) if self.forced else log_p

    def _force(self, log_p: Tensor, generated: Tensor) -> Tensor:
        schedule = _ids(self.forced, log_p)  # (F,)
        wanted = schedule[generated.clamp(max=len(self.forced) - 1)]  # (B,)
        certain = torch.full_like(log_p, -torch.inf).scatter(-1, wanted[:, None], 0.0)
        return torch.where((generated < len(self.forced))[:, None], certain, log_p)


@lru_cache(maxsize=64)
def _ids_on(tokens: tuple[int, ...], device: torch.device) -> Tensor:
    # Kept: a copy from the host cannot be part of a CUDA graph.
    return torch.tensor(tokens, device=device)


def _ids(tokens: tuple[int, ...], like: Tensor) -> Tensor:
    return _ids_on(tokens, like.device)


def _keep_top_p(scores: Tensor, top_p: float) -> Tensor:
    descending, order = scores.sort(dim=-1, descending=True)
    mass = descending.softmax(dim=-1)
    # A token goes when the likelier ones already hold top_p; the likeliest always stays.
    surplus = mass.cumsum(dim=-1) - mass >= top_p
    return scores.masked_fill(torch.zeros_like(surplus).scatter(-1, order, surplus), -torch.inf)


def fold_eos(scores: Tensor, eos_ids: tuple[int, ...]) -> Tensor:
    """Scores (…, V), log p or logits, with the mass of all EOS ids on the first of them."""
    ids = _ids(eos_ids, scores)
    mass = scores[..., ids].logsumexp(dim=-1)
    scores = scores.index_fill(-1, ids, -torch.inf)
    scores[..., eos_ids[0]] = mass
    return scores
