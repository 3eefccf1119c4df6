"""Samples: token sequences with log p and log proposal, token by token, and their labels.

One Arrow table in memory, Parquet shards on disk. A folder of samples is

    manifest.json           what was drawn: config, seed, versions, fingerprints, digests of the shards
    shard-00000.parquet     rows [0, shard_rows), and so on; each written whole or not at all
    labels/                 the same for labels, once an oracle has been asked

so that drawing and labelling can each be stopped and taken up again.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from nado.errors import CoverageError, InputError, MismatchError, StorageError
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
        # Null where nobody knows what the text was drawn from (imported samples): it then has no weight.
        ("log_proposal", pa.list_(pa.float32())),
        ("finished", pa.bool_()),  # by the completion mode; an unfinished text is unsatisfied
        ("proposal", pa.string()),
        # How many tokens, from the first, are not known to be p's own. After them p wrote: a label is an
        # unbiased sample of R at every prefix from this length on, with no weight at all. 0 for p itself.
        ("prefix_length", pa.int32()),
    ]
)
LABEL_SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("satisfied", pa.bool_()),
        ("parts", pa.list_(pa.bool_())),  # a conjunction's members, as the condition orders them; or null
        # One a prefix y_<i, i = 0 … T − 1, where T counts tokens, EOS included; null when not asked for.
        ("stops", pa.list_(pa.bool_())),  # would the oracle hold if the text ended here?
        ("progress", pa.list_(pa.bool_())),  # the bits of all these prefixes, one prefix after the other
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
        sums = np.zeros(len(self.offsets) - 1)
        filled = np.diff(self.offsets) > 0
        # Row by row, not as differences of one running sum: an infinite row must not spoil the others.
        if filled.any():
            sums[filled] = np.add.reduceat(self.values.astype(np.float64), self.offsets[:-1][filled])
        return sums


@dataclass(frozen=True)
class Samples:
    """Columns of SCHEMA, and those of LABEL_SCHEMA once labelled.

    `uncorrected` marks samples of a proposal that does not cover p, drawn for an ablation: they are trained
    on as if p had drawn them. Without `covers` they are of such a proposal too, and are not trained on.
    """

    table: pa.Table
    uncorrected: bool = False
    covers: bool = True

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def filter(self, kept: NDArray[np.bool_]) -> "Samples":
        """The rows where `kept` is true."""
        return replace(self, table=self.table.filter(pa.array(kept)))

    def strings(self, name: str) -> list[str]:
        """A text column: prompt, condition, text or proposal."""
        self._require(name)
        strings: list[str] = self.table[name].to_pylist()
        return strings

    def array(self, name: str) -> NDArray[Any]:
        """A column of one number or boolean a row: row, finished, prefix_length, satisfied."""
        self._require(name)
        array: NDArray[Any] = self.table[name].to_numpy()
        return array

    def ragged(self, name: str) -> Ragged:
        """A column of lists: tokens, log_p, log_proposal, parts, stops, progress."""
        self._require(name)
        self._require_known(name)
        column = self.table[name]
        # Chunk by chunk: one Arrow array of lists ends at 2³¹ values.
        values = [np.zeros(0, column.type.value_type.to_pandas_dtype())]
        lengths = [np.zeros(1, np.int64)]
        for chunk in column.chunks:
            values.append(chunk.flatten().to_numpy(zero_copy_only=False))
            lengths.append(np.diff(chunk.offsets.to_numpy()).astype(np.int64))
        return Ragged(np.concatenate(values), np.cumsum(np.concatenate(lengths)))

    @property
    def labelled(self) -> bool:
        """Whether an oracle has been asked about every row."""
        return "satisfied" in self.table.column_names

    def log_weights(self) -> NDArray[np.float64]:
        """log w = log p − log proposal of every whole sequence.

        Refused where it would be wrong: for samples of a proposal that does not cover p, and for imported
        ones whose proposal nobody recorded.
        """
        self.require_covering()
        if self.uncorrected:
            _refuse_weights("samples stamped uncorrected, drawn for an ablation")
        log_p, log_proposal = self.ragged("log_p"), self.ragged("log_proposal")
        difference = log_p.values.astype(np.float64) - log_proposal.values.astype(np.float64)
        return Ragged(difference, log_p.offsets).sums()

    def require_covering(self) -> None:
        """Refuse samples whose weights would be wrong, though nobody asked for an ablation."""
        if not self.covers:
            _refuse_weights(
                "samples of stops of a dial: too little of p, or tokens left out as not plausible"
            )

    def _require(self, name: str) -> None:
        if name not in self.table.column_names:
            raise InputError(
                f"samples with the column {name}",
                f"the columns {', '.join(self.table.column_names)}",
                "Label them first: nado label."
                if name in LABEL_SCHEMA.names
                else "Draw them with nado draw.",
            )

    def _require_known(self, name: str) -> None:
        unknown = self.table[name].null_count
        if unknown:
            raise InputError(
                f"{name} of every sample", f"{unknown} of {len(self)} without it", _HOW_TO_KNOW[name]
            )


_BY_LABELLING = "Label the samples with {}."
_HOW_TO_KNOW = {
    "log_proposal": "They were imported, and what they were drawn from is unknown, so they have no weights: "
    "train without weights, or import them with drawn_from_p=True if p itself wrote them.",
    "parts": _BY_LABELLING.format("parts"),
    "stops": _BY_LABELLING.format("prefixes"),
    "progress": _BY_LABELLING.format("prefixes"),
}


class Folder:
    """A folder of shards and its manifest: created, resumed, read and checked here alone.

    A shard is on disk whole or not at all, so its file is all that says it is done; the manifest gets the
    digests when every shard is there. One process writes at a time (`nado.storage.hold`).
    """

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
        """Begin a run, or take up one that was begun with the same config; returns the manifest.

        In it a shard that is still to be written is None, and so is every shard of an unfinished run.
        """
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
            for index in self.missing(manifest):
                manifest["shards"][index] = None
            return manifest
        if self.path.exists() and any(self.path.glob(f"{self.stem}-*.parquet")):
            raise MismatchError(
                f"a new or resumable folder at {self.path}",
                "shards without a manifest",
                "Choose another folder, or delete this one.",
            )
        if self.path.exists():
            remove_partial_files(self.path)  # a manifest that was never finished
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
        lost = [name for name in ("config", "config_digest", "shards") if name not in manifest]
        if lost:
            raise StorageError(
                f"the fields config, config_digest and shards in {self.manifest_path}",
                f"no {' and no '.join(lost)}",
                "Restore the file, or start in a new folder.",
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
            path = self.shard_path(index)
            with _blaming(path):
                shards.append({"rows": pq.read_metadata(path).num_rows, "digest": digest_file(path)})
        complete = {**manifest, "shards": shards, **summary}
        write_json(self.manifest_path, complete)
        return complete

    def read_shard(self, index: int, digest: str | None = None) -> pa.Table:
        """One shard, or an error that names it; with a digest, as it was when that was taken."""
        path = self.shard_path(index)
        with _blaming(path):
            if digest is not None and digest_file(path) != digest:
                raise OSError("its digest is not the one in the manifest")
            table = pq.read_table(path)
        if table.schema.names != self.schema.names:
            raise StorageError(
                f"the columns {', '.join(self.schema.names)} in {path}",
                f"{', '.join(table.schema.names)}",
                "This file was not written by nado: move it away.",
            )
        return table

    def read(self, manifest: dict[str, Any] | None = None) -> pa.Table:
        """All shards of a run, checked against the digests in its manifest as far as there are any."""
        manifest = self.manifest() if manifest is None else manifest
        self.require_all(manifest)
        digests = [shard and shard["digest"] for shard in manifest["shards"]]
        return pa.concat_tables([self.read_shard(index, digest) for index, digest in enumerate(digests)])

    def require_all(self, manifest: dict[str, Any]) -> None:
        """Refuse a run that lacks shards."""
        missing = self.missing(manifest)
        if missing:
            raise StorageError(
                f"all {len(manifest['shards'])} shards in {self.path}",
                f"{len(missing)} missing, the first {self.shard_path(missing[0]).name}",
                "Run the command that began it again: it goes on where it stopped.",
            )


@contextmanager
def _blaming(path: Path) -> Iterator[None]:
    """Errors of reading, as ones that name the shard."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise StorageError(
            f"a readable shard {path}",
            f"the error: {error}",
            "Delete that file and run the same command again: only this shard is made anew.",
        ) from error


def samples_folder(path: str | Path) -> Folder:
    """The folder of drawn samples at `path`."""
    return Folder(path, SCHEMA)


def labels_folder(path: str | Path) -> Folder:
    """The folder of labels inside the samples folder at `path`."""
    return Folder(Path(path) / "labels", LABEL_SCHEMA)


def read_samples(path: str | Path, *, labels: bool = True) -> Samples:
    """Samples from a folder, with their labels where there are any and they are asked for."""
    folder = samples_folder(path)
    manifest = folder.manifest()
    table = folder.read(manifest)
    if labels and labels_folder(path).manifest_path.exists():
        table = _join_labels(table, labels_folder(path), samples_digest(manifest))
    return Samples(table, is_uncorrected(manifest))


def samples_digest(manifest: dict[str, Any]) -> str:
    """A digest of the samples of a complete run, to which labels are tied."""
    return digest_json([shard and shard["digest"] for shard in manifest["shards"]])


def is_uncorrected(manifest: dict[str, Any]) -> bool:
    """Whether the samples of this manifest are stamped uncorrected."""
    return bool(manifest["config"].get("proposal", {}).get("uncorrected", False))


def _refuse_weights(found: str) -> NoReturn:
    raise CoverageError(
        "samples of a proposal that can write everything p can",
        found,
        "Draw them from a proposal that covers p to use weights.",
    )


def join_samples(several: Iterable[Samples]) -> Samples:
    """One Samples of several, for instance of importance rounds; all labelled, or none."""
    samples = list(several)
    if len({each.labelled for each in samples}) != 1:
        raise InputError(
            "samples that are all labelled, or all not",
            f"{sum(each.labelled for each in samples)} of {len(samples)} labelled",
            "Label the rest first: nado label.",
        )
    table = pa.concat_tables([each.table for each in samples])
    return Samples(table, any(each.uncorrected for each in samples), all(each.covers for each in samples))


def _join_labels(table: pa.Table, folder: Folder, digest: str) -> pa.Table:
    manifest = folder.manifest()
    labels = folder.read(manifest)
    if manifest["config"].get("samples") != digest or not labels["row"].equals(table["row"]):
        raise MismatchError(
            f"labels of the samples in {folder.path.parent}",
            "labels of other samples",
            f"Delete {folder.path} and label again.",
        )
    for name in LABEL_SCHEMA.names[1:]:
        table = table.append_column(LABEL_SCHEMA.field(name), labels[name])
    return table


def _differences(old: Any, new: Any) -> str:
    there, here = dict(_leaves(old)), dict(_leaves(new))
    changed = [key for key in sorted({*there, *here}) if there.get(key) != here.get(key)]
    return ", ".join(
        f"{key} ({_short(there.get(key, 'nothing'))} there, {_short(here.get(key, 'nothing'))} here)"
        for key in changed
    )


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every value inside nested dicts and lists, with the path to it: `proposal.components.0.share`."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not items and not isinstance(value, dict | list):
        yield name, value
    for key, inner in items:
        yield from _leaves(inner, f"{name}.{key}" if name else str(key))


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "…"
