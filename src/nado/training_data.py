"""Samples made ready for training: padded, weighted, batched by length, with the base's states beside them.

Nothing is tokenised and no base is run inside the training loop.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nado.errors import InputError
from nado.guide import Conditions
from nado.noise import uniforms
from nado.objective import WeightForm, balance_labels, importance_weights
from nado.proposals import ESS_SHARE
from nado.reading import Reader
from nado.samples import Ragged, Samples

log = logging.getLogger(__name__)

BUCKETS = 4  # batches sorted by length together: less padding, but length says much about the label
# Tokens the base reads at once when its states are kept; on a CPU as many as its caches hold.
_READ_TOKENS = 2**17
_READ_TOKENS_CPU = 2**13


@dataclass(frozen=True)
class Batch:
    """Some texts, padded on the right to T."""

    states: Tensor  # (B, T, state_size)
    tokens: Tensor  # (B, T)
    lengths: Tensor  # (B,)
    satisfied: Tensor  # bool (B,)
    conditions: Conditions
    log_p: Tensor  # (B, T) of the chosen tokens
    weights: Tensor  # (B, T + 1), summed over equal texts
    multiplicity: Tensor  # (B,) how many drawn texts a row stands for
    offset: Tensor  # (B,) log-odds that balancing added
    stops: Tensor | None  # bool (B, T)
    progress: Tensor | None  # (B, T, bits), −1 where there is no such bit
    parts: Tensor | None  # (B, bits), −1 likewise
    # (B, T + 1) how much the loss at each prefix counts where only some are supervised: 0, or one over the
    # chance of having been chosen. None: all of them, once.
    sampled: Tensor | None = None

    @property
    def last_tokens(self) -> Tensor:
        """The token before each position, −1 before the first: (B, T)."""
        return torch.nn.functional.pad(self.tokens[:, :-1], (1, 0), value=-1)

    @property
    def positions(self) -> Tensor:
        """Which positions are real: bool (B, T)."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device)[None, :] < self.lengths[:, None]

    @property
    def summed(self) -> Tensor:
        """Which positions must be summed over the vocabulary: bool (B, T).

        Prefix i needs S of the step after it and, for its own R, the step before it.
        """
        if self.sampled is None:
            return self.positions
        wanted = self.sampled > 0
        return self.positions & (wanted[:, :-1] | wanted[:, 1:])

    @property
    def natural_weights(self) -> Tensor:
        """`weights` without what balancing put in: under them labels come at p's own rates, (B, T + 1)."""
        rate = torch.sigmoid(-self.offset)  # the offset moved this rate of satisfied texts to a half
        return self.weights * (2 * torch.where(self.satisfied, rate, 1 - rate))[:, None]

    def silenced(self) -> "Batch":
        """The same texts, counting for nothing: for a process that would have none."""
        return replace(
            self,
            weights=torch.zeros_like(self.weights),
            multiplicity=torch.zeros_like(self.multiplicity),
        )


@dataclass
class TrainingData:
    """All samples as tensors; `batches` cuts them up."""

    prompts: list[str]
    condition_names: list[str]  # the text of each row of `conditions`
    tokens: Tensor  # (S, T)
    lengths: Tensor  # (S,)
    satisfied: Tensor  # bool (S,)
    condition: Tensor  # (S,) row of `conditions`
    conditions: Conditions
    log_p: Tensor  # (S, T)
    weights: Tensor  # (S, T + 1)
    multiplicity: Tensor  # (S,)
    offset: Tensor  # (S,)
    ess: float  # share of the samples that the weights leave effective
    stops: Tensor | None = None
    progress: Tensor | None = None
    parts: Tensor | None = None
    states: Tensor | None = None  # (Σ lengths, state_size)
    starts: Tensor | None = None  # (S,) first row of each text in `states`
    _near: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.prompts)

    @classmethod
    def from_samples(
        cls,
        samples: Samples,
        reader: Reader,
        *,
        progress_bits: int = 0,
        balanced: bool = False,
        weight_form: WeightForm = "suffix",
        clip: float = 10.0,
        both_labels: bool = True,
        part_names: Callable[[str], Sequence[str]] | None = None,
    ) -> "TrainingData":
        """Pad, weight and check labelled samples.

        `both_labels` refuses samples from which nothing can be learned; evaluation can do without.
        `part_names` names the parts of a condition, for guides that read which of them are missing.
        """
        samples.require_covering()
        lengths = torch.from_numpy(np.diff(samples.ragged("tokens").offsets))
        satisfied = torch.from_numpy(samples.array("satisfied").astype(bool))
        if both_labels:
            require_both_labels(satisfied)
        prompts, texts = samples.strings("prompt"), samples.strings("condition")
        names = list(dict.fromkeys(texts))
        place = {name: number for number, name in enumerate(names)}
        pair_ids = _numbered(list(zip(prompts, texts, strict=True)))
        log_p = _padded(samples.ragged("log_p"), lengths)
        # Uncorrected samples are an ablation: trained on as if p had drawn them, as the paper does.
        log_proposal = log_p if samples.uncorrected else _padded(samples.ragged("log_proposal"), lengths)
        found = importance_weights(log_p, log_proposal, lengths, pair_ids, form=weight_form, clip=clip)
        ess = found.ess / len(prompts)
        if ess < ESS_SHARE:
            log.warning(
                "the effective sample size is %.1f %% of the samples: draw closer to p, or mix in more of it",
                100 * ess,
            )
        balance = balance_labels(satisfied, pair_ids) if balanced else None
        weights = found.weights if balance is None else found.weights * balance.weights[:, None]
        data = cls(
            prompts=prompts,
            condition_names=names,
            tokens=_padded(samples.ragged("tokens"), lengths).long(),
            lengths=lengths,
            satisfied=satisfied,
            condition=torch.tensor([place[text] for text in texts]),
            conditions=Conditions.encode(reader, names, part_names),
            log_p=log_p,
            weights=weights.float(),
            multiplicity=torch.ones(len(prompts)),
            offset=torch.zeros(len(prompts)) if balance is None else balance.offset.float(),
            ess=ess,
        )
        data._add_prefix_labels(samples, progress_bits)
        return data

    def _add_prefix_labels(self, samples: Samples, bits: int) -> None:
        names = samples.table.column_names
        if "stops" in names and samples.table["stops"].null_count == 0:
            self.stops = _padded(samples.ragged("stops"), self.lengths).bool()
        if bits:
            lengths = self.lengths.numpy()
            inside = np.arange(self.tokens.shape[1])[None, :] < lengths[:, None]
            progress = np.full((*inside.shape, bits), -1, dtype=np.int8)
            _spread_bits(progress, samples.ragged("progress"), lengths, inside)
            self.progress = torch.from_numpy(progress)
            parts = np.full((len(self), 1, bits), -1, dtype=np.int8)
            ones = np.ones_like(lengths)
            _spread_bits(parts, samples.ragged("parts"), ones, ones[:, None] > 0)
            self.parts = torch.from_numpy(parts[:, 0])

    def merge_equal(self) -> None:
        """Let one row stand for all equal texts of a prompt with equal labels: the same losses, less work.

        Call it before `keep_states`. A peaked p writes many texts more than once.
        """
        seen: dict[tuple[object, ...], int] = {}
        place = []
        rows = zip(
            self.prompts, self.condition.tolist(), self.lengths.tolist(), self.satisfied.tolist(), strict=True
        )
        for row, tokens in zip(rows, self.tokens.numpy(), strict=True):
            place.append(seen.setdefault((*row, tokens.tobytes()), len(seen)))
        group = torch.tensor(place)
        first = torch.full((len(seen),), len(self)).scatter_reduce(0, group, torch.arange(len(self)), "amin")
        weights = torch.zeros(len(seen), self.weights.shape[1]).index_add(0, group, self.weights)
        multiplicity = torch.zeros(len(seen)).index_add(0, group, self.multiplicity)
        self.prompts = [self.prompts[row] for row in first.tolist()]
        for name in (
            "tokens",
            "lengths",
            "satisfied",
            "condition",
            "log_p",
            "offset",
            "stops",
            "progress",
            "parts",
        ):
            column = getattr(self, name)
            setattr(self, name, None if column is None else column[first])
        self.weights, self.multiplicity = weights, multiplicity

    def keep_states(
        self, reader: Reader, device: torch.device | None = None, file: str | Path | None = None
    ) -> None:
        """Read the base's states of every text once and keep them: on `device`, or in a `file` on disk."""
        self.starts = self.lengths.cumsum(0) - self.lengths
        total = int(self.lengths.sum())
        most = _READ_TOKENS_CPU if reader.model.device.type == "cpu" else _READ_TOKENS
        order = self.lengths.argsort(descending=True)  # the first of a chunk is its longest
        first = 0
        while first < len(order):
            rows = order[first : first + max(1, most // int(self.lengths[order[first]]))]
            read = self._read(reader, rows)  # (B, T, state_size)
            if self.states is None:
                self.states = _room_for_states(total, read, device, file)
            inside = torch.arange(read.shape[1])[None, :] < self.lengths[rows][:, None]
            places = (self.starts[rows][:, None] + torch.arange(read.shape[1])[None, :])[inside]
            self.states[places.to(self.states.device)] = read[inside.to(read.device)].to(self.states.device)
            first += len(rows)

    def _read(self, reader: Reader, rows: Tensor) -> Tensor:
        longest = int(self.lengths[rows].max())
        prompts = [self.prompts[row] for row in rows.tolist()]
        return reader.read(
            prompts,
            self.tokens[rows, :longest].to(reader.model.device),
            self.lengths[rows].to(reader.model.device),
        )

    def order(self, batch_size: int, seed: int, epoch: int) -> list[Tensor]:
        """The rows of every batch of an epoch: random, of near-equal length, fixed by seed and epoch."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        shuffled = torch.randperm(len(self), generator=generator)
        batches: list[Tensor] = []
        for chunk in shuffled.split(batch_size * BUCKETS):
            batches += chunk[self.lengths[chunk].argsort(stable=True)].split(batch_size)
        return [batches[place] for place in torch.randperm(len(batches), generator=generator).tolist()]

    def batch(
        self, rows: Tensor, reader: Reader, positions_per_text: int | None = None, seed: int = 0
    ) -> Batch:
        """The given texts, on the reader's device, supervised at all prefixes or at a sample of them."""
        device = reader.model.device
        longest = int(self.lengths[rows].max())
        home = self.tokens.device if self.states is None else self.states.device
        there = rows.to(home)

        def take(name: str) -> Tensor:
            return self._column(name, home)[there].to(device, non_blocking=True)

        def take_wide(name: str, width: int = longest) -> Tensor:
            return self._column(name, home)[:, :width][there].to(device, non_blocking=True)

        return Batch(
            states=self._read(reader, rows)
            if self.states is None
            else self._states(there, longest).to(device),
            tokens=take_wide("tokens"),
            lengths=take("lengths"),
            satisfied=take("satisfied"),
            conditions=self.conditions.rows(take("condition")),
            log_p=take_wide("log_p"),
            weights=take_wide("weights", longest + 1),
            multiplicity=take("multiplicity"),
            offset=take("offset"),
            stops=None if self.stops is None else take_wide("stops"),
            progress=None if self.progress is None else take_wide("progress"),
            parts=None if self.parts is None else take("parts"),
            sampled=None
            if positions_per_text is None
            else sample_prefixes(rows, self.lengths[rows], positions_per_text, seed).to(device),
        )

    def _column(self, name: str, home: torch.device) -> Tensor:
        """A column where the states are: small beside them, and a GPU picks rows faster than the host.

        Columns are replaced and never changed in place, of which a copy would know nothing.
        """
        column: Tensor = getattr(self, name)
        kept = self._near.get(name)
        if kept is None or kept[0] is not column or kept[1].device != home:
            kept = self._near[name] = (column, column.to(home))
        return kept[1]

    def _states(self, rows: Tensor, longest: int) -> Tensor:
        assert self.states is not None
        home = self.states.device
        starts, lengths = (self._column(name, home)[rows][:, None] for name in ("starts", "lengths"))
        steps = torch.arange(longest, device=home)[None, :]
        return self.states[starts + torch.where(steps < lengths, steps, 0)]  # past its end its first again


def sample_prefixes(rows: Tensor, lengths: Tensor, count: int, seed: int) -> Tensor:
    """How much each prefix of the texts `rows` counts when only `count` of each text do: (B, T + 1).

    Every prefix is as likely as any other and counts for one over that chance, so that a sum over the chosen
    ones is right on average. The choice is a pure function of seed and row, whatever batch a text is in. A
    text of at most `count` tokens is taken whole.
    """
    columns = torch.arange(int(lengths.max()) + 1).expand(len(rows), -1)
    inside = columns <= lengths[:, None]
    keys = uniforms(seed, rows[:, None].expand_as(columns), columns).masked_fill(~inside, 2.0)
    chosen = keys.argsort(dim=1).argsort(dim=1) < count
    whole = (lengths <= count)[:, None]
    share = ((lengths + 1) / count)[:, None]
    return torch.where(whole, 1.0, chosen * share) * inside


def _room_for_states(
    total: int, like: Tensor, device: torch.device | None, file: str | Path | None
) -> Tensor:
    """An empty (total, state_size) tensor; one in a file is paged in as batches ask for it."""
    width = like.shape[-1]
    if file is not None:
        return torch.from_file(str(file), shared=True, size=total * width, dtype=like.dtype).view(
            total, width
        )
    return torch.empty(total, width, dtype=like.dtype, device=device if device is not None else like.device)


def split_by_prompt(samples: Samples, share: float, seed: int) -> tuple[Samples, Samples]:
    """Training and held-out samples, with no (prompt, condition) in both."""
    pairs = list(zip(samples.strings("prompt"), samples.strings("condition"), strict=True))
    return split_by_group(samples, pairs, share, seed)


def split_by_group(
    samples: Samples, groups: Sequence[object], share: float, seed: int
) -> tuple[Samples, Samples]:
    """Training and held-out samples, with no group in both; `groups` says to which each sample belongs."""
    ids = _numbered(groups)
    count = int(ids.max()) + 1
    held = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[
        : max(1, round(share * count))
    ]
    mask = torch.isin(ids, held).numpy()
    return samples.filter(~mask), samples.filter(mask)


def _numbered(values: Sequence[object]) -> Tensor:
    numbers: dict[object, int] = {}
    return torch.tensor([numbers.setdefault(value, len(numbers)) for value in values])


def _padded(column: Ragged, lengths: Tensor) -> Tensor:
    """A ragged column as (S, T), zeros past the end."""
    width = int(lengths.max())
    padded = np.zeros((len(lengths), width), dtype=column.values.dtype)
    inside = np.arange(width)[None, :] < lengths.numpy()[:, None]
    padded[inside] = column.values
    return torch.from_numpy(padded)


def _spread_bits(
    target: NDArray[np.int8], column: Ragged, lengths: NDArray[np.int64], inside: NDArray[np.bool_]
) -> None:
    """Write each row's bits, `lengths` (S,) times as many as it has parts, into `target` (S, T, bits).

    Rows with equally many parts are written together: there are a handful of such numbers, and may be a
    million rows.
    """
    sizes = np.diff(column.offsets)
    counts = sizes // lengths  # bits at each position of a row
    for count in np.unique(counts):
        rows = counts == count
        own = np.full((int(lengths[rows].sum()), target.shape[2]), -1, dtype=np.int8)
        own[:, :count] = column.values[np.repeat(rows, sizes)].reshape(len(own), count)
        target[inside & rows[:, None]] = own


def require_both_labels(satisfied: Tensor) -> None:
    """Refuse samples from which nothing can be learned."""
    positives = int(satisfied.sum())
    if positives == 0:
        raise InputError(
            "samples of both kinds to learn from",
            f"no satisfied text among {len(satisfied)}",
            "Draw more samples, draw from a guided proposal, or begin with one of the oracle's parts.",
        )
    if positives == len(satisfied):
        raise InputError(
            "samples of both kinds to learn from",
            f"no unsatisfied text among {len(satisfied)}",
            "p satisfies this oracle already, or the oracle says yes to everything: audit it.",
        )


def iterate(data: TrainingData, batch_size: int, seed: int) -> Iterator[tuple[int, Tensor]]:
    """(epoch, rows) of one batch after the other, for ever."""
    epoch = 0
    while True:
        for rows in data.order(batch_size, seed, epoch):
            yield epoch, rows
        epoch += 1
