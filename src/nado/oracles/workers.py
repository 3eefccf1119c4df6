"""Worker processes that ask an oracle, and survive it: one that hangs or crashes is stopped and named.

The oracle travels to its workers by the program's own pipes (as a reference to a file, a module or its
arguments, see `Oracle.__reduce_ex__`); nothing is ever unpickled from disk or network.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from nado.errors import InputError, OracleError
from nado.oracles.protocol import Oracle

Rows = TypeVar("Rows")
Result = TypeVar("Result")
_START_LIMIT_S = 120.0


class Failure(NamedTuple):
    """What happened instead of an answer."""

    kind: Literal["raised", "hung", "died"]
    detail: str
    trace: str = ""
    hint: str = ""  # the oracle's own

    @classmethod
    def of(cls, error: Exception, trace: str = "") -> Failure:
        """What an oracle raised; of an oracle's own error what it found, its cause included, and its hint."""
        if isinstance(error, OracleError):
            return cls("raised", error.found, trace, error.hint)
        return cls("raised", f"{type(error).__name__}: {error}", trace)


class Job(NamedTuple, Generic[Rows]):
    """A batch that a worker has in hand."""

    number: int
    rows: Rows
    deadline: float


class Worker(Generic[Rows, Result]):
    """One process that answers one batch at a time."""

    def __init__(
        self, context: BaseContext, ask: Callable[[Oracle, Rows], Result], oracle: Oracle, name: str
    ) -> None:
        self.connection, theirs = context.Pipe()
        self._process = context.Process(  # type: ignore[attr-defined]
            target=_serve, args=(theirs, ask, oracle), name=name, daemon=True
        )
        self._process.start()
        theirs.close()  # so that the end of the process is seen as the end of the pipe

    def wait_until_ready(self) -> None:
        """Return when the oracle has arrived, or say why it has not."""
        outcome = self.receive(_START_LIMIT_S)
        if isinstance(outcome, Failure):
            raise OracleError(
                "worker processes to start",
                f"{outcome.detail}",
                "Its own message is above. A script that labels with workers does so under "
                "`if __name__ == '__main__':`.",
            )

    def send(self, rows: Rows) -> None:
        """Hand out a batch; a worker that has died is noticed by `receive`."""
        try:
            self.connection.send(rows)
        except OSError:
            return

    def receive(self, timeout: float | None) -> Result | Failure:
        """The result of the batch in hand, or what happened instead."""
        if not self.connection.poll(timeout):
            return Failure("hung", f"no answer within {timeout:g} s")
        try:
            result: Result | Failure = self.connection.recv()
        except (EOFError, OSError):
            self._process.join(5)
            return Failure("died", f"that its process ended with exit code {self._process.exitcode}")
        return result

    def stop(self) -> None:
        """End the process, whatever it is doing."""
        self.connection.close()
        self._process.kill()
        self._process.join()


def _serve(connection: Connection, ask: Callable[[Oracle, Any], Any], oracle: Oracle) -> None:
    """The life of a worker: answer batches until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle
    connection.send("ready")
    while True:
        try:
            rows = connection.recv()
        except (EOFError, OSError):
            return
        try:
            outcome = ask(oracle, rows)
        except Exception as error:
            outcome = Failure.of(error, traceback.format_exc())
        try:
            connection.send(outcome)
        except OSError:
            return


class WorkerPool(Generic[Rows, Result]):
    """Several workers; results come back in the order of the batches."""

    def __init__(
        self,
        ask: Callable[[Oracle, Rows], Result],
        oracle: Oracle,
        workers: int,
        timeout: float | None = None,
        start_method: str = "spawn",
    ) -> None:
        if workers < 1 or (timeout is not None and timeout <= 0):
            raise InputError(
                "one worker or more, and a timeout above 0",
                f"workers={workers}, timeout={timeout}",
                "Leave the timeout out for none.",
            )
        _check_sendable(oracle)
        self._context = multiprocessing.get_context(start_method)
        self._ask, self._oracle, self._timeout = ask, oracle, timeout
        self._busy: dict[Worker[Rows, Result], Job[Rows]] = {}
        self._workers = [self._start() for _ in range(workers)]
        try:
            for worker in self._workers:
                worker.wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def map(self, batches: Iterable[Rows]) -> Iterator[Result | tuple[Failure, Rows]]:
        """Every batch's result in order; a failure comes with its batch and is the last.

        Batches before the failing one are still answered and given out first.
        """
        source = enumerate(batches)
        busy = self._busy
        done: dict[int, Result | tuple[Failure, Rows]] = {}
        next_out, failed = 0, False
        while True:
            # Do not run far ahead of a slow batch: finished ones wait in memory.
            idle = [w for w in self._workers if w not in busy]
            while idle and not failed and len(done) < 4 * len(self._workers):
                item = next(source, None)
                if item is None:
                    break
                worker = idle.pop()
                busy[worker] = self._hand_out(worker, *item)
            if not busy and next_out not in done:
                return
            for index, outcome in self._collect(busy) if busy else ():
                done[index] = outcome
                failed = failed or isinstance(outcome, tuple)
            while next_out in done:
                outcome = done.pop(next_out)
                yield outcome
                if isinstance(outcome, tuple):
                    return
                next_out += 1

    def ask_alone(self, rows: Rows) -> Result | Failure:
        """One batch, by itself: how a failing batch is taken apart."""
        worker = self._workers[0]
        if worker in self._busy:  # its next answer would be to another batch
            del self._busy[worker]
            worker = self._replace(worker)
        worker.send(rows)
        outcome = worker.receive(self._timeout)
        if isinstance(outcome, Failure) and outcome.kind != "raised":
            self._replace(worker)
        return outcome

    def stop(self) -> None:
        """End every worker."""
        for worker in self._workers:
            worker.stop()

    def _start(self) -> Worker[Rows, Result]:
        return Worker(self._context, self._ask, self._oracle, f"oracle {self._oracle.name}")

    def _replace(self, worker: Worker[Rows, Result]) -> Worker[Rows, Result]:
        worker.stop()
        fresh = self._start()
        self._workers[self._workers.index(worker)] = fresh
        fresh.wait_until_ready()
        return fresh

    def _hand_out(self, worker: Worker[Rows, Result], index: int, rows: Rows) -> Job[Rows]:
        worker.send(rows)
        limit = float("inf") if self._timeout is None else self._timeout
        return Job(index, rows, time.monotonic() + limit)

    def _collect(
        self, busy: dict[Worker[Rows, Result], Job[Rows]]
    ) -> Iterator[tuple[int, Result | tuple[Failure, Rows]]]:
        """Wait until some worker has something, or is late; both leave `busy`."""
        nearest = min(job.deadline for job in busy.values())
        patience = None if nearest == float("inf") else max(0.0, nearest - time.monotonic())
        ready = wait([worker.connection for worker in busy], patience)
        now = time.monotonic()
        for worker, job in list(busy.items()):
            if worker.connection in ready:
                outcome = worker.receive(0)
            elif now >= job.deadline:
                outcome = Failure("hung", f"no answer within {self._timeout:g} s")
            else:
                continue
            del busy[worker]
            if isinstance(outcome, Failure):
                if outcome.kind != "raised":
                    self._replace(worker)
                yield job.number, (outcome, job.rows)
            else:
                yield job.number, outcome


def _check_sendable(oracle: Oracle) -> None:
    try:
        pickle.dumps(oracle)
    except OracleError:
        raise
    except Exception as error:
        raise OracleError(
            "an oracle that can be sent to worker processes",
            f"{oracle.name}: {type(error).__name__}: {error}",
            "Label with workers=1 and no timeout, or load it from a file with load_oracle.",
        ) from error
