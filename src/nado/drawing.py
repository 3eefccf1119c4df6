"""Drawing: the one sampling loop, for every language model and every proposal.

Rows are numbered; row r belongs to prompt r // samples_per_prompt and its noise depends on (seed, r, step)
alone. Rows are drawn shard by shard, each shard from a fresh start, so that a shard is the same whatever
happened before it. On a CPU, at one batch size, it is the same to the last bit. On a GPU matrix products
round differently in batches of different shapes; a token changes where its noise falls within that rounding
of a boundary between two tokens, and then the rest of that row differs.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from nado.errors import InputError, NadoError, require_at_least
from nado.language_model import (
    LanguageModel,
    OverBase,
    Preparing,
    Refillable,
    Sampling,
    has_fixed_rows,
    is_finished,
    is_refillable,
)
from nado.noise import sample, uniforms
from nado.progress import Listener, Meter, Progress
from nado.prompts import Prompt
from nado.proposals import (
    Mixing,
    Proposal,
    begin_mixing,
    mixed_distribution,
    record_token,
    summarise_weights,
)
from nado.samples import SCHEMA, Folder, Samples, samples_folder
from nado.storage import digest_json, hold
from nado.versions import versions

__all__ = ["DrawingError", "Progress", "default_batch_size", "draw", "draw_rows"]

# Counters of the two choices a row makes before its first token; token steps count from 0.
_PICK, _SWITCH = -1, -2
_REFILL_SHARE = 8  # refill once an eighth of the rows stand idle
_LOOK_AHEAD = 4096  # different prompts offered at first to a model that reads ahead
_BACKLOG = 8  # harvests that may wait to be made text of, before drawing waits for them
SHARD_BATCHES = 16  # batches in a shard

OnRows: TypeAlias = Callable[[int, int], None]  # told how many more rows and tokens are done


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
    on_progress: Listener | None = None,
) -> Samples:
    """Draw `samples_per_prompt` texts for every prompt into Parquet shards under `folder`.

    Begun again with the same arguments, after any interruption, it draws only the shards that are
    missing. Another model, proposal, seed or set of prompts in the same folder is an error. Sizes that
    are not given are those the run began with.
    """
    proposal = proposal if proposal is not None else Proposal()
    proposal.require_covers(model)
    require_prompts(prompts)
    require_at_least(1, samples_per_prompt=samples_per_prompt, batch_size=batch_size, shard_rows=shard_rows)
    target = samples_folder(folder)
    with hold(target.path):
        run = open_run(
            target,
            prompts,
            model.fingerprint,
            lambda: default_batch_size(model),
            samples_per_prompt=samples_per_prompt,
            proposal=proposal,
            seed=seed,
            batch_size=batch_size,
            shard_rows=shard_rows,
            on_progress=on_progress,
        )
        for index in run.missing:
            rows = run.shards[index]
            asked = [prompts[row // samples_per_prompt] for row in rows]
            table = draw_rows(
                model,
                asked,
                rows,
                proposal=proposal,
                seed=seed,
                batch_size=run.config["batch_size"],
                on_rows=run.meter.count,
            )
            target.write(index, table)
        return _finish(target, run.manifest, proposal)


@dataclass(frozen=True)
class DrawingRun:
    """A folder that is being drawn into: what it is to hold, and what of that is missing."""

    config: dict[str, Any]  # as in the manifest
    shards: list[range]  # the rows of each
    manifest: dict[str, Any]
    missing: list[int]
    meter: Meter


def open_run(
    target: Folder,
    prompts: Sequence[Prompt],
    fingerprint: str,
    default_batch: Callable[[], int],
    *,
    samples_per_prompt: int,
    proposal: Proposal,
    seed: int,
    batch_size: int | None,
    shard_rows: int | None,
    on_progress: Listener | None,
    **more: Any,
) -> DrawingRun:
    """Begin a run, or take one up: whoever draws its shards, they are cut and named in one way.

    Sizes are as asked for, else as the run began, else by what fits, which `default_batch` says. What fits on
    a GPU changes with what else is on it; a run that is taken up must not change with it. `more` tells it
    from runs of other engines.
    """
    begun = target.manifest()["config"] if target.manifest_path.exists() else {}
    batch_size = batch_size or begun.get("batch_size") or default_batch()
    shard_rows = shard_rows or begun.get("shard_rows") or SHARD_BATCHES * batch_size
    config = {
        **more,
        "prompts": digest_json([list(prompt) for prompt in prompts]),
        "samples_per_prompt": samples_per_prompt,
        "model": fingerprint,
        "proposal": proposal.describe(),
        "seed": seed,
        "batch_size": batch_size,
        "shard_rows": shard_rows,
    }
    shards = cut_shards(len(prompts) * samples_per_prompt, shard_rows)
    manifest = target.open(config, len(shards))
    missing = target.missing(manifest)
    meter = Meter([len(rows) for rows in shards], missing, on_progress)
    return DrawingRun(config, shards, manifest, missing, meter)


def draw_rows(
    model: LanguageModel[Any],
    prompts: Sequence[Prompt],
    rows: Sequence[int],
    *,
    proposal: Proposal,
    seed: int,
    batch_size: int,
    on_rows: OnRows | None = None,
) -> pa.Table:
    """Draw one text for each prompt; `rows` are their numbers, on which the noise depends.

    Everything the loop needs is in its arguments, so that a worker process or another machine that is
    given the same ones returns the same table. `on_rows` is called in the caller's own thread.
    """
    if not rows:
        return SCHEMA.empty_table()
    clerk = _Clerk(model, on_rows)
    loop = _Loop(model, prompts, rows, proposal, seed, batch_size, clerk)
    try:
        with torch.no_grad():
            loop.run()
        harvests = clerk.finish()
    finally:
        clerk.dismiss()
    return _to_table(model, prompts, rows, proposal, harvests)


def default_batch_size(model: LanguageModel[Any]) -> int:
    """Rows drawn side by side: 64 on a CPU; on a GPU as many as leave room for their logits, up to 8,192."""
    if model.device.type != "cuda":
        return 64
    free, _ = torch.cuda.mem_get_info(model.device)
    # About six float32 copies of a row's distribution live at once, and its cache takes as much again.
    rows = int(free // (8 * 4 * max(model.vocabulary_size, 16_384)))
    return max(64, min(8192, 1 << max(rows.bit_length() - 1, 0)))


# --- the loop -----------------------------------------------------------------------------------------


@dataclass
class _Slots:
    """Rows that are being drawn side by side: (B,), or (B, L + 1) where there is one entry a token."""

    mixing: Mixing
    index: Tensor  # where the row stands among those asked for
    steps: Tensor  # tokens it has
    done: Tensor
    noise: Tensor
    # One column more than L: rows that are done but still in the batch write there.
    tokens: Tensor
    log_p: Tensor
    log_proposal: Tensor

    def select(self, rows: Tensor) -> "_Slots":
        """The given rows."""
        return _Slots(self.mixing.select(rows), *(value[rows] for value in self._tensors()))

    def put(self, rows: Tensor, fresh: "_Slots") -> None:
        """Replace the given rows."""
        for mine, new in zip(self._tensors(), fresh._tensors(), strict=True):
            mine[rows] = new
        self.mixing.put(rows, fresh.mixing)

    def write(self, token: Tensor, log_p: Tensor, log_proposal: Tensor, eos_id: int) -> None:
        """Append one token to every row that is not done; it may be its last."""
        limit = self.tokens.shape[1] - 1
        column = torch.where(self.done, limit, self.steps)[:, None]
        self.tokens.scatter_(1, column, token[:, None].int())
        self.log_p.scatter_(1, column, log_p[:, None])
        self.log_proposal.scatter_(1, column, log_proposal[:, None])
        self.steps += ~self.done
        self.done |= (token == eos_id) | (self.steps >= limit)

    def _tensors(self) -> tuple[Tensor, ...]:
        return (self.index, self.steps, self.done, self.noise, self.tokens, self.log_p, self.log_proposal)


class _Loop:
    """The rows of one shard going through a fixed number of slots.

    Nothing in the loop waits for a GPU except the count of finished rows, and that is asked for before the
    step that follows is queued: the device always has work.
    """

    slots: _Slots
    states: list[Any]
    idle_first: Tensor  # slots, those of finished rows first
    idle: "_Awaited"

    def __init__(
        self,
        model: LanguageModel[Any],
        prompts: Sequence[Prompt],
        rows: Sequence[int],
        proposal: Proposal,
        seed: int,
        batch_size: int,
        clerk: "_Clerk",
    ) -> None:
        self.model, self.proposal, self.seed, self.clerk = model, proposal, seed, clerk
        self.prompts, self.rows = prompts, rows
        self.batch_size = min(batch_size, len(rows))
        # A model that guides p itself steps p anyway: one pass serves both.
        self.guides_p = bool(proposal.models) and getattr(proposal.models[0], "base", None) is model
        self.models = [*proposal.models] if self.guides_p else [model, *proposal.models]
        self.refillable = all(is_refillable(each) for each in self.models)
        self.shrinkable = not all(has_fixed_rows(each) for each in self.models)
        self.sampler = cast(Sampling[Any], model) if proposal.is_p and _has(model, "sample") else None
        # Models over one base read prompts through it: what one of them has read, it has for all.
        readers = {id(_root(each)): each for each in self.models if _has(each, "prepare")}
        self.readers = [cast(Preparing[Any], each) for each in readers.values()]
        self.taken = 0  # rows that have been started
        self.read_to = 0  # rows before this one have prompts that were read ahead
        self.offer = _LOOK_AHEAD

    def run(self) -> None:
        """Start, step, harvest and refill until every row is drawn."""
        while self.waiting:
            self._start()
            while len(self.slots.index):
                self._advance()
                self._turn_over()

    @property
    def waiting(self) -> int:
        """Rows not yet started."""
        return len(self.rows) - self.taken

    def _start(self) -> None:
        taken = self._take(self.batch_size)
        self.states = [each.start(*self._asked(taken)) for each in self.models]
        self.slots = self._fresh(taken)

    def _advance(self) -> None:
        """One token for every live row."""
        slots = self.slots
        noise = slots.noise.gather(1, slots.steps[:, None]).squeeze(-1)
        if self.sampler is not None:
            token, log_p_token = self.sampler.sample(self.states[0], noise)
            log_proposal = log_p_token
        else:
            token, log_p_token, log_proposal = self._sample_mixture(noise)
        slots.write(token, log_p_token, log_proposal, self.model.eos_id)
        self.idle_first = slots.done.sort(descending=True, stable=True).indices
        self.idle = _Awaited(slots.done.sum())
        self.states = [each.step(state, token) for each, state in zip(self.models, self.states, strict=True)]

    def _sample_mixture(self, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens (B,) from the proposal, with their log p and log proposal."""
        slots, others = self.slots, [state.log_p for state in self.states]  # (B, V) each
        log_p = self.states[0].log_p_base if self.guides_p else others.pop(0)
        drawn_from, components = mixed_distribution(self.proposal, slots.mixing, log_p, others, slots.steps)
        token = sample(drawn_from, noise)
        log_p_token = log_p.gather(-1, token[:, None]).squeeze(-1)
        return token, log_p_token, record_token(slots.mixing, components, token, log_p_token, slots.steps)

    def _turn_over(self) -> None:
        """Take finished rows out and put new ones in, when enough have finished to be worth it."""
        idle, slots = self.idle.value(), len(self.slots.index)
        self.clerk.proceed()
        if self.refillable and self.waiting:
            if idle * _REFILL_SHARE >= slots:
                self._refill(self.idle_first[: min(idle, self.waiting)])
        elif idle == slots or (self.shrinkable and 2 * idle >= slots):
            self._harvest(self.idle_first[:idle])
            self._keep(self.idle_first[idle:])

    def _refill(self, rows: Tensor) -> None:
        """Take the given finished rows out and start new ones in their place."""
        self._harvest(rows)
        taken = self._take(len(rows))
        self.states = [
            cast(Refillable[Any], each).refill(state, rows, *self._asked(taken))
            for each, state in zip(self.models, self.states, strict=True)
        ]
        self.slots.put(rows, self._fresh(taken))

    def _keep(self, rows: Tensor) -> None:
        """Go on with these rows alone."""
        if len(rows):
            self.states = [
                each.select(state, rows) for each, state in zip(self.models, self.states, strict=True)
            ]
        self.slots = self.slots.select(rows)

    def _harvest(self, rows: Tensor) -> None:
        done = self.slots.select(rows)
        self.clerk.receive(
            [done.index, done.steps, done.mixing.switch, done.tokens, done.log_p, done.log_proposal]
        )

    def _fresh(self, taken: range) -> _Slots:
        """Rows before their first token."""
        device, limit = self.model.device, self.model.length_limit
        index = torch.tensor(taken, device=device)
        row = torch.tensor([self.rows[place] for place in taken], device=device)
        steps = torch.arange(limit + 1, device=device)
        wide = (len(taken), limit + 1)
        return _Slots(
            mixing=begin_mixing(self.proposal, self._choice(row, _PICK), self._choice(row, _SWITCH), limit),
            index=index,
            steps=torch.zeros_like(index),
            done=torch.zeros_like(index, dtype=torch.bool),
            noise=uniforms(self.seed, row[:, None].expand(wide), steps[None, :]),
            tokens=torch.full(wide, self.model.eos_id, dtype=torch.int32, device=device),
            log_p=torch.zeros(wide, device=device),
            log_proposal=torch.zeros(wide, device=device),
        )

    def _choice(self, row: Tensor, counter: int) -> Tensor:
        return uniforms(self.seed, row, torch.full_like(row, counter))

    def _take(self, count: int) -> range:
        taken = range(self.taken, min(self.taken + count, len(self.rows)))
        self.taken = taken.stop
        if self.refillable and self.readers and self.read_to < taken.stop:
            self._read_ahead(taken.start)
            if taken.start and self.read_to < taken.stop:
                self.readers = []  # not even one refill fits: reading ahead would read everything twice
        return taken

    def _read_ahead(self, first: int) -> None:
        """Let models read the prompts of many rows to come at once: few, large prefills."""
        ahead: dict[str, None] = {}
        for prompt in self.prompts[first:]:
            ahead[prompt.prompt] = None
            if len(ahead) == self.offer:
                break
        fitted = min(reader.prepare(list(ahead)) for reader in self.readers)
        # Whoever is offered prompts tokenises them all: offer no more than twice what fits.
        self.offer = max(64, min(_LOOK_AHEAD, 2 * fitted))
        read = set(list(ahead)[:fitted])
        rows = takewhile(lambda row: self.prompts[row].prompt in read, range(first, len(self.rows)))
        self.read_to = first + sum(1 for _ in rows)

    def _asked(self, taken: range) -> tuple[list[str], list[str]]:
        asked = self.prompts[taken.start : taken.stop]
        return [each.prompt for each in asked], [each.condition for each in asked]


class _Awaited:
    """A number that a GPU is still working out; only its reader waits for it."""

    def __init__(self, number: Tensor) -> None:
        self._host = _begin_copy(number)
        self._ready: torch.cuda.Event | None = None
        if number.is_cuda:
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(number.device))  # it may not be the current device

    def value(self) -> int:
        """The number, once it is there; all that was queued before it has then been done too."""
        if self._ready is not None:
            self._ready.synchronize()
        return int(self._host)


def _begin_copy(tensor: Tensor) -> Tensor:
    """A tensor on the host that will hold the given one's values; on a CPU it is that one."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _root(model: LanguageModel[Any]) -> LanguageModel[Any]:
    """The base that a model reweights, or the model itself."""
    return _root(model.base) if isinstance(model, OverBase) else model


def _has(model: LanguageModel[Any], method: str) -> bool:
    # Not isinstance with a protocol: before Python 3.12 that reads every property, the fingerprint too.
    return callable(getattr(model, method, None))


# --- what becomes of finished rows --------------------------------------------------------------------


class _Clerk:
    """Makes text and tables of finished rows, in a thread beside the loop.

    The thread sees the host's memory only. Were it to call the GPU, it would spoil whatever CUDA graph the
    loop is capturing at that moment.
    """

    def __init__(self, model: LanguageModel[Any], on_rows: OnRows | None) -> None:
        self._model, self._on_rows = model, on_rows
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._arriving: list[list[Tensor]] = []
        self._reading: deque[Future[pa.Table]] = deque()
        self._harvests: list[pa.Table] = []

    def receive(self, columns: list[Tensor]) -> None:
        """Begin to copy the columns of finished rows to the host."""
        self._arriving.append([_begin_copy(column) for column in columns])

    def proceed(self) -> None:
        """Read what has been received, which must have arrived by now; raises what reading it raised."""
        for columns in self._arriving:
            if self._model.device.type == "cuda":  # pinned memory is given back to CUDA: in this thread, then
                columns = [column.clone() for column in columns]
            self._reading.append(self._thread.submit(_read_rows, self._model, columns))
        self._arriving.clear()
        while self._reading and (self._reading[0].done() or len(self._reading) > _BACKLOG):
            harvest = self._reading.popleft().result()
            self._harvests.append(harvest)
            if self._on_rows is not None:
                self._on_rows(harvest.num_rows, len(harvest["tokens"].combine_chunks().flatten()))

    def finish(self) -> list[pa.Table]:
        """Everything received, read."""
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        self.proceed()
        while self._reading:
            self._reading[0].exception()  # waits; raised by the next line
            self.proceed()
        return self._harvests

    def dismiss(self) -> None:
        """End the thread; what it has not begun is dropped."""
        self._thread.shutdown(cancel_futures=True)


def _read_rows(model: LanguageModel[Any], columns: list[Tensor]) -> pa.Table:
    """Rows taken out together as a table: index, switch, ended, text, tokens, log_p, log_proposal."""
    index, lengths, switch, tokens, log_p, log_proposal = (column.numpy() for column in columns)
    inside = np.arange(tokens.shape[1])[None, :] < lengths[:, None]
    _require_finite(log_p[inside], log_proposal[inside])
    texts = model.decode(
        [row[:length] for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    )
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    lists = {"tokens": tokens, "log_p": log_p, "log_proposal": log_proposal}
    return pa.table(
        {
            "index": index,
            "switch": switch,
            "ended": tokens[np.arange(len(lengths)), lengths - 1] == model.eos_id,
            "text": pa.array(texts, pa.string()),
            **{name: pa.ListArray.from_arrays(offsets, pa.array(v[inside])) for name, v in lists.items()},
        }
    )


def _require_finite(log_p: NDArray[np.float32], log_proposal: NDArray[np.float32]) -> None:
    outside = np.isneginf(log_p) & np.isfinite(log_proposal)
    if outside.any():
        raise DrawingError(
            "a proposal that writes only what p can write",
            f"{int(outside.sum())} tokens to which p gives probability 0",
            "Guide the same base, with the same warpers, that samples are drawn for.",
        )
    broken = ~(np.isfinite(log_p) & np.isfinite(log_proposal))
    if broken.any():
        raise DrawingError(
            "finite log-probabilities for every drawn token",
            f"{int(broken.sum())} of {len(log_p)} that are not",
            "The model overflowed: load it in float32 or bfloat16 and check its weights.",
        )


def _to_table(
    model: LanguageModel[Any],
    prompts: Sequence[Prompt],
    rows: Sequence[int],
    proposal: Proposal,
    harvests: list[pa.Table],
) -> pa.Table:
    """The drawn rows in the order they were asked for."""
    drawn = pa.concat_tables(harvests).combine_chunks()
    drawn = drawn.take(pa.array(np.argsort(drawn["index"].to_numpy())))
    ended = torch.from_numpy(drawn["ended"].to_numpy())
    lengths = np.diff(drawn["tokens"].combine_chunks().offsets.to_numpy())
    prefix = np.zeros_like(lengths) if proposal.is_p else np.minimum(drawn["switch"].to_numpy(), lengths)
    return pa.table(
        {
            "row": np.asarray(rows, dtype=np.int64),
            "prompt": [each.prompt for each in prompts],
            "condition": [each.condition for each in prompts],
            **{name: drawn[name] for name in ("tokens", "text", "log_p", "log_proposal")},
            "finished": is_finished(ended, model.completion).numpy(),
            "proposal": [proposal.name()] * len(rows),
            "prefix_length": prefix,
        }
    ).cast(SCHEMA)


# --- runs ---------------------------------------------------------------------------------------------


def cut_shards(total: int, shard_rows: int) -> list[range]:
    """The rows of each shard."""
    return [range(first, min(first + shard_rows, total)) for first in range(0, total, shard_rows)]


def _finish(target: Folder, manifest: dict[str, Any], proposal: Proposal) -> Samples:
    """Read everything back; if that is news, say in the manifest what it is."""
    samples = Samples(target.read(manifest), proposal.uncorrected)
    if None in manifest["shards"]:
        summary: dict[str, Any] = {"versions": versions()}
        if not (proposal.is_p or proposal.uncorrected):
            summary["weights"] = summarise_weights(samples.log_weights()).describe()
        target.close(manifest, **summary)
    return samples


def require_prompts(prompts: Sequence[Prompt]) -> None:
    if not prompts:
        raise InputError("at least one prompt", "none", "Give prompts, for instance read_prompts(file).")
    for each in prompts:
        if not (
            isinstance(each, Prompt) and isinstance(each.prompt, str) and isinstance(each.condition, str)
        ):
            raise InputError(
                "prompts as Prompt(prompt, condition)", f"{each!r}", "Wrap them: Prompt(text, text)."
            )
