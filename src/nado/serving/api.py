"""The application: routes, streaming, errors."""

import asyncio
import base64
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from nado.serving.answers import Chats, Completions, Writer
from nado.serving.engine import Engine
from nado.serving.gates import App, Gate, Guarded
from nado.serving.jobs import Answer, Delta, Event, Failure, Job
from nado.serving.metrics import Requests, write_metrics
from nado.serving.reading import read_chat, read_completion
from nado.serving.refusals import RefusalError, refuse, to_json
from nado.serving.schema import ERRORS, ChatRequest, CompletionRequest, Settings

_STREAM_HEADERS = {"X-Accel-Buffering": "no"}  # proxies pass chunks on as they come


class AsciiJSON(JSONResponse):
    """JSON, escaped."""

    def render(self, content: Any) -> bytes:
        """As bytes."""
        return to_json(content)


@dataclass(frozen=True)
class Desk:
    """What the routes share."""

    engine: Engine
    requests: Requests
    created: int
    page: str
    policy: str


def make_app(engine: Engine, *, token: str | None = None, local_only: bool = True) -> App:
    """The application, its gate in front. The engine is started and stopped with it."""
    page = files("nado.serving").joinpath("playground.html").read_text(encoding="utf-8")
    desk = Desk(engine, Requests(), int(time.time()), page, content_policy(page))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if not engine.alive:
            engine.start()
        yield
        await asyncio.to_thread(engine.stop)

    app = FastAPI(
        title="nado", docs_url=None, redoc_url=None, lifespan=lifespan, default_response_class=AsciiJSON
    )
    app.add_exception_handler(RefusalError, _show_refusal)
    app.add_exception_handler(RequestValidationError, _show_invalid)
    app.add_exception_handler(HTTPException, _show_http)
    app.add_exception_handler(Exception, _show_failure)
    _add_routes(app, desk)
    config = engine.config
    gate = Gate(config.max_body, config.body_seconds, token, local_only)
    return Counted(Guarded(app, gate), desk.requests)


class Counted:
    """An application whose requests are counted."""

    def __init__(self, app: App, requests: Requests) -> None:
        self._app, self._requests = app, requests

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass the request on and note how it ended."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500

        async def noting(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            route = scope.get("route")
            path = getattr(route, "path", "other")  # never the client's own words: they would fill the page
            self._requests.count(path, status, time.perf_counter() - began)


def _add_routes(app: FastAPI, desk: Desk) -> None:
    served = desk.engine.model

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def playground() -> HTMLResponse:
        return HTMLResponse(desk.page, headers={"Content-Security-Policy": desk.policy})

    @app.get("/healthz", responses={503: {"description": "Nothing is being written any more"}})
    async def health() -> Response:
        return AsciiJSON({"status": "ok" if desk.engine.alive else "down"}, 200 if desk.engine.alive else 503)

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        text = write_metrics(desk.engine, desk.requests)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models", responses={401: ERRORS[401]})
    async def models() -> Response:
        return AsciiJSON({"object": "list", "data": [describe_model(desk)]})

    @app.get("/v1/models/{name}", responses={401: ERRORS[401], 404: ERRORS[404], 422: ERRORS[400]})
    async def model(name: str) -> Response:
        if name != served.name:
            raise unknown_model(name)
        return AsciiJSON(describe_model(desk))

    @app.post("/v1/completions", responses={**ERRORS, 422: ERRORS[400]})
    async def complete(asked: CompletionRequest, request: Request) -> Response:
        require_model(asked, served.name)
        job = read_completion(asked, desk.engine, _seed(asked))
        writer = make_writer(Completions, desk, job, asked, asked.logprobs is not None)
        return await answer(request, desk.engine, job, writer, asked.includes_usage)

    @app.post("/v1/chat/completions", responses={**ERRORS, 422: ERRORS[400]})
    async def chat(asked: ChatRequest, request: Request) -> Response:
        require_model(asked, served.name)
        job = read_chat(asked, desk.engine, _seed(asked))
        writer = make_writer(Chats, desk, job, asked, asked.logprobs)
        return await answer(request, desk.engine, job, writer, asked.includes_usage)


def _seed(asked: Settings) -> int:
    return secrets.randbits(48) if asked.seed is None else asked.seed  # 48: JavaScript keeps every digit


def require_model(asked: Settings, name: str) -> None:
    """Only the model that is served can be asked for."""
    if asked.model is not None and asked.model != name:
        raise unknown_model(asked.model)


def unknown_model(name: str) -> RefusalError:
    """What is said of any other model."""
    return RefusalError(
        404, f"The model {name[:80]!r} is not served here.", param="model", code="model_not_found"
    )


def describe_model(desk: Desk) -> dict[str, Any]:
    """The served model, with what a client has to know to ask it."""
    engine = desk.engine
    served, config = engine.model, engine.config
    guides = [
        {
            "name": each.name,
            "oracle": None if each.oracle is None else each.oracle.name,
            "exact_end": served.ends_exactly([each]),
        }
        for each in served.members
    ]
    return {
        "id": served.name,
        "object": "model",
        "created": desk.created,
        "owned_by": "nado",
        "guides": guides,
        "template": served.template,
        "chat": served.chats,
        "limits": {
            "tokens": served.base.length_limit,
            "prompt_tokens": engine.prompt_tokens,
            "condition_tokens": config.max_condition_tokens,
            "texts": config.max_texts,
            "draws": config.budget,
        },
    }


def make_writer(kind: Callable[..., Writer], desk: Desk, job: Job, asked: Settings, logprobs: bool) -> Writer:
    """What will write the answer."""
    engine = desk.engine
    read = sum(len(row) for row in engine.model.base.encode(list(dict.fromkeys(job.prompts))))
    return kind(
        engine.model.name,
        job.seed,
        read,
        logprobs=logprobs,
        guidance=asked.return_guidance,
        judged=job.judged,
        verified=asked.verified,
    )


# --- from the engine's thread to the client -----------------------------------------------------------


class Ticket:
    """A submitted job and its events. Whoever leaves it gives the job up."""

    def __init__(self, engine: Engine, job: Job, request: Request) -> None:
        self._job, self._request = job, request
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        job.deliver = lambda event: _call(loop, self._events.put_nowait, event)
        engine.submit(job)

    async def events(self) -> AsyncIterator[Delta | Answer]:
        """Everything until the last answer; raises what failed. Ends early when the client has left."""
        left = asyncio.create_task(_wait_until_left(self._request))
        answers = 0
        try:
            while answers < len(self._job.prompts):
                event = await self._next(left)
                if event is None:
                    return
                if isinstance(event, Failure):
                    raise refuse(event.error)
                answers += isinstance(event, Answer)
                yield event
        finally:
            left.cancel()
            if answers < len(self._job.prompts):
                self._job.cancel()

    async def _next(self, left: "asyncio.Task[None]") -> Event | None:
        if not self._events.empty():
            return self._events.get_nowait()
        waiting = asyncio.create_task(self._events.get())
        await asyncio.wait({waiting, left}, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result()
        waiting.cancel()
        return None


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], event: Event) -> None:
    with suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(function, event)


async def _wait_until_left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def answer(request: Request, engine: Engine, job: Job, writer: Writer, usage: bool) -> Response:
    """Submit a job and answer it, in one piece or as a stream."""
    try:
        ticket = Ticket(engine, job, request)
    except Exception as error:
        raise refuse(error) from error
    events = ticket.events()
    if not job.stream:
        answers = [event async for event in events if isinstance(event, Answer)]
        return AsciiJSON(writer.whole(answers))
    first = await anext(events, None)  # an error before it has a status of its own
    return StreamingResponse(
        _stream(first, events, writer, usage), media_type="text/event-stream", headers=_STREAM_HEADERS
    )


async def _stream(
    first: Delta | Answer | None, events: AsyncIterator[Delta | Answer], writer: Writer, usage: bool
) -> AsyncIterator[bytes]:
    answers: list[Answer] = []
    event = first
    try:
        while event is not None:
            yield _line(writer.chunk(event))
            if isinstance(event, Answer):
                answers.append(event)
            event = await anext(events, None)
        if usage:
            yield _line(writer.last_chunk(answers))
    except RefusalError as refusal:  # too late for a status
        yield _line(refusal.body())
    finally:
        await events.aclose()  # type: ignore[attr-defined]
    yield b"data: [DONE]\n\n"


def _line(value: dict[str, Any]) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


# --- errors -------------------------------------------------------------------------------------------


async def _show_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusalError)
    headers = {"Retry-After": "1"} if error.status == 429 else None
    return AsciiJSON(error.body(), error.status, headers)


async def _show_invalid(request: Request, error: Exception) -> Response:
    """The first thing wrong with a request, without echoing the client's own words."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    param = ".".join(place)[:80] or None
    message = f"{param}: {first['msg']}" if param else str(first["msg"])
    return await _show_refusal(request, RefusalError(400, message, param=param, code=str(first["type"])))


async def _show_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return await _show_refusal(request, RefusalError(error.status_code, str(error.detail)))


async def _show_failure(request: Request, error: Exception) -> Response:
    return await _show_refusal(request, refuse(error))


def content_policy(page: str) -> str:
    """Allows the page its own script and its own server, nothing else."""
    script = page.split("<script>", 1)[1].split("</script>", 1)[0] if "<script>" in page else ""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
