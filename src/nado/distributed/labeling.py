"""Labelling on a cluster: the same labels as `nado.sample_labels.label_samples`, shard by shard.

Actors read the samples' shards and write those of the labels. Prefixes need the base's tokenizer only, never
its weights: an actor that labels takes a core, not a GPU.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nado.distributed.cluster import connect, find_place
from nado.distributed.shards import Made, ShardTask, make_shards
from nado.errors import MismatchError, OracleError, require_at_least
from nado.labeling import Rows, join_labels, label_batches
from nado.oracles.protocol import Oracle
from nado.progress import Listener, Meter
from nado.sample_labels import decode_prefixes, finish_labels, read_complete_manifest, to_table
from nado.samples import Folder, Samples, labels_folder, samples_digest, samples_folder
from nado.storage import hold
from nado.study.sections import DistributedConfig

_COMPARED = 64  # texts of a shard that the decoder has to reproduce


class Decoder(Protocol):
    """What makes text of tokens."""

    def decode(self, tokens: Any) -> list[str]:
        """The text of each row."""
        ...


LoadOracle: TypeAlias = Callable[[], Oracle]
LoadDecoder: TypeAlias = Callable[[], Decoder]


def label_on_cluster(
    folder: str | Path,
    load: LoadOracle,
    cluster: DistributedConfig,
    *,
    load_decoder: LoadDecoder | None = None,
    parts: bool = True,
    timeout: float | None = None,
    batch_size: int = 1024,
    on_progress: Listener | None = None,
) -> dict[str, Any]:
    """Label as `nado.sample_labels.label_samples` does; returns how many texts, and the share satisfied.

    Actors `load` the oracle. With `load_decoder` every prefix is asked about too. When the oracle fails on
    one node, shards that were labelled whole are kept.
    """
    require_at_least(1, batch_size=batch_size)
    oracle = load()
    source, target = samples_folder(Path(folder).resolve()), labels_folder(Path(folder).resolve())
    drawn = read_complete_manifest(source)
    config = {
        "oracle": oracle.fingerprint,
        "samples": samples_digest(drawn),
        "prefixes": load_decoder is not None,
        "parts": parts,
    }
    with hold(target.path), connect(cluster) as ray:
        manifest = target.open(config, len(drawn["shards"]))
        missing = target.missing(manifest)
        meter = Meter([shard["rows"] for shard in drawn["shards"]], missing, on_progress)
        if missing:
            asking = Asking(oracle.fingerprint, parts, timeout, batch_size)
            task = LabelTask(target, cluster.attempts, source, load, load_decoder, asking)
            entries = [{"shard": index, "digest": drawn["shards"][index]["digest"]} for index in missing]
            place = find_place(ray, cluster, len(missing), gpus=0.0)
            make_shards(task, entries, place, _counting(meter))
        if None in manifest["shards"]:
            finish_labels(target, manifest, oracle)
    return _summarise(target, len(drawn["shards"]))


@dataclass(frozen=True)
class Asking:
    """How the oracle is asked, and which oracle it must be."""

    fingerprint: str
    parts: bool
    timeout: float | None
    batch_size: int


@dataclass
class LabelTask(ShardTask):
    """Labels shards with an oracle that is loaded when the first of them is asked for."""

    source: Folder
    load: LoadOracle
    load_decoder: LoadDecoder | None
    asking: Asking

    @cached_property
    def oracle(self) -> Oracle:
        """The oracle, or an error if this node has another one."""
        oracle = self.load()
        if oracle.fingerprint != self.asking.fingerprint:
            raise MismatchError(
                f"the same oracle {oracle.name} on every node, {self.asking.fingerprint}",
                f"{oracle.fingerprint}",
                "Give all nodes the same files and the same versions of what the oracle imports.",
            )
        return oracle

    @cached_property
    def decoder(self) -> Decoder | None:
        """What makes text of prefixes, where they are asked for."""
        return None if self.load_decoder is None else self.load_decoder()

    def make(self, entry: dict[str, Any]) -> pa.Table:
        """Label one shard."""
        samples = Samples(self.source.read_shard(entry["shard"], entry["digest"]))
        batches, asking = self._batches(samples), self.asking
        try:
            answers = list(label_batches(self.oracle, batches, parts=asking.parts, timeout=asking.timeout))
        except OracleError as error:
            hint = f"Mend that node. A mended oracle is another: for one, delete {self.target.path} first."
            raise OracleError(error.expected, error.found, hint) from error
        return to_table(samples.table["row"], join_labels(answers))

    def _batches(self, samples: Samples) -> Iterator[Rows]:
        if self.decoder is not None:
            _require_same_texts(self.decoder, samples)
        for first in range(0, len(samples), self.asking.batch_size):
            part = Samples(samples.table.slice(first, self.asking.batch_size))
            tokens = None if self.decoder is None else part.ragged("tokens")
            prefixes = None if tokens is None else decode_prefixes(self.decoder, tokens)  # type: ignore[arg-type]
            yield Rows(part.strings("condition"), part.strings("text"), part.array("finished"), prefixes)


def _require_same_texts(decoder: Decoder, samples: Samples) -> None:
    """A decoder has no weights to know the samples' own by: it has to write the texts that are there."""
    first = Samples(samples.table.slice(0, _COMPARED))
    decoded = decoder.decode(first.table["tokens"].to_pylist())
    for recorded, made in zip(first.strings("text"), decoded, strict=True):
        if recorded != made:
            raise MismatchError(
                f"the tokenizer of the base the samples were drawn from, which wrote {recorded[:60]!r}",
                f"{made[:60]!r}",
                "Name that base in [base].",
            )


def _counting(meter: Meter) -> Callable[[Made], None]:
    return lambda made: meter.count(made.rows)


def _summarise(target: Folder, shards: int) -> dict[str, Any]:
    """How many texts there are, and the share of satisfied ones."""
    satisfied = [
        pq.read_table(target.shard_path(index), columns=["satisfied"])["satisfied"].to_numpy()
        for index in range(shards)
    ]
    return {"texts": sum(map(len, satisfied)), "satisfied": float(np.concatenate(satisfied).mean())}
