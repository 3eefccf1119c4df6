"""Heads: the chunked sums and their gradients equal a plain computation over the whole vocabulary."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from nado import heads
from nado.decomposition import close_at_limit, expected_log_r, log_one_minus
from nado.heads import Head, Scores, Step

V, SIZE, BASE, RANK, N, EOS = 37, 12, 10, 4, 29, 3
KINDS = list(itertools.product(("sigmoid", "norm"), ("tied", "low_rank", "own")))


def build(kind: str, matrix: str, seed: int = 0) -> tuple[Head, Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32)

    head = Head(kind, matrix, SIZE, BASE, V, RANK)  # type: ignore[arg-type]
    for parameter in head.parameters():
        parameter.data = 0.4 * normal(*parameter.shape)
    embeddings = normal(V, BASE)
    features = normal(N, SIZE).requires_grad_()
    log_p = (2 * normal(N, V)).log_softmax(-1)
    chosen = torch.randint(V, (N,), generator=generator)
    at_limit = torch.rand(N, generator=generator) < 0.3
    return head, embeddings, features, log_p, chosen, at_limit


def plain(
    head: Head, embeddings: Tensor, features: Tensor, log_p: Tensor, chosen: Tensor, at_limit: Tensor
) -> Step:
    """The definition, on full (N, V) tensors."""
    if head.kind == "norm":
        log_p = torch.where(at_limit[:, None], close_at_limit(log_p, EOS, at_limit), log_p)
    log_r = head.log_r(head.scores(features, embeddings), log_p)
    if head.kind == "norm":
        log_r = log_r.clamp(max=-1e-6)
    log_r = close_at_limit(log_r, EOS, at_limit)
    log_not_r = log_one_minus(log_r)
    log_s, log_not_s = expected_log_r(log_p, log_r), expected_log_r(log_p, log_not_r)
    if head.kind == "norm":
        bias = head.scores(features, embeddings).biases
        log_s, log_not_s = torch.nn.functional.logsigmoid(bias), torch.nn.functional.logsigmoid(-bias)
    at = torch.arange(N)
    return Step(
        log_r[at, chosen],
        log_not_r[at, chosen],
        log_s,
        log_not_s,
        log_r[:, EOS],
        log_not_r[:, EOS],
        torch.zeros(N),
    )


def check(found: Step, wanted: Step) -> None:
    for name in ("log_r", "log_not_r", "log_s", "log_not_s", "log_r_eos", "log_not_r_eos"):
        mine, theirs = getattr(found, name), getattr(wanted, name)
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(("kind", "matrix"), KINDS)
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_chunked_sums_and_gradients_equal_the_plain_ones(kind: str, matrix: str, chunk: int) -> None:
    head, embeddings, features, log_p, chosen, at_limit = build(kind, matrix)
    found = head.reduce(
        head.scores(features, embeddings), lambda rows: log_p[rows], chosen, at_limit, EOS, chunk=chunk
    )
    wanted = plain(head, embeddings, features, log_p, chosen, at_limit)
    check(found, wanted)
    leaves = [features, *head.parameters()]
    weights = torch.randn(6, N, generator=torch.Generator().manual_seed(9))

    def mixed(step: Step) -> Tensor:
        # Every output takes part; −inf (an impossible token) has no gradient.
        columns = (step.log_r, step.log_not_r, step.log_s, step.log_not_s, step.log_r_eos, step.log_not_r_eos)
        return sum((w * c.masked_fill(c.isinf(), 0)).sum() for w, c in zip(weights, columns, strict=True))  # type: ignore[return-value]

    mine = torch.autograd.grad(mixed(found), leaves, allow_unused=True)
    theirs = torch.autograd.grad(mixed(wanted), leaves, allow_unused=True)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-4)


def test_a_wrong_slope_is_rejected() -> None:
    """The gradient check above can fail: without the factor 1 − R it does."""
    head, embeddings, features, log_p, chosen, at_limit = build("sigmoid", "tied")
    found = head.reduce(head.scores(features, embeddings), lambda rows: log_p[rows], chosen, at_limit, EOS)
    right = torch.autograd.grad(found.log_s.sum(), features)[0]
    scores = head.scores(features, embeddings)
    r = (scores.logits() + scores.biases[:, None]).sigmoid()
    wrong_slope = ((log_p.exp() * r) @ embeddings) / (log_p.exp() * r).sum(-1, keepdim=True)
    wrong = wrong_slope @ head.vector.weight + head.bias.weight
    with pytest.raises(AssertionError):
        torch.testing.assert_close(right, wrong.detach(), rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize(("kind", "matrix"), KINDS)
def test_a_fresh_head_says_the_same_of_every_token(kind: str, matrix: str) -> None:
    head = Head(kind, matrix, SIZE, BASE, V, RANK)  # type: ignore[arg-type]
    _, embeddings, features, log_p, _, _ = build(kind, matrix)
    log_r = head.log_r(head.scores(features, embeddings), log_p)
    assert (log_r - log_r[:, :1]).abs().max() < 1e-6


def test_log_r_is_never_above_0() -> None:
    for kind, matrix in KINDS:
        head, embeddings, features, log_p, _, _ = build(kind, matrix)
        assert head.log_r(head.scores(10 * features, embeddings), log_p).max() <= 0


@pytest.mark.parametrize("kind", ["sigmoid", "norm"])
@pytest.mark.parametrize("frozen", [True, False])
def test_what_is_left_of_a_chunk_keeps_nothing_of_the_vocabularys_size_alive(kind: Any, frozen: bool) -> None:
    """A column of log p is a view: 15 chunks of it were 8 GB."""
    positions, vocabulary = 5, 1000
    scores = Scores(
        torch.randn(positions, 8, requires_grad=True),
        torch.randn(positions),
        torch.randn(vocabulary, 8, requires_grad=not frozen),
    )
    sums = heads._norm_sums if kind == "norm" else heads._sigmoid_sums
    for left in sums(scores, torch.randn(positions, vocabulary), 3):
        assert left.untyped_storage().nbytes() <= 8 * positions


@pytest.mark.parametrize("kind", ["sigmoid", "norm"])
def test_vocabularies_of_262144_tokens(kind: Any) -> None:
    """As large as any in use: sums a few positions at a time equal those over all of them at once."""
    vocabulary, generator = 262_144, torch.Generator().manual_seed(0)
    head = Head(kind, "tied", SIZE, BASE, vocabulary, RANK)
    torch.nn.init.normal_(head.vector.weight, std=0.3, generator=generator)
    embeddings = torch.randn(vocabulary, BASE, generator=generator)
    scores = head.scores(torch.randn(5, SIZE, generator=generator), embeddings)
    logits = torch.randn(5, vocabulary, generator=generator)
    chosen, at_limit = torch.tensor([0, 1, 100_000, 262_143, EOS]), torch.zeros(5, dtype=torch.bool)
    few, all_at_once = (
        head.reduce(scores, lambda rows: logits[rows], chosen, at_limit, EOS, chunk=chunk) for chunk in (2, 5)
    )
    log_p = logits.log_softmax(-1)
    log_r = head.log_r(scores, log_p)
    for one, other in zip(few, all_at_once, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    if kind == "sigmoid":
        assert torch.allclose(few.log_s, expected_log_r(log_p, log_r), atol=1e-5)
    assert torch.allclose(few.log_r, log_r.gather(1, chosen[:, None])[:, 0], atol=1e-5)
