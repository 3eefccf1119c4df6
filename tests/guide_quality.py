"""How far a guide of a tabular model is from the exact R: everything by enumeration."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from nado.decomposition import close_at_limit
from nado.drawing import draw_rows
from nado.exact import AnyOracle, TabularModel, exact_log_q, exact_log_r, guided_model, prefix_log_p
from nado.guide import Conditions, Guide
from nado.prompts import Prompt
from nado.proposals import Proposal
from nado.samples import Samples
from nado.tabular_reader import TabularReader


class Quality(NamedTuple):
    """Distances from the exact R and q*, the worst over prompts."""

    log_r_error: float  # mean |log R_θ − log R| over entries with probability > 1e-3 and R > 0
    leaked: float  # largest R_θ where R = 0, over the same entries
    total_variation: float  # of q and q*


def own_pairs(model: TabularModel) -> list[Prompt]:
    """Each prompt as its own condition."""
    return [Prompt(str(key), str(key)) for key in model.keys]


def labelled_samples(
    model: TabularModel,
    oracle: AnyOracle,
    count: int,
    *,
    pairs: Sequence[Prompt] | None = None,
    proposal: Proposal | None = None,
    seed: int = 0,
) -> Samples:
    """`count` texts for every pair of prompt and condition, drawn and labelled."""
    prompts = [pair for pair in pairs or own_pairs(model) for _ in range(count)]
    table = draw_rows(
        model, prompts, range(len(prompts)), proposal=proposal or Proposal(), seed=seed, batch_size=4096
    )
    answers = np.asarray(oracle(table["condition"].to_pylist(), table["text"].to_pylist()), dtype=bool)
    satisfied = answers & table["finished"].to_numpy(zero_copy_only=False)
    return Samples(table.append_column("satisfied", pa.array(satisfied)))


@torch.no_grad()
def guide_log_r(guide: Guide, reader: TabularReader, prompt: str, condition: str | None = None) -> Tensor:
    """log R_θ(prefix ⊕ v) at every prefix: (N, V)."""
    model = reader.model
    table = model.table(prompt)
    outcomes = model.outcomes(prompt)
    tokens, lengths = outcomes.tokens[: len(table)], outcomes.lengths[: len(table)]
    written = torch.arange(tokens.shape[1]).expand_as(tokens)
    last = torch.nn.functional.pad(tokens[:, :-1], (1, 0), value=-1)
    prompts = [prompt] * len(table)
    states = reader.read(prompts, tokens, lengths)
    conditions = Conditions.encode(reader, [prompt if condition is None else condition] * len(table))
    features = guide.features(states, last, model.length_limit - written, conditions)
    here = features[torch.arange(len(table)), lengths - 1]  # the last position of prefix ⊕ EOS is the prefix
    log_r = guide.head.log_r(guide.scores(here), table.float())
    if model.completion == "eos":
        log_r = close_at_limit(log_r, model.eos_id, lengths == model.length_limit)
    return log_r


def measure(
    guide: Guide, reader: TabularReader, oracle: AnyOracle, pairs: Sequence[Prompt] | None = None
) -> Quality:
    """The guide against enumeration."""
    rows = []
    for prompt, condition in pairs or own_pairs(reader.model):
        table = reader.model.table(prompt)
        exact = exact_log_r(reader.model, oracle, prompt, condition)
        learned = guide_log_r(guide, reader, prompt, condition).double()
        reached = prefix_log_p(table)[: len(table), None] + table > np.log(1e-3)
        possible, impossible = reached & ~exact.isneginf(), reached & exact.isneginf()
        error = (learned - exact)[possible].abs().mean()
        leaked = learned.exp()[impossible].max() if impossible.any() else torch.tensor(0.0)
        q = guided_model(reader.model, {(prompt, condition): learned}).outcomes(prompt, condition).log_p
        variation = 0.5 * (q.exp() - exact_log_q(reader.model, oracle, prompt, condition).exp()).abs().sum()
        rows.append((float(error), float(leaked), float(variation)))
    return Quality(*(max(column) for column in zip(*rows, strict=True)))
