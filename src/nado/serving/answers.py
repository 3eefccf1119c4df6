"""Answers in OpenAI's words: one JSON document, or a stream of chunks."""

import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nado.serving.jobs import Answer, Delta, TokenRecord


@dataclass
class Writer:
    """Writes the answer to one request. `Completions` and `Chats` know the two shapes."""

    model: str
    seed: int
    prompt_tokens: int
    logprobs: bool  # whether log q is asked for
    guidance: bool
    judged: bool  # whether to say if the oracle is satisfied
    verified: bool
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    _offsets: dict[int, int] = field(default_factory=dict)  # characters of each choice that were written
    _begun: set[int] = field(default_factory=set)

    prefix = "cmpl"
    kind = "text_completion"
    chunk_kind = "text_completion"

    def __post_init__(self) -> None:
        self.id = self.id or f"{self.prefix}-{uuid.uuid4().hex}"

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """All choices in one document."""
        ordered = sorted(answers, key=lambda answer: answer.index)
        choices = [
            {
                **self._choice(answer.index, answer.text, answer.records),
                "finish_reason": answer.reason,
                **self._verdict(answer),
            }
            for answer in ordered
        ]
        return {**self._head(self.kind), "choices": choices, "usage": self.usage(answers), "seed": self.seed}

    def chunk(self, event: Delta | Answer) -> dict[str, Any]:
        """One event of a stream."""
        text = event.rest if isinstance(event, Answer) else event.text
        choice = {**self._part(event.index, text, event.records), "finish_reason": None}
        if isinstance(event, Answer):
            choice |= {"finish_reason": event.reason, **self._verdict(event)}
        return {**self._head(self.chunk_kind), "choices": [choice], "seed": self.seed}

    def last_chunk(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The count of tokens, where a stream is to end with it."""
        return {**self._head(self.chunk_kind), "choices": [], "usage": self.usage(answers)}

    def usage(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Tokens read and written; EOS counts, and so do the draws that a verified text took."""
        written = sum(answer.drawn_tokens for answer in answers)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": written,
            "total_tokens": self.prompt_tokens + written,
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _verdict(self, answer: Answer) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.judged:
            found["satisfied"] = answer.satisfied
        if self.verified:
            found |= {"verified": bool(answer.satisfied), "draws": answer.draws}
            if not answer.satisfied:
                found["missing_parts"] = list(answer.missing)
        return found

    def _told(self, records: Sequence[TokenRecord]) -> dict[str, Any]:
        return {"guidance": [describe_token(record) for record in records]} if self.guidance else {}

    def _choice(self, index: int, text: str, records: Sequence[TokenRecord]) -> dict[str, Any]:
        raise NotImplementedError

    def _part(self, index: int, text: str, records: Sequence[TokenRecord]) -> dict[str, Any]:
        return self._choice(index, text, records)


class Completions(Writer):
    """/v1/completions."""

    def _choice(self, index: int, text: str, records: Sequence[TokenRecord]) -> dict[str, Any]:
        found = {"index": index, "text": text, "logprobs": None, **self._told(records)}
        if self.logprobs:
            found["logprobs"] = self._logprobs(index, records)
        return found

    def _logprobs(self, index: int, records: Sequence[TokenRecord]) -> dict[str, Any]:
        offsets, place = [], self._offsets.get(index, 0)
        for record in records:
            offsets.append(place)
            place += len(record.text)
        self._offsets[index] = place
        return {
            "tokens": [record.text for record in records],
            "token_logprobs": [record.log_q for record in records],
            "top_logprobs": [dict(record.top) for record in records],
            "text_offset": offsets,
        }


class Chats(Writer):
    """/v1/chat/completions."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def _choice(self, index: int, text: str, records: Sequence[TokenRecord]) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, **self._more(records)}

    def _part(self, index: int, text: str, records: Sequence[TokenRecord]) -> dict[str, Any]:
        role = {} if index in self._begun else {"role": "assistant"}
        self._begun.add(index)
        return {"index": index, "delta": {**role, "content": text}, **self._more(records)}

    def _more(self, records: Sequence[TokenRecord]) -> dict[str, Any]:
        found: dict[str, Any] = {"logprobs": None, **self._told(records)}
        if self.logprobs:
            found["logprobs"] = {"content": [_chat_logprob(record) for record in records], "refusal": None}
        return found


def _chat_logprob(record: TokenRecord) -> dict[str, Any]:
    top = [_named_logprob(*pair) for pair in record.top]
    return {**_named_logprob(record.text, record.log_q), "top_logprobs": top}


def _named_logprob(text: str, log_q: float) -> dict[str, Any]:
    return {"token": text, "logprob": log_q, "bytes": list(text.encode("utf-8", "replace"))}


def describe_token(record: TokenRecord) -> dict[str, Any]:
    """What base and guide made of a token, as probabilities."""
    return {
        "token": record.text,
        "p": math.exp(record.log_p),
        "q": math.exp(record.log_q),
        "R": None if record.log_r is None else math.exp(min(0.0, record.log_r)),
        "S": math.exp(min(record.log_s, 700.0)),
        "base_choice": record.base_choice,
        "p_base_choice": math.exp(record.log_p_base_choice),
        "ends": record.ends,
    }
