"""Shards made by Ray's actors: each written whole where it belongs, by whichever actor gets to it.

Ray Data hands out the work, and starts an actor again that has died. Its shard is then made anew, from a
fresh start, and is the same. What is added here is a count of such deaths: a shard that takes its actor down
every time, for want of memory say, has to end in an error and not go round for ever.
"""

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from secrets import token_hex
from time import monotonic, sleep
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from nado.distributed.cluster import Place
from nado.distributed.errors import KEPT, EngineError, describe_failure, explain, to_error
from nado.errors import StorageError
from nado.samples import Folder
from nado.storage import remove_partial_files

_REPLY = pa.schema(
    [
        ("shard", pa.int64()),
        ("rows", pa.int64()),
        ("tokens", pa.int64()),
        ("node", pa.string()),
        ("failure", pa.string()),  # empty where there was none
    ]
)
_SEEN_S = 30.0  # how long a network's file system may take to show one machine's file to another


class Made(NamedTuple):
    """What was made of a shard."""

    rows: int
    tokens: int


@dataclass
class ShardTask(ABC):
    """What every actor is given: where shards go, and how one is made from its entry in the list of work."""

    target: Folder
    attempts: int  # how often a shard is begun at most

    @abstractmethod
    def make(self, entry: dict[str, Any]) -> pa.Table:
        """The rows of the shard `entry["shard"]`."""

    def run(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Make a shard and write it; returns a row of _REPLY, also when that failed."""
        index = int(entry["shard"])
        reply = {"shard": index, "rows": 0, "tokens": 0, "node": socket.gethostname(), "failure": ""}
        note = None
        try:
            note = self._note_attempt(index)
            return reply | self._make_and_write(index, entry)._asdict()
        except Exception as error:
            return reply | {"failure": describe_failure(error)}
        finally:
            if note is not None:
                note.unlink(missing_ok=True)

    def _make_and_write(self, index: int, entry: dict[str, Any]) -> Made:
        path = self.target.shard_path(index)
        if path.exists():  # whoever made it died before saying so
            return Made(pq.read_metadata(path).num_rows, 0)
        table = self.make(entry)
        self.target.write(index, table)
        tokens = (
            pc.sum(pc.list_value_length(table["tokens"])).as_py() if "tokens" in table.schema.names else 0
        )
        return Made(table.num_rows, tokens or 0)

    def _note_attempt(self, index: int) -> Path:
        """A note beside the shard, which stays there if this process dies; too many of them are an error.

        It looks like a file that was never finished, and is cleared away with those.
        """
        path = self.target.shard_path(index)
        earlier = sorted(path.parent.glob(f".{path.stem}-attempt-*.partial"))
        if len(earlier) >= self.attempts:
            nodes = ", ".join(dict.fromkeys(note.read_text(encoding="utf-8") for note in earlier))
            for note in earlier:
                note.unlink(missing_ok=True)
            raise EngineError(
                f"an actor that lives until {path.name} is made",
                f"{len(earlier)} that died over it on {nodes}, most likely for want of memory",
                "Lower batch_size, or give each actor more cores so that fewer share a node.",
            )
        note = path.with_name(f".{path.stem}-attempt-{token_hex(4)}.partial")
        note.write_text(socket.gethostname(), encoding="utf-8")
        return note


class Actor:
    """What Ray Data starts and calls: one entry in, one reply out."""

    def __init__(self, task: ShardTask) -> None:
        self._task = task

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Make the shard of the batch's only row."""
        return pa.Table.from_pylist([self._task.run(entry) for entry in batch.to_pylist()], _REPLY)


def make_shards(
    task: ShardTask, entries: Sequence[dict[str, Any]], place: Place, on_made: Callable[[Made], None]
) -> None:
    """Let actors make the shards of all entries; the first failure ends it.

    Shards are told of as they are finished, in whatever order that is.
    """
    for reply in _replies(task, entries, place):
        if reply["failure"]:
            raise to_error(reply["failure"], f"shard {reply['shard']}, on {reply['node']}")
        _require_seen(task.target.shard_path(reply["shard"]), reply["node"])
        on_made(Made(reply["rows"], reply["tokens"]))
    remove_partial_files(task.target.path)  # what actors that died had begun


def _replies(task: ShardTask, entries: Sequence[dict[str, Any]], place: Place) -> Iterator[dict[str, Any]]:
    data = import_module("ray.data")
    context = data.DataContext.get_current()
    shown, context.enable_progress_bars = context.enable_progress_bars, False
    try:
        # One block an entry, so that one task is one shard.
        source = data.from_arrow([pa.Table.from_pylist([entry]) for entry in entries])
        replies = source.map_batches(
            Actor,
            fn_constructor_args=(task,),
            batch_size=1,
            batch_format="pyarrow",
            # A second entry waiting for a busy actor would wait there while another is idle.
            compute=data.ActorPoolStrategy(size=place.actors, max_tasks_in_flight_per_actor=1),
            num_cpus=place.cpus,
            num_gpus=place.gpus or None,
        )
        batches = iter(replies.iter_batches(batch_size=1, batch_format="pyarrow", prefetch_batches=0))
        with closing(batches):
            for batch in batches:
                yield from batch.to_pylist()
    except (import_module("ray.exceptions").RayError, OSError, ValueError) as error:
        raise EngineError(
            "a cluster that carries its work through",
            f"the error: {explain(error)}",
            KEPT,
        ) from error
    finally:
        context.enable_progress_bars = shown


def _require_seen(path: Path, node: str) -> None:
    """A shard that an actor says is written has to be visible here: the folder must be everybody's."""
    give_up = monotonic() + _SEEN_S
    while not path.exists():
        if monotonic() > give_up:
            raise StorageError(
                f"the file {path}, which an actor on {node} has written",
                "none on this machine",
                "Choose a folder on a file system that all nodes share.",
            )
        sleep(0.2)
