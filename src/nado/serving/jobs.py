"""A request as the engine sees it, and what comes back."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from nado.options import option
from nado.serving.voices import Voice

Reason = Literal["stop", "length", "content_filter"]


@dataclass(frozen=True)
class ServingConfig:
    """Sizes and limits of a server."""

    batch_size: int = option(32, "rows that are written side by side, for each combination of guides")
    queue_size: int = option(256, "texts that may wait for a row; beyond that requests are turned away")
    deadline: float = option(120.0, "seconds a request may take")
    max_prompt_tokens: int = option(128, "tokens a prompt may have")
    max_condition_tokens: int = option(64, "tokens a condition may have")
    max_texts: int = option(16, "texts one request may ask for")
    max_body: int = option(65536, "bytes a request may have")
    body_seconds: float = option(10.0, "seconds a client may take to send a request")
    budget: int = option(16, "draws for a verified text")
    max_pools: int = option(4, "combinations of guides that are kept ready")


@dataclass(frozen=True)
class TokenRecord:
    """One token as it was chosen."""

    token: int
    text: str
    log_q: float
    top: tuple[tuple[str, float], ...] = ()  # the likeliest tokens under q
    log_p: float = 0.0
    log_r: float | None = None  # of the text with this token; None without a guide
    log_s: float = 0.0
    base_choice: str = ""  # the token the base alone likes best
    log_p_base_choice: float = 0.0
    ends: bool = False


@dataclass(frozen=True)
class Delta:
    """More text of one choice."""

    index: int
    text: str
    records: tuple[TokenRecord, ...]


@dataclass(frozen=True)
class Answer:
    """One finished choice."""

    index: int
    text: str
    tokens: tuple[int, ...]
    reason: Reason
    records: tuple[TokenRecord, ...]  # in a stream those that were not sent yet
    rest: str  # text that was not sent yet
    satisfied: bool | None  # None where no oracle was asked
    draws: int
    drawn_tokens: int  # of all draws
    missing: tuple[str, ...] = ()  # parts the nearest miss lacks, where nothing was verified


@dataclass(frozen=True)
class Failure:
    """The request cannot be answered."""

    error: Exception


Event: TypeAlias = Delta | Answer | Failure


class DeadlineError(TimeoutError):
    """A request took longer than the server allows."""


@dataclass(eq=False)
class Job:
    """A request: one text for each of its prompts."""

    prompts: tuple[str, ...]
    conditions: tuple[str, ...]
    guides: tuple[str, ...]  # names, in the order of the voice's strengths
    voice: Voice
    seed: int
    max_tokens: int
    stops: tuple[str, ...] = ()
    temperature: float = 1.0  # of q, after everything else; 0 takes the likeliest token
    top_p: float = 1.0
    verified: bool = False
    judged: bool = False  # say whether the oracle is satisfied
    stream: bool = False
    top_logprobs: int | None = None  # None: log q is not asked for
    guidance: bool = False
    deadline: float = field(default_factory=lambda: time.monotonic() + 3600)
    deliver: Callable[[Event], None] = lambda event: None
    failed: bool = False
    _gone: threading.Event = field(default_factory=threading.Event)

    @property
    def recorded(self) -> bool:
        """Whether every token's numbers are wanted."""
        return self.guidance or self.top_logprobs is not None

    @property
    def followed(self) -> bool:
        """Whether the text is needed after every token, not only at the end."""
        return self.recorded or bool(self.stops) or (self.stream and not self.verified)

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for it any more."""
        return self._gone.is_set()

    def cancel(self) -> None:
        """Give it up; called from any thread."""
        self._gone.set()

    def fail(self, error: Exception) -> None:
        """Tell whoever waits, once, and give it up."""
        if not self.cancelled:
            self.failed = True
            self.cancel()
            self.deliver(Failure(error))
