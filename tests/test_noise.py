"""Counter noise is uniform, independent and the same everywhere; the sampler hits exact probabilities.

Statistical tests have fixed seeds: they either pass for ever or never. Each rejects at a false-alarm
probability of 1e-6 for noise that is truly uniform.
"""

import numpy as np
import pytest
import torch
from scipy.stats import chi2, kstest
from torch import Tensor

from nado.noise import sample, sample_logits, uniforms

FALSE_ALARM = 1e-6


def chi_square_p(counts: Tensor, expected: Tensor) -> float:
    """The p-value of counts against expected ones; cells expected below 5 times are pooled."""
    rare = expected < 5
    if rare.any():
        counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    keep = expected > 0
    assert not counts[~keep].any()
    statistic = ((counts[keep] - expected[keep]) ** 2 / expected[keep]).sum()
    return float(chi2.sf(float(statistic), int(keep.sum()) - 1))


def grid(rows: int, steps: int, seed: int = 0) -> Tensor:
    row = torch.arange(rows)[:, None].expand(-1, steps)
    return uniforms(seed, row, torch.arange(steps)[None, :])


GOLDEN_0 = [
    0.9215022184161134,
    0.7087519971551345,
    0.6327652528272464,
    0.7072536668021968,
    0.9487315742689927,
]
GOLDEN_MINUS_7 = [
    0.15922350027452092,
    0.19515562129903696,
    0.7440724917887577,
    0.21091664609873673,
    0.9639804762462519,
]


# --- uniforms -----------------------------------------------------------------------------------------


def test_golden_values() -> None:
    """Pinned: a change here changes every sample ever drawn with a seed."""
    rows = torch.tensor([0, 0, 1, 12345678901, 3])
    steps = torch.tensor([0, 1, 0, 31, -2])
    assert uniforms(0, rows, steps).tolist() == GOLDEN_0
    assert uniforms(-7, rows, steps).tolist() == GOLDEN_MINUS_7


@pytest.mark.parametrize("seed", [0, 1, 2**63, -5])
def test_noise_is_uniform(seed: int) -> None:
    noise = grid(1000, 200, seed).flatten()
    counts = torch.histc(noise, 1000, 0, 1)
    assert chi_square_p(counts, torch.full((1000,), len(noise) / 1000)) > FALSE_ALARM
    assert kstest(noise.numpy(), "uniform").pvalue > FALSE_ALARM
    low_bits = (noise * 2**52).long() % 256
    assert chi_square_p(low_bits.bincount(minlength=256).double(), torch.full((256,), 781.25)) > FALSE_ALARM


@pytest.mark.parametrize("shift", [(1, 0), (0, 1), (1, 1), (16, 0)])
def test_neighbours_are_independent(shift: tuple[int, int]) -> None:
    """Pairs of neighbouring rows, steps and both fill the unit square evenly."""
    noise = grid(1024, 256)
    first = noise[: 1024 - shift[0], : 256 - shift[1]]
    second = noise[shift[0] :, shift[1] :]
    cells = ((first * 16).long() * 16 + (second * 16).long()).flatten()
    # Only every other pair, so that no number is in two of them.
    counts = cells[::2].bincount(minlength=256).double()
    assert chi_square_p(counts, torch.full((256,), float(counts.sum()) / 256)) > FALSE_ALARM


def test_neighbouring_seeds_are_independent() -> None:
    first, second = grid(500, 200, seed=0), grid(500, 200, seed=1)
    cells = ((first * 16).long() * 16 + (second * 16).long()).flatten()
    assert chi_square_p(cells.bincount(minlength=256).double(), torch.full((256,), 390.625)) > FALSE_ALARM


def test_the_tests_of_noise_would_see_bad_noise() -> None:
    """A linear congruence of the counters, the obvious wrong way, fails the pair test."""
    rows, steps = torch.arange(1024)[:, None], torch.arange(256)[None, :]
    bad = ((rows * 1103515245 + steps * 12345 + 7) % 2**20).double() / 2**20
    cells = ((bad[:-1] * 16).long() * 16 + (bad[1:] * 16).long()).flatten()[::2]
    counts = cells.bincount(minlength=256).double()
    assert chi_square_p(counts, torch.full((256,), float(counts.sum()) / 256)) < FALSE_ALARM


def test_noise_does_not_depend_on_the_batch() -> None:
    everything = grid(50, 20)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    steps = torch.full((50,), 7)
    assert torch.equal(uniforms(0, order, steps), everything[order, 7])
    assert uniforms(0, torch.tensor([33]), torch.tensor([19])).item() == everything[33, 19].item()


def test_noise_is_strictly_between_0_and_1() -> None:
    noise = grid(2000, 500, seed=3)
    assert noise.dtype == torch.float64
    assert 0 < float(noise.min()) < 1e-4
    assert 1 - 1e-4 < float(noise.max()) < 1


def test_global_random_state_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    sample(torch.zeros(4, 8).log_softmax(-1), uniforms(0, torch.arange(4), torch.arange(4)))
    assert torch.equal(before, torch.random.get_rng_state())


# --- the sampler --------------------------------------------------------------------------------------

EXTREMES = torch.tensor([1e-16, 1e-300, 0.5, 1 - 1e-16, 1.0], dtype=torch.float64)


def distribution(size: int, seed: int = 0, spread: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(size, generator=generator) * spread).log_softmax(-1)


def by_hand(log_p: Tensor, noise: Tensor) -> Tensor:
    """The textbook inverse of the cumulative distribution."""
    edges = log_p.double().exp().cumsum(-1)
    return torch.searchsorted(edges, noise[:, None] * edges[:, -1:], right=True).squeeze(-1)


@pytest.mark.parametrize("size", [2, 24, 127, 128, 129, 256, 1000, 4099])
def test_tokens_are_where_the_cumulative_distribution_passes_the_noise(size: int) -> None:
    log_p = torch.stack([distribution(size, seed) for seed in range(64)])
    for step in range(20):
        noise = uniforms(1, torch.arange(64), torch.full((64,), step))
        expected = by_hand(log_p, noise)
        assert torch.equal(sample(log_p, noise), expected)
        tokens, normaliser = sample_logits(log_p + 3.5, noise)
        assert torch.equal(tokens, expected)
        torch.testing.assert_close(normaliser, torch.full((64,), 3.5), atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [24, 1000])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_match_probabilities(size: int, temperature: float) -> None:
    logits, draws = distribution(size) * 1.3, 40_000
    noise = uniforms(0, torch.arange(draws), torch.zeros(draws, dtype=torch.long))
    tokens, _ = sample_logits(logits.expand(draws, -1), noise, temperature)
    expected = (logits.double() / temperature).softmax(-1) * draws
    assert chi_square_p(tokens.bincount(minlength=size).double(), expected) > FALSE_ALARM


def off_by_one(log_p: Tensor, noise: Tensor) -> Tensor:
    return (sample(log_p, noise) + 1) % log_p.shape[-1]


def without_tail(log_p: Tensor, noise: Tensor) -> Tensor:
    whole = log_p.shape[-1] // 128 * 128
    return sample(log_p[:, :whole].log_softmax(-1), noise)


def with_coarse_noise(log_p: Tensor, noise: Tensor) -> Tensor:
    return sample(log_p, (noise * 64).floor() / 64 + 1 / 128)


def argmax_of_wrong_noise(log_p: Tensor, noise: Tensor) -> Tensor:
    """One uniform a row instead of one a token, as in a hasty Gumbel trick."""
    return (log_p - noise[:, None].log().neg().log().float()).argmax(-1)


@pytest.mark.parametrize("wrong", [off_by_one, without_tail, with_coarse_noise, argmax_of_wrong_noise])
def test_a_wrong_sampler_is_rejected(wrong) -> None:  # type: ignore[no-untyped-def]
    log_p, draws = distribution(1000), 40_000
    noise = uniforms(0, torch.arange(draws), torch.zeros(draws, dtype=torch.long))
    counts = wrong(log_p.expand(draws, -1), noise).bincount(minlength=1000).double()
    assert chi_square_p(counts, log_p.double().exp() * draws) < FALSE_ALARM


@pytest.mark.parametrize("size", [3, 24, 127, 128, 129, 300, 1024])
def test_tokens_of_probability_0_are_never_drawn(size: int) -> None:
    """Whatever is masked, at the edges of the noise too: first, last, whole blocks, all but one."""
    rows = len(EXTREMES)
    every = torch.arange(size)
    masks = [every == 0, every == size - 1, every % 2 == 0, every % 2 == 1, every < size // 2]
    masks += [every >= size - size // 2, every != size // 2, every != 0, every != size - 1]
    masks += [(every // 128) % 2 == 0] if size > 128 else []
    for mask in masks:
        log_p = distribution(size).masked_fill(mask, -torch.inf).log_softmax(-1).expand(rows, -1)
        for tokens in (sample(log_p, EXTREMES), sample_logits(log_p - 7, EXTREMES)[0]):
            assert not mask[tokens].any()


def test_rounding_at_a_block_edge_does_not_reach_a_token_of_probability_0() -> None:
    """The remainder of the noise within a block can round below 0: its first tokens were returned then."""
    size, draws = 512, 20_000
    log_p = distribution(size, spread=4.0)
    log_p[torch.arange(size) % 128 < 5] = -torch.inf
    log_p = log_p.log_softmax(-1)
    blocks = log_p.exp().view(-1, 128).double().sum(-1).cumsum(0)
    edges = blocks[:-1] / blocks[-1]
    steps = torch.arange(-draws // 2, draws // 2) * 2.0**-54
    noise = (edges[:, None] + steps[None, :]).flatten()
    tokens = sample(log_p.expand(len(noise), -1), noise)
    assert log_p[tokens].isfinite().all()


def test_small_probabilities_in_a_large_vocabulary_keep_their_mass() -> None:
    """200,000 tokens of 1e-6 each behind one of 0.8: float32 sums would lose or shift the tail."""
    size, draws = 200_001, 400
    p = torch.full((size,), 0.2 / (size - 1), dtype=torch.float64)
    p[0] = 0.8
    noise = (torch.arange(draws).double() + 0.5) / draws
    tokens = torch.cat([sample(p.log().float().expand(50, -1), part) for part in noise.split(50)])
    assert (tokens == 0).sum() == 320
    expected = (noise[320:] - 0.8) / 0.2 * (size - 1)
    # Log p in float32 is itself only exact to 1e-7 of 13.8: the tail may be that much lighter or heavier.
    assert (tokens[320:] - expected).abs().max() < 5


def test_one_certain_token() -> None:
    log_p = torch.full((len(EXTREMES), 300), -torch.inf)
    log_p[:, 255] = 0.0
    assert (sample(log_p, EXTREMES) == 255).all()


def test_many_draws_of_extreme_noise_stay_inside_the_vocabulary() -> None:
    rng = np.random.default_rng(0)
    for size in (5, 130, 777):
        log_p = distribution(size).expand(1000, -1)
        noise = torch.from_numpy(np.concatenate([rng.random(500) * 1e-15, 1 - rng.random(500) * 1e-15]))
        tokens = sample(log_p, noise)
        assert int(tokens.min()) >= 0
        assert int(tokens.max()) < size
