"""What the guide is told of the requests in a batch: where each stands, and what it asks for.

vLLM's own loop knows no conditions. A request carries them in its `extra_args` (`vllm_xargs` in its HTTP
API), a processor that vLLM tells of every change of the batch writes them on a `Board`, and the model reads
it when it makes logits. Nothing here needs vLLM itself.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from nado.errors import InputError

CONDITION, STRENGTH, DOUBT, PLAUSIBLE = "nado_condition", "nado_strength", "nado_doubt", "nado_plausible"
_KNOWN = (CONDITION, STRENGTH, DOUBT, PLAUSIBLE)


@dataclass(frozen=True)
class RequestRow:
    """A request in the batch."""

    prompt_length: int
    condition: str | None  # None: the folder's own
    strength: float
    doubt: float = 0.0
    plausible: float = 0.0


class Board:
    """The rows of the batch as they stand, by their place in it. Changed before a step, read within it."""

    def __init__(self) -> None:
        self.rows: dict[int, RequestRow] = {}
        self.changes = 0

    def update(
        self,
        removed: Iterable[int],
        added: Iterable[tuple[int, RequestRow]],
        moved: Iterable[tuple[int, int, bool]],
    ) -> None:
        """Apply vLLM's changes in its order; a move is (from, to, whether the two are exchanged)."""
        for place in removed:
            self.rows.pop(place, None)
        for place, row in added:
            self.rows[place] = row
        for here, there, exchanged in moved:
            mine, other = self.rows.pop(here, None), self.rows.pop(there, None)
            if mine is not None:
                self.rows[there] = mine
            if exchanged and other is not None:
                self.rows[here] = other
        self.changes += 1

    def in_order(self) -> list[RequestRow]:
        """The rows from the first place to the last."""
        return [self.rows[place] for place in sorted(self.rows)]


_boards: WeakValueDictionary[str, Board] = WeakValueDictionary()


def board_of(instance: str) -> Board:
    """The board that the processor and the model of one vLLM engine share in their process."""
    return _boards.setdefault(instance, Board())


def read_row(prompt_length: int, arguments: Mapping[str, Any] | None) -> RequestRow:
    """A row from a request's `extra_args`, which `require_arguments` has let through."""
    given = arguments or {}
    condition = given.get(CONDITION)
    return RequestRow(
        prompt_length,
        None if condition is None else str(condition),
        float(given.get(STRENGTH, 1.0)),
        float(given.get(DOUBT, 0.0)),
        float(given.get(PLAUSIBLE, 0.0)),
    )


def require_arguments(
    arguments: Mapping[str, Any] | None, *, needs_condition: bool, has_scale: bool = True
) -> None:
    """Refuse a request that asks for what the guide cannot do, before it is in the batch."""
    given = arguments or {}
    unknown = [name for name in given if str(name).startswith("nado_") and name not in _KNOWN]
    if unknown:
        raise InputError(f"the arguments {', '.join(_KNOWN)}", unknown[0], "Leave it out.")
    strength = given.get(STRENGTH, 1.0)
    if not (_is_number(strength) and strength >= 0):
        raise InputError(
            f"{STRENGTH} of 0 or more",
            f"{strength!r}",
            "Use 0 for the base alone, 1 for the method itself.",
        )
    shares = {DOUBT: "Use 0 to believe the guide whatever it says.", PLAUSIBLE: "Use 0 to leave nothing out."}
    for name, hint in shares.items():
        share = given.get(name, 0.0)
        if not (_is_number(share) and 0 <= share <= 1):
            raise InputError(f"{name} from 0 to 1", f"{share!r}", hint)
    if given.get(DOUBT) and not has_scale:
        raise InputError(
            f"no {DOUBT} of a guide that was only warmed up",
            f"{given[DOUBT]!r}",
            "Its R is known up to a factor at every prefix: leave it out.",
        )
    condition = given.get(CONDITION)
    if condition is not None and not isinstance(condition, str):
        raise InputError(f"{CONDITION} as a string", f"{condition!r}", 'Write "dog, ball" for keywords.')
    if condition is None and needs_condition and strength > 0:
        raise InputError(
            f"the condition that the guide shall lead to, as {CONDITION}",
            "none",
            f'Send "vllm_xargs": {{"{CONDITION}": "…"}}, or {{"{STRENGTH}": 0}} for the base alone.',
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def require_room(max_tokens: int | None, prompt_logprobs: int | None, length_limit: int) -> None:
    """Refuse a text longer than the guide was trained for, and log-probabilities of the prompt."""
    if max_tokens is None or max_tokens > length_limit:
        raise InputError(
            f"max_tokens of at most {length_limit}, the length limit that guide and base were made for",
            f"{max_tokens}",
            "Lower it, or train a guide for a higher limit.",
        )
    if prompt_logprobs is not None:
        raise InputError(
            "no prompt_logprobs from a guided model",
            f"{prompt_logprobs}",
            "The guide says nothing of the prompt: ask the base for them.",
        )


def require_no_beams(max_tokens: int | None, detokenize: bool, arguments: Mapping[str, Any] | None) -> None:
    """Refuse what vLLM's beam search sends: each prefix as a prompt of its own, of which one token is asked.

    The guide would take every token for the first. A client that wants one token says so with a strength.
    """
    named = any(name in (arguments or {}) for name in _KNOWN)
    if max_tokens == 1 and not detokenize and not named:
        raise InputError(
            "texts written token by token, which a guide can follow",
            "beam search, or a request for one token without its text",
            f"Sample, or search greedily; if it is one token you want, send {STRENGTH}.",
        )
