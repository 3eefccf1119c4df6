"""Training data divided among processes: each reads its own Parquet rows and keeps its own states.

Texts are divided by prompt into a fixed number of *shares*. A batch takes equally many texts from each, in
turn, so that every process holds its own part of it, if the number of processes divides that of the shares.
Batches depend on the number of shares and not on that of processes: one process with four shares, two and
four take the same steps. What all of them need to know of all texts is a few numbers each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from nado.errors import InputError, MismatchError
from nado.reading import Reader
from nado.samples import LABEL_SCHEMA, Samples, is_uncorrected, labels_folder, samples_digest, samples_folder
from nado.training_data import BUCKETS, Batch, TrainingData, require_both_labels, sample_prefixes


class Rank(NamedTuple):
    """Which of how many processes this is."""

    number: int = 0
    of: int = 1

    def own_shares(self, shares: int) -> list[int]:
        """The shares that are this process's own."""
        return list(range(self.number, shares, self.of))


@dataclass(kw_only=True)
class DividedData(TrainingData):
    """Numbers of all texts, and everything about this process's own.

    `lengths`, `satisfied`, `multiplicity` and `parts` are those of all texts; of the weights only the total
    is known, which tells one run from another. The rest is in `own`.
    """

    own: TrainingData
    place: Tensor  # (S,) row of each text in `own`, −1 where it is another process's
    share: Tensor  # (S,) that each text belongs to, ascending
    shares: int

    def __len__(self) -> int:
        return len(self.lengths)

    def keep_states(
        self, reader: Reader, device: torch.device | None = None, file: str | Path | None = None
    ) -> None:
        """Keep the states of this process's own texts."""
        self.own.keep_states(reader, device, file)

    def order(self, batch_size: int, seed: int, epoch: int) -> list[Tensor]:
        """The rows of every batch of an epoch, share after share in turn.

        Shares are shuffled each for itself and cut to the smallest of them; what is cut off is another text
        in every epoch.
        """
        per = _require_multiple(batch_size, self.shares) // self.shares
        sizes = torch.bincount(self.share, minlength=self.shares)
        least, starts = int(sizes.min()), sizes.cumsum(0) - sizes
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        shuffled = torch.stack(
            [
                start + torch.randperm(int(size), generator=generator)[:least]
                for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)
            ]
        )  # (shares, least)
        batches: list[Tensor] = []
        for chunk in shuffled.split(per * BUCKETS, dim=1):
            by_length = chunk.gather(1, self.lengths[chunk].argsort(dim=1, stable=True))
            # In turn: text i of a batch is share i mod shares', so every n-th text is one process's own.
            batches += [part.T.reshape(-1) for part in by_length.split(per, dim=1)]
        return [batches[place] for place in torch.randperm(len(batches), generator=generator).tolist()]

    def batch(
        self, rows: Tensor, reader: Reader, positions_per_text: int | None = None, seed: int = 0
    ) -> Batch:
        """The given texts, which must be this process's own."""
        places = self.place[rows]
        if bool((places < 0).any()):
            raise InputError(
                "texts that this process holds",
                f"{int((places < 0).sum())} of {len(rows)} that another does",
                f"Use a number of processes that divides {self.shares}, the number of shares.",
            )
        batch = self.own.batch(places, reader)
        if positions_per_text is None:
            return batch
        # By the texts' numbers among all: the choice must not depend on who holds them.
        sampled = sample_prefixes(rows, self.lengths[rows], positions_per_text, seed)
        return replace(batch, sampled=sampled.to(batch.tokens.device))


def _require_multiple(batch_size: int, shares: int) -> int:
    if batch_size % shares:
        raise InputError(
            f"a batch_size that is a multiple of {shares}, the number of shares",
            f"{batch_size}",
            "Change one.",
        )
    return batch_size


# --- dividing -----------------------------------------------------------------------------------------


def number_shares(samples: Samples, shares: int) -> NDArray[np.int64]:
    """The share of every sample: whole prompts, in the order they come in, about equally many texts each."""
    pairs = list(zip(samples.strings("prompt"), samples.strings("condition"), strict=True))
    numbers: dict[tuple[str, str], int] = {}
    pair = np.array([numbers.setdefault(each, len(numbers)) for each in pairs], dtype=np.int64)
    if len(numbers) < shares:
        raise InputError(
            f"at least {shares} prompts, one for each share", f"{len(numbers)}", "Use fewer shares."
        )
    counts = np.bincount(pair)
    middle = np.cumsum(counts) - counts / 2
    share = np.minimum((middle * shares / counts.sum()).astype(np.int64), shares - 1)
    # Prompts with very unequal numbers of texts can leave a share empty: then by number of prompts.
    if len(np.unique(share)) < shares:
        share = np.arange(len(counts)) * shares // len(counts)
    found: NDArray[np.int64] = share[pair]
    return found


class Spread(NamedTuple):
    """What is needed of some samples' weights to know the effective size of many: log Σ w and log Σ w²."""

    samples: int
    log_sum: float
    log_sum_squares: float

    @classmethod
    def of(cls, samples: Samples) -> "Spread":
        """Of samples; those stamped uncorrected are trained on as if p had drawn them."""
        log_w = torch.zeros(len(samples)) if samples.uncorrected else torch.from_numpy(samples.log_weights())
        return cls(len(log_w), float(log_w.logsumexp(0)), float((2 * log_w).logsumexp(0)))

    @staticmethod
    def effective_share(several: "Sequence[Spread]") -> float:
        """ESS = (Σ w)² / Σ w² over all samples, as a share of them."""
        samples, first, second = (
            torch.tensor(column, dtype=torch.float64) for column in zip(*several, strict=True)
        )
        return float((2 * first.logsumexp(0) - second.logsumexp(0)).exp() / samples.sum())


def divide(own: TrainingData, own_share: Tensor, spreads: Mapping[int, Spread], shares: int) -> DividedData:
    """This process's data as part of all processes'; `own_share` (own rows,) ascends.

    Every process must call it at the same time: they tell each other the numbers of their texts.
    """
    told = _exchange([_describe(own, own_share == share, share, spreads[share]) for share in spreads])
    told.sort(key=lambda each: int(each["share"]))
    share = torch.cat([torch.full_like(each["lengths"], each["share"]) for each in told])
    columns = {
        name: torch.cat([each[name] for each in told]) for name in ("lengths", "satisfied", "multiplicity")
    }
    require_both_labels(columns["satisfied"])
    place = torch.full_like(share, -1)
    place[torch.isin(share, own_share.unique())] = torch.arange(len(own))
    return _around(
        own,
        place,
        share,
        shares,
        **columns,
        parts=None if own.parts is None else torch.cat([each["parts"] for each in told]),
        weights=torch.tensor([sum(each["weight"] for each in told)], dtype=torch.float64),
        ess=Spread.effective_share([each["spread"] for each in told]),
    )


def divide_for_evaluation(whole: TrainingData, rank: Rank) -> DividedData:
    """Data that every process has read whole, of which each evaluates, and keeps states of, its own part.

    That part is the one `nado.training.evaluate` gives it: every n-th text, shortest first.
    """
    rows = whole.lengths.argsort(stable=True)[rank.number :: rank.of]
    place = torch.full_like(whole.lengths, -1)
    place[rows] = torch.arange(len(rows))
    known = ("lengths", "satisfied", "multiplicity", "parts", "weights", "ess")
    columns = {name: getattr(whole, name) for name in known}
    return _around(select(whole, rows), place, torch.zeros_like(place), rank.of, **columns)


def select(data: TrainingData, rows: Tensor) -> TrainingData:
    """Some of the texts; states are not taken along."""
    columns = ("tokens", "lengths", "satisfied", "condition", "log_p", "weights", "multiplicity", "offset")
    chosen = {name: getattr(data, name)[rows] for name in columns}
    for name in ("stops", "progress", "parts"):
        column = getattr(data, name)
        chosen[name] = None if column is None else column[rows]
    prompts = [data.prompts[row] for row in rows.tolist()]
    return replace(data, prompts=prompts, states=None, starts=None, **chosen)


def _around(own: TrainingData, place: Tensor, share: Tensor, shares: int, **columns: Any) -> DividedData:
    """All texts' numbers around this process's data."""
    kept = {field.name: getattr(own, field.name) for field in fields(TrainingData) if field.init}
    return DividedData(**kept | {"prompts": []} | columns, own=own, place=place, share=share, shares=shares)


def _describe(own: TrainingData, rows: Tensor, share: int, spread: Spread) -> dict[str, Any]:
    """What other processes need to know of a share."""
    return {
        "share": share,
        "lengths": own.lengths[rows],
        "satisfied": own.satisfied[rows],
        "multiplicity": own.multiplicity[rows],
        "parts": None if own.parts is None else own.parts[rows],
        "weight": float(own.weights[rows].double().sum()),
        "spread": spread,
    }


def _exchange(mine: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Everybody's entries; one process alone has its own."""
    from accelerate.utils import gather_object

    everybody: list[dict[str, Any]] = gather_object(mine)
    return everybody


# --- reading ------------------------------------------------------------------------------------------


def read_index(folder: Path) -> Samples:
    """Prompt and condition of every sample, with its place among all: little, so every process reads it."""
    source = samples_folder(folder)
    manifest = source.manifest()
    source.require_all(manifest)
    tables = [
        pq.read_table(source.shard_path(index), columns=["prompt", "condition"])
        for index in range(len(manifest["shards"]))
    ]
    table = pa.concat_tables(tables)
    return Samples(
        table.append_column("place", pa.array(np.arange(table.num_rows))), is_uncorrected(manifest)
    )


def read_places(folder: Path, places: NDArray[np.int64]) -> Samples:
    """The labelled samples at the given places, which ascend; only shards with some of them are read."""
    source, target = samples_folder(folder), labels_folder(folder)
    drawn, labelled = source.manifest(), target.manifest()
    if labelled["config"].get("samples") != samples_digest(drawn):
        raise MismatchError(
            f"labels of the samples in {folder}",
            "labels of other samples",
            f"Delete {target.path} and label again.",
        )
    ends = np.cumsum([shard["rows"] for shard in drawn["shards"]])
    tables = []
    for index, (end, shard) in enumerate(zip(ends, drawn["shards"], strict=True)):
        inside = places[(places >= end - shard["rows"]) & (places < end)] - (end - shard["rows"])
        if not len(inside):
            continue
        table = source.read_shard(index, shard["digest"])
        labels = target.read_shard(index, labelled["shards"][index]["digest"])
        for name in LABEL_SCHEMA.names[1:]:
            table = table.append_column(LABEL_SCHEMA.field(name), labels[name])
        tables.append(table.take(pa.array(inside)))
    return Samples(pa.concat_tables(tables), is_uncorrected(drawn))
