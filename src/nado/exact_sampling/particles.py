"""Sequential Monte Carlo with R as twist: particles that promise little give way to those that promise much.

Particles are drawn from q. After i tokens a particle's weight is w_i = Π_{j≤i} S_j / R(y≤j) · S_{i+1}, and at
its end Π_j S_j / R(y≤j) · C: the increments are S_1, then S_{i+1} / R(y≤i), then C / R(y≤T). When the weights
of a run become too unequal, its particles are resampled and share their mean. Finished particles keep their
weight and take part. The mean weight at the end is an unbiased estimate of R(x), whatever R is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nado.drawing import default_batch_size
from nado.errors import InputError, require_at_least
from nado.exact_sampling.judge import Judge
from nado.exact_sampling.weighted import (
    WeightedTexts,
    collect,
    invert_weights,
    require_weights,
)
from nado.exact_sampling.writing import Writing, number_texts
from nado.guided_language_model import GuidedLanguageModel
from nado.metrics.measure import Measure, mean
from nado.metrics.resampling import DEFAULT, Resampling
from nado.noise import uniforms
from nado.objective import effective_sample_size
from nado.oracles.protocol import Oracle
from nado.prompts import pair_prompts

_RESAMPLING = -(1 << 32)  # counters of resampling count down from here


@dataclass(frozen=True, eq=False)
class ParticleRuns:
    """Independent runs of SMC: for each prompt `runs` of them, one after the other; G runs in all."""

    particles: WeightedTexts  # a group is a run; its mean weight is the run's estimate
    ess: Tensor  # (G, T + 1): after i tokens, before any resampling there; the last one is that of the result
    resamplings: Tensor  # (G,) how often each run was resampled
    base_tokens: Tensor  # (G,) tokens the base was run for, those of particles that gave way too
    runs: int  # of each prompt

    @property
    def log_r_start(self) -> Tensor:
        """log of each run's unbiased estimate of R(x); −inf where no particle satisfies: (G,)."""
        return self.particles.log_r_start

    def measure_r_start(self, resampling: Resampling = DEFAULT) -> Measure:
        """R(x), the mean over runs, with an interval: over runs for one prompt, over prompts for several."""
        prompts = len(self.ess) // self.runs
        number = None if prompts == 1 else [run // self.runs for run in range(len(self.ess))]
        metric = mean(
            "Pr_p[C]",
            self.log_r_start.exp().tolist(),
            method=f"mean over {len(self.ess)} runs of SMC with {self.particles.size} particles",
            unit="share",
        )
        return metric.measure(number, resampling)


def smc(
    model: GuidedLanguageModel,
    prompts: Sequence[str],
    conditions: Sequence[str] | None,
    oracle: Oracle,
    *,
    particles: int,
    runs: int = 1,
    seed: int = 0,
    ess_threshold: float = 0.5,
    batch_size: int | None = None,
) -> ParticleRuns:
    """`runs` independent runs of SMC for every prompt, as many side by side as `batch_size` rows hold.

    A run is resampled when its ESS falls below `ess_threshold` times its particles: 0 is never (importance
    sampling), 1 whenever weights differ.
    """
    tasks = pair_prompts(prompts, conditions)
    require_weights(model, oracle)
    require_at_least(1, particles=particles, runs=runs, batch_size=batch_size)
    _require_threshold(ess_threshold)
    groups = [task for task in tasks for _ in range(runs)]
    group = torch.arange(len(groups)).repeat_interleave(particles)
    numbers = number_texts(group, torch.arange(particles).repeat(len(groups)))
    writing = Writing(model, groups, group, numbers, Judge(model, oracle, groups), seed=seed)
    together = max(1, (batch_size or default_batch_size(model)) // particles)
    parts = [
        _Runs(writing, range(first, min(first + together, len(groups))), particles, ess_threshold)
        for first in range(0, len(groups), together)
    ]
    for part in parts:
        part.go()
    base_tokens = torch.cat([part.base_tokens for part in parts]).cpu()
    return ParticleRuns(
        particles=collect(
            writing,
            groups,
            base_tokens=int(base_tokens.sum()),
            log_offset=torch.cat([part.log_offset.flatten() for part in parts]),
        ),
        ess=_stack_ess([part.ess for part in parts]).cpu(),
        resamplings=torch.cat([part.resamplings for part in parts]).cpu(),
        base_tokens=base_tokens,
        runs=runs,
    )


class _Runs:
    """Runs that go along in one batch, each resampled on its own: K runs of N particles."""

    def __init__(self, writing: Writing, runs: range, particles: int, threshold: float) -> None:
        self.writing, self.particles, self.threshold = writing, particles, threshold
        self.places = slice(runs.start * particles, runs.stop * particles)
        self.run = torch.arange(runs.start, runs.stop, device=writing.model.device)  # (K,)
        self.log_offset = torch.zeros(len(runs), particles, dtype=torch.float64, device=self.run.device)
        self.resamplings = torch.zeros_like(self.run)
        self.base_tokens = torch.zeros_like(self.run)
        self.ess: list[Tensor] = []

    def go(self) -> None:
        """From the first token to the end of the last particle."""
        self.writing.begin(self.log_offset.numel())
        while self.writing.live:
            self._resample()
            before = self._lengths()
            self.writing.ask(self.writing.advance())
            self.base_tokens += self._lengths() - before
        self.ess.append(effective_sample_size(self._log_weights()))

    def _resample(self) -> None:
        """Resample the runs whose ESS is too low and which still have particles under way."""
        log_weights = self._log_weights()  # (K, N)
        ess = effective_sample_size(log_weights)
        self.ess.append(ess)
        open_runs = self._open()
        # A hair below, so that equal weights are never resampled for the sake of rounding.
        poor = open_runs & (ess > 0) & (ess < self.threshold * self.particles * (1 - 1e-9))
        if not bool(poor.any()):
            return
        step = torch.full_like(self.run, _RESAMPLING - len(self.ess))
        chosen = resample_systematically(log_weights, uniforms(self.writing.seed, self.run, step))
        own = torch.arange(self.particles, device=self.run.device)
        ancestors = torch.where(poor[:, None], chosen, own)
        mean_weight = log_weights.logsumexp(dim=-1, keepdim=True) - math.log(self.particles)
        # Whatever its ancestor weighed, a resampled particle weighs the mean.
        levelled = self.log_offset.gather(-1, ancestors) + mean_weight - log_weights.gather(-1, ancestors)
        self.log_offset = torch.where(poor[:, None], levelled, self.log_offset)
        first = torch.arange(len(self.run), device=self.run.device)[:, None] * self.particles
        self.writing.replace(self.places, (ancestors + first).flatten() + self.places.start)
        self.resamplings += poor

    def _log_weights(self) -> Tensor:
        return self.writing.log_weights(self.places).view(-1, self.particles) + self.log_offset

    def _lengths(self) -> Tensor:
        return self.writing.lengths[self.places].view(-1, self.particles).sum(dim=-1)

    def _open(self) -> Tensor:
        """Which runs have particles under way: bool (K,)."""
        held = self.writing.held[self.writing.held != self.writing.spare]
        return torch.bincount((held - self.places.start) // self.particles, minlength=len(self.run)) > 0


def resample_systematically(log_weights: Tensor, noise: Tensor) -> Tensor:
    """Ancestors (K, N) for weights (K, N) and one uniform a run (K,): N points at even distances.

    A particle with the share s of its run's weight gets ⌊N·s⌋ or ⌈N·s⌉ copies, N·s on average.
    """
    count = log_weights.shape[-1]
    even = torch.arange(count, device=log_weights.device)
    return invert_weights(log_weights, (even + noise[:, None]) / count)


def _stack_ess(parts: list[list[Tensor]]) -> Tensor:
    """(G, T + 1); runs that were over earlier than the longest keep their last value."""
    longest = max(len(part) for part in parts)
    return torch.cat([torch.stack([*part, *part[-1:] * (longest - len(part))], dim=1) for part in parts])


def _require_threshold(ess_threshold: float) -> None:
    if not 0 <= ess_threshold <= 1:
        raise InputError(
            "an ess_threshold between 0 and 1",
            f"{ess_threshold}",
            "It is a share of the particles: 0.5 is usual, 0 never resamples.",
        )
