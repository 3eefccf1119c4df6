"""Do drawn texts occur as often as they should? One check, for every statistical test of drawing."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from scipy.stats import chi2, norm

# The chance that a test which should pass does not, if its seed were a new one. Seeds are fixed.
FALSE_ALARM = 1e-6


def fit_p_value(drawn: Sequence[tuple[int, ...]], log_p: Mapping[tuple[int, ...], float]) -> float:
    """Pearson's chi-square p-value of texts (as token tuples) against their exact log-probabilities.

    Texts expected fewer than 5 times share one cell. A text that cannot occur makes it 0.
    """
    counts = Counter(drawn)
    if any(log_p.get(text, -np.inf) == -np.inf for text in counts):
        return 0.0
    expected = {text: len(drawn) * float(np.exp(value)) for text, value in log_p.items()}
    common = [text for text, number in expected.items() if number >= 5]
    observed = np.array([counts[text] for text in common] + [0.0])
    wanted = np.array([expected[text] for text in common] + [0.0])
    observed[-1], wanted[-1] = len(drawn) - observed.sum(), max(len(drawn) - wanted.sum(), 1e-9)
    if wanted[-1] < 5 and len(common):  # too thin to stand alone
        observed = np.append(observed[:-2], observed[-2:].sum())
        wanted = np.append(wanted[:-2], wanted[-2:].sum())
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    return float(chi2.sf(statistic, len(wanted) - 1))


def mean_p_value(values: np.ndarray, expected: float) -> float:
    """Two-sided p-value of the mean of independent values against what it should be."""
    error = values.std(ddof=1) / len(values) ** 0.5
    return float(2 * norm.sf(abs(values.mean() - expected) / error))


def rates_p_value(groups: Mapping[object, Sequence[bool]], rates: Mapping[object, float]) -> float:
    """P-value of answers in groups against the exact rate of each; groups with few expected are left out."""
    statistic, freedom = 0.0, 0
    for group, answers in groups.items():
        rate, number = rates[group], len(answers)
        if rate in (0.0, 1.0) and any(answer != bool(rate) for answer in answers):
            return 0.0
        if min(rate, 1 - rate) * number >= 5:
            statistic += (sum(answers) - number * rate) ** 2 / (number * rate * (1 - rate))
            freedom += 1
    assert freedom >= 5, "too few groups to say anything"
    return float(chi2.sf(statistic, freedom))


def rows_of(tokens) -> list[tuple[int, ...]]:
    """A ragged column as tuples."""
    return [tuple(tokens.row(row).tolist()) for row in range(len(tokens.offsets) - 1)]


def outcome_log_p(model, prompt: str, condition: str | None = None) -> dict[tuple[int, ...], float]:
    """Every text a tabular model can write, as tokens, with its log-probability."""
    outcomes = model.outcomes(prompt, condition)
    texts = [
        tuple(row[:length].tolist()) for row, length in zip(outcomes.tokens, outcomes.lengths, strict=True)
    ]
    return dict(zip(texts, outcomes.log_p.tolist(), strict=True))


def enumerate_log_p(model, prompt: str) -> dict[tuple[int, ...], float]:
    """The same for any model with a small vocabulary and a length limit of 2, by teacher forcing."""
    assert model.length_limit == 2
    size, eos = model.vocabulary_size, model.eos_id
    texts = [(eos,), *((v, w) for v in range(size) if v != eos for w in range(size))]
    tokens = torch.tensor([[*text, eos][:2] for text in texts])
    lengths = torch.tensor([len(text) for text in texts])
    log_p = model.score([prompt] * len(texts), tokens, lengths).double().sum(dim=1)
    return dict(zip(texts, log_p.tolist(), strict=True))
