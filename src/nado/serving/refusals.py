"""Errors as clients see them: OpenAI's shape, no more than they need to know."""

import json
from typing import Any

from nado.errors import NadoError, OracleError
from nado.serving.engine import QueueFullError, StoppingError
from nado.serving.jobs import DeadlineError

_TYPES = {401: "authentication_error", 404: "not_found_error", 408: "timeout_error", 429: "rate_limit_error"}


class RefusalError(Exception):
    """An answer other than the one that was asked for."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """In OpenAI's shape."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def refuse(error: Exception) -> RefusalError:
    """What a client is told of an error; of ours only that there was one."""
    if isinstance(error, RefusalError):
        return error
    if isinstance(error, QueueFullError):
        return RefusalError(429, str(error), code="queue_full")
    if isinstance(error, DeadlineError):
        return RefusalError(408, "The request took longer than this server allows.", code="deadline")
    if isinstance(error, StoppingError):
        return RefusalError(503, str(error), code="shutting_down")
    if isinstance(error, OracleError):
        return RefusalError(500, str(error), code="oracle_failed")
    if isinstance(error, NadoError):
        return RefusalError(400, str(error))
    return RefusalError(500, "The server failed; its log says why.")


def to_json(value: Any) -> bytes:
    """JSON that any client can read: escaped, so that no character can break the answer."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")
