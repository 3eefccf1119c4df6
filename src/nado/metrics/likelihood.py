"""Perplexity: how surprised a language model is by texts, a token; its own tokens, EOS included.

Perplexities of models with different tokenizers are not comparable: compare texts under one model.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray

from nado.errors import InputError
from nado.importing import Encoding
from nado.language_model import LanguageModel
from nado.metrics.measure import Metric, require_as_many, require_texts
from nado.metrics.resampling import FloatArray

LogP: TypeAlias = NDArray[np.floating[Any]]


def perplexity(
    model: LanguageModel[Any],
    prompts: Sequence[str],
    texts: Sequence[str],
    *,
    conditions: Sequence[str] | None = None,
    batch_size: int = 32,
) -> Metric:
    """Perplexity of finished texts under a model that can make tokens of them, given their prompts."""
    require_texts(texts, "perplexity")
    require_as_many(prompts, texts, "prompts", "texts")
    tokens = [[*row, model.eos_id] for row in _encode(model, texts)]
    return perplexity_of_log_p(
        score_tokens(model, prompts, tokens, conditions=conditions, batch_size=batch_size)
    )


def perplexity_of_log_p(log_p: Sequence[LogP]) -> Metric:
    """exp(−Σ log p / Σ tokens) over all tokens of all texts, from log p of each token of each text."""
    method = "exp of the mean −log p a token, EOS included, over all tokens of all texts"
    if len(log_p) == 0:
        raise InputError("at least one text for perplexity", "none", "Check what was generated or filtered.")
    totals = np.array([float(np.sum(row, dtype=np.float64)) for row in log_p])
    counts = np.array([len(row) for row in log_p], dtype=np.float64)
    if np.isnan(totals).any() or (totals == np.inf).any():
        row = int(np.flatnonzero(~(totals < np.inf))[0])
        raise InputError(
            "log-probabilities of tokens",
            f"{totals[row]:g} in text {row}",
            "The model overflowed: load it in float32.",
        )
    impossible = int(np.isneginf(totals).sum())
    if impossible:
        # A value of infinity would be true and useless: the share of such texts is what can be said.
        note = f"infinite: the model cannot write {impossible} of {len(log_p)} texts (log p = −inf)"
        rows = np.zeros((len(log_p), 2))
        return Metric("perplexity", rows, _combine, method, "a token", note)
    return Metric("perplexity", np.stack([totals, counts], axis=1), _combine, method, "a token")


def score_tokens(
    model: LanguageModel[Any],
    prompts: Sequence[str],
    tokens: Sequence[Sequence[int]],
    *,
    conditions: Sequence[str] | None = None,
    batch_size: int = 32,
) -> list[LogP]:
    """log p of every token of every text; texts of like length share a batch, answers keep their order."""
    _require_scorable(model, prompts, tokens, batch_size)
    conditions = prompts if conditions is None else conditions
    require_as_many(conditions, tokens, "conditions", "texts")
    order = sorted(range(len(tokens)), key=lambda row: len(tokens[row]))
    scored: list[LogP] = [np.zeros(0, np.float32)] * len(tokens)
    for first in range(0, len(order), batch_size):
        batch = order[first : first + batch_size]
        lengths = torch.tensor([len(tokens[row]) for row in batch])
        padded = torch.full((len(batch), int(lengths.max())), model.eos_id)
        for place, row in enumerate(batch):
            padded[place, : len(tokens[row])] = torch.tensor(tokens[row], dtype=torch.long)
        answers = model.score(
            [prompts[row] for row in batch],
            padded.to(model.device),
            lengths.to(model.device),
            [conditions[row] for row in batch],
        ).cpu()
        for place, row in enumerate(batch):
            scored[row] = answers[place, : len(tokens[row])].numpy()
    return scored


def _combine(sums: FloatArray) -> FloatArray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.exp(-sums[..., 0] / np.where(sums[..., 1] == 0, np.nan, sums[..., 1]))


def _encode(model: LanguageModel[Any], texts: Sequence[str]) -> list[list[int]]:
    if not callable(getattr(model, "encode_texts", None)):
        raise InputError(
            "a model that can make tokens of texts",
            f"{type(model).__name__}, which has no encode_texts",
            "Give tokens to score_tokens, and its answer to perplexity_of_log_p.",
        )
    return cast(Encoding, model).encode_texts(texts)


def _require_scorable(
    model: LanguageModel[Any], prompts: Sequence[str], tokens: Sequence[Sequence[int]], batch_size: int
) -> None:
    require_as_many(prompts, tokens, "prompts", "texts")
    if batch_size < 1:
        raise InputError("a batch_size of at least 1", f"{batch_size}", "Ask for 1 or more.")
    longest = max(range(len(tokens)), key=lambda row: len(tokens[row]), default=None)
    if longest is not None and len(tokens[longest]) > model.length_limit:
        raise InputError(
            f"texts of at most {model.length_limit} tokens, EOS included: the scoring model's length limit",
            f"{len(tokens[longest])} tokens in text {longest}",
            "Load the scoring model with a larger length limit.",
        )
