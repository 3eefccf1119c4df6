"""Labels of samples on disk: an oracle asked about every text, shard by shard, into `labels/`.

The rules are those of drawing: a shard of labels is there whole or not at all, a run that was killed goes on
where it stopped, and labels of another oracle, or of other samples, in the same folder are an error.
"""

import itertools
import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nado.errors import InputError, MismatchError, OracleError, require_at_least
from nado.labeling import Labels, Rows, join_labels, label, label_batches
from nado.language_model import LanguageModel
from nado.oracles.protocol import Oracle
from nado.progress import Listener, Meter
from nado.samples import (
    LABEL_SCHEMA,
    Folder,
    Ragged,
    Samples,
    labels_folder,
    read_samples,
    samples_digest,
    samples_folder,
)
from nado.storage import hold
from nado.versions import versions

_DECODED_TOKENS = 2**20  # tokens of prefixes made text of at once

_log = logging.getLogger(__name__)


def label_samples(
    folder: str | Path,
    oracle: Oracle,
    *,
    model: LanguageModel[Any] | None = None,
    prefixes: bool = False,
    parts: bool = True,
    workers: int = 1,
    timeout: float | None = None,
    batch_size: int = 1024,
    on_progress: Listener | None = None,
    quiet: bool = False,
) -> Samples:
    """Ask `oracle` about every sample in `folder` and keep its answers in `labels/` there.

    With `prefixes` it is also asked about every prefix of every text, for progress and stop labels;
    `model`, the one the samples were drawn from, makes text of them. Without `parts` texts that are not
    finished are not asked about at all, which a slow oracle is grateful for. When the oracle fails, shards
    that were labelled whole are kept and are not asked about again. `quiet` is for samples that are a part of
    more: that all answers are the same is then noted, but not said aloud.
    """
    require_at_least(1, batch_size=batch_size)
    source = samples_folder(folder)
    drawn = read_complete_manifest(source)
    decode = _prefix_reader(drawn, model) if prefixes else None
    target = labels_folder(folder)
    config = {
        "oracle": oracle.fingerprint,
        "samples": samples_digest(drawn),
        "prefixes": prefixes,
        "parts": parts,
    }
    with hold(target.path):
        manifest = target.open(config, len(drawn["shards"]))
        work = _Work(source, drawn, target.missing(manifest), decode, batch_size)
        meter = Meter([shard["rows"] for shard in drawn["shards"]], work.missing, on_progress)
        # One call for all shards: workers start once.
        answers = label_batches(oracle, work.batches(), parts=parts, workers=workers, timeout=timeout)
        try:
            with closing(cast(Generator[Labels, None, None], answers)):
                for index in work.missing:
                    labels = _collect(itertools.islice(answers, work.count(index)), meter)
                    target.write(index, to_table(work.take_rows(index), labels))
        except OracleError as error:
            raise OracleError(
                error.expected,
                error.found,
                "Shards before it are kept for the same oracle. A mended one is another: "
                f"delete {target.path} and label again.",
            ) from error
        if None in manifest["shards"]:
            finish_labels(target, manifest, oracle, quiet=quiet)
    return read_samples(folder)


@dataclass
class _Work:
    """The shards to be labelled, read as the oracle gets to them, and cut into batches."""

    source: Folder
    drawn: dict[str, Any]
    missing: list[int]
    decode: Callable[[Ragged], list[list[str]]] | None
    batch_size: int

    def __post_init__(self) -> None:
        self._rows: dict[int, pa.ChunkedArray] = {}

    def batches(self) -> Iterator[Rows]:
        """Every batch of every shard, in order. Workers may be some batches ahead of what is written."""
        for index in self.missing:
            samples = Samples(self.source.read_shard(index, self.drawn["shards"][index]["digest"]))
            self._rows[index] = samples.table["row"]
            for first in range(0, len(samples), self.batch_size):
                yield self._to_batch(Samples(samples.table.slice(first, self.batch_size)))

    def count(self, index: int) -> int:
        """How many batches a shard is."""
        return -(-int(self.drawn["shards"][index]["rows"]) // self.batch_size)

    def take_rows(self, index: int) -> pa.ChunkedArray:
        """The row numbers of a shard that has been labelled."""
        return self._rows.pop(index)

    def _to_batch(self, samples: Samples) -> Rows:
        prefixes = None if self.decode is None else self.decode(samples.ragged("tokens"))
        return Rows(
            samples.strings("condition"), samples.strings("text"), samples.array("finished"), prefixes
        )


def decode_prefixes(model: LanguageModel[Any], tokens: Ragged) -> list[list[str]]:
    """The text of every prefix y_<i of each row, i = 0 … T − 1, shortest first.

    Prefixes that rows share are made text of once.
    """
    numbers, places = _number_prefixes(tokens)
    texts: list[str] = []
    chunk: list[list[int]] = []
    size = 0
    for row, length in places:
        chunk.append(tokens.row(row)[:length].tolist())
        size += length
        if size >= _DECODED_TOKENS:
            texts += model.decode(chunk)
            chunk, size = [], 0
    texts += model.decode(chunk) if chunk else []
    return [[texts[number] for number in row] for row in numbers]


def _number_prefixes(tokens: Ragged) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """A number for each prefix of each row, equal for equal ones; and a (row, length) for each number."""
    children: dict[tuple[int, int], int] = {}  # (number of the prefix, next token) → number
    numbers: list[list[int]] = []
    places: list[tuple[int, int]] = [(0, 0)]
    for row in range(len(tokens.offsets) - 1):
        path = [0]
        for length, token in enumerate(tokens.row(row)[:-1].tolist(), start=1):
            number = children.setdefault((path[-1], token), len(places))
            if number == len(places):
                places.append((row, length))
            path.append(number)
        numbers.append(path)
    return numbers, places


def read_complete_manifest(source: Folder) -> dict[str, Any]:
    """The manifest of samples that are all there."""
    manifest = source.manifest()
    source.require_all(manifest)
    if None in manifest["shards"]:
        raise MismatchError(
            f"a complete run in {source.path}",
            "one whose last step was interrupted",
            "Run the command that drew it again, then label.",
        )
    return manifest


def _prefix_reader(
    drawn: dict[str, Any], model: LanguageModel[Any] | None
) -> Callable[[Ragged], list[list[str]]]:
    if model is None:
        raise InputError(
            "the model the samples were drawn from, because prefixes are asked for",
            "none",
            "Give model=, or leave prefixes out.",
        )
    fingerprint = drawn["config"].get("model")
    if model.fingerprint != fingerprint:
        raise MismatchError(
            f"the model the samples were drawn from, {fingerprint}",
            f"{model.fingerprint}",
            "Load that model with its own warpers, limit and completion.",
        )
    return lambda tokens: decode_prefixes(model, tokens)


def _collect(answers: Iterator[Labels], meter: Meter) -> Labels:
    """The labels of one shard."""
    batches = []
    for labels in answers:
        meter.count(len(labels))
        batches.append(labels)
    return join_labels(batches)


def relabel(
    samples: Samples, oracle: Oracle, *, model: LanguageModel[Any] | None = None, prefixes: bool = False
) -> Samples:
    """The same samples with another oracle's labels, in memory; arguments as for `label_samples`."""
    if prefixes and model is None:
        raise InputError("the model the samples were drawn from", "none", "Give model=.")
    texts = None if not prefixes or model is None else decode_prefixes(model, samples.ragged("tokens"))
    labels = label(
        oracle,
        samples.strings("condition"),
        samples.strings("text"),
        finished=samples.array("finished"),
        prefixes=texts,
    )
    answered = to_table(samples.table["row"], labels)
    table = samples.table
    for name in LABEL_SCHEMA.names:
        if name in table.column_names and name != "row":
            table = table.drop_columns([name])
    for name in LABEL_SCHEMA.names:
        if name != "row":
            table = table.append_column(LABEL_SCHEMA.field(name), answered[name])
    return replace(samples, table=table)


def to_table(rows: pa.ChunkedArray, labels: Labels) -> pa.Table:
    """Labels as a shard holds them."""
    columns = {name: _to_lists(getattr(labels, name), len(labels)) for name in ("parts", "stops", "progress")}
    return pa.table({"row": rows, "satisfied": labels.satisfied, **columns}).cast(LABEL_SCHEMA)


def _to_lists(column: Ragged | None, rows: int) -> pa.Array:
    if column is None:
        return pa.nulls(rows, pa.list_(pa.bool_()))
    return pa.ListArray.from_arrays(pa.array(column.offsets, pa.int32()), pa.array(column.values))


def finish_labels(target: Folder, manifest: dict[str, Any], oracle: Oracle, *, quiet: bool = False) -> None:
    """Say in the manifest what the oracle answered; one answer only is said aloud as well, unless `quiet`."""
    satisfied = target.read(manifest)["satisfied"].to_numpy()
    notes = one_sided(satisfied, oracle.name)
    for note in () if quiet else notes:
        _log.warning(note)
    target.close(
        manifest,
        versions=versions(),
        oracle=oracle.name,
        rows=len(satisfied),
        satisfied=int(satisfied.sum()),
        rate=float(satisfied.mean()),  # of the samples as they were drawn, unweighted
        notes=notes,
    )


def one_sided(satisfied: NDArray[np.bool_], name: str) -> list[str]:
    """What to say when a guide would have only one kind of text to learn from."""
    if satisfied.any() and not satisfied.all():
        return []
    return [
        f"{'every' if satisfied.any() else 'no'} text of {len(satisfied)} satisfies {name}: a guide needs "
        "both kinds. Audit the oracle, draw more samples, or draw from a proposal nearer to what is rare."
    ]
