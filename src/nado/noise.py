"""Randomness by counter, and the one sampler: a token is a pure function of (seed, row, step) and p.

Because no generator state is carried from draw to draw, the same row gets the same noise in any batch,
in any order, on any machine, and a run that was killed goes on as if it had not been.
"""

import torch
from torch import Tensor

_BLOCK = 128  # tokens summed together in the first of the sampler's two looks at the vocabulary


def uniforms(seed: int, rows: Tensor, steps: Tensor) -> Tensor:
    """One float64 in (0, 1) for every (row, step), in the shape of `rows`.

    Three rounds of a 64-bit mixer (SplitMix64's finaliser), one per counter. torch has no unsigned
    arithmetic, but two's-complement multiplication wraps to the same bits and the shifts are masked.
    """
    state = torch.full_like(rows, _to_signed(seed * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019))
    for counter in (rows, steps):
        state = _mix(state ^ _mix(counter + _to_signed(0x9E3779B97F4A7C15)))
    # The top 52 bits, centred in their cell: never exactly 0 or 1. With 53 the half would be rounded away.
    return (_shift_right(state, 12).double() + 0.5) * 2.0**-52


def sample(log_p: Tensor, noise: Tensor) -> Tensor:
    """A token a row by inverse-CDF sampling from normalised log p (B, V) and `noise` (B,): (B,)."""
    return _invert(log_p, log_p.new_zeros(len(log_p), 1), noise)[0]


def sample_logits(logits: Tensor, noise: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Tokens (B,) from raw logits (B, V), and each row's log normaliser (B,), without ever forming log p.

    One look at the vocabulary instead of four: at thousands of rows that look is most of the sampler's time.
    """
    scores = logits.float() / temperature
    top = scores.amax(dim=-1, keepdim=True)
    token, total = _invert(scores, top, noise)
    return token, top.squeeze(-1) + total.log().float()


def _invert(scores: Tensor, top: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Where the cumulative sum of exp(scores − top) passes `noise` of its total: token (B,), total (B,).

    Two steps instead of a sort or a cumulative sum over V: first which block of tokens, then which token
    in it. Sums are float64, so that the tail of a large vocabulary keeps its mass. A token of probability
    0 is never returned.
    """
    blocks = _block_sums((scores - top).exp())  # (B, K)
    edges = blocks.cumsum(dim=-1)
    target = noise[:, None] * edges[:, -1:]
    block = _first_above(edges, target, blocks)
    before = edges.gather(-1, block) - blocks.gather(-1, block)

    width = min(_BLOCK, scores.shape[-1])
    columns = block * _BLOCK + torch.arange(width, device=scores.device)  # (B, width)
    inside = columns < scores.shape[-1]
    # From the scores again, not from the whole exponentiated tensor: a compiler then never stores that.
    near = scores.gather(-1, columns.clamp(max=scores.shape[-1] - 1))
    weights = (near - top).exp().double() * inside
    place = _first_above(weights.cumsum(dim=-1), target - before, weights)
    return columns.gather(-1, place).squeeze(-1), edges[:, -1]


def _block_sums(mass: Tensor) -> Tensor:
    whole = mass.shape[-1] // _BLOCK * _BLOCK
    blocks = mass[:, :whole].reshape(len(mass), -1, _BLOCK).sum(dim=-1, dtype=torch.float64)
    if whole == mass.shape[-1]:
        return blocks
    tail = mass[:, whole:].sum(dim=-1, keepdim=True, dtype=torch.float64)
    return torch.cat([blocks, tail], dim=-1)


def _first_above(cumulative: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    """Index of the first entry with weight past `target`, or the last with weight if none is: (B, 1)."""
    places = torch.arange(weights.shape[-1], device=weights.device)
    last = torch.where(weights > 0, places, 0).amax(dim=-1, keepdim=True)
    # Rounding can put `target` a hair below the first sum; an entry without weight must not be hit then.
    return torch.where((cumulative > target) & (weights > 0), places, last).amin(dim=-1, keepdim=True)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _to_signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _to_signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _to_signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value
