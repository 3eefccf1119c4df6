"""Labelling: ask an oracle about many texts, and keep what it said when it fails.

A text that is not finished is unsatisfied whatever it says. Its parts are recorded as judged, so that
``satisfied == finished & all(parts)``; progress and stop labels of every prefix come from
`Oracle.read_prefixes`, the function that decoding uses too.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nado.errors import InputError, OracleError
from nado.oracles.protocol import BoolArray, Oracle, check_rows, hold_together, shorten
from nado.oracles.workers import Failure, WorkerPool
from nado.samples import Ragged


@dataclass(frozen=True)
class Rows:
    """A batch to be labelled; `prefixes` are the texts of each row's prefixes, shortest first."""

    conditions: Sequence[str]
    texts: Sequence[str]
    finished: BoolArray
    prefixes: Sequence[Sequence[str]] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def part(self, rows: slice) -> Rows:
        """Some of the rows."""
        prefixes = None if self.prefixes is None else self.prefixes[rows]
        return Rows(self.conditions[rows], self.texts[rows], self.finished[rows], prefixes)


@dataclass(frozen=True)
class Labels:
    """What the oracle said about a batch.

    `parts` is None when they were not asked for, `progress` and `stops` when there were no prefixes. A
    row of `progress` holds the bits of all its prefixes, one after the other.
    """

    satisfied: BoolArray
    parts: Ragged | None = None
    progress: Ragged | None = None
    stops: Ragged | None = None

    def __len__(self) -> int:
        return len(self.satisfied)

    def progress_of(self, row: int) -> BoolArray:
        """The progress of one row at each of its prefixes: (prefixes, bits)."""
        if self.progress is None or self.stops is None:
            raise InputError("labels with progress", "labels without", "Label with prefixes.")
        bits: BoolArray = self.progress.row(row).reshape(len(self.stops.row(row)), -1)
        return bits


def label(
    oracle: Oracle,
    conditions: Sequence[str],
    texts: Sequence[str],
    *,
    finished: Sequence[bool] | BoolArray | None = None,
    prefixes: Sequence[Sequence[str]] | None = None,
    parts: bool = True,
    batch_size: int = 1024,
    workers: int = 1,
    timeout: float | None = None,
) -> Labels:
    """Label texts held in memory; None as `finished` means that all of them are."""
    check_rows(conditions, texts, oracle.name)
    done = np.ones(len(texts), dtype=bool) if finished is None else np.asarray(finished, dtype=bool)
    rows = Rows(conditions, texts, done, prefixes)
    _check_lengths(rows)
    starts = range(0, len(texts), batch_size)
    batches = (rows.part(slice(start, start + batch_size)) for start in starts)
    labelled = label_batches(oracle, batches, parts=parts, workers=workers, timeout=timeout)
    return join_labels([label_rows(oracle, rows.part(slice(0, 0)), parts), *labelled])


def label_batches(
    oracle: Oracle,
    batches: Iterable[Rows],
    *,
    parts: bool = True,
    workers: int = 1,
    timeout: float | None = None,
    start_method: str = "spawn",
) -> Iterator[Labels]:
    """The labels of each batch, in order, from one or several processes.

    An oracle that raises, takes longer than `timeout` seconds for a batch, or brings its process down
    is named together with the text that did it. Batches before that one have been given out by then, so
    whoever writes them keeps them. One worker without a timeout is this very process.
    """
    ask = functools.partial(_label_for_worker, parts=parts)
    if workers == 1 and timeout is None:
        for rows in batches:
            _check_lengths(rows)
            yield _label_here(oracle, rows, parts)
        return
    pool = WorkerPool(ask, oracle, workers, timeout, start_method)
    try:
        for outcome in pool.map(map(_check_lengths, batches)):
            if isinstance(outcome, tuple):
                failure, rows = outcome
                raise _blame(oracle, failure, rows, pool.ask_alone, timeout)
            yield outcome
    finally:
        pool.stop()


def label_rows(oracle: Oracle, rows: Rows, parts: bool = True) -> Labels:
    """Label one batch here and now."""
    if parts:
        judged = oracle.parts(rows.conditions, rows.texts)
        satisfied = hold_together(judged)
        kept = _join_rows(judged)
    else:  # a cut text is unsatisfied anyway: a slow oracle need not read it
        open_rows = np.flatnonzero(rows.finished).tolist()
        satisfied = np.zeros(len(rows), dtype=bool)
        satisfied[open_rows] = oracle(
            [rows.conditions[i] for i in open_rows], [rows.texts[i] for i in open_rows]
        )
        kept = None
    progress, stops = _read_prefixes(oracle, rows)
    return Labels(satisfied & rows.finished, kept, progress, stops)


def _read_prefixes(oracle: Oracle, rows: Rows) -> tuple[Ragged | None, Ragged | None]:
    if rows.prefixes is None:
        return None, None
    counts = np.array([len(prefixes) for prefixes in rows.prefixes], dtype=np.int64)
    conditions = [c for c, count in zip(rows.conditions, counts, strict=True) for _ in range(count)]
    bits, stops = oracle.read_prefixes(conditions, list(itertools.chain.from_iterable(rows.prefixes)))
    flat = _join_rows(bits)
    ends = _offsets(counts)
    return Ragged(flat.values, flat.offsets[ends]), Ragged(stops, ends)


def join_labels(batches: Sequence[Labels]) -> Labels:
    """The labels of several batches as one."""
    return Labels(
        np.concatenate([labels.satisfied for labels in batches]),
        _join_ragged([labels.parts for labels in batches]),
        _join_ragged([labels.progress for labels in batches]),
        _join_ragged([labels.stops for labels in batches]),
    )


def _join_ragged(pieces: Sequence[Ragged | None]) -> Ragged | None:
    present = [piece for piece in pieces if piece is not None]
    if not present:
        return None
    lengths = np.concatenate([np.diff(piece.offsets) for piece in present])
    return Ragged(np.concatenate([piece.values for piece in present]), _offsets(lengths))


def _join_rows(rows: Sequence[BoolArray]) -> Ragged:
    values = np.concatenate(rows) if rows else np.zeros(0, dtype=bool)
    return Ragged(values, _offsets(np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))))


def _offsets(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])


def _check_lengths(rows: Rows) -> Rows:
    lengths = {len(rows.conditions), len(rows.texts), len(rows.finished)}
    if len(lengths | ({len(rows.prefixes)} if rows.prefixes is not None else set())) != 1:
        raise InputError(
            "as many conditions, finished flags and prefix lists as texts",
            f"{len(rows.conditions)} conditions, {len(rows.texts)} texts, {len(rows.finished)} flags"
            + ("" if rows.prefixes is None else f", {len(rows.prefixes)} prefix lists"),
            "Give one of each for every text.",
        )
    return rows


def _label_for_worker(oracle: Oracle, rows: Rows, *, parts: bool) -> Labels:
    return label_rows(oracle, rows, parts)


def _label_here(oracle: Oracle, rows: Rows, parts: bool) -> Labels:
    """Label in this process; when the oracle raises, find the text."""
    try:
        return label_rows(oracle, rows, parts)
    except Exception as error:

        def ask_alone(row: Rows) -> Labels | Failure:
            try:
                return label_rows(oracle, row, parts)
            except Exception as error:
                return Failure.of(error)

        raise _blame(oracle, Failure.of(error), rows, ask_alone, None) from error


def _blame(
    oracle: Oracle,
    failure: Failure,
    rows: Rows,
    ask_alone: Callable[[Rows], Labels | Failure],
    timeout: float | None,
) -> OracleError:
    """The error that names the text: the batch is asked again, one text at a time."""
    culprit, alone = _find_culprit(rows, ask_alone, timeout)
    kept = "Batches before it are kept; mend the oracle and run the same command again."
    if culprit is None or alone is None:
        where = f"a batch of {len(rows)} texts that begins with {shorten(rows.texts[0])}"
        hint = "No single text explains it: use smaller batches or a longer timeout. " + kept
    else:
        failure = alone
        what, text = _find_prefix(rows.part(slice(culprit, culprit + 1)), ask_alone)
        # An oracle's own error may have named the text already.
        named = failure.detail.removesuffix(f" for the text {shorten(text)}")
        failure = failure._replace(detail=named)
        where = f"{what} {shorten(text)} under the condition {shorten(rows.conditions[culprit])}"
        hint = " ".join(part for part in (failure.hint, kept) if part)
    error = OracleError(f"an answer from the oracle {oracle.name}", f"{failure.detail} for {where}", hint)
    if failure.trace:
        error.add_note(failure.trace)
    return error


def _find_prefix(row: Rows, ask_alone: Callable[[Rows], Labels | Failure]) -> tuple[str, str]:
    """Whether it is a text itself that fails or, it being answered, the beginning of it that does."""
    alone = np.ones(1, dtype=bool)
    whole = Rows(row.conditions, row.texts, alone)
    if row.prefixes is not None and not isinstance(ask_alone(whole), Failure):
        for prefix in row.prefixes[0]:
            if isinstance(ask_alone(Rows(row.conditions, [prefix], alone)), Failure):
                return "the prefix", prefix
    return "the text", row.texts[0]


def _find_culprit(
    rows: Rows, ask_alone: Callable[[Rows], Labels | Failure], timeout: float | None
) -> tuple[int | None, Failure | None]:
    # A batch that is merely slow would take its whole time again: stop looking after a while.
    give_up = time.monotonic() + (float("inf") if timeout is None else max(10.0, 10 * timeout))
    for i in range(len(rows)):
        outcome = ask_alone(rows.part(slice(i, i + 1)))
        if isinstance(outcome, Failure):
            return i, outcome
        if time.monotonic() > give_up:
            break
    return None, None
