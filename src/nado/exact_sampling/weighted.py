"""Texts with importance weights: drawn from q, worth w = p·C / q each (Semantics 4).

The weighted texts of a prompt stand for its q*: E_q[w] = R(x), and q* / q = w / R(x). A text drawn from them
in proportion to w is a draw from q* up to an error of the order of 1 / ESS.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nado.drawing import default_batch_size
from nado.errors import InputError, MismatchError, require_at_least
from nado.exact_sampling.judge import Judge, decode_distinct
from nado.exact_sampling.writing import Writing, number_texts
from nado.guided_language_model import GuidedLanguageModel
from nado.noise import uniforms
from nado.objective import effective_sample_size
from nado.oracles.protocol import Oracle
from nado.prompts import Prompt, pair_prompts

# Steps of counters that are no token steps; a group's number stands where a text's stands for tokens.
CHOOSING = -(2 << 32)


@dataclass(frozen=True, eq=False)
class WeightedTexts:
    """Texts and their weights, as many for each of G groups; a group's texts stand together: n = G · size.

    A group is a prompt with its condition, or one run of SMC. `log_weights` is log w: −inf for a text that
    fails, is not finished, or came to a dead end. At a soft rate its last factor is αC + β(1 − C), not C.
    """

    groups: list[Prompt]
    tokens: Tensor  # (n, T), padded with EOS
    lengths: Tensor  # (n,), EOS included
    texts: list[str]
    finished: Tensor  # bool (n,)
    satisfied: Tensor  # bool (n,): finished, and the oracle says yes
    dead: Tensor  # bool (n,): given up where R gave every possible token 0
    log_ratio: Tensor  # (n,) log p − log q of the tokens
    log_terminal: Tensor  # (n,) the weight's last factor
    log_weights: Tensor  # (n,)
    log_s: Tensor  # (n, T) the normaliser of each step, 0 past the end
    base_tokens: int  # tokens that the base was run for, prompts apart
    independent: bool  # drawn one by one from q, so that log_weights = log_ratio + log_terminal
    covering: bool = True  # whether q writes texts that satisfy: at target rate 0 it need not

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def size(self) -> int:
        """Texts of each group."""
        return len(self.texts) // len(self.groups)

    @property
    def grouped_log_weights(self) -> Tensor:
        """(G, size)."""
        return self.log_weights.view(len(self.groups), -1)

    @property
    def log_mean_weight(self) -> Tensor:
        """log of the mean weight of each group; its mean estimates R(x), or 1 at a soft rate: (G,)."""
        return self.grouped_log_weights.logsumexp(dim=-1) - math.log(self.size)

    @property
    def hard_log_weights(self) -> Tensor:
        """Weights with C as their last factor, at a soft rate too: their mean estimates R(x): (n,)."""
        if not self.covering:
            raise InputError(
                "texts drawn at a target rate above 0 to estimate R(x) from",
                "target rate 0, at which none is to satisfy",
                "Draw at another rate.",
            )
        return torch.where(self.satisfied, self.log_weights - self.log_terminal, -math.inf)

    @property
    def log_r_start(self) -> Tensor:
        """log of an unbiased estimate of R(x) from each group, −inf where no text satisfies: (G,)."""
        return self.hard_log_weights.view(len(self.groups), -1).logsumexp(dim=-1) - math.log(self.size)

    @property
    def ess(self) -> Tensor:
        """How many texts of the target the weighted ones of each group are worth: (G,)."""
        return effective_sample_size(self.grouped_log_weights)


@dataclass(frozen=True)
class Chosen:
    """Texts drawn from weighted ones in proportion to their weights, with replacement."""

    rows: Tensor  # (G, draws) into the weighted texts; −1 where none of the group has a positive weight
    texts: list[list[str]]  # of each group; empty where there are none
    ess: Tensor  # (G,): what the texts chosen from were worth; few are chosen again and again where it is low


def draw_weighted(
    model: GuidedLanguageModel,
    prompts: Sequence[str],
    conditions: Sequence[str] | None,
    oracle: Oracle,
    *,
    count: int,
    seed: int = 0,
    batch_size: int | None = None,
) -> WeightedTexts:
    """Draw `count` texts from q for every prompt, with their weights from the same forward passes.

    Drawing more of them, or for more prompts behind these, leaves the first ones as they are.
    """
    tasks = pair_prompts(prompts, conditions)
    require_weights(model, oracle)
    require_at_least(1, count=count, batch_size=batch_size)
    group = torch.arange(len(tasks)).repeat_interleave(count)
    numbers = number_texts(group, torch.arange(count).repeat(len(tasks)))
    writing = Writing(model, tasks, group, numbers, Judge(model, oracle, tasks), seed=seed)
    writing.finish(batch_size or default_batch_size(model))
    return collect(writing, tasks, base_tokens=int(writing.lengths.sum()))


def resample(weighted: WeightedTexts, draws: int = 1, *, seed: int = 0) -> Chosen:
    """Choose `draws` texts of each group with probabilities in proportion to their weights.

    Importance resampling, of texts drawn from q as well as of SMC's particles. One draw from many texts is
    close to a draw from the target; several from one group are not independent of one another.
    """
    require_at_least(1, draws=draws)
    log_weights = weighted.grouped_log_weights
    group = torch.arange(len(log_weights))[:, None].expand(-1, draws)
    noise = uniforms(seed, group, CHOOSING - torch.arange(draws)[None, :])
    chosen = invert_weights(log_weights, noise)
    rows = torch.where(log_weights.isneginf().all(dim=-1, keepdim=True), -1, chosen + group * weighted.size)
    texts = [[weighted.texts[row] for row in of_group if row >= 0] for of_group in rows.tolist()]
    return Chosen(rows, texts, weighted.ess)


def invert_weights(log_weights: Tensor, points: Tensor) -> Tensor:
    """Where the running sum of weights (G, N) passes `points` (G, D) of its total: (G, D).

    A weight of 0 is never hit, unless all of them are 0.
    """
    top = log_weights.amax(dim=-1, keepdim=True)
    weights = (log_weights - torch.where(top.isneginf(), 0.0, top)).exp().double()
    edges = weights.cumsum(dim=-1)
    found = torch.searchsorted(edges, (points * edges[:, -1:]).contiguous(), right=True)
    # Rounding can put a point on the very last edge.
    last = torch.where(weights > 0, torch.arange(weights.shape[-1], device=weights.device), 0).amax(-1, True)
    return torch.minimum(found, last)


def collect(
    writing: Writing,
    groups: list[Prompt],
    *,
    base_tokens: int,
    log_offset: Tensor | None = None,
) -> WeightedTexts:
    """What has been written, on the CPU. `log_offset` (n,) is what resampling added to the log weights."""
    places = slice(0, writing.count)
    lengths = writing.lengths[places].cpu()
    longest = int(lengths.max())
    tokens = writing.tokens[places, :longest].cpu()
    log_ratio, log_terminal = writing.log_ratio[places].cpu(), writing.log_terminal(places).cpu()
    log_weights = log_ratio + log_terminal
    return WeightedTexts(
        groups=groups,
        tokens=tokens,
        lengths=lengths,
        texts=decode_distinct(writing.model, tokens, lengths),
        finished=writing.finished[places].cpu(),
        satisfied=writing.satisfied[places].cpu(),
        dead=writing.dead[places].cpu(),
        log_ratio=log_ratio,
        log_terminal=log_terminal,
        log_weights=log_weights if log_offset is None else log_weights + log_offset.cpu(),
        log_s=writing.log_s[places, :longest].cpu(),
        base_tokens=base_tokens,
        independent=log_offset is None,
        covering=writing.model.guidance.target_rate > 0,
    )


# --- checks of arguments ------------------------------------------------------------------------------


def require_weights(model: GuidedLanguageModel, oracle: Oracle) -> None:
    """Refuse settings under which q misses texts that satisfy the oracle: its weights would be wrong."""
    guidance = model.guidance
    if guidance.floor > 0:
        raise InputError(
            "no floor where texts are weighted",
            f"a floor of {guidance.floor:g}",
            "Texts given up below a floor are missing from every estimate: use Guidance(floor=0).",
        )
    if guidance.plausible > 0:
        raise InputError(
            "every token within reach where texts are weighted",
            f"plausible {guidance.plausible:g}",
            "Texts with less likely tokens are missing from every estimate: use Guidance(plausible=0).",
        )
    asked = model.oracle
    if (
        guidance.exact_end
        and asked is not oracle
        and (asked is None or asked.fingerprint != oracle.fingerprint)
    ):
        raise MismatchError(
            "the oracle that decides the model's exact end",
            f"another one, {oracle.name}",
            "Give both the same oracle, or turn exact_end off: q never ends a text that its own refuses.",
        )
