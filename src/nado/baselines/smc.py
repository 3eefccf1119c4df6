"""Sequential Monte Carlo without a learned R: particles of the base, and the oracle alone (Lew et al. 2023).

Particles are drawn from p. Where the oracle tells what a prefix has settled, a particle's promise after i
tokens is e^(β · parts settled) in place of R, and particles that promise little give way to those that
promise more; where it does not, nothing is known before the end and SMC is importance sampling. At the end
a particle weighs C, corrected for every promise, so that one drawn by its weight is close to a draw from
q*.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nado.baselines.method import Method, Provisions, Row, Settings, System, Texts, Training
from nado.exact_sampling import resample, smc
from nado.following import Standing
from nado.guided_language_model import GuidedLanguageModel
from nado.prompts import Prompt


class OracleParticles(Method):
    """Particles of the base that the oracle's own progress selects."""

    name = "SMC without a guide"
    source = "Lew et al. 2023"
    sized = True

    def obstacle(self, given: Provisions) -> str | None:
        """One particle is base sampling."""
        return "the budget pays for one particle, which is base sampling" if given.draws < 2 else None

    def grid(self, given: Provisions) -> list[dict[str, Any]]:
        """β; without progress to be had there is only the end."""
        promises = (2.0, 1.0, 4.0, 0.0) if given.oracle.cheap else (0.0,)
        return [{"particles": given.draws, "promise": promise} for promise in promises]

    def prepare(self, given: Provisions, settings: Settings) -> System:
        """The particles."""
        return _Particles(given, settings["particles"], settings["promise"])


@dataclass(frozen=True)
class _Particles:
    given: Provisions
    particles: int
    promise: float
    training: Training | None = None

    def write(self, prompts: Sequence[Prompt], seed: int) -> Texts:
        """One text from a run of particles of its own for each prompt."""
        oracle = self.given.oracle
        names = [len(oracle.progress_names(each.condition)) for each in prompts]
        follower = ProgressFollower(self.promise, max(names) if self.promise else 0)
        model = GuidedLanguageModel(self.given.base, follower, oracle=oracle)
        runs = smc(
            model,
            [each.prompt for each in prompts],
            [each.condition for each in prompts],
            oracle,
            particles=self.particles,
            seed=seed,
            batch_size=max(self.given.rows, self.particles),
        )
        found = runs.particles
        rows = []
        for group, chosen in enumerate(resample(found, seed=seed).rows[:, 0].tolist()):
            place = chosen if chosen >= 0 else group * self.particles  # none satisfies: the first fails, too
            length = int(found.lengths[place])
            rows.append(Row(found.tokens[place, :length].tolist(), bool(found.finished[place])))
        return Texts(rows, found.base_tokens)


class ProgressFollower:
    """R in the place of which stands e^−β for every bit of progress that is not settled yet.

    It is the same for every next token, so that q is p; only the particles' weights feel it.
    """

    def __init__(self, promise: float, bits: int) -> None:
        self.promise, self._bits = promise, bits

    @property
    def progress_bits(self) -> int:
        """How many bits the conditions have at most."""
        return self._bits

    @property
    def fingerprint(self) -> str:
        """The promise."""
        return f"progress-{self.promise}-{self._bits}"

    def start(self, prompts: Sequence[str], conditions: Sequence[str]) -> None:
        """There is nothing to know."""

    def select(self, state: None, rows: Tensor) -> None:
        """There is nothing to keep."""

    def refill(self, state: None, rows: Tensor, prompts: Sequence[str], conditions: Sequence[str]) -> None:
        """There is nothing to begin."""

    def log_r(self, state: Any, standing: Standing) -> Tensor:
        """−β for every bit that is not settled: (B, V)."""
        if standing.progress is None:
            return torch.zeros_like(standing.log_p)
        unsettled = (standing.progress == 0).sum(dim=-1, keepdim=True)
        return (-self.promise * unsettled.to(standing.log_p.dtype)).expand_as(standing.log_p)

    def rewind(self, state: None) -> None:
        """There is nothing to forget."""
