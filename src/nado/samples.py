"""Samples: token sequences with log p and log proposal, token by token, and their labels.

One Arrow table in memory, Parquet shards on disk. A folder of samples is

    manifest.json           what was drawn: config, seed, versions, fingerprints, digests of the shards
    shard-00000.parquet     rows [0, shard_rows), and so on; each written whole or not at all
    labels/                 the same for labels, once an oracle has been asked

so that drawing and labelling can each be stopped and taken up again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from nado.errors import InputError, MismatchError, StorageError
from nado.storage import (
    digest_file,
    digest_json,
    read_json,
    remove_partial_files,
    write_atomically,
    write_json,
)

SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("prompt", pa.string()),
        ("condition", pa.string()),
        ("tokens", pa.list_(pa.int32())),  # EOS included when the text ended itself
        ("text", pa.string()),
        ("log_p", pa.list_(pa.float32())),
        ("log_proposal", pa.list_(pa.float32())),
        ("finished", pa.bool_()),  # by the completion mode; an unfinished text is unsatisfied
        ("proposal", pa.string()),
        ("prefix_length", pa.int32()),  # labels are unbiased from here on without any weight
    ]
)
LABEL_SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("satisfied", pa.bool_()),
        ("parts", pa.list_(pa.bool_())),  # a conjunction's members, as the condition orders them
    ]
)
FORMAT = 1


class Ragged(NamedTuple):
    """Rows of unequal length as one flat array: row i is values[offsets[i]:offsets[i + 1]]."""

    values: NDArray[Any]
    offsets: NDArray[np.int64]

    def row(self, index: int) -> NDArray[Any]:
        """One row."""
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def sums(self) -> NDArray[np.float64]:
        """The sum of every row, in float64; 0 for an empty one."""
        running = np.concatenate([[0.0], np.cumsum(self.values, dtype=np.float64)])
        sums: NDArray[np.float64] = running[self.offsets[1:]] - running[self.offsets[:-1]]
        return sums


@dataclass(frozen=True)
class Samples:
    """Columns of SCHEMA, and those of LABEL_SCHEMA once labelled."""

    table: pa.Table

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def strings(self, name: str) -> list[str]:
        """A text column: prompt, condition, text or proposal."""
        strings: list[str] = self.table[name].to_pylist()
        return strings

    def array(self, name: str) -> NDArray[Any]:
        """A column of one number or boolean a row: row, finished, prefix_length, satisfied."""
        self._require(name)
        array: NDArray[Any] = self.table[name].combine_chunks().to_numpy(zero_copy_only=False)
        return array

    def ragged(self, name: str) -> Ragged:
        """A column of lists: tokens, log_p, log_proposal, parts."""
        self._require(name)
        column = self.table[name].combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
        offsets = column.offsets.to_numpy().astype(np.int64)
        values = column.values.to_numpy(zero_copy_only=False)[offsets[0] : offsets[-1]]
        return Ragged(values, offsets - offsets[0])

    @property
    def labelled(self) -> bool:
        """Whether an oracle has been asked about every row."""
        return "satisfied" in self.table.column_names

    def log_weights(self) -> NDArray[np.float64]:
        """log w = log p − log proposal of every whole sequence."""
        log_p, log_proposal = self.ragged("log_p"), self.ragged("log_proposal")
        difference = log_p.values.astype(np.float64) - log_proposal.values.astype(np.float64)
        return Ragged(difference, log_p.offsets).sums()

    def _require(self, name: str) -> None:
        if name not in self.table.column_names:
            raise InputError(
                f"samples with the column {name}",
                f"the columns {', '.join(self.table.column_names)}",
                "Label them first: nado label."
                if name in LABEL_SCHEMA.names
                else "Draw them with nado draw.",
            )


class Folder:
    """A folder of shards and its manifest: created, resumed, read and checked here alone."""

    def __init__(self, path: str | Path, schema: pa.Schema, stem: str = "shard") -> None:
        self.path = Path(path)
        self.schema = schema
        self.stem = stem

    @property
    def manifest_path(self) -> Path:
        """Where the manifest lies."""
        return self.path / "manifest.json"

    def shard_path(self, index: int) -> Path:
        """Where a shard lies, or will."""
        return self.path / f"{self.stem}-{index:05d}.parquet"

    def open(self, config: dict[str, Any], shards: int) -> dict[str, Any]:
        """Begin a run, or take up one that was begun with the same config; returns the manifest."""
        digest = digest_json(config)
        if self.manifest_path.exists():
            manifest = self.manifest()
            if manifest["config_digest"] != digest:
                raise MismatchError(
                    f"{self.path} to hold this same run",
                    f"another one, which differs in {_differences(manifest['config'], config)}",
                    "Choose another folder, or delete this one.",
                )
            remove_partial_files(self.path)
            return manifest
        if self.path.exists() and any(self.path.glob(f"{self.stem}-*.parquet")):
            raise MismatchError(
                f"a new or resumable folder at {self.path}",
                "shards without a manifest",
                "Choose another folder, or delete this one.",
            )
        manifest = {"format": FORMAT, "config": config, "config_digest": digest, "shards": [None] * shards}
        write_json(self.manifest_path, manifest)
        return manifest

    def manifest(self) -> dict[str, Any]:
        """The manifest, checked for this version's format."""
        manifest = read_json(self.manifest_path)
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise StorageError(
                f"a manifest of format {FORMAT} in {self.path}",
                "another format",
                "Use the nado that wrote it.",
            )
        return manifest

    def missing(self, manifest: dict[str, Any]) -> list[int]:
        """Shards still to be written. One that is on disk is complete: shards are moved into place whole."""
        return [index for index in range(len(manifest["shards"])) if not self.shard_path(index).exists()]

    def write(self, index: int, table: pa.Table) -> None:
        """Write one shard, whole or not at all."""
        table = table.cast(self.schema)
        write_atomically(self.shard_path(index), lambda path: pq.write_table(table, path, compression="zstd"))

    def close(self, manifest: dict[str, Any], **summary: Any) -> dict[str, Any]:
        """Record the digests of all shards: the run is complete."""
        shards = []
        for index in range(len(manifest["shards"])):
            rows = self.read_shard(index).num_rows
            shards.append({"rows": rows, "digest": digest_file(self.shard_path(index))})
        complete = {**manifest, "shards": shards, **summary}
        write_json(self.manifest_path, complete)
        return complete

    def read_shard(self, index: int) -> pa.Table:
        """One shard, or an error that names it."""
        path = self.shard_path(index)
        try:
            table = pq.read_table(path)
        except (OSError, pa.ArrowInvalid) as error:
            raise StorageError(
                f"a readable shard {path}",
                f"the error: {error}",
                "Delete that file and run the same command again: only this shard is made anew.",
            ) from error
        if table.schema.names != self.schema.names:
            raise StorageError(
                f"the columns {', '.join(self.schema.names)} in {path}",
                f"{', '.join(table.schema.names)}",
                "This file was not written by nado: move it away.",
            )
        return table

    def read(self) -> pa.Table:
        """All shards of a complete run."""
        manifest = self.manifest()
        missing = self.missing(manifest)
        if missing:
            raise StorageError(
                f"all {len(manifest['shards'])} shards in {self.path}",
                f"{len(missing)} missing, the first {self.shard_path(missing[0]).name}",
                "Run the command that began it again: it goes on where it stopped.",
            )
        return pa.concat_tables([self.read_shard(index) for index in range(len(manifest["shards"]))])


def samples_folder(path: str | Path) -> Folder:
    """The folder of drawn samples at `path`."""
    return Folder(path, SCHEMA)


def labels_folder(path: str | Path) -> Folder:
    """The folder of labels inside the samples folder at `path`."""
    return Folder(Path(path) / "labels", LABEL_SCHEMA)


def read_samples(path: str | Path) -> Samples:
    """Samples from a folder, with their labels where there are any."""
    table = samples_folder(path).read()
    labels = labels_folder(path)
    if labels.manifest_path.exists():
        labelled = labels.read()
        if not labelled["row"].equals(table["row"]):
            raise MismatchError(
                f"labels for the rows of {path}",
                "labels of other rows",
                f"Delete {labels.path} and label again.",
            )
        for name in LABEL_SCHEMA.names[1:]:
            table = table.append_column(LABEL_SCHEMA.field(name), labelled[name])
    return Samples(table)


def join_samples(several: Iterable[Samples]) -> Samples:
    """One Samples of several, for instance of importance rounds."""
    return Samples(pa.concat_tables([samples.table for samples in several]))


def _differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    keys: Sequence[str] = sorted({*old, *new})
    changed = [key for key in keys if old.get(key) != new.get(key)]
    return ", ".join(f"{key} ({_short(old.get(key))} there, {_short(new.get(key))} here)" for key in changed)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "…"
