"""How far a long run is: what it tells its listener, and a bar on stderr that listens."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Progress:
    """What a progress bar wants to know. Tokens and seconds are those of this run, not of one resumed."""

    rows: int
    total_rows: int
    tokens: int
    seconds: float
    resumed_rows: int = 0  # of `rows`, those that were there when the run began

    @property
    def rows_per_second(self) -> float:
        """Samples made in a second of this run."""
        return (self.rows - self.resumed_rows) / max(self.seconds, 1e-9)

    @property
    def tokens_per_second(self) -> float:
        """Tokens made in a second of this run, padding not counted."""
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def seconds_left(self) -> float | None:
        """How long the rest takes at this speed; None before the first row."""
        speed = self.rows_per_second
        return (self.total_rows - self.rows) / speed if speed > 0 else None


Listener: TypeAlias = Callable[[Progress], None]


class Meter:
    """Counts rows and tokens and tells whoever listens, in the thread that counts."""

    def __init__(self, shards: Sequence[int], missing: Sequence[int], listener: Listener | None) -> None:
        """`shards` are the rows of each, `missing` those that this run is to make."""
        self._listener = listener
        self._total = sum(shards)
        self._resumed = self._total - sum(shards[index] for index in missing)
        self._rows, self._tokens = self._resumed, 0
        self._began = time.monotonic()

    def count(self, rows: int, tokens: int = 0) -> None:
        """Add what has just been done."""
        self._rows += rows
        self._tokens += tokens
        if self._listener is not None:
            seconds = time.monotonic() - self._began
            self._listener(Progress(self._rows, self._total, self._tokens, seconds, self._resumed))


@contextmanager
def progress_bar(description: str = "drawing", *, force: bool = False) -> Iterator[Listener]:
    """A bar on stderr with samples/s, tokens/s and time left; gives the `on_progress` to pass on.

    Silent when stderr is not a terminal, unless forced.
    """
    if not (force or sys.stderr.isatty()):
        yield lambda progress: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True, force_terminal=True if force else None)
    speed = TextColumn("{task.fields[speed]}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), speed)
    with Bar(*columns, console=console) as bar:
        task = bar.add_task(description, total=None, speed="")

        def show(now: Progress) -> None:
            bar.update(task, completed=now.rows, total=now.total_rows, speed=describe_speed(now))

        yield show


def describe_speed(progress: Progress) -> str:
    """Samples/s, tokens/s where tokens are made, and time left, as the bar shows them."""
    parts = [f"{progress.rows_per_second:,.0f} samples/s"]
    if progress.tokens:
        parts.append(f"{progress.tokens_per_second:,.0f} tokens/s")
    left = progress.seconds_left
    if left is not None:
        minutes, seconds = divmod(round(left), 60)
        hours, minutes = divmod(minutes, 60)
        parts.append(f"{hours}:{minutes:02d}:{seconds:02d} left")
    return " · ".join(parts)
