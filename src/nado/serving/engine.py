"""The thread that writes: requests come in from any thread, pools are stepped in one.

A request is put into the pool of its combination of guides, and its rows join that pool's batch at the next
step. The queue is bounded; a request that is late, or that nobody waits for any more, leaves at a step too.
"""

import logging
import threading
from collections import deque
from typing import Any

import torch

from nado.errors import InputError, NadoError
from nado.huggingface import CausalModel, EncoderDecoderModel
from nado.serving.jobs import Job, ServingConfig
from nado.serving.models import ServedModel
from nado.serving.pool import Pool, Row, Tally
from nado.serving.voices import VoicedModel

log = logging.getLogger(__name__)

_IDLE_SECONDS = 0.5  # how long the thread sleeps at most; a request wakes it at once


class QueueFullError(NadoError, RuntimeError):
    """More texts wait than the server has places for."""


class StoppingError(NadoError, RuntimeError):
    """The server is being shut down."""


class Engine:
    """Steps the pools of a served model."""

    def __init__(self, model: ServedModel, config: ServingConfig | None = None) -> None:
        self.model, self.config = model, config if config is not None else ServingConfig()
        self.tally = Tally()
        self.widest, self.prompt_tokens = widest_prompt(model.base, self.config.max_prompt_tokens)
        self._pools: dict[tuple[str, ...], Pool] = {}
        self._arrived: deque[Job] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._waiting = 0  # texts that have no row yet, as of the last step, and those that arrived since
        self._thread = threading.Thread(target=self._run, name="nado-engine", daemon=True)

    # --- from any thread ------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Put a request into the queue."""
        with self._changed:
            if self._stopping:
                raise StoppingError(
                    "a server that is running", "one that is shutting down", "Ask another one."
                )
            if self._waiting + len(job.prompts) > self.config.queue_size:
                raise QueueFullError(
                    f"at most {self.config.queue_size} waiting texts",
                    f"{self._waiting} already",
                    "Try again later.",
                )
            self._waiting += len(job.prompts)
            self._arrived.append(job)
            self._changed.notify()

    def stop(self, seconds: float = 60.0) -> bool:
        """Take no more requests, finish those there are; returns whether all were finished in time."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        """Whether the thread is there to answer."""
        return self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """Texts that have no row yet."""
        return self._waiting

    @property
    def running(self) -> int:
        """Texts that are being written."""
        return sum(pool.running for pool in list(self._pools.values()))

    # --- in its own -----------------------------------------------------------------------------------

    def _run(self) -> None:
        with torch.inference_mode():
            while self._collect():
                for pool in list(self._pools.values()):
                    if pool.busy:
                        self._advance(pool)
                self._forget_idle()
                self._count()

    def _collect(self) -> bool:
        """Put what has arrived into its pool, waiting for something to do; False when it is time to end."""
        with self._changed:
            while not self._arrived and not self._busy():
                if self._stopping:
                    return False
                self._changed.wait(_IDLE_SECONDS)
            arrived = list(self._arrived)
            self._arrived.clear()
        for job in arrived:
            try:
                pool = self._pool(job.guides)
            except Exception as error:
                log.exception("no pool for %s", job.guides)
                job.fail(error)
                continue
            pool.waiting.extend(Row(job, index) for index in range(len(job.prompts)))
        return True

    def _busy(self) -> bool:
        return any(pool.busy for pool in self._pools.values())

    def _pool(self, names: tuple[str, ...]) -> Pool:
        if names not in self._pools:
            model = VoicedModel(self.model.base, self.model.choose(names))
            self._pools[names] = Pool(model, self.config, self.widest, self.tally)
        return self._pools[names]

    def _advance(self, pool: Pool) -> None:
        try:
            pool.advance()
        except Exception as error:  # ours, or the machine's: these requests are lost, the others are not
            log.exception("a step failed")
            self.tally.failed += pool.running
            pool.abandon(error)

    def _forget_idle(self) -> None:
        """Give up the memory of the combination that was not asked for longest."""
        while len(self._pools) > self.config.max_pools:
            idle = [names for names, pool in self._pools.items() if not pool.busy]
            if not idle:
                return
            del self._pools[min(idle, key=lambda names: self._pools[names].used)]

    def _count(self) -> None:
        waiting = sum(len(pool.waiting) for pool in self._pools.values())
        with self._changed:
            self._waiting = waiting + sum(len(job.prompts) for job in self._arrived)


def widest_prompt(base: CausalModel | EncoderDecoderModel, tokens: int) -> tuple[str, int]:
    """A prompt of as many tokens as any may have, `tokens` or what the base can read, and their number."""
    bound = base._prompt_room()
    wanted = tokens if bound is None else min(tokens, bound[0])
    words = wanted
    while words >= 0:
        prompt = " ".join(["a"] * words)
        try:
            count = len(base.encode([prompt])[0])
        except InputError:  # more than the base can read
            count = wanted + 1
        if count <= wanted:
            return prompt, count
        words -= max(1, (count - wanted) // 2)
    raise InputError(
        f"room for prompts in the base's context beside texts of {base.length_limit} tokens",
        "none",
        "Lower the length limit.",
    )


def same_in_any_place(engine: Engine, steps: int = 4) -> bool:
    """Whether a text is the same, to the last bit, in the first and in the last row of a batch.

    Row by row the arithmetic is the same, but a library may round differently in another thread or at
    another address. Whoever serves on a CPU wants to know.
    """
    base, size = engine.model.base, engine.config.batch_size
    model: Any = base
    with torch.inference_mode():
        state = model.start([engine.widest] * size)
        for _ in range(steps):
            if not bool((state.logits == state.logits[:1]).all()):
                return False
            state = model.step(state, state.logits.argmax(dim=-1))
        return True
