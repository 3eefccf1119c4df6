"""A server in a thread, for tests that speak HTTP to it."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn

import small_models
from nado.huggingface import CausalModel
from nado.huggingface.reading import HuggingFaceReader
from nado.oracles import Keywords
from nado.serving.api import make_app
from nado.serving.engine import Engine
from nado.serving.jobs import ServingConfig
from nado.serving.models import ServedModel
from nado.serving.voices import Member
from random_guides import random_guide

LIMIT = 12
ORACLE = Keywords(inflections=False, at_least=1)
CHAT = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def build_served(*, chat: bool = True) -> ServedModel:
    tokenizer = small_models.tokenizer()
    if chat:
        tokenizer.chat_template = CHAT
    base = CausalModel(small_models.build("llama", 3), tokenizer, length_limit=LIMIT)
    reader = HuggingFaceReader(base)
    first = random_guide(reader, 0, progress_bits=4, named_parts=True)
    second = random_guide(reader, 1, reads="light")
    members = (Member("first", first, ORACLE), Member("second", second, None))
    return ServedModel("small", base, members, "a {condition}")


@dataclass(frozen=True)
class Running:
    """A server that answers."""

    url: str
    port: int
    engine: Engine


@contextmanager
def running(
    served: ServedModel, config: ServingConfig | None = None, token: str | None = None
) -> Iterator[Running]:
    engine = Engine(served, config or ServingConfig(batch_size=8, max_prompt_tokens=24))
    app = make_app(engine, token=token)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", ws="none", lifespan="on"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
        assert thread.is_alive()
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Running(f"http://127.0.0.1:{port}", port, engine)
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()
