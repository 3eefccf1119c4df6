"""Drawing: the one sampling loop, for every language model and every proposal.

Rows are numbered; row r belongs to prompt r // samples_per_prompt and its noise depends on (seed, r, step)
alone. Rows are drawn shard by shard, each shard from a fresh start, so that a shard is the same whatever
happened before it. On a CPU, at one batch size, it is the same to the last bit. On a GPU matrix products
round differently in batches of different shapes; a token changes where its noise falls within that rounding
of a boundary between two tokens, and then the rest of that row differs.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from nado.errors import InputError, NadoError
from nado.language_model import LanguageModel, Preparing, Refillable, Sampling, is_finished, is_refillable
from nado.noise import sample, uniforms
from nado.prompts import Prompt
from nado.proposals import Mixing, Proposal, begin_mixing, mixed_distribution, record_token
from nado.samples import SCHEMA, Samples, read_samples, samples_folder
from nado.storage import digest_json
from nado.versions import versions

# Counters of the two choices a row makes before its first token; token steps count from 0.
_PICK, _SWITCH = -1, -2
_REFILL_SHARE = 8  # refill once an eighth of the rows stand idle
_LOOK_AHEAD = 2**17  # rows whose prompts are offered to a model to read ahead


@dataclass(frozen=True)
class Progress:
    """What a progress bar wants to know."""

    rows: int
    total_rows: int
    tokens: int
    seconds: float


class DrawingError(NadoError, ArithmeticError):
    """The model gave something that is not a distribution."""


def draw(
    model: LanguageModel[Any],
    prompts: Sequence[Prompt],
    folder: str | Path,
    *,
    samples_per_prompt: int = 1,
    proposal: Proposal | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    shard_rows: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Samples:
    """Draw `samples_per_prompt` texts for every prompt into Parquet shards under `folder`.

    Begun again with the same arguments, after any interruption, it draws only the shards that are
    missing. Another model, proposal, seed or set of prompts in the same folder is an error.
    """
    proposal = proposal if proposal is not None else Proposal()
    proposal.require_covers(model)
    _require_counts(prompts, samples_per_prompt)
    batch_size = batch_size if batch_size is not None else default_batch_size(model)
    total = len(prompts) * samples_per_prompt
    shard_rows = shard_rows if shard_rows is not None else 16 * batch_size
    target = samples_folder(folder)
    config = {
        "prompts": digest_json([list(prompt) for prompt in prompts]),
        "samples_per_prompt": samples_per_prompt,
        "model": model.fingerprint,
        "proposal": proposal.describe(),
        "seed": seed,
        "batch_size": batch_size,
        "shard_rows": shard_rows,
    }
    manifest = target.open(config, shards=-(-total // shard_rows))
    missing = target.missing(manifest)
    meter = _Meter(
        total, on_progress, done=total - sum(len(_shard(index, shard_rows, total)) for index in missing)
    )
    for index in missing:
        rows = _shard(index, shard_rows, total)
        asked = [prompts[row // samples_per_prompt] for row in rows]
        table = draw_rows(
            model, asked, rows, proposal=proposal, seed=seed, batch_size=batch_size, on_rows=meter.count
        )
        target.write(index, table)
    if any(shard is None for shard in manifest["shards"]):
        target.close(manifest, versions=versions(), uncorrected=proposal.uncorrected)
    return read_samples(folder)


def draw_rows(
    model: LanguageModel[Any],
    prompts: Sequence[Prompt],
    rows: Sequence[int],
    *,
    proposal: Proposal,
    seed: int,
    batch_size: int,
    on_rows: Callable[[int, int], None] | None = None,
) -> pa.Table:
    """Draw one text for each prompt; `rows` are their numbers, on which the noise depends.

    Everything the loop needs is in its arguments, so that a worker process or another machine that is
    given the same ones returns the same table.
    """
    loop = _Loop(model, prompts, rows, proposal, seed, batch_size, on_rows)
    with torch.no_grad():
        harvests = loop.run()
    return _to_table(model, prompts, rows, proposal, harvests)


def default_batch_size(model: LanguageModel[Any]) -> int:
    """Rows drawn side by side: 64 on a CPU; on a GPU as many as leave room for their logits, up to 8,192."""
    if model.device.type != "cuda":
        return 64
    free, _ = torch.cuda.mem_get_info(model.device)
    # About six float32 copies of a row's distribution live at once, and its cache takes as much again.
    rows = free // (8 * 4 * max(model.vocabulary_size, 16_384))
    return int(max(64, min(8192, 2 ** int(np.log2(max(rows, 1))))))


class _Loop:
    """One shard's rows going through a fixed number of slots.

    Nothing in the loop waits for a GPU except the count of finished rows, and that is asked for before the
    step that follows is queued: the device always has work.
    """

    def __init__(
        self,
        model: LanguageModel[Any],
        prompts: Sequence[Prompt],
        rows: Sequence[int],
        proposal: Proposal,
        seed: int,
        batch_size: int,
        on_rows: Callable[[int, int], None] | None,
    ) -> None:
        self.model, self.proposal, self.seed, self.on_rows = model, proposal, seed, on_rows
        self.prompts, self.rows = prompts, rows
        self.models = [model, *proposal.models]
        self.refillable = all(is_refillable(m) for m in self.models)
        # Captured GPU steps have a fixed shape: shrinking would mean recording them again.
        self.shrinkable = not (self.refillable and model.device.type == "cuda")
        self.sampler = model if proposal.is_p and isinstance(model, Sampling) else None
        self.taken = 0  # rows of this shard that have been started
        self.prepared = 0  # rows whose prompts have been read ahead
        self.batch_size = min(batch_size, len(rows))
        self.clerk = ThreadPoolExecutor(max_workers=1)
        self.harvests: list[Future[_Harvest]] = []

    def run(self) -> list["_Harvest"]:
        """Start, step, harvest and refill until every row is drawn."""
        with self.clerk:
            while self.taken < len(self.rows):
                self._start()
                while len(self.index):
                    self._advance()
                    self._turn_over()
            return [harvest.result() for harvest in self.harvests]

    @property
    def waiting(self) -> int:
        """Rows not yet started."""
        return len(self.rows) - self.taken

    def _take(self, count: int) -> range:
        taken = range(self.taken, min(self.taken + count, len(self.rows)))
        self.taken = taken.stop
        if self.refillable and self.prepared < self.taken:
            self._prepare(taken.start)
        return taken

    def _prepare(self, first: int) -> None:
        """Let models read the prompts of many rows to come at once: few, large prefills."""
        distinct = dict.fromkeys(prompt.prompt for prompt in self.prompts[first : first + _LOOK_AHEAD])
        self.prepared = first + _LOOK_AHEAD
        for model in self.models:
            if isinstance(model, Preparing):
                fitted = set(list(distinct)[: model.prepare(list(distinct))])
                missing = (i for i in range(first, len(self.rows)) if self.prompts[i].prompt not in fitted)
                self.prepared = min(self.prepared, next(missing, len(self.rows)))

    def _start(self) -> None:
        taken = self._take(self.batch_size)
        prompts, conditions = zip(*self.prompts[taken.start : taken.stop], strict=True)
        self.states = [m.start(prompts, conditions) for m in self.models]
        device, limit = self.model.device, self.model.length_limit
        self.index = torch.tensor(taken, device=device)
        self.row = torch.tensor([self.rows[index] for index in taken], device=device)
        self.steps = torch.zeros_like(self.index)
        self.done = torch.zeros_like(self.index, dtype=torch.bool)
        # One column more than L: rows that are done but still in the batch write there.
        self.tokens = torch.full((len(taken), limit + 1), self.model.eos_id, dtype=torch.int32, device=device)
        self.log_p = torch.zeros(len(taken), limit + 1, device=device)
        self.log_proposal = torch.zeros_like(self.log_p)
        self.mixing = self._begin_mixing(self.row)
        self.noise = self._noise(self.row)

    def _noise(self, row: Tensor) -> Tensor:
        """A row's noise for all its tokens: (B, L + 1)."""
        steps = torch.arange(self.model.length_limit + 1, device=row.device)
        return uniforms(self.seed, row[:, None].expand(-1, len(steps)), steps[None, :])

    def _begin_mixing(self, row: Tensor) -> Mixing:
        pick = uniforms(self.seed, row, torch.full_like(row, _PICK))
        switch = uniforms(self.seed, row, torch.full_like(row, _SWITCH))
        return begin_mixing(self.proposal, pick, switch, self.model.length_limit)

    def _advance(self) -> None:
        """One token for every live row."""
        noise = self.noise.gather(1, self.steps[:, None]).squeeze(-1)
        if self.sampler is not None:
            token, log_p_token = self.sampler.sample(self.states[0], noise)
            log_proposal = log_p_token
        else:
            log_p = self.states[0].log_p  # (B, V)
            others = [state.log_p for state in self.states[1:]]
            drawn_from, components = mixed_distribution(self.proposal, self.mixing, log_p, others, self.steps)
            token = sample(drawn_from, noise)
            log_p_token = log_p.gather(-1, token[:, None]).squeeze(-1)
            log_proposal = record_token(self.mixing, components, token, log_p_token, self.steps)
        self._write(token, log_p_token, log_proposal)
        self.idle_first = self.done.sort(descending=True, stable=True).indices
        self.idle = _Awaited(self.done.sum())
        self.states = [m.step(state, token) for m, state in zip(self.models, self.states, strict=True)]

    def _write(self, token: Tensor, log_p: Tensor, log_proposal: Tensor) -> None:
        column = torch.where(self.done, self.model.length_limit, self.steps)[:, None]
        self.tokens.scatter_(1, column, token[:, None].int())
        self.log_p.scatter_(1, column, log_p[:, None])
        self.log_proposal.scatter_(1, column, log_proposal[:, None])
        self.steps += ~self.done
        self.done |= (token == self.model.eos_id) | (self.steps >= self.model.length_limit)

    def _turn_over(self) -> None:
        """Take finished rows out and put new ones in, when enough have finished to be worth it."""
        idle = self.idle.value()
        if self.refillable and self.waiting:
            if idle * _REFILL_SHARE >= len(self.index):
                rows = self.idle_first[: min(idle, self.waiting)]
                self._harvest(rows)
                self._refill(rows)
        elif idle == len(self.index):
            self._harvest(self.idle_first)
            self.index = self.index[:0]
        elif self.shrinkable and 2 * idle >= len(self.index):
            self._harvest(self.idle_first[:idle])
            self._keep(self.idle_first[idle:])

    def _harvest(self, rows: Tensor) -> None:
        """Copy finished rows out; another thread brings them to the host and makes text of them."""
        names = ("index", "steps", "tokens", "log_p", "log_proposal")
        columns = [getattr(self, name)[rows] for name in names] + [self.mixing.switch[rows]]
        self.harvests.append(self.clerk.submit(_to_host, self.model, columns, self.on_rows))

    def _refill(self, rows: Tensor) -> None:
        taken = self._take(len(rows))
        prompts, conditions = zip(*self.prompts[taken.start : taken.stop], strict=True)
        self.states = [
            cast(Refillable[Any], m).refill(state, rows, prompts, conditions)
            for m, state in zip(self.models, self.states, strict=True)
        ]
        self.index[rows] = torch.tensor(taken, device=rows.device)
        self.row[rows] = torch.tensor([self.rows[index] for index in taken], device=rows.device)
        self.steps[rows] = 0
        self.done[rows] = False
        self.noise[rows] = self._noise(self.row[rows])
        fresh = self._begin_mixing(self.row[rows])
        self.mixing.picked[rows], self.mixing.switch[rows] = fresh.picked, fresh.switch
        self.mixing.log_posterior[rows] = fresh.log_posterior

    def _keep(self, rows: Tensor) -> None:
        """Go on with these rows alone."""
        self.states = [m.select(state, rows) for m, state in zip(self.models, self.states, strict=True)]
        for name in ("index", "row", "steps", "done", "tokens", "log_p", "log_proposal", "noise"):
            setattr(self, name, getattr(self, name)[rows])
        self.mixing = self.mixing.select(rows)


class _Awaited:
    """A number that a GPU is still working out; only its reader waits for it."""

    def __init__(self, number: Tensor) -> None:
        self._host = number
        self._ready: torch.cuda.Event | None = None
        if number.is_cuda:
            self._host = torch.empty((), dtype=number.dtype, pin_memory=True)
            self._host.copy_(number, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record()

    def value(self) -> int:
        """The number, once it is there."""
        if self._ready is not None:
            self._ready.synchronize()
        return int(self._host)


@dataclass(frozen=True)
class _Harvest:
    """Rows taken out together, on the host; ragged columns are flat."""

    index: NDArray[np.int64]
    lengths: NDArray[np.int64]
    ended: NDArray[np.bool_]
    switch: NDArray[np.int64]
    tokens: NDArray[np.int32]
    log_p: NDArray[np.float32]
    log_proposal: NDArray[np.float32]
    text: list[str]


def _to_host(
    model: LanguageModel[Any], columns: list[Tensor], on_rows: Callable[[int, int], None] | None
) -> _Harvest:
    index, lengths, tokens, log_p, log_proposal, switch = (column.cpu().numpy() for column in columns)
    inside = np.arange(tokens.shape[1])[None, :] < lengths[:, None]
    if not (np.isfinite(log_p[inside]).all() and np.isfinite(log_proposal[inside]).all()):
        raise DrawingError(
            "finite log-probabilities for every drawn token",
            f"{int((~np.isfinite(log_p[inside])).sum())} that are not",
            "The model overflowed: load it in float32 or bfloat16 and check its weights.",
        )
    ended = tokens[np.arange(len(lengths)), lengths - 1] == model.eos_id
    text = model.decode([row[:length] for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True)])
    if on_rows is not None:
        on_rows(len(lengths), int(lengths.sum()))
    return _Harvest(index, lengths, ended, switch, tokens[inside], log_p[inside], log_proposal[inside], text)


def _to_table(
    model: LanguageModel[Any],
    prompts: Sequence[Prompt],
    rows: Sequence[int],
    proposal: Proposal,
    harvests: list[_Harvest],
) -> pa.Table:
    """The drawn rows in their own order."""
    order = np.argsort(np.concatenate([harvest.index for harvest in harvests]), kind="stable")
    lengths = np.concatenate([harvest.lengths for harvest in harvests])[order]
    ended = np.concatenate([harvest.ended for harvest in harvests])[order]
    switch = np.concatenate([harvest.switch for harvest in harvests])[order]
    texts = [text for harvest in harvests for text in harvest.text]
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    lists = {
        name: pa.ListArray.from_arrays(offsets, pa.array(_ragged(harvests, name, order)))
        for name in ("tokens", "log_p", "log_proposal")
    }
    return pa.table(
        {
            "row": pa.array(np.asarray(rows, dtype=np.int64)),
            "prompt": [prompt.prompt for prompt in prompts],
            "condition": [prompt.condition for prompt in prompts],
            "tokens": lists["tokens"],
            "text": [texts[place] for place in order],
            "log_p": lists["log_p"],
            "log_proposal": lists["log_proposal"],
            "finished": is_finished(torch.from_numpy(ended), model.completion).numpy(),
            "proposal": [proposal.name()] * len(rows),
            "prefix_length": pa.array(
                (np.minimum(switch, lengths) if proposal.complete_from_p else 0 * lengths).astype(np.int32)
            ),
        }
    ).cast(SCHEMA)


def _ragged(harvests: list[_Harvest], name: str, order: NDArray[np.int64]) -> NDArray[Any]:
    """A flat column of all harvests, its rows put into `order`."""
    lengths = np.concatenate([harvest.lengths for harvest in harvests])
    starts = np.cumsum(lengths) - lengths
    flat = np.concatenate([getattr(harvest, name) for harvest in harvests])
    sizes = lengths[order]
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    ordered: NDArray[Any] = flat[np.repeat(starts[order], sizes) + within]
    return ordered


class _Meter:
    """Counts rows and tokens and tells whoever listens."""

    def __init__(self, total: int, listener: Callable[[Progress], None] | None, done: int) -> None:
        self.total, self.listener, self.rows, self.tokens = total, listener, done, 0
        self.began = time.monotonic()

    def count(self, rows: int, tokens: int) -> None:
        self.rows += rows
        self.tokens += tokens
        if self.listener is not None:
            self.listener(Progress(self.rows, self.total, self.tokens, time.monotonic() - self.began))


def _shard(index: int, shard_rows: int, total: int) -> range:
    return range(index * shard_rows, min((index + 1) * shard_rows, total))


def _require_counts(prompts: Sequence[Prompt], samples_per_prompt: int) -> None:
    if not prompts:
        raise InputError("at least one prompt", "none", "Give prompts, for instance read_prompts(file).")
    if not all(isinstance(prompt, Prompt) for prompt in prompts):
        raise InputError(
            "prompts as Prompt(prompt, condition)",
            f"{type(prompts[0]).__name__}",
            "Wrap them: Prompt(text, text).",
        )
    if samples_per_prompt < 1:
        raise InputError("at least 1 sample a prompt", f"{samples_per_prompt}", "Ask for 1 or more.")
