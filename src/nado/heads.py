"""Heads: how a guide's feature at a position becomes log R(prefix ⊕ v) for every token v.

A head is asked in two ways. Decoding wants all of log R: `log_r` gives (…, V). Training wants only what the
losses need, the chosen token's log R and Σ_v p_v R_v, for tens of thousands of positions: `reduce` makes
those a chunk of positions at a time and keeps nothing of size V.

- `sigmoid`: log R(v) = log σ(z·E_v + b). E is the base's own output matrix (tied: tokens that were seldom
  sampled inherit from their neighbours), that matrix seen through a learned low-rank map, or a matrix of the
  guide's own.
- `norm`: log R(v) = log σ(s) + a_v − log Σ_u p_u e^{a_u} with a_v = z·E_v: how likely success is, apart from
  which token it hangs on. Consistent with s by construction; values above 0 are penalised and clamped.

Zero-initialised, R is the same for every v, so that q = p before training.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from torch.utils.checkpoint import checkpoint

from nado.decomposition import log_one_minus

HeadKind = Literal["sigmoid", "norm"]
Matrix = Literal["tied", "low_rank", "own"]

# Chunks hold about this many entries of a (positions, vocabulary) tensor: half a gigabyte in float32 on a
# GPU, and on a CPU what its caches hold, which makes the passes over it twice as fast.
_CHUNK_ENTRIES = 2**27
_CHUNK_ENTRIES_CPU = 2**20

# The highest log R of a norm head, which could reach 0: then ~R would be 0, and q would miss texts for good.
_SURE = -1e-6


def chunk_rows(vocabulary: int, device: torch.device) -> int:
    """How many positions are summed over the vocabulary at a time."""
    return max(1, (_CHUNK_ENTRIES_CPU if device.type == "cpu" else _CHUNK_ENTRIES) // vocabulary)


class Scores(NamedTuple):
    """What a head makes of features: position i scores token v as vectors[i]·matrix[v] and biases[i]."""

    vectors: Tensor  # (N, D)
    biases: Tensor  # (N,)
    matrix: Tensor  # (V, D)

    def rows(self, rows: slice) -> "Scores":
        """Some positions."""
        return Scores(self.vectors[rows], self.biases[rows], self.matrix)

    def logits(self) -> Tensor:
        """vectors·matrixᵀ in float32, without the bias: (N, V)."""
        return (self.vectors.to(self.matrix.dtype) @ self.matrix.T).float()


class Step(NamedTuple):
    """Positions summed over the vocabulary, all (N,)."""

    log_r: Tensor  # of the chosen token
    log_not_r: Tensor  # log(1 − R) of the chosen token
    log_s: Tensor  # log Σ_v p_v R_v
    log_not_s: Tensor  # log(1 − Σ_v p_v R_v)
    log_r_eos: Tensor
    log_not_r_eos: Tensor
    excess: Tensor  # Σ_v p_v max(0, log R_v): only a norm head can go above 0


class Head(nn.Module):
    """The last layer of a guide."""

    def __init__(
        self, kind: HeadKind, matrix: Matrix, size: int, base_size: int, vocabulary: int, rank: int
    ) -> None:
        super().__init__()
        self.kind, self.matrix_kind = kind, matrix
        width = {"tied": base_size, "low_rank": rank, "own": size}[matrix]
        self.vector = nn.Linear(size, width, bias=False)
        self.bias = nn.Linear(size, 1)
        if matrix == "low_rank":
            self.mixer = nn.Linear(base_size, rank, bias=False)
        elif matrix == "own":
            self.own = nn.Parameter(torch.randn(vocabulary, size) / size**0.5)

        self.reset()

    def reset(self) -> None:
        """Zero what a feature is multiplied by: R is then the same for every token."""
        for parameter in (self.vector.weight, self.bias.weight, self.bias.bias):
            nn.init.zeros_(parameter)

    def scores(self, features: Tensor, output_embeddings: Tensor | None) -> Scores:
        """Score features (N, size); `output_embeddings` (V, base_size) is the base's, frozen."""
        if self.matrix_kind == "own":
            matrix: Tensor = self.own
        else:
            assert output_embeddings is not None
            matrix = output_embeddings
        if self.matrix_kind == "low_rank":
            matrix = self.mixer(matrix.to(self.mixer.weight.dtype))
        return Scores(self.vector(features), self.bias(features).squeeze(-1).float(), matrix)

    def log_r(
        self,
        scores: Scores,
        log_p: Tensor,
        logits: Tensor | None = None,
        mend: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """log R of every next token, at most 0: (N, V). `logits` are the scores' own, if at hand.

        `mend` calibrates log-odds. A sigmoid has them before it has R: there and back takes as long as both
        vocabulary products of a small base.
        """
        logits = scores.logits() if logits is None else logits.float()
        if self.kind == "sigmoid":
            log_odds = logits + scores.biases[:, None]
            return logsigmoid(log_odds if mend is None else mend(log_odds))
        log_r = _norm_log_r(logits, scores.biases, log_p).clamp(max=_SURE)
        return log_r if mend is None else logsigmoid(mend(log_r - log_one_minus(log_r)))

    def reduce(
        self,
        scores: Scores,
        base_logits: Callable[[slice], Tensor],
        chosen: Tensor,
        at_limit: Tensor,
        eos_id: int,
        chunk: int | None = None,
    ) -> Step:
        """Sum positions over the vocabulary, `chunk` of them at a time.

        `base_logits(rows)` gives numbers (n, V) whose softmax is p, without gradient. Where `at_limit` (N,)
        is set every token but EOS has R = 0 exactly (completion "eos", step L).
        """
        count = len(scores.vectors)
        chunk = chunk if chunk is not None else chunk_rows(len(scores.matrix), scores.matrix.device)
        named = torch.stack([chosen, torch.full_like(chosen, eos_id)], dim=1)  # (N, 2)
        sums = _norm_sums if self.kind == "norm" else _sigmoid_sums
        columns = []
        for first in range(0, count, chunk):
            rows = slice(first, min(first + chunk, count))
            with torch.no_grad():
                known = base_logits(rows)
            columns.append(sums(scores.rows(rows), known, eos_id))
        summed = Sums(*(torch.cat(column) for column in zip(*columns, strict=True)))
        # The two tokens we must know by name come straight from their rows of the matrix.
        vectors = scores.vectors.to(scores.matrix.dtype)
        named_scores = (vectors[:, None, :] * scores.matrix[named]).sum(dim=-1).float()  # (N, 2)
        step = _norm_step if self.kind == "norm" else _sigmoid_step
        return step(scores.biases, named_scores, summed, at_limit, at_limit[:, None] & (named != eos_id))


class Sums(NamedTuple):
    """What is left of a chunk's (n, V) tensors, (n,) each."""

    first: Tensor  # sigmoid: Σ p R; norm: log Σ p e^a
    second: Tensor  # sigmoid: Σ p (1 − R); norm: Σ p max(0, log R)
    log_p_eos: Tensor


def _sigmoid_sums(scores: Scores, base_logits: Tensor, eos_id: int) -> Sums:
    expected: Any = _LearnedSigmoid if scores.matrix.requires_grad else _ExpectedSigmoid
    return Sums(*expected.apply(*scores, base_logits, eos_id))


class _ExpectedSigmoid(torch.autograd.Function):
    """S and 1 − S with a frozen matrix.

    S_i depends on z_i and b_i alone, so its whole Jacobian is one vector of the size of z_i:
    ∂S/∂z = Σ_v p_v R_v (1 − R_v) E_v. It is made in the forward pass, while the (chunk, V) tensors are there;
    the backward pass then needs neither them nor a second look at the vocabulary.
    """

    @staticmethod
    def forward(
        ctx: Any, vectors: Tensor, biases: Tensor, matrix: Tensor, base_logits: Tensor, eos_id: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits = vectors.to(matrix.dtype) @ matrix.T
        hit, miss, slope, bias_slope, log_p_eos = _summed(logits, biases, base_logits, eos_id)
        ctx.save_for_backward((slope @ matrix).float(), bias_slope)
        ctx.dtype = vectors.dtype
        ctx.mark_non_differentiable(log_p_eos)
        return hit, miss, log_p_eos

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        slope, bias_slope = ctx.saved_tensors
        # 1 − S falls as S rises.
        gradient = gradients[0] - gradients[1]
        return (gradient[:, None] * slope).to(ctx.dtype), gradient * bias_slope, None, None, None


class _LearnedSigmoid(torch.autograd.Function):
    """S and 1 − S with a matrix that learns, too.

    ∂S_i/∂E_v = p_v R_v (1 − R_v) z_i is as large as the (chunk, V) tensors: they are made again in the
    backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, vectors: Tensor, biases: Tensor, matrix: Tensor, base_logits: Tensor, eos_id: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits = vectors.to(matrix.dtype) @ matrix.T
        hit, miss, _, _, log_p_eos = _summed(logits, biases, base_logits, eos_id)
        ctx.save_for_backward(vectors, biases, matrix, base_logits)
        ctx.eos_id, ctx.dtype = eos_id, logits.dtype  # under autocast not that of the matrix
        ctx.mark_non_differentiable(log_p_eos)
        return hit, miss, log_p_eos

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        vectors, biases, matrix, base_logits = ctx.saved_tensors
        z, rows = vectors.to(ctx.dtype), matrix.to(ctx.dtype)
        logits = z @ rows.T
        _, _, slope, bias_slope, _ = _summed(logits, biases, base_logits, ctx.eos_id)
        gradient = gradients[0] - gradients[1]
        slope *= gradient[:, None].to(ctx.dtype)  # (n, V)
        to_vectors, to_matrix = (slope @ rows).to(vectors.dtype), (slope.T @ z).to(matrix.dtype)
        return to_vectors, gradient * bias_slope, to_matrix, None, None


def _elementwise(
    logits: Tensor, biases: Tensor, base_logits: Tensor, eos_id: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """All that happens between the two matrix products: sums over V, and the slope that stays (n, V)."""
    shifted = logits.float() + biases[:, None]
    log_p, log_p_eos = _normalise(base_logits, eos_id)
    p, r, not_r = log_p.exp(), shifted.sigmoid(), (-shifted).sigmoid()
    slope = p * r * not_r
    return (p * r).sum(-1), (p * not_r).sum(-1), slope.to(logits.dtype), slope.sum(-1), log_p_eos


def _normalise(base_logits: Tensor, eos_id: int) -> tuple[Tensor, Tensor]:
    """log p (n, V) and, apart from it, that of EOS (n,): a column of log p would keep all of it alive."""
    base_logits = base_logits.float()
    total = base_logits.logsumexp(dim=-1)
    return base_logits - total[:, None], base_logits[:, eos_id] - total


def _summed(
    logits: Tensor, biases: Tensor, base_logits: Tensor, eos_id: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`_elementwise`, fused on a GPU; outside autocast, as a backward pass is: compiled once for both."""
    elementwise = _fused_elementwise() if logits.is_cuda else _elementwise
    with torch.autocast(logits.device.type, enabled=False):
        return elementwise(logits, biases, base_logits, eos_id)


@cache
def _fused_elementwise() -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    # A dozen passes over (n, V) in float32 become two over the logits as they are.
    return torch.compile(_elementwise, dynamic=True)


def _sigmoid_step(biases: Tensor, named: Tensor, sums: Sums, at_limit: Tensor, impossible: Tensor) -> Step:
    scores = named + biases[:, None]
    log_r = logsigmoid(scores).masked_fill(impossible, -torch.inf)
    log_not_r = logsigmoid(-scores).masked_fill(impossible, 0.0)
    # At step L only EOS can succeed, and the mass of everything else is lost.
    log_p_eos = sums.log_p_eos
    s = torch.where(at_limit, (log_p_eos + log_r[:, 1]).exp(), sums.first)
    not_s = torch.where(at_limit, (log_p_eos + log_not_r[:, 1]).exp() - torch.expm1(log_p_eos), sums.second)
    return Step(
        log_r[:, 0], log_not_r[:, 0], _safe_log(s), _safe_log(not_s), log_r[:, 1], log_not_r[:, 1], 0 * s
    )


def _norm_log_r(a: Tensor, s: Tensor, log_p: Tensor) -> Tensor:
    return logsigmoid(s)[:, None] + a - (log_p + a).logsumexp(dim=-1, keepdim=True)


def _norm_sums(scores: Scores, base_logits: Tensor, eos_id: int) -> Sums:
    return Sums(*checkpoint(_plain_norm_sums, *scores, base_logits, eos_id, use_reentrant=False))


def _plain_norm_sums(
    vectors: Tensor, s: Tensor, matrix: Tensor, base_logits: Tensor, eos_id: int
) -> tuple[Tensor, Tensor, Tensor]:
    a = (vectors.to(matrix.dtype) @ matrix.T).float()
    log_p, log_p_eos = _normalise(base_logits, eos_id)
    log_r = _norm_log_r(a, s, log_p)
    return (log_p + a).logsumexp(dim=-1), (log_p.exp() * log_r.clamp(min=0)).sum(dim=-1), log_p_eos


def _norm_step(s: Tensor, named: Tensor, sums: Sums, at_limit: Tensor, impossible: Tensor) -> Step:
    # At step L p puts all the mass that can still succeed on EOS.
    log_sum = torch.where(at_limit, sums.log_p_eos + named[:, 1], sums.first)
    log_r = ((logsigmoid(s) - log_sum)[:, None] + named).clamp(max=_SURE)
    log_not_r = torch.log(-torch.expm1(log_r)).masked_fill(impossible, 0.0)
    log_r = log_r.masked_fill(impossible, -torch.inf)
    excess = torch.where(at_limit, 0.0, sums.second)
    return Step(
        log_r[:, 0], log_not_r[:, 0], logsigmoid(s), logsigmoid(-s), log_r[:, 1], log_not_r[:, 1], excess
    )


def _safe_log(values: Tensor) -> Tensor:
    return values.clamp(min=torch.finfo(torch.float32).tiny).log()
