"""Slow oracles, such as a judge behind an API: cached on disk, a few at a time, tried again.

Every answer is committed to the cache as soon as it arrives, so a run that is stopped, or that fails
on its thousandth text, has lost nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import random
import sqlite3
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from nado.errors import InputError, OracleError, StorageError
from nado.oracles.description import describe
from nado.oracles.function import OracleOfFunction, check_answer, read_signature
from nado.oracles.protocol import BoolArray, shorten

Row = tuple[str, str]


class RemoteOracle(OracleOfFunction):
    """A slow function, plain or async, of one text or of a condition and a text, made an oracle.

    At most `concurrency` calls run at a time. One that raises is tried `retries` times more, after
    `backoff`, 2·`backoff`, 4·`backoff` … seconds. Answers are kept in the SQLite file `cache` under a
    digest of the question and the text. The question is the function's code; give a `version` to name
    it yourself, so that answers survive changes of code that do not change the question.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        cache: str | Path | None = None,
        concurrency: int = 8,
        retries: int = 4,
        backoff: float = 1.0,
        name: str | None = None,
        version: str | None = None,
    ) -> None:
        if concurrency < 1 or retries < 0 or backoff < 0:
            raise InputError(
                "concurrency of 1 or more, retries and backoff of 0 or more",
                f"concurrency={concurrency}, retries={retries}, backoff={backoff}",
                "Leave them out for 8 at a time, 4 retries and 1 second.",
            )
        super().__init__(function, read_signature(function, batch=False, asynchronous=True), name)
        self.cache = None if cache is None else Path(cache)
        self.concurrency = concurrency
        self.retries = retries
        self.backoff = backoff
        self.version = version

    @property
    def spec(self) -> str:
        """Name and `version` where one is given; otherwise the function's code decides."""
        question = describe(self.function) if self.version is None else f"{self.name}, {self.version}"
        return f"remote({question})"

    def settings(self) -> dict[str, Any]:
        """The arguments beside the function."""
        names = ("cache", "concurrency", "retries", "backoff", "name", "version")
        return {name: getattr(self, name) for name in names}

    def judge(self, conditions: Sequence[str], texts: Sequence[str]) -> BoolArray:
        """Cached answers where there are any; each other row is asked once, however often it occurs."""
        rows = list(zip(conditions, texts, strict=True))
        if self.takes == "text":
            rows = [("", text) for _, text in rows]
        with _open_cache(self.cache) as cache:
            prefix = self.fingerprint
            answers = {row: cache.get(_key(prefix, row)) for row in dict.fromkeys(rows)}
            open_rows = [row for row, answer in answers.items() if answer is None]

            def keep(row: Row, answer: bool) -> None:
                answers[row] = answer
                cache.put(_key(prefix, row), answer)

            if open_rows:
                waits = inspect.iscoroutinefunction(self.function)
                (self._ask_coroutines if waits else self._ask_threads)(open_rows, keep)
        return np.array([answers[row] for row in rows], dtype=bool)

    def _ask_threads(self, rows: list[Row], keep: Callable[[Row, bool], None]) -> None:
        failed = threading.Event()  # the first row given up stops the others

        def ask(row: Row) -> None:
            try:
                for attempt in range(self.retries + 1):
                    if failed.is_set():
                        return
                    try:
                        answer = self.function(*self._arguments(row))
                    except Exception as error:
                        self._give_up_after(attempt, row, error)
                        failed.wait(self._pause(attempt))
                    else:
                        keep(row, check_answer(answer, self.name, row[1]))
                        return
            except BaseException:
                failed.set()
                raise

        with ThreadPoolExecutor(self.concurrency) as pool:
            try:
                for task in [pool.submit(ask, row) for row in rows]:
                    task.result()
            except BaseException:
                failed.set()
                raise

    def _ask_coroutines(self, rows: list[Row], keep: Callable[[Row, bool], None]) -> None:
        async def ask(row: Row, limit: asyncio.Semaphore) -> None:
            async with limit:
                for attempt in range(self.retries + 1):
                    try:
                        answer = await self.function(*self._arguments(row))
                    except Exception as error:
                        self._give_up_after(attempt, row, error)
                        await asyncio.sleep(self._pause(attempt))
                    else:
                        keep(row, check_answer(answer, self.name, row[1]))
                        return

        async def ask_all() -> None:
            limit = asyncio.Semaphore(self.concurrency)
            async with asyncio.TaskGroup() as group:  # the first row given up cancels the others
                for row in rows:
                    group.create_task(ask(row, limit))

        try:
            _run(ask_all())
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None

    def _arguments(self, row: Row) -> tuple[str, ...]:
        return row[1:] if self.takes == "text" else row

    def _pause(self, attempt: int) -> float:
        # A little jitter, from a generator of its own, so that retries do not arrive all at once.
        return float(self.backoff * 2**attempt * random.Random().uniform(0.9, 1.1))

    def _give_up_after(self, attempt: int, row: Row, error: Exception) -> None:
        if attempt < self.retries:
            return
        raise OracleError(
            f"an answer from the remote oracle {self.name}",
            f"{type(error).__name__}: {error} after {self.retries + 1} attempts "
            f"for the text {shorten(row[1])}",
            "Answers so far are kept in the cache; run the same command again."
            if self.cache is not None
            else "Give it a cache file so that answers are kept between runs.",
        ) from error


remote = RemoteOracle  # the verb: remote(function, cache=…)


class _Cache:
    """Answers in an SQLite file: one row a question, committed one by one, safe between processes."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()  # answers arrive from several threads
        connection.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, satisfied INTEGER)")

    def get(self, key: str) -> bool | None:
        with self._lock:
            found = self._connection.execute("SELECT satisfied FROM answers WHERE key = ?", (key,)).fetchone()
        return None if found is None else bool(found[0])

    def put(self, key: str, answer: bool) -> None:
        with self._lock:
            self._connection.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, int(answer)))


@contextlib.contextmanager
def _open_cache(path: Path | None) -> Iterator[_Cache]:
    """The cache in a file, or one in memory for this call alone."""
    connection = None
    try:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        # No isolation level: every statement is a transaction of its own.
        connection = sqlite3.connect(
            path or ":memory:", timeout=60, isolation_level=None, check_same_thread=False
        )
        yield _Cache(connection)
    except (sqlite3.Error, OSError) as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(
            f"a readable and writable cache of answers at {path}",
            f"the error: {error}",
            "Choose another file; delete this one only if its answers may be lost.",
        ) from error
    finally:
        if connection is not None:
            connection.close()


def _key(fingerprint: str, row: Row) -> str:
    digest = hashlib.sha256(fingerprint.encode())
    for piece in row:
        content = piece.encode("utf-8", "surrogatepass")
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def _run(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end, also when called from a notebook whose own loop is running."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(work)
        return
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, work).result()
