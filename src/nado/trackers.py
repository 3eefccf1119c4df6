"""Where a training run can be watched: TensorBoard, Weights & Biases, and a bar on stderr."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from nado.errors import InputError, MissingPackageError
from nado.storage import digest_json

StepListener: TypeAlias = Callable[[int, dict[str, float]], None]

TRACKERS = ("tensorboard", "wandb")


def require_trackers(names: Sequence[str]) -> None:
    """Refuse an unknown tracker, or one whose package is not there: accelerate would just leave it out."""
    for name in names:
        if name not in TRACKERS:
            raise InputError(
                f"trackers out of {', '.join(TRACKERS)}", f"{name!r}", "Name one of these, or none."
            )
        if find_spec(name) is None:
            raise MissingPackageError(name, "trackers", f"the tracker {name}")


@contextmanager
def open_trackers(
    names: Sequence[str], folder: str | Path | None, config: dict[str, Any], done: int
) -> Iterator[StepListener]:
    """Log into `folder` with accelerate's trackers; gives the function to call with every step's row.

    `done` steps were logged before an interruption: what was logged after them is replaced.
    """
    with ExitStack() as stack:
        trackers = []
        for name in names:
            assert folder is not None
            tracker = _make(name, Path(folder), done)
            tracker.start()
            stack.callback(tracker.finish)
            if done == 0:
                tracker.store_init_configuration({key: _plain(value) for key, value in config.items()})
            trackers.append(tracker)

        def show(step: int, row: dict[str, float]) -> None:
            for each in trackers:
                each.log({name: value for name, value in row.items() if name != "step"}, step=step)

        yield show


def _make(name: str, folder: Path, done: int) -> Any:
    from accelerate.tracking import TensorBoardTracker, WandBTracker

    folder.mkdir(parents=True, exist_ok=True)
    if name == "tensorboard":
        return TensorBoardTracker("tensorboard", logging_dir=str(folder), purge_step=done + 1)
    # The same folder is the same run, however often it is taken up again.
    run = digest_json(str(folder.resolve()))[:16]
    return WandBTracker("nado", dir=str(folder), name=folder.name, id=run, resume="allow")


def _plain(value: Any) -> bool | int | float | str:
    return value if isinstance(value, bool | int | float | str) else str(value)


@contextmanager
def training_bar(steps: int, *, force: bool = False) -> Iterator[StepListener]:
    """A bar on stderr with the losses and time left; gives the `on_step` to pass to `train`.

    Silent when stderr is not a terminal, unless forced.
    """
    if not (force or sys.stderr.isatty()):
        yield lambda step, row: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, force_terminal=True if force else None)
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[losses]}"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("training", total=steps, losses="")
        seen: dict[str, float] = {}

        def show(step: int, row: dict[str, float]) -> None:
            seen.update(row)  # evaluations come seldom: the last one stays
            bar.update(task, completed=step, losses=describe_losses(seen))

        yield show


def describe_losses(row: dict[str, float]) -> str:
    """The step's loss, the last held-out one and the last guided satisfaction, as the bar shows them."""
    parts = [f"loss {row['loss']:.4f}"]
    if "held_out_loss" in row:
        parts.append(f"held out {row['held_out_loss']:.4f}")
    parts += [f"{name.replace('_', ' ')} {row[name]:.3f}" for name in row if name.startswith("guided_")]
    return " · ".join(parts)
