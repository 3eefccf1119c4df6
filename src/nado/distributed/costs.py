"""What a run costs: GPU-hours, hours and bytes for N prompts × K samples × L tokens, from measured speeds.

Three speeds were measured on one GPU with a base of 135 million parameters (`benchmarks/results`). They are
turned into floating-point operations a second, and another base is taken to reach the same: an extrapolation,
and marked as one. The tables of docs/scale.md are made here:

    python -m nado.distributed.costs benchmarks/results --write docs/scale.md
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nado.errors import InputError
from nado.storage import read_json

BEGIN, END = "<!-- made by nado.distributed.costs -->", "<!-- end -->"

GPUS = (1, 8, 64, 1000)
CORES = 16  # beside a GPU, that label
GUIDE = 4 * 12 * 768**2  # parameters of the measured guide's layers
PRODUCTS = 3  # of a position with the vocabulary, in a training step: log p, log R, and the sum's gradient
TEXTS = 1024  # texts a GPU trains on at a time, as measured
LARGEST_BATCH = 65_536  # texts a step beyond which more of them teach little; an assumption
TOKEN_BYTES = 16  # of a drawn token on disk, at most: id, log p, log proposal, text
STATE_BYTES = 0.25e12  # of kept states beside each GPU, in memory or on a local disk; an assumption
SHARD_BATCHES = 16


@dataclass(frozen=True)
class Base:
    """A base model: what its costs depend on."""

    name: str
    parameters: float
    vocabulary: int
    width: int
    batch: int  # texts drawn side by side
    gpus: int = 1  # that hold one copy of it in bfloat16, one at work at a time

    @property
    def read_work(self) -> float:
        """Operations to read, or to draw, a token."""
        return 2 * self.parameters

    @property
    def train_work(self) -> float:
        """Operations of a training step a token, once the base's state is there."""
        return 6 * GUIDE + PRODUCTS * 2 * self.vocabulary * self.width


MEASURED = Base("135M", 134_515_008, 49_152, 576, 8192)
BASES = (
    MEASURED,
    Base("7B", 6.74e9, 32_000, 4096, 1024),
    Base("70B", 70.6e9, 128_256, 8192, 1024, gpus=2),
)


@dataclass(frozen=True)
class Speeds:
    """What a GPU does in a second, in operations, and what a core labels in a second, in texts."""

    draw: float
    read: float
    train: float
    label: float

    @classmethod
    def measured(cls, results: Path) -> "Speeds":
        """From the files of the benchmarks."""
        drawing, training, labeling = (
            read_json(results / f"{name}.json")["metrics"] for name in ("drawing", "training", "labeling")
        )
        kept, unkept = training["tokens_per_s_h200"], training["tokens_per_s_h200_uncached"]
        if not kept > unkept:
            raise InputError(
                "training that is faster with kept states", f"{kept:g} and {unkept:g}", "Measure it again."
            )
        # What a step takes longer where states are not kept is reading the base.
        return cls(
            draw=drawing["tokens_per_s_h200"] * MEASURED.read_work,
            read=MEASURED.read_work / (1 / unkept - 1 / kept),
            train=kept * MEASURED.train_work,
            label=labeling["texts_per_s_1core"],
        )


@dataclass(frozen=True)
class Task:
    """How much is drawn, and how often training passes over it."""

    prompts: float
    samples: float
    tokens: float
    passes: float = 3.0

    @property
    def texts(self) -> float:
        """Texts in all."""
        return self.prompts * self.samples

    @property
    def tokens_in_all(self) -> float:
        """Tokens of all texts."""
        return self.texts * self.tokens


@dataclass(frozen=True)
class Costs:
    """What a task takes on one base; hours are GPU-hours, of labelling core-hours."""

    draw: float
    label: float
    read: float
    train: float
    sample_bytes: float
    state_bytes: float
    shards: int
    gpus_a_copy: int
    passes: float

    def hours(self, gpus: int) -> dict[str, float]:
        """Hours by the clock on so many GPUs, stage after stage; none where the base does not fit.

        The base is read once where its states can be kept, and for every pass of training where not.
        """
        copies = gpus // self.gpus_a_copy
        if copies == 0:
            return {}
        # Whole shards are handed out: the last round may leave copies idle.
        rounds = math.ceil(self.shards / copies)
        reads = 1 if self.state_bytes <= STATE_BYTES * gpus else self.passes
        training = min(gpus, LARGEST_BATCH // TEXTS)
        return {
            "draw": self.draw / self.gpus_a_copy * rounds / self.shards,
            "label": self.label / (CORES * gpus),
            "read": self.read * reads / (copies * self.gpus_a_copy),
            "train": self.train / training,
        }


def estimate_costs(base: Base, task: Task, speeds: Speeds) -> Costs:
    """The costs of a task; for any base but the measured one an extrapolation."""
    hour, tokens = 3600.0, task.tokens_in_all
    return Costs(
        draw=tokens * base.read_work * base.gpus / speeds.draw / hour,
        label=task.texts / speeds.label / hour,
        read=tokens * base.read_work / speeds.read / hour,
        train=tokens * task.passes * base.train_work / speeds.train / hour,
        sample_bytes=tokens * TOKEN_BYTES,
        state_bytes=tokens * base.width * 2,
        shards=math.ceil(task.texts / (SHARD_BATCHES * base.batch)),
        gpus_a_copy=base.gpus,
        passes=task.passes,
    )


# --- as text ------------------------------------------------------------------------------------------


def write_tables(speeds: Speeds, task: Task, large: Task) -> str:
    """Every table of the page."""
    parts = [
        "**Speeds of one GPU**\n\n" + _speeds_table(speeds),
        f"**{_describe(task)}: what it takes in all**\n\n" + _costs_table(speeds, task),
        f"**{_describe(task)}: hours by the clock, with the stage that takes the most (beyond one GPU "
        "extrapolated)**\n\n" + _hours_table(speeds, task),
        f"**{_describe(large)}**\n\n" + _costs_table(speeds, large) + "\n\n" + _hours_table(speeds, large),
    ]
    return "\n\n".join(parts)


def _speeds_table(speeds: Speeds) -> str:
    rows = []
    for base in BASES:
        draw = speeds.draw / base.read_work / base.gpus
        # A core labels while its GPU draws: the time an oracle may take before it is what is waited for.
        patience = CORES * 64 / draw
        rows.append(
            [
                _named(base),
                f"{draw:,.0f}",
                f"{speeds.read / base.read_work:,.0f}",
                f"{speeds.train / base.train_work:,.0f}",
                f"{draw * TOKEN_BYTES / 1e6:,.2g} MB/s",
                _seconds(patience),
            ]
        )
    heads = ("base", "drawn tokens/s", "read tokens/s", "trained tokens/s", "samples written")
    return _table([*heads, f"an oracle of 64-token texts may take, on {CORES} cores a GPU"], rows)


def _costs_table(speeds: Speeds, task: Task) -> str:
    rows = []
    for base in BASES:
        costs = estimate_costs(base, task, speeds)
        rows.append(
            [
                _named(base),
                *(_hours(value) for value in (costs.draw, costs.read, costs.train)),
                _hours(costs.label),
                _bytes(costs.sample_bytes),
                _bytes(costs.state_bytes),
            ]
        )
    heads = ["base", "drawing, GPU-h", "reading once, GPU-h", f"training, {task.passes:g} passes, GPU-h"]
    return _table([*heads, "keyword oracle, core-h", "samples", "states, if kept"], rows)


def _hours_table(speeds: Speeds, task: Task) -> str:
    rows = []
    for base in BASES:
        cells = []
        for gpus in GPUS:
            hours = estimate_costs(base, task, speeds).hours(gpus)
            slowest = max(hours, key=lambda name: hours[name]) if hours else ""
            cells.append(f"{_hours(sum(hours.values()))} ({slowest})" if hours else "does not fit")
        rows.append([_named(base), *cells])
    return _table(["base", *(f"{gpus:,} GPU{'s' * (gpus > 1)}" for gpus in GPUS)], rows)


def _named(base: Base) -> str:
    return f"{base.name}, measured" if base is MEASURED else f"{base.name}, extrapolated"


def _describe(task: Task) -> str:
    return f"{task.prompts:,.0f} prompts × {task.samples:,.0f} samples × {task.tokens:,.0f} tokens"


def _hours(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}" if value >= 0.01 else "< 0.01"


def _seconds(value: float) -> str:
    return f"{value * 1e3:,.2g} ms" if value < 1 else f"{value:,.2g} s"


def _bytes(value: float) -> str:
    for unit, size in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9)):
        if value >= size:
            return f"{value / size:,.3g} {unit}"
    return f"{value / 1e6:,.3g} MB"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


TASK, LARGE = Task(1e6, 32, 64), Task(1e9, 16, 128)


def update_page(page: str, results: Path) -> str:
    """A page with the tables between its two marks made again."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise InputError(f"a page with {BEGIN} and {END}", "one without", "Put both where the tables go.")
    return f"{before}{BEGIN}\n\n{write_tables(Speeds.measured(results), TASK, LARGE)}\n\n{END}{after}"


def main(arguments: list[str] | None = None) -> None:
    """Print the tables, for a task of one's own; or write those of the page again."""
    parser = argparse.ArgumentParser(prog="python -m nado.distributed.costs", description="What a run costs.")
    parser.add_argument("results", type=Path, help="the folder of the benchmarks' results")
    parser.add_argument("--prompts", type=float, default=TASK.prompts)
    parser.add_argument("--samples", type=float, default=TASK.samples, help="texts a prompt")
    parser.add_argument("--tokens", type=float, default=TASK.tokens, help="tokens a text")
    parser.add_argument("--passes", type=float, default=TASK.passes, help="of training over all texts")
    parser.add_argument("--write", type=Path, help="a page whose tables are made again")
    options: Any = parser.parse_args(arguments)
    if options.write is not None:
        page = update_page(options.write.read_text(encoding="utf-8"), options.results)
        options.write.write_text(page, encoding="utf-8")
        return
    task = Task(options.prompts, options.samples, options.tokens, options.passes)
    print(write_tables(Speeds.measured(options.results), task, LARGE))


if __name__ == "__main__":
    main()
