"""Who may ask, and how much: hosts, the bearer token, the size of a request and the time to send it.

Below the framework, so that nothing of a request is parsed before it has passed.
"""

import asyncio
import hmac
import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from nado.serving.refusals import RefusalError, to_json

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

_OPEN = ("/", "/healthz", "/openapi.json")  # need no token: they tell nothing that is secret
_PAGE_HEADERS = [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]


@dataclass(frozen=True)
class Gate:
    """What is checked before a request is looked at."""

    max_body: int
    body_seconds: float
    token: str | None = None
    local_only: bool = False  # refuse requests for other hosts: a page elsewhere may have its name point here

    def require(self, scope: Scope) -> None:
        """Raise where a request may not come in."""
        headers = dict(scope["headers"])
        if self.local_only and not _is_local(headers.get(b"host", b"")):
            raise RefusalError(400, "This server answers only as localhost.", code="host")
        if self.token is not None and scope["path"] not in _OPEN:
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, b"Bearer " + self.token.encode()):
                raise RefusalError(
                    401, "Give the server's token: Authorization: Bearer …", code="invalid_api_key"
                )
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.max_body:
            raise self.too_large()

    def too_large(self) -> RefusalError:
        """What is said of a body over the limit."""
        return RefusalError(413, f"A request may have {self.max_body} bytes.", code="body_too_large")

    async def read(self, receive: Receive) -> bytes:
        """The body, if it is small enough and comes in time."""
        body = b""
        try:
            async with asyncio.timeout(self.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise RefusalError(400, "The request was broken off.", code="disconnected")
                    body += bytes(message.get("body", b""))
                    if len(body) > self.max_body:
                        raise self.too_large()
                    if not message.get("more_body"):
                        return body
        except TimeoutError:
            raise RefusalError(408, "The request took too long to arrive.", code="slow_body") from None


class Guarded:
    """An application behind a gate."""

    def __init__(self, app: App, gate: Gate) -> None:
        self._app, self._gate = app, gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request in, with its whole body, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._gate.require(scope)
            body = await self._gate.read(receive)
        except RefusalError as refusal:
            await _send_refusal(refusal, send)
            return
        first = True

        async def replay() -> MutableMapping[str, Any]:
            nonlocal first
            if first:
                first = False
                return {"type": "http.request", "body": body, "more_body": False}
            return await receive()  # only that the client has left

        await self._app(scope, replay, _add_headers(send))


def _add_headers(send: Send) -> Send:
    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), *_PAGE_HEADERS]
        await send(message)

    return sending


async def _send_refusal(refusal: RefusalError, send: Send) -> None:
    headers = [(b"content-type", b"application/json"), (b"connection", b"close"), *_PAGE_HEADERS]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": to_json(refusal.body())})


def _is_local(host: bytes) -> bool:
    name = host.decode("latin-1").rsplit(":", 1)[0] if not host.endswith(b"]") else host.decode("latin-1")
    name = name.strip("[]")
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
