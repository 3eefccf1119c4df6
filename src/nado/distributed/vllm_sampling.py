"""p in vLLM's words: what it is asked for so that its texts are p's, and what its answers say.

Everything that is part of p is either mapped exactly or refused. Nothing here needs vLLM itself.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from nado.distributed.errors import EngineError
from nado.drawing import DrawingError
from nado.errors import InputError
from nado.proposals import Proposal
from nado.warpers import Warpers

LEAST_TEMPERATURE = 0.01  # vLLM takes anything lower for this
MOST_ENDS = 128  # tokens vLLM tells log p of beside the one it drew
_SEED_BITS = 62


class Row(NamedTuple):
    """A text as samples have it: EOS included, several EOS ids folded into the first."""

    tokens: list[int]
    log_p: list[float]
    ended: bool


@dataclass(frozen=True)
class Asked:
    """What vLLM is asked for one text of p: tokens to put behind the prompt, and its sampling parameters."""

    forced: tuple[int, ...]
    eos_ids: tuple[int, ...]
    settings: dict[str, Any]

    def read(self, tokens: Sequence[int], log_p: Sequence[dict[int, Any]], reason: str | None) -> Row:
        """A row from what vLLM drew: its tokens, log p of each (and of all EOS ids), and why it stopped."""
        if reason not in ("stop", "length"):
            raise EngineError(
                "texts that end, or are cut at the limit",
                f"one that vLLM gave up ({reason})",
                "Look at vLLM's own messages; the same command goes on where it stopped.",
            )
        row, told = list(tokens), [float(log_p[at][token].logprob) for at, token in enumerate(tokens)]
        ended = reason == "stop"
        if ended and len(self.eos_ids) > 1:
            row[-1] = self.eos_ids[0]
            told[-1] = _log_sum(float(log_p[-1][eos].logprob) for eos in self.eos_ids)
        if not np.isfinite(told).all():
            raise DrawingError(
                "finite log-probabilities for every drawn token",
                f"{np.isinf(told).sum() + np.isnan(told).sum()} of {len(told)} that are not",
                "The model overflowed: load it in float32 or bfloat16 and check its weights.",
            )
        return Row([*self.forced, *row], [0.0] * len(self.forced) + told, ended)


def ask_for(warpers: Warpers, eos_ids: tuple[int, ...], vocabulary_size: int, length_limit: int) -> Asked:
    """p's declared warpers, ends and limit as vLLM's sampling parameters.

    vLLM applies them in p's own order: forbidden tokens, temperature, top-k, top-p. Forced tokens are
    certain, so they are read with the prompt. Texts end at p's own EOS ids, whatever the checkpoint says.
    """
    _require_temperature(warpers)
    _require_forced(warpers, eos_ids, length_limit)
    settings: dict[str, Any] = {
        "temperature": warpers.temperature,
        "top_k": warpers.top_k if warpers.top_k < vocabulary_size else 0,
        "top_p": warpers.top_p,
        "max_tokens": length_limit - len(warpers.forced),
        "ignore_eos": True,
        "stop_token_ids": list(eos_ids),
        "detokenize": False,
    }
    if len(eos_ids) == 1:
        settings["logprobs"] = 0  # of the drawn token alone
    elif len(eos_ids) <= MOST_ENDS:
        settings["logprob_token_ids"] = list(eos_ids)
    else:
        raise InputError(
            f"a base with at most {MOST_ENDS} EOS ids, for the engine vllm",
            f"{len(eos_ids)}",
            "Draw with the engine local.",
        )
    if warpers.forbidden:  # the one way that gives them no mass at all: a bias only makes them unlikely
        forbidden = set(warpers.forbidden)
        settings["allowed_token_ids"] = [token for token in range(vocabulary_size) if token not in forbidden]
    return Asked(warpers.forced, eos_ids, settings)


def require_p(proposal: Proposal) -> None:
    """Refuse a proposal other than p: vLLM tells one log-probability a token, that of what it draws from."""
    if not proposal.is_p:
        raise InputError(
            "p itself as the proposal, for the engine vllm",
            proposal.name(),
            "Draw from other proposals with the engine local.",
        )


def row_seed(seed: int, row: int) -> int:
    """A row's own seed: the row is then the same in whichever shard or batch it is drawn."""
    digest = hashlib.sha256(f"{seed} {row}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - _SEED_BITS)


def _log_sum(values: Iterable[float]) -> float:
    return float(np.logaddexp.reduce(np.array(list(values), dtype=np.float64)))


def _require_temperature(warpers: Warpers) -> None:
    if warpers.temperature < LEAST_TEMPERATURE:
        raise InputError(
            f"a temperature of p of at least {LEAST_TEMPERATURE:g}, for the engine vllm",
            f"{warpers.temperature:g}, which vLLM would raise to that",
            "Draw with the engine local.",
        )


def _require_forced(warpers: Warpers, eos_ids: tuple[int, ...], length_limit: int) -> None:
    ends = [token for token in warpers.forced if token in eos_ids]
    if ends or len(warpers.forced) >= length_limit:
        raise InputError(
            "forced tokens that leave something to write, for the engine vllm",
            f"EOS ({ends[0]}) among them" if ends else f"{len(warpers.forced)} of at most {length_limit}",
            "Draw with the engine local.",
        )
