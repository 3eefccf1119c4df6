"""What the exact tests draw: a tabular model, a prompt, an oracle; and how its texts become batches."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from torch import Tensor

from nado.exact import Outcomes, TabularModel, exact_log_r, exact_log_r_start, satisfied_outcomes

# The same examples on every machine and in every run: a failure is a change in the code.
exactly = settings(
    deadline=None,
    max_examples=30,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.filter_too_much],
)

PROMPTS = ("", "one", "two")


@dataclass(frozen=True)
class RandomOracle:
    """A fixed but arbitrary set of texts for each condition: no structure that a test could lean on."""

    seed: int
    share: float

    def __call__(self, conditions: Sequence[str], texts: Sequence[str]) -> list[bool]:
        return [self._share_of(pair) < self.share for pair in zip(conditions, texts, strict=True)]

    def _share_of(self, pair: tuple[str, str]) -> float:
        return hashlib.sha256(f"{self.seed} {pair}".encode()).digest()[0] / 256


@dataclass(frozen=True)
class LetterOracle:
    """Whether the text has the letter at the given place (0 is the first)."""

    letter: str
    place: int

    def __call__(self, conditions: Sequence[str], texts: Sequence[str]) -> list[bool]:
        return [text[self.place : self.place + 1] == self.letter for text in texts]


@dataclass(frozen=True)
class ConstantOracle:
    """The same answer for every text."""

    answer: bool

    def __call__(self, conditions: Sequence[str], texts: Sequence[str]) -> list[bool]:
        return [self.answer] * len(texts)


@dataclass(frozen=True)
class Problem:
    """A model, a prompt, a condition and an oracle, with what follows from them by enumeration."""

    model: TabularModel = field(repr=False)
    description: str
    prompt: str
    condition: str
    oracle: RandomOracle | LetterOracle | ConstantOracle

    @property
    def table(self) -> Tensor:
        return self.model.table(self.prompt, self.condition)

    @property
    def log_r(self) -> Tensor:
        return exact_log_r(self.model, self.oracle, self.prompt, self.condition)

    @property
    def log_r_start(self) -> Tensor:
        return exact_log_r_start(self.model, self.oracle, self.prompt, self.condition)

    @property
    def satisfied(self) -> Tensor:
        return satisfied_outcomes(self.model, self.oracle, self.prompt, self.condition)

    @property
    def outcomes(self) -> Outcomes:
        return self.model.outcomes(self.prompt, self.condition)


@st.composite
def models(draw: st.DrawFn, min_length: int = 1, zeros: bool = True) -> tuple[TabularModel, str]:
    arguments = {
        "vocabulary_size": draw(st.integers(2, 4)),
        "length_limit": draw(st.integers(min_length, 4)),
        "completion": draw(st.sampled_from(["eos", "limit"])),
        "seed": draw(st.integers(0, 10**6)),
        "zeros": draw(st.sampled_from([0.0, 0.3])) if zeros else 0.0,
    }
    return TabularModel.random(PROMPTS, **arguments), str(arguments)


@st.composite
def problems(draw: st.DrawFn, min_length: int = 1, zeros: bool = True, settled: bool = False) -> Problem:
    """Problems with R(x) > 0, and, unless `settled`, R(x) < 1."""
    model, description = draw(models(min_length, zeros))
    oracle = draw(
        st.one_of(
            st.builds(RandomOracle, st.integers(0, 10**6), st.sampled_from([0.15, 0.5, 0.85])),
            st.builds(LetterOracle, st.sampled_from("ab"), st.integers(0, 1)),
        )
    )
    prompt, condition = draw(st.sampled_from(PROMPTS)), draw(st.sampled_from(PROMPTS))
    problem = Problem(model, description, prompt, condition, oracle)
    rate = float(problem.log_r_start.exp())
    assume(rate > 1e-9 and (settled or rate < 1 - 1e-9))
    return problem


def perturbed(log_r: Tensor, seed: int, size: float = 1.0) -> Tensor:
    """R moved at random in log-odds, through a sigmoid that is never 0 nor 1: a guide that learned badly."""
    noise = torch.randn(log_r.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    odds = torch.logit(log_r.exp().clamp(0.02, 0.98)) + size * noise
    return torch.nn.functional.logsigmoid(odds)


def unroll(table: Tensor, outcomes: Outcomes) -> Tensor:
    """The row of a table (N, V) that each step of each text reads: (M, L, V). Padding reads nonsense."""
    garbage = torch.linspace(-7.0, -0.1, table.shape[1], dtype=table.dtype).unsqueeze(0)
    rows = torch.cat([table, garbage])
    prefix = torch.zeros(len(outcomes.lengths), dtype=torch.long)
    steps = []
    for position in range(outcomes.tokens.shape[1]):
        steps.append(torch.where(position < outcomes.lengths, prefix, len(table)))
        prefix = (table.shape[1] - 1) * prefix + 1 + outcomes.tokens[:, position]
    return rows[torch.stack(steps, dim=1)]


def chosen(values: Tensor, outcomes: Outcomes) -> Tensor:
    """The entries (M, L) of the tokens that were chosen from (M, L, V)."""
    return values.gather(-1, outcomes.tokens.unsqueeze(-1)).squeeze(-1)


def arbitrary_values(outcomes: Outcomes, seed: int = 0) -> Tensor:
    """An arbitrary function f of a text, (M,), to take expectations of."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(outcomes.texts), generator=generator, dtype=torch.float64)
